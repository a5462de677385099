"""Synthetic sequences."""

import numpy as np

from meshtrain.config import build as builders
from meshtrain.config.parse import parse


def test_synthetic_sequences_are_progressions_within_the_vocabulary(tiny):
    parts = builders.build(parse(tiny, num_devices=8))
    batch, heldout = (s.read(np.arange(16)) for s in (parts.train_data, parts.heldout_data))
    rows = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
    assert rows.shape == (16, 17) and rows.min() >= 0 and rows.max() < 64
    strides = np.diff(rows, axis=1) % 64
    assert (strides == strides[:, :1]).all() and len(set(strides[:, 0])) > 8
    assert (batch.tokens != heldout.tokens).any()
