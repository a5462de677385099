"""Workdirs on object stores: servers on loopback speak the protocols of S3 and Google's."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

import meshtrain
from meshtrain import errors, object_store, storage
from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.cli import app
from meshtrain.supervise import launch
from meshtrain.train import train
from tests.lib import store_servers
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick
from tests.lib.paths import ROOT
from tests.lib.processes import free_port
from tests.lib.rows import losses, rows

pytestmark = store_servers.needed
# argv: workdir, steps, where to be killed in the save of step 4.
PROGRAM = """
import os, signal, sys
import jax
sys.path[:0] = ["."]
jax.config.update("jax_num_cpu_devices", 8)  # as this process
from tests.lib.configs import quick
from meshtrain import object_store
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.train import train

def killed_before(module, name, is_now):
    original = getattr(module, name)
    def function(*args, **options):
        if is_now(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    setattr(module, name, function)

workdir, steps, where = sys.argv[1:]
if where == "arrays":
    killed_before(AsyncWriter, "wait", lambda self: lock["step"] == 4)
if where == "small files":
    killed_before(object_store, "upload", lambda path: path.parts[-3:-1] == ("4", "arrays"))
if where == "manifest":
    killed_before(object_store, "create", lambda path: path.parent.name == "4")
if where == "end":
    killed_before(object_store, "remove", lambda path, **_: path.name == "2")
lock = {}
original = AsyncWriter.save
def save(self, folder, tree):
    original(self, folder, tree)
    lock["step"] = int(folder.parent.name.partition(".")[0])
AsyncWriter.save = save
config = quick(steps=int(steps))
config.checkpoint.update(every=2, keep_last=1)
train(config, workdir=workdir)
"""


def saving(steps, **settings):
    c = quick(steps=steps)
    c.checkpoint.update(every=2, keep_last=1, **settings)
    return c


@pytest.fixture(scope="module", params=store_servers.KINDS)
def server(request):
    with store_servers.running(request.param) as url:
        yield url


@pytest.fixture
def url(server, tmp_path, monkeypatch):
    """The URL of a new workdir. A test may call `new_process`, whose scratch folders are empty."""
    number = 0

    def new_process():
        nonlocal number
        number += 1
        monkeypatch.setenv(object_store.VARIABLE, str(tmp_path / f"scratch-{number}"))
        object_store.root.cache_clear()

    new_process()
    yield Run(f"{server}/{tmp_path.name}", new_process)
    object_store.release_lease()
    object_store.root.cache_clear()


class Run(str):
    """A URL."""

    def __new__(cls, url, new_process):
        run = super().__new__(cls, url)
        run.new_process = new_process
        return run


def opened(url):
    """Returns the files of a run as another process finds them."""
    url.new_process()
    return find.download_metadata(Path(url))


def checkpoints(workdir):
    return workdir / find.FOLDER


def restored(workdir):
    directory, _ = find.find_valid(workdir)
    return arrays.as_numpy(directory)


@pytest.mark.slow
def test_a_run_on_a_store_equals_a_run_on_a_disk(url, tmp_path, capsys):
    train(saving(4), workdir=tmp_path / "disk")
    train(saving(4), workdir=url)
    assert str(object_store.root()) not in capsys.readouterr().out
    found = opened(url)
    assert losses(found) == losses(tmp_path / "disk")
    assert_bit_equal(restored(found), restored(tmp_path / "disk"))
    assert find.steps(checkpoints(found)) == [4]
    # The objects have the names of the files, so that a copy is a workdir.
    copy = tmp_path / "copy"
    for name in object_store.names(found):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(object_store.read(found / name)[0])
    copied = manifest.verify(checkpoints(copy) / "4")
    assert copied.arrays == manifest.verify(checkpoints(found) / "4").arrays
    # Both resume on another mesh.
    url.new_process()
    c = saving(6)
    c.mesh.update(data=2, fsdp=2, tensor=2)
    train(c, workdir=url)
    train(c, workdir=copy)
    found = opened(url)
    assert_bit_equal(restored(found), restored(copy))
    assert losses(found) == losses(copy) and len(losses(found)) == 6
    assert [row["step"] for row in rows(found, "events.jsonl") if row["event"] == "restore"] == [4]
    assert "LOCK" not in object_store.names(found)


@pytest.mark.slow
def test_a_damaged_or_missing_chunk_is_found_and_an_older_checkpoint_resumed(url):
    c = saving(6)
    c.checkpoint.keep_last = 9
    train(c, workdir=url)
    found = opened(url)
    expected = restored(found)
    for step, change in ((6, lambda data: bytes(b ^ 1 for b in data)), (4, lambda data: None)):
        directory = checkpoints(found) / str(step)
        names = [name for name in manifest.read(directory).files if "ocdbt.process_0/d/" in name]
        largest = max(names, key=lambda name: len(object_store.read(directory / name)[0]))
        object_store.write(directory / largest, change(object_store.read(directory / largest)[0]))
        with pytest.raises(CorruptCheckpoint):
            manifest.verify(directory)
    url.new_process()
    train(c, workdir=url)
    found = opened(url)
    events = rows(found, "events.jsonl")
    assert [row["step"] for row in events if row["event"] == "restore"] == [2]
    assert sorted(row["step"] for row in events if row["event"] == "quarantine") == [4, 6]
    assert str(object_store.root()) not in (found / "events.jsonl").read_text()
    places = [row["place"] for row in events if row["event"] == "quarantine"]
    assert sorted(places) == [f"{url}/checkpoints/quarantine/{step}" for step in (4, 6)]
    assert {"4", "6"} == {path.name for path in (checkpoints(found) / "quarantine").iterdir()}
    assert_bit_equal(restored(found), expected)


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_not_damage(url, monkeypatch):
    train(saving(2), workdir=url)
    directory = checkpoints(opened(url)) / "2"
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 1, "initial_delay": "1ms"})
    spec = object_store.spec

    def elsewhere(folder):
        found = spec(folder)
        return found and {"driver": "s3", "bucket": "bucket", "path": found["path"], **closed}

    closed = {"endpoint": f"http://127.0.0.1:{free_port()}", "aws_region": "us-east-1"}
    closed["context"] = {
        "s3_request_retries": object_store.RETRIES,
        "aws_credentials": {"type": "environment"},
    }
    monkeypatch.setattr(object_store, "spec", elsewhere)
    with (
        pytest.raises(errors.TransientError, match="may be valid"),
        manifest.reading_chunks(directory),
    ):
        list(manifest._open_arrays(directory))
    with pytest.raises(errors.TransientError, match="may be valid"):
        manifest.verify(directory)
    with pytest.raises(OSError) as error:
        object_store.names(directory)
    assert error.value.filename == object_store.url(directory) and "connect" in error.value.strerror


def test_a_store_that_accepts_requests_and_never_answers_is_an_error():
    """In a new process, since the client reads its settings once."""
    code = """
import sys
from meshtrain import object_store
from meshtrain.cli import app
object_store.RETRIES["max_retries"] = 1
sys.exit(app.command(["checkpoint", "ls", "s3://bucket/run"]))
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**os.environ, "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        # Its names are those that a run sets; this process may have set them.
        env |= dict(object_store.TIMEOUTS, TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS="1")
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, timeout=60
        )
    assert found.returncode == 2 and b"Timeout was reached" in found.stderr


