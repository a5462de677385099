"""Runs any pipeline schedule as a GradFn, so that the train step does not know about pipelines.

In a tick every stage runs at most one forward and one backward of a chunk of its layers, as its
column of the table says, and sends the results to its neighbours. Embedding and head belong to no
stage: all stages compute them together, for the micro-batch that is at the first or last chunk in
that tick. With the rule `("vocab", ("pipeline", "tensor"))` they are sharded over the stages.

  forward    embed the micro-batch of the first chunk; save each chunk's input (or its residuals);
             run the chunk; send the output to the next stage
  backward   run the chunk again from its saved input (or load its residuals); compute head and loss
             of the last chunk's output; backpropagate through the chunk and add up the gradients of
             its layers; send the gradient of its input to the previous stage; backpropagate the
             gradient of the first chunk's input through the embedding

An idle stage computes too, on zeros or on an old slot. This costs no time, because all stages work
in lock step. Its results go to a free slot and are not used.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.metrics import GradFn, Metrics
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.grad_sync import Sync, synchronise
from meshtrain.parallel.remat import rematerialised
from meshtrain.pipeline import per_stage
from meshtrain.pipeline.stages import Stages, differentiable, with_differentiable
from meshtrain.schedules import IDLE, Slot, Table

# P stages, V chunks per stage, K layers per chunk, N batch shards


def pipelined(
    model: Model,
    table: Table,
    *,
    dtype: str,
    remat: str,
    unroll: int,
    keep: str,
    grad_shardings: Any,
    unreduced_axes: tuple[str, ...],
    grad_sync: Sync | None = None,
) -> GradFn:
    """Returns the GradFn that runs the micro-batches of `table` through the stages.

    `keep` is what a stage saves of a chunk for its backward: "inputs", from which the chunk is run
    again, or "residuals", all arrays that the backward needs, except those that follow from the
    weights alone. `remat` and `unroll` are those of `grads.make_loss`; the other arguments are
    those of `grads.accumulate`.
    """
    ticks = ticks_of(table)

    def grad_fn(params, batch, key, scale=1.0, residual=None):
        stages = _make_stages(
            model,
            table,
            params,
            batch,
            dtype=dtype,
            remat=remat,
            unroll=unroll,
            unreduced_axes=unreduced_axes,
            keep=keep,
            # The tree of the gradients' shardings has exactly the parameters that are trained.
            trained=grad_shardings,
        )
        loop = _GradLoop(stages, table, grad_shardings, scale)
        carry = loop.initial_carry()
        # One loop per phase: the loops of warm-up and cool-down contain only forwards or backwards.
        for phase in table.phases:
            rows = _select(ticks, phase)
            carry, _ = jax.lax.scan(functools.partial(loop.tick, rows), carry, rows)
        grads = {**carry.outer_grads, **per_stage.gradients(carry.layer_grads)}
        return synchronise(
            grads,
            carry.metrics,
            grad_shardings,
            grad_sync=grad_sync,
            residual=residual,
            key=key,
        )

    return grad_fn


def make_eval_step(
    model: Model, table: Table, *, dtype: str, unreduced_axes: tuple[str, ...]
) -> Callable[[Params, Any], Metrics]:
    """Returns the function (params, batch) -> Metrics that runs only the forwards of `table`."""
    ticks = ticks_of(table)
    rows = _select(ticks, ticks.forward.active.any(1))

    def eval_step(params, batch):
        stages = _make_stages(
            model,
            table,
            params,
            batch,
            dtype=dtype,
            remat="none",
            unroll=1,
            unreduced_axes=unreduced_axes,
            keep="inputs",
        )

        def tick(carry, row):
            arrived, metrics = carry
            y = _run_forwards(stages, rows, row, arrived, stages.run)

            def head():
                microbatch = stages.microbatch(row.last_forward)
                return stages.head(stages.outer, per_stage.share(y, -1), microbatch)

            new_metrics = _unless_idle(rows.last_forward, row.last_forward, head)
            sent = per_stage.send(y, 1)
            return (sent, jax.tree.map(jnp.add, metrics, new_metrics)), None

        (_, metrics), _ = jax.lax.scan(tick, _zeros(stages, table.num_stages), rows)
        return jax.tree.map(lambda leaf: leaf.sum(0), metrics)

    return eval_step


def _make_stages(
    model: Model,
    table: Table,
    params: Params,
    batch: Any,
    *,
    dtype: str,
    remat: str,
    unroll: int,
    unreduced_axes: tuple[str, ...],
    keep: str,
    trained: Params | None = None,
) -> Stages:
    """Returns the stages for one step; `trained` is a tree with the trained leaves."""
    run_layers = functools.partial(
        blocks.run_blocks,
        rematerialised(model.block, remat, in_loop=True),
        # As in `grads.make_loss`.
        unroll=unroll if remat == "none" else 1,
    )
    return Stages(
        model,
        run_layers,
        blocks.to_compute_dtype(params, dtype),
        batch,
        num_microbatches=table.num_microbatches,
        num_chunks=table.num_chunks,
        unreduced_axes=unreduced_axes,
        keep=keep,
        trained=trained,
    )


# ---- the rows of the table ----


class Tick(NamedTuple):
    """A row of the table, or several rows, stacked.

    The last four fields are the micro-batch, or IDLE, at an end of the stack of layers: ().
    """

    # of (P,) arrays
    forward: Slot
    backward: Slot
    # the micro-batch whose forward starts, in the first chunk
    first_forward: Any
    # the micro-batch whose forward ends, in the last chunk
    last_forward: Any
    # the micro-batch whose backward starts, in the last chunk
    last_backward: Any
    # the micro-batch whose backward ends, in the first chunk
    first_backward: Any


def ticks_of(table: Table) -> Tick:
    """Returns the rows of a table, stacked."""
    last_stage = table.num_stages - 1
    last_chunk = table.num_chunks - 1

    def microbatch_at(slot, stage, chunk):
        return np.where(slot.chunk[:, stage] == chunk, slot.microbatch[:, stage], IDLE)

    return Tick(
        forward=table.forward,
        backward=table.backward,
        first_forward=microbatch_at(table.forward, 0, 0),
        last_forward=microbatch_at(table.forward, last_stage, last_chunk),
        last_backward=microbatch_at(table.backward, last_stage, last_chunk),
        first_backward=microbatch_at(table.backward, 0, 0),
    )


def _select(ticks: Tick, index: slice | np.ndarray) -> Tick:
    """Returns the rows with this index."""
    return jax.tree.map(lambda column: column[index], ticks)


# ---- the loop over ticks ----


class Carry(NamedTuple):
    """The state that is carried from tick to tick."""

    # (P, N, ...) activations received from the previous stage
    x: Any
    # (P, N, ...) gradients received from the next stage, of the differentiable part of x
    grad: Any
    # (P, slots, N, ...) inputs or residuals of chunks whose backward is still to come
    kept: Any
    # (P, V, N, K, ...) float32 or float64
    layer_grads: Params
    # (N, ...) float32 or float64
    outer_grads: Params
    # (N,)
    metrics: Metrics


class _GradLoop:
    """The loop that computes the gradients of one step: its initial carry and its body, `tick`."""

    def __init__(self, stages: Stages, table: Table, grad_shardings: Any, scale: jax.Array | float):
        self.stages = stages
        self.table = table
        self.scale = scale
        self.grad_specs = jax.tree.map(
            lambda grad_sharding: sharding.without_axes(grad_sharding, stages.axes).spec,
            grad_shardings,
        )

    def initial_carry(self) -> Carry:
        """Returns zeros: empty slots, and sums of gradients in float32 or float64."""
        stages, table = self.stages, self.table
        x, metrics = _zeros(stages, table.num_stages)
        # Only the shapes count, so any chunk and micro-batch will do.
        first = jnp.zeros(table.num_stages, jnp.int32)

        def kept_of_a_chunk():
            layers = stages.layers_of(first)
            _, kept = stages.forward(layers, x, stages.microbatches(first))
            return kept

        def empty_slots(leaf):
            shape = (table.num_stages, table.num_slots, *leaf.shape[1:])
            return stages.pin(jnp.zeros(shape, leaf.dtype), "pipeline", None)

        def zero_grad(leaf):
            # Not in bfloat16: the sum over micro-batches would lose small terms.
            return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

        return Carry(
            x=x,
            grad=differentiable(x),
            kept=jax.tree.map(empty_slots, jax.eval_shape(kept_of_a_chunk)),
            layer_grads=self.pin_layers(jax.tree.map(zero_grad, stages.layers)),
            outer_grads=self.pin_outer(jax.tree.map(zero_grad, stages.outer)),
            metrics=metrics,
        )

    def tick(self, rows: Tick, carry: Carry, row: Tick) -> tuple[Carry, None]:
        """Runs the tick `row`; `rows` are all ticks of the loop, as numpy arrays."""
        if rows.forward.active.any():
            carry = self.forward(rows, carry, row)
        if rows.backward.active.any():
            carry = self.backward(rows, carry, row)
        return carry, None

    def forward(self, rows: Tick, carry: Carry, row: Tick) -> Carry:
        """Runs a chunk on each stage, saves its input or residuals, and sends the output on."""
        stages = self.stages
        y, kept = _run_forwards(stages, rows, row, carry.x, stages.forward)
        kept = per_stage.put(carry.kept, row.forward.slot, kept)
        return carry._replace(x=per_stage.send(y, 1), kept=kept)

    def backward(self, rows: Tick, carry: Carry, row: Tick) -> Carry:
        """Backpropagates through a chunk on each stage, and sends the gradient back."""
        stages, table = self.stages, self.table
        active = row.backward.active
        number, chunk, slot = _valid_indices(row.backward)

        # Run the chunk again from its saved input, or load its residuals.
        kept = per_stage.pick(carry.kept, slot)
        kept = jax.tree.map(lambda leaf: stages.pin(leaf, "pipeline"), kept)
        layers = stages.layers_of(chunk)
        y, vjp = stages.backward(layers, kept, stages.microbatches(number))

        # Head and loss, of the last chunk's output.
        def head_grads_and_metrics():
            y_last = stages.pin(per_stage.share(y, -1))

            def scaled_loss(outer, part):
                y = with_differentiable(y_last, part)
                metrics = stages.head(outer, y, stages.microbatch(row.last_backward))
                return metrics.loss.sum() * self.scale, metrics

            grad_fn = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True)
            return grad_fn(stages.outer, differentiable(y_last))

        (head_grads, y_grad), metrics = _unless_idle(
            rows.last_backward, row.last_backward, head_grads_and_metrics
        )

        # The last chunk's gradient comes from the head, all others from the next stage.
        is_last_stage = jnp.arange(table.num_stages) == table.num_stages - 1
        is_last_chunk = is_last_stage & (chunk == table.num_chunks - 1)
        grad = per_stage.either(is_last_chunk, per_stage.on_all_stages(y_grad), carry.grad)
        grad = stages.pin(_zero_if_idle(active, grad), "pipeline")
        layer_grads, grad = stages.apply_vjp(vjp, grad)

        # The embedding, from the gradient of the first chunk's input.
        def embedding_grads():
            microbatch = stages.microbatch(row.first_backward)

            def embed(outer):
                return differentiable(stages.embed(outer, microbatch))

            _, vjp = jax.vjp(embed, stages.outer)
            return vjp(stages.pin(per_stage.share(grad, 0)))[0]

        embed_grads = _unless_idle(rows.first_backward, row.first_backward, embedding_grads)

        outer_grads = _add_grads(carry.outer_grads, head_grads)
        outer_grads = _add_grads(outer_grads, embed_grads)
        layer_grads = per_stage.add(carry.layer_grads, chunk, layer_grads, active)
        return carry._replace(
            grad=per_stage.send(grad, -1),
            layer_grads=self.pin_layers(layer_grads),
            outer_grads=self.pin_outer(outer_grads),
            metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
        )

    def pin_layers(self, grads: Params) -> Params:
        """Shards gradients (P, V, N, K, ...) as the train step needs them."""

        def pin_leaf(leaf, spec):
            # The spec is that of a stacked parameter (L, ...), whose first entry is `pipeline`.
            return self.stages.pin(leaf, "pipeline", None, rest=(None, *spec[1:]))

        return jax.tree.map(pin_leaf, grads, self.grad_specs.get("layers", {}))

    def pin_outer(self, grads: Params) -> Params:
        """Shards gradients (N, ...) as the train step needs them."""
        specs = {name: self.grad_specs[name] for name in grads}
        return jax.tree.map(lambda leaf, spec: self.stages.pin(leaf, rest=spec), grads, specs)


def _zeros(stages: Stages, num_stages: int) -> tuple[Any, Metrics]:
    """Returns a message (P, N, ...) and Metrics (N,) of zeros."""
    microbatch = stages.microbatch(jnp.int32(0))
    x = jax.eval_shape(stages.embed, stages.outer, microbatch)
    metrics = jax.eval_shape(stages.head, stages.outer, x, microbatch)
    message = jax.tree.map(lambda leaf: jnp.zeros((num_stages, *leaf.shape), leaf.dtype), x)
    message = stages.pin(message, "pipeline")
    return message, _zeros_like(metrics)


def _run_forwards(stages: Stages, rows: Tick, row: Tick, arrived: Any, run: Callable) -> Any:
    """Runs the forwards of a tick: `run(layers, inputs, micro-batches)` of each stage's chunk."""
    number, chunk, _ = _valid_indices(row.forward)

    def embed():
        return stages.embed(stages.outer, stages.microbatch(row.first_forward))

    # The first chunk's input comes from the embedding, all others from the previous stage.
    embedded = _unless_idle(rows.first_forward, row.first_forward, embed)
    is_first_chunk = (jnp.arange(len(chunk)) == 0) & (chunk == 0)
    x = per_stage.either(is_first_chunk, per_stage.on_all_stages(embedded), arrived)
    x = stages.pin(_zero_if_idle(row.forward.active, x), "pipeline")
    return run(stages.layers_of(chunk), x, stages.microbatches(number))


