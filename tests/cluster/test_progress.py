"""The page on which a process writes its progress."""

import math
import time

import pytest

from meshtrain.cluster import progress


def test_the_progress_page_is_shared_with_its_creator(tmp_path, monkeypatch):
    page = progress.ProgressPage.create(tmp_path / "page")
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "page"))
    clock = progress.Clock()
    clock.enter("data", 7)
    clock.enter("step", 7)
    clock.enter("data", 8)
    assert (page.phase, page["first_step"], page["current_step"]) == ("data", 7, 8)
    assert page["step_seconds"] == 0 and not clock.stop_requested
    for step in (9, 10):
        clock.enter("data", step)
    assert page["step_seconds"] > 0  # after three steps
    page["stop_requested"] = 1
    assert clock.stop_requested
    time.sleep(2 * progress.HEARTBEAT_SECONDS)
    clock.close()
    assert time.monotonic() - page["heartbeat"] < 2 * progress.HEARTBEAT_SECONDS
    assert sum(page.seconds().values()) < 5


def test_a_damaged_page_harms_nobody_and_its_last_valid_values_count(tmp_path):
    path = tmp_path / "page"
    page = progress.ProgressPage.create(path)
    written = progress.ProgressPage(path)
    values = {"heartbeat": 5.0, "phase": 4.0, "first_step": 7.0, "current_step": 9.0, "save": 2.0}
    for name, value in values.items():
        written[name] = value

    def read():
        return {name: page[name] for name in values}

    assert read() == values and not page.fault
    for damage in (b"", b"x", path.read_bytes()[:20], bytes.fromhex("ff" * 999)):
        path.write_bytes(damage)
        assert read() == values and page.phase == "step" and page.fault
        assert not written["stop_requested"]
        written["heartbeat"] = 5.0  # repairs the others too
        assert path.read_bytes()[: 8 * progress.STOP] != damage[: 8 * progress.STOP]
        assert read() == values
    page["stop_requested"] = 1
    assert written["stop_requested"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("phase", value) for value in (math.nan, math.inf, -1.0, 0.5, 9.0, 1e300)),
        *(("current_step", value) for value in (math.nan, 0.5, -2.0, 1e300)),
        *(("step_seconds", value) for value in (math.nan, -math.inf, 1e300)),
    ],
)
def test_values_that_no_process_writes_are_ignored(tmp_path, name, value):
    page = progress.ProgressPage.create(tmp_path / "page")
    before = page[name]
    progress.ProgressPage(tmp_path / "page")[name] = value
    assert page[name] == before and page.fault == f"{name}={value}"
