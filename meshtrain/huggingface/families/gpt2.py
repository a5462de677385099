"""Rates of dropout in a config.json: GPT-2 has three, `model.dropout` is one for all."""

from typing import Any

from meshtrain.huggingface.families.base import Family

DROPOUT_RATES = ("embd_pdrop", "attn_pdrop", "resid_pdrop")

DEFAULT_DROPOUT = 0.1  # of each in transformers

MODEL_TYPE = "gpt2"


def dropout_of_config(config: dict[str, Any], family: Family) -> dict[str, float]:
    """Returns `dropout` of the `model` section: that of GPT-2 if its rates are equal, otherwise 0."""
    rates = (
        {config.get(key, DEFAULT_DROPOUT) for key in DROPOUT_RATES}
        if family.model_type == MODEL_TYPE
        else {}
    )
    return {"dropout": float([*rates][0] or 0) if len(rates) == 1 else 0.0}


def dropout_rates(section: dict[str, Any], family: Family) -> dict[str, float]:
    """Returns the rates for a config.json; a family that has no such rates gets none."""
    return (
        dict.fromkeys(DROPOUT_RATES, section["dropout"]) if family.model_type == MODEL_TYPE else {}
    )