def test_one_run_at_a_time_holds_the_lock(url, monkeypatch, capsys):
    monkeypatch.setattr(object_store, "TERM", 1.0)
    lock = object_store.scratch_folder(url) / "LOCK"
    assert object_store.acquire_lease(lock, log=print) == ""
    first, object_store._held = object_store._held, None  # as in another process
    monkeypatch.setattr(object_store, "is_dead", lambda holder: False)
    assert "another run is in it" in object_store.acquire_lease(lock, log=print)
    assert "waits 1 s" in capsys.readouterr().out
    # The holder is suspended for longer than a term: the next one takes over, and the first one
    # notices.
    first._released.set()
    first._thread.join()
    assert object_store.acquire_lease(lock, log=print) == ""
    assert not first.renew()
    second, object_store._held = object_store._held, first
    with pytest.raises(OSError, match="taken over"):
        object_store.confirm_lease()
    first.release()  # does not remove the lock of the second
    assert object_store.read(lock)[0] is not None
    object_store._held = second
    object_store.confirm_lease()
    object_store.release_lease()
    assert object_store.read(lock)[0] is None


def test_what_another_run_may_have_written_is_not_moved(url, monkeypatch):
    folder = object_store.scratch_folder(url)
    source, target = folder / "checkpoints" / "2", folder / "checkpoints" / "quarantine" / "2"
    for path in (source / "chunk", source / manifest.NAME):
        object_store.write(path, b"ours")
    workdir = storage.workdir_at(folder)
    assert object_store.acquire_lease(folder / "LOCK", log=print) == ""
    object_store.write(target / manifest.NAME, b"theirs")
    with pytest.raises(OSError, match="another run has written it"):
        workdir.move_objects(source, target)
    object_store.write(target / manifest.NAME, None)
    object_store.write(target / "chunk", None)
    record, generation = object_store.read(folder / "LOCK")
    object_store.write(folder / "LOCK", b"{}")
    with pytest.raises(object_store.LockLost):
        workdir.move_objects(source, target)
    assert object_store.names(target) == [] and len(object_store.names(source)) == 2
    object_store.write(folder / "LOCK", record)
    workdir.move_objects(source, target)
    assert object_store.names(source) == [] and len(object_store.names(target)) == 2
    object_store.release_lease()


