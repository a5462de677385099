"""Short runs of `train` with skipped steps, a loss spike and evaluations: undisturbed and interrupted.

The interrupted runs crash and resume, then stop and resume: on the same mesh, and on another in between.
"""

import contextlib
import copy
import dataclasses
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import FOLDER, manifest
from meshtrain.cluster import progress
from meshtrain.config import checks
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.configs import default
from meshtrain.data.source import Source
from meshtrain.metrics import Metrics, weighted
from meshtrain.models.base import Model
from meshtrain.train import Result, train
from meshtrain.verify import certificate

STEPS, WARMUP_STEPS, NUM_LAYERS = 64, 8, 2
EVAL_EVERY, EVAL_BATCHES, SAVE_EVERY = 20, 3, 28
CRASH = 56  # step of the checkpoint from which a run resumes after a crash just after its rollback
EARLY_CRASH = 28  # the same, of a crash before the loss spike
SPIKE = CRASH  # batch with a loss spike: found after the next step, and rolled back to step CRASH
STOP = 61  # step at which a run stops, because it was asked to in the evaluation before
SKIPPED = (10, 55, 59, 62)  # batches whose loss is not finite; after the rollback two batches later
NO_VALUE = -1.0  # in Run.rows
TIMES = ("step_time", "data_wait", "tokens_per_second", "mfu")  # columns of metrics.jsonl


class Run(NamedTuple):
    """A finished run."""

    rows: dict[str, np.ndarray]  # column of metrics.jsonl -> (steps,)
    events: list[dict[str, Any]]  # skips, spikes and rollbacks from step CRASH on
    saved: manifest.Manifest  # of the last checkpoint
    result: Result


class Setup(NamedTuple):
    """What the runs of a subject have in common."""

    raw: dict[str, Any]
    model: Model
    source: Source  # of batches for `_with_events`
    meshes: tuple[dict[str, int], dict[str, int]]  # axis sizes and num_microbatches
    zero_gradients: list[str]  # see `certificate.compare`

    @property
    def global_batch(self) -> int:
        return self.raw["train"]["global_batch"]


def setup_of(subject: Any) -> Setup:
    """Returns the settings, model and data of a subject's runs."""
    raw, own = copy.deepcopy(subject.raw), default_settings()
    raw["train"].update(steps=STEPS, log_every=1)
    raw["optim"].update(schedule="cosine", warmup_steps=WARMUP_STEPS, final_fraction=0.1)
    raw["optim"].update(clip_norm=subject.clip_norm)
    raw["eval"].update(every=EVAL_EVERY, batches=EVAL_BATCHES)
    raw["checkpoint"] = own["checkpoint"] | {"every": SAVE_EVERY, "keep": STEPS}
    raw["divergence"] = own["divergence"] | {"rollback": True}
    raw["health"]["every"] = 0  # `run_laws.replicas` checks it
    model = subject.model
    if subject.name == raw["model"]["build"]:
        small = {"num_layers": NUM_LAYERS, "first_dense_layers": 0, "z_loss": 1e-3}
        raw["model"].update({key: n for key, n in small.items() if key in raw["model"]})
        model = build_model(parse(raw))
    masks = subject.is_text
    grads = subject.steps(packing=False, masks=masks, dropout=subject.model.row_keys)[0].grads
    samples, _ = subject.batches(packing=False, masks=masks)
    source = _numbered(samples, raw["train"]["global_batch"])
    zero = certificate.zero_gradient_names(grads)
    return Setup(raw, model, source, _meshes(raw, model), zero)


