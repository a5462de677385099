"""Families that differ from Llama in a few settings: config.json files of the hub, and their keys.

Also model types whose class is that of another family.
"""

import json
import math

import jax
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, convert, tensor_rows, weights
from tests.lib.hf import GOLDEN, arrays, load, run, tensor_bytes

SHORT, LONG = [1.0] * 48, [4.0] * 48
HUB = {  # config.json of well-known models (the keys of the model), and their number of parameters
    "gemma-2b": (
        dict(
            architectures=["GemmaForCausalLM"],
            head_dim=256,
            hidden_act="gelu",
            hidden_size=2048,
            intermediate_size=16384,
            max_position_embeddings=8192,
            model_type="gemma",
            num_attention_heads=8,
            num_hidden_layers=18,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            vocab_size=256000,
        ),
        2_506_172_416,
    ),
    "Phi-3-mini-128k": (
        dict(
            architectures=["Phi3ForCausalLM"],
            hidden_act="silu",
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=131072,
            model_type="phi3",
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_scaling=dict(long_factor=LONG, short_factor=SHORT, type="su"),
            rope_theta=10000.0,
            sliding_window=262144,
            tie_word_embeddings=False,
            vocab_size=32064,
        ),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        dict(
            architectures=["Phi3ForCausalLM"],
            attention_bias=False,
            full_attn_mod=1,
            hidden_act="silu",
            hidden_size=3072,
            intermediate_size=8192,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            model_type="phi3",
            num_attention_heads=24,
            num_hidden_layers=32,
            num_key_value_heads=8,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rms_norm_eps=1e-5,
            rope_scaling=dict(long_factor=LONG, short_factor=SHORT, type="longrope"),
            rope_theta=10000.0,
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
        3_836_021_760,
    ),
    "starcoder2-3b": (
        dict(
            architectures=["Starcoder2ForCausalLM"],
            activation_function="gelu",
            attention_softmax_in_fp32=True,
            hidden_act="gelu_pytorch_tanh",
            hidden_size=3072,
            intermediate_size=12288,
            layer_norm_epsilon=1e-5,
            max_position_embeddings=16384,
            mlp_type="default",
            model_type="starcoder2",
            norm_epsilon=1e-5,
            norm_type="layer_norm",
            num_attention_heads=24,
            num_hidden_layers=30,
            num_key_value_heads=2,
            rope_theta=999999.4420358813,
            sliding_window=4096,
            use_bias=True,
            vocab_size=49152,
        ),
        3_030_371_328,
    ),
    "stablelm-2-1_6b": (
        dict(
            architectures=["StableLmForCausalLM"],
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=5632,
            layer_norm_eps=1e-5,
            max_position_embeddings=4096,
            model_type="stablelm",
            num_attention_heads=32,
            num_hidden_layers=24,
            num_key_value_heads=32,
            partial_rotary_factor=0.25,
            qk_layernorm=False,
            rope_theta=10000,
            tie_word_embeddings=False,
            use_parallel_residual=False,
            use_qkv_bias=True,
            vocab_size=100352,
        ),
        1_644_515_328,
    ),
    "GLM-4-9B-0414": (
        dict(
            architectures=["Glm4ForCausalLM"],
            attention_bias=True,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=13696,
            max_position_embeddings=32768,
            model_type="glm4",
            num_attention_heads=32,
            num_hidden_layers=40,
            num_key_value_heads=2,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            vocab_size=151552,
        ),
        9_400_279_040,
    ),
    "Seed-OSS-36B": (
        dict(
            architectures=["SeedOssForCausalLM"],
            attention_bias=True,
            attention_out_bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=5120,
            intermediate_size=27648,
            max_position_embeddings=524288,
            mlp_bias=False,
            model_type="seed_oss",
            num_attention_heads=80,
            num_hidden_layers=64,
            num_key_value_heads=8,
            rms_norm_eps=1e-6,
            rope_scaling=dict(rope_type="default"),
            rope_theta=10000000.0,
            tie_word_embeddings=False,
            vocab_size=155136,
        ),
        36_151_104_512,
    ),
    "internlm3-8b": (
        dict(
            architectures=["InternLM3ForCausalLM"],
            bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=10240,
            max_position_embeddings=32768,
            model_type="internlm3",
            num_attention_heads=32,
            num_hidden_layers=48,
            num_key_value_heads=2,
            qkv_bias=False,
            rms_norm_eps=1e-5,
            rope_scaling=dict(factor=6.0, rope_type="dynamic"),
            rope_theta=50000000,
            tie_word_embeddings=False,
            vocab_size=128512,
        ),
        8_804_241_408,
    ),
    "ERNIE-4.5-0.3B": (
        dict(
            architectures=["Ernie4_5ForCausalLM"],
            head_dim=128,
            hidden_act="silu",
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=131072,
            model_type="ernie4_5",
            num_attention_heads=16,
            num_hidden_layers=18,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=True,
            use_bias=False,
            vocab_size=103424,
        ),
        360_748_032,
    ),
}


@pytest.mark.parametrize("model", HUB)
def test_a_hub_config_gives_the_number_of_parameters_of_its_model(model):
    config, num_parameters = HUB[model]
    section, family = config_json.to_section(config), config_json.family_of(config)
    abstract = jax.eval_shape(convert.model_of(section).init, jax.random.key(0))
    rows = tensor_rows.rows(family.names, weights.shapes_in_files(abstract, family), section)
    sizes = {name: math.prod(row.shape) for row in rows for name in row.tensors}
    assert sum(sizes.values()) == num_parameters


@pytest.mark.parametrize("model", HUB)
def test_a_config_converts_back_to_its_own_model_type(model):
    config, _ = HUB[model]
    section = config_json.to_section(config)
    exported = json.loads(json.dumps(config_json.to_config(section, config)))
    assert exported["model_type"] == config["model_type"]
    assert config_json.to_section(exported) == section
    rope = config.get("rope_scaling") or {}
    assert exported["rope_parameters"].get("short_factor") == rope.get("short_factor")


ROPE = dict(rope_type="default", rope_theta=100.0)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 3, long_factor=[2.0] * 3)
LONGROPE |= dict(rope_theta=100.0, partial_rotary_factor=0.75)

