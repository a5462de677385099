"""Memory of devices and of the process: in the rows, and as a profile of one step."""

import gzip
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.monitor import memory
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT
from tests.lib.processes import free_port
from tests.lib.rows import events

MIB = 1 << 20


def settings(*, steps=3, profile_step=0):
    c = tiny_config()
    c.train.update(steps=steps, log_every=1)
    c.monitor.memory_profile_step = profile_step
    c.eval.batches = 0
    return c


def profiles(workdir):
    """Returns the profiles of a run, uncompressed, by path."""
    files = sorted((workdir / "memory").rglob("*"))
    return {
        str(file.relative_to(workdir)): gzip.decompress(file.read_bytes())
        for file in files
        if file.is_file()
    }


def test_the_peak_in_use_is_that_of_the_fullest_device(monkeypatch):
    assert memory.peak_bytes_in_use() is None  # CPU devices report nothing
    reports = [{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, None]
    devices = [SimpleNamespace(memory_stats=lambda one=one: one) for one in reports]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory.peak_bytes_in_use() == 7


def test_the_memory_of_the_process_is_resident_and_its_peak_stays():
    before = memory.of_process()["host_memory"]
    held = b"x" * (256 * MIB)  # each page is written
    during = memory.of_process()
    del held
    after = memory.of_process()
    assert during["host_memory"] - before > 200 * MIB
    assert during["host_memory"] - after["host_memory"] > 200 * MIB
    # Not exact: the kernel adds the pages of threads now and then.
    assert after["peak_host_memory"] > during["host_memory"] - 8 * MIB
    # Of resident memory: that of the address space is larger.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert after["peak_host_memory"] < most + 8 * MIB


def test_a_system_that_reports_no_memory_has_no_such_metrics(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PROCESS_STATUS", tmp_path / "missing")
    assert memory.of_process() == {}
    (tmp_path / "missing").write_text("Name: python\nVmRSS:\t     12 kB\n")
    assert memory.of_process() == {"host_memory": 12 * 1024}


def test_a_row_has_the_memory_of_the_process():
    rows = []
    train(settings(steps=2), on_metrics=rows.append)
    for row in rows:
        assert 50 * MIB < row["host_memory"] <= row["peak_host_memory"] < 1 << 40


@pytest.mark.parametrize("step", [1, 3])
def test_the_profile_is_that_of_one_step(step, tmp_path, capsys):
    train(settings(profile_step=step), workdir=tmp_path)
    (path,), (profile,) = zip(*profiles(tmp_path).items(), strict=True)
    assert path == f"memory/{step}/rank-0.pprof"
    # Labels of buffers, and the functions that made them.
    assert b"buffer" in profile and b"_to_devices" in profile
    assert f"memory profile of step {step} in " in capsys.readouterr().out
    (event,) = events(tmp_path, "memory_profile")
    assert (event["step"], event["path"]) == (step, path)


def test_a_run_that_has_passed_the_step_writes_no_other_profile(tmp_path):
    train(settings(steps=2, profile_step=2), workdir=tmp_path)
    file = tmp_path / "memory" / "2" / "rank-0.pprof"
    file.write_bytes(b"of the step")
    train(settings(steps=3, profile_step=2), workdir=tmp_path)
    assert file.read_bytes() == b"of the step"


def test_a_run_that_has_passed_the_step_without_a_profile_says_so(tmp_path, capsys):
    train(settings(steps=2, profile_step=0), workdir=tmp_path)
    train(settings(steps=3, profile_step=2), workdir=tmp_path)
    assert "no memory profile: the run starts at step 2, after step 2" in capsys.readouterr().out


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "memory").touch()
    assert train(settings(profile_step=1), workdir=tmp_path).step == 3
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "memory profile" in line]
    assert line.startswith("no memory profile of step 1: ") and "rank-0.pprof" in line


def test_a_profile_without_its_step_or_place_is_a_mistake():
    c = settings(profile_step=4)
    with pytest.raises(ConfigError) as found:
        train(c)
    assert [*found.value.faults] == [
        "monitor.memory_profile_step=4: the run has train.steps=3; use one of 1 to 3, or 0 for no "
        "profile",
        "monitor.memory_profile_step=4: there is no folder for its file; use --workdir",
    ]
    c.monitor.memory_profile_step = -1
    with pytest.raises(ConfigError, match="monitor.memory_profile_step=-1: use 0 or more"):
        parse(c, num_devices=8)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_writes_its_own_profile(tmp_path):
    program = """
import sys, jax
from meshtrain.cluster import distributed
from meshtrain.train import train
from tests.lib.configs import tiny_config
jax.config.update("jax_num_cpu_devices", 4)
distributed.initialize()
c = tiny_config()
c.train.steps = c.monitor.memory_profile_step = 2
train(c, workdir=sys.argv[1])
"""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "2"}
    environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    environ["PYTHONPATH"] = str(ROOT)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**environ, "JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    assert [*profiles(tmp_path)] == ["memory/2/rank-0.pprof", "memory/2/rank-1.pprof"]
    assert json.dumps("memory/2/rank-0.pprof") in (tmp_path / "events.jsonl").read_text()
