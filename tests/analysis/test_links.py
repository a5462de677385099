"""The bytes of collectives by link, against arithmetic."""

import jax
import numpy as np
import pytest
from conftest import tiny_config

from meshtrain.analysis import hlo
from meshtrain.analysis.audit import audit, text
from meshtrain.analysis.collective_ops import Collective
from meshtrain.analysis.links import LinkBytes, links
from meshtrain.parallel.mesh import Network


def network(hosts, slices):
    shape = 1, len(hosts), 1, 1, 1, 1
    return Network(np.array(hosts).reshape(shape), np.array(slices).reshape(shape))


def collective(kind, *groups, count=1.0):
    fields = dict.fromkeys(("name", "op_name", "source", "origin"), "")
    array = hlo.Array("f32", (1000,))
    size = 2 if kind == "collective-permute" else len(groups[0])
    return Collective(
        kind=kind, axes=None, group_size=size, array=array, itemsize=4, count=count,
        count_known=True, groups=groups, **fields,
    )  # fmt: skip


FOUR_HOSTS = network(hosts=[0, 0, 1, 1, 2, 2, 3, 3], slices=[0] * 4 + [1] * 4)
ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("one", "by_link", "leaving"),
    [
        # A ring of 8: of its hops, 4 within hosts, 2 between hosts of a slice, 2 between slices.
        (collective("all-reduce", ALL), (3500, 1750, 1750), (7000, 7000)),
        (collective("all-reduce", ALL, count=3), (10500, 5250, 5250), (21000, 21000)),
        # The order in which XLA lists the devices does not matter.
        (collective("all-reduce", (0, 4, 1, 5, 2, 6, 3, 7)), (3500, 1750, 1750), (7000, 7000)),
        (collective("all-gather", ALL), (1750, 875, 875), (3500, 3500)),
        (collective("reduce-scatter", ALL[:4], ALL[4:]), (1500, 1500, 0), (3000, 0)),
        (collective("all-reduce", (0, 1), (2, 3), (4, 5), (6, 7)), (4000, 0, 0), (0, 0)),
        # One device of each slice in a group: all bytes of all four groups leave the slice.
        (collective("all-reduce", *((n, n + 4) for n in range(4))), (0, 0, 4000), (8000, 16000)),
        # 1/7 to the device of the same host, 2/7 to the other host of the slice, 4/7 to the other slice.
        (collective("all-to-all", ALL), (500, 1000, 2000), (6000, 8000)),
        # Only device 3 sends to the other slice, only 1 to the other host of its slice.
        (collective("collective-permute", (0, 1), (1, 2), (2, 3), (3, 4)), (1000, 500, 500), (4000, 4000)),
    ],
)  # fmt: skip
def test_bytes_are_counted_for_the_link_that_carries_them(one, by_link, leaving):
    found = links([("some", one)], FOUR_HOSTS)
    assert found.by_axes == [LinkBytes("some", *map(pytest.approx, by_link))]
    assert (found.leaving_host, found.leaving_slice) == pytest.approx(leaving)
    assert (found.num_hosts, found.num_slices) == (4, 2)


def test_an_uneven_group_leaves_a_slice_once():
    # Three devices of slice 0 and one of slice 1: the ring crosses there and back.
    found = links([("some", collective("all-gather", (0, 1, 2, 4)))], FOUR_HOSTS)
    assert found.by_axes == [LinkBytes("some", 3000 / 8, 3000 / 8, 6000 / 8)]
    assert found.leaving_slice == 3000 and found.leaving_host == 3000


def audited(**mesh):
    c = tiny_config()
    c.mesh.update({"data": 1, **mesh})
    return audit.audit(c, devices=jax.devices())


def test_hybrid_sharding_sends_one_shard_of_the_gradients_between_slices():
    """fsdp within slices of 4 devices, data between them: the all-reduce of a shard is all that leaves a slice."""
    result = audited(data=2, fsdp=4, slices=2)
    by_axes = {row.axes: row for row in result.links.by_axes}
    # 2 (n - 1) / n of a shard's float32 gradients, n = 2; besides it, loss and weight are summed.
    shard = result.param_bytes
    assert by_axes["data"].slices == pytest.approx(shard, abs=16)
    assert by_axes["data"].host == by_axes["fsdp"].slices == 0
    assert by_axes["fsdp"].host == pytest.approx(result.total("fsdp").bytes)
    assert result.links.leaving_slice == pytest.approx(4 * shard, abs=64)
    printed = "\n".join(text.lines(result))
    assert "mesh data 2 x fsdp 4 · 2 slices · 8 cpu" in printed
    assert (
        f"all devices of a slice send to other slices {result.links.leaving_slice:>15,.0f}"
        in printed
    )
    assert audit._plain(result.links)["leaving_slice"] == result.links.leaving_slice


def test_a_flat_all_reduce_sends_almost_twice_as_much_between_slices():
    flat, plain = audited(data=8, slices=2), audited(data=8)
    assert flat.links.leaving_slice == pytest.approx(2 * 7 / 8 * flat.param_bytes, abs=64)
    assert plain.links.leaving_slice == plain.links.leaving_host == 0
    assert flat.total("data") == plain.total("data")
    assert "between slices" not in "\n".join(text.lines(plain))
