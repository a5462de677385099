"""A model split into pipeline stages, which run on all stages and batch shards at once.

The maths of a stage is the model's own, under `jax.vmap` over the dim of stages, which is sharded over
the mesh axis `pipeline`. XLA shards the rest over the other axes by the rules, as without a pipeline.
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
    """The parameters and the batch of one step, arranged by stage, and the functions computed with them.

    `layers` and `constants` (not trained) are (P, V, N, K, ...); `outer` and `outer_constants` (N, ...) have
    all other parameters. With the dim N, each batch shard has its own gradients. It is sharded, so no device holds
    more than one copy. `run_layers(layers, x, microbatch)` applies stacked layers (K, ...). Activations
    `x` are an array or a pytree of arrays.
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
        partial_over: tuple[str, ...],
        keep: str,
        trained: Params | None = None,
    ):
        """`trained`: a tree with the trained parameters; None: all are."""
        self.model, self.run_layers, self.keep = model, run_layers, keep
        self._vjp: ChunkVjp | None = None
        self.axes, self.num_shards = sharding.batch_slices(partial_over)
        trained = params if trained is None else trained
        fixed = trees.difference(params, trained)
        params = trees.intersect(params, trained)
        layers, fixed_layers = (
            per_stage.to_stages(part["layers"], num_chunks) if "layers" in part else {}
            for part in (params, fixed)
        )
        constants = per_stage.constants_of_stages(model.constants, num_chunks) | fixed_layers
        outer, outer_constants = (
            {name: tree for name, tree in part.items() if name != "layers"}
            for part in (params, fixed)
        )
        self.layers = jax.tree.map(lambda leaf: self._broadcast(leaf, "pipeline", None), layers)
        self.constants = jax.tree.map(
            lambda leaf: self._broadcast(leaf, "pipeline", None), constants
        )
        self.outer = jax.tree.map(self._broadcast, outer)
        self.outer_constants = jax.tree.map(self._broadcast, outer_constants)

        # (N, b, M, ...): as in grads.split, rows m, m + M, ... form micro-batch m.
        def split(leaf):
            rows = leaf.shape[0] // self.num_shards // num_microbatches
            return leaf.reshape(self.num_shards, rows, num_microbatches, *leaf.shape[1:])

        self.batch = jax.tree.map(split, batch)

    def _broadcast(self, leaf: jax.Array, *lead: str | None) -> jax.Array:
        dim = len(lead)
        shape = (*leaf.shape[:dim], self.num_shards, *leaf.shape[dim:])
        return self.pin(jnp.broadcast_to(jnp.expand_dims(leaf, dim), shape), *lead)

    def layers_of(self, chunk: jax.Array) -> tuple[Params, Params]:
        """Returns parameters and constants of chunk `chunk` (P,) of each stage: (P, N, K, ...)."""
        return per_stage.pick((self.layers, self.constants), chunk)

    def pin(self, x: Any, *lead: str | None, rest: tuple | None = None) -> Any:
        """Constrains the sharding of each leaf: `lead`, then the batch axes, then `rest` (default: free)."""

        def pin_leaf(leaf):
            others = (FREE,) * (leaf.ndim - len(lead) - 1) if rest is None else rest
            return jax.lax.with_sharding_constraint(leaf, jax.P(*lead, self.axes or None, *others))

        return jax.tree.map(pin_leaf, x)

    def microbatch(self, number: jax.Array) -> Any:
        """Returns micro-batch `number`: (N, b, ...)."""
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, axis=2, keepdims=False),
            self.batch,
        )

    def microbatches(self, numbers: jax.Array) -> Any:
        """Returns micro-batch `numbers` (P,) of each stage: (P, N, b, ...)."""
        return per_stage.choose(self.batch, numbers, axis=2)

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
        return self.pin(self._per_stage(self._chunk)(layers, x, microbatches), "pipeline")

    def forward(self, layers: tuple[Params, Params], x: Any, microbatches: Any):
        """Returns what `run` returns, and what `backward` needs later: a pytree of (P, N, ...)."""
        if self.keep == "inputs":
            return self.run(layers, x, microbatches), x
        y, residuals = self._run_with_residuals(layers, x, microbatches)
        depends = self._chunk_vjp(layers, x, microbatches).depends_on_x
        return y, [y, *itertools.compress(residuals, depends)]

    def backward(self, layers: tuple[Params, Params], kept: Any, microbatches: Any):
        """Returns the output of the chunk and its vjp, for `apply_vjp`; `kept` comes from `forward`."""
        if self.keep == "inputs":
            y, residuals = self._run_with_residuals(layers, kept, microbatches)
            return y, self._chunk_vjp(layers, kept, microbatches).vjp_from(residuals)
        y, *saved = kept
        # Residuals that do not depend on x are recomputed from the weights; XLA removes the rest.
        _, recomputed = self._run_with_residuals(
            layers, jax.tree.map(jnp.zeros_like, y), microbatches
        )
        chunk_vjp, saved = self._chunk_vjp(layers, y, microbatches), iter(saved)
        return y, chunk_vjp.vjp_from(
            next(saved) if depends else residual
            for depends, residual in zip(chunk_vjp.depends_on_x, recomputed, strict=True)
        )

    def apply_vjp(self, vjp: Any, grad: Any) -> tuple[Params, Any]:
        """Returns the gradients of each stage's chunk and of its input, from `grad` of its output."""
        layer_grads, grad = self._per_stage(lambda vjp, grad: vjp(grad))(vjp, grad)
        return layer_grads, self.pin(grad, "pipeline")

    def _chunk(self, layers, x, microbatch):
        trained, constants = layers
        return self.run_layers(trees.merge(constants, trained), x, microbatch)

    def _run_with_residuals(self, layers, x, microbatches) -> tuple[Any, list[jax.Array]]:
        """Returns what `run` returns, and the residuals of the chunk's vjp, each (P, N, ...)."""
        args = layers, x, microbatches
        run = self._chunk_vjp(*args).run
        y, residuals = self._per_stage(run)(*args)
        return self.pin(y, "pipeline"), residuals

    def _chunk_vjp(self, *args) -> "ChunkVjp":
        """Returns the vjp of a chunk of one stage and batch shard; `args` have leading dims (P, N)."""
        if self._vjp is None:
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), args
            )
            with sharding.partial_axes((*self.axes, "pipeline")):
                self._vjp = trace_vjp(self._chunk, *shapes)
        return self._vjp


