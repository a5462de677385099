"""Bytes that devices with parts of the same sequences send, and how evenly they share attention."""

import jax
import numpy as np
import pytest

from meshtrain.data.source import Source, to_batch
from meshtrain.ops import context_attention
from meshtrain.parallel import sharding
from meshtrain.tools.audit import audit, text
from tests.lib.audits import assert_explained
from tests.lib.configs import tiny_config

METHODS = ["ring", pytest.param("gather", marks=pytest.mark.slow), "ulysses"]
KEYS_AND_VALUES = "keys and values between parts of a sequence"


def audited(method, source=None, remat="none", attention="auto", **mesh):
    c = tiny_config()
    c.train.remat, c.context.method, c.model.attention_impl = remat, method, attention
    c.mesh.update({"data": 1, **mesh})
    return audit.audit(c, data=source, devices=jax.devices()[: np.prod([*mesh.values()])])


def sent_by_formula(method, n, tensor=1, rows=16):
    """Returns the bytes of both layers: 16 tokens a row, 2 key/value heads, 4 heads of 8."""
    tokens = rows * 16 // n
    kv, q = tokens * 2 * 2 // tensor * 8 * 4, tokens * 4 // tensor * 8 * 4
    if method == "ulysses":
        kv *= max(1, n * tensor // 2)  # repeated until their heads divide
        return 2 * 2 * (n - 1) / n * (2 * q + kv)
    return 2 * ((n - 1) * kv * 2 + (n - (method == "gather")) * kv)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "mesh",
    [{"data": 2, "context": 4}, pytest.param({"fsdp": 2, "context": 2}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.slow
def test_attention_sends_keys_and_values_by_the_formula_of_its_method(method, mesh):
    result = audited(method, **mesh)
    assert_explained(result)
    sent = result.bytes_for(KEYS_AND_VALUES, "context")
    assert sent == sent_by_formula(method, mesh["context"], rows=8)
    assert not any(role == KEYS_AND_VALUES for _, role, _ in result.unsent_bytes)


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize(("tensor", "repeats"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.slow
def test_a_fused_kernel_sends_gradients_of_keys_once_less(method, tensor, repeats):
    """For 4 devices along tensor the 2 heads of keys are repeated, and their kernels are not
    sharded, which is another warning."""
    result = audited(method, attention="emulated", context=2, tensor=tensor)
    if repeats == 1:
        assert_explained(result)
    kv = 16 * 16 // 2 * 2 * 2 * repeats // tensor * 8 * 4  # bytes of keys and values of a device
    assert result.bytes_for(KEYS_AND_VALUES, "context") == 2 * 3 * kv
    assert not any(role == KEYS_AND_VALUES for _, role, _ in result.unsent_bytes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_what_recomputed_attention_sends_again_is_explained(method):
    result = audited(method, remat="full", context=4)
    (extra,) = (row for row in result.extra_bytes if row[1] == KEYS_AND_VALUES)
    assert extra[2] == "sent again, because train.remat=full recomputes attention"
    # q, k and v are exchanged before attention, and its output after it; a layer's output is not
    # needed again.
    again = {"ring": 1 / 3, "gather": 1 / 3, "ulysses": 1 / 2}[method]
    minimum = sent_by_formula(method, 4)
    assert result.bytes_for(KEYS_AND_VALUES, "context") == minimum + extra[3]
    assert 0 < extra[3] <= again * minimum


@pytest.mark.slow
def test_an_extra_gather_of_sequences_is_reported(monkeypatch):
    attend = context_attention.attention

    def gathers_queries(q_BSHK, *args, **options):
        whole = sharding.constrain(q_BSHK, "batch", None, "heads", "head_dim")
        return attend(q_BSHK + whole[:, ::-1], *args, **options)

    monkeypatch.setattr(context_attention, "attention", gathers_queries)
    warnings = audited("ring", context=2).warnings
    assert any("all-gather over context" in warning for warning in warnings)


@pytest.mark.slow
def test_the_zigzag_order_balances_long_documents_and_packing_does_not_hide_the_rest():
    of_full_rows = audited("gather", data=2, context=4).imbalance
    # The last of 4 parts of 4 tokens has 13 + ... + 16 of the 136 pairs.
    assert of_full_rows.contiguous == pytest.approx(58 / 34) and of_full_rows.zigzag == 1

    def read(indices):  # a document of 12 tokens, then one of 4
        tokens = np.tile(np.where(np.arange(17) == 11, 0, 1), (len(indices), 1))
        return to_batch(tokens.astype(np.int32), separator=0)

    result = audited("gather", source=Source(read, description="two documents"), context=2)
    # Pairs by chunk of 4 tokens: 10, 26, 42, 10; of devices 52 and 36, or 20 and 68.
    assert result.imbalance.contiguous == pytest.approx(52 / 44)
    assert result.imbalance.zigzag == pytest.approx(68 / 44)
    assert result.to_dict()["imbalance"]["of"] == "4 batches of two documents"
    printed = [*text.lines(result)]
    assert any("1.545 (zigzag order)" in line for line in printed)
