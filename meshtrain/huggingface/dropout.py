"""Rates of dropout in a config.json: GPT-2 has three, `model.dropout` is one for all."""

from typing import Any

from meshtrain.huggingface.families import Family

RATES = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
DEFAULT = 0.1  # of each in transformers
MODEL_TYPE = "gpt2"


def to_section(config: dict[str, Any], family: Family) -> dict[str, float]:
    """Returns `dropout` of the `model` section: that of GPT-2 if its rates are equal, otherwise 0."""
    rates = {config.get(key, DEFAULT) for key in RATES} if family.model_type == MODEL_TYPE else {}
    return {"dropout": float([*rates][0] or 0) if len(rates) == 1 else 0.0}


def to_config(section: dict[str, Any], family: Family) -> dict[str, float]:
    """Returns the rates for a config.json; a family that has no such rates gets none."""
    return dict.fromkeys(RATES, section["dropout"]) if family.model_type == MODEL_TYPE else {}
