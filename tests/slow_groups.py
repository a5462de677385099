"""Divides the slow tests of more than 3 s into groups of about the same time.

CI runs one group per commit.

  launch/test.sh -m "slow or not slow" --slow-group=2/3    without the long tests of groups 1 and 3
  launch/test.sh -m "slow or not slow" --write-durations   measures the slow tests anew

tests/durations.json has the long tests with their seconds. A test that is not in it, such as a new
one, belongs to no group and always runs. --write-durations changes the entries of the tests that
passed, and no others: a run of one file is enough after a change to that file.
"""

import argparse
import collections
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = Path(__file__).with_name("durations.json")
LONG = 3  # seconds


def read_durations() -> dict[str, int]:
    """Returns the seconds of each long test by its node ID."""
    return json.loads(DURATIONS.read_text())


def divide(durations: dict[str, float], num_groups: int) -> list[set[str]]:
    """Returns groups of about the same time: longest test first, each into the shortest group."""
    groups = [set() for _ in range(num_groups)]
    seconds = [0.0] * num_groups
    for test in sorted(durations, key=lambda test: (-durations[test], test)):
        shortest = seconds.index(min(seconds))
        groups[shortest].add(test)
        seconds[shortest] += durations[test]
    return groups


def exists(test: str) -> bool:
    """Returns whether there is a test function of this node ID.

    The parameters are not looked at.
    """
    file, _, name = test.partition("[")[0].partition("::")
    path = ROOT / file
    return path.is_file() and f"\ndef {name}(" in path.read_text()


def updated(old: dict[str, int], measured: dict[str, float]) -> dict[str, int]:
    """Returns the new durations: measured replace old ones, and tests that are gone are dropped."""
    merged = {test: seconds for test, seconds in old.items() if exists(test)} | measured
    return {test: round(merged[test]) for test in sorted(merged) if merged[test] > LONG}


def parse_group(text: str) -> tuple[int, int]:
    """Returns the number of the group, from 1, and the number of groups."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: must be N/M with N from 1 to M, such as 1/3")
    return int(match[1]), int(match[2])


class Recorder:
    """Adds up the time of setup, call and teardown of each slow test."""

    def __init__(self):
        self.seconds = collections.Counter()
        self.passed = set()

    def pytest_runtest_logreport(self, report):
        if "slow" not in report.keywords:
            return
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self):
        measured = {test: self.seconds[test] for test in self.passed}
        durations = updated(read_durations(), measured)
        DURATIONS.write_text(json.dumps(durations, indent=2, ensure_ascii=False) + "\n")


def pytest_addoption(parser):
    group = parser.getgroup("meshtrain")
    group.addoption(
        "--slow-group",
        type=parse_group,
        metavar="N/M",
        help=f"of the slow tests of more than {LONG} s, run only group N of M",
    )
    group.addoption(
        "--write-durations",
        action="store_true",
        help=f"write the seconds of the slow tests that passed to {DURATIONS.name}",
    )


def pytest_configure(config):
    is_worker = hasattr(
        config, "workerinput"
    )  # of pytest-xdist, whose reports the main process gets
    if config.getoption("--write-durations") and not is_worker:
        config.pluginmanager.register(Recorder())


def pytest_report_header(config):
    if config.getoption("--slow-group") is None:
        return None
    number, num_groups = config.getoption("--slow-group")
    durations = read_durations()
    group = divide(durations, num_groups)[number - 1]
    seconds = sum(durations[test] for test in group)
    return (
        f"slow tests of more than {LONG} s: group {number} of {num_groups}, "
        f"{len(group)} of {len(durations)} tests, {seconds} s"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow-group") is None:
        return
    number, num_groups = config.getoption("--slow-group")
    durations = read_durations()
    others = durations.keys() - divide(durations, num_groups)[number - 1]
    left_out = [item for item in items if item.nodeid in others]
    items[:] = [item for item in items if item.nodeid not in others]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
