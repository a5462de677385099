"""Plants bugs one at a time and reports what finds each: `verify --quick`, `verify`, or the tests.

  python tests/mutants/run.py                               all bugs: verify --quick, then the tests
  python tests/mutants/run.py 'ring_*' --stages=quick,full,tests --jobs=2
  python tests/mutants/run.py 'ring_*' --unchanged          the same without a bug: must pass
  python tests/mutants/run.py --stages=                     only writes the pages of the results

A bug is a patch: NAME.patch, a unified diff after a header. `Bug:` says what is wrong; `Kind:` is
the kind of mistake, one of KINDS; `Tests:` lists the test files (or tests, FILE::TEST, which may be
slow) that must find it if verify does not; `Config:` has the flags of verify (default:
--config=configs/quickstart.py; "none" if verify does not run this code). The patch is applied to a
copy of the repository, where the stages run one after the other until one of them finds the bug. A
crash is not a find: it is reported, and the next stage runs.

Each result is appended to results.jsonl. From it come README.md, which lists all bugs by kind, and
the tables in docs/proof.md: numbers by kind, and bugs of other trainers (real_bugs.toml).
A stage that has a result for the same change is not run again: to run all stages again, for example
after a change of verify, remove that file.
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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS, TABLE = FOLDER / "results.jsonl", FOLDER / "README.md"
REAL_BUGS, PROOF = FOLDER / "real_bugs.toml", ROOT / "docs" / "proof.md"
STAGES = ("quick", "full", "tests")
QUICKSTART, NONE = "--config=configs/quickstart.py", "none"
# What verify and pytest print when they find a bug.
FOUND, FOUND_BY_TESTS = re.compile(r"\bFAILED\b"), re.compile(r"^(FAILED|ERROR) tests/\S+::")
CRASH = re.compile(r"\b\w+(Error|Exception)\b")  # verify reports an exception as a failed layout
RUNNING: set[subprocess.Popen] = set()  # Ctrl-C ends them
# A bug has the kind of the mistake, not that of the module. Kinds are in the order of a step, then
# what is around it.
KINDS = {
    "formula": "a layer, a loss or its starting values are not what the paper or the model says",
    "mask": "a token, key, row or stage that must not count does, or one that must does not",
    "order": "a right value in a wrong place: an index, an offset, a permutation, one too few",
    "gradient": "the forward pass is right, and a derivative is missing or has other values",
    "reduction": "a sum over devices, parts or parameters is missing, done twice, or over others",
    "weighting": "a sum is divided by the wrong number: a mean of means, padding, the loss scale",
    "precision": "a value is rounded too early, is in too small a dtype, overflows or underflows",
    "random": "random numbers are used twice, correlated, or of another distribution",
    "optimizer": "an update, a learning rate or weight decay does not follow the formula",
    "data": "samples or text are lost, repeated or altered, or a file is converted wrongly",
    "state": "what is saved, restored, skipped or rolled back is not the state that it must be",
    "durability": "a crash, power loss or second writer can lose or damage what was saved",
    "processes": "processes and hosts disagree, wait for ever, or end with the wrong verdict",
    "security": "input of others is trusted, or what it may cost has no limit",
    "cost": "values are right, and time or memory is lost, or predicted wrongly",
    "reporting": "a setting, a check, a message or a record is wrong, late or missing",
}
INTRODUCTION = """# Planted bugs

Written by `python tests/mutants/run.py --stages=` from `results.jsonl`; `run.py` explains the
patches and its flags, and [docs/proof.md](../../docs/proof.md) what the numbers say.
The stages run from left to right until one finds the bug, so the cells after it are empty.
"n/a": `verify` does not run this code.

