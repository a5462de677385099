"""Runs any pipeline schedule as a GradFn, so that the train step does not know about pipelines.

In a tick every stage runs at most one forward and one backward of a chunk of its layers, as its
column of the table says, and sends the results to its neighbours. Embedding and head belong to no
stage: all stages compute them together, for the micro-batch that is at the first or last chunk.
With the rule `("vocab", ("pipeline", "tensor"))` they are sharded over the stages.

A row of the loop is the backward of one tick and the forward of the next, which do not depend on
each other. What crosses the stages is computed a row before it is used, or used a row after it
arrived, so that a row has other work while it is sent:

  embedding  backpropagate the gradient that left the first chunk in the row before
  backward   run the chunk again from its saved input (or load its residuals); compute head and loss
             of the output that the last chunk shared in the row before; backpropagate through the
             chunk and add up the gradients of its layers; send the gradient of its input to the
             previous stage
  forward    save each chunk's input (or its residuals); run the chunk; send the output to the next
             stage, and that of the last chunk to all; embed the micro-batch that enters the first
             chunk in the next row

An idle stage computes too, on zeros or on an old slot. This costs no time, because all stages work
in lock step. Its results go to a free slot and are not used.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.metrics import GradFn, Metrics
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params
from meshtrain.parallel import accelerator, sharding
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
    all_rows = rows_of(table)

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
            keep_output=not head_follows(table),
            # The tree of the gradients' shardings has exactly the parameters that are trained.
            trained=grad_shardings,
        )
        loop = _GradLoop(stages, table, grad_shardings, scale)
        carry = loop.initial_carry()
        # Platforms with asynchronous collectives get a loop for each kind of row.
        for phase in phases(all_rows, fine=accelerator.platform() != "cpu"):
            carry = loop.run_phase(_select(all_rows, phase.rows), phase, carry)
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
    rows = rows_of(table)
    rows = _select(rows, rows.forward.active.any(1))

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

        def run_row(carry, row):
            x, metrics = carry
            y = _run_forwards(stages, row, x, stages.run)

            def head():
                microbatch = stages.microbatch(row.last_forward)
                return stages.head(stages.outer, per_stage.share(y, -1), microbatch)

            new_metrics = _unless_idle(rows.last_forward, row.last_forward, head)
            x = _next_inputs(stages, rows, row, y)
            return (x, jax.tree.map(jnp.add, metrics, new_metrics)), None

        (_, metrics), _ = jax.lax.scan(run_row, _first_inputs_and_metrics(stages, table), rows)
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
    keep_output: bool = False,
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
        keep_output=keep_output,
        trained=trained,
    )


# ---- the rows of the loop ----


class Row(NamedTuple):
    """A row of the loop, or several rows, stacked.

    The last four fields are the micro-batch, or IDLE, at an end of the stack of layers: ().
    """

    # of (P,) arrays: the forwards of a tick of the table, and the backwards of the tick before
    forward: Slot
    backward: Slot
    # the micro-batch that enters the first chunk in the next row that has forwards
    entering: Any
    # the micro-batch whose forward ends, in the last chunk
    last_forward: Any
    # the micro-batch whose backward starts, in the last chunk
    last_backward: Any
    # the micro-batch whose backward has left the first chunk in the row before
    leaving: Any


def rows_of(table: Table) -> Row:
    """Returns the rows of the loop, stacked, without those that have nothing to do."""
    first_forward, last_forward = _at_the_ends(table, table.forward)
    first_backward, last_backward = _at_the_ends(table, table.backward)

    # The forward of tick t is in row t, its backward in row t + 1.
    def delayed(column, num_rows):
        padding = [(num_rows, 2 - num_rows)] + [(0, 0)] * (column.ndim - 1)
        return np.pad(column, padding, constant_values=IDLE)

    # In front of a tick without forwards the next one with forwards counts.
    forward_ticks = np.flatnonzero(table.forward.active.any(1))
    entering = np.full(table.num_ticks, IDLE, np.int32)
    entering[forward_ticks[:-1]] = first_forward[forward_ticks[1:]]

    rows = Row(
        forward=Slot(*(delayed(column, 0) for column in table.forward)),
        backward=Slot(*(delayed(column, 1) for column in table.backward)),
        entering=delayed(entering, 0),
        last_forward=delayed(last_forward, 0),
        last_backward=delayed(last_backward, 1),
        leaving=delayed(first_backward, 2),
    )
    has_work = rows.forward.active.any(1) | rows.backward.active.any(1) | (rows.leaving != IDLE)
    return _select(rows, has_work)


def _at_the_ends(table: Table, work: Slot) -> tuple[np.ndarray, np.ndarray]:
    """Returns the micro-batch of each tick in the first and the last chunk of the stack: (T,)."""

    def microbatch_at(stage, chunk):
        return np.where(work.chunk[:, stage] == chunk, work.microbatch[:, stage], IDLE)

    return microbatch_at(0, 0), microbatch_at(table.num_stages - 1, table.num_chunks - 1)


def head_follows(table: Table) -> bool:
    """Returns whether each micro-batch's backward starts in the tick in which its forward ends."""
    _, last_forward = _at_the_ends(table, table.forward)
    _, last_backward = _at_the_ends(table, table.backward)
    return np.array_equal(last_forward, last_backward)


