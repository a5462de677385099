"""The flags of `meshtrain launch`: used or rejected; and what it leaves in a workdir.

No process imports jax.
"""

import subprocess
import sys

import pytest

from meshtrain.cli import app
from meshtrain.errors import ConfigError
from meshtrain.supervise import launch as launch_module
from meshtrain.supervise import restart_policy
from meshtrain.supervise.launch import launch
from meshtrain.supervise.restart_policy import RestartBudget, Settings
from tests.lib.paths import ROOT

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "a,b",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def started(monkeypatch):
    """Returns the settings and commands of the supervisors that are started.

    Nothing else happens.
    """
    found = []

    class Supervisor:
        def __init__(self, settings, *, workdir, secret):
            self.settings = settings

        def run(self, command, **options):
            found.append((self.settings, command))
            return 0

    monkeypatch.setattr(launch_module, "Supervisor", Supervisor)
    return found


def run(arguments, capsys):
    """Returns the exit code and stderr of `meshtrain launch ARGUMENTS`."""
    code = app.main("launch", arguments.split())
    return code, capsys.readouterr().err


def test_the_variables_that_make_a_host_one_of_several_are_named(started, monkeypatch, capsys):
    """They may be stale: the user has set none of the flags in the messages that follow."""
    variables = "WORLD_SIZE=2 RANK=1 MASTER_ADDR=old MASTER_PORT=29500"
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    monkeypatch.setenv("MESHTRAIN_SECRET", "s" * 32)
    assert run("-- --config=quickstart", capsys) == (
        0,
        f"launch: node 1 of 2: {variables} (torchrun); to run alone, set JAX_NUM_PROCESSES=1\n",
    )
    assert started[0][0].coordinator == "old:29500"