@pytest.mark.parametrize("node_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_last_upload_of_launch_leaves_the_files_of_another_run(
    url, monkeypatch, capfd, node_rank
):
    monkeypatch.setattr(object_store, "TERM", 2.0)
    workdir = storage.open_workdir(url)
    folder = workdir.folder
    (folder / storage.LOGS).mkdir(parents=True)
    for name in ("config.json", "events.jsonl", "logs/rank-0.log"):
        (folder / name).write_text("ours")

    def renew():
        number = 0
        while not ended.wait(0.1):
            object_store.write(folder / "LOCK", json.dumps({"renewals": number}).encode())
            number += 1

    ended = threading.Event()
    other = threading.Thread(target=renew)
    object_store.write(folder / "LOCK", b"{}")
    other.start()
    launch._upload(workdir, node_rank=node_rank)
    ended.set()
    other.join()
    assert object_store.names(folder) == ["LOCK"]
    assert "another run is in it; the last logs of this one" in capfd.readouterr().err

    # The other run has ended; or one of ours was killed.
    launch._upload(workdir, node_rank=node_rank)
    names = {*object_store.names(folder)}
    assert "logs/rank-0.log" in names and ("events.jsonl" in names) == (node_rank == 0)
    assert ("LOCK" in names) == (node_rank > 0)


def test_a_path_in_a_scratch_folder_has_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv(object_store.VARIABLE, str(tmp_path))
    object_store.root.cache_clear()
    run = object_store.scratch_folder("s3://bucket/a run.partial/", process=3)
    assert object_store.url(run) == "s3://bucket/a run.partial" and not object_store.url(
        tmp_path / "x"
    )
    saving = run / "checkpoints" / "20.partial" / "arrays.orbax-checkpoint-tmp" / "d"
    assert object_store.url(saving) == "s3://bucket/a run.partial/checkpoints/20/arrays/d"
    assert object_store.spec(saving)["path"] == "a run.partial/checkpoints/20/arrays/d/"
    assert storage.readable(f"saved in {run}.") == "saved in s3://bucket/a run.partial."
    assert storage.workdir_at(saving).array_store(
        {"base": {"path": str(saving)}, "manifest": {}}
    ) == {"base": object_store.spec(saving)}
    folder = storage.open_workdir(tmp_path)
    assert isinstance(folder, storage.LocalFolder) and folder.folder == tmp_path
    assert isinstance(storage.workdir_at(tmp_path), storage.LocalFolder)
    object_store.root.cache_clear()


def test_a_lock_of_a_process_that_has_ended_is_taken_over_at_once(url):
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = object_store.scratch_folder(url) / "LOCK"
    here = {"host": socket.gethostname(), "kernel": object_store._kernel_id()}
    record = {"pid": ended.pid, **here}
    object_store.write(lock, json.dumps(record).encode())
    began = time.monotonic()
    assert (
        object_store.acquire_lease(lock, log=print) == ""
        and time.monotonic() - began < object_store.TERM / 2
    )
    object_store.release_lease()
    assert object_store.is_dead({"pid": os.getpid(), **here})
    assert not object_store.is_dead({"pid": os.getppid(), **here}) and not object_store.is_dead({})
    # Another machine or container may have the same name.
    assert not object_store.is_dead({"pid": ended.pid, "host": here["host"], "kernel": "another"})
    assert not object_store.is_dead({"pid": os.getpid(), "host": here["host"]})


def test_a_lost_answer_to_a_renewal_does_not_lose_the_lock(url, monkeypatch):
    """Neither if the client repeats the write, nor if the next renewal finds it done."""
    original = object_store.write

    def lost(path, data, **options):
        assert original(path, data, **options)
        if is_unreachable:
            raise OSError(None, "no answer", str(path))
        return b""  # the repeated write finds another generation

    monkeypatch.setattr(object_store, "write", lost)
    is_unreachable = False
    lock = object_store.scratch_folder(url) / "LOCK"
    assert object_store.acquire_lease(lock, log=print) == ""
    assert object_store._held.renew()
    is_unreachable = True
    with pytest.raises(OSError, match="no answer"):
        object_store._held.renew()
    monkeypatch.setattr(object_store, "write", original)
    assert object_store._held.renew() and object_store._held.renew()


