"""The bytes that devices with different experts send, and the roofline.

The loops of these steps depend on the routing.
"""

import math

import jax
import numpy as np
import pytest

from meshtrain import hardware
from meshtrain.parallel import expert, sharding
from meshtrain.tools.audit import audit, text
from tests.lib.audits import assert_explained
from tests.lib.configs import tiny_config

TOKENS, RESULTS, SUMS = "tokens for experts", "results of experts", "gradients summed"
DISPATCHED = "tokens sent to experts, and results"
D_MODEL, NUM_LAYERS, NUM_TOKENS, PER_TOKEN = 32, 2, 16 * 16, 2  # of tiny_config


def audited(mesh, model=None, train=None, pipeline=None, method="gather"):
    c = tiny_config()
    c.expert.method = method
    c.model.update(num_experts=8, experts_per_token=PER_TOKEN, d_expert=48)
    c.model.update(model or {})
    c.train.update(train or {})
    c.pipeline.update(pipeline or {})
    c.mesh.update({"data": 1, **mesh})
    return audit.audit(c, devices=jax.devices()[: np.prod([*mesh.values()])])


def needed(result, label, *axes):
    found = [one for one in result.explanations if one.label == label]
    return sum(one.needed_bytes for one in found if one.collective.axes == axes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "num_shards"),
    [
        ({"expert": 8}, 8),
        ({"expert": 4, "fsdp": 2}, 4),
        ({"expert": 2, "tensor": 2, "data": 2}, 4),
        ({"expert": 2, "context": 2, "fsdp": 2}, 2),
    ],
    ids=str,
)
def test_a_group_sends_by_the_formula_and_the_minimum_is_a_dispatch(mesh, num_shards):
    result = audited(mesh)
    assert_explained(result)
    e = mesh["expert"]
    local = NUM_TOKENS * mesh.get("tensor", 1) // np.prod([*mesh.values()])
    each = (e - 1) * local * D_MODEL * 4
    for label in (TOKENS, RESULTS):  # in both passes of each layer
        assert result.bytes_for(label, "expert") == 2 * NUM_LAYERS * each
        # Of all pairs of experts, those of which one is in a shard.
        num_own = 8 // num_shards
        share = 1 - math.comb(8 - num_own, PER_TOKEN) / math.comb(8, PER_TOKEN)
        bytes_needed = needed(result, label, "expert")
        np.testing.assert_allclose(bytes_needed, 2 * NUM_LAYERS * each * share)
        reasons = [reason for _, found, reason, _ in result.extra_bytes if found == label]
        assert len(reasons) == (share < 1)
        assert all(f"would send {share:.4g} times" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("mesh", "train", "pipeline"),
    [
        ({"expert": 8}, {}, {}),
        pytest.param({"expert": 4, "fsdp": 2}, dict(dtype="bfloat16"), {}, marks=pytest.mark.slow),
        pytest.param({"expert": 2, "tensor": 2, "data": 2}, {}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"expert": 2, "context": 2, "fsdp": 2}, dict(remat="full"), {}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"pipeline": 2, "expert": 4}, dict(num_microbatches=4), {}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_dispatch_is_explained_and_its_buffers_are_a_third_above_the_minimum(
    mesh, train, pipeline
):
    result = audited(mesh, train=train, pipeline=pipeline, method="dispatch")
    assert_explained(result)
    assert result.bytes_for(TOKENS, "expert") == result.bytes_for(RESULTS, "expert") == 0
    sent, minimum = result.bytes_for(DISPATCHED, "expert"), needed(result, DISPATCHED, "expert")
    again = sum(
        row[3]
        for row in result.extra_bytes
        if row[1] == DISPATCHED
        and ("again" in row[2] or "lock step" in row[2] or "recomp" in row[2])
    )
    assert 1 < (sent - again) / minimum <= 1.35


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "context": 2}, {"tensor": 2, "fsdp": 2}], ids=str)
def test_dense_layers_at_the_start_need_what_other_layers_need(mesh):
    result = audited(mesh, model=dict(num_layers=3, first_dense_layers=1))
    # On CPU XLA moves the small matrix of a router.
    assert [line for line in result.warnings if "mixture.py" not in line] == []


