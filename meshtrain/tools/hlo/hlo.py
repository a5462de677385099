"""Parses the HLO text of a compiled program: instructions, how often each runs, source lines.

No devices are needed. The text is `jax.jit(f).lower(...).compile().as_text()` of any backend.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

HOST_MEMORY = "S(5)"  # XLA's number of that memory space, in a layout


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    is_on_host: bool = False  # in the host's memory

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> float:
        """Bytes per element; 0 for types without elements (tokens)."""
        bits = re.search(r"\d+", self.dtype)
        return 1 if self.dtype == "pred" else int(bits[0]) / 8 if bits else 0


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    results: tuple[Array, ...]  # one, or the elements of a tuple, flattened
    operands: tuple[str, ...]  # names of instructions in the same computation
    operand_text: str  # the text between the parentheses
    attributes: str  # the text after the parentheses
    is_root: bool

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations that it runs: loop bodies, branches, fused computations."""
        if self.opcode.endswith(("-done", "-update")):
            # Counted at the matching -start.
            return []
        values = re.findall(
            r"\b(?:body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|[\w.\-%]+)",
            self.attributes,
        )
        return re.findall(r"[\w.\-]+", " ".join(values))

    def computation(self, key: str) -> str:
        """Returns the name of a computation of a `while`: its "body" or its "condition"."""
        return re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)[1]

    @cached_property
    def num_trips(self) -> int | None:
        """Number of iterations of a `while`; None if the compiler does not know it."""
        match = re.search(r"known_trip_count\W+n\W+(\d+)", self.attributes)
        return int(match[1]) if match else None

    @cached_property
    def fraction_taken(self) -> float:
        """The fraction of runs in which a `conditional` takes its branch with collectives.

        1 if unknown. The pipeline names its conditionals for it, for example `3_of_4_ticks`.
        """
        match = re.search(r"/(\d+)_of_(\d+)_ticks/", self.op_name)
        if not match or self.opcode != "conditional":
            return 1
        return int(match[1]) / int(match[2])

    def int_attribute(self, key: str) -> int | None:
        """Returns N from `key=N` or `key={N}` in the attributes; None if it is not there."""
        match = re.search(rf"\b{key}=\{{?(\d+)", self.attributes)
        return int(match[1]) if match else None

    @cached_property
    def op_name(self) -> str:
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\", "") if match else ""

    @property
    def phase(self) -> str:
        """forward or backward, from the names that JAX gives operations; empty if unknown."""
        return phase_of(self.op_name)


def phase_of(op_name: str) -> str:
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else ""


@dataclass(frozen=True)
class Frame:
    """A source line in the traceback of an operation."""

    file: str
    function: str
    line: int


@dataclass
class Module:
    """A compiled program: instructions by computation and name."""

    num_devices: int
    entry: str = ""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    frames: dict[int, tuple[Frame, int]] = field(default_factory=dict)  # frame, id of its parent
    # Loops with one of these in their name count as loops of zero iterations.
    skipped: tuple[str, ...] = ()
    _runs: dict[str, tuple[float, bool]] = field(default_factory=dict)

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """For each computation, the computations and instructions that call it."""
        callers = defaultdict(list)
        for name, body in self.computations.items():
            for instruction in body.values():
                for called in instruction.called:
                    callers[called].append((name, instruction))
        return callers

    @cached_property
    def users(self) -> dict[tuple[str, str], list[Instruction]]:
        """For each value, the instructions that use it as an operand."""
        users = defaultdict(list)
        for name, body in self.computations.items():
            for instruction in body.values():
                for operand in dict.fromkeys(instruction.operands):
                    users[name, operand].append(instruction)
        return users

    def num_trips(self, computation: str, loop: Instruction) -> int | None:
        """Returns the number of iterations of a `while`; None if it is not found, or not constant.

        XLA does not write it down for all loops. `lax.scan` counts by one, from a constant up to a
        constant; libtpu unrolls loops, which then count by two.
        """
        if any(name in loop.op_name for name in self.skipped):
            return 0
        if loop.num_trips is not None or "known_init_step" in loop.attributes:
            return loop.num_trips
        condition = loop.computation("condition")
        tests = self.computations[condition].values()
        counters = [test for test in tests if test.opcode == "get-tuple-element"]
        state = self.computations[computation][loop.operands[0]]
        compare = self._root(condition)
        if compare.opcode == "fusion":
            condition = compare.called[0]
            compare = self._root(condition)
        is_count = compare.opcode == "compare" and "direction=LT" in compare.attributes
        if not is_count or len(counters) != 1 or state.opcode != "tuple":
            return None
        index = counters[0].int_attribute("index")
        if index is None:
            return None
        start = self._constant(computation, state.operands[index])
        limit = self._constant(condition, compare.operands[1])
        if start is None or limit is None:
            return None
        return max(0, math.ceil((limit - start) / self._step(loop, index)))

    def _step(self, loop: Instruction, index: int) -> int:
        """Returns by how much a loop increases its counter; 1 if that is not found."""
        body = loop.computation("body")
        root = self._root(body)
        if root.opcode != "tuple":
            return 1
        value = self.computations[body][root.operands[index]]
        while value.opcode in ("copy", "bitcast"):
            value = self.computations[body][value.operands[0]]
        if value.opcode == "fusion":
            body = value.called[0]
            value = self._root(body)
        if value.opcode != "add":
            return 1
        steps = [self._constant(body, operand) for operand in value.operands]
        return next((step for step in steps if step), 1)

    def _root(self, computation: str) -> Instruction:
        instructions = self.computations[computation].values()
        return next(instruction for instruction in instructions if instruction.is_root)

    def _constant(self, computation: str, name: str) -> int | None:
        """Returns the integer that a value is a copy of; None if it is not a constant."""
        body = self.computations[computation]
        value = body.get(name)
        while value and value.opcode in ("copy", "bitcast"):
            value = body.get(value.operands[0])
        if value and value.opcode == "constant" and re.fullmatch(r"-?\d+", value.operand_text):
            return int(value.operand_text)
        return None

    def runs(self, computation: str) -> tuple[float, bool]:
        """Returns how often a computation runs per step, and whether that count is exact.

        A loop of unknown length counts as one iteration. Every branch of a conditional counts as
        taken, unless the conditional's name says how often: the pipeline's conditionals have
        collectives in one branch only.
        """
        if computation == self.entry:
            return 1, True
        if computation in self._runs:
            return self._runs[computation]
        total, is_exact = 0, True
        for caller, instruction in self.callers[computation]:
            count, is_count_exact = self.runs(caller)
            if instruction.opcode == "while":
                num_trips = self.num_trips(caller, instruction)
                if num_trips is None:
                    is_count_exact = False
                else:
                    count *= num_trips
            total += count * instruction.fraction_taken
            is_exact = is_exact and is_count_exact
        self._runs[computation] = total, is_exact
        return total, is_exact

    def traceback(self, instruction: Instruction) -> list[Frame]:
        """Returns the source lines of an instruction, innermost first."""
        trace: list[Frame] = []
        frame_id = instruction.int_attribute("stack_frame_id")
        while frame_id in self.frames and len(trace) < 100:
            frame, frame_id = self.frames[frame_id]
            trace.append(frame)
        if trace:
            return trace
        file = re.search(r'source_file="([^"]*)"', instruction.attributes)
        if not file:
            return []
        return [Frame(file[1], "", instruction.int_attribute("source_line") or 0)]


