"""What the trainer asks of a model: pure functions over a nested dict of arrays, with named axes.

The only file that takes Flax modules apart. Everything else sees plain functions and dicts, so a
checkpoint holds no library's classes and a step is made of `jax.*` transforms alone.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen, nnx

from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics

Params = Any  # nested dict of arrays
Axes = Any  # the same nested dict, of tuples of logical names


class Past(NamedTuple):
    """Where in a cache of T positions a call stands."""

    start: jax.Array  # () int32, positions that earlier calls filled
    segments_BT: jax.Array  # (B, T) int32, attention stays within equal numbers


@dataclass(frozen=True)
class Model:
    """A model as pure functions. A stack of blocks gives embed, block and head; any other gives loss.

    In a stack, `params["layers"]` holds every block's parameters with a leading `layers` dim, and
    `block` gets one layer's slice; the trainer runs the stack, so no model knows of remat or pipelines.
    `constants` are arrays with that leading dim too, which differ from layer to layer and are not
    trained; `block` finds their slices among its parameters.
    """

    init: Callable[[jax.Array], Params]  # of a PRNG key
    axes: Axes
    loss: Callable[[Params, Any, jax.Array | None], Metrics] | None = (
        None  # (params, batch, key); no key: evaluation
    )
    embed: Callable[[Params, Any], jax.Array] | None = None  # (params, batch) -> x
    block: Callable[[Params, jax.Array, Any], jax.Array] | None = None  # (layer, x, batch) -> x
    head: Callable[[Params, jax.Array, Any], Metrics] | None = None  # (params, x, batch)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    logits: Callable[[Params, jax.Array], jax.Array] | None = None  # (params, x), to generate from
    # The same with what earlier calls left: empty_cache (rows, length) -> cache with a leading `layers`
    # dim; cached_block (layer, x, batch, its cache, past) -> (x, its cache).
    empty_cache: Callable[[int, int, Any], Any] | None = None
    cached_block: Callable[[Params, jax.Array, Any, Any, Past], tuple[jax.Array, Any]] | None = None
    flops_per_token: Callable[[int], float] | None = (
        None  # of the sequence length; forward and backward
    )
    # (sequence length, dtype) -> which implementation its attention takes; ConfigError if it cannot serve.
    attention: Callable[[int, str], str] | None = None

    def stack(self, layers: Params) -> Params:
        """Returns all that the blocks are given, of these parameters of layers: (layers, ...)."""
        return {**layers, **self.constants} if self.constants else layers


@dataclass(frozen=True)
class Functional:
    """An NNX module split into what creates its parameters, their names, and how to run it on others."""

    init: Callable[[jax.Array], Params]
    axes: Axes
    bind: Callable[..., nnx.Module]  # (params, key=None) -> module; without a key dropout is off


def functional(build: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """Makes pure functions of `build(rngs) -> nnx.Module`.

    A parameter's names are its `out_sharding` metadata (`nnx.with_partitioning`). Raises ConfigError
    for a module that keeps state other than parameters and random streams, such as BatchNorm's.
    """

    def split(key):
        # Flax would otherwise place each variable by its names at once, as if they were mesh axes.
        with nnx.use_eager_sharding(False):
            return nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)

    graph, params, streams, rest = jax.eval_shape(split, jax.random.key(0))
    for path, variable in nnx.to_flat_state(rest):
        raise ConfigError(
            f"model state {'/'.join(map(str, path))} is a {type(variable).__name__}: meshtrain keeps parameters "
            f"only; use a layer without running state (LayerNorm or GroupNorm instead of BatchNorm)"
        )

    def init(key):
        return nnx.to_pure_dict(split(key)[1])

    def bind(values, key=None):
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy, for the next line writes into it
        nnx.replace_by_pure_dict(state, {name: values[name] for name in nnx.to_pure_dict(params)})
        leaves, tree = jax.tree.flatten(streams)
        base = jax.random.key(0) if key is None else key
        # Each stream its own key, or all layers would drop the same.
        fresh = [
            jax.random.fold_in(base, n) if _is_key(leaf) else jax.numpy.uint32(0)
            for n, leaf in enumerate(leaves)
        ]
        module = nnx.merge(graph, state, jax.tree.unflatten(tree, fresh))
        if key is None and leaves:
            module.eval()
        return module

    names = {
        path: variable.get_metadata().get("out_sharding")
        for path, variable in nnx.to_flat_state(params)
    }
    axes = _axes_tree(nnx.to_pure_dict(params), names)
    return Functional(init, axes, bind)


def stack(block: Functional, num_layers: int) -> tuple[Callable[[jax.Array], Params], Axes]:
    """Returns init and axes of `num_layers` blocks on a leading `layers` dim."""
    axes = jax.tree.map(
        lambda names: ("layers", *names), block.axes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return (lambda key: jax.vmap(block.init)(jax.random.split(key, num_layers))), axes


def from_nnx(
    build: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[nnx.Module, Any], Metrics]
) -> Model:
    """Makes a Model of your NNX module: `build(rngs) -> module` and `loss(module, batch) -> Metrics`."""
    pure = functional(build)
    return Model(
        pure.init, pure.axes, loss=lambda params, batch, key: loss(pure.bind(params, key), batch)
    )


def from_linen(
    module: linen.Module, loss: Callable[[Callable, Any], Metrics], *, example: Any
) -> Model:
    """Makes a Model of your Linen module: `loss(apply, batch) -> Metrics`, where `apply(*inputs)` runs it.

    `example` is one input (an array, or a tuple of several), of which only shape and dtype matter.
    """
    example = example if isinstance(example, tuple) else (example,)
    zeros = tuple(jax.numpy.zeros(x.shape, x.dtype) for x in example)

    def variables(key):
        return module.init({"params": key, "dropout": key}, *zeros)

    boxed = jax.eval_shape(variables, jax.random.key(0))
    for collection in boxed.keys() - {"params"}:
        raise ConfigError(
            f"model state {collection!r}: meshtrain keeps parameters only; use a layer without running state "
            f"(LayerNorm or GroupNorm instead of BatchNorm)"
        )
    specs = linen.get_partition_spec(boxed)["params"]
    names = {path: tuple(spec) or None for path, spec in jax.tree.leaves_with_path(specs)}
    shapes = linen.unbox(boxed)["params"]
    axes = jax.tree.map_with_path(lambda path, leaf: names[path] or (None,) * leaf.ndim, shapes)

    def run(params, batch, key):
        def apply(*inputs, **options):
            rngs = {} if key is None else {"dropout": key}
            return module.apply({"params": params}, *inputs, rngs=rngs, **options)

        with linen.intercept_methods(_without_dropout) if key is None else contextlib.nullcontext():
            return loss(apply, batch)

    return Model(lambda key: linen.unbox(variables(key))["params"], axes, loss=run)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _without_dropout(run: Callable, args: tuple, options: dict, context: Any) -> Any:
    return args[0] if isinstance(context.module, linen.Dropout) else run(*args, **options)


def _axes_tree(shapes: Any, names: dict) -> Axes:
    """Names as a tree like `shapes`; a parameter without names is sharded nowhere."""
    return jax.tree.map_with_path(
        lambda path, leaf: tuple(names[tuple(entry.key for entry in path)] or (None,) * leaf.ndim),
        shapes,
    )
