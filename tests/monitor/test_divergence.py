"""Steps with losses that are not finite are skipped.

Loss spikes are logged, and rolled back on request.
"""

import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

import meshtrain
from meshtrain.checkpoint import manifest
from meshtrain.config.schema import DivergenceConfig
from meshtrain.monitor.divergence import DECAY, WARMUP_STEPS, LossMonitor, RunningLoss
from meshtrain.train import train
from tests.lib import run_states
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import tiny_config
from tests.lib.line_fit import line_fit, squares
from tests.lib.machines import run_machine
from tests.lib.rows import events, rows


def batches(count):
    draw = np.random.default_rng(0)
    return [
        {"x": (x := draw.normal(size=(16, 4)).astype("f")), "y": x.sum(1, keepdims=True) + 1}
        for _ in range(count)
    ]


def fit():
    return meshtrain.from_nnx(line_fit, squares)


def config_for(steps, every=10, **divergence):
    c = tiny_config()
    c.train.steps, c.checkpoint.every = steps, every
    c.optim.schedule, c.optim.learning_rate = "constant", 1e-2
    c.divergence.update(divergence)
    return c


def run(data, workdir=None, *, steps=None, **divergence):
    c = config_for(len(data) if steps is None else steps, **divergence)
    return train(c, workdir=workdir, model=fit(), data=data)


def test_a_step_that_is_not_finite_is_skipped_and_recorded(tmp_path):
    data = batches(6)
    expected = run(data[:3] + data[4:])
    data[3] = {**data[3], "y": data[3]["y"] * np.nan}
    result = run(data, tmp_path)
    assert int(result.state.step) == 6
    assert_bit_equal(result.state.params, expected.state.params)
    assert_bit_equal(result.state.opt_state, expected.state.opt_state)
    (skip,) = events(tmp_path, "skip")
    assert skip["step"] == 3 and skip["loss"] is None
    assert [row["skipped"] for row in rows(tmp_path)] == [0, 0, 0, 1, 0, 0]


def weighted_squares(model, batch):
    return meshtrain.weighted(
        ((model(batch["x"]) - batch["y"]) ** 2).sum(-1), batch["weights"], more=batch["y"][:, 0]
    )


def test_a_batch_without_weight_has_no_loss_and_is_in_no_mean(tmp_path, capsys):
    """Its zero would lower the running mean, and make each real batch a spike."""
    data = [batch | {"weights": np.ones(16, "f")} for batch in batches(72)]
    taught = data[::3]
    for number, batch in enumerate(data):
        if number % 3:
            batch["weights"] = np.zeros(16, "f")
    c = config_for(len(data), every=5, rollback=True)
    c.checkpoint.update(keep_last=1, keep_best=1, best_by="loss")
    model = meshtrain.from_nnx(line_fit, weighted_squares)
    found = []
    train(c, workdir=tmp_path, model=model, data=data, on_metrics=found.append)
    losses = [row["loss"] for row in rows(tmp_path)]
    assert [row["loss"] for row in found] == losses
    assert [loss is None for loss in losses] == [number % 3 > 0 for number in range(72)]
    assert [row["more"] is None for row in rows(tmp_path)] == [loss is None for loss in losses]
    assert not events(tmp_path, "spike") and not events(tmp_path, "skip")
    assert "loss none" in capsys.readouterr().out

    # The newest checkpoint follows an empty batch; the best one a batch with a loss.
    kept = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    newest = manifest.read(tmp_path / "checkpoints" / "72")
    assert "loss" not in newest.metrics and newest.loss_statistics["count"] == len(taught)
    (best,) = kept - {72}
    best_loss = manifest.read(tmp_path / "checkpoints" / str(best)).metrics["loss"]
    saved = [losses[step - 1] for step in range(5, 72, 5)]
    assert best_loss == min(loss for loss in saved if loss is not None)


