"""Traces some steps of a config, and summarises where their time went."""

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

from meshtrain.analysis.profile import trace
from meshtrain.analysis.profile.label import Label, Labels
from meshtrain.cluster import distributed
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import assemble
from meshtrain.state import TrainState


@dataclass(frozen=True)
class Usage:
    """What a device, or one of its streams, did with the time; each a share of it."""

    name: str
    busy: float
    collective: float
    exposed: float  # collectives beside which nothing else ran


@dataclass(frozen=True)
class Row:
    """Operations of one kind, pass and line of source, per step and device."""

    kind: str
    phase: str
    source: str
    name: str  # of the one that costs most
    num_names: int
    calls: float
    seconds: float  # their own time


@dataclass(frozen=True)
class Timing:
    """Seconds a step."""

    traced: float
    untraced: float | None  # in the steps before, but the first; None: there was none
    waited: float  # for the data, of `traced`


@dataclass(frozen=True)
class Profile:
    steps: range
    timing: Timing
    devices: list[Usage]
    streams: dict[str, list[Usage]]  # of each device, where it has any
    rows: list[Row]  # the costliest first
    file: Path


def profile(
    config: Mapping[str, Any],
    *,
    steps: range,
    output: Path,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
) -> Profile:
    """Traces `steps` (the first being step 1 or later) of what `train` would run with the same arguments.

    Raises ConfigError where the trace cannot be written, or says nothing of this process's devices.
    """
    with distributed.raise_on_all_processes():
        cfg = parse(config, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        program = assemble(cfg, parts)
        folder = _writable(output)
    size = cfg.train.global_batch
    source = parts.train_data
    source = source if isinstance(source, Source) else from_iterable(source, global_batch=size)
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    with program.active(), contextlib.closing(loader):
        train_step = program.compile(loader.peek())
        distributed.barrier("compiled")
        run = _Run(train_step, loader, program.start(cfg.train.seed))
        run.take(range(1))  # warms up
        untraced = run.take(range(1, steps.start))[0] if steps.start > 1 else None
        with _traced(folder) as files:
            traced, waited = run.take(steps)
    operations = [one for file in files for one in trace.read(file)]
    with distributed.raise_on_all_processes():
        if not operations:
            raise ConfigError(
                f"--output={output}: the trace says nothing of this process's devices; what may trace a "
                f"GPU is for its driver to allow (NVreg_RestrictProfilingToAdminUsers), and it takes CUPTI"
            )
    labels = Labels(train_step.as_text())
    labelled = [(one, labels.of(one.path, one.name)) for one in operations]
    timing = Timing(traced, untraced, waited)
    devices, streams = _usages(labelled, traced * len(steps))
    rows = _rows(labelled, len(steps) * len(devices))
    return Profile(steps, timing, devices, streams, rows, files[0])


@dataclass
class _Run:
    train_step: jax.stages.Compiled
    loader: Loader
    state: TrainState

    def take(self, numbers: range) -> tuple[float, float]:
        """Takes these steps as the trainer does; returns seconds a step, and for how many of them it
        waited for the data."""
        began, waited, before = time.perf_counter(), 0.0, None
        for number in numbers:
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                asked = time.perf_counter()
                batch = next(self.loader)
                waited += time.perf_counter() - asked
                self.state, report = self.train_step(self.state, batch)
                jax.block_until_ready(before)  # one step late
                before = report
        jax.block_until_ready((self.state, before))
        return (time.perf_counter() - began) / len(numbers), waited / len(numbers)


@contextlib.contextmanager
def _traced(folder: Path) -> Iterator[list[Path]]:
    """Traces what runs within; afterwards the list holds the files that this has made."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow the steps down
    before, files = {*folder.rglob("*.xplane.pb")}, []
    with jax.profiler.trace(folder, profiler_options=options):
        yield files
    files += {*folder.rglob("*.xplane.pb")} - before


def _writable(output: Path) -> Path:
    """Returns the folder for this process's trace."""
    several = distributed.num_processes() > 1
    folder = output / f"rank-{distributed.process_id()}" if several else output
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
    """Returns what each device did in so many seconds, and each stream of those that have some."""
    of_device, of_line = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for one, label in labelled:
        of_device[one.device].append((one, label))
        if one.line.startswith("Stream"):
            of_line[one.device][one.line].append((one, label))
    devices = [_usage(name, of_device[name], seconds) for name in sorted(of_device, key=_natural)]
    streams = {
        device: [_usage(name, lines[name], seconds) for name in sorted(lines, key=_natural)]
        for device, lines in of_line.items()
    }
    return devices, streams


def _usage(name: str, labelled: Labelled, seconds: float) -> Usage:
    sent = [part for one, label in labelled if label.is_collective for part in one.own]
    other = [part for one, label in labelled if not label.is_collective for part in one.own]
    busy = trace.covered(sent + other)
    exposed = max(0.0, busy - trace.covered(other))
    return Usage(name, busy / seconds, trace.covered(sent) / seconds, exposed / seconds)


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _rows(labelled: Labelled, times: int) -> list[Row]:
    groups = defaultdict(list)
    for one, label in labelled:
        groups[label[:3]].append((one, label))
    rows = []
    for key, group in groups.items():
        by_name = defaultdict(float)
        for one, label in group:
            by_name[label.name] += one.seconds
        costliest = max(by_name, key=by_name.get)
        seconds = sum(by_name.values()) / times
        rows.append(Row(*key, costliest, len(by_name), len(group) / times, seconds))
    return sorted(rows, key=lambda row: -row.seconds)
