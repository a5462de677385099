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
    # "meshtrain/models/layers.py:125 Attention.__call__", "near ...", or a name if there is no line.
    source: str
    name: str  # of the instruction or kernel

    @property
    def is_collective(self) -> bool:
        return self.kind in KINDS


class Labels:
    """Labels for the operations of one compiled program."""

    def __init__(self, program: str | Module):
        self._module = hlo.parse(program) if isinstance(program, str) else program
        self._found = {
            name: (computation, instruction)
            for computation, body in self._module.computations.items()
            for name, instruction in body.items()
        }
        self._of_kernel = {_kernel_name(name): name for name in self._found}
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

        For a kernel in a CUDA graph, `path` names only the call of the graph; the kernel of a fusion has
        the fusion's name.
        """
        kernel = kernel.partition(" = ")[0].lstrip("%")  # on TPU the name is a line of HLO text
        for name in (*reversed(path.split("/")), kernel):
            if name in self._found and self._found[name][1].opcode not in CONTAINERS:
                return name
        return self._of_kernel.get(kernel) or (kernel if kernel in self._found else None)

    def label(self, name: str) -> Label:
        """Returns the label of an instruction."""
        computation, instruction = self._found[name]
        kind, main = self._kind(instruction)
        body, combined = self._module.computations[computation], ""
        if kind in KINDS and len(instruction.operands) > 1:
            # XLA combines several tensors: the label names the largest.
            instruction = max((body[one] for one in instruction.operands), key=_size)
            main, combined = self._kind(instruction)[1], ", combined"
        described, is_own = self._with_source_line(computation, main, instruction)
        op_name = described.op_name
        phase = "forward" if "jvp(" in op_name else "other"
        phase = "backward" if "transpose(" in op_name else phase
        phase = "recompute" if "rematted" in op_name else phase
        source = source_of(self._module.traceback(described)) or op_name.rpartition("/")[2]
        source = source or name.partition(".")[0]
        return Label(kind, phase, f"{'' if is_own else 'near '}{source}{combined}", name)

    def _kind(self, instruction: Instruction) -> tuple[str, Instruction]:
        """Returns the kind of an instruction, and the instruction inside it that determines the kind."""
        by_kind = {}
        for one in self._with_nested(instruction):
            by_kind.setdefault(_opcode(one), one)
        return next(
            ((kind, by_kind[kind]) for kind in (*KINDS, *MAIN_OPCODES) if kind in by_kind),
            (_opcode(instruction), instruction),
        )

    def _with_nested(self, instruction: Instruction) -> Iterator[Instruction]:
        yield instruction
        if instruction.opcode == "fusion" or instruction.opcode.startswith("async"):
            for name in instruction.called:
                for one in self._module.computations[name].values():
                    yield from self._with_nested(one)

    def _with_source_line(
        self, computation: str, main: Instruction, instruction: Instruction
    ) -> tuple[Instruction, bool]:
        """Returns the nearest instruction with a source line, and whether the line is its own.

        Some instructions that XLA creates have no source line; their users or operands often have one.
        """
        body = self._module.computations[computation]
        near = [main, instruction, *reversed([*self._with_nested(instruction)])]  # its root first
        for distance in range(MAX_DISTANCE):
            for one in near:
                # Without an op_name, the line is only the call that the instruction was inlined from.
                if one.op_name and source_of(self._module.traceback(one)):
                    return one, distance == 0 or one.opcode == "bitcast"
            users = [
                user for one in near for user in self._module.users.get((computation, one.name), ())
            ]
            operands = [body[name] for one in near for name in one.operands if name in body]
            near = users + operands
        return main if main.op_name else instruction, True


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.results)


def _opcode(instruction: Instruction) -> str:
    """Returns the opcode without -start or -done; "dot" for library calls that multiply matrices."""
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
