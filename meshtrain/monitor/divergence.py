"""Handles losses that are not finite, and loss spikes.

A step whose loss or gradient is not finite is skipped (step.py); several in a row end the training.
A spike is a finite loss far above the running mean. It is logged; with `divergence.rollback` the run
returns to its newest checkpoint and skips the data since (as PaLM did, arXiv 2204.02311, section 5.1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from meshtrain.config.schema import DivergenceConfig

DECAY = 0.99  # of the running mean and variance, per step

WARMUP_STEPS = 50  # until the running mean and variance are used

MAX_ROLLBACKS = 3  # to the same step, one after the other; the last of them ends the run

MIN_DEVIATION = 0.01  # lower bound of the standard deviation, as a fraction of the mean


@dataclass
class RunningLoss:
    """The running mean and variance of the loss."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def deviations_above_mean(self, loss: float) -> float:
        """Returns (loss - mean) / standard deviation; 0 during the first WARMUP_STEPS steps."""
        deviation = max(math.sqrt(self.variance), MIN_DEVIATION * abs(self.mean))
        return (loss - self.mean) / deviation if self.count >= WARMUP_STEPS and deviation else 0.0

    def add(self, loss: float) -> None:
        self.count += 1
        weight = max(1 / self.count, 1 - DECAY)  # 1 / count at first: the arithmetic mean
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change**2)


NAMES = [one.name for one in fields(RunningLoss)]


class LossMonitor:
    """Checks the loss of each step; writes to `event(name, **fields)` and `log(text)`."""

    def __init__(
        self,
        settings: DivergenceConfig,
        statistics: Mapping[str, float],
        *,
        event: Callable[..., None],
        log: Callable[[str], None],
    ):
        """`statistics` is a saved `LossMonitor.statistics` of the run to resume, or empty."""
        self._settings, self._event, self._log = settings, event, log
        losses = dict(statistics)
        self._skips = losses.pop("skips", 0)  # older checkpoints lack it
        # Rollbacks to the same step, one after the other, and that step.
        self._rollbacks, self._rolled_back_to = (
            losses.pop("rollbacks", 0),
            losses.pop("rollback_step", -1),
        )
        self._losses = RunningLoss(**{name: losses[name] for name in losses if name in NAMES})
        self.spike: int | None = None  # step of a spike to roll back

    @property
    def statistics(self) -> dict[str, float]:
        """What to save in a checkpoint: the resumed run finds the same spikes and ends at the same skip."""
        counts = {"skips": self._skips}
        if self._rollbacks:
            counts |= {"rollbacks": self._rollbacks, "rollback_step": self._rolled_back_to}
        return asdict(self._losses) | counts

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the metrics of a step; raises FloatingPointError after `max_skips` skipped steps in a row."""
        self._skips = self._skips + 1 if metrics["skipped"] else 0
        if self._skips:
            scale = {key: metrics[key] for key in ("loss_scale",) if key in metrics}
            self._event(
                "skip", step=step, loss=metrics["loss"], grad_norm=metrics["grad_norm"], **scale
            )
            if self._skips >= self._settings.max_skips:
                self._end(step, metrics)
            return
        deviations = self._losses.deviations_above_mean(metrics["loss"])
        limit = self._settings.spike
        if deviations > limit:
            fields = {"loss": metrics["loss"], "mean": self._losses.mean, "deviations": deviations}
            self._event("spike", step=step, **fields)
            self._log(
                f"step {step}: loss {metrics['loss']:.4f} is {deviations:.1f} standard deviations above "
                f"the running mean {self._losses.mean:.4f}"
            )
            self.spike = step if self._settings.rollback else None
        # A spike must not raise the mean: that would hide the next spike.
        self._losses.add(metrics["loss"] if deviations <= limit else self._losses.mean)

    def roll_back(self, step: int | None, position: int) -> None:
        """Records that the run returns to `step` (None: no checkpoint) and continues at sample `position`.

        Raises FloatingPointError at the last of MAX_ROLLBACKS successive rollbacks to the same step.
        """
        spike, self.spike = self.spike, None
        if step is None:
            self._log("no checkpoint to roll back to: training continues")
            return
        self._event("rollback", step=spike, to=step, position=position)
        self._log(f"rolled back to step {step}; the data up to sample {position} is skipped")
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        if self._rollbacks == MAX_ROLLBACKS:
            self._rollbacks = 0  # the next start, with other settings, has all of them again
            self._event("end", step=step, reason="spikes")
            raise FloatingPointError(
                f"step {step}: the loss spiked {MAX_ROLLBACKS} times after it, each time on other data. "
                f"Try a lower optim.learning_rate"
            )

    def check_final(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises FloatingPointError if the last loss or gradient of a run was not finite."""
        # With a loss scale (float16) an occasional skipped step is normal.
        skipped = metrics.get("skipped") and "loss_scale" not in metrics
        if metrics and (skipped or not math.isfinite(metrics["loss"])):
            self._end(step, metrics)

    def _end(self, step: int, metrics: Mapping[str, float]) -> None:
        fields = {**metrics, "step": step, "skipped_in_a_row": self._skips}
        self._event("end", reason="not finite", **fields)
        fault = (
            f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: not finite"
        )
        fault += f" for {self._skips} steps in a row" if self._skips > 1 else ""
        scale = (
            f"; the loss scale was {metrics['loss_scale']:.1e}" if "loss_scale" in metrics else ""
        )
        more = ", or train.dtype=bfloat16" if "loss_scale" in metrics else ""
        raise FloatingPointError(
            f"{fault}; the parameters were not changed{scale}. Try a lower optim.learning_rate "
            f"(here {metrics['learning_rate']:.1e}){more}"
        )
