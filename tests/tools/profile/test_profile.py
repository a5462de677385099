"""`meshtrain profile`: time of the operations in a trace, their labels, and the printed text."""

import json
from collections import defaultdict

import jax
import pytest

from meshtrain.cli import app
from meshtrain.tools.hlo import labels as hlo_labels
from meshtrain.tools.profile import profile, text, trace
from tests.lib.configs import tiny_config

# A program as XLA prints it; one of its kernels is in a CUDA graph.
PROGRAM = """\
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/me/model.py"

FunctionNames
1 "Net.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=8 end_column=20}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p, %p), BACKWARD
}

%fused_dot (l: f32[8]) -> f32[8] {
  %l = f32[8]{0} parameter(0)
  %dot.6 = f32[8]{0} dot(%l, %l), FORWARD
  ROOT %add.6 = f32[8]{0} add(%dot.6, %l), BACKWARD
}

%async_computation (s: f32[8]) -> f32[4] {
  %s = f32[8]{0} parameter(0)
  ROOT %reduce-scatter.7 = f32[4]{0} reduce-scatter(%s), dimensions={0}, to_apply=%sum, NEITHER
}

%command_buffer (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %loop_add_fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused_add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %custom-call.2 = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm", FORWARD
  %all-reduce-start.3 = f32[8]{0} all-reduce-start(%custom-call.2), replica_groups={}, \
to_apply=%sum, NEITHER
  %all-reduce-done.3 = f32[8]{0} all-reduce-done(%all-reduce-start.3)
  %copy.4 = f32[8]{0} copy(%custom-call.2), metadata={stack_frame_id=1}
  %gemm_fusion.6 = f32[8]{0} fusion(%copy.4), kind=kCustom, calls=%fused_dot, BACKWARD
  %async-start.7 = ((f32[8]), f32[4]) async-start(%gemm_fusion.6), calls=%async_computation
  %small.8 = f32[2]{0} slice(%copy.4), slice={[0:2]}
  %all-reduce.8 = (f32[2], f32[8]) all-reduce(%small.8, %gemm_fusion.6), to_apply=%sum, NEITHER
  ROOT %call.5 = f32[8]{0} call(%all-reduce-done.3), to_apply=%command_buffer
}
"""
PASSES = {
    "BACKWARD": "transpose(jvp())/add",
    "FORWARD": "jvp()/dot_general",
    "NEITHER": "reduce_sum",
}
for word, op_name in PASSES.items():
    metadata = f'metadata={{op_name="jit(train_step)/{op_name}" stack_frame_id=1}}'
    PROGRAM = PROGRAM.replace(word, metadata)

# On GPU 0: stream, kernel, instruction path in the trace, start and duration in microseconds.
KERNELS = [
    ("Stream #13(Compute)", "nvjet_hsh_128x128", "custom-call.2", 0, 40),
    ("Stream #13(Compute)", "loop_add_fusion_1", "while.9/call.5", 60, 20),
    ("Stream #14(MemcpyH2D)", "MemcpyH2D", "", 80, 10),
    (
        "Stream #15(Compute)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "all-reduce-start.3",
        30,
        50,
    ),
    ("XLA Ops", "custom-call.2", "custom-call.2", 0, 40),  # a repeated event
]
ROUNDING = 1e-9  # rounding error of sums of fractions


def trace_of(kernels):
    """Returns an .xplane.pb of one GPU."""
    lines = defaultdict(list)
    names = {name: number for number, name in enumerate(dict.fromkeys(k[1] for k in kernels), 1)}
    for stream, name, op, start, length in kernels:
        stats = f'stats {{ metadata_id: 1 str_value: "{op}" }}' if op else ""
        span = f"offset_ps: {start * 1000000} duration_ps: {length * 1000000}"
        lines[stream].append(f"events {{ metadata_id: {names[name]} {span} {stats} }}")
    proto = 'planes { name: "/device:GPU:0" stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    for name, number in names.items():
        meta = f'key: {number} value {{ id: {number} name: "{name}" }}'
        proto += f" event_metadata {{ {meta} }}"
    for number, (stream, events) in enumerate(lines.items()):
        proto += f' lines {{ id: {number} name: "{stream}" {" ".join(events)} }}'
    return jax.profiler.ProfileData.text_proto_to_serialized_xspace(proto + " }")


