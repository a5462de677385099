"""Labels the operations of a trace with kind, pass and source line, from the compiled program."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from meshtrain.tools.hlo import hlo
from meshtrain.tools.hlo.collective_ops import KINDS, source_of
from meshtrain.tools.hlo.hlo import Instruction, Module

# A fusion has the kind of the first of these opcodes that it contains.
MAIN_OPCODES = (
    "dot",
    "convolution",
    "custom-call",
    "scatter",
    "gather",
    "sort",
    "reduce-window",
    "reduce",
)
CONTAINERS = ("call", "conditional", "while")
MATMUL_KERNEL = re.compile(r"gemm|matmul|cublas|cutlass|nvjet|xmma", re.IGNORECASE)
COPY_KERNEL = re.compile(r"mem(cpy|set)", re.IGNORECASE)
MAX_DISTANCE = 3  # in the graph of uses, to an instruction with a source line


class Label(NamedTuple):
    kind: str  # "dot", "all-reduce", "fusion", ...
    phase: str  # "forward", "backward", "recompute", "other"
    # "meshtrain/models/layers.py:125 Attention.__call__", "near ...", or a name without a line.
    source: str
    name: str  # of the instruction or kernel

    @property
    def is_collective(self) -> bool:
        return self.kind in KINDS


class Labels:
    """Labels for the operations of one compiled program."""

    def __init__(self, program: str | Module):
        self._module = hlo.parse(program) if isinstance(program, str) else program
        # By the instruction's name: the computation that has it, and the instruction.
        self._instructions = {
            name: (computation, instruction)
            for computation, body in self._module.computations.items()
            for name, instruction in body.items()
        }
        self._name_of_kernel = {_kernel_name(name): name for name in self._instructions}
        self._labels: dict[tuple[str, str], Label] = {}

    def label_of(self, path: str, kernel: str) -> Label:
        """Returns the label of a `trace.Operation` with this `path`, and `kernel` as its name."""
        if (path, kernel) not in self._labels:
            name = self._instruction(path, kernel)
            label = self.label(name) if name else _label_from_name(kernel or path)
            self._labels[path, kernel] = label
        return self._labels[path, kernel]

    def _instruction(self, path: str, kernel: str) -> str | None:
        """Returns the name of the instruction; None if the program does not have it.

        For a kernel in a CUDA graph, `path` names only the call of the graph; the kernel of a
        fusion has the fusion's name.
        """
        # On TPU the name is a line of HLO text.
        kernel = kernel.partition(" = ")[0].lstrip("%")
        for name in (*reversed(path.split("/")), kernel):
            if name in self._instructions:
                _, instruction = self._instructions[name]
                if instruction.opcode not in CONTAINERS:
                    return name
        if kernel in self._name_of_kernel:
            return self._name_of_kernel[kernel]
        return kernel if kernel in self._instructions else None

    def label(self, name: str) -> Label:
        """Returns the label of an instruction."""
        computation, instruction = self._instructions[name]
        kind, main = self._kind(instruction)
        combined = ""
        if kind in KINDS and len(instruction.operands) > 1:
            # XLA combines several tensors: the label names the largest.
            body = self._module.computations[computation]
            instruction = max((body[operand] for operand in instruction.operands), key=_size)
            _, main = self._kind(instruction)
            combined = ", combined"
        described, is_own = self._with_source_line(computation, main, instruction)
        source = source_of(self._module.traceback(described))
        source = source or described.op_name.rpartition("/")[2] or name.partition(".")[0]
        return Label(
            kind=kind,
            phase=_phase_of(described.op_name),
            source=f"{'' if is_own else 'near '}{source}{combined}",
            name=name,
        )

    def _kind(self, instruction: Instruction) -> tuple[str, Instruction]:
        """Returns the kind of an instruction, and the instruction inside it that determines it."""
        by_opcode: dict[str, Instruction] = {}
        for nested in self._with_nested(instruction):
            by_opcode.setdefault(_opcode(nested), nested)
        for kind in (*KINDS, *MAIN_OPCODES):
            if kind in by_opcode:
                return kind, by_opcode[kind]
        return _opcode(instruction), instruction

    def _with_nested(self, instruction: Instruction) -> Iterator[Instruction]:
        yield instruction
        if instruction.opcode == "fusion" or instruction.opcode.startswith("async"):
            for name in instruction.called:
                for nested in self._module.computations[name].values():
                    yield from self._with_nested(nested)

    def _with_source_line(
        self, computation: str, main: Instruction, instruction: Instruction
    ) -> tuple[Instruction, bool]:
        """Returns the nearest instruction with a source line, and whether the line is its own.

        Some instructions that XLA creates have none; their users or operands often have one.
        """
        body = self._module.computations[computation]
        # The root of a fusion is its last instruction, and comes first.
        near = [main, instruction, *reversed([*self._with_nested(instruction)])]
        for distance in range(MAX_DISTANCE):
            for candidate in near:
                # Without an op_name, the line is only the call that it was inlined from.
                if candidate.op_name and source_of(self._module.traceback(candidate)):
                    return candidate, distance == 0 or candidate.opcode == "bitcast"
            users, operands = [], []
            for candidate in near:
                users += self._module.users.get((computation, candidate.name), ())
                operands += [body[name] for name in candidate.operands if name in body]
            near = users + operands
        return main if main.op_name else instruction, True


def _phase_of(op_name: str) -> str:
    """Returns the pass, from the names that JAX gives operations."""
    if "rematted" in op_name:
        return "recompute"
    return hlo.phase_of(op_name) or "other"


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.results)


def _opcode(instruction: Instruction) -> str:
    """Returns the opcode without -start or -done; "dot" for library calls of matrix products."""
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        return "dot" if target and MATMUL_KERNEL.search(target[1]) else "custom-call"
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def _label_from_name(kernel: str) -> Label:
    """Returns a label from the name of the kernel alone."""
    letters = re.sub("[^a-z]", "", kernel.lower())
    kinds = [kind for kind in KINDS if kind.replace("-", "") in letters]
    if kinds or "nccl" in letters:
        kind = kinds[0] if kinds else "collective-permute"  # NCCL's sends and receives
    elif COPY_KERNEL.search(kernel):
        kind = "copy"
    else:
        kind = "dot" if MATMUL_KERNEL.search(kernel) else "kernel"
    return Label(kind, "other", kernel[:60], kernel[:60])  # C++ template names are long


def _kernel_name(name: str) -> str:
    return re.sub(r"\W", "_", name)
