"""Laws of dtypes: what must be computed in float32 is, by the dtypes of the traced step.

They read the equations of the step that `train` runs and of its evaluation, in bfloat16 or float16;
nothing is compiled or run. A scope marks the equations of the model; all others are of the trainer.

The trainer, around any model:

  arithmetic  none in 16 bits: sums of gradients over micro-batches, shards and stages, clipping,
              optimizer, averages, loss scale, sums of the loss and of metrics
  rounding    only parameters are rounded to 16 bits, once

The package's transformer:

  functions   FUNCTIONS, such as the softmax, norms, rope angles, losses and routers use, have no
              argument in 16 bits, and none that subtraction, squares or products of two activations
              rounded to 16 bits on the way
  choices     experts are chosen by scores that were never in 16 bits
  statistics  results of `rsqrt`, `sin`, `log`, maxima and sums of exponentials are not rounded
              before they are used
  sums        those of more than MAX_TERMS terms, and those over iterations of a loop
  loss        nothing is computed in 16 bits between the logits and the loss

Known and allowed: results of matrix products are rounded once, logits too; the outputs of the
experts of one token are added in the compute dtype (EXPERTS), and the gradients of two uses of a
value; the code of documents for cuDNN (SEGMENT_CODE) is rounded alike in queries and keys.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshtrain.models.base import Model
from meshtrain.ops.cudnn import SEGMENT_CODE
from meshtrain.ops.experts import EXPERTS
from meshtrain.program import Program
from meshtrain.tools.verify.causes import sizes_of_scan

MODEL = "verified_model"  # the scope of the model's equations
# That of a sum of which all terms but one are zero: see pipeline/per_stage.py, models/mixture.py.
SHARE = "share"
HALF = ("bfloat16", "float16")

# Their errors grow with the values or the number of terms.
FUNCTIONS = {"exp", "exp2", "expm1", "log", "log1p", "rsqrt", "sqrt", "cbrt", "sin", "cos", "tan"}
FUNCTIONS |= {"cumsum", "cumprod", "cumlogsumexp", "reduce_max", "reduce_prod", "argmax"}
CHOICES = {"top_k", "sort"}
STATISTICS = {"rsqrt", "sin", "cos", "log", "log1p", "reduce_max"}

# They lose what a later function needs: x - mean(x), x**2, a cap of scores.
CANCELLING = {"sub", "integer_pow", "square", "pow", "tanh"}

SUMS = {"reduce_sum", "reduce", "reduce_window_sum", "scatter-add", "scatter_add"}
SUMS |= {"psum", "psum_invariant", "reduce_scatter", "psum_scatter"}
ADDITIONS = {"add", "add_any", "sub", "scatter-add", "scatter_add"}
MAX_TERMS = 8  # shards of a mesh that is verified, each summed in float32

OF_GRADIENTS = ("grad_norm", "skipped")  # names of scalars of a step

# They move numbers and compute nothing.
LAYOUT = {"reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "expand_dims", "stack"}
LAYOUT |= {"concatenate", "pad", "select_n", "copy", "copy_p", "optimization_barrier", "name"}
LAYOUT |= {"split", "rev", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "roll"}
LAYOUT |= {"sharding_constraint", "stop_gradient", "ppermute", "all_gather", "all_to_all", "pvary"}
LAYOUT |= {"pcast", "device_put", "mesh_cast", "reshard", "convert_element_type", "squeeze"}
LAYOUT |= {"bitcast_convert_type", "reduce_precision", "all_gather_invariant", "unstack"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "is_finite", "sign"}

# ---- marks: what is known of a value ----

PARAMETER = "parameter"  # a parameter, perhaps in another dtype or layout
PRODUCT = "product of two activations"  # in 16 bits, since the last matrix product
LINEAR = "linear layer"  # the same of an activation and a parameter
LOST = "subtraction, square or tanh"  # in 16 bits, since the last matrix product
COMPUTED = "arithmetic"  # the same of any arithmetic, or rounded to 16 bits
EXPONENTIAL = "exponential"
STATISTIC = "statistic"
# Marks (IS, loop, number) and (OF, loop, number): a value that a loop carries, and what is computed
# from it. (SUM, loop, number, fault): its sum, in 16 bits, with a term that does not depend on it,
# which is a fault if the loop carries that on in the same place.
IS, OF, SUM = "is", "of", "sum"

Marks = frozenset[Any]
NO_MARKS: Marks = frozenset()


def with_scope(model: Model) -> Model:
    """Returns the model with all its equations in the scope MODEL."""

    def in_scope(function: Callable) -> Callable:
        def run(*args, **options):
            with jax.named_scope(MODEL):
                return function(*args, **options)

        return run

    names = ("loss", "embed", "block", "head")
    functions = {name: getattr(model, name) for name in names if getattr(model, name) is not None}
    scoped = {name: in_scope(function) for name, function in functions.items()}
    return dataclasses.replace(model, **scoped)


def fault_of(program: Program, batch: Any, *, is_transformer: bool) -> str | None:
    """Returns the first fault of the step or the evaluation of a program, or None.

    Its model has the scope MODEL. `batch` may be abstract.
    """
    state = program.abstract_state

    def losses_of_step(state, batch):
        new, scalars = program.train_step(state, batch)
        # Others depend on the gradients, which the model may have computed in 16 bits.
        losses = {name: scalars[name] for name in scalars if name not in OF_GRADIENTS}
        return losses, new, scalars

    def losses_of_evaluation(params, batch):
        return program.eval_step(params, batch), None, None

    for function, params, arguments in (
        (losses_of_step, state.params, (state, batch)),
        (losses_of_evaluation, state.params, (state.params, batch)),
    ):
        with program.active():
            jaxpr, (losses, *_) = jax.make_jaxpr(function, return_shape=True)(*arguments)
        are_params = {id(leaf) for leaf in jax.tree.leaves(params)}
        inputs = [
            frozenset({PARAMETER}) if id(leaf) in are_params else NO_MARKS
            for leaf in jax.tree.leaves(arguments)
        ]
        walk = _Walk(is_transformer=is_transformer)
        results = walk.run(jaxpr, inputs)[: len(jax.tree.leaves(losses))]
        if walk.fault is not None:
            return walk.fault
        if is_transformer and COMPUTED in frozenset().union(*results):
            return "arithmetic or rounding in 16 bits between the logits and the sums of the loss"
    return None


class _Walk:
    """Follows values through the equations of a program, and keeps the first fault."""

    def __init__(self, *, is_transformer: bool):
        self.is_transformer = is_transformer
        self.fault: str | None = None
        # Of what was followed already; the jaxprs are kept alive, so their ids are unique.
        self.results: dict[Any, tuple[Any, list[Marks]]] = {}

    def run(self, jaxpr: Any, inputs: Sequence[Marks], scope: str = "") -> list[Marks]:
        """Returns the marks of the results of `jaxpr`, for inputs with these marks."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one
        scopes = MODEL, SHARE, EXPERTS, SEGMENT_CODE
        known = id(jaxpr), tuple(inputs), *(name in scope for name in scopes)
        if known in self.results:
            return self.results[known][1]
        marks = dict.fromkeys(jaxpr.constvars, NO_MARKS)
        marks |= dict(zip(jaxpr.invars, inputs, strict=True))

        def marks_of(value: Any) -> Marks:
            is_literal = hasattr(value, "val")
            return NO_MARKS if is_literal else marks[value]

        for equation in jaxpr.eqns:
            entering = [marks_of(value) for value in equation.invars]
            inner_scope = f"{scope}/{equation.source_info.name_stack}"
            leaving = self.run_equation(equation, entering, inner_scope)
            marks |= dict(zip(equation.outvars, leaving, strict=True))
        results = [marks_of(value) for value in jaxpr.outvars]
        self.results[known] = jaxpr, results
        return results

    def run_equation(self, equation: Any, entering: list[Marks], scope: str) -> list[Marks]:
        """Returns the marks of the results of an equation; checks it if it has none inside."""
        name = equation.primitive.name
        if name == "scan":
            return self.run_scan(equation, entering, scope)
        if name == "while":
            return self.run_while(equation, entering, scope)
        if name == "cond":
            return self.run_cond(equation, entering, scope)
        inner = None if name in SUMS else _inner_jaxpr(equation.params)
        if inner is not None and len(inner.invars) == len(entering):
            return self.run(inner, entering, scope)

        if self.fault is None:
            self.fault = self.check(equation, entering, scope)
        leaving = _marks_after(equation, entering, scope)
        if self.is_transformer and MODEL in scope:
            leaving |= _sums_with_carried(equation, entering, scope)
        return [leaving for _ in equation.outvars]

    def run_scan(self, equation: Any, entering: list[Marks], scope: str) -> list[Marks]:
        body = equation.params["jaxpr"]
        first, num_carry = sizes_of_scan(equation)
        end = first + num_carry
        consts = entering[:first]
        slices = entering[end:]

        def iterate(carry):
            return self.run(body, [*consts, *carry, *slices], scope)

        return self.run_loop(id(body), iterate, entering[first:end])

    def run_while(self, equation: Any, entering: list[Marks], scope: str) -> list[Marks]:
        body = equation.params["body_jaxpr"].jaxpr
        first = equation.params["cond_nconsts"]
        end = first + equation.params["body_nconsts"]
        consts = entering[first:end]

        def iterate(carry):
            return self.run(body, [*consts, *carry], scope)

        return self.run_loop(id(body), iterate, entering[end:])

    def run_cond(self, equation: Any, entering: list[Marks], scope: str) -> list[Marks]:
        """Returns the marks of each result in any of the branches."""
        branches = []
        for branch in equation.params["branches"]:
            branches.append(self.run(branch, entering[1:], scope))
        return [frozenset().union(*marks) for marks in zip(*branches, strict=True)]

    def run_loop(self, loop: int, iterate: Callable, carry: list[Marks]) -> list[Marks]:
        """Returns the marks after any number of iterations of the loop with this id."""

        def without_loop(marks):
            return frozenset(
                mark for mark in marks if not (isinstance(mark, tuple) and mark[1] == loop)
            )

        while True:
            entering = []
            for number, marks in enumerate(carry):
                entering.append(marks | {(IS, loop, number), (OF, loop, number)})
            leaving = iterate(entering)
            for number, marks in enumerate(leaving[: len(carry)]):
                faults = [mark[3] for mark in marks if mark[:3] == (SUM, loop, number)]
                self.fault = self.fault or next(iter(faults), None)
            results = [without_loop(marks) for marks in leaving]
            before = carry
            carry = [old | new for old, new in zip(before, results, strict=False)]
            if carry == before:
                return [*carry, *results[len(carry) :]]

    def check(self, equation: Any, entering: list[Marks], scope: str) -> str | None:
        """Returns the fault of an equation, with its place in the source."""
        fault = None
        if MODEL not in scope:
            fault = _fault_of_trainer(equation, entering, scope)
        elif self.is_transformer:
            fault = _fault_of_model(equation, entering, scope)
        return fault and f"{fault}{_place_of(equation)}"


