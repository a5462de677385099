"""Verifies layouts in the dtype of the config, with the kernels of the devices that are there."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from meshtrain import console
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.tools.verify import QUICK_LAYOUTS, certificate, check_without, layouts, precision
from meshtrain.tools.verify.case import VerifyCase, set_num_layers, shrink
from meshtrain.tools.verify.certificate import Certificate
from meshtrain.tools.verify.laws import rounding as rounding_laws

HEAD_DIM = 64  # fused attention kernels need a multiple of 8
SEQ_LEN = 64
NUM_LAYERS = 8  # for up to two chunks on each of four stages


def verify_here(
    settings: Mapping[str, Any],
    *,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    quick: bool = False,
    keep_sizes: bool = False,
    without: Iterable[str] = (),
    log: Callable[[str], None] = print,
) -> Certificate:
    """Compares the errors of layouts in `train.dtype` with those of one device; see precision.py.

    The layouts use the attention implementation of the config, one device uses "xla". The arguments
    are those of `verify`. Raises ConfigError for mistakes of the user.
    """
    without = list(without)
    check_without(without)
    configured = settings.to_dict() if hasattr(settings, "to_dict") else dict(settings)
    dtype = configured["train"]["dtype"]
    if dtype == "float64":
        raise ConfigError("train.dtype=float64: verify compares float64 without --here")

    raw = copy.deepcopy(configured)
    if model is None and not keep_sizes:
        shrink_for_kernels(raw)
    with jax.enable_x64(True):
        case = VerifyCase(raw, model, data, keep_sizes=True)
        fixed: dict[str, Any] = {"masks": case.is_text, "loss_scale": False, "dropout": False}
        fixed["adapter"] = None
        if model is None and "attention_impl" in raw["model"]:
            packed = case.rows is not None and "packing" not in without
            text = _describe_attention(case, configured["model"], dtype, packed=packed)
            fixed["attention_impl"] = text.partition(";")[0]
            log(f"attention {text}")
        rows = layouts.select(case, without, fixed)
        chosen = rows[:QUICK_LAYOUTS] if quick else rows
        log(f"{len(chosen)} layouts of {jax.device_count()} devices in {dtype}")

        violations = []
        for name, law in rounding_laws.laws().items():
            fault = law()
            if fault:
                violations.append(f"{name}: {fault}")
                log(f"FAILED on one device: {name}: {fault}")

        results = []
        with console.progress("verifying", len(chosen), stream="stdout") as advance:
            for row in chosen:
                result = precision.check_layout(case, row, dtype)
                results.append(result)
                log(certificate.summary_line(result))
                advance(1)

    left_out = ["evaluation and the learning rate, which verify compares without --here"]
    if len(rows) > len(chosen):
        left_out.append(f"{len(rows) - len(chosen)} layouts that --quick leaves out")
    not_covered = certificate.not_covered(
        configured,
        case.raw,
        [result.row for result in results],
        without=without,
        left_out=left_out,
    )
    return Certificate(
        case.name, certificate.MAX_RATIO, tuple(violations), tuple(results), not_covered
    )


def _describe_attention(case: VerifyCase, section: dict, dtype: str, *, packed: bool) -> str:
    """Returns the implementation that the config selects in `dtype`, and text to log about it."""
    used = copy.deepcopy(case.raw)
    for key in ("attention_impl", "dropout"):
        if key in section:
            used["model"][key] = section[key]
    model = build_model(parse(used, num_devices=jax.device_count()))
    return model.attention(used["data"]["seq_len"], dtype, packed)


def shrink_for_kernels(raw: dict[str, Any]) -> None:
    """Reduces the sizes as `shrink` does, but to heads and sequences that fused kernels support."""
    sizes = copy.deepcopy({**raw["model"], **raw["data"]})
    shrink(raw)
    model, data = raw["model"], raw["data"]
    set_num_layers(model, NUM_LAYERS)
    if {"num_heads", "d_model"} <= model.keys():
        head_dim = min(HEAD_DIM, sizes.get("head_dim") or sizes["d_model"] // sizes["num_heads"])
        model["d_model"] = min(sizes["d_model"], head_dim * model["num_heads"])
        if model.get("head_dim"):
            model["head_dim"] = head_dim
    for section in (model, data):
        for key in {"seq_len", "max_seq_len"} & section.keys():
            section[key] = min(SEQ_LEN, sizes[key])
