"""A config.json of transformers as the `model` section of a config, and back."""

import json
import math
from pathlib import Path
from typing import Any

from meshtrain.errors import ConfigError
from meshtrain.huggingface.families import (
    ALSO,
    CAPS,
    EVERYWHERE,
    FAMILIES,
    KINDS,
    LEAST,
    LETTERS,
    OF_TEXT,
    PLAIN,
    SCALINGS,
    Family,
)

NAME = "config.json"
# Not those that transformers would assume of a family.
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
IMPLIED = ("num_kv_heads", "head_dim", *CAPS)  # where they are null
Config = dict[str, Any]  # what such a file holds
Section = dict[str, Any]


def read(path: Path) -> Config:
    """Returns what a config.json says of the language model; raises ConfigError where it cannot be read."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(config, dict):
            raise ValueError("is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if isinstance(text := config.get("text_config"), dict):
        beside = {key: config[key] for key in OF_TEXT if key in config}
        config = {"architectures": config.get("architectures")} | beside | text
    return config


def family_of(config: Config) -> Family:
    """Returns the family that a config.json names; raises ConfigError where it is none of ours."""
    named = config.get("architectures") or []
    named = named if isinstance(named, list) else [named]
    wanted = {ALSO.get(name, name) for name in named if isinstance(name, str)}
    for family in FAMILIES:
        if family.architecture in wanted or (
            not named and family.model_type == config.get("model_type")
        ):
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"architectures={named}: none that is known here; use a model of {known}")


def to_section(config: Config) -> Section:
    """Returns the `model` section of a config.json; raises ConfigError for all that this transformer lacks."""
    family = family_of(config)
    config = family.defaults | config
    faults = _faults(config, family)
    if faults:
        raise ConfigError(*faults)
    section = PLAIN | family.section
    section |= {ours: config[theirs] for ours, theirs in family.keys.items()}
    heads = section["num_heads"]
    section["num_kv_heads"] = section.get("num_kv_heads") or heads
    section["head_dim"] = section.get("head_dim") or section["d_model"] // heads
    section["d_ff"] = section["d_ff"] or 4 * section["d_model"]
    section |= {key: float(section[key] or 0.0) for key in CAPS}
    if "mlp_bias" in family.defaults:
        section["bias"] = bool(config["mlp_bias"])
    if section["norm"] == "rms_1p":
        section["embed_scale"] = section["d_model"] ** 0.5
        section["query_scale"] = config["query_pre_attn_scalar"] ** -0.5
    if section["positions"] == "rope":
        section |= _rope(config, family) | _attention(config, family)
    return section


def _faults(config: Config, family: Family) -> list[str]:
    """What a config.json lacks, and what it wants that this transformer does not have."""
    faults = []
    for ours, theirs in family.keys.items():
        kind = KINDS.get(ours, int)
        value = config.get(theirs, "")
        if theirs not in config:
            faults.append(f"{theirs}: missing")
        elif value is None and (ours in IMPLIED or family.defaults.get(theirs, "") is None):
            continue
        elif isinstance(value, bool) != (kind is bool) or not isinstance(value, kind | int):
            faults.append(
                f"{theirs}={value!r}: is of type {type(value).__name__}, not {kind.__name__}"
            )
        elif kind is not bool and not 0 < value < math.inf:
            faults.append(f"{theirs}={value!r}: is no number above 0")
    for key, values in (EVERYWHERE | family.only).items():
        if config.get(key) not in values:
            told = " or ".join("none" if value is None else repr(value) for value in values)
            faults.append(f"{key}={config[key]!r}: this transformer has only {told}")
    for key, least in LEAST.items():
        if key in family.defaults and not (_is_number(config[key]) and config[key] >= least):
            faults.append(f"{key}={config[key]!r}: is no number from {least} on")
    if "mlp_bias" in family.defaults and bool(config["attention_bias"]) != bool(config["mlp_bias"]):
        faults.append(
            f"attention_bias={config['attention_bias']}, mlp_bias={config['mlp_bias']}: this transformer "
            f"has both, or neither"
        )
    return faults


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _rope(config: Config, family: Family) -> Section:
    theta, scaling = _rope_of(config, "full_attention")
    section = {"rope_theta": theta, "rope_scaling": scaling}
    if "rope_local_base_freq" in family.defaults:
        old = {"rope_theta": config["rope_local_base_freq"]}
        old["rope_parameters"] = config.get("rope_parameters")
        section["rope_theta_local"], scaling = _rope_of(old, "sliding_attention")
        if scaling:
            raise ConfigError(
                f"rope_parameters: {scaling[0]} in sliding_attention; it has only default"
            )
    return section


def _rope_of(config: Config, layers: str) -> tuple[float, tuple]:
    """Returns base and scaling of rope in one kind of layers, by the new keys or the old ones."""
    given: Config = {}
    for key in ("rope_scaling", "rope_parameters"):
        of_kind = config.get(key) or {}
        if isinstance(of_kind, dict) and LETTERS.keys() & of_kind.keys():
            of_kind = of_kind.get(layers) or {}
        if not isinstance(of_kind, dict):
            raise ConfigError(f"{key}={of_kind!r}: is no JSON object")
        given |= of_kind
    kind = given.get("rope_type", given.get("type", "default"))
    if (
        not isinstance(kind, str)
        or kind not in SCALINGS
        or given.get("partial_rotary_factor", 1.0) != 1.0
    ):
        told = {key: value for key, value in given.items() if key != "rope_theta"}
        raise ConfigError(
            f"rope {told}: this transformer has only {', '.join(SCALINGS)}, of all dims"
        )
    numbers = {key: given.get(key) for key in SCALINGS[kind]}
    numbers["rope_theta"] = given.get("rope_theta", config["rope_theta"])
    for key, value in numbers.items():
        if not (_is_number(value) and value > 0):
            raise ConfigError(f"{key}={value!r} of {kind} rope: is no number above 0")
    theta = float(numbers.pop("rope_theta"))
    return theta, (kind, *map(float, numbers.values())) if numbers else ()


def _attention(config: Config, family: Family) -> Section:
    """Returns which layers are local, as the shortest string that says it, and how far they see."""
    types, num_layers = config.get("layer_types"), config["num_hidden_layers"]
    letters = every_layer(family.letters(config), num_layers)
    if types is not None:
        own, letters = letters, _letters(types, num_layers)
        if not family.by_layer and letters != own:
            kind = next(name for name, letter in LETTERS.items() if letter == own[0])
            raise ConfigError(f"layer_types={types}: a {family.architecture} has {kind} alone here")
    window = config.get("sliding_window") if "l" in letters else 0
    if "l" in letters and not (isinstance(window, int) and _is_number(window) and window >= 1):
        raise ConfigError(f"sliding_window={window!r}: {letters.count('l')} layers need 1 or more")
    short = next(
        n for n in range(1, num_layers + 1) if every_layer(letters[:n], num_layers) == letters
    )
    return {"attention": letters[:short], "window": window}


def _letters(types: Any, num_layers: int) -> str:
    listed = {*map(str, types)} if isinstance(types, list) else {"none"}
    if not listed <= LETTERS.keys() or len(types) != num_layers:
        raise ConfigError(f"layer_types={types}: use one of {', '.join(LETTERS)} for each layer")
    return "".join(map(LETTERS.get, types))


def every_layer(letters: str, num_layers: int) -> str:
    """Returns a letter for each layer."""
    return (letters * -(-num_layers // len(letters)))[:num_layers]


def to_config(section: Section, original: Config | None = None) -> Config:
    """Returns the config.json of a model section: of the first family where it reads back as the same.

    `original` is where the model came from: its family comes first, and what it says beside the model,
    such as ids of tokens, is kept. Raises ConfigError where no family has such a model.
    """
    original, nearest = original or {}, None
    preferred = family_of(original) if original else None
    for family in sorted(FAMILIES, key=lambda one: one is not preferred):
        config = _written(section, family)
        if family is preferred:
            config = original | config
        config = NO_IDS | config
        differing = differences(section, to_section(config))
        if not differing:
            return config
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = family, differing
    raise ConfigError(
        f"no architecture of transformers has this model; nearest is {nearest[0].architecture}, where",
        *(f"  {one}" for one in nearest[1]),
    )


def differences(here: Section, there: Section) -> list[str]:
    """Returns a line for each key in which two sections describe other models."""
    here, there = meaning(here), meaning(there)
    return [
        f"model.{key} is {there.get(key)!r}, not {value!r}"
        for key, value in here.items()
        if value != there.get(key)
    ]


def _written(section: Section, family: Family) -> Config:
    s = PLAIN | section
    s |= {"head_dim": head_dim(s)}
    config = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= {key: values[0] for key, values in family.only.items() if values[0] is not None}
    config |= {
        theirs: s[ours] or None if ours in CAPS else s[ours] for ours, theirs in family.keys.items()
    }
    if "mlp_bias" in family.defaults:
        config |= {"attention_bias": s["bias"], "mlp_bias": s["bias"]}
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = round((s["query_scale"] or s["head_dim"] ** -0.5) ** -2)
    if family.section.get("positions", "rope") == "rope":
        config |= _written_rope(s, family) | _written_attention(s, family)
    return config


def _written_rope(s: Section, family: Family) -> Config:
    """Returns the keys of transformers 5, and those before it."""
    kind, *numbers = s["rope_scaling"] or ("default",)
    given = {"rope_type": kind} | dict(zip(SCALINGS[kind], numbers, strict=True))
    if "original_max_position_embeddings" in given:
        given["original_max_position_embeddings"] = int(given["original_max_position_embeddings"])
    config = {"rope_theta": s["rope_theta"], "rope_scaling": given if numbers else None}
    config["rope_parameters"] = given | {"rope_theta": s["rope_theta"]}
    if "rope_local_base_freq" in family.defaults:
        local = s["rope_theta_local"] or s["rope_theta"]
        config["rope_local_base_freq"] = local
        config["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return config


def _written_attention(s: Section, family: Family) -> Config:
    if "sliding_window" not in family.defaults:
        return {}
    letters = every_layer(s["attention"], s["num_layers"])
    window = s["window"] if "l" in letters else None
    if not family.by_layer:
        return {"sliding_window": window}
    types = {letter: name for name, letter in LETTERS.items()}
    config = {"layer_types": [types[letter] for letter in letters]}
    if "use_sliding_window" in family.defaults:
        first = (letters + "l").index("l")
        config |= {"use_sliding_window": "l" in letters, "max_window_layers": first}
        return config | {"sliding_window": window}
    return config | {"sliding_window": window or family.defaults["sliding_window"]}  # never null


def head_dim(section: Section) -> int:
    return section["head_dim"] or section["d_model"] // section["num_heads"]


def meaning(section: Section) -> Section:
    """Returns a section with all that is implied written out, so that equal models have equal ones."""
    s = PLAIN | section | {"head_dim": head_dim(section)}
    letters = every_layer(s["attention"], s["num_layers"])
    s["attention"], s["window"] = letters, s["window"] if "l" in letters else 0
    s["query_scale"] = s["query_scale"] or s["head_dim"] ** -0.5
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
    for how in ("z_loss", "attention_impl", "loss_chunk_mib"):
        del s[how]
    return s
