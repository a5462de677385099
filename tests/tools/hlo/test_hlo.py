"""HLO text is parsed in every form that XLA writes; nothing is compiled."""

import pytest

from meshtrain.tools.hlo import collective_ops, hlo

MESH = {"pipeline": 1, "data": 2, "fsdp": 2, "tensor": 2}
HEADER = "HloModule step, num_partitions=8\n\n"
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def metadata(op_name, file, line):
    return f'metadata={{op_name="{op_name}" source_file="{file}" source_line={line}}}'


def collectives_in(body, before="", platform="cpu"):
    """Returns the collectives of a program with this entry after the computations `before`."""
    text = (
        f"{HEADER}{before}\nENTRY %main (p: f32[8,4]) -> f32[8,4] "
        f"{{\n  %p = f32[8,4]{{1,0}} parameter(0)"
    )
    module = hlo.parse(text + f"{body}\n}}\n")
    return collective_ops.find_collectives(module, MESH, platform)


@pytest.mark.parametrize(
    ("written", "expected", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)], ("tensor",)),
        ("{}", [tuple(range(8))], ("data", "fsdp", "tensor")),
        ("{{0,1,2,3,4,5,6,7}}", [tuple(range(8))], ("data", "fsdp", "tensor")),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)], ("fsdp", "tensor")),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)], ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)], ("fsdp",)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", [tuple(range(8))], tuple(MESH)[1:]),
        ("mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)], ("fsdp", "tensor")),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [(0, 1, 4, 5), (2, 3, 6, 7)], ("data", "tensor")),
        (
            "mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
            [(0, 4), (1, 5), (2, 6), (3, 7)],
            ("data",),
        ),
        ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)], ("fsdp",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", [(0, 3), (1, 2), (4, 7), (5, 6)], None),
    ],
)
def test_groups_are_parsed_in_every_form_and_named_by_mesh_axes(written, expected, axes):
    found = collective_ops.groups_of(f", channel_id=1, replica_groups={written}, to_apply=%add", 8)
    assert sorted(found) == expected
    assert collective_ops.axes_of(found, MESH) == axes


def test_groups_within_one_axis_are_named_by_it():
    assert collective_ops.axes_of(((0, 1), (2, 3)), {"data": 1, "tensor": 4}) == ("tensor",)


@pytest.mark.parametrize(
    ("line", "kind", "shape", "sent"),
    [
        ("f32[16,4]{1,0} all-gather(%p), dimensions={0}", "all-gather", (16, 4), 128),
        ("f32[8,4]{1,0} all-reduce(%p), to_apply=%add", "all-reduce", (8, 4), 128),
        (
            "f32[4,4]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add",
            "reduce-scatter",
            (8, 4),
            64,
        ),
        ("f32[8,4]{1,0} all-to-all(%p), dimensions={0}", "all-to-all", (8, 4), 64),
        ("f32[8,4]{1,0} ragged-all-to-all(%p, %p, %p)", "ragged-all-to-all", (8, 4), 64),
        ("f32[8,4]{1,0} collective-broadcast(%p)", "collective-broadcast", (8, 4), 128),
        (
            "(f32[8,4]{1,0}, f32[16,4]{1,0:T(8,128)}) all-gather-start(%p), dimensions={0}",
            "all-gather",
            (16, 4),
            128,
        ),
        ("f32[8,4]{1,0} all-reduce-start(%p), to_apply=%add", "all-reduce", (8, 4), 128),
        (
            "((f32[8,4]{1,0}), f32[4,4]{1,0}) reduce-scatter-start(%p), dimensions={0}",
            "reduce-scatter",
            (8, 4),
            64,
        ),
        # Newer text repeats the types of operands.
        ("f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %p), to_apply=%add", "all-reduce", (8, 4), 128),
    ],
)
def test_each_kind_has_the_full_tensor_and_the_bytes_that_a_device_sends(line, kind, shape, sent):
    end = f"{kind}-start" in line and f"\n  %d = f32[8,4]{{1,0}} {kind}-done(%c)"
    (c,) = collectives_in(f"\n  %c = {line}, replica_groups=[4,2]<=[8]{end or ''}", ADD)
    assert (c.kind, c.array.shape, c.axes, c.bytes) == (kind, shape, ("tensor",), sent)


