"""Says of each collective what it is for, by what the layout needs; what nothing explains stays so."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshtrain.audit.collectives import Collective, sent
from meshtrain.audit.layout import Axes, Layout, Leaf
from meshtrain.audit.minimum import Need, matrices_of

# Bytes that are still needed, by role and leaf (or axis) and axes; what a collective moves is taken off.
Left = dict[tuple[str, str, Axes], float]


@dataclass(frozen=True)
class Explained:
    collective: Collective
    label: str  # what it is for
    needed: float  # of its bytes, those that the minimum holds as well
    reason: str = ""  # for what it moves beyond them
    called_for: bool = True

    @property
    def excess(self) -> float:
        return self.collective.bytes - self.needed


def explain(
    plan: Layout, needs: list[Need], found: list[Collective]
) -> tuple[list[Explained], Left]:
    """Returns each collective with what it is for, and what is left of the needs."""
    left: Left = {}
    for need in needs:
        key = need.role, need.leaf, need.axes
        left[key] = left.get(key, 0) + need.bytes
    for axis in plan.model_axes if plan.is_stack else ():
        rows, columns = matrices_of(plan, axis)
        num_layers = max((leaf.num_layers for leaf in plan.leaves if leaf.is_stacked), default=0)
        times = plan.num_microbatches * num_layers * max(0, columns - rows)
        one = sent("all-reduce", plan.x_size * plan.itemsize, plan.mesh[axis])
        left["inputs", "", (axis,)] = times * one
    # Forward first: what is too much then shows where it arises, most often on the way back.
    ordered = sorted(found, key=lambda c: ("forward", "", "backward").index(c.phase))
    explained = [_judge(plan, left, collective) for collective in ordered]
    return explained, {key: bytes for key, bytes in left.items() if key[0] != "inputs"}


def _judge(plan: Layout, left: Left, c: Collective) -> Explained:
    rules: tuple[Callable, ...] = (_scalar, _gather, _sum, _update, _activation, _whole, _own_loss)
    for rule in rules:
        if c.axes and (explained := rule(plan, left, c)):
            return explained
    leaf = next((leaf for leaf in plan.leaves if leaf.argument == c.origin), None)
    what = f"{leaf.name} moved" if leaf else "not called for by this layout"
    return Explained(c, what, 0, "nothing in this layout calls for it", called_for=False)


def _take(left: Left, key: tuple[str, str, Axes], c: Collective, part: float = 0.4) -> float:
    """Takes off the needs what the collective moves of them, if that is at least this part of it."""
    taken = min(c.bytes, left.get(key, 0))
    if taken < part * c.bytes:
        return 0
    left[key] -= taken
    return taken


def _scalar(plan: Layout, left: Left, c: Collective) -> Explained | None:
    if c.array.size > 1:
        return None
    return Explained(c, "scalars", 0, "metrics, and the norm of the gradient")


def _gather(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter that is cut over the batch's axes, made whole to compute with."""
    if c.kind != "all-gather":
        return None
    for leaf in plan.leaves:
        if c.origin and leaf.argument != c.origin or not {*c.axes} <= {*leaf.axes}:
            continue
        if not {*c.axes} <= {*plan.batch_axes} or not _is_of(plan, leaf, leaf.axes, c):
            continue
        if needed := _take(left, ("gather", leaf.name, c.axes), c):
            return Explained(c, "parameters gathered", needed, _wider(c, leaf.compute_itemsize))
        if c.origin:
            return Explained(c, "parameters gathered again", 0, _why_again(plan, leaf, c))
    return None


def _why_again(plan: Layout, leaf: Leaf, c: Collective) -> str:
    if len(leaf.users) > 1:
        return f"{leaf.name} is read by {' and '.join(leaf.users)}, each gathers it"
    if _is_recomputed(c):
        return f"train.remat={plan.remat} computes again, and gathers for it"
    return f"{leaf.name}: XLA gathers it once more where it could keep it"


