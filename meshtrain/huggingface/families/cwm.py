"""CWM: Llama 3 in which three of four layers have a window."""

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family

# Of a config.json without rope_parameters, whatever its rope_theta.
DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _standardize(config: Config) -> Config:
    if config.get("rope_parameters") is None:
        config = config | {"rope_parameters": DEFAULT_ROPE}
    # transformers ignores them: no layer has them.
    return {key: value for key, value in config.items() if key != "attention_bias"}


def _every_fourth_global(config: Config) -> str:
    return "glll"


CWM = Family(
    architecture="CwmForCausalLM",
    model_type="cwm",
    names=base.NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "mlp_bias": False,
        "sliding_window": 8192,
    },
    supported_values=base.SILU_ONLY | {"mlp_bias": (False,)},
    heads_divide_hidden_size=True,
    default_layers=_every_fourth_global,
    standardize=_standardize,
)
