"""Accounts for the bytes of collectives: what each is for, and which needs are not met yet."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshtrain.analysis.audit import minimum
from meshtrain.analysis.audit.minimum import Need
from meshtrain.analysis.audit.placement import Placement
from meshtrain.analysis.collective_ops import Collective

LOCK_STEP = "lock step: all stages take part in every tick, including stages without work"
RECOMPUTED = (
    "recomputed in the backward pass: pipeline.keep=inputs keeps only inputs, or train.remat is on"
)


@dataclass(frozen=True)
class Explanation:
    """What a collective is for."""

    collective: Collective
    label: str  # its purpose
    needed_bytes: float = 0  # the part of its bytes that is in the minimum
    reason: str = ""  # for its other bytes
    is_needed: bool = True  # False: the layout does not need it, which is a warning
    # If there are several reasons: each one's fraction of the bytes above the minimum.
    fractions: Mapping[str, float] = field(default_factory=dict)

    @property
    def extra_bytes(self) -> float:
        """Bytes above the minimum."""
        return self.collective.bytes - self.needed_bytes


class Ledger:
    """The needs of a layout, and how many bytes of each no collective has claimed yet."""

    def __init__(self, placement: Placement):
        self.placement = placement
        self.needs = minimum.needs(placement)
        self.unclaimed: Counter = Counter()
        # Bytes above the minimum that a pipeline may send, by (reason, key).
        self.allowed_extra: Counter = Counter()
        for need in self.needs:
            self.unclaimed[need.key] += need.bytes
            self.allowed_extra[LOCK_STEP, need.key] += need.bytes_once * need.idle_times
            self.allowed_extra[RECOMPUTED, need.key] += need.bytes_once * need.recompute_times

    def claim(self, c: Collective, needs: Iterable[Need], fraction: float) -> tuple[float, float]:
        """Claims a `fraction` of these needs for a collective.

        Returns the bytes asked for, and how many of them were still unclaimed.
        A collective over several axes may serve needs over a subset of them.
        """
        asked = claimed = 0.0
        for need in needs:
            is_subset = {*need.axes} <= {*c.axes}
            wanted = (
                fraction * need.bytes_once * c.count if is_subset else self._in_its_dtype(c, need)
            )
            granted = max(0.0, min(wanted, self.unclaimed[need.key]))
            self.unclaimed[need.key] -= granted
            asked, claimed = asked + wanted, claimed + granted
        return asked, min(claimed, c.bytes)

    def _in_its_dtype(self, c: Collective, need: Need) -> float:
        """Returns the bytes of a collective in the dtype of a need; sums over deferred axes are in float32."""
        is_wider = need.leaf and c.itemsize > need.leaf.compute_itemsize
        if not is_wider or {*need.axes} <= {*self.placement.deferred_axes}:
            return c.bytes
        return c.bytes * need.leaf.compute_itemsize / c.itemsize

    def explain_extra(
        self,
        c: Collective,
        label: str,
        needs: list[Need],
        claimed: float,
        asked: float = math.inf,
    ) -> Explanation | None:
        """Explains a collective if the pipeline accounts for all its bytes beyond those `claimed`.

        None if nearly all that it `asked` for was claimed; the rest is not due to repetition.
        """
        if claimed >= 0.99 * asked:
            return None
        pools = [(why, key) for why in (LOCK_STEP, RECOMPUTED) for key in {n.key for n in needs}]
        # Counted in the dtype of the needs; a wider dtype has the same reason.
        itemsizes = {need.leaf.compute_itemsize for need in needs if need.leaf}
        rest = min(asked, c.bytes * min(itemsizes, default=c.itemsize) / c.itemsize) - claimed
        if not 0 < rest <= 1.01 * sum(self.allowed_extra[pool] for pool in pools):
            return None
        drawn: Counter = Counter()
        for pool in pools:
            amount = min(rest - drawn.total(), self.allowed_extra[pool])
            self.allowed_extra[pool] -= amount
            drawn[pool[0]] += amount
        fractions = {why: amount / drawn.total() for why, amount in drawn.items() if amount}
        most = max(fractions, key=fractions.get)
        return Explanation(c, label, claimed, most, fractions=fractions)
