"""The benchmarks' record, and those scripts that count bytes, at toy size: none that takes times."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from benchmarks import collectives, contest, gpu_step, memory, record
from meshtrain.analysis.audit import minimum

FOLDER = Path(record.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "record.parser(" in path.read_text())
TOY = dict(layers=4, width=32, seq_len=32, rows=2)


def run(script, *flags):
    return subprocess.Popen(
        [sys.executable, FOLDER / f"{script}.py", *flags],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_record_says_what_its_figures_depend_on_and_names_its_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--rounds=2"])
    jax.devices()  # so that nobody parses these any more:
    monkeypatch.setenv("XLA_FLAGS", "--some=1")
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    parser = record.parser("What it is.\n\n  how to run it")
    parser.add_argument("--rounds", type=int)
    assert "\n  how to run it" in parser.format_help()
    found = record.about(parser.parse_args(["--rounds=2", f"--output={tmp_path}"]))
    assert found["command"] == "python benchmarks/x.py --rounds=2"
    assert found["flags"] == {"rounds": "2", "output": str(tmp_path)}
    assert found["environment"]["XLA_FLAGS"] == "--some=1"
    assert found["environment"]["JAX_ENABLE_X64"] == "0"
    assert found["versions"].keys() == {*record.PACKAGES} and found["versions"]["jax"]
    assert found["devices"] == ["cpu"] * 8 and found["cores"] == len(os.sched_getaffinity(0))

    record.save(tmp_path, found, model="toy")
    (file,) = tmp_path.glob("*.json")
    assert file.name == f"toy_cpu-{found['cores']}-cores_{found['date'][:10]}.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))
    assert str(file) in capsys.readouterr().out
    record.save(tmp_path / "named.json", found, model="toy")
    assert (tmp_path / "named.json").read_text() == file.read_text()
    record.save(None, found, model="toy")
    several = {"devices": ["NVIDIA H100 80GB HBM3"] * 2, "date": "2026-01-02T03:04:05+00:00"}
    assert record.name_of("gpt2", several) == "gpt2_nvidia-h100-80gb-hbm3-x2_2026-01-02"


def test_where_there_is_no_git_the_environment_says_the_commit(tmp_path, monkeypatch):
    args = record.parser("").parse_args([])
    monkeypatch.setenv("GIT_COMMIT", "0123456789ab")
    monkeypatch.setattr(record, "FOLDER", tmp_path / "results")
    assert record.about(args, ["cpu"])["git"] == "0123456789ab"  # no checkout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.about(args, ["cpu"])["git"] == "0123456789ab"  # no git
    monkeypatch.delenv("GIT_COMMIT")
    assert record.about(args, ["cpu"])["git"] is None


def test_a_table_has_a_line_for_each_row(capsys):
    record.show(
        [{"what": "a", "s": 1.23456}, {"what": "longer", "s": 10}, {"what": "b", "s": None}]
    )
    assert capsys.readouterr().out.splitlines() == [
        "what        s",
        "a       1.235",
        "longer     10",
        "b           -",
    ]


def test_what_a_device_holds_is_what_the_arithmetic_says(monkeypatch):
    right = memory.cases
    few = ("stage 1, remat full", "stage 3, remat full")

    def cases(args):
        return [one for one in right(args) if one[1] in few]

    monkeypatch.setattr(memory, "cases", cases)
    args = SimpleNamespace(**TOY, sweeps=["zero"], microbatches=[])
    totals = []
    for row in memory.measure(args):
        least, found = row["arithmetic"], row["compiled"]
        assert found["argument"] == pytest.approx(least["state"], rel=0.01), row["case"]
        # The new state takes the place of the old one.
        assert found["total"] == pytest.approx(found["argument"] + found["temporary"], rel=0.01)
        assert found["total"] == pytest.approx(sum(least.values()), rel=0.2), row["case"]
        totals.append(found["total"])
    assert totals[0] > 1.2 * totals[1]


@pytest.mark.slow
def test_only_gpipe_needs_memory_for_each_micro_batch(monkeypatch):
    monkeypatch.setattr(memory, "PIPELINES", memory.PIPELINES[:2])
    args = SimpleNamespace(**TOY, sweeps=["schedule"], microbatches=[8, 16])
    gpipe, one_f_one_b = memory.slopes(memory.measure(args))
    x = args.rows * args.seq_len * args.width * 4 / 1e3
    assert gpipe == {"": "gpipe, inputs", **dict.fromkeys(list(gpipe)[1:], pytest.approx(x))}
    assert [*one_f_one_b.values()] == ["1f1b, inputs", 0, 0]


def test_bytes_are_told_by_axis_beside_the_least():
    args = SimpleNamespace(**TOY | dict(rows=8), microbatches=2)
    audited = {
        name: collectives.measure(args, collectives.LAYOUTS[name]) for name in ("data", "tensor")
    }
    (data,), (tensor,) = (collectives.rows_of(*item) for item in audited.items())
    assert data["over"] == "data" and data["ratio"] == pytest.approx(1, abs=0.01)
    assert data["most beyond it"] == ""
    # What XLA on CPU sums apart, and says so.
    assert tensor["over"] == "tensor" and tensor["ratio"] > 1.1
    assert tensor["most beyond it"] == minimum.APART
    assert collectives.reasons(audited.values())[0].startswith(minimum.APART)


def test_every_layout_is_of_eight_devices():
    for name, layout in collectives.LAYOUTS.items():
        sizes = [size for axis, size in layout.items() if axis != "zero_stage"]
        assert math.prod(sizes) == collectives.DEVICES, name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_script_says_how_to_run_it():
    running = {name: run(name, "--help") for name in SCRIPTS}
    for name, process in running.items():
        told, _ = process.communicate()
        assert process.returncode == 0 and f"python benchmarks/{name}.py" in told, name
        assert "--output" in told, name


@pytest.mark.slow
@pytest.mark.multiprocess
def test_scaling_at_toy_size(tmp_path):
    """The times say nothing here; that all workers have the same losses does, and is checked."""
    toy = ["--layers=2", "--width=32", "--seq-len=32", "--rows=8", "--rounds=1", "--steps=1"]
    process = run("scaling", *toy, "--layouts", "fsdp", "1f1b", f"--output={tmp_path}")
    told, _ = process.communicate()
    assert process.returncode == 0, told
    found = json.loads(next(tmp_path.glob("scaling-llama-2x32_*.json")).read_text())
    assert [row["ideal"] for row in found["figures"]] == [2, pytest.approx(2 * 8 / 9)]


# What contestant.py does, for nothing: it keeps a list of its starts, and some end early.
FAKE = """
import json, pathlib, sys
name = sys.argv[1]
with (pathlib.Path(__file__).parent / "starts").open("a") as file:
    print(name, file=file)
