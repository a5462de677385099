"""Says of each collective what it is for, by what the layout needs; what nothing explains stays so."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Axes, Layout, Leaf
from meshtrain.audit.minimum import Need, beyond, matrices_of


class Left:
    """What is still needed of each need; what a collective moves of it is taken off."""

    def __init__(self, needs: list[Need]):
        self.needs = needs
        self.bytes = [need.bytes for need in needs]
        self.kin = {need.leaf: {need.leaf} for need in needs}

    def pool(self, leaves: Iterable[str]) -> None:
        """Makes leaves share their needs: those whose gradients cannot be told apart by their shapes."""
        known = [self.kin[leaf] for leaf in leaves if leaf in self.kin]
        merged = set().union(*known)
        self.kin |= dict.fromkeys(merged, merged)

    def take(self, c: Collective, role: str, axes: Axes, part: float, leaf: str = "") -> float:
        """Returns the bytes that the minimum has for this part of a tensor, 0 where it needs no more.

        A collective along several axes may serve the needs of some of them.
        """
        kin = self.kin.get(leaf, {leaf}) if role == "sum" else {leaf}
        taken = 0.0
        for own in self.needs:
            if (own.role, own.leaf) != (role, leaf) or not {*own.axes} <= {*axes}:
                continue
            wanted = {(role, own.axes, name) for name in kin}
            places = [n for n, x in enumerate(self.needs) if (x.role, x.axes, x.leaf) in wanted]
            due = own.once * part * c.count
            if sum(self.bytes[n] for n in places) > 0.99 * due:
                taken += due
                for n in places:
                    drawn = min(self.bytes[n], due)
                    self.bytes[n] -= drawn
                    due -= drawn
        return taken


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
) -> tuple[list[Explained], list[tuple[Need, float]]]:
    """Returns each collective with what it is for, and needs that none of them served, in bytes."""
    left = Left([*needs, *beyond(plan)])
    for c in found:
        left.pool(leaf.name for looks, _, leaf in _gradients(plan, c) if looks)

    def order(c: Collective) -> tuple:
        # The largest first: a whole stack is not mistaken for one layer of another. Along model
        # axes the forward pass first: what is too much then shows where it arises, on the way back.
        late = c.phase == "backward" and not {*(c.axes or ())} & {*plan.batch_axes}
        return late, -c.bytes

    ordered = sorted(found, key=order)
    rules = (_scalar, _gather, _sum, _update, _activation, _whole, _own_loss)
    clear = [_first(rules, plan, left, c) for c in ordered]
    # What only the number of elements speaks for comes after all that has the shape as well.
    explained = [
        one or _first((_sum_by_size, _unexplained), plan, left, c)
        for c, one in zip(ordered, clear, strict=True)
    ]
    return explained, list(zip(needs, left.bytes, strict=False))


def _first(rules: Iterable[Callable], plan: Layout, left: Left, c: Collective) -> Explained | None:
    """Returns what the first rule says that has a say."""
    return next((said for rule in rules if (said := rule(plan, left, c))), None)


def _unexplained(plan: Layout, left: Left, c: Collective) -> Explained:
    return Explained(c, "not called for by this layout", 0, _guess(plan, c), called_for=False)


def _guess(plan: Layout, c: Collective) -> str:
    """What a tensor that nothing calls for is, as far as its origin or its shape tells."""
    for leaf in plan.leaves:
        if leaf.argument == c.origin:
            return f"it holds {leaf.name}"
    alike = [leaf.name for leaf in plan.leaves if _looks_like(c, [*leaf.shape], leaf)]
    return f"it has the shape of {alike[0]}, whole" if alike else "no parameter has its shape"


def _scalar(plan: Layout, left: Left, c: Collective) -> Explained | None:
    if c.array.size > 1:
        return None
    return Explained(c, "scalars", 0, "metrics, and the norm of the gradient")


def _gather(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter that is cut over the batch's axes, made whole to compute with."""
    if c.kind != "all-gather" or c.axes is None:
        return None
    for leaf in plan.leaves:
        if c.origin and leaf.argument != c.origin or not {*c.axes} <= {*leaf.axes}:
            continue
        part = _part(plan, leaf, leaf.dims, c)
        if not part or not {*c.axes} <= {*plan.batch_axes}:
            continue
        if needed := left.take(c, "gather", c.axes, part, leaf.name):
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
    alike = [fit for fit in _gradients(plan, c) if fit[0]]
    if taken := _taken(plan, left, c, alike):
        return taken
    for _, _, leaf in alike:
        if len(leaf.users) > 1:
            why = f"{leaf.name} is used by {' and '.join(leaf.users)}, each sums its part"
            return Explained(c, "gradients summed again", 0, why)
    return None


