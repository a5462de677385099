"""Verifies a model's parallelism: each layout must compute the same steps as one device, in float64."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from meshtrain import console
from meshtrain import state as states
from meshtrain.config.build import Parts, build_model, optimizer_builder
from meshtrain.config.checks import BATCH_AXES
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.data.loader import Loader
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError, choice_faults
from meshtrain.models.base import Model
from meshtrain.models.transformer_config import VOCAB_MULTIPLE
from meshtrain.ops.losses import MIB
from meshtrain.parallel import sharding
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState
from meshtrain.step import Scalars
from meshtrain.tools.verify import OPTIONAL, QUICK_LAYOUTS, certificate, layouts, precision
from meshtrain.tools.verify.case import STEPS, VerifyCase, keep_gradients
from meshtrain.tools.verify.certificate import Certificate, Result
from meshtrain.tools.verify.jobs import Task, run_tasks
from meshtrain.tools.verify.laws import model as model_laws
from meshtrain.tools.verify.pairwise import Row
from meshtrain.tools.verify.reference import step as reference_step

TOLERANCE = 1e-10

NUM_LOW_PRECISION = 2  # number of layouts that are verified in bfloat16 and float16

INITIAL_TOLERANCE = 1e-6  # for initial parameters: a user's model may draw them in float32


def verify(
    settings: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    quick: bool = False,
    keep_sizes: bool = False,
    without: Iterable[str] = (),
    jobs: int = 1,
    log: Callable[[str], None] = print,
) -> Certificate:
    """Compares layouts in which every possible pair of settings occurs with one device.

    `model` and `data` are as for `train`. `quick` tries only the QUICK_LAYOUTS layouts that cover the
    most pairs. `keep_sizes` leaves the sizes of the model unchanged. `without` lists checks of OPTIONAL
    that do not apply, such as "packing" for a model that ignores `batch.segments`. `jobs` processes share
    the work on simulated devices; with `model` or `data` there is one. Raises ConfigError for mistakes
    of the user.
    """
    if faults := [fault for name in without for fault in choice_faults("without", name, OPTIONAL)]:
        raise ConfigError(*faults)
    with jax.enable_x64(True):
        subject = VerifyCase(settings, model, data, keep_sizes=keep_sizes)
        rows, low, names = plan(subject, quick, without)
        log(f"{subject.name}: {states.count(subject.abstract_params):,} parameters, float64")
        log(
            f"{len(rows)} layouts of {jax.device_count()} devices, {STEPS} steps each on "
            f"{subject.global_batch} rows, compared with one device"
        )
        tasks = [Task(model_laws.check, name) for name in names]
        tasks += [Task(check_layout, row) for row in rows] + [Task(check_precision, r) for r in low]
        results, violations = [], []
        with console.progress("verifying", len(tasks), stream="stdout") as advance:
            for found in run_tasks(subject, tasks, 1 if model or data else jobs):
                if isinstance(found, Result):
                    results.append(found)
                    log(certificate.summary_line(found))
                else:
                    found = [fault for fault in found if not fault.startswith(tuple(without))]
                    for fault in found:
                        log(f"FAILED on one device: {fault}")
                    violations += found
                advance(1)
    rows += low
    results.sort(key=lambda result: rows.index(result.row))
    left_out = ["most layouts, the laws of runs, and low precision: --quick leaves them out"]
    missing = certificate.not_covered(
        subject.settings, subject.raw, rows, without=list(without), left_out=left_out[: int(quick)]
    )
    return Certificate(subject.name, TOLERANCE, tuple(violations), tuple(results), missing)


def plan(
    subject: VerifyCase, quick: bool, without: Iterable[str]
) -> tuple[list[Row], list[Row], list[str]]:
    """Returns the layouts, those that are verified in low precision too, and the names of the laws."""
    rows = layouts.select(subject, without)
    low = [
        {**row, "dtype": dtype, "masks": subject.is_text, "loss_scale": False, "dropout": False}
        for row in rows[:NUM_LOW_PRECISION]
        for dtype in ("bfloat16", "float16")
    ]
    if quick:
        rows, low = rows[:QUICK_LAYOUTS], []
    rows.sort(key=lambda row: sum(row.get(axis, 1) > 1 for axis in AXES))
    return rows, low, list(model_laws.laws(subject, quick=quick))


def check_precision(subject: VerifyCase, row: Row) -> Result:
    return precision.check_layout(subject.for_layout(row), row, row["dtype"], program_of)


def check_layout(subject: VerifyCase, row: Row) -> Result:
    """Runs the steps on one layout and compares them with the steps on one device."""
    differences: dict[str, float] = {}
    subject = subject.for_layout(row)

    def check() -> str | None:
        program = program_of(subject, row)
        fault = _sharding_fault(program, row["zero_stage"])
        return fault or _compare(subject, row, program, differences)

    return certificate.result_of(row, differences, check)


def program_of(subject: VerifyCase, row: Row) -> Program:
    """Returns the trainer's program for a layout; its optimizer state also holds the gradients."""
    raw = copy.deepcopy(subject.raw)
    raw["mesh"] = {axis: row.get(axis, 1) for axis in AXES}
    raw["optim"]["clip_norm"] = subject.clip_norm
    keys = ("zero_stage", "num_microbatches", "remat", "unroll")
    raw["train"].update({key: row[key] for key in keys if key in row})
    if row.get("schedule"):
        raw["pipeline"].update({key: row[key] for key in ("schedule", "num_chunks", "keep")})
    if row.get("context_method"):
        raw["context"] = {"method": row["context_method"]}
    if row.get("sync_pattern") is not None:
        raw["sync"]["pattern"] = row["sync_pattern"]
        # Devices of one host as two slices, so that a hierarchy has levels.
        raw["mesh"]["slices"] = math.gcd(2, raw["mesh"]["data"])
    if row["sequence_parallel"]:
        raw["rules"] = (("residual_seq", ("context", "tensor")), *raw["rules"])
    if "attention_impl" in row:
        raw["model"].update(attention_impl=row["attention_impl"])
    if row.get("loss_chunks"):
        raw["model"].update(loss_chunk_mib=_loss_chunk_mib(subject, raw, row["loss_chunks"]))
    cfg = parse(raw, num_devices=jax.device_count())
    model = subject.model if raw["model"] == subject.raw["model"] else build_model(cfg)
    make_optimizer = optimizer_builder(cfg, model)
    model = dataclasses.replace(model, row_keys=bool(row.get("dropout")))
    parts = Parts(model, lambda schedule: keep_gradients(make_optimizer(schedule)))
    return assemble(cfg, parts)


