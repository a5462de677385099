"""Converts between the rope keys of a config.json and those of a section.

A config.json of transformers 5 has `rope_parameters`, one of earlier versions `rope_scaling`.
"""

import math
from typing import Any

from meshtrain.errors import ConfigError
from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Config, Family, Section

ORIGINAL_LENGTH = "original_max_position_embeddings"
LENGTH = "max_position_embeddings"
ROPE_SCALINGS = {  # rope type: the values that follow it in a section's rope_scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", ORIGINAL_LENGTH, "attention_factor", "truncate"),
    "dynamic": ("factor", LENGTH),  # of the model: transformers ignores original_...
    "longrope": (ORIGINAL_LENGTH, "attention_factor", "short_factor", "long_factor"),
}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0, "truncate": True}

FRACTION = "partial_rotary_factor"
LOCAL_THETA = "rope_local_base_freq"  # a family that has it has another rope in local layers


def to_section(config: Config, family: Family) -> Section:
    """Returns the rope keys of a section.

    Raises ConfigError if transformers would compute anything else.
    """
    scaling = base.json_object(config, "rope_scaling")
    parameters = base.json_object(config, "rope_parameters")
    # At the top level null is 1, whatever the default.
    default_fraction = config.get(FRACTION, family.rope_fraction)
    default_fraction = 1.0 if default_fraction is None else default_fraction
    if LOCAL_THETA in family.defaults:
        if default_fraction != 1:
            raise ConfigError(f"{FRACTION}={default_fraction!r}: not supported; only 1.0 is")
        return _ropes_by_layer_type(scaling, parameters, config, family)
    # A rope_scaling replaces rope_parameters, and its theta.
    rope = scaling or parameters
    if base.LAYER_LETTERS.keys() & rope.keys():
        raise ConfigError(
            f"rope {rope}: {family.architecture} has the same rope in all layers; use one for all"
        )
    # transformers reads this key also next to the others; there, it has priority.
    if ORIGINAL_LENGTH in config:
        rope = rope | {ORIGINAL_LENGTH: config[ORIGINAL_LENGTH]}
    rope = {FRACTION: default_fraction} | rope
    theta, numbers = _parse(rope, config, config["rope_theta"])
    fraction = _fraction(rope[FRACTION], config, family)
    return {"rope_theta": theta, "rope_scaling": numbers, "rope_fraction": fraction}


def _fraction(fraction: Any, config: Config, family: Family) -> float:
    """Returns the fraction of the dims of a head that rope rotates."""
    if fraction == 1:
        return 1.0
    if family.rope_fraction is None:
        raise ConfigError(
            f"{FRACTION}={fraction!r}: {family.architecture} of transformers rotates all dims of "
            f"a head; use 1.0"
        )
    if not base.is_positive(fraction) or fraction > 1:
        raise ConfigError(f"{FRACTION}={fraction!r}: is not a number above 0, and at most 1")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * fraction)
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"{FRACTION}={fraction!r}: is {rotated} of {head_dim} dims of a head; only an even "
            f"number above 0 is supported"
        )
    return float(fraction)


def _ropes_by_layer_type(
    scaling: Config, parameters: Config, config: Config, family: Family
) -> Section:
    """Returns the rope keys of a family whose global and local layers have different ropes."""
    if parameters and not base.LAYER_LETTERS.keys() & parameters.keys():
        raise ConfigError(
            f"rope_parameters={parameters}: {family.architecture} reads only those of "
            f"{' and '.join(base.LAYER_LETTERS)}; put them there"
        )
    if "type" in scaling and "rope_type" not in scaling and not parameters:
        raise ConfigError(
            f"rope_scaling={scaling}: {family.architecture} in transformers ignores its type; "
            f"name it rope_type"
        )
    full = base.json_object(parameters, "full_attention")
    local = base.json_object(parameters, "sliding_attention")
    if (parameters | full | scaling).get("truncate", True) is not True:
        raise ConfigError(f"truncate: {family.architecture} in transformers ignores it; remove it")
    theta, numbers = _parse(full | scaling, config, config["rope_theta"])
    local_theta, local_numbers = _parse(local, config, config[LOCAL_THETA])
    if any(part.get(FRACTION, 1.0) != 1 for part in (parameters, full | scaling, local)):
        raise ConfigError(f"{FRACTION}: not supported; only 1.0 is")
    if local_numbers:
        raise ConfigError(
            f"rope_parameters: rope_type={local_numbers[0]} in sliding_attention: "
            f"only default is supported"
        )
    return {"rope_theta": theta, "rope_scaling": numbers, "rope_theta_local": local_theta}


