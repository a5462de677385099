"""Verifies a model's parallelism: each layout must compute the same steps as one device.

Everything is computed in float64. What one device computes is checked by laws, because a comparison
of layouts with one device cannot find an error that both make.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtrain import console
from meshtrain import state as states
from meshtrain.config.schema import AXES, BATCH_AXES
from meshtrain.data.loader import Loader
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding
from meshtrain.program import Program
from meshtrain.state import TrainState
from meshtrain.step import Scalars
from meshtrain.tools.verify import (
    QUICK_LAYOUTS,
    causes,
    certificate,
    check_without,
    layouts,
    precision,
    variants,
)
from meshtrain.tools.verify.case import STEPS, AdapterCase, VerifyCase, program_of
from meshtrain.tools.verify.certificate import Certificate, Result
from meshtrain.tools.verify.jobs import Task, run_tasks
from meshtrain.tools.verify.laws import agreement
from meshtrain.tools.verify.laws import dropout as dropout_laws
from meshtrain.tools.verify.laws import experts as expert_laws
from meshtrain.tools.verify.laws import grad_sync as sync_laws
from meshtrain.tools.verify.laws import model as model_laws
from meshtrain.tools.verify.laws import optimizers as optimizer_laws
from meshtrain.tools.verify.laws import random_keys as key_laws
from meshtrain.tools.verify.laws import rounding as rounding_laws
from meshtrain.tools.verify.laws import runs as run_laws
from meshtrain.tools.verify.pairwise import Row
from meshtrain.tools.verify.reference import step as reference_step

TOLERANCE = 1e-10
INITIAL_TOLERANCE = 1e-6  # for initial parameters: a user's model may draw them in float32
NUM_LOW_PRECISION = 2  # number of layouts that are verified in bfloat16 and float16


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

    `model` and `data` are as for `train`. `quick` tries only the QUICK_LAYOUTS layouts that cover
    the most pairs. `keep_sizes` leaves the sizes of the model unchanged. `without` lists checks of
    OPTIONAL that do not apply, such as "packing" for a model that ignores `batch.segments`. `jobs`
    processes share the work on simulated devices; with `model` or `data` there is one. Raises
    ConfigError for mistakes of the user.
    """
    without = list(without)
    check_without(without)
    with jax.enable_x64(True):
        case = VerifyCase(settings, model, data, keep_sizes=keep_sizes)
        rows, low_rows, law_names = plan(case, quick, without)
        log(f"{case.name}: {states.count(case.abstract_params):,} parameters, float64")
        log(
            f"{len(rows)} layouts of {jax.device_count()} devices, {STEPS} steps each on "
            f"{case.global_batch} rows, compared with one device"
        )
        results, violations = [], []
        # A model that one device computes in different ways fails in most layouts: the cause first.
        if not case.is_transformer:
            of_model = laws_of_the_model(case, quick)
            law_names = [name for name in law_names if name not in of_model]
            violations = _disagreements(case, of_model, without)
            if violations:
                return _disagreement(case, rows, violations, without, log)
        tasks = _tasks(rows, low_rows, law_names)
        with console.progress("verifying", len(tasks), stream="stdout") as advance:
            for outcome in run_tasks(case, tasks, 1 if model or data else jobs):
                advance(1)
                if isinstance(outcome, Result):
                    results.append(outcome)
                    log(certificate.summary_line(outcome))
                    continue
                faults = _kept(outcome.faults, without)
                for fault in faults:
                    log(f"FAILED on one device: {fault}")
                if not outcome.faults:
                    log(f"{'':8}  {outcome.seconds:4.1f} s  law: {outcome.name}  ok")
                violations += faults
    # Tasks end in any order.
    rows = rows + low_rows
    results.sort(key=lambda result: rows.index(result.row))
    left_out = []
    if quick:
        left_out.append(
            "most layouts, the laws of runs, and low precision: --quick leaves them out"
        )
    not_covered = certificate.not_covered(
        case.settings, case.raw, rows, without=without, left_out=left_out
    )
    return Certificate(case.name, TOLERANCE, tuple(violations), tuple(results), not_covered)


