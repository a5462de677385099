"""A model split into pipeline stages: its pieces, run on all stages and batch shards at once.

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
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.pipeline import ring

# P stages, V chunks per stage, K layers per chunk, N batch shards, b rows per micro-batch and shard, M micro-batches

FREE = PartitionSpec.UNCONSTRAINED


class Stages:
    """The parameters and the batch of one step, arranged by stage, and the functions computed with them.

    `layers` and `constants` (not trained) are (P, V, N, K, ...); `outer` (N, ...) has all
    other parameters. The dim N gives each batch shard gradients of its own. It is sharded, so no device
    holds more than one copy. `run_layers(layers, x, part)` applies stacked layers (K, ...).
    """

    def __init__(
        self,
        model: Model,
        run_layers: Callable[[Params, jax.Array, Any], jax.Array],
        params: Params,
        batch: Any,
        *,
        num_microbatches: int,
        num_chunks: int,
        partial_over: tuple[str, ...],
        keep: str,
    ):
        self.model, self.run_layers, self.keep = model, run_layers, keep
        self._vjp: ChunkVjp | None = None
        self.axes, self.num_slices = sharding.batch_slices(partial_over)
        layers = ring.to_stages(params["layers"], num_chunks)
        constants = ring.constants_of_stages(model.constants, num_chunks)
        outer = {name: tree for name, tree in params.items() if name != "layers"}
        self.layers = jax.tree.map(lambda leaf: self._broadcast(leaf, "pipeline", None), layers)
        self.constants = jax.tree.map(
            lambda leaf: self._broadcast(leaf, "pipeline", None), constants
        )
        self.outer = jax.tree.map(self._broadcast, outer)

        def split(leaf):  # rows m, m + M, ... form micro-batch m, as in grads.split: (N, b, M, ...)
            rows = leaf.shape[0] // self.num_slices // num_microbatches
            return leaf.reshape(self.num_slices, rows, num_microbatches, *leaf.shape[1:])

        self.batch = jax.tree.map(split, batch)

    def _broadcast(self, leaf: jax.Array, *lead: str | None) -> jax.Array:
        dim = len(lead)
        shape = (*leaf.shape[:dim], self.num_slices, *leaf.shape[dim:])
        return self.pin(jnp.broadcast_to(jnp.expand_dims(leaf, dim), shape), *lead)

    def layers_of(self, chunk: jax.Array) -> tuple[Params, Params]:
        """Returns parameters and constants of chunk `chunk` (P,) of each stage: (P, N, K, ...)."""
        return ring.pick((self.layers, self.constants), chunk)

    def pin(self, x: jax.Array, *lead: str | None, rest: tuple | None = None) -> jax.Array:
        """Constrains the sharding of `x`: `lead`, then the batch axes, then `rest` (default: free)."""
        rest = (FREE,) * (x.ndim - len(lead) - 1) if rest is None else rest
        return jax.lax.with_sharding_constraint(x, jax.P(*lead, self.axes or None, *rest))

    def part(self, number: jax.Array) -> Any:
        """Returns micro-batch `number`: (N, b, ...)."""
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, axis=2, keepdims=False),
            self.batch,
        )

    def parts(self, numbers: jax.Array) -> Any:
        """Returns micro-batch `numbers` (P,) of each stage: (P, N, b, ...)."""
        return ring.choose(self.batch, numbers, axis=2)

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

    def embed(self, outer: Params, part: Any) -> jax.Array:
        """Returns the embedded micro-batch: (N, b, ...)."""
        return self.pin(self._per_shard(self.model.embed)(outer, part))

    def head(self, outer: Params, x: jax.Array, part: Any) -> Metrics:
        """Returns the sums of each batch shard: (N,)."""
        return self._per_shard(self.model.head)(outer, x, part)

    def run(self, layers: tuple[Params, Params], x: jax.Array, parts: Any) -> jax.Array:
        """Runs a chunk on each stage: layers (P, N, K, ...), x (P, N, b, ...) -> (P, N, b, ...)."""
        return self.pin(self._per_stage(self._chunk)(layers, x, parts), "pipeline")

    def forward(self, layers: tuple[Params, Params], x: jax.Array, parts: Any):
        """Returns what `run` returns, and what `backward` needs of it later: a pytree of (P, N, ...)."""
        if self.keep == "inputs":
            return self.run(layers, x, parts), x
        y, residuals = self._run_with_residuals(layers, x, parts)
        depends = self._chunk_vjp(layers, x, parts).depends_on_x
        return y, [y, *itertools.compress(residuals, depends)]

    def backward(self, layers: tuple[Params, Params], kept: Any, parts: Any):
        """Returns the output of the chunk that `forward` kept this of, and its vjp, for `pull`."""
        if self.keep == "inputs":
            y, residuals = self._run_with_residuals(layers, kept, parts)
            return y, self._chunk_vjp(layers, kept, parts).pull(residuals)
        y, *residuals = kept
        # Residuals that do not depend on x are computed again from the weights; XLA removes the rest.
        _, again = self._run_with_residuals(layers, jnp.zeros_like(y), parts)
        vjp, of_x = self._chunk_vjp(layers, y, parts), iter(residuals)
        return y, vjp.pull(
            next(of_x) if depends else residual
            for depends, residual in zip(vjp.depends_on_x, again, strict=True)
        )

    def pull(self, pull: Any, grad: jax.Array) -> tuple[Params, jax.Array]:
        """Returns the gradients of each stage's chunk and of its input."""
        layer_grads, grad = self._per_stage(lambda pull, grad: pull(grad))(pull, grad)
        return layer_grads, self.pin(grad, "pipeline")

    def _chunk(self, layers, x, part):
        trained, constants = layers
        stack = {**trained, **constants} if constants else trained
        return self.run_layers(stack, x, part)

    def _run_with_residuals(self, layers, x, parts) -> tuple[jax.Array, list[jax.Array]]:
        """Returns what `run` returns, and the residuals of the chunk's vjp, each (P, N, ...)."""
        run = self._chunk_vjp(layers, x, parts).run
        y, *residuals = self._per_stage(lambda *args: run(*jax.tree.leaves(args)))(layers, x, parts)
        return self.pin(y, "pipeline"), residuals

    def _chunk_vjp(self, layers, x, parts) -> "ChunkVjp":
        """Returns the vjp of a chunk of one stage and slice; arguments have leading dims (P, N)."""
        if self._vjp is None:
            shapes = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), (layers, x, parts)
            )
            with sharding.partial_axes((*self.axes, "pipeline")):
                self._vjp = trace_vjp(self._chunk, *shapes)
        return self._vjp


