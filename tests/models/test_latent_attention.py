"""Multi-head latent attention: equal on every mesh, for every implementation, and with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.huggingface import weights
from meshtrain.inference.sampling import Sampling, generate
from meshtrain.models import lora, lora_layer, lora_merge, transformer, trees
from meshtrain.models.base import CacheState
from meshtrain.models.blocks import run_blocks
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import attention as attention_ops
from meshtrain.tools.verify.reference import model as reference_model
from meshtrain.tools.verify.reference.adapter import Adapter
from tests.lib.compare import assert_same
from tests.lib.configs import tiny_config
from tests.lib.runs import Run

slow = pytest.mark.slow
# Head dims that differ from each other: 6 + 4 of a key, 5 of a value.
LATENT = dict(num_heads=4, num_kv_heads=4, head_dim=6, kv_lora_rank=16, q_lora_rank=12)
LATENT |= dict(rope_head_dim=4, v_head_dim=5)
EXPERTS = dict(num_experts=4, d_expert=24, num_shared_experts=1, router="sigmoid", num_layers=3)
EXPERTS |= dict(first_dense_layers=1, balance="sequence", balance_weight=0.5)
MODELS = {
    "plain": LATENT,
    "direct queries, windows": LATENT
    | dict(q_lora_rank=0, attention="lg", window=5, rope_theta_local=100.0, attention_softcap=3.0),
    "wide values, biases": LATENT | dict(v_head_dim=14, bias=True, norm="layer", query_scale=0.4),
    "experts": LATENT | EXPERTS,
}


def latent(name="plain", **model):
    """Returns a tiny config with packed rows: positions, segments and uneven token weights."""
    c = tiny_config()
    c.model.update(MODELS[name] | model)
    c.data.separator = 7
    c.optim.epsilon = 1e-6  # Adam divides by it where the gradient is zero
    return c


@functools.cache
def one_device(name):
    return Run(latent(name), "float64").one_step()


CASES = [
    ("plain", {"tensor": 4}, {}, {}),
    pytest.param("plain", {"fsdp": 8}, {}, {"zero_stage": 1}, marks=slow),
    pytest.param(
        "plain", {"context": 4, "tensor": 2}, {"method": "ring"}, {"remat": "full"}, marks=slow
    ),
    pytest.param("plain", {"context": 2, "fsdp": 4}, {"method": "ulysses"}, {}, marks=slow),
    pytest.param(
        "wide values, biases", {"context": 4, "fsdp": 2}, {"method": "gather"}, {}, marks=slow
    ),
    pytest.param(
        "direct queries, windows",
        {"data": 2, "fsdp": 2, "tensor": 2},
        {},
        {"num_microbatches": 2},
        marks=slow,
    ),
    pytest.param("direct queries, windows", {"context": 8}, {"method": "ring"}, {}, marks=slow),
    pytest.param(
        "experts",
        {"pipeline": 2, "expert": 2, "tensor": 2},
        {},
        {"num_microbatches": 2},
        marks=slow,
    ),
    pytest.param("experts", {"expert": 2, "context": 2, "fsdp": 2}, {}, {}, marks=slow),
]


@pytest.mark.parametrize(("name", "layout", "context", "train"), CASES, ids=str)
@pytest.mark.slow
def test_a_layout_trains_like_one_device(name, layout, context, train, x64):
    c = latent(name)
    c.context.update(context)
    c.train.update(train)
    assert_same(Run(c, "float64", **layout).one_step(), one_device(name), 1e-10)


@slow
@pytest.mark.parametrize("name", ["direct queries, windows", "wide values, biases"])
def test_blocks_of_any_size_compute_the_same_gradients(name, x64):
    for implementation in ("blockwise:5", "xla:3"):
        found = Run(latent(name, attention_impl=implementation), "float64").one_step()
        assert_same(found, one_device(name), 1e-10)


@pytest.mark.slow
def test_no_remat_and_full_remat_compute_the_same_gradients(x64):
    c = latent()
    c.train.remat = "full"
    assert_same(Run(c, "float64").one_step(), one_device("plain"), 1e-12)


def test_the_initial_parameters_have_the_documented_shapes():
    shapes = jax.eval_shape(build_model(parse(latent(), num_devices=1)).init, jax.random.key(0))
    found = {
        f"{name}/{leaf}": one.shape
        for name, kernels in shapes["layers"]["attention"].items()
        for leaf, one in kernels.items()
    }
    assert found == {
        "query_down/kernel": (2, 32, 12),
        "query_down_norm/scale": (2, 12),
        "query_up/kernel": (2, 12, 4, 10),
        "kv_down/kernel": (2, 32, 20),
        "kv_down_norm/scale": (2, 16),
        "kv_up/kernel": (2, 16, 4, 11),
        "out/kernel": (2, 4, 5, 32),
    }


# ---- with a cache ----


def logits_of(model, params, tokens):
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape))
    x = run_blocks(model.block, model.stack(params["layers"]), model.embed(params, batch), batch)
    return model.logits(params, x)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "plain" else slow) for name in MODELS]
)
def test_a_cache_of_latents_gives_the_logits_of_full_rows(name, x64):
    """It computes another formula: queries and results are projected, not keys and values."""
    section = latent(name).model.to_dict()
    section.pop("build")
    model = transformer.build(**section)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), model.init(jax.random.key(0)))
    expected = jax.jit(functools.partial(logits_of, model))(params, TOKENS)
    caches = model.empty_cache(2, 9, jnp.float64)
    assert {leaf.shape[-2:] for leaf in jax.tree.leaves(caches)} == {(1, 16 + 4)}
    assert len(jax.tree.leaves(caches[0])) == section["first_dense_layers"]
    check_cache(model, params, expected)


TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9))


def check_cache(model, params, expected):
    caches = model.empty_cache(2, 9, jnp.float64)
    step = jax.jit(functools.partial(cached_logits, model))
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        found, caches = step(params, TOKENS[:, start:stop], caches, start)
        np.testing.assert_allclose(found, expected[:, start:stop], rtol=0, atol=1e-12)


def test_adapters_by_name_equal_merged_kernels_with_a_cache_too(x64):
    """Of kv_up, which the cache meets in another formula, and of router and shared gate."""
    section = latent("experts", shared_gate=True).model.to_dict()
    section.pop("build")
    plain = transformer.build(**section)
    names = ("kv_up", "router", "shared_gate")
    by_pattern = lora.lora(plain, rank=2, alpha=6.0, targets=("*", "layers/mlp/*"))
    shapes = jax.eval_shape(by_pattern.init, jax.random.key(0))
    adapted_by_pattern = lora_layer.adapted_layers(weights.paths_of(shapes))
    assert not [path for path in adapted_by_pattern if path.endswith(names)]

    model = lora.lora(plain, rank=2, alpha=6.0, targets=tuple(f"*/{name}" for name in names))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.init(jax.random.key(0)))
    generator = np.random.default_rng(1)
    merged = params
    layers = lora_layer.adapted_layers(weights.paths_of(params))
    assert layers == ["first_layers/0/attention/kv_up"] + [
        f"layers/{name}" for name in ("attention/kv_up", "mlp/router", "mlp/shared_gate")
    ]
    for path in layers:
        layer = trees.leaf(params, path)
        b = generator.normal(0, 0.3, layer["lora_b"].shape)
        params = trees.merge(params, trees.nested(path, {"lora_b": b}))
        kernel = lora_merge.merged(layer["kernel"], layer["lora_a"], b, scale=3.0)
        merged = trees.merge(merged, trees.nested(path, {"kernel": kernel}))
    merged = trees.matching(merged, lambda path: "lora_" not in path)
    expected = jax.jit(functools.partial(logits_of, plain))(merged, TOKENS)
    found = jax.jit(functools.partial(logits_of, model))(params, TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    check_cache(model, params, expected)

    # Loss and gradients of A and B are those of the reference model.
    batch = Batch(TOKENS, TOKENS, np.ones(TOKENS.shape), None, None)
    adapter = Adapter(2, 6.0, tuple(f"*/{name}" for name in names))
    typed = TransformerConfig(**section)

    def own_loss(factors):
        tree = trees.merge(params, factors)
        x = run_blocks(model.block, model.stack(tree["layers"]), model.embed(tree, batch), batch)
        return model.head(tree, x, batch).loss

    def reference_loss(factors):
        return reference_model.loss(trees.merge(params, factors), batch, typed, adapter)

    factors = trees.matching(params, lambda path: "lora_" in path)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(jax.value_and_grad(reference_loss))(factors)
    assert_same(jax.jit(jax.value_and_grad(own_loss))(factors), expected, 1e-10)


def cached_logits(model, params, tokens, caches, start):
    """Returns the logits of tokens that follow `start` cached ones, and the updated caches."""
    positions = start + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), positions, jnp.zeros_like(positions))
    past = CacheState(start, jnp.zeros((2, 9), jnp.int32))
    x, first = model.cached_embed(params, batch, caches[0], past)

    def block(x, layer_and_cache):
        return model.cached_block(layer_and_cache[0], x, batch, layer_and_cache[1], past)

    x, of_layers = jax.lax.scan(block, x, (model.stack(params["layers"]), caches[1]))
    return model.logits(params, x), (first, of_layers)


@slow
@pytest.mark.parametrize("layout", [{"tensor": 4, "data": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_generation_has_the_same_tokens_on_every_mesh(layout):
    def tokens_on(**layout):
        run = Run(latent("experts"), "float32", **layout)
        settings = Sampling(temperature=0.0)
        options = dict(length=6, context=16, dtype="float32", sampling=settings)
        prompts = [[3, 1, 4, 1, 5], [9, 2]]
        return list(generate(run.program, run.start().params, prompts, **options))

    assert tokens_on(**layout) == tokens_on()


# ---- what is rejected, and what is counted ----


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dict(num_kv_heads=2), "model.num_kv_heads=2: with model.kv_lora_rank=16 each head has"),
        (dict(rope_head_dim=3), "model.rope_head_dim=3: with model.kv_lora_rank=16 rope rotates"),
        (dict(rope_head_dim=0), "model.rope_head_dim=0: with model.kv_lora_rank=16"),
        (
            dict(positions="learned"),
            "model.positions='learned': model.kv_lora_rank=16 needs 'rope'",
        ),
        (dict(qk_norm=True), "model.qk_norm=True: is not supported with model.kv_lora_rank=16"),
        (dict(qkv_bias=True), "model.qkv_bias=True: is not supported with"),
        (dict(rope_interleaved=True), "model.rope_interleaved=True: with model.kv_lora_rank=16"),
        (dict(rope_fraction=0.5), "model.rope_fraction=0.5: with model.kv_lora_rank=16"),
        (dict(kv_lora_rank=-1), "model.kv_lora_rank=-1"),
        (dict(kv_lora_rank=0), "model.q_lora_rank=12: is a size of latent attention; set"),
        (dict(kv_lora_rank=0, q_lora_rank=0, v_head_dim=0), "model.rope_head_dim=4: is a size of"),
    ],
    ids=str,
)
def test_what_latent_attention_does_not_support_is_one_line(model, message):
    with pytest.raises(ConfigError) as error:
        build_model(parse(latent(**model), num_devices=1))
    assert any(fault.startswith(message) for fault in error.value.faults), error.value.faults


def test_flops_count_each_projection_and_both_head_dims():
    c = latent()
    model = build_model(parse(c, num_devices=1))
    D, H, S = 32, 4, 16
    attention = D * 12 + 12 * H * 10 + D * 20 + 16 * H * 11 + H * 5 * D
    weights = 2 * (attention + 3 * D * 64) + D * 64
    assert model.flops_per_token(S) == 6 * weights + 2 * 6 * H * (10 + 5) * S
    direct = build_model(parse(latent(q_lora_rank=0), num_devices=1)).flops_per_token(S)
    assert direct - model.flops_per_token(S) == 6 * 2 * (D * H * 10 - D * 12 - 12 * H * 10)


@pytest.mark.parametrize("value_dim", [3, 8, 12])
def test_fused_attention_gets_one_head_dim(value_dim, simulated_gpu, monkeypatch):
    """jax's kernels have one head dim: zeros fill up the smaller ones, and change nothing."""
    shapes = []

    def fused(q, k, v, *, scale, is_causal, **_):
        shapes.append((q.shape, k.shape, v.shape))
        return attention_ops._xla(
            q, k, v, None, None, start=0, scale=scale, softcap=0.0, window=None
        )

    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.normal(size=(2, 6, 4, 8)), jnp.bfloat16) for _ in range(2))
    v = jnp.asarray(random.normal(size=(2, 6, 4, value_dim)), jnp.bfloat16)
    compute = functools.partial(attention_ops.cudnn.attention, start=0, softcap=0.0, window=None)
    found = compute(q, k, v, None, None, scale=0.3)
    expected = attention_ops.attention(q, k, v, None, scale=0.3, implementation="xla")
    np.testing.assert_array_equal(found, expected)
    assert {shape[-1] for shape in shapes[0]} == {max(8, value_dim)}
