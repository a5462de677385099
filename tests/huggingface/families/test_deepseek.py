"""DeepSeek-V2 and V3 in Hugging Face folders: what the tests of every family leave out."""

import importlib
import json
import math
import shutil

import jax
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, convert, tensor_rows, weights
from meshtrain.huggingface.families import deepseek
from tests.lib.hf import GOLDEN, arrays, run, save, tensor_bytes

YARN = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1)
YARN |= dict(original_max_position_embeddings=4096)
LITE = dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    attention_bias=False,
    aux_loss_alpha=0.001,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    pretraining_tp=1,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="greedy",
    v_head_dim=128,
    vocab_size=102400,
)
V2 = LITE | dict(
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_group=8,
    n_routed_experts=160,
    num_attention_heads=128,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    routed_scaling_factor=16.0,
    topk_group=3,
    topk_method="group_limited_greedy",
)
V3 = V2 | dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_nextn_predict_layers=1,
    rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
)
# As DeepSeek's papers and the files' index say; V3 without its layer for a further token.
COUNTS = {"lite": (LITE, 15_706_484_224), "v2": (V2, 235_741_434_880)}
COUNTS |= {"v3": (V3, 671_026_419_200)}


@pytest.mark.parametrize("model", COUNTS)
def test_a_hub_config_gives_the_number_of_parameters_of_its_model(model):
    config, num_parameters = COUNTS[model]
    section, family = config_json.to_section(config), config_json.family_of(config)
    abstract = jax.eval_shape(convert.model_of(section).init, jax.random.key(0))
    rows = tensor_rows.rows(family.names, weights.shapes_in_files(abstract, family), section)
    assert sum(math.prod(row.shape) for row in rows for _ in row.tensors) == num_parameters


def test_the_config_of_the_lite_model_is_that_on_the_hub():
    section = importlib.import_module("configs.deepseek_v2_lite").get_config().model.to_dict()
    hub = config_json.to_section(LITE)
    assert config_json.differences(section, hub) == []
    keys = ("balance", "balance_weight", "max_seq_len")
    assert [section[key] for key in keys] == [hub[key] for key in keys]


@pytest.mark.parametrize("model", COUNTS)
def test_a_config_and_its_section_convert_to_each_other_also_without_the_original(model):
    section = config_json.to_section(COUNTS[model][0])
    config = config_json.to_config(section)
    assert config["architectures"] == COUNTS[model][0]["architectures"]
    assert config_json.to_section(config) == section
    mscales = {key: config["rope_scaling"][key] for key in ("mscale", "mscale_all_dim")}
    assert mscales == {key: COUNTS[model][0]["rope_scaling"][key] for key in mscales}
    assert config.get("num_nextn_predict_layers", 0) == 0


@pytest.mark.parametrize(
    ("changes", "query_scale", "factor"),
    [
        (dict(mscale=1.0, mscale_all_dim=0.5), (1 + 0.05 * math.log(40)) ** 2, None),
        (dict(mscale_all_dim=1.0), (1 + 0.1 * math.log(40)) ** 2, 0.0),
        (dict(mscale=0.7), None, 0.0),
        (dict(factor=1), None, 0.0),
        (dict(), None, 0.0),
    ],
    ids=str,
)
def test_mscale_all_dim_scales_scores_and_mscale_the_rope(changes, query_scale, factor):
    config = V3 | dict(rope_scaling=YARN | changes)
    section = config_json.to_section(config)
    expected = query_scale and 192**-0.5 * query_scale
    assert math.isclose(section["query_scale"], expected or 0.0, rel_tol=1e-15)
    own = (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40)) if factor is None else factor
    assert math.isclose(section["rope_scaling"][5], own, rel_tol=1e-15)
    assert config_json.to_section(config_json.to_config(section)) == section


def test_a_scale_that_no_mscale_gives_is_not_exported():
    section = config_json.to_section(V3)
    for changes in (dict(query_scale=0.123456789), dict(rope_scaling=())):
        with pytest.raises(ConfigError, match="nearest is DeepseekV3ForCausalLM, where model.quer"):
            config_json.to_config(section | changes)


def test_without_groups_the_method_of_v2_is_greedy():
    assert config_json.to_section(LITE | dict(n_group=None))["expert_groups"] == ()
    assert config_json.to_section(V2 | dict(topk_method="greedy"))["expert_groups"] == ()
    section = config_json.to_section(V2)
    assert section["expert_groups"] == (8, 3) and section["router"] == "softmax"
    assert config_json.to_config(section)["topk_method"] == "group_limited_greedy"
    assert config_json.to_config(section | dict(expert_groups=()))["topk_method"] == "greedy"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LITE, dict(norm_topk_prob=True), "norm_topk_prob=True: not supported; only False is"),
        (LITE, dict(attention_bias=True), "attention_bias=True: not supported"),
        (LITE, dict(topk_method="noaux_tc"), "topk_method='noaux_tc': not supported"),
        (LITE, dict(kv_lora_rank=0), "kv_lora_rank=0: is not a number above 0"),
        (LITE, dict(aux_loss_alpha=-1), "aux_loss_alpha=-1: is not a number of at least 0"),
        (V2, dict(n_group=None), "n_group=None: is not an integer of at least 1"),
        (V3, dict(norm_topk_prob=False), "norm_topk_prob=False: not supported; only True is"),
        (V3, dict(rope_interleave=False), "rope_interleave=False: not supported; only True is"),
        (V3, dict(quantization_config={"quant_method": "fp8"}), "only null is"),
    ],
    ids=str,
)
def test_what_transformers_computes_otherwise_is_rejected(config, changes, message):
    with pytest.raises(ConfigError) as error:
        config_json.to_section(config | changes)
    assert message in str(error.value)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.slow
def test_layers_for_further_tokens_are_left_out_and_reported(number, folder_of, tmp_path, capsys):
    def change(tensors):
        for n in range(number):
            tensors[f"model.layers.{3 + n}.enorm.weight"] = np.ones(16, np.float32)
            tensors[f"model.layers.{3 + n}.eh_proj.weight"] = np.ones((16, 32), np.float32)

    source = folder_of("deepseek_v3", change=change, num_nextn_predict_layers=number)
    run(source, tmp_path / "run")
    assert (
        f"in float32, without {2 * number} tensors of layers for further" in capsys.readouterr().out
    )
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(GOLDEN / "deepseek_v3")
    assert json.loads((tmp_path / "back" / "config.json").read_text())[deepseek.MTP_LAYERS] == 0


def test_a_tensor_of_a_layer_that_the_config_does_not_have_is_an_error(folder_of, tmp_path):
    def change(tensors):
        tensors["model.layers.3.enorm.weight"] = np.ones(16, np.float32)

    source = folder_of("deepseek_v3", change=change)
    with pytest.raises(ConfigError, match="layers.3.enorm.weight +expected none"):
        run(source, tmp_path / "run")


def test_a_latent_of_another_size_is_reported_by_its_tensors(tmp_path):
    folder = shutil.copytree(GOLDEN / "deepseek_v2", tmp_path / "wrong")
    tensors = arrays(folder)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors[name] = tensors[name][:-1]
    save(folder, tensors)
    with pytest.raises(ConfigError, match=r"kv_a_proj_with_mqa.weight +expected \[18, 16\] +found"):
        run(folder, tmp_path / "run")
