"""Warns about replicated arrays, idle mesh axes, unneeded collectives, loops of unknown length.

What `train` warns about before it compiles is in meshtrain/monitor/warnings.py; an audit has it
too.
"""

from collections import Counter
from collections.abc import Iterator

import jax

from meshtrain.parallel import sharding
from meshtrain.parallel.sharding import Rules
from meshtrain.state import TrainState, bytes_per_device
from meshtrain.tools.audit.layout import Axes, Leaf, Placement
from meshtrain.tools.audit.minimum import Explanation

# An array is large if a device holds this many bytes of it, or this fraction of all parameters.
LARGE_FRACTION = 0.05
LARGE_BYTES = 64 << 20


def warnings(
    placement: Placement, rules: Rules, state: TrainState, explanations: list[Explanation]
) -> list[str]:
    """Returns one line for each warning."""
    return [
        *_idle_axes(placement),
        *_replicated_parameters(placement, rules),
        *_replicated_moments(placement, state),
        *_not_needed(explanations),
        *_unknown_loops(explanations),
    ]


def axes_label(axes: Axes | None) -> str:
    return " x ".join(axes) if axes else "other"


def _idle_axes(placement: Placement) -> Iterator[str]:
    for axis, size in placement.mesh.items():
        if size > 1 and axis not in (*placement.token_axes, *placement.model_axes):
            yield (
                f"mesh.{axis}={size} shards neither the batch nor a parameter: all its devices do "
                f"the same work; add a rule for {axis} to config.rules, or set mesh.{axis}=1"
            )


def _is_large(placement: Placement, num_bytes: float) -> bool:
    total = sum(leaf.size * leaf.itemsize for leaf in placement.leaves)
    return num_bytes >= LARGE_BYTES or num_bytes >= LARGE_FRACTION * total


def _replicated_parameters(placement: Placement, rules: Rules) -> Iterator[str]:
    axes = {*placement.model_axes}
    if placement.zero_stage == 3:
        axes |= {*sharding.ZERO_AXES}
    for leaf in placement.leaves:
        num_bytes = leaf.size * leaf.itemsize / placement.num_devices(leaf.axes)
        # Sizes that do not divide are warned about by meshtrain/monitor/warnings.py.
        not_divisible = sharding.not_divisible(leaf.dim_names, leaf.shape, rules, placement.mesh)
        for axis, size in placement.mesh.items():
            is_replicated = size > 1 and axis in axes and axis not in leaf.axes
            if is_replicated and axis not in not_divisible and _is_large(placement, num_bytes):
                yield (
                    f"{leaf.name} {leaf.shape}, {num_bytes:,.0f} bytes on each device, is "
                    f"replicated over {axis}={size}: {_why_replicated(leaf, axis, rules)}"
                )


def _why_replicated(leaf: Leaf, axis: str, rules: Rules) -> str:
    names = [name for name in leaf.dim_names if name]
    if not names:
        return "its dims have no logical names; give them names such as ('embed', 'mlp')"
    for name, target in rules:
        axes = sharding.axes_of(target)
        if name not in names or axis not in axes:
            continue
        first = next(rule for rule in rules if rule[0] == name)
        if first != (name, target):
            return f"the rule {(name, target)} is not used, because {first} comes first"
        return (
            f"the rule {(name, target)} is not used, because an earlier rule already shards this "
            f"array over {axis}"
        )
    return f"no rule maps one of {', '.join(map(repr, names))} to {axis}"


def _replicated_moments(placement: Placement, state: TrainState) -> Iterator[str]:
    """Warns about optimizer state that is not sharded like its parameter: a factored moment."""
    if placement.num_devices(sharding.ZERO_AXES) == 1 or placement.zero_stage == 0:
        return
    shapes = {leaf.shape for leaf in placement.leaves}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        num_bytes = bytes_per_device(leaf)
        is_replicated = leaf.sharding.is_fully_replicated and leaf.shape not in shapes
        if is_replicated and _is_large(placement, num_bytes):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            yield (
                f"optimizer state {name} {leaf.shape}, {num_bytes:,} bytes on each device, is "
                f"replicated: its shape differs from its parameter's, so no rule applies to it"
            )


def _not_needed(explanations: list[Explanation]) -> Iterator[str]:
    merged: Counter = Counter()
    for explanation in explanations:
        c = explanation.collective
        if not explanation.is_needed:
            line = f"{c.kind} over {axes_label(c.axes)} of {c.array.dtype}{list(c.array.shape)}"
            line += f" at {c.source}" if c.source else ""
            line += f": {explanation.label}: {explanation.reason}"
            merged[line] += explanation.extra_bytes
    for line, num_bytes in merged.most_common():
        yield f"{line} ({num_bytes:,.0f} bytes)"


def _unknown_loops(explanations: list[Explanation]) -> Iterator[str]:
    collectives = [explanation.collective for explanation in explanations]
    unknown = [c for c in collectives if not c.count_known]
    if unknown:
        yield (
            f"{len(unknown)} collectives are in loops of unknown length (the first at "
            f"{unknown[0].source}); each is counted as if its loop ran once"
        )
