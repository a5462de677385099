"""What a layout cannot do without: the least that each device has to send per step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshtrain.analysis.audit.placement import Axes, Dims, Layout, Leaf
from meshtrain.analysis.collective_ops import sent

# What bytes are for.
GATHERED = "parameters gathered"
SUMMED = "gradients summed"
UPDATED = "updated parameters gathered"
ACTIVATIONS = "activations"
STATISTICS = "softmax statistics"
MESSAGES = "messages from stage to stage"
SHARED = "one stage's output or gradient, for all"
MOVED = "layers brought to their stages, gradients back"
APART = "input gradients summed one by one"  # which no layout needs, and compilers may still do


@dataclass(frozen=True)
class Need:
    """Bytes that some axes have to carry for a reason."""

    role: str
    axes: Axes
    leaf: Leaf | None  # whose parameter; None for activations
    key: tuple  # needs of the same key cannot be told apart
    once: float  # bytes that a device sends each time that the tensor moves
    times: int  # per step
    idle: float = 0  # times more in lock step, where stages without work take part
    again: float = 0  # times more for what a stage runs again on the way back

    @property
    def bytes(self) -> float:
        return self.once * self.times


def needs(plan: Layout) -> list[Need]:
    """Returns what a layout needs, parameter by parameter; activations only where it is known: in a stack."""
    found = [need for leaf in plan.leaves for need in _of_parameter(plan, leaf)]
    if plan.is_stack:
        found += [need for axis in plan.model_axes for need in _of_activations(plan, axis)]
        found += [*_of_ends(plan), *_of_stages(plan)]
    return [need for need in found if need.bytes]


def _of_parameter(plan: Layout, leaf: Leaf) -> Iterator[Need]:
    """Yields what the batch axes have to carry for one parameter: gathers, gradient sums, updates."""

    def among(axes: Axes, dims: Dims) -> Axes:
        return tuple(axis for axis in axes if any(axis in dim for dim in dims))

    def whole(dims: Dims, itemsize: int) -> float:
        held = {axis for dim in dims for axis in dim} - {*plan.batch_axes}
        return leaf.size * itemsize / plan.share(tuple(held))

    parts, rows = plan.num_microbatches, plan.batch_axes
    idle = plan.idle * leaf.is_stacked
    gathered = among(rows, leaf.dims)
    once = sent("all-gather", whole(leaf.dims, leaf.compute_itemsize), plan.share(gathered))
    # Cut up to save memory, it is let go after the forward pass, and after the backward pass.
    again = (parts + idle) * leaf.is_stacked * plan.runs_again
    yield Need(GATHERED, gathered, leaf, (GATHERED, leaf.name), once, 2 * parts, 2 * idle, again)

    # Gradients that are held cut are cut after each micro-batch, the rest of the sum can wait for
    # the last one, and is of float32 then. Optimizer state that is cut needs a slice of the sum only.
    late = plan.late_axes
    early = tuple(axis for axis in rows if axis not in late)
    dims = leaf.grad_dims if plan.zero_stage >= 2 else leaf.moment_dims
    size = whole(leaf.grad_dims, leaf.compute_itemsize)
    yield _sum(plan, leaf, early, among(early, dims), size, parts, idle)
    size = whole(leaf.grad_dims, max(4, leaf.itemsize)) / plan.share(among(early, dims))
    yield _sum(plan, leaf, late, among(late, dims), size, 1)

    updated = tuple(axis for axis in among(rows, leaf.moment_dims) if axis not in gathered)
    size = whole(leaf.moment_dims, leaf.itemsize) / plan.share(gathered)
    once = sent("all-gather", size, plan.share(updated))
    yield Need(UPDATED, updated, leaf, (UPDATED, leaf.name), once, 1)


def _sum(
    plan: Layout, leaf: Leaf, axes: Axes, cut: Axes, size: float, times: int, idle: float = 0
) -> Need:
    """A sum over some axes of which each device keeps its slice along those that `cut`."""
    others = plan.share(tuple(axis for axis in axes if axis not in cut))
    once = sent("reduce-scatter", size, plan.share(cut))
    once += sent("all-reduce", size / plan.share(cut), others)
    # Sums of one shape look the same, whichever parameter they are of.
    shape = plan.local(leaf, leaf.grad_dims, plan.batch_axes)[leaf.is_stacked :]
    key = (SUMMED, axes, *sorted(n for n in shape if n > 1))
    return Need(SUMMED, axes, leaf, key, once, times, idle)


def _of_activations(plan: Layout, axis: str) -> Iterator[Need]:
    """Yields what a model axis has to carry in a stack, after Megatron (arXiv 1909.08053, 2205.05198).

    Each matrix of a block that is cut along its input makes a sum of partial products, and the
    matrices that feed it one more on the way back. A sum is worth a gather and a reduce-scatter,
    which take its place where the axis cuts the sequence between blocks. What is computed again,
    for remat or for a pipeline that keeps inputs only, is not counted.
    """

    def need(role: str, times: int) -> Need:
        parts, key = plan.num_microbatches, (role, (axis,))
        return Need(role, (axis,), None, key, once, parts * times, plan.idle * times)

    inward, outward = (sum(leaf.num_layers for leaf in cut) for cut in matrices_of(plan, axis))
    once = sent("all-reduce", plan.x_bytes, plan.mesh[axis])
    yield need(ACTIVATIONS, 2 * inward)
    yield need(APART, max(0, outward - inward))


def _of_ends(plan: Layout) -> Iterator[Need]:
    """Yields the sums of a table and a head that are cut, one each, over all the axes that cut it."""
    parts = plan.num_microbatches
    for user in ("embed", "head"):
        cutting = {axis for leaf in plan.leaves if user in leaf.users for axis in leaf.axes}
        axes = tuple(axis for axis in plan.model_axes if axis in cutting)
        size = plan.share(axes)
        once = sent("all-reduce", plan.x_bytes, size)
        yield Need(ACTIVATIONS, axes, None, (ACTIVATIONS, axes), once, parts)
        if user == "head":
            # Of each position the largest logit, the sum of exponentials, and the target's logit.
            once = sent("all-reduce", plan.tokens * max(4, plan.itemsize), size)
            yield Need(STATISTICS, axes, None, (STATISTICS, axes), once, 3 * parts)


def _of_stages(plan: Layout) -> Iterator[Need]:
    """Yields what the stages of a pipeline hand to each other, by the one that sends most."""
    P, V, M = plan.mesh["pipeline"], plan.num_chunks, plan.num_microbatches
    if P == 1:
        return
    # All that a stage makes goes on, both ways, but what leaves the last chunk, or the first.
    messages = M * (2 * V - (P == 2))
    idle = 2 * plan.num_ticks - messages
    yield Need(MESSAGES, ("pipeline",), None, (MESSAGES,), plan.x_bytes, messages, idle)
    yield Need(SHARED, ("pipeline",), None, (SHARED,), plan.x_bytes, 2 * M)
    chunk = np.arange(P * V)  # lives on stage chunk // V, and runs on stage chunk % P
    moves = np.bincount(chunk // V, chunk // V != chunk % P).max()
    for leaf in plan.leaves:
        if leaf.is_stacked:
            once = math.prod(plan.local(leaf, leaf.dims, ())) * leaf.compute_itemsize
            once += math.prod(plan.local(leaf, leaf.grad_dims, ())) * max(4, leaf.itemsize)
            yield Need(MOVED, ("pipeline",), leaf, (MOVED,), once / V, moves)


def matrices_of(plan: Layout, axis: str) -> tuple[list[Leaf], list[Leaf]]:
    """Returns the matrices of a block that an axis cuts along their input, and those along their output.

    The first make a vector of the residual stream's width, the others start from one.
    """
    cut = [leaf for leaf in plan.leaves if leaf.is_stacked and axis in sum(leaf.dims[1:], ())]
    inward = [leaf for leaf in cut if leaf.shape[-1] == plan.width and axis not in leaf.dims[-1]]
    outward = [leaf for leaf in cut if leaf not in inward and plan.width in leaf.shape[1:-1]]
    return inward, outward
