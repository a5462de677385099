"""Mixtures of experts: the keys of config.json, tensors of all experts, and what no file of transformers has."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from meshtrain.huggingface import files
from meshtrain.huggingface.families import base as families
from meshtrain.huggingface.families.base import Family
from meshtrain.models import mixture

Config = dict[str, Any]  # a config.json

Section = dict[str, Any]  # the `model` section of a config

LOSS_WEIGHT = "router_aux_loss_coef"

LOSSES = ("batch", "sequence")  # values of `balance` that have such a weight

# Whether the weights of the experts of a token are divided by their sum.
NORMALIZED = "norm_topk_prob"

BIAS = ".e_score_correction_bias"  # end of the name of the only tensor that a layer measures

FIRST_DENSE = "first_k_dense_replace"

ALPHA = "aux_loss_alpha"  # weight of DeepSeek-V2's balance loss

BIAS_STEP = 0.001  # of a router that is balanced by a bias, as in DeepSeek-V3


def faults(config: Config, family: Family) -> list[str]:
    """Returns an error for each key that is invalid, besides those in Family.keys."""
    found = []
    for key in {LOSS_WEIGHT, ALPHA} & family.defaults.keys():
        weight = config[key]
        if not (families.is_number(weight) and weight >= 0):
            found.append(f"{key}={weight!r}: is not a number of at least 0")
    if LOSS_WEIGHT in family.defaults:
        return found
    config = config | _groups(config)
    minimums = {"n_group": 1, "topk_group": 1, FIRST_DENSE: 0}
    found += [
        f"{key}={config[key]!r}: is not an integer of at least {minimum}"
        for key, minimum in minimums.items()
        if not families.is_count(config[key], minimum)
    ]
    num_experts, num_groups = config.get(family.keys["num_experts"]), config["n_group"]
    if not found and families.is_count(num_experts):
        if num_experts % num_groups or num_experts < 2 * num_groups:
            found.append(
                f"n_group={num_groups}: are not groups of 2 or more of {num_experts} experts"
            )
    return found


def _groups(config: Config) -> Config:
    """Returns the keys of the groups of experts, of which DeepSeek-V2's "greedy" ignores all but one."""
    if config.get("topk_method") == "greedy":
        return {"n_group": 1, "topk_group": 1}
    return {key: config[key] for key in ("n_group", "topk_group")}


def to_section(config: Config, family: Family) -> Section:
    """Returns the keys of a section that are not in Family.keys.

    The balance loss, which does not change the logits, is that of this package, with the weight in config.json.
    """
    if LOSS_WEIGHT not in family.defaults:
        groups = tuple(_groups(config).values())
        section = {"balance": "bias", "balance_weight": BIAS_STEP}
        if ALPHA in family.defaults:
            section = {"balance": "sequence", "balance_weight": float(config[ALPHA])}
        section |= {"expert_groups": groups if groups[0] > 1 else ()}
        return section | {"first_dense_layers": config[FIRST_DENSE]}
    section = {"balance": "batch", "balance_weight": float(config[LOSS_WEIGHT])}
    if NORMALIZED in family.defaults:
        section["router"] = "topk_softmax" if config[NORMALIZED] else "softmax"
    return section


def to_config(s: Section, family: Family) -> Config:
    """Returns the keys of a config.json."""
    config = {family.keys.get("d_expert", family.keys["d_ff"]): s["d_expert"] or s["d_ff"]}
    if LOSS_WEIGHT not in family.defaults:
        num_groups, groups_per_token = s["expert_groups"] or (1, 1)
        config |= {"n_group": num_groups, "topk_group": groups_per_token}
        if ALPHA in family.defaults:
            config["topk_method"] = "group_limited_greedy" if num_groups > 1 else "greedy"
            config[ALPHA] = float(s["balance_weight"]) if s["balance"] in LOSSES else 0.0
        return config | {FIRST_DENSE: s["first_dense_layers"]}
    config[LOSS_WEIGHT] = float(s["balance_weight"]) if s["balance"] in LOSSES else 0.0
    if NORMALIZED in family.defaults:
        config[NORMALIZED] = s["router"] == "topk_softmax"
    return config


def written_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a tensor in files whose dtype is `dtype`."""
    return np.promote_types(dtype, np.float32) if name.endswith(BIAS) else dtype


def unfuse(name: str, tensor: files.Tensor, family: Family) -> dict[str, files.Tensor]:
    """Returns the tensors that one of all experts holds, one after the other in its bytes; or the tensor itself."""
    end = next((end for end in family.fused if name.endswith(f".{end}")), None)
    if end is None:
        return {name: tensor}
    parts, shape = family.fused[end], tensor.shape
    stem = name.removesuffix(end)
    if "*" not in parts[0]:
        return {stem + parts[0]: tensor}
    if len(shape) != 3 or not math.prod(shape) or shape[1] % len(parts):
        return {name: tensor}
    found = {}
    for number, of_expert in enumerate(tensor.split(shape[0])):
        matrix = dataclasses.replace(of_expert, shape=shape[1:])
        split = zip(parts, matrix.split(len(parts)), strict=True)
        found |= {stem + part.replace("*", str(number)): one for part, one in split}
    return found


def initial_measured(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns what a layer has measured before the first step, for all layers."""
    num_experts = leaf.shape[-1] if leaf.ndim == 2 else 1
    value = np.asarray(getattr(mixture.RouterStats(num_experts), name)[...], leaf.dtype)
    values = np.broadcast_to(value, leaf.shape)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])