def _inner_jaxpr(params: dict[str, Any]) -> Any:
    """Returns the equations that a call has inside, or None."""
    for value in params.values():
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            return value
    return None


def _marks_after(equation: Any, entering: list[Marks], scope: str) -> Marks:
    """Returns the marks of the result of an equation without others inside."""
    name = equation.primitive.name
    marks = frozenset().union(*entering)
    if name == "convert_element_type" and _is_rounding(equation) and PARAMETER not in marks:
        return marks | {COMPUTED}
    if name in LAYOUT:
        return marks
    is_scaling = name == "neg" or (
        name in ("mul", "div") and any(hasattr(value, "val") for value in equation.invars)
    )
    is_16_bit = _dtype_of(equation.outvars[0]) in HALF
    if name == "dot_general":
        kept = frozenset(mark for mark in marks if mark[0] == OF)
        if not is_16_bit:
            return kept
        return kept | {LINEAR if PARAMETER in marks else PRODUCT}

    dropped = {PARAMETER} if is_scaling else {PARAMETER, STATISTIC}
    if name not in ("mul", "div", "max", "sub"):
        dropped.add(EXPONENTIAL)
    kept = frozenset(mark for mark in marks if mark not in dropped and mark[0] != IS)
    is_sum = name == "reduce_sum" and SHARE not in scope.split("/")
    if name in STATISTICS or (is_sum and EXPONENTIAL in marks):
        kept |= {STATISTIC}
    if name in ("exp", "exp2"):
        kept |= {EXPONENTIAL}
    if is_16_bit:
        kept |= {COMPUTED}
        is_square = name == "mul" and equation.invars[0] is equation.invars[1]
        if name in CANCELLING or is_square:
            kept |= {LOST}
    return kept


