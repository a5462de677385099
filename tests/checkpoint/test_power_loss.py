"""What a run finds after a power loss: every moment of saves, removals, quarantines and rollbacks.

The operations of a run are recorded, on a disk with strace, on a store by its server. What of them
may be there after a power loss, tests.lib.power_loss and tests.lib.starts say.
"""

import pytest

from tests.lib import power_loss, starts, strace
from tests.lib.strace import Disk, Operation

needs_strace = pytest.mark.skipif(bool(fault := strace.fault()), reason=fault)


@pytest.fixture
def scratch():
    with starts.scratch_folder() as folder:
        yield folder


@needs_strace
@pytest.mark.slow
def test_after_a_power_loss_a_start_finds_the_newest_checkpoint_that_was_committed(scratch):
    examined = starts.examine_disk(starts.record(scratch), scratch, **starts.QUICK)
    assert examined.faults == []
    assert examined.num_states > 1000 and examined.num_starts > 2


def test_after_a_crash_a_start_finds_the_newest_checkpoint_that_a_store_has():
    with starts.store() as server:
        starts.record_store(server)
        examined = starts.examine_store(server, **starts.QUICK)
    assert examined.faults == []
    assert examined.num_states > 300 and examined.num_starts > 0


@pytest.mark.slow
def test_every_state_of_a_store_after_a_crash_has_the_newest_checkpoint():
    with starts.store() as server:
        starts.record_store(server)
        examined = starts.examine_store(server, **starts.FULL)
    assert examined.faults == []
    assert examined.num_states > 500 and examined.num_starts > 20


@pytest.mark.slow
@needs_strace
def test_every_state_of_the_disk_after_a_power_loss_has_the_newest_checkpoint(scratch):
    examined = starts.examine_disk(starts.record(scratch), scratch, **starts.FULL)
    assert examined.faults == []
    assert examined.num_states > 15_000 and examined.num_starts > 100


# ---- the model of the disk ----

FOLDER, FILE = 1, 2
NEW_FOLDER = Operation("link", FOLDER, 0, "d", is_folder=True)
NEW_FILE = Operation("link", FILE, FOLDER, "f")
WRITE = Operation("write", FILE, data=b"ab")


def trees(*operations):
    """Returns what the disk may hold after the operations, each as text."""
    found = power_loss.states_at(operations, len(operations), each=True)
    return {str(sorted(state.tree.items())) for state in found}


def test_a_disk_holds_what_was_flushed_and_any_part_of_the_rest():
    flushed = Operation("sync", 0, offset=9), Operation("sync", FOLDER, offset=9)
    contents = [b"", b"\0\0", b"a", b"ab"]
    possible = {str([("d", None), ("d/f", content)]) for content in contents}
    assert trees(NEW_FOLDER, NEW_FILE, WRITE, *flushed) == possible
    assert trees(NEW_FOLDER, NEW_FILE, WRITE, *flushed, Operation("sync", FILE, offset=9)) == {
        str([("d", None), ("d/f", b"ab")])
    }
    # A flush of the file flushes no entry, and one of an entry not that of its folder.
    assert {"[]", "[('d', None)]"} <= trees(
        NEW_FOLDER, NEW_FILE, WRITE, Operation("sync", FILE, offset=9)
    )
    assert "[]" in trees(NEW_FOLDER, NEW_FILE, WRITE, Operation("sync", FOLDER, offset=9))
    # What was written after the flush had begun is not flushed.
    began = Operation("sync", FILE, offset=2)
    assert trees(NEW_FOLDER, NEW_FILE, WRITE, *flushed, began) == possible


def test_a_rename_reaches_a_disk_at_once_and_perhaps_before_the_content():
    made = (NEW_FOLDER, NEW_FILE, Operation("sync", 0, offset=9), Operation("sync", 1, offset=9))
    moved = Operation("rename", FILE, FOLDER, "f", 0, "g")
    assert trees(*made, WRITE, moved) == {
        str(tree)
        for content in (b"", b"\0\0", b"a", b"ab")
        for tree in ([("d", None), ("d/f", content)], [("d", None), ("g", content)])
    } - {str([("d", None), ("d/f", torn)]) for torn in (b"\0\0", b"a")}
    # A removed file is there or not.
    removed = Operation("unlink", folder=FOLDER, name="f")
    assert trees(*made, removed) == {str([("d", None), ("d/f", b"")]), str([("d", None)])}


@needs_strace
def test_the_record_of_a_program_has_its_operations_in_threads_too(tmp_path):
    code = """
import os, sys, threading
folder = sys.argv[1]
os.mkdir(folder + "/a b")
def write(number):
    with open(f"{folder}/a b/{number}", "wb") as file:
        file.write(b'"<>(' * number)
        file.flush()
        os.pwrite(file.fileno(), b"x", 1)
        os.fsync(file.fileno())
threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
handle = os.open(folder + "/a b", os.O_RDONLY)
os.unlink("1", dir_fd=handle)
os.rename("2", "c", src_dir_fd=handle, dst_dir_fd=handle)
os.fsync(handle)
os.truncate(f"{folder}/a b/3", 2)
"""
    folder = tmp_path / "disk"
    folder.mkdir()
    operations = strace.record(["-c", code, str(folder)], folder, tmp_path / "marks")
    kinds = [operation.kind for operation in operations]
    assert [kinds.count(kind) for kind in ("link", "write", "sync")] == [5, 8, 5]
    disk = Disk()
    for operation in operations:
        disk.apply(operation)
    assert disk.tree() == strace.tree_of(folder) and disk.tree()["a b/3"] == b'"x'
