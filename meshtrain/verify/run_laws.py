"""Laws of a run of `train`: what surrounds a step is right, and the same after interruptions on any mesh."""

import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import optim
from meshtrain.checkpoint import FOLDER, manifest
from meshtrain.data import tokens
from meshtrain.monitor import health
from meshtrain.state import evaluation_params
from meshtrain.verify import certificate, reference_model, reference_step, runs
from meshtrain.verify.certificate import Trees
from meshtrain.verify.runs import CRASH, SKIPPED, SPIKE, STEPS, Run, Setup

TOLERANCE = 1e-10  # between meshes; on the same mesh all values are bit-equal


def laws(subject: Any) -> dict[str, Callable[[], str | None]]:
    """Returns the laws by name; each returns a line about its first violation, or None."""
    setup = functools.cache(lambda: runs.setup_of(subject))
    found = functools.cache(lambda: runs.all_runs(setup()))

    def of_each_run(law: Callable) -> Callable:
        def first_fault():
            faults = ((name, law(setup(), run)) for name, run in found().items())
            return next((f"{name}: {fault}" for name, fault in faults if fault), None)

        return first_fault

    def compared(name: str, tolerance: float) -> Callable:
        return lambda: resume(setup(), found()[name], found()["undisturbed"], tolerance)

    return {
        "data order": of_each_run(data_order),
        "learning rates": of_each_run(learning_rates),
        "evaluation": of_each_run(evaluation),
        "divergence": of_each_run(divergence),
        "resume": compared("resumed", 0.0),
        "resume on another mesh": compared("resumed on another mesh", TOLERANCE),
        "skips in a row": skips_in_a_row,
        "replicas": replicas,
        "epochs": epochs,
    }


def data_order(setup: Setup, run: Run) -> str | None:
    """Law: each step has the batch after the previous one; a rollback skips the batches since the spike."""
    steps = np.arange(STEPS)
    batches = np.where(steps < CRASH, steps, steps + 2)
    samples = (batches + 1) * setup.global_batch
    for name, expected in {"step": steps, "batch": batches, "tokens": samples}.items():
        pairs = itertools.zip_longest(run.rows[name].tolist(), expected.tolist())
        for number, (found, wanted) in enumerate(pairs):
            if found != wanted:
                return f"row {number} of metrics.jsonl: {name} {found}, not {wanted}"
    if run.saved.position != samples[-1]:
        return f"the last checkpoint is at sample {run.saved.position}, not {samples[-1]}"
    return None


def learning_rates(setup: Setup, run: Run) -> str | None:
    """Law: learning rates and optimizer counts follow the number of updates, without skipped steps."""
    section, opt_state, updates = setup.raw["optim"], run.result.state.opt_state, 0
    has_count = optim.updates_done(opt_state, otherwise=None) is not None
    for step, rate in enumerate(run.rows["learning_rate"]):
        expected = reference_model.learning_rate(updates if has_count else step, section, STEPS)
        if not abs(rate - expected) <= 1e-6 * section["learning_rate"]:
            return f"step {step}: {rate:.9g} is not {expected:.9g}"
        updates += run.rows["skipped"][step] == 0
    for path, leaf in jax.tree.leaves_with_path(opt_state):
        name, is_own = certificate.name_of(path), section["build"] == "meshtrain.optim:adamw"
        if is_own and name.endswith("count") and leaf != updates:
            return f"optimizer state {name}: {leaf} after {updates} updates"
    return None


def evaluation(setup: Setup, run: Run) -> str | None:
    """Law: the held-out loss is total cross-entropy / total weight; the loss of a step has all its terms."""
    one_device = jax.jit(functools.partial(reference_step.loss, setup.model))
    sums, size, params = [], setup.global_batch, evaluation_params(run.result.state)
    for number in range(runs.EVAL_BATCHES):
        batch = setup.source.read(number * size + np.arange(size))["samples"]
        sums.append(one_device(params, batch))
    total = sum(map(runs.cross_entropy, sums)) / sum(one.weight for one in sums)
    losses = run.rows["model_loss"] * runs.factor_of(run.rows["batch"])
    losses = np.where(run.rows["skipped"], runs.NO_VALUE, losses)
    return _difference(
        {"held-out loss": run.result.eval_loss, "loss of step": run.rows["loss"]},
        {"held-out loss": total, "loss of step": losses},
    )


