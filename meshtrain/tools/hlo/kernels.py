"""Kinds of kernels of a compiled step, and the time that one is expected to take.

A roofline is a limit. Kernels need more: how much more was measured for each kind, and stands as
factors in hardware.toml. The expected time is computed, from these factors and the limit.
"""

import re
from collections.abc import Iterator

import numpy as np

from meshtrain.hardware import KernelFactors
from meshtrain.tools.hlo import traffic
from meshtrain.tools.hlo.hlo import Instruction, Module

PRODUCT = "matrix product"
ROW_REDUCTION, COLUMN_REDUCTION = "row reduction", "column reduction"
GATHER, SCATTER = "gather", "scatter"
# Elementwise, with a function that a GPU computes in its few special units.
TRANSCENDENTAL = "elementwise, exp or tanh"
ELEMENTWISE, COPY, OPTIMIZER = "elementwise", "copy", "optimizer"
# Library and hand-written kernels, sorts: nothing says how far from its limit the next one is.
OTHER = "other"

# Opcodes that compute nothing: where a kernel has only these, it is a copy.
MOVING_OPCODES = frozenset(
    "parameter constant bitcast reshape transpose convert copy copy-start slice dynamic-slice "
    "dynamic-update-slice concatenate pad reverse broadcast iota tuple get-tuple-element "
    "fusion".split()
)
# Their results are no arrays that the kernel goes through element by element.
UNSIZED_OPCODES = frozenset("parameter constant tuple get-tuple-element fusion".split())
TRANSCENDENTAL_OPCODES = frozenset(
    "exponential exponential-minus-one log log-plus-one logistic tanh erf power sine cosine tan "
    "atan2 cbrt".split()
)
OTHER_OPCODES = frozenset(
    "custom-call sort fft rng rng-bit-generator reduce-window select-and-scatter cholesky "
    "triangular-solve topk".split()
)
# An operation on fewer elements than this share of a kernel's largest array doesn't set its time.
MAIN_SHARE = 0.5


def kind_of(
    module: Module, computation: str, instruction: Instruction, *, is_update: bool = False
) -> str:
    """Returns the kind of a kernel. `is_update`: it belongs to the optimizer's update.

    The operations on arrays about as large as the kernel's largest decide: the sum of a row in a
    kernel that reads rows, but not the mean of 8 numbers at the end of one that adds two matrices.
    """
    if traffic.matmul_flops(module, computation, instruction):
        return PRODUCT
    if call := traffic.attention_call(module, computation, instruction):
        return attention_kind("backward" if call.is_backward else "forward", call.head_dim)
    inside = [*_with_nested(module, computation, instruction)]
    if any(operation.opcode in OTHER_OPCODES for _, operation in inside):
        return OTHER

    sizes = [_size(body, operation) for body, operation in inside]
    least = MAIN_SHARE * max(sizes)
    main = []
    for (body, operation), size in zip(inside, sizes, strict=True):
        if size >= least and operation.opcode not in MOVING_OPCODES:
            main.append((body, operation))
    opcodes = {operation.opcode for _, operation in main}
    reductions = [(body, one) for body, one in main if one.opcode == "reduce"]
    if any(_is_of_rows(body, reduction) for body, reduction in reductions):
        return ROW_REDUCTION
    if reductions:
        return COLUMN_REDUCTION
    if "scatter" in opcodes:
        return SCATTER
    if "gather" in opcodes:
        return GATHER
    if not main:
        return COPY
    if is_update:
        return OPTIMIZER
    return TRANSCENDENTAL if opcodes & TRANSCENDENTAL_OPCODES else ELEMENTWISE


def attention_kind(phase: str, head_dim: int) -> str:
    """Returns the kind of cuDNN's attention: its rate depends on the pass and the head dim."""
    return f"fused attention {phase}, head dim {head_dim}"


# The instructions of a computation, by name.
Body = dict[str, Instruction]


def _with_nested(
    module: Module, computation: str, instruction: Instruction
) -> Iterator[tuple[Body, Instruction]]:
    """Yields a kernel's operations, each with the computation that has its operands."""
    yield module.computations[computation], instruction
    if instruction.opcode == "fusion":
        for name in instruction.called:
            for nested in module.computations[name].values():
                yield from _with_nested(module, name, nested)


def _size(body: Body, operation: Instruction) -> int:
    """Returns how many elements an operation goes through: of a reduction, those that it reads."""
    opcode = operation.opcode
    if opcode in UNSIZED_OPCODES:
        return 0
    # Only a part of its array is written: the buffer is updated in place.
    if opcode == "dynamic-update-slice":
        return _operand_size(body, operation, 1)
    # What passes on the elements of another operation may pass on such a buffer.
    if opcode in traffic.PASSING:
        return 0
    if opcode == "reduce":
        return _operand_size(body, operation, 0)
    return max((array.size for array in operation.results), default=0)


def _operand_size(body: Body, operation: Instruction, number: int) -> int:
    return body[operation.operands[number]].results[0].size


def _is_of_rows(body: Body, reduction: Instruction) -> bool:
    """Returns whether a reduction adds up neighbours in memory, such as the elements of a row.

    XLA lays arrays out row by row before it forms the kernels of a GPU: the last dim is contiguous.
    """
    shape = body[reduction.operands[0]].results[0].shape
    text = re.search(r"\bdimensions=\{([\d,]*)\}", reduction.attributes)
    dims = [int(dim) for dim in re.findall(r"\d+", text[1])] if text else []
    long_dims = [dim for dim, size in enumerate(shape) if size > 1]
    return bool(long_dims) and long_dims[-1] in dims


def factor_of(
    module: Module, computation: str, instruction: Instruction, kind: str, factors: KernelFactors
) -> float | None:
    """Returns the measured time of such a kernel over its limit; None if it was not measured."""
    if kind != PRODUCT:
        return dict(factors.kinds).get(kind)
    # Few kernels have several products; the largest decides.
    products = traffic.products(module, computation, instruction)
    largest = max(products, key=lambda product: product.flops)
    if not largest.dims:
        return None
    # The middle size: the head and a feed-forward differ in it, and all products share the least.
    _, middle, _ = sorted(largest.dims)
    # Between two measured sizes linear in the logarithm, outside them the nearest.
    sizes = [size for size, _ in factors.product]
    values = [factor for _, factor in factors.product]
    return float(np.interp(np.log(middle), np.log(sizes), values))


def expected_seconds(
    kind: str, factor: float, *, compute_seconds: float, moving_seconds: float
) -> float:
    """Returns the expected time of a kernel, from the limits by its FLOPs and by its bytes."""
    if kind == PRODUCT:
        # The factor is of products that FLOPs limit.
        return max(factor * compute_seconds, moving_seconds)
    return factor * max(compute_seconds, moving_seconds)
