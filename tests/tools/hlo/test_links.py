"""The bytes of collectives by link, against arithmetic."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from meshtrain import state as states
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.hardware import devices
from meshtrain.parallel.mesh import Network
from meshtrain.program import assemble
from meshtrain.tools.audit import audit, text
from meshtrain.tools.audit.explain import explain
from meshtrain.tools.audit.layout import placement_of
from meshtrain.tools.hlo import collective_ops, hlo
from meshtrain.tools.hlo.collective_ops import MESSAGE_NOTE, Collective
from meshtrain.tools.hlo.roofline import roofline
from meshtrain.tools.hlo.traffic import LinkBytes, link_traffic
from tests.lib.configs import tiny_config


def network(hosts, slices):
    shape = 1, len(hosts), 1, 1, 1, 1
    return Network(np.array(hosts).reshape(shape), np.array(slices).reshape(shape))


def collective(kind, *groups, count=1.0):
    fields = dict.fromkeys(("name", "op_name", "source", "origin"), "")
    array = hlo.Array("f32", (1000,))
    size = 2 if kind == "collective-permute" else len(groups[0])
    return Collective(
        kind=kind,
        axes=None,
        group_size=size,
        array=array,
        itemsize=4,
        count=count,
        count_known=True,
        groups=groups,
        **fields,
    )


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
        # 1/7 to the device of the same host, 2/7 to the other host of the slice, 4/7 to the other
        # slice.
        (collective("all-to-all", ALL), (500, 1000, 2000), (6000, 8000)),
        # Only device 3 sends to the other slice, only 1 to the other host of its slice.
        (
            collective("collective-permute", (0, 1), (1, 2), (2, 3), (3, 4)),
            (1000, 500, 500),
            (4000, 4000),
        ),
    ],
)
def test_bytes_are_counted_for_the_link_that_carries_them(one, by_link, leaving):
    found = link_traffic([("some", one)], FOUR_HOSTS)
    assert found.by_axes == [LinkBytes("some", *map(pytest.approx, by_link))]
    assert (found.leaving_host, found.leaving_slice) == pytest.approx(leaving)
    assert (found.num_hosts, found.num_slices) == (4, 2)


def test_an_uneven_group_leaves_a_slice_once():
    # Three devices of slice 0 and one of slice 1: the ring crosses there and back.
    found = link_traffic([("some", collective("all-gather", (0, 1, 2, 4)))], FOUR_HOSTS)
    assert found.by_axes == [LinkBytes("some", 3000 / 8, 3000 / 8, 6000 / 8)]
    assert found.leaving_slice == 3000 and found.leaving_host == 3000


SLICE = """HloModule step, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y)
}

