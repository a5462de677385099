"""Runs, in processes of their own, whose store falls silent, or that are killed while they read."""

import os
import subprocess
import sys
import threading
import time

import pytest

from meshtrain.cluster import progress
from tests.lib import prepare, s3_server, store_servers
from tests.lib.paths import ROOT
from tests.lib.rows import losses, newest_step

pytestmark = pytest.mark.slow

URL = "s3://bucket/data"
STEPS = 40
# Arguments: workdir, path of the data, the data axis of 4 devices, seconds of patience.
RUN = f"""
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from meshtrain.data import loader, remote_store
from meshtrain.train import train
from tests.lib.configs import quick

workdir, path, data, patience = sys.argv[1:]
remote_store.PATIENCE = float(patience)
loader.PREFETCHED = 2
c = quick(steps={STEPS})
c.mesh.update(data=int(data), fsdp=4 // int(data))
c.data.update(build="meshtrain.data.tokens:build", path=path, cache_gb=0.0, packing="best_fit")
c.model.vocab_size = 256
c.checkpoint.every = 5
train(c, workdir=workdir)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("prepared")
    prepare.write_jsonl(place / "in", [prepare.prose(seed, 500) for seed in range(200)])
    arguments = ["--tokenizer=bytes", "--shard_tokens=180000"]
    assert prepare.run(place / "in", f"--output={place / 'out'}", *arguments) == 0
    return place / "out"


@pytest.fixture
def store(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A request without a byte for so long is repeated; 30 s by default.
    monkeypatch.setenv("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "2")
    with s3_server.running() as server:
        store_servers.set_address(monkeypatch, server.address)
        files = [path for path in folder.iterdir() if ".best_fit" not in path.name]
        server.objects = {f"data/{path.name}": path.read_bytes() for path in files}
        yield server


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """Losses of a run on the disk."""
    workdir = tmp_path_factory.mktemp("straight")
    assert finish(start(workdir, folder)) == (0, "")
    return losses(workdir)


def start(workdir, path, data=4, patience=120.0, **variables):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **variables}
    arguments = [str(workdir), str(path), str(data), str(patience)]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], env=environ, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def wait_for_step(process, workdir, step):
    while newest_step(workdir) < step:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@pytest.mark.parametrize("step", [3, 11, 22])
def test_a_killed_run_on_a_store_resumes_on_another_mesh(straight, store, tmp_path, step):
    """No step is lost or read twice, whatever was being fetched."""
    store.before_read = lambda name, range: time.sleep(0.05)
    process = start(tmp_path / "run", URL)
    try:
        wait_for_step(process, tmp_path / "run", step)
    finally:
        process.kill()
        process.communicate()
    assert finish(start(tmp_path / "run", URL, data=1))[0] == 0
    resumed = losses(tmp_path / "run")
    assert resumed.keys() == straight.keys()
    # The other mesh sums in another order.
    assert resumed == pytest.approx(straight, rel=1e-5)


def test_a_run_waits_for_a_silent_store(straight, store, tmp_path):
    """Requests are taken and never answered for a while; the progress page names the data."""
    silent = threading.Event()
    speak = threading.Event()

    def before_read(name, range):
        if silent.is_set():
            speak.wait(60)

    store.before_read = before_read
    page = progress.ProgressPage.create(tmp_path / "page")
    process = start(tmp_path / "run", URL, **{progress.VARIABLE: str(tmp_path / "page")})
    try:
        wait_for_step(process, tmp_path / "run", 5)
        silent.set()
        time.sleep(6)  # three times the limit of a request
        phase = page.phase
        silent.clear()
        code, errors = finish(process)
    finally:
        speak.set()
        process.kill()
    assert phase == "data"
    assert code == 0
    assert f"data: {URL}: " in errors and "answers again" in errors
    assert losses(tmp_path / "run") == straight


def test_a_run_whose_store_stays_silent_saves_its_state_and_resumes(straight, store, tmp_path):
    speak = threading.Event()
    silent = threading.Event()

    def before_read(name, range):
        if silent.is_set():
            speak.wait(120)

    store.before_read = before_read
    process = start(tmp_path / "run", URL, patience=3.0)
    try:
        wait_for_step(process, tmp_path / "run", 7)
        silent.set()
        code, errors = finish(process)
    finally:
        speak.set()
        process.kill()
    assert code != 0
    assert "no answer from the store" in errors
    silent.clear()
    last = newest_step(tmp_path / "run")
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")]
    assert max(saved) == last + 1
    assert finish(start(tmp_path / "run", URL))[0] == 0
    assert losses(tmp_path / "run") == straight
