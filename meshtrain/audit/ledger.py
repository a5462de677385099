"""What each collective is for, and how much of what a layout needs none has served yet."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshtrain.audit import minimum
from meshtrain.audit.collectives import Collective
from meshtrain.audit.layout import Layout
from meshtrain.audit.minimum import Need

LOCK_STEP = "lock step: in each tick all stages take part, also those without work"


@dataclass(frozen=True)
class Explained:
    collective: Collective
    label: str  # what it is for
    needed: float = 0  # of its bytes, those that the minimum holds as well
    reason: str = ""  # for what it moves beyond them
    called_for: bool = True

    @property
    def excess(self) -> float:
        return self.collective.bytes - self.needed


class Ledger:
    """What a layout needs, and how much of it is still left to be moved."""

    def __init__(self, plan: Layout):
        self.plan = plan
        self.needs = minimum.needs(plan)
        self.left: Counter = Counter()
        self.idle: Counter = Counter()  # what lock step moves besides
        for need in self.needs:
            self.left[need.key] += need.bytes
            self.idle[need.key] += need.once * need.idle

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

    def lock_step(self, c: Collective, needs: Iterable[Need], taken: float) -> str:
        """Returns a reason if stages without work account for all that it moves beyond `taken`."""
        rest = c.bytes - taken
        for need in needs:
            if 0 < rest <= 1.01 * self.idle[need.key]:
                self.idle[need.key] -= rest
                return LOCK_STEP
        return ""
