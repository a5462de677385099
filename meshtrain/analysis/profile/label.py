"""Says of an operation in a trace what it is, and which line of source it is for, by the compiled program."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from meshtrain.analysis import hlo
from meshtrain.analysis.collective_ops import KINDS, source_of
from meshtrain.analysis.hlo import Instruction, Module

# What a fusion is called after, if it holds one: the first of these.
HEAVY = (
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
MATRICES = re.compile(r"gemm|matmul|cublas|cutlass|nvjet|xmma", re.IGNORECASE)
COPIES = re.compile(r"mem(cpy|set)", re.IGNORECASE)
NEARBY = 3  # uses away


class Label(NamedTuple):
    kind: str  # "dot", "all-reduce", "fusion", ...
    phase: str  # "forward", "backward", "recompute", "other"
    source: (
        str  # "meshtrain/models/layers.py:125 Attention.__call__", "near ...", or some other name
    )
    name: str  # of the instruction, or the kernel

    @property
    def is_collective(self) -> bool:
        return self.kind in KINDS


class Labels:
    """Labels for the operations of one compiled program."""

    def __init__(self, text: str):
        self._module: Module = hlo.parse(text)
        self._found = {
            name: (computation, instruction)
            for computation, body in self._module.computations.items()
            for name, instruction in body.items()
        }
        self._of_kernel = {_as_kernel(name): name for name in self._found}
        self._known: dict[tuple[str, str], Label] = {}

    def of(self, path: str, kernel: str) -> Label:
        """Returns the label of an operation that a trace describes so (see `trace.Operation`)."""
        if (path, kernel) not in self._known:
            name = self._instruction(path, kernel)
            label = self._label(name) if name else _by_name(kernel or path)
            self._known[path, kernel] = label
        return self._known[path, kernel]

    def _instruction(self, path: str, kernel: str) -> str | None:
        """Returns the instruction's name, if there is one.

        Kernels in a CUDA graph are told as the call of the whole graph, but fusions give theirs their name.
        """
        kernel = kernel.partition(" = ")[0].lstrip("%")  # TPU's are whole lines of the program
        for name in (*reversed(path.split("/")), kernel):
            if name in self._found and self._found[name][1].opcode not in CONTAINERS:
                return name
        return self._of_kernel.get(kernel) or (kernel if kernel in self._found else None)

    def _label(self, name: str) -> Label:
        computation, instruction = self._found[name]
        kind, heaviest = self._kind(instruction)
        body, combined = self._module.computations[computation], ""
        if kind in KINDS and len(instruction.operands) > 1:
            # XLA moves several tensors at once: the largest tells more than the first.
            instruction = max((body[one] for one in instruction.operands), key=_size)
            heaviest, combined = self._kind(instruction)[1], ", combined"
        described, is_own = self._described(computation, heaviest, instruction)
        op_name = described.op_name
        phase = "forward" if "jvp(" in op_name else "other"
        phase = "backward" if "transpose(" in op_name else phase
        phase = "recompute" if "rematted" in op_name else phase
        source = source_of(self._module.traceback(described)) or op_name.rpartition("/")[2]
        source = source or name.partition(".")[0]
        return Label(kind, phase, f"{'' if is_own else 'near '}{source}{combined}", name)

    def _kind(self, instruction: Instruction) -> tuple[str, Instruction]:
        """Returns what an instruction is, and which instruction within it makes it that."""
        by_kind = {}
        for one in self._within(instruction):
            by_kind.setdefault(_plain(one), one)
        return next(
            ((kind, by_kind[kind]) for kind in (*KINDS, *HEAVY) if kind in by_kind),
            (_plain(instruction), instruction),
        )

    def _within(self, instruction: Instruction) -> Iterator[Instruction]:
        yield instruction
        if instruction.opcode == "fusion" or instruction.opcode.startswith("async"):
            for name in instruction.called:
                for one in self._module.computations[name].values():
                    yield from self._within(one)

    def _described(
        self, computation: str, heaviest: Instruction, instruction: Instruction
    ) -> tuple[Instruction, bool]:
        """Returns the nearest instruction with a line of source, and whether that is its own.

        XLA leaves it off some that it makes; what is made of a result then often still has it.
        """
        body = self._module.computations[computation]
        near = [heaviest, instruction, *reversed([*self._within(instruction)])]  # the root first
        for distance in range(NEARBY):
            for one in near:
                # One without a name has the line of the call that it was inlined from.
                if one.op_name and source_of(self._module.traceback(one)):
                    return one, distance == 0 or one.opcode == "bitcast"
            users = [
                user for one in near for user in self._module.users.get((computation, one.name), ())
            ]
            operands = [body[name] for one in near for name in one.operands if name in body]
            near = users + operands
        return heaviest if heaviest.op_name else instruction, True


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.results)


def _plain(instruction: Instruction) -> str:
    """Returns what an instruction does, whichever half of it this is, and whoever's library does it."""
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        return "dot" if target and MATRICES.search(target[1]) else "custom-call"
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def _by_name(kernel: str) -> Label:
    """Returns what the name of a kernel alone tells."""
    letters = re.sub("[^a-z]", "", kernel.lower())
    kinds = [kind for kind in KINDS if kind.replace("-", "") in letters]
    if kinds or "nccl" in letters:
        kind = kinds[0] if kinds else "collective-permute"  # NCCL's sends and receives
    elif COPIES.search(kernel):
        kind = "copy"
    else:
        kind = "dot" if MATRICES.search(kernel) else "kernel"
    return Label(kind, "other", kernel[:60], kernel[:60])  # of templates they are long


def _as_kernel(name: str) -> str:
    return re.sub(r"\W", "_", name)
