"""FLOPs of a transformer, and weights that a token does not use: counted in its layers' parameters.

A layer that gains a matrix is counted without a line here.
"""

import math
from typing import NamedTuple

import jax

from meshtrain.models.base import Functional
from meshtrain.models.transformer_config import TransformerConfig


class WeightCount(NamedTuple):
    """Number of weights in the matrix products of layers."""

    used: int  # by a token
    unused: int  # those of the experts that a token is not sent to


def count_weights(c: TransformerConfig, layer: Functional) -> WeightCount:
    """Returns the number of weights in the matrix products of a layer: those in its kernels."""
    used = unused = 0
    names_of_path = dict(jax.tree.leaves_with_path(layer.axes, is_leaf=_is_names))
    for path, leaf in jax.tree.leaves_with_path(layer.shapes):
        if path[-1].key != "kernel":
            continue
        size = math.prod(leaf.shape)
        if "expert" in names_of_path[path]:
            of_token = size // c.num_experts * c.experts_per_token
            used += of_token
            unused += size - of_token
        else:
            used += size
    return WeightCount(used, unused)


def _is_names(axes: object) -> bool:
    return isinstance(axes, tuple)


def flops_per_token(c: TransformerConfig, layer_weights: int, seq_len: int) -> float:
    """Returns 6 N + 12 L d S, forward and backward (PaLM, arXiv 2204.02311, appendix B).

    N is the number of weights in matrix products, `layer_weights` of all layers plus the output
    head, but not embeddings, norm scales or biases; of the routed experts those that a token uses.
    d = heads x head dim, the mean of that of keys and that of values. Attention counts in full, not
    halved for causality. In local layers the window replaces S.
    """
    weights = layer_weights + c.d_model * c.vocab_size
    visible = float(c.visible_positions(seq_len).sum())
    return 6.0 * weights + 6.0 * c.num_heads * (c.query_size + c.value_size) * visible