QUICK_LAWS = ("schedule", "optimizer", "keys", "dropout", "rounded values")


def _tasks(rows: Sequence[Row], low_rows: Sequence[Row], law_names: Sequence[str]) -> list[Task]:
    """Returns the checks in the order in which processes start them.

    A few quick ones first, which soon have a verdict, then the longest: with those at the end, a
    process would work alone. Interleaved schedules take twice the time of other layouts.
    """
    quick = [name for name in law_names if name in QUICK_LAWS]
    others = [name for name in law_names if name not in QUICK_LAWS and name != "runs"]
    simplest, more_rows = rows[:1], rows[1:]
    long = [row for row in more_rows if row.get("schedule") == "interleaved"]
    tasks = [Task(run_law, name) for name in quick]
    tasks += [Task(check_layout, row) for row in simplest]
    tasks += [Task(run_law, name) for name in law_names if name == "runs"]
    tasks += [Task(check_precision, row) for row in low_rows]
    tasks += [Task(check_layout, row) for row in long]
    tasks += [Task(check_layout, row) for row in more_rows if row not in long]
    return tasks + [Task(run_law, name) for name in others]


def _kept(faults: Iterable[str], without: Iterable[str]) -> list[str]:
    """Returns the faults, except those of checks that the user leaves out."""
    return [fault for fault in faults if not fault.startswith(tuple(without))]


def _disagreements(
    case: VerifyCase, laws: Mapping[str, Callable[[], list[str]]], without: list[str]
) -> list[str]:
    """Returns the violations by a model of the user's, up to the first law that is violated."""
    checks = [lambda: _agreement(case, without), *laws.values()]
    if "packing" not in without:
        checks.append(lambda: _violations({"packing": lambda: agreement.packing(case)}))
    for check in checks:
        faults = _kept(check(), without)
        if faults:
            return faults
    return []


def _agreement(case: VerifyCase, without: list[str]) -> list[str]:
    try:
        return agreement.violations(case, without)
    except ConfigError:
        raise
    except Exception as error:  # any error of the model
        line = certificate.describe_error(error) + causes.place_of_error(error)
        return [f"rows: the model raises {line} for {agreement.NUM_ROWS} or 8 rows"]


def _disagreement(
    case: VerifyCase,
    rows: list[Row],
    violations: list[str],
    without: list[str],
    log: Callable[[str], None],
) -> Certificate:
    """Returns the certificate of a model that one device already computes in different ways."""
    for fault in violations:
        log(f"FAILED on one device: {fault}")
    log(f"the {len(rows)} layouts were not compared: one device disagrees with itself")
    left_out = [f"all {len(rows)} layouts: one device disagrees with itself"]
    not_covered = certificate.not_covered(
        case.settings, case.raw, [], without=without, left_out=left_out
    )
    return Certificate(case.name, TOLERANCE, tuple(violations), (), not_covered)


def plan(
    case: VerifyCase, quick: bool, without: Iterable[str]
) -> tuple[list[Row], list[Row], list[str]]:
    """Returns the layouts, those in low precision, and the names of the laws."""
    rows = layouts.select(case, without)
    low_rows = []
    if quick:
        rows = rows[:QUICK_LAYOUTS]
    else:
        fixed = {"masks": case.is_text, "loss_scale": False, "dropout": False, "adapter": None}
        for row in rows[:NUM_LOW_PRECISION]:
            for dtype in ("bfloat16", "float16"):
                low_rows.append({**row, "dtype": dtype, **fixed})
    # Those with few axes first: a fault is the easiest to locate there.
    rows.sort(key=lambda row: sum(row.get(axis, 1) > 1 for axis in AXES))
    return rows, low_rows, list(laws(case, quick=quick))


# ---- laws that the model and the trainer must satisfy on one device ----

Law = Callable[[], str | None]  # returns how it is violated, or None


