"""Tests and measurements on the GPUs of this host, the most useful first, for a lease of minutes.

  bash launch/gpu_check.sh                            # installs jax with CUDA first
  python benchmarks/gpu/run_queue.py [--minutes=15] [--only NAME ...] [--output=DIR]
  python benchmarks/gpu/run_queue.py --list           # what is done, and what is left

Each entry is a process with a time limit of at most 4 minutes. An entry starts only if its limit
fits into the rest of --minutes. Its record is saved as soon as it ends, in benchmarks/results/
(DIR), with the card and the program in its name, and later calls skip what has a record: for the
same card, the same number of them, the same program (a hash of the files in meshtrain/), the same
jax and the same command. Ctrl-C keeps what is done. Figures of different cards are not compared.

An entry that fails or exceeds its limit is a row FAILED, and the others continue; it is tried again
after all that were never tried. An entry that needs more memory or GPUs than there are, fused
attention, or torch, is skipped, and says why. The table of all records is printed and saved as
text. "MFU % at most" is the ceiling by the rule of `meshtrain audit`, on devices of
meshtrain/hardware.toml. The exit code is 1 if an entry failed, 2 without a GPU, and 130 after
Ctrl-C. --toy runs the same at small size on two simulated CPU devices, and saves nothing without
--output.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import devices, record, settings
from benchmarks.lib.devices import Devices
from meshtrain import hardware
from meshtrain.configs import default
from meshtrain.ops.grouped import HOPPER

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("entry", "case", "result", "ms", "MFU %", "MFU % at most", "GB", "note")
EXIT_FAILED, EXIT_NO_GPU, EXIT_INTERRUPTED = 1, 2, 130
MINUTES, TOY_MINUTES = 15, 120  # of all entries
LIMIT, TOY_LIMIT = 4, 15  # minutes of an entry
LOG = 20_000  # characters of the output of an entry that are saved
LLAMA_BYTES = 110e9  # peak of both steps of Llama 3.1 8B, compiled for h200


# ---- the contents of the outputs, as rows of the table ----


def rows_of_log(text: str) -> Iterator[dict]:
    yield {"note": last_line(text)}


def rows_of_profile(text: str) -> Iterator[dict]:
    (milliseconds,) = re.findall(r"^([\d.]+) ms a step", text, re.MULTILINE)
    untraced = re.search(r"[\d.]+ ms before, with the trace off", text)
    yield {"ms": float(milliseconds), "note": untraced[0] if untraced else ""}


def rows_of_tests(text: str) -> Iterator[dict]:
    suite = ElementTree.fromstring(text).find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - sum(counts[name] for name in ("failures", "errors", "skipped"))
    if not passed:
        raise ValueError("no test passed")
    yield {"note": f"{passed} passed, {counts['skipped']} skipped"}


def rows_of_settings(text: str) -> Iterator[dict]:
    found = json.loads(text)
    for row in found["rows"]:
        first_step = f"first step after {row['to first step, cold s']:.3g} s"
        speed = f"{row['speed / first']:.4g} times the speed of the first"
        yield {
            "case": row["settings"],
            "ms": row["ms per step"],
            "MFU %": row["MFU %, PaLM"],
            "MFU % at most": row["MFU % at most"],
            "GB": row["GB"],
            "note": f"{row['rows']} rows, {first_step}, {speed}",
        }
    yield from rows_of_others(found["skipped"], "skipped")
    yield from rows_of_others(found["raw"]["failed"], "FAILED")


def rows_of_steps(text: str) -> Iterator[dict]:
    found = json.loads(text)
    if "left_out" in found:
        yield {"note": found["left_out"]}
        return
    for row in found["rows"]:
        ratio = f"{row['speed / meshtrain']:.3g} times the speed of meshtrain"
        size = f"{found['batch']} rows, {found['dtype']}, {row['tokens/s']:.4g} tokens/s"
        yield {
            "case": row["implementation"],
            "ms": row["ms per step"],
            "MFU %": row["MFU %, PaLM"],
            "MFU % at most": row["MFU % at most"],
            "GB": row["GB"],
            "note": size if row["implementation"] == "meshtrain" else ratio,
        }
    yield from rows_of_others(found["raw"]["failed"], "FAILED")


def rows_of_others(reasons: Mapping[str, str], result: str) -> Iterator[dict]:
    for name, reason in reasons.items():
        yield {"case": name, "result": result, "note": reason}


def rows_of_curves(text: str) -> Iterator[dict]:
    found = json.loads(text)
    for row in found["rows"]:
        last = f"last losses {row['mean of the last fifth']:.4f}, {row['difference %']:+.2g} %"
        most = f"at most {row['largest difference %']:.2g} % apart"
        yield {"case": row["settings"], "note": f"{last}, {most}"}
    yield from rows_of_others(found["skipped"], "skipped")


def rows_of_statistics(text: str) -> Iterator[dict]:
    for row in json.loads(text)["rows"]:
        errors = f"error {row['one call']:.2g}"
        if row["two chunks"] is not None:
            errors += f", of two chunks {row['two chunks']:.2g}"
        yield {"case": f"{row['case']}: {row['compared']}", "note": errors}


def rows_of_grouped(text: str) -> Iterator[dict]:
    for row in json.loads(text)["rows"]:
        note = f"{row['TFLOP/s']:.4g} TFLOP/s, {row['speed / batched']:.4g} x the speed of batched"
        if row["difference"] is not None:
            note += f", results differ by {row['difference']:.2g}"
        case = f"{row['model']}, {row['load']} load, {row['kernel']}"
        yield {"case": case, "ms": row["ms"], "note": note}


def rows_of_scaling(text: str) -> Iterator[dict]:
    found = json.loads(text)
    for row in found["figures"]:
        note = f"{found['model']}, efficiency {row['efficiency %']:.3g} % of {row['ideal %']:.3g} %"
        columns = {name: row[name] for name in ("MFU %", "MFU % at most", "GB")}
        case = f"{row['layout']} x {row['devices']}"
        yield {"case": case, "ms": row["ms per step"], **columns, "note": note}


def rows_of_bandwidth(text: str) -> Iterator[dict]:
    """Yields the largest size of each collective."""
    table = json.loads(text)["table"]
    for row in {row["collective"]: row for row in table}.values():
        bus = f"{row['bytes'] / (1 << 20):.4g} MiB, {row['device_bus'] / 1e9:.4g} GB/s of the bus"
        yield {"case": row["collective"], "ms": 1e3 * row["device"], "note": bus}


# ---- the entries ----


class Entry(NamedTuple):
    name: str
    command: list[str]  # after the Python
    minutes: float = LIMIT  # time limit
    output: str = ""  # file that the command writes; "": its standard output is read
    read: Callable[[str], Iterator[dict]] = rows_of_log
    why_not: str = ""  # why this host cannot run it


PLAIN, FUSED, PALLAS = "train.kernels=plain", "train.kernels=fused", "train.kernels=pallas"


def formulations() -> list[str]:
    """Returns the settings that are compared with the first, the plain program."""
    return [
        f"{PLAIN} train.xla_preset=none",
        f"{PLAIN} train.xla_preset=cublas",
        f"{FUSED} train.xla_preset=none",
        f"{FUSED} train.xla_preset=cublas",
        f"{FUSED} train.xla_preset=cublas model.loss_chunk_mib=8192",
        f"{PALLAS} train.xla_preset=cublas",
        f"{PALLAS} train.xla_preset=cublas model.loss_chunk_mib=8192",
    ]


def entries_of(found: Devices, *, toy: bool) -> list[Entry]:
    """Returns all entries for these devices, the most useful first."""

    def sized(model: str) -> str:
        """Returns the model, or the tiny one of its family."""
        return f"{model.partition('-')[0]}-toy" if toy else model

    few = ["--rounds=1", "--steps=2"] if toy else []
    small = ["--toy", *few] if toy else []
    tests = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/test_gpu.py", "-m"]
    tests += ["not gpu" if toy else "gpu", "-k"]
    kernels = "attention or cudnn"
    compare = ["benchmarks/compare/gpu_settings.py"]
    llama = [*compare, f"--model={sized('llama3-8b')}", *(few or ["--rounds=2", "--steps=3"])]
    curves = ["benchmarks/compare/loss_curves.py", *(["--toy", "--steps=10"] if toy else [])]
    step = ["benchmarks/compare/gpu_step.py", *(small or ["--rounds=4"])]
    verify = ["verify", "--config=quickstart", "--here", f"--config.train.dtype={found.dtype}"]
    simulate = [f"--simulate_devices={found.count}"] if toy else []
    scaling = ["benchmarks/parallel/scaling.py", *(small or ["--rounds=5", "--steps=10"])]
    too_small = why_too_small(found, LLAMA_BYTES)
    alone = why_alone(found)
    return [
        Entry(
            "formulations",
            # Not all of the limit, so that what was measured is saved.
            [*compare, f"--model={sized('gpt2-124m')}", *few, "--minutes=2.75"]
            + ["--settings", *formulations()],
            output="settings.json",
            read=rows_of_settings,
        ),
        Entry(
            "profile",
            ["-m", "meshtrain", "profile", "--num_devices=1", *profiled(toy=toy)],
            minutes=2,
            read=rows_of_profile,
        ),
        Entry("tests-kernels", [*tests, kernels], output="junit.xml", read=rows_of_tests),
        Entry(
            "tests-training", [*tests, f"not ({kernels})"], output="junit.xml", read=rows_of_tests
        ),
        Entry(
            "llama-1-row",
            # With one layer in the loop, as it was compiled to fit.
            [*llama, "--settings", "train.global_batch=1 train.remat=none train.unroll=1"],
            minutes=3,
            output="settings.json",
            read=rows_of_settings,
            why_not=too_small,
        ),
        Entry(
            "llama-8-rows",
            [*llama, "--settings", "train.global_batch=8 train.remat=full"],
            minutes=3,
            output="settings.json",
            read=rows_of_settings,
            why_not=too_small,
        ),
        Entry(
            "presets",
            ["benchmarks/gpu/presets.py", f"--model={sized('gpt2-124m')}", *few],
            output="presets.json",
            read=rows_of_settings,
        ),
        Entry(
            "loss-curves",
            [*curves, "--settings", formulations()[0], formulations()[3]],
            output="curves.json",
            read=rows_of_curves,
            why_not=why_unknown(formulations()[3]),
        ),
        Entry(
            "attention-statistics",
            ["benchmarks/gpu/attention_statistics.py", *small[:1]],
            minutes=2,
            output="statistics.json",
            read=rows_of_statistics,
            why_not="" if toy else why_unfused(found),
        ),
        Entry(
            "grouped-experts",
            ["benchmarks/gpu/grouped_experts.py", *small[:1]],
            minutes=3,
            output="grouped.json",
            read=rows_of_grouped,
            why_not="" if toy else why_not_hopper(found),
        ),
        Entry("verify", ["-m", "meshtrain", *verify, "--quick", *simulate], output="certificate"),
        Entry(
            "gpt2-350m",
            [*step, "--models", sized("gpt2-350m"), "--only", "meshtrain"],
            minutes=3,
            output="step.json",
            read=rows_of_steps,
        ),
        Entry(
            "gpt2-1.3b",
            [*step, "--models", sized("gpt2-1.3b"), "--only", "meshtrain"],
            output="step.json",
            read=rows_of_steps,
        ),
        Entry(
            "torch",
            [*step, "--models", sized("gpt2-124m"), "--only", "meshtrain", "torch compiled"],
            output="step.json",
            read=rows_of_steps,
            why_not=why_no_torch(),
        ),
        Entry("info", ["-m", "meshtrain", "info", *simulate], minutes=1, why_not=alone),
        Entry("scaling", scaling, output="scaling.json", read=rows_of_scaling, why_not=alone),
        Entry(
            "bandwidth",
            ["benchmarks/parallel/bandwidth.py", *small[:1]],
            output="bandwidth.json",
            read=rows_of_bandwidth,
            why_not=alone,
        ),
    ]


def profiled(*, toy: bool) -> list[str]:
    """Returns the flags of the profile."""
    if toy:
        return ["--config=quickstart", "--steps=2..3"]
    synthetic = "--config.data.build=meshtrain.data.synthetic:build"
    size = "--config.train.global_batch=64"
    return ["--config=gpt2", size, synthetic, "--steps=5..7", "--top=30"]


def why_too_small(found: Devices, needed: float) -> str:
    if found.memory is None or found.memory >= needed:
        return ""
    return f"needs {needed / 1e9:.0f} GB, and jax may allocate {found.memory / 1e9:.0f} GB"


def why_alone(found: Devices) -> str:
    return "" if found.count > 1 else "needs several GPUs"


def why_unfused(found: Devices) -> str:
    return "" if found.has_fused_attention else f"{found.kind} has no fused attention"


def why_not_hopper(found: Devices) -> str:
    row = hardware.device_of(found.kind)
    is_other = row and row.chip and row.chip.capability != HOPPER
    return f"grouped kernels need a Hopper GPU, and this is {found.kind}" if is_other else ""


def why_no_torch() -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def why_unknown(text: str) -> str:
    """Returns why this version does not know the settings, or ""."""
    _, skipped = settings.apply_each(default.get_config(), [text])
    return skipped.get(text, "")


# ---- the records ----


def hash_of_program() -> str:
    """Returns a hash of the files in meshtrain/, which a checkout without git has too."""
    digest = hashlib.sha256()
    folder = ROOT / "meshtrain"
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def newest_record(folder: Path, entry: Entry, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest record of an entry for these devices and this program, if there is one."""
    found = []
    for path in folder.glob(f"{model_of(entry, about)}_*.json"):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # incomplete: the queue was killed
            continue
        if identity(saved) == identity(about | {"entry_command": entry.command}):
            found.append(saved)
    return max(found, key=lambda saved: saved["date"], default=None)


