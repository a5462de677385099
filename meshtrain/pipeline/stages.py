"""A model split into pipeline stages, which run on all stages and batch shards at once.

The maths of a stage is the model's own, under `jax.vmap` over the dim of stages, which is sharded
over the mesh axis `pipeline`. XLA shards the rest over the other axes by the rules, as without a
pipeline.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshtrain.metrics import Metrics
from meshtrain.models import trees
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.pipeline import per_stage

# P stages, V chunks per stage, K layers per chunk, N batch shards, M micro-batches,
# b rows per micro-batch and shard

FREE = PartitionSpec.UNCONSTRAINED


class Stages:
    """The parameters and the batch of one step, arranged by stage, and the functions that use them.

    `layers` and `constants` (not trained) are (P, V, N, K, ...); `outer` and `outer_constants` (N,
    ...) have all other parameters. With the dim N, each batch shard has its own gradients. It is
    sharded, so no device holds more than one copy. Activations `x` are an array or a pytree of
    arrays. Integers and bools among them travel with the others, but have no gradient.
    """

    def __init__(
        self,
        model: Model,
        run_layers: Callable[[Params, Any, Any], Any],
        params: Params,
        batch: Any,
        *,
        num_microbatches: int,
        num_chunks: int,
        unreduced_axes: tuple[str, ...],
        keep: str,
        keep_output: bool = False,
        trained: Params | None = None,
    ):
        """Moves the parameters to their stages.

        `run_layers(layers, x, microbatch)` applies stacked layers (K, ...). The gradients of the
        batch shards along `unreduced_axes` are not added up. `keep` is that of
        `executor.pipelined`; `keep_output`: `backward` returns the chunk's output, too. `trained`
        is a tree with the trained leaves; None: all are.
        """
        self.model = model
        self.run_layers = run_layers
        self.keep = keep
        self.keep_output = keep_output
        self._vjp: ChunkVjp | None = None
        self.axes, self.num_shards = sharding.batch_slices(unreduced_axes)

        if trained is None:
            trained = params
        frozen = trees.difference(params, trained)
        params = trees.intersect(params, trained)
        layers = _layers_to_stages(params, num_chunks)
        frozen_layers = _layers_to_stages(frozen, num_chunks)
        constants = per_stage.constants_of_stages(model.constants, num_chunks) | frozen_layers
        self.layers = self._broadcast_layers(layers)
        self.constants = self._broadcast_layers(constants)
        self.outer = jax.tree.map(self._broadcast, _without_layers(params))
        self.outer_constants = jax.tree.map(self._broadcast, _without_layers(frozen))

        # (N, b, M, ...): as in grads.split, rows m, m + M, ... form micro-batch m.
        def split(leaf):
            rows = leaf.shape[0] // self.num_shards // num_microbatches
            return leaf.reshape(self.num_shards, rows, num_microbatches, *leaf.shape[1:])

        self.batch = jax.tree.map(split, batch)

    def _broadcast_layers(self, layers: Params) -> Params:
        """Adds the dim of batch shards to layers (P, V, K, ...)."""
        return jax.tree.map(lambda leaf: self._broadcast(leaf, "pipeline", None), layers)

    def _broadcast(self, leaf: jax.Array, *lead: str | None) -> jax.Array:
        """Adds a dim of N batch shards after the dims that are sharded over `lead`."""
        dim = len(lead)
        shape = (*leaf.shape[:dim], self.num_shards, *leaf.shape[dim:])
        return self.pin(jnp.broadcast_to(jnp.expand_dims(leaf, dim), shape), *lead)

    def pin(self, x: Any, *lead: str | None, rest: tuple | None = None) -> Any:
        """Shards each leaf: by `lead`, then the batch axes, then `rest` (default: left to XLA)."""

        def pin_leaf(leaf):
            others = rest
            if others is None:
                others = (FREE,) * (leaf.ndim - len(lead) - 1)
            spec = jax.P(*lead, self.axes or None, *others)
            return jax.lax.with_sharding_constraint(leaf, spec)

        return jax.tree.map(pin_leaf, x)

    # ---- the inputs of a tick ----

    def layers_of(self, chunk: jax.Array) -> tuple[Params, Params]:
        """Returns parameters and constants of chunk `chunk` (P,) of each stage: (P, N, K, ...)."""
        return per_stage.pick((self.layers, self.constants), chunk)

    def microbatch(self, number: jax.Array) -> Any:
        """Returns micro-batch `number`: (N, b, ...)."""

        def pick(leaf):
            return jax.lax.dynamic_index_in_dim(leaf, number, axis=2, keepdims=False)

        return jax.tree.map(pick, self.batch)

    def microbatches(self, numbers: jax.Array) -> Any:
        """Returns micro-batch `numbers` (P,) of each stage: (P, N, b, ...)."""
        return per_stage.choose(self.batch, numbers, axis=2)

    # ---- the computations of a tick ----

    def _per_shard(self, function: Callable) -> Callable:
        """Returns `function` mapped over the leading dim N of batch shards."""

        def on_shard(*args):
            with sharding.partial_axes(self.axes):
                return function(*args)

        return jax.vmap(on_shard, spmd_axis_name=self.axes or None)

    def _per_stage(self, function: Callable) -> Callable:
        """Returns `function` mapped over the leading dims (P, N)."""

        def on_stage(*args):
            with sharding.partial_axes(("pipeline",)):
                return function(*args)

        return jax.vmap(self._per_shard(on_stage), spmd_axis_name="pipeline")

    def embed(self, outer: Params, microbatch: Any) -> Any:
        """Returns the embedded micro-batch: (N, b, ...)."""
        params = trees.merge(self.outer_constants, outer)
        return self.pin(self._per_shard(self.model.embed)(params, microbatch))

    def head(self, outer: Params, x: Any, microbatch: Any) -> Metrics:
        """Returns the Metrics of each batch shard: (N,)."""
        params = trees.merge(self.outer_constants, outer)
        return self._per_shard(self.model.head)(params, x, microbatch)

    def run(self, layers: tuple[Params, Params], x: Any, microbatches: Any) -> Any:
        """Runs a chunk on each stage: layers (P, N, K, ...), x (P, N, b, ...) -> (P, N, b, ...)."""
        y = self._per_stage(self._chunk)(layers, x, microbatches)
        return self.pin(y, "pipeline")

    def forward(self, layers: tuple[Params, Params], x: Any, microbatches: Any) -> tuple[Any, Any]:
        """Returns the output of `run`, and what `backward` needs later: a pytree of (P, N, ...)."""
        if self.keep == "inputs":
            return self.run(layers, x, microbatches), x
        y, residuals = self._run_with_residuals(layers, x, microbatches)
        depends_on_x = self._chunk_vjp(layers, x, microbatches).depends_on_x
        saved = list(itertools.compress(residuals, depends_on_x))
        return y, ([y, *saved] if self.keep_output else saved)

    def backward(
        self, layers: tuple[Params, Params], kept: Any, microbatches: Any, *, like: Any
    ) -> tuple[Any, Callable]:
        """Returns output and vjp of the chunk, for `apply_vjp`; `kept` comes from `forward`.

        `like` is any input of the stages. The output is None if only residuals are kept.
        """
        if self.keep == "inputs":
            y, residuals = self._run_with_residuals(layers, kept, microbatches)
            return y, self._chunk_vjp(layers, kept, microbatches).vjp_from(residuals)
        saved = iter(kept)
        y = next(saved) if self.keep_output else None
        # Residuals that do not depend on x are recomputed from the weights; XLA removes the rest.
        any_x = jax.tree.map(jnp.zeros_like, like)
        _, residuals = self._run_with_residuals(layers, any_x, microbatches)
        chunk_vjp = self._chunk_vjp(layers, any_x, microbatches)
        for number, depends_on_x in enumerate(chunk_vjp.depends_on_x):
            if depends_on_x:
                residuals[number] = next(saved)
        return y, chunk_vjp.vjp_from(residuals)

    def apply_vjp(self, vjp: Callable, grad: Any) -> tuple[Params, Any]:
        """Returns the gradients of each stage's chunk and of its input; `grad` is of its output.

        The gradients of x are those of `differentiable(x)`.
        """
        layer_grads, grad = self._per_stage(lambda vjp, grad: vjp(grad))(vjp, grad)
        return layer_grads, self.pin(grad, "pipeline")

    def _chunk(self, layers: tuple[Params, Params], x: Any, microbatch: Any) -> Any:
        """Runs the layers of one chunk, of one stage and batch shard."""
        trained, constants = layers
        return self.run_layers(trees.merge(constants, trained), x, microbatch)

    def _run_with_residuals(
        self, layers: tuple[Params, Params], x: Any, microbatches: Any
    ) -> tuple[Any, list[jax.Array]]:
        """Returns the output of `run`, and the residuals of the chunk's vjp, each (P, N, ...)."""
        run = self._chunk_vjp(layers, x, microbatches).run
        y, residuals = self._per_stage(run)(layers, x, microbatches)
        return self.pin(y, "pipeline"), residuals

    def _chunk_vjp(self, layers: tuple[Params, Params], x: Any, microbatches: Any) -> "ChunkVjp":
        """Returns the vjp of a chunk of one stage and shard; the arguments are (P, N, ...)."""
        if self._vjp is None:

            def one_shard(leaf):
                return jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype)

            shapes = jax.tree.map(one_shard, (layers, x, microbatches))
            with sharding.partial_axes((*self.axes, "pipeline")):
                self._vjp = trace_vjp(self._chunk, *shapes)
        return self._vjp


