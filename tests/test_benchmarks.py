"""Records of benchmarks, and scripts that count bytes, at toy size.

Measured times are not tested.
"""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from types import SimpleNamespace

import jax
import pytest

from benchmarks import lora
from benchmarks.compare import gpu_settings, gpu_step, loss_curves
from benchmarks.faults import injection
from benchmarks.gpu import attention_statistics, presets, run_queue
from benchmarks.lib import comparison, devices, gpu_models, record, settings
from benchmarks.parallel import bandwidth, collectives, memory, scaling
from benchmarks.plan import roofline
from meshtrain import hardware, state
from meshtrain.config.build import build
from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.tools.audit import minimum
from meshtrain.tools.hlo import target

FOLDER = record.FOLDER.parent
SCRIPTS = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in FOLDER.rglob("*.py")
    if path.parent.name != "lib"
)
TOY = dict(layers=4, width=32, seq_len=32, rows=2)


def run(script, *flags):
    return subprocess.Popen(
        [sys.executable, FOLDER / script, *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_record_holds_what_its_results_depend_on_and_is_named_after_it(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--rounds=2"])
    jax.devices()  # jax has read its environment variables; it ignores these:
    monkeypatch.setenv("XLA_FLAGS", "--some=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    parser = record.parser("Purpose.\n\n  how to run it")
    parser.add_argument("--rounds", type=int)
    assert "\n  how to run it" in parser.format_help()
    about = record.about(parser.parse_args(["--rounds=2", f"--output={tmp_path}"]))
    assert about["command"] == "python benchmarks/x.py --rounds=2"
    assert about["flags"] == {"rounds": "2", "output": str(tmp_path)}
    assert about["environment"]["XLA_FLAGS"] == "--some=1"
    assert about["environment"]["JAX_ENABLE_X64"] == "0"
    assert about["versions"].keys() == {*record.PACKAGES} and about["versions"]["jax"]
    assert about["devices"] == ["cpu"] * 8 and about["cores"] == len(os.sched_getaffinity(0))

    record.save(tmp_path, about, model="toy")
    (file,) = tmp_path.glob("*.json")
    assert file.name == f"toy_cpu-{about['cores']}-cores_{about['date'][:10]}.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(about))
    assert str(file) in capsys.readouterr().out
    record.save(tmp_path / "named.json", about, model="toy")
    assert (tmp_path / "named.json").read_text() == file.read_text()
    record.save(None, about, model="toy")
    several = {"devices": ["NVIDIA H100 80GB HBM3"] * 2, "date": "2026-01-02T03:04:05+00:00"}
    assert record.name_of("gpt2", several) == "gpt2_nvidia-h100-80gb-hbm3-x2_2026-01-02"


def test_commit_comes_from_the_environment_without_git(tmp_path, monkeypatch):
    args = record.parser("").parse_args([])
    monkeypatch.setenv("GIT_COMMIT", "0123456789ab")
    monkeypatch.setattr(record, "FOLDER", tmp_path / "results")
    assert record.about(args, ["cpu"])["git"] == "0123456789ab"  # not a git checkout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.about(args, ["cpu"])["git"] == "0123456789ab"  # git is not installed
    monkeypatch.delenv("GIT_COMMIT")
    assert record.about(args, ["cpu"])["git"] is None


def test_table_has_a_line_for_each_row(capsys):
    record.show(
        [{"what": "a", "s": 1.23456}, {"what": "longer", "s": 10}, {"what": "b", "s": None}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "what        s",
        "a       1.235",
        "longer     10",
        "b           -",
    ]


@pytest.mark.slow
def test_compiled_bytes_agree_with_the_arithmetic(monkeypatch):
    all_cases = memory.cases
    names = ("stage 1, remat full", "stage 3, remat full")

    def cases(args):
        return [case for case in all_cases(args) if case[1] in names]

    monkeypatch.setattr(memory, "cases", cases)
    args = SimpleNamespace(**TOY, sweeps=["zero"], microbatches=[])
    totals = []
    for row in memory.measure(args):
        minimum, compiled = row["arithmetic"], row["compiled"]
        assert compiled["argument"] == pytest.approx(minimum["state"], rel=0.01), row["case"]
        # The new state reuses the memory of the donated old one.
        expected = compiled["argument"] + compiled["temporary"]
        assert compiled["total"] == pytest.approx(expected, rel=0.01)
        assert compiled["total"] == pytest.approx(sum(minimum.values()), rel=0.2), row["case"]
        totals.append(compiled["total"])
    assert totals[0] > 1.2 * totals[1]


@pytest.mark.slow
def test_only_the_memory_of_gpipe_grows_with_the_number_of_micro_batches(monkeypatch):
    monkeypatch.setattr(memory, "PIPELINES", memory.PIPELINES[:2])
    args = SimpleNamespace(**TOY, sweeps=["schedule"], microbatches=[8, 16])
    gpipe, one_f_one_b = memory.slopes(memory.measure(args))
    x = args.rows * args.seq_len * args.width * 4 / 1e3
    assert gpipe == {"": "gpipe, inputs", **dict.fromkeys(list(gpipe)[1:], pytest.approx(x))}
    assert [*one_f_one_b.values()] == ["1f1b, inputs", 0, 0]


@pytest.mark.slow
def test_bytes_by_axis_are_compared_with_the_minimum():
    args = SimpleNamespace(**TOY | dict(rows=8), microbatches=2)
    audited = {
        name: collectives.measure(args, collectives.LAYOUTS[name]) for name in ("data", "tensor")
    }
    (data,), (tensor,) = (collectives.rows_of(*item) for item in audited.items())
    assert data["over"] == "data" and data["ratio"] == pytest.approx(1, abs=0.01)
    assert data["largest excess"] == ""
    # Partial sums that XLA on CPU reduces separately.
    assert tensor["over"] == "tensor" and tensor["ratio"] > 1.1
    assert tensor["largest excess"] == minimum.SEPARATE_INPUT_GRADIENTS
    assert collectives.reasons(audited.values())[0].startswith(minimum.SEPARATE_INPUT_GRADIENTS)


def test_the_validation_part_chooses_the_learning_rate_of_fine_tuning():
    def row(method, rate, validation, test, num_bytes):
        after = {"validation": validation, "test": test}
        return {
            "method": method,
            "learning rate": rate,
            "optimizer bytes": num_bytes,
            "after": after,
            "seconds": [1.0, 9.0, 2.0],
        }

    rows = [row(lora.FULL, 1, 2.0, 2.5, 4e6), row(lora.FULL, 2, 3.0, 1.0, 4e6)]
    rows += [row(lora.LORA, 3, 2.0, 1.0, 1e6), row(lora.LORA, 4, 1.0, 3.0, 1e6)]
    rows[0]["before"] = {"validation": 8.0, "test": 9.0}
    full, low_rank = lora.figures(rows)
    assert (full["learning rate"], full["loss before"], full["loss after"]) == (1, 9.0, 2.5)
    assert (low_rank["learning rate"], low_rank["loss after"]) == (4, 3.0)
    assert low_rank["relative, %"] == pytest.approx(20) and low_rank["memory, %"] == 25
    assert full["s per step"] == 2.0
    batches = lora.heldout_parts(
        SimpleNamespace(rows=2, eval_batches=3), SimpleNamespace(size=12, read=list)
    )
    assert sum(batches["validation"] + batches["test"], []) == [*range(12)]


def test_every_layout_has_eight_devices():
    for name, layout in collectives.LAYOUTS.items():
        sizes = [size for axis, size in layout.items() if axis != "zero_stage"]
        assert math.prod(sizes) == collectives.DEVICES, name


@pytest.mark.parametrize("model", roofline.MODELS)
def test_the_roofline_is_of_the_models_that_it_names(model):
    config = load_config(roofline.MODELS[model][0], roofline.keys_of(model, 8))
    cfg = parse(config, num_devices=8)
    params = jax.eval_shape(build(cfg, data=[]).model.init, jax.random.key(0))
    size = float(model.split("-")[1][:-1]) * (1e9 if model.endswith("b") else 1e6)
    assert state.count(params) == pytest.approx(size, rel=0.25)
    assert cfg.train.dtype == "bfloat16" and cfg.mesh.fsdp == 8


@pytest.mark.slow
@pytest.mark.multiprocess
def test_help_of_every_script_has_a_command_to_run():
    running = {name: run(name, "--help") for name in SCRIPTS}
    outputs = {name: process.communicate()[0] for name, process in running.items()}
    for name, process in running.items():
        output = outputs[name]
        assert process.returncode == 0 and f"python benchmarks/{name}" in output, name
        assert "--output" in output, name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_scaling_at_toy_size(tmp_path):
    """The script checks that all workers have the same losses.

    Its times mean nothing at this size.
    """
    toy = ["--layers=2", "--width=32", "--seq-len=32", "--rows=8", "--rounds=1", "--steps=1"]
    process = run("parallel/scaling.py", *toy, "--layouts", "fsdp", "1f1b", f"--output={tmp_path}")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    results = json.loads(next(tmp_path.glob("scaling-llama-2x32_*.json")).read_text())
    assert [row["ideal"] for row in results["figures"]] == [2, pytest.approx(2 * 8 / 9)]


ON_GPUS = [
    {"layout": "data", "devices": 1, "efficiency %": 100.0},
    {"layout": "fsdp", "devices": 2, "efficiency %": 79.0},
    {"layout": "1f1b", "devices": 2, "efficiency %": 90.0},
]
ON_CORES = [
    {"seconds per step": "data", "efficiency": 0.95},
    {"seconds per step": "fsdp", "efficiency": 0.6},
]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--toy", "--min-efficiency=0.85"], "fsdp on 2 devices 0.790"),
        (["--toy", "--min-efficiency=0.95"], "fsdp on 2 devices 0.790, 1f1b on 2 devices 0.900"),
        (["--processes=1", "--min-efficiency=0.85"], "fsdp 0.600"),
        (["--processes=1", "--min-efficiency=0.6"], None),
        (["--toy"], None),
    ],
)
def test_scaling_ends_with_1_below_an_efficiency(flags, fault, tmp_path, monkeypatch, capsys):
    found = devices.Devices("cpu", "cpu", 2, "float32", None)
    monkeypatch.setattr(devices, "find", lambda: found)
    monkeypatch.setattr(scaling.runtime, "simulate", lambda num_devices: None)
    on_gpus = {"model": "toy", "cases": [], "figures": ON_GPUS}
    monkeypatch.setattr(scaling, "measure_devices", lambda *_: on_gpus)
    monkeypatch.setattr(scaling, "measure_speedups", lambda *_: {"figures": ON_CORES})
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags, f"--output={tmp_path}"])
    if fault is None:
        scaling.main()
    else:
        # Python prints a text as a line on stderr, and ends with exit code 1.
        with pytest.raises(SystemExit, match=f"^efficiency below --min-.*=0.[89]5: {fault}$"):
            scaling.main()
    assert list(tmp_path.glob("scaling-*.json"))


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--min-efficiency=85"], "--min-efficiency=85: use a fraction from 0 to 1"),
        (["--min-efficiency=nan"], "--min-efficiency=nan: use a fraction from 0 to 1"),
        (["--min-efficiency=0.8", "--simulate"], "--simulate measures overhead"),
    ],
)
def test_an_efficiency_that_cannot_be_compared_is_an_error(flags, fault, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags])
    with pytest.raises(SystemExit, match="^2$"):
        scaling.main()
    assert fault in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_context_at_toy_size(tmp_path):
    toy = ["--tokens=64", "--lengths", "512", "--layers=2", "--width=32", "--rounds=1", "--steps=1"]
    parts = ["--methods", "ring", "--parts", "speed", "overhead", "bytes", "memory"]
    process = run("parallel/context.py", *toy, *parts, f"--output={tmp_path}")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    (record,) = tmp_path.glob("context-speed-*.json")
    results = json.loads(record.read_text())
    assert results["speed"]["workers"]["ring"]["facts"][0]["pairs"] == 64 * 65 // 2 * 8
    assert {*results["overhead"]["workers"]["ring"]["turns"]} == {"1", "2", "4", "8"}
    (sent,), (kept,) = (results[part]["figures"] for part in ("bytes", "memory"))
    assert 1 <= sent["ratio"] < 1.02 and 0.5 < kept["kept, ratio"] < 1.5