def test_held_out_data_without_weight_have_no_loss(tmp_path, capsys):
    data = [batch | {"weights": np.ones(16, "f")} for batch in batches(3)]
    heldout = [batch | {"weights": np.zeros(16, "f")} for batch in batches(1)]
    c = config_for(3, every=2)
    c.eval.update(every=2, batches=1)
    model = meshtrain.from_nnx(line_fit, weighted_squares)
    result = train(c, workdir=tmp_path, model=model, data=data, eval_data=heldout)
    assert result.eval_loss is None and events(tmp_path, "end")[-1]["eval_loss"] is None
    assert rows(tmp_path)[2]["eval_loss"] is None
    for step in (2, 3):
        metrics = manifest.read(tmp_path / "checkpoints" / str(step)).metrics
        assert "loss" in metrics and "eval_loss" not in metrics
    output = capsys.readouterr().out
    assert "every token or example has weight 0" in output
    assert "held-out loss none" in output and "held-out loss 0" not in output


@pytest.mark.parametrize("every", [0, 10, 15])
def test_max_skips_steps_in_a_row_end_the_run_and_its_state_is_saved(tmp_path, every):
    """Whether the last skip is found at a step that saves (15) or at another one."""
    data = batches(24)
    for batch in data[12:20]:
        batch["y"] = batch["y"] * np.inf
    c = config_for(24, every, max_skips=3)
    with pytest.raises(FloatingPointError, match="step 14: .* not finite for 3 steps in a row"):
        train(c, workdir=tmp_path, model=fit(), data=data)
    end = events(tmp_path, "end")[-1]
    assert (end["step"], end["reason"], end["skipped_in_a_row"]) == (14, "not finite", 3)
    step = events(tmp_path, "save")[-1]["step"]
    assert step == (15 if every == 15 else 16)
    assert len(events(tmp_path, "skip")) == step - 12

    # The next start resumes there, and may skip as many steps again: steps 16 to 18.
    c.divergence.max_skips = 3 if every == 0 else 6
    if every == 0:
        with pytest.raises(FloatingPointError, match="step 18: .* for 3 steps in a row"):
            train(c, workdir=tmp_path, model=fit(), data=data)
    resumed = train(c, workdir=tmp_path, model=fit(), data=data)
    assert_bit_equal(resumed.state.params, run(data[:12] + data[20:]).state.params)


def test_skips_in_a_row_are_counted_across_a_resume(tmp_path):
    data = batches(20)
    for batch in data[8:]:
        batch["y"] = batch["y"] * np.inf
    with pytest.raises(FloatingPointError, match="step 10: .* for 2 steps in a row"):
        run(data, tmp_path, steps=10, max_skips=4)
    with pytest.raises(FloatingPointError, match="step 11: .* not finite for 4 steps in a row"):
        run(data, tmp_path, max_skips=4)


def test_a_run_whose_last_loss_is_not_finite_raises_each_time_but_is_saved(tmp_path):
    data = batches(6)
    data[3]["y"] = data[3]["y"] * np.nan
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="step 4: loss nan, .*lower optim.learning"):
            run(data, tmp_path, steps=4)
        end = events(tmp_path, "end")[-1]
        assert (end["step"], end["reason"], end["skipped_in_a_row"]) == (4, "not finite", 1)
    assert run(data, tmp_path).step == 6
    assert run(data, tmp_path).step == 6


def test_a_last_step_whose_float16_gradients_overflow_is_no_failure(tmp_path, capsys):
    """The loss scale halves, as at any other step; the last line says it, each time."""
    data = batches(4)
    data[2]["y"] = np.full_like(data[2]["y"], 200)
    c = config_for(3, every=0)
    c.train.dtype = "float16"
    for _ in range(2):
        train(c, workdir=tmp_path, model=fit(), data=data)
        assert rows(tmp_path)[-1]["loss"] > 3e4 and rows(tmp_path)[-1]["skipped"] == 1
        done_line = capsys.readouterr().out.splitlines()[-2]
        assert done_line == (
            "done: 3 steps · the last update was skipped: its float16 gradients overflowed"
        )
        assert "reason" not in events(tmp_path, "end")[-1]
    c.train.steps = 4
    train(c, workdir=tmp_path, model=fit(), data=data)
    assert capsys.readouterr().out.splitlines()[-2] == "done: 4 steps"

    data[2]["y"] = np.full_like(data[2]["y"], 1e30)  # its square is infinite
    c.train.steps = 3
    with pytest.raises(FloatingPointError, match="step 3: loss inf, .* or train.dtype=bfloat16"):
        train(c, model=fit(), data=data)


