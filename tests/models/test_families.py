"""Each model family is a config of one transformer, and equals the reference of meshtrain verify.

tests/huggingface/test_weights.py checks converted weights.
"""

import functools
import importlib

import jax
import numpy as np
import pytest

from meshtrain import ConfigError
from meshtrain.data import synthetic
from meshtrain.models import transformer, transformer_config
from meshtrain.tools.verify.laws import model as model_laws
from tests.lib.configs import tiny_config
from tests.lib.families import FAMILIES


def section(**changes):
    model = tiny_config().model.to_dict()
    del model["build"]
    return {**model, **changes}


@pytest.fixture
def batch():
    options = dict(seq_len=16, vocab_size=64, separator=-1, seed=0, split="train")
    return synthetic.build(**options).read(np.arange(4))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "llama 2" else pytest.mark.slow) for name in FAMILIES],
)
def test_initialisation_loss_and_gradient_of_a_family_equal_the_reference(family, batch):
    with jax.enable_x64(True):
        assert model_laws.decoder(section(**FAMILIES[family]), batch) is None


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (dict(rope_scaling=("yarn", 4.0)), ["model.rope_scaling=('yarn', 4.0)", "llama3"]),
        (
            dict(rope_scaling=("longrope", 4.0)),
            ["model.rope_scaling=('longrope', 4.0)", "'dynamic'"],
        ),
        (dict(rope_scaling=("yarn", 4.0, 32.0, 1.0, 64)), ["ATTENTION_FACTOR", "TRUNCATE"]),
        (dict(rope_scaling=("yarn", 0.5, 32.0, 1.0, 64, 0.0, True)), ["the factor is below 1"]),
        (dict(rope_scaling=("yarn", 4.0, 1.0, 32.0, 64, 0.0, True)), ["BETA_SLOW is not below"]),
        (dict(rope_scaling=("yarn", 4.0, 32.0, 1.0, 64, -1.0, True)), ["above 0"]),
        (dict(rope_scaling=("yarn", 4.0, 32.0, 1.0, 64, 0.0, 1)), ["True or False"]),
        (
            dict(rope_theta=1.0, rope_scaling=("yarn", 4.0, 32.0, 1.0, 64, 0.0, True)),
            ["model.rope_theta=1.0: yarn"],
        ),
        (dict(rope_scaling=("dynamic", 4.0)), ["model.rope_scaling=('dynamic', 4.0)"]),
        (dict(rope_scaling=("dynamic", 0.5, 64)), ["the factor is below 1"]),
        (dict(head_dim=2, rope_scaling=("dynamic", 4.0, 64)), ["model.head_dim=2: dynamic"]),
        (dict(rope_scaling=("longrope", 8, 1.0, 2.0, 2.0, 2.0)), ["SHORT..., LONG..."]),
        (dict(rope_scaling=("longrope", 8, 1.0, 2.0, 0.0)), ["with numbers above 0"]),
        (
            dict(rope_scaling=("longrope", 8, 1.0, 2.0, 2.0)),
            ["longrope has 2 factors; use 4 short"],
        ),
        (dict(rope_fraction=0.0), ["model.rope_fraction=0.0"]),
        (dict(rope_fraction=1.5), ["model.rope_fraction=1.5: use more than 0, and at most 1"]),
        (dict(rope_fraction=0.1), ["model.rope_fraction=0.1: is less than 2 of 8 dims"]),
        (dict(rope_scaling=("linear",)), ["model.rope_scaling=('linear',)"]),
        (dict(rope_scaling=("linear", "4")), ["model.rope_scaling=('linear', '4')"]),
        (dict(rope_scaling=("llama3", 8.0, 4.0, 1.0, 64)), ["low factor is not below"]),
        (dict(attention="gx"), ["model.attention='gx'"]),
        (dict(attention=""), ["model.attention=''"]),
        (dict(attention="lg"), ["model.window=0", "model.attention='lg'"]),
        (dict(d_model=33), ["model.d_model=33", "set model.head_dim"]),
        (dict(head_dim=5), ["model.head_dim=5", "odd"]),
        (dict(norm="rms1p", window=-1), ["model.norm='rms1p'", "model.window=-1"]),
        (dict(embed_scale=0.0), ["model.embed_scale=0.0"]),
        (dict(num_experts=4, experts_per_token=5), ["model.experts_per_token=5: use 1 to"]),
        (dict(num_experts=4, router="top2"), ["model.router='top2'", "topk_softmax"]),
        (dict(num_experts=4, balance="aux"), ["model.balance='aux'", "sequence"]),
        (dict(num_experts=4, expert_groups=(2,)), ["model.expert_groups=(2,)", "GROUPS_PER_TOKEN"]),
        (dict(num_experts=4, expert_groups=(3, 1)), ["not divisible by the number of groups"]),
        (dict(num_experts=4, expert_groups=(4, 1)), ["from 1 groups of 1; use groups"]),
    ],
    ids=str,
)
def test_an_invalid_model_section_is_rejected_naming_its_keys(changes, messages):
    with pytest.raises(ConfigError) as error:
        transformer.build(**section(**changes))
    assert [text for text in messages if text not in str(error.value)] == []


