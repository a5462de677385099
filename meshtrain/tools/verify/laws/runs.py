"""Laws of a run of `train`: what surrounds a step is right, and the same after interruptions."""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import find, manifest
from meshtrain.checkpoint.find import FOLDER
from meshtrain.cluster import progress
from meshtrain.config import checks
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.configs import default
from meshtrain.data import tokens
from meshtrain.data.source import Source, Timeline
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics, weighted
from meshtrain.models.base import Model
from meshtrain.monitor import health
from meshtrain.optim import base as optim
from meshtrain.state import TrainState, evaluation_params
from meshtrain.tools.verify import case as cases
from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.certificate import Trees
from meshtrain.tools.verify.reference import optimizers as reference_optimizers
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import Result, train

TOLERANCE = 1e-10  # between meshes; on the same mesh all values are bit-equal


def laws(case: VerifyCase) -> dict[str, Callable[[], str | None]]:
    """Returns the laws by name; each returns a line about its first violation, or None.

    They share a few runs of `train`, which the first of them makes.
    """
    setup = functools.cache(lambda: setup_of(case))
    runs = functools.cache(lambda: all_runs(setup()))

    def in_each_run(law: Callable[[Setup, Run], str | None]) -> Callable[[], str | None]:
        def first_fault() -> str | None:
            for name, run in runs().items():
                fault = law(setup(), run)
                if fault:
                    return f"{name}: {fault}"
            return None

        return first_fault

    def resumes(name: str, tolerance: float) -> Callable[[], str | None]:
        return lambda: resume(setup(), runs()[name], runs()["undisturbed"], tolerance)

    return {
        "data order": in_each_run(data_order),
        "learning rates": in_each_run(learning_rates),
        "evaluation": in_each_run(evaluation),
        "divergence": in_each_run(divergence),
        "resume": resumes("resumed", 0.0),
        "resume on another mesh": resumes("resumed on another mesh", TOLERANCE),
        "skips in a row": skips_in_a_row,
        "replicas": replicas,
        "epochs": epochs,
        "phases": phases,
    }


def trainer(case: VerifyCase) -> str | None:
    """Law: `train` computes the expected steps, in the order of the data, and the held-out loss."""
    raw = copy.deepcopy(case.raw)
    raw["optim"]["clip_norm"] = case.clip_norm
    raw["eval"]["batches"] = cases.STEPS
    samples, unpacked = case.batches(packing=False, masks=True)
    steps = case.steps(packing=False, masks=True, dropout=case.model.row_keys)
    # Modulo, because the loader prefetches beyond the last step.
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices % len(leaf)], samples))
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(raw, model=case.model, data=source, eval_data=source)
    last = steps[-1]
    params = evaluation_params(TrainState(None, last.params, last.opt_state))
    return _difference(
        {"parameters": jax.device_get(result.state.params), "evaluation": result.eval_loss},
        {"parameters": last.params, "evaluation": _mean_loss(case.model, params, unpacked)},
        zero_gradients=certificate.zero_gradient_names(steps[0].grads),
    )


# ---- the runs: one undisturbed, one that resumes on the same mesh, one on another mesh ----

STEPS, WARMUP_STEPS, NUM_LAYERS = 64, 8, 2
EVAL_EVERY, EVAL_BATCHES, SAVE_EVERY = 20, 3, 28
CRASH = 56  # step of the checkpoint from which a run resumes after a crash just after its rollback
EARLY_CRASH = 28  # the same, of a crash before the loss spike
SPIKE = CRASH  # batch with a loss spike: found after the next step, and rolled back to step CRASH
STOP = 60  # step at which a run stops, because it was asked to in its evaluation

# Batches whose loss is not finite; after the rollback two batches later.
SKIPPED = (10, 55, 59, 62)
NO_VALUE = -1.0  # in Run.rows
# Columns of metrics.jsonl that differ between two runs that do the same.
VARYING = (
    "step_time",
    "data_wait",
    "tokens_per_second",
    "mfu",
    "host_memory",
    "peak_host_memory",
)


class Run(NamedTuple):
    """A finished run."""

    rows: dict[str, np.ndarray]  # column of metrics.jsonl -> (steps,)
    events: list[dict[str, Any]]  # skips, spikes and rollbacks from step CRASH on
    saved: manifest.Manifest  # of the last checkpoint
    result: Result


