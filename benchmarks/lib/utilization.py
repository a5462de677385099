"""Tokens per second and model FLOPs utilization (MFU), as columns of a comparison of steps."""

from collections.abc import Mapping
from typing import Any

from benchmarks.lib import comparison, gpu_models
from meshtrain.hardware import peak_flops


def add_to(
    rows: list[dict[str, Any]],
    results: comparison.Results,
    *,
    model: str,
    configs: Mapping[str, Any],
    rates: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns the rows of `comparison.table` with more columns.

    `configs` has the config of each case, by its name, which is the first column. `rates` has the
    kind of the device and what it reaches in a matrix product, FLOP/s.
    """
    peak = peak_flops(rates["kind"])
    flops = gpu_models.model_flops(model)
    table = []
    for row in rows:
        name = next(iter(row.values()))
        tokens = configs[name].train.global_batch * configs[name].data.seq_len
        rate = 1e3 * tokens / row["ms per step"]
        columns = {"tokens/s": rate}
        for rule, count in flops.items():
            columns[f"MFU %, {rule}"] = 100 * rate * count / peak if peak else None
        columns["% of matmul rate"] = 100 * rate * flops["PaLM"] / rates["matmul_flops"]
        most = results.facts[name].get("mfu_at_most")
        columns["MFU % at most"] = most and 100 * most
        table.append(row | columns)
    return table


def print_rates(kind: str, rates: Mapping[str, float]) -> None:
    """Prints what this device reaches in a large matrix product, and in a copy."""
    product, copy = rates["matmul_flops"] / 1e12, rates["copy_bytes"] / 1e12
    print(f"{kind}: matrix product {product:.4g} TFLOP/s, copy {copy:.4g} TB/s")
