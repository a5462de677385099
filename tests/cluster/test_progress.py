"""The page on which a process writes its progress."""

import time

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
