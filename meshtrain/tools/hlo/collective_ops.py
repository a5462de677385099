"""Finds the collectives of a compiled program: bytes, device groups, mesh axes and source line of each."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshtrain.tools.hlo import dataflow, hlo
from meshtrain.tools.hlo.hlo import Array, Instruction, Module

Groups = tuple[tuple[int, ...], ...]  # device numbers, counted in the order of the mesh


def groups_of(attributes: str, num_devices: int) -> Groups:
    """Returns the device groups of a collective, from any form that XLA writes.

    `{{0,1},{2,3}}`; `[2,4]<=[8]`, optionally transposed by `T(1,0)`; `mesh['a'=2,'b'=4] {'b'}`,
    optionally with `device_ids=([2,4]T(1,0))`; `{}` for one group of all devices.
    """
    if pairs := re.search(r"replica_groups=\{(\{[\d,{}\s]*\})?\}", attributes):
        lists = re.findall(r"\{([\d,\s]+)\}", pairs[1] or "")
        if not lists:
            return (tuple(range(num_devices)),)
        return tuple(tuple(int(n) for n in group.split(",")) for group in lists)
    if iota := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _rows(_iota(iota[2]).reshape(_ints(iota[1])))
    if mesh := re.search(r"replica_groups=@?mesh\[([^\]]*)\](.*?)\{([^}]*)\}", attributes):
        return _mesh_groups(*mesh.groups())
    return (tuple(range(num_devices)),)


def pairs_of(attributes: str) -> Groups:
    """Returns the (source, target) pairs of a permutation."""
    found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    return tuple(
        (int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1] if found else "")
    )


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes that these groups span, or the one axis that they divide into subgroups.

    Returns None if neither is the case.
    """
    used = [axis for axis, size in mesh.items() if size > 1]
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in used])
    for number in range(len(used) + 1):
        for axes in itertools.combinations(range(len(used)), number):
            rest = [axis for axis in range(len(used)) if axis not in axes]
            rows = ids.transpose(rest + list(axes)).reshape(
                -1, math.prod(ids.shape[a] for a in axes)
            )
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return tuple(used[axis] for axis in axes)
    spans = axes_between([(group[0], other) for group in groups for other in group], mesh)
    return spans if len(spans) == 1 else None


