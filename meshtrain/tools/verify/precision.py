"""Verifies low precision: a layout loses no more to rounding in 16 bits than one device does.

`check_layout` compares the trainer's step in bfloat16 or float16 with float64, at parameters that
float32 represents exactly:

  error    the root mean square of the error of each gradient is at most MAX_RATIO times the error
           of a plain step on one device in the same dtype
  sum      gradients are linear in the token weights. The gradient of all tokens equals the sum of
           two gradients, of half the micro-batches and data shards each, to float32 rounding
  update   the new parameters are the optimizer's, computed from the gradients, to float32 rounding
  dtype    what must be computed in float32 is: see laws/dtypes.py
  skip     a float16 step that overflows leaves parameters and optimizer state bit-equal, and halves
           the loss scale

The errors are pooled over NUM_DRAWS draws of the parameters, because those of few numbers are
noise. The ratio of two such errors of n independent numbers has a relative standard error of about
1/sqrt(n); where four of them exceed MAX_RATIO (n below 98: the loss), exp(4/sqrt(n)) is allowed.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.data.loader import Loader
from meshtrain.data.source import Source
from meshtrain.models import blocks
from meshtrain.models.base import Params
from meshtrain.program import Program
from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.case import TRANSFORMER, VerifyCase, program_of
from meshtrain.tools.verify.certificate import MAX_RATIO, Result
from meshtrain.tools.verify.laws import dtypes
from meshtrain.tools.verify.pairwise import Row
from meshtrain.tools.verify.reference import step as reference_step

NUM_DRAWS = 16

# Relative to the largest value of a leaf; bfloat16 rounds by 4e-3, float16 by 5e-4.
SUM_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 1e-3  # relative to the largest update of a leaf
OVERFLOWING_SCALE = 2.0**40
MakeProgram = Callable[[VerifyCase, Row], Program]


def check_layout(
    case: VerifyCase, row: Row, dtype: str, make_program: MakeProgram = program_of
) -> Result:
    """Runs steps on one layout in `dtype`, with float32 parameters, and compares their errors.

    `make_program(case, row)` returns the trainer's program, whose optimizer state also holds the
    gradients. The differences in the Result are multiples of the errors on one device.
    """
    ratios: dict[str, float] = {}
    # Weights always differ between tokens; float16 always has a loss scale. Masks of dropout are
    # the same in any dtype.
    row = {**row, "dtype": dtype, "masks": case.is_text, "loss_scale": False, "dropout": False}

    def check() -> str | None:
        expected = expect(case, dtype, row["packing"])
        with jax.enable_x64(False):  # the program that `train` runs
            return _compare(PrecisionCase(case, row, dtype, make_program), expected, ratios)

    return certificate.result_of(row, ratios, check)


# ---- one device: what all layouts of a dtype are compared with ----


class Expected(NamedTuple):
    """What all layouts of one dtype and batch are compared with."""

    params: list[Params]  # float32, of each draw
    values: list[Any]  # float64 loss and gradients of each draw
    errors: dict[str, float]  # root mean square of the errors on one device, by name


@functools.lru_cache(maxsize=4)
def expect(case: VerifyCase, dtype: str, packing: bool) -> Expected:
    """Returns draws of the parameters, their float64 gradients, and the errors of one device."""
    random = np.random.default_rng(0)
    _, batch = _batches(case, packing)

    def draw(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        noise = 0.1 * (leaf.std() or 1) * random.normal(size=leaf.shape)
        return (leaf + noise).astype(np.float32)

    draws = [jax.tree.map(draw, case.start.params) for _ in range(NUM_DRAWS)]
    exact = _compiled(case, "float64")
    exact_values = []
    for params in draws:
        wide = blocks.to_compute_dtype(params, "float64")
        exact_values.append(jax.device_get(exact(wide, batch)))
    with jax.enable_x64(False):
        rounded = _compiled(case, dtype)
        values = [jax.device_get(rounded(params, batch)) for params in draws]
    return Expected(draws, exact_values, _errors(values, exact_values))


@functools.lru_cache(maxsize=4)
def _compiled(case: VerifyCase, dtype: str) -> Callable:
    """Returns the compiled function (params, batch) -> mean loss and its gradients.

    It is that of a plain step in `dtype`.
    """
    scale = states.FIRST_LOSS_SCALE if dtype == "float16" else 1.0

    def total(params, batch):
        sums = reference_step.loss(case.model, params, batch)
        return sums.loss * scale, sums

    def means(params, batch):
        grads, sums = jax.grad(total, has_aux=True)(blocks.to_compute_dtype(params, dtype), batch)
        weight = sums.weight * scale
        grads = jax.tree.map(lambda leaf: leaf.astype(weight.dtype) / weight, grads)
        return {"loss": sums.loss / sums.weight, "gradients": grads}

    return jax.jit(means)


def _batches(case: VerifyCase, packing: bool) -> tuple[Any, Any]:
    """Returns all samples, and the batch of the first step with one document per row.

    Floats are float32.
    """
    samples, (batch, *_) = case.batches(packing=packing, masks=case.is_text)

    def narrow(leaf):
        return leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf

    return jax.tree.map(narrow, (samples, batch))


def _errors(values: list[Any], exact_values: list[Any]) -> dict[str, float]:
    """Returns the root mean square of the errors of each leaf, over all draws."""
    squares: dict[str, list[float]] = {}
    for rounded_tree, exact_tree in zip(values, exact_values, strict=True):
        exact_leaves = jax.tree.leaves_with_path(exact_tree)
        for (path, exact), value in zip(exact_leaves, jax.tree.leaves(rounded_tree), strict=True):
            square = np.mean((np.asarray(value, np.float64) - exact) ** 2)
            squares.setdefault(certificate.name_of(path), []).append(square)
    return {name: math.sqrt(np.mean(draws)) for name, draws in squares.items()}


# ---- a layout ----


class PrecisionCase:
    """The train step of one layout in low precision."""

    def __init__(self, case: VerifyCase, row: Row, dtype: str, make_program: MakeProgram):
        self.case, self.row, self.dtype = case, row, dtype
        self.program = make_program(in_dtype(case, dtype), row)
        self.samples, _ = _batches(case, row["packing"])
        self.batch = self.load(self.samples)
        with self.program.active():
            self.step = self.program.compile(self.batch)
        start = case.start
        if dtype == "float16":
            start = start._replace(loss_scale=states.start_loss_scale())
        self.start = jax.tree.map(
            lambda leaf, like: np.asarray(leaf, like.dtype),
            jax.device_get(start),
            self.program.abstract_state,
        )

    def load(self, samples: Any) -> Any:
        """Returns the batch of the first step, sharded over the devices."""
        source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices], samples))
        loader = Loader(
            source,
            self.program.mesh,
            self.program.rules,
            global_batch=self.case.global_batch,
        )
        batch = loader.read(0)
        loader.close()
        return batch

    @functools.cached_property
    def ordered_step(self) -> jax.stages.Compiled:
        """The step, on GPUs with deterministic kernels.

        The fast ones add up in another order in each run.
        """
        if self.program.mesh.devices.flat[0].platform != "gpu":
            return self.step
        options = {**self.program.compiler_options, "xla_gpu_deterministic_ops": True}
        program = dataclasses.replace(self.program, compiler_options=options)
        with program.active():
            return program.compile(self.batch)

    def run(
        self, batch: Any = None, *, ordered: bool = False, **changes: Any
    ) -> tuple[states.TrainState, dict[str, Any]]:
        """Returns the state and the scalars after one step from the start with these `changes`."""
        shardings = states.shardings_of(self.program.abstract_state)
        state = jax.device_put(self.start._replace(**changes), shardings)
        step = self.ordered_step if ordered else self.step
        with self.program.active():
            return jax.device_get(step(state, self.batch if batch is None else batch))


def in_dtype(case: VerifyCase, dtype: str) -> VerifyCase:
    """Returns the case with the settings of a run in `dtype`, without clipping."""
    lower = copy.copy(case)
    lower.raw = copy.deepcopy(case.raw)
    lower.raw["train"].update(dtype=dtype, param_dtype="float32")
    lower.raw["optim"].update(moment_dtype="float32")
    lower.clip_norm = math.inf
    return lower


def _compare(layout: PrecisionCase, expected: Expected, ratios: dict[str, float]) -> str | None:
    """Adds the largest error of each kind to `ratios`; returns the first fault."""
    values, faults = [], []
    state = layout.start
    for params in expected.params:
        state, scalars = layout.run(params=params)
        grads, _ = state.opt_state
        values.append({"loss": scalars["loss"], "gradients": grads})
        if scalars["skipped"]:
            faults.append("a step was skipped")
    faults += error_faults(values, expected, ratios)
    # The other checks look at the last of the steps.
    params = expected.params[-1]
    faults.append(dtype_fault(layout.case, layout.row, layout.dtype))
    faults.append(sum_fault(layout, params))
    faults.append(update_fault(layout, params, state))
    if state.loss_scale is not None:
        faults.append(skip_fault(layout, state))
    return next(filter(None, faults), None)


# ---- the checks, named as in the docstring above ----


def error_faults(values: list[Any], expected: Expected, ratios: dict[str, float]) -> list[str]:
    """Error: returns a message for each leaf with too large an error."""
    faults = []
    leaves = jax.tree.leaves_with_path(expected.values[0])
    sizes = {certificate.name_of(path): np.size(leaf) for path, leaf in leaves}
    for name, error in _errors(values, expected.values).items():
        error_on_one = expected.errors[name]
        if error_on_one:
            ratio = error / error_on_one
        else:
            ratio = math.inf if error else 1.0
        kind = name.partition("/")[0]
        ratios[kind] = max(ratio, ratios.get(kind, 0.0))
        # Few numbers have noisy errors, see above.
        allowed = max(MAX_RATIO, math.exp(4 / math.sqrt(NUM_DRAWS * sizes[name])))
        if not ratio <= allowed:
            faults.append(
                f"{name}: its error is {error:.3g} here, {error_on_one:.3g} on one device: "
                f"{ratio:.2f} times"
            )
    return faults


def dtype_fault(case: VerifyCase, row: Row, dtype: str) -> str | None:
    """Dtype: what must be computed in float32 is, in the step and the evaluation of a layout."""
    program = program_of(in_dtype(case, dtype), row, dtypes.with_scope)
    samples, _ = _batches(case, row["packing"])
    size = case.global_batch
    batch = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[:size], samples))
    fault = dtypes.fault_of(program, batch, is_transformer=case.name == TRANSFORMER)
    return fault and f"dtype: {fault}"


def dtypes_of_data_parallelism(case: VerifyCase, dtype: str) -> str | None:
    """Law: the dtypes of the step with two micro-batches on each shard of the batch."""
    row = {"data": jax.device_count(), "zero_stage": 0, "num_microbatches": 2}
    row |= {"packing": False, "masks": case.is_text, "sequence_parallel": False}
    case = case.shallow  # made in float64
    with jax.enable_x64(False):
        return dtype_fault(case, row, dtype)


def sum_fault(layout: PrecisionCase, params: Params) -> str | None:
    """Sum: the gradient of all tokens is the sum of the gradients of two halves.

    Each half has the tokens of half the micro-batches and data shards.
    """
    num_rows = layout.case.global_batch
    num_microbatches = layout.row["num_microbatches"]
    shards = layout.program.mesh.shape["data"]
    if num_microbatches == 1 and layout.program.model.block is None:
        shards = 1  # such a loss may mix rows, so XLA sums over data
    if not layout.case.is_text or num_microbatches * shards == 1:
        return None
    # Rows m, m + M, ... form micro-batch m; each data shard has consecutive rows.
    rows = np.arange(num_rows)
    half = (rows % num_microbatches + rows * shards // num_rows) % 2
    sums = []
    for keep in (np.ones_like(half), half, 1 - half):
        weights = layout.samples.weights[:num_rows] * keep[:, None].astype(np.float32)
        batch = layout.load(layout.samples._replace(weights=weights))
        state, _ = layout.run(batch, ordered=True, params=params)
        grads, _ = state.opt_state
        total = np.sum(weights, dtype=np.float64)
        sums.append(jax.tree.map(lambda leaf, total=total: leaf * total, grads))
    every, *halves = sums
    _, fault = certificate.compare(
        {"gradients": jax.tree.map(np.add, *halves)},
        {"gradients": every},
        tolerance=SUM_TOLERANCE,
        where="as the sum of two halves",
    )
    return fault and f"sum over micro-batches and data: {fault}"


def update_fault(layout: PrecisionCase, params: Params, state: states.TrainState) -> str | None:
    """Update: the new parameters are the optimizer's, in float64, from the layout's gradients."""
    optimizer = layout.program.optimizer
    grads, _ = state.opt_state
    with jax.enable_x64(True):
        wide_params = blocks.to_compute_dtype(params, "float64")
        wide_grads = blocks.to_compute_dtype(grads, "float64")
        updates, _ = optimizer.update(wide_grads, optimizer.init(wide_params), wide_params)
        updates = jax.device_get(updates)
    for (path, update), before, after in zip(
        jax.tree.leaves_with_path(updates),
        jax.tree.leaves(params),
        jax.tree.leaves(state.params),
        strict=True,
    ):
        rounding = np.finfo(np.float32).eps * np.abs(before).max()
        allowed = UPDATE_TOLERANCE * np.abs(update).max() + rounding
        error = np.abs(np.asarray(after, np.float64) - before - update).max()
        if not error <= allowed:
            name = certificate.name_of(path)
            return f"update of {name}: off by {error:.3g}; {allowed:.3g} is allowed"
    return None


def skip_fault(layout: PrecisionCase, state: states.TrainState) -> str | None:
    """Skip: a step that overflows changes only the step number, and halves the loss scale."""
    scale = states.LossScale(np.float32(OVERFLOWING_SCALE), np.int32(7))
    before = state._replace(loss_scale=scale)
    after, scalars = layout.run(**before._asdict())
    if not scalars["skipped"]:
        return f"skip: a step with a loss scale of {OVERFLOWING_SCALE:g} was not skipped"
    halved = states.LossScale(np.float32(OVERFLOWING_SCALE / 2), np.int32(0))
    expected = before._replace(step=before.step + 1, loss_scale=halved)
    expected_leaves = jax.tree.leaves_with_path(expected)
    for (path, wanted), leaf in zip(expected_leaves, jax.tree.leaves(after), strict=True):
        if np.asarray(wanted).tobytes() != np.asarray(leaf).tobytes():
            return f"skip: {certificate.name_of(path)} changed in a step that was skipped"
    return None
