"""The cache of compiled programs."""

import os
import pwd
import stat
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

from meshtrain.cluster import runtime


def test_the_cache_is_a_folder_that_nobody_else_can_enter(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        folder = runtime._cache_folder()
    finally:
        os.umask(before)
    assert folder.parent.parent == tmp_path / "cache"
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder)] == [0o700] * 2
    assert runtime._cache_folder() == folder  # the second time too
    assert capsys.readouterr().err == ""
    folder.parent.chmod(0o755)  # nobody can replace what is in it
    assert runtime._cache_folder() == folder
    for open_one in (folder, folder.parent):
        open_one.chmod(0o770)
        assert runtime._cache_folder() is None
        assert f"no compile cache in {open_one}: it is of user" in capsys.readouterr().err
        open_one.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(folder).st_uid + 1)
    assert runtime._cache_folder() is None


def test_a_cache_that_cannot_be_made_is_told_and_done_without(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert runtime._cache_folder() is None
    assert "Not a directory" in capsys.readouterr().err


def test_a_user_without_a_home_is_told_and_does_without(monkeypatch, capsys):
    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert runtime._cache_folder() is None
    assert "no compile cache in ~/.cache/meshtrain: Could not" in capsys.readouterr().err


@pytest.mark.parametrize("of_a_process", [8, 1])
def test_programs_of_several_cpu_devices_are_not_cached(of_a_process, tmp_path, monkeypatch):
    """They would hang when they are read back."""
    monkeypatch.setattr(jax, "local_device_count", lambda: of_a_process)
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
    assert many > none and first == second