CONCATENATE = """
%joined (a: f32[32], b: f32[4]) -> f32[36] {
  %a = f32[32]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  ROOT %ab = f32[36]{0} concatenate(%a, %b), dimensions={0}
}
"""


@pytest.mark.parametrize(
    "line",
    [
        "fusion(%flat, %bias), kind=kLoop, calls=%joined",
        "concatenate(%flat, %bias), dimensions={0}",
    ],
)
def test_tensors_that_are_concatenated_for_one_all_reduce_are_counted_apart(line):
    body = f"""
  %flat = f32[32]{{0}} bitcast(%p)
  %bias = f32[4]{{0}} slice(%flat), slice={{[0:4]}}, \
{metadata("jit(step)/jvp(f)/add", "/a/b.py", 3)}
  %v = f32[36]{{0}} {line}
  %c = f32[36]{{0}} all-reduce(%v), replica_groups={{}}, to_apply=%add"""
    first, second = collectives_in(body, ADD + CONCATENATE, platform="gpu")
    assert (first.array.shape, second.array.shape) == ((8, 4), (4,))
    assert first.bytes + second.bytes == 2 * 7 / 8 * 36 * 4
    assert (second.phase, second.source) == ("forward", "/a/b.py:3")


def test_a_permutation_counts_once_and_names_the_axes_between_its_devices():
    line = (
        "(f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%p), channel_id=3, "
        "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
    )
    (c,) = collectives_in(f"\n  %c = {line}\n  %d = f32[8,4]{{1,0}} collective-permute-done(%c)")
    assert (c.kind, c.axes, c.bytes) == ("collective-permute", ("fsdp",), 128)


def test_a_combined_all_reduce_is_listed_once_per_tensor_with_its_own_source():
    a, b = collectives_in(
        f"""
  %s = f32[] constant(0)
  %c = (f32[8,4]{{1,0}}, /*index=1*/f32[]) all-reduce(%p, %s), replica_groups={{}}, to_apply=%add
  %one = f32[8,4]{{1,0}} get-tuple-element(%c), index=0, \
{metadata("transpose(jvp())/mul", "/x/model.py", 7)}
  %two = f32[] get-tuple-element(%c), index=1, {metadata("jvp()/sum", "/x/loss.py", 9)}""",
        ADD,
    )
    assert (a.array.size, a.phase, a.source) == (32, "backward", "/x/model.py:7")
    assert (b.array.size, b.phase, b.source) == (1, "forward", "/x/loss.py:9")


