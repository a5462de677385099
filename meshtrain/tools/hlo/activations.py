"""The activations that a compiled step keeps for its backward pass, from its HLO.

JAX names the operations of the forward pass `jvp(...)`, those of the backward pass
`transpose(...)`. What the first compute and the second read is kept: single arrays where layers are
unrolled, arrays stacked over the layers that one loop writes and another reads. A pipeline's loop
over ticks carries buffers of its own, named `kept`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from meshtrain.tools.hlo.hlo import Array, Instruction, Module

PASSING = ("bitcast", "copy", "opt-barrier", "optimization-barrier")  # of their operand


def kept_bytes(module: Module, params: Any) -> int:
    """Returns the bytes of these arrays on a device, after sharding and fusion.

    Without those in the host's memory. With micro-batches, those of one.
    """
    if not module.entry:
        return 0
    kept = without_parameters(_kept_in(module, module.entry), params)
    on_device = [array for array in kept if not array.is_on_host]
    return round(sum(array.size * array.itemsize for array in on_device))


def without_parameters(arrays: Iterable[Any], params: Any) -> list[Any]:
    """Returns the arrays without those that have the shape of a parameter, or of one of its layers.

    Sharded or gathered: gathered weights are read in both passes, and the loss in chunks computes
    the head's gradient in the forward pass.
    """
    shapes = set()
    for leaf in jax.tree.leaves(params):
        for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            shapes |= {_essential(shape), _essential(shape[1:])}
    shapes -= {()}
    return [array for array in arrays if _essential(array.shape) not in shapes]


def _essential(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes above 1, sorted: gradients may be transposed."""
    return tuple(sorted(size for size in shape if size > 1))


def _kept_in(module: Module, computation: str) -> list[Array]:
    """Returns the arrays that a computation keeps, and those of its loop that keeps most."""
    body = module.computations[computation]
    kept: dict[tuple[str, int | None], Array] = {}
    most_in_loop: list[Array] = []
    loop_has_slots = False
    for instruction in body.values():
        # A loop of neither pass is over micro-batches, or over a pipeline's ticks.
        if instruction.opcode == "while" and not instruction.phase:
            loop = instruction.computation("body")
            in_loop = _kept_in(module, loop) + _slots(module, loop)
            most_in_loop = max(most_in_loop, in_loop, key=_total_size)
            loop_has_slots = loop_has_slots or bool(_slots(module, loop))
        if instruction.phase != "backward":
            continue
        for operand in _operands(body, instruction):
            source, index = _source(module, body, operand)
            is_array = index is not None or len(source.results) == 1
            if source.phase == "forward" and is_array:
                kept[source.name, index] = source.results[index or 0]
    if loop_has_slots and _slots(module, computation):
        # XLA has inlined pipeline loops of one row: these keep nothing in addition to the others.
        return most_in_loop
    return [*kept.values(), *most_in_loop]


def _total_size(arrays: list[Array]) -> int:
    return sum(array.size for array in arrays)


def _slots(module: Module, loop: str) -> list[Array]:
    """Returns a pipeline's buffers in the loop over ticks: what chunks keep for their backward."""
    instructions = [*module.computations[loop].values()]
    for instruction in module.computations[loop].values():
        if instruction.opcode == "fusion":
            instructions += module.computations.get(instruction.called[0], {}).values()
    return [
        instruction.results[0]
        for instruction in instructions
        if instruction.opcode == "dynamic-update-slice" and "/kept/" in instruction.op_name
    ]


def _operands(body: dict[str, Instruction], reader: Instruction) -> Iterator[Instruction]:
    """Yields the instructions whose values an instruction reads; of a tuple, its elements."""
    if reader.opcode in ("tuple", "get-tuple-element", *PASSING):
        return
    for name in reader.operands:
        operand = body[name]
        if operand.opcode == "tuple":
            yield from (body[element] for element in operand.operands)
        else:
            yield operand


def _source(
    module: Module, body: dict[str, Instruction], value: Instruction
) -> tuple[Instruction, int | None]:
    """Returns the instruction that computed a value, and the value's index in its results.

    The index is None if the instruction has one result.
    """
    index = None
    while True:
        if value.opcode == "get-tuple-element":
            index = value.int_attribute("index")
        elif value.opcode == "tuple" and index is not None:
            value, index = body[value.operands[index]], None
            continue
        elif value.opcode not in PASSING and not _is_invariant(module, value, index):
            return value, index
        value = body[value.operands[0]]


def _is_invariant(module: Module, loop: Instruction, index: int | None) -> bool:
    """Returns whether a loop returns the value that it was given."""
    if loop.opcode != "while" or index is None:
        return False
    body = module.computations[loop.computation("body")]
    root = next(instruction for instruction in body.values() if instruction.is_root)
    value = body[root.operands[index]]
    is_own = value.opcode == "get-tuple-element" and value.int_attribute("index") == index
    return is_own and body[value.operands[0]].opcode == "parameter"
