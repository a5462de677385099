"""The groups of slow tests: together they are all tests, and none is in two."""

import argparse
import json
import subprocess
import sys

import pytest
import slow_groups

SUITE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(5))
def test_long(n): pass

def test_new(): pass
"""


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7])
def test_each_long_test_is_in_exactly_one_group(num_groups):
    durations = {f"test_{n}": 20 + 7 * n % 40 for n in range(50)}
    groups = slow_groups.divide(durations, num_groups)
    assert sorted(test for group in groups for test in group) == sorted(durations)


def test_groups_take_about_the_same_time():
    durations = slow_groups.read_durations()
    groups = slow_groups.divide(durations, 3)
    seconds = [sum(durations[test] for test in group) for group in groups]
    assert max(seconds) - min(seconds) <= max(durations.values())


def test_groups_do_not_depend_on_the_order_of_the_file():
    durations = {"a": 30, "b": 30, "c": 40, "d": 25}
    backwards = dict(reversed(durations.items()))
    assert slow_groups.divide(durations, 3) == slow_groups.divide(backwards, 3)
    assert slow_groups.divide(durations, 3) == [{"c"}, {"a", "d"}, {"b"}]


def run(folder, *args):
    """Runs pytest on the suite in a folder with the durations in it; returns what it printed."""
    program = (
        "import sys, pathlib, pytest, slow_groups\n"
        "slow_groups.DURATIONS = pathlib.Path('durations.json').resolve()\n"
        "slow_groups.ROOT = pathlib.Path.cwd()\n"
        "slow_groups.LONG = float(sys.argv[1])\n"
        "sys.exit(pytest.main(['-p', 'slow_groups', *sys.argv[2:]]))"
    )
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    (folder / "test_suite.py").write_text(SUITE)
    environ = {"PYTHONPATH": str(slow_groups.DURATIONS.parent)}
    command = [sys.executable, "-c", program, *args]
    printed = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return printed.stdout + printed.stderr


def test_a_test_of_no_group_runs_in_each_and_the_others_in_one(tmp_path):
    listed = {f"test_suite.py::test_long[{n}]": 30 + n for n in range(4)}
    (tmp_path / "durations.json").write_text(json.dumps(listed))
    ran = []
    for number in (1, 2, 3):
        printed = run(tmp_path, "20", f"--slow-group={number}/3", "--verbose")
        assert f"group {number} of 3" in printed
        ran += [line.split()[0] for line in printed.splitlines() if " PASSED" in line]
    always = ["test_suite.py::test_long[4]", "test_suite.py::test_new"]
    assert sorted(ran) == sorted([*listed, *always * 3])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_durations_are_written_by_the_main_process(workers, tmp_path):
    (tmp_path / "durations.json").write_text('{"gone.py::test_gone": 50}')
    run(tmp_path, "-1", "--write-durations", f"--numprocesses={workers}")
    written = json.loads((tmp_path / "durations.json").read_text())
    assert written == {f"test_suite.py::test_long[{n}]": 0 for n in range(5)}


def test_only_what_was_measured_is_replaced():
    file = "tests/test_slow_groups.py"
    kept, faster, gone = f"{file}::run[a]", f"{file}::run[b]", f"{file}::test_gone"
    old = {kept: 40, faster: 50, gone: 60}
    assert slow_groups.updated(old, {faster: 3.0, f"{file}::run[c]": 20.6}) == {
        kept: 40,
        f"{file}::run[c]": 21,
    }


def test_every_test_with_a_duration_exists():
    gone = [test for test in slow_groups.read_durations() if not slow_groups.exists(test)]
    remedy = "correct tests/durations.json, or run the tests that moved with --write-durations"
    assert not gone, remedy


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3"])
def test_a_wrong_group_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be N/M"):
        slow_groups.parse_group(text)