def _layers_to_stages(params: Params, num_chunks: int) -> Params:
    """Returns the layers (P, V, K, ...) among the parameters; {} if there are none."""
    if "layers" not in params:
        return {}
    return per_stage.to_stages(params["layers"], num_chunks)


def _without_layers(params: Params) -> Params:
    return {name: tree for name, tree in params.items() if name != "layers"}


# ---- the activations that have a gradient ----


def differentiable(x: Any) -> Any:
    """Returns the part of `x` that has a gradient: None replaces integers and bools."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, x)


def with_differentiable(x: Any, part: Any) -> Any:
    """Returns `x` with the leaves of `part`, a tree like `differentiable(x)`."""
    return jax.tree.map(lambda leaf, new: leaf if new is None else new, x, part)


# ---- the vjp of a chunk ----


class ChunkVjp(NamedTuple):
    """The vjp of a chunk, traced once, so that its residuals are arrays in a fixed order.

    The forward and the backward of a micro-batch run in different ticks, and the residuals wait in
    the carry of the loop in between. They have to mean the same in both; one trace for both ensures
    it.
    """

    # (layers, x, microbatch) -> (y, residuals)
    run: Callable[..., tuple[Any, list[jax.Array]]]
    # structure of the function that `jax.vjp` returns: its leaves are the residuals
    tree: Any
    # for each residual; the others follow from the weights and the batch
    depends_on_x: list[bool]

    def vjp_from(self, residuals: Iterable[jax.Array]) -> Callable:
        """Returns the function gradient of y -> gradients of (layers, x), both differentiable."""
        return jax.tree.unflatten(self.tree, residuals)


def trace_vjp(chunk: Callable, layers: Any, x: Any, microbatch: Any) -> ChunkVjp:
    """Traces the vjp of `chunk((trained, constants), x, microbatch)`.

    It is that of `trained` and of the differentiable part of `x`.
    """

    def output_and_vjp(layers, x, microbatch):
        trained, constants = layers

        def run_chunk(trained, part):
            y = chunk((trained, constants), with_differentiable(x, part), microbatch)
            return differentiable(y), y

        _, vjp, y = jax.vjp(run_chunk, trained, differentiable(x), has_aux=True)
        return y, vjp

    jaxpr, (y, vjp) = jax.make_jaxpr(output_and_vjp, return_shape=True)(layers, x, microbatch)
    flat_function = jax.extend.core.jaxpr_as_fun(jaxpr)
    y_tree = jax.tree.structure(y)
    num_outputs = y_tree.num_leaves

    def run(*args):
        outputs = flat_function(*jax.tree.leaves(args))
        y = jax.tree.unflatten(y_tree, outputs[:num_outputs])
        residuals = outputs[num_outputs:]
        return y, residuals

    return ChunkVjp(
        run,
        tree=jax.tree.structure(vjp),
        depends_on_x=_depends_on_x(run, layers, x, microbatch),
    )


def _depends_on_x(run: Callable, layers: Any, x: Any, microbatch: Any) -> list[bool]:
    """Returns for each residual of `run` whether it depends on x: is batched when x is."""
    batched: list[bool] = []

    @jax.custom_batching.custom_vmap
    def observe(*residuals):
        return residuals

    @observe.def_vmap
    def _(axis_size, in_batched, *residuals):
        batched.extend(in_batched)
        return residuals, tuple(in_batched)

    def observed_residuals(layers, x, microbatch):
        _, residuals = run(layers, x, microbatch)
        return observe(*residuals)

    # Only traced: nothing is computed, and the size of the batch does not matter.
    xs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), x)
    over_x = jax.vmap(observed_residuals, in_axes=(None, 0, None))
    jax.eval_shape(over_x, layers, xs, microbatch)
    return batched
