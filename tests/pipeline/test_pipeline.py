"""Pipelines compute what one device computes, keep few activations, and send only messages."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import ConfigError
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.pipeline import executor, per_stage, stages
from meshtrain.pipeline.executor import phases
from meshtrain.program import assemble
from meshtrain.schedules import IDLE, SCHEDULES
from tests.lib.compare import assert_same
from tests.lib.configs import GPT2, packed, tiny_config
from tests.lib.runs import Run, one_device

# The pattern of attention kinds is not aligned with the chunks.
LAYERS = dict(num_layers=8, attention="llg", window=3)
# Mesh axes; schedule, chunks per stage, `keep`; settings of `train`.
CASES = [
    (
        {"pipeline": 2, "data": 2, "tensor": 2},
        ("interleaved", 4, "residuals"),
        {"num_microbatches": 4},
    ),
]
MORE = [  # `verify` tries many more
    # fewer micro-batches than stages
    ({"pipeline": 4}, ("interleaved", 2, "inputs"), {"num_microbatches": 2}),
    (
        {"pipeline": 2, "data": 2, "fsdp": 2},
        ("gpipe", 1, "inputs"),
        {"num_microbatches": 4, "zero_stage": 1, "remat": "dots"},
    ),
    ({"pipeline": 2}, ("gpipe", 1, "residuals"), {"num_microbatches": 1}),
    ({"pipeline": 8}, ("1f1b", 1, "inputs"), {"num_microbatches": 16}),
    (
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        ("1f1b", 1, "inputs"),
        {"num_microbatches": 8, "zero_stage": 2, "remat": "full"},
    ),
]
slow = pytest.mark.slow


def with_pipeline(c, pipeline, train):
    c.pipeline.update(dict(zip(("schedule", "num_chunks", "keep"), pipeline, strict=True)))
    c.train.update(train, unroll=1)  # a loop over layers compiles faster
    return c


@pytest.mark.parametrize(
    ("layout", "pipeline", "train"),
    [*CASES, *(pytest.param(*case, marks=slow) for case in MORE)],
    ids=str,
)
def test_gradients_and_updates_equal_one_device_in_float64(layout, pipeline, train, x64):
    c = with_pipeline(packed(**LAYERS), pipeline, train)
    assert_same(Run(c, "float64", **layout).one_step(), one_device(**LAYERS), rtol=1e-10)


FINE = [
    ({"pipeline": 2}, ("1f1b", 1, "inputs"), {"num_microbatches": 4}, {}),
    # a repeated sequence of loops
    ({"pipeline": 2, "fsdp": 2}, ("interleaved", 2, "residuals"), {"num_microbatches": 8}, {}),
    # tied weights, which get gradients at both ends
    ({"pipeline": 4, "data": 2}, ("1f1b", 1, "inputs"), {"num_microbatches": 8}, GPT2),
    # the head does not follow the forward
    ({"pipeline": 2}, ("gpipe", 1, "residuals"), {"num_microbatches": 4, "zero_stage": 1}, {}),
    # fewer micro-batches than stages
    ({"pipeline": 4}, ("interleaved", 2, "inputs"), {"num_microbatches": 2}, {}),
]


@pytest.mark.parametrize(
    ("layout", "pipeline", "train", "model"),
    [FINE[0], *(pytest.param(*case, marks=slow) for case in FINE[1:])],
    ids=str,
)
def test_a_loop_for_each_kind_of_row_changes_no_result(
    layout, pipeline, train, model, x64, monkeypatch
):
    """As on GPUs and TPUs; without a branch."""
    monkeypatch.setattr(executor, "phases", lambda rows, fine: phases(rows, fine=True))
    model = LAYERS | model
    c = with_pipeline(packed(**model), pipeline, train)
    run = Run(c, "float64", **layout)
    assert_same(run.one_step(), one_device(**model), rtol=1e-10)
    with run.program.active():
        args = run.program.abstract_state.params, run.batch(), jax.random.key(0)
        assert "_ticks" not in str(jax.jit(run.program.grad_fn).trace(*args).jaxpr)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rows_of_the_loops_are_those_of_the_table(name, chunks, fine):
    if chunks > 1 and name != "interleaved":
        return
    for P, M in itertools.product((1, 2, 4), (1, 2, 3, 8, 9, 16)):
        table = SCHEDULES[name](P, M, chunks)
        rows = executor.rows_of(table)
        for work, of_rows in (("forward", rows.forward), ("backward", rows.backward)):
            of_table = getattr(table, work)
            for column, expected in zip(of_rows, of_table, strict=True):
                np.testing.assert_array_equal(
                    column[of_rows.active.any(1)], expected[of_table.active.any(1)]
                )
        # Each micro-batch once; the first is embedded before the loops.
        for column, first in ((rows.entering, 1), *((column, 0) for column in rows[3:])):
            assert column[column != IDLE].tolist() == [*range(first, M)]
        found = executor.phases(rows, fine=fine)
        numbers = [number for phase in found for number in range(*phase.rows.indices(10**6))]
        assert numbers == [*range(len(rows.leaving))]
        for phase in found:
            num_rows = phase.rows.stop - phase.rows.start
            assert num_rows == sum(phase.lengths) * phase.num_repeats
            # All rows of a loop have the same work, in each repetition.
            is_active = [rows.forward.active.any(1), rows.backward.active.any(1)]
            is_active += [column != IDLE for column in rows[2:]] if fine else []
            kinds = np.stack(is_active, 1)[phase.rows].reshape(
                phase.num_repeats, -1, len(is_active)
            )
            bounds = np.cumsum([0, *phase.lengths])
            for start, end in itertools.pairwise(bounds):
                assert (kinds[:, start:end] == kinds[0, start]).all()
        assert fine or len(found) <= 4


def test_with_many_microbatches_interleaved_repeats_its_loops():
    def num_loops(M):
        rows = executor.rows_of(SCHEDULES["interleaved"](4, M, 2))
        return sum(len(phase.lengths) for phase in executor.phases(rows, fine=True))

    assert num_loops(16) == num_loops(64) == 16


@slow
def test_gradients_and_updates_equal_one_device_in_float32():
    c = with_pipeline(packed(), ("1f1b", 1, "residuals"), {"num_microbatches": 4})
    found = Run(c, pipeline=2, data=2, tensor=2).one_step()
    assert_same(found[::2], Run(packed()).one_step()[::2], rtol=1e-5)


@slow
def test_bfloat16_is_as_accurate_as_without_a_pipeline():
    def gradients(c, **layout):
        c.train.dtype = "bfloat16"
        return Run(c, **layout).one_step()[0]

    exact, plain = Run(packed()).one_step()[0], gradients(packed())
    c = with_pipeline(packed(), ("1f1b", 1, "inputs"), {"num_microbatches": 4})
    pipelined = gradients(c, pipeline=2, fsdp=2)

    def error(found):
        squares = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), found, exact)
        return sum(jax.tree.leaves(squares)) ** 0.5

    assert error(pipelined) < 2 * error(plain)


def test_layers_compute_in_the_compute_dtype():
    """Not in float32, as the parameters are stored: that would be right, but slow."""
    c = with_pipeline(packed(), ("1f1b", 1, "inputs"), {"num_microbatches": 4})
    c.train.dtype = "bfloat16"
    run = Run(c, pipeline=2, fsdp=2)
    with run.program.active():
        text = str(jax.make_jaxpr(run.program.train_step)(run.program.abstract_state, run.batch()))
    products = re.findall(r":(\w+)\[[\d,]*\] = dot_general", text)
    assert len(products) > 20
    assert products.count("bf16") > len(products) / 2


@pytest.mark.parametrize("keep", ["inputs", pytest.param("residuals", marks=slow)])
@pytest.mark.slow
def test_inputs_of_idle_stages_change_no_result(keep, x64, monkeypatch):
    monkeypatch.setattr(executor, "IDLE_INPUT", np.nan)
    pipeline = ("interleaved", 2, keep)
    c = with_pipeline(packed(**LAYERS), pipeline, {"num_microbatches": 2})
    found = Run(c, "float64", pipeline=4).one_step()
    assert_same(found, one_device(**LAYERS), rtol=1e-10)


def test_evaluation_equals_one_device(x64):
    def sums(c, **layout):
        run = Run(c, "float64", **layout)
        with run.program.active():
            return jax.jit(run.program.eval_step)(run.start().params, run.batch())

    c = packed(num_layers=4, z_loss=1e-3)
    expected = sums(c.copy_and_resolve_references())
    with_pipeline(c, ("interleaved", 2, "inputs"), {"num_microbatches": 4})
    found = sums(c, pipeline=2, fsdp=2, tensor=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


@slow
def test_blocks_may_contain_gathers_on_any_layout(x64):
    def gathering(model):
        def block(layer, x, batch):
            order = jnp.argsort(batch.tokens, axis=-1)
            x = x + 0.1 * jnp.take_along_axis(model.block(layer, x, batch), order[..., None], 1)
            return x + 0.1 * layer["mlp"]["up"]["kernel"].T[batch.tokens]

        return dataclasses.replace(model, block=block)

    def gradients(c, **layout):
        run = Run(c, "float64", **layout)
        parts = run.parts._replace(model=gathering(run.parts.model))
        program = assemble(run.cfg, parts, devices=jax.devices()[: run.program.mesh.size])
        with program.active():
            args = program.initial_state(0).params, run.batch(), jax.random.key(0)
            return jax.device_get(jax.jit(program.grad_fn)(*args))

    c = with_pipeline(packed(), ("1f1b", 1, "inputs"), {"num_microbatches": 2})
    found = gradients(c, pipeline=2, fsdp=2, tensor=2)
    assert_same(found, gradients(packed()), rtol=1e-10)


@functools.cache
def compiled(schedule, num_chunks, keep, num_microbatches):
    """Returns the compiled gradients of a step on two stages, with micro-batches of two rows."""
    c = tiny_config()
    # No dim of a weight is 24, so shapes tell activations from weights.
    c.model.num_layers, c.data.seq_len = 4, 24
    train = {"num_microbatches": num_microbatches, "global_batch": 2 * num_microbatches}
    run = Run(with_pipeline(c, (schedule, num_chunks, keep), train), pipeline=2)
    with run.program.active():
        args = run.program.abstract_state.params, run.batch(), jax.random.key(0)
        return jax.jit(run.program.grad_fn).lower(*args).compile()


MESSAGE = 2 * 24 * 32 * 4  # bytes of an activation: rows, positions, width, float32


def temporary(*args):
    return compiled(*args).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "case",
    [
        ("1f1b", 1, "inputs"),
        pytest.param(("1f1b", 1, "residuals"), marks=slow),
        pytest.param(("interleaved", 2, "inputs"), marks=slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_microbatches(case):
    assert temporary(*case, 16) - temporary(*case, 8) < MESSAGE / 2


@slow
def test_memory_of_gpipe_grows_by_each_microbatch():
    assert temporary("gpipe", 1, "inputs", 16) >= temporary("gpipe", 1, "inputs", 8) + 8 * MESSAGE


@slow
def test_kept_residuals_avoid_the_second_forward_and_hold_no_weights(monkeypatch):
    kept, original = [], per_stage.put

    def put(tree, index, value):
        kept.extend(leaf.shape for leaf in jax.tree.leaves(value))
        return original(tree, index, value)

    def products(keep):
        return len(re.findall(r" dot\(", compiled("1f1b", 1, keep, 8).as_text()))

    monkeypatch.setattr(per_stage, "put", put)
    compiled.cache_clear()
    assert products("residuals") < products("inputs")
    weights = {(32, 4, 8), (32, 2, 8), (4, 8, 32), (32, 64), (64, 32)}
    assert kept and not {shape[-n:] for shape in kept for n in (2, 3)} & weights


def test_a_residual_is_kept_if_and_only_if_it_depends_on_the_input():
    def chunk(layers, x, microbatch):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ jnp.exp(w)), None), x, layers[0])
        return y * jnp.exp(microbatch)  # the second factor depends on the batch alone

    shapes = jax.eval_shape(lambda: (jnp.ones((2, 4, 4)), jnp.ones((3, 4)), jnp.ones((1, 4))))
    vjp = stages.trace_vjp(chunk, (shapes[0], {}), *shapes[1:])
    weights, x, microbatch = jnp.full((2, 4, 4), -2.0), jnp.ones((3, 4)), jnp.arange(4.0)[None]
    y, residuals = vjp.run(weights, x, microbatch)
    _, with_zeros = vjp.run(weights, 0 * x, microbatch)
    assert 0 < sum(vjp.depends_on_x) < len(vjp.depends_on_x)
    for depends, residual, with_zero in zip(vjp.depends_on_x, residuals, with_zeros, strict=True):
        assert depends or jnp.array_equal(residual, with_zero)
        assert not depends or residual.shape[-2:] == x.shape  # no weights
    _, expected = jax.vjp(lambda weights, x: chunk((weights, {}), x, microbatch), weights, x)
    jax.tree.map(np.testing.assert_array_equal, vjp.vjp_from(residuals)(y), expected(y))


@pytest.mark.parametrize(
    "name", ["1f1b", pytest.param("gpipe", marks=slow), pytest.param("interleaved", marks=slow)]
)
@pytest.mark.slow
def test_stages_exchange_messages_and_gather_nothing(name):
    text = compiled(name, 2 if name == "interleaved" else 1, "inputs", 8).as_text()
    assert " all-gather" not in text and " all-to-all" not in text
    assert "collective-permute" in text


def fault_of(c, **mesh):
    c.mesh.update({"data": 1, **mesh})
    with pytest.raises(ConfigError) as error:
        cfg = parse(c, num_devices=int(np.prod(list(mesh.values()))))
        parts = build(cfg)
        assemble(cfg, parts, devices=jax.devices()[: cfg.mesh.pipeline])
    (fault,) = error.value.faults
    return fault


def test_layers_that_stages_cannot_share_evenly_are_reported():
    c = tiny_config()
    c.model.num_layers = 10
    c.pipeline.update(schedule="interleaved", num_chunks=2)
    fault = fault_of(c, pipeline=2)
    assert fault == (
        "model.num_layers=10 is not divisible by mesh.pipeline=2 x pipeline.num_chunks=2; use 8 "
        "or 12"
    )


def test_several_chunks_need_the_interleaved_schedule():
    c = tiny_config()
    c.model.num_layers, c.pipeline.num_chunks = 4, 2
    assert fault_of(c, pipeline=2).startswith(
        "pipeline.num_chunks=2: 1f1b has one chunk per stage; use"
    )


def test_a_model_that_is_not_a_stack_is_reported():
    c = tiny_config()
    c.mesh.update(data=1, pipeline=2)
    cfg = parse(c, num_devices=2)
    parts = build(cfg)
    model = dataclasses.replace(parts.model, block=None, loss=lambda params, batch, key: None)
    with pytest.raises(ConfigError, match="mesh.pipeline=2: the model is not a stack of blocks"):
        assemble(cfg, parts._replace(model=model), devices=jax.devices()[:2])


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3), (3, 4), (6, 4), (8, 4)])
def test_each_chunk_moves_once_to_its_stage_and_back(stages, chunks):
    state = np.arange(stages * chunks).reshape(stages, chunks)  # stage i holds those in order
    for inward, expected in [(True, state.reshape(chunks, stages).T), (False, state)]:
        moved = np.full_like(state, -1)
        for pairs, outgoing, incoming in per_stage.rounds(stages, chunks, inward=inward):
            assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == [*range(stages)]
            for source, target in pairs:
                moved[target, incoming[target]] = state[source, outgoing[source]]
        np.testing.assert_array_equal(moved, expected)
        state = moved
