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
from meshtrain import foreign
from meshtrain.config import load
from meshtrain.config.schema import Config
from meshtrain.tools.plan.layout import with_layout
from meshtrain.tools.plan.search import Plan

SECONDS = 300  # for a layout


def compile_best(
    plan: Plan,
    target: str,
    cfg: Config,
    *,
    limit: float,
    most: int,
    log: Callable[[str], None],
) -> Plan:
    """Returns the plan with the compiled memory of its first `most` layouts.

    Those that do not fit become rejected ones. `target` names the devices, as `audit --target`.
    """
    fitting, rejected = [], list(plan.rejected)
    for number, candidate in enumerate(plan.candidates[:most], 1):
        audit, fault = audited(with_layout(cfg, candidate.layout).to_dict(), target)
        if audit:
            size = audit["memory"]["peak"]
            candidate = replace(candidate, compiled_memory=size)
            if size > limit:
                fault = f"compiled it needs {(size - limit) / 1e9:.1f} GB too much"
        if fault:
            log(f"compiled {number} of {most}: {fault}")
            rejected.append((candidate, fault))
        else:
            log(f"compiled {number} of {most}: {candidate.compiled_memory / 1e9:.1f} GB")
            fitting.append(candidate)
    # A layout that was not compiled may need more than predicted, so those that were come first.
    return Plan(fitting + plan.candidates[most:], rejected, plan.num_tried)


def audited(config: Mapping[str, Any], target: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the audit of the compiled step of a config, or None and why there is none.

    Audits are kept in ~/.cache/meshtrain, or in XDG_CACHE_HOME, unless a `build` key names code
    outside meshtrain, which may change.
    """
    file = _cache_file(config, target)
    if file:
        with contextlib.suppress(OSError, ValueError):  # none, or damaged
            audit = foreign.read_json(file)
            if "memory" in audit:
                return audit, ""
    audit, fault = _audit(config, target)
    if audit and file:
        part = file.with_suffix(f".{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(audit), encoding="utf-8")
            part.replace(file)
        except OSError:  # a home that cannot be written
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return audit, fault


def _cache_file(config: Mapping[str, Any], target: str) -> Path | None:
    """Returns the file for an audit by this compiler and this meshtrain; None if it is not kept."""
    builds = [section.get("build", "") for section in config.values() if isinstance(section, dict)]
    if not all(build == "" or build.startswith("meshtrain.") for build in builds):
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if folder.parts[0] == "~":  # no home
        return None
    versions = [version(name) for name in ("jax", "jaxlib", "flax", "optax")]
    flags = {name: os.environ[name] for name in sorted(os.environ) if re.match("XLA_|JAX_", name)}
    digest = hashlib.sha256(json.dumps([config, target, versions, flags]).encode())
    package = Path(meshtrain.__file__).parent
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    return folder / "meshtrain" / "audits" / f"{digest.hexdigest()[:32]}.json"


def _audit(config: Mapping[str, Any], target: str) -> tuple[dict[str, Any] | None, str]:
    """Runs `meshtrain audit`; returns what it wrote, or None and why there is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "config.json", Path(folder) / "audit.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "meshtrain", "audit"),
            f"--config={file}",
            "--trust_code",
            f"--target={target}",
            f"--output={output}",
        ]
        # The config is complete: variables would change it.
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(load.VARIABLE_PREFIX)
        }
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, env=environ
            )
        except subprocess.TimeoutExpired:
            return None, f"not compiled in {SECONDS} s"
        if run.returncode:
            last = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
            return None, f"not compiled: {' '.join(last)[:200]}"
        audit = foreign.read_json(output)
    if not audit["memory"]:
        return None, "the compiler reports no memory"
    return audit, ""