if name == "broken":
    print(json.dumps({"error": "out of memory"}), flush=True)
    sys.exit(1)
print("no JSON", json.dumps({"compile_seconds": None}), sep="\\n", flush=True)
for turn, line in enumerate(sys.stdin):
    if name == "late" and turn == 1:
        sys.exit(3)
    loss = 2.0 if name == "other" else 1.0
    reply = {"seconds": 2.0 if name == "slow" else 1.0, "losses": [loss] * int(line), "bytes": None}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Contestants are fake; returns a function that lists their starts."""
    monkeypatch.setattr(contest, "SCRIPT", tmp_path / "fake.py")
    contest.SCRIPT.write_text(FAKE)
    return lambda: (tmp_path / "starts").read_text().split()


TURNS = dict(rounds=2, steps=3)


@pytest.mark.multiprocess
def test_those_that_fail_are_told_and_the_others_go_on(starts, capsys):
    names = ["meshtrain", "broken", "slow", "late"]
    found = contest.hold({}, names, **TURNS, pairs=False)
    assert found.failed == {"broken": "out of memory", "late": "exit code 3"}
    assert "broken failed: out of memory" in capsys.readouterr().err
    assert starts() == ["initial", *["meshtrain"] * 2, "broken", *["slow"] * 2, *["late"] * 2]
    rows = contest.table(found)
    assert [(row["step of"], row["ms"], row["meshtrain / it"]) for row in rows] == [
        ("meshtrain", 1000, 1),
        ("slow", 2000, 0.5),
    ]
    assert contest.faults(found, rtol=1e-3) == []


@pytest.mark.multiprocess
def test_in_pairs_each_peer_meets_the_first_and_starts_cold_once(starts):
    found = contest.hold({}, ["meshtrain", "slow", "other"], **TURNS, pairs=True)
    assert [list(heat) for heat in found.heats] == [["meshtrain", "slow"], ["meshtrain", "other"]]
    assert [starts().count(name) for name in ("initial", "meshtrain", "slow")] == [1, 3, 2]
    (fault,) = contest.faults(found, rtol=1e-3)
    assert fault.startswith("other has the losses [2.0,")


@pytest.mark.multiprocess
def test_a_contest_ends_where_the_first_fails(starts):
    found = contest.hold({}, ["late", "slow", "other"], **TURNS, pairs=True)
    assert starts().count("other") == 0 and contest.table(found) == []
    assert contest.faults(found, rtol=1e-3) == ["late failed: exit code 3"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "bare jax, scan"],
        ["--only", "meshtrain", "tensorflow"],
        ["--output=one.json", "--models", "gpt2-124m", "gpt2-350m"],
    ],
)
def test_what_cannot_be_compared_or_kept_is_refused(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        gpu_step.main()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_contestants_at_toy_size_compute_the_same(tmp_path):
    """The bare jax step too; torch where it is installed."""
    names = ["meshtrain", "bare jax, scan", "bare jax, unrolled", "torch eager"]
    process = run(
        "gpu_step", "--toy", "--rounds=1", "--steps=5", "--only", *names, f"--output={tmp_path}"
    )
    told, _ = process.communicate()
    assert process.returncode == 0, told
    for model in gpu_step.TOY:
        (file,) = tmp_path.glob(f"{model}_*.json")
        found = json.loads(file.read_text(), parse_constant=pytest.fail)  # of NaN
        assert found["raw"]["failed"] == {}
        rows = {row["step of"]: row for row in found["rows"]}
        assert list(rows) == contest.present(names)
        assert all(row["meshtrain / it"] > 0 and row["tokens/s"] > 0 for row in rows.values())
        (heat,) = found["raw"]["heats"]
        for name, score in heat.items():
            assert len(score["losses"]) == 5
            assert score["losses"] == pytest.approx(heat["meshtrain"]["losses"], rel=2e-2), name
        assert len({facts["parameters"] for facts in found["raw"]["facts"].values()}) == 1
        assert found["raw"]["facts"]["meshtrain"]["bytes"] > 0
        assert 0 < found["rules"]["causal"] < found["rules"]["PaLM"]