def test_a_float16_run_may_end_with_a_batch_without_weight():
    metrics = {"loss": None, "grad_norm": 0.0, "skipped": 0, "loss_scale": 16.0}
    monitor().check_end(3, metrics, is_finished=True)


def test_a_spike_is_logged(tmp_path, capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    run(data, tmp_path)
    (spike,) = events(tmp_path, "spike")
    assert spike["step"] == 60 and spike["deviations"] > 8
    assert "standard deviations above" in capsys.readouterr().out
    assert not events(tmp_path, "rollback")


# The spike of step 59 is found just before a save.
@pytest.mark.parametrize(("spike", "to"), [(63, 60), (59, 50)])
def test_a_spike_is_rolled_back_and_its_data_skipped(tmp_path, spike, to):
    data = batches(90)
    data[spike]["y"] = data[spike]["y"] * 1000
    result = run(data, tmp_path, steps=70, rollback=True)
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["to"]) == (spike, to)
    used = back["position"] // 16  # batches used before the rollback
    expected = run(data[:to] + data[used:], steps=70)
    assert_bit_equal(result.state, expected.state)
    assert [row["step"] for row in rows(tmp_path)] == list(range(70))
    saved = events(tmp_path, "save")[-1]
    assert saved["step"] == 70


def test_a_crash_right_after_a_rollback_does_not_repeat_the_spike(tmp_path):
    data, steps = batches(90), []
    data[63]["y"] = data[63]["y"] * 1000

    def crash(row):
        steps.append(row["step"])
        if steps.count(60) == 2:
            raise KeyboardInterrupt

    c = config_for(70, rollback=True)
    with pytest.raises(KeyboardInterrupt):
        train(c, workdir=tmp_path / "crashed", model=fit(), data=data, on_metrics=crash)
    result = run(data, tmp_path / "crashed", steps=70, rollback=True)
    assert len(events(tmp_path / "crashed", "rollback")) == 1
    expected = run(data, tmp_path / "undisturbed", steps=70, rollback=True)
    assert_bit_equal(result.state, expected.state)


