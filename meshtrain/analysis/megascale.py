"""A program for several TPU slices: XLA compiles that of one slice, which exchanges messages with the others.

A `send` with _xla_host_transfer_rendezvous="all-reduce.1_0" and _xla_megascale_transfer_type="ALL_REDUCE" starts an
exchange of each device with the ones of the same number in all slices; the `recv-done` of the same rendezvous ends it.
"""

import re
from collections.abc import Sequence

import numpy as np

from meshtrain.analysis.groups import Groups
from meshtrain.analysis.hlo import Instruction


def transfer_of(instruction: Instruction) -> str:
    """Returns the kind of exchange between slices that an instruction starts, such as "all-reduce"; else ""."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
    return found[1].lower().replace("_", "-") if found and instruction.opcode == "send" else ""


def end_of(instruction: Instruction, body: dict[str, Instruction]) -> Instruction | None:
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


def in_all_slices(groups: Groups, num_devices: int, slices: Sequence[int]) -> Groups:
    """Returns the groups of all slices, counted in the order of the mesh, of which `groups` are those of one.

    `slices`: the number of the slice of each device. A program of all `num_devices` devices has its own groups.
    """
    if num_devices == len(slices):
        return groups
    places = _places(slices)
    return tuple(tuple(place[[*group]].tolist()) for place in places for group in groups)


def groups_between(slices: Sequence[int]) -> Groups:
    """Returns for each device number within a slice the devices of all slices that have it."""
    return tuple(map(tuple, np.stack(_places(slices)).T.tolist()))


def _places(slices: Sequence[int]) -> list[np.ndarray]:
    return [np.flatnonzero(np.equal(slices, one)) for one in np.unique(slices)]
