"""What a collective was found to be for, and what is still needed after it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Axes, Layout, Leaf
from meshtrain.audit.minimum import Need


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


def wider(c: Collective, itemsize: int) -> str:
    return f"in {c.array.dtype}, wider than what is computed in" if c.itemsize > itemsize else ""


def is_recomputed(c: Collective) -> bool:
    return "rematted" in c.op_name


def local(plan: Layout, leaf: Leaf, dims: tuple[Axes, ...], axes: Axes) -> list[int]:
    """Returns the shape of a leaf cut by `dims`, whole along `axes`."""
    cuts = (plan.share(tuple(axis for axis in dim if axis not in axes)) for dim in dims)
    return [size // cut for size, cut in zip(leaf.shape, cuts, strict=True)]


def part_of(plan: Layout, leaf: Leaf, dims: tuple[Axes, ...], c: Collective) -> float:
    """Returns how much of a leaf a tensor holds: 1, or some of its layers; 0 where its size does not fit."""
    whole = math.prod(local(plan, leaf, dims, c.axes))
    fits = whole % c.array.size == 0 and leaf.num_layers % (whole // c.array.size) == 0
    return c.array.size / whole if fits else 0


def looks_like(c: Collective, shape: list[int], leaf: Leaf) -> bool:
    """Whether a tensor has the dims of a leaf or one of its layers, in whatever order."""
    shapes = [shape, shape[1:]] if leaf.is_stacked else [shape]
    dims = sorted(size for size in c.array.shape if size > 1)
    return any(dims == sorted(size for size in shape if size > 1) for shape in shapes)
