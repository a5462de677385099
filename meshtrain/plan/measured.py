"""One factor between predicted and measured step time, from the metrics of a run."""

import json
import statistics
from pathlib import Path

from meshtrain.errors import ConfigError

FIRST = 5  # rows that are left out: the first steps compile, read caches and fill queues


def factor(workdir: Path) -> float:
    """Returns measured / predicted, the median over the rows of a run's metrics.jsonl that have both.

    Raises ConfigError if there is no such row.
    """
    file = workdir / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--measured={workdir}: metrics.jsonl cannot be read ({error})"
        ) from error
    ratios = [
        row["step_time"] / row["predicted_step_time"]
        for row in rows
        if row.get("step_time") and row.get("predicted_step_time")
    ]
    ratios = ratios[FIRST:] or ratios
    if not ratios:
        raise ConfigError(
            f"--measured={workdir}: no row of metrics.jsonl has predicted_step_time, which runs on devices of "
            f"meshtrain/analysis/hardware.py write; use such a run"
        )
    return statistics.median(ratios)