@pytest.mark.parametrize(
    ("variables", "arguments", "fault"),
    [
        ({}, "--nproc=2 --coordinator=foo", "--coordinator=foo: use HOST:PORT"),
        ({}, "--nproc=2 --coordinator=foo:1", "--coordinator=foo:1: --nnodes, --node_rank are not"),
        ({}, "--node_rank=0", "--node_rank=0: --nnodes, --coordinator are not set"),
        ({}, "--node_rank=1", "--node_rank=1: --nnodes, --coordinator are not set"),
        ({}, "--nnodes=2", "--nnodes=2: --node_rank, --coordinator are not set"),
        ({}, "--nnodes=2 --coordinator=a:b", "--coordinator=a:b: use HOST:PORT, with a port"),
        ({}, "--nnodes=2 --coordinator=a:1 --node_rank=2", "--node_rank=2: use an id from 0 to 1"),
        ({}, "--nnodes=1 --node_rank=1", "--node_rank=1: use an id from 0 to 0, below --nnodes=1"),
        ({}, "--nnodes=0", "--nnodes=0: "),
        ({"WORLD_SIZE": "1"}, "--coordinator=a:1", "--coordinator=a:1: "),
        ({"WORLD_SIZE": "2"}, "--nproc=2", "WORLD_SIZE=2: RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({"JAX_NUM_PROCESSES": "1"}, "--coordinator=a:1", "--coordinator=a:1: there is only one"),
        (SLURM, "--nnodes=3", "--nnodes=3: differs from 2 of SLURM"),
        ({}, "--nproc=2 --min_nproc=0", "--min_nproc=0: use 1 or more"),
        ({}, "--nproc=2 --min_nproc=-1", "--min_nproc=-1: use 1 or more"),
        ({}, "--nproc=2 --min_nproc=3", "--min_nproc=3: there are 2 processes in all"),
        ({}, "--grace=nan", "--grace=nan: use a finite number"),
        ({}, "--join_seconds=inf", "--join_seconds=inf: use a positive number of seconds, up to"),
        ({}, "--nproc=100000", "--nproc=100000: "),
        ({}, "--simulate_devices=0", "--simulate_devices=0: use 1 or more"),
        (
            {},
            "--simulate_devices=2 -- --simulate_devices=4 --config=x",
            "and, after --, --simulate",
        ),
        (
            {},
            "-- --config=x --num_processes=1",
            "--num_processes=1: launch sets it for each process",
        ),
        ({}, "-- generate --process_id=0", "--process_id=0: launch sets it for each process"),
        ({}, "--nproc=2 -- --config=x --coordinator=a:1", "--coordinator=a:1: launch sets it"),
        ({}, "--", "nothing to launch"),
    ],
)
def test_a_flag_that_would_be_ignored_is_one_fault(
    variables, arguments, fault, started, monkeypatch, capsys
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments += "" if "--" in arguments.split() else " -- --config=x"
    code, err = run(arguments, capsys)
    assert (code, started) == (2, [])
    (line,) = err.splitlines()
    assert fault in line


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        ({}, "--nproc=2", (1, 0, None)),
        ({}, "--nproc=2 --nnodes=1 --node_rank=0 --coordinator=a:1", (1, 0, None)),
        ({}, "--nnodes=2 --coordinator=a:1", (2, 0, "a:1")),
        ({}, "--nnodes=2 --coordinator=[::1]:1 --node_rank=1", (2, 1, "[::1]:1")),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "--nnodes=2 --coordinator=a:1", (2, 0, "a:1")),
        (SLURM, "--coordinator=c:1", (2, 1, "c:1")),
        (SLURM, "--nnodes=2 --coordinator=c:1", (2, 1, "c:1")),
        (SLURM, "--nnodes=1", (1, 0, None)),
    ],
)
def test_flags_override_the_launchers_variables(
    variables, arguments, expected, started, monkeypatch, capsys
):
    for name, value in {**variables, "MESHTRAIN_SECRET": "s" * 32}.items():
        monkeypatch.setenv(name, value)
    assert run(f"{arguments} -- --config=x", capsys) == (0, "")
    ((s, _),) = started
    assert (s.nnodes, s.node_rank, s.coordinator) == expected


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ({}, "--nnodes=2 --node_rank=0 --coordinator=127.0.0.1:1"),
        ({}, "--nnodes=2 --node_rank=1 --coordinator=a:1"),
        ({"MESHTRAIN_SECRET": ""}, "--nnodes=2 --coordinator=a:1"),
        (SLURM, ""),
    ],
)
def test_several_hosts_need_a_secret_or_the_permission_to_go_without(
    variables, arguments, started, monkeypatch, capsys, tmp_path
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    workdir = tmp_path / "run"
    command = f"{arguments} -- --config=x --workdir={workdir}"
    code, err = run(command, capsys)
    assert (code, started, workdir.exists()) == (2, [], False)
    line = err.splitlines()[-1]  # before it, the variables that make it one of several hosts
    assert line.startswith("MESHTRAIN_SECRET: is not set, ")
    assert "openssl rand -hex 32" in line and line.endswith("or give --insecure")
    assert run(f"--insecure {command}", capsys)[0] == 0
    monkeypatch.setenv("MESHTRAIN_SECRET", "s" * 32)
    assert run(command, capsys)[0] == 0
    assert [s.nnodes for s, _ in started] == [2, 2]


@pytest.mark.parametrize("secret", ["", "too short"])
def test_one_host_needs_no_secret(secret, started, monkeypatch, capsys):
    monkeypatch.setenv("MESHTRAIN_SECRET", secret)
    assert run("--nproc=2 -- --config=x", capsys) == (0, "")


def test_a_forced_number_of_devices_is_passed_on(started, capsys):
    assert run("--force --simulate_devices=2000 -- --config=x", capsys) == (0, "")
    assert started[0][1][-2:] == ["--simulate_devices=2000", "--force"]


def test_a_batch_script_launches_alone_and_says_so(started, monkeypatch, capsys):
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "a", "NTASKS": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, err = run("--nproc=2 -- --config=x", capsys)
    assert code == 0 and "SLURM_NTASKS=2: this process runs alone" in err


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "new" / "run"


def test_a_fault_at_the_start_leaves_no_workdir(workdir):
    command = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=1"]
    run = ["--config=configs/quickstart.py", f"--workdir={workdir}", "--config.a=1"]
    done = subprocess.run([*command, "--", *run], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not workdir.parent.exists(), done.stderr


@pytest.mark.parametrize(
    ("code", "files", "left"),
    [
        (2, [], []),
        (2, ["logs/rank-0.log"], []),
        (2, ["logs/rank-0.log", "config.json"], ["config.json", "logs"]),
        (1, ["logs/rank-0.log"], ["logs"]),  # the log of a crash
        (1, [], []),  # nothing was started: a host is missing
    ],
)
def test_folders_are_removed_only_after_a_fault_at_the_start(workdir, code, files, left):
    folders = launch_module.Folders(workdir)
    folders.make()
    for name in files:
        (workdir / name).write_text("x")
    folders.remove_if_unused(code)
    found = sorted(one.name for one in workdir.iterdir()) if workdir.exists() else []
    assert found == left and workdir.parent.exists() == bool(left)


def test_logs_are_not_written_through_a_link(workdir, tmp_path):
    workdir.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (workdir / "logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="logs: is a link"):
        launch_module.Folders(workdir).make()


def test_a_workdir_supplies_no_compiled_programs(workdir, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    launch_module.Folders(workdir).make()
    assert [path.name for path in workdir.iterdir()] == ["logs"]
    assert "JAX_COMPILATION_CACHE_DIR" not in launch_module._environment(quiet=False)


def test_folders_that_were_there_before_stay(workdir):
    (workdir / "logs").mkdir(parents=True)
    (workdir / "logs" / "rank-0.log").write_text("of an earlier run")
    folders = launch_module.Folders(workdir)
    folders.make()
    folders.remove_if_unused(2)
    assert [str(one.relative_to(workdir)) for one in workdir.rglob("*")] == [
        "logs",
        "logs/rank-0.log",
    ]


@pytest.mark.parametrize(("name", "left"), [("notes.txt", 1), ("config.json", 3)])
def test_a_folder_with_other_files_is_left_as_it_was(workdir, name, left):
    workdir.mkdir(parents=True)
    (workdir / name).write_text("x")
    folders = launch_module.Folders(workdir)
    folders.make()
    (workdir / "logs" / "rank-0.log").write_text("a fault")
    folders.remove_if_unused(2)
    assert len([*workdir.rglob("*")]) == left  # a run keeps its logs


@pytest.mark.parametrize("place", ["/", "az://bucket/run", "s3://bucket"])
def test_nothing_is_made_in_a_place_that_is_rejected(place, monkeypatch):
    monkeypatch.setattr(launch_module.Folders, "_mkdir", lambda *args, **options: 1 / 0)
    with pytest.raises(ConfigError, match=f"--workdir={place}: "):
        launch(["--config=x", f"--workdir={place}"])


def test_a_workdir_that_cannot_be_made_leaves_no_part_of_it(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run").write_text("a file")
    with pytest.raises(ConfigError, match="run: File exists; use a folder"):
        launch(["--config=x", f"--workdir={tmp_path}/new/run"])
    assert [one.name for one in tmp_path.rglob("*")] == ["new", "run"]


def test_a_run_that_is_preempted_any_number_of_times_keeps_its_backoff():
    budget = RestartBudget(max_restarts=3, window=60)
    for _ in range(3000):
        assert not budget.reason_to_give_up(restart_policy.Outcome(75), 1)
    assert budget.backoff() == restart_policy.MAX_BACKOFF


def test_invalid_counts_from_python_are_rejected():
    with pytest.raises(ConfigError, match="--min_nproc=0: use 1 or more"):
        Settings(nproc=2, min_nproc=0)
    with pytest.raises(ConfigError, match="--coordinator=a:1: --nnodes, --node_rank are not set"):
        launch(["--config=x"], nproc=2, coordinator="a:1")
