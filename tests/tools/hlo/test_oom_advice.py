"""What a run says when memory runs out: the ways out, in order.

Its figures are near those of the changed config.
"""

import dataclasses
import re

import jax
import pytest

from meshtrain import train
from meshtrain.checkpoint import find
from meshtrain.cli import app
from meshtrain.cluster import limits
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.errors import OutOfMemory
from meshtrain.monitor import memory as memory_in_use
from meshtrain.program import Program, assemble
from meshtrain.tools.audit import audit
from meshtrain.tools.hlo import memory
from meshtrain.tools.hlo.oom_advice import MemoryAdvice
from tests.lib.configs import tiny_config

NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes."


def wide_config(**keys):
    """A config whose activations are most of its memory; `keys` such as train__remat="full"."""
    c = tiny_config()
    c.update(mesh=dict(data=1), data=dict(seq_len=64), train=dict(global_batch=32, unroll=1))
    for key, value in keys.items():
        section, name = key.split("__")
        c[section][name] = value
    return c


def advice_for(c, num_devices=1):
    cfg = parse(c, num_devices=num_devices)
    parts = build(cfg)
    program = assemble(cfg, parts, devices=jax.devices()[:num_devices])
    return MemoryAdvice(cfg, parts, program, audit._batch_like(cfg, program, parts.train_data))


def measured(c, num_devices=1):
    advice = advice_for(c, num_devices)
    with advice.program.active():
        compiled = advice.program.compile(advice.batch)
    return memory.memory_of(advice.program, compiled)


def by_flags(advice):
    return {way.flags.replace("--config.", ""): way.saves for way in advice.ways()}