def _sum(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The gradient of a parameter, summed over those who had other rows."""
    rows = tuple(axis for axis in c.axes if axis in plan.batch_axes)
    if c.kind not in ("all-reduce", "reduce-scatter") or c.phase == "forward" or not rows:
        return None
    fitting = [
        leaf
        for leaf in plan.leaves
        if _is_of(plan, leaf, tuple({*leaf.axes, *leaf.grad_axes}), c)
        and not {*c.axes} & {*leaf.axes} - {*rows}
    ]
    # Leaves of equal size are told apart by what they still need: all of it first, then some.
    for part, leaf in itertools.product((0.99, 0.4), fitting):
        for key in [key for key in left if key[:2] == ("sum", leaf.name)]:
            if {*key[2]} <= {*rows} and (needed := _take(left, key, c, part)):
                return Explained(c, "gradients summed", needed, _why_more(plan, leaf, c, needed))
    for leaf in fitting:
        if len(leaf.users) > 1:
            why = f"{leaf.name} is used by {' and '.join(leaf.users)}, each sums its part"
            return Explained(c, "gradients summed again", 0, why)
    if not fitting:
        return None
    why = f"the gradient of {fitting[0].name} or one like it is summed more often than it has to be"
    return Explained(c, "gradients summed again", 0, why, called_for=False)


def _why_more(plan: Layout, leaf: Leaf, c: Collective, needed: float) -> str:
    if c.bytes <= 1.01 * needed:
        return ""
    if plan.zero_stage == 1:
        return (
            "train.zero_stage=1 holds gradients whole: all-reduced where a reduce-scatter would do"
        )
    if c.kind == "all-reduce" and {*c.axes} & {*leaf.grad_axes}:
        return "summed whole, then cut: no reduce-scatter was made of it"
    return _wider(c, leaf.compute_itemsize) or "held whole over a model axis while it is summed"


def _wider(c: Collective, itemsize: int) -> str:
    return f"in {c.array.dtype}, wider than what is computed in" if c.itemsize > itemsize else ""


def _update(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter whose slices were updated apart, made whole again."""
    if c.kind != "all-gather" or c.origin or c.phase:
        return None
    for leaf in plan.leaves:
        if _is_of(plan, leaf, leaf.moment_axes, c):
            if needed := _take(left, ("update", leaf.name, c.axes), c):
                return Explained(c, "updated parameters gathered", needed, _wider(c, leaf.itemsize))
    return None


def _activation(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """Activations between blocks, or a statistic for each position."""
    if not plan.is_stack or len(c.axes) > 1 or c.axes[0] not in plan.model_axes or c.origin:
        return None
    verb = "gathered" if c.kind == "all-gather" else "summed"
    if c.kind not in ("all-reduce", "reduce-scatter", "all-gather"):
        return None
    if c.array.size == plan.tokens:
        if needed := _take(left, ("statistics", "", c.axes), c):
            return Explained(c, "softmax statistics", needed, _wider(c, 4))
    if c.array.size == plan.x_size:
        if needed := _take(left, ("activations", "", c.axes), c):
            return Explained(c, f"activations {verb}", needed, _wider(c, plan.itemsize))
        if c.phase == "backward" and _take(left, ("inputs", "", c.axes), c):
            return Explained(c, "input gradients summed one by one", 0, _why_apart(plan, c.axes[0]))
        if _is_recomputed(c):
            why = f"train.remat={plan.remat} computes again, and sums or gathers for it"
            return Explained(c, f"activations {verb} again", 0, why)
    return _heads(plan, c)


def _why_apart(plan: Layout, axis: str) -> str:
    names = [
        leaf.name.split("/")[-2] if "/" in leaf.name else leaf.name
        for leaf in plan.leaves
        if leaf.is_stacked and axis in leaf.axes and axis not in leaf.dims[1] and len(leaf.dims) > 2
    ]
    return (
        f"{', '.join(names)}: those with one input each sum its gradient; added up first it would be "
        "one sum (as TPU does, XLA on CPU not)"
    )


def _heads(plan: Layout, c: Collective) -> Explained | None:
    """What a parameter makes that the axis leaves whole, used by parts of what it cuts: key/value heads."""
    axis = c.axes[0]
    for leaf in plan.leaves:
        if not leaf.is_stacked or axis in leaf.axes or len(leaf.shape) < 3 or c.phase != "backward":
            continue
        made = plan.tokens * math.prod(leaf.shape[2:])
        if made % c.array.size == 0 and plan.mesh[axis] % (made // c.array.size) == 0:
            why = f"{leaf.name} is whole: mesh.{axis}={plan.mesh[axis]} does not cut {leaf.names}"
            return Explained(c, f"gradients of what {axis} leaves whole", 0, why)
    return None


def _whole(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The gradient of a parameter that a model axis leaves whole."""
    if c.phase != "backward" or c.kind not in ("all-reduce", "reduce-scatter"):
        return None
    for leaf in plan.leaves:
        if {*c.axes} <= {*plan.model_axes} - {*leaf.axes} and _is_of(plan, leaf, leaf.axes, c):
            over = " x ".join(c.axes)
            why = f"{over} leaves {leaf.name.split('/')[-2]} and others whole"
            if {*c.axes} & {*plan.x_axes}:
                why += ", and cuts the sequence that they act on"
            return Explained(c, f"gradients of parameters that {over} leaves whole", 0, why)
    return None


def _own_loss(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """What a model that is no stack moves along the axes that cut its parameters."""
    if plan.is_stack or c.origin or not {*c.axes} <= {*plan.model_axes}:
        return None
    why = "a loss of one's own: what it needs is not known"
    return Explained(c, "partial results of your loss", 0, why)


def _is_recomputed(c: Collective) -> bool:
    return "rematted" in c.op_name or "checkpoint" in c.op_name


def _is_of(plan: Layout, leaf: Leaf, cut_by: Axes, c: Collective) -> bool:
    """Whether a tensor is a leaf (or some of its layers), whole over the collective's axes, cut over others."""
    cut = plan.share(tuple(axis for axis in cut_by if axis not in c.axes))
    return c.array.size in _sizes(leaf.size // cut, leaf.num_layers)


def _sizes(whole: int, num_layers: int) -> Iterator[int]:
    """Yields the elements of one layer, of several that a loop takes at once, of all."""
    return (whole // n for n in range(1, num_layers + 1) if num_layers % n == 0)
