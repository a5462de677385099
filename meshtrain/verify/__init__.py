"""Proves a model's parallelism: in float64, every layout takes the same steps as one device."""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from meshtrain import state as states
from meshtrain.config.build import Parts, optimizer_builder
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.data.loader import Loader
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError, choice_faults
from meshtrain.models.base import Model
from meshtrain.parallel import sharding
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState
from meshtrain.step import Report
from meshtrain.verify import certificate, laws, layouts
from meshtrain.verify import reference_step as reference
from meshtrain.verify.certificate import Certificate, Result
from meshtrain.verify.covering import Row, pairwise
from meshtrain.verify.subject import STEPS, Subject, keep_gradients

TOLERANCE = 1e-10
BORN = 1e-6  # of initial parameters: a user's own may be drawn in float32
QUICK = 5  # layouts
OPTIONAL = ("packing", "masks", "weights", "causality", "cross-entropy", "gradient")
EXIT_DIFFERS = 1
# Numbers are wanted, not speed.
QUICKLY_COMPILED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def verify(
    settings: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    quick: bool = False,
    keep_sizes: bool = False,
    without: Iterable[str] = (),
    tell: Callable[[str], None] = print,
) -> Certificate:
    """Returns what came of every layout of a config, and of a model and data as `train` takes them.

    `quick` tries only the layouts that hold the most pairs. `keep_sizes` leaves the `model` section
    as it is. `without` names what the model is not made for: "packing", where it ignores
    `batch.segments`, or another of OPTIONAL. Raises ConfigError for what the user has to change.
    """
    if faults := [fault for name in without for fault in choice_faults("without", name, OPTIONAL)]:
        raise ConfigError(*faults)
    with jax.enable_x64(True):
        subject = Subject(settings, model, data, keep_sizes=keep_sizes)
        rows = pairwise(layouts.possible(subject, without))
        rows = rows[:QUICK] if quick else rows
        rows.sort(key=lambda row: sum(row.get(axis, 1) > 1 for axis in AXES))
        tell(f"{subject.name}: {states.count(subject.start.params):,} parameters, float64")
        tell(
            f"{len(rows)} layouts of {jax.device_count()} devices, {STEPS} steps each, against one"
        )
        broken = [law for law in broken_laws(subject) if not law.startswith(tuple(without))]
        for law in broken:
            tell(f"FAILED on one device: {law}")
        results = []
        for row in rows:
            results.append(check(subject, row))
            tell(certificate.line(results[-1]))
    return Certificate(subject.name, TOLERANCE, tuple(broken), tuple(results))


def broken_laws(subject: Subject) -> list[str]:
    """Returns what is wrong on one device already, which no comparison of layouts would show."""
    return laws.broken(subject)


def check(subject: Subject, row: Row) -> Result:
    """Takes the steps on one layout and compares them with those of one device."""
    began, differences = time.perf_counter(), {}
    try:
        program = _program(subject, row)
        fault = _misplaced(program, row["zero_stage"]) or _compare(
            subject, row, program, differences
        )
    except ConfigError:
        raise
    except Exception as error:  # XLA's faults are of many types, and each is a finding
        fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Result(row, differences, fault, time.perf_counter() - began)


def _program(subject: Subject, row: Row) -> Program:
    """Returns the trainer's own program of a layout; its optimizer also keeps the gradients it gets."""
    raw = copy.deepcopy(subject.raw)
    raw["mesh"] = {axis: row.get(axis, 1) for axis in AXES}
    raw["optim"]["clip_norm"] = subject.clip_norm
    raw["train"].update({key: row[key] for key in ("zero_stage", "num_microbatches", "remat")})
    if row.get("schedule"):
        raw["pipeline"].update({key: row[key] for key in ("schedule", "num_chunks", "keep")})
    if row["sequence_parallel"]:
        raw["rules"] = (("residual_seq", ("context", "tensor")), *raw["rules"])
    cfg = parse(raw, num_devices=jax.device_count())
    make = optimizer_builder(cfg)
    parts = Parts(subject.model, lambda schedule: keep_gradients(make(schedule)))
    return assemble(cfg, parts)


