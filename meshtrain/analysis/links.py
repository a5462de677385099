"""The bytes that collectives send over each link: within hosts, between hosts, between slices.

Of a group of n devices that send B bytes each (`collective_ops.bytes_sent`):

- all-reduce, reduce-scatter, all-gather and broadcast run on a ring. It enters each slice once, and each host of a
  slice once; its n hops carry B each. So B bytes leave each slice and each host that does not hold all n devices.
  An all-reduce of T bytes has B = 2 (n - 1) / n T. (A tree may leave a slice with fewer bytes; NCCL chooses.)
- all-to-all: each device sends B / (n - 1) to each other one.
- permutation: each pair carries B.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshtrain.analysis.collective_ops import Collective
from meshtrain.analysis.groups import Groups
from meshtrain.parallel.mesh import LINKS, Network


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a device sends per step over one axis, or several together, by link: the mean of all devices."""

    axes: str
    host: float
    hosts: float
    slices: float


@dataclass(frozen=True)
class Links:
    by_axes: list[LinkBytes]
    leaving_host: float  # bytes per step, of the host that sends most
    leaving_slice: float
    num_hosts: int
    num_slices: int


def links(named: Iterable[tuple[str, Collective]], network: Network) -> Links:
    """Returns the bytes of the collectives, each with the name of its axes, by link."""
    hosts, slices = network.hosts.ravel(), network.slices.ravel()
    # A slice within a host is simulated: its devices count as a host of their own.
    islands = np.unique(np.stack([slices, hosts]), axis=1, return_inverse=True)[1].ravel()
    of_device = {link: np.zeros(hosts.size) for link in LINKS}
    by_axes: dict[str, Counter] = {}
    routes: dict = {}
    for axes, one in named:
        key = one.kind, one.groups
        if key not in routes:
            routes[key] = _routes(*key, islands, slices)
        row = by_axes.setdefault(axes, Counter())
        for link, sent in routes[key].items():
            of_device[link] += one.bytes * sent
            row[link] += one.bytes * sent.mean()
    between_hosts, between_slices = of_device["hosts"], of_device["slices"]
    return Links(
        by_axes=[
            LinkBytes(axes, *(by_axes[axes][link] for link in LINKS)) for axes in sorted(by_axes)
        ],
        leaving_host=float(np.bincount(islands, between_hosts + between_slices).max()),
        leaving_slice=float(np.bincount(slices, between_slices).max()),
        num_hosts=len({*islands.tolist()}),
        num_slices=len({*slices.tolist()}),
    )


def _routes(kind: str, groups: Groups, hosts: np.ndarray, slices: np.ndarray) -> dict:
    """Returns for each link the part of a collective's bytes that each device sends over it."""
    sent = np.zeros((len(LINKS), hosts.size))
    for group in groups:
        members = np.array(group)
        if kind == "collective-permute":
            sources, targets, part = members[:1], members[1:], 1.0
        elif "all-to-all" in kind:
            sources, targets = (one.ravel() for one in np.meshgrid(members, members, indexing="ij"))
            part = 1 / max(1, len(members) - 1)
        else:
            sources = members[np.lexsort((members, hosts[members], slices[members]))]
            targets, part = np.roll(sources, -1), 1.0
        is_other_slice = slices[sources] != slices[targets]
        is_other_host = hosts[sources] != hosts[targets]
        link = np.where(is_other_slice, 2, np.where(is_other_host, 1, 0))
        np.add.at(sent, (link, sources), part * (sources != targets))
    return dict(zip(LINKS, sent, strict=True))
