"""The blind measure: mutants that nobody chose, and what finds each: the tests, or verify --quick.

  python tests/blind/run.py --seed=3                 120 mutants; resumes a seed that has results
  python tests/blind/run.py --seed=3 --minutes=60    stops after an hour; the next call resumes
  python tests/blind/run.py                          only writes README.md from the results

`mutate.py` draws the mutants of a seed from the package at the commit of its first run, and a seed
is measured at that commit to its end: results/seed_N.jsonl has the commit in its first line. So the
tests of later commits never raise the score of a seed.

Each mutant meets the tests that reach its lines (`contexts.py`: measured once, in build/blind;
remove that folder to measure again), those of its own test file and then the cheapest first, until
one fails. For a constant of a module or a field of a class these are the lines that name it, and
tests whose file names it come first. If fewer than three tests reach the lines, those that reach
the function follow, then those that reach the file. A failed assertion, a crash and a hang are
finds, if the test passes alone without the mutant. Survivors then meet the slow tests of their
module's test file, and those in the maths of a step `verify --quick`. What survivors.toml calls
equivalent meets neither.

What still survives is classified by hand in survivors.toml: "equivalent", with the reason, or
"hole", with the test that was missing. The score is the share of found mutants among those that are
not equivalent; a survivor without a class counts as a hole.
"""

import argparse
import collections
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.blind import contexts, mutate  # noqa: E402
from tests.mutants import run as planted  # noqa: E402

FOLDER = Path(__file__).resolve().parent
RESULTS, CLASSES, TABLE = FOLDER / "results", FOLDER / "survivors.toml", FOLDER / "README.md"
STORE = ROOT / "build" / "blind" / "contexts"
# The areas that `verify` runs.
REMIT = {"step", "grads", "state", "optim", "ops", "models", "parallel", "pipeline"}
FEW_TESTS = 3
SECONDS_OF_A_MUTANT = 300  # of tests that pass; the others of a mutant that many reach are left out
STAGES = ("tests", "slow", "verify")
SECONDS_OF_A_SLOW_TEST = 1800
FINDS = ("failed", "crashed", "timeout")
INTRODUCTION = """# The blind measure

Written by `python tests/blind/run.py` from `results/` and `survivors.toml`; `run.py` explains how
mutants are drawn and examined. A seed keeps the score that it was measured with: holes that were
mended later are still counted as holes. Seed 1 met no slow tests. Survivors of seed 2 met the tests
a second time, those of their module first. Between seeds 2 and 3 the slow
tests grew from 768 to 883. Two holes of seed 3 are found by slow tests of other modules, which the
measure does not ask.

"""