def _parse(rope: Config, config: Config, default_theta: Any) -> tuple[float, tuple]:
    """Returns theta and rope_scaling."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    is_known = isinstance(rope_type, str) and rope_type in ROPE_SCALINGS
    if not is_known:
        shown = {key: value for key, value in rope.items() if key != "rope_theta"}
        raise ConfigError(f"rope {shown}: not supported; only {', '.join(ROPE_SCALINGS)} is")
    length = config.get(LENGTH)
    rope = {ORIGINAL_LENGTH: length} | rope | {LENGTH: length}
    values = {key: rope.get(key) for key in ROPE_SCALINGS[rope_type]}
    if rope_type == "longrope":
        return _parse_longrope(values, rope, default_theta)
    if rope_type == "yarn":
        # transformers replaces null and 0 by the default; but a null truncate is false.
        for key in ("beta_fast", "beta_slow"):
            values[key] = values[key] or YARN_DEFAULTS[key]
        values["truncate"] = bool(rope.get("truncate", True))
    values["rope_theta"] = rope.get("rope_theta", default_theta)
    for key, value in values.items():
        is_default = key == "attention_factor" and value is None
        if not (is_default or key == "truncate" or base.is_positive(value)):
            raise ConfigError(f"{key}={value!r} of {rope_type} rope: is not a number above 0")
    if rope_type == "yarn" and values["attention_factor"] is None:
        values["attention_factor"] = _attention_factor(rope)
    theta = float(values.pop("rope_theta"))
    numbers = [value if isinstance(value, bool) else float(value) for value in values.values()]
    return theta, (rope_type, *numbers) if numbers else ()


def _parse_longrope(values: Config, rope: Config, default_theta: Any) -> tuple[float, tuple]:
    """Returns theta and rope_scaling; the number of factors is checked with the size of a head."""
    theta = rope.get("rope_theta", default_theta)
    given = values["attention_factor"]
    numbers = {
        "rope_theta": theta,
        ORIGINAL_LENGTH: values[ORIGINAL_LENGTH],
        LENGTH: rope[LENGTH],
        "factor": 1.0 if rope.get("factor") is None else rope["factor"],
        "attention_factor": 1.0 if given is None else given,
    }
    for key, value in numbers.items():
        if not base.is_positive(value):
            raise ConfigError(f"{key}={value!r} of longrope rope: is not a number above 0")
    factors = [values["short_factor"], values["long_factor"]]
    for key, value in zip(("short_factor", "long_factor"), factors, strict=True):
        if not (isinstance(value, list) and value and all(map(base.is_positive, value))):
            raise ConfigError(f"{key}={value!r} of longrope rope: is not a list of numbers above 0")
    if len(factors[0]) != len(factors[1]):
        raise ConfigError("short_factor and long_factor of longrope rope: have different lengths")
    attention_factor = given
    if given is None:
        attention_factor = _longrope_factor(numbers[ORIGINAL_LENGTH], rope.get("factor"), rope)
    length = float(numbers[ORIGINAL_LENGTH])
    flat = [float(factor) for half in factors for factor in half]
    return float(theta), ("longrope", length, float(attention_factor), *flat)


def _longrope_factor(original_length: float, factor: float | None, rope: Config) -> float:
    """Returns what transformers multiplies cos and sin by if no attention_factor is given."""
    factor = rope[LENGTH] / original_length if factor is None else factor
    if factor <= 1 or original_length <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))


def _attention_factor(rope: Config) -> float:
    """Returns YaRN's attention factor by the keys mscale and mscale_all_dim.

    It is 0.0, the default, if one of them is missing or 0.
    """
    mscales = [rope.get("mscale"), rope.get("mscale_all_dim")]
    if not all(mscales):
        return 0.0
    if not all(map(base.is_positive, mscales)):
        raise ConfigError(f"mscale, mscale_all_dim={mscales} of yarn rope: are not numbers above 0")
    own, all_dim = (0.1 * mscale * math.log(max(rope["factor"], 1)) + 1 for mscale in mscales)
    return own / all_dim


def to_config(section: Section, family: Family) -> Config:
    """Returns the rope keys of config.json, both of transformers 5 and of earlier versions."""
    rope = _rope_config(section, family)
    has_scaling = rope.keys() != {"rope_type"}
    theta = section["rope_theta"]
    config = {
        "rope_theta": theta,
        "rope_scaling": rope if has_scaling else None,
        "rope_parameters": rope | {"rope_theta": theta},
    }
    if family.rope_fraction is not None:
        config[FRACTION] = section["rope_fraction"]
        config["rope_parameters"][FRACTION] = section["rope_fraction"]
        if has_scaling:
            config["rope_scaling"] = rope | {FRACTION: section["rope_fraction"]}
    if LOCAL_THETA in family.defaults:
        local_theta = section["rope_theta_local"] or theta
        config[LOCAL_THETA] = local_theta
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    return config


def _rope_config(section: Section, family: Family) -> Config:
    """Returns the object `rope_scaling`."""
    rope_type, *numbers = section["rope_scaling"] or ("default",)
    if rope_type == "longrope":
        return _longrope_config(section)
    values = dict(zip(ROPE_SCALINGS[rope_type], numbers, strict=True))
    rope = {"rope_type": rope_type}
    for key, value in values.items():
        is_default = key in YARN_DEFAULTS and value == YARN_DEFAULTS[key]
        if key != LENGTH and not is_default:
            rope[key] = value
    # A family that has the two mscales writes them instead of the attention factor that they give.
    own = family.to_rope_config(section)
    has_mscales = "mscale_all_dim" in own
    if has_mscales and _attention_factor(rope | own) == values["attention_factor"]:
        rope.pop("attention_factor", None)
    else:
        own.pop("mscale", None)
    rope |= own
    if ORIGINAL_LENGTH in rope:
        rope[ORIGINAL_LENGTH] = int(rope[ORIGINAL_LENGTH])
    return rope


def _longrope_config(section: Section) -> Config:
    """Returns the object `rope_scaling` of longrope."""
    rope_type, length, attention_factor, *factors = section["rope_scaling"]
    half = len(factors) // 2
    rope = {
        "rope_type": rope_type,
        "short_factor": factors[:half],
        "long_factor": factors[half:],
        ORIGINAL_LENGTH: int(length),
    }
    if attention_factor != _longrope_factor(length, None, {LENGTH: section["max_seq_len"]}):
        rope["attention_factor"] = attention_factor
    return rope
