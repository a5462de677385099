"""FLOPs, HBM bytes and exposed collectives, counted in programs written by hand.

Nothing is compiled.
"""

import numpy as np
import pytest

from meshtrain.config.schema import AXES
from meshtrain.hardware import devices
from meshtrain.parallel.mesh import Network
from meshtrain.tools.audit import text
from meshtrain.tools.hlo import collective_ops, hlo, traffic
from meshtrain.tools.hlo.roofline import link_rate, roofline

MEGA = 1024 * 1024
FUSIONS = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y)
}
%plain (a: f32[1024,1024]) -> f32[1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %double = f32[1024,1024]{1,0} add(%a, %a)
  ROOT %r = f32[1024]{0} reduce(%double, %zero), dimensions={0}, to_apply=%sum
}
%read_slice (s: f32[8,1024,1024], i: s32[]) -> bf16[1024,512] {
  %s = f32[8,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %o = s32[] constant(0)
  %one = f32[1,1024,1024]{2,1,0} dynamic-slice(%s, %i, %o, %o), dynamic_slice_sizes={1,1024,1024}
  %flat = f32[1024,1024]{1,0} bitcast(%one)
  %half = f32[1024,512]{1,0} slice(%flat), slice={[0:1024], [0:512]}
  ROOT %c = bf16[1024,512]{1,0} convert(%half)
}
%write_slice (s: f32[8,1024,1024], u: bf16[1024,1024], i: s32[]) -> f32[8,1024,1024] {
  %s = f32[8,1024,1024]{2,1,0} parameter(0)
  %u = bf16[1024,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %o = s32[] constant(0)
  %c = f32[1024,1024]{1,0} convert(%u)
  %b = f32[1,1024,1024]{2,1,0} bitcast(%c)
  ROOT %w = f32[8,1024,1024]{2,1,0} dynamic-update-slice(%s, %b, %i, %o, %o)
}
%rows (t: f32[8,1024], n: s32[2,1]) -> f32[2,1024] {
  %t = f32[8,1024]{1,0} parameter(0)
  %n = s32[2,1]{1,0} parameter(1)
  ROOT %g = f32[2,1024]{1,0} gather(%t, %n), offset_dims={1}
}
"""
ENTRY = """
ENTRY %main (p: f32[1024,1024]) -> f32[1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[8,1024,1024]{2,1,0} parameter(2)
  %h = bf16[1024,1024]{1,0} parameter(3)
  %t = f32[8,1024]{1,0} parameter(4)
  %n = s32[2,1]{1,0} parameter(5)
"""


def module_of(body, before=FUSIONS):
    body = body.strip("\n")
    return hlo.parse(f"HloModule step, num_partitions=8\n{before}{ENTRY}{body}\n}}\n")


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("%k = f32[1024]{0} fusion(%p), kind=kInput, calls=%plain", 4 * MEGA + 4096),
        # A slice of a slice: 2 of the 32 MiB; the index is 4 bytes.
        ("%k = bf16[1024,512]{1,0} fusion(%s, %i), kind=kLoop, calls=%read_slice", 3 * MEGA + 4),
        # noqa: E501
        (
            "%k = ((f32[8,1024,1024], s32[]), bf16[1024,512], u32[]) fusion-start(%s, %i), "
            "calls=%read_slice",
            3 * MEGA + 4,
        ),
        # In place: 2 MiB read, 4 of 32 MiB written.
        (
            "%k = f32[8,1024,1024]{2,1,0} fusion(%s, %h, %i), kind=kLoop, calls=%write_slice",
            6 * MEGA + 4,
        ),
        ("%k = f32[2,1024]{1,0} fusion(%t, %n), kind=kLoop, calls=%rows", 2 * 8192 + 8),
        ("%k = bf16[1024,1024]{1,0} bitcast(%h)", 0),
        ("%k = (f32[], f32[1024,1024]{1,0}) tuple(%i, %p)", 0),
        ("%k = f32[1024,1024]{1,0} copy(%p)", 8 * MEGA),
        ("%k = f32[1,1024,1024]{2,1,0} slice(%s), slice={[0:1], [0:1024], [0:1024]}", 8 * MEGA),
        (
            "%k = bf16[1024,1024]{1,0} dot(%h, %h), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={0}",
            4 * MEGA,
        ),
        (
            "%k = f32[1024,1024]{1,0} all-reduce(%p), channel_id=1, replica_groups={}, "
            "to_apply=%sum",
            0,
        ),
    ],
)
def test_bytes_of_an_operation(line, num_bytes):
    module = module_of(f"  ROOT {line}\n")
    assert traffic.hbm_bytes(module, "main", module.computations["main"]["k"]) == num_bytes
    assert [name for name, _ in traffic.executed(module)] == ["main"]


def test_a_product_is_counted_in_every_form():
    body = """
  %a = bf16[1024,1024]{1,0} dot(%h, %h), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %b = (bf16[1024,1024]{1,0}, s8[4194304]{0}) custom-call(%h, %h), \
custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  ROOT %c = bf16[1024,1024]{1,0} convolution(%h, %h), dim_labels=bf_io->bf
"""  # noqa: E501
    module = module_of(body)
    for name in "abc":
        one = module.computations["main"][name]
        assert traffic.matmul_flops(module, "main", one) == {2: 2 * 1024**3}
        assert traffic.hbm_bytes(module, "main", one) == 4 * MEGA  # the operand once; no workspace


@pytest.mark.parametrize(
    ("image", "kernel", "output", "attributes", "flops"),
    [
        # libtpu's products: of 32 taps of a row, one reads an element.
        (
            "[160,1,64]",
            "[64,32,128]",
            "[160,32,128]",
            "window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=b0f_i0o->b0f",
            2 * 160 * 64 * 32 * 128,
        ),
        # The second spatial dim sums over heads: each of 4 positions has 8 taps.
        (
            "[4,160,8,64]",
            "[8,64,512,1]",
            "[4,160,512,1]",
            "window={size=1x8}, dim_labels=0b1f_1io0->0bf1",
            2 * 4 * 160 * 8 * 64 * 512,
        ),
        # Outputs 0, 2, ... of a stride; between elements of the input is a zero each.
        (
            "[1,6,1]",
            "[1,3,1]",
            "[1,6,1]",
            "window={size=3 pad=1_1 lhs_dilate=2 stride=2 rhs_dilate=1}, dim_labels=b0f_i0o->b0f",
            2 * 6,
        ),
        # A dilated kernel of 2 taps, 3 apart, within 5 elements.
        (
            "[1,5,1]",
            "[1,2,1]",
            "[1,5,1]",
            "window={size=2 pad=0_3 rhs_dilate=3}, dim_labels=b0f_i0o->b0f",
            2 * 7,
        ),
    ],
)
def test_taps_of_a_convolution_that_read_padding_are_not_counted(
    image, kernel, output, attributes, flops
):
    body = f"""
  %image = bf16{image} parameter(6)
  %kernel = bf16{kernel} parameter(7)
  ROOT %c = bf16{output} convolution(%image, %kernel), {attributes}
"""
    module = module_of(body)
    one = module.computations["main"]["c"]
    assert traffic.matmul_flops(module, "main", one) == {2: flops}


HALF = 0.5 * 2 * 4 * 2 * 640 * 640  # of the scores of 4 rows with 2 heads, times 2


@pytest.mark.parametrize(
    ("name", "blocks", "results", "metadata", "flops"),
    [
        ("fwd_segmented_residuals", "[1,5,5]", "", "block_kv", HALF * (64 + 32)),
        ("dq_no_residuals", "[1,5,5]", "", "block_kv_dq", HALF * (2 * 64 + 32)),
        ("dkv_no_residuals", "[1,5,5]", "", "block_q_dkv", HALF * 2 * (64 + 32)),
        # Fused: 5 parts of the gradient of the queries.
        (
            "dkv_no_residuals",
            "[1,5,5]",
            "bf16[4,5,2,640,64]{4,3,2,1,0}, ",
            "block_q_dkv",
            HALF * (3 * 64 + 2 * 32),
        ),
        # A window leaves 2 of 5 blocks.
        ("fwd_residuals", "[1,5,2]", "", "block_kv", 0.8 * HALF * (64 + 32)),
        ("dkv_no_residuals", "[1,2,5]", "", "block_q_dkv", 0.8 * HALF * 2 * (64 + 32)),
    ],
)
def test_splash_attention_has_the_products_of_its_blocks(name, blocks, results, metadata, flops):
    body = f"""
  %next = s8{blocks} parameter(6)
  %mask = s8{blocks} parameter(7)
  %q = bf16[4,2,640,64]{{3,2,1,0}} parameter(8)
  %k = bf16[4,1,640,64]{{3,2,1,0}} parameter(9)
  %v = bf16[4,1,640,32]{{3,2,1,0}} parameter(10)
  ROOT %splash_mha_{name}.2 = ({results}bf16[4,2,640,32]{{3,2,1,0}}, f32[4,2,640,128]{{3,2,1,0}}) \
custom-call(%next, %mask, %q, %k, %v), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 64, \\"{metadata}\\": 128}}"
}}}}
"""
    module = module_of(body)
    call = traffic.attention_call(
        module, "main", module.computations["main"][f"splash_mha_{name}.2"]
    )
    assert call.flops == pytest.approx(flops)
    assert (call.head_dim, call.is_backward) == (64, not name.startswith("fwd"))


@pytest.mark.parametrize("call", ["mosaic_gpu_v2", "tpu_custom_call"])
def test_a_grouped_product_has_the_rows_of_balanced_routing(call):
    body = f"""
  %sizes = s32[4]{{0}} parameter(6)
  %rows = bf16[1280,64]{{1,0}} parameter(7)
  %w = bf16[4,64,32]{{2,1,0}} parameter(8)
  %g = bf16[1280,32]{{1,0}} parameter(9)
  %y = bf16[1280,32]{{1,0}} custom-call(%sizes, %rows, %w), custom_call_target="{call}", \
