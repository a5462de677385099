"""Prepared data on object stores: the same samples as from a disk, whatever the store does."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from http import HTTPStatus

import jax
import numpy as np
import pytest

from meshtrain import object_store
from meshtrain.cli import app
from meshtrain.data import loader, prepared, remote, remote_cache, remote_store
from meshtrain.errors import ConfigError, TransientError
from meshtrain.train import train
from tests.lib import prepare, s3_server, store_servers
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick
from tests.lib.paths import ROOT
from tests.lib.remote_data import build
from tests.lib.rows import losses

PART = 4096  # bytes with a checksum, in these tests
BLOCK = 8 * PART


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared folder of three shards, of 5 or 6 blocks each."""
    place = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "PART_BYTES", PART)
        prepare.write_jsonl(place / "in", [prepare.prose(seed, 500) for seed in range(200)])
        arguments = ["--tokenizer=bytes", "--shard_tokens=180000"]
        assert prepare.run(place / "in", f"--output={place / 'out'}", *arguments) == 0
    assert len(prepared.read_manifest(place / "out")["shards"]) == 3
    return place / "out"


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (prepared, remote_cache):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    for module in (remote, remote_cache):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture
def store(folder, tmp_path, monkeypatch, small_blocks):
    """A server with the objects of `folder` at s3://bucket/data, and an empty cache."""
    new_process(monkeypatch, tmp_path)
    with s3_server.running() as server:
        store_servers.set_address(monkeypatch, server.address)
        # Not the packings that other tests have cached there.
        files = [path for path in folder.iterdir() if ".best_fit" not in path.name]
        server.objects = {f"data/{path.name}": path.read_bytes() for path in files}
        yield server


URL = "s3://bucket/data"