def identity(saved: Mapping[str, Any]) -> tuple:
    """Returns what two runs of an entry must share, to be the same measurement."""
    versions = saved["versions"]
    return (
        saved["program"],
        saved["devices"],
        versions["jax"],
        versions["jaxlib"],
        saved["entry_command"],
    )


def model_of(entry: Entry, about: Mapping[str, Any]) -> str:
    """Returns the first part of the name of a record."""
    return f"{entry.name}-{about['program'][:8]}"


def has_failed(saved: Mapping[str, Any]) -> bool:
    return any(row["result"] == "FAILED" for row in saved["rows"])


# ---- running ----


def run_entry(entry: Entry, folder: Path, *, minutes: float) -> dict[str, Any]:
    """Runs an entry in a folder of its own; returns its part of the record."""
    folder.mkdir()
    file, log = folder / (entry.output or "none"), folder / "log.txt"
    command = [sys.executable, *entry.command]
    if entry.output:
        flag = "--junitxml" if file.suffix == ".xml" else "--output"
        command.append(f"{flag}={file}")
    began = time.monotonic()
    fault = run_command(command, log, seconds=60 * minutes)
    text = log.read_text(errors="replace", encoding="utf-8")
    saved: dict[str, Any] = {"seconds": time.monotonic() - began, "log": text[-LOG:]}
    rows = []
    is_file = bool(file.suffix)  # else a folder, or nothing, and the log is read
    if is_file and not file.exists():
        fault = fault or "it wrote no record"
    elif is_file or not fault:  # a record may have rows in spite of a fault
        text = file.read_text(encoding="utf-8") if is_file else text
        try:
            rows = list(entry.read(text))
            saved["record"] = json.loads(text) if file.suffix == ".json" else None
        except (ValueError, KeyError, ElementTree.ParseError) as error:
            fault = fault or f"its output cannot be read: {error}"
    if not rows:
        fault = fault or "its record has no rows"
    if fault:
        rows.append({"result": "FAILED", "note": fault})
    first = {"entry": entry.name, "case": "", "result": "passed"}
    saved["rows"] = [dict.fromkeys(COLUMNS) | first | row for row in rows]
    return saved


