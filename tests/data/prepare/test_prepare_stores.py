"""`meshtrain prepare` from and to object stores: servers on loopback speak their protocols."""

import gzip
import importlib.util
import os
import signal
import subprocess
import sys
import urllib.request

import pyarrow
import pytest
from pyarrow import parquet

from meshtrain import object_store
from meshtrain.data.prepare import inputs, outputs, shards, sources, tokenize
from tests.lib import s3_server
from tests.lib.paths import ROOT
from tests.lib.prepare import TEXTS, content, inputs_of, prose, run, texts, write_jsonl
from tests.lib.processes import free_port, wait_until_listening

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "gcp_storage_emulator", "flask"))),
    reason="needs the servers of the extra stores",
)
SERVERS = {
    "s3": ["-m", "moto.server", "-p"],
    "gs": [str(ROOT / "tests" / "lib" / "gcs_server.py")],
}


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request):
    """Starts a server, sets the variables by which clients find it, and returns the URL."""
    port = free_port()
    bucket = ["bucket"] if request.param == "gs" else []
    command = [sys.executable, *SERVERS[request.param], str(port), *bucket]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=null, stderr=null)
    address = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        set_variables(patch, address)
        try:
            wait_until_listening(process, port)
            if not bucket:
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
            yield f"{request.param}://bucket"
        finally:
            process.kill()
            process.wait()


def set_variables(patch, address):
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("STORAGE_EMULATOR_HOST", address)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    sources.filesystem.cache_clear()


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """The URL of an empty folder. `new_machine` empties the scratch folders."""
    yield from folder_of(server, tmp_path, monkeypatch)


def folder_of(server, tmp_path, monkeypatch):
    number = 0

    def new_machine():
        nonlocal number
        number += 1
        object_store.release_lease()
        monkeypatch.setenv(object_store.VARIABLE, str(tmp_path / f"scratch-{number}"))
        object_store.root.cache_clear()
        sources.forget()

    new_machine()
    yield Store(f"{server}/{tmp_path.name}", new_machine)
    object_store.release_lease()
    object_store.root.cache_clear()
    sources.forget()


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A server that counts the bytes that it sends, and the URL of an empty folder."""
    with s3_server.running() as server:
        set_variables(monkeypatch, server.address)
        monkeypatch.setattr(sources, "ATTEMPTS", 1)
        for store in folder_of("s3://bucket", tmp_path, monkeypatch):
            yield server, store
    sources.filesystem.cache_clear()


class Store(str):
    """A URL."""

    def __new__(cls, url, new_machine):
        store = super().__new__(cls, url)
        store.new_machine = new_machine
        return store

    def put(self, folder, name="in"):
        """Uploads the files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                target = object_store.scratch_folder(f"{self}/{name}") / path.relative_to(folder)
                object_store.write(target, path.read_bytes())

    def get(self, folder, name="out"):
        """Downloads the objects of a folder, and returns them as `content` does."""
        place = object_store.scratch_folder(f"{self}/{name}")
        folder.mkdir()
        for one in object_store.names(place):
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (folder / one).write_bytes(object_store.read(place / one)[0])
        return content(folder)


def tokens_of(folder_content):
    return {name: data for name, data in folder_content.items() if name[0].isdigit()}


# ---- from a store ----


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "separator"])
def test_objects_give_the_tokens_of_the_files(tmp_path, store, kind):
    flags = inputs_of(kind, tmp_path / "in")
    store.put(tmp_path / "in")
    assert run(*flags, f"--output={tmp_path / 'reference'}", "--shard_tokens=20") == 0
    flags[0] = f"{store}/in"
    assert run(*flags, f"--output={tmp_path / 'out'}", "--shard_tokens=20") == 0
    assert tokens_of(content(tmp_path / "out")) == tokens_of(content(tmp_path / "reference"))


