"""The page of `meshtrain report` in headless Chromium: it renders without errors.

It does so at two widths, light and dark.

The screenshots stay in pytest's folder of the test (`--basetemp` chooses where).
"""

import html
import json
import re
import shutil
import struct
import subprocess
import threading

import pytest

from meshtrain.tools.report import page, read, serve
from tests.lib.stories import row, story, write

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)"
    ),
]
# Times that the page's own clock may take: loading a page of 10^6 steps, on a machine that runs
# other tests too.
MAX_SECONDS = 2.0
# As chromium --help-flags does not list them:
# third_party/blink/public/mojom/css/preferred_color_scheme.mojom
SCHEMES = {"dark": 0, "light": 1}


def chromium(folder, address, *flags):
    """Opens an address; returns what Chromium prints on stdout, and its log."""
    common = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    common += ["--enable-logging=stderr", "--virtual-time-budget=5000", f"--user-data-dir={folder}"]
    command = [CHROMIUM, *common, *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout, done.stderr


def report_on(folder, *workdirs):
    runs = [read.Run(workdir) for workdir in workdirs]
    file = folder / "page.html"
    file.write_text(page.html(page.data_of(runs, []), live=False), encoding="utf-8")
    return file


def dom_of(folder, address):
    """Returns the DOM after the scripts have run, and what the page says about itself.

    Fails on console messages.
    """
    dom, log = chromium(folder / "profile", address, "--dump-dom")
    assert [line for line in log.splitlines() if ":CONSOLE" in line] == []
    facts = json.loads(html.unescape(re.search(r'data-report="([^"]*)"', dom)[1]))
    assert facts["errors"] == []
    return dom, facts


def test_a_run_with_faults_is_drawn_at_two_widths_light_and_dark(tmp_path):
    file = report_on(tmp_path, story(tmp_path / "one"), story(tmp_path / "two", steps=200))
    dom, facts = dom_of(tmp_path, file.as_uri())
    assert facts["charts"] == {
        "Training loss": [300, 200],
        "Held-out loss": [2, 2],
        "Gradient norm": [300, 200],
        "Throughput": [300, 200],
        "Time of a step": [300, 300, 200, 200],
    }
    text = re.sub(r"<script.*?</script>|<[^>]*>", " ", dom, flags=re.DOTALL)
    for words in (
        "rank 1 killed",
        "rollback",
        "1 restart, 15 steps lost",
        "MFU (the peak",
        "train.steps",
    ):
        assert words in text
    assert dom.count("<canvas") == len(facts["charts"])
    assert len(re.findall(r'role="img" aria-label="[^"]{10,}"', dom)) >= 10
    seen = set()
    for width in (1280, 400):
        for scheme, number in SCHEMES.items():
            shot = tmp_path / f"{width}_{scheme}.png"
            flags = f"--window-size={width},2400", f"--blink-settings=preferredColorScheme={number}"
            chromium(tmp_path / "profile", file.as_uri(), *flags, f"--screenshot={shot}")
            image = shot.read_bytes()
            assert struct.unpack(">II", image[16:24]) == (width, 2400)
            seen.add(image)
    assert len(seen) == 4  # dark differs from light


def test_a_million_steps_are_small_and_quick(tmp_path):
    tail = '"loss": 2.5, "grad_norm": 1.5, "step_time": 0.25}'
    workdir = tmp_path / "run"
    write(workdir / "events.jsonl", [{"event": "start", "time": 1.0, "step": 0}])
    with open(workdir / "metrics.jsonl", "w") as file:
        file.writelines(
            f'{{"step": {step}, "noise": {step * 7919 % 10007}, {tail}\n' for step in range(10**6)
        )
    file = report_on(tmp_path, workdir)
    assert file.stat().st_size < 5e6
    _, facts = dom_of(tmp_path, file.as_uri())
    assert 1000 < facts["charts"]["noise"][0] <= 2500
    assert facts["milliseconds"] < 1000 * MAX_SECONDS


def test_a_hostile_run_runs_nothing(tmp_path):
    """Even markup that got into the page could not run: only the page's own scripts may."""
    workdir = story(tmp_path / "run")
    evil = (
        "</script><img src=x "
        "onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    )
    (workdir / "config.json").write_text(json.dumps({"data": {"path": evil}, evil: {evil: evil}}))
    with open(workdir / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": evil, "time": 1040.0, "step": 290, "why": evil}) + "\n")
    dom, _ = dom_of(tmp_path, report_on(tmp_path, workdir).as_uri())
    assert "<title>run · meshtrain report</title>" in dom and "owned</title>" not in dom
    assert 'src="x"' not in dom and "&lt;img src=x" in dom


def test_a_page_prints(tmp_path):
    pdf = tmp_path / "page.pdf"
    address = report_on(tmp_path, story(tmp_path / "run")).as_uri()
    chromium(tmp_path / "profile", address, f"--print-to-pdf={pdf}")
    assert pdf.read_bytes().startswith(b"%PDF")


def test_a_served_page_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "FRESH_SECONDS", 0.0)
    run = read.Run(story(tmp_path / "run"))

    def grow():  # by one row at each request
        found = page.data_of([run], [])
        with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(run.metrics.num_rows)) + "\n")
        return found

    server, address = serve.server(grow, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dom, facts = dom_of(tmp_path, address)
    finally:
        server.shutdown()
        server.server_close()
    assert facts["charts"]["Training loss"][0] > 301  # the page itself has 300
    assert "Live: the last row was written" in dom