def parse(text: str) -> Module:
    """Parses the HLO text of a program."""
    header = text.partition("\n")[0]
    counts = [int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)]
    module = Module(num_devices=math.prod(counts))
    body: dict[str, Instruction] | None = None
    # XLA writes the metadata of a Pallas kernel for TPUs on lines of its own.
    text = re.sub(
        r"kernel_metadata=\{\n(?:.*\n)*?\}", lambda match: match[0].replace("\n", ""), text
    )
    for line in text.splitlines():
        if body is not None and line.startswith(" "):
            if instruction := _instruction(line):
                body[instruction.name] = instruction
            continue
        # A line without an indent ends a computation, and may open one.
        body = None
        opening = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
        if opening and line.endswith("{"):
            is_entry, name = opening.groups()
            body = module.computations.setdefault(name, {})
            if is_entry:
                module.entry = name
    module.frames = _frames(text)
    return module


def _instruction(line: str) -> Instruction | None:
    """Parses `ROOT %name = type opcode(operands), attributes`; None for another line."""
    start = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not start:
        return None
    is_root, name = start.groups()
    rest = line[start.end() :]
    # The type of several results is in parentheses, and has spaces.
    end = _closing_parenthesis(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    end = _closing_parenthesis(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    # Asynchronous fusions (jaxlib >= 0.11). The start has the type ((operands), results, u32[]).
    if opcode == "fusion-start":
        opcode, kind = "fusion", kind[_closing_parenthesis(kind, 1) + 1 :].removesuffix(", u32[])")
    elif opcode == "fusion-done":
        opcode = "bitcast"
    return Instruction(
        name=name,
        opcode=opcode,
        results=arrays(kind),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        operand_text=inside,
        attributes=rest[end + 1 :],
        is_root=bool(is_root),
    )


def arrays(text: str) -> tuple[Array, ...]:
    """Returns the arrays in a type such as `(f32[2,3]{1,0}, bf16[8]{0:S(5)}, s32[])`."""
    found = []
    for dtype, shape, layout in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", text):
        sizes = tuple(int(n) for n in re.findall(r"\d+", shape))
        found.append(Array(dtype, sizes, is_on_host=HOST_MEMORY in layout))
    return tuple(found)


def _closing_parenthesis(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text)


def _frames(text: str) -> dict[int, tuple[Frame, int]]:
    """Parses the tables of source lines that precede the computations."""

    def table(name: str) -> dict[str, str]:
        match = re.search(rf"^{name}\n((?:\d+ .+\n)*)", text, re.MULTILINE)
        return dict(row.split(" ", 1) for row in match[1].splitlines()) if match else {}

    def fields(row: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\d+)", row))

    files, functions = table("FileNames"), table("FunctionNames")
    locations: dict[str, Frame] = {}
    for location_id, row in table("FileLocations").items():
        ids = fields(row)
        file = files.get(ids.get("file_name_id"), "").strip('"')
        function = functions.get(ids.get("function_name_id"), "").strip('"')
        locations[location_id] = Frame(file, function, int(ids.get("line", 0)))
    frames: dict[int, tuple[Frame, int]] = {}
    for frame_id, row in table("StackFrames").items():
        ids = fields(row)
        # parent_frame_id is the id of the caller's frame plus 1, or 0 if there is no caller.
        parent = int(ids.get("parent_frame_id", 0)) - 1
        frames[int(frame_id)] = (locations[ids["file_location_id"]], parent)
    return frames
