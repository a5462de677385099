"""Compiles the best layouts ahead of time, each in a process of its own: XLA can end a process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshtrain.plan.search import Candidate, Plan, settings
from meshtrain.plan.subject import Subject

SECONDS = 300  # for a layout


def compile_best(
    plan: Plan, target: str, subject: Subject, *, limit: float, most: int, log: Callable
) -> Plan:
    """Returns the plan with the compiled memory of its first `most` layouts, and without those that do not fit.

    `target` names the devices, as `audit --target`.
    """
    found, rejected = [], list(plan.rejected)
    for number, one in enumerate(plan.found):
        if number >= most:
            found.append(one)
            continue
        size, fault = _compiled_memory(one, target, subject)
        log(f"compiled {number + 1} of {most}: {fault or f'{size / 1e9:.1f} GB'}")
        one = replace(one, compiled_memory=size)
        if size and size > limit:
            reason = f"compiled it needs {(size - limit) / 1e9:.1f} GB too much"
            rejected.append((one, reason))
        elif fault:
            rejected.append((one, fault))
        else:
            found.append(one)
    # A layout that was not compiled may need more than predicted, so those that were come first.
    found.sort(key=lambda one: one.compiled_memory is None)
    return Plan(found, rejected, plan.num_tried)


def _compiled_memory(one: Candidate, target: str, subject: Subject) -> tuple[float | None, str]:
    """Returns the bytes at the peak of the compiled step, or None and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        config, output = Path(folder) / "config.json", Path(folder) / "audit.json"
        config.write_text(json.dumps(settings(subject, one.layout)))
        command = [sys.executable, "-m", "meshtrain", "audit", f"--config={config}", "--trust_code"]
        command += [f"--target={target}", f"--output={output}"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"not compiled in {SECONDS} s"
        if run.returncode:
            last = (run.stderr.strip() or run.stdout.strip()).splitlines()[-1:]
            return None, f"not compiled: {' '.join(last)[:200]}"
        memory = json.loads(output.read_text())["memory"]
    return (memory["peak"], "") if memory else (None, "the compiler reports no memory")
