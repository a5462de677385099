"""jax's environment variables, as a user may set them: one line and exit code 2, no traceback."""

import functools
import os
import re
import subprocess
import sys

import pytest

from meshtrain.cluster import distributed, environment, runtime
from tests.lib.paths import ROOT


def info(**variables):
    """Runs `meshtrain info`, which starts jax and does little else."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-m", "meshtrain", "info"]
    environ |= variables
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "JAX_PLATFORMS",
            "foo",
            "Unable to initialize backend 'foo'.*; set JAX_PLATFORMS=cpu, or un",
        ),
        ("JAX_PLATFORMS", "cuda", ".*; set JAX_PLATFORMS=cpu, or unset it"),
        ("JAX_PLATFORM_NAME", "foo", "Unknown backend.*; set JAX_PLATFORMS=cpu"),
        ("JAX_DISABLE_JIT", "1", "a step runs only as a compiled program; unset it"),
        ("JAX_ENABLE_X64", "maybe", "invalid truth value 'maybe'.*; unset it, or correct it"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "foo", 'Invalid value "foo".*; unset it'),
        ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "x", "Invalid value .x."),
    ],
)
def test_a_wrong_variable_is_one_line(name, value, message):
    done = info(**{name: value})
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}={value}: ")
    assert re.search(message, line), line


def test_unused_gpus_are_logged_once(monkeypatch, capsys):
    monkeypatch.setattr(
        runtime, "_log_unused_gpus", functools.cache(runtime._log_unused_gpus.__wrapped__)
    )
    monkeypatch.setattr(environment, "num_gpus", lambda environ: 8)
    runtime._log_unused_gpus()
    assert capsys.readouterr().err == ""  # the tests themselves choose the CPU
    runtime._log_unused_gpus.cache_clear()
    monkeypatch.setattr(type(runtime.jax.config), "jax_platforms", None, raising=False)
    runtime._log_unused_gpus()
    runtime._log_unused_gpus()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("this machine has 8 NVIDIA GPUs and jax uses only the CPU; set JAX_")
    runtime._log_unused_gpus.cache_clear()
    monkeypatch.setattr(distributed, "process_id", lambda: 1)
    runtime._log_unused_gpus()
    assert capsys.readouterr().err == ""
