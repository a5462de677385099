"""Finds the collectives of a compiled program: bytes, device groups, mesh axes, source line."""

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
HELPERS = ("constrain", "gathered", "flat_dot_general", "Linear", "look_up", "lookup")
REDUCE_SCATTER_NOTE = "all-reduce + slice on CPU, a reduce-scatter on GPU and TPU"
BITS_NOTE = "sent in 32 bits on CPU; counted in the 16 bits that GPU and TPU send"
MESSAGE_NOTE = "sent between TPU slices as messages, padded to tiles of 8 x 128 elements"
PADDED_NOTE = (
    "a gather that libtpu sends as an all-reduce of shards padded with zeros, in twice the bytes"
)
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
    sent_as: str = ""  # the kind that the program has, if it is not `kind`

    @property
    def tensor_bytes(self) -> float:
        return self.array.size * self.itemsize

    @property
    def bytes(self) -> float:
        """Bytes that each device sends per step, with a bandwidth-optimal algorithm."""
        kind = self.sent_as or self.kind
        return self.count * bytes_sent(kind, self.tensor_bytes, self.group_size)

    @property
    def phase(self) -> str:
        """forward or backward, from the names that JAX gives operations; empty if unknown."""
        return hlo.phase_of(self.op_name)


def bytes_sent(kind: str, tensor_bytes: float, group_size: int) -> float:
    """Returns the bytes that each device of the group sends for one tensor."""
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * share * tensor_bytes
    if kind in ("collective-permute", "collective-broadcast"):
        return tensor_bytes
    return tensor_bytes * share


def find_collectives(
    module: Module, mesh: Mapping[str, int], platform: str = "cpu", slices: Sequence[int] = ()
) -> list[Collective]:
    """Returns the collectives of a step on a mesh of these axes, in the order of the text.

    Compiled for CPU, a step has no reduce-scatter and no bfloat16 collective; these are listed as
    GPU and TPU run them. `slices`: the number of the slice of each device, of which a program for
    TPUs has only one.
    """
    slices = slices if len(slices) else [0] * module.num_devices
    collectives: list[Collective] = []
    fragments = set()
    for computation, body in module.computations.items():
        count, count_known = module.runs(computation)
        is_fused = any(caller.opcode == "fusion" for _, caller in module.callers[computation])
        for instruction in body.values():
            kind = instruction.opcode.removesuffix("-start")
            kind = transfer_of(instruction) or kind
            if kind not in KINDS or not count:
                continue
            if is_fused:
                # TPU splits one collective over several fusions.
                channel = (kind, instruction.int_attribute("channel_id"))
                if channel in fragments:
                    continue
                fragments.add(channel)
            tensors = _tensors(
                module,
                computation,
                instruction,
                kind=kind,
                members=_members(module, instruction, kind, slices),
                mesh=mesh,
                platform=platform,
            )
            for tensor in tensors:
                collectives.append(replace(tensor, count=count, count_known=count_known))
    return collectives


def _members(module: Module, instruction: Instruction, kind: str, slices: Sequence[int]) -> Groups:
    """Returns the devices of each group, or each (source, target) of a permutation."""
    if instruction.opcode == "send":
        return groups_between_slices(slices)
    if kind == "collective-permute":
        members = pairs_of(instruction.attributes)
    else:
        members = groups_of(instruction.attributes, module.num_devices)
    return groups_in_all_slices(members, module.num_devices, slices)


