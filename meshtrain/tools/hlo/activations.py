"""The activations that a compiled step keeps from its forward pass for its backward pass, from its HLO.

JAX names the operations of the forward pass `jvp(...)`, those of the backward pass `transpose(...)`. What the first
compute and the second read is kept: single arrays where layers are unrolled, arrays stacked over the layers that one
loop writes and another reads. A pipeline's loop over ticks carries buffers of its own, named `kept`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from meshtrain.tools.hlo.hlo import Array, Instruction, Module

PASSING = ("bitcast", "copy", "opt-barrier", "optimization-barrier")


def kept_bytes(module: Module, params: Any) -> int:
    """Returns the bytes of these arrays on one device, after sharding and fusion; with micro-batches, of one."""
    kept = _kept_in(module, module.entry) if module.entry else []
    return round(sum(one.size * one.itemsize for one in without_parameters(kept, params)))


def without_parameters(arrays: Iterable[Any], params: Any) -> list[Any]:
    """Returns the arrays that do not have the shape of a parameter, sharded or gathered, or of one of its layers.

    Gathered weights are read in both passes, and the loss in chunks computes the head's gradient in the forward pass.
    """
    leaves = jax.tree.leaves(params)
    shapes = {one for leaf in leaves for one in (leaf.shape, leaf.sharding.shard_shape(leaf.shape))}
    shapes = {_essential(shape) for one in shapes for shape in (one, one[1:])} - {()}
    return [one for one in arrays if _essential(one.shape) not in shapes]


def _essential(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes above 1, sorted: gradients may be transposed."""
    return tuple(sorted(size for size in shape if size > 1))


def _kept_in(module: Module, computation: str) -> list[Array]:
    body = module.computations[computation]
    kept, loops = {}, [[]]
    for one in body.values():
        if one.opcode == "while" and not one.phase:  # over micro-batches, or a pipeline's ticks
            loop = one.computation("body")
            loops.append(_kept_in(module, loop) + _slots(module, loop))
        for operand in _operands(body, one) if one.phase == "backward" else ():
            source, index = _source(module, body, operand)
            if source.phase == "forward" and (index is not None or len(source.results) == 1):
                kept[source.name, index] = source.results[index or 0]
    return [*kept.values(), *max(loops, key=lambda loop: sum(one.size for one in loop))]


def _slots(module: Module, loop: str) -> list[Array]:
    """Returns a pipeline's buffers in the loop over ticks: what chunks keep until their backward."""
    body = module.computations[loop]
    fused = (one.called[0] for one in body.values() if one.opcode == "fusion")
    inside = (one for name in fused for one in module.computations.get(name, {}).values())
    return [
        one.results[0]
        for one in (*body.values(), *inside)
        if one.opcode == "dynamic-update-slice" and "/kept/" in one.op_name
    ]


def _operands(body: dict[str, Instruction], one: Instruction) -> Iterator[Instruction]:
    """Yields the instructions whose values an instruction reads; of a tuple, its elements."""
    if one.opcode not in ("tuple", "get-tuple-element", *PASSING):
        for operand in (body[name] for name in one.operands):
            is_tuple = operand.opcode == "tuple"
            yield from (body[name] for name in operand.operands) if is_tuple else [operand]


def _source(
    module: Module, body: dict[str, Instruction], one: Instruction
) -> tuple[Instruction, int | None]:
    """Returns the instruction that computed a value, and the index of the value in its results, None if it is one."""
    index = None
    while True:
        if one.opcode == "get-tuple-element":
            index = one.int_attribute("index")
        elif one.opcode == "tuple" and index is not None:
            one, index = body[one.operands[index]], None
            continue
        elif one.opcode not in PASSING and not _is_invariant(module, one, index):
            return one, index
        one = body[one.operands[0]]


def _is_invariant(module: Module, one: Instruction, index: int | None) -> bool:
    """Whether a loop returns the value that it was given."""
    if one.opcode != "while" or index is None:
        return False
    body = module.computations[one.computation("body")]
    root = next(each for each in body.values() if each.is_root)
    value = body[root.operands[index]]
    is_own = value.opcode == "get-tuple-element" and value.int_attribute("index") == index
    return is_own and body[value.operands[0]].opcode == "parameter"