def test_rows_are_on_disk_before_the_checkpoint_of_their_step(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def spy(handle):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    run(batches(10), tmp_path, steps=10)
    tables = [flushed.index(name) for name in ("metrics.jsonl", "events.jsonl")]
    assert max(tables) < flushed.index("._MANIFEST.json")


def test_repeated_spikes_on_different_data_end_the_run(tmp_path):
    data = batches(90)
    for spike in (63, 67, 71):  # the fourth step after the checkpoint each time
        data[spike]["y"] = data[spike]["y"] * 1000
    c = config_for(90, rollback=True)
    c.train.log_every = 25
    found = []
    with pytest.raises(FloatingPointError, match="step 60: the loss spiked 3 times"):
        train(c, workdir=tmp_path, model=fit(), data=data, on_metrics=found.append)
    end = events(tmp_path, "end")[-1]
    spike = events(tmp_path, "spike")[-1]
    assert (end["reason"], end["step"], end["to"], end["loss"]) == (
        "spikes",
        spike["step"],
        60,
        spike["loss"],
    )
    # Its row is there although train.log_every does not ask for it.
    last_row = rows(tmp_path)[-1]
    assert last_row == found[-1] and last_row["step"] == end["step"]
    names = ("loss", "grad_norm", "learning_rate", "skipped")
    assert [last_row[name] for name in names] == [end[name] for name in names]


def test_the_step_of_one_skip_too_many_has_a_row(tmp_path):
    data = batches(24)
    for batch in data[12:]:
        batch["y"] = batch["y"] * np.inf
    c = config_for(24, max_skips=3)
    c.train.log_every = 10
    with pytest.raises(FloatingPointError, match="step 14"):
        train(c, workdir=tmp_path, model=fit(), data=data)
    assert [row["step"] for row in rows(tmp_path)] == [0, 10, 14]
    assert rows(tmp_path)[-1]["skipped"] == 1


@pytest.mark.parametrize("change", [60, 64])
def test_with_rollback_a_lasting_rise_of_the_loss_is_a_new_level(tmp_path, capsys, change):
    """From another data set on, each rollback finds a high loss at once."""
    data = batches(120)
    for batch in data[change:]:
        batch["y"] = batch["y"] * 1000
    assert run(data, tmp_path, steps=100, rollback=True).step == 100
    assert [back["to"] for back in events(tmp_path, "rollback")] == [60, 60]
    # A spike is found one step later.
    spikes = [spike["step"] for spike in events(tmp_path, "spike")]
    assert spikes == [change, change + 1, 60, 61, 60]
    (level,) = events(tmp_path, "new_level")
    assert level["step"] == 60 and level["loss"] > 1000 * level["mean"]
    assert capsys.readouterr().out.count("the mean restarts at") == 1


def losses_of(*levels):
    """Returns a loss for each step, with noise around these levels."""
    return np.random.default_rng(0).normal(levels, 0.1)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_lasting_rise_of_the_loss_is_not_a_spike_for_ever(every):
    """`every`: the share of the steps whose loss is high from step 100 on."""
    levels = np.full(600, 3.0)
    levels[100::every] = 9.0
    levels[550] = 40.0  # a real spike
    spikes, new_levels = [], []

    def record(name, **fields):
        (spikes if name == "spike" else new_levels).append(fields["step"])

    settings = DivergenceConfig(max_skips=3, spike_sigmas=8.0, rollback=False)
    watch = LossMonitor(settings, {}, event=record, log=lambda text: None)
    for step, loss in enumerate(losses_of(*levels)):
        watch.observe(step, {"loss": loss, "skipped": 0})
    assert spikes[:11] == list(range(100, 100 + 11 * every, every))
    assert len(new_levels) == 1 and new_levels[0] < 100 + 20 * every
    assert spikes[-1] == 550 and spikes[-2] == new_levels[0]
    assert watch.statistics["variance"] == pytest.approx(
        {1: 0.01, 2: 9, 5: 36 * 0.2 * 0.8}[every], rel=0.3
    )


def test_a_spike_leaves_mean_and_variance_as_they_are():
    watch = monitor(spike_sigmas=8.0)
    for step, loss in enumerate(losses_of(*np.full(100, 3.0))):
        watch.observe(step, {"loss": loss, "skipped": 0})
    before = RunningLoss(**{name: watch.statistics[name] for name in ("count", "mean", "variance")})
    watch.observe(100, {"loss": 9.0, "skipped": 0})
    assert before.deviations_above_mean(9.0) > 8
    assert {**watch.statistics, **vars(before)} == watch.statistics


def test_without_a_workdir_a_spike_is_not_rolled_back(capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    assert run(data, rollback=True).step == 70
    assert capsys.readouterr().out.count("no checkpoint to roll back to") == 1


def test_without_a_valid_checkpoint_a_run_continues_after_a_spike(tmp_path, capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    (tmp_path / "checkpoints" / "quarantine" / "5").mkdir(parents=True)
    c = config_for(70, every=0, rollback=True)
    result = train(c, workdir=tmp_path, model=fit(), data=data, from_scratch=True)
    assert result.step == 70 and "no checkpoint to roll back to" in capsys.readouterr().out


def test_a_spike_in_the_last_step_is_rolled_back(tmp_path):
    data = batches(90)
    data[69]["y"] = data[69]["y"] * 1000
    result = run(data, tmp_path, steps=70, rollback=True)
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["to"], back["position"]) == (69, 60, 70 * 16)
    assert_bit_equal(result.state, run(data[:60] + data[70:], steps=70).state)


@pytest.mark.parametrize("every", [10, 0])
def test_a_run_stopped_after_a_spike_says_what_it_saved(tmp_path, capsys, every):
    """With a checkpoint to return to it saves nothing, and does not say that it does."""
    data = batches(70)
    data[63]["y"] = data[63]["y"] * 1000

    def stop(row):
        if row["step"] == 63:
            os.kill(os.getpid(), signal.SIGTERM)

    c = config_for(70, every=every, rollback=True)
    result = train(c, workdir=tmp_path, model=fit(), data=data, on_metrics=stop)
    assert result.interrupted and events(tmp_path, "spike")[0]["step"] == 63
    last_line = capsys.readouterr().out.splitlines()[-1]
    preempted = events(tmp_path, "preempted")[-1]
    newest = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert preempted["saved"] == newest
    if every:
        assert newest == 60 and "not saved, because the loss has spiked" in last_line
        assert "resume from step 60" in last_line
    else:  # the run would have continued from this state
        assert newest == result.step and f"saved in {tmp_path}" in last_line


def test_the_running_mean_and_variance_match_their_definition():
    losses, values = RunningLoss(), np.random.default_rng(0).normal(3, 0.5, 400)
    for number, value in enumerate(values, 1):
        losses.add(value)
        if number <= 1 / (1 - DECAY):  # so far all values have the same weight
            assert losses.mean == pytest.approx(values[:number].mean())
            assert losses.variance == pytest.approx(values[:number].var())
    weights = np.array([DECAY ** (len(values) - 1 - i) for i in range(len(values))])
    mean = np.average(values, weights=weights)
    assert losses.mean == pytest.approx(mean, rel=0.02)
    assert losses.variance == pytest.approx(
        np.average((values - mean) ** 2, weights=weights), rel=0.1
    )
    two_deviations = losses.mean + 2 * losses.variance**0.5
    assert losses.deviations_above_mean(two_deviations) == pytest.approx(2)
    assert RunningLoss(count=WARMUP_STEPS - 1, mean=1.0).deviations_above_mean(100) == 0


def test_a_resumed_monitor_finds_the_same_spikes():
    spikes = []
    settings = DivergenceConfig(max_skips=3, spike_sigmas=4.0, rollback=False)

    def monitor(statistics):
        return LossMonitor(
            settings,
            statistics,
            event=lambda name, **fields: spikes.append(fields["step"]),
            log=lambda text: None,
        )

    values = [*np.random.default_rng(0).normal(3, 0.1, 99), 9.0]
    uninterrupted, first = monitor({}), monitor({})
    for step, value in enumerate(values):
        uninterrupted.observe(step, {"loss": value, "skipped": 0})
    for step, value in enumerate(values[:70]):
        first.observe(step, {"loss": value, "skipped": 0})
    second = monitor(first.statistics)
    for step, value in enumerate(values[70:], 70):
        second.observe(step, {"loss": value, "skipped": 0})
    assert spikes == [99, 99] and second.statistics == uninterrupted.statistics


def monitor(statistics=(), **settings):
    quiet = {"event": lambda *_, **__: None, "log": lambda _: None}
    settings = {"max_skips": 10, "spike_sigmas": np.inf, "rollback": False} | settings
    return LossMonitor(DivergenceConfig(**settings), dict(statistics), **quiet)


def test_only_skips_in_a_row_end_a_run():
    watch = monitor(max_skips=3)
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1}
    for step, skipped in enumerate([1, 1, 0, 1, 1, 0, 1, 1]):
        watch.observe(step, metrics | {"skipped": skipped})
    watch.check_end(8, metrics, is_finished=True)
    watch.observe(8, metrics | {"skipped": 1})
    with pytest.raises(FloatingPointError, match="step 8: .* for 3 steps in a row"):
        watch.check_end(9, metrics, is_finished=False)


def test_only_rollbacks_to_the_same_step_end_a_run():
    watch = monitor(rollback=True)
    for step in (10, 10, 20, 20, 30, 40, 50, 50):
        watch.roll_back(step, step * 8)
    with pytest.raises(FloatingPointError, match="step 50: the loss spiked 3 times"):
        watch.roll_back(50, 400)


def test_after_the_last_rollback_a_run_with_other_settings_goes_on(tmp_path):
    """The data with the last spike is skipped, and three more rollbacks are possible."""
    data = batches(100)
    for spike in (63, 67, 71, 76):
        data[spike]["y"] = data[spike]["y"] * 1000
    with pytest.raises(FloatingPointError, match="step 60: the loss spiked 3 times"):
        run(data, tmp_path, steps=80, rollback=True)
    assert run(data, tmp_path, steps=80, rollback=True).step == 80
    assert [one["to"] for one in events(tmp_path, "rollback")] == [60] * 4


def test_statistics_of_other_versions_are_ignored():
    watch = monitor({"count": 5, "mean": 1.0, "skips": 2, "more": 3.0})
    assert watch.statistics["count"] == 5 and "more" not in watch.statistics


def test_rollbacks_are_counted_across_restarts():
    statistics = {}
    for _ in range(2):
        watch = monitor(statistics, rollback=True)
        watch.roll_back(50, 400)
        statistics = watch.statistics
    watch = monitor(statistics, rollback=True)
    for _ in range(2):  # at the next start three more are possible
        with pytest.raises(FloatingPointError, match="step 50: the loss spiked 3 times"):
            watch.roll_back(50, 400)
        assert "rollbacks" not in watch.statistics
        watch.roll_back(50, 400)
        watch.roll_back(50, 400)


class LossStates(RuleBasedStateMachine):
    """Losses, rollbacks and restarts in any order, beside the losses kept in lists."""

    def __init__(self):
        super().__init__()
        self.settings = dict(spike_sigmas=run_states.MAX_DEVIATIONS, rollback=True, max_skips=10**6)
        self.events = []
        self.watch = run_states.Watch()
        self.real = self.monitor({})
        self.step = 0
        self.level = 3.0

    def monitor(self, statistics):
        return LossMonitor(
            DivergenceConfig(**self.settings),
            statistics,
            event=lambda name, **fields: self.events.append(name),
            log=lambda text: None,
        )

    def observe(self, loss, *, is_skipped=False):
        self.events.clear()
        metrics = {"loss": loss, "skipped": is_skipped}
        is_empty = np.isnan(loss) and not is_skipped
        needs_row = self.real.observe(self.step, metrics | ({"loss": None} if is_empty else {}))
        expected = self.watch.observe(self.step, loss, is_skipped=is_skipped, warm_up=WARMUP_STEPS)
        assert self.events == expected and needs_row == ("spike" in expected)
        assert (self.real.spike == self.step) == (expected == ["spike"])
        self.step += 1

    @rule(
        count=st.integers(1, 60),
        noise=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
        seed=st.integers(0, 99),
    )
    def usual_losses(self, count, noise, seed):
        for value in np.random.default_rng(seed).normal(1.0, noise, count):
            self.observe(self.level * value)

    @rule(
        factor=st.sampled_from([0.01, 0.5, 0.9, 1.05, 1.079, 1.081, 1.2, 2.0, 100.0]),
        count=st.integers(1, 12),
    )
    def unusual_losses(self, factor, count):
        """The deviation counts as at least 1 % of the mean: 8 of them are 8 %."""
        for _ in range(count):
            self.observe(self.level * factor)

    @rule(factor=st.sampled_from([0.5, 1.01, 3.0]))
    def another_level(self, factor):
        self.level *= factor

    @rule(count=st.integers(1, 3), loss=st.sampled_from([np.nan, np.inf, 1.0]))
    def skipped_steps(self, count, loss):
        for _ in range(count):
            self.observe(loss, is_skipped=True)

    @rule()
    def a_batch_without_weight(self):
        self.observe(np.nan)

    @precondition(lambda self: self.real.spike is not None)
    @rule(back=st.integers(1, 3), is_gone=st.booleans())
    def rollback(self, back, is_gone):
        """To one of a few checkpoints, or there is none; then perhaps the same spike again."""
        to = max(self.step // 20 * 20 - 20 * (back - 1), 0)
        if is_gone:
            self.real.roll_back(None, 0)
        elif self.watch.roll_back(to):
            with pytest.raises(FloatingPointError, match=f"step {to}: the loss spiked 3 times"):
                self.real.roll_back(to, 0)
        else:
            self.real.roll_back(to, 0)
        self.step = self.step if is_gone else to
        assert self.real.spike is None

    @rule()
    def restart(self):
        self.real = self.monitor(self.real.statistics)

    @invariant()
    def statistics_are_those_of_the_lists(self):
        assert self.real.statistics == pytest.approx(self.watch.statistics(), abs=1e-9)


def test_losses_are_watched_as_promised_in_any_order():
    run_machine(LossStates, num_examples=40, num_rules=25)


def test_parameters_stay_finite_on_every_device():
    data = batches(4)
    data[2]["y"][5] = np.nan  # in the rows of one device
    state = run(data).state
    assert all(
        np.isfinite(shard.data).all()
        for leaf in jax.tree.leaves(state.params)
        for shard in leaf.addressable_shards
    )
