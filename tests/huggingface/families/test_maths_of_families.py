"""Families with a piece of maths of their own: generation with a cache, and their files.

test_training.py compares training steps, tests/huggingface/test_weights.py logits, and
test_convert.py the bits of both ways.
"""

import numpy as np
import pytest

from meshtrain.config import load as configfile
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, weights
from meshtrain.inference import generate as inference_generate
from tests.lib.hf import GOLDEN, arrays, assert_same_generation, load, run

slow = pytest.mark.slow

FAMILIES = (
    "ministral3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "granitemoe",
    "qwen2_moe",
    "gpt_oss",
)
LAYOUTS = {
    "olmo2": {"tensor": 2, "fsdp": 4},
    "granitemoe": {"tensor": 4, "data": 2},
    "gpt_oss": {"expert": 2, "tensor": 2, "fsdp": 2},
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[] if one in ("smollm3", "gpt_oss") else slow) for one in FAMILIES],
)
def test_generation_with_a_cache_has_the_logits_of_transformers(family, tmp_path):
    run(GOLDEN / family, tmp_path / "run")
    raw = configfile.load_config(str(tmp_path / "run" / "config.json"))
    raw.mesh.update({"data": 1, **LAYOUTS.get(family, {"fsdp": 8})})
    cfg = parse(raw, num_devices=8)
    program, params = inference_generate.restore_params(cfg, tmp_path / "run")
    with program.active():
        assert_same_generation(GOLDEN / family, program.model, params)


# ---- files ----


def test_gate_and_up_of_gpt_oss_alternate(tmp_path):
    """The halves of a tensor with both, one after the other, would give other logits."""
    _, params = load(GOLDEN / "gpt_oss")
    stored = arrays(GOLDEN / "gpt_oss")["model.layers.1.mlp.experts.gate_up_proj"]
    mlp = params["layers"]["mlp"]
    np.testing.assert_array_equal(mlp["gate"]["kernel"][1], stored[..., ::2])
    np.testing.assert_array_equal(mlp["up"]["kernel"][1], stored[..., 1::2])


def test_experts_in_one_tensor_may_be_more_than_the_tensors_of_a_folder(folder_of):
    """Their number is a dim, not the number of names."""
    folder = folder_of("gpt_oss", num_local_experts=400)
    with pytest.raises(ConfigError, match="num_local_experts=400|expected"):
        load(folder)
    weights.check_sizes(folder_of("granitemoe"))


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        (dict(pre_norm=False, post_norm=True, qk_norm=True, qk_norm_heads="all"), "Olmo2"),
        (dict(rope_layers="rn", qkv_bias=True, out_bias=True), "SmolLM3"),
        (dict(branch_scale=0.3, logit_scale=1 / 49, query_scale=0.2, out_bias=False), "Granite"),
        (dict(num_experts=4, logit_scale=1 / 3), "GraniteMoe"),
        (
            dict(num_experts=4, num_shared_experts=2, d_expert=6, shared_gate=True, qkv_bias=True),
            "Qwen2Moe",
        ),
        (
            dict(
                num_experts=4,
                expert_bias=True,
                attention_sinks=True,
                mlp="clamped_swiglu",
                glu_limit=5.0,
                attention="lg",
                window=5,
            ),
            "GptOss",
        ),
    ],
    ids=str,
)
def test_a_run_trained_here_is_exported_as_the_family_with_its_pieces(changes, architecture, tiny):
    section = tiny.model.to_dict() | changes
    config = config_json.to_config(section)
    assert config["architectures"] == [f"{architecture}ForCausalLM"]
    assert config_json.differences(section, config_json.to_section(config)) == []


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("olmo2", dict(pre_norm=True), "model.pre_norm is False, not True"),
        ("olmo2", dict(rope_layers="rn"), "model.rope_layers is 'rrr', not 'rnr'"),
        ("smollm3", dict(attention_sinks=True), "model.attention_sinks is False, not True"),
        ("granite", dict(rope_layers="rn"), "model.rope_layers"),
        ("qwen2_moe", dict(shared_gate=False), "model.shared_gate"),
        ("qwen2_moe", dict(d_shared=0, num_shared_experts=0, shared_gate=False), "=0: is not a"),
        ("gpt_oss", dict(mlp="swiglu"), "model.mlp is 'clamped_swiglu', not 'swiglu'"),
        ("gpt_oss", dict(expert_bias=False), "model.expert_bias is True, not False"),
    ],
    ids=str,
)
def test_a_piece_that_a_family_lacks_is_not_exported(family, changes, part):
    section = weights.model_section(GOLDEN / family) | changes
    original = config_json.read(GOLDEN / family / "config.json")
    with pytest.raises(ConfigError, match="no supported architecture") as error:
        config_json.to_config(section, original)
    assert part in str(error.value)
