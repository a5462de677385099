"""SmolLM3: Llama with layers that have no rope."""

from typing import Any

from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

HAS_ROPE = "no_rope_layers"  # a list of 1 for each layer with rope, and 0 for one without
INTERVAL = "no_rope_layer_interval"  # every n-th layer is without, if there is no such list


def _faults(config: Config) -> list[str]:
    faults = base.bias_faults(config)
    num_layers = config.get("num_hidden_layers")
    layers = config[HAS_ROPE]
    if layers is None:
        return faults + base.minimum_faults(config, {INTERVAL: 1})
    is_list = isinstance(layers, list) and all(isinstance(one, int) for one in layers)
    if not is_list or (base.is_count(num_layers) and len(layers) < num_layers):
        faults.append(f"{HAS_ROPE}={layers!r}: is not a list of 1 (rope) or 0 for each layer")
    return faults


def _letters(config: Config) -> str:
    """Returns "r" or "n" for each layer, as in model.rope_layers."""
    num_layers, layers = config["num_hidden_layers"], config[HAS_ROPE]
    if layers is None:
        layers = [(number + 1) % config[INTERVAL] for number in range(num_layers)]
    return "".join("r" if has_rope else "n" for has_rope in layers[:num_layers])


def _to_section(config: Config) -> Section:
    rope_layers = base.shortest_pattern(_letters(config))
    return base.biases_to_section(config) | {"rope_layers": rope_layers}


def _to_config(section: Section) -> Config:
    letters = base.repeat_to(section["num_layers"], section["rope_layers"])
    has_rope: list[Any] = [int(letter == "r") for letter in letters]
    return base.biases_to_config(section) | {HAS_ROPE: has_rope}


def _layers_without_rope_local(config: Config) -> str:
    is_used = config["use_sliding_window"] and config["sliding_window"] is not None
    return "".join("l" if is_used and letter == "n" else "g" for letter in _letters(config))


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    names=base.NAMES,
    section={},
    defaults=base.COMMON_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        HAS_ROPE: None,
        INTERVAL: 4,
    },
    supported_values=base.SILU_ONLY | {"use_sliding_window": (True, False)},
    default_layers=_layers_without_rope_local,
    faults=_faults,
    to_section=_to_section,
    to_config=_to_config,
)