def laws(case: VerifyCase, *, quick: bool = False) -> dict[str, Callable[[], list[str]]]:
    """Returns the laws that apply to the case, by name.

    They are functions that return a line for each violation.
    """
    groups: dict[str, Callable[[], list[str]]] = {}
    if not quick:
        groups["runs"] = lambda: _violations(run_laws.laws(case))
    for name, law in _laws_of_the_trainer(case, quick).items():
        groups[name] = lambda name=name, law=law: _violations({name: law})
    return groups | laws_of_the_model(case, quick)


def laws_of_the_model(case: VerifyCase, quick: bool) -> dict[str, Callable[[], list[str]]]:
    """Returns the laws of the model and of its data, by name."""
    groups: dict[str, Callable[[], list[str]]] = {}
    for name, law in _laws_of_the_model(case, quick).items():
        groups[name] = lambda name=name, law=law: _violations({name: law})
    if case.is_text:
        vocab_size = case.raw["model"].get("vocab_size")
        groups["language model"] = lambda: reference_step.violations(
            case.model, case.start.params, _batch(case), vocab_size
        )
    return groups


class LawResult(NamedTuple):
    """The violations of a law, each a line."""

    name: str
    faults: list[str]
    seconds: float


def run_law(case: VerifyCase, name: str) -> LawResult:
    """Returns the result of the law of this name."""
    began = time.perf_counter()
    faults = check_law(case, name)
    return LawResult(name, faults, time.perf_counter() - began)


def check_law(case: VerifyCase, name: str) -> list[str]:
    """Returns a line for each violation of the law of this name, starting with the name."""
    return laws(case)[name]()


def _laws_of_the_trainer(case: VerifyCase, quick: bool) -> dict[str, Law]:
    """Returns the laws of the trainer itself: its steps, sums, random keys and optimizer."""
    raw, optim = case.raw, case.raw["optim"]
    laws: dict[str, Law] = {} if quick else rounding_laws.laws()
    for dtype in ("bfloat16",) if quick else ("bfloat16", "float16"):
        laws[f"{dtype} step"] = lambda dtype=dtype: precision.dtypes_of_data_parallelism(
            case, dtype
        )
    if case.is_text:
        laws["trainer"] = lambda: run_laws.trainer(case.shallow)
    if jax.device_count() > 1:
        laws["narrow sums"] = sync_laws.compressed
    laws["schedule"] = lambda: optimizer_laws.schedule(optim)
    laws["keys"] = lambda: key_laws.repeated(raw)
    if case.model.row_keys:
        laws["dropout"] = dropout_laws.independent
    if optim["build"] in optimizer_laws.BUILDERS:
        laws["optimizer"] = lambda: optimizer_laws.updates(optim)
    return laws


def _laws_of_the_model(case: VerifyCase, quick: bool) -> dict[str, Law]:
    """Returns the laws of the model and of its data."""
    laws: dict[str, Law] = {}
    if case.is_transformer:
        section = {key: value for key, value in case.raw["model"].items() if key != "build"}
        sections = variants.select(section)[: variants.NUM_QUICK if quick else None]
        for number, c in enumerate(sections):
            laws[f"transformer {number}"] = lambda c=c: model_laws.decoder_of(c, _rows(case, 5))
        if section["num_experts"]:
            few = {**section, "num_layers": 2, "first_dense_layers": 0}
            for name, law in expert_laws.LAWS.items():
                laws[name] = lambda law=law: law(few, _rows(case, 5))
    else:
        laws["gradient"] = lambda: model_laws.gradient(case.model, case.start.params, _batch(case))
    if case.must_predict_next_token:
        laws["targets"] = lambda: "not the next tokens" if case.rows is None else None
    return laws


def _batch(case: VerifyCase) -> Any:
    """Returns the first batch."""
    samples, _ = case.batches(packing=False, masks=case.is_text)
    return jax.tree.map(lambda leaf: leaf[: case.global_batch], samples)


def _rows(case: VerifyCase, num: int) -> Batch:
    """Returns the first rows of the first batch, as one document each."""
    batch = _batch(case)
    return Batch(batch.tokens[:num], batch.targets[:num], batch.weights[:num], None, None)


def _violations(named_laws: Mapping[str, Law]) -> list[str]:
    """Returns a line for each law that is violated."""
    lines = []
    for name, law in named_laws.items():
        try:
            fault = law()
        except Exception as error:  # any error of the code under test is a violation
            fault = certificate.describe_error(error)
        if fault:
            lines.append(f"{name}: {fault}")
    return lines