def _tensors(
    module: Module,
    computation: str,
    instruction: Instruction,
    *,
    kind: str,
    members: Groups,
    mesh: Mapping[str, int],
    platform: str,
) -> Iterator[Collective]:
    """Yields a Collective for each tensor of one instruction, as if it ran once."""
    if kind == "collective-permute":
        axes, size = axes_between(members, mesh), 2
    else:
        axes, size = axes_of(members, mesh), max(map(len, members))
    if size == 1 or axes == ():
        return
    axes_size = math.prod(mesh[axis] for axis in axes or ())
    is_subgroup = size < axes_size and kind != "collective-permute"
    for element, array in enumerate(_arrays(module, computation, instruction, kind, size)):
        index = element if len(instruction.results) > 1 else None
        uses = list(dataflow.uses(module, computation, instruction.name, index))
        origin, smallest, is_padded = "", array.itemsize, False
        if element < len(instruction.operands):
            value = (computation, instruction.operands[element], None)
            origin, smallest = dataflow.source_argument(module, value)
            is_padded = kind == "all-reduce" and dataflow.is_padded_shard(
                module, value, array.size / size
            )

        # XLA on CPU sends 16-bit values in 32 bits. A copy needs no more bits than its source; a
        # sum in float32 does.
        is_16_bit = (
            (smallest == 2 and kind != "all-reduce")
            or dataflow.is_rounded_to_16_bits(uses)
            or "_promoted" in instruction.attributes
        )
        is_promoted = array.dtype == "f32" and is_16_bit and platform == "cpu"
        # It has no reduce-scatter either: each device takes its slice of an all-reduce.
        is_scatter = kind == "all-reduce" and dataflow.is_sliced_per_device(
            module, uses, array.size / size
        )
        meant = "all-gather" if is_padded else "reduce-scatter" if is_scatter else kind
        notes = []
        if is_scatter:
            notes.append(REDUCE_SCATTER_NOTE)
        if is_padded:
            notes.append(PADDED_NOTE)
        if is_promoted:
            notes.append(BITS_NOTE)
        if instruction.opcode == "send":
            notes.append(MESSAGE_NOTE)
        if is_subgroup:
            notes.append(SUBGROUP_NOTE)

        described = _described_element(module, computation, instruction, element)
        collective = Collective(
            name=instruction.name,
            kind=meant,
            sent_as=kind if is_padded else "",
            axes=axes,
            group_size=size,
            array=array,
            itemsize=2 if is_promoted else array.itemsize,
            count=1,
            count_known=True,
            op_name=described.op_name,
            source=source_of(module.traceback(described) or module.traceback(instruction)),
            origin=origin,
            groups=members,
            notes=tuple(notes),
        )
        parts = _concatenated(module, computation, instruction) if kind == "all-reduce" else []
        for part in parts:
            yield replace(
                collective,
                array=part.results[0],
                op_name=part.op_name,
                source=source_of(module.traceback(part)),
            )
        if not parts:
            yield collective


def _concatenated(module: Module, computation: str, instruction: Instruction) -> list[Instruction]:
    """Returns the tensors that XLA on GPU concatenates to one vector for a single all-reduce.

    [] if it does not.
    """
    body = module.computations[computation]
    vector = body.get(instruction.operands[0])
    if vector is None or len(instruction.operands) > 1:
        return []
    if vector.opcode == "fusion":
        inner = module.computations[vector.called[0]]
        root = next(candidate for candidate in inner.values() if candidate.is_root)
        numbers = {
            parameter.name: int(parameter.operand_text)
            for parameter in inner.values()
            if parameter.opcode == "parameter"
        }
        if root.opcode != "concatenate" or not {*root.operands} <= {*numbers}:
            return []
        names = [vector.operands[numbers[name]] for name in root.operands]
    elif vector.opcode == "concatenate":
        names = vector.operands
    else:
        return []
    parts = [body[name] for name in names]
    return [body[part.operands[0]] if part.opcode == "bitcast" else part for part in parts]


def _arrays(
    module: Module, computation: str, instruction: Instruction, kind: str, group_size: int
) -> list[Array]:
    """Returns the full tensors that an instruction moves.

    Taken from its operands, because a -start instruction has additional results.
    """
    body = module.computations[computation]
    operands = [body[name] for name in instruction.operands if name in body]
    arrays = [array for operand in operands for array in operand.results]
    arrays = arrays or list(hlo.arrays(instruction.operand_text))
    if kind == "all-gather":
        dim = instruction.int_attribute("dimensions") or 0
        gathered = []
        for array in arrays:
            shape = [*array.shape]
            shape[dim] *= group_size
            gathered.append(Array(array.dtype, tuple(shape)))
        return gathered
    if kind == "all-to-all" and len(arrays) > 1:
        # One slice for each device.
        return [Array(arrays[0].dtype, (len(arrays), *arrays[0].shape))]
    if kind == "ragged-all-to-all" or instruction.opcode == "send":
        # The other operands are offsets and sizes, or a token.
        return arrays[:1]
    return arrays