def test_a_run_that_lost_its_lock_leaves_the_objects_of_the_other_run(url, monkeypatch):
    """They may be of a save of the same step that is not finished."""
    monkeypatch.setattr(object_store, "RENEWALS", 1e-3)  # the thread does not notice it first
    monkeypatch.setattr("meshtrain.checkpoint.saver.LAST_TRIES", 1)
    original, chunk = (
        object_store.confirm_lease,
        object_store.scratch_folder(url) / "checkpoints" / "2" / "arrays" / "chunk",
    )

    written = []

    def stolen():
        if not written:
            written.append(object_store.write(chunk, b"of the other run"))
            object_store.write(chunk.parents[3] / "LOCK", b"{}")
        original()

    monkeypatch.setattr(object_store, "confirm_lease", stolen)
    with pytest.raises(meshtrain.ConfigError, match="could not be saved"):
        train(saving(2), workdir=url)
    assert object_store.read(chunk)[0] == b"of the other run"


@pytest.mark.slow
def test_late_writes_of_a_suspended_run_change_no_committed_checkpoint(url, monkeypatch):
    """It was suspended while it wrote arrays, and another run has saved the same step."""
    monkeypatch.setattr(object_store, "RENEWALS", 1e-3)  # the thread does not notice it first
    monkeypatch.setattr("meshtrain.checkpoint.saver.LAST_TRIES", 1)
    train(saving(2), workdir=url)
    found = opened(url)
    before = restored(found)
    tree = {"step": jax.numpy.int32(2), "params": {"w": jax.numpy.ones(1000)}}
    folder = manifest.partial_folder(checkpoints(found), 2) / arrays.FOLDER
    assert object_store.acquire_lease(found / "LOCK", log=print) == ""
    object_store.write(found / "LOCK", b"{}")
    with contextlib.closing(AsyncWriter()) as writer:
        writer.save(folder, tree)
        with pytest.raises(OSError, match="taken over"):
            writer.wait()
    found = opened(url)
    manifest.verify(checkpoints(found) / "2")
    assert_bit_equal(restored(found), before)


def test_files_that_did_not_change_are_not_uploaded_again(url):
    """The workdir may be a folder around another run.

    Its files have changed in the store since the download.
    """
    train(saving(2), workdir=url)
    object_store.write(object_store.scratch_folder(url) / "other" / "LOCK", b"older")
    found = opened(url)
    assert (found / "other" / "LOCK").read_bytes() == b"older"
    object_store.write(found / "other" / "LOCK", b"newer")
    storage.workdir_at(found).push()
    assert object_store.read(found / "other" / "LOCK")[0] == b"newer"


def test_a_checkpoint_is_committed_once(url, tmp_path):
    path = object_store.scratch_folder(url) / "checkpoints" / "2" / manifest.NAME
    path.parent.mkdir(parents=True)
    path.write_text("of the first run")
    object_store.create(path)
    object_store.create(path)  # a repeated request finds its own object
    path.write_text("of the second run")
    with pytest.raises(OSError, match="another run has written it"):
        object_store.create(path)
    assert object_store.read(path)[0] == b"of the first run"


def test_a_run_that_lost_its_lock_cannot_save(url, monkeypatch):
    monkeypatch.setattr(object_store, "RENEWALS", 1e-3)  # the thread does not notice it first
    monkeypatch.setattr("meshtrain.checkpoint.saver.LAST_TRIES", 1)
    original = manifest.commit

    def stolen(folder, step, **fields):
        saved = original(folder, step, **fields)
        object_store.write(folder.parent / "LOCK", b"{}")
        return saved

    monkeypatch.setattr(manifest, "commit", stolen)
    with pytest.raises(meshtrain.ConfigError, match="could not be saved"):
        train(saving(4), workdir=url)
    assert find.steps(checkpoints(opened(url))) == [2]


def test_a_rollback_is_recorded_in_the_store(url):
    """After a crash the run resumes at the position behind the spike."""
    train(saving(2), workdir=url)
    directory = checkpoints(opened(url)) / "2"
    from meshtrain.checkpoint.saver import Saver

    saver = object.__new__(Saver)
    saver._workdir, saver._folder = storage.workdir_at(directory), directory.parent
    saver._log, saver._confirm_lock = print, lambda: None
    saver.record_rollback(manifest.read(directory), 777, {}, tokens=0)
    assert manifest.read(checkpoints(opened(url)) / "2").position == 777