metadata={{op_name="jit(f)/grouped_dot_of_1024/shard_map/gmm"}}
  %x = bf16[1280,64]{{1,0}} custom-call(%sizes, %g, %w), custom_call_target="{call}", \
metadata={{op_name="jit(f)/transpose(vmap(grouped_dot_of_1024))/shard_map/gmm"}}
  %o = bf16[1280,32]{{1,0}} custom-call(%sizes, %rows, %w), custom_call_target="{call}", \
metadata={{op_name="jit(f)/norm_backward"}}
  ROOT %d = bf16[4,64,32]{{2,1,0}} custom-call(%sizes, %rows, %g), custom_call_target="{call}", \
metadata={{op_name="jit(f)/transpose(vmap(grouped_dot_of_1024))/shard_map/tgmm"}}
"""
    module = module_of(body)
    for name in "yxd":
        one = module.computations["main"][name]
        assert traffic.matmul_flops(module, "main", one) == {2: 2 * 1024 * 64 * 32}
    assert not traffic.matmul_flops(module, "main", module.computations["main"]["o"])


@pytest.mark.parametrize(("target", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
def test_fused_attention_has_its_products_once(target, products):
    body = f"""
  %q = bf16[2,64,8,32]{{3,2,1,0}} parameter(6)
  %k = bf16[2,128,4,32]{{3,2,1,0}} parameter(7)
  ROOT %a = (bf16[2,8,64,32]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn${target}", \
backend_config={{"mask_type":"NO_MASK",\
"bmm1_grad_gemm1_dot_dimension_numbers":{{"lhs_contracting_dimensions":["2"]}}}}
"""
    module = module_of(body)
    one, full = module.computations["main"]["a"], 2 * products * 2 * 8 * 64 * 128 * 32
    assert traffic.attention_flops(module, "main", one) == full
    assert traffic.matmul_flops(module, "main", one) == {}
    causal = module_of(body.replace("NO_MASK", "CAUSAL"))
    assert traffic.attention_flops(causal, "main", causal.computations["main"]["a"]) == full / 2


LOOP = """
%body (v: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %v = (s32[], f32[1024,1024]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%v), index=0
  %w = f32[1024,1024]{1,0} get-tuple-element(%v), index=1
  %y = f32[1024,1024]{1,0} copy(%w)
  ROOT %r = (s32[], f32[1024,1024]{1,0}) tuple(%n, %y)
}
%cond (v: (s32[], f32[1024,1024])) -> pred[] {
  %v.1 = (s32[], f32[1024,1024]{1,0}) parameter(0)
  ROOT %t = pred[] constant(true)
}
"""


def measured(body, before="", **sizes):
    module = module_of(body, FUSIONS + before)
    shape = {axis: sizes.get(axis, 1) for axis in AXES}
    found = collective_ops.find_collectives(module, shape, "gpu")
    one_host = Network(*[np.zeros([*shape.values()], int)] * 2)
    return roofline(module, found, devices()["h200"], one_host, model_flops=1e9)


def test_the_body_of_a_loop_counts_once_for_each_iteration():
    body = """
  %z = (s32[], f32[1024,1024]{1,0}) tuple(%i, %p)
  %l = (s32[], f32[1024,1024]{1,0}) while(%z), condition=%cond, body=%body, \
={"known_trip_count":{"n":"7"}}
  ROOT %o = f32[1024,1024]{1,0} get-tuple-element(%l), index=1
"""
    found = measured(body, LOOP, data=8)
    assert found.operations[0].hbm_bytes == sum(row.hbm_bytes for row in found.rows) == 56 * MEGA
    assert found.seconds == pytest.approx(56 * MEGA / 4.8e12)
    assert found.mfu == pytest.approx(1e9 / (989.5e12 * found.seconds))
    assert found.has_all_counts
    unknown = measured(body.replace("known_trip_count", "other"), LOOP, data=8)
    assert not unknown.has_all_counts and unknown.operations[0].runs == 1
    assert unknown.mfu is None  # no ceiling: the step takes longer by an unknown time
    assert any("no ceiling of MFU: see the note" in line for line in text._roofline(unknown))
    assert any("MFU at most" in line for line in text._roofline(found))


COPY = "  %c{} = f32[1024,1024]{{1,0}} copy(%p)\n"
START = (
    "  %g = f32[1024,1024]{1,0} all-reduce-start(%p), channel_id=1, replica_groups={}, "
    "to_apply=%sum"
)
DONE = "  ROOT %d = f32[1024,1024]{1,0} all-reduce-done(%g)\n"


@pytest.mark.parametrize(
    ("body", "num_copies_hiding"),
    [
        (START + "\n" + DONE, 0),
        (START + "\n" + COPY.format(1) + DONE, 1),
        (COPY.format(1) + START + "\n" + COPY.format(2) + COPY.format(3) + DONE, 2),
        (START + ', backend_config={"is_sync":true}\n' + COPY.format(1) + DONE, 0),
        (START + "\n" + "".join(map(COPY.format, range(20))) + DONE, 20),
    ],
)
def test_work_between_start_and_end_hides_a_collective(body, num_copies_hiding):
    (one,) = measured(body, data=8).transfers
    assert (one.name, one.kind, one.bytes) == ("data", "all-reduce", 2 * 7 / 8 * 4 * MEGA)
    assert one.seconds == pytest.approx(one.bytes / 450e9)
    hidden = num_copies_hiding * 8 * MEGA / 4.8e12
    assert one.exposed == pytest.approx(max(0, one.seconds - hidden), abs=1e-15)


def test_two_collectives_do_not_hide_behind_the_same_work():
    second = START.replace("%g", "%g2").replace("=1,", "=2,") + "\n"
    end = "  %d2 = f32[1024,1024]{1,0} all-reduce-done(%g2)\n"
    (one,) = measured(START + "\n" + second + COPY.format(1) + end + DONE, data=8).transfers
    assert one.exposed == pytest.approx(one.seconds - 8 * MEGA / 4.8e12)


def test_a_group_over_hosts_has_their_network_adapters():
    numbers = np.arange(32).reshape(4, 8)
    data, tensor = map(tuple, numbers.T.tolist()), map(tuple, numbers.tolist())
    hosts = numbers.reshape(1, 4, 1, 1, 1, 8) // 8
    in_hosts, h200 = Network(hosts, 0 * hosts), devices()["h200"]
    assert link_rate(h200, in_hosts, tuple(tensor)) == 450e9
    data = tuple(data)
    assert link_rate(h200, in_hosts, data) == 50e9  # one device of each host
    assert link_rate(h200, in_hosts, (tuple(range(32)),)) == 400e9
    assert link_rate(h200, in_hosts, ((0, 1), (7, 8))) == 50e9  # the slowest pair counts
    # Of the 31 others of an all-to-all 24 are in other hosts, and get different bytes.
    rate = link_rate(h200, in_hosts, (tuple(range(32)),), "all-to-all")
    np.testing.assert_allclose(rate, 50e9 * 31 / 24)
    assert link_rate(h200, in_hosts, tuple(tensor), "all-to-all") == 450e9
    assert link_rate(devices()["v5p"], Network(0 * hosts, 0 * hosts), data) == 180e9


def test_a_group_over_tpu_slices_has_the_data_centre_network_of_all_its_chips():
    slices = np.arange(32).reshape(1, 2, 16, 1, 1, 1) // 16
    network, pairs = Network(slices, slices), tuple((n, n + 16) for n in range(16))
    assert link_rate(devices()["v5p"], network, pairs) == 6.25e9
    assert link_rate(devices()["v5e"], network, (tuple(range(32)),)) == 16 * 3.125e9
