"""Options of the compiler by name, and the cache of what it compiled."""

import os
import pwd
import stat
import subprocess
import sys
from types import SimpleNamespace

import jax
import jaxlib
import numpy as np
import pytest
from conftest import ROOT, tiny_config

from meshtrain.config import parse as config
from meshtrain.errors import ConfigError
from meshtrain.parallel import xla as compiler
from meshtrain.train import train


def mesh(platform, size):
    devices = np.array([SimpleNamespace(platform=platform)] * size)
    return SimpleNamespace(devices=devices, size=size)


@pytest.mark.parametrize("preset", compiler.PRESETS)
def test_this_compiler_knows_every_option_of_a_preset(preset):
    found = compiler.options(preset, mesh("gpu", 8))
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert lowered.compile(compiler_options=found)(1.0) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options=found | {"xla_gpu_of_a_later_year": True})


def test_options_that_are_gone_are_left_out(monkeypatch):
    name = "xla_gpu_enable_pipelined_all_gather"
    for version, there in [("0.10.2", True), ("0.11.0", False), ("0.12.0.1", False)]:
        monkeypatch.setattr(jaxlib, "__version__", version)
        assert (name in compiler.options("overlap", mesh("gpu", 8))) == there


@pytest.mark.parametrize(
    ("platform", "size", "preset"),
    [("cpu", 1, "none"), ("cpu", 8, "none"), ("gpu", 1, "none"), ("gpu", 8, "overlap")]
    + [("tpu", 8, "none")],
)
def test_auto_is_what_suits_the_devices(platform, size, preset):
    place = mesh(platform, size)
    assert compiler.options("auto", place) == compiler.options(preset, place)


def test_what_runs_once_is_compiled_quickly_on_cpus_unless_the_user_says_how(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    (option,) = (found := compiler.quick_compile_options(mesh("cpu", 8)))
    assert jax.jit(lambda x: x + 1, compiler_options=found)(1.0) == 2
    assert compiler.quick_compile_options(mesh("gpu", 8)) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{option}=0")
    assert compiler.quick_compile_options(mesh("cpu", 8)) == {}


def test_a_preset_that_is_none_is_told():
    c = tiny_config()
    c.train.xla_preset = "fast"
    with pytest.raises(ConfigError, match="train.xla_preset='fast'"):
        config.parse(c, num_devices=8)


def test_an_option_that_is_gone_unawares_is_told_with_the_way_out(monkeypatch):
    later = {"xla_gpu_of_an_earlier_year": True}
    monkeypatch.setattr(compiler, "options", lambda preset, mesh: later)
    with pytest.raises(ConfigError, match="train.xla_preset: .*of_an_earlier_year.*=none"):
        train(tiny_config())


def test_other_faults_of_the_compiler_are_not_mistaken_for_that():
    with pytest.raises(jax.errors.JaxRuntimeError):
        compiler.compiled(jax.jit(lambda x: x).lower(1.0), {"xla_gpu_graph_min_graph_size": "few"})


# ---- the cache ----


def test_the_cache_is_a_folder_that_nobody_else_can_enter(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        folder = compiler._own_folder()
    finally:
        os.umask(before)
    assert folder.parent.parent == tmp_path / "cache"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder)] == [0o700] * 2
    assert compiler._own_folder() == folder  # the second time too
    assert capsys.readouterr().err == ""
    folder.parent.chmod(0o755)  # nobody can replace what is in it
    assert compiler._own_folder() == folder
    for open_one in (folder, folder.parent):
        open_one.chmod(0o770)
        assert compiler._own_folder() is None
        assert f"no compile cache in {open_one}: it is of user" in capsys.readouterr().err
        open_one.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(folder).st_uid + 1)
    assert compiler._own_folder() is None


def test_a_cache_that_cannot_be_made_is_told_and_done_without(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiler._own_folder() is None
    assert "Not a directory" in capsys.readouterr().err


def test_a_user_without_a_home_is_told_and_does_without(monkeypatch, capsys):
    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert compiler._own_folder() is None
    assert "no compile cache in ~/.cache/meshtrain: Could not" in capsys.readouterr().err


@pytest.mark.parametrize("of_a_process", [8, 1])
def test_programs_of_several_cpu_devices_are_not_cached(of_a_process, tmp_path, monkeypatch):
    """They would hang when they are read back."""
    monkeypatch.setattr(jax, "local_device_count", lambda: of_a_process)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        compiler.use_cache()
        assert not jax.config.jax_enable_compilation_cache
        assert not jax.config.jax_compilation_cache_dir and not list(tmp_path.iterdir())
    finally:
        jax.config.update("jax_enable_compilation_cache", before[0])
        jax.config.update("jax_compilation_cache_dir", before[1])


SCRIPT = """
import jax, sys
from conftest import tiny_config
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from meshtrain.train import train
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
result = train(tiny_config())
print(sum("cache_hits" in name for name in hits), jax.tree.leaves(result.state.params)[0].sum())
"""


@pytest.mark.slow
def test_a_second_run_reads_what_the_first_compiled_and_computes_the_same(tmp_path):
    def run():
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        hits, total = done.stdout.splitlines()[-1].split()
        return int(hits), total

    (none, first), (many, second) = run(), run()
    assert none == 0 and many > 0 and first == second
