"""The rows that a run has written."""

import json


def rows(workdir, name="metrics.jsonl"):
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def losses(workdir):
    """Returns the losses by step; the row of the final evaluation has none."""
    return {row["step"]: row["loss"] for row in rows(workdir) if "loss" in row}


def newest_step(workdir):
    try:
        return max(losses(workdir), default=-1)
    except (OSError, ValueError):  # no file yet, or an incomplete line
        return -1


def events(workdir, name):
    return [row for row in rows(workdir, "events.jsonl") if row["event"] == name]