def run_command(command: list[str], log: Path, *, seconds: float) -> str:
    """Runs a command, with its output in a file; returns why it failed, or "".

    Ends its processes after `seconds`, and if this process is interrupted.
    """
    with log.open("w", encoding="utf-8") as file:
        options = dict(cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = last_line(log.read_text(errors="replace", encoding="utf-8"))
    if code is None:
        return f"not done after {seconds / 60:g} minutes: {last}"
    return f"exit code {code}: {last}" if code else ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:150] if lines else "no output"


def in_order(entries: Sequence[Entry], records: Mapping[str, dict]) -> list[Entry]:
    """Returns the entries to run: those never tried, then those that failed."""
    possible = [entry for entry in entries if not entry.why_not]
    never_tried = [entry for entry in possible if entry.name not in records]
    failed = [
        entry for entry in possible if entry.name in records and has_failed(records[entry.name])
    ]
    return never_tried + failed


def run_all(
    queue: Sequence[Entry],
    records: dict[str, dict],
    about: Mapping[str, Any],
    *,
    folder: Path | None,
    deadline: float,
    limit: float | None,
) -> list[str]:
    """Runs entries whose limits end before the deadline; returns the names of those that ran.

    Adds each record to `records`, and saves it in the folder, before the next entry starts. `limit`
    is in minutes, and the deadline in seconds of `time.monotonic`.
    """
    ran = []
    with tempfile.TemporaryDirectory() as temporary:
        for entry in queue:
            entry_minutes = limit or entry.minutes
            # The next one may be shorter.
            if time.monotonic() + 60 * entry_minutes > deadline:
                continue
            print(f"{entry.name} ...", flush=True)
            # As of now: the load, and the date in the name.
            now = record.now() | {"entry": entry.name, "entry_command": entry.command}
            saved = run_entry(entry, Path(temporary, entry.name), minutes=entry_minutes)
            records[entry.name] = {**about, **now, **saved}
            ran.append(entry.name)
            result = "FAILED" if has_failed(saved) else "passed"
            notes = [row["note"] for row in saved["rows"] if row["result"] == result]
            print(f"{result} after {saved['seconds']:.0f} s: {notes[-1]}", flush=True)
            record.save(folder, records[entry.name], model=model_of(entry, about))
    return ran


