"""What each collective is for, and how much of what a layout needs none has served yet."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshtrain.analysis.audit import minimum
from meshtrain.analysis.audit.minimum import Need
from meshtrain.analysis.audit.placement import Layout
from meshtrain.analysis.collective_ops import Collective

LOCK_STEP = "lock step: in each tick all stages take part, also those without work"
RUN_AGAIN = (
    "run again on the way back, from the input that pipeline.keep=inputs keeps, or for train.remat"
)


@dataclass(frozen=True)
class Explained:
    collective: Collective
    label: str  # what it is for
    needed: float = 0  # of its bytes, those that the minimum holds as well
    reason: str = ""  # for what it moves beyond them
    called_for: bool = True
    parts: Mapping[str, float] = field(
        default_factory=dict
    )  # of several reasons, shares of the excess

    @property
    def excess(self) -> float:
        return self.collective.bytes - self.needed


class Ledger:
    """What a layout needs, and how much of it is still left to be moved."""

    def __init__(self, plan: Layout):
        self.plan = plan
        self.needs = minimum.needs(plan)
        self.left: Counter = Counter()
        self.more: Counter = Counter()  # what a pipeline moves besides, by reason and key
        for need in self.needs:
            self.left[need.key] += need.bytes
            self.more[LOCK_STEP, need.key] += need.once * need.idle
            self.more[RUN_AGAIN, need.key] += need.once * need.again

    def take(self, c: Collective, needs: Iterable[Need], part: float) -> tuple[float, float]:
        """Takes a `part` of needs off; returns its bytes, and those of them that were still left.

        A collective along several axes may serve the needs of some of them.
        """
        due = taken = 0.0
        for need in needs:
            wanted = part * need.once * c.count if {*need.axes} <= {*c.axes} else c.bytes
            drawn = max(0.0, min(wanted, self.left[need.key]))
            self.left[need.key] -= drawn
            due, taken = due + wanted, taken + drawn
        return due, min(taken, c.bytes)

    def beyond(
        self, c: Collective, label: str, needs: list[Need], taken: float
    ) -> Explained | None:
        """Says what a collective is for where a pipeline accounts for all that it moves beyond `taken`."""
        pools = [(why, key) for why in (LOCK_STEP, RUN_AGAIN) for key in {n.key for n in needs}]
        # In the width of the needs; what is wider is so for the same reason.
        widths = {need.leaf.compute_itemsize for need in needs if need.leaf}
        rest = c.bytes * min(widths, default=c.itemsize) / c.itemsize - taken
        if not 0 < rest <= 1.01 * sum(self.more[pool] for pool in pools):
            return None
        drawn: Counter = Counter()
        for pool in pools:
            part = min(rest - drawn.total(), self.more[pool])
            self.more[pool] -= part
            drawn[pool[0]] += part
        parts = {why: part / drawn.total() for why, part in drawn.items() if part}
        return Explained(c, label, taken, max(parts, key=parts.get), parts=parts)
