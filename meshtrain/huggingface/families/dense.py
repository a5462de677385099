"""The supported architectures of transformers: the keys of their config.json, and its defaults."""

from collections.abc import Mapping

from meshtrain.huggingface import names
from meshtrain.huggingface.families import base as families
from meshtrain.huggingface.families import deepseek, mixtures
from meshtrain.huggingface.families.base import CONFIG_KEYS, SOFTCAP_KEYS, Family


def _every_second_global(config: Mapping) -> str:
    return "lg"


def _every_nth_global(config: Mapping) -> str:
    n = config["sliding_window_pattern"]
    return "".join("l" if (i + 1) % n else "g" for i in range(config["num_hidden_layers"]))


QWEN_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

GEMMA_SUPPORTED = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False, None)}

GEMMA_SECTION = {"norm": "rms_1p", "mlp": "geglu", "post_norm": True}

GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        names.LLAMA,
        section={},
        defaults=families.COMMON_DEFAULTS
        | {
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        },
        supported_values=families.SILU_ONLY,
        uses_layer_types=False,
        heads_divide_hidden_size=True,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        names.LLAMA,
        section={},
        defaults=families.COMMON_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "hidden_act": "silu",
            "sliding_window": 4096,
        },
        supported_values=families.SILU_ONLY,
        default_layers=families.all_local,
        uses_layer_types=False,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        names.LLAMA,
        section={"qkv_bias": True},
        defaults=families.COMMON_DEFAULTS
        | QWEN_DEFAULTS
        | {"num_key_value_heads": 32, "max_position_embeddings": 32768, "hidden_act": "silu"},
        supported_values=families.QWEN_SUPPORTED,
        default_layers=families.last_layers_local,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        names.LLAMA,
        section={"qk_norm": True},
        defaults=families.COMMON_DEFAULTS
        | QWEN_DEFAULTS
        | {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "hidden_act": "silu",
            "attention_bias": False,
        },
        supported_values=families.QWEN_SUPPORTED | {"attention_bias": (False, None)},
        default_layers=families.last_layers_local,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        names.GEMMA,
        section=GEMMA_SECTION,
        defaults=GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 8192,
            "rope_theta": 10000.0,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        supported_values=GEMMA_SUPPORTED,
        keys=CONFIG_KEYS | SOFTCAP_KEYS,
        default_layers=_every_second_global,
        heads_divide_hidden_size=True,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names.GEMMA,
        section=GEMMA_SECTION | {"qk_norm": True},
        defaults=GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        supported_values=GEMMA_SUPPORTED,
        # transformers ignores attn_logit_softcapping.
        keys=CONFIG_KEYS | {"logit_softcap": SOFTCAP_KEYS["logit_softcap"]},
        default_layers=_every_nth_global,
        heads_divide_hidden_size=True,
        prefixes=(
            ("language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        ignored_prefixes=("vision_tower.", "multi_modal_projector.", "model.vision_tower.")
        + ("model.multi_modal_projector.",),
    ),
    *mixtures.FAMILIES,
    *deepseek.FAMILIES,
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        names.GPT2,
        section={"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        supported_values={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        keys={
            "num_layers": "n_layer",
            "d_model": "n_embd",
            "num_heads": "n_head",
            "d_ff": "n_inner",
            "vocab_size": "vocab_size",
            "max_seq_len": "n_positions",
            "norm_epsilon": "layer_norm_epsilon",
            "tie_embeddings": "tie_word_embeddings",
        },
        prefixes=(("transformer.", "transformer."), ("lm_head.", "lm_head."), ("", "transformer.")),
        aliases={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
    ),
)

# Multimodal architectures: only the language model, under `text_config`, is converted.
TEXT_ARCHITECTURES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}

TEXT_MODEL_TYPES = {"gemma3": "gemma3_text"}

# transformers ignores these keys in the language model of a multimodal architecture.
IGNORED_TEXT_KEYS = ("final_logit_softcapping",)
