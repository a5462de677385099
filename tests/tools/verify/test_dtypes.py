"""The laws of dtypes hold for the step on every kind of mesh, and find planted losses of precision.

Programs are traced, not compiled.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshtrain.program import assemble
from meshtrain.state import TrainState
from meshtrain.tools.verify.laws import dtypes
from tests.lib.configs import GPT2, packed
from tests.lib.families import FAMILIES
from tests.lib.runs import Run

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
MIXTURE = dict(num_experts=4, experts_per_token=2, num_shared_experts=1, balance_weight=0.1)
MIXTURE |= dict(attention="lg", window=5, attention_softcap=3.0, logit_softcap=4.0, balance="bias")
# Sixteen heads share a key, more than MAX_TERMS.
LATENT = dict(num_heads=16, num_kv_heads=16, kv_lora_rank=24, q_lora_rank=20, rope_head_dim=8)
LATENT |= dict(num_experts=8, experts_per_token=2, router="sigmoid", balance="sequence")
LATENT |= dict(balance_weight=0.1, router_z_loss=0.1, expert_groups=(4, 2), capacity_factor=1.5)
LATENT |= dict(first_dense_layers=1, d_model=64, v_head_dim=12)
GEMMA = dict(dropout=0.1, post_norm=True, norm="rms_1p", embed_scale=3.0)
OLMO = dict(qk_norm=True, qk_norm_heads="all", norm="layer", attention_impl="blockwise:5")
SINKS = dict(attention_sinks=True, attention="lg", window=5)
GPT_OSS = dict(SINKS, mlp="clamped_swiglu", num_experts=4, experts_per_token=2, expert_bias=True)
CHUNKS = dict(z_loss=1e-3, loss_chunk_mib=0.01, qk_norm=True)
slow = pytest.mark.slow


def fault_of(model, mesh, dtype, train):
    c = packed(**model)
    c.context.method = train.pop("context_method", "auto")
    c.train.update(dtype=dtype, **train)
    run = Run(c, **mesh)
    scoped = run.parts._replace(model=dtypes.with_scope(run.parts.model))
    program = assemble(run.cfg, scoped, devices=run.program.mesh.devices.ravel())
    return dtypes.fault_of(program, run.batch(), is_transformer=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_hold_for_every_family(family):
    assert fault_of(FAMILIES[family], CUBE, "bfloat16", {}) is None


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
@pytest.mark.parametrize(
    ("model", "mesh", "train"),
    [
        pytest.param(CHUNKS, CUBE, {}, id="chunked loss"),
        pytest.param(GEMMA, CUBE, dict(num_microbatches=2, zero_stage=2), marks=slow, id="gemma"),
        pytest.param(OLMO, CUBE, dict(num_microbatches=2, remat="full"), marks=slow, id="olmo"),
        pytest.param(
            GPT2,
            dict(pipeline=2, fsdp=2, context=2),
            dict(num_microbatches=4),
            marks=slow,
            id="ring",
        ),
        pytest.param(
            {}, dict(data=2, context=4), dict(context_method="gather"), marks=slow, id="gather"
        ),
        pytest.param(
            dict(num_kv_heads=1),
            dict(data=2, context=4),
            dict(context_method="ulysses"),
            marks=slow,
            id="ulysses",
        ),
        pytest.param(
            MIXTURE,
            dict(data=2, expert=2, fsdp=2),
            dict(num_microbatches=2),
            marks=slow,
            id="mixture",
        ),
        pytest.param(LATENT, dict(data=2, expert=2, tensor=2), {}, marks=slow, id="latent"),
        pytest.param(GPT_OSS, CUBE, {}, id="sinks"),
        pytest.param(
            dict(SINKS, attention_impl="blockwise:5"), CUBE, {}, marks=slow, id="blockwise sinks"
        ),
        pytest.param(
            dict(SINKS, attention="g"), dict(data=2, context=4), {}, marks=slow, id="ring sinks"
        ),
    ],
)
def test_what_must_be_in_float32_is(model, mesh, train, dtype):
    assert fault_of(model, mesh, dtype, dict(train)) is None


# ---- each law finds a planted loss of precision ----

# B batch, S sequence, D model, E experts

X = jax.ShapeDtypeStruct((4, 16, 32), jnp.bfloat16)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def wide(x):
    return x.astype(jnp.float32)


def half(x):
    return x.astype(jnp.bfloat16)


def program_of(step, evaluate=None):
    """Returns a program of functions (w, x) -> result, without anything else that a program has."""

    def train_step(state, batch):
        return state, {"loss": step(state.params, batch), "grad_norm": 0.0, "skipped": False}

    return types.SimpleNamespace(
        abstract_state=TrainState(jax.ShapeDtypeStruct((), jnp.int32), W, None),
        active=lambda: jax.named_scope(""),
        train_step=train_step,
        eval_step=evaluate or (lambda params, batch: 0.0),
    )


def loop(body, carry):
    return lax.scan(lambda carry, _: (body(carry), None), carry, None, length=3)[0]


MODEL_BUGS = {
    "exp in 16 bits": (lambda w, x: jnp.exp(x), "exp in bfloat16"),
    "root of a norm": (
        lambda w, x: wide(lax.rsqrt(half((wide(x) ** 2).mean(-1)))),
        "rsqrt in bfloat16",
    ),
    "squares of a norm": (
        lambda w, x: lax.rsqrt(wide(x * x).mean(-1)),
        "rsqrt of what a subtraction, square or tanh left",
    ),
    "mean of a norm": (
        lambda w, x: lax.rsqrt((wide(x - x.mean(-1, keepdims=True)) ** 2).mean(-1)),
        "rsqrt of what a subtraction, square or tanh left",
    ),
    "root rounded": (lambda w, x: half(lax.rsqrt((wide(x) ** 2).mean(-1))), "a statistic is"),
    "angles rounded": (lambda w, x: half(2.0 * jnp.cos(wide(x))) * x, "a statistic is rounded"),
    "scores rounded": (
        lambda w, x: jnp.exp(wide(jnp.einsum("bsd,btd->bst", x, x))),
        "exp of what a product of two activations left in 16 bits",
    ),
    "sum of a softmax rounded": (
        lambda w, x: half(jnp.exp(wide(x)).sum(-1)),
        "a statistic is rounded",
    ),
    "router logits": (
        lambda w, x: lax.top_k(wide(x @ half(w)), 2)[0],
        "top_k of scores that were computed in 16 bits",
    ),
    "router bias": (lambda w, x: lax.top_k(wide(x + half(wide(x))), 2)[0], "top_k of scores"),
    "sum of tokens": (
        lambda w, x: wide(lax.reduce(x, jnp.bfloat16(0), lax.add, (0, 1))),
        "of many terms in bfloat16",
    ),
    "table's gradient": (
        lambda w, x: wide(jnp.zeros((8, 32), x.dtype).at[jnp.arange(4) % 2].add(x[:, 0])),
        "scatter-add of many terms",
    ),
    "sum over iterations": (
        lambda w, x: wide(loop(lambda total: total + x, jnp.zeros_like(x))),
        "a loop adds up its iterations in bfloat16",
    ),
    "loss in 16 bits": (lambda w, x: wide(2 * x).sum(), "between the logits and the sums"),
}


@pytest.mark.parametrize(("bug", "message"), MODEL_BUGS.values(), ids=MODEL_BUGS.keys())
@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_loss_of_precision_in_the_model_is_found(bug, message, in_evaluation):
    def in_scope(w, x):
        with jax.named_scope(dtypes.MODEL):
            return bug(w, x)

    def nothing(w, x):
        return 0.0

    program = program_of(*((nothing, in_scope) if in_evaluation else (in_scope,)))
    fault = dtypes.fault_of(program, X, is_transformer=True)
    assert message in fault
    assert dtypes.fault_of(program, X, is_transformer=False) is None


def test_a_sum_with_a_value_of_an_earlier_iteration_is_none_over_iterations():
    """As where a stage of a pipeline computes x + branch again, of which both were kept earlier."""

    def loss(w, x):
        with jax.named_scope(dtypes.MODEL):
            w = half(w)

            def tick(carry):
                kept_x, kept_branch, _ = carry
                return jnp.tanh(kept_x), kept_x @ w, kept_x + kept_branch

            *_, out = loop(tick, (x, x, x))
            return jax.nn.logsumexp(wide(out @ w), axis=-1).sum()

    assert dtypes.fault_of(program_of(loss, loss), X, is_transformer=True) is None


def test_what_the_model_may_compute_in_16_bits_is_no_fault():
    def layer(w, x):
        normed = half(wide(x) * lax.rsqrt((wide(x) ** 2).mean(-1, keepdims=True)))
        scores = jnp.einsum("bsd,btd->bst", normed, normed, preferred_element_type=jnp.float32)
        x = x + half(jax.nn.softmax(scores)) @ normed @ w
        return x + jax.nn.gelu(x @ w) @ w

    def loss(w, x):
        with jax.named_scope(dtypes.MODEL):
            w = half(w)
            x = loop(lambda x: layer(w, x), x)
            return jax.nn.logsumexp(wide(x @ w), axis=-1).sum()

    assert dtypes.fault_of(program_of(loss, loss), X, is_transformer=True) is None


TRAINER_BUGS = {
    "sum": (lambda w, x: wide(x + x), "the trainer computes add in bfloat16"),
    "micro-batches": (
        lambda w, x: wide(loop(lambda total: total + x, jnp.zeros_like(x))),
        "the trainer computes add in bfloat16",
    ),
    "rounded gradient": (lambda w, x: wide(half(2 * w)), "rounds a value that is no parameter"),
}


@pytest.mark.parametrize(("bug", "message"), TRAINER_BUGS.values(), ids=TRAINER_BUGS.keys())
def test_a_loss_of_precision_in_the_trainer_is_found_with_any_model(bug, message):
    fault = dtypes.fault_of(program_of(bug), X, is_transformer=False)
    assert message in fault and "test_dtypes.py" in fault
    parameters_once = program_of(lambda w, x: half(w))
    assert dtypes.fault_of(parameters_once, X, is_transformer=False) is None
