"""Worker processes: results in order, errors of items, processes that end."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from meshtrain.data.workers import Message, WorkerEnded, Workers
from meshtrain.errors import ConfigError
from tests.lib import squares
from tests.lib.paths import ROOT


@pytest.fixture(params=[0, 1, 3])
def workers(request):
    made = Workers(squares.Squares, {"add": 1}, request.param)
    yield made
    made.close()


def items(numbers):
    return [Message("square", [np.array([number, 2])]) for number in numbers]


def firsts(results):
    return [int(result.arrays[0][0]) for result in results]


def test_results_are_in_the_order_of_the_items(workers):
    assert firsts(workers.map(items(range(20)))) == [n * n + 1 for n in range(20)]
    assert firsts(workers.run(items([7]))) == [50]
    assert workers.run([]) == []
    (empty,) = workers.run([Message("square", [np.zeros(0)])])
    assert empty.arrays[0].shape == (0,)
    large = np.arange(3 << 18)
    (squared,) = workers.run([Message("square", [large])])
    np.testing.assert_array_equal(squared.arrays[0], large**2 + 1)


def test_an_error_of_an_item_is_raised_and_the_next_items_are_answered(workers):
    with pytest.raises(ConfigError) as error:
        workers.run([*items([1]), Message("fault"), *items([2, 3])])
    assert error.value.faults == ("one", "two")
    with pytest.raises(Exception, match="a bug of ours"):
        workers.run([Message("error")])
    assert firsts(workers.run(items([4]))) == [17]


def test_what_is_left_of_a_stopped_loop_answers_no_later_item(workers):
    for result in workers.map(items(range(9))):
        assert firsts([result]) == [1]
        break
    assert firsts(workers.map(items([5, 6]))) == [26, 37]


def test_a_process_that_has_ended_is_replaced_once():
    workers = Workers(squares.Squares, {"add": 1}, 2)
    assert firsts(workers.run(items(range(4)))) == [1, 2, 5, 10]
    with pytest.raises(WorkerEnded, match="data.num_workers=2: .* ended with signal 9; if the"):
        list(workers.map([Message("kill")]))
    # One that somebody else has killed is no error of the item.
    for process in _processes(workers):
        os.kill(process, signal.SIGKILL)
    assert firsts(workers.run(items([3]))) == [10]
    with pytest.raises(WorkerEnded):
        workers.run([Message("kill")])
    workers.close()


def _processes(workers):
    (result,) = workers.run([Message("pid")])
    return [result.value]


def test_signals_are_for_the_parent():
    workers = Workers(squares.Squares, {"add": 1}, 1)
    (process,) = _processes(workers)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process, number)
    assert _processes(workers) == [process]
    workers.close()


def test_what_a_library_prints_is_no_answer(capfd):
    workers = Workers(squares.Squares, {"add": 1}, 1)
    assert firsts(workers.run([Message("print", [np.array([3, 2])])])) == [10]
    workers.close()
    assert "printed" in capfd.readouterr().err


SCRIPT = """
import os, signal
import numpy as np
from meshtrain.data.workers import Message, Workers
from tests.lib import squares

workers = Workers(squares.Squares, {"add": 1}, 1)
print(workers.run([Message("pid")])[0].value, flush=True)
END
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit"])
def test_processes_end_with_their_parent_whose_script_they_do_not_run(end, tmp_path):
    """A script without `if __name__ == "__main__"`, in a folder with a module of a known name."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("END", end))
    (tmp_path / "numpy.py").write_text("raise ImportError('not this one')")
    program = "import numpy, runpy, sys; sys.path.insert(0, '.'); runpy.run_path('script.py')"
    done = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.communicate(timeout=60)[0].split()
    assert len(lines) == 1
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(lines[0]), 0)
            if _is_zombie(lines[0]):
                raise ProcessLookupError


def _is_zombie(process):
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
