"""Decimal fractions of a number: as many as on paper, in every place that rounds them."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.build import with_steps
from meshtrain.config.parse import parse
from meshtrain.config.rounding import to_12_digits
from meshtrain.data.source import to_batch
from meshtrain.models.mixture import within_capacity
from tests.lib.epochs import settings
from tests.lib.token_files import build


@pytest.mark.parametrize(
    ("number", "fraction", "down", "up"),
    [
        (100, 0.07, 7, 7),
        (100, 0.29, 29, 29),
        (10**9, 0.29, 290_000_000, 290_000_000),
        (9, 1 / 3, 3, 3),
        (9, 2 / 3, 6, 6),
        (100, 0.0701, 7, 8),
        (10, 1e-8, 0, 1),
        (0, 0.07, 0, 0),
        (99, 0.0, 0, 0),
    ],
)
def test_a_fraction_of_a_number_is_rounded_as_on_paper(number, fraction, down, up):
    product = to_12_digits(number * fraction)
    assert (math.floor(product), math.ceil(product)) == (down, up)


def test_the_held_out_tokens_are_the_fraction(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    settings = {"dtype": "uint16", "vocab_size": 100, "seq_len": 1, "heldout": 0.29}
    sizes = [build(tmp_path / "a.bin", **settings, split=one).size for one in ("train", "heldout")]
    assert sizes == [70, 28]  # 71 and 29 tokens; the first is no target


def test_epochs_take_no_step_for_a_rounding_error():
    cfg = parse(settings(epochs=1.07, global_batch=1))
    data = SimpleNamespace(read=None, size=10**9)
    assert with_steps(cfg, data).train.steps == 1_070_000_000


def test_an_expert_accepts_no_token_for_a_rounding_error():
    c = SimpleNamespace(num_experts=10, capacity_factor=1.1)
    batch = to_batch(np.zeros((1, 101), np.int32))
    kept = within_capacity(c, jnp.zeros((1, 100, 1), jnp.int32), batch)
    assert kept.sum() == 11  # 1.1 x 100 x 1 / 10
