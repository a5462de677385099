"""Compiles the best layouts ahead of time, each in a process of its own: XLA can end a process."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import meshtrain
from meshtrain.config import load
from meshtrain.tools.plan.search import Plan, settings
from meshtrain.tools.plan.subject import PlanInput

SECONDS = 300  # for a layout


def compile_best(
    plan: Plan, target: str, subject: PlanInput, *, limit: float, most: int, log: Callable
) -> Plan:
    """Returns the plan with the compiled memory of its first `most` layouts, and without those that do not fit.

    `target` names the devices, as `audit --target`.
    """
    found, rejected = [], list(plan.rejected)
    for number, one in enumerate(plan.found[:most], 1):
        audit, fault = audited(settings(subject, one.layout), target)
        if audit:
            size = audit["memory"]["peak"]
            one = replace(one, compiled_memory=size)
            if size > limit:
                fault = f"compiled it needs {(size - limit) / 1e9:.1f} GB too much"
        log(f"compiled {number} of {most}: {fault or f'{size / 1e9:.1f} GB'}")
        rejected += [(one, fault)] if fault else []
        found += [] if fault else [one]
    # A layout that was not compiled may need more than predicted, so those that were come first.
    return Plan(found + plan.found[most:], rejected, plan.num_tried)


def audited(config: Mapping[str, Any], target: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the audit of the compiled step of a config, or None and why there is none.

    Audits are kept in ~/.cache/meshtrain, or in XDG_CACHE_HOME, unless a `build` key names code outside meshtrain,
    which may change.
    """
    file = _cache_file(config, target)
    if file:
        with contextlib.suppress(OSError, ValueError, TypeError):  # none, or damaged
            if "memory" in (audit := json.loads(file.read_text())):
                return audit, ""
    audit, fault = _audit(config, target)
    if audit and file:
        part = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(audit))
            part.replace(file)
        except OSError:  # a home that cannot be written
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return audit, fault


def _cache_file(config: Mapping[str, Any], target: str) -> Path | None:
    """Returns the file for an audit by this compiler and this version of meshtrain; None if it is not kept."""
    builds = [section.get("build", "") for section in config.values() if isinstance(section, dict)]
    if not all(build == "" or build.startswith("meshtrain.") for build in builds):
        return None
    versions = [version(name) for name in ("jax", "jaxlib", "flax", "optax")]
    flags = {name: os.environ[name] for name in sorted(os.environ) if re.match("XLA_|JAX_", name)}
    digest = hashlib.sha256(json.dumps([config, target, versions, flags]).encode())
    package = Path(meshtrain.__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return (
        None
        if folder.parts[0] == "~"
        else folder / "meshtrain" / "audits" / f"{digest.hexdigest()[:32]}.json"
    )


def _audit(config: Mapping[str, Any], target: str) -> tuple[dict[str, Any] | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "config.json", Path(folder) / "audit.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "meshtrain", "audit", f"--config={file}", "--trust_code"]
        command += [f"--target={target}", f"--output={output}"]
        try:
            # The config is complete: variables would change it.
            environ = {
                k: v for k, v in os.environ.items() if not k.startswith(load.VARIABLE_PREFIX)
            }
            options = dict(capture_output=True, text=True, timeout=SECONDS, env=environ)
            run = subprocess.run(command, **options)
        except subprocess.TimeoutExpired:
            return None, f"not compiled in {SECONDS} s"
        if run.returncode:
            last = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
            return None, f"not compiled: {' '.join(last)[:200]}"
        audit = json.loads(output.read_text())
    return (audit, "") if audit["memory"] else (None, "the compiler reports no memory")
