"""Which tests reach which lines of the package, measured once for all blind mutants.

`collect` runs each test file in a process of its own, under coverage.py, with a context for each
test, and stores what was reached in a folder outside git, a file for each test file. A test file
that changed is run again. Lines of the package that moved since then are found by their text.

Three things would hide lines, so the plugin below takes care of them:

- A function that jax has traced is not run again: the caches of traces are cleared before each
  test. The compiled programs stay, since tests/conftest.py keeps them itself.
- What a fixture of a module does belongs to all tests that use it, not to the first of them.
- Processes that a test starts are measured too, in the context of the test.
"""

import contextlib
import difflib
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

# The package under measure, by file or folder.
AREAS = (
    "step",
    "grads",
    "state",
    "optim",
    "ops",
    "models",
    "parallel",
    "pipeline",
    "data",
    "checkpoint",
    "supervise",
    "inference",
)
OUTPUT_VARIABLE = "BLIND_CONTEXTS"  # for the plugin: the file that it writes
TEST_VARIABLE = "BLIND_TEST"  # for processes that a test starts: its node ID
SETTINGS_OF_PROCESSES = """[run]
data_file = {folder}/processes
parallel = true
context = ${{{variable}}}
include = {include}
patch = _exit
"""


def files_of_area(root: Path, area: str) -> list[str]:
    """Returns the paths of the area's source files from the root of the repository."""
    package = root / "meshtrain"
    if (package / f"{area}.py").is_file():
        return [f"meshtrain/{area}.py"]
    return sorted(path.relative_to(root).as_posix() for path in (package / area).rglob("*.py"))


# ---- in the process of a test file ----