class Phase(NamedTuple):
    """Consecutive rows that repeat a sequence of loops."""

    rows: slice
    # of the loops of one repetition
    lengths: tuple[int, ...]
    num_repeats: int


def phases(rows: Row, *, fine: bool) -> list[Phase]:
    """Returns the phases of a step, in order.

    A loop has rows with forwards only, with both or with backwards only. If `fine`, all its rows
    also embed a micro-batch, or none does, and so for the other work at the ends of the stack. So
    it needs no branch, in which a collective would have no other work beside it. The price is that
    more loops are compiled: 8 for 1f1b instead of 4.
    """
    has_forward = rows.forward.active.any(1)
    has_backward = rows.backward.active.any(1)
    columns = [has_forward, has_backward]
    if fine:
        columns += [column != IDLE for column in rows[2:]]
    kinds = np.stack(columns, axis=1)
    changes = np.flatnonzero((kinds[1:] != kinds[:-1]).any(1)) + 1
    bounds = [0, *changes.tolist(), len(kinds)]
    loops = [(end - start, *kinds[start]) for start, end in itertools.pairwise(bounds)]

    found = []
    number = 0
    while number < len(loops):
        num_loops, num_repeats = _longest_repetition(loops[number:]) if fine else (1, 1)
        end = number + num_loops * num_repeats
        lengths = tuple(loop[0] for loop in loops[number : number + num_loops])
        found.append(Phase(slice(bounds[number], bounds[end]), lengths, num_repeats))
        number = end
    return found


