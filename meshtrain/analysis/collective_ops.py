"""The collectives of a compiled program: what each moves, along which mesh axes, and for which line of source."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshtrain.analysis import dataflow, groups, hlo
from meshtrain.analysis.hlo import Array, Instruction, Module

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:jax|jaxlib|flax|optax|chex|einops|equinox|haiku)/"
    r"|/lib/python3\.\d+/(?!(?:site|dist)-packages/)"
)
HELPERS = ("constrain", "_flat_dot_general", "table")  # of ours, called from the line to be shown
SLICED = "all-reduce + slice on CPU, a reduce-scatter on GPU and TPU"
PROMOTED = "in 32 bits on CPU; counted in the 16 bits that GPU and TPU send"
PART = "among some of the devices along this axis"


@dataclass(frozen=True)
class Collective:
    """One tensor that a collective moves; one that moves several at once is listed once for each."""

    name: str  # of the instruction
    kind: str
    axes: tuple[str, ...] | None  # that its groups span; None: they cut across the mesh
    group_size: int
    array: Array  # the whole tensor: what a gather makes, what a reduction or permutation takes
    itemsize: float  # bytes of an element as GPU and TPU send it
    count: float  # per step, loops multiplied in
    count_known: bool  # no: some loop around it counts as one turn
    op_name: str
    source: str  # file:line function
    origin: str  # the argument of the step whose values a gather moves; empty: computed ones
    notes: tuple[str, ...] = ()

    @property
    def tensor_bytes(self) -> float:
        return self.array.size * self.itemsize

    @property
    def bytes(self) -> float:
        """What each device sends per step, by the best known algorithm of this kind."""
        return self.count * sent(self.kind, self.tensor_bytes, self.group_size)

    @property
    def phase(self) -> str:
        """Which part of the step it is of, as jax names operations; empty where it is not named."""
        if "transpose(" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name else ""


def sent(kind: str, tensor_bytes: float, group_size: int) -> float:
    """Returns the bytes that each device of the group sends for one tensor."""
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * share * tensor_bytes
    return tensor_bytes * (1 if kind in ("collective-permute", "collective-broadcast") else share)


def find(module: Module, mesh: Mapping[str, int], platform: str = "cpu") -> list[Collective]:
    """Returns the collectives of a step on a mesh of these axes, in the order of the text.

    On CPU, where XLA has no reduce-scatter and no bfloat16, they are those that GPU and TPU would run.
    """
    found, fragments = [], set()
    for computation, body in module.computations.items():
        times, known = module.runs(computation)
        fused = any(caller.opcode == "fusion" for _, caller in module.callers[computation])
        for instruction in body.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or not times:
                continue
            channel = (kind, instruction.number("channel_id"))
            if fused and channel in fragments:
                continue  # TPU spreads one collective over several fusions
            fragments |= {channel} if fused else set()
            found += _of(module, computation, instruction, kind, mesh, times, known, platform)
    return found


def _of(
    module, computation, instruction, kind, mesh, times, known, platform
) -> Iterator[Collective]:
    """Yields the tensors of one instruction."""
    if kind == "collective-permute":
        axes, size = groups.axes_between(groups.pairs_of(instruction.attributes), mesh), 2
    else:
        members = groups.groups_of(instruction.attributes, module.num_devices)
        axes, size = groups.axes_of(members, mesh), max(map(len, members))
    if size == 1 or axes == ():
        return
    part = kind != "collective-permute" and size < math.prod(mesh[axis] for axis in axes or ())
    for element, array in enumerate(_arrays(module, computation, instruction, kind, size)):
        shown = _element(module, computation, instruction, element)
        several = len(instruction.results) > 1
        used = dataflow.uses(module, computation, instruction.name, element if several else None)
        used = list(used)
        origin, narrowest = "", array.itemsize
        if element < len(instruction.operands):
            value = (computation, instruction.operands[element], None)
            origin, narrowest = dataflow.argument(module, value)
        # What is only handed on is as good before it was widened; a sum is not.
        narrow = narrowest == 2 and kind != "all-reduce" or dataflow.is_narrowed(used)
        promoted = array.dtype == "f32" and (narrow or "_promoted" in instruction.attributes)
        promoted = promoted and platform == "cpu"
        sliced = kind == "all-reduce" and dataflow.is_sliced(module, used, array.size / size)
        yield Collective(
            name=instruction.name,
            kind="reduce-scatter" if sliced else kind,
            axes=axes,
            group_size=size,
            array=array,
            itemsize=2 if promoted else array.itemsize,
            count=times,
            count_known=known,
            op_name=shown.op_name,
            source=source_of(module.traceback(shown) or module.traceback(instruction)),
            origin=origin,
            notes=(SLICED,) * sliced + (PROMOTED,) * promoted + (PART,) * part,
        )


def _arrays(module, computation, instruction, kind, group_size) -> list[Array]:
    """Returns the whole tensors that it moves, from its operands: results hold more, for a -start."""
    body = module.computations[computation]
    arrays = [a for name in instruction.operands if name in body for a in body[name].results]
    arrays = arrays or list(hlo.arrays(instruction.operand_text))
    if kind == "all-gather":
        dim = instruction.number("dimensions") or 0
        grown = ((*a.shape[:dim], a.shape[dim] * group_size, *a.shape[dim + 1 :]) for a in arrays)
        return [Array(a.dtype, shape) for a, shape in zip(arrays, grown, strict=True)]
    if kind == "all-to-all" and len(arrays) > 1:  # one slice for each device
        return [Array(arrays[0].dtype, (len(arrays), *arrays[0].shape))]
    return arrays[:1] if kind == "ragged-all-to-all" else arrays


def _element(module, computation, instruction, element) -> Instruction:
    """Returns the instruction whose metadata tells most of one tensor of a combined collective."""
    if len(instruction.results) == 1:
        return instruction
    for user in module.users[computation, instruction.name]:
        if user.opcode == "get-tuple-element" and user.number("index") == element and user.op_name:
            return user
    return instruction


def source_of(traceback: list[hlo.Frame]) -> str:
    """Returns the innermost line that is no library's: 'meshtrain/models/layers.py:125 Attention.__call__'."""
    own = [frame for frame in traceback if frame.file and not LIBRARY.search(frame.file)]
    own = [frame for frame in own if frame.function not in HELPERS] or own
    if not own:
        return ""
    path = Path(own[0].file)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    short = Path(*short.parts[-3:])
    function = own[0].function.replace("<locals>.", "").replace(".<lambda>", "")
    return f"{short}:{own[0].line} {function}".strip()
