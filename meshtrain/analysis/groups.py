"""Parses the device groups of a collective as XLA writes them, and names them by mesh axes."""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

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
