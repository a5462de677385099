"""`checkpoint.export`: model folders of a run, in the background, complete or not there."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshtrain.checkpoint import export, manifest
from meshtrain.cli import app
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.huggingface import convert, files
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT


def config_of(**settings):
    c = tiny_config()
    c.train.steps, c.eval.batches, c.mesh.data = 6, 0, 8
    c.checkpoint.update(export="hf", **settings)
    return c


def events(workdir, name):
    rows = map(json.loads, (workdir / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == name]


def tensors(folder):
    return {name: one.read().tobytes() for name, one in files.tensors(folder).items()}


def test_a_run_exports_its_checkpoints_and_keeps_them_until_then(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    seen = []
    plain = export.Exporter._export

    def slow(self, step):
        # The run has ended its steps before the first export begins.
        while not (workdir / "checkpoints" / "4").is_dir():
            time.sleep(0.05)
        seen.append(sorted(os.listdir(workdir / "checkpoints")))
        return plain(self, step)

    monkeypatch.setattr(export.Exporter, "_export", slow)
    c = config_of(export_every=2, keep_last=1)
    c.train.steps = 4
    train(c, workdir=workdir)
    assert sorted(os.listdir(workdir / "model")) == ["2", "4"]
    assert seen[0] == ["2", "4"]  # keep_last is 1
    assert os.listdir(workdir / "checkpoints") == ["4"]
    assert [row["step"] for row in events(workdir, "export")] == [2, 4]
    assert app.main("convert", [str(workdir), str(tmp_path / "converted")]) == 0
    for name in ("2", "4"):
        config = json.loads((workdir / "model" / name / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
    assert tensors(workdir / "model" / "4") == tensors(tmp_path / "converted")
    assert tensors(workdir / "model" / "2") != tensors(workdir / "model" / "4")
    card = (workdir / "model" / "4" / "README.md").read_text()
    assert "# LlamaForCausalLM, step 4" in card and "| steps | 4 of 4 |" in card
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")


def test_a_run_that_resumes_removes_what_is_half_done_and_exports_what_is_missing(tmp_path):
    workdir = tmp_path / "run"
    c = config_of(export_every=3)
    c.checkpoint.export = ""
    c.checkpoint.export_every = 0
    c.checkpoint.every = 3
    train(c, workdir=workdir)
    half = workdir / "model" / "3.partial"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    c.checkpoint.update(export="hf", export_every=3)
    train(c, workdir=workdir)
    assert sorted(os.listdir(workdir / "model")) == ["3", "6"]
    assert tensors(workdir / "model" / "3") != tensors(workdir / "model" / "6")
    # Again, there is nothing left to do.
    before = (workdir / "model" / "3").stat().st_mtime_ns
    train(c, workdir=workdir)
    assert (workdir / "model" / "3").stat().st_mtime_ns == before
    assert len(events(workdir, "export")) == 2


def test_an_export_that_fails_ends_no_run(tmp_path, capsys):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "model").write_text("a file where the folder is to be")
    train(config_of(), workdir=workdir)
    (row,) = events(workdir, "export_failed")
    assert row["step"] == 6 and row["error"]
    assert "step 6 could not be exported" in capsys.readouterr().out
    assert len(events(workdir, "end")) == 1


def test_an_export_replaces_that_of_a_checkpoint_that_was_lost(tmp_path):
    workdir = tmp_path / "run"
    old = workdir / "model" / "6"
    old.mkdir(parents=True)
    (old / "config.json").write_text("{}")
    train(config_of(export_every=6), workdir=workdir)
    assert "architectures" in json.loads((old / "config.json").read_text())
    assert os.listdir(workdir / "model") == ["6"]


def test_an_export_in_progress_ends_with_the_run(tmp_path, monkeypatch):
    """A run that stops early does not wait, and leaves no half folder."""
    workdir = tmp_path / "run"
    monkeypatch.setattr(export, "START", "import time\ntime.sleep(600)\n")
    exporter = export.Exporter(
        workdir,
        parse(config_of(export_every=2), num_devices=8).checkpoint,
        event=lambda *args, **fields: None,
        log=lambda text: None,
    )
    half = workdir / "model" / "2.partial"
    half.mkdir(parents=True)
    exporter.add(2)
    while exporter._process is None:
        time.sleep(0.01)
    exporter.close()
    assert exporter._process.returncode == -signal.SIGKILL
    assert os.listdir(workdir / "model") == []


@pytest.mark.parametrize(
    ("change", "workdir", "fault"),
    [
        ({}, None, "checkpoint.export=hf: is written to WORKDIR/model; add --workdir=DIR"),
        ({}, "gs://bucket/run", "--workdir=gs://bucket/run is an object store"),
        ({"norm": "layer"}, "run", "no supported architecture of transformers computes"),
    ],
)
def test_what_cannot_be_exported_is_one_line_at_the_start(change, workdir, fault, tmp_path):
    c = config_of()
    c.model.update(change)
    place = tmp_path / "run" if workdir == "run" else workdir
    faults = convert.export_faults(parse(c, num_devices=8), place)
    assert len(faults) == 1 and fault in faults[0]
    if workdir == "run":
        with pytest.raises(ConfigError, match="checkpoint.export=hf: no supported"):
            train(c, workdir=place)
        assert not place.exists()


def test_wrong_settings_are_named():
    c = tiny_config()
    c.checkpoint.update(export="gguf", export_every=-1)
    with pytest.raises(ConfigError) as caught:
        parse(c, num_devices=8)
    assert any("checkpoint.export='gguf': use hf" in fault for fault in caught.value.faults)
    c.checkpoint.update(export="", export_every=5)
    with pytest.raises(ConfigError, match="checkpoint.export_every=5: nothing is exported"):
        parse(c, num_devices=8)


KILLED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
from meshtrain.train import train
from tests.lib.configs import tiny_config
c = tiny_config()
c.train.steps, c.eval.batches = 100_000, 0
c.checkpoint.update(export="hf", export_every=20, keep_last=2)
train(c, workdir=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.5, 4.0])
def test_a_kill_leaves_no_folder_that_is_half_written(seconds, tmp_path):
    """At any moment of an export: every folder without .partial in its name is complete."""
    workdir = tmp_path / "run"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(workdir)], env=environ)
    try:
        while not [*workdir.glob("model/*")]:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()
    time.sleep(0.5)  # its export ends with it
    sizes = {path: path.stat().st_size for path in workdir.rglob("*.partial/*")}
    time.sleep(0.5)
    assert sizes == {path: path.stat().st_size for path in workdir.rglob("*.partial/*")}
    for folder in workdir.glob("model/*"):
        if not folder.name.endswith(".partial"):
            names = {path.name for path in folder.iterdir()}
            assert {"config.json", "model.safetensors", "README.md"} <= names
            assert all(np.isfinite(one.read()).all() for one in files.tensors(folder).values())


# ---- killed while it writes ----

EXPORTED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
from meshtrain.train import train
from tests.lib.configs import tiny_config
c = tiny_config()
c.train.steps, c.eval.batches = 6, 0
c.checkpoint.update(export="hf", export_every=2, keep_last=1)
train(c, workdir=sys.argv[1])
"""

