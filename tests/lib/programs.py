"""Steps compiled by `meshtrain audit` for devices that this host lacks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.errors import ConfigError
from meshtrain.tools.hlo import hlo, target
from tests.lib.paths import ROOT


def skip_unless_compiled(devices):
    """Skips the test without the compiler for `devices`, a value of --target."""
    try:
        target.parse(devices)
    except ConfigError as error:
        pytest.skip(str(error))


def audited(config, devices, *overrides):
    """Returns the audit of a step as `figures`, and its program as `text` and `module`."""
    skip_unless_compiled(devices)
    with tempfile.TemporaryDirectory() as folder:
        figures, program = Path(folder, "audit.json"), Path(folder, "step.hlo")
        flags = [f"--config={config}", f"--target={devices}"]
        flags += [f"--output={figures}", f"--keep_hlo={program}", *overrides]
        done = subprocess.run(
            [sys.executable, "-m", "meshtrain", "audit", *flags],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        text = program.read_text()
        return SimpleNamespace(
            figures=json.loads(figures.read_text()), text=text, module=hlo.parse(text)
        )