def _meshes(raw: dict[str, Any], model: Model) -> tuple[dict[str, int], dict[str, int]]:
    """Returns a mesh with data and fsdp, and one with pipeline, tensor and fsdp as far as possible."""
    num_devices = jax.device_count()
    half = 2 if num_devices % 2 == 0 else 1
    pipeline = half if model.block else 1
    tensor = 2 if num_devices % (2 * pipeline) == 0 else 1
    tensor = 1 if checks.tensor_faults(raw["model"], tensor) else tensor
    fsdp = num_devices // pipeline // tensor
    second = {"pipeline": pipeline, "tensor": tensor, "fsdp": fsdp, "num_microbatches": 4}
    return {"data": num_devices // half, "fsdp": half, "num_microbatches": 2}, second


def all_runs(setup: Setup) -> dict[str, Run]:
    """Returns the undisturbed run and the interrupted runs, by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        original = Path(folder, "undisturbed")
        runs = {"undisturbed": _run(setup, original)}
        crashes = {"resumed": CRASH, "resumed on another mesh": EARLY_CRASH}
        for (name, crash), mesh in zip(crashes.items(), setup.meshes, strict=True):
            workdir = Path(folder, name)
            # What is left after a crash before the next save.
            shutil.copytree(original / FOLDER / str(crash), workdir / FOLDER / str(crash))
            shutil.copy(original / "metrics.jsonl", workdir)
            if crash == CRASH:
                lines = (original / "events.jsonl").read_text().splitlines(keepends=True)
                last = max((n for n, line in enumerate(lines) if '"rollback"' in line), default=-1)
                (workdir / "events.jsonl").write_text("".join(lines[: last + 1]))
            step = _train(setup, mesh, workdir, stop=True).step
            assert step == STOP, f"asked to stop at step {STOP}, the run stopped at step {step}"
            runs[name] = _run(setup, workdir)
    return runs


def _run(setup: Setup, workdir: Path) -> Run:
    """Trains to the last step on the first mesh."""
    result = _train(setup, setup.meshes[0], workdir)
    lines, events = (
        [json.loads(line) for line in (workdir / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    rows = {
        name: np.array([NO_VALUE if (x := row.get(name)) is None else x for row in lines], float)
        for name in sorted({name for row in lines for name in row} - {*TIMES})
    }
    kept = ("skip", "spike", "rollback")
    events = [one for one in events if one["event"] in kept and one["step"] >= CRASH]
    saved = manifest.read(workdir / FOLDER / str(result.step))
    return Run(rows, events, saved, result._replace(state=jax.device_get(result.state)))


def _train(setup: Setup, mesh: dict[str, int], workdir: Path, *, stop: bool = False) -> Result:
    """Trains on a mesh; with `stop`, asks the run to stop during the evaluation before step STOP."""
    raw = copy.deepcopy(setup.raw)
    raw["train"]["num_microbatches"] = mesh["num_microbatches"]
    raw["mesh"] = {axis: mesh.get(axis, 1) for axis in AXES}
    raw["pipeline"].update(schedule="1f1b", num_chunks=1)
    page = progress.ProgressPage.create(path := workdir.parent / "page")

    def read(indices: np.ndarray) -> Any:
        if stop and page["current_step"] == STOP - 2:
            page["stop_requested"] = 1  # as the supervisor does
        return setup.source.read(indices)

    os.environ[progress.VARIABLE] = str(path)
    try:
        data = {"data": setup.source, "eval_data": Source(read)}
        result = train(raw, workdir=workdir, model=_with_events(setup.model), **data)
    finally:
        del os.environ[progress.VARIABLE]
    if result.interrupted and not stop:  # by a signal, which `train` has received
        raise KeyboardInterrupt
    return result


def _numbered(samples: Any, global_batch: int) -> Source:
    """Returns a source without end; "batch" is the number of the batch that a sample belongs to."""
    num = len(jax.tree.leaves(samples)[0])

    # float64 is enabled in the main thread only, not in the loader's.
    samples = jax.tree.map(
        lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf, samples
    )

    def read(indices: np.ndarray) -> Any:
        rows = jax.tree.map(lambda leaf: leaf[indices % num], samples)
        return {"samples": rows, "batch": (indices // global_batch).astype(np.float32)}

    return Source(read)


def _with_events(model: Model) -> Model:
    """Returns the model for batches of `_numbered`; its loss has another factor in each batch."""

    def change(metrics: Metrics, batch: Any) -> Metrics:
        number = batch["batch"].mean().astype(metrics.loss.dtype)
        factor = jnp.where(number == SPIKE, 1000, factor_of(number))
        factor = jnp.where(jnp.isin(number, jnp.array(SKIPPED)), jnp.nan, factor)
        extra = {"cross_entropy": cross_entropy(metrics), "model_loss": metrics.loss}
        extra |= {"batch": number * metrics.weight}
        return Metrics(metrics.loss * factor, metrics.weight, {**metrics.extra, **extra})

    if model.block is None:
        loss = model.loss
        return dataclasses.replace(
            model, loss=lambda params, b, key: change(loss(params, b["samples"], key), b)
        )
    return dataclasses.replace(
        model,
        embed=lambda params, batch: model.embed(params, batch["samples"]),
        block=lambda layer, x, batch: model.block(layer, x, batch["samples"]),
        head=lambda params, x, batch: change(model.head(params, x, batch["samples"]), batch),
    )


def factor_of(number: Any) -> Any:
    """Returns the factor of the loss in an ordinary batch."""
    return 1 + number / STEPS


def cross_entropy(metrics: Metrics) -> jax.Array:
    """Returns the loss without z-loss."""
    return metrics.extra.get("cross_entropy", metrics.loss)


def default_settings() -> dict[str, Any]:
    return default.get_config().copy_and_resolve_references().to_dict()


def fit(
    folder: str, values: list[float], sections: dict[str, dict], *, replicas_differ: bool = False
) -> Exception | None:
    """Trains a linear model on batches of these values, after which the data fails; returns the error."""
    raw, size = default_settings(), jax.device_count()
    raw["train"].update(steps=20, global_batch=size)
    for name, section in sections.items():
        raw[name].update(section)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        def of_device():
            return jnp.ones(4) + replicas_differ * jax.lax.axis_index("data")

        # Unchecked: jax would reject replicas that differ.
        return {
            "kernel": jax.shard_map(of_device, in_specs=(), out_specs=jax.P(), check_vma=False)()
        }

    def loss(params, batch, key):
        return weighted((batch @ params["kernel"] - 1) ** 2)

    source = Source(lambda indices: np.full((len(indices), 4), values[indices[0] // size], "f"))
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            train(raw, workdir=folder, model=Model(init, {"kernel": (None,)}, loss), data=source)
        except Exception as error:  # noqa: BLE001  a law judges it
            return error
    return None