class Recorder:
    """A plugin of pytest: coverage with a context for each test and each fixture of a module."""

    def __init__(self, root: Path, output: Path):
        import coverage

        self.root, self.output = root, output
        self.folder = output.with_suffix(".data")
        self.folder.mkdir(parents=True, exist_ok=True)
        include = []
        for area in AREAS:
            include.append(f"{root}/meshtrain/{area}.py")
            include.append(f"{root}/meshtrain/{area}/*")
        settings = self.folder / "settings"
        settings.write_text(
            SETTINGS_OF_PROCESSES.format(
                folder=self.folder, variable=TEST_VARIABLE, include="\n  ".join(["", *include])
            )
        )
        self.coverage = coverage.Coverage(
            data_file=str(self.folder / "tests"), include=include, config_file=False
        )
        os.environ[TEST_VARIABLE] = ""
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self.coverage.start()
        self.context, self.entered = "", time.perf_counter()
        self.seconds: dict[str, float] = {}  # of each test and each fixture, by itself
        self.ran: list[str] = []
        self.not_passed: set[str] = set()
        self.fixtures: dict[str, list[str]] = {}  # of each test, those wider than a function

    def enter(self, context: str) -> None:
        now = time.perf_counter()
        self.seconds[self.context] = self.seconds.get(self.context, 0.0) + now - self.entered
        self.context, self.entered = context, now
        self.coverage.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        import jax

        jax.clear_caches()
        os.environ[TEST_VARIABLE] = item.nodeid
        self.ran.append(item.nodeid)
        self.enter(item.nodeid)
        result = yield
        self.enter("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        outer = self.context
        self.enter(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.enter(outer)

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def pytest_collection_finish(self, session):
        for item in session.items:
            self.fixtures[item.nodeid] = [f"fixture {name}" for name in item.fixturenames]

    def pytest_sessionfinish(self):
        self.coverage.stop()
        reached = self.lines_by_context()
        tests = [name for name in self.ran if name not in self.not_passed]
        lines: dict[str, dict[str, list[int]]] = {}
        for number, test in enumerate(tests):
            for context in (test, *self.fixtures[test]):
                for file, found in reached.get(context, {}).items():
                    of_file = lines.setdefault(file, {})
                    of_file[str(number)] = sorted({*of_file.get(str(number), ()), *found})
        content = {
            "tests": tests,
            "seconds": [round(self.seconds_of(test), 2) for test in tests],
            "lines": lines,
        }
        self.output.write_bytes(gzip.compress(json.dumps(content).encode()))
        shutil.rmtree(self.folder, ignore_errors=True)  # a process may still write its lines

    def seconds_of(self, test: str) -> float:
        """Returns the time of a test and of its fixtures: alone, it has to wait for them."""
        return sum(self.seconds.get(context, 0.0) for context in (test, *self.fixtures[test]))

    def lines_by_context(self) -> dict[str, dict[str, set[int]]]:
        """Returns the lines by context and file, of this process and those that it started."""
        import coverage

        reached: dict[str, dict[str, set[int]]] = {}
        others = [coverage.CoverageData(str(path)) for path in self.folder.glob("processes*")]
        for data in (self.coverage.get_data(), *others):
            with contextlib.suppress(coverage.exceptions.DataError):  # of a process that was killed
                data.read()
                for file in data.measured_files():
                    name = Path(file).relative_to(self.root).as_posix()
                    for line, contexts in data.contexts_by_lineno(file).items():
                        for context in contexts:
                            reached.setdefault(context, {}).setdefault(name, set()).add(line)
        return reached


def pytest_configure(config):
    output = os.environ.get(OUTPUT_VARIABLE)
    if output:
        config.pluginmanager.register(Recorder(config.rootpath, Path(output)))


# ---- in the process of the command ----


def test_files(root: Path) -> list[str]:
    """Returns the paths of all test files; first those of the areas, which say most about them."""
    files = [path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")]

    def rank(file: str) -> tuple[bool, str]:
        folder = file.split("/")[1]
        return folder not in AREAS and file.count("/") > 1, file

    return sorted(files, key=rank)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def collect(root: Path, store: Path, commit: str, deadline: float, log) -> None:
    """Runs the test files that the store lacks, until the deadline (of time.monotonic).

    `root` is a copy of the repository at `commit`, in which no mutant is planted.
    """
    store.mkdir(parents=True, exist_ok=True)
    for file in test_files(root):
        target = stored_file(store, root, file)
        if target.exists():
            continue
        if time.monotonic() > deadline:
            return
        with_output = target.with_suffix(".part")
        environ = environ_of(root) | {OUTPUT_VARIABLE: str(with_output)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.blind.contexts"]
        command += ["-p", "no:cacheprovider", "-m", "not slow", file]
        start = time.monotonic()
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        code = subprocess.run(command, cwd=root, env=environ, **quiet).returncode
        content = {"tests": [], "seconds": [], "lines": {}}  # of a file whose process crashed
        if with_output.exists():
            content = json.loads(gzip.decompress(with_output.read_bytes()))
            with_output.unlink()
        content["commit"] = commit
        target.write_bytes(gzip.compress(json.dumps(content).encode()))
        seconds = time.monotonic() - start
        log(f"contexts of {file}: {len(content['tests'])} tests, exit {code}, {seconds:.0f} s")


def environ_of(root: Path) -> dict[str, str]:
    """Returns the environment of tests of this copy of the repository."""
    environ = os.environ | {
        "PYTHONPATH": str(root),
        "GIT_CEILING_DIRECTORIES": str(root.parent),
    }
    # The installed package names a plugin of pytest that an older commit does not have.
    if not (root / "meshtrain/tools/verify/pytest_plugin.py").exists():
        environ["PYTEST_ADDOPTS"] = "-p no:meshtrain"
    return environ


def name_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", "-")


def stored_file(store: Path, root: Path, file: str) -> Path:
    return store / f"{name_of(file)}.{digest_of(root / file)}.gz"


class Test(NamedTuple):
    name: str  # node ID
    seconds: float  # under coverage


class Contexts:
    """What the store knows of a copy of the repository."""

    def __init__(self, root: Path, store: Path, text_at):
        """`text_at` (commit, file) returns the text of a source file at an older commit."""
        self.root, self.text_at = root, text_at
        self.num_files, self.tests = 0, {}
        self.moved: dict[tuple[str, str], dict[int, int]] = {}
        # file -> line -> the tests that reach it
        self.reached: dict[str, dict[int, set[str]]] = {}
        for file in test_files(root):
            path = stored_file(store, root, file)
            if path.exists():
                self.num_files += 1
                self._add(json.loads(gzip.decompress(path.read_bytes())))

    def _add(self, content: dict) -> None:
        names = content["tests"]
        for name, seconds in zip(names, content["seconds"], strict=True):
            self.tests[name] = Test(name, seconds)
        for file, by_test in content["lines"].items():
            key = content["commit"], file
            if key not in self.moved:
                self.moved[key] = self._moved_lines(*key)
            moved = self.moved[key]
            of_file = self.reached.setdefault(file, {})
            for number, lines in by_test.items():
                for line in lines:
                    if line in moved:
                        of_file.setdefault(moved[line], set()).add(names[int(number)])

    def _moved_lines(self, commit: str, file: str) -> dict[int, int]:
        """Returns the present number of each line of the file at the commit that is still there."""
        path = self.root / file
        if not path.exists():
            return {}
        old, new = self.text_at(commit, file).splitlines(), path.read_text().splitlines()
        moved = {}
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
            for offset in range(block.size):
                moved[block.a + offset + 1] = block.b + offset + 1
        return moved

    def of_lines(self, file: str, lines) -> set[str]:
        """Returns the names of the tests that reach one of these lines."""
        of_file = self.reached.get(file, {})
        return set().union(*(of_file.get(line, ()) for line in lines))
