"""Losses that are not finite have no effect, spikes are told, and undone if wished."""

import jax
import numpy as np
import pytest
from conftest import tiny_config
from flax import nnx
from test_train import assert_bit_equal, rows

import meshtrain
from meshtrain.config.schema import DivergenceConfig
from meshtrain.monitor.divergence import MEMORY, WARM, Losses, Watch
from meshtrain.train import train


def line_fit(rngs):
    return nnx.Linear(4, 1, rngs=rngs, kernel_init=nnx.initializers.zeros)


def squares(model, batch):
    return meshtrain.weighted(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


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


def events(workdir, name):
    return [row for row in rows(workdir, "events.jsonl") if row["event"] == name]


def test_a_step_that_is_not_finite_has_no_effect_but_on_the_record(tmp_path):
    data = batches(6)
    good = run(data[:3] + data[4:])
    data[3] = {**data[3], "y": data[3]["y"] * np.nan}
    result = run(data, tmp_path)
    assert int(result.state.step) == 6
    assert_bit_equal(result.state.params, good.state.params)
    assert_bit_equal(result.state.opt_state, good.state.opt_state)
    (skip,) = events(tmp_path, "skip")
    assert skip["step"] == 3 and skip["loss"] is None
    assert [row["skipped"] for row in rows(tmp_path)] == [0, 0, 0, 1, 0, 0]


def test_too_many_in_a_row_end_the_run_with_its_newest_checkpoint_as_it_was(tmp_path):
    data = batches(20)
    for batch in data[12:]:
        batch["y"] = batch["y"] * np.inf
    with pytest.raises(FloatingPointError, match="step 14: .* as in the 3 steps up to it"):
        run(data, tmp_path, max_skips=3)
    end = events(tmp_path, "end")[-1]
    assert (end["step"], end["reason"], end["skipped_in_a_row"]) == (14, "not finite", 3)
    again = run(data[:10], tmp_path)  # its newest checkpoint is of step 10, and good
    assert_bit_equal(again.state.params, run(data[:10]).state.params)


def test_a_run_whose_last_loss_is_not_finite_does_not_end_well_but_is_saved(tmp_path):
    data = batches(4)
    data[3]["y"] = data[3]["y"] * np.nan
    with pytest.raises(FloatingPointError, match="step 4: loss nan"):
        run(data, tmp_path)
    assert run(data, tmp_path, steps=4).step == 4


def test_a_spike_is_told(tmp_path, capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    run(data, tmp_path)
    (spike,) = events(tmp_path, "spike")
    assert spike["step"] == 60 and spike["deviations"] > 8
    assert "standard deviations above" in capsys.readouterr().out
    assert not events(tmp_path, "rollback")


@pytest.mark.parametrize(("bad", "to"), [(63, 60), (59, 50)])  # the latter seen just before a save
def test_a_spike_is_undone_and_its_data_passed_over(tmp_path, bad, to):
    data = batches(90)
    data[bad]["y"] = data[bad]["y"] * 1000
    result = run(data, tmp_path, steps=70, rollback=True)
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["to"]) == (bad, to)
    passed = back["position"] // 16  # batches used by then
    expected = run(data[:to] + data[passed:], steps=70)
    assert_bit_equal(result.state, expected.state)
    assert [row["step"] for row in rows(tmp_path)] == list(range(70))
    saved = events(tmp_path, "save")[-1]
    assert saved["step"] == 70


def test_spikes_on_any_data_end_the_run(tmp_path):
    data = batches(90)
    for batch in data[60:]:
        batch["y"] = batch["y"] * 1000
    with pytest.raises(FloatingPointError, match="step 60: the loss leapt up 3 times"):
        run(data, tmp_path, rollback=True)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    assert run(data, rollback=True).step == 70
    assert capsys.readouterr().out.count("no checkpoint to go back to") == 1


def test_a_run_without_a_good_checkpoint_goes_on_in_spite_of_a_spike(tmp_path, capsys):
    data = batches(70)
    data[60]["y"] = data[60]["y"] * 1000
    (tmp_path / "checkpoints" / "quarantine" / "5").mkdir(parents=True)
    c = config_for(70, every=0, rollback=True)
    result = train(c, workdir=tmp_path, model=fit(), data=data, from_scratch=True)
    assert result.step == 70 and "no checkpoint to go back to" in capsys.readouterr().out


def test_a_spike_in_the_last_step_is_undone_as_well(tmp_path):
    data = batches(90)
    data[69]["y"] = data[69]["y"] * 1000
    result = run(data, tmp_path, steps=70, rollback=True)
    (back,) = events(tmp_path, "rollback")
    assert (back["step"], back["to"], back["position"]) == (69, 60, 70 * 16)
    assert_bit_equal(result.state, run(data[:60] + data[70:], steps=70).state)


def test_the_running_mean_and_variance_are_those_of_their_definition():
    losses, values = Losses(), np.random.default_rng(0).normal(3, 0.5, 400)
    for value in values:
        losses.add(value)
    weights = np.array([MEMORY ** (len(values) - 1 - i) for i in range(len(values))])
    mean = np.average(values, weights=weights)
    assert losses.mean == pytest.approx(mean, rel=0.02)
    assert losses.variance == pytest.approx(
        np.average((values - mean) ** 2, weights=weights), rel=0.1
    )
    assert losses.above(losses.mean + 2 * losses.variance**0.5) == pytest.approx(2)
    assert Losses(count=WARM - 1, mean=1.0).above(100) == 0


def test_a_resumed_watch_sees_what_it_would_have_seen():
    told = []
    settings = DivergenceConfig(max_skips=3, spike=4.0, rollback=False)

    def watch(memory):
        return Watch(
            settings, memory, event=lambda name, **f: told.append(f["step"]), line=lambda _: None
        )

    values = [*np.random.default_rng(0).normal(3, 0.1, 99), 9.0]
    whole, first = watch({}), watch({})
    for step, value in enumerate(values):
        whole.see(step, {"loss": value, "skipped": 0})
    for step, value in enumerate(values[:70]):
        first.see(step, {"loss": value, "skipped": 0})
    second = watch(first.memory)
    for step, value in enumerate(values[70:], 70):
        second.see(step, {"loss": value, "skipped": 0})
    assert told == [99, 99] and second.memory == whole.memory


def test_parameters_stay_finite_on_every_device():
    data = batches(4)
    data[2]["y"][5] = np.nan  # of one device
    state = run(data).state
    assert all(
        np.isfinite(shard.data).all()
        for leaf in jax.tree.leaves(state.params)
        for shard in leaf.addressable_shards
    )
