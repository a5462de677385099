"""`meshtrain report`: what a page shows of a run's files, that none of it is code, the server."""

import hashlib
import http.client
import json
import re
import threading
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.errors import ConfigError
from meshtrain.tools.report import facts, page, read, serve
from meshtrain.tools.report.facts import PER_BUCKET, decimate
from tests.lib.paths import ROOT
from tests.lib.stories import row, story, write

HOSTILE = "</script><script>alert(1)</script><!--\u2028"


def facts_of(workdir):
    run = read.Run(workdir)
    run.update()
    return facts.facts_of(run)


def fault(capsys, *arguments):
    assert app.main("report", [*map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


# ---- decimation ----


def test_decimation_keeps_the_extremes_and_the_gaps():
    draw = np.random.default_rng(0)
    steps, values = np.arange(100_000.0), draw.normal(size=100_000)
    values[[12_345, 77_777]], values[50_001] = (99.0, -99.0), np.nan
    kept = decimate(steps, values, 100)
    assert (np.diff(kept) > 0).all() and len(kept) <= PER_BUCKET * 100
    assert {0, 12_345, 50_001, 77_777, 99_999} <= {*kept.tolist()}
    for start in range(0, 100_000, 1000):
        one = slice(start, start + 1000)
        inside = values[kept[(kept >= start) & (kept < start + 1000)]]
        assert np.nanmin(inside) == np.nanmin(values[one])
        assert np.nanmax(inside) == np.nanmax(values[one])


def test_decimation_of_uneven_steps_and_of_values_that_are_all_nan():
    steps = np.concatenate([np.arange(3000.0), [1e9, 2e9]])
    kept = decimate(steps, np.full(3002, np.nan), 10)
    assert {0, 3000, 3001} <= {*kept.tolist()} and len(kept) < 20
    assert decimate(np.arange(50.0), np.zeros(50), 10).tolist() == [*range(50)]


# ---- what a run kept ----


def test_of_a_repeated_step_the_last_row_counts(tmp_path):
    rows = [row(step, eval_loss=7.0) for step in range(10)]
    again = [row(step, loss=step) for step in range(4, 8)]
    write(tmp_path / "metrics.jsonl", [*rows, *again])
    found = facts_of(tmp_path)
    assert found["series"]["loss"][0] == [*range(8)]
    assert found["series"]["loss"][1][4:] == [4, 5, 6, 7]
    assert found["series"]["eval_loss"][0] == [0, 1, 2, 3]
    assert "6 rows of steps that the run repeated are left out" in " ".join(found["notes"])


def test_a_reader_continues_where_it_was_and_starts_again_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "LINES_AT_ONCE", 3)
    path = write(tmp_path / "metrics.jsonl", [row(step) for step in range(10)])
    run = read.Run(tmp_path)
    run.update()
    with open(path, "a") as file:
        file.write("".join(json.dumps(row(step)) + "\n" for step in (10, 7, 8)) + '{"step": 9, "lo')
    run.update()
    assert run.metrics.columns()["loss"][0].tolist() == [*range(9)]
    assert "metrics.jsonl: the last line is incomplete, and left out" in run.notes()
    with open(path, "a") as file:
        file.write('ss": 0.5}\n')
    run.update()
    assert run.metrics.columns()["loss"][1][-1] == 0.5 and run.metrics.num_rows == 10
    write(tmp_path / "new", [row(step, loss=1.0) for step in range(20)]).replace(path)
    run.update()
    assert run.metrics.columns()["loss"][1].tolist() == [1.0] * 20
    assert run.notes() == ["events.jsonl is missing", "config.json is missing, or cannot be read"]


def test_lines_that_cannot_be_read_are_counted_and_null_is_a_gap(tmp_path):
    lines = [row(0), row(1, loss=None), row(2, tokens=2**4000), {"loss": 1.0}, [1]]
    text = (
        "\n".join(map(json.dumps, lines))
        + '\n{"step": 3, "lo\n\x00\x00\n{"step": 4, "loss": NaN}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "events.jsonl").write_text('{"event": "save", "time": 1e999}\n"text"\n')
    found = facts_of(tmp_path)
    assert found["series"]["loss"] == [[0, 1, 2, 4], [5.0, None, 1.666667, None]]
    assert found["notes"][:2] == [
        "metrics.jsonl: 4 lines cannot be read, and are left out",
        "events.jsonl: 1 lines cannot be read, and are left out",
    ]
    page.to_json({"runs": [found]})


def test_a_metric_of_each_layer_is_shown_by_its_extremes(tmp_path):
    rows = [row(step, expert_load_max=[1.0, 3.0, None, "x", 2.0]) for step in range(3)]
    write(tmp_path / "metrics.jsonl", rows)
    series = facts_of(tmp_path)["series"]
    assert series["expert_load_max: largest of the layers"][1] == [3.0] * 3
    assert series["expert_load_max: smallest of the layers"][1] == [1.0] * 3


def test_the_batch_of_a_skipped_step_is_a_gap_even_if_its_loss_is_finite(tmp_path):
    """Only its gradients overflowed: float16 with a loss scale, or one bad batch."""
    rows = [row(step, skipped=0.0, expert_load_max=[1.0, 2.0], tokens=step) for step in range(6)]
    rows[2] |= {"loss": 1e4, "skipped": 1.0, "grad_norm": None, "learning_rate": 1e-3}
    rows[2]["eval_loss"] = 0.5  # of the parameters before the step
    rows[5] |= {"loss": 1e5, "skipped": 1.0, "cross_entropy": 1e5}
    path = write(tmp_path / "metrics.jsonl", rows[:5])
    run = read.Run(tmp_path)
    run.update()
    with open(path, "a") as file:  # a live page reads the last row by itself
        file.write(json.dumps(rows[5]) + "\n")
    run.update()
    found = facts.facts_of(run)
    assert found["series"]["loss"][1][2::3] == [None, None] and found["last_step"] == 5
    assert found["summary"]["loss"]["largest"] == 5.0 and found["summary"]["loss"]["n"] == 4
    assert found["summary"]["cross_entropy"] is None
    layers = found["series"]["expert_load_max: largest of the layers"]
    assert layers == [[*range(6)], [2.0, 2.0, None, 2.0, 2.0, None]]
    assert "expert_load_max" not in found["series"]
    assert found["series"]["tokens"][1] == [*range(6)]
    assert found["series"]["learning_rate"][1] == [1e-3] and found["summary"]["eval_loss"]["n"] == 1


def test_the_time_line_has_restarts_and_the_account_is_the_supervisors(tmp_path):
    found = facts_of(story(tmp_path))
    spans = [(span["kind"], span["start"], span["end"]) for span in found["spans"]]
    assert spans == [
        ("training", 1000.0, 1020.0),
        ("recovery", 1020.0, 1030.0),
        ("training", 1030.0, 1050.0),
    ]
    assert (found["restarts"], found["lost_steps"], found["seconds"]["wall"]) == (1, 15, 50.0)
    assert found["status"] == "done" and found["counts"]["rollback"] == 1
    texts = {event["event"]: event["text"] for event in found["events"]}
    assert texts["rollback"] == "back to step 100; the data up to sample 1,776 is skipped"
    assert texts["spike"] == "loss 9"  # the others are missing
    assert found["schedule"]["words"].startswith("1f1b, 2 stages, 4 micro-batches")


def test_a_run_that_was_killed_and_resumed_is_two_spans(tmp_path):
    events = [{"event": "start", "time": t, "step": 0} for t in (10.0, 500.0)]
    save = {"event": "save", "time": 20.0, "step": 5}
    write(tmp_path / "events.jsonl", [events[0], save, events[1]])
    found = facts_of(tmp_path)
    first, second = found["spans"]
    assert (first["start"], first["end"], second["start"]) == (10.0, 20.0, 500.0)
    assert second["end"] == found["written"] > 500
    assert (found["status"], found["last_step"]) == ("running, or killed", None)


def test_settings_that_differ_are_listed():
    one = {"train": {"steps": 1, "seed": 0}, "rules": [["batch", "data"]]}
    other = {"train": {"steps": 2, "seed": 0}, "rules": [["batch", "data"]], "new": {"key": None}}
    expected = {"train.steps": ["1", "2"], "new.key": [None, "null"]}
    assert facts.differences([one, other]) == expected


def test_verdicts_are_found_in_the_workdir_and_given(tmp_path, capsys):
    row = {"data": 2, "zero_stage": 3, "dtype": "float64", "packing": False}
    results = [{"row": row, "differences": {"loss": 1e-9}, "fault": "loss: 1 here, 2 there"}]
    record = {"passed": False, "subject": "gpt", "tolerance": 1e-6, "results": results}
    record |= {"broken_laws": ["causality"], "not_covered": ["GPUs"], "versions": {"jax": "1"}}
    story(tmp_path)
    (tmp_path / "verify.json").write_text(json.dumps(record))
    audit = {"device": "8 cpu", "platform": "cpu by jax", "axes": [], "warnings": ["no rule"]}
    given = tmp_path / "other.json"
    given.write_text(json.dumps(audit | {"memory": {"peak": 5, "capacity": 4.0}, "roofline": None}))
    certificate, found = facts.find_verdicts([tmp_path], [given])
    assert certificate["lines"] == [
        "one device: causality",
        "data 2 · zero_stage 3 · dtype float64: loss: 1 here, 2 there",
    ]
    assert not certificate["ok"] and certificate["largest"] == {"loss": 1e-9}
    assert (found["ok"], found["fits"], found["lines"]) == (False, False, ["no rule"])
    for warnings, is_ok in ((["no rule"], False), ([], True)):
        given.write_text(json.dumps(audit | {"warnings": warnings}))
        assert facts.verdict_of(given)["ok"] is is_ok
    given.write_text("{}")
    output = tmp_path / "page.html"
    line = fault(capsys, tmp_path, f"--output={output}", f"--verdict={given}")
    assert line.startswith(f"--verdict={given}: neither the JSON") and not output.exists()


# ---- the command ----


def test_mistakes_are_one_line_with_exit_code_2(tmp_path, capsys):
    workdir, missing = story(tmp_path / "run"), tmp_path / "none"
    output = f"--output={tmp_path / 'page.html'}"
    assert fault(capsys, missing, output).startswith(f"{missing}: not a run (no metrics.jsonl")
    assert fault(capsys, workdir) == "use either --output=FILE or --serve"
    assert fault(capsys, workdir, output, "--serve") == "use either --output=FILE or --serve"
    assert fault(capsys, workdir, output, "--port=80") == "--port=80: use it with --serve"
    assert "--port=99999: " in fault(capsys, workdir, "--serve", "--port=99999")
    assert "use a file in a folder" in fault(capsys, workdir, f"--output={tmp_path}")
    assert "use a file in a folder" in fault(capsys, workdir, "--output=/nowhere/page.html")


def test_a_page_is_one_file_that_loads_nothing(tmp_path, capsys):
    story(tmp_path / "one"), story(tmp_path / "two", steps=200)
    output = tmp_path / "page.html"
    assert (
        app.main("report", [str(tmp_path / "one"), str(tmp_path / "two"), f"--output={output}"])
        == 0
    )
    text = output.read_text()
    size = output.stat().st_size
    assert size > len(text)  # some characters have several bytes
    assert f"2 runs, 500 rows, {size:,} bytes" in capsys.readouterr().out
    code = re.sub(r"/\*!.*?\*/", "", text)  # uPlot's comment names its page
    assert {*re.findall(r"https?://[^\s\"'<\\]+", code)} <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[^>]*>", code) == [
        '<link rel="icon" href="data:,">'
    ]
    assert not re.search(r"@import|url\(", code)
    assert "default-src 'none'" in text and "connect-src 'none'" in text
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert [len(run["series"]["loss"][0]) for run in data["runs"]] == [300, 200]
    assert data["differences"] == {"train.steps": ["300", "200"]}


def test_what_a_run_says_is_never_code(tmp_path):
    workdir = story(tmp_path / "run")
    config = {"data": {"path": HOSTILE}, HOSTILE: HOSTILE, "train": [HOSTILE]}
    (workdir / "config.json").write_text(json.dumps(config))
    event = {"event": HOSTILE, "time": 1.0, "why": HOSTILE, "mesh": HOSTILE}
    write(workdir / "events.jsonl", [event, event | {"event": "start"}])
    write(workdir / "metrics.jsonl", [row(0, **{HOSTILE: 1.0}), row(1, text=HOSTILE)])
    run = read.Run(workdir)
    text = page.html(page.data_of([run], []), live=False)
    assert "alert(1)</script>" not in text and text.count("</script>") == 3
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert data["runs"][0]["config"]["data.path"] == json.dumps(HOSTILE)
    assert HOSTILE in data["runs"][0]["series"] and data["runs"][0]["mesh"] == {}


def test_the_chart_library_is_the_pinned_one():
    """uPlot 1.6.32: the files that `npm pack uplot@1.6.32` contains, in dist/ and LICENSE."""
    pinned = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    folder = ROOT / "meshtrain" / "tools" / "report" / "page"
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in pinned}
    assert digests == pinned
    for name in page.SCRIPTS:
        assert "</script" not in (folder / name).read_text().lower()