@pytest.fixture
def gpu(tmp_path):
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(trace_of(KERNELS))
    labels = hlo_labels.Labels(PROGRAM)
    return [(one, labels.label_of(one.path, one.name)) for one in trace.read(file)]


def operation(name, start, end):
    return trace.Operation("CPU 0", "thread 0", name, name, start, end)


def test_a_moment_belongs_to_the_innermost_operation():
    names = ("loop", 0, 10), ("a", 1, 4), ("within a", 2, 3), ("b", 4, 6), ("too long", 8, 12)
    line = [operation(*one) for one in names]
    trace.assign_own_time(reversed(line))
    own = {one.name: one.own for one in line}
    assert own == {
        "loop": [(0, 1), (6, 8)],
        "a": [(1, 2), (3, 4)],
        "within a": [(2, 3)],
        "b": [(4, 6)],
        "too long": [(8, 12)],
    }
    assert trace.covered_seconds([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == pytest.approx(4e-9)


def test_gpu_kernels_are_labelled_from_the_program(gpu):
    labels = {one.name: found for one, found in gpu}
    assert len(gpu) == 4
    where = "home/me/model.py:7 Net.__call__"
    assert labels["nvjet_hsh_128x128"] == ("dot", "forward", where, "custom-call.2")
    # Found by the kernel's own name, because XLA names only the graph that contains it.
    assert labels["loop_add_fusion_1"] == ("fusion", "backward", where, "loop_add_fusion.1")
    reduce = labels["ncclDevKernel_AllReduce_Sum_f32_RING_LL"]
    assert reduce == ("all-reduce", "other", where, "all-reduce-start.3") and reduce.is_collective
    assert labels["MemcpyH2D"].kind == "copy"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all-gather"),
        ("ncclDevKernel_SendRecv", "collective-permute"),
        ("sm90_xmma_gemm_bf16bf16", "dot"),
        ("my_kernel", "kernel"),
    ],
)
def test_kernels_outside_the_program_are_labelled_by_name(kernel, kind):
    assert hlo_labels.Labels(PROGRAM).label_of("call.5", kernel).kind == kind


@pytest.mark.parametrize(
    ("name", "kind", "phase"),
    [("gemm_fusion.6", "dot", "forward"), ("async-start.7", "reduce-scatter", "other")],
)
def test_an_operation_has_the_kind_of_its_main_nested_instruction(name, kind, phase):
    found = hlo_labels.Labels(PROGRAM).label_of(name, name)
    assert found == (kind, phase, "home/me/model.py:7 Net.__call__", name)


def test_a_combined_collective_is_labelled_by_its_largest_tensor():
    found = hlo_labels.Labels(PROGRAM).label_of("all-reduce.8", "")
    assert found[:2] == ("all-reduce", "forward")  # the pass of gemm_fusion.6
    assert found.source == "home/me/model.py:7 Net.__call__, combined"


def test_an_operation_without_a_source_line_is_near_another():
    found = hlo_labels.Labels(PROGRAM).label_of("copy.4", "copy.4")
    assert found.source.startswith("near home/me/model.py:7")


def test_collectives_are_exposed_where_nothing_else_runs(gpu):
    (device,), streams = profile._usages(gpu, 100e-6)
    assert device.name == "GPU 0"
    shares = device.busy, device.collective, device.exposed
    assert shares == pytest.approx((0.9, 0.5, 0.2))  # 40 to 60: between the two kernels
    busy = {stream.name: stream.busy for stream in streams["GPU 0"]}
    assert busy == pytest.approx(
        {"Stream #13(Compute)": 0.6, "Stream #14(MemcpyH2D)": 0.1, "Stream #15(Compute)": 0.5}
    )