# ---- the laws ----


def _fault_of_trainer(equation: Any, entering: list[Marks], scope: str) -> str | None:
    name = equation.primitive.name
    dtype = _half_of(equation)
    if dtype is None or name in COMPARISONS or SHARE in scope.split("/"):
        return None
    if name == "convert_element_type":
        if _is_rounding(equation) and PARAMETER not in entering[0]:
            return f"the trainer rounds a value that is no parameter to {dtype}"
        return None
    return None if name in LAYOUT else f"the trainer computes {name} in {dtype}"


def _fault_of_model(equation: Any, entering: list[Marks], scope: str) -> str | None:
    name = equation.primitive.name
    dtype = _half_of(equation)
    first = entering[0] if entering else NO_MARKS
    if name in FUNCTIONS:
        if dtype is not None:
            return f"{name} in {dtype}"
        lost = sorted(first & {LOST, PRODUCT})
        if lost:
            return f"{name} of what a {lost[0]} left in 16 bits"
    if name in CHOICES and _dtype_of(equation.invars[0]).startswith(("float", "bfloat")):
        if dtype is not None or first & {LOST, PRODUCT, LINEAR, COMPUTED}:
            return f"{name} of scores that were computed in 16 bits"
    if name == "convert_element_type" and STATISTIC in first:
        is_code = SEGMENT_CODE in scope
        if _dtype_of(equation.outvars[0]) in HALF and not is_code:
            return f"a statistic is rounded to {dtype} before it is used"
    if _dtype_of(equation.outvars[0]) not in HALF or _is_of_a_token(name, scope):
        return None
    if name in SUMS and _num_terms(equation) > MAX_TERMS:
        return f"{name} of many terms in {dtype}"
    return None


