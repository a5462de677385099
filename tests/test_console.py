"""Streams that break, signals at any time, and the progress bar: nothing is lost, no traceback."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from meshtrain import console
from tests.lib.paths import ROOT
from tests.lib.rows import losses

SMALL = [
    "--config=meshtrain/configs/default.py",
    "--config.data.build=meshtrain.data.synthetic:build",
    "--config.model.num_layers=1",
    "--config.model.d_model=32",
    "--config.model.d_ff=32",
    "--config.model.vocab_size=64",
    "--config.data.seq_len=16",
    "--config.train.global_batch=2",
    "--config.eval.batches=0",
]
COMMAND = [sys.executable, "-m", "meshtrain"]


@pytest.fixture(autouse=True, scope="module")
def sighup_ends_a_process():
    """Otherwise processes would inherit from `nohup bash launch/test.sh` that SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def shell(script, **options):
    """Runs a script in which $M is `python -m meshtrain`; returns exit code and stderr."""
    environ = {**os.environ, "M": " ".join(COMMAND), "SMALL": " ".join(SMALL)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True, **options
    )
    output = done.stdout + done.stderr
    assert not {word for word in ("Traceback", "Exception ignored", "\x1b") if word in output}, (
        output
    )
    return done.returncode, output


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


@pytest.mark.slow
def test_a_run_whose_streams_break_continues_and_logs_to_the_workdir(tmp_path):
    runs = {
        "full": "$M train $SMALL --workdir=DIR >/dev/full 2>/dev/full",
        "head": "PYTHONIOENCODING=ascii $M train $SMALL --workdir=DIR | head -1; exit "
        "${PIPESTATUS[0]}",
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


@pytest.mark.slow
def test_the_api_survives_a_stream_that_its_caller_has_replaced(tmp_path, monkeypatch, tiny):
    from meshtrain.train import train

    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert train(tiny, workdir=tmp_path).step == 3
        monkeypatch.undo()
        full.truncate = None  # its buffer cannot be flushed
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert not console.faults
    assert "done: 3 steps" in (tmp_path / "log.txt").read_text()
    assert [one["stream"] for one in events(tmp_path) if one["event"] == "output_lost"] == [
        "stdout"
    ]


# ---- signals ----


def on_terminal(arguments, *, until=None, columns=0, **variables):
    """Runs a command on a terminal, and presses Ctrl-C when it shows `until`.

    Returns exit code and output.
    """
    leader, follower = pty.openpty()
    os.set_inheritable(follower, True)
    if columns:
        termios.tcsetwinsize(follower, (24, columns))
    # Makes the terminal its own, so that Ctrl-C goes to all its processes.
    own = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    terminal = dict(stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
    command = [sys.executable, "-c", own, *arguments]
    # Whatever the terminal of the tests is; without TERM, the tokenizers package shows nothing.
    environ = os.environ | {"TERM": "xterm"} | variables
    process = subprocess.Popen(command, cwd=ROOT, env=environ, **terminal)
    os.close(follower)
    shown = ""
    if until:
        shown = read_until(leader, until)
        os.write(leader, b"\x03")
    with contextlib.suppress(OSError):  # closed by the last process
        while output := os.read(leader, 1 << 16):
            shown += output.decode()
    os.close(leader)
    return process.wait(60), shown


def start(arguments, **options):
    return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, text=True, **options)


@pytest.mark.parametrize(
    "through",
    [[], pytest.param(["launch", "--"], marks=pytest.mark.slow)],
    ids=["alone", "launch"],
)
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
            hup, term = signal.SIGHUP, signal.SIGTERM
            for number in (hup, hup, term, hup, term):
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


def test_deferred_signals_have_their_effect_afterwards():
    program = """if True:
        import os, signal, time
        from meshtrain.cluster import signals
        with signals.handled_in_thread():
            with signals.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
                print("alive", flush=True)
            time.sleep(30)
            print("not reached")
        """
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "alive\n"), done.stderr


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
        pytest.param(
            ["verify", "--config=meshtrain/configs/default.py", "--simulate_devices=2"],
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_of_verify(tmp_path):
    arguments = ["verify", "--config=quickstart", "--simulate_devices=2", "--jobs=2", "--quick"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    process = start([*arguments, f"--output={tmp_path}"], **options)
    while "compared with one device" not in process.stdout.readline():
        pass
    while len(in_session(process.pid)) < 3:  # itself and its workers
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "interrupted\n")
    deadline = time.monotonic() + 20
    while in_session(process.pid):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.1)


