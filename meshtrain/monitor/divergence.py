"""What is done about losses that are not finite, and about those that leap up.

A step whose loss or gradient is not finite has no effect (step.py); a run of them ends the training.
A spike is a finite loss far above the running mean; it is told, and if wished the run goes back to
its newest checkpoint and passes over the data since (as PaLM did, arXiv 2204.02311, section 5.1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from meshtrain.config.schema import DivergenceConfig

MEMORY = 0.99  # of the running mean and variance, for each step
WARM = 50  # steps until they are trusted
UNDONE = 3  # times to go back to the same step
LEAST = 0.01  # of the mean: a standard deviation below it counts as so much


@dataclass
class Losses:
    """The running mean and variance of the loss."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def above(self, loss: float) -> float:
        """Returns by how many standard deviations a loss is above the mean; 0 until there is one."""
        deviation = max(math.sqrt(self.variance), LEAST * abs(self.mean))
        return (loss - self.mean) / deviation if self.count >= WARM and deviation else 0.0

    def add(self, loss: float) -> None:
        self.count += 1
        weight = max(1 / self.count, 1 - MEMORY)  # a plain mean at first
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change**2)


class Watch:
    """Sees the numbers of each step; `event(name, **fields)` records, `line(text)` tells."""

    def __init__(
        self,
        settings: DivergenceConfig,
        memory: Mapping[str, float],
        *,
        event: Callable[..., None],
        line: Callable[[str], None],
    ):
        """`memory` is what `memory` returned when the checkpoint was saved that the run goes on from."""
        self._settings, self._event, self._line = settings, event, line
        self._losses, self._skips = Losses(**memory), 0
        self._undone: list[int] = []  # steps that the run went back to
        self.spike: int | None = None  # step of one that is to be undone

    @property
    def memory(self) -> dict[str, float]:
        """What a checkpoint has to keep, so that a resumed run sees the same spikes."""
        return asdict(self._losses)

    def see(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of a step; raises FloatingPointError where the run cannot go on."""
        self._skips = self._skips + 1 if numbers["skipped"] else 0
        if self._skips:
            scale = {key: numbers[key] for key in ("loss_scale",) if key in numbers}
            self._event(
                "skip", step=step, loss=numbers["loss"], grad_norm=numbers["grad_norm"], **scale
            )
            if self._skips >= self._settings.max_skips:
                self._end(step, numbers)
            return
        above = self._losses.above(numbers["loss"])
        limit = self._settings.spike
        if above > limit:
            fields = {"loss": numbers["loss"], "mean": self._losses.mean, "deviations": above}
            self._event("spike", step=step, **fields)
            self._line(
                f"step {step}: loss {numbers['loss']:.4f} is {above:.1f} standard deviations above "
                f"{self._losses.mean:.4f}, the mean so far"
            )
            self.spike = step if self._settings.rollback else None
        # One spike must not hide the next.
        self._losses.add(numbers["loss"] if above <= limit else self._losses.mean)

    def undo(self, step: int | None, position: int) -> None:
        """Records that the run goes back to `step` (None: it cannot), and on with sample `position`.

        Raises FloatingPointError where that was tried before, and spikes came on other data too.
        """
        spike, self.spike = self.spike, None
        if step is None:
            self._line("no checkpoint to go back to: going on")
            return
        self._event("rollback", step=spike, to=step, position=position)
        self._line(f"back to step {step}, past the data up to sample {position}")
        self._undone = [*self._undone, step][-UNDONE:]
        if self._undone == [step] * UNDONE:
            self._event("end", step=step, reason="spikes")
            raise FloatingPointError(
                f"step {step}: the loss leapt up {UNDONE} times after it, each time on other data. "
                f"Try a lower optim.learning_rate"
            )

    def conclude(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raises FloatingPointError for a run whose last loss or gradient was not finite."""
        skipped = (
            numbers.get("skipped") and "loss_scale" not in numbers
        )  # in float16 one in a while is
        if numbers and (skipped or not math.isfinite(numbers["loss"])):
            self._end(step, numbers)

    def _end(self, step: int, numbers: Mapping[str, float]) -> None:
        fields = {**numbers, "step": step, "skipped_in_a_row": self._skips}
        self._event("end", reason="not finite", **fields)
        told = (
            f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}: not finite"
        )
        told += f", as in the {self._skips} steps up to it" if self._skips > 1 else ""
        scale = (
            f"; the loss scale was {numbers['loss_scale']:.1e}" if "loss_scale" in numbers else ""
        )
        more = ", or train.dtype=bfloat16" if "loss_scale" in numbers else ""
        raise FloatingPointError(
            f"{told}; all were without effect{scale}. Try a lower optim.learning_rate "
            f"(here {numbers['learning_rate']:.1e}){more}"
        )
