"""In the workers of Ray Train: ranks from Ray, with a stand-in for it and with Ray itself."""

import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from meshtrain.cluster import ray_worker, runtime
from meshtrain.errors import ConfigError
from tests.lib.paths import ROOT
from tests.lib.rows import events, losses

EXAMPLE = ROOT / "docs" / "examples" / "ray_train.py"


# ---- with a stand-in ----


@pytest.fixture
def ray_train(monkeypatch):
    """Returns a function that makes this process the worker `rank` of `size`, or none."""

    def install(
        rank=None,
        size=2,
        host="10.0.0.1",
        address="10.0.0.1:1234",
        error=RuntimeError,
        experiment="run",
    ):
        def get_context():
            if rank is None:
                raise error("cannot be used outside of a Ray Train training function")
            return types.SimpleNamespace(
                get_world_rank=lambda: rank,
                get_world_size=lambda: size,
                get_experiment_name=lambda: experiment,
            )

        sent = []

        def broadcast(data):
            sent.append(data)
            return data if rank == 0 else address

        modules = {name: types.ModuleType(name) for name in ("ray", "ray.train")}
        modules["ray.train.collective"] = types.ModuleType("ray.train.collective")
        modules["ray"].train = modules["ray.train"]
        modules["ray"].util = types.SimpleNamespace(get_node_ip_address=lambda: host)
        modules["ray.train"].get_context = get_context
        modules["ray.train"].collective = modules["ray.train.collective"]
        modules["ray.train.collective"].broadcast_from_rank_zero = broadcast
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return sent

    return install


def test_without_ray_there_are_no_flags(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert ray_worker.flags() is None


@pytest.mark.parametrize("error", [RuntimeError, DeprecationWarning])
def test_the_driver_and_a_trial_of_tune_are_no_workers(error, ray_train):
    ray_train(error=error)
    assert ray_worker.flags() is None


def without_collective(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)  # its import is an error


def test_the_driver_of_an_older_ray_is_no_worker(ray_train, monkeypatch):
    # Its context outside of workers, which has no name.
    ray_train(rank=0, size=1, experiment=None)
    assert ray_worker.flags() is None
    without_collective(monkeypatch)
    assert ray_worker.flags() is None
    ray_train(error=RuntimeError)
    without_collective(monkeypatch)
    assert ray_worker.flags() is None


def test_a_worker_of_an_older_ray_names_the_extra(ray_train, monkeypatch):
    ray_train(rank=1)
    without_collective(monkeypatch)
    with pytest.raises(ConfigError, match=r"ray.train.collective is missing; .*setup.sh ray"):
        ray_worker.flags()


def test_rank_0_chooses_an_address_and_the_others_receive_it(ray_train):
    sent = ray_train(rank=0, size=3)
    address, *ranks = ray_worker.flags()
    host, port = address.split(":")
    assert host == "10.0.0.1" and 0 < int(port) < 65536
    assert ranks == [3, 0] and sent == [address]

    sent = ray_train(rank=2, size=3)
    assert ray_worker.flags() == ("10.0.0.1:1234", 3, 2) and sent == [None]


def test_an_ipv6_address_is_in_brackets(ray_train):
    ray_train(rank=0, host="fd00::1")
    address, *_ = ray_worker.flags()
    assert address.startswith("[fd00::1]:")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), ("10.0.0.1:1234", 2, 1)), (("10.0.0.9:1", 3, 2), ("10.0.0.9:1", 3, 2))],
    ids=["from Ray", "arguments"],
)
def test_ray_comes_before_variables_and_after_arguments(
    arguments, expected, ray_train, monkeypatch
):
    ray_train(rank=1)
    # A raylet that srun has started: the worker has the variables of the step.
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "5")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node1")
    joined = []
    monkeypatch.setattr(runtime.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(runtime, "_end_in_one_line", lambda: None)
    monkeypatch.setattr(runtime, "_join_and_setup", lambda flags, seconds: joined.append(flags))
    runtime.initialize(*arguments)
    assert joined == [expected]


def test_the_only_worker_runs_alone(ray_train, monkeypatch):
    ray_train(rank=0, size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(runtime, "_join_and_setup", None)  # would be an error
    runtime.initialize()


# ---- with Ray ----

SETTINGS = [
    "--config.train.steps=6",
    "--config.train.global_batch=4",
    "--config.train.log_every=1",
    "--config.checkpoint.every=2",
    "--config.mesh.data=-1",
    "--config.model.num_layers=1",
    "--config.eval.batches=1",
]


def run(script, *arguments):
    """Returns the exit code and the output of a script that starts Ray on this machine."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4}),  # two workers, on any machine
    }
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns the losses by step of one process, with the Python of the tests."""
    pytest.importorskip("ray.train", reason="needs Ray: bash launch/setup.sh ray")
    workdir = tmp_path_factory.mktemp("alone")
    command = ["-m", "meshtrain", "train", "--config=quickstart", f"--workdir={workdir}"]
    subprocess.run([sys.executable, *command, *SETTINGS], check=True, timeout=500, cwd=ROOT)
    return losses(workdir)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("joined_by", ["meshtrain", "Ray"])
def test_two_workers_have_the_losses_of_one_process(joined_by, expected, tmp_path):
    text = EXAMPLE.read_text()
    if joined_by == "Ray":
        # As on GPUs, with the devices of JAX_PLATFORMS.
        text = text.replace("import JaxTrainer", "import JaxConfig, JaxTrainer")
        text = text.replace(
            "        run_config=",
            "        jax_config=JaxConfig(use_gpu=True),\n        run_config=",
        )
    script = tmp_path / "script.py"
    script.write_text(text)
    workdir = tmp_path / "run"
    code, output = run(script, f"--workdir={workdir}", *SETTINGS)
    assert code == 0, output
    assert ("Initialized JAX distributed on CPU" in output) == (joined_by == "Ray")
    assert "data 2 · 2 cpu" in output and "{'step': 6, 'eval_loss': " in output
    found = losses(workdir)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_that_ray_restarts_resume(expected, tmp_path):
    text = EXAMPLE.read_text()
    kill = """
def kill_once(row):
    import os, pathlib, signal
    is_saved = pathlib.Path(SAVED).exists()  # a save ends only some steps later
    if row.get("step", 0) >= 3 and is_saved and not pathlib.Path(FLAG).exists():
        pathlib.Path(FLAG).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main():"""
    workdir = tmp_path / "run"
    saved = workdir / "checkpoints" / "2" / "MANIFEST.json"
    paths = f"\nFLAG, SAVED = {str(tmp_path / 'flag')!r}, {str(saved)!r}\n"
    text = text.replace("\ndef main():", f"{paths}{kill}")
    text = text.replace(
        'workdir=settings["workdir"])', 'workdir=settings["workdir"], on_metrics=kill_once)'
    )
    script = tmp_path / "script.py"
    script.write_text(text)
    code, output = run(script, f"--workdir={workdir}", "--max_failures=1", *SETTINGS)
    assert code == 0, output
    assert re.search(r"restored step [24]\b", output) and len(events(workdir, "end")) == 1
    found = losses(workdir)
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)
