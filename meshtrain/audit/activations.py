"""What collectives do for activations: along axes that cut the work on a row."""

import math

from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Layout
from meshtrain.audit.ledger import Explained, Left, is_recomputed, local, part_of, wider
from meshtrain.audit.minimum import matrices_of


def activation(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """Activations between blocks, or a statistic for each position."""
    if not plan.is_stack or len(c.axes or ()) != 1 or c.axes[0] not in plan.model_axes or c.origin:
        return None
    verb = "gathered" if c.kind == "all-gather" else "summed"
    if c.kind not in ("all-reduce", "reduce-scatter", "all-gather"):
        return None
    if c.array.size == plan.tokens:
        if needed := left.take(c, "statistics", c.axes, 1):
            return Explained(c, "softmax statistics", needed, wider(c, 4))
    # An all-reduce does the work of a reduce-scatter and a gather.
    halves = 2 if c.kind == "all-reduce" else 1
    if c.array.size == plan.x_size:
        if needed := left.take(c, "activations", c.axes, halves):
            return Explained(c, f"activations {verb}", needed, wider(c, plan.itemsize))
        if c.phase == "backward" and left.take(c, "inputs", c.axes, halves):
            return Explained(c, "input gradients summed one by one", 0, _why_apart(plan, c.axes[0]))
        if is_recomputed(c):
            why = f"train.remat={plan.remat} computes again, and sums or gathers for it"
            return Explained(c, f"activations {verb} again", 0, why)
    return _inside(plan, c)


def _why_apart(plan: Layout, axis: str) -> str:
    names = [leaf.name.split("/")[-2:][0] for leaf in matrices_of(plan, axis)[1]]
    return (
        f"of {', '.join(names)}, those with the same input sum its gradient each; added up first it "
        "would be one sum (as on TPU; XLA on CPU does not)"
    )


def _inside(plan: Layout, c: Collective) -> Explained | None:
    """What matrices of a block make or take that is not of the width of x."""
    axis = c.axes[0]
    for leaf in plan.leaves:
        if not leaf.is_stacked or len(leaf.shape) < 3:
            continue
        taken, made = leaf.shape[1], math.prod(local(plan, leaf, leaf.dims, plan.batch_axes)[2:])
        if axis in leaf.axes:
            size = made if axis in leaf.dims[1] else taken
            if size != plan.width and c.array.size == plan.tokens * size:
                why = f"{leaf.name} is cut along this axis; the minimum does not count it"
                return Explained(c, "partial products within a block", 0, why)
        elif c.phase == "backward" and taken == plan.width:
            # Key/value heads, say, that fewer devices would have than query heads.
            parts = plan.tokens * made / c.array.size
            if parts in range(1, plan.mesh[axis] + 1):
                why = (
                    f"{leaf.name} is whole: mesh.{axis}={plan.mesh[axis]} does not cut {leaf.names}"
                )
                return Explained(c, f"gradients of what {axis} leaves whole", 0, why)
    return None


def whole(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The gradient of a parameter that a model axis leaves whole."""
    if c.phase != "backward" or c.kind not in ("all-reduce", "reduce-scatter") or not c.axes:
        return None
    for leaf in plan.leaves:
        if {*c.axes} <= {*plan.model_axes} - {*leaf.axes} and part_of(plan, leaf, leaf.dims, c):
            over = " x ".join(c.axes)
            why = f"{over} leaves {leaf.name.split('/')[-2]} and others whole"
            if {*c.axes} & {*plan.x_axes}:
                why += ", and cuts the sequence that they act on"
            return Explained(c, f"gradients of parameters that {over} leaves whole", 0, why)
    return None


def own_loss(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """What a model that is no stack moves along the axes that cut its parameters."""
    if plan.is_stack or c.origin or not c.axes or not {*c.axes} <= {*plan.model_axes}:
        return None
    why = "a loss of one's own: what it needs is not known"
    return Explained(c, "partial results of your loss", 0, why)
