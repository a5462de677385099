"""Compiles the step of a config and says what its collectives move, beside the least that they could.

  python -m meshtrain.audit --config=configs/quickstart.py --simulate_devices=8 --config.mesh.data=8

Nothing is trained, and the token file is not read. Every key can be set, as for training.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import cli, sharding
from meshtrain import state as states
from meshtrain.audit import collectives, explain, hlo, layout, minimum, report, warn
from meshtrain.audit.ledger import Explained
from meshtrain.audit.minimum import Need
from meshtrain.config import Config, parse
from meshtrain.data.loader import from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import Program, assemble


@dataclass(frozen=True)
class Total:
    """What one axis, or several together, carry per device and step."""

    name: str
    bytes: float
    minimum: float | None  # None where it is not known

    @property
    def ratio(self) -> float | None:
        return self.bytes / self.minimum if self.minimum else None


@dataclass(frozen=True)
class Audit:
    mesh: dict[str, int]
    device: str
    platform: str
    axes: list[Total]
    explained: list[Explained]
    excess: list[tuple[str, str, str, float]]  # axes, label, reason, bytes
    unused: list[tuple[str, str, float]]  # axes, role, bytes of the minimum that do not move
    memory: dict[str, int]  # bytes per device
    warnings: list[str]

    def total(self, *axes: str) -> Total:
        """Returns what these axes carry together."""
        name = warn.name_of(axes)
        return next((total for total in self.axes if total.name == name), Total(name, 0, 0))

    def moved(self, label: str, *axes: str) -> float:
        """Returns the bytes that these axes carry for one purpose."""
        of = [one.collective for one in self.explained if one.label == label]
        return sum(c.bytes for c in of if c.axes == axes)


def audit(
    config: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    devices: list[jax.Device] | None = None,
) -> Audit:
    """Compiles the step that `train` would run, with the same arguments, and reads what it moves.

    Other `devices` than all of them may be a topology's (`jax.experimental.topologies`).
    """
    devices = devices or jax.devices()
    brought = [name for name, part in (("model", model), ("data", data)) if part is not None]
    cfg = parse(config, num_devices=len(devices), own=brought)
    program = assemble(cfg, model or cfg.model, devices)
    batch = _batch_like(cfg, program, data if data is not None else cfg.train_data)
    with program.active():
        compiled = program.compile(batch)
        plan = layout.plan(cfg, program, batch)
    least = minimum.needs(plan)
    device = program.mesh.devices.flat[0]
    found = collectives.find(hlo.parse(compiled.as_text()), plan.mesh, device.platform)
    explained, left = explain.explain(plan, least, found)
    unknown = () if plan.is_stack else plan.model_axes
    return Audit(
        mesh=plan.mesh,
        device=f"{program.mesh.size} {device.device_kind}",
        platform=f"{device.platform} by jax {jax.__version__}",
        axes=_totals(least, explained, unknown),
        explained=explained,
        excess=_excess(explained),
        unused=_unused(left),
        memory=_memory(program, compiled),
        warnings=warn.warnings(plan, cfg.rules, program.abstract_state, explained),
    )


def _batch_like(cfg: Config, program: Program, data: Any) -> Any:
    """Returns the shapes of a global batch, and where the loader puts them."""
    size = cfg.train.global_batch
    source = data if isinstance(data, Source) else from_iterable(data, global_batch=size)
    spec = sharding.spec_for(("batch",), (size,), cfg.rules, program.mesh.shape)
    place = jax.sharding.NamedSharding(program.mesh, spec)

    def like(leaf):
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=place)

    return jax.tree.map(like, source.read(np.arange(size)))


def _totals(least: list[Need], explained: list[Explained], unknown: Iterable[str]) -> list[Total]:
    moved: dict[str, float] = defaultdict(float)
    needed: dict[str, float] = defaultdict(float)
    for one in explained:
        moved[warn.name_of(one.collective.axes)] += one.collective.bytes
    for need in least:
        needed[warn.name_of(need.axes)] += need.bytes
    names = sorted({*moved, *needed})
    return [
        Total(n, moved[n], None if {*n.split(" x ")} & {*unknown} else needed[n]) for n in names
    ]


def _excess(explained: list[Explained]) -> list[tuple[str, str, str, float]]:
    merged: dict[tuple[str, str, str], float] = defaultdict(float)
    for one in explained:
        if one.excess > 0.5:
            merged[warn.name_of(one.collective.axes), one.label, one.reason] += one.excess
    return [(*key, moved) for key, moved in sorted(merged.items(), key=lambda item: -item[1])]


def _unused(left: list[tuple[Need, float]]) -> list[tuple[str, str, float]]:
    merged: dict[tuple[str, str], float] = defaultdict(float)
    for need, bytes in left:
        merged[warn.name_of(need.axes), need.role] += bytes
    return [(*key, bytes) for key, bytes in merged.items() if bytes > 0.5]


def _memory(program: Program, compiled: jax.stages.Compiled) -> dict[str, int]:
    state = program.abstract_state
    memory = {
        "parameters": states.bytes_per_device(state.params),
        "optimizer state": states.bytes_per_device(state.opt_state),
    }
    if analysis := compiled.memory_analysis():
        memory["arguments: both, step and batch"] = analysis.argument_size_in_bytes
        memory["results"] = analysis.output_size_in_bytes
        memory["results in the place of arguments"] = analysis.alias_size_in_bytes
        memory["temporary"] = analysis.temp_size_in_bytes
    return memory


def _without_token_file(config: Any) -> None:
    """Shapes are all that matters: made-up tokens do, and need no file."""
    if config.get("data", {}).get("build") == "meshtrain.data.tokens:build":
        config.data.build = "meshtrain.data.synthetic:build"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    flags = cli.parser("audit", __doc__)
    flags.add_argument("--output", type=Path, metavar="FILE", help="writes all of it as JSON")

    def run() -> int:
        args, config = cli.settings(flags, argv, _without_token_file)
        with _writer(args.output) as write:
            result = audit(config)
            print(*report.lines(result), sep="\n")
            write(json.dumps(_raw(result), indent=1) + "\n")
        return 0

    return cli.told(run)


@contextlib.contextmanager
def _writer(path: Path | None) -> Iterator[Callable[[str], Any]]:
    """Opens the file before anything is compiled, which takes long."""
    if path is None:
        yield lambda text: None
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"--output={path}: {error.strerror}; use a file that can be written"
        ) from error
    with file:
        yield file.write


def _raw(result: Audit) -> dict:
    """Returns all of an audit as what JSON can hold."""
    raw = asdict(result)
    for total, entry in zip(result.axes, raw["axes"], strict=True):
        entry["ratio"] = total.ratio
    for one, entry in zip(result.explained, raw["explained"], strict=True):
        c = one.collective
        entry["collective"] |= {"bytes": c.bytes, "tensor_bytes": c.tensor_bytes, "phase": c.phase}
    return raw
