"""Assembles the page: one HTML file with its style, scripts and data, which fetches nothing."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain.tools.report import facts
from meshtrain.tools.report.read import Run

PARTS = resources.files(__package__) / "page"

# uPlot 1.6.32 (MIT, page/uPlot.LICENSE), the two files of its npm package, unchanged: lines of 10^5
# points in milliseconds, in 51 kB, where chart libraries with their own scene graphs have hundreds.
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("uPlot.iife.min.js", "report.js")


def data_of(runs: Sequence[Run], given: Sequence[Path]) -> dict[str, Any]:
    """Returns everything that the page shows. `given` are files of audits and certificates."""
    for run in runs:
        run.update()
    newest_configs = []
    for run in runs:
        configs = run.configs()
        newest_configs.append(configs[-1] if configs else {})
    return {
        "meshtrain": meshtrain.__version__,
        "runs": [facts.facts_of(run) for run in runs],
        "differences": facts.differences(newest_configs),
        "verdicts": facts.find_verdicts([run.workdir for run in runs], given),
    }


def to_json(data: dict[str, Any]) -> str:
    """Returns JSON in ASCII without the characters that HTML reads, to be inside a script."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def html(data: dict[str, Any], *, live: bool) -> str:
    """Returns the page. With `live` it fetches data.json from its own server again and again."""
    styles = [_part(name) for name in STYLES]
    scripts = [_part(name) for name in SCRIPTS]
    policy = {
        "default-src": "'none'",
        "img-src": "data:",  # an empty icon, so that none is asked for
        "style-src": " ".join(map(_digest, styles)),
        "script-src": " ".join(map(_digest, scripts)),
        "connect-src": "'self'" if live else "'none'",
    }
    texts = {
        "policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "styles": "".join(f"<style>{text}</style>\n" for text in styles),
        "scripts": "".join(f"<script>{text}</script>\n" for text in scripts),
        "license": _part("uPlot.LICENSE"),
        "data": to_json(data),
        "live": "true" if live else "false",
    }
    # One pass: what is inserted is not searched.
    return re.sub(r"{{(\w+)}}", lambda match: texts[match[1]], _part("report.html"))


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns a source of a content security policy that allows exactly this text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