def _compare(
    subject: Subject, row: Row, program: Program, differences: dict[str, float]
) -> str | None:
    """Fills in the largest difference of each kind of value; returns the first that is too large."""
    varied = {key: row[key] for key in ("packing", "masks")}
    due, (samples, _) = subject.steps(**varied), subject.batches(**varied)
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices], samples))
    size = subject.global_batch
    loader = Loader(source, program.mesh, program.rules, global_batch=size)
    batches = [loader.read(number * size) for number in range(STEPS)]
    loader.close()
    zero = certificate.without_gradient(due[0].grads)

    def compared(seen, expected, tolerance=TOLERANCE):
        found, fault = certificate.compare(seen, expected, tolerance=tolerance, zero=zero)
        for kind, difference in found.items():
            differences[kind] = max(difference, differences.get(kind, 0.0))
        return fault

    start = subject.start
    if row.get("loss_scale"):  # float16's: a power of two, so nothing is to change
        start, scaled = start._replace(loss_scale=states.start_loss_scale()), _scaled(program)
    else:
        scaled = program
    with program.active():
        evaluate = jax.jit(program.eval_step)
        evaluate = evaluate.lower(program.abstract_state.params, batches[0]).compile()
        step = scaled.compile(batches[0])
        born = program.start(subject.raw["train"]["seed"]).params
        fault = compared({"start": jax.device_get(born)}, {"start": subject.start.params}, BORN)
        state = jax.device_put(start, states.shardings_of(scaled.abstract_state))
        held_out = evaluate(state.params, batches[0]).mean()
        fault = fault or compared({"evaluation": held_out}, {"evaluation": due[0].means})
        for number, (batch, expected) in enumerate(zip(batches, due, strict=True)):
            if fault:
                break
            state, report = step(state, batch)
            seen, wanted = _values(number, *jax.device_get((state, report)), expected)
            if fault := compared(seen, wanted):
                fault = f"step {number}: {fault}"
    return fault


def _scaled(program: Program) -> Program:
    """Returns the program for a state with a loss scale."""
    state = program.abstract_state
    scale = jax.eval_shape(states.start_loss_scale)
    scale = jax.tree.map(lambda leaf: leaf.update(sharding=state.step.sharding), scale)
    return dataclasses.replace(program, abstract_state=state._replace(loss_scale=scale))


def _values(
    number: int, state: TrainState, report: Report, due: reference.Step
) -> tuple[certificate.Trees, certificate.Trees]:
    """Returns what a step made and what it should have made, by kind."""
    grads, opt_state = state.opt_state
    return {
        "schedule": {"step": state.step, "learning_rate": report["learning_rate"]},
        "loss": {name: report[name] for name in due.means},
        "norm": report["grad_norm"],
        "gradients": grads,
        "parameters": state.params,
        "optimizer state": opt_state,
    }, {
        "schedule": {"step": number + 1, "learning_rate": due.learning_rate},
        "loss": due.means,
        "norm": due.norm,
        "gradients": due.grads,
        "parameters": due.params,
        "optimizer state": due.opt_state,
    }


def _misplaced(program: Program, zero_stage: int) -> str | None:
    """Returns what is not cut as the layout says: the rows of the batch, or what ZeRO cuts over fsdp."""
    sizes, fsdp = program.mesh.shape, program.mesh.shape["fsdp"]
    (cut,) = sharding.spec_for(("batch",), (program.mesh.size,), program.rules, sizes)
    if math.prod(sizes[axis] for axis in sharding.axes_of(cut)) != sizes["data"] * fsdp:
        return f"rows of the batch are cut over {cut}, not over data and fsdp"
    state, first = program.abstract_state, dict(reversed(program.rules))
    trees = {
        "parameters": (3, states.shardings_of(state.params)),
        "gradients": (2, program.grad_shardings),
        "moments": (1, states.shardings_of(state.opt_state[0])),
    }
    names = jax.tree.leaves(program.model.axes, is_leaf=lambda node: isinstance(node, tuple))
    leaves = jax.tree.leaves_with_path(state.params)
    for kind, (first_stage, places) in trees.items():
        for (path, leaf), dims, place in zip(leaves, names, jax.tree.leaves(places), strict=True):
            sized = zip(dims, leaf.shape, strict=True)
            divides = any(first.get(name) == "fsdp" and size % fsdp == 0 for name, size in sized)
            is_cut = any("fsdp" in sharding.axes_of(axes) for axes in place.spec)
            if fsdp > 1 and divides and is_cut != (zero_stage >= first_stage):
                how = "cut" if is_cut else "whole"
                return f"{kind} {certificate.name_of(path)}: {how} over fsdp at ZeRO stage {zero_stage}"
    return None
