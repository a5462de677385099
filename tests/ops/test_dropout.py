"""Dropout drops the same elements on every layout, and others in each step, row and layer.

In evaluation it drops none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils import murmurhash3_32

import meshtrain
from meshtrain.models import transformer
from meshtrain.ops import dropout as masks
from meshtrain.ops.attention import attention
from meshtrain.tools.verify.laws import dropout as dropout_laws
from meshtrain.tools.verify.reference import dropout as reference_dropout
from tests.lib.compare import assert_same
from tests.lib.configs import GPT2, packed, tiny_config
from tests.lib.runs import Run

RATE = 0.25
KEYS = np.random.default_rng(0).integers(2**32, size=(4, 2), dtype=np.uint32)


FOUR = dict(num_layers=4)
MIXTURE = dict(num_layers=3, num_experts=4, d_expert=16, first_dense_layers=1)
SLOW = pytest.mark.slow
LAYOUTS = {
    "micro-batches": (dict(data=2, fsdp=2), {}, {"num_microbatches": 3}, {}),
    "tensor": (dict(fsdp=2, tensor=2), {}, {"remat": "full"}, dict(attention_impl="blockwise:3")),
    "1f1b": (dict(pipeline=2, data=2), {}, {"num_microbatches": 4}, {}),
    "ulysses": (dict(context=2, tensor=2), {}, {"method": "ulysses"}, {}),
    "interleaved, gather": (
        dict(pipeline=2, context=2),
        FOUR,
        {"num_microbatches": 2, "schedule": "interleaved", "num_chunks": 2, "method": "gather"},
        {},
    ),
    "interleaved, residuals": (
        dict(pipeline=2, fsdp=2),
        FOUR,
        {"num_microbatches": 3, "schedule": "interleaved", "num_chunks": 2, "keep": "residuals"},
        {},
    ),
    "ring": (dict(data=2, context=4), GPT2, {"method": "ring"}, {}),
    "mixture": (dict(expert=2, data=2), MIXTURE, {"num_microbatches": 2}, {}),
}
DEFAULT = ("tensor",)


def config(**model):
    c = packed(dropout=RATE, **model)
    c.train.global_batch = 24
    return c


@functools.cache
def one_device(**model):
    return Run(config(**model), dtype="float64").one_step()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else SLOW) for name in LAYOUTS]
)
def test_a_step_with_dropout_equals_that_of_one_device(name, x64):
    layout, model, settings, only_here = LAYOUTS[name]
    c = config(**model, **only_here)
    for key, value in settings.items():
        (section,) = (part for part in (c.train, c.pipeline, c.context) if key in part)
        section[key] = value
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


def test_masks_differ_between_steps_and_are_off_in_evaluation():
    run = Run(config())
    with run.program.active():
        state, batch = run.start(), run.batch()
        step = jax.jit(run.program.train_step)
        first, second = (step(state._replace(step=jnp.int32(n)), batch)[1]["loss"] for n in (0, 1))
        sums = jax.jit(run.program.eval_step)(state.params, batch)
        without = Run(packed())
        expected = jax.jit(without.program.eval_step)(state.params, batch)
    assert abs(first - second) > 1e-3
    assert sums.loss == expected.loss and first != sums.loss / sums.weight


def test_the_hash_is_murmurhash3():
    words = np.random.default_rng(0).integers(2**32, size=(9, 7), dtype=np.uint32)
    expected = [murmurhash3_32(row.tobytes(), seed=0, positive=True) for row in words]
    found = masks._hash(words[:, :2], *words[:, 2:].T)
    assert found.tolist() == expected == reference_dropout.murmur3(words).tolist()


def test_a_mask_is_that_of_the_reference():
    batch = masks.at_layer({"row_keys": KEYS}, 3)
    x = jnp.arange(1.0, 4 * 6 * 5 + 1).reshape(4, 6, 5)
    found = meshtrain.dropout(x, batch, rate=RATE, site=2)
    expected = reference_dropout.dropped(x, reference_dropout.of_layer(KEYS, 3), RATE, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    of_rows = meshtrain.dropout(x[:, 0], batch, rate=RATE, site=2)
    assert of_rows.shape == (4, 5) and not np.array_equal(of_rows, found[:, 0])


def test_sites_of_a_model_and_of_an_adapter_have_masks_of_their_own():
    """An adapter counts its sites from 2**16."""
    x = jnp.ones((4, 6, 50))
    first, second = (
        meshtrain.dropout(x, {"row_keys": KEYS}, rate=0.5, site=site) for site in (2, 2**16 + 2)
    )
    assert 0.4 < np.mean(first != second) < 0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_kept_is_divided_in_float32(dtype):
    """In bfloat16, 1 - 0.1 would be 0.8984."""
    x = jnp.linspace(1, 3, 4 * 500).reshape(4, 500).astype(dtype)
    found = meshtrain.dropout(x, {"row_keys": KEYS}, rate=0.1, site=0)
    exact = (np.asarray(x, np.float64) / 0.9).astype(x.dtype)
    is_kept = np.asarray(found != 0)
    assert found.dtype == x.dtype and 0.85 < is_kept.mean() < 0.95
    np.testing.assert_array_equal(found[is_kept], exact[is_kept])


def test_masks_are_independent_at_the_rate():
    assert dropout_laws.independent() is None


def test_the_gradient_is_the_mask_and_keeps_only_keys():
    def total(x, keys):
        return (meshtrain.dropout(x, {"row_keys": keys}, rate=RATE, site=0) ** 2).sum()

    x = jnp.ones((4, 16, 8))
    grad = jax.grad(total)(x, KEYS)
    assert {*np.unique(np.round(grad, 4))} == {0, np.float32(np.round(2 / 0.75**2, 4))}
    _, vjp = jax.vjp(lambda x: meshtrain.dropout(x, {"row_keys": KEYS}, rate=RATE, site=0), x)
    assert max(leaf.size for leaf in jax.tree.leaves(vjp)) <= 16


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("xla:5", marks=pytest.mark.slow), "blockwise:5"]
)
def test_attention_drops_the_probabilities_of_the_reference(implementation, x64):
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(4, 12, heads, 6)) for heads in (4, 2, 2))
    drop = masks.OfAttention(KEYS, RATE, 5)

    def expected(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bshk,bthk->bhst", q, k) / 6**0.5
        probs = jax.nn.softmax(jnp.where(np.tril(np.ones((1, 1, 12, 12), bool)), scores, -jnp.inf))
        probs = reference_dropout.dropped(probs, KEYS, RATE, 5)
        return jnp.einsum("bhst,bthv->bshv", probs, v)

    def found(q, k, v):
        return attention(q, k, v, None, implementation=implementation, dropout=drop)

    def values(function):
        return jax.value_and_grad(lambda *qkv: jnp.sin(function(*qkv)).sum(), (0, 1, 2))(q, k, v)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), values(found), values(expected)
    )


def test_attention_between_blocks_holds_no_mask_of_all_scores():
    S, block = 512, 32
    q, k, v = (jax.ShapeDtypeStruct((4, S, 4, 8), jnp.float32) for _ in range(3))

    def total(q, k, v, keys):
        drop = masks.OfAttention(keys, RATE, 0)
        return attention(q, k, v, None, implementation=f"blockwise:{block}", dropout=drop).sum()

    text = jax.jit(jax.grad(total)).lower(q, k, v, KEYS).as_text()
    assert f"{S}x{S}x" not in text and f"{block}x{block}x" in text


def test_a_rate_that_is_no_probability_is_rejected():
    model = tiny_config().model.to_dict()
    del model["build"]
    with pytest.raises(meshtrain.ConfigError, match=r"^model.dropout=1.0: is a probability; use 0"):
        transformer.build(**model | {"dropout": 1.0})


def test_a_batch_that_cannot_hold_keys_is_rejected():
    with pytest.raises(
        meshtrain.ConfigError, match="a batch is a tuple, which cannot hold the keys"
    ):
        masks.with_row_keys((np.zeros((4, 2)),), jax.random.key(0))