@pytest.mark.slow
def test_gradients_of_experts_are_summed_over_data_alone():
    result = audited({"data": 2, "expert": 4})
    assert_explained(result)
    of_experts = 3 * NUM_LAYERS * 8 * 48 * D_MODEL * 4 // 4
    bias, scalars = NUM_LAYERS * 8 * 4, NUM_LAYERS * 2 * 4  # the bias has no gradient
    everything = result.param_bytes - bias
    assert result.bytes_for(SUMS, "data") == everything
    assert result.bytes_for(SUMS, "expert") == 2 * 3 / 4 * (everything - of_experts - scalars)
    # No further need: no gather of experts over `expert`, and no sum of their gradients.
    unsent = [("expert", SUMS, 2 * 3 / 4 * (bias + scalars)), ("data", SUMS, bias)]
    assert result.unsent_bytes == unsent


@pytest.mark.slow
def test_gradients_of_experts_are_summed_over_fsdp_and_context_at_once():
    result = audited({"expert": 2, "context": 2, "fsdp": 2})
    assert result.total("fsdp", "context").ratio < 1.01
    assert result.total("fsdp").bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["inputs", "residuals"])
def test_a_pipeline_of_experts_is_explained(keep):
    mesh = {"expert": 2, "pipeline": 2, "fsdp": 2}
    result = audited(mesh, train=dict(num_microbatches=4), pipeline=dict(keep=keep))
    assert_explained(result)
    losses = [row for row in result.extra_bytes if row[1] == "losses of the layers"]
    assert [row[0] for row in losses] == ["pipeline"]


@pytest.mark.parametrize("train", [dict(remat="full"), dict(dtype="bfloat16")], ids=str)
@pytest.mark.slow
def test_recomputed_layers_and_bfloat16_are_explained(train):
    result = audited({"expert": 4, "fsdp": 2}, train=train)
    assert_explained(result)
    again = [row[3] for row in result.extra_bytes if "recomputes the layer" in row[2]]
    each = 3 * NUM_TOKENS // 8 * D_MODEL * 4 * NUM_LAYERS
    assert again == ([each] if "remat" in train else [])


@pytest.mark.slow
def test_an_extra_gather_of_tokens_is_reported(monkeypatch):
    run = expert.run_experts

    def gathers_twice(feed_forward, x_BSD, *args, **options):
        everywhere = sharding.constrain(jax.numpy.sin(x_BSD), None, "seq", "residual")
        return run(feed_forward, x_BSD + everywhere[::-1], *args, **options)

    monkeypatch.setattr(expert, "run_experts", gathers_twice)
    assert any("over expert" in warning for warning in audited({"expert": 4}).warnings)


@pytest.mark.slow
def test_no_collective_is_in_the_loop_of_leftover_blocks(monkeypatch):
    result = audited({"expert": 4})
    assert all(one.collective.count_known for one in result.explanations)
    # With iterations that differ between devices, each iteration asks all devices whether one
    # continues.
    monkeypatch.setattr(sharding, "largest_of_mapped", lambda count: count)
    assert any("loops of unknown length" in warning for warning in audited({"expert": 4}).warnings)


@pytest.mark.parametrize(("num_experts", "is_balanced"), [(8, True), (1024, False)])
@pytest.mark.slow
def test_the_roofline_is_of_balanced_routing_where_there_is_a_first_pass(
    num_experts, is_balanced, monkeypatch
):
    h200 = hardware.devices()["h200"]
    monkeypatch.setattr(hardware, "device_of", lambda kind: h200)
    result = audited({"expert": 2}, model=dict(num_experts=num_experts, d_expert=8))
    assert result.roofline.is_balanced == result.roofline.has_all_counts == is_balanced
    assert (result.roofline.mfu is not None) == is_balanced
    note = "for balanced routing: rows of experts beyond an equal share are not counted"
    assert any(note in line for line in text.lines(result)) == is_balanced
