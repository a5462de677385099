"""The certificates of the configs of the package; slow, and in a file of their own for a worker of their own."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from meshtrain import cli
from meshtrain.verify import verify

FAMILIES = sorted(
    path.stem
    for path in (ROOT / "meshtrain" / "configs").glob("*.py")
    # The full verification of the quickstart contains its quick one.
    # llama3_128k differs from llama3 in sizes only, and a proof has its own. The other mixtures differ from mixtral in
    # sizes, router and norms, which the laws vary in the certificate of every config.
    if path.stem not in ("__init__", "default", "quickstart", "llama3_128k", "olmoe", "qwen3_moe")
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_quick_verification_of_every_config_passes_and_is_written(name, tmp_path, capsys):
    options = [f"--config=configs/{name}.py", "--quick", f"--output={tmp_path}"]
    assert cli.main("verify", options) == 0
    assert "all equal to one device" in capsys.readouterr().out
    record = json.loads((tmp_path / "verify.json").read_text())
    assert record["passed"] and len(record["results"]) == verify.QUICK_LAYOUTS
    kinds = {"start", "evaluation", "schedule", "loss", "norm", "gradients", "parameters"}
    for result in record["results"]:
        assert result["differences"].keys() == kinds | {"optimizer state"}
        assert max(result["differences"].values()) < verify.TOLERANCE
    page = (tmp_path / "verify.md").read_text()
    assert page.startswith("# meshtrain.models.transformer:build: passed")
    assert page.count("\n| ") == verify.QUICK_LAYOUTS + 2


@pytest.mark.slow
def test_the_full_verification_of_the_quickstart_passes_in_two_processes(tmp_path):
    options = ["--simulate_devices=8", "--jobs=2", f"--output={tmp_path}"]
    command = [sys.executable, "-m", "meshtrain", "verify", "--config=quickstart", *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "all equal to one device" in run.stdout
    record = json.loads((tmp_path / "verify.json").read_text())
    dtypes = [result["row"].get("dtype", "float64") for result in record["results"]]
    assert dtypes.count("float64") > 40 and {*dtypes} == {"float64", "bfloat16", "float16"}
    assert "## Not covered" in (tmp_path / "verify.md").read_text()
