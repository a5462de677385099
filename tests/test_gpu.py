"""On real GPUs: layouts train like one device, fused attention, 16-bit losses, a kill and a resume.

  python -m pytest tests/test_gpu.py -m gpu

The other tests run on simulated CPU devices, so each check runs in a process of its own, with the
devices of the host: this file, as `python tests/test_gpu.py CHECK` with PYTHONPATH=. The same
checks run on two simulated CPU devices, without the mark; there "fused" attention is the blockwise
implementation.
"""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import attention_statistics
from benchmarks.lib import devices
from meshtrain.cli.verify import QUICK_COMPILE_FLAGS
from meshtrain.cluster import environment
from meshtrain.ops import cudnn
from meshtrain.ops.attention import attention
from tests.lib.attention import CUDNN_CASES, check_cudnn
from tests.lib.compare import assert_same
from tests.lib.configs import packed, tiny_config
from tests.lib.paths import ROOT
from tests.lib.rows import losses, newest_step, rows
from tests.lib.runs import Run
from tests.lib.tiny_run import TINY

SECONDS = 600  # time limit of a check
STEPS = 40  # of the curve


def environ_of(platform):
    """Returns the environment of a process on these devices.

    conftest.py changed XLA_FLAGS for CPU.
    """
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    if platform == "cpu":
        return environ | devices.TOY
    environ["XLA_FLAGS"] = without_quick_flags(environ["XLA_FLAGS"])
    return environ | devices.environment()


def without_quick_flags(flags):
    # XLA takes spaces alone for the name of a file of flags.
    return flags.replace(QUICK_COMPILE_FLAGS, "").strip()