@pytest.fixture(scope="module")
def traced_run(tmp_path_factory):
    """The folder of the profile of a run: 8 simulated devices, fsdp 2, two micro-batches."""
    c = tiny_config()
    c.mesh.data, c.mesh.fsdp = 4, 2
    c.train.num_microbatches = 2
    folder = tmp_path_factory.mktemp("profile")
    return profile.profile(c, steps=range(2, 4), output=folder), folder


@pytest.mark.slow
def test_every_moment_of_a_trace_is_counted_once(traced_run):
    found, folder = traced_run
    assert found.file.is_relative_to(folder)
    operations = trace.read(found.file)
    lines = defaultdict(list)
    for one in operations:
        lines[one.line].append(one)
    for line in lines.values():
        own = sum(one.seconds for one in line)
        assert own == pytest.approx(trace.covered_seconds((one.start, one.end) for one in line))
    # A row counts per device and step: there are 8 devices and 2 steps.
    own = sum(one.seconds for one in operations)
    assert sum(row.seconds for row in found.rows) * 16 == pytest.approx(own)
    assert sum(row.calls for row in found.rows) * 16 == pytest.approx(len(operations))


@pytest.mark.slow
def test_devices_are_busy_with_collectives_and_other_work(traced_run):
    found, _ = traced_run
    assert [device.name for device in found.devices] == [f"CPU {n}" for n in range(8)]
    for device in found.devices:
        assert 0 <= device.exposed <= device.collective + ROUNDING
        assert 0 < device.collective < device.busy <= 1.01
    timing = found.timing
    assert 0 <= timing.waited < timing.traced and timing.untraced > 0


@pytest.mark.slow
def test_operations_have_a_source_line(traced_run):
    found, _ = traced_run
    in_layers = {(row.kind, row.phase) for row in found.rows if "models/layers.py" in row.source}
    assert {("dot", "forward"), ("dot", "backward"), ("all-gather", "forward")} <= in_layers
    unknown = [row for row in found.rows if ".py:" not in row.source]
    # Counted by number, not by time, because any operation may wait for another device.
    assert sum(row.calls for row in unknown) < 0.1 * sum(row.calls for row in found.rows)


@pytest.mark.slow
def test_the_text_shows_the_costliest_rows_and_sums_up_the_rest(traced_run):
    found, _ = traced_run
    lines = list(text.lines(found, top=3))
    (head,) = [number for number, line in enumerate(lines) if line.split()[:2] == ["ms", "%"]]
    rows = [line.split() for line in lines[head + 1 : head + 5]]
    shares = [float(row[1].removesuffix("%")) for row in rows]
    costs = [row.seconds for row in found.rows]
    assert costs == sorted(costs, reverse=True)
    assert shares[:3] == pytest.approx([100 * cost / sum(costs) for cost in costs[:3]], abs=0.1)
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert f"{len(found.rows) - 3} more rows" in lines[head + 4]
    assert lines[-1].endswith(str(found.file))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=0", "--steps=0: use N or FIRST..LAST, 1 or later"),
        ("--steps=5..3", "--steps=5..3: use N"),
        ("--top=0", "--top=0: use 1 or more"),
        ("--output={}/config.json/trace", "use a folder that can be written"),
        # This folder exists, but no file can be created in it.
        ("--output=/proc/self", "use a folder that can be written"),
    ],
)
def test_a_wrong_flag_is_reported_in_one_line_before_compiling(
    tmp_path, capsys, monkeypatch, flag, message
):
    monkeypatch.setattr("meshtrain.program.Program.compile", None)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    flags = f"--config={tmp_path}/config.json", f"--output={tmp_path}", flag.format(tmp_path)
    assert app.main("profile", [*flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
