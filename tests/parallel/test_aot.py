"""The pipelined step compiles ahead of time for TPU and GPU, on a host without them (and for CPU).

XLA partitions differently for each platform, and aborts the process on some programs. So each case
compiles in its own process: this file, run as `python tests/parallel/test_aot.py PLATFORM SCHEDULE KEEP`
with PYTHONPATH=.:tests.
"""

import collections
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest
from conftest import ROOT, tiny_config
from jax.experimental import topologies

from meshtrain.analysis import collective_ops, hlo
from meshtrain.analysis.audit import audit
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.program import assemble

LAYOUT = {"pipeline": 4, "data": 2, "fsdp": 2, "tensor": 2}
WHEELS = {  # modules that the platform needs, and how to install them
    "cpu": ([], ""),
    "tpu": (["libtpu"], "libtpu is not installed: pip install 'jax[tpu]'"),
    "cuda": (
        ["jax_plugins.xla_cuda12", "nvidia.cuda_nvcc", "nvidia.nvjitlink"],
        "jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12 or nvidia-nvjitlink-cu12 is not "
        "installed: pip install 'jax[cuda12]', or these four",
    ),
}
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask for the metadata of a Google Cloud host
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings
}


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def run(platform, *arguments):
    """Runs this file in a process and returns what it prints; skips the test without the compiler."""
    modules, reason = WHEELS[platform]
    if not all(map(is_installed, modules)):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, __file__, platform, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            **SETTINGS,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Involuntary full rematerialization" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("schedule, keep", [("1f1b", "inputs"), ("interleaved", "residuals")])
@pytest.mark.parametrize("platform", WHEELS)
def test_stages_only_permute_along_the_pipeline_axis(platform, schedule, keep):
    axes_of = collections.defaultdict(list)
    for kind, axes in run(platform, schedule, keep):
        axes_of[kind].append(axes)
    # On TPU XLA also permutes along other axes: the shards of a parameter during its matrix product.
    permuted = {tuple(axes) for axes in axes_of["collective-permute"]}
    assert {axes for axes in permuted if "pipeline" in axes} == {("pipeline",)}
    assert ["fsdp"] in axes_of["all-gather"]
    gathered = axes_of["all-gather"] + axes_of["all-to-all"]
    assert [axes for axes in gathered if axes is None or "pipeline" in axes] == []


def devices_of(platform):
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 32)
        return jax.devices()
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x8").devices
    target = (ROOT / "tests/parallel/h200.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology="4x8x1", target_config=target
    ).devices


def main(platform, schedule, keep):
    """Compiles the step and prints its collectives, each as [kind, mesh axes]."""
    devices = list(devices_of(platform))
    c = tiny_config()
    c.mesh.update(LAYOUT)
    c.model.num_layers = 8
    c.train.update(dtype="bfloat16", num_microbatches=8, global_batch=64)
    chunks = 2 if schedule == "interleaved" else 1
    c.pipeline.update(schedule=schedule, keep=keep, num_chunks=chunks)
    cfg = parse(c, num_devices=len(devices))
    parts = build(cfg)
    program = assemble(cfg, parts, devices=devices)
    batch = audit._batch_like(cfg, program, parts.train_data)
    with program.active():
        text = program.compile(batch).as_text()
    found = collective_ops.find(hlo.parse(text), program.mesh.shape, platform)
    print(json.dumps([(one.kind, one.axes) for one in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
