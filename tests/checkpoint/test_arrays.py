"""Arrays of a checkpoint: verified while they are read, and restored bit-equal on other meshes."""

import contextlib
import gc
import math
import os
import random
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import meshtrain
from meshtrain import errors
from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.cluster import distributed
from meshtrain.state import TrainState
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flat, flip, largest_file, noise, params_of, saving
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick
from tests.lib.rows import losses


@pytest.mark.slow
def test_a_restore_finds_damage_in_any_file_of_the_arrays(finished_run, tmp_path):
    """An index too: its arrays cannot be opened."""
    draw = random.Random(0)
    valid, saved = find.find_valid(finished_run)
    expected = {
        path: jnp.asarray(value)
        for path, value in arrays.as_numpy(valid).items()
        if path.startswith("params/")
    }
    params = traverse_util.unflatten_dict(expected, sep="/")["params"]
    faults = []
    for trial, file in enumerate(5 * sorted(valid.glob("arrays/**/d/*"))):
        directory = shutil.copytree(valid, tmp_path / str(trial) / valid.name)
        noise(directory / file.relative_to(valid), draw)
        try:
            found, *_ = arrays.restore_params(directory, saved.arrays, params)
        except errors.ConfigError as error:
            faults.append(str(error))
        else:  # only in bytes that nothing reads, or of other arrays
            assert jax.tree.all(jax.tree.map(np.array_equal, found, params))
    assert all("fails its checksum" in fault for fault in faults)
    assert any("zarr.json fails" in fault for fault in faults)


# Messages of TensorStore: of damage, then errors of the disk and of a store, and mistakes of the
# caller.
SHARD = 'Error reading shard entry {0} in "params.w/c/0/1" in OCDBT database at x: '
DAMAGED = f"DATA_LOSS: {SHARD}Digest mismatch"
CUT = f"FAILED_PRECONDITION: {SHARD}Truncated Zstd-compressed stream; at byte 1944"
NODE = (
    "Error reading x: Error decoding b-tree node: End of data expected; remaining length: 23; at "
    "byte 9"
)
SHORT = (
    "OUT_OF_RANGE: Error reading x: Requested byte range [0, 9) is not valid for value of size 8"
)
LACKING = 'NOT_FOUND: Metadata at "params.w/zarr.json" in OCDBT database at x does not exist'
UNREADABLE = "UNKNOWN: Error reading x: Input/output error [os_error_code='5']"
REFUSED = "Error reading x: HTTP response code: 400 [http_response_code='400']"


@pytest.mark.parametrize(
    ("message", "kind", "fault"),
    [
        (DAMAGED, CorruptCheckpoint, "^arrays/params.w/c/0/1 fails its checksum$"),
        (CUT, CorruptCheckpoint, "^arrays/params.w/c/0/1 fails its checksum$"),
        (NODE, CorruptCheckpoint, "^a chunk of arrays fails"),
        (SHORT, CorruptCheckpoint, "^a chunk of arrays fails"),
        (UNREADABLE, errors.TransientError, "Input/output error; the checkpoint may be valid"),
        (REFUSED, errors.TransientError, "the checkpoint may be valid"),
        (REFUSED.replace("400", "404"), CorruptCheckpoint, "^a chunk of arrays is missing$"),
        ("Found incomplete checkpoint at x/arrays.", CorruptCheckpoint, "is missing$"),
        (LACKING, CorruptCheckpoint, "^arrays/params.w/zarr.json is missing$"),
        ("FAILED_PRECONDITION: Error reading x: no credentials", ValueError, "no credentials"),
        ("INVALID_ARGUMENT: no such field", ValueError, "no such field"),
    ],
)
def test_only_damaged_bytes_make_a_checkpoint_corrupt(message, kind, fault, tmp_path):
    with pytest.raises(kind, match=fault), manifest.reading_chunks(tmp_path):
        try:
            raise ValueError(message)
        except ValueError as error:
            if kind is ValueError:
                raise
            raise RuntimeError("a message of Orbax") from error


def test_a_checkpoint_that_one_process_cannot_read_may_be_valid_whatever_another_found(monkeypatch):
    found = [None, [1, "damaged"], [0, "unreadable"]]
    monkeypatch.setattr(distributed, "gather", lambda value: found)
    with pytest.raises(errors.TransientError, match="^unreadable$"):
        distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))
    found.pop()
    with pytest.raises(CorruptCheckpoint, match="^damaged$"):
        distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))
    found[1] = None
    distributed.raise_first(None, (errors.TransientError, CorruptCheckpoint))


