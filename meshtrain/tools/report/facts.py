"""What a report says about a run, as values for JSON: metrics, events, configs, checkpoints, verdicts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.cluster.progress import sum_by_name
from meshtrain.config.schema import AXES
from meshtrain.errors import ConfigError
from meshtrain.schedules import SCHEDULES
from meshtrain.tools import schedule_drawing
from meshtrain.tools.report.read import Run, is_number, read_json

# How an event is described; one that has other fields, or is not here, by its fields.
WORDS = {
    "skip": "loss or gradient not finite: the step had no effect",
    "spike": "loss {loss:.4g}, {deviations:.1f} standard deviations above the running mean {mean:.4g}",
    "rollback": "back to step {to}; the data up to sample {position:,} is skipped",
    "restart": "{why}",
    "recovered": "first step {seconds:.1f} s after the failure",
    "save": "{bytes:,} bytes in {seconds:.1f} s, of it {blocked_seconds:.1f} s waited for",
    "quarantine": "{why}; moved to {place}",
    "corrupt": "{fault}",
    "warning": "{text}",
    "end": "held-out loss {eval_loss:.4g}",
    "preempted": "state saved",
}

MAX_EVENTS = 200  # of each kind that are listed; all are counted

MAX_TEXT = 300  # characters of a field

MAX_BOXES = 4096  # of a drawn schedule


def facts_of(run: Run) -> dict[str, Any]:
    """Returns everything that the page shows about a run."""
    columns, events = run.metrics.columns(), [event for event in run.events if _has_time(event)]
    configs = run.configs()
    config, manifest = configs[-1] if configs else {}, run.manifest()
    starts = [event for event in events if event["event"] == "start"]
    newest_start = starts[-1] if starts else {}
    steps, processes = _dict(config.get("train")).get("steps"), manifest.get("processes")
    versions = {key: str(one) for key, one in _dict(manifest.get("versions")).items()}
    if "jax" in newest_start:
        versions["jax"] = str(newest_start["jax"])
    seconds, restarts = _seconds(events)
    return {
        "name": run.workdir.resolve().name,
        "path": str(run.workdir),
        "series": {name: _points(*column) for name, column in columns.items() if name != "step"},
        "summary": {name: _summary(*column) for name, column in columns.items() if name != "step"},
        "num_rows": run.metrics.num_rows,
        "last_step": int(columns["step"][1][-1]) if run.metrics.num_rows else None,
        "num_steps": steps if type(steps) is int else None,
        "status": _status(events),
        "counts": dict(Counter(event["event"] for event in events)),
        "events": list(_listed(events)),
        "spans": _spans(events, run.last_write()),
        "written": run.last_write(),
        "seconds": seconds,
        **restarts,
        "mesh": mesh_of(newest_start.get("mesh") or config.get("mesh")),
        "processes": processes if type(processes) is int else None,
        "schedule": schedule_of(config),
        "versions": versions,
        "config": flat(config),
        "changes": [differences(pair) for pair in pairwise(configs)],
        "notes": run.notes(),
    }


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns each key of a config, such as train.steps, with its value as JSON."""
    sections = {key: one if isinstance(one, dict) else {"": one} for key, one in config.items()}
    return {
        f"{section}.{key}".rstrip("."): json.dumps(value)
        for section, values in sections.items()
        for key, value in values.items()
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Returns the keys whose values differ, with the value in each config; None where there is none."""
    rows = [flat(config) for config in configs]
    values = {
        key: [row.get(key) for row in rows] for key in dict.fromkeys(k for r in rows for k in r)
    }
    return {key: row for key, row in values.items() if len({*row}) > 1}


def mesh_of(mesh: Any) -> dict[str, int]:
    """Returns the sizes of the axes, outermost first, and `slices`; {} if they are not known."""
    sizes = {name: _dict(mesh).get(name, 1) for name in (*AXES, "slices")}
    is_known = _dict(mesh) and all(type(size) is int and size > 0 for size in sizes.values())
    return sizes if is_known else {}


def schedule_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the pipeline schedule in words, and as SVG unless it is too large; None without a pipeline."""
    sections = (_dict(config.get(name)) for name in ("mesh", "train", "pipeline"))
    mesh, train, pipeline = sections
    name, P = pipeline.get("schedule"), mesh.get("pipeline")
    M, V = train.get("num_microbatches"), pipeline.get("num_chunks", 1)
    if not all(type(n) is int and n > 0 for n in (P, M, V)) or P == 1 or P * M * V > 10**6:
        return None
    try:
        table = SCHEDULES[name](P, M, V)
    except (KeyError, TypeError, ValueError):
        return None
    words = f"{name}, {P} stages, {M} micro-batches, {V} chunk{'s' * (V > 1)} per stage"
    drawn = schedule_drawing.svg(name, table) if 2 * P * M * V <= MAX_BOXES else None
    return {"words": f"{words}, bubble {table.bubble:.1%} of a step", "svg": drawn}


def _points(steps: np.ndarray, values: np.ndarray) -> list[list[float | None]]:
    kept = decimate(steps, values)
    return [steps[kept].astype(int).tolist(), [_rounded(value) for value in values[kept].tolist()]]


def _rounded(value: float) -> float | None:
    """Returns a value with the seven digits of float32; None for NaN."""
    return float(f"{value:.7g}") if value == value else None


def _summary(steps: np.ndarray, values: np.ndarray) -> dict[str, Any] | None:
    """Returns first, last, median and extremes of the values that are not NaN, and the steps of the extremes."""
    finite = ~np.isnan(values)
    if not finite.any():
        return None
    steps, values = steps[finite], values[finite]
    low, high = values.argmin(), values.argmax()
    found = {"first": values[0], "last": values[-1], "smallest": values[low]}
    found |= {"largest": values[high], "median": np.median(values)}
    at = {"at_smallest": int(steps[low]), "at_largest": int(steps[high])}
    return {name: _rounded(float(value)) for name, value in found.items()} | at | {"n": len(values)}


def _status(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the run ended, as far as its events say."""
    latest = [
        event for event in events if event["event"] in ("start", "end", "preempted", "restart")
    ]
    for event in latest[-1:]:
        if event["event"] == "end":
            return f"ended: {event['reason']}" if event.get("reason") else "done"
        if event["event"] == "preempted":
            return "stopped, state saved"
        return "restarting" if event["event"] == "restart" else "running, or killed"
    return "state unknown: no start in events.jsonl"


def _listed(events: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yields the first MAX_EVENTS events of each kind; their other fields as one text."""
    seen: Counter = Counter()
    for event in events:
        seen[event["event"]] += 1
        if seen[event["event"]] > MAX_EVENTS:
            continue
        step = event.get("step")
        step = step if type(step) is int else None
        yield {"event": event["event"], "time": event["time"], "step": step, "text": _words(event)}


def _words(event: Mapping[str, Any]) -> str:
    try:
        return WORDS[event["event"]].format_map(event)[:MAX_TEXT] or "preempted"
    except (KeyError, TypeError, ValueError):
        rest = {key: one for key, one in event.items() if key not in ("event", "time", "step")}
        return ", ".join(f"{key} {_brief(value)}" for key, value in rest.items())


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _spans(events: Sequence[Mapping[str, Any]], last_write: float) -> list[dict[str, Any]]:
    """Returns the times in which the run trained, or recovered from a failure: kind, start, end.

    A span without an end, of a run that was killed or still runs, lasts until the last event; the latest one until
    `last_write`, when a row was written.
    """
    spans: list[dict[str, Any]] = []
    kind = None
    for event in events:
        name, time = event["event"], event["time"]
        is_new = name == "start" and kind != "recovery"
        if kind and not is_new:
            spans[-1]["end"] = time
        now = {"start": "training", "restart": "recovery", "recovered": "training"}
        now = None if name in ("end", "preempted", "goodput") else now.get(name, kind)
        if name == "start" and kind == "recovery":
            now = kind  # until the first step
        if now and (is_new or now != kind):
            spans.append({"kind": now, "start": time, "end": time})
        kind = now
    if kind:
        spans[-1]["end"] = max(spans[-1]["end"], last_write)
    return spans


def _seconds(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the seconds by kind, and the counts of restarts and lost steps.

    The supervisors' accounts count all attempts; without a supervisor those of the processes that ended do.
    """
    accounts = [event for event in events if event["event"] == "goodput"]
    is_supervised = bool(accounts)
    accounts = accounts or [event for event in events if event["event"] in ("end", "preempted")]
    numbers = [
        {k: v for k, v in _dict(one.get("seconds")).items() if is_number(v)} for one in accounts
    ]
    counts = {
        name: sum(one[name] for one in accounts if type(one.get(name)) is int)
        for name in ("restarts", "lost_steps")
    }
    return sum_by_name(numbers), {"supervised": is_supervised, **(counts if is_supervised else {})}


def _has_time(event: Mapping[str, Any]) -> bool:
    return is_number(event.get("time"))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


BUCKETS = 500  # a chart is about as many pixels wide, or twice as many

PER_BUCKET = 5


def decimate(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Returns the indices of the points to draw, at most PER_BUCKET for each of `buckets` equal ranges of steps.

    Of each range these are the first, the last, the smallest and the largest, which draw the same line where a
    range is a column of pixels: M4, U. Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation",
    PVLDB 7 (10), 2014. The first NaN of a range is kept as well, because a gap must not vanish. `steps`
    increase strictly; both arrays are (N,).
    """
    if len(steps) <= PER_BUCKET * buckets:
        return np.arange(len(steps))
    bucket = ((steps - steps[0]) * buckets // (steps[-1] - steps[0] + 1)).astype(int)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(bucket)))
    is_nan = np.isnan(values)
    low, high = np.where(is_nan, np.inf, values), np.where(is_nan, -np.inf, values)

    def first_of_each(mask: np.ndarray) -> np.ndarray:
        found = np.flatnonzero(mask)
        return found[np.unique(number[found], return_index=True)[1]]

    smallest = first_of_each(low == np.minimum.reduceat(low, starts)[number])
    largest = first_of_each(high == np.maximum.reduceat(high, starts)[number])
    ends = np.append(starts[1:], len(bucket)) - 1
    return np.unique(np.concatenate([starts, ends, smallest, largest, first_of_each(is_nan)]))


# Where the two are found in a workdir.
PLACES = ("audit.json", "verify.json", "certificate/verify.json")

MAX_LINES = 100  # of each list


def find_verdicts(workdirs: Sequence[Path], given: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the verdicts in the workdirs, and those of the given files.

    Raises ConfigError if a given file is neither; such a file in a workdir is left out.
    """
    places = [workdir / name for workdir in workdirs for name in PLACES]
    found = [verdict_of(path) for path in places]
    for path in given:
        verdict = verdict_of(path)
        if verdict is None:
            what = "neither the JSON of `meshtrain audit --output` nor a verify.json"
            raise ConfigError(f"--verdict={path}: {what}; give one of them")
        found.append(verdict)
    return [verdict for verdict in found if verdict]


def verdict_of(path: Path) -> dict[str, Any] | None:
    """Returns what the page shows of one file; None if it is neither an audit nor a certificate."""
    record = read_json(path)
    if not isinstance(record, dict):
        return None
    try:
        verdict = _certificate(record) if "passed" in record else _audit(record)
        json.dumps(verdict, allow_nan=False)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return {"file": str(path), **verdict}


def _certificate(record: dict[str, Any]) -> dict[str, Any]:
    results = record["results"]
    faults = [f"one device: {fault}" for fault in record.get("broken_laws", ())]
    faults += [f"{_layout(one['row'])}: {one['fault']}" for one in results if one.get("fault")]
    kinds = dict.fromkeys(kind for one in results for kind in one["differences"])
    exact = [one for one in results if one["row"].get("dtype", "float64") == "float64"]
    differences = {kind: [one["differences"].get(kind) for one in exact] for kind in kinds}
    largest = {
        kind: max((value for value in values if value is not None), default=None)
        for kind, values in differences.items()
    }
    return {
        "kind": "certificate",
        "ok": record["passed"] is True,
        "subject": str(record.get("subject")),
        "num_layouts": len(results),
        "tolerance": record.get("tolerance"),
        "largest": largest,
        "lines": faults[:MAX_LINES],
        "not_covered": [str(line) for line in record.get("not_covered", ())][:MAX_LINES],
        "versions": {key: str(one) for key, one in record.get("versions", {}).items()},
    }


def _layout(row: dict[str, Any]) -> str:
    """Returns the settings of a layout that are not off."""
    return " · ".join(
        f"{key} {value}" for key, value in row.items() if value not in (None, False, 0, 1)
    )


def _audit(record: dict[str, Any]) -> dict[str, Any]:
    memory, roofline = record.get("memory") or None, record.get("roofline") or {}
    fits = not (memory and memory.get("capacity") and memory["peak"] > memory["capacity"])
    return {
        "kind": "audit",
        "ok": not record["warnings"] and fits,
        "subject": f"{record.get('device')}, {record.get('platform')}",
        "lines": [str(line) for line in record["warnings"]][:MAX_LINES],
        "axes": [[one["name"], one["bytes"], one["minimum"]] for one in record["axes"]],
        "memory": memory,
        "fits": fits,
        "seconds": roofline.get("seconds"),
        "mfu": roofline.get("mfu"),
        "rows": [[row["name"], row["ceiling_seconds"]] for row in roofline.get("rows", ())]
        + [[f"{one['name']} (exposed)", one["exposed"]] for one in roofline.get("transfers", ())],
    }