YARN = dict(rope_type="yarn", factor=4.0, rope_theta=100.0, original_max_position_embeddings=8)
GROWTH = dict(llama_4_scaling_beta=0.25)
OF_YARN = ("yarn", 4.0, 32.0, 1.0)

# (golden folder, changed keys of config.json, changed keys of the section, or a part of the error)
ROWS = [
    ("glm", dict(rope_parameters=ROPE), dict(rope_fraction=0.5)),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor=None), dict(rope_fraction=1.0)),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor=0.25), dict(rope_fraction=0.25)),
    ("glm", dict(rope_parameters=ROPE | dict(partial_rotary_factor=1)), dict(rope_fraction=1.0)),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor=0.4), "is 3 of 8 dims"),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor=0.1), "is 0 of 8 dims"),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor="0.5"), "partial_rotary_factor='0.5'"),
    ("glm", dict(rope_parameters=ROPE, partial_rotary_factor=2.0), "partial_rotary_factor=2.0"),
    ("glm", dict(attention_bias=None), "attention_bias=None"),
    ("helium", dict(rope_parameters=ROPE, partial_rotary_factor=0.5), "rotates all dims of a head"),
    ("helium", dict(head_dim=8), "head_dim=8: the output projection"),
    ("stablelm", dict(use_parallel_residual=True), "use_parallel_residual=True"),
    ("stablelm", dict(qk_layernorm=True), "qk_layernorm=True"),
    ("starcoder2", dict(use_bias=False), dict(bias=False)),
    ("starcoder2", dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ("gemma", dict(hidden_act="silu"), "hidden_act='silu'"),
    ("gemma", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (
        "seed_oss",
        dict(mlp_bias=True),
        "attention_bias=True, attention_out_bias=False, mlp_bias=True",
    ),
    ("seed_oss", dict(attention_bias=False), dict(qkv_bias=False)),
    ("seed_oss", dict(attention_out_bias=True), dict(qkv_bias=True, out_bias=True)),
    (
        "seed_oss",
        dict(attention_bias=False, attention_out_bias=True),
        dict(qkv_bias=False, out_bias=True),
    ),
    (
        "seed_oss",
        dict(attention_bias=False, attention_out_bias=True, mlp_bias=True),
        "attention_bias=False, attention_out_bias=True, mlp_bias=True",
    ),
    ("llama2", dict(mlp_bias=False), dict(bias=False, qkv_bias=True, out_bias=True)),
    *(
        (family, dict(attention_bias=True), dict(qkv_bias=True, out_bias=True))
        for family in ("llama3", "qwen3", "qwen3_moe", "olmoe", "dots1", "hy_v3")
    ),
    *(
        (family, dict(attention_bias=True), dict(qkv_bias=True, out_bias=True))
        for family in ("gemma", "gemma2", "gemma3", "vaultgemma")
    ),
    ("cwm", dict(mlp_bias=True), "mlp_bias=True"),
    (
        "cwm",
        dict(rope_parameters=None, rope_theta=7.0),
        dict(rope_theta=1e6, rope_scaling=("llama3", 16.0, 1.0, 4.0, 8192.0)),
    ),
    ("cwm", dict(rope_parameters={}), dict(rope_theta=1e6, rope_scaling=())),
    ("ministral", dict(layer_types=None), dict(attention="l")),
    ("ministral", dict(layer_types=None, sliding_window=None), dict(attention="g", window=0)),
    ("phi3", dict(rope_parameters=dict(type="linear", factor=2.0)), "transformers rejects it"),
    (
        "phi3_longrope",
        dict(rope_parameters=LONGROPE | dict(rope_type="su")),
        dict(rope_scaling=("longrope", 32.0, 1.2**0.5, *[1.0] * 3, *[2.0] * 3)),
    ),
    (
        "phi3_longrope",
        dict(rope_parameters=LONGROPE | dict(rope_type="yarn", attention_factor=1.25)),
        dict(rope_scaling=("longrope", 32.0, 1.25, *[1.0] * 3, *[2.0] * 3)),
    ),
    ("phi3_longrope", dict(rope_parameters=LONGROPE | dict(short_factor=[1.0])), "different len"),
    ("phi3_longrope", dict(rope_parameters=LONGROPE | dict(long_factor="x")), "long_factor='x'"),
    ("ernie4_5_moe", dict(moe_layer_interval=2), "moe_layer_interval=2"),
    ("ernie4_5_moe", dict(moe_layer_end_index=0), "moe_layer_end_index=0"),
    ("ernie4_5_moe", dict(moe_num_shared_experts=0), dict(num_shared_experts=0)),
    ("ernie4_5_moe", dict(moe_num_shared_experts=None), "moe_num_shared_experts=None"),
    ("solar_open", dict(n_shared_experts=0), dict(num_shared_experts=0)),
    ("glm4_moe", dict(use_qk_norm=False), dict(qk_norm=False)),
    ("glm4_moe", dict(norm_topk_prob=False), "norm_topk_prob=False"),
    ("glm4_moe_lite", dict(mlp_layer_types=["sparse"] * 2), dict(first_dense_layers=0)),
    ("glm4_moe_lite", dict(mlp_layer_types=["sparse", "dense"]), "mlp_layer_types="),
    ("glm4_moe_lite", dict(mlp_layer_types=["dense"] * 2), "mlp_layer_types="),
    ("youtu", dict(rope_interleave=False), "rope_interleave=False"),
    (
        "ministral3",
        dict(rope_parameters=None),
        dict(
            rope_theta=1e6,
            rope_scaling=("yarn", 16.0, 32.0, 1.0, 16384.0, 1.0, True),
            query_growth=0.1,
            query_growth_length=16384,
        ),
    ),
    (
        "ministral3",
        dict(rope_parameters=YARN | GROWTH, original_max_position_embeddings=16),
        dict(rope_scaling=(*OF_YARN, 16.0, 0.0, True), query_growth=0.25, query_growth_length=16),
    ),
    (
        "ministral3",
        dict(rope_parameters=None, rope_scaling=dict(type="yarn", factor=4.0) | GROWTH),
        dict(
            rope_theta=10000.0,
            rope_scaling=(*OF_YARN, 64.0, 0.0, True),
            query_growth=0.25,
            query_growth_length=64,
        ),
    ),
    (
        "ministral3",
        dict(rope_parameters=ROPE | GROWTH | dict(original_max_position_embeddings=5)),
        dict(rope_scaling=(), query_growth=0.25, query_growth_length=5),
    ),
    (
        "ministral3",
        dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0)),
        dict(rope_scaling=(*OF_YARN, 8.0, 0.0, True), query_growth=0.0),
    ),
    ("ministral3", dict(rope_parameters=YARN), "llama_4_scaling_beta=None"),
    ("ministral3", dict(rope_parameters={}), "llama_4_scaling_beta=None"),
    (
        "ministral3",
        dict(rope_parameters=YARN | dict(llama_4_scaling_beta=-1)),
        "llama_4_scaling_beta=-1: is not a number of at least 0",
    ),
    (
        "ministral3",
        dict(rope_parameters=ROPE | GROWTH),
        "original_max_position_embeddings=None: is not a number above 0",
    ),
    (
        "ministral3",
        dict(rope_parameters=YARN | GROWTH | dict(original_max_position_embeddings=8.5)),
        "original_max_position_embeddings=8.5: is not an integer",
    ),
    ("smollm3", dict(rope_parameters=YARN), dict(rope_scaling=(*OF_YARN, 8.0, 0.0, True))),
    (
        "smollm3",
        dict(rope_parameters=dict(full_attention=ROPE, sliding_attention=ROPE)),
        "same rope in all layers",
    ),
    ("qwen2_moe", dict(mlp_only_layers=[1, 0]), dict(first_dense_layers=2)),
    ("qwen3_moe", dict(decoder_sparse_step=3), dict(first_dense_layers=2)),
    ("qwen3_moe", dict(decoder_sparse_step=3, mlp_only_layers=[1]), dict(first_dense_layers=2)),
    ("qwen2_moe_dense", dict(mlp_only_layers=None), dict(first_dense_layers=0)),
]


