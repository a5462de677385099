"""A run in the cell of a notebook: its picture, and a process in which several runs follow."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from meshtrain import console
from meshtrain.data.source import Source, to_batch
from meshtrain.monitor import cell
from meshtrain.train import train
from tests.lib.configs import quick
from tests.lib.paths import ROOT
from tests.lib.rows import rows

PNG = b"\x89PNG"


class Outputs(list):
    """Stands in for IPython: keeps the outputs of a kernel's cells, each with all its updates."""

    def display(self, output, *, raw, display_id):
        assert raw and display_id
        self.append([output])
        return types.SimpleNamespace(update=self.update)

    def update(self, output, *, raw):
        assert raw
        self[-1].append(output)

    def texts(self):
        return [output["text/plain"] for output in self[-1]]


@pytest.fixture
def outputs(monkeypatch):
    """Makes this process look like a kernel."""
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    ipython.version_info = (9, 0)  # matplotlib reads it
    outputs = Outputs()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(
        sys.modules, "IPython.display", types.SimpleNamespace(display=outputs.display)
    )
    return outputs


def test_only_a_kernel_has_cells(outputs, monkeypatch):
    assert cell.in_cell()
    # IPython in a terminal, IPython that is imported without a shell, and none.
    for shell in (object(), None):
        monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda shell=shell: shell)
        assert not cell.in_cell()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not cell.in_cell() and "IPython" not in sys.modules


def test_a_cell_shows_phases_steps_and_curves_in_one_output(outputs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="bash launch/setup.sh notebook")
    monkeypatch.setattr(cell, "SECONDS", 0.0)
    monkeypatch.setattr(cell, "MAX_PART", 1.0)
    c = quick(steps=6, log_every=2)
    c.eval.update(batches=1, every=3)
    train(c, workdir=tmp_path)
    assert len(outputs) == 1
    texts = outputs.texts()
    assert texts[0] == "starting" and "compiling the step" in texts and "evaluating" in texts
    steps = [text for text in texts if text.startswith("[")]
    assert "5/6 · loss " in steps[-2] and "tokens/s" in steps[-1] and "left" in steps[-1]
    last = outputs[-1][-1]
    losses = {row["step"]: row for row in rows(tmp_path)}
    assert last["text/plain"] == (
        f"training loss {losses[5]['loss']:.4f}, held-out loss {losses[6]['eval_loss']:.4f}"
    )
    assert last["image/png"].startswith(PNG) and "image/png" not in outputs[-1][0]
    # The picture has the steps, so they are no lines; all other lines stay.
    printed = capsys.readouterr().out
    assert "\nstep  0/6" not in printed and "done: 6 steps" in printed
    # A bar that is made after the run is not shown in its cell.
    assert not console.Bar(10).is_shown


