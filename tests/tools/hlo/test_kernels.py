"""Kinds of kernels and their expected time, in programs written by hand. Nothing is compiled."""

import dataclasses
import json

import numpy as np
import pytest

from meshtrain import hardware
from meshtrain.config.schema import AXES
from meshtrain.parallel.mesh import Network
from meshtrain.tools.audit import text
from meshtrain.tools.hlo import collective_ops, hlo, kernels
from meshtrain.tools.hlo.roofline import roofline

H200 = hardware.devices()["h200"]
FUSED = """
%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y)
}
%rows (a: f32[512,1024]) -> f32[512] {
  %a = f32[512,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %double = f32[512,1024]{1,0} add(%a, %a)
  ROOT %r = f32[512]{0} reduce(%double, %zero), dimensions={1}, to_apply=%sum
}
%columns (a: f32[512,1024]) -> f32[1024] {
  %a = f32[512,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[1024]{0} reduce(%a, %zero), dimensions={0}, to_apply=%sum
}
%rows_of_one_column (a: f32[512,1024]) -> f32[512,1] {
  %a = f32[512,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %b = f32[512,1024,1]{2,1,0} bitcast(%a)
  ROOT %r = f32[512,1]{1,0} reduce(%b, %zero), dimensions={1}, to_apply=%sum
}
%normalised (a: f32[512,1024]) -> f32[512,1024] {
  %a = f32[512,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %r = f32[512]{0} reduce(%a, %zero), dimensions={1}, to_apply=%sum
  %b = f32[512,1024]{1,0} broadcast(%r), dimensions={0}
  ROOT %y = f32[512,1024]{1,0} exponential(%b)
}
%rows_into_a_stack (s: f32[64,512], a: f32[512,1024], i: s32[]) -> f32[64,512] {
  %s = f32[6400,512]{1,0} parameter(0)
  %a = f32[512,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = f32[] constant(0)
  %o = s32[] constant(0)
  %r = f32[512]{0} reduce(%a, %zero), dimensions={1}, to_apply=%sum
  %b = f32[1,512]{1,0} bitcast(%r)
  ROOT %w = f32[6400,512]{1,0} dynamic-update-slice(%s, %b, %i, %o)
}
%small_sum (a: f32[512,1024], m: f32[8]) -> f32[512,1024] {
  %a = f32[512,1024]{1,0} parameter(0)
  %m = f32[8]{0} parameter(1)
  %zero = f32[] constant(0)
  %r = f32[] reduce(%m, %zero), dimensions={0}, to_apply=%sum
  %e = f32[] exponential(%r)
  %b = f32[512,1024]{1,0} broadcast(%e), dimensions={}
  ROOT %y = f32[512,1024]{1,0} multiply(%a, %b)
}
%gelu (a: bf16[512,1024]) -> bf16[512,1024] {
  %a = bf16[512,1024]{1,0} parameter(0)
  %t = bf16[512,1024]{1,0} tanh(%a)
  ROOT %y = bf16[512,1024]{1,0} multiply(%a, %t)
}
%cast (s: f32[8,512,1024], i: s32[]) -> bf16[1024,512] {
  %s = f32[8,512,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %o = s32[] constant(0)
  %j = s32[] add(%i, %i)
  %one = f32[1,512,1024]{2,1,0} dynamic-slice(%s, %j, %o, %o), dynamic_slice_sizes={1,512,1024}
  %flat = f32[512,1024]{1,0} bitcast(%one)
  %t = f32[1024,512]{1,0} transpose(%flat), dimensions={1,0}
  ROOT %c = bf16[1024,512]{1,0} convert(%t)
}
%lookup (t: f32[8,1024], n: s32[512,1]) -> f32[512,1024] {
  %t = f32[8,1024]{1,0} parameter(0)
  %n = s32[512,1]{1,0} parameter(1)
  %g = f32[512,1024]{1,0} gather(%t, %n), offset_dims={1}
  ROOT %y = f32[512,1024]{1,0} add(%g, %g)
}
%add_rows (t: f32[50000,1024], n: s32[512,1], u: f32[512,1024]) -> f32[50000,1024] {
  %t = f32[50000,1024]{1,0} parameter(0)
  %n = s32[512,1]{1,0} parameter(1)
  %u = f32[512,1024]{1,0} parameter(2)
  ROOT %s = f32[50000,1024]{1,0} scatter(%t, %n, %u), to_apply=%sum
}
"""
ENTRY = """
ENTRY %main (p: f32[512,1024]) -> f32[512] {
  %p = f32[512,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[8,512,1024]{2,1,0} parameter(2)
  %h = bf16[512,1024]{1,0} parameter(3)
  %t = f32[50000,1024]{1,0} parameter(4)
  %n = s32[512,1]{1,0} parameter(5)
  %m = f32[8]{0} parameter(6)
  %k = f32[6400,512]{1,0} parameter(7)
  %q = bf16[2,64,8,32]{3,2,1,0} parameter(8)
  %w = bf16[1024,4096]{1,0} parameter(9)
"""
ATTENTION = "(bf16[2,8,64,32]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="
PRODUCT = "bf16[512,4096]{1,0} dot(%h, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
KERNELS = {
    "f32[512]{0} fusion(%p), kind=kInput, calls=%rows": kernels.ROW_REDUCTION,
    "f32[1024]{0} fusion(%p), kind=kInput, calls=%columns": kernels.COLUMN_REDUCTION,
    # A dim of size 1 at the end changes nothing in memory.
    "f32[512,1]{1,0} fusion(%p), kind=kInput, calls=%rows_of_one_column": kernels.ROW_REDUCTION,
    "f32[512,1024]{1,0} fusion(%p), kind=kCustom, calls=%normalised": kernels.ROW_REDUCTION,
    # The stack is updated in place: its size says nothing about the kernel.
    "f32[6400,512]{1,0} fusion(%k, %p, %i), calls=%rows_into_a_stack": kernels.ROW_REDUCTION,
    "f32[512,1024]{1,0} fusion(%p, %m), kind=kLoop, calls=%small_sum": kernels.ELEMENTWISE,
    "f32[512,1024]{1,0} add(%p, %p)": kernels.ELEMENTWISE,
    "bf16[512,1024]{1,0} fusion(%h), kind=kLoop, calls=%gelu": kernels.TRANSCENDENTAL,
    "bf16[1024,512]{1,0} fusion(%s, %i), kind=kInput, calls=%cast": kernels.COPY,
    "f32[512,1024]{1,0} copy(%p)": kernels.COPY,
    "bf16[512,1024]{1,0} convert(%p)": kernels.COPY,
    "f32[512,1024]{1,0} fusion(%t, %n), kind=kLoop, calls=%lookup": kernels.GATHER,
    "f32[50000,1024]{1,0} fusion(%t, %n, %p), kind=kInput, calls=%add_rows": kernels.SCATTER,
    PRODUCT: kernels.PRODUCT,
    f'{ATTENTION}"__cudnn$fmhaSoftmax"': "fused attention forward, head dim 32",
    f'{ATTENTION}"__cudnn$fmhaSoftmaxBackward"': "fused attention backward, head dim 32",
    'f32[512,1024]{1,0} custom-call(%p), custom_call_target="__cudnn$norm"': kernels.OTHER,
}