@pytest.mark.parametrize(
    "arguments, fault",
    [
        (
            ["train", "--config=quickstart", "--workdir=s3://bucket"],
            "use a bucket and a folder of its own",
        ),
        (
            ["train", "--config=quickstart", "--workdir=gs://bucket/../x"],
            "use a bucket and a folder of its own",
        ),
        (
            ["launch", "--nproc=1", "--", "--config=quickstart", "--workdir=s3://"],
            "use a bucket and a folder",
        ),
        (
            ["train", "--config=quickstart", "--workdir=s3://./x"],
            "use a bucket and a folder of its own",
        ),
        (
            ["train", "--config=quickstart", "--workdir=s3://bucket/run/checkpoints/4"],
            "use --workdir=s3://bucket/run to resume",
        ),
        (
            ["train", "--config=quickstart", "--workdir=s3:bucket/run"],
            "write s3://BUCKET/RUN; for a folder, its absolute path",
        ),
        (
            ["train", "--config=quickstart", "--workdir=az://a/b"],
            "does not read or write az storage",
        ),
        (
            ["prepare", "x.txt", "--output=az://bucket/data"],
            "--output=az://bucket/data: this version does not read or write az storage",
        ),
        (
            ["prepare", "hf://user/data", "--output=data"],
            "hf://user/data: this version does not read or write hf storage",
        ),
    ],
)
def test_what_is_not_supported_is_rejected_in_a_line(arguments, fault, capsys):
    assert app.command(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and fault in lines[0]


def test_a_bucket_or_run_that_does_not_exist_is_reported_in_a_line(url, capsys):
    bucket = url.replace("//bucket", "//nobucket")
    with pytest.raises(meshtrain.ConfigError, match=f"^--workdir={bucket}: ") as error:
        train(saving(2), workdir=bucket)
    assert len(error.value.faults) == 1
    assert app.command(["checkpoint", "ls", url]) == 2
    assert capsys.readouterr().err == f"{url}: there are no objects under this name\n"


@pytest.mark.slow
def test_other_verbs_read_a_run_on_a_store(url, capsys, tmp_path):
    train(saving(2), workdir=url)
    for arguments in (
        ["checkpoint", "verify", url],
        ["checkpoint", "diff", f"{url}/checkpoints/2", url],
        ["convert", url, str(tmp_path / "converted")],
        ["report", url, f"--output={tmp_path}/report.html"],
    ):
        url.new_process()
        assert app.command(arguments) == 0, capsys.readouterr().err
    assert str(object_store.root()) not in capsys.readouterr().out
    url.new_process()
    c = saving(1)
    c.checkpoint.init_from = str(url)
    train(c)
    assert "parameters of /" not in capsys.readouterr().out
    url.new_process()
    assert app.command(["checkpoint", "prune", url, "--keep=1"]) == 0


def program(workdir, steps, where=""):
    command = [sys.executable, "-c", PROGRAM, workdir, str(steps), where]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop(object_store.VARIABLE)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_after_kill_in_a_save_the_run_resumes_from_a_valid_checkpoint(url, tmp_path):
    for where in ("arrays", "small files", "manifest", "end"):  # each resumes the run before it
        killed = program(url, 6, where)
        assert killed.returncode == -signal.SIGKILL, (where, killed.stderr)
        found = opened(url)
        there = find.steps(checkpoints(found))
        assert there == ([4, 2] if where == "end" else [2]), where
        assert [manifest.verify(checkpoints(found) / str(step)).step for step in there] == there
    resumed = program(url, 6)
    assert resumed.returncode == 0, resumed.stderr
    train(saving(6), workdir=tmp_path / "disk")
    found = opened(url)
    assert find.steps(checkpoints(found)) == [6]
    assert {
        name.split("/")[1] for name in object_store.names(found) if name.startswith("checkpoints/")
    } == {"6"}
    assert losses(found) == losses(tmp_path / "disk")
    assert_bit_equal(restored(found), restored(tmp_path / "disk"))


@pytest.mark.slow
def test_a_checkpoint_that_is_removed_from_the_store_while_it_is_read_is_not_used(url):
    config = saving(4)
    config.checkpoint.keep_last = 9
    train(config, workdir=url)
    seen = []

    def read(directory, saved):
        seen.append(saved.step)
        if saved.step == 4:  # as retention of the run does
            object_store.remove(directory, first=manifest.NAME)
        return arrays.as_numpy(directory)

    lines = []
    find.read_valid(opened(url), read, log=lines.append)
    assert seen == [4, 2] and not lines