def test_files_that_are_not_python_are_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["meshtrain"]
    folder = ROOT / "meshtrain"
    listed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert {*page.STYLES, *page.SCRIPTS, "report.html", "uPlot.LICENSE"} <= listed
    assert {"hardware.toml", "py.typed"} <= listed
    # Without namespaces every folder with code needs its __init__.py.
    assert settings["packages"]["find"]["namespaces"] is False
    folders = {path.parent for path in (ROOT / "meshtrain").rglob("*.py")}
    assert [path for path in folders if not (path / "__init__.py").exists()] == []


# ---- the server ----


@pytest.fixture
def served(tmp_path):
    """Serves the run in tmp_path/run; yields a function from path to response, and the address.

    A response is status, headers and text.
    """
    run = read.Run(story(tmp_path / "run"))
    server, address = serve.server(lambda: page.data_of([run], []), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def get(path):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    yield get, urlsplit(address), server
    server.shutdown()
    server.server_close()


def test_a_server_answers_on_loopback_and_only_with_its_token(served):
    get, address, server = served
    assert server.server_address[0] == address.hostname == "127.0.0.1"
    assert len(address.query.removeprefix("token=")) >= 32
    wrong = (
        "/",
        "/?token=",
        "/?token=x",
        "/data.json",
        f"/data.json?{address.query}x",
        "/?token=%C3%A4",
    )
    assert [get(path)[0] for path in wrong] == [403] * len(wrong)
    status, headers, text = get(f"/?{address.query}")
    assert status == 200 and 'data-live="true"' in text and "connect-src 'self'" in text
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert get(f"/../../etc/passwd?{address.query}")[0] == 404


def test_the_served_data_follow_the_run(served, tmp_path, monkeypatch):
    get, address, _ = served
    monkeypatch.setattr(serve, "FRESH_SECONDS", 0.0)
    before = json.loads(get(f"/data.json?{address.query}")[2])["runs"][0]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(300)) + "\n")
    after = json.loads(get(f"/data.json?{address.query}")[2])["runs"][0]
    assert (before["last_step"], after["last_step"]) == (299, 300)


def test_a_port_in_use_is_one_line(served, tmp_path, capsys):
    port = served[2].server_port
    assert f"--port={port}: Address already in use" in fault(
        capsys, tmp_path / "run", "--serve", f"--port={port}"
    )


def test_a_workdir_without_a_run_raises(tmp_path):
    Path(tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a run"):
        read.Run(tmp_path)