def in_session(session):
    """Returns the processes of a session; those of other programs may end meanwhile."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


# ---- the progress bar ----


def history(shown):
    """Returns the lines that stay on a terminal, and all that the bar showed."""
    lines = [line.split("\r\x1b[K") for line in shown.split("\r\n")]
    return [line[-1] for line in lines], [frame for line in lines for frame in line[:-1] if frame]


LINES_AND_BAR = """if True:
    import sys, time
    from meshtrain import console
    console.guard()
    with console.progress("working", 10) as advance:
        for number in range(10):
            time.sleep(console.DRAW_SECONDS)
            advance()
            if number == 4:
                print("a line", flush=True)
                print("part", end=" ", flush=True)
                advance(0)
                print("of a line", file=sys.stderr)
"""


def test_lines_stay_above_the_bar_and_the_bar_is_removed():
    code, shown = on_terminal([sys.executable, "-c", LINES_AND_BAR], columns=60)
    lines, frames = history(shown)
    assert code == 0 and lines == ["a line", "part of a line", ""], shown
    done = [int(re.search(r"(\d+)%", frame)[1]) for frame in frames]
    assert done == sorted(done) and {10, 50, 60, 100} <= {*done}
    assert all(len(frame) < 60 for frame in frames)
    assert "[==========          ] working · 50%" in frames[done.index(50)]
    assert on_terminal(["/usr/bin/env", "TERM=dumb", sys.executable, "-c", LINES_AND_BAR]) == (
        0,
        "a line\r\npart of a line\r\n",
    )


@pytest.mark.slow
def test_the_bar_of_a_run_moves_between_the_logged_lines(tmp_path):
    arguments = [*COMMAND, "train", *SMALL, f"--workdir={tmp_path}"]
    arguments += ["--config.train.steps=400", "--config.train.log_every=100"]
    code, shown = on_terminal(arguments)
    lines, frames = history(shown)
    logged = [re.match(r"step +(\d+)/400 · loss ", line) for line in lines]
    assert code == 0 and [int(found[1]) for found in logged if found] == [0, 100, 200, 300, 399]
    form = (
        r"(\[=* *\] )?(\d+)/400 loss [\d.]+ grad norm [\d.]+ lr \S+ [\d.]+[kMG]? tokens/s "
        r"[\d:]+ left"
    )
    phases = ["starting the devices", "opening model and data", "initialising the state"]
    phases.append("compiling the step")
    assert frames[:4] == phases and "saving step 400" in frames
    frames = [frame for frame in frames if frame not in (*phases, "saving step 400")]
    matches = {
        frame: re.fullmatch(form, frame.replace(" ·", ""))
        for frame in frames
        if not frame.endswith(" 0/400")
    }
    assert all(matches.values()), [frame for frame in matches if not matches[frame]]
    steps = [int(found[2]) for found in matches.values()]
    assert steps == sorted(steps) and len({*steps} - {1, 101, 201, 301, 400}) > 1, steps
    assert lines[-1] == "" and lines[-3].startswith("done: 400 steps")
    # The path of the command, if it is not on PATH.
    path, _, report = lines[-2].partition("meshtrain report ")
    assert path == "next: " or path.endswith("/bin/")
    assert report == f"{tmp_path} --output=report.html · --config.train.steps=800 continues it"

    # Resumed, without anything to do: only the phases are left to show.
    code, shown = on_terminal(arguments)
    assert code == 0 and "restoring step 400" in history(shown)[1]


def test_quiet_leaves_out_progress_alone(tmp_path):
    arguments = [*COMMAND, "train", *SMALL, "--config.train.steps=3", "--config.train.log_every=1"]
    code, shown = on_terminal([*arguments, f"--workdir={tmp_path}/quiet", "--quiet"])
    lines, frames = history(shown)
    assert (code, frames) == (0, [])
    assert [line.partition(" ")[0] for line in lines] == ["warning", "done:", ""], shown
    code, shown = on_terminal([*arguments, f"--workdir={tmp_path}/loud"])
    assert code == 0 and "step 2/3 · loss" in shown and "compiled in" in shown
    assert {*re.findall(r"\x1b\[[\d;?]*[A-Za-z]", shown)} == {"\x1b[K"}  # no colours
    assert losses(tmp_path / "quiet") == losses(tmp_path / "loud")
    names = [[event["event"] for event in events(tmp_path / one)] for one in ("quiet", "loud")]
    assert names[0] == names[1]


@pytest.mark.multiprocess
def test_quiet_processes_are_launched_by_a_quiet_supervisor(tmp_path):
    launch = [*COMMAND, "launch", "--nproc=2", "--quiet", "--", *SMALL, f"--workdir={tmp_path}"]
    launch.append("--config.train.steps=3")
    done = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if "] warning " not in line]
    assert len(lines) == 1 and lines[0].startswith("[0] done: 3 steps"), done.stdout
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "\nstep 2/3 · loss" in log and "\ncompiled in" in log and "\ndone: 3 steps" in log


def test_only_the_bar_uses_codes_of_the_terminal_and_only_where_there_are_any(tmp_path):
    package = [*(ROOT / "meshtrain").rglob("*.py")]
    sources = {path.name for path in package if re.search(r"\\x1b|\\033|\\e\[", path.read_text())}
    assert sources == {"console.py"}
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(
            " ".join(map(str, range(9_000 * number, 9_000 * number + 9_000)))
        )
    prepare = [*COMMAND, "prepare", str(tmp_path), "--num_workers=1", "--train_bpe=300"]
    shown = {}
    for name, variables in (("dumb", {"TERM": "dumb"}), ("plain", {"NO_COLOR": "1"})):
        code, shown[name] = on_terminal([*prepare, f"--output={tmp_path}/{name}"], **variables)
        assert code == 0 and "documents" in shown[name], shown
    assert "\x1b" not in shown["dumb"] and "Pre-processing" not in shown["dumb"]
    assert "\x1b[K" in shown["plain"] and not re.search(r"\x1b\[[\d;]*m", shown["plain"])


@pytest.mark.slow
def test_long_verbs_show_their_progress_and_ctrl_c_interrupts_all_their_processes(tmp_path, tiny):
    tiny.model.vocab_size = 259
    from meshtrain.train import train

    train(tiny, workdir=tmp_path / "run")
    (tmp_path / "text").mkdir()
    for number in range(40):
        words = (f"word{i * i % 9973}x{i + number}" for i in range(30_000))
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(words))
    prepare = (
        f"prepare {tmp_path}/text --output={tmp_path}/out --num_workers=2 --shard_tokens=100000"
    )
    for arguments, until, code, expected in (
        (f"checkpoint verify {tmp_path}/run", None, 0, ["checking"]),
        (f"convert {tmp_path}/run {tmp_path}/hf", None, 0, ["checking", "writing"]),
        (f"convert {tmp_path}/hf {tmp_path}/back", None, 0, ["reading", "saving"]),
        (f"{prepare} --train_bpe=3000", "Compute merges", 130, ["Pre-processing"]),
        (f"{prepare} --train_bpe=3000", "MB/s", 130, ["left"]),
        (f"{prepare} --train_bpe=3000", None, 0, ["left"]),
        (f"prepare --verify {tmp_path}/out", None, 0, ["checking"]),
    ):
        found, shown = on_terminal([*COMMAND, *arguments.split()], until=until, columns=120)
        assert found == code and "Traceback" not in shown, (arguments, shown)
        assert all(word in shown for word in [*expected, *["interrupted"] * (code == 130)]), shown
        assert (tmp_path / "out" / "manifest.json").exists() == (
            until is None and "out" in arguments
        )


def test_what_arrives_at_stderr_is_kept_until_the_last_block_ends(capfd):
    """An urgent line, such as that of Ctrl-C, does not wait: the process may end at once."""
    with console.keeping_stderr():
        with console.keeping_stderr():
            os.write(2, b"first\n")
        console.write_now("now\n")
        assert capfd.readouterr().err == "now\n"
    assert capfd.readouterr().err == "first\n"
    with console.keeping_stderr() as discard:
        os.write(2, b"a page of Rust\n")
        discard()
        os.write(2, b"second\n")
    os.write(2, b"third\n")
    assert capfd.readouterr().err == "second\nthird\n"
