"""Verifies low precision: a layout loses no more to rounding in bfloat16 and float16 than one device does.

`check_layout` compares the trainer's step with float64, at parameters that float32 represents exactly:

  error    the root mean square of the error of each gradient is at most MAX_RATIO times the error of a
           plain step on one device in the same dtype
  sum      gradients are linear in the token weights. The gradient of all tokens equals the sum of two
           gradients, of half the micro-batches and data shards each, to float32 rounding
  update   the new parameters are the optimizer's, computed from the gradients, to float32 rounding
  dtype    the transformer's softmax, norms, rope and loss, and the optimizer, compute in float32
  skip     a float16 step that overflows leaves parameters and optimizer state bit-equal, and halves
           the loss scale

The errors are pooled over NUM_DRAWS draws of the parameters, because those of few numbers are noise.
The ratio of two such errors of n independent numbers has a relative standard error of about 1/sqrt(n);
where four of them exceed MAX_RATIO (n below 98: the loss), exp(4/sqrt(n)) is allowed.
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
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.certificate import MAX_RATIO, Result
from meshtrain.tools.verify.laws.precision import low_precision_operation
from meshtrain.tools.verify.pairwise import Row
from meshtrain.tools.verify.reference import step as reference_step

NUM_DRAWS = 16

SUM_TOLERANCE = (
    1e-5  # relative to the largest value of a leaf; bfloat16 rounds by 4e-3, float16 by 5e-4
)

UPDATE_TOLERANCE = 1e-3  # relative to the largest update of a leaf

OVERFLOWING_SCALE = 2.0**40

MakeProgram = Callable[[VerifyCase, Row], Program]


class Expected(NamedTuple):
    """What all layouts of one dtype and batch are compared with."""

    params: list[Params]  # float32, of each draw
    values: list[Any]  # float64 loss and gradients of each draw
    errors: dict[str, float]  # root mean square of the errors on one device, by name


def check_layout(subject: VerifyCase, row: Row, dtype: str, make_program: MakeProgram) -> Result:
    """Runs steps on one layout in `dtype`, with float32 parameters, and compares their errors.

    `make_program(subject, row)` returns the trainer's program, whose optimizer state also holds the
    gradients. The differences in the Result are multiples of the errors on one device.
    """
    ratios: dict[str, float] = {}
    # Weights always differ between tokens; float16 always has a loss scale. Masks of dropout are the same in any dtype.
    row = {**row, "dtype": dtype, "masks": subject.is_text, "loss_scale": False, "dropout": False}

    def check() -> str | None:
        expected = expect(subject, dtype, row["packing"])
        with jax.enable_x64(False):  # the program that `train` runs
            return _compare(PrecisionCase(subject, row, dtype, make_program), expected, ratios)

    return certificate.result_of(row, ratios, check)


def in_dtype(subject: VerifyCase, dtype: str) -> VerifyCase:
    """Returns the subject with the settings of a run in `dtype`, without clipping."""
    lower = copy.copy(subject)
    lower.raw, lower.clip_norm = copy.deepcopy(subject.raw), math.inf
    lower.raw["train"].update(dtype=dtype, param_dtype="float32")
    lower.raw["optim"].update(moment_dtype="float32")
    return lower


class PrecisionCase:
    """The train step of one layout in low precision."""

    def __init__(self, subject: VerifyCase, row: Row, dtype: str, make_program: MakeProgram):
        self.subject, self.row = subject, row
        self.program = make_program(in_dtype(subject, dtype), row)
        self.samples = _batches(subject, row["packing"])[0]
        self.batch = self.load(self.samples)
        with self.program.active():
            self.step = self.program.compile(self.batch)
        start = subject.start
        if dtype == "float16":
            start = start._replace(loss_scale=states.start_loss_scale())
        abstract = self.program.abstract_state
        self.start = jax.tree.map(
            lambda leaf, like: np.asarray(leaf, like.dtype), jax.device_get(start), abstract
        )

    def load(self, samples: Any) -> Any:
        """Returns the batch of the first step, sharded over the devices."""
        size = self.subject.global_batch
        source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices], samples))
        loader = Loader(source, self.program.mesh, self.program.rules, global_batch=size)
        batch = loader.read(0)
        loader.close()
        return batch

    @functools.cached_property
    def ordered_step(self) -> jax.stages.Compiled:
        """The step; on GPUs with deterministic kernels, because the fast ones add up in another order in each run."""
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


@functools.lru_cache(maxsize=4)
def expect(subject: VerifyCase, dtype: str, packing: bool) -> Expected:
    """Returns the draws of the parameters, their float64 gradients, and the errors of one device."""
    random = np.random.default_rng(0)
    batch = _batches(subject, packing)[1]

    def draw(leaf):
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        noise = 0.1 * (leaf.std() or 1) * random.normal(size=leaf.shape)
        return (leaf + noise).astype(np.float32)

    params = [jax.tree.map(draw, subject.start.params) for _ in range(NUM_DRAWS)]
    in_float64 = [blocks.to_compute_dtype(one, "float64") for one in params]
    exact = _compiled(subject, "float64")
    values = [jax.device_get(exact(one, batch)) for one in in_float64]
    with jax.enable_x64(False):
        rounded = _compiled(subject, dtype)
        found = [jax.device_get(rounded(one, batch)) for one in params]
    return Expected(params, values, _errors(found, values))


@functools.lru_cache(maxsize=4)
def _compiled(subject: VerifyCase, dtype: str) -> Callable:
    """Returns the compiled function (params, batch) -> mean loss and its gradients: a plain step in `dtype`."""
    scale = states.FIRST_LOSS_SCALE if dtype == "float16" else 1.0

    def total(params, batch):
        sums = reference_step.loss(subject.model, params, batch)
        return sums.loss * scale, sums

    def means(params, batch):
        grads, sums = jax.grad(total, has_aux=True)(blocks.to_compute_dtype(params, dtype), batch)
        weight = sums.weight * scale
        grads = jax.tree.map(lambda leaf: leaf.astype(weight.dtype) / weight, grads)
        return {"loss": sums.loss / sums.weight, "gradients": grads}

    return jax.jit(means)


def _batches(subject: VerifyCase, packing: bool) -> tuple[Any, Any]:
    """Returns all samples and the batch of the first step, one document per row; floats in float32."""
    samples, (batch, *_) = subject.batches(packing=packing, masks=subject.is_text)

    def narrow(leaf):
        return leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf

    return jax.tree.map(narrow, (samples, batch))


def _errors(found: list[Any], expected: list[Any]) -> dict[str, float]:
    """Returns the root mean square of the errors of each leaf, over all draws."""
    squares: dict[str, list[float]] = {}
    for one, wanted in zip(found, expected, strict=True):
        leaves = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(one), strict=True)
        for (path, exact), value in leaves:
            square = np.mean((np.asarray(value, np.float64) - exact) ** 2)
            squares.setdefault(certificate.name_of(path), []).append(square)
    return {name: math.sqrt(np.mean(values)) for name, values in squares.items()}


def _compare(layout: PrecisionCase, expected: Expected, ratios: dict[str, float]) -> str | None:
    """Adds the largest error of each kind to `ratios`; returns the first fault."""
    found, faults = [], []
    for params in expected.params:
        state, scalars = layout.run(params=params)
        found.append({"loss": scalars["loss"], "gradients": state.opt_state[0]})
        faults.append("a step was skipped" if scalars["skipped"] else None)
    faults += error_faults(found, expected, ratios)
    faults.append(dtype_fault(layout))
    faults.append(sum_fault(layout, expected.params[-1]))
    faults.append(update_fault(layout, expected.params[-1], state))
    if state.loss_scale is not None:
        faults.append(skip_fault(layout, state))
    return next(filter(None, faults), None)


def dtype_fault(layout: PrecisionCase) -> str | None:
    """Dtype: see FLOAT32_OPERATIONS. Another model may use them in low precision on purpose."""
    if layout.subject.name != "meshtrain.models.transformer:build":
        return None
    program = layout.program
    with program.active():
        jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state, layout.batch)
    found = low_precision_operation(jaxpr)
    return found and f"dtype: the step computes {found}"


def error_faults(found: list[Any], expected: Expected, ratios: dict[str, float]) -> list[str]:
    """Returns a message for each leaf with too large an error."""
    faults, sizes = [], jax.tree.map(np.size, expected.values[0])
    numbers = {certificate.name_of(path): size for path, size in jax.tree.leaves_with_path(sizes)}
    for name, error in _errors(found, expected.values).items():
        of_one = expected.errors[name]
        ratio = error / of_one if of_one else (math.inf if error else 1.0)
        kind = name.partition("/")[0]
        ratios[kind] = max(ratio, ratios.get(kind, 0.0))
        if not ratio <= max(MAX_RATIO, math.exp(4 / math.sqrt(NUM_DRAWS * numbers[name]))):
            faults.append(
                f"{name}: its error is {error:.3g} here, {of_one:.3g} on one device: {ratio:.2f} times"
            )
    return faults


def sum_fault(layout: PrecisionCase, params: Params) -> str | None:
    """Sum: the gradient of all tokens is the sum of those of two halves of micro-batches and data shards."""
    rows, shards = np.arange(layout.subject.global_batch), layout.program.mesh.shape["data"]
    num_microbatches = layout.row["num_microbatches"]
    if num_microbatches == 1 and layout.program.model.block is None:
        shards = 1  # such a loss may mix rows, so XLA sums over data
    if not layout.subject.is_text or num_microbatches * shards == 1:
        return None
    # Rows m, m + M, ... form micro-batch m; each data shard has consecutive rows.
    half = (rows % num_microbatches + rows * shards // len(rows)) % 2
    sums = []
    for keep in (np.ones_like(half), half, 1 - half):
        weights = layout.samples.weights[: len(rows)] * keep[:, None].astype(np.float32)
        batch = layout.load(layout.samples._replace(weights=weights))
        state, _ = layout.run(batch, ordered=True, params=params)
        total = np.sum(weights, dtype=np.float64)
        sums.append(jax.tree.map(lambda leaf, total=total: leaf * total, state.opt_state[0]))
    every, *halves = sums
    _, fault = certificate.compare(
        {"gradients": jax.tree.map(np.add, *halves)},
        {"gradients": every},
        tolerance=SUM_TOLERANCE,
    )
    return fault and "sum over micro-batches and data: " + fault.replace(
        "on one device", "as the sum of two halves"
    )


def update_fault(layout: PrecisionCase, params: Params, state: states.TrainState) -> str | None:
    """Update: the new parameters are the optimizer's, in float64, from the layout's own gradients."""
    optimizer = layout.program.optimizer
    with jax.enable_x64(True):
        wide, grads = (
            blocks.to_compute_dtype(tree, "float64") for tree in (params, state.opt_state[0])
        )
        updates, _ = optimizer.update(grads, optimizer.init(wide), wide)
        updates = jax.device_get(updates)
    for (path, update), before, after in zip(
        jax.tree.leaves_with_path(updates),
        *map(jax.tree.leaves, (params, state.params)),
        strict=True,
    ):
        rounding = np.finfo(np.float32).eps * np.abs(before).max()
        allowed = UPDATE_TOLERANCE * np.abs(update).max() + rounding
        error = np.abs(np.asarray(after, np.float64) - before - update).max()
        if not error <= allowed:
            return f"update of {certificate.name_of(path)}: off by {error:.3g}; {allowed:.3g} is allowed"
    return None


def skip_fault(layout: PrecisionCase, state: states.TrainState) -> str | None:
    """Skip: a step that overflows changes only the step number and the loss scale, which is halved."""
    scale = states.LossScale(np.float32(OVERFLOWING_SCALE), np.int32(7))
    before = state._replace(loss_scale=scale)
    after, scalars = layout.run(**before._asdict())
    halved = states.LossScale(np.float32(OVERFLOWING_SCALE / 2), np.int32(0))
    wanted = before._replace(step=before.step + 1, loss_scale=halved)
    if not scalars["skipped"]:
        return f"skip: a step with a loss scale of {OVERFLOWING_SCALE:g} was not skipped"
    leaves = zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(after), strict=True)
    for (path, expected), found in leaves:
        if np.asarray(expected).tobytes() != np.asarray(found).tobytes():
            return f"skip: {certificate.name_of(path)} changed in a step that was skipped"
    return None
