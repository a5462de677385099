"""The pipelined step compiles ahead of time for TPU and GPU, on a host without them (and for CPU).

XLA partitions differently for each platform, and aborts the process on some programs. So each case
compiles in its own process: this file, run as `python tests/parallel/test_aot.py PLATFORM SCHEDULE
KEEP` with PYTHONPATH=.
"""

import collections
import json
import os
import subprocess
import sys

import jax
import pytest

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.program import assemble
from meshtrain.tools.audit import audit
from meshtrain.tools.hlo import collective_ops, hlo, target
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

LAYOUT = {"pipeline": 4, "data": 2, "fsdp": 2, "tensor": 2}
NUM_MICROBATCHES = 8
GLOBAL_BATCH = 64
NUM_TOKENS = 16 * GLOBAL_BATCH // NUM_MICROBATCHES // 4  # of a micro-batch on one device
NUM_SHARDS = 8  # of the vocabulary
TARGETS = {"cpu": "", "tpu": "v5e:4x8", "cuda": "h200:4x8"}


def run(platform, *arguments):
    """Runs this file in a process and returns what it prints.

    Skips the test without the compiler.
    """
    if TARGETS[platform]:
        try:
            target.parse(TARGETS[platform])
        except ConfigError as error:
            pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, __file__, platform, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            **target.SETTINGS,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
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
@pytest.mark.parametrize("platform", TARGETS)
def test_stages_only_permute_along_the_pipeline_axis(platform, schedule, keep):
    axes_of, gathered = collections.defaultdict(list), []
    for kind, axes, size in run(platform, schedule, keep):
        axes_of[kind].append(axes)
        if kind == "all-gather":
            gathered.append((axes, size))
    # On TPU XLA also permutes along other axes: the shards of a parameter during its matrix
    # product.
    permuted = {tuple(axes) for axes in axes_of["collective-permute"]}
    assert {axes for axes in permuted if "pipeline" in axes} == {("pipeline",)}
    assert ["fsdp"] in axes_of["all-gather"]
    # The shards of the vocabulary give each other no more than their statistics of each token.
    statistics = ["pipeline", "tensor"], NUM_TOKENS * NUM_SHARDS
    axes = [axes for axes, size in gathered if (axes, size) != statistics]
    assert [one for one in axes + axes_of["all-to-all"] if one is None or "pipeline" in one] == []


def devices_of(platform):
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 32)
        return jax.devices()
    return target.devices_of(TARGETS[platform])


def main(platform, schedule, keep):
    """Compiles the step and prints its collectives: [kind, mesh axes, size] of each."""
    target.prepare()  # jax is imported, but no backend has started
    devices = devices_of(platform)
    c = tiny_config()
    c.mesh.update(LAYOUT)
    c.model.num_layers = 8
    c.train.update(dtype="bfloat16", num_microbatches=NUM_MICROBATCHES, global_batch=GLOBAL_BATCH)
    chunks = 2 if schedule == "interleaved" else 1
    c.pipeline.update(schedule=schedule, keep=keep, num_chunks=chunks)
    cfg = parse(c, num_devices=len(devices))
    parts = build(cfg)
    program = assemble(cfg, parts, devices=devices)
    batch = audit._batch_like(cfg, program, parts.train_data)
    with program.active():
        text = program.compile(batch).as_text()
    found = collective_ops.find_collectives(hlo.parse(text), program.mesh.shape, platform)
    print(json.dumps([(one.kind, one.axes, one.array.size) for one in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