def test_a_resumed_run_shows_its_earlier_steps_and_a_rollback_removes_some(outputs, tmp_path):
    rows = ['{"step": 0, "loss": 4.0}', '{"step": 1, "loss": 3.0, "eval_loss": 3.5}']
    rows += ['{"step": 2, "loss": 9.0, "skipped": 1}', '{"step": 3, "loss": null}', '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    shown = cell.Cell(tmp_path)
    shown.write({"step": 4, "loss": 2.0})
    shown.write({"step": 5, "eval_loss": 2.5})
    curve = shown._curve()
    assert curve.steps.tolist() == [0, 1, 4] and curve.loss.tolist() == [4.0, 3.0, 2.0]
    assert curve.heldout_steps.tolist() == [1, 5] and curve.heldout_loss.tolist() == [3.5, 2.5]
    shown.begin(1)
    shown.write({"step": 1, "loss": 1.0})
    shown.close()
    assert outputs.texts()[-1] == "training loss 1.0000"
    assert shown._curve().steps.tolist() == [0, 1] and not shown._curve().heldout_steps.size


def test_pictures_of_steps_take_a_part_of_the_time_and_a_phase_is_shown_at_once(
    outputs, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(cell.time, "monotonic", lambda: now[0])
    shown = cell.Cell(None)
    shown.write({"step": 0, "loss": 1.0})
    steps, phase = console.Bar(10), console.Bar(0)
    monkeypatch.setattr(cell.Cell, "_output", lambda self: now.__setitem__(0, now[0] + 0.1) or {})
    steps.show(1, "1/10")  # until 100.1
    shown_until = len(outputs[-1])
    for time_now, due in ((101.9, False), (102.05, True)):
        now[0] = time_now
        assert steps.due() is due
        steps.show(2, "2/10")
        assert len(outputs[-1]) == shown_until + due
    # A picture of 0.1 s: the next one of a phase 1.9 s after it.
    for time_now, due in ((103.9, False), (104.1, True)):
        now[0] = time_now
        assert phase.due() is due
    shown.close()


def test_without_matplotlib_a_cell_shows_the_bar_and_one_line_names_the_extra(
    outputs, capsys, monkeypatch
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    monkeypatch.setattr(cell, "SECONDS", 0.0)
    train(quick(steps=3))
    printed = capsys.readouterr().out
    assert printed.count("matplotlib") == 1 and "bash launch/setup.sh notebook" in printed
    assert "step 0/3" in printed and not any("image/png" in output for output in outputs[-1])
    assert any(text.startswith("[=") for text in outputs.texts())
    assert outputs.texts()[-1].startswith("training loss ")


def test_a_picture_that_cannot_be_drawn_does_not_stop_the_run(outputs, capsys, monkeypatch):
    def draw(*arguments, **options):
        raise ValueError("no font")

    monkeypatch.setattr(cell.curves, "draw", draw)
    monkeypatch.setattr(cell, "SECONDS", 0.0)
    assert train(quick(steps=3)).step == 3
    printed = capsys.readouterr().out
    assert printed.count("no curves: ValueError: no font") == 1 and "step 2/3" in printed


# ---- several runs in one process ----


def left_over(before=None):
    """Returns what a run must leave as it was `before`: arrays, threads, signal handlers."""
    gc.collect()
    until = time.monotonic() + 5
    # A loader's thread ends after the read in which it was closed.
    while before and threading.active_count() > before[1] and time.monotonic() < until:
        time.sleep(0.01)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return len(jax.live_arrays()), threading.active_count(), handlers


def test_a_run_leaves_no_array_thread_or_handler_and_another_mesh_follows(outputs, tmp_path):
    before = left_over()
    losses = []
    for layout in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 4, "pipeline": 2}):
        c = quick(steps=3)
        c.mesh.update(layout)
        result = train(c, workdir=tmp_path / f"{len(losses)}")
        losses.append([row["loss"] for row in rows(tmp_path / f"{len(losses)}")])
        assert len(jax.live_arrays()) > before[0]
        del result
        assert left_over(before) == before
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_same_cell_again_takes_no_step_and_with_more_steps_resumes(outputs, tmp_path, capsys):
    train(quick(steps=2), workdir=tmp_path)
    capsys.readouterr()
    assert train(quick(steps=2), workdir=tmp_path).step == 2
    assert "train.steps=2: the run is at step 2 already" in capsys.readouterr().out
    assert train(quick(steps=4), workdir=tmp_path).step == 4
    assert "restored step 2 from" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, as in a kernel; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_saves_a_second_one_raises_and_the_next_run_resumes(
    outputs, interrupts, tmp_path, presses, capsys
):
    def press(row):
        # In the main thread, where the handler follows at once: else two signals could become one.
        for _ in range(presses if row["step"] == 20 else 0):
            signal.raise_signal(signal.SIGINT)

    def read(indices):
        return to_batch(np.ones((len(indices), 17), np.int32))

    before = left_over()
    raised = pytest.raises(KeyboardInterrupt) if presses == 2 else contextlib.nullcontext()
    result = None
    with raised as kept:  # as IPython keeps the last error
        result = train(quick(steps=500), workdir=tmp_path, data=Source(read), on_metrics=press)
    if presses == 1:
        assert result.interrupted and 0 < result.step < 500
        assert f"stopped after {result.step} of 500 steps · saved in" in capsys.readouterr().out
    del result
    assert left_over(before) == before and (kept is None) == (presses == 1)
    assert train(quick(steps=25), workdir=tmp_path, data=Source(read)).step == 25
    assert ("restored step" in capsys.readouterr().out) == (presses == 1)


def test_an_error_that_is_kept_holds_no_array_and_the_users_variables(outputs):
    def fail(row):
        mine = row["step"]
        if mine == 1:
            raise RuntimeError("mine")

    before = left_over()
    with pytest.raises(RuntimeError, match="mine") as kept:
        train(quick(steps=3), on_metrics=fail)
    assert left_over(before) == before
    assert kept.traceback[-1].frame.f_locals["mine"] == 1


# ---- a kernel ----

KERNEL_SETUP = """
import meshtrain
meshtrain.initialize(simulate_devices=2)
from meshtrain.train import train
from tests.lib.configs import quick
import jax
def run(steps):
    c = quick(steps=steps)
    c.checkpoint.every = 10**6
    return train(c, workdir="run")
"""


def execute(client, code, *, on_bar=None):
    """Returns what a cell prints, its displays with their updates, and the name of its error.

    `on_bar` is called once, when the cell has shown a bar.
    """
    client.execute(code)
    printed, displays, error = "", {}, None
    while True:
        message = client.get_iopub_msg(timeout=120)
        content, kind = message["content"], message["msg_type"]
        if kind == "status" and content["execution_state"] == "idle":
            client.get_shell_msg(timeout=120)
            return printed, list(displays.values()), error
        if kind == "stream":
            printed += content["text"]
        elif kind == "error":
            error = content["ename"]
        elif kind in ("display_data", "update_display_data"):
            shown = displays.setdefault(content["transient"]["display_id"], [])
            shown.append(content["data"])
            if on_bar and content["data"]["text/plain"].startswith("["):
                on_bar()
                on_bar = None


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_kernel_shows_a_run_that_is_interrupted_and_continues_in_the_same_cell(tmp_path):
    start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=environ)
    try:
        assert execute(client, KERNEL_SETUP)[2] is None
        code = "result = run({}); print(result.interrupted, result.step)"
        printed, (shown,), error = execute(
            client, code.format(10**6), on_bar=manager.interrupt_kernel
        )
        step = int(printed.split()[-1])
        assert error is None and "saved in run" in printed and f"True {step}" in printed
        assert any("image/png" in output for output in shown)
        printed, (shown,), error = execute(client, code.format(step + 2))
        assert error is None and f"restored step {step} from run" in printed
        assert f"False {step + 2}" in printed and "image/png" in shown[-1]
        code = "del result; print(len(jax.live_arrays()))"
        assert execute(client, code)[0] == "0\n"
        # The plot at the end of a cell is shown; a mistake is one error.
        client.execute("meshtrain.plot('run')")
        while (message := client.get_iopub_msg(timeout=120))["msg_type"] != "execute_result":
            pass
        assert "image/png" in message["content"]["data"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