class Setup(NamedTuple):
    """What the runs of a case have in common."""

    raw: dict[str, Any]
    model: Model
    source: Source  # of batches for `_with_events`
    meshes: tuple[dict[str, int], dict[str, int]]  # axis sizes and num_microbatches
    zero_gradients: list[str]  # see `certificate.compare`

    @property
    def global_batch(self) -> int:
        return self.raw["train"]["global_batch"]


def setup_of(case: VerifyCase) -> Setup:
    """Returns the settings, model and data of a case's runs."""
    raw, defaults = copy.deepcopy(case.raw), default_settings()
    raw["train"].update(steps=STEPS, log_every=1)
    raw["optim"].update(
        schedule="cosine",
        warmup_steps=WARMUP_STEPS,
        final_fraction=0.1,
        clip_norm=case.clip_norm,
    )
    raw["eval"].update(every=EVAL_EVERY, batches=EVAL_BATCHES)
    raw["checkpoint"] = defaults["checkpoint"] | {"every": SAVE_EVERY, "keep_last": STEPS}
    raw["divergence"] = defaults["divergence"] | {"rollback": True}
    raw["health"]["every"] = 0  # the law `replicas` checks it
    model = case.model
    if case.name == raw["model"]["build"]:
        small = {"num_layers": NUM_LAYERS, "first_dense_layers": 0, "z_loss": 1e-3}
        raw["model"].update({key: n for key, n in small.items() if key in raw["model"]})
        model = build_model(parse(raw))
    masks = case.is_text
    first_step, *_ = case.steps(packing=False, masks=masks, dropout=case.model.row_keys)
    samples, _ = case.batches(packing=False, masks=masks)
    return Setup(
        raw,
        model,
        source=_numbered(samples, raw["train"]["global_batch"]),
        meshes=_meshes(raw, model),
        zero_gradients=certificate.zero_gradient_names(first_step.grads),
    )