def test_keys_that_matter_in_training_alone_do_not_decide_the_logits():
    sparse = section(num_experts=4, experts_per_token=2, d_expert=8, qk_norm=True)
    without = {"balance", "balance_weight", "router_z_loss", "dropout", "z_loss"}
    without |= {"attention_impl", "loss_chunk_mib"}
    # Of a gate that is not clamped, of shared experts where there are none, and of queries that do
    # not grow.
    without |= {"glu_limit", "glu_slope", "d_shared", "shared_gate", "query_growth_length"}
    assert {*sparse} - {*transformer_config.effective(sparse)} == without
    dense = {
        *section(),
    } - {*transformer_config.effective(section())}
    switched_off = {"experts_per_token", "d_expert", "num_shared_experts", "router"}
    switched_off |= {"router_scale", "expert_groups", "capacity_factor", "qk_norm_heads"}
    switched_off |= {"expert_bias"}
    assert dense == without | switched_off


def test_flops_of_local_layers_count_only_their_window():
    models = {key: transformer.build(**section(**FAMILIES[key])) for key in ("gemma 3", "llama 2")}
    layers = 12 * 32  # 12 d per layer and visible position
    increase = {k: m.flops_per_token(64) - m.flops_per_token(32) for k, m in models.items()}
    assert increase == {"gemma 3": 32 * layers, "llama 2": 2 * 32 * layers}


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4), ("llama2", 6738.4), ("llama3", 8030.3), ("mistral", 7241.7)]
    + [("qwen2", 494.0), ("qwen3", 596.0), ("gemma2", 2614.3), ("gemma3", 999.9)]
    + [("mixtral", 46702.8), ("qwen3_moe", 30532.1), ("olmoe", 6919.2)]
    + [("deepseek_v2_lite", 15706.5)],
)
def test_a_config_has_the_parameter_count_of_its_model(name, millions):
    c = importlib.import_module(f"configs.{name}").get_config().model.to_dict()
    del c["build"]
    shapes = jax.eval_shape(transformer.build(**c).init, jax.random.key(0))
    padding = (-c["vocab_size"] % 128) * c["d_model"] * (1 if c["tie_embeddings"] else 2)
    num = sum(leaf.size for leaf in jax.tree.leaves(shapes)) - padding
    assert num / 1e6 == pytest.approx(millions, abs=0.06)


INITIAL = {  # first value of parameters of the tiny model, for seed 0
    "layers/attention/query/kernel": 0.008610553108155727,
    "layers/attention/out/kernel": 0.047706108540296555,
    "layers/mlp/up/kernel": -0.06827706098556519,
    "layers/mlp/down/kernel": 0.0796966403722763,
    "output/kernel": -0.021052172407507896,
}


def test_a_seed_gives_the_parameters_of_earlier_versions(tiny):
    """Otherwise a config would train another model, and figures in the docs would be wrong."""
    model = transformer.build(**{k: v for k, v in tiny.model.items() if k != "build"})
    params = jax.jit(model.init)(jax.random.key(0))
    found = {
        path: float(
            np.ravel(functools.reduce(lambda tree, key: tree[key], path.split("/"), params))[0]
        )
        for path in INITIAL
    }
    assert found == pytest.approx(INITIAL, rel=1e-6)
