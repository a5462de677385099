"""Collectives of host values equal numpy, in the same dtype, bit-identical on each member."""

import itertools
import os
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.cluster import distributed
from meshtrain.config.schema import SYNC_PATTERNS
from meshtrain.errors import ConfigError
from meshtrain.parallel import grad_sync
from meshtrain.parallel import mesh as meshes
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools import collectives
from tests.lib.paths import ROOT

CALLS = [(name, op) for name in ("all_reduce", "reduce_scatter") for op in collectives.OPS]
CALLS += [("all_gather", None), ("all_to_all", None), ("broadcast", 1)]
DTYPES = [np.float32, np.float64, np.int64, np.uint8, np.complex64, jnp.bfloat16, bool]
MESHES = {
    "only axis": (dict(data=8), "data"),
    "first axis": (dict(data=2, tensor=4), "data"),
    "last axis": (dict(data=2, tensor=4), "tensor"),
    "middle axis": (dict(pipeline=2, data=2, tensor=2), "data"),
}


def rows_of(num, dtype, shape=(), seed=0):
    """Returns small integers, or for floats half-integers, so that sums and means are exact."""
    rows = np.random.default_rng(seed).integers(-3, 4, (num, *shape))
    rows = rows / 2 if jax.dtypes.issubdtype(dtype, np.inexact) else abs(rows)
    return (rows > 1 if dtype is bool else rows).astype(dtype)


def numpy_result(name, option, rows):
    """Returns what each member gets, computed by numpy."""
    num, dtype = len(rows), rows.dtype
    if name == "broadcast":
        return np.stack([rows[option]] * num)
    if name == "all_gather":
        return np.stack([rows] * num)
    if name == "all_to_all":
        return np.stack([np.concatenate(parts) for parts in np.split(rows, num, axis=1)])
    upcast = rows.astype(np.float32) if dtype == jnp.bfloat16 else rows
    result = getattr(np, option)(upcast, axis=0)
    if dtype.kind != "b" and (option != "mean" or jax.dtypes.issubdtype(dtype, np.inexact)):
        result = result.astype(dtype)  # numpy sums uint8 to int64
    if name == "reduce_scatter":
        return np.stack(np.split(result, num))
    return np.stack([result] * num)


def check(result, expected):
    assert result.dtype == expected.dtype and result.shape == expected.shape
    if expected.dtype == jnp.bfloat16:  # numpy does not recognise its NaN
        result, expected = result.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(result, expected)


def calls_of(dtype):
    is_ordered = not jax.dtypes.issubdtype(dtype, np.complexfloating)
    return [(name, option) for name, option in CALLS if is_ordered or option not in ("max", "min")]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=[] if layout == "middle axis" else pytest.mark.slow)
        for layout, dtype in itertools.product(MESHES, DTYPES)
    ],
    ids=lambda value: value if isinstance(value, str) else jnp.dtype(value).name,
)
def test_along_an_axis_each_position_gets_what_numpy_computes(layout, dtype):
    sizes, axis = MESHES[layout]
    mesh = make_mesh(**sizes)
    num = mesh.shape[axis]
    rows = rows_of(num, dtype, (2 * num, 3))
    for name, option in calls_of(dtype):
        options = [] if option is None else [option]
        result = getattr(collectives, name)(rows, *options, axis=axis, mesh=mesh)
        check(result, numpy_result(name, option, rows))


