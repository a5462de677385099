"""The bytes that pipeline stages send: messages, broadcasts by first and last stage, other sums."""

import contextlib

import jax
import pytest

from meshtrain.pipeline import per_stage
from tests.lib.audits import ONE_BY_ONE, assert_explained, audited

STAGE_MESSAGES = "messages from stage to stage"
END_BROADCAST = "last stage's output or first stage's gradient, for all stages"
LAYER_TRANSFER = "layers sent to the stage that runs them, gradients sent back"
LOCK_STEP = "lock step"


def pipelined(M, layers=4, chunks=1, **mesh):
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = dict(schedule=name, num_chunks=chunks)
    train = dict(global_batch=64, num_microbatches=M)
    return audited(dict(num_layers=layers), train=train, schedule=schedule, **mesh)


def kinds(result, axis):
    collectives = (one.collective for one in result.explanations)
    return {c.kind for c in collectives if axis in (c.axes or ())}


def lock_step_bytes(result, label, axis):
    """Returns the bytes above the minimum because of lock step."""
    found = [row for row in result.extra_bytes if row[:2] == (axis, label)]
    return sum(num_bytes for _, _, reason, num_bytes in found if reason.startswith(LOCK_STEP))


@pytest.fixture(scope="module")
def results():
    return {M: pipelined(M, data=2, pipeline=4) for M in (4, 8)}


@pytest.mark.parametrize("M", [4, 8])
@pytest.mark.slow
def test_one_message_per_tick_in_each_direction(results, M):
    result, A, P = results[M], 64 // 2 // M * 16 * 32 * 4, 4
    assert_explained(result)
    assert result.bytes_for(STAGE_MESSAGES, "pipeline") == 2 * A * (M + P - 1)
    assert lock_step_bytes(result, STAGE_MESSAGES, "pipeline") == 2 * A * (P - 1)
    assert kinds(result, "pipeline") == {"collective-permute", "all-reduce"}


@pytest.mark.parametrize("M", [4, 8])
@pytest.mark.slow
def test_embedding_and_head_run_once_per_microbatch(results, M):
    # This also holds if they are in a branch that some ticks of a loop skip.
    result, A = results[M], 64 // 2 // M * 16 * 32 * 4
    assert result.bytes_for("activations", "pipeline") == 2 * M * 1.5 * A
    assert result.bytes_for(END_BROADCAST, "pipeline") == 2 * M * 1.5 * A
    broadcasts = [one for one in result.explanations if one.label == END_BROADCAST]
    # In the loop with both passes M - 1 outputs, and in those with one pass the other gradients.
    assert {one.collective.count for one in broadcasts} >= {M - 1, {4: 3, 8: 4}[M]}


@pytest.mark.slow
def test_a_broadcast_is_known_without_its_name(monkeypatch):
    """XLA may give it the name of what reads it."""
    scope = jax.named_scope

    def without_share(name):
        return contextlib.nullcontext() if name == "share" else scope(name)

    monkeypatch.setattr(jax, "named_scope", without_share)
    result = pipelined(2, layers=2, pipeline=2)
    assert_explained(result)


def test_gradients_of_a_pipeline_are_summed_over_data_once_for_any_number_of_microbatches(results):
    for result in results.values():
        # 2 (n - 1) / n of the parameters, n = 2
        assert result.bytes_for("gradients summed", "data") == result.param_bytes
        assert result.total("data").ratio <= 1.001


@pytest.mark.slow
def test_interleaved_stages_receive_their_layers_and_gather_them_in_every_tick():
    result = pipelined(4, chunks=2, fsdp=2, pipeline=2)
    assert_explained(result)
    # The layers of a stage: without embedding, head and the final norm's scale.
    layers = 2 * result.param_bytes - (2 * 64 + 1) * 32 * 4
    # Half of the chunks run on the stage that stores them. The weights and gradients of the others
    # move.
    assert result.bytes_for(LAYER_TRANSFER, "pipeline") == 2 * layers / 2 / 2
    # 9 ticks of one layer in each direction, 8 with work; recomputed chunks are gathered once more.
    assert lock_step_bytes(result, "gradients summed", "fsdp") == layers / 2 / 2
    assert lock_step_bytes(result, "parameters gathered", "fsdp") == 2 * layers / 2 / 2
    assert any(reason.startswith("recomputed") for _, _, reason, _ in result.extra_bytes)


@pytest.mark.slow
def test_layers_are_summed_within_a_stage_and_the_vocabulary_over_all_stages():
    result = pipelined(4, tensor=2, pipeline=2)
    assert_explained(result)
    A = 64 // 4 * 16 * 32 * 4
    assert result.total("tensor").minimum == 4 * 2 * 4 * A  # microbatches x layers x sums
    labels = ("activations", ONE_BY_ONE)
    # Two layers in the fifth tick: two sums forward, and five instead of two backward.
    assert sum(lock_step_bytes(result, label, "tensor") for label in labels) == 2 * (2 + 5) * A
    both = result.total("pipeline", "tensor")
    assert both.minimum == 2 * 4 * 1.5 * A + 3 * 4 * 1.5 * 16 * 16 * 4
    assert both.ratio <= 1.001


@pytest.mark.slow
def test_activations_gathered_over_stages_are_reported(monkeypatch):
    def gathered(x, stage):
        return jax.lax.with_sharding_constraint(x, jax.P())[stage]

    monkeypatch.setattr(per_stage, "share", gathered)
    result = pipelined(2, layers=2, pipeline=2)
    assert any("all-gather over pipeline" in warning for warning in result.warnings)
