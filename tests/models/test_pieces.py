"""Pieces of maths of single families: each mesh trains like one device, with every kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.models import transformer
from meshtrain.ops.feed_forward import clamped_swiglu
from meshtrain.optim import muon
from tests.lib.compare import assert_same
from tests.lib.configs import packed, tiny_config
from tests.lib.families import FAMILIES
from tests.lib.runs import Run, one_device

slow = pytest.mark.slow

MODELS = {
    "post-norm": FAMILIES["olmo 3"] | dict(rope_scaling=()),
    "no rope": dict(rope_layers="rn", qkv_bias=True, out_bias=True),
    "factors": FAMILIES["granite"],
    "shared gate": FAMILIES["qwen 2 moe"] | dict(num_experts=4),
    "gpt-oss": FAMILIES["gpt-oss"],
    "growing queries": FAMILIES["ministral 3"],
}
GRID = {"data": 2, "fsdp": 2, "tensor": 2}
PIPELINE = {"pipeline": 2, "data": 2, "tensor": 2}
EXPERTS = {"expert": 4, "tensor": 2}
STEPS = [
    ("post-norm", PIPELINE, {}),
    ("no rope", PIPELINE, {"num_microbatches": 2}),
    ("factors", GRID, {"kernels": "fused"}),
    ("shared gate", EXPERTS, {}),
    ("gpt-oss", {"expert": 2, "fsdp": 2, "tensor": 2}, {"kernels": "fused"}),
    ("growing queries", {"context": 2, "pipeline": 2, "tensor": 2}, {"remat": "full"}),
    *(
        pytest.param(*step, marks=slow)
        for step in [
            ("post-norm", GRID, {"kernels": "pallas"}),
            ("post-norm", {"context": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}),
            ("no rope", {"context": 2, "tensor": 4}, {"remat": "dots"}),
            ("factors", PIPELINE, {"kernels": "pallas"}),
            ("shared gate", PIPELINE, {"kernels": "fused", "num_microbatches": 2}),
            ("shared gate", {"context": 2, "tensor": 4}, {"remat": "full"}),
            ("growing queries", GRID, {"kernels": "fused"}),
            ("gpt-oss", PIPELINE, {"num_microbatches": 2}),
            ("gpt-oss", {"context": 4, "tensor": 2}, {"remat": "full"}),
        ]
    ),
]


@pytest.mark.parametrize(("name", "layout", "train"), STEPS, ids=str)
def test_a_step_equals_one_device(name, layout, train, x64):
    model = MODELS[name]
    c = packed(**model)
    c.train.update(train)
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


@pytest.mark.parametrize("method", ["gather", "dispatch"])
@pytest.mark.parametrize("kernel", ["batched", pytest.param("grouped", marks=slow)])
def test_biases_of_experts_on_every_route(method, kernel, x64):
    model = MODELS["gpt-oss"] | dict(d_model=32)
    c = packed(**model)
    c.expert.update(method=method, kernel=kernel)
    found = Run(c, dtype="float64", expert=2, fsdp=2).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


def test_a_layer_without_rope_does_not_see_the_order_of_earlier_tokens():
    """Only the mask of causal attention knows positions: earlier tokens may be exchanged."""
    cfg = parse(packed(rope_layers="n", num_layers=1), num_devices=1)
    model = build_model(cfg)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 8)).astype(np.int32)
    swapped = tokens[:, [2, 1, 0, *range(3, 8)]]

    def logits_of_last(tokens, model):
        batch = transformer.Batch(tokens, tokens, jnp.ones(tokens.shape))
        x = model.embed(params, batch)
        x = model.block(jax.tree.map(lambda leaf: leaf[0], params["layers"]), x, batch)
        return model.logits(params, x)[:, -1]

    np.testing.assert_allclose(
        logits_of_last(tokens, model), logits_of_last(swapped, model), rtol=0, atol=1e-5
    )
    with_rope = build_model(parse(packed(num_layers=1), num_devices=1))
    differ = logits_of_last(tokens, with_rope) - logits_of_last(swapped, with_rope)
    assert np.abs(differ).max() > 1e-3


def test_the_clamped_gate_is_that_of_gpt_oss():
    up, gate = (jnp.array(x) for x in ([-9.0, -1.0, 2.0, 9.0], [9.0, 2.0, -9.0, 1.0]))
    expected = [
        (max(-3, min(3, u)) + 1) * min(3, g) / (1 + np.exp(-1.5 * min(3, g)))
        for u, g in zip(up.tolist(), gate.tolist(), strict=True)
    ]
    np.testing.assert_allclose(clamped_swiglu(up, gate, limit=3.0, slope=1.5), expected, rtol=1e-6)


def test_muon_leaves_biases_of_experts_to_adamw():
    model = transformer.build(**section(MODELS["gpt-oss"]))
    found = muon.matrices(model.axes)["layers"]["mlp"]
    assert found["up"]["bias"] is None and found["down"]["bias"] is None
    assert found["up"]["kernel"] is not None


def test_flops_count_the_width_of_shared_experts_and_no_bias():
    def flops(**model):
        return transformer.build(**section(FAMILIES["qwen 2 moe"] | model)).flops_per_token(16)

    assert flops(d_shared=30) - flops(d_shared=20) == 6 * 2 * 3 * 32 * 10
    assert flops(expert_bias=True) == flops()
    assert flops() - flops(shared_gate=False) == 6 * 2 * 32


def section(changes):
    model = tiny_config().model.to_dict() | changes
    del model["build"]
    return model


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (dict(rope_layers=""), ["model.rope_layers=''", "'rrrn'"]),
        (dict(rope_layers="rx"), ["model.rope_layers='rx'"]),
        (dict(pre_norm=False), ["model.pre_norm=False", "model.post_norm=True"]),
        (dict(branch_scale=0.0), ["model.branch_scale=0.0"]),
        (dict(logit_scale=-1.0), ["model.logit_scale=-1.0"]),
        (dict(mlp="clamped_swiglu", glu_limit=0.0), ["model.glu_limit=0.0"]),
        (dict(num_experts=4, shared_gate=True), ["model.shared_gate=True", "no shared expert"]),
        (dict(num_experts=4, d_shared=8), ["model.d_shared=8", "model.num_shared_experts"]),
        (
            dict(kv_lora_rank=8, rope_head_dim=4, num_kv_heads=4, attention_sinks=True),
            ["model.attention_sinks=True: is not supported with model.kv_lora_rank=8"],
        ),
        (
            dict(kv_lora_rank=8, rope_head_dim=4, num_kv_heads=4, query_growth=0.1),
            ["model.query_growth=0.1: is not supported with model.kv_lora_rank=8"],
        ),
        (dict(query_growth=-0.1), ["model.query_growth=-0.1"]),
        (dict(query_growth=0.1, query_growth_length=0), ["model.query_growth_length=0"]),
    ],
    ids=str,
)
def test_an_invalid_value_is_rejected_naming_its_key(changes, messages):
    with pytest.raises(ConfigError) as error:
        transformer.build(**section(changes))
    assert [text for text in messages if text not in str(error.value)] == []
