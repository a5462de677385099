"""The held-out loss: each held-out sample counts once."""

import json
import os
import signal

import numpy as np
import pytest

import meshtrain
from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib import epochs
from tests.lib.line_fit import line_fit, squares


def source(table):
    """Returns a Source of these rows, that repeats them in each epoch."""
    size = len(table["y"])
    return meshtrain.Source(
        lambda indices: {name: column[indices % size] for name, column in table.items()},
        size=size,
    )


def heldout_loss(table, model, **settings):
    c = epochs.settings(steps=0, **settings)
    c.eval.batches = 4
    data = source(table)
    return train(c, model=model, data=data, eval_data=data).eval_loss


@pytest.mark.parametrize("global_batch", [8, 16, 24, 32])
def test_held_out_samples_count_once_for_each_batch_size(global_batch):
    table = epochs.rows()  # 19 rows
    table["weights"][3] = 0.5
    losses = table["y"] ** 2  # the model starts at 0
    expected = np.average(losses, weights=table["weights"])
    found = heldout_loss(table, epochs.linear(), global_batch=global_batch)
    assert found == pytest.approx(expected, rel=1e-6)


def test_without_weights_the_samples_that_fill_no_batch_are_left_out():
    table = epochs.rows()
    model = meshtrain.from_nnx(line_fit, squares)
    table = {"x": table["x"], "y": table["y"][:, None]}
    expected = (table["y"][:16] ** 2).mean()
    assert heldout_loss(table, model, global_batch=8) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="held-out data has 19 samples.*global_batch=24; hold"):
        heldout_loss(table, model, global_batch=24)


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_long_evaluation_ends_when_the_run_is_asked_to_stop(tmp_path, num_steps):
    """Step 2 is evaluated: it is the last one, or one in the middle."""
    c = epochs.settings(steps=num_steps)
    c.train.log_every = 1
    c.eval.update(every=2, batches=100)
    table = epochs.rows()
    num_read = 0

    def fetch(indices):
        nonlocal num_read
        num_read += 1
        if num_read == 3 and not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return {name: column[indices % len(indices)] for name, column in table.items()}

    def run(workdir):
        return train(
            c,
            model=epochs.linear(),
            data=source(table),
            eval_data=meshtrain.Source(fetch, size=8 * c.eval.batches),
            workdir=workdir,
        )

    stopped = run(tmp_path / "run")
    assert stopped.interrupted and stopped.step == 2 and stopped.eval_loss is None
    assert num_read < 50  # the loader reads ahead
    ended = run(tmp_path / "run")
    uninterrupted = run(tmp_path / "uninterrupted")
    assert not ended.interrupted and ended.eval_loss == uninterrupted.eval_loss
    for workdir in (tmp_path / "run", tmp_path / "uninterrupted"):
        rows = [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "eval_loss" in row] == [*{2, num_steps}]
