"""Writes the rows of metrics.jsonl to the caller, to trackers and to a notebook's cell too."""

import importlib.util
import math
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError, install_command
from meshtrain.monitor import cell

Row = dict[str, Any]
RUN_ID = "wandb_run_id"  # file in the workdir, so that a resumed run continues its curves


class Sink(Protocol):
    """Gets each row of a run."""

    name: str
    optional: bool  # whether the run continues without it after an error

    def begin(self, step: int) -> None:
        """Discards earlier rows of this step and later: those that follow replace them."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


def open_sinks(
    cfg: Config, workdir: Path | None, on_metrics: Callable[[Row], None] | None
) -> list[Sink]:
    """Returns the sinks of a run. Raises ConfigError for one that cannot be opened."""
    opened: list[Sink] = []
    if on_metrics:
        opened.append(_Function(on_metrics))
    if cfg.monitor.tensorboard:
        opened.append(_TensorBoard(workdir / "tensorboard"))
    if cfg.monitor.wandb:
        opened.append(_Wandb(cfg, workdir))
    if cell.in_cell():
        opened.append(cell.Cell(workdir))
    return opened


def sink_faults(cfg: Config, workdir: str | Path | None) -> list[str]:
    """Returns a line for each sink that a run cannot have."""
    faults = []
    for key, module in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        value = getattr(cfg.monitor, key)
        if not value:
            continue
        if importlib.util.find_spec(module) is None:
            faults.append(
                f"monitor.{key}={value}: {module} is not installed; {install_command(key)}"
            )
        if not workdir:
            faults.append(f"monitor.{key}={value}: there is no folder for its files; use --workdir")
    return faults


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a row by name; a list, one per layer, as name/0, name/1, ..."""
    for name, value in row.items():
        if name == "step":
            continue
        if isinstance(value, list):
            numbers = {f"{name}/{i}": number for i, number in enumerate(value)}
        else:
            numbers = {name: value}
        for key, number in numbers.items():
            if isinstance(number, int | float) and math.isfinite(number):
                yield key, number


class _Function:
    name, optional = "on_metrics", False

    def __init__(self, function: Callable[[Row], None]):
        self.write = function

    def begin(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard:
    name, optional = "TensorBoard", True

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def begin(self, step: int) -> None:
        from tensorboardX import SummaryWriter

        self.close()
        # The writer names its file by the second, and would overwrite one of the same second.
        number = len(list(self._folder.glob("events.*"))) if self._folder.exists() else 0
        self._writer = SummaryWriter(
            str(self._folder), purge_step=step, flush_secs=10, filename_suffix=f".{number:05d}"
        )

    def write(self, row: Row) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._writer:
            self._writer.close()


class _Wandb:
    name, optional = "Weights & Biases", True

    def __init__(self, cfg: Config, workdir: Path):
        import wandb

        file = workdir / RUN_ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=cfg.monitor.wandb,
                dir=workdir,
                id=file.read_text(encoding="utf-8"),
                resume="allow",
                config=cfg.to_dict(),
                # Its console output would break the progress bar.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"monitor.wandb={cfg.monitor.wandb}: {reason}; "
                f"run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        # W&B's own counter cannot go back to an earlier step.
        self._run.define_metric("*", step_metric="step")

    def begin(self, step: int) -> None:
        pass

    def write(self, row: Row) -> None:
        self._run.log({"step": row["step"], **dict(scalars(row))})

    def close(self) -> None:
        self._run.finish()
