"""Traces values of a compiled program to their source and their uses, through loops and fusions."""

from collections.abc import Iterator

from meshtrain.tools.hlo.hlo import Instruction, Module

# A value: computation, instruction, and the element if the instruction makes a tuple.
Value = tuple[str, str, int | None]
RESHAPING_OPCODES = ("bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done")

# Opcodes whose result is a copy or a part of their first operand.
COPYING_OPCODES = (
    *RESHAPING_OPCODES,
    "convert",
    "slice",
    "dynamic-slice",
    "all-gather",
    "collective-permute",
)


def source_argument(module: Module, value: Value) -> tuple[str, float]:
    """Returns the argument of the step that a value is a copy or a part of; empty if there is none.

    Also returns the smallest number of bytes per element that the value had on the way.
    """
    smallest = 8.0
    for _ in range(200):
        computation, name, _ = value
        instruction = module.computations[computation].get(name)
        if instruction and len(instruction.results) == 1:
            smallest = min(smallest, instruction.results[0].itemsize)
        source = _copied_from(module, value)
        if source is None:
            if instruction and instruction.opcode == "parameter" and computation == module.entry:
                return instruction.op_name, smallest
            return "", smallest
        value = source
    return "", smallest


def _copied_from(module: Module, value: Value) -> Value | None:
    """Returns the value that this one is a copy or a part of; None if it is computed."""
    computation, name, index = value
    instruction = module.computations[computation].get(name)
    if instruction is None:
        return None
    first = instruction.operands[0] if instruction.operands else ""
    match instruction.opcode:
        case "get-tuple-element":
            return computation, first, instruction.int_attribute("index")
        case "tuple" if index is not None:
            return computation, instruction.operands[index], None
        case "while" if _is_loop_invariant(module, instruction, index):
            return computation, first, index
        case "optimization-barrier":
            if len(instruction.operands) > 1:
                return computation, instruction.operands[index or 0], None
            return computation, first, index
        case "fusion" | "call":
            inner = module.computations[instruction.called[0]]
            root = next(name for name, i in inner.items() if i.is_root)
            return instruction.called[0], root, index
        case "parameter":
            return _caller_operand(module, computation, int(instruction.operand_text), index)
        case opcode if opcode.removesuffix("-start").removesuffix("-done") in COPYING_OPCODES:
            return computation, first, None
    return None


def _caller_operand(
    module: Module, computation: str, number: int, index: int | None
) -> Value | None:
    """Returns the value that the caller passes to a parameter."""
    for caller, instruction in module.callers[computation]:
        if instruction.opcode == "while":
            is_invariant = _is_loop_invariant(module, instruction, index)
            return (caller, instruction.operands[0], index) if is_invariant else None
        if instruction.opcode in ("fusion", "call") or instruction.opcode.endswith("-start"):
            return caller, instruction.operands[number], index
    return None


def _is_loop_invariant(module: Module, loop: Instruction, index: int | None) -> bool:
    """Returns whether a loop leaves this element of its state unchanged."""
    inner = module.computations[loop.computation("body")]
    root = next(i for i in inner.values() if i.is_root)
    if index is None or root.opcode != "tuple":
        return False
    result = inner[root.operands[index]]
    return result.opcode == "get-tuple-element" and result.int_attribute("index") == index


# Computation and instruction; None if the use cannot be followed.
Use = tuple[str, Instruction | None]


def uses(module: Module, computation: str, name: str, element: int | None = None) -> Iterator[Use]:
    """Yields the uses of a value, or of one element if it is a tuple."""
    if module.computations[computation][name].is_root:
        callers = module.callers[computation]
        for caller, instruction in callers:
            if instruction.opcode in ("fusion", "call") and len(instruction.results) == 1:
                yield from uses(module, caller, instruction.name)
            else:
                yield caller, None
        if not callers:
            # A result of the step.
            yield computation, None
    for user in module.users[computation, name]:
        if element is not None:
            if user.opcode != "get-tuple-element":
                yield computation, None
            elif user.int_attribute("index") == element:
                yield from uses(module, computation, user.name)
        elif user.opcode in RESHAPING_OPCODES:
            yield from uses(module, computation, user.name)
        elif user.opcode in ("fusion", "call"):
            inner = user.called[0]
            for parameter in module.computations[inner].values():
                if parameter.opcode != "parameter":
                    continue
                if user.operands[int(parameter.operand_text)] == name:
                    yield from uses(module, inner, parameter.name)
        else:
            yield computation, user


def is_rounded_to_16_bits(uses_of_value: list[Use]) -> bool:
    """Returns whether every use of a value first rounds it to 16 bits."""
    if not uses_of_value:
        return False
    for _, user in uses_of_value:
        if not user or user.opcode != "convert" or user.results[0].itemsize != 2:
            return False
    return True


def is_sliced_per_device(module: Module, uses_of_value: list[Use], size: float) -> bool:
    """Returns whether each device uses only its own slice of a value, of `size` elements."""

    def fits(computation: str, user: Instruction | None) -> bool:
        if user and user.opcode == "convert":
            return is_sliced_per_device(module, list(uses(module, computation, user.name)), size)
        if not user or user.opcode != "dynamic-slice" or user.results[0].size != size:
            return False
        starts = [(computation, name, None) for name in user.operands[1:]]
        return any(_depends_on_device(module, start) for start in starts)

    return bool(uses_of_value) and all(fits(*use) for use in uses_of_value)


def is_padded_shard(module: Module, value: Value, size: float) -> bool:
    """Returns whether a value is zeros but for a device's own part, of `size` elements."""
    computation, name, _ = _origin(module, value)
    update = module.computations[computation].get(name)
    if update is None or update.opcode != "dynamic-update-slice":
        return False
    buffer, part, *starts = update.operands
    part_of_device = module.computations[computation].get(part)
    if part_of_device is None or part_of_device.results[0].size != size:
        return False
    if not any(_depends_on_device(module, (computation, start, None)) for start in starts):
        return False
    computation, name, _ = _origin(module, (computation, buffer, None))
    fill = module.computations[computation].get(name)
    if fill is None or fill.opcode != "broadcast":
        return False
    computation, name, _ = _origin(module, (computation, fill.operands[0], None))
    number = module.computations[computation].get(name)
    return number is not None and number.opcode == "constant" and number.operand_text == "0"


def _origin(module: Module, value: Value) -> Value:
    """Returns the value that this one is a copy or a part of, as far as that can be traced."""
    for _ in range(200):
        source = _copied_from(module, value)
        if source is None:
            return value
        value = source
    return value


def _depends_on_device(module: Module, value: Value) -> bool:
    """Returns whether a value is computed from the device's number."""
    seen, todo = set(), [value]
    while todo:
        value = todo.pop()
        computation, name, _ = value
        instruction = module.computations[computation].get(name)
        if value in seen or instruction is None:
            continue
        seen.add(value)
        if instruction.opcode in ("partition-id", "replica-id"):
            return True
        if source := _copied_from(module, value):
            todo.append(source)
        if instruction.opcode not in ("while", "parameter", "get-tuple-element"):
            todo += [(computation, operand, None) for operand in instruction.operands]
    return False
