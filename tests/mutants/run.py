"""Plants bugs one at a time and reports what finds each: `verify --quick`, `verify`, or the tests.

  python tests/mutants/run.py                               all bugs: verify --quick, then the tests
  python tests/mutants/run.py 'ring_*' --stages=quick,full,tests --jobs=2
  python tests/mutants/run.py 'ring_*' --unchanged          the same without a bug: must pass
  python tests/mutants/run.py --stages=                     only writes README.md from results.jsonl

A bug is a patch: NAME.patch, a unified diff after a header. `Bug:` says what is wrong; `Tests:`
lists the test files (or tests, FILE::TEST, which may be slow) that must find it if verify does not;
`Config:` has the flags of verify (default: --config=configs/quickstart.py; "none" if verify does
not run this code). The patch is applied to a copy of the repository, where the stages run one after
the other until one of them finds the bug. A crash is not a find: it is reported, and the next stage
runs.

Each result is appended to results.jsonl. A stage that has a result for the same change is not run
again: to run all stages again, for example after a change of verify, remove that file.
"""

import argparse
import collections
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS, TABLE = FOLDER / "results.jsonl", FOLDER / "README.md"
STAGES = ("quick", "full", "tests")
QUICKSTART, NONE = "--config=configs/quickstart.py", "none"
# What verify and pytest print when they find a bug.
FOUND, FOUND_BY_TESTS = re.compile(r"\bFAILED\b"), re.compile(r"^(FAILED|ERROR) tests/\S+::")
CRASH = re.compile(r"\b\w+(Error|Exception)\b")  # verify reports an exception as a failed layout
RUNNING: set[subprocess.Popen] = set()  # Ctrl-C ends them
INTRODUCTION = """# Planted bugs

Written by `python tests/mutants/run.py --stages=` from `results.jsonl`; `run.py` explains the
patches and its flags.
The stages run from left to right until one finds the bug, so the cells after it are empty.
"n/a": `verify` does not run this code.

"""


class Mutant(NamedTuple):
    name: str
    bug: str
    tests: tuple[str, ...]  # files, or FILE::TEST
    config: str  # flags of verify, or "none"
    patch: str  # header and diff
    digest: str  # see `digest_of`


def load() -> list[Mutant]:
    """Returns the bugs of all patches, by name."""
    mutants = []
    for path in sorted(FOLDER.glob("*.patch")):
        patch = path.read_text()
        header = dict(line.split(": ", 1) for line in patch.partition("\n\n")[0].splitlines())
        tests, config = tuple(header["Tests"].split()), header.get("Config", QUICKSTART)
        mutants.append(Mutant(path.stem, header["Bug"], tests, config, patch, digest_of(patch)))
    return mutants


def digest_of(patch: str) -> str:
    """Returns a digest of the lines that a patch removes and adds.

    It does not depend on their place: a moved file, other lines around the bug, another indent or
    line break, and another list of tests keep the result.
    """
    _, _, diff = patch.partition("\n\n")
    lines = [line for line in diff.splitlines() if line[:1] in ("-", "+")]
    lines = [line for line in lines if not line.startswith(("--- ", "+++ "))]
    removed = "".join("".join(line[1:].split()) for line in lines if line[0] == "-")
    added = "".join("".join(line[1:].split()) for line in lines if line[0] == "+")
    return hashlib.sha256(f"{removed}\0{added}".encode()).hexdigest()[:12]


def plant(patch: str, folder: Path, *flags: str) -> None:
    """Applies a patch to the copy of the repository in `folder`.

    Raises CalledProcessError if it does not apply.
    """
    # git would skip all files silently if a folder above were a repository.
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    where = dict(cwd=folder, env=environ)
    subprocess.run(["git", "apply", *flags, "-"], input=patch, text=True, check=True, **where)


def copy_repository(folder: Path) -> None:
    def skip(parent: str, names: list[str]) -> set[str]:
        outputs = {"runs", "data", "models", "certificate", "profile", "build"}  # see .gitignore
        hidden = {name for name in names if name.startswith(".")}
        return {"__pycache__"} | (hidden | outputs if Path(parent) == ROOT else set())

    shutil.copytree(ROOT, folder, symlinks=True, ignore=skip, dirs_exist_ok=True)


def command_of(mutant: Mutant, stage: str) -> list[str]:
    if stage == "tests":
        options = ["-q", "-x", "-p", "no:cacheprovider"]
        if not any("::" in name for name in mutant.tests):
            options += ["-m", "not slow"]
        return [sys.executable, "-m", "pytest", *options, *mutant.tests]
    quick = ["--quick"] if stage == "quick" else []
    flags = [
        *mutant.config.split(),
        "--simulate_devices=8",
        "--jobs=1",
        "--output=certificate",
        *quick,
    ]
    return [sys.executable, "-m", "meshtrain", "verify", *flags]


