"""What collectives do for parameters: gather them, sum their gradients, gather what was updated."""

import math

from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Layout, Leaf
from meshtrain.audit.ledger import Explained, Left, is_recomputed, local, looks_like, part_of, wider


def gather(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter that is cut over the batch's axes, made whole to compute with."""
    if c.kind != "all-gather" or c.axes is None:
        return None
    for leaf in plan.leaves:
        if c.origin and leaf.argument != c.origin or not {*c.axes} <= {*leaf.axes}:
            continue
        part = part_of(plan, leaf, leaf.dims, c)
        if not part or not {*c.axes} <= {*plan.batch_axes}:
            continue
        if needed := left.take(c, "gather", c.axes, part, leaf.name):
            return Explained(c, "parameters gathered", needed, wider(c, leaf.compute_itemsize))
        if c.origin:
            return Explained(c, "parameters gathered again", 0, _why_again(plan, leaf, c))
    return None


def _why_again(plan: Layout, leaf: Leaf, c: Collective) -> str:
    if len(leaf.users) > 1:
        return f"{leaf.name} is read by {' and '.join(leaf.users)}, each gathers it"
    if is_recomputed(c):
        return f"train.remat={plan.remat} computes again, and gathers for it"
    return f"{leaf.name}: XLA gathers it once more where it could keep it"


def summed(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The gradient of a parameter, summed over those who had other rows."""
    alike = [fit for fit in gradients(plan, c) if fit[0]]
    if taken := _taken(plan, left, c, alike):
        return taken
    for _, _, leaf in alike:
        if len(leaf.users) > 1:
            why = f"{leaf.name} is used by {' and '.join(leaf.users)}, each sums its part"
            return Explained(c, "gradients summed again", 0, why)
    return None


def summed_by_size(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The same, of another shape or summed too often."""
    fitting = gradients(plan, c)
    if taken := _taken(plan, left, c, fitting):
        return taken
    for looks, _, leaf in fitting:
        if looks:
            why = f"{leaf.name} or one like it is summed more often than it has to be"
            return Explained(c, "gradients summed again", 0, why, called_for=False)
    return None


def gradients(plan: Layout, c: Collective) -> list[tuple[bool, float, Leaf]]:
    """Returns the leaves whose gradient a tensor may be: whether by shape too, how much of it, which."""
    rows = {*(c.axes or ())} & {*plan.batch_axes}
    if c.kind not in ("all-reduce", "reduce-scatter") or c.phase == "forward" or not rows:
        return []
    found = []
    for leaf in plan.leaves:
        shape = local(plan, leaf, leaf.grad_dims, c.axes)
        # Along axes that leave the leaf whole each device may still sum a slice of it only.
        spare = plan.share(tuple({*plan.model_axes} - {*leaf.axes, *c.axes}))
        part = part_of(plan, leaf, leaf.grad_dims, c)
        part = part or (c.array.size * spare == math.prod(shape)) / spare
        if part and not {*c.axes} & {*leaf.axes} - rows:
            found.append((looks_like(c, shape, leaf), part, leaf))
    return found


def _taken(plan: Layout, left: Left, c: Collective, fitting: list) -> Explained | None:
    rows = tuple(axis for axis in c.axes or () if axis in plan.batch_axes)
    for _, part, leaf in fitting:
        if needed := left.take(c, "sum", rows, part, leaf.name):
            return Explained(c, "gradients summed", needed, _why_more(plan, leaf, c, needed))
    return None


def _why_more(plan: Layout, leaf: Leaf, c: Collective, needed: float) -> str:
    if c.bytes <= 1.01 * needed:
        return ""
    if plan.zero_stage == 1:
        return (
            "train.zero_stage=1 holds gradients whole: all-reduced where a reduce-scatter would do"
        )
    if c.kind == "all-reduce" and {*c.axes} & {*leaf.grad_axes}:
        return "summed whole, then cut: no reduce-scatter was made of it"
    return wider(c, leaf.compute_itemsize)


def update(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter whose slices were updated apart, made whole again."""
    if c.kind != "all-gather" or c.origin or c.phase or c.axes is None:
        return None
    for leaf in plan.leaves:
        if part := part_of(plan, leaf, leaf.moment_dims, c):
            if needed := left.take(c, "update", c.axes, part, leaf.name):
                return Explained(c, "updated parameters gathered", needed, wider(c, leaf.itemsize))
    return None
