"""What stages of a pipeline move: messages, shares of both ends, and on the other axes what they would anyway."""

import jax
import pytest
from test_audit import ONE_BY_ONE, assert_explained, audited

from meshtrain.parallel.pipeline import ring

MESSAGES = "messages from stage to stage"
SHARED = "one stage's output or gradient, for all"
MOVED = "layers brought to their stages, gradients back"
LOCK_STEP = "lock step"


def pipelined(M, layers=4, chunks=1, **mesh):
    name = "interleaved" if chunks > 1 else "1f1b"
    schedule = dict(schedule=name, num_chunks=chunks)
    train = dict(global_batch=64, num_microbatches=M)
    return audited(dict(num_layers=layers), train=train, schedule=schedule, **mesh)


def kinds(result, axis):
    found = (one.collective for one in result.explained)
    return {c.kind for c in found if axis in (c.axes or ())}


def because(result, label, axis):
    """Bytes beyond the minimum, for lock step."""
    found = [key for key in result.excess if key[:2] == (axis, label)]
    return sum(moved for _, _, reason, moved in found if reason.startswith(LOCK_STEP))


@pytest.fixture(scope="module")
def results():
    return {M: pipelined(M, data=2, pipeline=4) for M in (4, 8)}


@pytest.mark.parametrize("M", [4, 8])
def test_messages_are_one_a_tick_each_way(results, M):
    result, A, P = results[M], 64 // 2 // M * 16 * 32 * 4, 4
    assert_explained(result)
    assert result.moved(MESSAGES, "pipeline") == 2 * A * (M + P - 1)
    assert because(result, MESSAGES, "pipeline") == 2 * A * (P - 1)
    assert kinds(result, "pipeline") == {"collective-permute", "all-reduce"}


@pytest.mark.parametrize("M", [4, 8])
def test_both_ends_are_worked_on_once_a_microbatch(results, M):
    # Also where they are in a branch that some ticks of a loop do not take.
    result, A = results[M], 64 // 2 // M * 16 * 32 * 4
    assert result.moved("activations", "pipeline") == 2 * M * 1.5 * A
    assert result.moved(SHARED, "pipeline") == 2 * M * 1.5 * A
    assert {one.collective.count for one in result.explained if one.label == SHARED} >= {M - 3, 3}


def test_gradients_cross_data_once_however_many_microbatches_stages_pass_on(results):
    for result in results.values():
        assert result.moved("gradients summed", "data") == result.held  # 2 (n - 1) / n of it, n = 2
        assert result.total("data").ratio <= 1.001


@pytest.mark.slow
def test_stages_with_several_chunks_take_their_layers_and_gather_them_in_every_tick():
    result = pipelined(4, chunks=2, fsdp=2, pipeline=2)
    assert_explained(result)
    whole = 2 * result.held - (2 * 64 + 1) * 32 * 4  # of a stage: less its tables, and a scale
    # Half of the chunks live where they run. Each of the others comes as weights, and goes as gradients.
    assert result.moved(MOVED, "pipeline") == 2 * whole / 2 / 2
    # 9 ticks of one layer each way, 8 with work; chunks run again, and gather once more for it.
    assert because(result, "gradients summed", "fsdp") == whole / 2 / 2
    assert because(result, "parameters gathered", "fsdp") == 2 * whole / 2 / 2
    assert any(reason.startswith("run again") for _, _, reason, _ in result.excess)


@pytest.mark.slow
def test_matrices_are_summed_within_a_stage_and_the_vocabulary_over_all_of_them():
    result = pipelined(4, tensor=2, pipeline=2)
    assert_explained(result)
    A = 64 // 4 * 16 * 32 * 4
    assert result.total("tensor").minimum == 4 * 2 * 4 * A  # microbatches x layers x sums
    assert because(result, "activations", "tensor") + because(result, ONE_BY_ONE, "tensor") == (
        2 * (2 + 5) * A  # in the fifth tick, of which backward five instead of two
    )
    both = result.total("pipeline", "tensor")
    assert both.minimum == 2 * 4 * 1.5 * A + 3 * 4 * 1.5 * 16 * 16 * 4
    assert both.ratio <= 1.001


def test_activations_gathered_over_stages_are_told(monkeypatch):
    def gathered(x, stage):
        return jax.lax.with_sharding_constraint(x, jax.P())[stage]

    monkeypatch.setattr(ring, "share", gathered)
    result = pipelined(2, layers=2, pipeline=2)
    assert any("all-gather over pipeline" in warning for warning in result.warnings)