def _sum_by_size(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The same, of another shape or summed too often."""
    fitting = _gradients(plan, c)
    if taken := _taken(plan, left, c, fitting):
        return taken
    for looks, _, leaf in fitting:
        if looks:
            why = f"{leaf.name} or one like it is summed more often than it has to be"
            return Explained(c, "gradients summed again", 0, why, called_for=False)
    return None


def _gradients(plan: Layout, c: Collective) -> list[tuple[bool, float, Leaf]]:
    """Returns the leaves whose gradient a tensor may be: whether by shape too, how much of it, which."""
    rows = {*(c.axes or ())} & {*plan.batch_axes}
    if c.kind not in ("all-reduce", "reduce-scatter") or c.phase == "forward" or not rows:
        return []
    return [
        (_looks_like(c, _local(plan, leaf, leaf.grad_dims, c.axes), leaf), part, leaf)
        for leaf in plan.leaves
        if (part := _part(plan, leaf, leaf.grad_dims, c)) and not {*c.axes} & {*leaf.axes} - rows
    ]


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
    return _wider(c, leaf.compute_itemsize)


def _wider(c: Collective, itemsize: int) -> str:
    return f"in {c.array.dtype}, wider than what is computed in" if c.itemsize > itemsize else ""


def _update(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """A parameter whose slices were updated apart, made whole again."""
    if c.kind != "all-gather" or c.origin or c.phase or c.axes is None:
        return None
    for leaf in plan.leaves:
        if part := _part(plan, leaf, leaf.moment_dims, c):
            if needed := left.take(c, "update", c.axes, part, leaf.name):
                return Explained(c, "updated parameters gathered", needed, _wider(c, leaf.itemsize))
    return None


def _activation(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """Activations between blocks, or a statistic for each position."""
    if not plan.is_stack or len(c.axes or ()) != 1 or c.axes[0] not in plan.model_axes or c.origin:
        return None
    verb = "gathered" if c.kind == "all-gather" else "summed"
    if c.kind not in ("all-reduce", "reduce-scatter", "all-gather"):
        return None
    if c.array.size == plan.tokens:
        if needed := left.take(c, "statistics", c.axes, 1):
            return Explained(c, "softmax statistics", needed, _wider(c, 4))
    # An all-reduce does the work of a reduce-scatter and a gather.
    halves = 2 if c.kind == "all-reduce" else 1
    if c.array.size == plan.x_size:
        if needed := left.take(c, "activations", c.axes, halves):
            return Explained(c, f"activations {verb}", needed, _wider(c, plan.itemsize))
        if c.phase == "backward" and left.take(c, "inputs", c.axes, halves):
            return Explained(c, "input gradients summed one by one", 0, _why_apart(plan, c.axes[0]))
        if _is_recomputed(c):
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
        taken, made = leaf.shape[1], math.prod(_local(plan, leaf, leaf.dims, ())[2:])
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


def _whole(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """The gradient of a parameter that a model axis leaves whole."""
    if c.phase != "backward" or c.kind not in ("all-reduce", "reduce-scatter") or not c.axes:
        return None
    for leaf in plan.leaves:
        if {*c.axes} <= {*plan.model_axes} - {*leaf.axes} and _part(plan, leaf, leaf.dims, c):
            over = " x ".join(c.axes)
            why = f"{over} leaves {leaf.name.split('/')[-2]} and others whole"
            if {*c.axes} & {*plan.x_axes}:
                why += ", and cuts the sequence that they act on"
            return Explained(c, f"gradients of parameters that {over} leaves whole", 0, why)
    return None


def _own_loss(plan: Layout, left: Left, c: Collective) -> Explained | None:
    """What a model that is no stack moves along the axes that cut its parameters."""
    if plan.is_stack or c.origin or not c.axes or not {*c.axes} <= {*plan.model_axes}:
        return None
    why = "a loss of one's own: what it needs is not known"
    return Explained(c, "partial results of your loss", 0, why)


def _is_recomputed(c: Collective) -> bool:
    return "rematted" in c.op_name or "checkpoint" in c.op_name


def _local(plan: Layout, leaf: Leaf, dims: tuple[Axes, ...], axes: Axes) -> list[int]:
    """Returns the shape of a leaf cut by `dims`, whole along `axes`."""
    cuts = (plan.share(tuple(axis for axis in dim if axis not in axes)) for dim in dims)
    return [size // cut for size, cut in zip(leaf.shape, cuts, strict=True)]


def _part(plan: Layout, leaf: Leaf, dims: tuple[Axes, ...], c: Collective) -> float:
    """Returns how much of a leaf a tensor holds: 1, or some of its layers; 0 where its size does not fit."""
    whole = math.prod(_local(plan, leaf, dims, c.axes))
    fits = whole % c.array.size == 0 and leaf.num_layers % (whole // c.array.size) == 0
    return c.array.size / whole if fits else 0


def _looks_like(c: Collective, shape: list[int], leaf: Leaf) -> bool:
    """Whether a tensor has the dims of a leaf or one of its layers, in whatever order."""
    shapes = [shape, shape[1:]] if leaf.is_stacked else [shape]
    dims = sorted(size for size in c.array.shape if size > 1)
    return any(dims == sorted(size for size in shape if size > 1) for shape in shapes)
