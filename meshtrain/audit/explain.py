"""Says of each collective what it is for, by what the layout needs; what nothing explains stays so."""

from collections.abc import Callable, Iterable

from meshtrain.audit import activations, parameters
from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Layout
from meshtrain.audit.ledger import Explained, Left, looks_like
from meshtrain.audit.minimum import Need, beyond


def explain(
    plan: Layout, needs: list[Need], found: list[Collective]
) -> tuple[list[Explained], list[tuple[Need, float]]]:
    """Returns each collective with what it is for, and needs that none of them served, in bytes."""
    left = Left([*needs, *beyond(plan)])
    for c in found:
        left.pool(leaf.name for looks, _, leaf in parameters.gradients(plan, c) if looks)

    def order(c: Collective) -> tuple:
        # The largest first: a whole stack is not mistaken for one layer of another. Along model
        # axes the forward pass first: what is too much then shows where it arises, on the way back.
        late = c.phase == "backward" and not {*(c.axes or ())} & {*plan.batch_axes}
        return late, -c.bytes

    ordered = sorted(found, key=order)
    rules = (
        *(_scalar, parameters.gather, parameters.summed, parameters.update),
        *(activations.activation, activations.whole, activations.own_loss),
    )
    clear = [_first(rules, plan, left, c) for c in ordered]
    # What only the number of elements speaks for comes after all that has the shape as well.
    explained = [
        one or _first((parameters.summed_by_size, _unexplained), plan, left, c)
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
    alike = [leaf.name for leaf in plan.leaves if looks_like(c, [*leaf.shape], leaf)]
    return f"it has the shape of {alike[0]}, whole" if alike else "no parameter has its shape"


def _scalar(plan: Layout, left: Left, c: Collective) -> Explained | None:
    if c.array.size > 1:
        return None
    return Explained(c, "scalars", 0, "metrics, and the norm of the gradient")
