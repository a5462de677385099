"""Checkpoints of several processes: each writes its shards, and verifies what it reads."""

import os
import subprocess
import sys

import pytest

from meshtrain.checkpoint import find, manifest
from tests.lib.checkpoints import checkpoints, flip, largest_file, params_of
from tests.lib.compare import assert_bit_equal
from tests.lib.paths import ROOT
from tests.lib.rows import events

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
PROGRAM = """
import sys
import jax
sys.path[:0] = ["."]
from tests.lib.configs import quick
jax.config.update("jax_num_cpu_devices", 2)
from meshtrain.cluster import distributed
from meshtrain.train import train
distributed.initialize()
config = quick(steps=int(sys.argv[2]))
config.mesh.update(data=1, fsdp=4)
config.checkpoint.update(every=1, keep_last=9)
if len(sys.argv) > 3:  # the second process removes the newest checkpoint there before it reads it
    from meshtrain.checkpoint import arrays, find
    config.checkpoint.init_from, read = sys.argv[3], arrays.restore_params
    def remove_first(directory, *args, **kwargs):
        if directory.name == "3" and jax.process_index() == 1:
            find.remove(directory)
        return read(directory, *args, **kwargs)
    arrays.restore_params = remove_first
train(config, workdir=sys.argv[1])
"""


def run(workdir, steps, *init_from):
    port = 20000 + os.getpid() % 20000
    address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **address}
    command = [sys.executable, "-c", PROGRAM, str(workdir), str(steps), *map(str, init_from)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env={**env, "JAX_PROCESS_ID": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_a_chunk_that_one_process_finds_damaged_is_used_by_none(tmp_path):
    run(tmp_path / "run", 3)
    newest = checkpoints(tmp_path / "run") / "3"
    of_second = largest_file(newest / "arrays" / "ocdbt.process_1")
    assert of_second.relative_to(newest).match(manifest.CHUNKS)
    flip(of_second)
    with pytest.raises(manifest.CorruptCheckpoint, match="arrays/.* fails its checksum"):
        manifest.verify(newest)
    run(tmp_path / "run", 4)
    assert [one["step"] for one in events(tmp_path / "run", "restore")] == [2]
    assert [one["step"] for one in events(tmp_path / "run", "quarantine")] == [3]
    assert find.steps(checkpoints(tmp_path / "run")) == [4, 3, 2, 1]
    assert manifest.verify(checkpoints(tmp_path / "run") / "4").processes == 2


def test_all_processes_start_from_the_same_checkpoint_of_a_live_run(tmp_path):
    """One finds that the chosen one was removed: all read the one that process 0 then chooses."""
    run(tmp_path / "source", 3)
    run(tmp_path / "new", 0, tmp_path / "source")
    (start,) = events(tmp_path / "new", "init_from")
    assert start["path"] == str(checkpoints(tmp_path / "source") / "2")
    found = params_of(checkpoints(tmp_path / "new") / "0")
    assert_bit_equal(found, params_of(checkpoints(tmp_path / "source") / "2"))