@pytest.mark.slow
@pytest.mark.multiprocess
def test_experts_at_toy_size(tmp_path):
    toy = ["--d-expert=32", "--layers=1", "--width=32", "--seq-len=32", "--rounds=1", "--steps=1"]
    kinds = ["--kinds", "dense", "skewed", "initial", "dense dispatch"]
    process = run("parallel/experts.py", *toy, *kinds, "--parts", "one", f"--output={tmp_path}")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    (file,) = tmp_path.glob("experts-8x32-one_*.json")
    results = json.loads(file.read_text())["one"]
    dense, skewed, initial, dispatch = results["figures"]
    assert dense["over dense"] == 1 and dense["processes"] == 1
    # Every token chooses one expert of 8, and another one.
    assert [row["largest load"] for row in (dense, skewed)] == pytest.approx([1, 4])
    assert initial["largest load"] == pytest.approx(dispatch["largest load"])
    assert 1 < initial["largest load"] < 4
    workers = results["workers"]
    losses = {
        fact["kind"]: reply["losses"]
        for fact, reply in zip(workers["facts"], workers["first"], strict=True)
    }
    assert losses["dense dispatch"] == pytest.approx(losses["initial"], rel=1e-5)
    assert losses["dense dispatch"] != pytest.approx(losses["skewed"], rel=1e-5)


