"""Grows the vocabulary of the parameters that a new run begins with.

Fine-tuning may add tokens to a tokenizer. Those that it had keep their ids and their parameters;
each new one begins as the mean of all old ones, so that at first it changes the logits of the
others little (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.models import trees
from meshtrain.models.base import Axes, Params

AXIS = "vocab"  # logical axis of the dim of tokens


class Vocabulary(NamedTuple):
    """The vocabulary of a run's model."""

    size: int  # tokens; 0: the model has no model.vocab_size
    dims: Mapping[str, int]  # of the parameters that have a value for each token: the dim of tokens


class Growth(NamedTuple):
    """Tokens that are new in a run."""

    old: int  # tokens of the model that it begins with
    vocabulary: Vocabulary

    def __str__(self) -> str:
        return (
            f"vocabulary grows from {self.old} to {self.vocabulary.size} tokens, new ones begin as "
            f"the mean of the others"
        )


def of_model(options: Mapping[str, Any], axes: Axes) -> Vocabulary:
    """Returns the vocabulary of a model with a `model` section, and logical axes of parameters."""
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    dims = {trees.name_of(path): names.index(AXIS) for path, names in leaves if AXIS in names}
    size = options.get("vocab_size", 0)
    return Vocabulary(size if isinstance(size, int) else 0, dims)


def growth(vocabulary: Vocabulary, old: Any) -> Growth | None:
    """Returns the growth from a model with `old` tokens; None if this one has no more."""
    if not isinstance(old, int) or not 0 < old < vocabulary.size:
        return None
    return Growth(old, vocabulary)


def as_saved(params: Params, shapes: Mapping[str, tuple[int, ...]], found: Growth | None) -> Params:
    """Returns `params`, with the `shapes` in a checkpoint if only the number of tokens differs."""
    if found is None:
        return params
    dims = found.vocabulary.dims

    def resized(path: tuple, leaf: Any) -> Any:
        name = trees.name_of(path)
        shape = shapes.get(name, leaf.shape)
        dim = dims.get(name)
        if dim is None or len(shape) != leaf.ndim or shape == leaf.shape:
            return leaf
        if shape[:dim] + shape[dim + 1 :] != leaf.shape[:dim] + leaf.shape[dim + 1 :]:
            return leaf
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map_with_path(resized, params)


def grow(params: Params, like: Params, loaded: set[str], found: Growth | None) -> Params:
    """Returns loaded parameters in the shapes of `like`, with values for the new tokens.

    `loaded` are the paths of those that were read; the others are those of `like`.
    """
    if found is None:
        return params

    def grown(path: tuple, leaf: jax.Array, target: Any) -> jax.Array:
        name = trees.name_of(path)
        if name not in loaded:
            return target
        if name not in found.vocabulary.dims:
            return leaf
        fill = jax.jit(
            partial(
                _fill,
                dim=found.vocabulary.dims[name],
                size=target.shape[found.vocabulary.dims[name]],
                old=found.old,
                new=found.vocabulary.size,
            ),
            out_shardings=target.sharding,
        )
        return fill(leaf)

    return jax.tree.map_with_path(grown, params, like)


def _fill(value: jax.Array, *, dim: int, size: int, old: int, new: int) -> jax.Array:
    """Returns a parameter with `size` rows in `dim`; those of new tokens have the mean of old ones.

    Rows that pad the vocabulary are 0.
    """
    value = jax.lax.slice_in_dim(value, 0, old, axis=dim)
    mean = jnp.mean(value, axis=dim, keepdims=True, dtype=jnp.float32).astype(value.dtype)
    shape = list(value.shape)
    shape[dim] = new - old
    added = jnp.broadcast_to(mean, shape)
    shape[dim] = size - new
    return jnp.concatenate([value, added, jnp.zeros(shape, value.dtype)], axis=dim)
