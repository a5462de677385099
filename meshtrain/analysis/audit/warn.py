"""What a layout leaves undone: large arrays that are whole on many devices, axes that share no work."""

from collections import Counter
from collections.abc import Iterator

import jax

from meshtrain.analysis.audit.ledger import Explained
from meshtrain.analysis.audit.placement import Axes, Layout, Leaf
from meshtrain.parallel import sharding
from meshtrain.parallel.sharding import Rules
from meshtrain.state import TrainState, bytes_per_device

LARGE_SHARE = 0.05  # of all parameters, or
LARGE_BYTES = 64 << 20  # on each device


def warnings(
    plan: Layout, rules: Rules, state: TrainState, explained: list[Explained]
) -> list[str]:
    """Returns a line for each."""
    return [
        *_idle_axes(plan),
        *_whole_parameters(plan, rules),
        *_whole_moments(plan, state),
        *_not_called_for(explained),
        *_unknown_loops(explained),
    ]


def name_of(axes: Axes | None) -> str:
    return " x ".join(axes) if axes else "other"


def _idle_axes(plan: Layout) -> Iterator[str]:
    for axis, size in plan.mesh.items():
        if size > 1 and axis not in (*plan.batch_axes, *plan.model_axes):
            yield (
                f"mesh.{axis}={size} cuts neither the batch nor a parameter: its devices all do the same "
                f"work; give it a line in config.rules, or set mesh.{axis}=1"
            )


def _is_large(plan: Layout, held: float) -> bool:
    total = sum(leaf.size * leaf.itemsize for leaf in plan.leaves)
    return held >= LARGE_BYTES or held >= LARGE_SHARE * total


def _whole_parameters(plan: Layout, rules: Rules) -> Iterator[str]:
    cutting = {*plan.model_axes, *(("fsdp",) if plan.zero_stage == 3 else ())}
    for leaf in plan.leaves:
        held = leaf.size * leaf.itemsize / plan.share(leaf.axes)
        for axis, size in plan.mesh.items():
            if size > 1 and axis in cutting - {*leaf.axes} and _is_large(plan, held):
                yield (
                    f"{leaf.name} {leaf.shape}, {held:,.0f} bytes a device, is whole along {axis}={size}: "
                    + _why_whole(leaf, axis, plan, rules)
                )


def _why_whole(leaf: Leaf, axis: str, plan: Layout, rules: Rules) -> str:
    named = [name for name in leaf.names if name]
    if not named:
        return "it has no names; give its dims some, such as ('embed', 'mlp')"
    for name, to in rules:
        axes = sharding.axes_of(to)
        if name not in named or axis not in axes:
            continue
        size, share = leaf.shape[leaf.names.index(name)], plan.share(axes)
        if size % share:
            return f"{name!r} is {size}, which {share} does not divide"
        first = next(rule for rule in rules if rule[0] == name)
        return (
            f"the rule {(name, to)} comes too late, after {first}"
            if first != (name, to)
            else (
                f"the rule {(name, to)} cannot be followed, an earlier one cuts this array along {axis}"
            )
        )
    return f"no rule maps one of {', '.join(map(repr, named))} to {axis}"


def _whole_moments(plan: Layout, state: TrainState) -> Iterator[str]:
    """Optimizer state that is not cut like its parameter: a factored moment, say."""
    size = plan.mesh["fsdp"]
    if size == 1 or plan.zero_stage == 0:
        return
    shapes = {leaf.shape for leaf in plan.leaves}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        held = bytes_per_device(leaf)
        if leaf.sharding.is_fully_replicated and leaf.shape not in shapes and _is_large(plan, held):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            yield (
                f"optimizer state {name} {leaf.shape}, {held:,} bytes a device, is whole: "
                f"its shape is not its parameter's, so no rule applies to it"
            )


def _not_called_for(explained: list[Explained]) -> Iterator[str]:
    merged: Counter = Counter()
    for one in explained:
        c = one.collective
        if not one.called_for:
            what = f"{c.kind} over {name_of(c.axes)} of {c.array.dtype}{list(c.array.shape)}"
            where = f" at {c.source}" if c.source else ""
            merged[f"{what}{where}: {one.label}: {one.reason}"] += one.excess
    for line, moved in merged.most_common():
        yield f"{line} ({moved:,.0f} bytes)"


def _unknown_loops(explained: list[Explained]) -> Iterator[str]:
    unknown = [one.collective for one in explained if not one.collective.count_known]
    if unknown:
        yield (
            f"{len(unknown)} collectives are in loops of unknown length (the first at {unknown[0].source}); "
            f"each is counted as one turn"
        )