# Replaces implementation.py: it computes nothing and appends its name to a file; some fail.
FAKE = """
import json, pathlib, sys
name = sys.argv[1]
with (pathlib.Path(__file__).parent / "starts").open("a") as file:
    print(name, file=file)
if name == "broken":
    print(json.dumps({"error": "out of memory"}), flush=True)
    sys.exit(1)
print("no JSON", json.dumps({"compile_seconds": None}), sep="\\n", flush=True)
for number, line in enumerate(sys.stdin):
    if name == "late" and number == 1:
        sys.exit(3)
    loss = 2.0 if name == "other" else 1.0
    reply = {"seconds": 2.0 if name == "slow" else 1.0, "losses": [loss] * int(line), "bytes": None}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Replaces implementation.py by FAKE; returns a function that lists the started processes."""
    monkeypatch.setattr(comparison, "SCRIPT", tmp_path / "fake.py")
    comparison.SCRIPT.write_text(FAKE)
    return lambda: (tmp_path / "starts").read_text().split()


COUNTS = dict(rounds=2, steps=3)


@pytest.mark.multiprocess
def test_failed_implementations_are_reported_and_the_others_continue(starts, capsys):
    names = ["meshtrain", "broken", "slow", "late"]
    results = comparison.run(comparison.with_config({}, names), **COUNTS, pairs=False)
    assert results.failed == {"broken": "out of memory", "late": "exit code 3"}
    assert "broken failed: out of memory" in capsys.readouterr().err
    assert starts() == ["initial", *["meshtrain"] * 2, "broken", *["slow"] * 2, *["late"] * 2]
    rows = comparison.table(results)
    columns = ("implementation", "ms per step", "speed / meshtrain")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        ("meshtrain", 1000, 1),
        ("slow", 2000, 0.5),
    ]
    assert comparison.faults(results, rtol=1e-3) == []


@pytest.mark.multiprocess
def test_pairs_time_each_other_implementation_with_the_first_and_start_it_cold_once(starts):
    results = comparison.run(
        comparison.with_config({}, ["meshtrain", "slow", "other"]), **COUNTS, pairs=True
    )
    groups = [["meshtrain", "slow"], ["meshtrain", "other"]]
    assert [list(group) for group in results.groups] == groups
    assert [starts().count(name) for name in ("initial", "meshtrain", "slow")] == [1, 3, 2]
    (fault,) = comparison.faults(results, rtol=1e-3)
    assert fault.startswith("other has the losses [2.0,")


