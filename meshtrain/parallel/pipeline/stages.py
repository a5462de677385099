"""A model cut into pipeline stages: its pieces, run on all stages and slices of the batch at once.

The maths of a stage is the model's own, under `jax.vmap` with the mesh axis that the dim is sharded
over; so XLA shards it over the other axes by the rules, as it does without a pipeline.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from meshtrain import grads
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.pipeline import ring

# P stages, V chunks a stage, K layers a chunk, N slices of the batch, b rows of a micro-batch in one, M micro-batches

FREE = PartitionSpec.UNCONSTRAINED


class Stages:
    """The parameters and the batch of one step, laid out for the stages, and what is computed with them.

    `layers` is (P, V, N, K, ...), and so are `constants`, which are not trained; `outer` (N, ...) is all
    parameters but the layers. Each slice of the batch has its own copy, which on a device is none, and
    so gradients of its own.
    """

    def __init__(
        self,
        model: Model,
        block: Callable,
        params: Params,
        batch: Any,
        *,
        num_microbatches: int,
        num_chunks: int,
        partial_over: tuple[str, ...],
        unroll: int,
        keep: str,
    ):
        self.model, self.block, self.unroll, self.keep = model, block, unroll, keep
        self._moving: list[bool] | None = None
        self.axes, self.num_slices = sharding.batch_slices(partial_over)
        layers = ring.to_stages(params["layers"], num_chunks)
        constants = ring.constants_of_stages(model.constants, num_chunks)
        outer = {name: tree for name, tree in params.items() if name != "layers"}
        self.layers = jax.tree.map(lambda leaf: self._copied(leaf, "pipeline", None), layers)
        self.constants = jax.tree.map(lambda leaf: self._copied(leaf, "pipeline", None), constants)
        self.outer = jax.tree.map(self._copied, outer)

        def cut(leaf):  # as grads.split cuts, without moving the rows: (N, b, M, ...)
            rows = leaf.shape[0] // self.num_slices // num_microbatches
            return leaf.reshape(self.num_slices, rows, num_microbatches, *leaf.shape[1:])

        self.batch = jax.tree.map(cut, batch)

    def _copied(self, leaf: jax.Array, *lead: str | None) -> jax.Array:
        dim = len(lead)
        shape = (*leaf.shape[:dim], self.num_slices, *leaf.shape[dim:])
        return self.pin(jnp.broadcast_to(jnp.expand_dims(leaf, dim), shape), *lead)

    def layers_of(self, chunk: jax.Array) -> tuple[Params, Params]:
        """Returns what is trained of a chunk (P,) of each stage, and its constants: (P, N, K, ...)."""
        return ring.pick((self.layers, self.constants), chunk)

    def pin(self, x: jax.Array, *lead: str | None, rest: tuple | None = None) -> jax.Array:
        """Lays the dims of `x` out over `lead`, then over the slices' axes; `rest` as XLA likes, unless told."""
        rest = (FREE,) * (x.ndim - len(lead) - 1) if rest is None else rest
        return jax.lax.with_sharding_constraint(x, jax.P(*lead, self.axes or None, *rest))

    def part(self, number: jax.Array) -> Any:
        """Returns one micro-batch, (N, b, ...)."""
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, axis=2, keepdims=False),
            self.batch,
        )

    def parts(self, numbers: jax.Array) -> Any:
        """Returns the micro-batch (P,) of each stage, (P, N, b, ...)."""
        return ring.choose(self.batch, numbers, axis=2)

    def _sliced(self, function: Callable) -> Callable:
        def apart(*args):
            with sharding.partial_axes(self.axes):
                return function(*args)

        return jax.vmap(apart, spmd_axis_name=self.axes or None)

    def _staged(self, function: Callable) -> Callable:
        def apart(*args):
            with sharding.partial_axes(("pipeline",)):
                return function(*args)

        return jax.vmap(self._sliced(apart), spmd_axis_name="pipeline")

    def embed(self, outer: Params, part: Any) -> jax.Array:
        """Returns (N, b, ...)."""
        return self.pin(self._sliced(self.model.embed)(outer, part))

    def head(self, outer: Params, x: jax.Array, part: Any) -> Metrics:
        """Returns sums of each slice, (N,)."""
        return self._sliced(self.model.head)(outer, x, part)

    def run(self, layers: tuple[Params, Params], x: jax.Array, parts: Any) -> jax.Array:
        """Returns what a chunk of each stage makes of its `x`: (P, N, K, ...), (P, N, b, ...) -> (P, N, b, ...)."""
        return self.pin(self._staged(self._chunk)(layers, x, parts), "pipeline")

    def forward(self, layers: tuple[Params, Params], x: jax.Array, parts: Any):
        """Returns that, and what is kept of it for `backward`, a pytree of (P, N, ...)."""
        if self.keep == "inputs":
            return self.run(layers, x, parts), x
        y, pull = self._vjp(layers, x, parts)
        moving = self._depend_on_x(layers, x, parts)
        return y, [y, *itertools.compress(jax.tree.leaves(pull), moving)]

    def backward(self, layers: tuple[Params, Params], kept: Any, parts: Any):
        """Returns what `forward` returned, and what `pull` takes to go back through it."""
        if self.keep == "inputs":
            return self._vjp(layers, kept, parts)
        y, *moved = kept
        # On zeros, for what does not depend on them; the rest is not used, and so not computed.
        _, pull = self._vjp(layers, jnp.zeros_like(y), parts)
        leaves, tree = jax.tree.flatten(pull)
        moved = iter(moved)
        moving = self._depend_on_x(layers, y, parts)
        leaves = [
            next(moved) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)
        ]
        return y, jax.tree.unflatten(tree, leaves)

    def pull(self, pull: Any, grad: jax.Array) -> tuple[Params, jax.Array]:
        """Returns the gradients of each stage's chunk and of its input."""
        layer_grads, grad = self._staged(lambda pull, grad: pull(grad))(pull, grad)
        return layer_grads, self.pin(grad, "pipeline")

    def _chunk(self, layers, x, part):
        trained, constants = layers
        stack = {**trained, **constants} if constants else trained
        return grads.run_blocks(self.block, stack, x, part, self.unroll)

    def _vjp_of_chunk(self, layers, x, part):
        trained, constants = layers
        return jax.vjp(lambda trained, x: self._chunk((trained, constants), x, part), trained, x)

    def _vjp(self, layers, x, parts):
        y, pull = self._staged(self._vjp_of_chunk)(layers, x, parts)
        return self.pin(y, "pipeline"), pull

    def _depend_on_x(self, layers, x, parts) -> list[bool]:
        """Returns which leaves of a chunk's `pull` depend on its input.

        The others, weights above all, are there again when the chunk's turn comes to go back.
        """

        def leaves(x, layers, part):
            with sharding.partial_axes((*self.axes, "pipeline")):
                return jax.tree.leaves(self._vjp_of_chunk(layers, x, part)[1])

        if self._moving is None:
            args = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), (x, layers, parts)
            )
            jaxpr = jax.make_jaxpr(leaves)(*args).jaxpr
            wanted = np.eye(len(jaxpr.outvars), dtype=bool).tolist()
            self._moving = [partial_eval.dce_jaxpr(jaxpr, one)[1][0] for one in wanted]
        return self._moving