LOOPS = """
%inner (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %v = f32[8,4]{1,0} get-tuple-element(%t), index=1
  %c = f32[8,4]{1,0} all-reduce(%v), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %r = (s32[], f32[8,4]{1,0}) tuple(%c, %c)
}
%until (t: (s32[], f32[8,4])) -> pred[] {
  ROOT %t.1 = pred[] constant(true)
}
%outer (u: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %u = (s32[], f32[8,4]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[8,4]) while(%u), condition=%until, body=%inner, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


@pytest.mark.parametrize(
    ("trips", "count", "known"),
    [(', backend_config={"known_trip_count":{"n":"5"}}', 15, True), ("", 3, False)],
)
def test_counts_of_nested_loops_are_multiplied(trips, count, known):
    (c,) = collectives_in(
        f"\n  %w = (s32[], f32[8,4]{{1,0}}) while(%p), condition=%until, body=%outer{trips}",
        ADD + LOOPS,
    )
    assert (c.count, c.count_known, c.bytes) == (count, known, count * 128)


UNROLLED = """
%next (x: u32[]) -> u32[] {
  %x = u32[] parameter(0)
  %two.1 = u32[] constant(2)
  ROOT %sum.1 = u32[] add(%x, %two.1)
}
%below (s: (u32[], f32[8,4])) -> pred[] {
  %s = (u32[], f32[8,4]{1,0}) parameter(0)
  %n = u32[] get-tuple-element(%s), index=0
  %limit = u32[] constant(7)
  ROOT %t = pred[] compare(%n, %limit), direction=LT
}
%twice (s.1: (u32[], f32[8,4])) -> (u32[], f32[8,4]) {
  %s.1 = (u32[], f32[8,4]{1,0}) parameter(0)
  %n.1 = u32[] get-tuple-element(%s.1), index=0
  %copy = u32[] copy(%n.1)
  %two = u32[] constant(2)
  %following = u32[] STEP
  %a = f32[8,4]{1,0} get-tuple-element(%s.1), index=1
  %c = f32[8,4]{1,0} all-reduce(%a), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %r = (u32[], f32[8,4]{1,0}) tuple(%following, %c)
}
"""


@pytest.mark.parametrize(
    ("step", "count"),
    [
        ("add(%copy, %two)", 4),
        ("fusion(%n.1), kind=kLoop, calls=%next", 4),
        ("multiply(%copy, %two)", 7),
    ],
)
def test_a_loop_that_was_unrolled_counts_by_more_than_one(step, count):
    """From 0 up to 7 by 2; by one, as `lax.scan` does, where the step is not found."""
    (c,) = collectives_in(
        """
  %zero = u32[] constant(0)
  %state = (u32[], f32[8,4]{1,0}) tuple(%zero, %p)
  %w = (u32[], f32[8,4]{1,0}) while(%state), condition=%below, body=%twice""",
        ADD + UNROLLED.replace("STEP", step),
    )
    assert (c.count, c.count_known) == (count, True)


def test_an_instruction_may_have_the_metadata_of_a_kernel_on_other_lines():
    """As jaxlib writes Pallas kernels for TPUs. The computation continues after it."""
    (c,) = collectives_in(
        """
  %k = f32[8,4]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"block_kv\\": 64}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %c = f32[8,4]{1,0} all-reduce(%k), replica_groups=[4,2]<=[8], to_apply=%add""",
        ADD,
    )
    assert c.bytes == 128


@pytest.mark.parametrize(
    ("start", "compare", "count", "known"),
    [
        ("constant(1)", "compare(%n, %limit), direction=LT", 6, True),
        ("constant(1)", "compare(%n, %limit), direction=GT", 1, False),
        ("constant(1)", "compare(%limit, %n), direction=LT", 1, False),
        ("parameter(2)", "compare(%n, %limit), direction=LT", 1, False),
    ],
)
def test_a_loop_that_counts_between_constants_has_a_known_length(start, compare, count, known):
    condition = f"""