class ChunkVjp(NamedTuple):
    """The vjp of a chunk, traced once, so that its residuals are arrays in a fixed order.

    The forward and the backward of a micro-batch run in different ticks, and the residuals wait in the
    carry of the loop in between. They have to mean the same in both; one trace for both ensures it.
    """

    run: Callable[..., list[jax.Array]]  # leaves of (layers, x, part) -> [y, *residuals]
    tree: Any  # of the function that `jax.vjp` returns: its leaves are the residuals
    depends_on_x: list[bool]  # of each residual; the others follow from the weights and the batch

    def pull(self, residuals: Iterable[jax.Array]) -> Callable:
        """Returns the function gradient of y -> gradients of (layers, x)."""
        return jax.tree.unflatten(self.tree, residuals)


def trace_vjp(chunk: Callable, layers: Any, x: jax.ShapeDtypeStruct, part: Any) -> ChunkVjp:
    """Traces the vjp of `chunk((trained, constants), x, part)` with respect to `trained` and `x`."""

    def output_and_vjp(layers, x, part):
        trained, constants = layers
        return jax.vjp(lambda trained, x: chunk((trained, constants), x, part), trained, x)

    jaxpr, (_, pull) = jax.make_jaxpr(output_and_vjp, return_shape=True)(layers, x, part)
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return ChunkVjp(run, jax.tree.structure(pull), _depends(run, layers, x, part)[1:])


def _depends(run: Callable, layers: Any, x: jax.ShapeDtypeStruct, part: Any) -> list[bool]:
    """Returns, for each output of `run`, whether it depends on x: whether it is batched when x is."""
    batched: list[bool] = []
    leaves = jax.tree.leaves((layers, x, part))
    of_x = len(jax.tree.leaves(layers))

    @jax.custom_batching.custom_vmap
    def observe(*outputs):
        return outputs

    @observe.def_vmap
    def _(axis_size, in_batched, *outputs):
        batched.extend(in_batched)
        return outputs, tuple(in_batched)

    def outputs(x, others):
        return observe(*run(*others[:of_x], x, *others[of_x:]))

    others = [*leaves[:of_x], *leaves[of_x + 1 :]]
    xs = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    jax.eval_shape(jax.vmap(outputs, in_axes=(0, None)), xs, others)
    return batched
