"""The held-out loss: each held-out sample counts once."""

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
