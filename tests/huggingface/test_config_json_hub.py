"""config.json files as the hub has them: their models, and keys old, new and unsupported."""

import importlib
import json
import math

import jax
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, convert, tensor_rows, weights
from tests.lib.hf import FAMILIES, GOLDEN

LLAMA = dict(hidden_act="silu", rms_norm_eps=1e-5, vocab_size=32000)
HUB = {  # config.json of well-known models (the keys of the model), and their number of parameters
    "gpt2": (
        dict(
            architectures=["GPT2LMHeadModel"],
            activation_function="gelu_new",
            n_ctx=1024,
            n_embd=768,
            n_head=12,
            n_layer=12,
            n_positions=1024,
            vocab_size=50257,
        ),
        124_439_808,
    ),
    "Llama-2-7b": (
        LLAMA
        | dict(
            architectures=["LlamaForCausalLM"],
            hidden_size=4096,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            rope_scaling=None,
            tie_word_embeddings=False,
        ),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        LLAMA
        | dict(
            architectures=["LlamaForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=131072,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rope_theta=500000.0,
            rope_scaling=dict(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            vocab_size=128256,
        ),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        LLAMA
        | dict(
            architectures=["MistralForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        dict(
            architectures=["Qwen2ForCausalLM"],
            hidden_act="silu",
            hidden_size=896,
            intermediate_size=4864,
            max_position_embeddings=32768,
            max_window_layers=24,
            num_attention_heads=14,
            num_hidden_layers=24,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        dict(
            architectures=["Qwen3ForCausalLM"],
            attention_bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=40960,
            max_window_layers=28,
            num_attention_heads=16,
            num_hidden_layers=28,
            num_key_value_heads=8,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        596_049_920,
    ),
    "Mixtral-8x7B-v0.1": (
        LLAMA
        | dict(
            architectures=["MixtralForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_experts_per_tok=2,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        dict(
            architectures=["Qwen3MoeForCausalLM"],
            attention_bias=False,
            decoder_sparse_step=1,
            head_dim=128,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=6144,
            max_position_embeddings=40960,
            max_window_layers=48,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            sliding_window=None,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        30_532_122_624,
    ),
    "OLMoE-1B-7B-0924": (
        dict(
            architectures=["OlmoeForCausalLM"],
            attention_bias=False,
            clip_qkv=None,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=1024,
            max_position_embeddings=4096,
            norm_topk_prob=False,
            num_attention_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            num_hidden_layers=16,
            num_key_value_heads=16,
            output_router_logits=False,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000.0,
            router_aux_loss_coef=0.01,
            tie_word_embeddings=False,
            vocab_size=50304,
        ),
        6_919_161_856,
    ),
    "gemma-2-2b": (
        dict(
            architectures=["Gemma2ForCausalLM"],
            attention_bias=False,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            hidden_size=2304,
            intermediate_size=9216,
            max_position_embeddings=8192,
            num_attention_heads=8,
            num_hidden_layers=26,
            num_key_value_heads=4,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            sliding_window=4096,
            vocab_size=256000,
        ),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        dict(
            architectures=["Gemma3ForCausalLM"],
            attn_logit_softcapping=None,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            num_attention_heads=4,
            num_hidden_layers=26,
            num_key_value_heads=1,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            vocab_size=262144,
        ),
        999_885_952,
    ),
    "gemma-3-4b": (
        dict(
            architectures=["Gemma3ForConditionalGeneration"],
            eos_token_id=[1, 106],
            text_config=dict(
                hidden_size=2560,
                intermediate_size=10240,
                model_type="gemma3_text",
                num_hidden_layers=34,
                rope_scaling=dict(factor=8.0, rope_type="linear"),
                sliding_window=1024,
            ),
            vision_config=dict(hidden_size=1152, num_hidden_layers=27),
        ),
        3_880_263_168,
    ),
}


def write_config(path, config):
    path.write_text(json.dumps(config))
    return path.parent


@pytest.mark.parametrize("model", HUB)
def test_a_hub_config_gives_the_number_of_parameters_of_its_model(model, tmp_path):
    config, num_parameters = HUB[model]
    folder = write_config(tmp_path / "config.json", config)
    section = weights.model_section(folder)
    family, init = weights.family_in(folder), convert.model_of(section).init
    shapes = weights.shapes_in_files(jax.eval_shape(init, jax.random.key(0)), family)
    rows = tensor_rows.rows(family.names, shapes, section)
    sizes = {name: math.prod(row.shape) for row in rows for name in row.tensors}
    assert sum(sizes.values()) == num_parameters


def test_a_hub_config_gives_the_attention_and_rope_of_each_layer(tmp_path):
    found = {}
    for model, (config, _) in HUB.items():
        s = weights.model_section(write_config(tmp_path / "config.json", config))
        found[model] = s["attention"], s["window"], s["rope_theta"], s["rope_theta_local"]
        found[model] += (s["rope_scaling"],)
    assert found == {
        "gpt2": ("g", 0, 1e4, 0.0, ()),
        "Llama-2-7b": ("g", 0, 1e4, 0.0, ()),
        "Llama-3.1-8B": ("g", 0, 5e5, 0.0, ("llama3", 8.0, 1.0, 4.0, 8192.0)),
        "Mistral-7B-v0.1": ("l", 4096, 1e4, 0.0, ()),
        "Qwen2.5-0.5B": ("g", 0, 1e6, 0.0, ()),
        "Qwen3-0.6B": ("g", 0, 1e6, 0.0, ()),
        "Mixtral-8x7B-v0.1": ("g", 0, 1e6, 0.0, ()),
        "Qwen3-30B-A3B": ("g", 0, 1e6, 0.0, ()),
        "OLMoE-1B-7B-0924": ("g", 0, 1e4, 0.0, ()),
        "gemma-2-2b": ("lg", 4096, 1e4, 0.0, ()),
        "gemma-3-1b": ("lllllg", 512, 1e6, 1e4, ()),
        "gemma-3-4b": ("lllllg", 1024, 1e6, 1e4, ("linear", 8.0)),
    }


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Mixtral-8x7B-v0.1", "mixtral"),
        ("Qwen3-30B-A3B", "qwen3_moe"),
        ("OLMoE-1B-7B-0924", "olmoe"),
    ],
)
def test_a_config_of_a_mixture_is_that_of_its_model_on_the_hub(model, name):
    section = importlib.import_module(f"configs.{name}").get_config().model.to_dict()
    hub = config_json.to_section(HUB[model][0])
    assert config_json.differences(section, hub) == []
    keys = ("balance", "balance_weight", "max_seq_len")
    assert [section[key] for key in keys] == [hub[key] for key in keys]


LOCAL = "sliding_attention"
EXTRA_KEYS = {  # keys of newer and older versions of transformers that do not change the logits
    "any": dict(
        use_cache=False,
        initializer_range=0.01,
        attention_dropout=0.0,
        dtype="bfloat16",
        torch_dtype="bfloat16",
        rope_scaling=None,
        partial_rotary_factor=1.0,
        is_causal=True,
        quantization_config=None,
        transformers_version="4.31.0",
    ),
    "llama2": dict(pretraining_tp=1, layer_types=["full_attention"] * 3, sliding_window=None),
    "llama3": dict(mlp_bias=False, use_sliding_window=False, max_window_layers=3),
    "mistral": dict(layer_types=["sliding_attention"] * 3, attention_bias=False, mlp_bias=False),
    "qwen2": dict(attention_bias=False, mlp_bias=False, use_mrope=False),
    "qwen3": dict(attention_bias=None, layer_types=None, sliding_window=4096),
    "yarn": dict(sliding_window=4096, rope_theta=7.0, original_max_position_embeddings=8),
    "mixtral": dict(layer_types=["sliding_attention"] * 3, output_router_logits=True),
    "qwen3_moe": dict(attention_bias=None, mlp_only_layers=None, max_window_layers=1),
    "dots1": dict(num_local_experts=6, max_window_layers=9, output_router_logits=True),
    "deepseek_v2": dict(n_group=None, topk_group=None, seq_aux=True, scoring_func="softmax"),
    "deepseek_v2_groups": dict(moe_layer_freq=1, ep_size=1, num_experts=6, head_dim=4),
    "deepseek_v3": dict(topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True),
    "olmo2": dict(clip_qkv=8.0, mlp_bias=True, layer_types=["full_attention"] * 3),
    "olmo3": dict(layer_types=None, rope_theta=3.0, rope_local_base_freq=9.0),
    "smollm3": dict(layer_types=None, no_rope_layers=[1, 0, 1, 0], no_rope_layer_interval=0),
    "granite": dict(layer_types=["full_attention"] * 3, sliding_window=None),
    "granitemoe": dict(mlp_bias=True, output_router_logits=True),
    "qwen2_moe": dict(attention_bias=False, layer_types=None, mlp_only_layers=None),
    "qwen2_moe_dense": dict(mlp_only_layers=[0, 3], decoder_sparse_step=1),
    "gpt_oss": dict(layer_types=None, num_experts=4, experts_per_token=9, mlp_bias=True),
    "olmoe": dict(head_dim=4, num_local_experts=5, output_router_logits=True),
    "gemma2": dict(attention_bias=None, hidden_act="gelu_pytorch_tanh", layer_types=None),
    "gemma3": dict(layer_types=None, sliding_window_pattern=2, use_bidirectional_attention=None),
    "gemma": dict(hidden_act="gelu", hidden_activation=None, sliding_window=3, layer_types=None),
    "vaultgemma": dict(attention_bias=None, layer_types=None),
    "seed_oss": dict(residual_dropout=0.3, sliding_window=3, pretraining_tp=2),
    "ministral3": dict(attention_bias=True, mscale=2.0, layer_types=[LOCAL, LOCAL]),
    "ministral": dict(attention_bias=True, mlp_bias=True, use_sliding_window=False),
    "cwm": dict(attention_bias=True, rope_theta=3.0, layer_types=["full_attention", LOCAL]),
    "starcoder2": dict(residual_dropout=0.1, hidden_act="gelu_new", head_dim=4, mlp_bias=False),
    "stablelm": dict(hidden_dropout=0.1, partial_rotary_factor=0.75, rotary_scaling_factor=2.0),
    "phi3": dict(resid_pdrop=0.1, original_max_position_embeddings=16, mlp_bias=True),
    "phi3_longrope": dict(embd_pdrop=0.1, partial_rotary_factor=0.5),
    "glm": dict(partial_rotary_factor=0.25, layer_types=None),
    "glm4": dict(partial_rotary_factor=0.25, post_norm=False),
    "ernie4_5": dict(partial_rotary_factor=1.0, compression_ratio=1.0),
    "helium": dict(mlp_bias=False, partial_rotary_factor=1.0),
    "youtu": dict(head_dim=3, rope_interleave=True, n_routed_experts=None),
    "solar_open": dict(intermediate_size=99, first_k_dense_replace=1, num_local_experts=6),
    "glm4_moe": dict(partial_rotary_factor=0.25, num_nextn_predict_layers=0),
    "ernie4_5_moe": dict(moe_layer_end_index=1, use_bias=None, moe_norm_min=1e-12),
    "minimax_m2": dict(rotary_dim=4, output_router_logits=True, scoring_func="sigmoid"),
    "hy_v3": dict(enable_moe_fp32_combine=False, num_nextn_predict_layers=1),
    "glm4_moe_lite": dict(mlp_layer_types=None, first_k_dense_replace=7, topk_method="noaux_tc"),
    "gpt2": dict(n_ctx=32, gradient_checkpointing=False, layer_types=["full_attention"] * 3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_do_not_change_the_logits_are_accepted(family):
    config = config_json.read(GOLDEN / family / "config.json")
    more = EXTRA_KEYS["any"] | EXTRA_KEYS[family]
    assert config_json.to_section(config | more) == config_json.to_section(config)


def test_a_null_window_means_global_attention():
    windowed = HUB["Qwen2.5-0.5B"][0] | dict(use_sliding_window=True, max_window_layers=0)
    assert config_json.to_section(windowed | dict(sliding_window=None))["attention"] == "g"


NEW_KEYS = ("rope_parameters", "dtype")
# Another family, which is preferred, computes the same.
SAME = {"seed_oss": "Qwen2ForCausalLM", "phi3": "LlamaForCausalLM", "helium": "GlmForCausalLM"}
SAME |= {"hy_v3": "Dots1ForCausalLM"}
SAME |= {"cwm": "MinistralForCausalLM", "glm4_moe_lite": "DeepseekV3ForCausalLM"}
OLD_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype")


@pytest.mark.parametrize("removed", [NEW_KEYS, OLD_KEYS, ()], ids=["old keys", "new keys", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_config_can_be_read_by_old_and_new_keys(family, removed):
    section = weights.model_section(GOLDEN / family)
    config = config_json.to_config(section)
    partial = {key: value for key, value in config.items() if key not in removed}
    assert config_json.to_section(partial) == section
    original = config_json.read(GOLDEN / family / "config.json")["architectures"]
    assert config["architectures"] == [SAME.get(family, original[0])]


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        (dict(attention="l", window=7), "MistralForCausalLM"),
        (dict(qkv_bias=True), "Qwen2ForCausalLM"),
        (dict(qk_norm=True, attention="ggl", window=3, head_dim=6), "Qwen3ForCausalLM"),
        (dict(norm="layer", positions="learned", mlp="gelu", bias=True), "GPT2LMHeadModel"),
    ],
    ids=str,
)
def test_a_run_trained_here_is_exported_as_the_matching_family(tiny, changes, architecture):
    section = {**tiny.model.to_dict(), "num_kv_heads": 4, "num_layers": 3} | changes
    config = config_json.to_config(section)
    assert config["architectures"] == [architecture]
    assert config_json.differences(section, config_json.to_section(config)) == []


def test_defaults_of_transformers_that_do_not_apply_are_overridden(tiny):
    """Token ids must be null.

    Gemma 2 of transformers rejects a null window, so it gets the default.
    """
    assert config_json.to_config(tiny.model.to_dict())["eos_token_id"] is None
    section = weights.model_section(GOLDEN / "gemma2") | {"attention": "g", "window": 0}
    assert config_json.to_config(section)["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("keys", "attention"),
    [
        (dict(use_sliding_window=True, max_window_layers=21), "g" * 21 + "l" * 3),
        (dict(use_sliding_window=True, max_window_layers=0), "l"),
        (dict(use_sliding_window=False, max_window_layers=0), "g"),
    ],
    ids=str,
)
def test_the_last_layers_of_qwen_are_local_if_layer_types_is_missing(keys, attention):
    assert config_json.to_section(HUB["Qwen2.5-0.5B"][0] | keys)["attention"] == attention


def test_a_model_without_a_family_is_reported_with_the_nearest_one(tiny):
    section = {**tiny.model.to_dict(), "attention": "lg", "window": 4, "embed_scale": 2.0}
    with pytest.raises(ConfigError) as error:
        config_json.to_config(section)
    assert "nearest is MinistralForCausalLM" in str(error.value)
    assert "model.embed_scale is 1.0, not 2.0" in str(error.value)


@pytest.mark.parametrize(
    ("family", "keys", "parts"),
    [
        ("llama3", dict(architectures=["BertModel"]), ["BertModel", "GPT2LMHeadModel"]),
        ("llama3", dict(architectures=[], model_type="t5"), ["architectures=[]"]),
        ("llama3", dict(hidden_act="gelu"), ["hidden_act='gelu'", "'silu'"]),
        ("llama3", dict(mlp_bias=True), ["attention_bias=False", "mlp_bias=True"]),
        ("qwen3", dict(attention_bias="true"), ["attention_bias='true'"]),
        ("llama3", dict(rope_parameters=dict(rope_type="longrope")), ["longrope", "short_factor"]),
        ("llama3", dict(rope_parameters=dict(rope_type="proportional")), ["proportional", "yarn"]),
        ("llama3", dict(rope_parameters=dict(rope_type="yarn")), ["factor=None"]),
        ("llama3", dict(rope_parameters=dict(rope_type="dynamic")), ["factor=None"]),
        ("llama3", dict(rope_parameters=dict(rope_type="linear")), ["factor=None"]),
        ("llama3", dict(rope_parameters=7), ["rope_parameters=7"]),
        ("llama3", dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]),
        ("llama3", dict(quantization_config=dict(bits=4)), ["quantization_config="]),
        ("llama3", dict(hidden_size=0, vocab_size="61"), ["hidden_size=0", "vocab_size='61'"]),
        ("llama3", dict(hidden_size=True), ["hidden_size=True", "bool"]),
        ("llama3", dict(num_hidden_layers=None), ["num_hidden_layers=None"]),
        ("llama3", dict(is_causal=False), ["is_causal=False"]),
        ("llama3", dict(architectures=7), ["architectures=7"]),
        ("llama3", dict(layer_types=["sliding_attention"] * 3), ["layer_types=", "full_attention"]),
        ("mistral", dict(layer_types=["full_attention"] * 3), ["layer_types=", "sliding_att"]),
        ("mistral", dict(layer_types=["sliding_attention"] * 2), ["layer_types="]),
        ("qwen2", dict(layer_types=[{}] * 3), ["layer_types="]),
        ("qwen2", dict(max_window_layers=None), ["max_window_layers=None"]),
        ("gemma3", dict(query_pre_attn_scalar=0), ["query_pre_attn_scalar=0"]),
        ("gemma3", dict(sliding_window_pattern="6"), ["sliding_window_pattern='6'"]),
        ("qwen2", dict(layer_types=["chunked_attention"] * 3), ["chunked_attention"]),
        ("qwen2", dict(layer_types=["full_attention"]), ["layer_types="]),
        ("qwen2", dict(sliding_window=None), ["sliding_window=None"]),
        ("gpt2", dict(activation_function="relu"), ["activation_function='relu'"]),
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), ["scale_attn_by_inverse_layer_idx"]),
        ("gemma2", dict(hidden_activation="gelu"), ["hidden_activation='gelu'", "tanh"]),
        ("gemma3", dict(use_bidirectional_attention=True), ["use_bidirectional_attention"]),
    ],
    ids=str,
)
def test_unsupported_keys_are_reported(family, keys, parts, tmp_path):
    config = json.loads((GOLDEN / family / "config.json").read_text())
    folder = write_config(tmp_path / "config.json", config | keys)
    with pytest.raises(ConfigError) as error:
        weights.model_section(folder)
    assert [part for part in (*parts, "config.json: ") if part not in str(error.value)] == []


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"a": 1}', "\0", "[" * 100_000])
def test_an_unreadable_config_is_reported(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json: "):
        weights.model_section(tmp_path)


def test_a_config_may_have_a_byte_order_mark_and_crlf(tmp_path):
    text = (GOLDEN / "llama3" / "config.json").read_text().replace("\n", "\r\n")
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert weights.model_section(tmp_path) == weights.model_section(GOLDEN / "llama3")