# ---- what is printed ----


def states_of(entries: Sequence[Entry], records: Mapping[str, dict]) -> list[dict]:
    """Returns the rows of --list."""
    rows = []
    for entry in entries:
        saved = records.get(entry.name)
        row = {
            "entry": entry.name,
            "state": "left",
            "when": None,
            "limit": f"{entry.minutes:g} min",
        }
        if saved:
            state = "FAILED" if has_failed(saved) else "done"
            row |= {"state": state, "when": saved["date"][:16]}
        elif entry.why_not:
            row["state"] = f"skipped: {entry.why_not}"
        rows.append(row)
    return rows


def text_of(title: str, entries: Sequence[Entry], records: Mapping[str, dict]) -> str:
    """Returns the table of all records, with a row for each entry that is skipped."""
    rows = []
    for entry in entries:
        if entry.name in records:
            rows += records[entry.name]["rows"]
        elif entry.why_not:
            skipped = {"entry": entry.name, "result": "skipped", "note": entry.why_not}
            rows.append(dict.fromkeys(COLUMNS) | skipped)
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        if rows:
            record.show(rows)
    return f"{title}\n\n{table.getvalue()}"


def select(parser: argparse.ArgumentParser, entries: Sequence[Entry], only: Sequence[str] | None):
    """Returns the entries whose names begin like one of `only`."""
    for name in only or ():
        if not any(entry.name.startswith(name) for entry in entries):
            names = ", ".join(entry.name for entry in entries)
            parser.error(f"--only {name}: no entry begins so; there are {names}")
    return [entry for entry in entries if not only or entry.name.startswith(tuple(only))]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--list", action="store_true", help="print what is done and what is left")
    parser.add_argument("--only", "--parts", nargs="+", metavar="NAME",
                        help="only the entries that begin so")  # fmt: skip
    parser.add_argument("--minutes", type=float, help=f"of all entries (default: {MINUTES})")
    parser.add_argument("--limit", type=float, metavar="MINUTES",
                        help="of each entry, instead of its own")  # fmt: skip
    parser.add_argument("--toy", action="store_true", help="the same at small size, on CPU")
    args = parser.parse_args()
    folder = args.output or (None if args.toy else record.FOLDER)
    if folder and not folder.is_dir():
        parser.error(f"--output={folder} is no folder")
    began = time.monotonic()
    # Without this the processes of the running entry would outlive the queue.
    signal.signal(signal.SIGTERM, interrupt)
    os.environ |= devices.environment() | (devices.TOY if args.toy else {})
    os.environ["PYTHONUNBUFFERED"] = "1"  # the log of an entry that is ended has its last lines
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found = devices.find()
    if not (found.is_gpu or args.toy):
        print("jax finds no GPU; bash launch/gpu_check.sh --toy runs on CPU", file=sys.stderr)
        return EXIT_NO_GPU
    about = record.about(args, devices=[found.kind] * found.count)
    about["program"] = hash_of_program()
    entries = select(parser, entries_of(found, toy=args.toy), args.only)
    records = {}
    for entry in entries if folder else ():
        saved = newest_record(folder, entry, about)
        if saved:
            records[entry.name] = saved
    memory = f" with {found.memory / 1e9:.3g} GB" if found.memory else ""
    title = f"{found.count} x {found.kind}{memory}, {found.dtype}, program {about['program']}"
    if args.list:
        print(f"{title}\n")
        record.show(states_of(entries, records))
        return 0
    minutes = args.minutes or (TOY_MINUTES if args.toy else MINUTES)
    deadline = began + 60 * minutes
    return run_and_report(args, title, entries, records, about, folder=folder, deadline=deadline)


def run_and_report(
    args: argparse.Namespace,
    title: str,
    entries: Sequence[Entry],
    records: dict[str, dict],
    about: Mapping[str, Any],
    *,
    folder: Path | None,
    deadline: float,
) -> int:
    """Runs what is left, and prints and saves the table; returns the exit code."""
    ran, is_interrupted = [], False
    try:
        ran = run_all(
            in_order(entries, records),
            records,
            about,
            folder=folder,
            deadline=deadline,
            limit=args.limit or (TOY_LIMIT if args.toy else None),
        )
    except KeyboardInterrupt:
        is_interrupted = True
    text = text_of(title, entries, records)
    print(f"\n{text}")
    if folder and records:
        file = folder / f"{record.name_of('gpu-check', about)}.txt"
        file.write_text(text, encoding="utf-8")
        print(f"written to {file}")
    left = [entry.name for entry in in_order(entries, records) if entry.name not in ran]
    if left:
        print(f"left for another call: {', '.join(left)}")
    if is_interrupted:
        print("interrupted; the records above are complete", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(has_failed(records[name]) for name in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
