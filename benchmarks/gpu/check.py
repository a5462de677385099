"""Tests and measurements on the GPUs of this host, in one table.

  bash launch/gpu_check.sh                          # installs jax with CUDA first
  python benchmarks/gpu/check.py [--toy] [--parts tests bandwidth ...] [--output=DIR]

The parts: `info` (an all-reduce), the tests marked gpu, `verify --here`, gpu_step.py for each
model, scaling.py and bandwidth.py. Each has a time limit. One that fails or exceeds its limit is a
row FAILED, and the others continue. The table is printed, and saved with the records of all parts
in benchmarks/results/ (DIR): as text, and as JSON. "MFU % at most" is the ceiling by the rule of
`meshtrain audit`, on devices of meshtrain/hardware.toml. The exit code is 1 if a part
failed, and 2 without a GPU. --toy runs the same at small size on two simulated CPU devices, and
saves nothing without --output.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import devices, gpu_models, record
from benchmarks.lib.devices import Devices

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("check", "case", "result", "ms", "MFU %", "MFU % at most", "GB", "note")
EXIT_FAILED, EXIT_NO_GPU = 1, 2
TAIL = 2000  # characters of the output of a failed part that are saved


class Part(NamedTuple):
    name: str
    minutes: float  # time limit
    command: list[str]  # after the Python
    output: str = ""  # file in the folder of the part
    read: Any = None  # (contents of the file) -> rows


def parts_of(found: Devices, *, toy: bool) -> list[Part]:
    """Returns all parts for these devices."""
    small = ["--toy", "--rounds=1", "--steps=2"] if toy else []
    scaling = ["benchmarks/parallel/scaling.py", *(small or ["--rounds=5", "--steps=10"])]
    simulate = [f"--simulate_devices={found.count}"] if toy else []
    verify = ["verify", "--config=quickstart", "--here", f"--config.train.dtype={found.dtype}"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py", "-m"]
    step = ["benchmarks/compare/gpu_step.py", *small, "--models"]
    return [
        Part("info", 5, ["-m", "meshtrain", "info", *simulate]),
        Part("tests", 30, [*tests, "not gpu" if toy else "gpu"], "junit.xml", rows_of_tests),
        Part("verify --here", 45, ["-m", "meshtrain", *verify, "--quick", *simulate]),
        *(
            Part(f"gpu_step {model}", 30, [*step, model], "step.json", rows_of_steps)
            for model in (gpu_models.TOY if toy else gpu_models.SHAPES)
        ),
        Part("scaling", 60, scaling, "scaling.json", rows_of_scaling),
        Part(
            "bandwidth",
            15,
            ["benchmarks/parallel/bandwidth.py", *small[:1]],
            "bandwidth.json",
            rows_of_bandwidth,
        ),
    ]


def rows_of_tests(text: str) -> Iterator[dict]:
    suite = ElementTree.fromstring(text).find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - sum(counts[name] for name in ("failures", "errors", "skipped"))
    if not passed:
        raise ValueError("no test passed")
    yield {"note": f"{passed} passed, {counts['skipped']} skipped"}


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
    for name, error in found["raw"]["failed"].items():
        yield {"case": name, "result": "failed", "note": error}


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
    if not table:
        yield {"note": "one device: no other to communicate with"}


def run_part(part: Part, folder: Path) -> tuple[list[dict], dict[str, Any]]:
    """Runs one check; returns its rows of the table, and its entry in the saved record."""
    folder.mkdir()
    file, log = folder / part.output, folder / "log.txt"
    flag = "--junitxml" if part.output.endswith(".xml") else "--output"
    has_output = part.output or part.name.startswith("verify")
    command = [sys.executable, *part.command, *([f"{flag}={file}"] if has_output else [])]
    began = time.monotonic()
    fault = _run(command, log, seconds=60 * part.minutes)
    rows, saved = [], {"command": " ".join(["python", *part.command])}
    with contextlib.suppress(OSError):  # it ended before it wrote the file
        text = file.read_text(encoding="utf-8") if part.output else ""
        try:
            rows = list(part.read(text)) if part.read else []
            saved["record"] = json.loads(text) if file.suffix == ".json" else text
        except (ValueError, KeyError, ElementTree.ParseError) as error:
            fault = fault or str(error)
    saved["seconds"] = time.monotonic() - began
    if fault:
        saved["log"] = log.read_text(errors="replace", encoding="utf-8")[-TAIL:]
        rows.append({"result": "FAILED", "note": fault})
    rows = rows or [{"note": f"{saved['seconds']:.0f} s"}]
    first = {"check": part.name, "case": "", "result": "passed"}
    return [dict.fromkeys(COLUMNS) | first | row for row in rows], saved


def _run(command: list[str], log: Path, *, seconds: float) -> str:
    """Runs a command, with its output in a file; returns why it failed, or "".

    Ends its processes after `seconds`.
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
    if code is None:
        return f"not done after {seconds / 60:g} minutes"
    lines = [
        line.strip()
        for line in log.read_text(errors="replace", encoding="utf-8").splitlines()
        if line.strip()
    ]
    return f"exit code {code}: {lines[-1][:150] if lines else 'no output'}" if code else ""


def text_of(rows: list[dict], title: str) -> str:
    table = io.StringIO()
    with contextlib.redirect_stdout(table):
        record.show(rows)
    return f"{title}\n\n{table.getvalue()}"


def save(folder: Path, results: dict[str, Any], text: str) -> None:
    name = record.name_of("gpu-check", results)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"written to {folder / name}.json and .txt")


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="the same at small size, on CPU")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only the parts that begin so")
    args = parser.parse_args()
    folder = args.output or (None if args.toy else record.FOLDER)
    if folder and not folder.is_dir():
        parser.error(f"--output={folder} is no folder")
    os.environ |= devices.environment() | (devices.TOY if args.toy else {})
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found = devices.find()
    if not (found.is_gpu or args.toy):
        print("jax finds no GPU; bash launch/gpu_check.sh --toy runs on CPU", file=sys.stderr)
        return EXIT_NO_GPU
    parts = parts_of(found, toy=args.toy)
    if args.parts:
        parts = [part for part in parts if part.name.startswith(tuple(args.parts))]
    results = record.about(args, devices=[found.kind] * found.count) | {"rows": [], "parts": {}}
    memory = f" with {found.memory / 1e9:.3g} GB" if found.memory else ""
    title = f"{found.count} x {found.kind}{memory}, {found.dtype}"
    with tempfile.TemporaryDirectory() as temporary:
        for number, part in enumerate(parts):
            print(f"{part.name} ...", flush=True)
            rows, saved = run_part(part, Path(temporary, str(number)))
            results["rows"] += rows
            results["parts"][part.name] = saved
            print(
                f"{rows[-1]['result']} after {saved['seconds']:.0f} s: {rows[-1]['note']}",
                flush=True,
            )
    text = text_of(results["rows"], title)
    print(f"\n{text}")
    if folder:
        save(folder, results, text)
    return EXIT_FAILED if any(row["result"] == "FAILED" for row in results["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