def _loss_chunk_mib(subject: VerifyCase, raw: Mapping[str, Any], num_chunks: int) -> float:
    """Returns the `loss_chunk_mib` with which each device computes its loss in `num_chunks` chunks."""
    mesh, vocab = raw["mesh"], -(-raw["model"]["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    slices = math.prod(mesh[axis] for axis in (*BATCH_AXES, "context"))
    slices *= raw["train"]["num_microbatches"]
    num_tokens = subject.samples.tokens[: subject.global_batch].size // slices
    (axes,) = sharding.spec_for(("vocab",), (vocab,), raw["rules"], mesh)
    size = num_tokens * vocab * 4 / math.prod(mesh[axis] for axis in sharding.axes_of(axes))
    return size / MIB / (num_chunks - 0.5)


def _compare(
    subject: VerifyCase, row: Row, program: Program, differences: dict[str, float]
) -> str | None:
    """Adds the largest difference of each kind to `differences`; returns a message if one is too large."""
    variant = {key: row[key] for key in ("packing", "masks")}
    samples, _ = subject.batches(**variant)
    expected_sums = subject.steps(**variant, dropout=False)[0].sums  # of an evaluation
    expected_steps = subject.steps(**variant, dropout=bool(row.get("dropout")))
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices], samples))
    size = subject.global_batch
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    batches = [loader.read(number * size) for number in range(STEPS)]
    loader.close()
    zero = certificate.zero_gradient_names(expected_steps[0].grads)

    def record(actual, expected, tolerance=TOLERANCE):
        largest, fault = certificate.compare(
            actual, expected, tolerance=tolerance, zero_gradients=zero
        )
        for kind, difference in largest.items():
            differences[kind] = max(difference, differences.get(kind, 0.0))
        return fault

    start, step_program = subject.start, program
    if row.get("loss_scale"):  # as for float16; a power of two, so the results must not change
        start = start._replace(loss_scale=states.start_loss_scale())
        step_program = _with_loss_scale(program)
    with program.active():
        evaluate = jax.jit(program.eval_step)
        evaluate = evaluate.lower(program.abstract_state.params, batches[0]).compile()
        step = step_program.compile(batches[0])
        initial = jax.device_get(program.start(subject.raw["train"]["seed"]).params)
        fault = record({"start": initial}, {"start": subject.start.params}, INITIAL_TOLERANCE)
        state = jax.device_put(start, states.shardings_of(step_program.abstract_state))
        metrics = evaluate(state.params, batches[0])
        sums = {"loss": metrics.loss, "weight": metrics.weight, **metrics.extra}
        fault = fault or record({"evaluation": sums}, {"evaluation": expected_sums})
        for number, (batch, expected) in enumerate(zip(batches, expected_steps, strict=True)):
            if fault:
                break
            state, scalars = step(state, batch)
            trees = _values(number, *jax.device_get((state, scalars)), expected)
            if fault := record(*trees):
                fault = f"step {number}: {fault}"
    return fault