def test_an_object_a_folder_and_a_prefix_are_inputs(tmp_path, store, capsys):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for name in ("part-1.txt", "part-2.txt", "other.txt", "deep/c.txt", "d.py", ".hidden.txt"):
        (folder / name).write_text(name)
    store.put(folder)
    expected = {
        "/in": ["deep/c.txt", "other.txt", "part-1.txt", "part-2.txt"],
        "/in/": ["deep/c.txt", "other.txt", "part-1.txt", "part-2.txt"],
        "/in/deep": ["deep/c.txt"],
        "/in/part-": ["part-1.txt", "part-2.txt"],
        "/in/d.py": ["d.py"],
    }
    for number, (name, found) in enumerate(expected.items()):
        assert run(f"{store}{name}", f"--output={tmp_path / str(number)}") == 0
        assert sorted(texts(tmp_path / str(number))) == found
    assert run(f"{store}/in", f"--output={tmp_path / 'py'}", "--pattern=*.py") == 0
    assert texts(tmp_path / "py") == ["d.py"]
    capsys.readouterr()
    assert run(f"{store}/nothing", f"--output={tmp_path / 'x'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{store}/nothing: no such object or folder" in line


def test_the_fault_of_an_object_names_its_url(tmp_path, store, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "good"}\nno JSON\n')
    (tmp_path / "in" / "b.jsonl").write_text('{\n"text": 1}\n')
    store.put(tmp_path / "in")
    assert run(f"{store}/in/a.jsonl", f"--output={tmp_path / 'out'}") == 2
    assert f"{store}/in/a.jsonl:2: not JSON" in capsys.readouterr().err
    assert run(f"{store}/in/b.jsonl", f"--output={tmp_path / 'out'}") == 2
    error = capsys.readouterr().err
    assert f"{store}/in/b.jsonl: is a JSON object over several lines" in error
    assert str(tmp_path) not in error


def test_an_array_record_and_a_saved_dataset_are_read(tmp_path, store):
    library = pytest.importorskip("array_record.python.array_record_module", reason="extra `data`")
    datasets = pytest.importorskip("datasets", reason="needs the extra `dev`")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "in" / "saved")
    writer = library.ArrayRecordWriter(str(tmp_path / "in" / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    store.put(tmp_path / "in")
    for name in ("saved", "a.array_record"):
        assert run(f"{store}/in/{name}", f"--output={tmp_path / name}-out") == 0
        assert texts(f"{tmp_path / name}-out") == TEXTS


def test_only_ranges_of_a_parquet_file_are_read(tmp_path, recording, monkeypatch):
    server, store = recording
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    noise = [os.urandom(100_000) for _ in range(40)]
    table = pyarrow.table({"noise": noise, "text": [f"text {n}" for n in range(40)]})
    parquet.write_table(table, path, row_group_size=10, compression="none")
    store.put(path.parent)
    assert run(f"{store}/in", f"--output={tmp_path / 'out'}") == 0
    assert texts(tmp_path / "out") == [f"text {n}" for n in range(40)]
    assert 0 < server.sent < 300_000


def test_a_run_resumes_from_objects_and_rejects_changed_ones(tmp_path, store, monkeypatch, capsys):
    write_jsonl(tmp_path / "in", [prose(seed, 20) for seed in range(30)])
    store.put(tmp_path / "in")
    flags = [f"{store}/in", "--shard_tokens=900"]
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    interrupted(monkeypatch, *flags, f"--output={tmp_path / 'out'}")
    sources.forget()
    interrupted(monkeypatch, *flags, f"--output={tmp_path / 'out'}")
    assert run(*flags, f"--output={tmp_path / 'out'}") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")
    interrupted(monkeypatch, *flags, f"--output={tmp_path / 'changed'}")
    write_jsonl(tmp_path / "in", [prose(seed, 21) for seed in range(30)])
    store.put(tmp_path / "in")
    sources.forget()
    assert run(*flags, f"--output={tmp_path / 'changed'}") == 2
    assert "the inputs have changed" in capsys.readouterr().err


def interrupted(monkeypatch, *flags):
    """Runs `meshtrain prepare`, and interrupts it after it has added a shard."""
    add = shards.Journal.add

    def add_and_stop(journal, shard):
        add(journal, shard)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shards.Journal, "add", add_and_stop)
        assert run(*flags) == 75


def test_an_object_that_changes_after_it_was_listed_is_an_error(tmp_path, store, capsys):
    write_jsonl(tmp_path / "in")
    store.put(tmp_path / "in")
    (path,) = sources.list_objects(f"{store}/in")
    write_jsonl(tmp_path / "in", ["other"])
    store.put(tmp_path / "in")
    with pytest.raises(inputs.ConfigError, match="a.jsonl: has changed since it was listed"):
        sources.open_source(path)


# ---- to a store ----


FLAGS = ["--shard_tokens=900", "--train_bpe=300"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of inputs, and what a run writes to a disk."""
    folder = tmp_path_factory.mktemp("written")
    write_jsonl(folder / "in", [prose(seed, 60) for seed in range(40)])
    (folder / "in" / "b.txt.gz").write_bytes(gzip.compress(prose(1, 2000).encode()))
    assert run(folder / "in", f"--output={folder / 'out'}", *FLAGS) == 0
    return folder / "in", content(folder / "out")


def test_an_output_in_a_store_is_that_on_a_disk(tmp_path, store, written, capsys):
    folder, reference = written
    assert run(folder, f"--output={store}/out", *FLAGS) == 0
    printed = capsys.readouterr().out
    assert f"train with --config.data.path={store}/out " in printed
    assert store.get(tmp_path / "found") == reference
    scratch = object_store.scratch_folder(f"{store}/out")
    assert not [*scratch.glob("*.bin")] and not [*scratch.glob("*.idx")]
    store.new_machine()
    assert run(folder, f"--output={store}/out", *FLAGS) == 0
    assert f"{store}/out is already prepared" in capsys.readouterr().out
    assert run(folder, f"--output={store}/out", "--shard_tokens=7") == 2
    assert f"--output={store}/out: was started with different settings" in capsys.readouterr().err


def test_a_run_stopped_after_any_shard_resumes_on_another_machine(
    tmp_path, store, written, monkeypatch
):
    folder, reference = written
    num_shards = len([name for name in reference if name.endswith(".idx")])
    for _ in range(num_shards):
        interrupted(monkeypatch, folder, f"--output={store}/out", *FLAGS)
        store.new_machine()
    assert run(folder, f"--output={store}/out", *FLAGS) == 0
    assert store.get(tmp_path / "found") == reference


def test_parts_in_a_store_are_written_by_several_machines(tmp_path, store, written, monkeypatch):
    folder, reference = written
    for index in (1, 2, 0):
        flags = [folder, f"--output={store}/out", *FLAGS, f"--part={index}/3"]
        if index == 0:
            interrupted(monkeypatch, *flags)
            store.new_machine()
        assert run(*flags) == 0
        store.new_machine()
    assert store.get(tmp_path / "found") == reference


def test_a_folder_of_other_objects_is_rejected(tmp_path, store, written, capsys):
    store.put(written[0], "out")
    assert run(written[0], f"--output={store}/out", *FLAGS) == 2
    assert f"--output={store}/out: holds other files" in capsys.readouterr().err
    assert run(written[0], f"--output={store}/out", *FLAGS, "--part=0/2") == 2
    assert f"--output={store}/out: holds other files" in capsys.readouterr().err


def test_the_lock_of_a_store_admits_one_process(store, written, capsys, monkeypatch):
    monkeypatch.setattr(object_store, "TERM", 2.0)
    code = f"""
import sys, time
sys.path[:0] = ["."]
from meshtrain import object_store
from meshtrain.data.prepare import outputs
object_store.TERM = 2.0
outputs.open_output("{store}/out").acquire()
print("held", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        assert run(written[0], f"--output={store}/out", *FLAGS) == 2
        assert f"--output={store}/out: another run is in it, pid {process.pid}" in (
            capsys.readouterr().err
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert run(written[0], f"--output={store}/out", *FLAGS) == 0


# ---- a store that fails ----


def test_a_store_that_does_not_answer_is_an_error_of_one_line(tmp_path, monkeypatch, capsys):
    set_variables(monkeypatch, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(sources, "ATTEMPTS", 1)
    monkeypatch.setattr(sources, "RETRY_TIME", 1)
    for url in ("s3://bucket/in", "gs://bucket/in"):
        sources.filesystem.cache_clear()
        assert run(url, f"--output={tmp_path / 'out'}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{url}: cannot be read: ") and len(line) < 600
    sources.filesystem.cache_clear()


def test_a_store_that_fails_in_the_middle_is_an_error_and_the_run_resumes(
    tmp_path, recording, monkeypatch, capsys
):
    server, store = recording
    monkeypatch.setattr(tokenize, "UNIT_BYTES", 100)  # objects are read as they are needed
    for number in range(6):
        folder = write_jsonl(tmp_path / str(number), [prose(number, 50)] * 3).parent
        store.put(folder, f"in/{number}")
    flags = [f"{store}/in", "--shard_tokens=500"]
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    kept = dict(server.objects)
    add = shards.Journal.add

    def add_and_fail(journal, shard):
        add(journal, shard)
        server.objects = {}

    with monkeypatch.context() as patched:
        patched.setattr(shards.Journal, "add", add_and_fail)
        assert run(*flags, f"--output={tmp_path / 'out'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "s3://bucket/" in line
    server.objects = kept
    assert run(*flags, f"--output={tmp_path / 'out'}") == 0
    assert content(tmp_path / "out") == content(tmp_path / "reference")


def test_a_shard_that_is_too_large_for_an_object_is_rejected_at_once(store, written, capsys):
    flags = [written[0], f"--output={store}/out", "--shard_tokens=2000000000", FLAGS[1]]
    assert run(*flags) == 2
    assert "--shard_tokens=2000000000: an object of a store has at most" in capsys.readouterr().err
    assert outputs.MAX_OBJECT_BYTES < 5 << 30