def bytes_read():
    """Returns the bytes that this process has read from files."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))


def test_replicas_write_parts_of_large_arrays_alone(tmp_path):
    """Each part is a program to compile, which takes longer than to write a small array."""
    replicated = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec())
    params = {"small": jnp.zeros((8, 128)), "large": jnp.zeros((8, 2**18))}  # of 4 KiB, of 8 MiB
    state = TrainState(jnp.int32(0), jax.device_put(params, replicated), ())
    described = dict.fromkeys(("metrics", "loss_statistics", "mesh", "versions", "config"), {})
    described |= dict(position=0, time=0.0, processes=1, arrays=arrays.shapes_of(state))
    with contextlib.closing(AsyncWriter()) as writer:
        writer.save(manifest.partial_folder(tmp_path, 0) / arrays.FOLDER, arrays.fields(state))
        writer.wait()
    saved = manifest.commit(tmp_path, 0, **described)
    assert {path: len(chunks) for path, chunks in saved.chunks.items()} == {
        "step": 1,
        "params/small": 1,
        "params/large": 8,
    }


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts bytes with /proc")
def test_a_save_reads_no_array_and_a_restore_reads_each_once(tmp_path):
    size = 4 << 20
    state = TrainState(jnp.int32(0), {"w": jax.random.normal(jax.random.key(0), (size // 4,))}, ())
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )
    described = dict.fromkeys(("metrics", "loss_statistics", "mesh", "versions", "config"), {})
    described |= dict(position=0, time=0.0, processes=1, arrays=arrays.shapes_of(state))
    with contextlib.closing(AsyncWriter()) as writer:
        for step in range(2):  # the first one loads libraries
            before = bytes_read()
            folder = manifest.partial_folder(tmp_path, step) / arrays.FOLDER
            writer.save(folder, arrays.fields(state))
            writer.wait()
            manifest.commit(tmp_path, step, **described)
            saved = bytes_read() - before
    before = bytes_read()
    read = arrays.restore(tmp_path / "1", arrays.shapes_of(state), abstract)
    restored = bytes_read() - before
    assert_bit_equal(read.params, state.params)
    assert saved < size / 20 and 0.8 * size < restored < 1.1 * size


@pytest.mark.slow
def test_after_damage_was_found_no_read_is_left_behind(workdir, monkeypatch):
    """Python would print a traceback for each."""
    left = []
    monkeypatch.setattr(sys, "unraisablehook", left.append)
    directory = checkpoints(workdir) / "6"
    flip(largest_file(directory))
    for _ in range(3):
        with pytest.raises(CorruptCheckpoint), manifest.reading_chunks(directory):
            arrays.as_numpy(directory)
        gc.collect()
    assert not left


def test_a_checkpoint_of_another_model_is_rejected_with_a_table_of_arrays(workdir):
    c = saving(8)
    c.model.d_ff, c.checkpoint.allow_change = 128, "model.d_ff"
    with pytest.raises(meshtrain.ConfigError) as error:
        train(c, workdir=workdir)
    head, *table = error.value.faults
    assert head.endswith(
        "9 arrays do not match this model and optimizer; use its config, or another --workdir"
    )
    assert (
        "params/layers/mlp/down/kernel" in table[0]
        and "(2, 64, 32) float32 in the checkpoint, (2, 128, 32) float32 here" in table[0]
    )


def test_another_dtype_is_rejected_without_allow_cast(workdir, finished_run):
    directory, saved = find.find_valid(finished_run)
    state = train(saving(6), workdir=workdir).state
    in_bfloat16 = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, "bfloat16" if x.dtype == "float32" else x.dtype, sharding=x.sharding
        ),
        state,
    )
    with pytest.raises(meshtrain.ConfigError, match="checkpoint.allow_cast=True"):
        arrays.restore(directory, saved.arrays, in_bfloat16)
    read = arrays.restore(directory, saved.arrays, in_bfloat16, allow_cast=True)
    assert_bit_equal(read, jax.tree.map(lambda x, to: x.astype(to.dtype), state, in_bfloat16))
    with jax.enable_x64(True):
        c = saving(6)
        c.train.param_dtype = "float64"
        with pytest.raises(meshtrain.ConfigError, match="checkpoint.allow_cast=True"):
            train(c, workdir=workdir)
        c.checkpoint.allow_cast = True
        in_float64 = train(c, workdir=workdir).state.params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(in_float64)} == {"float64"}
    assert_bit_equal(
        in_float64, jax.tree.map(lambda x: np.float64(x), jax.device_get(state.params))
    )
    c = saving(7)
    c.train.param_dtype = "bfloat16"  # the optimizer state then has other arrays
    with pytest.raises(meshtrain.ConfigError, match="load only the parameters"):
        train(c, workdir=workdir)


LAYOUTS = [
    {"data": 1, "fsdp": 8},
    pytest.param({"data": 1, "tensor": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 1, "pipeline": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 2, "pipeline": 2, "slices": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_is_restored_bit_equal_on_any_mesh(tmp_path, layout, monkeypatch):
    def run(workdir, steps, **sizes):
        c = quick(steps=steps)
        c.model.num_layers = 4
        c.train.num_microbatches = 4 if "pipeline" in sizes else 1
        c.mesh.update(sizes)
        num_devices = math.prod(size for axis, size in sizes.items() if axis != "slices")
        with monkeypatch.context() as patch:
            devices = jax.devices()[:num_devices]
            patch.setattr(jax, "devices", lambda: devices)
            patch.setattr(jax, "device_count", lambda: num_devices)
            return train(c, workdir=workdir)

    with monkeypatch.context() as patch:  # each replica writes a part, as it does of large arrays
        patch.setattr(arrays, "MIN_PART_OF_REPLICA", 0)
        first = run(tmp_path / "a", 2, data=8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    restored = run(tmp_path / "b", 2, **layout)  # no step is trained
    assert_bit_equal(restored.state, first.state)
    run(tmp_path / "b", 3, **layout)  # saved on this mesh, then restored on the first
    back = run(tmp_path / "b", 3, data=8)
    assert_bit_equal(flat(back.state.params), params_of(checkpoints(tmp_path / "b") / "3"))
    run(tmp_path / "a", 4, data=8)
    run(tmp_path / "b", 4, data=8)
    actual, expected = losses(tmp_path / "b"), losses(tmp_path / "a")
    np.testing.assert_allclose(actual[2], expected[2], rtol=1e-6)
    np.testing.assert_allclose(actual[3], expected[3], rtol=1e-5)
