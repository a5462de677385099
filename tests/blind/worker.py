"""Runs chosen tests on a copy of the repository, in forks of a process that has loaded jax.

`python -P worker.py`, with the copy as its folder, answers each line of its input, a request in
JSON, with a line of output, also JSON. Nothing of the package is loaded before the fork, and no
backend of jax is initialised (it would have threads, which a fork loses): so each request sees the
sources as they are now. The processes that a test starts read the same sources.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time

import pytest

# What the package and the tests load, and what starts no thread.
LOADED = ("jax", "jax.numpy", "flax.nnx", "optax", "numpy", "ml_collections", "yaml")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: processes whose parent has ended become ours
SECONDS_TO_COLLECT = 300
SECONDS_OF_A_TEST = 600  # if its limit is not known


class Chosen:
    """A plugin of pytest: runs these tests only, each within its limit, and reports failures."""

    def __init__(self, limits: dict[str, float], output: int):
        """`limits` has the seconds of each test, in the order in which they run; {}: all tests."""
        self.limits, self.output = limits, output
        self.failed = ""

    def write(self, event: str, name: str) -> None:
        os.write(self.output, f"{event} {name}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if not self.limits:
            return
        places = {name: place for place, name in enumerate(self.limits)}
        items[:] = [item for item in items if item.nodeid in places]
        items.sort(key=lambda item: places[item.nodeid])

    def pytest_collectreport(self, report):
        if report.failed:
            self.write("failed", report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        # The default action of the signal ends the process, in whatever code it hangs.
        signal.setitimer(signal.ITIMER_REAL, self.limits.get(item.nodeid, SECONDS_OF_A_TEST))
        self.write("started", item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.write("failed", report.nodeid)


def run_tests(file: str, limits: dict[str, float], marker: str, log: str) -> dict:
    """Returns the outcome of these tests: passed, failed, crashed or timeout, and of which test.

    `marker` is an expression of pytest: "not slow" or "slow".
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_in_child(file, limits, marker, log, writing)
    os.close(writing)
    with open(reading, errors="replace") as events:
        # Processes that a test has started may keep the pipe open, so its end does not matter.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        _end_all_below()
        lines = events.read().splitlines()
    failed = [line.partition(" ")[2] for line in lines if line.startswith("failed ")]
    started = [line.partition(" ")[2] for line in lines if line.startswith("started ")]
    _, status = os.waitpid(child, 0)
    by = (failed or started[-1:] or [file])[0]
    outcome = "passed"
    if failed:
        outcome = "failed"
    elif os.WIFSIGNALED(status):
        outcome = "timeout" if os.WTERMSIG(status) == signal.SIGALRM else "crashed"
    elif os.WEXITSTATUS(status) not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        outcome = "crashed"
    return {"outcome": outcome, "by": by if outcome != "passed" else "", "num": len(started)}


def _run_in_child(file: str, limits: dict[str, float], marker: str, log: str, output: int):
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_COLLECT)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marker]
    code = pytest.main([*options, file], plugins=[Chosen(limits, output)])
    sys.stdout.flush()
    os._exit(code)


def _end_all_below() -> None:
    """Ends the processes that a test has left, and waits for them, until there are none."""
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            children = [int(one) for one in file.read().split()]
        living = [one for one in children if not _has_ended(one)]
        for one in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.05)


def _has_ended(process: int) -> bool:
    """Returns whether a child has ended; it is reaped, unless it is the one that ran the tests."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def main() -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        answer = run_tests(**request)
        answer["seconds"] = round(time.perf_counter() - start, 1)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        # Zombies of processes that tests left.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