@pytest.mark.multiprocess
def test_comparison_ends_when_the_first_implementation_fails(starts):
    results = comparison.run(
        comparison.with_config({}, ["late", "slow", "other"]), **COUNTS, pairs=True
    )
    assert starts().count("other") == 0 and comparison.table(results) == []
    assert comparison.faults(results, rtol=1e-3) == ["late failed: exit code 3"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "bare jax, scan"],
        ["--only", "meshtrain", "tensorflow"],
        ["--output=one.json", "--models", "gpt2-124m", "gpt2-350m"],
    ],
)
def test_flags_that_cannot_be_compared_or_saved_are_rejected(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        gpu_step.main()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_implementations_at_toy_size_have_the_same_losses(tmp_path):
    """meshtrain, bare jax, and torch if it is installed."""
    names = ["meshtrain", "bare jax, scan", "bare jax, unrolled", "torch eager"]
    process = run(
        "compare/gpu_step.py",
        "--toy",
        "--rounds=1",
        "--steps=5",
        "--only",
        *names,
        f"--output={tmp_path}",
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    for model in gpu_models.TOY:
        (file,) = tmp_path.glob(f"{model}_*.json")
        saved = json.loads(file.read_text(), parse_constant=pytest.fail)  # fails on NaN
        assert saved["raw"]["failed"] == {}
        rows = {row["implementation"]: row for row in saved["rows"]}
        assert list(rows) == comparison.available(names)
        assert all(row["speed / meshtrain"] > 0 and row["tokens/s"] > 0 for row in rows.values())
        (group,) = saved["raw"]["groups"]
        for name, times in group.items():
            assert len(times["losses"]) == 5
            assert times["losses"] == pytest.approx(group["meshtrain"]["losses"], rel=2e-2), name
        assert len({facts["parameters"] for facts in saved["raw"]["facts"].values()}) == 1
        assert saved["raw"]["facts"]["meshtrain"]["bytes"] > 0
        assert 0 < saved["rules"]["causal"] < saved["rules"]["PaLM"]


# ---- on GPUs ----


def gpus(capability="9.0", gigabytes=70.0, count=1):
    return devices.Devices("gpu", "NVIDIA H100 80GB HBM3", count, capability, gigabytes * 1e9)


@pytest.mark.parametrize(
    ("capability", "dtype", "fused"),
    [("7.0", "float16", False), ("8.0", "bfloat16", True), ("10.0", "bfloat16", True)]
    + [("gfx942", "bfloat16", False), ("", "bfloat16", False)],
)
def test_the_dtype_is_one_that_the_gpu_multiplies(capability, dtype, fused):
    found = gpus(capability)
    assert (found.dtype, found.has_fused_attention) == (dtype, fused)
    names = gpu_step.implementations("gpt2-350m", None, dtype)
    assert ("bare jax, unrolled" in names) == (dtype == "bfloat16")


def test_the_batch_has_the_rows_that_fit_the_memory():
    def rows(model, gigabytes, capability="9.0", programs=2):
        return gpu_models.rows_that_fit(model, gpus(capability, gigabytes), programs=programs)

    most = {model: shape[7] for model, shape in gpu_models.SHAPES.items()}
    assert rows("gpt2-124m", 180) == most["gpt2-124m"]
    found = [rows("gpt2-124m", gigabytes) for gigabytes in (8, 12, 20, 70)]
    assert found == sorted({*found}) and found[0] >= 1
    assert rows("gpt2-124m", 10) < rows("gpt2-124m", 10, programs=1)
    assert rows("gpt2-124m", 14, "7.0") < rows("gpt2-124m", 14)  # the scores need memory
    assert rows("llama3-8b", 70, programs=1) == 0 and rows("llama3-8b", 130, programs=1) == 1
    unknown = devices.Devices("cpu", "cpu", 1, "", None)
    assert gpu_models.rows_that_fit("gpt2-350m", unknown) == most["gpt2-350m"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["rtx4090:1", "v100:1"])
def test_a_compiled_step_needs_at_most_the_estimated_memory(where, tmp_path):
    """The step that gpu_step.py would run on these GPUs.

    Without the compiler for GPUs the test is skipped.
    """
    try:
        device, _ = target.parse(where)
    except ConfigError as error:
        pytest.skip(str(error))
    found = gpus(device.chip.capability, 0.93 * device.memory / 1e9)
    rows = gpu_models.rows_that_fit("gpt2-124m", found, programs=2)
    config = gpu_models.settings("gpt2-124m", rows=rows, dtype=found.dtype)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    flags = [f"--config={tmp_path}/config.json", f"--target={where}", f"--output={tmp_path}/found"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    command = [sys.executable, "-m", "meshtrain", "audit", *flags, f"--keep_hlo={tmp_path}/hlo"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = json.loads((tmp_path / "found").read_text())["memory"]["peak"]
    expected = devices.bytes_of_step(config, rows=rows, fused=found.has_fused_attention)
    assert 0.7 * expected < peak < expected < found.memory
    assert ("__cudnn$fmha" in (tmp_path / "hlo").read_text()) == found.has_fused_attention


def test_a_step_that_runs_out_of_memory_is_tried_with_half_the_rows(monkeypatch):
    tried = []

    def run(cases, **options):
        tried.append(cases[0].config["train"]["global_batch"])
        failed = {"meshtrain": "RESOURCE_EXHAUSTED: 3 GB"} if tried[-1] > limit else {}
        return comparison.Results({}, [], failed)

    monkeypatch.setattr(comparison, "run", run)
    args, limit = SimpleNamespace(only=None, rounds=1, steps=1), 16
    _, config = gpu_step.run_comparison(args, "gpt2-124m", gpus(gigabytes=180))
    assert tried == [64, 32, 16] and config.train.global_batch == 16
    limit = 0
    with pytest.raises(gpu_step.DoesNotFit, match="no row fits in 180 GB"):
        gpu_step.run_comparison(args, "gpt2-124m", gpus(gigabytes=180))
    assert tried[-1] == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 8])
def test_the_layouts_fit_every_number_of_gpus(count):
    layouts = ("data", "fsdp", "1f1b", "1f1b-inputs", "interleaved")
    size = dict(rows=4, dtype="bfloat16")
    cases = list(scaling.cases_on(count, "gpt2-350m", layouts, **size))
    assert [case[:2] for case in cases].count(("data", 1)) == 1
    for layout, num, config in cases:
        cfg = parse(config, num_devices=num)  # raises ConfigError for what cannot be split
        assert cfg.train.global_batch == 4 * num
        is_pipeline = layout not in ("data", "fsdp") and num > 1
        assert cfg.mesh.pipeline == (num if is_pipeline else 1)
    assert {num for _, num, _ in cases} == {1, 2, 4, 8, count} - {n for n in (2, 4, 8) if n > count}
    pipelines = {num for layout, num, _ in cases if layout == "1f1b"}
    several = scaling.counts_up_to(count)[1:]
    assert pipelines == {num for num in several if 24 % num == 0}
    sharded = {num for layout, num, _ in cases if layout == "fsdp"}
    assert sharded == {num for num in several if 1024 % num == 0}


# ---- the queue ----


def entry(code, name="one", **fields):
    return run_queue.Entry(name, ["-c", code], **fields)


@pytest.mark.multiprocess
def test_a_failed_entry_is_a_row_and_an_entry_has_a_time_limit(tmp_path):
    def row(name, code, minutes=1.0, **fields):
        saved = run_queue.run_entry(entry(code, **fields), tmp_path / name, minutes=minutes)
        (row,) = saved["rows"]
        assert list(row) == [*run_queue.COLUMNS]
        return row["result"], row["note"], saved

    assert row("a", "print(1)")[:2] == ("passed", "1")
    why = "import sys; print('why'); sys.exit(3)"
    result, note, saved = row("b", why)
    assert (result, note, saved["log"]) == ("FAILED", "exit code 3: why", "why\n")
    assert run_queue.has_failed(saved)
    # The limit also ends the children of the entry.
    sleep = "import subprocess; print('started', flush=True); subprocess.run(['sleep', '99'])"
    result, note, saved = row("c", sleep, 0.02, output="none.json")
    assert (result, note) == ("FAILED", "not done after 0.02 minutes: started")
    assert saved["seconds"] < 60
    assert row("d", "print(1)", output="none.json")[1] == "it wrote no record"
    # A record has rows in spite of a fault.
    rows = "import sys; open(sys.argv[1].partition('=')[2], 'w').write('{}'); exit('one differs')"
    fields = {"output": "a.json", "read": lambda text: iter([{"case": "x"}])}
    saved = run_queue.run_entry(entry(rows, **fields), tmp_path / "f", minutes=1)
    assert [row["result"] for row in saved["rows"]] == ["passed", "FAILED"]
    assert saved["record"] == {} and saved["rows"][1]["note"] == "exit code 1: one differs"
    empty = "import sys; open(sys.argv[1].partition('=')[2], 'w').write('{}')"
    _, note, _ = row("g", empty, output="a.json", read=lambda text: iter([]))
    assert note == "its record has no rows"
    tests = "import sys; open(sys.argv[1].partition('=')[2], 'w').write({!r})"
    counts = '<s><testsuite tests="{}" failures="0" errors="0" skipped="2"/></s>'
    for number, expected in (
        (2, ("FAILED", "its output cannot be read: no test passed")),
        (5, ("passed", "3 passed, 2 skipped")),
    ):
        code = tests.format(counts.format(number))
        junit = {"output": "junit.xml", "read": run_queue.rows_of_tests}
        assert row(f"e{number}", code, **junit)[:2] == expected


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Returns a function that runs entries as the queue of a host with two H100."""
    monkeypatch.setattr(devices, "find", lambda: gpus(count=2))

    def run(*entries, flags=()):
        monkeypatch.setattr(run_queue, "entries_of", lambda *_, **__: [*entries])
        monkeypatch.setattr(sys, "argv", ["run_queue.py", f"--output={tmp_path}", *flags])
        return run_queue.main()

    return run


def started(capsys):
    """Returns the names of the entries that the last call started."""
    return re.findall(r"^(\S+) \.\.\.$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.multiprocess
def test_each_entry_has_a_record_that_names_the_card_and_the_others_continue(
    queue, tmp_path, capsys
):
    good, bad, other = entry("print(7)"), entry("exit('no')", "bad"), entry("", "other")
    assert queue(good, bad, other) == 1
    assert started(capsys) == ["one", "bad", "other"]
    program = run_queue.hash_of_program()
    for name in ("one", "bad", "other"):
        (file,) = tmp_path.glob(f"{name}-{program[:8]}_nvidia-h100-80gb-hbm3-x2_*.json")
        saved = json.loads(file.read_text())
        assert saved["rows"][-1]["result"] == ("FAILED" if name == "bad" else "passed")
        assert saved["entry"] == name and saved["program"] == program
        assert saved["devices"] == [gpus().kind] * 2
    (text,) = tmp_path.glob("gpu-check_nvidia-h100-80gb-hbm3-x2_*.txt")
    assert "exit code 1: no" in text.read_text() and "7" in text.read_text()


@pytest.mark.multiprocess
def test_a_later_call_runs_what_has_no_record_and_then_what_failed(
    queue, tmp_path, monkeypatch, capsys
):
    good, bad, new = entry("print(7)"), entry("exit('no')", "bad"), entry("print(8)", "new")
    queue(bad, good)
    capsys.readouterr()
    assert queue(bad, good, new) == 1
    output = capsys.readouterr().out
    assert re.findall(r"^(\S+) \.\.\.$", output, re.MULTILINE) == ["new", "bad"]
    assert re.search(r"^one .* 7$", output, re.MULTILINE), "the table has earlier records too"
    assert queue(bad, good, new, flags=["--list"]) == 0
    states = dict(re.findall(r"^(\w+) +(done|FAILED|left) ", capsys.readouterr().out, re.M))
    assert states == {"bad": "FAILED", "one": "done", "new": "done"}
    # Another command, another card, another program.
    assert queue(good._replace(command=["-c", "print(9)"])) == 0 and started(capsys) == ["one"]
    monkeypatch.setattr(devices, "find", lambda: gpus(count=1))
    assert queue(new) == 0 and started(capsys) == ["new"]
    assert queue(new) == 0 and started(capsys) == []
    monkeypatch.setattr(run_queue, "hash_of_program", lambda: "0123456789ab")
    assert queue(new) == 0 and started(capsys) == ["new"]
    (file,) = tmp_path.glob("new-01234567_*.json")
    file.write_text(file.read_text()[:99])  # as of a process that was killed
    assert queue(new) == 0 and started(capsys) == ["new"]


@pytest.mark.multiprocess
def test_an_entry_starts_only_if_its_limit_fits_into_the_minutes(queue, capsys):
    long, short = entry("", "long", minutes=4), entry("", "short", minutes=1)
    assert queue(long, short, flags=["--minutes=2"]) == 0
    output = capsys.readouterr().out
    assert "short ..." in output and "long ..." not in output
    assert "left for another call: long\n" in output
    assert queue(long, short, flags=["--minutes=2", "--limit=1.5"]) == 0
    assert started(capsys) == ["long"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_ends_what_runs(queue, tmp_path, capsys, number):
    # A shell's background jobs ignore SIGINT. Only the queue's own handler acts on SIGTERM.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: None}
    before = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    pid = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); "
    sleeping = entry(code + "time.sleep(20)", "sleeping")

    def press():
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread, began = threading.Thread(target=press), time.monotonic()
    thread.start()
    try:
        assert queue(entry("print(7)"), sleeping, entry("", "later")) == 130
    finally:
        thread.join()
        for one, handler in before.items():
            signal.signal(one, handler)
    assert time.monotonic() - began < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert [file.name.partition("-")[0] for file in tmp_path.glob("*.json")] == ["one"]
    assert "left for another call: sleeping, later\n" in capsys.readouterr().out


def test_an_entry_that_this_host_cannot_run_is_skipped_with_the_reason(queue, capsys):
    def reasons(found):
        return {
            one.name: one.why_not for one in run_queue.entries_of(found, toy=False) if one.why_not
        }

    small = reasons(gpus(gigabytes=79))
    assert small["llama-1-row"] == "needs 110 GB, and jax may allocate 79 GB"
    assert small["llama-8-rows"] == small["llama-1-row"]
    assert small["scaling"] == small["bandwidth"] == "needs several GPUs"
    large = reasons(gpus(gigabytes=139, count=8))
    assert not any(name in large for name in ("llama-1-row", "scaling", "attention-statistics"))
    assert "no fused attention" in reasons(gpus("7.0"))["attention-statistics"]
    skipped = entry("exit(1)", why_not="needs 110 GB, and jax may allocate 79 GB")
    assert queue(skipped) == 0
    output = capsys.readouterr().out
    assert re.search(r"^one .* skipped .* needs 110 GB", output, re.MULTILINE)
    assert "one ..." not in output and "left for" not in output
    assert queue(skipped, flags=["--list"]) == 0
    assert "skipped: needs 110 GB" in capsys.readouterr().out


def test_the_queue_selects_entries_by_name_and_needs_a_gpu(queue, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        queue(entry(""), flags=["--only", "two"])
    assert "--only two: no entry begins so; there are one" in capsys.readouterr().err
    monkeypatch.setattr(devices, "find", lambda: devices.Devices("cpu", "cpu", 1, "", None))
    assert queue(entry("")) == 2


SCRIPTS_OF_ENTRIES = {
    "benchmarks/compare/gpu_settings.py": gpu_settings,
    "benchmarks/compare/gpu_step.py": gpu_step,
    "benchmarks/compare/loss_curves.py": loss_curves,
    "benchmarks/gpu/presets.py": presets,
}


class Reached(Exception):
    """A script has read its flags."""


def test_the_scripts_of_the_queue_know_its_flags(monkeypatch):
    """At full size, at which this host cannot run them."""

    def reach():
        raise Reached

    entries = run_queue.entries_of(gpus(gigabytes=139, count=8), toy=False)
    assert len({one.name for one in entries}) == len(entries)
    assert all(one.minutes <= 4 for one in entries)
    monkeypatch.setattr(devices, "find", reach)
    monkeypatch.setattr(presets.subprocess, "run", lambda command: reach())
    # This version may know none of the settings.
    monkeypatch.setattr(loss_curves, "known_settings", lambda args: (args.settings, {}))
    for one in entries:
        script, *flags = one.command
        if script in SCRIPTS_OF_ENTRIES:
            monkeypatch.setattr(sys, "argv", [script, *flags])
            with pytest.raises(Reached):
                SCRIPTS_OF_ENTRIES[script].main()
        for texts in [flags[flags.index("--settings") + 1 :]] if "--settings" in flags else []:
            known, skipped = settings.apply_each(gpu_models.settings("gpt2-124m"), texts)
            assert known or one.name == "loss-curves", skipped
    keys = [flag for flag in run_queue.profiled(toy=False) if flag.startswith("--config.")]
    parse(load_config("gpt2", keys), num_devices=1)


# ---- settings that alternate, loss curves, statistics of attention ----


def test_settings_that_this_version_does_not_know_are_skipped_with_the_reason():
    config = gpu_models.settings("gpt2-toy")
    texts = ["train.remat=full train.unroll=2", "train.kernel=plain", "train.xla_preset=cublass"]
    known, skipped = settings.apply_each(config, texts)
    (found,) = known.values()
    assert (found.train.remat, found.train.unroll) == ("full", 2)
    assert config.train.remat == "none"  # is not changed
    assert "--config.train.kernel: unknown key" in skipped["train.kernel=plain"]
    assert "use one of auto, none" in skipped["train.xla_preset=cublass"]


def test_settings_are_compared_all_together_if_they_fit():
    texts = [f"train.kernels=plain {key}" for key in ("train.remat=none", "train.remat=full")]
    texts.append("train.kernels=plain train.unroll=1")

    def fit(gigabytes, texts=texts):
        configs, _, together = gpu_settings.configs_that_fit(
            "gpt2-124m", texts, gpus(gigabytes=gigabytes)
        )
        (rows,) = {config.train.global_batch for config in configs.values()}
        return rows, together

    assert fit(139) == (64, True)
    assert fit(44) == (64, False)  # two fit
    rows, together = fit(20)
    assert 1 < rows < 64
    # GPT-2's fused formulas keep the result of GELU: 6.4 GB.
    assert fit(44, [*texts, "train.kernels=fused train.remat=none"]) == (32, False)
    # As they are asked for.
    assert fit(20, ["train.global_batch=64 train.remat=none"])[0] == 64


@pytest.mark.multiprocess
def test_a_limit_of_time_starts_no_other_case_and_no_second_round(starts):
    cases = comparison.with_config({}, ["meshtrain", "slow"])
    results = comparison.run(cases, **COUNTS, pairs=False, warm=False, seconds=0)
    assert results.failed == {"slow": "not started: no time was left"}
    assert starts() == ["initial", "meshtrain"]
    (row,) = comparison.table(results, column="settings", ratio="speed / first")
    assert row["settings"] == "meshtrain" and row["warm s"] is None and row["speed / first"] == 1
    assert len(results.groups[0]["meshtrain"]["seconds"]) == 1
    results = comparison.run(cases, **COUNTS, pairs=False, warm=False, seconds=60)
    assert [len(times["seconds"]) for times in results.groups[0].values()] == [2, 2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_settings_at_toy_size(tmp_path):
    texts = ["train.remat=none", "train.kernels=none of these", "train.remat=full"]
    flags = ["--model=gpt2-toy", "--rounds=1", "--steps=5", f"--output={tmp_path}"]
    process = run("compare/gpu_settings.py", *flags, "--settings", *texts)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    (file,) = tmp_path.glob("settings-gpt2-toy_*.json")
    saved = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [row["settings"] for row in saved["rows"]] == [texts[0], texts[2]]
    assert [*saved["skipped"]] == [texts[1]] and saved["raw"]["failed"] == {}
    first, second = (times["losses"] for times in saved["raw"]["groups"][0].values())
    assert len(first) == 5 and first == pytest.approx(second, rel=2e-2)
    rows = [*run_queue.rows_of_settings(file.read_text())]
    assert [row.get("result") for row in rows] == [None, None, "skipped"]
    assert "4 rows, first step after" in rows[0]["note"]


def test_a_faster_set_of_options_is_a_line_of_the_table_and_noise_is_not():
    def line(kind, **milliseconds):
        rows = [
            {"settings": presets.KEY + name.replace("_and_", ","), "ms per step": time}
            for name, time in milliseconds.items()
        ]
        about = {"devices": [kind], "model": "gpt2-124m", "versions": {"jax": "0.11.2"}}
        return presets.line_of(about | {"date": "2026-11-29T01:02:03", "rows": rows})

    found = line("NVIDIA H200", none=120.0, cublas=110.0, cublas_and_triton=109.5)
    assert found.startswith(
        'presets = ["cublas"]  # NVIDIA H200, gpt2-124m, jax 0.11.2, 2026-11-29'
    )
    assert "cublas 110 ms" in found
    found = line("NVIDIA H200", none=120.0, cublas=110.0, cublas_and_cuda_graphs=100.0)
    assert tomllib.loads(found) == {"presets": ["cublas", "cuda_graphs"]}
    assert line("a card of a later year", none=100.0, cublas=110.0).startswith("presets = []")
    assert {*presets.CANDIDATES} >= {"none", ",".join(hardware.DEFAULT_PRESETS)}


def test_loss_curves_that_lead_elsewhere_are_a_fault():
    first = {step: 5 - step / 100 for step in range(0, 100, 5)}
    shifted = {step: loss * (1.02 if step >= 80 else 1) for step, loss in first.items()}
    outlier = first | {50: 5.0}
    broken = first | {95: math.nan}
    rows = [
        loss_curves.row_of(name, losses, first, 1.0)
        for name, losses in (
            ("first", first),
            ("shifted", shifted),
            ("outlier", outlier),
            ("broken", broken),
        )
    ]
    assert rows[1]["difference %"] == pytest.approx(2)
    assert rows[2]["largest difference %"] == pytest.approx(100 * (5 / 4.5 - 1))
    assert [fault.partition(":")[0] for fault in loss_curves.faults_of(rows)] == [
        "shifted",
        "outlier",
        "broken",
        "broken",
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_loss_curves_at_toy_size(tmp_path):
    texts = ["train.remat=none", "train.remat=full"]
    flags = ["--toy", "--steps=20", f"--output={tmp_path}", "--settings", *texts]
    process = run("compare/loss_curves.py", *flags)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    (file,) = tmp_path.glob("loss-curves_*.json")
    saved = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [*saved["losses"]] == texts
    for curve in saved["losses"].values():
        losses = [*curve.values()]
        assert len(losses) >= 4 and losses[-1] < losses[0]
    assert len([*run_queue.rows_of_curves(file.read_text())]) == 2


def test_merged_chunks_equal_one_call_and_another_statistic_is_found():
    shape, formula = attention_statistics.TOY[0], attention_statistics.FORMULA
    rows, faults = attention_statistics.measure(shape, formula, "float32")
    assert faults == []
    assert {row["compared"] for row in rows} >= {"output", "statistic", "gradient of q"}

    def forward(*args):
        out, statistic = formula.forward(*args)
        return out, statistic / math.log(2)

    def backward(q, k, v, results, *others):
        return formula.backward(q, k, v, (results[0], results[1] * math.log(2)), *others)

    in_base_2 = attention_statistics.Kernel(forward, backward)
    _, faults = attention_statistics.measure(shape, in_base_2, "float32")
    assert "the statistic is closest to the same in base 2" in faults[0]
    assert any("gradient of k: the error of two chunks" in fault for fault in faults)
    # Its own backward pass does not fit.
    wrong = formula._replace(forward=forward)
    _, faults = attention_statistics.measure(shape, wrong, "float32")
    assert any("gradient of k: the error of one call" in fault for fault in faults)


def test_cudnn_lowers_for_chunks_of_keys(simulated_gpu):
    shape = attention_statistics.SHAPES[1]
    B, S, H, G, K = shape
    inputs = [jax.ShapeDtypeStruct((B, S, heads, K), "bfloat16") for heads in (H, G, G, H)]
    kernel = attention_statistics.cudnn_kernel()
    traced = jax.jit(functools.partial(attention_statistics.two_chunks, kernel)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The first half of the queries has one chunk of keys, the second half two.
    assert len(re.findall(r"@__cudnn\$fmhaSoftmax\(", text)) == 3
    assert len(re.findall(r"@__cudnn\$fmhaSoftmaxBackward\(", text)) == 3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_measurements_on_gpus_at_toy_size(tmp_path):
    running = [
        run("parallel/scaling.py", "--toy", "--rounds=1", "--steps=1", f"--output={tmp_path}"),
        run("parallel/bandwidth.py", "--toy", f"--output={tmp_path}"),
        run("gpu/lookup.py", "--toy", f"--output={tmp_path}"),
    ]
    for process in running:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    found = json.loads(next(tmp_path.glob("scaling-gpt2-toy_*.json")).read_text())
    cases = [(row["layout"], row["devices"]) for row in found["figures"]]
    assert cases == [("data", 1), ("data", 2), ("fsdp", 2), ("1f1b", 2)]
    assert [round(row["ideal %"]) for row in found["figures"]] == [100, 100, 100, 89]
    assert all(math.isfinite(loss) for case in found["cases"] for loss in case["losses"])
    found = json.loads(next(tmp_path.glob("bandwidth-2-devices_*.json")).read_text())
    assert {row["collective"] for row in found["table"]} == {*bandwidth.COLLECTIVES}
    rows = json.loads(next(tmp_path.glob("lookup_*.json")).read_text())["rows"]
    errors = [row["error %"] for row in rows if row["tokens"] == "Zipf"]
    assert errors[1] < 0.3 < 1 < errors[0]


def test_a_soak_injects_nothing_after_its_end_and_records_its_steps(tmp_path, monkeypatch):
    """On a machine under load, a sleep can take until after the end."""
    clock, injected = [0.0], []

    def sleep(seconds):
        clock[0] += seconds + 40.0

    monkeypatch.setattr(injection, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    process = SimpleNamespace(poll=lambda: None, wait=lambda *_: 0, terminate=lambda: None)
    monkeypatch.setattr(injection, "start", lambda *_: process)
    monkeypatch.setattr(injection, "wait_for", lambda *_: None)
    monkeypatch.setattr(injection, "inject", lambda *_: injected.append(clock[0]))
    monkeypatch.setattr(injection, "newest_step", lambda workdir: 99)
    monkeypatch.setattr(injection, "final_state", lambda workdir: 1)
    monkeypatch.setattr(injection, "read_jsonl", lambda *_: [{"event": "goodput"}])
    (tmp_path / "interrupted.log").write_text("launch: goodput")
    results = injection.soak(SimpleNamespace(seed=0, minutes=2, every=60, s3=False), tmp_path)
    assert clock[0] > 120 and injected and max(injected) < 120
    assert results["steps"] == 100 and len(results["faults"]) == len(injected)
