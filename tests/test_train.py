"""Complete runs: the files that they write, how they resume and how they stop."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

import meshtrain
from meshtrain import program
from meshtrain.checkpoint import manifest
from meshtrain.cli import app
from meshtrain.cluster import distributed
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Source, to_batch
from meshtrain.state import TrainState
from meshtrain.train import Result, train
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick, tiny_config
from tests.lib.paths import ROOT
from tests.lib.rows import losses, rows


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 1, "tensor": 4}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ],
    ids=str,
)
def test_losses_of_steps_0_to_10_equal_one_device(tmp_path, layout, monkeypatch):
    def run(folder, **sizes):
        num_devices = int(np.prod(list(sizes.values())))
        with monkeypatch.context() as patch:
            devices = jax.devices()[:num_devices]
            patch.setattr(jax, "devices", lambda: devices)
            patch.setattr(jax, "device_count", lambda: num_devices)
            c = quick(steps=11)
            c.mesh.update(sizes)
            train(c, workdir=tmp_path / folder)
        return np.array(list(losses(tmp_path / folder).values()))

    found, expected = run("layout", **layout), run("one device", data=1)
    assert len(found) == 11 and expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_run_writes_its_config_metrics_and_events(tmp_path, capsys):
    c = tiny_config()
    c.train.steps, c.eval.every, c.checkpoint.every = 5, 2, 2
    result = train(c, workdir=tmp_path)
    assert (result.step, result.interrupted, int(result.state.step)) == (5, False, 5)

    *table, final = rows(tmp_path)
    assert [row["step"] for row in table] == [0, 1, 2, 3, 4]
    assert final == {"step": 5, "eval_loss": result.eval_loss}
    keys = (
        "step loss grad_norm learning_rate skipped tokens step_time data_wait tokens_per_second "
        "mfu host_memory peak_host_memory"
    ).split()
    assert set(table[1]) == set(keys) and set(table[2]) == {*keys, "eval_loss"}
    assert [row["tokens"] for row in table] == [16 * 16 * n for n in range(1, 6)]
    assert table[0]["mfu"] is None  # the peak FLOP/s of a CPU is unknown

    events = rows(tmp_path, "events.jsonl")
    assert [event["event"] for event in events] == ["start", "save", "save", "save", "end"]
    assert [event["step"] for event in events] == [0, 2, 4, 5, 5]
    assert events[-1]["eval_loss"] == pytest.approx(result.eval_loss)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["mesh"]["data"] == 8 and saved["data"]["vocab_size"] == 64
    output = capsys.readouterr().out
    assert "data 8" in output and "done: 5 steps" in output
    (memory,) = re.findall(
        r"\nmemory +the step needs (\S+) of [\d,.]+ GB on each device: state ", output
    )
    assert 0 < float(memory) < 0.1


def test_a_result_is_printed_in_a_line():
    state = TrainState(np.int32(3), {"w": np.ones((300, 300))}, ())
    assert str(Result(state, 3, 1.5, interrupted=False)) == (
        "Result(step=3, eval_loss=1.5, interrupted=False, state=TrainState with 90,000 parameters)"
    )


@pytest.mark.slow
def test_the_time_that_steps_wait_for_data_and_the_mfu_are_recorded(tmp_path):
    parts = build(parse(quick(), num_devices=8))
    source = parts.train_data

    def slow(indices):
        time.sleep(0.5)
        return source.read(indices)

    c = quick(steps=7)
    c.hardware.peak_flops = 1e9  # of each of 8 devices
    train(c, workdir=tmp_path, data=meshtrain.Source(slow))
    flops = parts.model.flops_per_token(c.data.seq_len)
    for row in rows(tmp_path):
        assert row["mfu"] == pytest.approx(flops * row["tokens_per_second"] / 8e9)
    waits = [row["data_wait"] for row in rows(tmp_path)]
    assert min(waits) >= 0 and waits[-1] > 0.1  # only the first batches are prefetched


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path):
    uninterrupted = train(quick(steps=6), workdir=tmp_path / "uninterrupted")
    train(quick(steps=3), workdir=tmp_path / "resumed")
    resumed = train(quick(steps=6), workdir=tmp_path / "resumed")
    assert_bit_equal(resumed.state, uninterrupted.state)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")


@pytest.mark.slow
def test_the_workdir_may_be_next_to_the_current_folder(tmp_path, monkeypatch):
    """TensorStore rejects a path with `..`."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    for steps in (1, 2):
        assert train(quick(steps=steps), workdir="../run").step == steps
    assert len(rows(tmp_path / "run")) == 2


