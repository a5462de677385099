"""How jax is set up in a process: the compile cache, and whether it has joined the others."""

import importlib.util
import json
import os
import pwd
import re
import stat
import subprocess
import sys

import jax
import pytest

from meshtrain.cluster import distributed, environment, rendezvous, runtime
from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib.paths import ROOT
from tests.lib.rows import losses
from tests.lib.tiny_run import TINY


def test_the_cache_folder_is_private(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        folder = runtime._cache_folder()
    finally:
        os.umask(before)
    assert folder.parent.parent == tmp_path / "cache"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder)] == [0o700] * 2
    assert runtime._cache_folder() == folder  # also when it exists
    assert capsys.readouterr().err == ""
    folder.parent.chmod(0o755)  # readable by others, but not writable
    assert runtime._cache_folder() == folder
    for shared in (folder, folder.parent):
        shared.chmod(0o770)
        assert runtime._cache_folder() is None
        assert f"no compile cache in {shared}: owned by user" in capsys.readouterr().err
        shared.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(folder).st_uid + 1)
    assert runtime._cache_folder() is None


def test_a_cache_folder_that_cannot_be_created_is_logged_and_not_used(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert runtime._cache_folder() is None
    assert "Not a directory" in capsys.readouterr().err


def test_a_missing_home_folder_is_logged_and_there_is_no_cache(monkeypatch, capsys):
    def unknown_user(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    assert runtime._cache_folder() is None
    assert "no compile cache in ~/.cache/meshtrain: Could not" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("home", "xdg", "expected"),
    [
        ("", "", None),  # `~` would be the root folder
        ("relative", "", None),
        ("HERE", "", ".cache/meshtrain"),
        ("HERE", "relative", ".cache/meshtrain"),
        ("", "HERE/cache", "cache/meshtrain"),
    ],
)
def test_the_cache_folder_is_an_absolute_path(home, xdg, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "_make_private", lambda folder, others: None)
    monkeypatch.setenv("HOME", home.replace("HERE", str(tmp_path)))
    monkeypatch.setenv("XDG_CACHE_HOME", xdg.replace("HERE", str(tmp_path)))
    folder = runtime._cache_folder()
    assert (folder and folder.parent) == (expected and tmp_path / expected)
    assert bool(capsys.readouterr().err) == (expected is None)


def test_a_simulated_device_has_several_threads(monkeypatch):
    """With one each, collectives that wait for each other could take all threads."""
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    runtime.set_num_threads(1)
    assert "PJRT_NPROC" not in os.environ
    runtime.set_num_threads(8)
    assert os.environ["PJRT_NPROC"] == "32"
    monkeypatch.setenv("PJRT_NPROC", "5")
    runtime.set_num_threads(8)
    assert os.environ["PJRT_NPROC"] == "5"


@pytest.mark.parametrize("num_local", [8, 1])
def test_programs_of_several_cpu_devices_are_not_cached(num_local, tmp_path, monkeypatch):
    """A program that is read from the cache would hang."""
    monkeypatch.setattr(jax, "local_device_count", lambda: num_local)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        runtime._use_cache()
        assert not jax.config.jax_enable_compilation_cache
        assert not jax.config.jax_compilation_cache_dir and not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_enable_compilation_cache", before[0])
        jax.config.update("jax_compilation_cache_dir", before[1])


SCRIPT = """
import jax, sys
from tests.lib.configs import tiny_config
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from meshtrain.train import train
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
result = train(tiny_config())
print(sum("cache_hits" in name for name in events), jax.tree.leaves(result.state.params)[0].sum())
"""


@pytest.mark.slow
def test_a_second_run_reads_the_cached_programs_and_computes_the_same(tmp_path):
    def run():
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        hits, total = done.stdout.splitlines()[-1].split()
        return int(hits), total

    (first_hits, first), (second_hits, second) = run(), run()
    assert second_hits > first_hits and first == second


def test_a_process_of_several_that_has_joined_none_does_not_train_alone(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(ConfigError, match="^WORLD_SIZE=2: jax has started the devices of this"):
        train(tiny)


def test_a_process_meets_the_others_with_the_token_of_its_supervisor(monkeypatch):
    class Met(Exception):
        pass

    def wait_for_all(process, *, seconds, token):
        raise Met(token)

    monkeypatch.setattr(rendezvous, "wait_for_all", wait_for_all)
    monkeypatch.setenv("MESHTRAIN_TOKEN", "f" * 64)
    with pytest.raises(Met, match="f" * 64):
        distributed.initialize("127.0.0.1:1", 2, 1)
    monkeypatch.delenv("MESHTRAIN_TOKEN")  # without a supervisor
    with pytest.raises(Met, match="^$"):
        distributed.initialize("127.0.0.1:1", 2, 1)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_platform_that_is_not_there_is_one_line(platform):
    if platform == "cuda" and environment.num_gpus(os.environ):
        pytest.skip("this machine has NVIDIA GPUs")
    if platform == "tpu" and importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed here")
    command = [sys.executable, "-m", "meshtrain", "info", f"--platform={platform}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("JAX_PLATFORMS", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"JAX_PLATFORMS={platform}: ")


# ---- --num_devices ----


def meshtrain(*arguments, **variables):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ["XLA_FLAGS"] += " " + variables.pop("XLA_FLAGS", "")
    environ |= variables
    command = [sys.executable, "-m", "meshtrain", *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)


def test_fewer_devices_than_there_are_train_as_if_there_were_no_more(tmp_path):
    arguments = ["train", *TINY, "--config.train.steps=3", "--config.mesh.data=-1"]
    arguments += ["--config.data.build=meshtrain.data.synthetic:build"]
    for folder, flags in (
        ("fewer", ["--simulate_devices=8", "--num_devices=4"]),
        ("all", ["--simulate_devices=4"]),
    ):
        done = meshtrain(*arguments, *flags, f"--workdir={tmp_path / folder}")
        assert done.returncode == 0 and "data 4 · 4 cpu" in done.stdout, done.stderr
        (path,) = (tmp_path / folder / "checkpoints").glob("*3/MANIFEST.json")
        manifest = json.loads(path.read_text())
        assert manifest["mesh"]["data"] == 4
    assert losses(tmp_path / "fewer") == losses(tmp_path / "all")


@pytest.mark.parametrize(
    "variables",
    [
        {"JAX_NUM_CPU_DEVICES": "4"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    ],
    ids=["jax", "xla"],
)
def test_devices_that_variables_simulate_are_reduced_too(variables):
    done = meshtrain("info", "--platform=cpu", "--num_devices=2", **variables)
    assert done.returncode == 0 and "over 2 devices: right" in done.stdout, done.stderr


def test_more_devices_than_there_are_is_one_line():
    done = meshtrain("info", "--platform=cpu", "--num_devices=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "--num_devices=2: jax finds only 1 of kind cpu; omit the flag, or simulate more with "
        "--simulate_devices=2\n"
    )


@pytest.mark.multiprocess
def test_processes_take_equal_parts_of_the_devices():
    launch = ["launch", "--nproc=2", "--simulate_devices=4", "--", "info", "--num_devices=4"]
    done = meshtrain(*launch)
    assert done.returncode == 0 and "over 4 devices: right" in done.stdout, done.stderr
    assert len(re.findall(r"process [01] +pid \d+ on \S+: 2 x cpu", done.stdout)) == 2


@pytest.mark.parametrize(("num_devices", "visible"), [(3, "0,1,2"), (4, "all"), (5, "all")])
def test_a_process_alone_uses_its_first_gpus(num_devices, visible):
    """Without GPUs: the test checks the options that jax gets before it looks for them."""
    program = (
        "from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES; "
        "from meshtrain.cluster import environment, runtime; "
        "environment.DRIVER_FILES = 'null'; "
        f"runtime._use_fewer({num_devices}, None); print(CUDA_VISIBLE_DEVICES.value)"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{visible}\n"


def test_devices_that_jax_cannot_be_given_fewer_of_are_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(
        ConfigError, match="^--num_devices=4: jax has started 8 devices of kind tpu"
    ):
        runtime._check_num_devices(4)