def module_of(*lines):
    body = "".join(f"  %line{number} = {line}\n" for number, line in enumerate(lines))
    return hlo.parse(f"HloModule step, num_partitions=1\n{FUSED}{ENTRY}{body}}}\n")


def roofline_of(*lines, device=H200):
    module = module_of(*lines)
    shape = dict.fromkeys(AXES, 1)
    one_host = Network(*[np.zeros([*shape.values()], int)] * 2)
    found = collective_ops.find_collectives(module, shape, "gpu")
    return roofline(module, found, device, one_host, model_flops=1e9)


@pytest.mark.parametrize(("line", "kind"), KERNELS.items(), ids=[*KERNELS.values()])
def test_the_kind_of_a_kernel(line, kind):
    module = module_of(line)
    kernel = module.computations["main"]["line0"]
    assert kernels.kind_of(module, "main", kernel) == kind
    is_elementwise = kind in (kernels.ELEMENTWISE, kernels.TRANSCENDENTAL)
    expected = kernels.OPTIMIZER if is_elementwise else kind
    assert kernels.kind_of(module, "main", kernel, is_update=True) == expected


def test_the_factor_of_a_product_depends_on_the_middle_one_of_its_sizes():
    factors = hardware.KernelFactors("a profile", kinds=(), product=((512, 2.0), (2048, 1.0)))

    def factor(rows, columns, contracted):
        module = hlo.parse(f"""HloModule step
ENTRY %main (a: bf16[3,4], b: bf16[3,4]) -> bf16[3,4] {{
  %a = bf16[7,{rows},{contracted}]{{2,1,0}} parameter(0)
  %b = bf16[7,{contracted},{columns}]{{2,1,0}} parameter(1)
  ROOT %c = bf16[7,{rows},{columns}]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}}, \
lhs_contracting_dims={{2}}, rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}
}}
""")
        product = module.computations["main"]["c"]
        return kernels.factor_of(module, "main", product, kernels.PRODUCT, factors)

    assert factor(65536, 512, 512) == factor(512, 65536, 64) == 2.0
    assert factor(512, 1024, 65536) == factor(65536, 32, 1024) == pytest.approx(1.5)
    assert factor(8192, 2048, 50304) == 1.0
    assert factor(65536, 8, 64) == 2.0  # smaller than all that were measured