def _longest_repetition(sequence: list) -> tuple[int, int]:
    """Returns the length of a start of the sequence, and how often it follows, at least once.

    Of all starts that repeat, those that cover most of the sequence; otherwise one entry.
    """
    best = (1, 1)
    for length in range(1, len(sequence) // 2 + 1):
        num = 1
        while sequence[num * length : (num + 1) * length] == sequence[:length]:
            num += 1
        if num > 1 and num * length > best[0] * best[1]:
            best = (length, num)
    return best


def _select(rows: Row, index: slice | np.ndarray) -> Row:
    """Returns the rows with this index."""
    return jax.tree.map(lambda column: column[index], rows)


# ---- the loop over rows ----


class Carry(NamedTuple):
    """The state that is carried from row to row."""

    # (P, N, ...) inputs of the next forwards: from the previous stage, or embedded
    x: Any
    # (P, N, ...) gradients received from the next stage, of the differentiable part of x. The last
    # stage receives that of the first chunk's input, for the embedding.
    grad: Any
    # (N, ...) output of the last chunk, on all stages; None unless `head_follows`
    last_y: Any
    # (P, slots, N, ...) inputs or residuals of chunks whose backward is still to come
    kept: Any
    # (P, V, N, K, ...) float32 or float64
    layer_grads: Params
    # (N, ...) float32 or float64
    outer_grads: Params
    # (N,)
    metrics: Metrics


class _GradLoop:
    """The loop that computes the gradients of one step: its initial carry and body, `run_row`."""

    def __init__(self, stages: Stages, table: Table, grad_shardings: Any, scale: jax.Array | float):
        self.stages = stages
        self.table = table
        self.scale = scale
        self.head_follows = head_follows(table)
        self.grad_specs = jax.tree.map(
            lambda grad_sharding: sharding.without_axes(grad_sharding, stages.axes).spec,
            grad_shardings,
        )

    def initial_carry(self) -> Carry:
        """Returns the first input, empty slots, and zeros in float32 or float64 as gradients."""
        stages, table = self.stages, self.table
        x, metrics = _first_inputs_and_metrics(stages, table)
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

        # Not x itself, of which the part on the first stage is the first micro-batch.
        zeros = _zeros_like(x)
        last_y = stages.pin(jax.tree.map(lambda leaf: leaf[0], zeros))
        return Carry(
            x=x,
            grad=stages.pin(differentiable(zeros), "pipeline"),
            last_y=last_y if self.head_follows else None,
            kept=jax.tree.map(empty_slots, jax.eval_shape(kept_of_a_chunk)),
            layer_grads=self.pin_layers(jax.tree.map(zero_grad, stages.layers)),
            outer_grads=self.pin_outer(jax.tree.map(zero_grad, stages.outer)),
            metrics=metrics,
        )

    def run_phase(self, rows: Row, phase: Phase, carry: Carry) -> Carry:
        """Runs all rows of a phase."""
        bounds = np.cumsum([0, *phase.lengths]).tolist()

        def repetition(carry, own_rows):
            for start, end in itertools.pairwise(bounds):
                # Rows of the same kind: those of the first repetition stand for all others.
                body = functools.partial(self.run_row, _select(rows, slice(start, end)))
                carry, _ = jax.lax.scan(body, carry, _select(own_rows, slice(start, end)))
            return carry, None

        if phase.num_repeats == 1:
            carry, _ = repetition(carry, rows)
            return carry
        by_repetition = jax.tree.map(
            lambda column: column.reshape(phase.num_repeats, -1, *column.shape[1:]), rows
        )
        carry, _ = jax.lax.scan(repetition, carry, by_repetition)
        return carry

    def run_row(self, rows: Row, carry: Carry, row: Row) -> tuple[Carry, None]:
        """Runs the row `row`; `rows` are all rows of the loop, as numpy arrays."""
        if (rows.leaving != IDLE).any():
            carry = self.embedding(rows, carry, row)
        if rows.backward.active.any():
            carry = self.backward(rows, carry, row)
        if rows.forward.active.any():
            carry = self.forward(rows, carry, row)
        return carry, None

    def embedding(self, rows: Row, carry: Carry, row: Row) -> Carry:
        """Backpropagates the gradient that left the first chunk through the embedding."""
        stages = self.stages

        def embedding_grads():
            microbatch = stages.microbatch(row.leaving)

            def embed(outer):
                return differentiable(stages.embed(outer, microbatch))

            # Around the ring it was sent to the last stage.
            grad = stages.pin(per_stage.share(carry.grad, -1))
            _, vjp = jax.vjp(embed, stages.outer)
            return vjp(grad)[0]

        grads = _unless_idle(rows.leaving, row.leaving, embedding_grads)
        return carry._replace(outer_grads=self.pin_outer(_add_grads(carry.outer_grads, grads)))

    def backward(self, rows: Row, carry: Carry, row: Row) -> Carry:
        """Backpropagates through a chunk on each stage, and sends the gradient back."""
        stages, table = self.stages, self.table
        active = row.backward.active
        number, chunk, slot = _valid_indices(row.backward)

        # Run the chunk again from its saved input, or load its residuals.
        kept = per_stage.pick(carry.kept, slot)
        kept = jax.tree.map(lambda leaf: stages.pin(leaf, "pipeline"), kept)
        layers = stages.layers_of(chunk)
        y, vjp = stages.backward(layers, kept, stages.microbatches(number), like=carry.x)

        # Head and loss, of the last chunk's output.
        def head_grads_and_metrics():
            y_last = carry.last_y if self.head_follows else stages.pin(per_stage.share(y, -1))

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

        outer_grads = _add_grads(carry.outer_grads, head_grads)
        layer_grads = per_stage.add(carry.layer_grads, chunk, layer_grads, active)
        return carry._replace(
            grad=per_stage.send(grad, -1),
            layer_grads=self.pin_layers(layer_grads),
            outer_grads=self.pin_outer(outer_grads),
            metrics=jax.tree.map(jnp.add, carry.metrics, metrics),
        )

    def forward(self, rows: Row, carry: Carry, row: Row) -> Carry:
        """Runs a chunk on each stage, saves its input or residuals, and sends the output on."""
        stages = self.stages
        y, kept = _run_forwards(stages, row, carry.x, stages.forward)
        kept = per_stage.put(carry.kept, row.forward.slot, kept)

        def shared_output():
            return stages.pin(per_stage.share(y, -1))

        last_y = None
        if self.head_follows:
            last_y = _unless_idle(rows.last_forward, row.last_forward, shared_output)
        x = _next_inputs(stages, rows, row, y)
        return carry._replace(x=x, last_y=last_y, kept=kept)

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


def _first_inputs_and_metrics(stages: Stages, table: Table) -> tuple[Any, Metrics]:
    """Returns the inputs (P, N, ...) of the first forwards, and Metrics (N,) of zeros."""
    first_forward, _ = _at_the_ends(table, table.forward)
    microbatch = stages.microbatch(jnp.int32(first_forward[first_forward != IDLE][0]))
    embedded = stages.embed(stages.outer, microbatch)
    metrics = jax.eval_shape(stages.head, stages.outer, embedded, microbatch)
    is_first_stage = jnp.arange(table.num_stages) == 0
    embedded = per_stage.on_all_stages(embedded)
    x = per_stage.either(is_first_stage, embedded, _zeros_like(embedded))
    return stages.pin(x, "pipeline"), _zeros_like(metrics)


def _run_forwards(stages: Stages, row: Row, x: Any, run: Callable) -> Any:
    """Runs the forwards of a row: `run(layers, inputs, micro-batches)` of each stage's chunk."""
    number, chunk, _ = _valid_indices(row.forward)
    x = stages.pin(_zero_if_idle(row.forward.active, x), "pipeline")
    return run(stages.layers_of(chunk), x, stages.microbatches(number))


def _next_inputs(stages: Stages, rows: Row, row: Row, y: Any) -> Any:
    """Sends the outputs `y` of a row's forwards; returns the inputs of the next ones."""

    def embed():
        return stages.embed(stages.outer, stages.microbatch(row.entering))

    # The first chunk's input comes from the embedding, all others from the previous stage.
    embedded = per_stage.on_all_stages(_unless_idle(rows.entering, row.entering, embed))
    num_stages = row.forward.microbatch.shape[0]
    enters = (jnp.arange(num_stages) == 0) & (row.entering != IDLE)
    return stages.pin(per_stage.either(enters, embedded, per_stage.send(y, 1)), "pipeline")


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