def new_process(monkeypatch, tmp_path):
    """Forgets what this process knows of the cache; its files stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote_cache.open_cache.cache_clear()


def blocks(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("blocks/*/*") if path.name.isdecimal()]


def cached_bytes(tmp_path):
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files if path.name not in ("used", "claims"))


def assert_equal_samples(one, other, count=300):
    """Compares samples in batches, in an order that jumps, with and without reading ahead."""
    for start in (0, 128, 64, 1000):
        indices = np.arange(start, start + count // 4)
        if start != 64 and other.prefetch:
            other.prefetch(indices)
        jax.tree.map(np.testing.assert_array_equal, one.read(indices), other.read(indices))


def bin_reads(store):
    return [read for read in store.reads if read[0].endswith(".bin")]


# ---- the same samples ----


@pytest.mark.parametrize("cache_gb", [1, 0, 4.5 * BLOCK / 1e9])
@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_samples_are_those_of_the_local_folder_with_any_cache(
    folder, store, tmp_path, packing, cache_gb
):
    local = build(folder, packing=packing)
    remote_source = build(URL, packing=packing, cache_gb=cache_gb)
    assert remote_source.identity == local.identity and remote_source.size == local.size
    assert remote_source.baseline == local.baseline
    assert remote_source.description.removeprefix(URL) == local.description.removeprefix(
        str(folder)
    )
    np.testing.assert_array_equal(remote_source.token_bytes, local.token_bytes)
    assert_equal_samples(local, remote_source)
    least, most = {1: (10, 16), 0: (0, 0)}.get(cache_gb, (1, 4))
    assert least <= len(blocks(tmp_path)) <= most


def test_a_mixture_of_a_store_and_a_disk_is_read_ahead(folder, store):
    other = str(folder)
    local = build("", mixture=((other, 1.0), (other, 3.0)))
    mixed = build("", mixture=((other, 1.0), (URL, 3.0)), cache_gb=1.0)
    assert local.prefetch is None and local.identity == mixed.identity
    mixed.prefetch(np.arange(200))
    store.reads.clear()
    jax.tree.map(
        np.testing.assert_array_equal, local.read(np.arange(200)), mixed.read(np.arange(200))
    )
    assert not store.reads


@store_servers.needed
@pytest.mark.slow
@pytest.mark.parametrize("kind", store_servers.KINDS)
def test_samples_are_the_same_from_servers_of_s3_and_google(
    folder, kind, tmp_path, monkeypatch, small_blocks
):
    new_process(monkeypatch, tmp_path)
    with store_servers.running(kind) as bucket:
        monkeypatch.setenv(object_store.VARIABLE, str(tmp_path / "scratch"))
        target = object_store.scratch_folder(f"{bucket}/some/data")
        for path in folder.iterdir():
            object_store.write(target / path.name, path.read_bytes())
        for packing in ("windows", "best_fit"):
            assert_equal_samples(
                build(folder, packing=packing), build(f"{bucket}/some/data", packing=packing)
            )


def test_each_block_is_fetched_once_and_a_new_process_fetches_none(
    folder, store, tmp_path, monkeypatch
):
    source = build(URL, heldout=0.0)
    source.read(np.arange(source.size))
    assert len(bin_reads(store)) == len({*bin_reads(store)}) == 16
    new_process(monkeypatch, tmp_path)
    store.reads.clear()
    again = build(URL)
    assert_equal_samples(build(folder), again)
    assert not bin_reads(store)


READER = """
import sys
import numpy as np
from meshtrain.data import remote, remote_cache
remote.BLOCK = remote_cache.BLOCK = int(sys.argv[2])
from tests.lib.remote_data import build
print("ready", flush=True)
sys.stdin.readline()
source = build(sys.argv[1], heldout=0.0)
print(source.read(np.arange(source.size)).tokens.sum())
"""


def test_processes_of_a_host_share_the_cache(folder, store, tmp_path):
    """Each block is fetched by one of them, though all need all blocks at the same time."""
    store.before_read = lambda name, range: time.sleep(0.3)
    command = [sys.executable, "-c", READER, URL, str(BLOCK)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    sums = [process.communicate()[0] for process in processes]
    source = build(folder, heldout=0.0)
    assert sums == [f"{source.read(np.arange(source.size)).tokens.sum()}\n"] * 3
    assert len(bin_reads(store)) == len({*bin_reads(store)}) == 16


# ---- training ----

MESHES = [
    {"data": 8},
    pytest.param({"data": 1, "fsdp": 4, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "pipeline": 2, "context": 2}, marks=pytest.mark.slow),
]


def config_of(path, steps=6, mesh=None):
    c = quick(steps=steps)
    c.mesh.update(mesh or {"data": 8})
    c.data.update(
        build="meshtrain.data.tokens:build", path=str(path), heldout=0.05, packing="best_fit"
    )
    c.model.vocab_size = 256
    if c.mesh.pipeline > 1:
        c.train.num_microbatches = 2
    return c


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_run_on_a_store_is_the_run_on_the_disk_on_any_mesh(folder, store, tmp_path, mesh):
    on_disk = train(config_of(folder, mesh=mesh), workdir=tmp_path / "a")
    on_store = train(config_of(URL, mesh=mesh), workdir=tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert on_disk.eval_loss == on_store.eval_loss
    assert_bit_equal(on_disk.state.params, on_store.state.params)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["disk", "store"])
def test_a_run_is_resumed_on_the_other_place_of_its_data(folder, store, tmp_path, first):
    places = (folder, URL) if first == "disk" else (URL, folder)
    train(config_of(folder, steps=8), workdir=tmp_path / "straight")
    assert train(config_of(places[0], steps=4), workdir=tmp_path / "moved").step == 4
    train(config_of(places[1], steps=8), workdir=tmp_path / "moved")
    straight = losses(tmp_path / "straight")
    assert len(straight) == 8 and losses(tmp_path / "moved") == straight


def test_the_tokenizer_of_the_data_is_in_the_workdir(tmp_path, monkeypatch, small_blocks):
    """`generate` needs it, and the data may be away by then."""
    new_process(monkeypatch, tmp_path)
    tokenizer = prepare.hugging_face(tmp_path / "tokenizer")
    texts = prepare.write_jsonl(tmp_path / "in", [prepare.prose(seed, 500) for seed in range(20)])
    assert prepare.run(texts, f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer}") == 0
    with s3_server.running() as server:
        store_servers.set_address(monkeypatch, server.address)
        for path in (tmp_path / "out").iterdir():
            server.objects[f"data/{path.name}"] = path.read_bytes()
        c = config_of(URL, steps=2)
        c.model.vocab_size = 320
        train(c, workdir=tmp_path / "run")
    copied = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    assert copied.read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()


# ---- damage ----


def test_a_corrupt_block_of_the_cache_is_fetched_again(folder, store, tmp_path, monkeypatch):
    build(URL).read(np.arange(2000))
    for number, path in enumerate(blocks(tmp_path)):
        content = path.read_bytes()
        inverted = bytes(255 - byte for byte in content[:-4]) + content[-4:]
        path.write_bytes([inverted, content[:-5], b"", content + b"x"][number % 4])
    new_process(monkeypatch, tmp_path)
    assert_equal_samples(build(folder), build(URL))


def test_blocks_may_be_removed_at_any_time(folder, store, tmp_path):
    source = build(URL)
    source.read(np.arange(2000))
    shutil.rmtree(tmp_path / "cache" / "meshtrain" / "data" / "blocks")
    (tmp_path / "cache" / "meshtrain" / "data" / "blocks").mkdir()
    assert_equal_samples(build(folder), source)


@pytest.mark.parametrize("cache_gb", [1, 0])
def test_a_corrupt_object_is_named_with_its_offset(store, cache_gb):
    content = bytearray(store.objects["data/00001.bin"])
    content[5 * PART + 7] ^= 1
    store.objects["data/00001.bin"] = bytes(content)
    with pytest.raises(
        ConfigError, match=rf"{URL}/00001.bin: at byte {5 * PART}: .*upload it again"
    ):
        source = build(URL, cache_gb=cache_gb)
        source.read(np.arange(source.size))


def test_a_transfer_that_is_damaged_is_repeated(folder, store):
    """Every object is damaged when it is read for the first time."""
    good = dict(store.objects)
    for name in good:
        if name.endswith(".bin"):
            store.objects[name] = bytes([good[name][0] ^ 1]) + good[name][1:]

    def repair(name, range):
        if range and range.startswith("bytes=0-"):
            store.objects[name] = good[name]  # for the next read: this one has its object

    store.before_read = repair
    assert_equal_samples(build(folder), build(URL))
    assert len(bin_reads(store)) == 3 + len({*bin_reads(store)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("00001.bin", None, "00001.bin is missing, but manifest.json lists it"),
        ("00002.idx", None, "00002.idx is missing, but manifest.json lists it"),
        ("00002.bin", 1000, "00002.bin: is shorter than manifest.json lists"),
        ("00002.idx", 100, r"00002.idx: is shorter than manifest.json lists"),
        ("token_bytes.npy", 50, "token_bytes.npy: cannot be read"),
        ("manifest.json", 50, "manifest.json: cannot be read|manifest.json cannot be read"),
        ("manifest.json", None, f"data.path={URL}: has no manifest.json; give the bucket"),
    ],
)
def test_a_missing_or_truncated_object_is_named(store, name, change, message):
    content = store.objects.pop(f"data/{name}")
    if change:
        store.objects[f"data/{name}"] = content[:change]
    with pytest.raises(ConfigError, match=message):
        source = build(URL)
        source.read(np.arange(source.size))


def test_an_older_manifest_without_checksums_is_read_with_a_warning(folder, store):
    assert build(URL).warnings == []
    manifest = json.loads(store.objects["data/manifest.json"])
    for shard in manifest["shards"]:
        del shard["files"]["bin"]["crc32"], shard["files"]["bin"]["part_bytes"]
    store.objects["data/manifest.json"] = json.dumps(manifest).encode()
    source = build(URL)
    assert len(source.warnings) == 1 and "without checksums of parts" in source.warnings[0]
    assert_equal_samples(build(folder), source)


def test_the_checksums_of_a_manifest_are_those_of_the_parts_of_a_shard(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        content = (folder / f"{shard['name']}.bin").read_bytes()
        parts = [content[at : at + PART] for at in range(0, len(content), PART)]
        expected = "".join(f"{zlib.crc32(part):08x}" for part in parts)
        assert shard["files"]["bin"]["crc32"] == expected


# ---- the bound, and disks that cannot be written ----


@pytest.mark.parametrize("num_blocks", [1, 6, 100])
def test_the_cache_stays_within_its_bound(folder, store, tmp_path, num_blocks):
    small = cached_bytes_of_folder(store)
    limit = small + num_blocks * (BLOCK + 4) + 10
    source = build(URL, cache_gb=limit / 1e9)
    source.read(np.arange(1000))
    assert cached_bytes(tmp_path) <= limit
    assert 0 < len(blocks(tmp_path)) <= num_blocks


def cached_bytes_of_folder(store):
    """Returns the size of the files that are in the cache whatever its bound."""
    return sum(len(content) for name, content in store.objects.items() if not name.endswith(".bin"))


def test_the_blocks_that_were_not_used_for_longest_make_room(folder, store, tmp_path, monkeypatch):
    limit = cached_bytes_of_folder(store) + 25 * (BLOCK + 4)
    old = tmp_path / "cache" / "meshtrain" / "data" / "blocks" / ("f" * 64)
    old.mkdir(parents=True)
    for number in range(20):
        (old / str(number)).write_bytes(bytes(BLOCK + 4))
        os.utime(old / str(number), (1e9 + number, 1e9 + number))
    source = build(URL, cache_gb=limit / 1e9, heldout=0.0)
    source.read(np.arange(source.size))
    assert cached_bytes(tmp_path) <= limit
    left = sorted(int(path.name) for path in old.iterdir())
    assert left and left == list(range(20 - len(left), 20))
    assert len(blocks(tmp_path)) - len(left) == 16


def test_a_folder_that_cannot_be_written_costs_a_line(folder, store, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source = build(URL)
    assert_equal_samples(build(folder), source)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Not a directory; nothing is cached" in line and "XDG_CACHE_HOME" in line


def test_a_disk_that_becomes_full_costs_a_line(folder, store, tmp_path, monkeypatch, capsys):
    replace = os.replace

    def full_after_some(new, path):
        if len(blocks(tmp_path)) > 3:
            raise OSError(28, "No space left on device")
        replace(new, path)

    monkeypatch.setattr(remote_cache.os, "replace", full_after_some)
    assert_equal_samples(build(folder), build(URL))
    assert not [*(tmp_path / "cache").rglob("*.new")]
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device; nothing is cached" in line


# ---- a store that is slow, away or silent ----


def test_a_store_with_errors_and_outages_gives_the_same_samples(folder, store, monkeypatch):
    """One request in four fails; then the store is away for a while."""
    numbers = iter(range(10**9))
    away = threading.Event()

    def unreliable(name, range):
        if away.is_set() or next(numbers) % 4 == 1:
            return HTTPStatus.SERVICE_UNAVAILABLE

    store.before_read = unreliable
    source = build(URL, cache_gb=0.0)
    source.read(np.arange(20))
    away.set()
    threading.Timer(1.0, away.clear).start()
    assert_equal_samples(build(folder), source, count=80)


def test_a_store_that_stays_away_ends_with_one_line(store, monkeypatch, capsys):
    source = build(URL)
    source.read(np.arange(4))
    store.before_read = lambda name, range: HTTPStatus.SERVICE_UNAVAILABLE
    monkeypatch.setattr(remote_store, "PATIENCE", 1.0)
    shutil.rmtree(remote_cache.cache_folder() / "blocks")
    with pytest.raises(TransientError, match=rf"{URL}/0000\d.bin: no answer .* check the address"):
        source.read(np.arange(source.size))


@pytest.mark.slow
def test_a_run_whose_store_goes_away_saves_its_state_and_resumes(
    folder, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote_store, "PATIENCE", 1.0)
    train(config_of(folder, steps=30), workdir=tmp_path / "straight")
    c = config_of(URL, steps=30)
    c.data.cache_gb = 0.0  # each row is a request

    def away_after_some(name, range):
        return HTTPStatus.SERVICE_UNAVAILABLE if len(losses_so_far(tmp_path)) > 3 else None

    monkeypatch.setattr(loader, "PREFETCHED", 2)
    store.before_read = away_after_some
    with pytest.raises(TransientError, match="no answer from the store"):
        train(c, workdir=tmp_path / "run")
    saved = [
        int(path.name)
        for path in (tmp_path / "run" / "checkpoints").iterdir()
        if path.name.isdecimal()
    ]
    assert saved and 3 < max(saved) < 30
    store.before_read = lambda name, range: None
    train(c, workdir=tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def losses_so_far(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    return losses(tmp_path / "run") if file.exists() else []


@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.UNAUTHORIZED])
def test_missing_permission_is_named_at_once(store, status):
    store.before_read = lambda name, range: status
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID.*AWS_NO_SIGN_REQUEST"):
        build(URL)


def test_anonymous_reads_are_not_signed(store, monkeypatch):
    monkeypatch.setenv("AWS_NO_SIGN_REQUEST", "1")
    spec = object_store.spec(object_store.scratch_folder(URL))
    assert spec["context"]["aws_credentials"] == {"type": "anonymous"}
    assert build(URL).size


# ---- before anything is compiled ----


def check(path, capsys):
    code = app.main("train", ["--config=quickstart", f"--config.data.path={path}"])
    return code, capsys.readouterr().err.splitlines()


def test_a_url_without_prepared_data_is_reported_at_once(store, capsys):
    for url in ("s3://bucket/other", "s3://bucket/data/more", "s3://bucket"):
        code, lines = check(url, capsys)
        assert code == 2 and len(lines) == 1
        assert lines[0].startswith(f"data.path={url}: has no manifest.json")


def test_a_store_that_is_not_there_is_reported_at_once(store, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(remote_store, "OPEN_PATIENCE", 0.5)
    code, lines = check(URL, capsys)
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith(f"data.path={URL}: no answer from the store")


def test_a_workdir_in_the_data_is_rejected(store, tmp_path):
    for workdir in (URL, f"{URL}/run"):
        with pytest.raises(ConfigError, match="keep the run and its data in separate folders"):
            train(config_of(URL), workdir=workdir)