def divergence(setup: Setup, run: Run) -> str | None:
    """Law: a spike is judged by mean and deviation of all finite losses before it, and rolled back."""
    expected = [("spike", SPIKE), ("rollback", SPIKE)]
    expected += [("skip", batch - 2) for batch in SKIPPED if batch > SPIKE]
    if (events := [(one["event"], one["step"]) for one in run.events]) != expected:
        return f"{events}, not {expected}"
    spike, rollback, *_ = run.events
    finite = run.rows["loss"][run.rows["skipped"] == 0]
    losses = finite[: SPIKE - sum(batch < SPIKE for batch in SKIPPED)]
    mean = losses.mean()
    deviations = (spike["loss"] - mean) / max(losses.std(), 0.01 * mean)
    place = (SPIKE + 2) * setup.global_batch
    if not finite.min() < run.saved.watch["mean"] < finite.max():
        return f"running mean {run.saved.watch['mean']:.9g}: the spike's loss is in it"
    return _difference(
        {key: spike[key] for key in ("mean", "deviations")}
        | {key: rollback[key] for key in ("to", "position")},
        {"mean": mean, "deviations": deviations, "to": CRASH, "position": place},
    )


def resume(setup: Setup, run: Run, undisturbed: Run, tolerance: float) -> str | None:
    """Law: an interrupted run has the metrics, last checkpoint and state of the undisturbed run."""
    keys = ("step", "position", "watch", "metrics")
    actual, expected = (
        {
            "metrics": one.rows,
            "checkpoint": {key: getattr(one.saved, key) for key in keys},
            "state": one.result.state._asdict(),
            "held-out loss": one.result.eval_loss,
        }
        for one in (run, undisturbed)
    )
    if len({str(jax.tree.map(np.shape, tree)) for tree in (actual, expected)}) > 1:
        return "other steps, metrics or arrays than in the undisturbed run"
    zero = setup.zero_gradients if tolerance else ()
    return _difference(actual, expected, "the undisturbed run", tolerance, zero)


def skips_in_a_row() -> str | None:
    """Law: a run ends after `max_skips` skipped steps in a row, those before a resume included."""
    sections = {"checkpoint": {"every": 4}, "divergence": {"max_skips": 4}}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            error = runs.fit(folder, [1, 1, *[np.nan] * 8], sections)
            if not isinstance(error, FloatingPointError) or not str(error).startswith("step 5:"):
                return f"{error!r}, not the end of the run at step 5"
    return None


def replicas() -> str | None:
    """Law: a state whose replicas differ is not saved: in the run, at its end, and if the data fails."""
    cases = ((2, 4, 4), (0, 3, 3), (0, 3, 2)) if jax.device_count() > 1 else ()
    for every, steps, num_batches in cases:
        sections = {"checkpoint": {"every": every}, "train": {"steps": steps}}
        with tempfile.TemporaryDirectory() as folder:
            error = runs.fit(folder, [1] * num_batches, sections, replicas_differ=True)
            saved = manifest.steps(Path(folder, FOLDER))
        if saved or not isinstance(error, health.CorruptState):
            return f"checkpoint.every={every}: saved at steps {saved}, {error!r}"
    return None


def epochs() -> str | None:
    """Law: an epoch has each row once, in its own order; rows do not depend on how they are read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.txt").write_bytes(np.random.default_rng(0).bytes(300))
        options = {**runs.default_settings()["data"], "path": folder, "seq_len": 8, "heldout": 0.0}
        del options["build"], options["per_process"]
        source = tokens.build(**options, split="train")
        num = (
            tokens.BLOCK // source.size + 2
        )  # epochs: the rows of BLOCK samples are computed together
        rows = source.read(np.arange(num * source.size)).tokens
        for first in range(3 * num, -1, -1):  # in another order
            part = np.arange(first, len(rows), 3 * num + 1)
            if not np.array_equal(source.read(part).tokens, rows[part]):
                return f"samples {part.tolist()}: other rows than in order"
    orders = {tuple(map(bytes, epoch.astype(np.uint8))) for epoch in np.split(rows, num)}
    sizes = {len({*order}) for order in orders}
    if sizes != {source.size} or len(orders) < num:
        return f"{len(orders)} different orders of {sizes} rows in {num} epochs of {source.size}"
    return None


def _difference(
    actual: Trees,
    expected: Trees,
    source: str = "the reference",
    tolerance: float = TOLERANCE,
    zero_gradients: list[str] = (),
) -> str | None:
    options = dict(tolerance=tolerance, zero_gradients=zero_gradients)
    _, fault = certificate.compare(actual, expected, **options)
    return fault and fault.removesuffix("on one device") + f"in {source}"