%count (u: (f32[8,4], s32[])) -> pred[] {{
  %u = (f32[8,4]{{1,0}}, s32[]) parameter(0)
  %n = s32[] get-tuple-element(%u), index=1
  %limit = s32[] constant(7)
  ROOT %less = pred[] {compare}
}}
"""
    (c,) = collectives_in(
        f"""
  %one = s32[] {start}
  %copied = s32[] copy(%one)
  %state = (f32[8,4]{{1,0}}, s32[]) tuple(%p, %copied)
  %w = (f32[8,4]{{1,0}}, s32[]) while(%state), condition=%count, body=%inner""",
        ADD + LOOPS + condition,
    )
    assert (c.count, c.count_known) == (count, known)


@pytest.mark.parametrize(
    ("name", "count"), [("jit(f)/cond", 1), ("jit(f)/3_of_4_ticks/cond", 3 / 4)]
)
def test_a_branch_counts_as_often_as_its_name_says(name, count):
    branch = LOOPS.partition("%until")[0].replace("%inner", "%branch")
    (c,) = collectives_in(
        "\n  %w = (s32[], f32[8,4]{1,0}) conditional(%p, %p), branch_computations={%branch}, "
        + metadata(name, "a.py", 1),
        ADD + branch,
    )
    assert c.count == count


SLICE = """
%own (full: f32[8,4], id: u32[]) -> f32[4,4] {
  %full = f32[8,4]{1,0} parameter(0)
  %id = u32[] parameter(1)
  %number = s32[] convert(%id)
  %zero = s32[] constant(0)
  ROOT %part = f32[4,4]{1,0} dynamic-slice(%full, OFFSET, %zero), dynamic_slice_sizes={4,4}
}
"""


@pytest.mark.parametrize(
    ("offset", "also", "kind"),
    [
        ("%number", "", "reduce-scatter"),
        ("%zero", "", "all-reduce"),  # every device keeps the same slice
        # The full result is used too.
        ("%number", "\n  %n = f32[8,4]{1,0} negate(%c)", "all-reduce"),
    ],
)
def test_an_all_reduce_of_which_each_device_uses_its_slice_is_a_reduce_scatter(offset, also, kind):
    body = f"""
  %c = f32[8,4]{{1,0}} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add
  %b = f32[8,4]{{1,0}} bitcast(%c)
  %id = u32[] partition-id()
  %f = f32[4,4]{{1,0}} fusion(%b, %id), kind=kLoop, calls=%own{also}"""
    (c,) = collectives_in(body, ADD + SLICE.replace("OFFSET", offset))
    assert c.kind == kind
    assert (collective_ops.REDUCE_SCATTER_NOTE in c.notes) == (kind == "reduce-scatter")


PADDED = """
%pad (into: f32[8,4], part: f32[4,4], at: u32[]) -> f32[8,4] {
  %into = f32[8,4]{1,0} parameter(0)
  %part = f32[4,4]{1,0} parameter(1)
  %at = u32[] parameter(2)
  %zero.1 = u32[] constant(0)
  ROOT %update = f32[8,4]{1,0} dynamic-update-slice(%into, %part, %at, %zero.1)
}
"""


@pytest.mark.parametrize(
    ("fill", "at", "kind"),
    [
        ("0", "%start", "all-gather"),
        ("1", "%start", "all-reduce"),  # a sum with ones
        ("0", "%always", "all-reduce"),  # all devices have the same part
    ],
)
def test_an_all_reduce_of_shards_padded_with_zeros_is_a_gather_of_twice_the_bytes(fill, at, kind):
    """As libtpu gathers over large slices of v5p."""
    (c,) = collectives_in(
        f"""
  %fill = f32[] constant({fill})
  %wide = f32[8,4]{{1,0}} broadcast(%fill), dimensions={{}}
  %id = u32[] partition-id()
  %four = u32[] constant(4)
  %start = u32[] multiply(%id, %four)
  %always = u32[] constant(4)
  %own = f32[4,4]{{1,0}} slice(%p), slice={{[0:4], [0:4]}}
  %f = f32[8,4]{{1,0}} fusion(%wide, %own, {at}), kind=kLoop, calls=%pad
  %c = f32[8,4]{{1,0}} all-reduce(%f), replica_groups=[4,2]<=[8], to_apply=%add""",
        ADD + PADDED,
        platform="tpu",
    )
    assert c.kind == kind and c.bytes == 128
    assert (collective_ops.PADDED_NOTE in c.notes) == (kind == "all-gather")


@pytest.mark.parametrize(
    ("kind", "where", "platform", "itemsize"),
    [
        ("all-gather", "before", "cpu", 2),
        ("all-gather", "after", "cpu", 2),
        ("all-gather", "nowhere", "cpu", 4),
        ("all-gather", "after", "tpu", 4),
        ("all-reduce", "before", "cpu", 4),  # a float32 sum of rounded values
        ("all-reduce", "after", "cpu", 2),
    ],
)
def test_a_collective_that_only_cpu_runs_in_float32_counts_as_bfloat16(
    kind, where, platform, itemsize
):
    first = "%v = f32[8,4] copy(%p)"
    if where == "before":
        first = "%h = bf16[8,4] convert(%p)\n  %v = f32[8,4] convert(%h)"
    (c,) = collectives_in(
        f"\n  {first}\n  %c = f32[16,4] {kind}(%v), dimensions={{0}}, replica_groups=[4,2]<=[8]"
        f"\n  %u = bf16[16,4] {'convert' if where == 'after' else 'negate'}(%c)",
        platform=platform,
    )
    assert c.itemsize == itemsize


TRACED = """
%one_layer (a: f32[2,8,4], i: s32[]) -> f32[8,4] {
  %a = f32[2,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,8,4]{2,1,0} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={1,8,4}
  ROOT %b = f32[8,4]{1,0} bitcast(%s)
}
%until (t: (s32[], f32[8,4])) -> pred[] {
  ROOT %t.1 = pred[] constant(true)
}
%body (t: (s32[], f32[2,8,4])) -> (s32[], f32[2,8,4]) {
  %t = (s32[], f32[2,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[2,8,4]{2,1,0} get-tuple-element(%t), index=1
  %f = f32[8,4]{1,0} fusion(%v, %i), kind=kLoop, calls=%one_layer
  INSIDE
  %n = f32[2,8,4]{2,1,0} negate(%v)
  ROOT %r = (s32[], f32[2,8,4]{2,1,0}) tuple(%i, RESULT)
}
"""


@pytest.mark.parametrize(
    ("place", "result"), [("inside", "%v"), ("after", "%v"), ("inside", "%n"), ("after", "%n")]
)
def test_a_gather_is_traced_to_the_argument_of_the_step_through_loops_and_fusions(place, result):
    gather = "%c = f32[16,4]{1,0} all-gather(%f), dimensions={0}, replica_groups=[4,2]<=[8]"
    (c,) = collectives_in(
        f"""
  %w = f32[2,8,4]{{2,1,0}} parameter(1), {metadata("state.params['layers']['kernel']", "", 0)}
  %t = (s32[], f32[2,8,4]{{2,1,0}}) tuple(%p, %w)
  %l = (s32[], f32[2,8,4]{{2,1,0}}) while(%t), condition=%until, body=%body
  %i = s32[] get-tuple-element(%l), index=0
  %v = f32[2,8,4]{{2,1,0}} get-tuple-element(%l), index=1
  %f = f32[8,4]{{1,0}} slice(%v), slice={{[0:1], [0:8], [0:4]}}
  {gather if place == "after" else ""}""",
        TRACED.replace("INSIDE", gather if place == "inside" else "").replace("RESULT", result),
    )
    assert c.origin == ("state.params['layers']['kernel']" if result == "%v" else "")


def test_a_wrapped_collective_counts_where_it_starts():
    wrapped = """
%wrapped (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %c = f32[4,4]{1,0} reduce-scatter(%p), dimensions={0}, replica_groups=[4,2]<=[8], \
to_apply=%add
}
"""
    (c,) = collectives_in(
        """
  %s = ((f32[8,4]{1,0}), f32[4,4]{1,0}, u32[]) async-start(%p), calls=%wrapped
  %u = ((f32[8,4]{1,0}), f32[4,4]{1,0}, u32[]) async-update(%s), calls=%wrapped
  %d = f32[4,4]{1,0} async-done(%u), calls=%wrapped""",
        ADD + wrapped,
    )
    assert (c.kind, c.count, c.bytes) == ("reduce-scatter", 1, 64)


def test_the_source_is_the_innermost_line_outside_libraries():
    text = f"""{HEADER}FileNames
1 "/home/me/model.py"
2 "/venv/lib/python3.11/site-packages/flax/nnx/linear.py"

FunctionNames
1 "Net.__call__"
2 "Linear.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12}}
2 {{file_name_id=2 function_name_id=2 line=300}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  ROOT %c = f32[8,4]{{1,0}} all-reduce(%p), replica_groups={{}}, metadata={{op_name="x" \
stack_frame_id=2}}
}}
"""
    (c,) = collective_ops.find_collectives(hlo.parse(text), MESH)
    assert c.source.endswith("me/model.py:12 Net.__call__")


def test_fragments_of_one_collective_in_several_fusions_count_once():
    inner = """
%FUSED (p: f32[8,4]) -> f32[16,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %c = f32[16,4]{1,0} all-gather(%p), channel_id=5, dimensions={0}, replica_groups=[4,2]<=[8]
}
"""
    calls = "\n".join(
        f"  %{n} = f32[16,4]{{1,0}} fusion(%p), kind=kCustom, calls=%{n}.f" for n in "ab"
    )
    assert (
        len(collectives_in(f"\n{calls}", "".join(inner.replace("FUSED", f"{n}.f") for n in "ab")))
        == 1
    )
