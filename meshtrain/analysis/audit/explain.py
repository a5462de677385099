"""Says of each collective what it is for, by what the layout needs; what nothing explains stays so."""

import math
from collections.abc import Callable, Iterable

from meshtrain.analysis.audit import minimum
from meshtrain.analysis.audit import pipeline_needs as stages
from meshtrain.analysis.audit.ledger import RUN_AGAIN, Explained, Ledger
from meshtrain.analysis.audit.minimum import Need
from meshtrain.analysis.audit.placement import Dims, Layout, Leaf
from meshtrain.analysis.collective_ops import Collective


def explain(plan: Layout, found: list[Collective]) -> tuple[list[Explained], Ledger]:
    """Returns each collective with what it is for, and beside them what none of them served."""
    ledger = Ledger(plan)

    def order(c: Collective) -> tuple:
        # Those of known origin first, and the largest: a whole stack is not mistaken for one layer
        # of another. Along model axes the forward pass before all: what is too much then shows
        # where it arises, on the way back.
        late = c.phase == "backward" and not {*(c.axes or ())} & {*plan.batch_axes}
        return late, c.origin == "", -c.bytes

    ordered = sorted(found, key=order)
    rules = (
        _scalar,
        stages.message,
        stages.moved,
        stages.shared,
        _gathered,
        _summed,
        _updated,
        _activation,
        _left_whole,
        _own_loss,
    )
    clear = [_first(rules, ledger, c) for c in ordered]
    # What only the number of elements speaks for comes after all that has the shape as well.
    return [
        one or _first((_summed_by_size, _unexplained), ledger, c)
        for c, one in zip(ordered, clear, strict=True)
    ], ledger


def _first(rules: Iterable[Callable], ledger: Ledger, c: Collective) -> Explained | None:
    """Returns what the first rule says that has a say."""
    return next((said for rule in rules if (said := rule(ledger, c))), None)


def _scalar(ledger: Ledger, c: Collective) -> Explained | None:
    if c.array.size > 1:
        return None
    return Explained(c, "scalars", 0, "metrics, and the norm of the gradient")


def _gathered(ledger: Ledger, c: Collective) -> Explained | None:
    """A parameter that is cut over the batch's axes, made whole to compute with."""
    plan, taken = ledger.plan, 0.0
    fits = _of_parameters(ledger, c, minimum.GATHERED)
    fits = [fit for fit in fits if c.origin in ("", fit[0].leaf.argument)]
    alike = [
        (need, part)
        for need, part in fits
        if _looks_like(c, plan.local(need.leaf, need.leaf.dims, c.axes), need.leaf)
    ]
    for need, part in alike or fits:
        leaf = need.leaf
        taken += ledger.take(c, [need], part * (1 - taken / c.bytes))[1]
        if taken > 0.99 * c.bytes:
            return Explained(c, minimum.GATHERED, taken)
        if taken and c.itemsize > leaf.compute_itemsize:
            return Explained(c, minimum.GATHERED, taken, _wider(c))
    if more := ledger.beyond(c, minimum.GATHERED, [need for need, _ in alike], taken):
        return more
    if fits and (c.origin or taken):
        tied, again = len(leaf.users) > 1, "rematted" in c.op_name
        why = f"{leaf.name} is gathered more than once in a pass"
        why += f", by {' and '.join(leaf.users)}" if tied else ""
        why += f", for what train.remat={plan.remat} computes again" if again else ""
        return Explained(c, minimum.GATHERED, taken, why, called_for=tied or again)
    return None


def _updated(ledger: Ledger, c: Collective) -> Explained | None:
    """A parameter whose slices were updated apart, made whole again."""
    if c.origin or c.phase:
        return None
    for need, part in _of_parameters(ledger, c, minimum.UPDATED):
        if taken := ledger.take(c, [need], part)[1]:
            return Explained(c, minimum.UPDATED, taken, _wider(c))
    return None


def _of_parameters(ledger: Ledger, c: Collective, role: str) -> Iterable[tuple[Need, float]]:
    """Yields whose gather it may be by its size, and how much of it."""
    for need in ledger.needs:
        if c.kind == "all-gather" and need.role == role and {*(c.axes or "-")} <= {*need.axes}:
            dims = need.leaf.dims if role == minimum.GATHERED else need.leaf.moment_dims
            if part := _part(ledger.plan, c, need.leaf, dims):
                yield need, part


def _part(plan: Layout, c: Collective, leaf: Leaf, dims: Dims) -> float:
    """Returns how much of a leaf a tensor holds: 1, or some of its layers; 0 if it does not fit."""
    return _share(c, plan.local(leaf, dims, c.axes), leaf.num_layers)