class ChunkVjp(NamedTuple):
    """The vjp of a chunk, traced once, so that its residuals are arrays in a fixed order.

    The forward and the backward of a micro-batch run in different ticks, and the residuals wait in the
    carry of the loop in between. They have to mean the same in both; one trace for both ensures it.
    """

    run: Callable[..., tuple[Any, list[jax.Array]]]  # (layers, x, microbatch) -> (y, residuals)
    tree: Any  # of the function that `jax.vjp` returns: its leaves are the residuals
    depends_on_x: list[bool]  # of each residual; the others follow from the weights and the batch

    def vjp_from(self, residuals: Iterable[jax.Array]) -> Callable:
        """Returns the function gradient of y -> gradients of (layers, x)."""
        return jax.tree.unflatten(self.tree, residuals)


def trace_vjp(chunk: Callable, layers: Any, x: Any, microbatch: Any) -> ChunkVjp:
    """Traces the vjp of `chunk((trained, constants), x, microbatch)` with respect to `trained` and `x`."""

    def output_and_vjp(layers, x, microbatch):
        trained, constants = layers
        return jax.vjp(lambda trained, x: chunk((trained, constants), x, microbatch), trained, x)

    jaxpr, (y, vjp) = jax.make_jaxpr(output_and_vjp, return_shape=True)(layers, x, microbatch)
    flat = jax.extend.core.jaxpr_as_fun(jaxpr)
    tree, num_outputs = jax.tree.structure(y), len(jax.tree.leaves(y))

    def run(*args):
        outputs = flat(*jax.tree.leaves(args))
        return jax.tree.unflatten(tree, outputs[:num_outputs]), outputs[num_outputs:]

    return ChunkVjp(run, jax.tree.structure(vjp), _depends_on_x(run, layers, x, microbatch))


def _depends_on_x(run: Callable, layers: Any, x: Any, microbatch: Any) -> list[bool]:
    """Returns, for each residual of `run`, whether it depends on x: whether it is batched when x is."""
    batched: list[bool] = []

    @jax.custom_batching.custom_vmap
    def observe(*residuals):
        return residuals

    @observe.def_vmap
    def _(axis_size, in_batched, *residuals):
        batched.extend(in_batched)
        return residuals, tuple(in_batched)

    def residuals(layers, x, microbatch):
        return observe(*run(layers, x, microbatch)[1])

    xs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), x)
    jax.eval_shape(jax.vmap(residuals, in_axes=(None, 0, None)), layers, xs, microbatch)
    return batched
