"""Reads the text of a compiled program: its instructions, how often each runs, and their source lines.

Pure text, no devices: `jax.jit(f).lower(...).compile().as_text()` of any backend.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> float:
        """Bytes of one element; 0 for what is no number (tokens)."""
        bits = re.search(r"\d+", self.dtype)
        return 1 if self.dtype == "pred" else int(bits[0]) / 8 if bits else 0


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]  # one, or those of a tuple, flattened
    operands: tuple[str, ...]  # names, of instructions of the same computation
    operand_text: str  # as it stands between the parentheses
    attributes: str  # what follows them
    is_root: bool

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations that it runs: bodies, branches, what is fused or wrapped."""
        if self.opcode.endswith(("-done", "-update")):
            return []  # of what their -start runs
        found = re.findall(
            r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|[\w.\-%]+)",
            self.attributes,
        )
        return re.findall(r"[\w.\-]+", " ".join(found))

    @cached_property
    def num_trips(self) -> int | None:
        """How often a `while` runs its body; None where the compiler does not say."""
        found = re.search(r"known_trip_count\W+n\W+(\d+)", self.attributes)
        return int(found[1]) if found else None

    @cached_property
    def share_of_turns(self) -> float:
        """How often a `conditional` is taken, where its name says so (`3_of_4_ticks`); 1 elsewhere."""
        found = re.search(r"/(\d+)_of_(\d+)_ticks/", self.op_name)
        return int(found[1]) / int(found[2]) if found and self.opcode == "conditional" else 1

    def number(self, key: str) -> int | None:
        """Returns the integer in `key=N` (or `key={N}`) of the attributes."""
        found = re.search(rf"\b{key}=\{{?(\d+)", self.attributes)
        return int(found[1]) if found else None

    @cached_property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\", "") if found else ""


@dataclass(frozen=True)
class Frame:
    """A line of source, as the traceback of an operation names it."""

    file: str
    function: str
    line: int


@dataclass
class Module:
    """A compiled program. Instructions are found by computation and name."""

    num_devices: int
    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    frames: dict[int, tuple[Frame, int]] = field(default_factory=dict)  # and the id of the parent
    _runs: dict[str, tuple[float, bool]] = field(default_factory=dict)

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """Who runs a computation: the caller's computation and the instruction there."""
        callers = defaultdict(list)
        for name, body in self.computations.items():
            for instruction in body.values():
                for called in instruction.called:
                    callers[called].append((name, instruction))
        return callers

    @cached_property
    def users(self) -> dict[tuple[str, str], list[Instruction]]:
        """Which instructions take a value."""
        users = defaultdict(list)
        for name, body in self.computations.items():
            for instruction in body.values():
                for operand in dict.fromkeys(instruction.operands):
                    users[name, operand].append(instruction)
        return users

    def runs(self, computation: str) -> tuple[float, bool]:
        """Returns how often a computation runs in one step, and whether that is known.

        A loop of unknown length counts as one turn, each branch of a conditional as taken, unless the
        name of the conditional says how often: of the pipeline's only one branch has collectives.
        """
        if computation == self.entry:
            return 1, True
        if computation in self._runs:
            return self._runs[computation]
        total, known = 0, True
        for caller, instruction in self.callers[computation]:
            times, sure = self.runs(caller)
            if instruction.opcode == "while":
                trips = instruction.num_trips
                sure, times = sure and trips is not None, times * (1 if trips is None else trips)
            total, known = total + times * instruction.share_of_turns, known and sure
        self._runs[computation] = total, known
        return total, known

    def traceback(self, instruction: Instruction) -> list[Frame]:
        """Returns the source lines of an instruction, the innermost first."""
        number, trace = instruction.number("stack_frame_id"), []
        while number in self.frames and len(trace) < 100:
            frame, parent = self.frames[number]
            trace.append(frame)
            number = parent
        if not trace and (file := re.search(r'source_file="([^"]*)"', instruction.attributes)):
            trace = [Frame(file[1], "", instruction.number("source_line") or 0)]
        return trace


def parse(text: str) -> Module:
    """Returns the program that `text` describes."""
    header = text.partition("\n")[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    module = Module(num_devices=math.prod(counts))
    body: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if body is None or not line.startswith(" "):
            body = None
            if line.endswith("{") and (opening := re.match(r"(ENTRY )?%?([\w.\-]+)", line)):
                body = module.computations.setdefault(opening[2], {})
                module.entry = opening[2] if opening[1] else module.entry
        elif instruction := _instruction(line):
            body[instruction.name] = instruction
    module.frames = _frames(text)
    return module


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not found:
        return None
    rest = line[found.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    return Instruction(
        name=found[2],
        opcode=opcode,
        results=arrays(kind),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        operand_text=inside,
        attributes=rest[end + 1 :],
        is_root=bool(found[1]),
    )


def arrays(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a type, such as `(f32[2,3]{1,0}, s32[])`."""
    return tuple(
        Array(dtype, tuple(int(n) for n in re.findall(r"\d+", shape)))
        for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", text)
    )


def _closing(text: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` closes."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text)


def _frames(text: str) -> dict[int, tuple[Frame, int]]:
    """Reads the tables of source lines that stand before the computations."""

    def table(name: str) -> dict[str, str]:
        found = re.search(rf"^{name}\n((?:\d+ .+\n)*)", text, re.MULTILINE)
        return dict(row.split(" ", 1) for row in found[1].splitlines()) if found else {}

    def fields(row: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\d+)", row))

    files, functions, places, frames = table("FileNames"), table("FunctionNames"), {}, {}
    for number, row in table("FileLocations").items():
        at = fields(row)
        file = files.get(at.get("file_name_id"), "").strip('"')
        function = functions.get(at.get("function_name_id"), "").strip('"')
        places[number] = Frame(file, function, int(at.get("line", 0)))
    for number, row in table("StackFrames").items():
        at = fields(row)
        # Counted from 1, where 0 would be none: frame 2 with parent_frame_id=2 was called by frame 1.
        parent = int(at.get("parent_frame_id", 0)) - 1
        frames[int(number)] = (places[at["file_location_id"]], parent)
    return frames
