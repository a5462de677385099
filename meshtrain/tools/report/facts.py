"""The facts that a report shows, as values for JSON: of runs, and of audits and certificates."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    "spike": "loss {loss:.4g}, {deviations:.1f} standard deviations above the running mean "
    "{mean:.4g}",
    "rollback": "back to step {to}; the data up to sample {position:,} is skipped",
    "restart": "{why}",
    "recovered": "first step {seconds:.1f} s after the failure",
    "save": "{bytes:,} bytes in {seconds:.1f} s; training waited {blocked_seconds:.1f} s",
    "quarantine": "{why}; moved to {place}",
    "corrupt": "{fault}",
    "warning": "{text}",
    "end": "held-out loss {eval_loss:.4g}",
    "preempted": "newest checkpoint: step {saved}",
}
MAX_EVENTS = 200  # of each kind that are listed; all are counted
MAX_TEXT = 300  # characters of a field
MAX_BOXES = 4096  # of a drawn schedule


def facts_of(run: Run) -> dict[str, Any]:
    """Returns everything that the page shows about a run."""
    configs = run.configs()
    config = configs[-1] if configs else {}
    steps = _dict(config.get("train")).get("steps")

    series, summary = {}, {}
    columns = run.metrics.columns()
    for name, (at_steps, values) in columns.items():
        if name != "step":
            series[name] = _points(at_steps, values)
            summary[name] = _summary(at_steps, values)
    # The row of the final evaluation is none of a step.
    last_step = None
    step_numbers, _ = columns.get("loss") or columns.get("step") or ([], [])
    if len(step_numbers):
        last_step = int(step_numbers[-1])

    events = [event for event in run.events if is_number(event.get("time"))]
    starts = [event for event in events if event["event"] == "start"]
    newest_start = starts[-1] if starts else {}
    seconds, restarts = _seconds(events)

    # What only a checkpoint knows; the newest start knows jax better.
    manifest = run.manifest()
    processes = manifest.get("processes")
    versions = _texts(manifest.get("versions"))
    if "jax" in newest_start:
        versions["jax"] = str(newest_start["jax"])
    return {
        "name": run.workdir.resolve().name,
        "path": str(run.workdir),
        "series": series,
        "summary": summary,
        "num_rows": run.metrics.num_rows,
        "last_step": last_step,
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
    values = {}
    for section, entry in config.items():
        if isinstance(entry, dict):
            for key, value in entry.items():
                values[f"{section}.{key}".rstrip(".")] = json.dumps(value)
        else:
            values[section.rstrip(".")] = json.dumps(entry)
    return values


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Returns the keys whose values differ, with the value in each config, or None."""
    flat_configs = [flat(config) for config in configs]
    keys = dict.fromkeys(key for values in flat_configs for key in values)
    differing = {}
    for key in keys:
        row = [values.get(key) for values in flat_configs]
        if len({*row}) > 1:
            differing[key] = row
    return differing


def mesh_of(mesh: Any) -> dict[str, int]:
    """Returns the sizes of the axes, outermost first, and `slices`; {} if they are not known."""
    given = _dict(mesh)
    sizes = {name: given.get(name, 1) for name in (*AXES, "slices")}
    is_known = given and all(_is_count(size) for size in sizes.values())
    return sizes if is_known else {}


def schedule_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the pipeline schedule in words and as SVG; None without a pipeline.

    The SVG is None if it would have too many boxes.
    """
    pipeline = _dict(config.get("pipeline"))
    name = pipeline.get("schedule")
    P = _dict(config.get("mesh")).get("pipeline")
    M = _dict(config.get("train")).get("num_microbatches")
    V = pipeline.get("num_chunks", 1)
    if (
        not isinstance(name, str)
        or not all(map(_is_count, (P, M, V)))
        or P == 1
        or P * M * V > 10**6
    ):
        return None
    try:
        table = SCHEDULES[name](P, M, V)
    except (KeyError, TypeError, ValueError):
        return None
    words = f"{name}, {P} stages, {M} micro-batches, {V} chunk{'s' * (V > 1)} per stage"
    svg = None
    if 2 * P * M * V <= MAX_BOXES:
        svg = schedule_drawing.svg(name, table)
    return {"words": f"{words}, bubble {table.bubble:.1%} of a step", "svg": svg}


# ---- metrics ----


def _points(steps: np.ndarray, values: np.ndarray) -> list[list[float | None]]:
    """Returns the steps and values to draw."""
    shown = decimate(steps, values)
    return [
        steps[shown].astype(int).tolist(),
        [_rounded(value) for value in values[shown].tolist()],
    ]


def _rounded(value: float) -> float | None:
    """Returns a value with the seven digits of float32; None for NaN."""
    return float(f"{value:.7g}") if value == value else None


def _summary(steps: np.ndarray, values: np.ndarray) -> dict[str, Any] | None:
    """Returns first, last, median and extremes of the values, NaN left out."""
    finite = ~np.isnan(values)
    if not finite.any():
        return None
    steps, values = steps[finite], values[finite]
    low, high = values.argmin(), values.argmax()
    return {
        "first": _rounded(float(values[0])),
        "last": _rounded(float(values[-1])),
        "smallest": _rounded(float(values[low])),
        "largest": _rounded(float(values[high])),
        "median": _rounded(float(np.median(values))),
        "at_smallest": int(steps[low]),
        "at_largest": int(steps[high]),
        "n": len(values),
    }


def _status(events: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the run ended, as far as its events say."""
    for event in reversed(events):
        match event["event"]:
            case "end":
                return f"ended: {event['reason']}" if event.get("reason") else "done"
            case "preempted":
                step = event.get("step")
                is_saved = event.get("saved", step) == step  # older runs do not say
                return "stopped, state saved" if is_saved else "stopped, state not saved"
            case "restart":
                return "restarting"
            case "start":
                return "running, or killed"
    return "state unknown: no start in events.jsonl"


