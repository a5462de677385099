"""Converts between a config.json of transformers and the `model` section of a config."""

import typing
from pathlib import Path
from typing import Any

from meshtrain import foreign
from meshtrain.configs import default
from meshtrain.errors import ConfigError
from meshtrain.huggingface import model_types, mxfp4, rope
from meshtrain.huggingface.families import FAMILIES, base
from meshtrain.huggingface.families.base import Config, Family, Section
from meshtrain.models import transformer_config
from meshtrain.models.transformer_config import TransformerConfig

# A `model` section without the keys of CONFIG_KEYS; Family.section overrides these. A balance loss
# is not assumed: a config.json says it, if its model has experts.
SECTION_DEFAULTS: Section = {
    key: value
    for key, value in default.get_config().model.to_dict().items()
    if key not in base.CONFIG_KEYS
} | {"balance": "none", "balance_weight": 0.0}

NAME = "config.json"

# ---- reading ----

# Keys next to `text_config` in a multimodal config.json that apply to the language model.
TOP_LEVEL_KEYS = (
    "tie_word_embeddings",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def read(path: Path) -> Config:
    """Returns the keys of a config.json for the language model.

    Raises ConfigError if it cannot be read.
    """
    try:
        config = foreign.read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    text = config.get("text_config")
    family = _multimodal_family(config)
    if family is None or family.multimodal is None or not isinstance(text, dict):
        return config
    model_type = config.get("model_type")
    is_default = model_type == family.multimodal.model_type
    language_model: Config = {
        "architectures": config.get("architectures"),
        "model_type": family.model_type if is_default else model_type,
    }
    top_level = family.multimodal.defaults | config
    for key in TOP_LEVEL_KEYS:
        if key in top_level:
            language_model[key] = top_level[key]
    for key, value in text.items():
        if key not in family.multimodal.ignored_keys:
            language_model[key] = value
    return language_model


def _multimodal_family(config: Config) -> Family | None:
    """Returns the family of the language model of a multimodal config.json."""
    architectures = _architectures(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.multimodal is None:
            continue
        is_named = family.multimodal.architecture in architectures
        if is_named or family.multimodal.model_type == model_type:
            return family
    return None


def family_of(config: Config) -> Family:
    """Returns the family of a config.json; raises ConfigError if it is not supported."""
    named = _architectures(config)
    model_type = config.get("model_type")
    candidates = [family for family in FAMILIES if not family.architectures.isdisjoint(named)]
    for family in candidates if named else FAMILIES:
        if family.model_type == model_type:
            return family
    for family in FAMILIES:
        # transformers ignores the name of code that a folder brings with it.
        if family.model_type == model_type and family.own_architecture in named:
            return family
    if candidates:
        family = candidates[0]
        # The class of such a type is all that is known, except in a multimodal model.
        is_unknown = (
            isinstance(model_type, str)
            and model_type not in model_types.OF_TRANSFORMERS
            and family.architecture in named
        )
        if model_type is None or is_unknown:
            return family
        raise ConfigError(
            f"model_type={model_type!r}: transformers uses this model, not that of "
            f"architectures={named}; make them agree"
        )
    supported = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
    raise ConfigError(
        f"architectures={config.get('architectures')}: not supported; use a model of {supported}"
    )


def _architectures(config: Config) -> list[str]:
    named = config.get("architectures") or []
    return [*map(str, named)] if isinstance(named, list) else [str(named)]


# ---- config.json to section ----

# Keys of a section that are 0 where config.json has null, and all that may be null there.
ZERO_FOR_NULL = ("q_lora_rank", "attention_softcap", "logit_softcap")

NULLABLE = ("num_kv_heads", "head_dim", *ZERO_FOR_NULL)

# Keys of a section whose value may be 0.
ZERO_ALLOWED = ("num_shared_experts",)

# Types of the values in a section.
VALUE_TYPES: dict[str, type] = typing.get_type_hints(TransformerConfig)

QUANTIZATION = "quantization_config"

# Of keys that any config.json may have; see Family.supported_values.
SUPPORTED_VALUES = {
    QUANTIZATION: (None,),
    "use_bidirectional_attention": (None, False),
    "is_causal": (True,),  # null is bidirectional
    "per_layer_config": (None,),
    "text_config": (None,),  # of a multimodal architecture that is not supported
}


def to_section(config: Config) -> Section:
    """Returns the `model` section of a config.json.

    Raises ConfigError with all unsupported keys.
    """
    family = family_of(config)
    omitted = _omitted_keys(config, family)
    config = with_defaults(config, family)
    faults = [*omitted, *_faults(config, family)]
    if faults:
        raise ConfigError(*faults)
    section = SECTION_DEFAULTS | family.section
    for key, hf_key in family.keys.items():
        section[key] = config[hf_key]
    num_heads = section["num_heads"]
    section["num_kv_heads"] = section.get("num_kv_heads") or num_heads
    section["head_dim"] = section.get("head_dim") or section["d_model"] // num_heads
    for key in ZERO_FOR_NULL:
        section[key] = VALUE_TYPES[key](section[key] or 0)
    section |= family.to_section(config)
    if section["positions"] == "rope":
        section |= rope.to_section(config, family)
        section |= _attention_to_section(config, family)
    return section


def with_defaults(config: Config, family: Family) -> Config:
    """Returns a config.json with the keys that it omits, and without other names of keys."""
    config = family.defaults | family.standardize(config)
    for alias, key in family.aliases.items():
        if alias in config:
            config = config | {key: config[alias]}
    return config


def _omitted_keys(config: Config, family: Family) -> list[str]:
    """Returns an error for each key that a config.json of an unknown model type omits.

    Its defaults are those of a config class that transformers does not have.
    """
    model_type = config.get("model_type")
    if model_type in (None, family.model_type):
        return []
    given = {*config, *(key for alias, key in family.aliases.items() if alias in config)}
    rope_dicts = [base.json_object(config, key) for key in ("rope_parameters", "rope_scaling")]
    if any("rope_theta" in parameters for parameters in rope_dicts):
        given.add("rope_theta")
    # The shapes of the tensors show these two.
    given |= {"head_dim", "tie_word_embeddings"}
    return [
        f"{key}: missing; model_type={model_type!r} may have another default than "
        f"{family.model_type!r}"
        for key in family.defaults
        if key not in given
    ]


def _faults(config: Config, family: Family) -> list[str]:
    """Returns an error for each key of a config.json that is missing, invalid or not supported."""
    faults = _value_faults(config, family)
    faults += _unsupported_faults(config, family)
    faults += base.minimum_faults(config, family.minimums)
    faults += _window_faults(config, family)
    # Only valid sizes can be divided.
    if not faults:
        faults = _head_size_faults(config, family)
    return faults + family.faults(config)


def _value_faults(config: Config, family: Family) -> list[str]:
    """Returns an error for each value of Family.keys that is missing or invalid."""
    faults = []
    for key, hf_key in family.keys.items():
        if hf_key not in config:
            faults.append(f"{hf_key}: missing")
            continue
        value = config[hf_key]
        has_null_default = hf_key in family.defaults and family.defaults[hf_key] is None
        if value is None and (key in NULLABLE or has_null_default):
            continue
        value_type = VALUE_TYPES[key]
        # For Python a bool is an int; here it is not.
        is_right_bool = isinstance(value, bool) == (value_type is bool)
        if not is_right_bool or not isinstance(value, value_type | int):
            actual = type(value).__name__
            faults.append(f"{hf_key}={value!r}: is of type {actual}, not {value_type.__name__}")
        elif key in ZERO_ALLOWED and value == 0:
            continue
        elif value_type is not bool and not base.is_positive(value):
            faults.append(f"{hf_key}={value!r}: is not a number above 0")
        elif key == "num_layers" and value > base.MAX_LAYERS:
            faults.append(
                f"{hf_key}={value}: is more than the {base.MAX_LAYERS:,} layers of any model"
            )
    return faults


def _unsupported_faults(config: Config, family: Family) -> list[str]:
    faults = []
    supported_values = SUPPORTED_VALUES | family.supported_values
    if family.reads_mxfp4 and mxfp4.is_used(config):
        del supported_values[QUANTIZATION]
    for key, values in supported_values.items():
        if key in config and config[key] not in values:
            supported = " or ".join("null" if value is None else repr(value) for value in values)
            faults.append(f"{key}={config[key]!r}: not supported; only {supported} is")
    return faults


def _window_faults(config: Config, family: Family) -> list[str]:
    if "sliding_window" not in family.defaults:
        return []
    window = config["sliding_window"]
    if window is None or base.is_count(window):
        return []
    return [f"sliding_window={window!r}: is not an integer of at least 1, nor null"]


def _head_size_faults(config: Config, family: Family) -> list[str]:
    num_heads = config[family.keys["num_heads"]]
    size = config[family.keys["d_model"]]
    if family.heads_divide_hidden_size and size % num_heads:
        return [f"hidden_size={size}: is not a multiple of num_attention_heads={num_heads}"]
    # A family that has no such key ignores it.
    head_dim = config.get("head_dim") if "head_dim" not in family.keys else None
    if head_dim and head_dim != size // num_heads:
        return [f"head_dim={head_dim}: is not hidden_size / num_attention_heads"]
    return []


def _attention_to_section(config: Config, family: Family) -> Section:
    """Returns `attention`, the shortest pattern of letters that gives all layers, and `window`."""
    num_layers = config["num_hidden_layers"]
    letters = base.repeat_to(num_layers, family.default_layers(config))
    layer_types = config.get("layer_types")
    if layer_types is not None:
        default = letters
        letters = _parse_layer_types(layer_types, num_layers)
        if not family.uses_layer_types and letters != default:
            only = base.LAYER_TYPES[default[0]]
            raise ConfigError(
                f"layer_types={layer_types}: {family.architecture} supports only {only}"
            )
    has_switch = "use_sliding_window" in family.defaults
    is_used = config["use_sliding_window"] if has_switch else True
    window = config.get("sliding_window") if is_used and "l" in letters else 0
    if "l" in letters and not window:
        switch = "" if is_used else ", use_sliding_window=False"
        raise ConfigError(
            f"sliding_window={config.get('sliding_window')!r}{switch}: "
            f"{letters.count('l')} local layers need 1 or more"
        )
    return {"attention": base.shortest_pattern(letters), "window": window}


def _parse_layer_types(layer_types: Any, num_layers: int) -> str:
    distinct = {*map(str, layer_types)} if isinstance(layer_types, list) else {"none"}
    if not distinct <= base.LAYER_LETTERS.keys() or len(layer_types) != num_layers:
        names = ", ".join(base.LAYER_LETTERS)
        raise ConfigError(f"layer_types={layer_types}: use one of {names} for each layer")
    return "".join(base.LAYER_LETTERS[name] for name in layer_types)


# ---- section to config.json ----

# Written as null, because the defaults in transformers are the token ids of the original models.
NULL_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def to_config(section: Section, original: Config | None = None) -> Config:
    """Returns the config.json of the first family that converts back to the same model.

    `original` is the config.json that the model came from: its family is tried first, and its other
    keys, such as token ids, are copied. Raises ConfigError if no family matches.
    """
    original = original or {}
    preferred = family_of(original) if original else None
    is_mixture = bool(section.get("num_experts"))
    candidates = [family for family in FAMILIES if family.is_mixture == is_mixture]
    candidates.sort(key=lambda family: family is not preferred)
    attempts = []
    for family in candidates:
        config = _config_for(section, family)
        if family is preferred:
            # An export is not quantized.
            not_copied = {QUANTIZATION, *family.aliases}
            copied = {key: value for key, value in original.items() if key not in not_copied}
            config = copied | config
        config = NULL_TOKEN_IDS | config
        # Converting back finds whatever the family cannot express.
        try:
            differing = differences(section, to_section(config))
            is_rejected = False
        except ConfigError as error:
            differing = list(error.faults)
            is_rejected = True
        if not differing:
            return config
        attempts.append((family, is_rejected, differing))

    def distance(attempt: tuple[Family, bool, list[str]]) -> tuple:
        """Returns how far a family is: one difference is nearer than a config.json with a fault."""
        family, is_rejected, differing = attempt
        has_other_positions = family.section.get("positions", "rope") != section["positions"]
        return family is not preferred, has_other_positions, len(differing) + is_rejected

    nearest, _, fewest = min(attempts, key=distance)
    raise ConfigError(
        f"no supported architecture of transformers computes this model; the nearest is "
        f"{nearest.architecture}, where {', '.join(fewest)}"
    )


def _config_for(section: Section, family: Family) -> Config:
    """Returns the config.json of a section, without values that `family` cannot express."""
    section = SECTION_DEFAULTS | section
    section["head_dim"] = head_dim(section)
    config: Config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
    for hf_key, values in family.supported_values.items():
        if values[0] is not None:
            config[hf_key] = values[0]
    for key, hf_key in family.keys.items():
        config[hf_key] = (section[key] or None) if key in ZERO_FOR_NULL else section[key]
    if family.is_mixture:
        expert_key = family.keys["d_expert" if "d_expert" in family.keys else "d_ff"]
        config[expert_key] = section["d_expert"] or section["d_ff"]
    config |= family.to_config(section)
    if family.section.get("positions", "rope") == "rope":
        config |= rope.to_config(section, family)
        config |= _attention_to_config(section, family)
    return config


def _attention_to_config(section: Section, family: Family) -> Config:
    """Returns the keys of the window, and of the layers that have it."""
    if "sliding_window" not in family.defaults:
        return {}
    letters = base.repeat_to(section["num_layers"], section["attention"])
    has_window = "l" in letters
    window = section["window"] if has_window else None
    has_switch = "use_sliding_window" in family.defaults
    if not family.uses_layer_types:
        switch = {"use_sliding_window": has_window} if has_switch else {}
        return {"sliding_window": window, **switch}
    config: Config = {"layer_types": [base.LAYER_TYPES[letter] for letter in letters]}
    if has_switch:
        config["use_sliding_window"] = has_window
        config["max_window_layers"] = letters.index("l") if has_window else len(letters)
        config["sliding_window"] = window
    else:
        # These families reject null, even if no layer uses the window.
        config["sliding_window"] = window or family.defaults["sliding_window"]
    return config


# ---- equal models ----


def differences(expected: Section, actual: Section) -> list[str]:
    """Returns a line for each key that makes two sections different models."""
    expected = normalize(expected)
    actual = normalize(actual)
    # model.bias includes these.
    included = ("qkv_bias", "out_bias") if expected["bias"] != actual["bias"] else ()
    return [
        f"model.{key} is {actual.get(key)!r}, not {value!r}"
        for key, value in expected.items()
        if value != actual.get(key) and key not in included
    ]


def normalize(section: Section) -> Section:
    """Returns a section with all defaults filled in, so that equal models have equal sections.

    Keys that do not change the logits of this model are left out.
    """
    section = SECTION_DEFAULTS | section
    section["head_dim"] = head_dim(section)
    letters = base.repeat_to(section["num_layers"], section["attention"])
    section["attention"] = letters
    if "l" not in letters:
        section["window"] = 0
    if not section["query_scale"]:
        section["query_scale"] = (section["head_dim"] + section["rope_head_dim"]) ** -0.5
    if section["v_head_dim"] == section["head_dim"]:
        section["v_head_dim"] = 0
    for key in ("qkv_bias", "out_bias"):
        section[key] = section[key] or section["bias"]
    section["rope_layers"] = base.repeat_to(section["num_layers"], section["rope_layers"])
    section["norm_bias"] = section["norm"] == "layer" and (section["norm_bias"] or section["bias"])
    _normalize_rope(section, letters)
    section = transformer_config.effective(section)
    if section["num_experts"]:
        section["d_expert"] = section["d_expert"] or section["d_ff"]
        section["expert_groups"] = tuple(section["expert_groups"])
        if section["num_shared_experts"]:
            _normalize_shared(section)
        if not section["first_dense_layers"]:
            del section["d_ff"]
    return section


def _normalize_shared(section: Section) -> None:
    """Replaces the number of shared experts by their width: nothing else depends on it."""
    number = section["num_shared_experts"]
    section["d_shared"] = section["d_shared"] or number * section["d_expert"]
    section["num_shared_experts"] = 1


def _normalize_rope(section: Section, letters: str) -> None:
    """Replaces the rope keys by (theta, scaling) of the layers that exist."""
    section["rope_scaling"] = tuple(section["rope_scaling"])
    has_rope = section["positions"] == "rope"
    if not has_rope or "l" not in letters:
        del section["rope_theta_local"]
    elif not section["rope_theta_local"]:
        section["rope_theta_local"] = section["rope_theta"], section["rope_scaling"]
    else:
        section["rope_theta_local"] = section["rope_theta_local"], ()
    if not has_rope or "g" not in letters:
        del section["rope_theta"], section["rope_scaling"]
    if has_rope:
        # Fractions that rotate the same number of dims are equal.
        rotated = int(section["head_dim"] * section["rope_fraction"]) // 2 * 2
        section["rope_fraction"] = rotated / section["head_dim"]
    else:
        del section["rope_fraction"], section["rope_interleaved"]


def head_dim(section: Section) -> int:
    return section["head_dim"] or section["d_model"] // section["num_heads"]