def test_a_run_resumes_on_another_mesh(tmp_path):
    def deeper(**options):
        c = quick(**options)
        c.model.num_layers = 4
        return c

    uninterrupted = train(deeper(steps=5), workdir=tmp_path / "uninterrupted")
    c = deeper(steps=2, num_microbatches=4)
    c.mesh.update(data=1, pipeline=2, fsdp=2, tensor=2)
    c.pipeline.update(schedule="interleaved", num_chunks=2)
    train(c, workdir=tmp_path / "resumed")
    c = deeper(steps=5, num_microbatches=2)
    c.mesh.update(data=1, fsdp=8)
    resumed = train(c, workdir=tmp_path / "resumed")
    expected = list(losses(tmp_path / "uninterrupted").values())
    np.testing.assert_allclose(list(losses(tmp_path / "resumed").values()), expected, rtol=1e-5)
    assert int(resumed.state.step) == int(uninterrupted.state.step) == 5


@pytest.mark.slow
def test_with_a_changed_batch_size_a_run_resumes_with_the_next_sample(tmp_path):
    seen = []

    def read(indices):
        seen.extend(indices.tolist())
        return to_batch(np.ones((len(indices), 17), np.int32))

    train(quick(steps=3), workdir=tmp_path, data=Source(read))
    seen.clear()
    train(quick(steps=4, global_batch=8), workdir=tmp_path, data=Source(read))
    # Of sample 0 a run reads the length of the sequences, which config.json has.
    assert seen[:9] == [0, *range(48, 56)]


@pytest.mark.slow
def test_tokens_continue_when_a_run_resumes_with_another_seq_len(tmp_path):
    def tokens():
        return [row["tokens"] for row in rows(tmp_path)]

    train(quick(steps=2), workdir=tmp_path)  # 16 rows of 16 tokens in each step
    c = quick(steps=3)
    c.data.seq_len = 8
    train(c, workdir=tmp_path)
    assert tokens() == [256, 512, 640]

    # A checkpoint of an older version does not have the number.
    folder = tmp_path / "checkpoints" / "3"
    saved = manifest.read(folder)
    assert saved.metrics.pop("tokens") == 640
    manifest.write(folder, saved)
    c.train.steps, c.data.seq_len = 4, 16
    train(c, workdir=tmp_path)
    assert tokens() == [256, 512, 640, 3 * 16 * 8 + 256]