@pytest.mark.parametrize(("family", "keys", "expected"), ROWS, ids=lambda value: str(value)[:60])
def test_a_key_has_the_effect_that_it_has_in_transformers(family, keys, expected):
    original = config_json.read(GOLDEN / family / "config.json")
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as error:
            config_json.to_section(original | keys)
        assert expected in str(error.value)
        return
    section = config_json.to_section(original)
    assert (
        config_json.differences(section | expected, config_json.to_section(original | keys)) == []
    )


def test_factors_of_longrope_that_do_not_fit_the_head_are_rejected_before_anything_is_read():
    config = config_json.read(GOLDEN / "phi3_longrope" / "config.json")
    short = LONGROPE | dict(short_factor=[1.0] * 2, long_factor=[1.0] * 2)
    section = config_json.to_section(config | dict(rope_parameters=short))
    with pytest.raises(ConfigError, match="longrope has 4 factors; use 3 short ones, then 3 long"):
        convert.model_of(section)


# ---- tensors that hold several parameters ----


def test_a_fused_tensor_holds_its_parts_one_after_the_other():
    _, params = load(GOLDEN / "phi3", data=1)
    fused = arrays(GOLDEN / "phi3")["model.layers.1.self_attn.qkv_proj.weight"]
    attention = params["layers"]["attention"]
    kernels = [np.asarray(attention[name]["kernel"][1]) for name in ("query", "key", "value")]
    parts = [kernel.reshape(16, -1).T for kernel in kernels]
    np.testing.assert_array_equal(np.concatenate(parts), fused)
    assert [len(part) for part in parts] == [16, 8, 8]
    fused = arrays(GOLDEN / "phi3")["model.layers.1.mlp.gate_up_proj.weight"]
    gate, up = (np.asarray(params["layers"]["mlp"][name]["kernel"][1]).T for name in ("gate", "up"))
    np.testing.assert_array_equal(np.concatenate([gate, up]), fused)


