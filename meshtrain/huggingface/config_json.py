"""Converts between a config.json of transformers and the `model` section of a config."""

import json
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError
from meshtrain.huggingface import experts, rope
from meshtrain.huggingface.families import base as families
from meshtrain.huggingface.families import deepseek, dense, gpt2
from meshtrain.huggingface.families.base import Family
from meshtrain.models import transformer_config

NAME = "config.json"

# Written as null, because the defaults in transformers are the token ids of the original models.
NULL_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

NULLABLE = (
    "num_kv_heads",
    "head_dim",
    "q_lora_rank",
    *families.SOFTCAP_KEYS,
)  # keys of a section: may be null

Config = dict[str, Any]  # a config.json

Section = dict[str, Any]  # the `model` section of a config


def read(path: Path) -> Config:
    """Returns the keys of a config.json for the language model; raises ConfigError if it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    text, model_type = config.get("text_config"), config.get("model_type")
    is_multimodal = dense.TEXT_ARCHITECTURES.keys() & {*_architectures(config)}
    is_multimodal = is_multimodal or model_type in [*dense.TEXT_MODEL_TYPES]
    if is_multimodal and isinstance(text, dict):
        shared = {key: config[key] for key in families.TOP_LEVEL_KEYS if key in config}
        text = {key: value for key, value in text.items() if key not in dense.IGNORED_TEXT_KEYS}
        default = {"model_type": dense.TEXT_MODEL_TYPES.get(model_type, model_type)}
        config = {"architectures": config.get("architectures")} | default | shared | text
    return config


def _architectures(config: Config) -> list[str]:
    named = config.get("architectures") or []
    return [*map(str, named)] if isinstance(named, list) else [str(named)]


def family_of(config: Config) -> Family:
    """Returns the family of a config.json; raises ConfigError if it is not supported."""
    named, model_type = _architectures(config), config.get("model_type")
    wanted = {dense.TEXT_ARCHITECTURES.get(name, name) for name in named}
    for family in dense.FAMILIES:
        if family.architecture in wanted or (not named and family.model_type == model_type):
            if model_type not in (None, family.model_type):
                raise ConfigError(
                    f"model_type={model_type!r}: transformers uses this model, not that of "
                    f"architectures={named}; make them agree"
                )
            return family
    supported = ", ".join(family.architecture for family in dense.FAMILIES)
    raise ConfigError(
        f"architectures={config.get('architectures')}: not supported; use a model of {supported}"
    )


def to_section(config: Config) -> Section:
    """Returns the `model` section of a config.json; raises ConfigError with all unsupported keys."""
    family = family_of(config)
    config = with_defaults(config, family)
    faults = _faults(config, family)
    if faults:
        raise ConfigError(*faults)
    section = families.SECTION_DEFAULTS | family.section | gpt2.dropout_of_config(config, family)
    section |= {key: config[hf_key] for key, hf_key in family.keys.items()}
    heads = section["num_heads"]
    section["num_kv_heads"] = section.get("num_kv_heads") or heads
    section["head_dim"] = section.get("head_dim") or section["d_model"] // heads
    section["d_ff"] = section["d_ff"] or 4 * section["d_model"]
    section |= {key: float(section[key] or 0.0) for key in families.SOFTCAP_KEYS}
    if "mlp_bias" in family.defaults:
        section["bias"] = bool(config["mlp_bias"])
    if family.is_mixture:
        section |= experts.to_section(config, family) | deepseek.to_section(config, family)
    if section["norm"] == "rms_1p":
        section["embed_scale"] = section["d_model"] ** 0.5
        section["query_scale"] = config["query_pre_attn_scalar"] ** -0.5
    if section["positions"] == "rope":
        section |= rope.to_section(config, family) | _attention_section(config, family)
    return section


def with_defaults(config: Config, family: Family) -> Config:
    """Returns a config.json with the keys that it omits, and without other names of keys."""
    config = family.defaults | config
    return config | {name: config[key] for key, name in family.aliases.items() if key in config}


def _faults(config: Config, family: Family) -> list[str]:
    """Returns an error for each key of a config.json that is missing, invalid or not supported."""
    faults = []
    for key, hf_key in family.keys.items():
        type_ = families.VALUE_TYPES.get(key, int)
        value = config.get(hf_key, "")
        if hf_key not in config:
            faults.append(f"{hf_key}: missing")
        elif value is None and (key in NULLABLE or family.defaults.get(hf_key, "") is None):
            continue
        elif isinstance(value, bool) != (type_ is bool) or not isinstance(value, type_ | int):
            faults.append(
                f"{hf_key}={value!r}: is of type {type(value).__name__}, not {type_.__name__}"
            )
        elif type_ is not bool and not (families.is_number(value) and value > 0):
            faults.append(f"{hf_key}={value!r}: is not a number above 0")
    for key, values in (families.SUPPORTED_VALUES | family.supported_values).items():
        if key in config and config[key] not in values:
            supported = " or ".join("null" if value is None else repr(value) for value in values)
            faults.append(f"{key}={config[key]!r}: not supported; only {supported} is")
    for key, minimum in families.MINIMUMS.items():
        if key in family.defaults and not families.is_count(config[key], minimum):
            faults.append(f"{key}={config[key]!r}: is not an integer of at least {minimum}")
    window = config["sliding_window"] if "sliding_window" in family.defaults else None
    if window is not None and not families.is_count(window):
        faults.append(f"sliding_window={window!r}: is not an integer of at least 1, nor null")
    heads, size = (config.get(family.keys[key]) for key in ("num_heads", "d_model"))
    if not faults and family.heads_divide_hidden_size and size % heads:
        faults.append(f"hidden_size={size}: is not a multiple of num_attention_heads={heads}")
    if not faults and "head_dim" not in family.keys and config.get("head_dim"):
        if config["head_dim"] != size // heads:
            faults.append(
                f"head_dim={config['head_dim']}: is not hidden_size / num_attention_heads"
            )
    if family.is_mixture:
        faults += experts.faults(config, family)
    if "mlp_bias" in family.defaults and bool(config["attention_bias"]) != bool(config["mlp_bias"]):
        faults.append(
            f"attention_bias={config['attention_bias']}, mlp_bias={config['mlp_bias']}: "
            f"only the same value for both is supported"
        )
    return faults


def _attention_section(config: Config, family: Family) -> Section:
    """Returns `attention`, the shortest repeating pattern of layer letters, and `window`, in tokens."""
    types, num_layers = config.get("layer_types"), config["num_hidden_layers"]
    letters = repeat_to(num_layers, family.default_layers(config))
    if types is not None:
        default, letters = letters, _parse_layer_types(types, num_layers)
        if not family.uses_layer_types and letters != default:
            only = families.LAYER_TYPES[default[0]]
            raise ConfigError(f"layer_types={types}: {family.architecture} supports only {only}")
    is_used = config["use_sliding_window"] if "use_sliding_window" in family.defaults else True
    window = config.get("sliding_window") if is_used and "l" in letters else 0
    if "l" in letters and not window:
        used = "" if is_used else ", use_sliding_window=False"
        raise ConfigError(
            f"sliding_window={config.get('sliding_window')!r}{used}: {letters.count('l')} local layers need 1 or more"
        )
    period = next(
        n for n in range(1, num_layers + 1) if repeat_to(num_layers, letters[:n]) == letters
    )
    return {"attention": letters[:period], "window": window}


def _parse_layer_types(types: Any, num_layers: int) -> str:
    distinct = {*map(str, types)} if isinstance(types, list) else {"none"}
    if not distinct <= families.LAYER_LETTERS.keys() or len(types) != num_layers:
        raise ConfigError(
            f"layer_types={types}: use one of {', '.join(families.LAYER_LETTERS)} for each layer"
        )
    return "".join(map(families.LAYER_LETTERS.get, types))


def repeat_to(num_layers: int, letters: str) -> str:
    """Returns the letter of every layer: the pattern `letters`, repeated."""
    return (letters * -(-num_layers // len(letters)))[:num_layers]


def to_config(section: Section, original: Config | None = None) -> Config:
    """Returns the config.json of a `model` section, for the first family that converts back to the same model.

    `original` is the config.json that the model came from: its family is tried first, and its other keys,
    such as token ids, are copied. Raises ConfigError if no family matches.
    """
    original, nearest = dict(original or {}), None
    preferred = family_of(original) if original else None
    is_mixture = bool(section.get("num_experts"))
    candidates = [f for f in dense.FAMILIES if f.is_mixture == is_mixture]
    for family in sorted(candidates, key=lambda family: family is not preferred):
        config = _config_for(section, family)
        if family is preferred:
            config = {k: v for k, v in original.items() if k not in family.aliases} | config
        config = NULL_TOKEN_IDS | config
        try:
            differing = differences(section, to_section(config))
        except ConfigError as error:
            differing = list(error.faults)
        if not differing:
            return config
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = family, differing
    raise ConfigError(
        f"no supported architecture of transformers computes this model; the nearest is "
        f"{nearest[0].architecture}, where {', '.join(nearest[1])}"
    )


def differences(expected: Section, actual: Section) -> list[str]:
    """Returns a line for each key that makes two sections different models."""
    expected, actual = normalize(expected), normalize(actual)
    return [
        f"model.{key} is {actual.get(key)!r}, not {value!r}"
        for key, value in expected.items()
        if value != actual.get(key)
    ]


def _config_for(section: Section, family: Family) -> Config:
    """Returns the config.json of a section for `family`, without the values that the family cannot express."""
    s = families.SECTION_DEFAULTS | section
    s |= {"head_dim": head_dim(s)}
    config = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= gpt2.dropout_rates(s, family) | {
        key: values[0] for key, values in family.supported_values.items() if values[0] is not None
    }
    config |= {
        hf_key: (s[key] or None) if key in families.SOFTCAP_KEYS else s[key]
        for key, hf_key in family.keys.items()
    }
    if family.is_mixture:
        config |= experts.to_config(s, family) | deepseek.to_config(s, family)
    if "mlp_bias" in family.defaults:
        config |= {"attention_bias": s["bias"], "mlp_bias": s["bias"]}
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = round((s["query_scale"] or s["head_dim"] ** -0.5) ** -2)
    if family.section.get("positions", "rope") == "rope":
        config |= rope.to_config(s, family) | _attention_config(s, family)
    return config


def _attention_config(s: Section, family: Family) -> Config:
    if "sliding_window" not in family.defaults:
        return {}
    letters = repeat_to(s["num_layers"], s["attention"])
    window = s["window"] if "l" in letters else None
    if not family.uses_layer_types:
        switch = {"use_sliding_window": "l" in letters}
        used = switch if switch.keys() <= family.defaults.keys() else {}
        return {"sliding_window": window, **used}
    config = {"layer_types": [families.LAYER_TYPES[letter] for letter in letters]}
    if "use_sliding_window" in family.defaults:
        first_local = (letters + "l").index("l")
        config |= {"use_sliding_window": "l" in letters, "max_window_layers": first_local}
        return config | {"sliding_window": window}
    # These families reject null, even if no layer uses the window.
    return config | {"sliding_window": window or family.defaults["sliding_window"]}


def head_dim(section: Section) -> int:
    return section["head_dim"] or section["d_model"] // section["num_heads"]


def normalize(section: Section) -> Section:
    """Returns a section with all defaults filled in, so that equal models have equal sections."""
    s = families.SECTION_DEFAULTS | section | {"head_dim": head_dim(section)}
    letters = repeat_to(s["num_layers"], s["attention"])
    s["attention"], s["window"] = letters, s["window"] if "l" in letters else 0
    s["query_scale"] = s["query_scale"] or (s["head_dim"] + s["rope_head_dim"]) ** -0.5
    if s["v_head_dim"] == s["head_dim"]:
        s["v_head_dim"] = 0
    s["qkv_bias"] = s["qkv_bias"] or s["bias"]
    s["rope_scaling"] = tuple(s["rope_scaling"])
    if s["positions"] != "rope" or "l" not in letters:
        del s["rope_theta_local"]
    elif not s["rope_theta_local"]:
        s["rope_theta_local"] = s["rope_theta"], s["rope_scaling"]
    else:
        s["rope_theta_local"] = s["rope_theta_local"], ()
    if s["positions"] != "rope" or "g" not in letters:
        del s["rope_theta"], s["rope_scaling"]
    s = transformer_config.effective(s)
    if s["num_experts"]:
        s["d_expert"] = s["d_expert"] or s["d_ff"]
        s["expert_groups"] = tuple(s["expert_groups"])
        if not s["first_dense_layers"]:
            del s["d_ff"]
    return s
