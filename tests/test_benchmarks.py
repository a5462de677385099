"""Records of benchmarks, and scripts that count bytes, at toy size.

Measured times are not tested.
"""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from benchmarks import lora
from benchmarks.compare import gpu_step
from benchmarks.faults import injection
from benchmarks.gpu import check
from benchmarks.lib import comparison, devices, gpu_models, record
from benchmarks.parallel import bandwidth, collectives, memory, scaling
from benchmarks.plan import roofline
from meshtrain import state
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
    for name, process in running.items():
        output, _ = process.communicate()
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


def part(code, minutes=1.0, output="", read=None):
    return check.Part("part", minutes, ["-c", code], output, read)


@pytest.mark.multiprocess
def test_a_failed_part_is_a_row_and_a_part_has_a_time_limit(tmp_path):
    def row(name, *arguments):
        (row,), saved = check.run_part(part(*arguments), tmp_path / name)
        assert list(row) == [*check.COLUMNS]
        return row["result"], row["note"], saved

    assert row("a", "print(1)")[0] == "passed"
    result, note, saved = row("b", "import sys; print('why'); sys.exit(3)")
    assert (result, note, saved["log"]) == ("FAILED", "exit code 3: why", "why\n")
    # The limit also ends the children of the part.
    sleep = "import subprocess; subprocess.run(['sleep', '99'])"
    result, note, saved = row("c", sleep, 0.02)
    assert (result, note) == ("FAILED", "not done after 0.02 minutes") and saved["seconds"] < 60
    tests = "import sys; open(sys.argv[1].partition('=')[2], 'w').write({!r})"
    counts = '<s><testsuite tests="{}" failures="0" errors="0" skipped="2"/></s>'
    for number, expected in (
        (2, ("FAILED", "no test passed")),
        (5, ("passed", "3 passed, 2 skipped")),
    ):
        code = tests.format(counts.format(number))
        found = row(f"d{number}", code, 1.0, "junit.xml", check.rows_of_tests)
        assert found[:2] == expected


@pytest.mark.multiprocess
def test_the_exit_code_says_if_a_part_failed_and_the_table_is_saved(tmp_path, monkeypatch, capsys):
    codes = iter(["", "raise SystemExit('no')"])
    monkeypatch.setattr(check, "parts_of", lambda *_, **__: [part(code) for code in codes])
    monkeypatch.setattr(devices, "find", lambda: gpus(count=2))
    monkeypatch.setattr(sys, "argv", ["check.py", f"--output={tmp_path}"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert check.main() == 1
    (text,) = tmp_path.glob("*.txt")
    assert (
        text.name.startswith("gpu-check_nvidia-h100-80gb-hbm3-x2_")
        and text.read_text() in capsys.readouterr().out
    )
    saved = json.loads(text.with_suffix(".json").read_text())
    assert [row["result"] for row in saved["rows"]] == ["passed", "FAILED"]
    codes = iter([""])
    assert check.main() == 0
    monkeypatch.setattr(devices, "find", lambda: devices.Devices("cpu", "cpu", 1, "", None))
    assert check.main() == 2


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