"""


class Mutant(NamedTuple):
    name: str
    bug: str
    kind: str  # one of KINDS
    tests: tuple[str, ...]  # files, or FILE::TEST
    config: str  # flags of verify, or "none"
    patch: str  # header and diff
    digest: str  # see `digest_of`


def load() -> list[Mutant]:
    """Returns the bugs of all patches, by name.

    Raises ValueError if a patch has no kind, or an unknown one.
    """
    mutants = []
    for path in sorted(FOLDER.glob("*.patch")):
        patch = path.read_text()
        header = dict(line.split(": ", 1) for line in patch.partition("\n\n")[0].splitlines())
        tests, config = tuple(header["Tests"].split()), header.get("Config", QUICKSTART)
        kind = header.get("Kind", "")
        if kind not in KINDS:
            raise ValueError(f"{path.name}: Kind: {kind!r} is none of {', '.join(KINDS)}")
        bug = header["Bug"]
        mutants.append(Mutant(path.stem, bug, kind, tests, config, patch, digest_of(patch)))
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


def found_by(mutant: Mutant, results: dict) -> tuple[dict[str, dict | None], str]:
    """Returns the results of a bug by stage, and what finds it: a stage, "open" or "not run"."""
    found = {stage: results.get((mutant.name, stage, mutant.digest)) for stage in STAGES}
    for stage, result in found.items():
        if result and result["outcome"] == "killed":
            return found, stage
    return found, "open" if any(found.values()) else "not run"


def total(mutants: list[Mutant], results: dict) -> str:
    """Returns a sentence: how many bugs there are, and what finds them."""
    counts, tests_alone = collections.Counter(), 0
    for mutant in mutants:
        found, killer = found_by(mutant, results)
        counts[killer] += 1
        tests_alone += killer == "tests" and not found["quick"] and mutant.config != NONE
    return (
        f"{len(mutants)} bugs: {counts['quick']} found by `verify --quick`, {counts['full']} by "
        f"`verify`, {counts['tests']} by the tests ({tests_alone} of them not run with `--quick`), "
        f"{counts['open']} by nothing that was run; {counts['not run']} not run."
    )


def markdown(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table."""
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def table(mutants: list[Mutant], results: dict) -> str:
    """Returns the text of README.md: the bugs of each kind, and what finds them."""
    heads = ["bug", "what is wrong", "verify --quick", "verify", "tests", "s", "found by"]
    lines = [INTRODUCTION + total(mutants, results)]
    for kind, meaning in KINDS.items():
        rows = []
        for mutant in mutants:
            if mutant.kind != kind:
                continue
            found, killer = found_by(mutant, results)
            cells = [one["outcome"] if one else "" for one in found.values()]
            cells = ["n/a"] * 2 + cells[2:] if mutant.config == NONE else cells
            by = f"`{found[killer]['by']}`".replace("|", "\\|") if killer in STAGES else ""
            # Results of older versions of this script have no time.
            seconds = str(found[killer].get("seconds", "")) if killer in STAGES else ""
            bug = mutant.bug.replace("|", "\\|")
            rows.append([f"`{mutant.name}`", bug, *cells, seconds, by])
        if rows:
            lines += ["", f"## {kind}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
            lines += markdown(heads, rows)
    return "\n".join([*lines, ""])


def table_of_kinds(mutants: list[Mutant], results: dict) -> str:
    """Returns a table: for each kind, how many bugs are planted and what finds them."""
    heads = ["kind", "what goes wrong", "planted", "verify --quick", "verify", "tests"]
    heads += ["nothing", "not run", "median s"]
    rows = []
    for kind, meaning in KINDS.items():
        counts, seconds = collections.Counter(), []
        for mutant in mutants:
            if mutant.kind == kind:
                found, killer = found_by(mutant, results)
                counts[killer] += 1
                if killer in STAGES and "seconds" in found[killer]:
                    seconds.append(found[killer]["seconds"])
        cells = [counts[key] for key in (*STAGES, "open", "not run")]
        median = f"{statistics.median(seconds):.0f} of {len(seconds)}" if seconds else ""
        link = f"[{kind}](../tests/mutants/README.md#{kind})"
        rows.append([link, meaning, *map(str, [counts.total(), *cells]), median])
    return "\n".join([total(mutants, results), "", *markdown(heads, rows)])


def load_real_bugs(path: Path = REAL_BUGS) -> list[dict[str, Any]]:
    """Returns the bugs of other trainers, in the order of KINDS, then of the file."""
    order = list(KINDS)
    bugs = tomllib.loads(path.read_text())["bug"]
    return sorted(bugs, key=lambda bug: order.index(bug["kind"]))


def table_of_real_bugs(bugs: list[dict[str, Any]]) -> str:
    """Returns a table: bugs of other trainers, and planted bugs of the same kind of mistake."""
    rows = []
    for bug in bugs:
        number = bug["link"].rpartition("/")[2]
        planted = ", ".join(f"`{name}`" for name in bug["planted"])
        link = f"[{bug['trainer']} #{number}]({bug['link']})"
        report = f"{link}, {bug['state']}"
        rows.append([bug["kind"], report, bug["what"], planted or f"none: {bug['why']}"])
    heads = ["kind", "report", "what was wrong, and how it showed", "planted here"]
    num_trainers = len({bug["trainer"] for bug in bugs})
    num_planted = sum(bool(bug["planted"]) for bug in bugs)
    sentence = (
        f"{len(bugs)} reports about {num_trainers} projects; {num_planted} of them have a planted "
        "bug of the same kind."
    )
    return "\n".join([sentence, "", *markdown(heads, rows)])


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Returns a page with each table between its two comments, and its other text unchanged.

    Raises ValueError if the page lacks a comment.
    """
    for name, text in tables.items():
        start, end = f"<!-- start: {name} -->\n", f"<!-- end: {name} -->\n"
        before, after = page.index(start) + len(start), page.index(end)
        page = f"{page[:before]}\n{text}\n\n{page[after:]}"
    return page


def proof(mutants: list[Mutant], results: dict) -> str:
    """Returns the text of docs/proof.md with the tables of these results."""
    tables = {
        "kinds": table_of_kinds(mutants, results),
        "real bugs": table_of_real_bugs(load_real_bugs()),
    }
    return with_tables(PROOF.read_text(), tables)


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
    if not chosen:
        parser.error(f"{' '.join(args.names)}: no such bug; README.md lists them")
    if args.unchanged:
        files = tuple(sorted({file for one in chosen for file in one.tests}))
        configs = sorted({one.config for one in chosen} - {NONE})
        chosen = [Mutant(f"unchanged {config}", "", "", (), config, "", "") for config in configs]
        chosen.append(Mutant("unchanged", "", "", files, NONE, "", ""))

    def write_pages() -> None:
        results = read_results(args.results)
        args.results.with_name(TABLE.name).write_text(table(mutants, results))
        if args.results == RESULTS:
            PROOF.write_text(proof(mutants, results))

    def record(result: dict[str, Any]) -> None:
        with lock:
            if interrupted.is_set():
                raise KeyboardInterrupt
            print(result["mutant"], result["stage"], result["outcome"], result["by"], flush=True)
            if not args.unchanged:
                with open(args.results, "a") as file:
                    file.write(json.dumps(result) + "\n")
                write_pages()

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
    write_pages()
    if args.stages:
        print(f"{sum('killed' in found for found in outcomes)} of {len(chosen)} found")
    else:
        print(total(mutants, read_results(args.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
