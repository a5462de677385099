"""The certificates of the package's configs; slow, so in a file, and a worker, of their own."""

import functools
import json
import subprocess
import sys

import pytest

from meshtrain.cli import app
from meshtrain.config.load import load_config
from meshtrain.tools.verify import layouts, verify
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.laws import rounding as rounding_laws
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT

# A quick verification takes two to twelve minutes next to other tests. The others differ from this
# one and from the quickstart in sizes and in what the laws vary in the certificate of every config,
# so one layout each runs here, another one for each.
QUICK = ["gemma3"]
OTHERS = sorted(
    path.stem
    for path in (ROOT / "meshtrain" / "configs").glob("[!_]*.py")
    if path.stem not in ("default", "quickstart", *QUICK)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_verification_of_a_config_passes_and_is_written(name, tmp_path, capsys):
    options = [f"--config=configs/{name}.py", "--quick", f"--output={tmp_path}"]
    assert app.main("verify", options) == 0
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
@pytest.mark.parametrize("name", OTHERS)
def test_a_config_like_another_equals_one_device_in_a_layout(name, x64):
    subject = VerifyCase(load_config(name), None, None, keep_sizes=False)
    rows = [row for row in layouts.select(subject) if row["pipeline"] > 1]
    # Those of few layers take less time.
    rows = [row for row in rows if subject.for_layout(row) is subject.shallow]
    result = verify.check_layout(subject, rows[OTHERS.index(name) % len(rows)])
    assert result.fault is None and max(result.differences.values()) < verify.TOLERANCE


@pytest.mark.parametrize("has_sinks", [False, True])
def test_layouts_of_a_model_with_sinks_have_no_kernel_that_declines_them(has_sinks, x64):
    raw = tiny_config()
    raw.model.attention_sinks = has_sinks
    rows = layouts.select(VerifyCase(raw, None, None, keep_sizes=False))
    assert any(row["attention_impl"] == "splash" for row in rows) != has_sinks


@pytest.mark.slow
def test_a_quick_verification_in_two_processes(tmp_path):
    options = ["--quick", "--simulate_devices=8", "--jobs=2", f"--output={tmp_path}"]
    command = [sys.executable, "-m", "meshtrain", "verify", "--config=quickstart", *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "all equal to one device" in run.stdout
    assert "## Not covered" in (tmp_path / "verify.md").read_text()


@functools.cache
def full_plan():
    """The parts of the quickstart's full verification: layouts, low precision, and laws."""
    subject = VerifyCase(load_config("quickstart"), None, None, keep_sizes=False)
    rows, low, laws = verify.plan(subject, quick=False, without=())
    assert len(rows) > 40 and {row["dtype"] for row in low} == {"bfloat16", "float16"}
    return subject, rows, low, laws


# The full verification takes 7 minutes on two cores: `meshtrain verify --config=quickstart`. Here a
# few of its layouts run, and all laws that --quick leaves out.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_layouts_of_the_full_verification_equal_one_device(part, x64):
    subject, rows, *_ = full_plan()
    result = verify.check_layout(subject, rows[3 + 15 * part])
    assert result.fault is None and max(result.differences.values()) < verify.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layout_is_as_precise_as_one_device(dtype, x64):
    subject, _, low, _ = full_plan()
    result = verify.check_precision(subject, next(row for row in low if row["dtype"] == dtype))
    assert result.fault is None


@pytest.mark.slow
@pytest.mark.parametrize("law", ["runs", *rounding_laws.laws()])
def test_the_laws_that_only_the_full_verification_has_hold(law, x64):
    subject, *_, names = full_plan()
    quick = {*verify.plan(subject, quick=True, without=())[2]}
    assert law in names and law not in quick
    assert verify.check_law(subject, law) == []
