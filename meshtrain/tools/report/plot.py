"""`meshtrain.plot`: the loss curves of runs as one picture, for a notebook or a file."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.monitor import curves
from meshtrain.tools.report.read import Run


def plot(workdir: str | Path, *others: str | Path) -> Any:
    """Returns a matplotlib Figure with the training and held-out loss of one or several runs.

    At the end of a cell it is shown; `plot("runs/one", "runs/two").savefig("loss.png")` writes a
    file. Of a step that a run repeated after a restart or a rollback, the last value counts, and a
    skipped step has none. Raises ConfigError if a workdir, which is a folder, has no finite loss,
    or if matplotlib, of the extra `notebook`, is missing.
    """
    workdirs = [Path(one) for one in (workdir, *others)]
    # Of absolute paths: that of "." is empty.
    names = [os.path.basename(os.path.abspath(one)) for one in workdirs]
    if len({*names}) < len(names):
        names = [str(one) for one in workdirs]
    return curves.draw([_curve(*one) for one in zip(workdirs, names, strict=True)])


def _curve(workdir: Path, name: str) -> curves.Curve:
    run = Run(workdir)
    run.update()
    columns = run.metrics.columns()
    none = (np.array([]), np.array([]))
    steps, loss = columns.get("loss", none)
    heldout_steps, heldout_loss = columns.get("eval_loss", none)
    losses = np.concatenate([loss, heldout_loss])
    if not losses.size:
        raise ConfigError(f"{workdir}: its metrics.jsonl has no loss yet; train first")
    if not np.isfinite(losses).any():
        raise ConfigError(
            f"{workdir}: each of the {losses.size} losses in its metrics.jsonl is not finite, or "
            f"of a skipped step; try a lower optim.learning_rate"
        )
    return curves.Curve(
        name=name,
        steps=steps,
        loss=loss,
        heldout_steps=heldout_steps,
        heldout_loss=heldout_loss,
    )