def test_the_expected_time_is_the_limit_times_the_factor_of_the_kind():
    rows, columns, copy = [*KERNELS][0], [*KERNELS][1], "f32[512,1024]{1,0} copy(%p)"
    found = roofline_of(rows, columns, copy, PRODUCT)
    factor = dict(H200.factors.kinds)
    read = 512 * 1024 * 4
    moved = (read + 512 * 4) * factor["row reduction"]
    moved += (read + 1024 * 4) * factor["column reduction"]
    moved += 2 * read * factor["copy"]
    # The middle size of the product is 1,024, between the two smallest that were measured.
    (small, most), (large, least), _ = H200.factors.product
    share = np.log(1024 / small) / np.log(large / small)
    product = 2 * 512 * 1024 * 4096 / 989.5e12 * (most + share * (least - most))
    assert found.expected.seconds == pytest.approx(moved / 4.8e12 + product)
    assert found.expected.seconds == pytest.approx(sum(row.expected_seconds for row in found.rows))
    assert found.expected.mfu == pytest.approx(1e9 / (989.5e12 * found.expected.seconds))
    assert found.expected.by_rule == {}
    # The limit is what it is without factors.
    plain = roofline_of(rows, columns, copy, PRODUCT, device=hardware.devices()["h100"])
    bytes_ratio = 3350e9 / 4800e9
    assert found.rows[2].ceiling_seconds == pytest.approx(
        plain.rows[2].ceiling_seconds * bytes_ratio
    )
    assert found.rows[0].ceiling_seconds == pytest.approx(plain.rows[0].ceiling_seconds)


def test_a_product_that_bytes_limit_has_no_factor():
    outer = "f32[8,8]{1,0} dot(%m, %m), lhs_contracting_dims={}, rhs_contracting_dims={}"
    assert roofline_of(outer).expected.seconds == pytest.approx(4 * (8 + 64) / 4.8e12)


def test_a_kind_that_was_not_measured_takes_its_time_by_rule():
    attention, norm = [*KERNELS][-2:]
    found = roofline_of(attention, norm)
    assert found.expected.seconds == pytest.approx(found.seconds)
    assert found.expected.farthest == []
    kinds = {"other", "fused attention backward, head dim 32"}
    assert found.expected.by_rule.keys() == kinds
    assert sum(found.expected.by_rule.values()) == pytest.approx(found.seconds)
    lines = "\n".join(text._roofline(found))
    assert "by rule, as no factor was measured: " in lines and "ms of other" in lines
    assert "farthest" not in lines


def test_three_rows_are_named_that_are_farthest_from_their_limit():
    norm = ', metadata={op_name="jit(step)/jvp()/norm"}'
    rows, columns = [*KERNELS][0] + norm, [*KERNELS][1] + norm
    copy = "f32[512,1024]{1,0} copy(%p)" + norm
    found = roofline_of(columns, copy, copy, rows, rows, "f32[8]{0} add(%m, %m)")
    named = found.expected.farthest
    # A row is all kernels of one kind, pass and line. Copies take longer, but near their limit.
    kinds = [(row.kind, row.runs, row.phase) for row in named]
    assert kinds == [
        ("row reduction", 2, "forward"),
        ("copy", 2, "forward"),
        ("column reduction", 1, "forward"),
    ]
    for row in named:
        factor = dict(H200.factors.kinds)[row.kind]
        assert row.above_seconds == pytest.approx((factor - 1) * row.ceiling_seconds)
    lines = [*text._roofline(found)]
    start = next(number for number, line in enumerate(lines) if "farthest" in line)
    assert [line.split(maxsplit=2)[2] for line in lines[start + 1 : start + 4]] == [
        f"{row.kind}, {row.phase}, {row.source}" for row in named
    ]
    assert lines[start + 4] == ""


def test_text_and_json_say_that_the_expected_time_is_computed():
    found = roofline_of([*KERNELS][0])
    lines = "\n".join(text._roofline(found))
    assert "ms by rule  ms expected" in lines
    assert "computed, not measured" in lines
    assert f"{found.expected.seconds * 1e3:,.2f} ms" in lines
    fields = json.loads(json.dumps(dataclasses.asdict(found)))
    assert fields["expected"]["farthest"][0]["kind"] == "row reduction"
    assert fields["operations"][0]["factor"] == dict(H200.factors.kinds)["row reduction"]
    assert fields["rows"][2]["expected_seconds"] > fields["rows"][2]["ceiling_seconds"]


def test_a_device_without_factors_has_no_expected_time():
    found = roofline_of(*KERNELS, device=hardware.devices()["h100"])
    assert found.expected is None
    assert {row.expected_seconds for row in found.rows} == {None}
    assert {operation.expected_seconds for operation in found.operations} == {None}
    lines = "\n".join(text._roofline(found))
    assert "no expected time" in lines and "measured on h100" in lines
    assert "ms expected" not in lines and "a step takes at least" in lines


def test_every_factor_of_the_table_is_of_a_kind_that_a_kernel_can_have():
    known = {*KERNELS.values(), kernels.OPTIMIZER}
    known |= {kernels.attention_kind(phase, 64) for phase in ("forward", "backward")}
    for device in hardware.devices().values():
        if device.factors:
            kinds = dict(device.factors.kinds)
            assert kinds.keys() <= known
            # No kernel is faster than its limit.
            assert min([*kinds.values(), *dict(device.factors.product).values()]) >= 1
    # What was measured on an H200 says nothing about its relatives.
    measured = [name for name, device in hardware.devices().items() if device.factors]
    assert measured == ["h200"]
