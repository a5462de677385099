"""The figures of a step that is compiled for devices which this host lacks."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def audited(config: str, target: str, keys: Sequence[str]) -> dict[str, Any]:
    """Returns what `meshtrain audit` finds in a process of its own, or its `error`.

    `keys` are overrides, such as --config.mesh.fsdp=8.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "audit.json")
        flags = [f"--config={config}", f"--target={target}", f"--output={file}"]
        done = subprocess.run(
            [sys.executable, "-m", "meshtrain", "audit", *flags, *keys],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1]}
        return json.loads(file.read_text(encoding="utf-8"))