@pytest.mark.parametrize("name", ["self_attn.qkv_proj", "mlp.gate_up_proj"])
def test_a_fused_tensor_of_another_shape_is_reported_by_its_name(name, folder_of):
    def change(tensors):
        tensors[f"model.layers.1.{name}.weight"] = np.ones((7, 16), np.float32)

    with pytest.raises(ConfigError, match=rf"layers.1.{name}.weight +expected \[\d+, 16\] +found"):
        load(folder_of("phi3", change=change))


@pytest.mark.parametrize("family", ["dots1", "glm4_moe"])
def test_a_model_without_shared_experts_keeps_their_empty_tensors(family, folder_of, tmp_path):
    def change(tensors):
        for name, x in tensors.items():
            if ".shared_experts." in name:
                tensors[name] = x[:, :0] if "down_proj" in name else x[:0]

    source = folder_of(family, change=change, n_shared_experts=0)
    run(source, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(source)


# ---- model types whose class is that of another family ----


def config_of(family, **keys):
    return config_json.read(GOLDEN / family / "config.json") | keys


@pytest.mark.parametrize(
    ("family", "model_type", "own"),
    [
        ("llama3", "internlm3", "InternLM3ForCausalLM"),
        ("llama3", "iquestcoder", "IQuestCoderForCausalLM"),
        ("llama3", "exaone", "ExaoneForCausalLM"),
        ("deepseek_v3", "sarvam_mla", "SarvamMLAForCausalLM"),
        ("glm4_moe", "sarvam_moe", "SarvamMoEForCausalLM"),
    ],
)
def test_the_class_of_a_model_type_is_trusted_and_its_type_is_kept(family, model_type, own):
    plain = config_json.to_section(config_of(family))
    config = config_of(family, model_type=model_type)
    for architectures in (config["architectures"], [own], None):
        changed = config | dict(architectures=architectures)
        assert config_json.to_section(changed) == plain
        exported = config_json.to_config(plain, changed)
        assert exported["model_type"] == model_type
        assert exported["architectures"] == config["architectures"]


def test_a_model_type_has_the_defaults_and_the_names_of_its_config_class():
    config = config_of("llama3", model_type="internlm3", qkv_bias=True, bias=True)
    for key in ("head_dim", "rms_norm_eps"):
        del config[key]
    section = config_json.to_section(config)
    assert (section["head_dim"], section["norm_epsilon"], section["bias"]) == (128, 1e-5, True)
    rope = dict(type="deepseek_yarn", factor=4.0, original_max_position_embeddings=16)
    sarvam = config_of("deepseek_v3", model_type="sarvam_mla", rope_scaling=rope, head_dim=576)
    assert config_json.to_section(sarvam)["rope_scaling"][:2] == ("yarn", 4.0)


def test_an_unknown_model_type_is_trusted_if_its_config_gives_every_key():
    config = config_of("llama3", model_type="my_llama")
    assert config_json.to_section(config) == config_json.to_section(config_of("llama3"))
    del config["rms_norm_eps"]
    with pytest.raises(ConfigError) as error:
        config_json.to_section(config)
    (fault,) = error.value.faults
    assert fault.startswith("rms_norm_eps: missing; model_type='my_llama' may have another default")


@pytest.mark.parametrize("model_type", ["granite", "mistral", "smollm3", "helium", "qwen2_moe"])
def test_a_model_type_that_transformers_computes_otherwise_is_rejected(model_type):
    with pytest.raises(ConfigError, match=f"model_type='{model_type}': transformers uses this"):
        config_json.to_section(config_of("llama3", model_type=model_type))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_mistral_3_is_imported(prefix, folder_of):
    def change(tensors):
        head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."
        for name in list(tensors):
            renamed = name.replace("model.", prefix, 1).replace("lm_head.", head)
            tensors[renamed] = tensors.pop(name)
        tensors["vision_tower.x"] = tensors["multi_modal_projector.y"] = np.ones(3, np.float32)

    text = config_of("mistral", tie_word_embeddings=True)
    del text["architectures"]
    config = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3")
    # The head is that of the multimodal model, which has keys of its own.
    config |= dict(text_config=text, tie_word_embeddings=False)
    _, params = load(folder_of("mistral", config=config, change=change))
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "mistral")[1])


def test_the_type_of_the_text_in_a_multimodal_model_decides_its_class(tmp_path):
    config = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3")
    for model_type in ("mistral", "ministral3"):
        text = config_of(model_type)
        (tmp_path / "config.json").write_text(json.dumps(config | dict(text_config=text)))
        assert weights.model_section(tmp_path)["tie_embeddings"]
        assert weights.family_in(tmp_path).model_type == model_type
    text = config_of("mistral", model_type="ministral")
    (tmp_path / "config.json").write_text(json.dumps(config | dict(text_config=text)))
    with pytest.raises(ConfigError, match="'ministral': transformers uses this model"):
        weights.model_section(tmp_path)