# ---- a layout compared with one device ----


def check_precision(case: VerifyCase, row: Row) -> Result:
    """Runs the steps on one layout in the row's low precision, see precision.py."""
    return precision.check_layout(case.for_layout(row), row, row["dtype"])


def check_layout(case: VerifyCase, row: Row) -> Result:
    """Runs the steps on one layout and compares them with the steps on one device."""
    differences: dict[str, float] = {}
    case = case.for_layout(row)

    def check() -> str | None:
        program = program_of(case, row)
        fault = _sharding_fault(program, row["zero_stage"])
        return fault or _compare(case, row, program, differences)

    return certificate.result_of(row, differences, check)


def _compare(
    case: VerifyCase, row: Row, program: Program, differences: dict[str, float]
) -> str | None:
    """Adds the largest difference of each kind to `differences`; returns the first fault."""
    packing, masks, dropout = row["packing"], row["masks"], bool(row.get("dropout"))
    samples, _ = case.batches(packing=packing, masks=masks)
    adapter = row.get("adapter")
    evaluated, *_ = case.steps(packing=packing, masks=masks, dropout=False, adapter=adapter)
    expected_steps = case.steps(packing=packing, masks=masks, dropout=dropout, adapter=adapter)
    zero_gradients = certificate.zero_gradient_names(expected_steps[0].grads)
    batches = _load(case, program, samples)

    def record(
        actual: certificate.Trees, expected: certificate.Trees, tolerance: float = TOLERANCE
    ) -> str | None:
        largest, fault = certificate.compare(
            actual, expected, tolerance=tolerance, zero_gradients=zero_gradients
        )
        for kind, difference in largest.items():
            differences[kind] = max(difference, differences.get(kind, 0.0))
        return fault

    start, step_program = case.adapters[adapter].start, program
    if row.get("loss_scale"):  # as for float16; a power of two, so the results must not change
        start = start._replace(loss_scale=states.start_loss_scale())
        step_program = _with_loss_scale(program)
    with program.active():
        evaluate = jax.jit(program.eval_step)
        evaluate = evaluate.lower(program.abstract_state.params, batches[0]).compile()
        step = step_program.compile(batches[0])

        initial = jax.device_get(program.initial_state(case.raw["train"]["seed"]).params)
        expected_initial = case.adapters[adapter].initial_params
        fault = record({"start": initial}, {"start": expected_initial}, INITIAL_TOLERANCE)

        state = jax.device_put(start, states.shardings_of(step_program.abstract_state))
        metrics = evaluate(state.params, batches[0])
        sums = {"loss": metrics.loss, "weight": metrics.weight, **metrics.extra}
        fault = fault or record({"evaluation": sums}, {"evaluation": evaluated.sums})

        for number, (batch, expected) in enumerate(zip(batches, expected_steps, strict=True)):
            if fault:
                break
            state, scalars = step(state, batch)
            host_state, host_scalars = jax.device_get((state, scalars))
            actual_values = _values(host_state, host_scalars, expected.means)
            fault = record(actual_values, _expected_values(number, expected))
            fault = fault or _frozen_fault(case.adapters[adapter], host_state.params)
            if fault:
                fault = f"step {number}: {fault}"
    return fault


def _frozen_fault(adapted: AdapterCase, params: Params) -> str | None:
    """Returns a message if a parameter that is not trained has changed in any bit."""
    before = jax.tree.leaves_with_path(adapted.start.params)
    for (path, first), leaf in zip(before, jax.tree.leaves(params), strict=True):
        name = certificate.name_of(path)
        if not adapted.adapter.trains(name) and first.tobytes() != np.asarray(leaf).tobytes():
            return f"parameters {name}: changed, but are frozen"
    return None


def _load(case: VerifyCase, program: Program, samples: Any) -> list[Any]:
    """Returns the batch of each step, sharded over the devices by the trainer's loader."""
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices], samples))
    size = case.global_batch
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    batches = [loader.read(number * size) for number in range(STEPS)]
    loader.close()
    return batches