def run(platform, *arguments):
    """Runs this file in a process, and returns what it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    options = dict(cwd=ROOT, env=environ_of(platform), text=True, timeout=SECONDS)
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def why_no_gpu():
    """Returns why this host cannot run the tests, or ""."""
    if not environment.num_gpus(os.environ):
        return "this host has no NVIDIA GPU"
    if run("gpu", "describe")["platform"] != "gpu":
        return "jax finds no GPU; bash launch/setup.sh cuda12,dev"
    return ""


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def platform(request):
    if request.param == "gpu" and (reason := why_no_gpu()):
        pytest.skip(reason)
    return request.param


# ---- the tests ----


@pytest.mark.multiprocess
def test_a_layout_computes_the_gradients_of_one_device(platform):
    assert run(platform, "parity")["compared"]


@pytest.mark.multiprocess
def test_fused_attention_is_as_precise_as_the_formula(platform):
    found = run(platform, "fused_attention")
    if not found:
        pytest.skip("this GPU has no fused attention: its compute capability is below 8.0")
    for name, (fused, plain) in found.items():
        assert fused < 2 * plain, f"{name}: {found}"


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_cudnn_equals_the_formula():
    if reason := why_no_gpu():
        pytest.skip(reason)
    if not run("gpu", "cudnn_cases"):
        pytest.skip("this GPU has no fused attention: its compute capability is below 8.0")


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_chunks_of_keys_merge_by_the_statistic_of_cudnn():
    if reason := why_no_gpu():
        pytest.skip(reason)
    if not run("gpu", "cudnn_chunks"):
        pytest.skip("this GPU has no fused attention: its compute capability is below 8.0")


@pytest.mark.multiprocess
def test_16_bit_losses_follow_those_in_float32(platform):
    found, expected = run(platform, "curve").values()
    assert len(found) == STEPS and expected[-1] < 0.8 * expected[0]
    # The loss of one batch is sensitive: 1.8 % apart on CPU, 3.7 % on an H200.
    np.testing.assert_allclose(found, expected, rtol=0.06)
    assert 0 < np.abs(np.divide(found, expected) - 1).mean() < 0.005


@pytest.mark.multiprocess
def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(platform, tmp_path):
    killed, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    assert train(platform, killed, kill=True) == -signal.SIGKILL
    assert newest_step(killed) < RESUMED_STEPS - 1
    for workdir in (killed, uninterrupted):
        assert train(platform, workdir) == 0
    (restore,) = (row for row in rows(killed, "events.jsonl") if row["event"] == "restore")
    assert restore["step"] >= 10
    found, expected = losses(killed), losses(uninterrupted)
    assert list(found) == list(expected) == list(range(RESUMED_STEPS))
    # Two processes may choose other algorithms for the same product on a GPU.
    rtol = 0 if platform == "cpu" else 1e-3
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=rtol)


# ---- a run that is killed ----

RESUMED_STEPS = 200
KEYS = {"train.steps": RESUMED_STEPS, "train.global_batch": 24, "mesh.data": 1, "mesh.fsdp": -1}
KEYS |= {"data.build": "meshtrain.data.synthetic:build"}


def train(platform, workdir, *, kill=False):
    """Trains, or kills the run when it has logged steps after a checkpoint.

    Returns the exit code.
    """
    keys = [*TINY, *(f"--config.{key}={value}" for key, value in KEYS.items())]
    command = [sys.executable, "-m", "meshtrain", "train", *keys, f"--workdir={workdir}"]
    environ = environ_of(platform) | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    environ["XLA_FLAGS"] += " --xla_gpu_deterministic_ops=true"
    process, deadline = subprocess.Popen(command, cwd=ROOT, env=environ), time.monotonic() + SECONDS
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, "the run does not end"
            saved = [
                int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit()
            ]
            if kill and saved and newest_step(workdir) > max(saved):
                process.kill()
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    return process.returncode


# ---- the checks, each in a process of its own ----


def describe():
    return vars(devices.describe())


def layouts_of(num_devices):
    """Returns the layouts to compare, as config sections: each kind of parallelism that fits."""
    if num_devices == 1:
        return [{"train": {"num_microbatches": 4, "remat": "full"}}]
    meshes = [{"fsdp": num_devices}]
    if num_devices % 2 == 0:
        half = num_devices // 2
        meshes += [{"tensor": 2, "data": half}, {"pipeline": 2, "fsdp": half}]
    return [{"mesh": mesh, "train": {"num_microbatches": 2}} for mesh in meshes]


def parity():
    """Compares gradients, parameters and loss of a step of packed rows in float64."""
    jax.config.update("jax_enable_x64", True)
    expected = Run(parity_config(), dtype="float64").one_step()
    layouts = layouts_of(jax.device_count())
    for layout in layouts:
        c = parity_config()
        c.train.update(layout["train"])
        found = Run(c, dtype="float64", **layout.get("mesh", {})).one_step()
        assert_same(found, expected, rtol=1e-9)
    return {"compared": layouts}


def parity_config():
    c = packed()
    c.train.global_batch = 4 * jax.device_count()
    c.model.update(d_model=48, d_ff=96)  # divisible by 2, 3, 4, 6 and 8
    return c


def fused_attention():
    """Returns the errors of output and gradients from float64: (fused, plain) by name."""
    found = devices.describe()
    if found.is_gpu and not found.has_fused_attention:
        return {}
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, 256, heads, 64) for heads in (4, 2, 2, 4)]
    *inputs, weight = (
        jax.random.normal(key, shape).astype(found.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )

    def values(implementation, dtype):
        def compute(*inputs):
            out = attention(*inputs, None, implementation=implementation)
            return jnp.sum(out.astype(dtype) * weight.astype(dtype)), out

        args = [x.astype(dtype) for x in inputs]
        gradient = jax.jit(jax.value_and_grad(compute, (0, 1, 2), has_aux=True))
        (_, out), grads = gradient(*args)
        return {"output": out, **dict(zip("qkv", grads, strict=True))}

    fused = values("cudnn" if found.is_gpu else "blockwise:64", found.dtype)
    plain, exact = values("xla", found.dtype), values("xla", "float64")
    return {
        name: [float(np.abs(np.float64(one[name]) - exact[name]).mean()) for one in (fused, plain)]
        for name in exact
    }


def cudnn_cases():
    """Compares cuDNN's attention with the formula.

    Returns the cases and head dims that this GPU supports.
    """
    compared = []
    for case, head_dim in itertools.product(CUDNN_CASES, (64, 128)):
        packed_rows = CUDNN_CASES[case].get("segments", False)
        if not cudnn.why_not(head_dim, jnp.bfloat16, 0.0, packed_rows):
            check_cudnn(case, length=301, head_dim=head_dim)
            compared.append([case, head_dim])
    return compared


def cudnn_chunks():
    """Merges cuDNN's attention for chunks of keys, as `context.method` ring and gather do."""
    if cudnn.why_not(64, jnp.bfloat16, 0.0, False):
        return []
    kernel, shape = attention_statistics.cudnn_kernel(), (2, 512, 4, 2, 64)
    rows, faults = attention_statistics.measure(shape, kernel, "bfloat16")
    assert faults == []
    return rows


def curve():
    """Returns the losses of some steps in 16 bits and in float32, on all devices."""
    dtype = devices.describe().dtype
    return {name: losses_in(name) for name in (dtype, "float32")}


def losses_in(dtype):
    c = tiny_config()
    c.train.update(dtype=dtype, global_batch=8 * jax.device_count(), steps=STEPS)
    # Sizes that fused attention supports.
    c.model.update(d_model=128, num_heads=2, num_kv_heads=1, max_seq_len=64)
    c.data.seq_len = 64
    c.optim.update(learning_rate=2e-3, schedule="constant")
    run = Run(c, data=jax.device_count())
    with run.program.active():
        state, found = run.start(), []
        compiled = run.program.compile(run.batch())
        for number in range(STEPS):
            state, scalars = compiled(state, run.batch(number))
            found.append(float(scalars["loss"]))
    return found


CHECKS = (describe, parity, fused_attention, cudnn_cases, cudnn_chunks, curve)

if __name__ == "__main__":
    (check,) = (check for check in CHECKS if check.__name__ == sys.argv[1])
    print(json.dumps(check()))