def _meshes(raw: dict[str, Any], model: Model) -> tuple[dict[str, int], dict[str, int]]:
    """Returns a mesh with data and fsdp, and one with pipeline, tensor and fsdp if possible."""
    num_devices = jax.device_count()
    half = 2 if num_devices % 2 == 0 else 1
    first = {"data": num_devices // half, "fsdp": half, "num_microbatches": 2}
    pipeline = half if model.block else 1
    tensor = 2 if num_devices % (2 * pipeline) == 0 else 1
    if checks.tensor_faults(raw["model"], tensor):
        tensor = 1
    fsdp = num_devices // pipeline // tensor
    second = {"pipeline": pipeline, "tensor": tensor, "fsdp": fsdp, "num_microbatches": 4}
    return first, second


def all_runs(setup: Setup) -> dict[str, Run]:
    """Returns the undisturbed run and the interrupted runs, by name."""
    first_mesh, second_mesh = setup.meshes
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        original = Path(folder, "undisturbed")
        runs = {"undisturbed": _run(setup, original)}
        for name, crash, mesh in (
            ("resumed", CRASH, first_mesh),
            ("resumed on another mesh", EARLY_CRASH, second_mesh),
        ):
            workdir = Path(folder, name)
            _copy_crashed(original, workdir, crash)
            step = _train(setup, mesh, workdir, stop=True).step
            assert step == STOP, f"asked to stop at step {STOP}, the run stopped at step {step}"
            runs[name] = _run(setup, workdir)
    return runs


def _copy_crashed(original: Path, workdir: Path, crash: int) -> None:
    """Copies what a run leaves that crashes before the save after step `crash`."""
    shutil.copytree(original / FOLDER / str(crash), workdir / FOLDER / str(crash))
    shutil.copy(original / "metrics.jsonl", workdir)
    if crash == CRASH:
        lines = (original / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        rollbacks = [number for number, line in enumerate(lines) if '"rollback"' in line]
        kept = lines[: rollbacks[-1] + 1] if rollbacks else []
        (workdir / "events.jsonl").write_text("".join(kept), encoding="utf-8")


def _run(setup: Setup, workdir: Path) -> Run:
    """Trains to the last step on the first mesh."""
    result = _train(setup, setup.meshes[0], workdir)
    *lines, final_line = _json_lines(workdir / "metrics.jsonl")
    assert final_line["step"] == STEPS, "the last row is not that of the final evaluation"
    rows = {}
    for name in sorted({name for line in lines for name in line} - {*VARYING}):
        values = [line.get(name) for line in lines]
        rows[name] = np.array([NO_VALUE if x is None else x for x in values], float)
    events = []
    for event in _json_lines(workdir / "events.jsonl"):
        if event["event"] in ("skip", "spike", "rollback") and event["step"] >= CRASH:
            events.append(event)
    saved = manifest.read(workdir / FOLDER / str(result.step))
    result = result._replace(state=jax.device_get(result.state), eval_loss=final_line["eval_loss"])
    return Run(rows, events, saved, result)


def _json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _train(setup: Setup, mesh: dict[str, int], workdir: Path, *, stop: bool = False) -> Result:
    """Trains on a mesh; with `stop`, asks the run to stop in the evaluation of step STOP."""
    raw = copy.deepcopy(setup.raw)
    raw["train"]["num_microbatches"] = mesh["num_microbatches"]
    raw["mesh"] = {axis: mesh.get(axis, 1) for axis in AXES}
    raw["pipeline"].update(schedule="1f1b", num_chunks=1)
    path = workdir.parent / "page"
    page = progress.ProgressPage.create(path)

    def read(indices: np.ndarray) -> Any:
        if stop and page["current_step"] == STOP - 1:
            page["stop_requested"] = 1  # as the supervisor does
        return setup.source.read(indices)

    os.environ[progress.VARIABLE] = str(path)
    try:
        result = train(
            raw,
            workdir=workdir,
            model=_with_events(setup.model),
            data=setup.source,
            eval_data=Source(read),
        )
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
        extra = {
            **metrics.extra,
            "cross_entropy": cross_entropy(metrics),
            "model_loss": metrics.loss,
            "batch": number * metrics.weight,
        }
        return Metrics(metrics.loss * factor, metrics.weight, extra)

    check_batch = model.check_batch
    if check_batch is not None:
        model = dataclasses.replace(model, check_batch=lambda batch: check_batch(batch["samples"]))
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


# ---- laws of each run ----


def data_order(setup: Setup, run: Run) -> str | None:
    """Law: each step has the batch after the previous one, but a rollback skips two batches."""
    steps = np.arange(STEPS)
    batches = np.where(steps < CRASH, steps, steps + 2)
    samples = (batches + 1) * setup.global_batch
    for name, expected in {"step": steps, "batch": batches, "tokens": samples}.items():
        pairs = itertools.zip_longest(run.rows[name].tolist(), expected.tolist())
        for number, (value, wanted) in enumerate(pairs):
            if value != wanted:
                return f"row {number} of metrics.jsonl: {name} {value}, not {wanted}"
    if run.saved.position != samples[-1]:
        return f"the last checkpoint is at sample {run.saved.position}, not {samples[-1]}"
    return None


def learning_rates(setup: Setup, run: Run) -> str | None:
    """Law: learning rates and optimizer counts follow the updates, without skipped steps."""
    section, opt_state = setup.raw["optim"], run.result.state.opt_state
    has_count = optim.updates_done(opt_state, otherwise=None) is not None
    updates = 0
    for step, rate in enumerate(run.rows["learning_rate"]):
        number = updates if has_count else step
        expected = reference_optimizers.learning_rate(number, section, STEPS)
        if not abs(rate - expected) <= 1e-6 * section["learning_rate"]:
            return f"step {step}: {rate:.9g} is not {expected:.9g}"
        updates += run.rows["skipped"][step] == 0
    is_own = section["build"] == "meshtrain.optim.base:adamw"
    for path, leaf in jax.tree.leaves_with_path(opt_state):
        name = certificate.name_of(path)
        if is_own and name.endswith("count") and leaf != updates:
            return f"optimizer state {name}: {leaf} after {updates} updates"
    return None


def evaluation(setup: Setup, run: Run) -> str | None:
    """Law: the held-out loss is total cross-entropy / total weight.

    The loss of a step has all its terms.
    """
    size = setup.global_batch
    batches = [
        setup.source.read(number * size + np.arange(size))["samples"]
        for number in range(EVAL_BATCHES)
    ]
    heldout_loss = _mean_loss(setup.model, evaluation_params(run.result.state), batches)
    losses = run.rows["model_loss"] * factor_of(run.rows["batch"])
    losses = np.where(run.rows["skipped"], NO_VALUE, losses)
    return _difference(
        {"held-out loss": run.result.eval_loss, "loss of step": run.rows["loss"]},
        {"held-out loss": heldout_loss, "loss of step": losses},
    )


def divergence(setup: Setup, run: Run) -> str | None:
    """Law: a spike is judged by the finite losses before it, and rolled back.

    Their mean and deviation are those of all of them.
    """
    expected = [("spike", SPIKE), ("rollback", SPIKE)]
    expected += [("skip", batch - 2) for batch in SKIPPED if batch > SPIKE]
    events = [(event["event"], event["step"]) for event in run.events]
    if events != expected:
        return f"{events}, not {expected}"
    spike, rollback, *_ = run.events
    finite = run.rows["loss"][run.rows["skipped"] == 0]
    losses = finite[: SPIKE - sum(batch < SPIKE for batch in SKIPPED)]
    mean = losses.mean()
    deviations = (spike["loss"] - mean) / max(losses.std(), 0.01 * mean)
    if not finite.min() < run.saved.loss_statistics["mean"] < finite.max():
        return f"running mean {run.saved.loss_statistics['mean']:.9g}: the spike's loss is in it"
    return _difference(
        {
            "mean": spike["mean"],
            "deviations": spike["deviations"],
            "to": rollback["to"],
            "position": rollback["position"],
        },
        {
            "mean": mean,
            "deviations": deviations,
            "to": CRASH,
            "position": (SPIKE + 2) * setup.global_batch,
        },
    )


def resume(setup: Setup, run: Run, undisturbed: Run, tolerance: float) -> str | None:
    """Law: an interrupted run has the metrics, last checkpoint and state of the undisturbed run."""
    actual, expected = _outcome(run), _outcome(undisturbed)
    shapes = {str(jax.tree.map(np.shape, tree)) for tree in (actual, expected)}
    if len(shapes) > 1:
        return "other steps, metrics or arrays than in the undisturbed run"
    return _difference(
        actual,
        expected,
        where="in the undisturbed run",
        tolerance=tolerance,
        zero_gradients=setup.zero_gradients if tolerance else (),
    )


def _outcome(run: Run) -> Trees:
    """Returns everything in which two runs have to be equal."""
    return {
        "metrics": run.rows,
        "checkpoint": {
            "step": run.saved.step,
            "position": run.saved.position,
            "loss_statistics": run.saved.loss_statistics,
            "metrics": run.saved.metrics,
        },
        "state": run.result.state._asdict(),
        "held-out loss": run.result.eval_loss,
    }


# ---- laws of small runs of their own ----


def skips_in_a_row() -> str | None:
    """Law: a run ends after `max_skips` skipped steps in a row, those before a resume included.

    Its state is saved: the next start continues after these steps, and may skip as many again.
    """
    values = [1, 1, *[np.nan] * 12]
    with tempfile.TemporaryDirectory() as folder:
        # At step 4 a run ends with two skips; with two more the resumed run ends in step 5. It has
        # taken step 6 by then, and the next run ends four steps after that.
        for steps, end in ((4, 4), (20, 5), (20, 10)):
            sections = {"train": {"steps": steps}, "divergence": {"max_skips": 4}}
            error = fit(folder, values, sections)
            is_end = isinstance(error, FloatingPointError) and str(error).startswith(f"step {end}:")
            if not is_end:
                return f"{error!r}, not the end of the run at step {end}"
    return None


def replicas() -> str | None:
    """Law: a state whose replicas differ is never saved.

    Neither in the run, nor at its end, nor if the data fails.
    """
    if jax.device_count() == 1:
        return None
    for every, steps, num_batches in ((2, 4, 4), (0, 3, 3), (0, 3, 2)):
        sections = {"checkpoint": {"every": every}, "train": {"steps": steps}}
        with tempfile.TemporaryDirectory() as folder:
            error = fit(folder, [1] * num_batches, sections, replicas_differ=True)
            saved = find.steps(Path(folder, FOLDER))
        if saved or not isinstance(error, health.CorruptState):
            return f"checkpoint.every={every}: saved at steps {saved}, {error!r}"
    return None


def epochs() -> str | None:
    """Law: an epoch has each row once, in its own order, however the rows are read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_bytes(np.random.default_rng(0).bytes(300))
        options = {**default_settings()["data"], "path": folder, "seq_len": 8, "heldout": 0.0}
        del options["build"], options["per_process"]
        source = tokens.build(**options, split="train")
        # The rows of BLOCK samples are computed together.
        num_epochs = tokens.BLOCK // source.size + 2
        rows = source.read(np.arange(num_epochs * source.size)).tokens
        for first in range(3 * num_epochs, -1, -1):  # in another order
            part = np.arange(first, len(rows), 3 * num_epochs + 1)
            if not np.array_equal(source.read(part).tokens, rows[part]):
                return f"samples {part.tolist()}: other rows than in order"
    orders = {tuple(map(bytes, epoch.astype(np.uint8))) for epoch in np.split(rows, num_epochs)}
    sizes = {len({*order}) for order in orders}
    if sizes != {source.size} or len(orders) < num_epochs:
        return (
            f"{len(orders)} different orders of {sizes} rows in {num_epochs} epochs of "
            f"{source.size}"
        )
    return None


def phases() -> str | None:
    """Law: where a run resumes, its phases continue as planned, and those ahead may change.

    All phases together read each row of a part once, before they read one again.
    """
    steps, batch = 24, 3
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(2):  # each byte of a file is its own
            path = Path(folder, f"{number}.txt")
            path.write_bytes(bytes(range(128 * number, 128 * number + 121)))
            paths.append(str(path))
        options = {**default_settings()["data"], "seq_len": 8, "heldout": 0.0, "dtype": "uint8"}
        del options["build"], options["per_process"]

        def in_run(ahead: tuple, run: Timeline) -> Source:
            plan = ((0.25, paths[0]), (8, ((paths[0], 1), (paths[1], 2))), *ahead)
            source = tokens.build(**{**options, "phases": plan}, split="train")
            return source.in_run(run)

        def firsts(source: Source) -> np.ndarray:
            return source.read(np.arange(steps * batch)).tokens[:, 0]

        planned = in_run(((0.5, paths[1]),), Timeline(steps, batch))
        expected = firsts(planned)
        begins = [phase.sample for phase in planned.phases]
        if begins != [0, 18, 42] or (expected[:18] >= 128).any() or (expected[42:] < 128).any():
            return f"phases at {begins} read {expected.tolist()}"
        for step in (0, 5, 6, 10, 14, 15, 23):  # phases begin at steps 6 and 14
            run = Timeline(steps, batch, step, step * batch, planned.phases)
            if not np.array_equal(firsts(in_run(((0.5, paths[1]),), run)), expected):
                return f"resumed at step {step}, other samples than without"
            smaller = run._replace(global_batch=2, same_batch=False)
            last = in_run(((0.5, paths[1]),), smaller).phases[-1].sample
            if last != 3 * min(step, 14) + 2 * max(0, 14 - step):
                return f"resumed at step {step} with batches of 2, the last phase begins at {last}"
            if step <= 14:
                end = step * batch
                try:
                    changed = firsts(in_run(((0.5, paths[0]),), run))
                except ConfigError as error:
                    return f"resumed at step {step} with another last phase: {error}"
                if not np.array_equal(changed[:end], expected[:end]) or (changed[42:] >= 128).any():
                    return f"resumed at step {step} with another last phase: {changed.tolist()}"
        # The first 15 rows, all that a file has, of the samples up to the second phase.
        if len({*expected[:15].tolist()}) != 15:
            return f"rows of a file come again before all of it was read: {expected[:15].tolist()}"
    return None


def fit(
    folder: str, values: list[float], sections: dict[str, dict], *, replicas_differ: bool = False
) -> Exception | None:
    """Trains a linear model on batches of these values, after which the data fails.

    Returns the error.
    """
    raw, size = default_settings(), jax.device_count()
    raw["train"].update(steps=20, global_batch=size)
    for name, section in sections.items():
        raw[name].update(section)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        def device_kernel():
            return jnp.ones(4) + replicas_differ * jax.lax.axis_index("data")

        # Unchecked: jax would reject replicas that differ.
        make = jax.shard_map(device_kernel, in_specs=(), out_specs=jax.P(), check_vma=False)
        return {"kernel": make()}

    def loss(params, batch, key):
        return weighted((batch @ params["kernel"] - 1) ** 2)

    source = Source(lambda indices: np.full((len(indices), 4), values[indices[0] // size], "f"))
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            train(raw, workdir=folder, model=Model(init, {"kernel": (None,)}, loss), data=source)
        except Exception as error:  # noqa: BLE001  a law judges it
            return error
    return None


def default_settings() -> dict[str, Any]:
    return default.get_config().copy_and_resolve_references().to_dict()


# ---- comparison ----


def _mean_loss(model: Model, params: Any, batches: list[Any]) -> jax.Array:
    """Returns the total cross-entropy / the total weight of batches, on one device."""
    loss = jax.jit(functools.partial(reference_step.loss, model))
    sums = [loss(params, batch) for batch in batches]
    return sum(map(cross_entropy, sums)) / sum(metrics.weight for metrics in sums)


def _difference(
    actual: Trees,
    expected: Trees,
    *,
    where: str = "in the reference",
    tolerance: float = TOLERANCE,
    zero_gradients: Collection[str] = (),
) -> str | None:
    _, fault = certificate.compare(
        actual,
        expected,
        tolerance=tolerance,
        zero_gradients=zero_gradients,
        where=where,
    )
    return fault