def _unless_idle(microbatches: np.ndarray, microbatch: jax.Array, compute: Callable) -> Any:
    """Returns compute(), or zeros in ticks whose `microbatch` is IDLE.

    `microbatches` has its values in all ticks of the loop: the branch is left out if it is always
    or never taken. The values come from the table, so all devices take the same branch. A branch on
    the stage index could leave devices waiting for each other.
    """
    num_ticks = len(microbatches)
    num_active = np.count_nonzero(microbatches != IDLE)
    if num_active == num_ticks:
        return compute()
    shapes = jax.eval_shape(compute)
    # A compiled program does not show how often a branch is taken; the audit reads it from this
    # name.
    with jax.named_scope(f"{num_active}_of_{num_ticks}_ticks"):
        if num_active == 0:
            return _zeros_like(shapes)
        return jax.lax.cond(microbatch != IDLE, compute, lambda: _zeros_like(shapes))


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _valid_indices(slot: Slot) -> Slot:
    """Returns indices that are valid for idle stages as well."""
    return jax.tree.map(lambda column: jnp.maximum(column, 0), slot)


# Input of an idle stage. No result depends on it: tests set it to NaN.
IDLE_INPUT = 0.0


def _zero_if_idle(active: jax.Array, x: Any) -> Any:
    """Returns `x` (P, ...) with IDLE_INPUT on the stages that are not `active`."""
    idle = jax.tree.map(lambda leaf: jnp.asarray(IDLE_INPUT, leaf.dtype), x)
    return per_stage.either(active, x, idle)


def _add_grads(sums: Params, grads: Params) -> Params:
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, grads)
