"""What a layout cannot do without: the least that each device has to send per step."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.audit.collectives import sent
from meshtrain.audit.layout import Axes, Layout, Leaf


@dataclass(frozen=True)
class Need:
    """Bytes that some axes have to carry for a reason."""

    axes: Axes
    role: str  # "gather", "sum", "update", "activations", "statistics"
    leaf: str  # whose parameter; empty for activations
    bytes: float  # per device and step
    once: float  # of it, each time that the tensor moves


def needs(plan: Layout) -> list[Need]:
    """Returns what a layout needs, parameter by parameter; activations only where it is known: in a stack."""
    found = [need for leaf in plan.leaves for need in _of_parameter(plan, leaf)]
    if plan.is_stack:
        found += [need for axis in plan.model_axes for need in _of_activations(plan, axis)]
    return [need for need in found if need.bytes]


def _of_parameter(plan: Layout, leaf: Leaf) -> Iterator[Need]:
    """Yields what the batch axes have to carry for one parameter: gathers, gradient sums, updates."""

    def need(role: str, kind: str, axes: Axes, held_by: Axes, itemsize: int, times: int) -> Need:
        whole = leaf.size * itemsize / plan.share(tuple(a for a in held_by if a not in axes))
        once = sent(kind, whole, plan.share(axes))
        return Need(axes, role, leaf.name, times * once, once)

    def among(axes: Axes) -> Axes:
        return tuple(axis for axis in plan.batch_axes if axis in axes)

    parts, small = plan.num_microbatches, leaf.compute_itemsize
    gathered, cut = among(leaf.axes), among(leaf.grad_axes)
    whole_over = tuple(axis for axis in plan.batch_axes if axis not in cut)
    late = ("data",) if plan.zero_stage >= 2 else plan.batch_axes
    yield need("gather", "all-gather", gathered, leaf.axes, small, parts * leaf.passes)
    # Gradients that are held cut are cut after each micro-batch, others can wait for the last one.
    yield need("sum", "reduce-scatter", cut, leaf.grad_axes, small, parts)
    for axes, times in (
        (tuple(axis for axis in whole_over if axis in late), 1),
        (tuple(axis for axis in whole_over if axis not in late), parts),
    ):
        itemsize = leaf.itemsize if times == 1 else small
        later = among(tuple(axis for axis in leaf.moment_axes if axis in axes))
        if later and later != gathered:  # stage 1: each device needs its slice of the sum only
            rest = tuple(axis for axis in axes if axis not in later)
            scatter = need("sum", "reduce-scatter", later, leaf.grad_axes, itemsize, times)
            reduce = need("sum", "all-reduce", rest, leaf.moment_axes, itemsize, times)
            both = scatter.bytes + reduce.bytes
            yield Need(axes, "sum", leaf.name, both, both / times)
        else:
            yield need("sum", "all-reduce", axes, leaf.grad_axes, itemsize, times)
    updated = among(tuple(axis for axis in leaf.moment_axes if axis not in leaf.axes))
    yield need("update", "all-gather", updated, leaf.moment_axes, leaf.itemsize, 1)


def _of_activations(plan: Layout, axis: str) -> Iterator[Need]:
    """Yields what a model axis has to carry in a stack, after Megatron (arXiv 1909.08053, 2205.05198).

    Each matrix of a block that is cut along its input makes a sum of partial products, and the
    matrices that feed it one more on the way back. A sum is worth a gather and a reduce-scatter,
    which is what takes its place where the axis cuts the sequence between blocks.
    """
    rows = len(matrices_of(plan, axis)[0])
    num_layers = max((leaf.num_layers for leaf in plan.leaves if leaf.is_stacked), default=0)
    by_embed, by_head = (
        any(axis in leaf.axes and user in leaf.users for leaf in plan.leaves)
        for user in ("embed", "head")
    )
    half = sent("all-gather", plan.x_size * plan.itemsize, plan.mesh[axis])
    again = 0
    if plan.remat == "full" and rows:
        # The block's last sum need not be computed again; where it is cut, its input is gathered.
        again = 2 * rows - 1 if axis in plan.x_axes else 2 * (rows - 1)
    halves = num_layers * (4 * rows + again) + 2 * by_embed + 2 * by_head
    yield Need((axis,), "activations", "", plan.num_microbatches * halves * half, half)
    # Of each position the largest logit, the sum of exponentials, and the target's logit.
    once = sent("all-reduce", plan.tokens * max(plan.itemsize, 4), plan.mesh[axis])
    yield Need((axis,), "statistics", "", plan.num_microbatches * 3 * by_head * once, once)


def beyond(plan: Layout) -> list[Need]:
    """Returns what no layout needs and compilers may still move: a sum for each matrix, not for each input."""
    found = []
    for axis in plan.model_axes if plan.is_stack else ():
        rows, columns = matrices_of(plan, axis)
        num_layers = max((leaf.num_layers for leaf in plan.leaves if leaf.is_stacked), default=0)
        once = sent("all-gather", plan.x_size * plan.itemsize, plan.mesh[axis])
        times = 2 * plan.num_microbatches * num_layers * max(0, len(columns) - len(rows))
        found.append(Need((axis,), "inputs", "", times * once, once))
    return found


def matrices_of(plan: Layout, axis: str) -> tuple[list[Leaf], list[Leaf]]:
    """Returns the matrices of a block that an axis cuts along their input, and those along their output.

    The first make a vector of the residual stream's width, the others start from one.
    """
    cut = [leaf for leaf in plan.leaves if leaf.is_stacked and len(leaf.shape) > 2]
    rows = [leaf for leaf in cut if axis in leaf.dims[1] and leaf.shape[-1] == plan.width]
    columns = [
        leaf
        for leaf in cut
        if axis in leaf.axes and axis not in leaf.dims[1] and leaf.shape[1] == plan.width
    ]
    return rows, columns