@pytest.mark.slow
def test_a_run_resumes_after_a_crash_while_writing_a_row(tmp_path):
    train(quick(steps=2), workdir=tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    train(quick(steps=3), workdir=tmp_path)
    assert list(losses(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize(
    "ids", [{"JAX_NUM_PROCESSES": "2"}, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}]
)
def test_an_incomplete_process_environment_is_rejected(ids, monkeypatch):
    for name, value in {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", **ids}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(meshtrain.ConfigError, match="JAX_PROCESS_ID"):
        distributed.initialize()


@pytest.mark.slow
def test_a_resumed_run_records_the_same_evaluation_losses(tmp_path):
    def eval_losses(folder):
        return {row["step"]: row.get("eval_loss") for row in rows(tmp_path / folder)}

    c = quick(steps=6)
    c.eval.update(every=2, batches=1)
    train(c, workdir=tmp_path / "uninterrupted")
    c.train.steps = 4
    first = train(c, workdir=tmp_path / "resumed")
    assert eval_losses("resumed")[4] == first.eval_loss
    c.train.steps = 6
    train(c, workdir=tmp_path / "resumed")
    expected = eval_losses("uninterrupted")
    assert eval_losses("resumed") == expected and expected[4] is not None
    again = train(c, workdir=tmp_path / "resumed")  # evaluates, and takes no step
    assert eval_losses("resumed") == expected == {**expected, 6: again.eval_loss}


def test_a_run_without_evaluation_data_ignores_eval_every(tmp_path):
    c = quick(steps=2)
    c.eval.every = 1
    assert train(c, workdir=tmp_path).step == 2


def test_a_finished_run_started_again_does_no_steps(tmp_path):
    train(quick(steps=2), workdir=tmp_path)
    again = train(quick(steps=2), workdir=tmp_path)
    assert again.step == 2 and len(rows(tmp_path)) == 2


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_makes_a_run_save_and_stop(tmp_path, number):
    is_first = True

    def read(indices):
        if is_first and indices[0] >= 16 * 20:
            threading.Timer(0, os.kill, (os.getpid(), number)).start()
        return to_batch(np.ones((len(indices), 17), np.int32))

    before = signal.getsignal(number)
    result = train(quick(steps=5000), workdir=tmp_path, data=Source(read))
    assert result.interrupted and 0 < result.step < 5000
    assert rows(tmp_path, "events.jsonl")[-1]["event"] == "preempted"
    assert signal.getsignal(number) is before
    is_first = False
    again = train(quick(steps=result.step + 1), workdir=tmp_path, data=Source(read))
    assert again.step == result.step + 1
    assert rows(tmp_path, "events.jsonl")[-4]["event"] == "restore"


def test_a_non_finite_loss_stops_the_run(tmp_path):
    c = quick(steps=50, log_every=100)
    c.optim.learning_rate = 1e38
    with pytest.raises(FloatingPointError, match="step .*: loss"):
        train(c, workdir=tmp_path)
    assert rows(tmp_path, "events.jsonl")[-1]["reason"] == "not finite"


def test_a_workdir_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(meshtrain.ConfigError, match="--workdir="):
        train(quick(), workdir=tmp_path / "file")


def test_outputs_of_a_workdir_that_are_no_files_are_reported(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    os.mkfifo(tmp_path / "events.jsonl")
    (tmp_path / "config.json").symlink_to("/nowhere")
    with pytest.raises(meshtrain.ConfigError) as error:
        train(quick(), workdir=tmp_path)
    names = [re.search(r"(\w+)\.json", fault)[1] for fault in error.value.faults]
    assert names == ["metrics", "events", "config"]
    assert all("is not a file; move it away" in fault for fault in error.value.faults)


@pytest.mark.parametrize("name", ["LOCK", "metrics.jsonl", "config.json", "log.txt"])
def test_a_link_in_a_workdir_does_not_change_the_file_at_its_end(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(meshtrain.ConfigError, match=name):
        train(quick(), workdir=tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "mine"


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "meshtrain.main", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_trains_and_rejects_invalid_configs_with_exit_code_2(tmp_path):
    small = [
        "--config.data.build=meshtrain.data.synthetic:build",
        "--config.model.num_layers=1",
        "--config.model.d_model=32",
        "--config.model.d_ff=32",
        "--config.train.steps=2",
        "--config.eval.batches=0",
    ]
    config = "--config=configs/default.py"
    trained = command(config, f"--workdir={tmp_path}", "--simulate_devices=2", *small)
    assert trained.returncode == 0 and "done: 2 steps" in trained.stdout, trained.stderr
    assert "data 2 · 2 cpu" in trained.stdout

    wrong = ["--config.train.stepz=1", "--config.mesh.fsdp=3"]
    rejected = command(config, "--simulate_devices=2", *wrong, *small)
    assert rejected.returncode == 2 and rejected.stdout == ""
    assert len(rejected.stderr.splitlines()) == 3
    assert 'did you mean "train.steps"?' in rejected.stderr
    assert command(config, "--config.optim.learning_rate=1e38", *small).returncode == 17


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_train_like_one_and_resume_its_checkpoints_and_vice_versa(tmp_path):
    train(quick(steps=6), workdir=tmp_path / "one")
    train(quick(steps=2), workdir=tmp_path / "two")
    program = f"""
import sys, jax
jax.config.update("jax_num_cpu_devices", 4)
sys.path[:0] = ["."]
from meshtrain import Source
from meshtrain.state import TrainState
from meshtrain.train import Result, train
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.cluster import distributed
from tests.lib.configs import quick
distributed.initialize()
source = build(parse(quick(), num_devices=8)).train_data
def read(indices):
    # One, to know the length of the rows.
    assert len(indices) in (1, 8), "each process reads its half of the 16 rows"
    return source.read(indices)
c = quick(steps=5)
c.mesh.slices = 2  # one for each process; the runs in one process have none
c.checkpoint.update(every=1, every_minutes=1e-9, allow_change="data.build")
train(c, workdir={str(tmp_path / "two")!r}, data=Source(read))
"""
    port = 20000 + os.getpid() % 20000
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(rank),
            },
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    newest = manifest.verify(tmp_path / "two" / "checkpoints" / "5")
    assert (newest.processes, newest.position) == (2, 80)
    c = quick(steps=6)
    c.checkpoint.allow_change = "data.build"
    train(c, workdir=tmp_path / "two")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(one) == list(two) == list(range(6))
    np.testing.assert_allclose(list(one.values()), list(two.values()), rtol=1e-5)
    starts = [
        row["step"] for row in rows(tmp_path / "two", "events.jsonl") if row["event"] == "start"
    ]
    assert starts == [0, 2, 5]


def test_the_loop_never_waits_for_the_newest_step_nor_copies_to_devices_implicitly(monkeypatch):
    """Outputs of a step are read only after the next one is dispatched."""
    log, outputs_of_steps, guard = [], [], contextlib.ExitStack()
    compile_ = program.Program.compile

    def compiled(self, batch):
        train_step = compile_(self, batch)

        def step(state, batch):
            log.append(("dispatched", len(outputs_of_steps)))
            if not outputs_of_steps:  # enter once, at the first step
                guard.enter_context(jax.transfer_guard_host_to_device("disallow"))
            outputs_of_steps.append(train_step(state, batch))
            return outputs_of_steps[-1]

        step.memory_analysis, step.as_text = train_step.memory_analysis, train_step.as_text
        return step

    def logged(wait):
        def logged_wait(tree):
            ids = {id(leaf) for leaf in jax.tree.leaves(tree)}
            for number, outputs in enumerate(outputs_of_steps):
                is_read = any(id(leaf) in ids for leaf in jax.tree.leaves(outputs))
                if is_read and log[-1] != ("read", number):
                    log.append(("read", number))
            return wait(tree)

        return logged_wait

    monkeypatch.setattr(program.Program, "compile", compiled)
    monkeypatch.setattr(ArrayImpl, "_value", property(logged(ArrayImpl._value.fget)))
    monkeypatch.setattr(ArrayImpl, "block_until_ready", logged(ArrayImpl.block_until_ready))
    monkeypatch.setattr(jax, "block_until_ready", logged(jax.block_until_ready))
    with guard:
        train(quick(steps=4))
    expected = [("dispatched", 0)]
    for step in (1, 2, 3):
        expected += [("dispatched", step), ("read", step - 1)]
    assert log == expected + [("read", 3)]


@pytest.mark.parametrize(
    "keys",
    [
        {"model.attention_impl": "cudnn"},
        {"mesh.data": 1, "mesh.context": 8, "context.method": "ulysses"},
    ],
    ids=str,
)
def test_attention_that_is_not_supported_is_the_only_line_of_a_run(keys, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    arguments = [f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}"]
    arguments += [f"--config.{key}={value}" for key, value in keys.items()]
    assert app.main("train", arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1 and "; use '" in output.err
    assert not (tmp_path / "run").exists()
