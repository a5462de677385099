"""Streams that break, Ctrl-C and other signals at any time, and the progress bar: nothing is lost, no traceback."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

SMALL = [
    "--config=meshtrain/configs/default.py",
    "--config.data.build=meshtrain.data.synthetic:build",
    "--config.model.num_layers=1",
    "--config.model.d_model=32",
    "--config.model.d_ff=32",
    "--config.eval.batches=0",
]
COMMAND = [sys.executable, "-m", "meshtrain"]


def shell(script, **options):
    """Runs a script in which $M is `python -m meshtrain`; returns exit code and stderr."""
    environ = {**os.environ, "M": " ".join(COMMAND), "SMALL": " ".join(SMALL)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True, **options
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def events(workdir):
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


# ---- streams that break ----

SCHEDULE = "$M schedule --schedule=1f1b --stages=2 --microbatches=4"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (f"{SCHEDULE} | true; exit ${{PIPESTATUS[0]}}", 0),
        (f"{SCHEDULE} >/dev/full", 1),
        (f"{SCHEDULE} >&-", 1),
        (f"{SCHEDULE} >/dev/full 2>&1", 1),
        ("$M train --help >/dev/full", 1),
        ("$M train --help | true; exit ${PIPESTATUS[0]}", 0),
        ("$M trian 2>/dev/full", 2),
        ("$M trian 2>&- >&- <&-", 2),
        ("PYTHONIOENCODING=ascii $M train --help", 0),
    ],
)
def test_a_broken_stream_changes_only_the_exit_code(script, code):
    found, output = shell(script)
    assert found == code
    if "2>" not in script and code == 1:
        assert "stdout: " in output and "the output is incomplete" in output


def test_a_run_whose_streams_break_continues_and_logs_to_the_workdir(tmp_path):
    runs = {
        "full": "$M train $SMALL --workdir=DIR >/dev/full 2>/dev/full",
        "head": "PYTHONIOENCODING=ascii $M train $SMALL --workdir=DIR | head -1; exit ${PIPESTATUS[0]}",
        "closed": "$M launch -- $SMALL --workdir=DIR >&- 2>&- <&-",
    }
    errors = {"full": "No space left on device", "head": "Broken pipe", "closed": "Bad file desc"}
    for name, script in runs.items():
        script = script.replace("DIR", f"{tmp_path / name} --config.train.steps=3")
        assert shell(script.replace("$SMALL", "$SMALL --config.train.log_every=1"))[0] == 0, name
        workdir = tmp_path / name
        assert [one["event"] for one in events(workdir)].count("end") == 1
        log = (workdir / "log.txt").read_text()
        assert "done: 3 steps" in log and re.search(r"step 2/3 [?·] loss", log)
        lost = [one for one in events(workdir) if one["event"] == "output_lost"]
        assert {"stream": "stdout", "error": errors[name]}.items() <= {
            **lost[0],
            "error": lost[0]["error"][: len(errors[name])],
        }.items(), lost
        assert len(lost) <= 2


def test_the_api_survives_a_stream_that_its_caller_has_replaced(tmp_path, monkeypatch, tiny):
    from meshtrain.train import train

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert train(tiny, workdir=tmp_path).step == 3
        monkeypatch.undo()
        full.truncate = None  # its buffer cannot be flushed
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert "done: 3 steps" in (tmp_path / "log.txt").read_text()
    assert [one["stream"] for one in events(tmp_path) if one["event"] == "output_lost"] == [
        "stdout"
    ]


# ---- signals ----


def start(arguments, **options):
    return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, text=True, **options)


@pytest.mark.parametrize("through", [[], ["launch", "--"]], ids=["alone", "launch"])
def test_a_closed_terminal_saves_the_run(through, tmp_path):
    """The terminal is really closed: SIGHUP, and errors in all writes."""
    leader, follower = pty.openpty()
    arguments = [*SMALL, f"--workdir={tmp_path}", "--config.train.steps=100000"]
    terminal = dict(stdin=follower, stdout=follower, stderr=follower)
    process = start([*through, *arguments], start_new_session=True, **terminal)
    os.close(follower)
    read_until(leader, "step   ")
    os.close(leader)
    for _ in range(3):  # a shell and the kernel may each send one
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    assert process.wait(60) == 75
    found = events(tmp_path)
    assert "preempted" in {one["event"] for one in found}
    assert {one["event"] for one in found} & {"save", "output_lost"} == {"save", "output_lost"}


def test_a_process_that_is_started_with_nohup_ignores_sighup():
    program = """if True:
        import os, signal, time
        from meshtrain.cluster import signals
        with signals.handled_in_thread(), signals.stop_event() as event:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.2)
                print(number.name, event.is_set(), flush=True)
            time.sleep(30)
        """
    for ignore, stopped in (("trap '' HUP; ", "TERM"), ("", "HUP")):
        command = ["bash", "-c", f'{ignore}exec "$@"', "-", sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        first = done.stdout.split("\n").index(f"SIG{stopped} True")
        assert first == (2 if ignore else 0)
        assert done.returncode == 128 + signal.SIGTERM and "aborted" in done.stderr


def read_until(fd, text, seconds=60):
    """Returns what a terminal shows until `text`."""
    shown, until = "", time.monotonic() + seconds
    while text not in shown and time.monotonic() < until:
        if select.select([fd], [], [], 1)[0]:
            try:
                shown += os.read(fd, 1 << 16).decode()
            except OSError:  # closed
                break
    assert text in shown, shown
    return shown


def catches(process, number):
    """Whether a process handles a signal, which Python does by itself only for SIGINT."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> number - 1 & 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", *SMALL],
        ["convert", "nowhere", "TARGET"],
        ["prepare", "INPUT", "--output=TARGET", "--train_bpe=30000"],
        ["verify", "--config=meshtrain/configs/default.py", "--simulate_devices=2"],
        ["launch", "--", "verify", "--config=meshtrain/configs/default.py"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_ctrl_c_ends_every_verb_at_once_with_one_line(arguments, tmp_path):
    (tmp_path / "text").mkdir()
    words = (f"word{i * i % 9973}x{i}" for i in range(300_000))
    (tmp_path / "text" / "a.txt").write_text(" ".join(words))
    arguments = [
        one.replace("TARGET", str(tmp_path / "out")).replace("INPUT", str(tmp_path / "text"))
        for one in arguments
    ]
    for seconds in (0, 0.1) if arguments[0] in ("train", "convert") else (0, 3.0):
        process = start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not catches(process, signal.SIGTERM):
            time.sleep(0.01)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 130, (seconds, output, errors)
        assert "Traceback" not in errors and errors.endswith("interrupted\n"), errors
    assert not (tmp_path / "out" / "manifest.json").exists()