# In the process of an export: counts the moments at which it changes its folder, in files of their
# own, and stops before the one with the number in HOLD_AT.
SITE = """
import builtins, os, sys, time
folder = os.environ["HOLD_FOLDER"]
moments = 0
def moment():
    global moments
    if str(moments) == os.environ.get("HOLD_AT") and not os.listdir(folder):
        with plain_open(f"{folder}/{os.getpid()}", "w"):
            pass
        time.sleep(600)
    moments += 1
def audit(event, args):
    if event == "os.rename" and str(args[0]).endswith(".partial"):
        moment()
        if "HOLD_AT" not in os.environ:
            plain_open(f"{folder}/{moments}", "w").close()
    if event == "open" and ".partial" in str(args[0]) and set(str(args[1])) & set("wx"):
        moment()
class InHalves:
    def __init__(self, file):
        self.file = file
    def write(self, data):
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        moment()
        self.file.write(data[half:])
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *args):
        self.file.close()
plain_open = builtins.open
def open_in_halves(path, mode="r", *args, **options):
    file = plain_open(path, mode, *args, **options)
    is_export = mode == "wb" and ".partial" in str(path)
    return InHalves(file) if is_export else file
if "convert" in sys.orig_argv:
    sys.addaudithook(audit)
    builtins.open = open_in_halves
"""


def start_run(workdir, held, site, **environ):
    """Starts the run of EXPORTED, whose exports write names into the folder `held`."""
    held.mkdir(exist_ok=True)
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    environ = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "HOLD_FOLDER": str(held),
        **environ,
    }
    return subprocess.Popen([sys.executable, "-c", EXPORTED, str(workdir)], env=environ)