def _with_loss_scale(program: Program) -> Program:
    """Returns the program for a state with a loss scale."""
    state = program.abstract_state
    scale = jax.eval_shape(states.start_loss_scale)
    scale = jax.tree.map(lambda leaf: leaf.update(sharding=state.step.sharding), scale)
    return dataclasses.replace(program, abstract_state=state._replace(loss_scale=scale))


def _values(state: TrainState, scalars: Scalars, names: Iterable[str]) -> certificate.Trees:
    """Returns the values after a step, by kind; `names` are those of the means."""
    grads, opt_state = state.opt_state
    return {
        "schedule": {"step": state.step, "learning_rate": scalars["learning_rate"]},
        "loss": {name: scalars[name] for name in names},
        "norm": scalars["grad_norm"],
        "gradients": grads,
        "parameters": state.params,
        "optimizer state": opt_state,
    }


def _expected_values(number: int, step: reference_step.Step) -> certificate.Trees:
    """Returns the same values of a step on one device."""
    return {
        "schedule": {"step": number + 1, "learning_rate": step.learning_rate},
        "loss": step.means,
        "norm": step.norm,
        "gradients": step.grads,
        "parameters": step.params,
        "optimizer state": step.opt_state,
    }


# ---- the shardings of a layout ----


def _sharding_fault(program: Program, zero_stage: int) -> str | None:
    """Returns a message if the batch or a tree of parameters is not sharded as the layout says."""
    sizes = program.mesh.shape
    (batch_axes,) = sharding.spec_for(("batch",), (program.mesh.size,), program.rules, sizes)
    expected = {axis for axis in BATCH_AXES if sizes[axis] > 1}
    if {axis for axis in sharding.axes_of(batch_axes) if sizes[axis] > 1} != expected:
        return f"rows of the batch are sharded over {batch_axes}, not over {BATCH_AXES}"

    state = program.abstract_state
    dims_by_name = {}
    for path, dims in jax.tree.leaves_with_path(
        program.model.axes, is_leaf=lambda node: isinstance(node, tuple)
    ):
        dims_by_name[certificate.name_of(path)] = dims
    # Each tree with its shardings, and the first ZeRO stage that shards it.
    moments = state.opt_state[0]
    trees = (
        ("parameters", 3, state.params, states.shardings_of(state.params)),
        ("gradients", 2, moments, program.grad_shardings),
        ("moments", 1, moments, states.shardings_of(moments)),
    )
    for kind, first_stage, leaves, shardings in trees:
        for (path, leaf), leaf_sharding in zip(
            jax.tree.leaves_with_path(leaves), jax.tree.leaves(shardings), strict=True
        ):
            dims = dims_by_name[certificate.name_of(path)]
            expected = _expected_axes(dims, leaf.shape, program.rules, sizes)
            if zero_stage < first_stage:
                expected -= {*sharding.ZERO_AXES}
            named = [axis for axes in leaf_sharding.spec for axis in sharding.axes_of(axes)]
            actual = {axis for axis in named if sizes[axis] > 1}
            wrong = sorted(expected ^ actual)
            if wrong:
                is_sharded = "sharded" if wrong[0] in actual else "replicated"
                name = certificate.name_of(path)
                return f"{kind} {name}: {is_sharded} over {wrong[0]} at ZeRO stage {zero_stage}"
    return None


def _expected_axes(
    dims: tuple, shape: tuple[int, ...], rules: sharding.Rules, sizes: Mapping[str, int]
) -> set[str]:
    """Returns the mesh axes that shard an array.

    For each dim they are those of the first rule that divides it.
    """
    expected: set[str] = set()
    for rule, rule_axes in rules:
        axes = {axis for axis in sharding.axes_of(rule_axes) if sizes[axis] > 1}
        num_shards = math.prod(sizes[axis] for axis in axes)
        dim_sizes = [size for name, size in zip(dims, shape, strict=True) if name == rule]
        if not axes & expected and any(size % num_shards == 0 for size in dim_sizes):
            expected |= axes
    return expected
