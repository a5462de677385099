"""What a run carries from step to step, and where each part of it lives."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain import sharding
from meshtrain.errors import ConfigError
from meshtrain.models.base import Axes, Model, Params


class TrainState(NamedTuple):
    step: jax.Array  # () int32, updates done
    params: Params
    opt_state: Any


def initializer(
    model: Model, optimizer: optax.GradientTransformation, *, param_dtype: str
) -> Callable:
    """Returns the function key -> TrainState at step 0."""

    def init(key):
        params = jax.tree.map(
            lambda p: p.astype(param_dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p,
            model.init(key),
        )
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    return init


def plan(
    init: Callable,
    axes: Axes,
    optimizer: optax.GradientTransformation,
    rules: sharding.Rules,
    mesh,
    *,
    zero_stage: int,
) -> tuple[TrainState, Any]:
    """Returns the abstract state of `init`, each array with its sharding, and the gradients' shardings.

    ZeRO (arXiv 1910.02054) is what `fsdp` shards: nothing at stage 0, the optimizer's moments from
    1 on, gradients from 2 on, parameters at 3. Three mappings of one tree, and nothing else.
    """
    shapes = jax.eval_shape(init, jax.random.key(0))
    _check_axes(axes, shapes.params, mesh)

    def mapping(first_stage: int):
        active = rules if zero_stage >= first_stage else sharding.without(rules, "fsdp")
        return sharding.shardings(axes, shapes.params, active, mesh)

    replicated = NamedSharding(mesh, PartitionSpec())

    def like_its_parameter(leaf, place, parameter):
        return place if leaf.shape == parameter.shape else replicated  # a factored moment, say

    opt_state = optax.tree.map_params(
        optimizer,
        like_its_parameter,
        shapes.opt_state,
        mapping(1),
        shapes.params,
        transform_non_params=lambda _: replicated,
    )
    places = TrainState(replicated, mapping(3), opt_state)
    abstract = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, places)
    return abstract, mapping(2)


def _check_axes(axes: Axes, params: Params, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError unless every parameter's dims have names, and some name where an axis needs it."""

    def is_names(node):
        return node is None or isinstance(node, tuple)

    given = dict(jax.tree.leaves_with_path(axes, is_leaf=is_names))
    faults = []
    for path, leaf in jax.tree.leaves_with_path(params):
        if given.get(path) is None or len(given[path]) != leaf.ndim:
            faults.append(
                f"model.axes: parameter {jax.tree_util.keystr(path, simple=True, separator='/')} of shape "
                f"{leaf.shape} has {given.get(path)}; give a tuple with a name, or None, for each dim"
            )
    if faults:
        raise ConfigError(*faults[:3])
    cutting = [axis for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1]
    if cutting and not any(name for names in given.values() for name in names):
        raise ConfigError(
            f"mesh.{cutting[0]}={mesh.shape[cutting[0]]}: no parameter of the model names its dims, so nothing is "
            f'to be cut; name them (nnx.with_partitioning(init, ("embed", "mlp"))), or use mesh.data alone'
        )


def places_of(abstract: Any) -> Any:
    """Returns the shardings in a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes that one device holds of an abstract tree."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def count(tree: Any) -> int:
    """Returns the number of elements in a tree of shaped leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
