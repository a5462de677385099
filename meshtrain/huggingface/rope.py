"""Converts between the rope keys of a config.json, of transformers 5 or earlier, and those of a section."""

import math
from typing import Any

from meshtrain.errors import ConfigError
from meshtrain.huggingface.families import base as families
from meshtrain.huggingface.families.base import Family

Config = dict[str, Any]  # a config.json

Section = dict[str, Any]  # the `model` section of a config

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


def to_section(config: Config, family: Family) -> Section:
    """Returns the rope keys of a section; raises ConfigError if transformers would compute anything else."""
    scaling, parameters = (_object(config, key) for key in ("rope_scaling", "rope_parameters"))
    by_layer_type = families.LAYER_LETTERS.keys() & parameters.keys()
    if "rope_local_base_freq" not in family.defaults:
        # A rope_scaling replaces rope_parameters, and its theta.
        rope = scaling or parameters
        if families.LAYER_LETTERS.keys() & rope.keys():
            raise ConfigError(
                f"rope {rope}: {family.architecture} has the same rope in all layers; use one for all"
            )
        # transformers reads this key also next to the others; there, it has priority.
        outer = {key: config[key] for key in (ORIGINAL_LENGTH,) if key in config}
        theta, numbers = _parse(rope | outer, config, config["rope_theta"])
        return {"rope_theta": theta, "rope_scaling": numbers}
    if parameters and not by_layer_type:
        raise ConfigError(
            f"rope_parameters={parameters}: {family.architecture} reads only those of "
            f"{' and '.join(families.LAYER_LETTERS)}; put them there"
        )
    if "type" in scaling and "rope_type" not in scaling and not parameters:
        raise ConfigError(
            f"rope_scaling={scaling}: {family.architecture} in transformers ignores its type; name it rope_type"
        )
    full, local = (
        _object(parameters, layer_type) for layer_type in ("full_attention", "sliding_attention")
    )
    if (parameters | full | scaling).get("truncate", True) is not True:
        raise ConfigError(f"truncate: {family.architecture} in transformers ignores it; remove it")
    theta, numbers = _parse(full | scaling, config, config["rope_theta"])
    local_theta, local_numbers = _parse(local, config, config["rope_local_base_freq"])
    if local_numbers:
        raise ConfigError(
            f"rope_parameters: rope_type={local_numbers[0]} in sliding_attention: only default is supported"
        )
    return {"rope_theta": theta, "rope_scaling": numbers, "rope_theta_local": local_theta}


def _object(config: Config, key: str) -> Config:
    """Returns a JSON object in a config.json; {} if it is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{key}={value!r}: is not a JSON object")
    return value or {}


def _parse(rope: Config, config: Config, default_theta: Any) -> tuple[float, tuple]:
    """Returns theta and rope_scaling."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if (
        not isinstance(rope_type, str)
        or rope_type not in ROPE_SCALINGS
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        shown = {key: value for key, value in rope.items() if key != "rope_theta"}
        raise ConfigError(
            f"rope {shown}: not supported; only {', '.join(ROPE_SCALINGS)} is, on all dims of a head"
        )
    length = config.get(LENGTH)
    rope = {ORIGINAL_LENGTH: length} | rope | {LENGTH: length}
    values = {key: rope.get(key) for key in ROPE_SCALINGS[rope_type]}
    if rope_type == "yarn":
        # transformers replaces null and 0 by the default; but a null truncate is false.
        values |= {key: values[key] or YARN_DEFAULTS[key] for key in ("beta_fast", "beta_slow")}
        values["truncate"] = bool(rope.get("truncate", True))
    values["rope_theta"] = rope.get("rope_theta", default_theta)
    for key, value in values.items():
        is_default = key == "attention_factor" and value is None
        if not (is_default or key == "truncate" or _is_positive(value)):
            raise ConfigError(f"{key}={value!r} of {rope_type} rope: is not a number above 0")
    if rope_type == "yarn" and values["attention_factor"] is None:
        values["attention_factor"] = _attention_factor(rope)
    theta = float(values.pop("rope_theta"))
    scaling = [value if isinstance(value, bool) else float(value) for value in values.values()]
    return theta, (rope_type, *scaling) if scaling else ()


def _attention_factor(rope: Config) -> float:
    """Returns YaRN's attention factor by DeepSeek's keys; 0.0, the default, if one of them is missing or 0."""
    mscales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(mscales):
        return 0.0
    if not all(map(_is_positive, mscales)):
        raise ConfigError(f"mscale, mscale_all_dim={mscales} of yarn rope: are not numbers above 0")
    own, all_dim = (0.1 * mscale * math.log(max(rope["factor"], 1)) + 1 for mscale in mscales)
    return own / all_dim


def query_factor(config: Config) -> float:
    """Returns the m by whose square DeepSeek multiplies the scores of attention: 0.1 mscale_all_dim ln(factor) + 1."""
    rope = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    all_dim, factor = rope.get("mscale_all_dim"), rope.get("factor")
    has_scaling = rope.get("rope_type", rope.get("type", "default")) != "default"
    if not (has_scaling and _is_positive(all_dim) and _is_positive(factor) and factor > 1):
        return 1.0
    return 0.1 * all_dim * math.log(factor) + 1


def _mscales(s: Section) -> Config:
    """Returns DeepSeek's keys for the query_scale of a section with latent attention; `query_factor` inverts it."""
    kind, *numbers = s["rope_scaling"] or ("default",)
    if kind != "yarn" or not s["kv_lora_rank"] or not s["query_scale"] or numbers[0] <= 1:
        return {}
    log, own = 0.1 * math.log(numbers[0]), numbers[4]
    m = (s["query_scale"] * (s["head_dim"] + s["rope_head_dim"]) ** 0.5) ** 0.5
    found = {"mscale_all_dim": round((m - 1) / log, 6)}
    if own:
        found["mscale"] = round((own * m - 1) / log, 6)
    return found


def _is_positive(value: Any) -> bool:
    return families.is_number(value) and value > 0


def to_config(s: Section, family: Family) -> Config:
    """Returns the rope keys of config.json, both of transformers 5 and of earlier versions."""
    rope_type, *numbers = s["rope_scaling"] or ("default",)
    named = dict(zip(ROPE_SCALINGS[rope_type], numbers, strict=True))
    omitted = {LENGTH} | {key for key in YARN_DEFAULTS if named.get(key) == YARN_DEFAULTS[key]}
    rope = {"rope_type": rope_type} | {k: v for k, v in named.items() if k not in omitted}
    mscales = _mscales(s)
    if mscales and _attention_factor(rope | mscales) == named["attention_factor"]:
        rope.pop("attention_factor", None)
    else:
        mscales.pop("mscale", None)
    rope |= mscales
    if ORIGINAL_LENGTH in rope:
        rope[ORIGINAL_LENGTH] = int(rope[ORIGINAL_LENGTH])
    config = {"rope_theta": s["rope_theta"], "rope_scaling": rope if numbers else None}
    config["rope_parameters"] = rope | {"rope_theta": s["rope_theta"]}
    if "rope_local_base_freq" in family.defaults:
        local = s["rope_theta_local"] or s["rope_theta"]
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return config
