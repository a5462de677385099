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
}
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.0, "truncate": True}

LOCAL_THETA = "rope_local_base_freq"  # a family that has it has another rope in local layers


def to_section(config: Config, family: Family) -> Section:
    """Returns the rope keys of a section.

    Raises ConfigError if transformers would compute anything else.
    """
    scaling = base.json_object(config, "rope_scaling")
    parameters = base.json_object(config, "rope_parameters")
    if LOCAL_THETA in family.defaults:
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
    theta, numbers = _parse(rope, config, config["rope_theta"])
    return {"rope_theta": theta, "rope_scaling": numbers}


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
    if not is_known or rope.get("partial_rotary_factor", 1.0) != 1.0:
        shown = {key: value for key, value in rope.items() if key != "rope_theta"}
        raise ConfigError(
            f"rope {shown}: not supported; only {', '.join(ROPE_SCALINGS)} is, "
            f"on all dims of a head"
        )
    length = config.get(LENGTH)
    rope = {ORIGINAL_LENGTH: length} | rope | {LENGTH: length}
    values = {key: rope.get(key) for key in ROPE_SCALINGS[rope_type]}
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
    values = dict(zip(ROPE_SCALINGS[rope_type], numbers, strict=True))
    rope = {"rope_type": rope_type}
    for key, value in values.items():
        is_default = key in YARN_DEFAULTS and value == YARN_DEFAULTS[key]
        if key != LENGTH and not is_default:
            rope[key] = value
    # A family that has the two mscales writes them instead of the attention factor that they give.
    mscales = family.to_rope_config(section)
    if mscales and _attention_factor(rope | mscales) == values["attention_factor"]:
        rope.pop("attention_factor", None)
    else:
        mscales.pop("mscale", None)
    rope |= mscales
    if ORIGINAL_LENGTH in rope:
        rope[ORIGINAL_LENGTH] = int(rope[ORIGINAL_LENGTH])
    return rope
