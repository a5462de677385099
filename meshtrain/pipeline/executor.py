"""Runs any pipeline schedule as a GradFn, so that the train step does not know about pipelines.

In a tick every stage runs at most one forward and one backward of a chunk of its layers, as its column
of the table says, and sends the results to its neighbours. Embedding and head belong to no stage: all stages
compute them together, for the micro-batch that is at the first or last chunk in that tick. With the
rule `("vocab", ("pipeline", "tensor"))` they are sharded over the stages.

  forward    embed the micro-batch of the first chunk; save each chunk's input (or its residuals);
             run the chunk; send the output to the next stage
  backward   run the chunk again from its saved input (or load its residuals); compute head and loss
             of the last chunk's output; backpropagate through the chunk and add up the gradients of
             its layers; send the gradient of its input to the previous stage; backpropagate the
             gradient of the first chunk's input through the embedding

An idle stage computes too, on zeros or on an old slot. This costs no time, because all stages work in
lock step. Its results go to a free slot and are not used.
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
from meshtrain.parallel import grad_sync, sharding
from meshtrain.parallel.remat import rematerialised
from meshtrain.pipeline import per_stage
from meshtrain.pipeline.stages import Stages
from meshtrain.schedules import IDLE, Slot, Table

# P stages, V chunks per stage, K layers per chunk, N batch shards

IDLE_INPUT = 0.0  # input of an idle stage; no result depends on it


class Tick(NamedTuple):
    """A row of the table, or several rows, stacked. The last four fields are a micro-batch or IDLE: ()."""

    forward: Slot  # of (P,) arrays
    backward: Slot
    first_forward: Any  # micro-batch whose forward starts, in the first chunk
    last_forward: Any  # micro-batch whose forward ends, in the last chunk
    last_backward: Any  # micro-batch whose backward starts, in the last chunk
    first_backward: Any  # micro-batch whose backward ends, in the first chunk


class Carry(NamedTuple):
    """The state that is carried from tick to tick."""

    x: Any  # (P, N, ...) activations received from the previous stage
    grad: Any  # (P, N, ...) gradients received from the next stage
    kept: Any  # (P, slots, N, ...) inputs or residuals of chunks whose backward is still to come
    layer_grads: Params  # (P, V, N, K, ...) float32 or float64
    outer_grads: Params  # (N, ...) float32 or float64
    metrics: Metrics  # (N,)


def pipelined(
    model: Model,
    table: Table,
    *,
    dtype: str,
    remat: str,
    unroll: int,
    keep: str,
    grad_shardings: Any,
    partial_over: tuple[str, ...],
    how: grad_sync.Sync | None = None,
) -> GradFn:
    """Returns the GradFn that runs the micro-batches of `table` through the stages.

    `keep` is what a stage saves of a chunk for its backward: "inputs", from which the chunk is run again,
    or "residuals", all arrays that the backward needs, except those that follow from the weights alone.
    """

    def grad_fn(params, batch, key, scale=1.0, residual=None):
        run = dtype, remat, unroll, partial_over, keep, grad_shardings
        stages = _stages(model, table, params, batch, *run)
        step = _Step(stages, table, grad_shardings, scale)
        carry = step.start()
        for phase in table.phases:
            rows = jax.tree.map(lambda column, phase=phase: column[phase], ticks_of(table))
            carry, _ = jax.lax.scan(functools.partial(step.tick, rows), carry, rows)
        sums = {**carry.outer_grads, **per_stage.gradients(carry.layer_grads)}, carry.metrics
        return grad_sync.synchronise(sums, grad_shardings, residual, how, key)

    return grad_fn


def make_eval_step(
    model: Model, table: Table, *, dtype: str, partial_over: tuple[str, ...]
) -> Callable[[Params, Any], Metrics]:
    """Returns the function (params, batch) -> Metrics that runs only the forwards of `table`."""
    rows = ticks_of(table)
    rows = jax.tree.map(lambda column: column[rows.forward.active.any(1)], rows)

    def metrics_of(params, batch):
        stages = _stages(model, table, params, batch, dtype, "none", 1, partial_over, "inputs")

        def tick(carry, row):
            arrived, metrics = carry
            y = _forward(stages, rows, arrived, row, stages.run)

            def head():
                microbatch = stages.microbatch(row.last_forward)
                return stages.head(stages.outer, per_stage.share(y, -1), microbatch)

            new = _if_ever_active(rows.last_forward, row.last_forward, head)
            return (per_stage.send(y, 1), jax.tree.map(jnp.add, metrics, new)), None

        x, metrics = _zeros(stages, table.num_stages)
        (_, metrics), _ = jax.lax.scan(tick, (x, metrics), rows)
        return jax.tree.map(lambda leaf: leaf.sum(0), metrics)

    return metrics_of


def ticks_of(table: Table) -> Tick:
    """Returns the rows of a table, stacked."""

    def at(work, stage, chunk):
        return np.where(work.chunk[:, stage] == chunk, work.microbatch[:, stage], IDLE)

    first, last = (0, 0), (table.num_stages - 1, table.num_chunks - 1)
    forward, backward = table.forward, table.backward
    return Tick(
        forward,
        backward,
        first_forward=at(forward, *first),
        last_forward=at(forward, *last),
        last_backward=at(backward, *last),
        first_backward=at(backward, *first),
    )


class _Step:
    """The forward half and the backward half of a tick."""

    def __init__(self, stages: Stages, table: Table, grad_shardings: Any, scale):
        self.stages, self.table, self.scale = stages, table, scale
        self.grad_specs = jax.tree.map(
            lambda one: sharding.without_axes(one, stages.axes).spec, grad_shardings
        )

    def start(self) -> Carry:
        x, metrics = _zeros(self.stages, self.table.num_stages)
        idle = jnp.zeros(self.table.num_stages, jnp.int32)

        def kept():
            layers, batch = self.stages.layers_of(idle), self.stages.microbatches(idle)
            return self.stages.forward(layers, x, batch)[1]

        def slots(leaf):
            lead = (self.table.num_stages, self.table.num_slots)
            zeros = jnp.zeros((*lead, *leaf.shape[1:]), leaf.dtype)
            return self.stages.pin(zeros, "pipeline", None)

        def zeros(leaf):
            return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

        return Carry(
            x=x,
            grad=x,
            kept=jax.tree.map(slots, jax.eval_shape(kept)),
            layer_grads=self.pin_layers(jax.tree.map(zeros, self.stages.layers)),
            outer_grads=self.pin_outer(jax.tree.map(zeros, self.stages.outer)),
            metrics=metrics,
        )

    def tick(self, rows: Tick, carry: Carry, row: Tick) -> tuple[Carry, None]:
        if rows.forward.active.any():
            y, kept = _forward(self.stages, rows, carry.x, row, self.stages.forward)
            kept = per_stage.put(carry.kept, row.forward.slot, kept)
            carry = carry._replace(x=per_stage.send(y, 1), kept=kept)
        if rows.backward.active.any():
            carry = self.backward(rows, carry, row)
        return carry, None

    def backward(self, rows: Tick, carry: Carry, row: Tick) -> Carry:
        stages, active = self.stages, row.backward.active
        number, chunk, slot = _indices(row.backward)
        kept = jax.tree.map(
            lambda leaf: stages.pin(leaf, "pipeline"), per_stage.pick(carry.kept, slot)
        )
        layers = stages.layers_of(chunk)
        y, vjp = stages.backward(layers, kept, stages.microbatches(number))

        def head():
            def loss(outer, y):
                metrics = stages.head(outer, y, stages.microbatch(row.last_backward))
                return metrics.loss.sum() * self.scale, metrics

            y_last = stages.pin(per_stage.share(y, -1))
            return jax.grad(loss, argnums=(0, 1), has_aux=True)(stages.outer, y_last)

        (head_grads, y_grad), metrics = _if_ever_active(rows.last_backward, row.last_backward, head)
        is_last = (jnp.arange(len(chunk)) == len(chunk) - 1) & (chunk == self.table.num_chunks - 1)
        grad = per_stage.either(is_last, per_stage.on_all_stages(y_grad), carry.grad)
        layer_grads, grad = stages.apply_vjp(vjp, stages.pin(_masked(active, grad), "pipeline"))

        def embed():
            microbatch = stages.microbatch(row.first_backward)
            _, vjp = jax.vjp(lambda outer: stages.embed(outer, microbatch), stages.outer)
            return vjp(stages.pin(per_stage.share(grad, 0)))[0]

        outer_grads = carry.outer_grads
        for new in (head_grads, _if_ever_active(rows.first_backward, row.first_backward, embed)):
            outer_grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), outer_grads, new)
        layer_grads = per_stage.add(carry.layer_grads, chunk, layer_grads, active)
        return carry._replace(
            grad=per_stage.send(grad, -1),
            layer_grads=self.pin_layers(layer_grads),
            outer_grads=self.pin_outer(outer_grads),
            metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
        )

    def pin_layers(self, tree: Params) -> Params:
        """Shards gradients (P, V, N, K, ...) as the train step needs them."""
        return jax.tree.map(
            lambda leaf, spec: self.stages.pin(leaf, "pipeline", None, rest=(None, *spec[1:])),
            tree,
            self.grad_specs.get("layers", {}),
        )

    def pin_outer(self, tree: Params) -> Params:
        """Shards gradients (N, ...) as the train step needs them."""
        specs = {name: self.grad_specs[name] for name in tree}
        return jax.tree.map(lambda leaf, spec: self.stages.pin(leaf, rest=spec), tree, specs)


def _stages(model, table, params, batch, dtype, remat, unroll, partial_over, keep, trained=None):
    block, unroll = rematerialised(model.block, remat), unroll if remat == "none" else 1
    return Stages(
        model,
        functools.partial(blocks.run_blocks, block, unroll=unroll),
        blocks.to_compute_dtype(params, dtype),
        batch,
        num_microbatches=table.num_microbatches,
        num_chunks=table.num_chunks,
        partial_over=partial_over,
        keep=keep,
        trained=trained,
    )


def _zeros(stages: Stages, num_stages: int) -> tuple[Any, Metrics]:
    """Returns a message (P, N, ...) and Metrics (N,) of zeros."""
    microbatch = stages.microbatch(jnp.int32(0))
    x = jax.eval_shape(stages.embed, stages.outer, microbatch)
    metrics = jax.eval_shape(stages.head, stages.outer, x, microbatch)
    message = jax.tree.map(lambda leaf: jnp.zeros((num_stages, *leaf.shape), leaf.dtype), x)
    return stages.pin(message, "pipeline"), jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics
    )


def _forward(stages: Stages, rows: Tick, arrived: Any, row: Tick, run: Callable) -> Any:
    """Runs the forwards of a tick: `run(layers, inputs, micro-batches)` of each stage's chunk."""
    number, chunk, _ = _indices(row.forward)

    def embed():
        return stages.embed(stages.outer, stages.microbatch(row.first_forward))

    entering = _if_ever_active(rows.first_forward, row.first_forward, embed)
    is_first = (jnp.arange(len(chunk)) == 0) & (chunk == 0)
    x = per_stage.either(is_first, per_stage.on_all_stages(entering), arrived)
    x = stages.pin(_masked(row.forward.active, x), "pipeline")
    return run(stages.layers_of(chunk), x, stages.microbatches(number))


def _if_ever_active(ever: np.ndarray, now: jax.Array, make: Callable) -> Any:
    """Returns make(), or zeros if `now` is IDLE; `ever` has the values of `now` in all ticks of the loop.

    `now` comes from the table, so all devices take the same branch. A branch on the stage index could
    leave devices waiting for each other.
    """
    taken = np.count_nonzero(ever != IDLE)
    if taken == len(ever):
        return make()
    shapes = jax.eval_shape(make)

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    # A compiled program does not show how often a branch is taken; the audit reads it from this name.
    with jax.named_scope(f"{taken}_of_{len(ever)}_ticks"):
        return jax.lax.cond(now != IDLE, make, zeros) if taken else zeros()


def _indices(work: Slot) -> Slot:
    """Returns valid indices, also for idle stages."""
    return Slot(*(jnp.maximum(column, 0) for column in work))


def _masked(active: jax.Array, x: Any) -> Any:
    return per_stage.either(
        active, x, jax.tree.map(lambda leaf: jnp.asarray(IDLE_INPUT, leaf.dtype), x)
    )
