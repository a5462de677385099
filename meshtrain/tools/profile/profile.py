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
from meshtrain.config.schema import Config
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.monitor import capacity
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
    config: Config | Mapping[str, Any],
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
        cfg = auto.resolve(parse(config), model=model)
        if data is not None:
            cfg = cfg.of_own_data()
        parts = build(cfg, model=model, data=data)
        program = assemble(cfg, parts)
        capacity.check_fits(cfg, parts.model, program.abstract_state)
        folder = _trace_folder(output)
    size = cfg.train.global_batch
    source = parts.train_data
    if not isinstance(source, Source):
        source = from_iterable(source, global_batch=size)
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    with program.active(), contextlib.closing(loader):
        train_step = program.compile(loader.peek())
        distributed.barrier("compiled")
        runner = _StepRunner(train_step, loader, program.initial_state(cfg.train.seed))
        # Step 0 warms up; the steps until the traced ones show what the trace costs.
        runner.run_steps(range(1))
        untraced = None
        if steps.start > 1:
            untraced, _ = runner.run_steps(range(1, steps.start))
        with _tracing(folder) as files:
            traced, waited = runner.run_steps(steps)
    operations = [operation for file in files for operation in trace.read(file)]
    with distributed.raise_on_all_processes():
        if not operations:
            raise ConfigError(
                f"--output={output}: the trace has no operation of this process's devices; tracing "
                f"a GPU needs CUPTI, and the driver's permission "
                f"(NVreg_RestrictProfilingToAdminUsers=0)"
            )
    labels = Labels(train_step.as_text())
    labelled = [
        (operation, labels.label_of(operation.path, operation.name)) for operation in operations
    ]
    devices, streams = _usages(labelled, traced * len(steps))
    return Profile(
        steps=steps,
        timing=Timing(traced, untraced, waited),
        devices=devices,
        streams=streams,
        rows=_rows(labelled, len(steps) * len(devices)),
        file=files[0],
    )


@dataclass
class _StepRunner:
    """What the trainer's loop does, without saving and logging."""

    train_step: jax.stages.Compiled
    loader: Loader
    state: TrainState

    def run_steps(self, steps: range) -> tuple[float, float]:
        """Runs these steps; returns seconds per step, and seconds of them that waited for data."""
        start, waited, previous = time.perf_counter(), 0.0, None
        for step in steps:
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                wait_start = time.perf_counter()
                batch = next(self.loader)
                waited += time.perf_counter() - wait_start
                self.state, metrics = self.train_step(self.state, batch)
                # One step late, so that the device always has a step to run.
                jax.block_until_ready(previous)
                previous = metrics
        jax.block_until_ready((self.state, previous))
        return (time.perf_counter() - start) / len(steps), waited / len(steps)


@contextlib.contextmanager
def _tracing(folder: Path) -> Iterator[list[Path]]:
    """Traces the code inside `with`; afterwards the list holds the new trace files."""
    options = jax.profiler.ProfileOptions()
    # Python's tracer slows the steps down.
    options.python_tracer_level = 0
    files: list[Path] = []
    files_before = {*folder.rglob("*.xplane.pb")}
    with jax.profiler.trace(folder, profiler_options=options):
        yield files
    files += {*folder.rglob("*.xplane.pb")} - files_before


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
    by_device: dict[str, Labelled] = defaultdict(list)
    by_stream: dict[str, dict[str, Labelled]] = defaultdict(lambda: defaultdict(list))
    for operation, label in labelled:
        by_device[operation.device].append((operation, label))
        if operation.line.startswith("Stream"):
            by_stream[operation.device][operation.line].append((operation, label))
    streams = {device: _usages_by_name(lines, seconds) for device, lines in by_stream.items()}
    return _usages_by_name(by_device, seconds), streams


def _usages_by_name(groups: Mapping[str, Labelled], seconds: float) -> list[Usage]:
    return [_usage(name, groups[name], seconds) for name in sorted(groups, key=_by_number)]


def _usage(name: str, labelled: Labelled, seconds: float) -> Usage:
    collective, other = [], []
    for operation, label in labelled:
        intervals = collective if label.is_collective else other
        intervals += operation.own
    busy = trace.covered_seconds(collective + other)
    exposed = max(0.0, busy - trace.covered_seconds(other))
    return Usage(
        name=name,
        busy=busy / seconds,
        collective=trace.covered_seconds(collective) / seconds,
        exposed=exposed / seconds,
    )


def _by_number(name: str) -> list[Any]:
    """Returns a sort key that puts "CPU 2" before "CPU 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _rows(labelled: Labelled, num_device_steps: int) -> list[Row]:
    """Returns the operations by kind, pass and source line, the costliest first."""
    groups: dict[tuple[str, str, str], Labelled] = defaultdict(list)
    for operation, label in labelled:
        groups[label.kind, label.phase, label.source].append((operation, label))
    rows = []
    for (kind, phase, source), group in groups.items():
        seconds_by_name: dict[str, float] = defaultdict(float)
        for operation, label in group:
            seconds_by_name[label.name] += operation.seconds
        row = Row(
            kind=kind,
            phase=phase,
            source=source,
            name=max(seconds_by_name, key=seconds_by_name.get),
            num_names=len(seconds_by_name),
            calls=len(group) / num_device_steps,
            seconds=sum(seconds_by_name.values()) / num_device_steps,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.seconds)