ENTRY %main (p: f32[4096,256]) -> f32[4096,256] {
  %p = f32[4096,256]{1,0} parameter(0)
  %r = f32[4096,256]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum
  %t = token[] after-all()
  %s = (f32[4096,256]{1,0}, u32[], token[]) send(%r, %t), channel_id=2, is_host_transfer=true, \
ATTRIBUTES
  %v = (f32[4096,256]{1,0}, u32[], token[]) recv(%t), channel_id=3, is_host_transfer=true, \
ATTRIBUTES
  %s.1 = token[] send-done(%s), channel_id=2, is_host_transfer=true
  %c = f32[4096,256]{1,0} copy(%p)
  %d = (f32[4096,256]{1,0}, token[]) recv-done(%v), channel_id=3, is_host_transfer=true
  %e = f32[4096,256]{1,0} copy(%p)
  ROOT %o = f32[4096,256]{1,0} get-tuple-element(%d), index=0
}
""".replace(
    "ATTRIBUTES",
    'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="all-reduce.1_0",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}',
)


def test_the_messages_between_tpu_slices_are_collectives():
    """XLA compiles the program of one slice.

    Its devices 0 to 3 are these numbers of each slice in the mesh.
    """
    module, sizes = hlo.parse(SLICE), dict.fromkeys(AXES, 1) | dict(pipeline=2, data=2, tensor=2)
    slices = [0, 0, 1, 1, 0, 0, 1, 1]  # stages are within a slice, so data is its second axis
    found = collective_ops.find_collectives(module, sizes, "tpu", slices)
    inside, between = found
    assert (inside.kind, inside.axes) == ("all-reduce", ("tensor",))
    assert inside.groups == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert (between.kind, between.axes) == ("all-reduce", ("data",))
    assert between.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert between.bytes == inside.bytes == 4096 * 256 * 4
    where = Network(*[np.array(slices).reshape(2, 2, 1, 1, 1, 2)] * 2)
    counted = link_traffic([("-".join(one.axes), one) for one in found], where)
    assert [(row.axes, row.host, row.slices) for row in counted.by_axes] == [
        ("data", 0, between.bytes),
        ("tensor", inside.bytes, 0),
    ]
    assert counted.leaving_slice == 4 * between.bytes
    result = roofline(module, found, devices()["v5e"], where, model_flops=1)
    rows = {row.name: row for row in result.transfers}
    assert (rows["data"].rate, rows["tensor"].rate) == (3.125e9, 90e9)
    # The first of the two copies, between the message and its end, hides its own time.
    copied = 2 * between.bytes / 819e9
    assert rows["data"].exposed == pytest.approx(rows["data"].seconds - copied)
    # Messages are not traffic of the HBM.
    assert sum(row.hbm_bytes for row in result.rows) == 2 * 2 * between.bytes


def test_padded_messages_between_slices_are_the_gradients_that_nothing_else_sums():
    c = tiny_config()
    c.mesh.update(data=2, fsdp=4)
    cfg = parse(c, num_devices=8)
    parts = build(cfg)
    program = assemble(cfg, parts)
    batch = audit._batch_like(cfg, program, parts.train_data)
    run = cfg, parts.model, program.mesh, program.abstract_state.params, batch
    placement = placement_of(*run)
    message = collective("all-reduce", *((n, n + 4) for n in range(4)))
    message = replace(message, axes=("data",), notes=(MESSAGE_NOTE,))
    # All gradients over data in one message, with 7 % of padding; then metrics in a part of a tile.
    needed = states.bytes_per_device(program.abstract_state.params)
    large, small = (
        replace(message, array=hlo.Array("f32", shape))
        for shape in ((int(1.07 * needed / 4),), (1, 1, 128))
    )
    middle = replace(message, array=hlo.Array("f32", (25, 8, 128)))
    messages = [small, middle, replace(large, array=hlo.Array("f32", (2 * needed,)))]
    assert [one.label for one in explain(placement, messages)[0]] == ["gradients summed"] * 2 + [
        "scalars"
    ]
    (first, second), _ = explain(placement, [small, large])  # the largest first
    assert (first.label, first.needed_bytes, first.is_needed) == ("gradients summed", needed, True)
    assert "padded to tiles" in first.reason and first.extra_bytes == large.bytes - needed
    assert (second.label, second.needed_bytes, second.is_needed) == ("scalars", 0, True)
    (other,), _ = explain(placement, [replace(large, notes=())])
    assert not other.is_needed


def test_without_the_rate_of_its_network_a_device_has_no_roofline_over_slices():
    one, two = network([0, 0], [0, 0]), network([0, 1], [0, 1])
    assert audit._table_device("TPU v4", one) == (devices()["v4"], [])
    assert audit._table_device("TPU v5p", two) == (devices()["v5p"], [])
    row, (warning,) = audit._table_device("TPU v4", two)
    assert row is None and "no rate of the network between slices of v4" in warning


def audited(**mesh):
    c = tiny_config()
    c.mesh.update({"data": 1, **mesh})
    return audit.audit(c, devices=jax.devices())


def test_hybrid_sharding_sends_one_shard_of_the_gradients_between_slices():
    """fsdp within slices of 4 devices, data between them.

    The all-reduce of a shard is all that leaves a slice.
    """
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


@pytest.mark.slow
def test_a_flat_all_reduce_sends_almost_twice_as_much_between_slices():
    flat, plain = audited(data=8, slices=2), audited(data=8)
    assert flat.links.leaving_slice == pytest.approx(2 * 7 / 8 * flat.param_bytes, abs=64)
    assert plain.links.leaving_slice == plain.links.leaving_host == 0
    assert flat.total("data") == plain.total("data")
    assert "between slices" not in "\n".join(text.lines(plain))
