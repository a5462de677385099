"""Handles losses that are not finite, and loss spikes.

A step whose loss or gradient is not finite is skipped (step.py); several in a row end the training.
A spike is a finite loss far above the running mean. It is logged; with `divergence.rollback` the
run returns to its newest checkpoint and skips the data since (as PaLM did, arXiv 2204.02311,
section 5.1). A loss that stays high, because the data has changed, is no spike: the running mean
restarts at the new level.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from meshtrain.config.schema import DivergenceConfig

DECAY = 0.99  # of the running mean and variance, per step
WARMUP_STEPS = 50  # until the running mean and variance are used
MAX_ROLLBACKS = 3  # to the same step, one after the other; the last of them ends the run
MAX_SPIKE_SHARE = 0.1  # of the recent steps; with more spikes (11 in a row) it is a new level
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
        if self.count < WARMUP_STEPS or not deviation:
            return 0.0
        return (loss - self.mean) / deviation

    def add(self, loss: float) -> None:
        self.count += 1
        weight = max(1 / self.count, 1 - DECAY)  # 1 / count at first: the arithmetic mean
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change**2)


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
        self._settings = settings
        self._event = event
        self._log = log
        names = [field.name for field in fields(RunningLoss)]
        saved = {name: statistics[name] for name in names if name in statistics}
        self._losses = RunningLoss(**saved)
        # Older checkpoints lack the other numbers.
        self._spike_share = statistics.get("spike_share", 0.0)  # of steps, a running mean
        self._skips = statistics.get("skips", 0)  # in a row
        # Rollbacks to the same step, one after the other, and that step.
        self._rollbacks = statistics.get("rollbacks", 0)
        self._rolled_back_to = statistics.get("rollback_step", -1)
        self.spike: int | None = None  # step of a spike to roll back
        self._spike_metrics: Mapping[str, Any] = {}  # of that step
        # The step that was one skip too many, its metrics, and the skips in a row: the run ends.
        self.failure: tuple[int, Mapping[str, Any], float] | None = None

    @property
    def statistics(self) -> dict[str, float]:
        """Returns what a checkpoint saves: a resumed run finds the same spikes and skips."""
        saved = asdict(self._losses)
        saved["spike_share"] = self._spike_share
        # After a failure the next start, with other settings, may skip as many steps again.
        saved["skips"] = 0 if self.failure else self._skips
        if self._rollbacks:
            saved["rollbacks"] = self._rollbacks
            saved["rollback_step"] = self._rolled_back_to
        return saved

    def observe(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Checks the metrics of a step; sets `failure` at `max_skips` skips in a row.

        A batch without weight has the loss None, which says nothing about the others. Returns
        whether the step may be the one that ends the run, so that it is to be recorded.
        """
        loss = metrics["loss"]
        if loss is None:
            return False
        if metrics["skipped"]:
            self._skips += 1
            names = ("loss", "grad_norm", "loss_scale")
            fields = {name: metrics[name] for name in names if name in metrics}
            self._event("skip", step=step, **fields)
            is_failure = self._skips >= self._settings.max_skips and self.failure is None
            if is_failure:
                self.failure = (step, metrics, self._skips)
            return is_failure
        self._skips = 0
        mean = self._losses.mean
        deviations = self._losses.deviations_above_mean(loss)
        is_spike = deviations > self._settings.spike_sigmas
        self._spike_share += (1 - DECAY) * (is_spike - self._spike_share)
        # A spike must not raise the mean: that would hide the next spike.
        if not is_spike:
            self._losses.add(loss)
            return False
        self._event("spike", step=step, loss=loss, mean=mean, deviations=deviations)
        self._log(
            f"step {step}: loss {loss:.4f} is {deviations:.1f} standard deviations above "
            f"the running mean {mean:.4f}"
        )
        # The first step after each rollback is taken from the state of the checkpoint: if its loss
        # is high on other data too, no rollback can help.
        is_first_step = step == self._rolled_back_to
        rollbacks_are_in_vain = is_first_step and self._rollbacks == MAX_ROLLBACKS - 1
        if self._spike_share > MAX_SPIKE_SHARE or rollbacks_are_in_vain:
            self._start_new_level(step, loss)
        elif self._settings.rollback:
            self.spike = step
            self._spike_metrics = metrics
        return True

    def _start_new_level(self, step: int, loss: float) -> None:
        """Restarts the running mean at the loss of a step, since the loss stays high."""
        self._event("new_level", step=step, loss=loss, mean=self._losses.mean)
        self._log(
            f"step {step}: the loss stays far above the running mean {self._losses.mean:.4f}, as "
            f"after a change of the data: the mean restarts at {loss:.4f}"
        )
        self._losses = RunningLoss()
        self._losses.add(loss)
        self._spike_share = 0.0
        self._rollbacks = 0

    def roll_back(self, step: int | None, position: int) -> None:
        """Records that the run returns to `step`, or that there is no checkpoint (None).

        `position` is the sample from which it continues. Raises FloatingPointError at the last of
        MAX_ROLLBACKS successive rollbacks to the same step.
        """
        spike = self.spike
        self.spike = None
        if step is None:
            self._log("no checkpoint to roll back to: training continues")
            return
        self._event("rollback", step=spike, to=step, position=position)
        self._log(f"rolled back to step {step}; the data up to sample {position} is skipped")
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_back_to else 1
        self._rolled_back_to = step
        if self._rollbacks == MAX_ROLLBACKS:
            self._rollbacks = 0  # the next start, with other settings, has all of them again
            fields = {**self._spike_metrics, "step": spike, "to": step}
            self._event("end", reason="spikes", **fields)
            raise FloatingPointError(
                f"step {step}: the loss spiked {MAX_ROLLBACKS} times after it, each time on other "
                f"data. "
                f"Try a lower optim.learning_rate"
            )

    def check_end(self, step: int, metrics: Mapping[str, Any], *, is_finished: bool) -> None:
        """Raises FloatingPointError after a failure, or if the last step was not finite.

        A float16 step of which only the gradients overflowed is no reason, as at any other step.

        `metrics` are those of the last step, or what its checkpoint has of them: finite numbers. A
        run that is not finished may still have finite steps.
        """
        if self.failure is not None:
            self._end(*self.failure)
        if not is_finished or not metrics.get("skipped"):
            return
        # With a loss scale (float16) gradients overflow now and then: then the scale is halved.
        is_normal = "loss_scale" in metrics and math.isfinite(metrics.get("loss", math.nan))
        if not is_normal:
            self._end(step, metrics, self._skips)

    def _end(self, step: int, metrics: Mapping[str, Any], skips: float) -> None:
        loss = metrics.get("loss", math.nan)
        grad_norm = metrics.get("grad_norm", math.nan)
        fields = {**metrics, "loss": loss, "grad_norm": grad_norm, "step": step}
        self._event("end", reason="not finite", skipped_in_a_row=skips, **fields)
        fault = f"step {step}: loss {loss}, gradient norm {grad_norm}: not finite"
        if skips > 1:
            fault += f" for {skips} steps in a row"
        fault += "; the parameters were not changed"
        remedy = f"Try a lower optim.learning_rate (here {metrics['learning_rate']:.1e})"
        if "loss_scale" in metrics:
            fault += f"; the loss scale was {metrics['loss_scale']:.1e}"
            remedy += ", or train.dtype=bfloat16"
        raise FloatingPointError(f"{fault}. {remedy}")
