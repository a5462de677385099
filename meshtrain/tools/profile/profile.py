"""Traces some train steps of a config and summarizes where the time goes."""

import contextlib
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshtrain.cluster import distributed
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import assemble
from meshtrain.state import TrainState
from meshtrain.tools.hlo.labels import Label, Labels
from meshtrain.tools.plan import auto
from meshtrain.tools.profile import trace


@dataclass(frozen=True)
class Usage:
    """How a device, or one of its streams, spends the time, as fractions of it."""

    name: str
    busy: float
    collective: float
    exposed: float  # collectives that overlap with no other operation


@dataclass(frozen=True)
class Row:
    """All operations of one kind, pass and source line; numbers per step and device."""

    kind: str
    phase: str
    source: str
    name: str  # of the costliest operation
    num_names: int
    calls: float
    seconds: float  # own time, without nested operations


@dataclass(frozen=True)
class Timing:
    """Seconds per step."""

    traced: float
    untraced: float | None  # steps between step 0 and the traced steps; None: there are none
    waited: float  # for data, included in `traced`


@dataclass(frozen=True)
class Profile:
    steps: range
    timing: Timing
    devices: list[Usage]
    streams: dict[str, list[Usage]]  # by device, if it has streams
    rows: list[Row]  # costliest first
    file: Path


def profile(
    config: Mapping[str, Any],
    *,
    steps: range,
    output: Path,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
) -> Profile:
    """Traces `steps` (1 or later: step 0 warms up) of what `train` would run with these arguments.

    Raises ConfigError if the folder cannot be written to, or if the trace has no operation of this
    process's devices.
    """
    with distributed.raise_on_all_processes():
        config, _ = auto.resolve(config, model=model)
        cfg = parse(config, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        program = assemble(cfg, parts)
        folder = _trace_folder(output)
    size = cfg.train.global_batch
    source = parts.train_data
    source = source if isinstance(source, Source) else from_iterable(source, global_batch=size)
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    with program.active(), contextlib.closing(loader):
        train_step = program.compile(loader.peek())
        distributed.barrier("compiled")
        runner = _StepRunner(train_step, loader, program.start(cfg.train.seed))
        runner.run_steps(range(1))  # warms up
        untraced = runner.run_steps(range(1, steps.start))[0] if steps.start > 1 else None
        with _tracing(folder) as files:
            traced, waited = runner.run_steps(steps)
    operations = [one for file in files for one in trace.read(file)]
    with distributed.raise_on_all_processes():
        if not operations:
            raise ConfigError(
                f"--output={output}: the trace has no operation of this process's devices; tracing a GPU "
                f"needs CUPTI, and the driver's permission (NVreg_RestrictProfilingToAdminUsers=0)"
            )
    labels = Labels(train_step.as_text())
    labelled = [(one, labels.label_of(one.path, one.name)) for one in operations]
    timing = Timing(traced, untraced, waited)
    devices, streams = _usages(labelled, traced * len(steps))
    rows = _rows(labelled, len(steps) * len(devices))
    return Profile(steps, timing, devices, streams, rows, files[0])


@dataclass
class _StepRunner:
    train_step: jax.stages.Compiled
    loader: Loader
    state: TrainState

    def run_steps(self, steps: range) -> tuple[float, float]:
        """Runs these steps like the trainer; returns seconds per step, and seconds of waiting for data."""
        start, waited, previous = time.perf_counter(), 0.0, None
        for step in steps:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                wait_start = time.perf_counter()
                batch = next(self.loader)
                waited += time.perf_counter() - wait_start
                self.state, metrics = self.train_step(self.state, batch)
                jax.block_until_ready(previous)  # one step late
                previous = metrics
        jax.block_until_ready((self.state, previous))
        return (time.perf_counter() - start) / len(steps), waited / len(steps)


@contextlib.contextmanager
def _tracing(folder: Path) -> Iterator[list[Path]]:
    """Traces the code inside `with`; afterwards the list holds the new trace files."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it slows the steps down
    before, files = {*folder.rglob("*.xplane.pb")}, []
    with jax.profiler.trace(folder, profiler_options=options):
        yield files
    files += {*folder.rglob("*.xplane.pb")} - before


def _trace_folder(output: Path) -> Path:
    """Creates and returns the folder for this process's trace."""
    has_peers = distributed.num_processes() > 1
    folder = output / f"rank-{distributed.process_id()}" if has_peers else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"--output={output}: {error.strerror}; use a folder that can be written"
        ) from error


Labelled = list[tuple[trace.Operation, Label]]


def _usages(labelled: Labelled, seconds: float) -> tuple[list[Usage], dict[str, list[Usage]]]:
    """Returns the usage of each device during `seconds`, and of each stream by device."""
    of_device, of_line = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for one, label in labelled:
        of_device[one.device].append((one, label))
        if one.line.startswith("Stream"):
            of_line[one.device][one.line].append((one, label))
    devices = [_usage(name, of_device[name], seconds) for name in sorted(of_device, key=_by_number)]
    streams = {
        device: [_usage(name, lines[name], seconds) for name in sorted(lines, key=_by_number)]
        for device, lines in of_line.items()
    }
    return devices, streams


def _usage(name: str, labelled: Labelled, seconds: float) -> Usage:
    collective = [part for one, label in labelled if label.is_collective for part in one.own]
    other = [part for one, label in labelled if not label.is_collective for part in one.own]
    busy = trace.covered_seconds(collective + other)
    exposed = max(0.0, busy - trace.covered_seconds(other))
    in_collectives = trace.covered_seconds(collective)
    return Usage(name, busy / seconds, in_collectives / seconds, exposed / seconds)


def _by_number(name: str) -> list[Any]:
    """Returns a sort key that puts "CPU 2" before "CPU 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _rows(labelled: Labelled, num_device_steps: int) -> list[Row]:
    groups = defaultdict(list)
    for one, label in labelled:
        groups[label[:3]].append((one, label))
    rows = []
    for key, group in groups.items():
        by_name = defaultdict(float)
        for one, label in group:
            by_name[label.name] += one.seconds
        costliest = max(by_name, key=by_name.get)
        seconds = sum(by_name.values()) / num_device_steps
        rows.append(Row(*key, costliest, len(by_name), len(group) / num_device_steps, seconds))
    return sorted(rows, key=lambda row: -row.seconds)
