"""Runs the default test suite several times beside a load, and counts the tests that failed.

  python -m tests.flakes                     ten runs of this commit; a call that was ended resumes
  python -m tests.flakes --runs=3 --load=1   three runs beside one busy process

The load is as many busy processes as the machine has cores, so that each test waits for its turn.
build/flakes/results.jsonl has a line for each run; only complete runs of the present commit count.
The exit code is 1 if a test failed in any of them.
"""

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from tests.lib.paths import ROOT

FOLDER = ROOT / "build" / "flakes"
RESULTS = FOLDER / "results.jsonl"
BUSY = "while True: pass"


@contextlib.contextmanager
def load(num_processes: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def commit() -> str:
    """Returns the commit of the checkout, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def failed_tests(report: Path) -> dict[str, str]:
    """Returns the first line of the message of each failed test in pytest's JUnit report."""
    failed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            failed[name] = (fault.get("message") or "").partition("\n")[0]
    return failed


def run_once(number: int, num_busy: int) -> dict:
    report = FOLDER / f"run_{number}.xml"
    command = ["bash", "launch/test.sh", "-m", "not slow", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    start = time.monotonic()
    with load(num_busy), open(FOLDER / f"run_{number}.log", "w") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output).returncode
    if not report.exists():
        raise SystemExit(f"{output.name}: exit code {code}, and no report")
    failed = failed_tests(report)
    if code and not failed:  # such as a crash of all workers
        failed["launch/test.sh"] = f"exit code {code}"
    return {"seconds": round(time.monotonic() - start), "failed": failed}


def runs_of(commit_of_runs: str) -> list[dict]:
    if not RESULTS.exists():
        return []
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [run for run in runs if run["commit"] == commit_of_runs]


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--runs", type=int, default=10, help="of this commit in all")
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="busy processes beside it")
    args = parser.parse_args()

    FOLDER.mkdir(parents=True, exist_ok=True)
    current = commit()
    runs = runs_of(current)
    while len(runs) < args.runs:
        run = {"commit": current} | run_once(len(runs) + 1, args.load)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(run) + "\n")
        runs.append(run)
        print(f"run {len(runs)}: {len(run['failed'])} failed, {run['seconds']} s", flush=True)

    counts = collections.Counter(test for run in runs for test in run["failed"])
    print(f"{len(runs)} runs of {current}: {len(counts)} tests failed in at least one")
    for test, count in counts.most_common():
        message = next(run["failed"][test] for run in runs if test in run["failed"])
        print(f"  {count} of {len(runs)}  {test}: {message[:120]}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