def test_a_sum_with_rounding_is_bit_identical_on_every_member():
    rows = np.random.default_rng(0).normal(size=(8, 1001)).astype(np.float32)
    result = collectives.all_reduce(rows, axis="data", mesh=make_mesh(data=8))
    assert len({row.tobytes() for row in result}) == 1
    np.testing.assert_allclose(result[0], rows.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", ["ring", "tree", "hierarchical"])
def test_every_pattern_adds_what_numpy_adds_and_leaves_the_same_bits_on_every_member(pattern):
    for (sizes, axis), op in [(MESHES["only axis"], "sum"), (MESHES["middle axis"], "mean")]:
        mesh = make_mesh(**sizes)
        keys = itertools.product((np.int64, jnp.bfloat16, bool), [(), (5, 3), (0, 2)])
        rows = [rows_of(mesh.shape[axis], *key) for key in keys]
        results = collectives.all_reduce(rows, op, axis=axis, mesh=mesh, pattern=pattern)
        for result, one in zip(results, rows, strict=True):
            check(result, numpy_result("all_reduce", op, one))
    noise = np.random.default_rng(0).normal(size=(8, 1001)).astype(np.float32)
    result = collectives.all_reduce(noise, axis="data", mesh=make_mesh(data=8), pattern=pattern)
    assert len({row.tobytes() for row in result}) == 1
    np.testing.assert_allclose(result[0], noise.sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_a_hierarchical_sum_meets_first_inside_each_host(layout, monkeypatch):
    num_hosts, num_each = layout
    monkeypatch.setattr(meshes, "host_of", lambda device: device.id // num_each)
    axis = f"hosts of {num_each}"  # what is found for a mesh is kept
    mesh, rows = jax.make_mesh((8,), (axis,)), rows_of(8, np.int64, (5,))
    result = collectives.all_reduce(rows, axis=axis, mesh=mesh, pattern="hierarchical")
    check(result, numpy_result("all_reduce", "sum", rows))
    levels = grad_sync.levels_of("hierarchical", 8, collectives._num_parts(mesh, axis))
    assert [level.size for level in levels] == ([num_each, num_hosts] if 1 < num_hosts < 8 else [8])


def test_hosts_without_contiguous_parts_are_reported(monkeypatch):
    monkeypatch.setattr(meshes, "host_of", lambda device: device.id % 2)
    along = {"axis": "alternating", "mesh": jax.make_mesh((2, 4), ("rest", "alternating"))}
    with pytest.raises(ConfigError, match="hosts do not hold equal, contiguous parts of 'alterna"):
        collectives.all_reduce(np.ones(4), pattern="hierarchical", **along)
    check(collectives.all_reduce(np.ones(4), pattern="tree", **along), np.full(4, 4.0))


def test_16_bit_floats_are_added_in_float32():
    mesh = make_mesh(data=4, tensor=2)
    rows = np.array([[256], [1], [1], [1]], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    result = collectives.all_reduce(rows, axis="data", mesh=mesh)
    assert result.ravel().tolist() == [260] * 4  # 259 rounds to 260 in bfloat16
    rows = np.full((4, 1), 60_000, np.float16)  # two of them overflow float16
    check(collectives.all_reduce(rows, "mean", axis="data", mesh=mesh), rows)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_any_nan_gives_nan(name, op, dtype):
    rows = np.array([[np.nan, 1, 1, 1], [1, np.nan, -np.inf, 1]], dtype)
    result = getattr(collectives, name)(rows, op, axis="data", mesh=make_mesh(data=2, tensor=4))
    check(result, numpy_result(name, op, rows))
    assert np.isnan(result.ravel()[:2]).all()


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_to_all"])
def test_moving_data_preserves_every_bit(name):
    special = np.array([0x7FF0_0000_0000_0BAD, 1 << 63, 1, 3], np.uint64).view(np.float64)
    rows = np.stack([special, special[::-1]])  # a NaN with a payload, -0.0 and subnormal numbers
    result = getattr(collectives, name)(rows, axis="data", mesh=make_mesh(data=2, tensor=4))
    assert result.tobytes() == numpy_result(name, 0, rows.view(np.uint64)).tobytes()
    names = np.array([["a", "bcd"], ["é", ""]])
    result = getattr(collectives, name)(names, axis="data", mesh=make_mesh(data=2, tensor=4))
    check(result, numpy_result(name, 0, names))


@pytest.mark.parametrize("shape", [(4, 4, 0), (4, 8, 4, 0, 2)])
def test_empty_arrays_keep_their_shape(shape):
    mesh = jax.make_mesh((2, 4), ("other", "data"))
    for name, option in CALLS:
        options = [] if option is None else [option]
        result = getattr(collectives, name)(np.zeros(shape), *options, axis="data", mesh=mesh)
        check(result, numpy_result(name, option, np.zeros(shape)))


def test_over_one_process_a_tree_is_unchanged():
    value = {"loss": 1.5, "counts": [3, np.ones(2, np.int16)], "none": None}
    result = collectives.all_reduce(value)
    assert jax.tree.structure(result) == jax.tree.structure(value)
    check(result["loss"], np.float64(1.5))
    check(result["counts"][1], np.ones(2, np.int16))
    result["counts"][1][0] = 7  # results are writable copies
    check(collectives.all_gather(value)["counts"][0], np.array([3]))
    assert collectives.all_reduce(value, "mean")["counts"][0].dtype == np.float64
    collectives.barrier()


def test_the_mesh_defaults_to_the_active_one_and_may_be_another():
    rows = rows_of(4, np.int64)
    with jax.set_mesh(make_mesh(data=4, tensor=2)):
        check(collectives.all_reduce(rows, axis="data"), np.full(4, rows.sum()))
        mesh = jax.make_mesh((2, 4), ("one", "other"))  # Explicit axes, as jax makes them
        check(collectives.all_reduce(rows, axis="other", mesh=mesh), np.full(4, rows.sum()))
        check(collectives.all_reduce(rows), rows)
        assert not jax.config.jax_enable_x64


def test_a_repeated_call_neither_compiles_nor_compares_processes(monkeypatch):
    mesh, gathered = make_mesh(data=8), []
    gather = distributed.gather
    monkeypatch.setattr(
        distributed, "gather", lambda value: gathered.append(value) or gather(value)
    )
    for seed in range(3):
        rows = rows_of(8, np.float32, (5,), seed)
        result = collectives.all_reduce(rows, axis="data", mesh=mesh)
        check(result, numpy_result("all_reduce", "sum", rows))
    assert len(gathered) == 1
    compute = collectives.program("all_reduce", "sum", mesh=mesh, axis="data")
    before = compute._cache_size()
    collectives.all_reduce(rows + 1, axis="data", mesh=make_mesh(data=8))
    assert compute is collectives.program("all_reduce", "sum", mesh=mesh, axis="data")
    assert compute._cache_size() == before > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collectives.all_reduce(1, "avg"), "op='avg': use one of sum, mean, max, min"),
        (lambda: collectives.reduce_scatter([1], ""), "op='': use one of sum, mean, max, min"),
        (lambda: collectives.all_reduce(1, axis="data"), "axis='data' and no mesh; give mesh="),
        (lambda: collectives.all_reduce(1, mesh=make_mesh(data=8)), "axis=None: use one of"),
        (
            lambda: collectives.all_reduce(1, pattern="rings"),
            "pattern='rings': use one of xla, hierarchical, ring, tree",
        ),
        (
            lambda: collectives.all_reduce(1, "max", pattern="ring"),
            "pattern='ring': it adds, and op='max' does not; use pattern='xla'",
        ),
        (lambda: along(np.ones(8), "rows"), "axis='rows': use one of pipeline, data"),
        (lambda: along(np.ones(4)), r"value has shape (4,); use a leading dim of 8"),
        (lambda: along(1.0), r"value has shape (); use a leading dim of 8"),
        (lambda: along(np.ones((8, 4)), name="all_to_all"), "shape (4,); use a first dim of 8"),
        (lambda: along({"x": np.ones(8)}, name="reduce_scatter"), "value['x'] has shape ()"),
        (lambda: along(np.ones((8, 0)), name="reduce_scatter"), "value has shape (0,)"),
        (lambda: collectives.broadcast(1, 1), "root=1: use a member from 0 to 0"),
        (lambda: collectives.broadcast(1, -1), "root=-1: use a member from 0 to 0"),
        (lambda: collectives.all_gather(object()), "value has dtype object; this call accepts"),
        (lambda: collectives.all_reduce(["a"]), "value[0] has dtype <U1; sum accepts bools"),
        (lambda: collectives.all_reduce(2**70), "value has dtype object; sum accepts bools"),
        (lambda: collectives.all_reduce(np.ones(2, ">f4")), "value has dtype >f4; sum accepts"),
        (lambda: collectives.all_reduce(np.longdouble(1)), "; sum accepts bools and native"),
        (lambda: collectives.all_reduce(1j, "max"), "value has dtype complex128; max accepts"),
    ],
)
def test_an_invalid_argument_is_reported_in_one_line(call, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        call()
    assert len(caught.value.faults) == 1 and "\n" not in str(caught.value)


def along(value, axis="data", *, name="all_reduce"):
    return getattr(collectives, name)(value, axis=axis, mesh=make_mesh(data=8))


def test_info_prints_versions_and_devices_and_checks_a_collective(capsys):
    assert app.main("info", []) == 0
    output = capsys.readouterr().out
    assert re.search(rf"^jax +{re.escape(jax.__version__)}$", output, re.MULTILINE)
    assert f"pid {os.getpid()} on " in output and ": 8 x cpu\n" in output
    assert re.search(r"^all_reduce +over 8 devices: right, [\d.]+ ms", output, re.MULTILINE)


def test_info_fails_if_a_device_adds_wrongly(capsys, monkeypatch):
    all_reduce = collectives.all_reduce

    def broken(value, **members):
        result = all_reduce(value, **members)
        result[3, 17] += 1
        return result

    monkeypatch.setattr(collectives, "all_reduce", broken)
    assert app.main("info", []) == 1
    assert "over 8 devices: WRONG on processes [0]: not 29.0" in capsys.readouterr().out


def check_on_each_process():
    """Runs on 2 processes of 2 devices each: over processes, then along mesh axes."""
    me = jax.process_index()
    for dtype in DTYPES:
        rows = rows_of(2, dtype, (4, 3))
        for name, option in calls_of(dtype):
            options = [] if option is None else [option]
            result = getattr(collectives, name)(rows[me], *options)
            check(result, numpy_result(name, option, rows)[me])
    # An axis over all four devices; one across the processes; one within each process.
    for sizes, positions in [
        (dict(data=4), [2 * me, 2 * me + 1]),
        (dict(data=2, tensor=2), [me]),
        (dict(pipeline=2, data=2), [0, 1]),
    ]:
        mesh = make_mesh(**sizes)
        for dtype in (np.float32, jnp.bfloat16, bool):
            num = mesh.shape["data"]
            rows = rows_of(num, dtype, (num, 3))
            for name, option in CALLS:
                options = [] if option is None else [option]
                value = {"x": rows[positions], "y": [rows[positions, ::-1]]}
                result = getattr(collectives, name)(value, *options, axis="data", mesh=mesh)
                check(result["x"], numpy_result(name, option, rows)[positions])
                check(result["y"][0], numpy_result(name, option, rows[:, ::-1])[positions])
            for pattern in SYNC_PATTERNS:
                result = collectives.all_reduce(
                    rows[positions], axis="data", mesh=mesh, pattern=pattern
                )
                check(result, numpy_result("all_reduce", "sum", rows)[positions])
    check_interleaved_devices(me)
    check_while_another_program_runs(me)
    noise = np.random.default_rng(me).normal(size=9999).astype(np.float32)
    for pattern in SYNC_PATTERNS:
        total = collectives.all_reduce(noise, pattern=pattern)
        assert len({row.tobytes() for row in collectives.all_gather(total)}) == 1
    check(collectives.all_reduce(np.array([np.nan, 1.0][me]), "max"), np.float64(np.nan))
    collectives.barrier()
    check_faults(me)


def check_interleaved_devices(me):
    """Checks an axis whose positions alternate between the processes."""
    devices = np.array(jax.devices()).reshape(2, 2).T.ravel()
    mesh, rows = jax.sharding.Mesh(devices, ("data",)), rows_of(4, np.int64, (4,))
    for name, option in CALLS:
        options = [] if option is None else [option]
        result = getattr(collectives, name)(rows[me::2], *options, axis="data", mesh=mesh)
        check(result, numpy_result(name, option, rows)[me::2])


def check_while_another_program_runs(me):
    """Checks that messages of a running step are not mixed with messages of a collective."""
    mesh = make_mesh(data=2, tensor=2)
    sharding = jax.NamedSharding(mesh, jax.P("data", "tensor"))
    ones = np.ones((16, 512), np.float32)
    x = jax.make_array_from_callback(ones.shape, sharding, lambda index: ones[index])
    step = jax.jit(lambda x: x - 1e-3 * (x @ (x.T @ x)) / jnp.sum(x * x))
    for i in range(30):
        x = step(step(x))
        check(collectives.all_reduce({"a": [float(me)] * 3, "b": i + me})["b"], np.array(2 * i + 1))
        check(collectives.all_reduce(np.array([me]), "max", axis="data", mesh=mesh), np.array([1]))


def check_faults(me):
    """Checks that both processes report arguments that differ, and neither hangs."""
    for value, message in [
        (np.zeros(5 + me), "value float64[5] on process 0, value float64[6] on process 1"),
        (np.zeros(7, [np.int32, np.int64][me]), "value int32[7] on process 0, value int64[7]"),
        ({"a": 1, "bc"[me]: 2}, "value['b'] int64[] on process 0, value['c'] int64[]"),
        ([1] * (3 + me), "nothing on process 0, value[3] int64[] on process 1"),
        ([1, object()][me], "process 1: value has dtype object"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            collectives.all_reduce(value)
    with pytest.raises(ConfigError, match=r"broadcast\(0, axis=None\) on process 0, broadcast\(1,"):
        collectives.broadcast(np.zeros(11), me)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_collectives_of_two_processes_equal_numpy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environments = [
        dict(zip(distributed.environment.JAX_VARIABLES, (address, "2", str(i)), strict=True))
        for i in (0, 1)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                **environment,
            },
        )
        for environment in environments
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":  # one of the two processes
    jax.config.update("jax_num_cpu_devices", 2)
    distributed.initialize()
    check_on_each_process()
