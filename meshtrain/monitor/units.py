"""The unit in which a run counts samples and throughput: tokens or examples."""

from dataclasses import dataclass
from typing import Any

from meshtrain.data.source import Batch
from meshtrain.models.base import Model


@dataclass(frozen=True)
class Units:
    """Tokens for a language model, else examples."""

    name: str
    per_sample: int
    flops: float | None  # per unit, forward and backward
    packed: bool = False  # rows hold several documents


def units_of(batch: Any, model: Model) -> Units:
    if not isinstance(batch, Batch):
        return Units("examples", 1, None)
    seq_len = batch.tokens.shape[1]
    flops = model.flops_per_token and model.flops_per_token(seq_len)
    return Units("tokens", seq_len, flops, packed=batch.segments is not None)