def _with_loss_scale(program: Program) -> Program:
    """Returns the program for a state with a loss scale."""
    state = program.abstract_state
    scale = jax.eval_shape(states.start_loss_scale)
    scale = jax.tree.map(lambda leaf: leaf.update(sharding=state.step.sharding), scale)
    return dataclasses.replace(program, abstract_state=state._replace(loss_scale=scale))


def _values(
    number: int, state: TrainState, scalars: Scalars, expected: reference_step.Step
) -> tuple[certificate.Trees, certificate.Trees]:
    """Returns the actual and the expected values of a step, by kind."""
    grads, opt_state = state.opt_state
    return {
        "schedule": {"step": state.step, "learning_rate": scalars["learning_rate"]},
        "loss": {name: scalars[name] for name in expected.means},
        "norm": scalars["grad_norm"],
        "gradients": grads,
        "parameters": state.params,
        "optimizer state": opt_state,
    }, {
        "schedule": {"step": number + 1, "learning_rate": expected.learning_rate},
        "loss": expected.means,
        "norm": expected.norm,
        "gradients": expected.grads,
        "parameters": expected.params,
        "optimizer state": expected.opt_state,
    }


def _sharding_fault(program: Program, zero_stage: int) -> str | None:
    """Returns a message if the batch, or a tree of parameters, is not sharded as the layout says."""
    sizes = program.mesh.shape
    (batch_axes,) = sharding.spec_for(("batch",), (program.mesh.size,), program.rules, sizes)
    expected_axes = {axis for axis in BATCH_AXES if sizes[axis] > 1}
    if {axis for axis in sharding.axes_of(batch_axes) if sizes[axis] > 1} != expected_axes:
        return f"rows of the batch are sharded over {batch_axes}, not over {BATCH_AXES}"
    state = program.abstract_state
    trees = {
        "parameters": (3, states.shardings_of(state.params)),
        "gradients": (2, program.grad_shardings),
        "moments": (1, states.shardings_of(state.opt_state[0])),
    }
    names = jax.tree.leaves(program.model.axes, is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree.leaves_with_path(state.params)
    for kind, (first_stage, shardings) in trees.items():
        for (path, leaf), dims, placed in zip(
            leaves, names, jax.tree.leaves(shardings), strict=True
        ):
            expected = _expected_axes(dims, leaf.shape, program.rules, sizes)
            if zero_stage < first_stage:
                expected -= {*sharding.ZERO_AXES}
            found = {axis for axes in placed.spec for axis in sharding.axes_of(axes)}
            found = {axis for axis in found if sizes[axis] > 1}
            if wrong := sorted(expected ^ found):
                how = "sharded" if wrong[0] in found else "replicated"
                name = certificate.name_of(path)
                return f"{kind} {name}: {how} over {wrong[0]} at ZeRO stage {zero_stage}"
    return None


def _expected_axes(
    dims: tuple, shape: tuple[int, ...], rules: sharding.Rules, sizes: Mapping[str, int]
) -> set[str]:
    """Returns the mesh axes that shard an array: for each dim, those of the first rule that divides it."""
    expected: set[str] = set()
    for rule, axes in rules:
        axes = {axis for axis in sharding.axes_of(axes) if sizes[axis] > 1}
        sized = [size for name, size in zip(dims, shape, strict=True) if name == rule]
        if not axes & expected and any(
            size % math.prod(sizes[axis] for axis in axes) == 0 for size in sized
        ):
            expected |= axes
    return expected