@pytest.mark.slow
def test_micro_batches_and_remat_save_about_what_is_said():
    now = measured(wide_config())
    assert now.activations > 0.6 * now.peak
    advice = advice_for(wide_config())
    advice.memory = dataclasses.replace(now, capacity=0.4 * now.peak)
    ways = by_flags(advice)
    # Half would not be enough.
    assert "train.num_microbatches=4" in ways and "train.num_microbatches=2" not in ways
    for key, value in {"train.num_microbatches": 4, "train.remat": "full"}.items():
        then = measured(wide_config(**{key.replace(".", "__"): value}))
        assert ways[f"{key}={value}"] == pytest.approx(now.peak - then.peak, rel=0.35)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"train.zero_stage": 3}, marks=pytest.mark.slow),
        {"optim.moment_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_bytes_of_the_state_are_exact(change):
    keys = dict(mesh__fsdp=8, train__zero_stage=1)

    def state(**more):
        advice = advice_for(wide_config(**keys | more), 8)
        return memory.states.bytes_per_device(advice.program.abstract_state)

    advice = advice_for(wide_config(**keys), 8)
    ((key, value),) = change.items()
    way = advice._state_remedy(change, "")
    # Gradients are replicated at stage 1, and sharded over eight devices at stage 3.
    gradients = 4 * memory.states.count(advice.program.abstract_state.params)
    expected = state() - state(**{key.replace(".", "__"): value})
    if key == "train.zero_stage":  # of two layers one is gathered at a time
        layers = advice.program.abstract_state.params["layers"]
        expected += gradients * 7 / 8 - 4 * memory.states.count(layers) / 2
    assert way.saves == pytest.approx(expected, rel=0.01) and way.saves > 0


@pytest.mark.slow
def test_only_ways_that_apply_are_offered():
    ways = by_flags(advice_for(wide_config(train__remat="full", optim__moment_dtype="bfloat16")))
    assert {*ways} == {"train.num_microbatches=2", "mesh.fsdp=2"}
    ways = by_flags(advice_for(wide_config(train__num_microbatches=32, train__remat="full")))
    assert {*ways} == {"optim.moment_dtype=bfloat16"}  # one row cannot be split
    keys = dict(mesh__data=2, mesh__fsdp=4, train__zero_stage=0)
    ways = by_flags(advice_for(wide_config(**keys), 8))
    assert "train.zero_stage=3" in ways and not any(way.startswith("mesh") for way in ways)
    ways = by_flags(advice_for(wide_config(mesh__data=8), 8))
    assert {"mesh.data=1 mesh.fsdp=8", "mesh.fsdp=2"} <= {*ways}
    ways = by_flags(advice_for(wide_config(mesh__data=8, mesh__slices=2), 8))
    assert "mesh.data=2 mesh.fsdp=4" in ways  # within slices


@pytest.mark.slow
def test_a_smaller_chunk_of_the_loss_saves_logits():
    c = wide_config(model__vocab_size=65536, data__vocab_size=65536)
    logits = 4 * 32 * 64 * 65536 / 2**20
    (flags,) = (way for way in by_flags(advice_for(c)) if "loss_chunk" in way)
    assert flags == f"model.loss_chunk_mib={logits / 4:.0f}"
    c.train.dtype = "float16"
    assert not any("loss_chunk" in way for way in by_flags(advice_for(c)))


def test_a_pipeline_keeps_the_inputs_of_its_chunks():
    keys = dict(mesh__pipeline=2, mesh__data=1, train__num_microbatches=4)
    residuals = advice_for(wide_config(**keys, pipeline__keep="residuals"), 2)
    inputs = advice_for(wide_config(**keys), 2)
    saves = by_flags(residuals)["pipeline.keep=inputs"]
    assert saves == residuals._activation_bytes(residuals.cfg) - inputs._activation_bytes(
        inputs.cfg
    )


def check_lines(lines):
    """Lines end with the ways out, the one that saves most first."""
    start = next(n for n, line in enumerate(lines) if line.strip().startswith("ways out"))
    saves = [re.search(r"--config\.\S+=\S+ +saves about (\S+) GB ", line) for line in lines[start:]]
    saves = [float(found[1]) for found in saves if found]
    assert saves and saves == sorted(saves, reverse=True)


@pytest.mark.slow
def test_a_compiler_without_memory_ends_the_run_with_the_ways_out(tiny, monkeypatch, capsys):
    def compile(*_):
        raise jax.errors.JaxRuntimeError(NO_MEMORY)

    monkeypatch.setattr(Program, "compile", compile)
    assert app.report_errors(lambda: train.train(tiny) and 0, "train") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "out of memory: 4.770 GB could not be allocated"
    assert lines[1].startswith("each device needs ") and "about" in lines[1]
    check_lines(lines)


@pytest.mark.slow
def test_a_first_step_without_memory_keeps_the_checkpoint(tiny, monkeypatch, tmp_path):
    tiny.train.steps = 1
    train.train(tiny, workdir=tmp_path)
    before = sorted((tmp_path / find.FOLDER).rglob("*"))
    compile = Program.compile

    class Compiled:
        def __init__(self, *args):
            self.memory_analysis, self.as_text = (
                getattr(compile(*args), name) for name in ("memory_analysis", "as_text")
            )

        def __call__(self, *_):
            raise jax.errors.JaxRuntimeError(NO_MEMORY)

    monkeypatch.setattr(Program, "compile", lambda *args: Compiled(*args))
    tiny.train.steps = 2
    with pytest.raises(OutOfMemory, match="the step needs .* GB on each device") as raised:
        train.train(tiny, workdir=tmp_path)
    check_lines(str(raised.value).splitlines())
    assert sorted((tmp_path / find.FOLDER).rglob("*")) == before
    monkeypatch.setattr(Program, "compile", compile)
    assert train.train(tiny, workdir=tmp_path).step == 2


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_audited_with_the_ways_out(tiny, monkeypatch, capsys):
    monkeypatch.setattr(limits, "available_memory", lambda: 8000.0)
    flags = ["--config=configs/default.py", "--config.model.d_model=32", "--config.model.d_ff=64"]
    flags += ["--config.model.num_layers=2", "--config.data.seq_len=16"]
    assert app.main("audit", flags) == 0
    lines = capsys.readouterr().out.splitlines()
    (verdict,) = (line for line in lines if "does NOT fit" in line)
    assert max(map(len, lines)) <= 100
    check_lines(lines[lines.index(verdict) :])


@pytest.mark.slow
def test_a_run_that_may_not_fit_logs_the_ways_out_and_goes_on(tiny, monkeypatch, capsys, tmp_path):
    tiny.train.steps = 1
    monkeypatch.setattr(memory_in_use, "peak_bytes_in_use", lambda: 7)
    monkeypatch.setattr(memory, "_capacity", lambda *_: 8000.0)
    assert train.train(tiny, workdir=tmp_path).step == 1
    assert '"peak_memory": 7' in (tmp_path / "metrics.jsonl").read_text()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory ")]
    assert "GB too much" in lines[0]
    check_lines([line.removeprefix("memory") for line in lines])