def log(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def git(*args: str) -> bytes:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def copy_at(commit: str, folder: Path) -> None:
    """Copies the repository as it was at a commit."""
    folder.mkdir()
    subprocess.run(["tar", "x"], cwd=folder, input=git("archive", commit), check=True)
    compile_by_hash(folder)


def compile_by_hash(folder: Path) -> None:
    """Compiles a copy of the package, so that no mutant runs with the code of another.

    Compiled files are valid by the hash of their source, and so are those that Python writes in
    their place. By default it would be the size and the second of the source, which a mutant may
    have in common with the original.
    """
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=checked-hash"]
    subprocess.run([*command, "meshtrain"], cwd=folder, check=True)


def text_at(commit: str, file: str) -> str:
    return git("show", f"{commit}:{file}").decode()


# ---- which tests ----


def choose(mutant: mutate.Mutant, known: contexts.Contexts) -> tuple[list[contexts.Test], str]:
    """Returns the tests for a mutant, in their order, and how near to it they come."""
    lines = range(mutant.line, mutant.end_line + 1)
    names, reach = known.of_lines(mutant.file, lines), "line"
    first, last = mutant.function
    if not last:
        names, reach = names | users_of(mutant, known), "use"
    if len(names) < FEW_TESTS and last:
        names, reach = names | known.of_lines(mutant.file, range(first, last + 1)), "function"
    if len(names) < FEW_TESTS:
        all_lines = known.reached.get(mutant.file, {})
        names, reach = known.of_lines(mutant.file, all_lines), "file"

    # The test file of the module, those that name what the mutant's statement assigns, those of the
    # module's folder, then the cheapest.
    named = names_of(mutant, known) if not last else None
    by_file = collections.defaultdict(list)
    for name in names:
        by_file[name.partition("::")[0]].append(known.tests[name])
    own_file = own_test_file(mutant.file)

    def rank(file: str) -> tuple[bool, bool, bool, float]:
        seconds = sum(test.seconds for test in by_file[file])
        is_named = bool(named and named.search((known.root / file).read_text()))
        is_own = Path(file).parent == Path(own_file).parent
        return file != own_file, not is_named, not is_own, seconds

    chosen, seconds = [], 0.0
    for file in sorted(by_file, key=rank):
        for test in sorted(by_file[file], key=lambda test: test.seconds):
            if seconds + test.seconds <= SECONDS_OF_A_MUTANT or not chosen:
                chosen.append(test)
                seconds += test.seconds
    return chosen, reach


def names_of(mutant: mutate.Mutant, known: contexts.Contexts) -> re.Pattern | None:
    """Returns a pattern of the names that the mutant's statement assigns, if there are any."""
    statement = (known.root / mutant.file).read_text().splitlines()[mutant.line - 1]
    targets = re.findall(r"\w+", re.split("[:=]", statement)[0])
    return re.compile(rf"\b({'|'.join(targets)})\b") if targets else None


def users_of(mutant: mutate.Mutant, known: contexts.Contexts) -> set[str]:
    """Returns the tests of a name that the mutant's statement assigns.

    They reach a line with this name, or their file has it and they reach the mutant's file.
    """
    pattern = names_of(mutant, known)
    if pattern is None:
        return set()
    tests = set()
    for file in known.reached:
        lines = (known.root / file).read_text().splitlines()
        named = [number for number, line in enumerate(lines, 1) if pattern.search(line)]
        tests |= known.of_lines(file, named)
    for test in known.of_lines(mutant.file, known.reached.get(mutant.file, {})):
        if pattern.search((known.root / test.partition("::")[0]).read_text()):
            tests.add(test)
    return tests


def own_test_file(file: str) -> str:
    """Returns the path of the test file of a module, which need not exist."""
    folder = str(Path(file).parent).replace("meshtrain", "tests", 1)
    return f"{folder}/test_{Path(file).stem}.py"


# ---- one mutant ----


class Worker:
    """The process of worker.py, in the copy of the repository where mutants are planted."""

    def __init__(self, root: Path):
        self.root = root
        # As tests/conftest.py sets it, before jax is loaded.
        environ = contexts.environ_of(root) | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # This file, whatever commit is in the copy; -P: its folder is not searched for modules.
        command = [sys.executable, "-P", str(FOLDER / "worker.py")]
        self.process = subprocess.Popen(command, cwd=root, env=environ, **pipes)
        self.passes_alone: dict[str, bool] = {}  # without a mutant, by test

    def run(self, file: str, limits: dict[str, float], marker: str) -> dict:
        log = str(self.root.parent / "tests.log")
        request = {"file": file, "limits": limits, "marker": marker, "log": log}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def limit_of(test: contexts.Test) -> float:
    """Returns the seconds after which a test hangs, on a host that may be busy."""
    return 300 + 5 * test.seconds


def examine(
    mutant: mutate.Mutant,
    chosen: dict[str, dict[str, float]],
    worker: Worker,
    marker: str = "not slow",
) -> dict:
    """Runs tests, by file with their limits, until one finds the mutant; returns the result.

    Without limits these are all tests of a file that have the marker.
    """
    path = worker.root / mutant.file
    original = path.read_bytes()
    start, num_run = time.monotonic(), 0
    result = {"outcome": "survived", "by": ""}
    try:
        for file, limits in chosen.items():
            path.write_bytes(mutant.apply(original))
            answer = worker.run(file, limits, marker)
            num_run += answer["num"]
            while answer["outcome"] in FINDS:
                path.write_bytes(original)
                if passes_without_mutant(worker, file, answer["by"], limits, marker):
                    result = {"outcome": answer["outcome"], "by": answer["by"]}
                    break
                limits = {name: limit for name, limit in limits.items() if name != answer["by"]}
                path.write_bytes(mutant.apply(original))
                answer = worker.run(file, limits, marker) if limits else {"outcome": "passed"}
            if result["outcome"] in FINDS:
                break
    finally:
        path.write_bytes(original)
    return result | {"num_run": num_run, "seconds": round(time.monotonic() - start, 1)}


def passes_without_mutant(
    worker: Worker,
    file: str,
    test: str,
    limits: dict[str, float],
    marker: str,
) -> bool:
    """Returns whether a test passes alone; it may depend on others, or on the load of the host."""
    if test not in worker.passes_alone:
        alone = limits  # of the file, if it could not be imported
        if "::" in test:
            alone = {test: limits.get(test, SECONDS_OF_A_SLOW_TEST)}
        worker.passes_alone[test] = worker.run(file, alone, marker)["outcome"] == "passed"
    return worker.passes_alone[test]


def verify(mutant: mutate.Mutant, root: Path, timeout: float) -> dict:
    """Returns the result of `verify --quick` of the quickstart with the mutant."""
    path = root / mutant.file
    original = path.read_bytes()
    start = time.monotonic()
    path.write_bytes(mutant.apply(original))
    try:
        settings = planted.Mutant(
            name="", bug="", kind="", tests=(), config=planted.QUICKSTART, patch="", digest=""
        )
        seen = planted.observe(planted.command_of(settings, "quick"), "quick", root, timeout)
    finally:
        path.write_bytes(original)
    outcome = "failed" if seen["outcome"] == "killed" else seen["outcome"]
    seconds = round(time.monotonic() - start, 1)
    return {"outcome": outcome, "by": f"verify --quick: {seen['by']}", "seconds": seconds}


# ---- all mutants of a seed ----


def read_seed(path: Path) -> tuple[dict, dict[tuple[int, str], dict]]:
    """Returns the first line of a file of results, and the results by number and stage."""
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return head, {(one["number"], one["stage"]): one for one in lines}


def file_of(seed: int, num: int) -> Path:
    """Returns the file of a seed's results, which is begun if it is not there."""
    path = RESULTS / f"seed_{seed}.jsonl"
    if not path.exists():
        RESULTS.mkdir(exist_ok=True)
        commit = git("rev-parse", "HEAD").decode().strip()
        head = {"seed": seed, "num": num, "commit": commit, "date": str(datetime.date.today())}
        path.write_text(json.dumps(head) + "\n")
    return path


def measure(seed: int, num: int, deadline: float) -> None:
    """Examines the mutants of a seed that have no result yet, until the deadline."""
    path = file_of(seed, num)
    head, known_results = read_seed(path)
    classes = read_classes(CLASSES)
    commit, num = head["commit"], head["num"]

    def record(number: int, stage: str, result: dict) -> None:
        mutant = mutants[number]
        result = {"number": number, "stage": stage} | describe(mutant) | result
        known_results[number, stage] = result
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")
        write_table()
        change = f"{one_line(mutant.before)} -> {one_line(mutant.after)}"
        where = f"{mutant.file}:{mutant.line} {change}"
        log(f"{number} {stage} {result['outcome']} {result['seconds']} s {where} {result['by']}")

    with tempfile.TemporaryDirectory(prefix="blind-") as name:
        root = Path(name) / "repository"
        copy_at(commit, root)
        mutants = mutate.draw(root, seed, num)
        for (number, _), result in known_results.items():
            if describe(mutants[number]).items() - result.items():
                raise SystemExit(f"{path.name}: mutate.py draws other mutants now; use a new seed")
        contexts.collect(root, STORE, commit, deadline, log)
        known = contexts.Contexts(root, STORE, text_at)
        worker = Worker(root)
        # A survivor of part of the tests is examined again when the others have contexts.
        is_final = known.num_files == len(contexts.test_files(root))
        for number, mutant in enumerate(mutants):
            earlier = known_results.get((number, "tests"))
            if earlier and (earlier["outcome"] in FINDS or earlier["is_final"] or not is_final):
                continue
            if time.monotonic() > deadline:
                break
            tests, reach = choose(mutant, known)
            if not tests and not is_final:
                continue
            chosen: dict[str, dict[str, float]] = {}
            for test in tests:
                chosen.setdefault(test.name.partition("::")[0], {})[test.name] = limit_of(test)
            result = examine(mutant, chosen, worker)
            result |= {"num_chosen": len(tests), "reach": reach, "is_final": is_final}
            record(number, "tests", result)

        def is_open(number: int, stage: str) -> bool:
            """Returns whether a mutant has survived so far, and this stage has not seen it."""
            tests = known_results.get((number, "tests"), {"is_final": False})
            if classes.get((seed, number), {}).get("class") == "equivalent":
                return False
            return (
                tests["is_final"]
                and last_results(known_results)[number]["outcome"] == "survived"
                and (number, stage) not in known_results
                and time.monotonic() < deadline
            )

        for number, mutant in enumerate(mutants):
            own_file = own_test_file(mutant.file)
            if is_open(number, "slow") and (root / own_file).exists():
                record(number, "slow", examine(mutant, {own_file: {}}, worker, marker="slow"))
        worker.close()
        for number, mutant in enumerate(mutants):
            if is_open(number, "verify") and mutant.area in REMIT:
                record(number, "verify", verify(mutant, root, timeout=1800))


def describe(mutant: mutate.Mutant) -> dict:
    fields = ("area", "file", "line", "kind", "before", "after")
    return {field: getattr(mutant, field) for field in fields}


def one_line(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= 80 else f"{short[:77]}..."


# ---- README.md ----


def write_table() -> None:
    TABLE.write_text(table(RESULTS, read_classes(CLASSES)))


def read_classes(path: Path) -> dict[tuple[int, int], dict]:
    """Returns the classes of survivors by seed and number."""
    entries = tomllib.loads(path.read_text()).get("survivor", []) if path.exists() else []
    return {(one["seed"], one["number"]): one for one in entries}


def last_results(results: dict[tuple[int, str], dict]) -> dict[int, dict]:
    """Returns the result of each mutant: that of the first stage that found it, or of its tests."""
    last = {}
    for stage in STAGES:
        # That verify ends or hangs without a verdict is no find.
        finds = ("failed",) if stage == "verify" else FINDS
        for (number, of_stage), result in results.items():
            if of_stage != stage or (number in last and last[number]["outcome"] in FINDS):
                continue
            if stage == "tests" or result["outcome"] in finds:
                last[number] = result
    return last


def table(folder: Path, classes: dict[tuple[int, int], dict]) -> str:
    """Returns the text of README.md."""
    paths = sorted(folder.glob("seed_*.jsonl"), key=lambda path: int(path.stem[5:]))
    heads = ["seed", "commit", "examined", "by tests", "by slow tests", "by verify"]
    heads += ["equivalent", "holes", "score"]
    scores, kinds, survivors = [], collections.defaultdict(collections.Counter), []
    for path in paths:
        head, results = read_seed(path)
        counts, is_complete = collections.Counter(), True
        for number, result in last_results(results).items():
            is_found = result["outcome"] in FINDS
            one = classes.get((head["seed"], number), {"class": "open", "reason": ""})
            counts["examined"] += 1
            is_complete &= is_found or result.get("is_final", True)
            counts[result["stage"] if is_found else one["class"]] += 1
            is_counted = is_found or one["class"] != "equivalent"
            kinds[result["kind"]]["found"] += is_found
            kinds[result["kind"]]["counted"] += is_counted
            if not is_found:
                change = f"`{one_line(result['before'])}` -> `{one_line(result['after'])}`"
                where = f"`{result['file']}:{result['line']}`"
                row = [f"{head['seed']}.{number}", where, change, one["class"], one["reason"]]
                survivors.append([cell.replace("|", "\\|") for cell in row])
        holes = counts["hole"] + counts["open"]
        num_found = sum(counts[stage] for stage in STAGES)
        score = f"{100 * num_found / max(1, num_found + holes):.0f} %"
        if not is_complete:  # finds are recorded at once, so they would be too many
            score = "contexts not complete"
        scores.append(
            [
                str(head["seed"]),
                head["commit"][:8],
                f"{counts['examined']} of {head['num']}",
                *(str(counts[stage]) for stage in STAGES),
                str(counts["equivalent"]),
                f"{holes}" + (f", {counts['open']} not classified" if counts["open"] else ""),
                score,
            ]
        )
    by_kind = [[kind, f"{n['found']} of {n['counted']}"] for kind, n in sorted(kinds.items())]
    parts = [
        INTRODUCTION + rows([heads, *scores]),
        "Found, by kind, without equivalent mutants, in all seeds:\n",
        rows([["kind", "found"], *by_kind]),
        "What survived:\n",
        rows([["mutant", "line", "change", "class", "reason"], *survivors]),
    ]
    return "\n".join(parts)


def rows(cells: list[list[str]]) -> str:
    head, *others = cells
    lines = [head, ["---"] * len(head), *others]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--seed", type=int, help="of the sample")
    parser.add_argument("--num", type=int, default=120, help="number of mutants")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to stop")
    args = parser.parse_args()
    if args.seed is not None:
        os.nice(max(0, 19 - os.nice(0)))
        measure(args.seed, args.num, time.monotonic() + 60 * args.minutes)
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