def axes_between(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the two devices of any pair differ."""
    sizes = list(mesh.values())
    ends = np.array(pairs, int).reshape(-1, 2).T
    differ = [
        np.any(a != b) for a, b in zip(*(np.unravel_index(e, sizes) for e in ends), strict=True)
    ]
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def _iota(text: str) -> np.ndarray:
    """Returns 0, 1, 2, ... in the shape `[2,4]`, transposed by `T(1,0)` if given."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return ids.transpose(_ints(order)) if order else ids


def _mesh_groups(axes: str, order: str, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    # 'a':(2)4 is a sub-axis of 'a': size 4, after a more significant factor 2.
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    ]
    dims = []  # (axis, product of the factors before it, size)
    for name, size in sizes.items():
        bounds = {1, size} | {c for n, b, s in parts if n == name for c in (b, b * s)}
        factors = itertools.pairwise(sorted(bounds))
        dims += [(name, low, high // low) for low, high in factors] or [(name, 1, 1)]
    ids = np.arange(math.prod(sizes.values()))
    if shaped := re.search(r"\((\[[\d,]+\](?:T\([\d,]+\))?)\)", order):
        ids = _iota(shaped[1]).reshape(-1)
    elif listed := re.search(r"\(([\d,\s]+)\)", order):
        ids = np.array(_ints(listed[1]))
    grouped = [
        number
        for name, before, size in parts
        for number, (axis, low, _) in enumerate(dims)
        if axis == name and before <= low < before * size
    ]
    others = [number for number in range(len(dims)) if number not in grouped]
    table = ids.reshape([size for _, _, size in dims]).transpose(others + grouped)
    return _rows(table.reshape(-1, math.prod(dims[number][2] for number in grouped)))


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(int(n) for n in row) for row in table)


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def transfer_of(instruction: Instruction) -> str:
    """Returns the kind of exchange between slices that an instruction starts, such as "all-reduce"; else ""."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    return found[1].lower().replace("_", "-") if found and instruction.opcode == "send" else ""


def end_of_transfer(instruction: Instruction, body: dict[str, Instruction]) -> Instruction | None:
    """Returns the instruction that ends an exchange between slices; None if this computation has none."""
    key = _rendezvous(instruction)
    received = {
        one.name for one in body.values() if one.opcode == "recv" and _rendezvous(one) == key
    }
    ends = (
        one for one in body.values() if one.opcode == "recv-done" and {*one.operands} & received
    )
    return next(ends, None)


def _rendezvous(instruction: Instruction) -> str:
    found = re.search(r'_rendezvous="([^"]*)"', instruction.attributes)
    return found[1] if found else instruction.name


def groups_in_all_slices(groups: Groups, num_devices: int, slices: Sequence[int]) -> Groups:
    """Returns the groups of all slices, counted in the order of the mesh, of which `groups` are those of one.

    `slices`: the number of the slice of each device. A program of all `num_devices` devices has its own groups.
    """
    if num_devices == len(slices):
        return groups
    places = _places(slices)
    return tuple(tuple(place[[*group]].tolist()) for place in places for group in groups)


def groups_between_slices(slices: Sequence[int]) -> Groups:
    """Returns for each device number within a slice the devices of all slices that have it."""
    return tuple(map(tuple, np.stack(_places(slices)).T.tolist()))


def _places(slices: Sequence[int]) -> list[np.ndarray]:
    return [np.flatnonzero(np.equal(slices, one)) for one in np.unique(slices)]


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

# Functions of this package for which the line of the caller is shown.
HELPERS = ("constrain", "gathered", "flat_dot_general", "look_up", "lookup")

REDUCE_SCATTER_NOTE = "all-reduce + slice on CPU, a reduce-scatter on GPU and TPU"

BITS_NOTE = "sent in 32 bits on CPU; counted in the 16 bits that GPU and TPU send"

MESSAGE_NOTE = "sent between TPU slices as messages, padded to tiles of 8 x 128 elements"

SUBGROUP_NOTE = "over groups of only some of the devices along this axis"


@dataclass(frozen=True)
class Collective:
    """One tensor that a collective moves; a combined collective has one entry for each tensor."""

    name: str  # of the instruction
    kind: str  # one of KINDS
    axes: tuple[str, ...] | None  # mesh axes that its groups span; None if none fit
    group_size: int
    array: Array  # the full tensor: output of a gather, input of a reduction or permutation
    itemsize: float  # bytes per element, as GPU and TPU send it
    count: float  # runs per step, loop iterations included
    count_known: bool  # False: a loop of unknown length is counted as one iteration
    op_name: str
    source: str  # file:line function
    origin: str  # the step's argument whose values a gather moves; empty: computed values
    groups: Groups  # the devices of each group, or each (source, target) of a permutation
    notes: tuple[str, ...] = ()

    @property
    def tensor_bytes(self) -> float:
        return self.array.size * self.itemsize

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step, with a bandwidth-optimal algorithm."""
        return self.count * bytes_sent(self.kind, self.tensor_bytes, self.group_size)

    @property
    def phase(self) -> str:
        """forward or backward, from the names that JAX gives operations; empty if unknown."""
        return hlo.phase_of(self.op_name)


def bytes_sent(kind: str, tensor_bytes: float, group_size: int) -> float:
    """Returns the bytes that each device of the group sends for one tensor."""
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * share * tensor_bytes
    return tensor_bytes * (1 if kind in ("collective-permute", "collective-broadcast") else share)


def find_collectives(
    module: Module, mesh: Mapping[str, int], platform: str = "cpu", slices: Sequence[int] = ()
) -> list[Collective]:
    """Returns the collectives of a step on a mesh of these axes, in the order of the text.

    Compiled for CPU, a step has no reduce-scatter and no bfloat16 collective; these are listed as GPU and
    TPU run them. `slices`: the number of the slice of each device, of which a program for TPUs has only one.
    """
    slices = slices if len(slices) else [0] * module.num_devices
    found, fragments = [], set()
    for computation, body in module.computations.items():
        count, count_known = module.runs(computation)
        is_fused = any(caller.opcode == "fusion" for _, caller in module.callers[computation])
        for instruction in body.values():
            kind = instruction.opcode.removesuffix("-start")
            kind = transfer_of(instruction) or kind
            if kind not in KINDS or not count:
                continue
            channel = (kind, instruction.int_attribute("channel_id"))
            if is_fused and channel in fragments:
                continue  # TPU splits one collective over several fusions
            fragments |= {channel} if is_fused else set()
            times = (count, count_known)
            where = module, computation, instruction
            members = _members(module, instruction, kind, slices)
            found += _tensors(*where, kind, members, mesh, times, platform)
    return found


def _members(module, instruction, kind, slices) -> Groups:
    """Returns the devices of each group, or each (source, target) of a permutation."""
    if instruction.opcode == "send":
        return groups_between_slices(slices)
    if kind == "collective-permute":
        members = pairs_of(instruction.attributes)
    else:
        members = groups_of(instruction.attributes, module.num_devices)
    return groups_in_all_slices(members, module.num_devices, slices)


def _tensors(
    module, computation, instruction, kind, members, mesh, times, platform
) -> Iterator[Collective]:
    """Yields a Collective for each tensor of one instruction."""
    if kind == "collective-permute":
        axes, size = axes_between(members, mesh), 2
    else:
        axes, size = axes_of(members, mesh), max(map(len, members))
    if size == 1 or axes == ():
        return
    is_subgroup = size < math.prod(mesh[axis] for axis in axes or ())
    is_subgroup = is_subgroup and kind != "collective-permute"
    for element, array in enumerate(_arrays(module, computation, instruction, kind, size)):
        described = _element(module, computation, instruction, element)
        index = element if len(instruction.results) > 1 else None
        uses = list(dataflow.uses(module, computation, instruction.name, index))
        origin, smallest = "", array.itemsize
        if element < len(instruction.operands):
            value = (computation, instruction.operands[element], None)
            origin, smallest = dataflow.source_argument(module, value)
        # A copy needs no more bits than its 16-bit source; a sum in float32 does.
        is_copy = smallest == 2 and kind != "all-reduce"
        is_16_bit = is_copy or dataflow.is_rounded_to_16_bits(uses)
        is_16_bit = is_16_bit or "_promoted" in instruction.attributes
        is_promoted = array.dtype == "f32" and is_16_bit and platform == "cpu"
        is_scatter = kind == "all-reduce" and dataflow.is_sliced_per_device(
            module, uses, array.size / size
        )
        notes = (REDUCE_SCATTER_NOTE,) * is_scatter + (BITS_NOTE,) * is_promoted
        notes += (MESSAGE_NOTE,) * (instruction.opcode == "send")
        one = Collective(
            name=instruction.name,
            kind="reduce-scatter" if is_scatter else kind,
            axes=axes,
            group_size=size,
            array=array,
            itemsize=2 if is_promoted else array.itemsize,
            count=times[0],
            count_known=times[1],
            op_name=described.op_name,
            source=source_of(module.traceback(described) or module.traceback(instruction)),
            origin=origin,
            groups=members,
            notes=notes + (SUBGROUP_NOTE,) * is_subgroup,
        )
        parts = _concatenated(module, computation, instruction) if kind == "all-reduce" else []
        for part in parts:
            source = source_of(module.traceback(part))
            yield replace(one, array=part.results[0], op_name=part.op_name, source=source)
        if not parts:
            yield one


def _concatenated(module, computation, instruction) -> list[Instruction]:
    """Returns the tensors that XLA on GPU concatenates to one vector for a single all-reduce; [] if it does not."""
    body = module.computations[computation]
    vector = body.get(instruction.operands[0])
    if vector is None or len(instruction.operands) > 1:
        return []
    if vector.opcode == "fusion":
        inner = module.computations[vector.called[0]]
        root = next(one for one in inner.values() if one.is_root)
        numbers = {
            one.name: int(one.operand_text) for one in inner.values() if one.opcode == "parameter"
        }
        if root.opcode != "concatenate" or not {*root.operands} <= {*numbers}:
            return []
        names = [vector.operands[numbers[name]] for name in root.operands]
    else:
        names = vector.operands if vector.opcode == "concatenate" else ()
    parts = [body[name] for name in names]
    return [body[one.operands[0]] if one.opcode == "bitcast" else one for one in parts]


def _arrays(module, computation, instruction, kind, group_size) -> list[Array]:
    """Returns the full tensors that an instruction moves.

    Taken from its operands, because a -start instruction has additional results.
    """
    body = module.computations[computation]
    arrays = [a for name in instruction.operands if name in body for a in body[name].results]
    arrays = arrays or list(hlo.arrays(instruction.operand_text))
    if kind == "all-gather":
        dim = instruction.int_attribute("dimensions") or 0
        shapes = ((*a.shape[:dim], a.shape[dim] * group_size, *a.shape[dim + 1 :]) for a in arrays)
        return [Array(a.dtype, shape) for a, shape in zip(arrays, shapes, strict=True)]
    if kind == "all-to-all" and len(arrays) > 1:  # one slice for each device
        return [Array(arrays[0].dtype, (len(arrays), *arrays[0].shape))]
    is_first = kind == "ragged-all-to-all" or instruction.opcode == "send"
    return arrays[:1] if is_first else arrays


def _element(module, computation, instruction, element) -> Instruction:
    """Returns the instruction that has the metadata of one tensor of a combined collective."""
    if len(instruction.results) == 1:
        return instruction
    for user in module.users[computation, instruction.name]:
        if (
            user.opcode == "get-tuple-element"
            and user.int_attribute("index") == element
            and user.op_name
        ):
            return user
    return instruction


def source_of(traceback: list[hlo.Frame]) -> str:
    """Returns the innermost line outside libraries: 'meshtrain/models/layers.py:125 Attention.__call__'."""
    frames = [frame for frame in traceback if frame.file and not LIBRARY.search(frame.file)]
    frames = [
        frame for frame in frames if frame.function.partition(".")[0] not in HELPERS
    ] or frames
    if not frames:
        return ""
    path = Path(frames[0].file)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    short = Path(*short.parts[-3:])
    function = frames[0].function.replace("<locals>.", "").replace(".<lambda>", "")
    return f"{short}:{frames[0].line} {function}".strip()