def _is_of_a_token(name: str, scope: str) -> bool:
    return EXPERTS in scope and name.startswith("scatter")


def _sums_with_carried(equation: Any, entering: list[Marks], scope: str) -> Marks:
    """Returns a mark of each value that a loop carries and that gets, in 16 bits, another term.

    The term does not depend on the value: the residual stream x + f(x) is no such sum.
    """
    name = equation.primitive.name
    dtype = _dtype_of(equation.outvars[0])
    if name not in ADDITIONS or dtype not in HALF or _is_of_a_token(name, scope):
        return NO_MARKS
    fault = f"a loop adds up its iterations in {dtype}{_place_of(equation)}"
    a, b = entering[0], entering[-1 if name.startswith("scatter") else 1]
    sums = set()
    for carried, term in ((a, b), (b, a)):
        for mark in carried:
            if mark[0] == IS and (OF, *mark[1:]) not in term:
                sums.add((SUM, *mark[1:], fault))
    return frozenset(sums)


def _num_terms(equation: Any) -> float:
    """Returns the number of terms of each sum, where it is known, else infinity."""
    if equation.primitive.name not in ("reduce_sum", "reduce"):
        return math.inf
    return math.prod(equation.invars[0].aval.shape) / math.prod(equation.outvars[0].aval.shape)


def _dtype_of(value: Any) -> str:
    return str(getattr(value.aval, "dtype", ""))


def _is_rounding(equation: Any) -> bool:
    """Returns whether a `convert_element_type` rounds floats to 16 bits."""
    before, after = _dtype_of(equation.invars[0]), _dtype_of(equation.outvars[0])
    return after in HALF and before in ("float32", "float64")


def _half_of(equation: Any) -> str | None:
    """Returns the dtype of 16 bits of an operand or result of an equation, or None."""
    for value in (*equation.invars, *equation.outvars):
        if _dtype_of(value) in HALF:
            return _dtype_of(value)
    return None


def _place_of(equation: Any) -> str:
    """Returns " (FILE:LINE FUNCTION)" of an equation: the innermost place outside of libraries."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if "site-packages" not in frame.file_name:
            name = "/".join(frame.file_name.split("/")[-2:])
            return f" ({name}:{frame.line_num} {frame.function_name})"
    return ""