def wait_until(condition, process=None, seconds=900):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.02)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_a_kill_while_an_export_is_written_leaves_no_folder_and_nothing_is_lost(tmp_path):
    """At moments that are drawn, and before the last change: the run resumes and exports all."""
    whole = tmp_path / "whole"
    assert start_run(whole, tmp_path / "counts", tmp_path / "site").wait() == 0
    (num_moments,) = {int(name) for name in os.listdir(tmp_path / "counts")}
    assert num_moments > 20  # also one within each write of a tensor
    drawn = random.sample(range(num_moments - 1), 3)
    print("killed before the changes", drawn)

    workdir = tmp_path / "run"
    for place in [*drawn, num_moments - 1]:
        held = tmp_path / f"held-{place}"
        process = start_run(workdir, held, tmp_path / "site", HOLD_AT=str(place))
        try:
            wait_until(lambda held=held: os.listdir(held), process)
        finally:
            process.kill()
            process.wait()
        (pid,) = map(int, os.listdir(held))
        wait_until(lambda pid=pid: not is_alive(pid))  # its export ends with it
        (partial,) = os.listdir(workdir / "model")
        assert partial == "2.partial"
        # Without config.json it is no model; that is written last.
        names = os.listdir(workdir / "model" / partial)
        assert ("config.json" in names) == (place == num_moments - 1)
    assert start_run(workdir, tmp_path / "no", tmp_path / "site").wait() == 0
    assert sorted(os.listdir(workdir / "model")) == ["2", "4", "6"]
    assert [row["step"] for row in events(workdir, "export")] == [2, 4, 6]
    assert os.listdir(workdir / "checkpoints") == ["6"]
    for name in ("2", "4", "6"):
        here, there = workdir / "model" / name, whole / "model" / name
        assert sorted(os.listdir(here)) == sorted(os.listdir(there))
        assert tensors(here) == tensors(there)
        assert (here / "config.json").read_bytes() == (there / "config.json").read_bytes()


# ---- of several processes ----

PROCESSES = """
import sys
import jax
sys.path[:0] = ["."]
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
from meshtrain.cluster import distributed
from meshtrain.train import train
from tests.lib.configs import tiny_config
distributed.initialize()
c = tiny_config()
c.train.steps, c.eval.batches = 4, 0
c.mesh.update(data=2, fsdp=2)
c.checkpoint.update(export="hf", export_every=2, keep_last=2)
train(c, workdir=sys.argv[1])
"""


def run_processes(workdir, num_processes):
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if num_processes > 1:
        port = 20000 + os.getpid() % 20000
        environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        environ["JAX_NUM_PROCESSES"] = str(num_processes)
    command = [sys.executable, "-c", PROCESSES, str(workdir), str(4 // num_processes)]
    processes = []
    for rank in range(num_processes):
        own = {"JAX_PROCESS_ID": str(rank)} if num_processes > 1 else {}
        processes.append(subprocess.Popen(command, cwd=ROOT, env={**environ, **own}))
    try:
        assert [process.wait(timeout=900) for process in processes] == [0] * num_processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_export_what_one_process_writes(tmp_path):
    """Each holds half of the shards: the folders are those of a conversion by one process."""
    workdir = tmp_path / "two"
    run_processes(workdir, 2)
    assert sorted(os.listdir(workdir / "model")) == ["2", "4"]
    assert [row["step"] for row in events(workdir, "export")] == [2, 4]
    for name in ("2", "4"):
        saved = manifest.read(workdir / "checkpoints" / name)
        assert saved.processes == 2 and saved.mesh["data"] == saved.mesh["fsdp"] == 2
        alone = tmp_path / name
        assert app.main("convert", [str(workdir / "checkpoints" / name), str(alone)]) == 0
        exported = workdir / "model" / name
        assert sorted(os.listdir(exported)) == sorted(os.listdir(alone))
        for path in alone.iterdir():
            assert (exported / path.name).read_bytes() == path.read_bytes(), path.name

    # And those of a run of one process with the same mesh.
    run_processes(tmp_path / "one", 1)
    for name in ("2", "4"):
        here, there = workdir / "model" / name, tmp_path / "one" / "model" / name
        assert tensors(here) == tensors(there)
        assert (here / "config.json").read_bytes() == (there / "config.json").read_bytes()


TRANSFORMERS = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokens = torch.arange(24).reshape(2, 12) * 7 % 61
print(float(model(tokens, labels=tokens).loss))
"""


@pytest.mark.slow
def test_transformers_reads_an_export(tmp_path):
    python = os.environ.get("PYTHON_WITH_PEFT", sys.executable)
    command = [python, "-c", "import torch, transformers"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("torch and transformers are not installed; PYTHON_WITH_PEFT names a Python")
    train(config_of(), workdir=tmp_path / "run")
    command = [python, "-c", TRANSFORMERS, str(tmp_path / "run" / "model" / "6")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout) < 10
