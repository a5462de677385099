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
exec(sys.argv[3])
if len(sys.argv) > 4:  # the second process removes the newest checkpoint there before it reads it
    from meshtrain.checkpoint import arrays, find
    config.checkpoint.init_from, read = sys.argv[4], arrays.restore_params
    def remove_first(directory, *args, **kwargs):
        if directory.name == "3" and jax.process_index() == 1:
            find.remove(directory)
        return read(directory, *args, **kwargs)
    arrays.restore_params = remove_first
train(config, workdir=sys.argv[1])
"""

# Process 0 cannot create the folder of the first save, nor merge what all have written in the
# second one; process 1 cannot write its arrays in the third.
FAILURES = """
from orbax.checkpoint._src.path import async_path
from orbax.checkpoint._src.serialization import tensorstore_utils
from meshtrain.checkpoint import arrays, saver
from meshtrain.storage import LocalFolder
saver.FIRST_WAIT = 0.0
number, due = 0, {(1, "mkdir"): 0, (2, "merge"): 0, (3, "write"): 1}
def fail(kind):
    if due.get((number, kind)) == distributed.process_id():
        del due[number, kind]
        raise OSError(28, "No space left on device")
def failing(kind, function):
    def called(*args, **options):
        fail(kind)
        return function(*args, **options)
    return called
def counted(function):
    def save(*args):
        global number
        number += 1
        return function(*args)
    return save
arrays.AsyncWriter.save = counted(arrays.AsyncWriter.save)
async_path.mkdir = failing("mkdir", async_path.mkdir)
LocalFolder.confirm_lock = failing("merge", LocalFolder.confirm_lock)
tensorstore_utils.build_array_write_spec = failing(
    "write", tensorstore_utils.build_array_write_spec
)
"""


def run(workdir, steps, *init_from, before=""):
    port = 20000 + os.getpid() % 20000
    address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **address}
    command = [sys.executable, "-c", PROGRAM, str(workdir), str(steps), before]
    command += map(str, init_from)
    processes = [
        subprocess.Popen(command, cwd=ROOT, env={**env, "JAX_PROCESS_ID": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


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


def test_a_save_that_fails_in_one_process_fails_in_all_at_once(tmp_path):
    """At jax's barriers the others would wait 20 minutes, and this test for its timeout."""
    run(tmp_path / "run", 4, before=FAILURES)
    failed = events(tmp_path / "run", "save_failed")
    assert [one["step"] for one in failed] == [1, 2, 3]
    assert all("No space left on device" in one["error"] for one in failed)
    assert "process 1: " in failed[2]["error"]
    assert find.steps(checkpoints(tmp_path / "run")) == [4]
    assert manifest.verify(checkpoints(tmp_path / "run") / "4").processes == 2