def _share(c: Collective, shape: list[int], pieces: int) -> float:
    parts = math.prod(shape) / c.array.size
    return 1 / parts if parts >= 1 and pieces % parts == 0 else 0


def _summed(ledger: Ledger, c: Collective) -> Explained | None:
    """The gradient of a parameter, summed over those who had other rows."""
    fitting = [fit for fit in _gradients(ledger, c) if fit[0]]
    if not {*(c.axes or ())} <= {*ledger.plan.late_axes}:
        fitting.sort(key=lambda fit: fit[1])  # early sums are of one layer rather than a stack
    if taken := _taken(ledger, c, fitting):
        return taken
    for _, _, leaf in fitting:
        if len(leaf.users) > 1:
            why = f"{leaf.name} is used by {' and '.join(leaf.users)}, each sums its part"
            return Explained(c, minimum.SUMMED, 0, why)
    return None


def _summed_by_size(ledger: Ledger, c: Collective) -> Explained | None:
    """The same, of another shape or summed too often."""
    fitting = _gradients(ledger, c)
    if taken := _taken(ledger, c, fitting):
        return taken
    alike = [leaf for looks, _, leaf in fitting if looks]
    return Explained(c, minimum.SUMMED, 0, _too_often(alike[0]), False) if alike else None


def _gradients(ledger: Ledger, c: Collective) -> list[tuple[bool, float, Leaf]]:
    """Returns the leaves whose gradient a tensor may be: whether by shape too, how much of it, which."""
    plan, axes = ledger.plan, {*(c.axes or ())}
    rows = axes & {*plan.batch_axes}
    if c.kind not in ("all-reduce", "reduce-scatter") or c.phase == "forward" or not rows:
        return []
    found = []
    for leaf in plan.leaves:
        # Along axes that leave the leaf whole each device may still sum a slice of it only.
        spare = plan.share(tuple({*plan.model_axes} - {*leaf.axes} - axes))
        # Along axes whose turn comes later it is not cut yet.
        shape = plan.local(leaf, leaf.grad_dims, (*c.axes, *plan.late_axes))
        part = _share(c, shape, leaf.num_layers * spare)
        if part and not axes & {*leaf.axes} - rows:
            found.append((_looks_like(c, shape, leaf), part, leaf))
    return found


def _taken(ledger: Ledger, c: Collective, fitting: list) -> Explained | None:
    for _, part, leaf in fitting:
        of_leaf = [n for n in ledger.needs if n.role == minimum.SUMMED and n.leaf is leaf]
        meant = [n for n in of_leaf if {*n.axes} <= {*c.axes}]
        meant = meant or [n for n in of_leaf if {*n.axes} & {*c.axes}]
        due, taken = ledger.take(c, meant, part)
        if taken < 0.99 * due and (more := ledger.beyond(c, minimum.SUMMED, meant, taken)):
            return more
        if taken < 0.99 * min(due, c.bytes) and taken:
            tied = len(leaf.users) > 1
            return Explained(c, minimum.SUMMED, taken, _too_often(leaf), called_for=tied)
        if taken:
            return Explained(c, minimum.SUMMED, taken, _why_more(ledger.plan, leaf, c, taken))
    return None


def _too_often(leaf: Leaf) -> str:
    return f"{leaf.name} or one like it is summed more often than it has to be"


def _why_more(plan: Layout, leaf: Leaf, c: Collective, taken: float) -> str:
    if c.bytes <= 1.01 * taken:
        return ""
    if also := [axis for axis in c.axes if axis not in plan.batch_axes]:
        return f"{leaf.name} is whole along {' x '.join(also)}, and summed over it too"
    if plan.zero_stage == 1:
        return (
            "train.zero_stage=1 holds gradients whole: all-reduced where a reduce-scatter would do"
        )
    if c.kind == "all-reduce" and {*c.axes} & {axis for dim in leaf.grad_dims for axis in dim}:
        return "summed whole, then cut: no reduce-scatter was made of it"
    return _wider(c)


def _wider(c: Collective) -> str:
    return f"in {c.array.dtype}, wider than it has to be"