def _described_element(
    module: Module, computation: str, instruction: Instruction, element: int
) -> Instruction:
    """Returns the instruction that has the metadata of one tensor of a combined collective."""
    if len(instruction.results) == 1:
        return instruction
    for user in module.users[computation, instruction.name]:
        is_element = user.opcode == "get-tuple-element" and user.int_attribute("index") == element
        if is_element and user.op_name:
            return user
    return instruction


def source_of(traceback: list[hlo.Frame]) -> str:
    """Returns the innermost line outside libraries: "meshtrain/step.py:125 train_step", or ""."""
    frames = [frame for frame in traceback if frame.file and not LIBRARY.search(frame.file)]
    callers = [frame for frame in frames if frame.function.partition(".")[0] not in HELPERS]
    frames = callers or frames
    if not frames:
        return ""
    frame = frames[0]
    path = Path(frame.file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    short = Path(*path.parts[-3:])
    function = frame.function.replace("<locals>.", "").replace(".<lambda>", "")
    return f"{short}:{frame.line} {function}".strip()


# ---- device groups, and the mesh axes that they span ----


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
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if not match:
        return ()
    pairs = re.findall(r"\{(\d+),(\d+)\}", match[1])
    return tuple((int(source), int(target)) for source, target in pairs)


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes that these groups span, or the one axis that they divide.

    Returns None if neither is the case.
    """
    used = [axis for axis, size in mesh.items() if size > 1]
    wanted = {frozenset(group) for group in groups}
    ids = np.arange(math.prod(mesh.values())).reshape([mesh[axis] for axis in used])
    for num_axes in range(len(used) + 1):
        for dims in itertools.combinations(range(len(used)), num_axes):
            other_dims = [dim for dim in range(len(used)) if dim not in dims]
            group_size = math.prod(ids.shape[dim] for dim in dims)
            rows = ids.transpose([*other_dims, *dims]).reshape(-1, group_size)
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return tuple(used[dim] for dim in dims)
    pairs = tuple((group[0], member) for group in groups for member in group)
    spanned = axes_between(pairs, mesh)
    return spanned if len(spanned) == 1 else None


def axes_between(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the two devices of any pair differ."""
    sizes = list(mesh.values())
    sources, targets = np.array(pairs, int).reshape(-1, 2).T
    # For each axis, the positions of all sources and of all targets along it.
    positions = zip(
        mesh, np.unravel_index(sources, sizes), np.unravel_index(targets, sizes), strict=True
    )
    return tuple(axis for axis, source, target in positions if np.any(source != target))


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


# ---- exchanges between TPU slices ----


def transfer_of(instruction: Instruction) -> str:
    """Returns the kind of exchange between slices that an instruction starts, or ""."""
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    if not match or instruction.opcode != "send":
        return ""
    return match[1].lower().replace("_", "-")


def end_of_transfer(instruction: Instruction, body: dict[str, Instruction]) -> Instruction | None:
    """Returns the instruction that ends an exchange between slices; None if it is elsewhere."""
    key = _rendezvous(instruction)
    receives = {
        candidate.name
        for candidate in body.values()
        if candidate.opcode == "recv" and _rendezvous(candidate) == key
    }
    for candidate in body.values():
        if candidate.opcode == "recv-done" and {*candidate.operands} & receives:
            return candidate
    return None


def _rendezvous(instruction: Instruction) -> str:
    """Returns the name that both ends of an exchange share."""
    match = re.search(r'_rendezvous="([^"]*)"', instruction.attributes)
    return match[1] if match else instruction.name


def groups_in_all_slices(groups: Groups, num_devices: int, slices: Sequence[int]) -> Groups:
    """Returns the groups of all slices in the order of the mesh; `groups` are those of one slice.

    `slices`: the number of the slice of each device. A program of all `num_devices` devices names
    all groups itself.
    """
    if num_devices == len(slices):
        return groups
    members = _members_of_slices(slices)
    return tuple(tuple(devices[[*group]].tolist()) for devices in members for group in groups)


def groups_between_slices(slices: Sequence[int]) -> Groups:
    """Returns for each device number within a slice the devices of all slices that have it."""
    return tuple(map(tuple, np.stack(_members_of_slices(slices)).T.tolist()))


def _members_of_slices(slices: Sequence[int]) -> list[np.ndarray]:
    """Returns the devices of each slice."""
    return [np.flatnonzero(np.equal(slices, number)) for number in np.unique(slices)]
