"""The files of a run, written by hand."""

import json

from meshtrain.config.schema import AXES


def row(step, **more):
    return {"step": step, "loss": 5.0 / (step + 1), "grad_norm": 1.0, "mfu": None, **more}


def write(path, rows, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return path


def story(workdir, steps=300):
    """Writes a run with a skipped step, a rollback and a restart; training begins at 1000.0."""
    mesh = dict.fromkeys((*AXES, "slices"), 1) | {"data": 2, "pipeline": 2}
    rows = [
        row(step, step_time=0.1, data_wait=0.01, tokens_per_second=100.0) for step in range(steps)
    ]
    rows[60] |= {"loss": None, "skipped": 1.0}
    rows[100]["eval_loss"], rows[199]["eval_loss"] = 0.5, 0.4
    write(workdir / "metrics.jsonl", rows)
    events = [
        {"event": "start", "time": 1000.0, "step": 0, "jax": "0.10.2", "mesh": mesh},
        {"event": "skip", "time": 1006.0, "step": 60, "loss": None, "grad_norm": None},
        {"event": "save", "time": 1010.0, "step": 100, "bytes": 10},
        {"event": "spike", "time": 1011.0, "step": 110, "loss": 9.0},
        {"event": "rollback", "time": 1011.1, "step": 110, "to": 100, "position": 1776},
        {"event": "restart", "time": 1020.0, "code": -9, "why": "rank 1 killed", "step": 175},
        {"event": "start", "time": 1025.0, "step": 160, "jax": "0.10.2", "mesh": mesh},
        {"event": "recovered", "time": 1030.0, "step": 160, "seconds": 10.0},
        {"event": "end", "time": 1050.0, "step": steps, "eval_loss": 0.3, "seconds": {"step": 9.0}},
        {"event": "goodput", "time": 1050.2, "restarts": 1, "lost_steps": 15,
         "seconds": {"step": 29.0, "compile": 11.0, "restart": 10.0, "wall": 50.0}},
    ]  # fmt: skip
    write(workdir / "events.jsonl", events)
    config = {"train": {"steps": steps, "num_microbatches": 4}, "mesh": mesh}
    config["pipeline"] = {"schedule": "1f1b", "num_chunks": 1}
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir
