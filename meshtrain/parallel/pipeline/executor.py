"""Runs any pipeline schedule: a GradFn like the plain one, so that a step knows nothing of pipelines.

In a tick every stage runs one forward of a chunk of its layers and one backward, as its column of the
table says, and hands the results to its neighbours. Embedding and head belong to no stage: all work on
them together, on the micro-batch that comes in or goes out in that tick; with the rule
`("vocab", ("pipeline", "tensor"))` each holds, and computes, its share.

  forward    embed what enters the first chunk; keep each chunk's input (or all that its backward
             needs); run the chunk; send the result to the next stage
  backward   run the chunk again from its input (or take what was kept); head and loss of what leaves
             the last chunk; pull gradients through the chunk, and add up its layers'; send its input's
             to the stage before; pull what arrives at the first chunk through the embedding

A stage that is idle computes too, on zeros or on what is left in a slot, which costs nothing in lock
step; what it keeps goes to a free slot, and nothing of it is used.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import grads as plain
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.parallel.pipeline import ring
from meshtrain.parallel.pipeline.schedules import IDLE, Table, Work
from meshtrain.parallel.pipeline.stages import Stages

# P stages, V chunks a stage, K layers a chunk, N slices of the batch

IDLE_INPUT = 0.0  # what an idle stage works on; nothing depends on it


class Tick(NamedTuple):
    """A row of the table; stacked, all rows of a phase."""

    forward: Work  # of (P,) arrays
    backward: Work
    enters: Any  # () micro-batch that comes into the first chunk, or IDLE
    through: Any  # () micro-batch whose forward leaves the last chunk
    turns: Any  # () micro-batch whose backward begins in the last chunk
    returns: Any  # () micro-batch whose gradient leaves the first chunk


class Carry(NamedTuple):
    """What passes from tick to tick."""

    x: jax.Array  # (P, N, ...) from the stage before
    grad: jax.Array  # (P, N, ...) from the stage after
    kept: Any  # (P, slots, N, ...) of chunks that have yet to go back
    layer_grads: Params  # (P, V, N, K, ...) float32 or wider, as the next
    outer_grads: Params  # (N, ...)
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
) -> plain.GradFn:
    """Returns the GradFn that takes the micro-batches of `table` through the stages.

    `keep` says what a stage keeps of a chunk for its backward: its "inputs", and it runs the chunk
    again, or its "residuals", all that the backward needs except what the weights alone determine.
    """

    def grad_fn(params, batch, key, scale=1.0):
        stages = _stages(model, table, params, batch, dtype, remat, unroll, partial_over, keep)
        step = _Step(stages, table, grad_shardings, scale)
        carry = step.start()
        for phase in table.phases:
            rows = jax.tree.map(lambda column, phase=phase: column[phase], ticks_of(table))
            carry, _ = jax.lax.scan(functools.partial(step.tick, rows), carry, rows)
        layer_grads = jax.vmap(ring.from_stages, in_axes=2)(carry.layer_grads)
        sums = {**carry.outer_grads, "layers": layer_grads}, carry.metrics
        return plain.synchronise(sums, grad_shardings)

    return grad_fn


def evaluate(
    model: Model, table: Table, *, dtype: str, partial_over: tuple[str, ...]
) -> Callable[[Params, Any], Metrics]:
    """Returns the Metrics of a batch without gradients: the forwards of `table` alone."""
    rows = ticks_of(table)
    rows = jax.tree.map(lambda column: column[rows.forward.active.any(1)], rows)

    def metrics_of(params, batch):
        stages = _stages(model, table, params, batch, dtype, "none", 1, partial_over, "inputs")

        def tick(carry, row):
            arrived, metrics = carry
            y = _forward(stages, rows, arrived, row, stages.run)

            def head():
                return stages.head(stages.outer, ring.share(y, -1), stages.part(row.through))

            new = _if_ever_active(rows.through, row.through, head)
            return (ring.send(y, 1), jax.tree.map(jnp.add, metrics, new)), None

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
        enters=at(forward, *first),
        through=at(forward, *last),
        turns=at(backward, *last),
        returns=at(backward, *first),
    )


class _Step:
    """The forward and the backward half of a tick."""

    def __init__(self, stages: Stages, table: Table, grad_shardings: Any, scale):
        self.stages, self.table, self.scale = stages, table, scale
        self.places = jax.tree.map(
            lambda place: sharding.without_axes(place, stages.axes).spec, grad_shardings
        )

    def start(self) -> Carry:
        x, metrics = _zeros(self.stages, self.table.num_stages)
        idle = jnp.zeros(self.table.num_stages, jnp.int32)

        def kept():
            layers, parts = self.stages.layers_of(idle), self.stages.parts(idle)
            return self.stages.forward(layers, x, parts)[1]

        def slots(leaf):
            lead = (self.table.num_stages, self.table.num_slots)
            zeros = jnp.zeros((*lead, *leaf.shape[1:]), leaf.dtype)
            return self.stages.pin(zeros, "pipeline", None)

        def wide(leaf):
            return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

        return Carry(
            x=x,
            grad=x,
            kept=jax.tree.map(slots, jax.eval_shape(kept)),
            layer_grads=self.pin_layers(jax.tree.map(wide, self.stages.layers)),
            outer_grads=self.pin_outer(jax.tree.map(wide, self.stages.outer)),
            metrics=metrics,
        )

    def tick(self, rows: Tick, carry: Carry, row: Tick) -> tuple[Carry, None]:
        if rows.forward.active.any():
            y, kept = _forward(self.stages, rows, carry.x, row, self.stages.forward)
            kept = ring.put(carry.kept, row.forward.slot, kept)
            carry = carry._replace(x=ring.send(y, 1), kept=kept)
        if rows.backward.active.any():
            carry = self.backward(rows, carry, row)
        return carry, None

    def backward(self, rows: Tick, carry: Carry, row: Tick) -> Carry:
        stages, active = self.stages, row.backward.active
        number, chunk, slot = _used(row.backward)
        kept = jax.tree.map(lambda leaf: stages.pin(leaf, "pipeline"), ring.pick(carry.kept, slot))
        layers = stages.layers_of(chunk)
        y, pull = stages.backward(layers, kept, stages.parts(number))

        def turn():
            def loss(outer, y):
                metrics = stages.head(outer, y, stages.part(row.turns))
                return metrics.loss.sum() * self.scale, metrics

            y_last = stages.pin(ring.share(y, -1))
            return jax.grad(loss, argnums=(0, 1), has_aux=True)(stages.outer, y_last)

        (head_grads, turned), metrics = _if_ever_active(rows.turns, row.turns, turn)
        is_last = (jnp.arange(len(chunk)) == len(chunk) - 1) & (chunk == self.table.num_chunks - 1)
        grad = jnp.where(_along(is_last, carry.grad), turned[None], carry.grad)
        layer_grads, grad = stages.pull(pull, stages.pin(_masked(active, grad), "pipeline"))

        def arrive():
            _, pull = jax.vjp(
                lambda outer: stages.embed(outer, stages.part(row.returns)), stages.outer
            )
            return pull(stages.pin(ring.share(grad, 0)))[0]

        outer_grads = carry.outer_grads
        for new in (head_grads, _if_ever_active(rows.returns, row.returns, arrive)):
            outer_grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), outer_grads, new)
        layer_grads = ring.add(carry.layer_grads, chunk, layer_grads, active)
        return carry._replace(
            grad=ring.send(grad, -1),
            layer_grads=self.pin_layers(layer_grads),
            outer_grads=self.pin_outer(outer_grads),
            metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
        )

    def pin_layers(self, tree: Params) -> Params:
        """Lays gradients (P, V, N, K, ...) out as the step will want them."""
        return jax.tree.map(
            lambda leaf, spec: self.stages.pin(leaf, "pipeline", None, rest=(None, *spec[1:])),
            tree,
            self.places["layers"],
        )

    def pin_outer(self, tree: Params) -> Params:
        """Lays gradients (N, ...) out as the step will want them."""
        places = {name: self.places[name] for name in tree}
        return jax.tree.map(lambda leaf, spec: self.stages.pin(leaf, rest=spec), tree, places)


def _stages(model, table, params, batch, dtype, remat, unroll, partial_over, keep) -> Stages:
    return Stages(
        model,
        plain.rematerialised(model.block, remat),
        plain.cast(params, dtype),
        batch,
        num_microbatches=table.num_microbatches,
        num_chunks=table.num_chunks,
        partial_over=partial_over,
        unroll=unroll if remat == "none" else 1,
        keep=keep,
    )


def _zeros(stages: Stages, num_stages: int) -> tuple[jax.Array, Metrics]:
    """Returns a message without content, (P, N, ...), and sums of nothing, (N,)."""
    part = stages.part(jnp.int32(0))
    x = jax.eval_shape(stages.embed, stages.outer, part)
    metrics = jax.eval_shape(stages.head, stages.outer, x, part)
    message = stages.pin(jnp.zeros((num_stages, *x.shape), x.dtype), "pipeline")
    return message, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)


def _forward(stages: Stages, rows: Tick, arrived: jax.Array, row: Tick, run: Callable) -> Any:
    """Returns what `run` makes of the chunks, their inputs and the micro-batches of a tick's forwards."""
    number, chunk, _ = _used(row.forward)

    def embed():
        return stages.embed(stages.outer, stages.part(row.enters))

    entering = _if_ever_active(rows.enters, row.enters, embed)
    is_first = (jnp.arange(len(chunk)) == 0) & (chunk == 0)
    x = jnp.where(_along(is_first, arrived), entering[None], arrived)
    x = stages.pin(_masked(row.forward.active, x), "pipeline")
    return run(stages.layers_of(chunk), x, stages.parts(number))


def _if_ever_active(ever: np.ndarray, now: jax.Array, make: Callable) -> Any:
    """Returns make(), or zeros in ticks whose number `now` is IDLE; `ever` are those of the whole phase.

    The table decides, so all devices take the same branch; one that depended on the stage could leave
    them waiting for each other.
    """
    taken = np.count_nonzero(ever != IDLE)
    if taken == len(ever):
        return make()
    shapes = jax.eval_shape(make)

    def zeros():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    # A compiled program does not say how often a branch is taken; by this name the audit knows.
    with jax.named_scope(f"{taken}_of_{len(ever)}_ticks"):
        return jax.lax.cond(now != IDLE, make, zeros) if taken else zeros()


def _used(work: Work) -> Work:
    """Returns numbers that are good to index with, also those of idle stages."""
    return Work(*(jnp.maximum(column, 0) for column in work))


def _masked(active: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(_along(active, x), x, jnp.asarray(IDLE_INPUT, x.dtype))


def _along(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a mask of stages (P,) that broadcasts against (P, ...)."""
    return mask.reshape(-1, *[1] * (x.ndim - 1))