def _listed(events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the first MAX_EVENTS events of each kind; their other fields as one text."""
    num_seen: Counter = Counter()
    for event in events:
        name = event["event"]
        num_seen[name] += 1
        if num_seen[name] > MAX_EVENTS:
            continue
        step = event.get("step")
        yield {
            "event": name,
            "time": event["time"],
            "step": step if type(step) is int else None,
            "text": _words(event),
        }


def _words(event: Mapping[str, Any]) -> str:
    try:
        return WORDS[event["event"]].format_map(event)[:MAX_TEXT] or "preempted"
    except (KeyError, TypeError, ValueError):
        shown_apart = ("event", "time", "step")
        texts = [f"{key} {_brief(value)}" for key, value in event.items() if key not in shown_apart]
        return ", ".join(texts)


def _brief(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _spans(events: Sequence[Mapping[str, Any]], last_write: float) -> list[dict[str, Any]]:
    """Returns the times in which the run trained, or recovered from a failure: kind, start, end.

    A span without an end, of a run that was killed or still runs, lasts until the last event; the
    latest one until `last_write`, when a row was written.
    """
    spans: list[dict[str, Any]] = []
    kind = None  # of the span that is open; None between spans
    for event in events:
        name, time = event["event"], event["time"]
        # A recovery lasts until the first step, and so over the start of the new attempt.
        is_new_start = name == "start" and kind != "recovery"
        if kind and not is_new_start:
            spans[-1]["end"] = time
        previous = kind
        if name in ("end", "preempted", "goodput"):
            kind = None
        elif name == "restart":
            kind = "recovery"
        elif name == "recovered" or is_new_start:
            kind = "training"
        if kind and (is_new_start or kind != previous):
            spans.append({"kind": kind, "start": time, "end": time})
    if kind:
        spans[-1]["end"] = max(spans[-1]["end"], last_write)
    return spans


def _seconds(events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the seconds by kind, and the counts of restarts and lost steps.

    The supervisors' accounts count all attempts; without a supervisor, those of the processes that
    ended do.
    """
    accounts = [event for event in events if event["event"] == "goodput"]
    restarts: dict[str, Any] = {"supervised": bool(accounts)}
    if accounts:
        for name in ("restarts", "lost_steps"):
            counts = [account[name] for account in accounts if type(account.get(name)) is int]
            restarts[name] = sum(counts)
    else:
        accounts = [event for event in events if event["event"] in ("end", "preempted")]
    seconds = []
    for account in accounts:
        by_kind = _dict(account.get("seconds"))
        seconds.append({kind: value for kind, value in by_kind.items() if is_number(value)})
    return sum_by_name(seconds), restarts


def _dict(value: Any) -> dict[str, Any]:
    """Returns a value of a file that may have been changed by hand, or {} if it is no dict."""
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> dict[str, str]:
    return {key: str(entry) for key, entry in _dict(value).items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


# ---- line charts ----

BUCKETS = 500  # a chart is about as many pixels wide, or twice as many
PER_BUCKET = 5


def decimate(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Downsamples a line chart and keeps the extremes; returns the indices of the points to draw.

    These are at most PER_BUCKET for each of `buckets` equal ranges of steps: the first, the last,
    the smallest and the largest, which draw the same line where a range is a column of pixels
    (M4: U. Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", PVLDB 7 (10),
    2014), and the first NaN, because a gap must not vanish. `steps` increase strictly; both arrays
    are (N,).
    """
    num_points = len(steps)
    if num_points <= PER_BUCKET * buckets:
        return np.arange(num_points)

    # Buckets without points drop out: the others are numbered 0, 1, ... in `bucket_of_point`.
    num_steps = steps[-1] - steps[0] + 1
    bucket = ((steps - steps[0]) * buckets // num_steps).astype(int)
    firsts = np.flatnonzero(np.diff(bucket, prepend=-1))
    lengths = np.diff(firsts, append=num_points)
    lasts = firsts + lengths - 1
    bucket_of_point = np.repeat(np.arange(len(firsts)), lengths)

    def first_where(mask: np.ndarray) -> np.ndarray:
        """Returns the index of the first point of each bucket for which `mask` is true."""
        indices = np.flatnonzero(mask)
        _, first_of_bucket = np.unique(bucket_of_point[indices], return_index=True)
        return indices[first_of_bucket]

    is_nan = np.isnan(values)
    low = np.where(is_nan, np.inf, values)
    high = np.where(is_nan, -np.inf, values)
    smallest = first_where(low == np.minimum.reduceat(low, firsts)[bucket_of_point])
    largest = first_where(high == np.maximum.reduceat(high, firsts)[bucket_of_point])
    gaps = first_where(is_nan)
    return np.unique(np.concatenate([firsts, lasts, smallest, largest, gaps]))


# ---- verdicts: audits and certificates ----

# Where they are found in a workdir.
PLACES = ("audit.json", "verify.json", "certificate/verify.json")
MAX_LINES = 100  # of each list


def find_verdicts(workdirs: Sequence[Path], given: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the verdicts in the workdirs, and those of the given files.

    Raises ConfigError if a given file is neither; such a file in a workdir is left out.
    """
    in_workdirs = [verdict_of(workdir / name) for workdir in workdirs for name in PLACES]
    verdicts = [verdict for verdict in in_workdirs if verdict]
    for path in given:
        verdict = verdict_of(path)
        if verdict is None:
            fault = "neither the JSON of `meshtrain audit --output` nor a verify.json"
            raise ConfigError(f"--verdict={path}: {fault}; give one of them")
        verdicts.append(verdict)
    return verdicts


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
    """Returns what the page shows of a verify.json."""
    results = record["results"]
    faults = [f"one device: {fault}" for fault in record.get("broken_laws", ())]
    for result in results:
        if result.get("fault"):
            faults.append(f"{_layout(result['row'])}: {result['fault']}")

    # The tolerance is that of float64: narrower dtypes have rounding errors of their own.
    largest: dict[str, float | None] = {}
    for result in results:
        is_exact = result["row"].get("dtype", "float64") == "float64"
        for kind, value in result["differences"].items():
            largest.setdefault(kind, None)
            if is_exact and value is not None:
                before = largest[kind]
                largest[kind] = value if before is None else max(before, value)
    return {
        "kind": "certificate",
        "ok": record["passed"] is True,
        "subject": str(record.get("subject")),
        "num_layouts": len(results),
        "tolerance": record.get("tolerance"),
        "largest": largest,
        "lines": faults[:MAX_LINES],
        "not_covered": [str(line) for line in record.get("not_covered", ())][:MAX_LINES],
        "versions": {key: str(value) for key, value in record.get("versions", {}).items()},
    }


def _layout(row: dict[str, Any]) -> str:
    """Returns the settings of a layout that are not off."""
    off = (None, False, 0, 1)
    return " · ".join(f"{key} {value}" for key, value in row.items() if value not in off)


def _audit(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what the page shows of an audit."""
    memory = record.get("memory") or None
    fits = True
    if memory and memory.get("capacity"):
        fits = memory["peak"] <= memory["capacity"]
    roofline = record.get("roofline") or {}
    rows = [[row["name"], row["ceiling_seconds"]] for row in roofline.get("rows", ())]
    for transfer in roofline.get("transfers", ()):
        rows.append([f"{transfer['name']} (exposed)", transfer["exposed"]])
    return {
        "kind": "audit",
        "ok": not record["warnings"] and fits,
        "subject": f"{record.get('device')}, {record.get('platform')}",
        "lines": [str(line) for line in record["warnings"]][:MAX_LINES],
        "axes": [[total["name"], total["bytes"], total["minimum"]] for total in record["axes"]],
        "memory": memory,
        "fits": fits,
        "seconds": roofline.get("seconds"),
        "mfu": roofline.get("mfu"),
        "rows": rows,
    }