def observe(command: list[str], stage: str, folder: Path, timeout: float) -> dict[str, Any]:
    """Runs a stage until it finds a bug.

    Returns the outcome, the line that says so, and the seconds that it took.
    """

    def short(line: str) -> str:  # without the first figures, difference and seconds
        return re.sub(r"^\s*\S+\s+[\d.]+ s\s+", "", line).strip()[:200]

    start = time.monotonic()
    pattern, line, last = FOUND_BY_TESTS if stage == "tests" else FOUND, "", ""
    environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    how |= dict(cwd=folder, env=environ, start_new_session=True)
    with subprocess.Popen(command, **how) as process:
        RUNNING.add(process)
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), end(process)))
        timer.start()
        for line in process.stdout:
            if pattern.search(line):
                end(process)
                break
            last = line if line.strip() else last
    timer.cancel()
    RUNNING.discard(process)
    seconds = round(time.monotonic() - start)
    if pattern.search(line):
        crashed = stage != "tests" and CRASH.search(line)
        outcome = "crashed" if crashed else "killed"
        return {"outcome": outcome, "by": short(line), "seconds": seconds}
    code = process.returncode
    outcome = "timeout" if late.is_set() else "crashed" if code else "survived"
    return {"outcome": outcome, "by": short(last) if code else "", "seconds": seconds}


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its children too


def examine(mutant: Mutant, args: argparse.Namespace, known: dict, record) -> set[str]:
    """Runs the stages of one bug until one finds it; returns their outcomes."""
    outcomes: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        for stage in args.stages:
            if (not mutant.tests) if stage == "tests" else mutant.config == NONE:
                continue
            result = known.get((mutant.name, stage, mutant.digest))
            if result is None:
                if not any(folder.iterdir()):
                    copy_repository(folder)
                    if mutant.patch:
                        plant(mutant.patch, folder)
                result = {"mutant": mutant.name, "stage": stage, "digest": mutant.digest}
                result |= observe(command_of(mutant, stage), stage, folder, args.timeout)
                record(result)
            outcomes.add(result["outcome"])
            if "killed" in outcomes:
                break
    return outcomes


def read_results(path: Path = RESULTS) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Returns the results by bug, stage and digest of the patch."""
    results = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {(one["mutant"], one["stage"], one["digest"]): one for one in results}


def table(mutants: list[Mutant], results: dict) -> str:
    """Returns the text of README.md."""
    counts, rows = collections.Counter(), []
    for mutant in mutants:
        found = {stage: results.get((mutant.name, stage, mutant.digest)) for stage in STAGES}
        killer = next((s for s, one in found.items() if one and one["outcome"] == "killed"), None)
        counts["tests alone"] += killer == "tests" and not found["quick"] and mutant.config != NONE
        counts[killer or ("open" if any(found.values()) else "not run")] += 1
        cells = [one["outcome"] if one else "" for one in found.values()]
        cells = ["n/a"] * 2 + cells[2:] if mutant.config == NONE else cells
        by = f"`{found[killer]['by']}`".replace("|", "\\|") if killer else ""
        # Results of older versions of this script have no time.
        seconds = str(found[killer].get("seconds", "")) if killer else ""
        rows.append([f"`{mutant.name}`", mutant.bug.replace("|", "\\|"), *cells, seconds, by])
    total = (
        f"{len(mutants)} bugs: {counts['quick']} found by `verify --quick`, {counts['full']} by "
        "`verify`, "
    )
    total += (
        f"{counts['tests']} by the tests ({counts['tests alone']} of them not run with `--quick`), "
    )
    total += f"{counts['open']} by nothing that was run; {counts['not run']} not run.\n"
    heads = ["bug", "what is wrong", "verify --quick", "verify", "tests", "s", "found by"]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([INTRODUCTION + total, *lines, ""])


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("names", nargs="*", default=["*"], help="names of bugs, * as in a shell")
    parser.add_argument("--stages", default="quick,tests", help=f"some of {','.join(STAGES)}")
    parser.add_argument("--jobs", type=int, default=1, help="bugs to examine at the same time")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of a stage")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are appended")
    parser.add_argument("--unchanged", action="store_true", help="run the stages without a bug")
    args = parser.parse_args()
    args.stages = [stage for stage in args.stages.split(",") if stage]
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"--stages: {unknown.pop()!r} is none of {', '.join(STAGES)}")
    mutants, known = load(), read_results(args.results)
    lock, interrupted = threading.Lock(), threading.Event()
    chosen = [one for one in mutants if any(fnmatch.fnmatch(one.name, n) for n in args.names)]
    if args.unchanged:
        files = tuple(sorted({file for one in chosen for file in one.tests}))
        configs = sorted({one.config for one in chosen} - {NONE})
        chosen = [Mutant(f"unchanged {config}", "", (), config, "", "") for config in configs]
        chosen.append(Mutant("unchanged", "", files, NONE, "", ""))

    def write_table() -> None:
        text = table(mutants, read_results(args.results))
        args.results.with_name(TABLE.name).write_text(text)

    def record(result: dict[str, Any]) -> None:
        with lock:
            if interrupted.is_set():
                raise KeyboardInterrupt
            print(result["mutant"], result["stage"], result["outcome"], result["by"], flush=True)
            if not args.unchanged:
                with open(args.results, "a") as file:
                    file.write(json.dumps(result) + "\n")
                write_table()

    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            outcomes = list(pool.map(lambda one: examine(one, args, known, record), chosen))
        except KeyboardInterrupt:
            interrupted.set()
            for process in [*RUNNING]:
                end(process)
            raise
    if args.unchanged:
        return 0 if set().union(*outcomes) <= {"survived"} else 1
    print(f"{sum('killed' in found for found in outcomes)} of {len(chosen)} found")
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