def _activation(ledger: Ledger, c: Collective) -> Explained | None:
    """Activations between blocks, or a statistic for each position."""
    plan, axes = ledger.plan, c.axes or ()
    if not plan.is_stack or not axes or c.origin or not {*axes} <= {*plan.model_axes}:
        return None
    sums = ("all-reduce", "reduce-scatter")
    if c.kind not in (sums if "pipeline" in axes else (*sums, "all-gather")):
        return None
    needs = {need.role: need for need in ledger.needs if need.leaf is None and need.axes == axes}
    if c.array.size == plan.tokens and (need := needs.get(minimum.STATISTICS)):
        if taken := ledger.take(c, [need], 1)[1]:
            return Explained(c, minimum.STATISTICS, taken, _wider(c))
    if c.array.size != plan.tokens * plan.width:
        return None
    if "rematted" in c.op_name:
        why = f"train.remat={plan.remat} computes again, and sums or gathers for it"
        return Explained(c, "activations again", 0, why)
    if plan.keep == "inputs" and c.phase == "forward" and "pipeline" not in axes:
        return Explained(c, "activations again", 0, RUN_AGAIN)
    part = 1 if c.kind == "all-reduce" else 0.5  # a gather or a scatter does half the work of a sum
    taken = 0.0
    if need := needs.get(minimum.ACTIVATIONS):
        due, taken = ledger.take(c, [need], part)
        if taken > 0.99 * due:
            return Explained(c, minimum.ACTIVATIONS, taken, _wider(c))
        if more := ledger.beyond(c, minimum.ACTIVATIONS, [need], taken):
            return more
        part *= 1 - taken / due
    if c.phase == "backward" and (need := needs.get(minimum.APART)):
        due, apart = ledger.take(c, [need], part)
        if apart > 0.99 * due:
            outward = minimum.matrices_of(plan, *axes)[1]
            names = [leaf.name.removesuffix("/kernel").split("/")[-1] for leaf in outward]
            why = (
                f"of {', '.join(names)}, those with the same input sum its gradient each; added up "
                "first it would be one sum (as on TPU; XLA on CPU does not)"
            )
            return Explained(c, minimum.APART, taken, why)
        if more := ledger.beyond(c, minimum.APART, [need], taken + apart):
            return more
    why = "of more than the sums of matrices that are cut along their input"
    return Explained(c, minimum.ACTIVATIONS, taken, why, called_for=False) if taken else None


def _left_whole(ledger: Ledger, c: Collective) -> Explained | None:
    """What a parameter that a model axis leaves whole costs on the way back."""
    plan, axes = ledger.plan, {*(c.axes or "-")}
    if c.phase != "backward" or c.origin:
        return None
    for leaf in plan.leaves:
        if not axes <= {*plan.model_axes} - {*leaf.axes}:
            continue
        over, shape = " x ".join(c.axes), plan.local(leaf, leaf.dims, plan.batch_axes)
        label = f"gradients of what {over} leaves whole"
        why = f"{leaf.name} and perhaps others are whole along {over}"
        if c.kind != "all-gather" and _part(plan, c, leaf, leaf.dims):
            why += "; devices that have other positions, or other heads, add up their gradients"
            return Explained(c, label, 0, why)
        # Key/value heads, say, that fewer devices would have than query heads.
        if leaf.is_stacked and plan.width in leaf.shape[1:-1]:
            parts = plan.tokens * math.prod(shape[1:]) / plan.width / c.array.size
            if parts in range(1, plan.share(c.axes) + 1):
                why += "; gradients of what it makes are put together"
                return Explained(c, label, 0, why)
    return None


def _own_loss(ledger: Ledger, c: Collective) -> Explained | None:
    """What a model that is no stack moves along the axes that cut its parameters."""
    plan = ledger.plan
    if plan.is_stack or c.origin or not c.axes or not {*c.axes} <= {*plan.model_axes}:
        return None
    why = "a loss of one's own: what it needs is not known"
    return Explained(c, "partial results of your loss", 0, why)


def _unexplained(ledger: Ledger, c: Collective) -> Explained:
    """What a tensor that nothing calls for is, as far as its origin or its shape tells."""
    leaves = ledger.plan.leaves
    holds = [leaf.name for leaf in leaves if leaf.argument == c.origin]
    alike = [leaf.name for leaf in leaves if _looks_like(c, [*leaf.shape], leaf)]
    what = "no parameter has its shape"
    if holds or alike:
        what = f"it holds {holds[0]}" if holds else f"it has the shape of {alike[0]}, whole"
    return Explained(c, "not called for by this layout", 0, what, called_for=False)


def _looks_like(c: Collective, shape: list[int], leaf: Leaf) -> bool:
    """Whether a tensor has the dims of a leaf or one of its layers, in whatever order."""
    shapes = [shape, shape[1:]] if leaf.is_stacked else [shape]
    dims = sorted(size for size in c.array.shape if size > 1)
    return any(dims == sorted(size for size in shape if size > 1) for shape in shapes)
