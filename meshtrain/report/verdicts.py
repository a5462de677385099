"""The verdicts of `meshtrain audit --output` and `meshtrain verify` that a report shows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError
from meshtrain.report.read import read_json

# Where the two are found in a workdir.
PLACES = ("audit.json", "verify.json", "certificate/verify.json")
MAX_LINES = 100  # of each list


def find(workdirs: Sequence[Path], given: Sequence[Path]) -> list[dict[str, Any]]:
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
