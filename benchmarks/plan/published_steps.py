"""How wrong the planner is: published steps of other trainers, predicted by `meshtrain plan`.

  python benchmarks/plan/published_steps.py [--group=nemo] [--compile=3] [--output=PATH]

published_steps.csv has a row for each measured step: sizes, mesh, batch, remat, seconds, and where
it was published. Frameworks differ in their kernels, so the table also has the errors after one
factor for each framework and chip. The regret of a group of layouts of one model is by how much the
layout with the least predicted time is slower than the fastest. No device is needed.

--compile=N compiles N of the layouts of COMPILED ahead of time, about half a minute each, and
compares the predicted memory with that of the compiled step, and the FLOPs of its matrix products
with arithmetic: a row is marked if they differ by more than 1 %. It needs the extra aot-gpu.
"""

import csv
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import record
from meshtrain import hardware
from meshtrain.config.load import load_config
from meshtrain.config.parse import on_devices, parse
from meshtrain.config.schema import AXES
from meshtrain.tools.plan import compiled, from_config, memory
from meshtrain.tools.plan.cost import PROGRAMS, OverlapModel, step_cost
from meshtrain.tools.plan.layout import Layout, name_of
from meshtrain.tools.plan.machine import ATTENTION, SUSTAINED, Machine
from meshtrain.tools.plan.predict import layout_of
from meshtrain.tools.plan.sizes import ModelWork, decoder

STEPS = Path(__file__).with_name("published_steps.csv")
# What is known of the frameworks, from their programs.
NOTHING, EVERYTHING = (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0)
# Of a layer's products (query, key and value; out; gate and up; down) and attention, what a kind of
# remat computes again.
RECOMPUTED = {
    # MaxText's "minimal_flash": "dots", and attention with its statistics.
    "dots+attention": (NOTHING, 0.0),
    # "save_qkv_proj"; and with the result of attention's last product ("out_proj=offload").
    "qkv": ((0.0, 1.0, 1.0, 0.0), 1.0),
    "qkv+out": ((0.0, 0.0, 1.0, 0.0), 1.0),
    "qkv+attention+out": ((0.0, 0.0, 1.0, 0.0), 0.0),  # "save_dot_with_context_except_mlp"
    # torchtitan's selective one: every second product, so keys, out and up.
    "every second": ((1 / 6, 1.0, 0.5, 0.0), 0.0),
}
# FlashAttention's first kernels (arXiv 2307.08691, figures 4 to 6, on A100), by which MPT was
# timed, as a Triton program.
FIRST_FLASH = (0.33, 0.29)
# FlashAttention-2, also on Hopper: by `scaled_dot_product_attention` of torch 2.
SECOND_FLASH = ATTENTION["ampere"]
TORCHTITAN = OverlapModel(recomputed=RECOMPUTED, attention=SECOND_FLASH)
HABITS = {
    # Megatron of 2021 had no fused attention and did not overlap the sum of gradients.
    "megatron": OverlapModel(
        fused_attention=False,
        data_hidden=0.0,
        sends_hidden=0.0,
        head_on_all_stages=False,
        recomputes_last=True,
    ),
    "nemo": OverlapModel(
        tensor_hidden=0.7,
        shards_residuals=True,
        head_on_all_stages=False,
        data_holds_moments=True,
        context_attention=1.0,
    ),
    "meta": OverlapModel(
        tensor_hidden=0.3,
        shards_residuals=True,
        head_on_all_stages=False,
        data_holds_moments=True,
        context_attention=1.0,
    ),
    # FSDP of torch 2.0 recomputes layers as they are, sums gradients in bfloat16, and gathers a
    # layer after the backward pass of the one before (BACKWARD_POST, Composer's default).
    "llm.c": OverlapModel(),
    "llm-foundry": OverlapModel(
        grad_bytes=2, attention=FIRST_FLASH, recomputes_last=True, gathers_late=True
    ),
    "torchtitan-eager": TORCHTITAN,
    "torchtitan-compile": TORCHTITAN,
}
# Layouts whose memory is compared with that of the compiled step: config, device, number, batch,
# keys.
KEYS = {
    **{f"mesh.{axis}": 1 for axis in AXES},
    **{"train.remat": "none", "train.num_microbatches": 1, "train.zero_stage": 3},
}
COMPILED = [
    ("llama3", "h100", 64, 128, {"mesh.fsdp": 64}),
    ("gpt2", "h100", 8, 64, {"mesh.data": 8}),
    ("llama3", "h200", 64, 64, {"mesh.fsdp": 8, "mesh.tensor": 8, "train.remat": "dots"}),
    ("llama3", "h100", 64, 64, {"mesh.data": 8, "mesh.fsdp": 8, "train.remat": "full"}),
    ("llama3", "h200", 64, 128, {"mesh.fsdp": 32, "mesh.context": 2}),
    ("llama3", "h100", 64, 64, {"mesh.fsdp": 64, "train.remat": "dots"}),
    (
        "llama3",
        "h200",
        32,
        64,
        {"mesh.pipeline": 4, "mesh.fsdp": 8, "train.num_microbatches": 8, "train.remat": "full"},
    ),
    (
        "llama3",
        "h200",
        32,
        32,
        {
            "mesh.pipeline": 4,
            "mesh.tensor": 8,
            "train.num_microbatches": 8,
            "pipeline.keep": "inputs",
        },
    ),
    ("llama3", "h200", 16, 16, {"mesh.fsdp": 2, "mesh.tensor": 8}),
    ("llama3", "h200", 32, 32, {"mesh.data": 2, "mesh.fsdp": 16, "train.zero_stage": 1}),
    ("llama3", "h200", 64, 128, {"mesh.fsdp": 64, "train.num_microbatches": 2}),
    ("gpt2", "h100", 8, 128, {"mesh.fsdp": 8, "train.remat": "dots"}),
    ("gpt2", "h100", 8, 256, {"mesh.fsdp": 8, "train.num_microbatches": 4}),
    ("gpt2", "a100-40gb", 8, 64, {"mesh.data": 4, "mesh.tensor": 2, "train.remat": "full"}),
    ("mistral", "h100", 32, 32, {"mesh.fsdp": 32, "train.remat": "dots"}),
    ("qwen3", "h100", 8, 32, {"mesh.fsdp": 8}),
    ("qwen3", "h100", 16, 32, {"mesh.fsdp": 8, "mesh.context": 2, "train.remat": "dots"}),
    ("gpt2", "h200", 8, 64, {"mesh.data": 8, "train.remat": "dots"}),
    ("gemma2", "h100", 16, 32, {"mesh.fsdp": 16, "train.remat": "dots"}),
    ("mixtral", "h200", 64, 64, {"mesh.fsdp": 8, "mesh.expert": 8, "train.remat": "full"}),
    ("mixtral", "h200", 64, 64, {"mesh.fsdp": 64, "train.remat": "dots"}),
    ("llama3_128k", "h200", 64, 8, {"mesh.fsdp": 8, "mesh.context": 8, "train.remat": "full"}),
]
DEVICES = hardware.devices() | {
    # Limited to 500 W, which sustains about a fifth less, and with HBM2e.
    "h100-500w": dataclasses.replace(
        hardware.devices()["h100"],
        flops_16=0.8 * hardware.devices()["h100"].flops_16,
        bandwidth=2.4e12,
    )
}


def rows(path: Path = STEPS) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def predicted(row: dict[str, str], speed: float = 1.0) -> float:
    """Returns the seconds of a step; `speed` multiplies the FLOP/s of the device."""

    def number(name: str) -> int:
        return int(float(row[name]))

    device, chips = DEVICES[row["hardware"]], number("chips")
    device = dataclasses.replace(device, flops_16=speed * device.flops_16)
    if row["network"]:  # slower than the vendor's own servers
        device = dataclasses.replace(device, network=float(row["network"]))
    per_host = 8 if device.chip else chips // number("slices")
    sizes = {name: number(name) for name in ("data", "fsdp", "pipeline", "context", "tensor")}
    chunks = number("chunks")
    layout = Layout(
        **sizes,
        zero_stage=number("zero"),
        rows=number("rows"),
        num_microbatches=number("micro"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        remat=row["remat"],
    )
    work = decoder(
        num_layers=number("L"),
        d_model=number("D"),
        d_ff=number("F"),
        num_heads=number("H"),
        num_kv_heads=number("G"),
        head_dim=number("K"),
        vocab_size=number("V"),
        gated=bool(number("gated")),
        tied=bool(number("tied")),
    )
    machine = Machine(device, chips, per_host)
    habits = HABITS.get(row["framework"]) or dataclasses.replace(
        PROGRAMS[machine.kind], recomputed=RECOMPUTED
    )
    return step_cost(work, layout, machine, number("seq"), habits).seconds


def errors(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Returns a row for each framework and chip, and one for all.

    A row has the errors in percent, as they are and scaled.
    """
    groups, table = defaultdict(list), []
    for row in rows:
        groups[row["framework"], row["hardware"]].append(float(row["step_s"]) / predicted(row))
    raw, scaled = [], []
    for (framework, chip), ratios in groups.items():
        factor = statistics.median(ratios)
        of_raw = [100 * abs(1 / ratio - 1) for ratio in ratios]
        of_scaled = [100 * abs(factor / ratio - 1) for ratio in ratios]
        raw, scaled = raw + of_raw, scaled + of_scaled
        table.append(_entry(f"{framework}, {chip}", of_raw, of_scaled, factor))
    return [*table, _entry("all", raw, scaled, None)]


def _entry(name: str, raw: list[float], scaled: list[float], factor: float | None):
    def quantiles(kind: str, values: list[float]) -> dict[str, float]:
        return {
            f"{kind}median, %": float(np.median(values)),
            f"{kind}p90, %": float(np.quantile(values, 0.9)),
        }

    entry = {"framework, chip": name, "steps": len(raw), "factor": factor}
    return entry | quantiles("", raw) | quantiles("scaled ", scaled)


SHARES = np.arange(0.60, 1.001, 0.02)  # of the peak, that `held_out` tries


def held_out(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Returns the errors of each source, without its own steps in what was fitted.

    The only figures that published steps gave are those of SUSTAINED. For each source of steps of
    these chips they are fitted again to the steps of all others.
    """

    def generation(row: dict[str, str]) -> str:
        return Machine(DEVICES[row["hardware"]], 1, 1).generation

    def source(row: dict[str, str]) -> str:
        # A repository is one source, but for chips of which there is no other.
        return row["source"] if generation(row) == "v6e" else row["source"].partition("@")[0]

    table, all_errors = [], []
    for name in ("hopper", "v6e"):
        steps = [row for row in rows if generation(row) == name]
        ratios = np.array(
            [
                [float(row["step_s"]) / predicted(row, share / SUSTAINED[name]) for row in steps]
                for share in SHARES
            ]
        )
        of_sources = np.array([source(row) for row in steps])
        for one in dict.fromkeys(of_sources):
            others = of_sources != one
            best = np.argmin(np.abs(np.median(ratios[:, others], axis=1) - 1))
            found = 100 * np.abs(1 / ratios[best, ~others] - 1)
            all_errors += [*found]
            table.append(_held_out_row(f"{name}: {one[:40]}", float(SHARES[best]), found))
    return [*table, _held_out_row("all of them", None, np.array(all_errors))]


def _held_out_row(name: str, share: float | None, found: np.ndarray) -> dict[str, Any]:
    quantiles = {"median, %": np.median(found), "p90, %": np.quantile(found, 0.9)}
    row = {"left out": name, "steps": len(found), "share of the others": share}
    return row | {key: float(value) for key, value in quantiles.items()}


def regrets(rows: list[dict[str, str]], least: int = 5) -> list[dict[str, Any]]:
    """Returns a row for each group of at least `least` layouts of one model on the same chips."""
    groups, table = defaultdict(list), []
    for row in rows:
        key = [row[name] for name in ("group", "model", "hardware", "chips", "seq", "global_batch")]
        groups[tuple(key)].append(row)
    for (_, model, chip, chips, *_), members in groups.items():
        if len({tuple(_layout(row)) for row in members}) < least:
            continue
        seconds = [float(row["step_s"]) for row in members]
        pick = min(members, key=predicted)
        table.append(
            {
                "model": model,
                "chips": f"{chips} {chip}",
                "layouts": len(members),
                "regret, %": 100 * (float(pick["step_s"]) / min(seconds) - 1),
                "slowest, %": 100 * (max(seconds) / min(seconds) - 1),
            }
        )
    return table


def _layout(row: dict[str, str]):
    return [row[name] for name in ("data", "fsdp", "tensor", "pipeline", "rows", "chunks")]


class Predicted(NamedTuple):
    """What is predicted of a row of COMPILED.

    Its config, the layout in words, bytes at the peak, and FLOPs of products.
    """

    config: dict[str, Any]
    layout: str
    memory: float
    products: float


def prediction(case: tuple) -> Predicted:
    name, _, devices, batch, keys = case
    config = load_config(name)
    config.train.global_batch = batch
    cfg = parse(config)
    plan_input = from_config.plan_input(cfg, platform="gpu")
    resolved = on_devices(cfg.with_keys(KEYS | keys), devices)
    layout = layout_of(resolved)
    parts = memory.parts(
        plan_input.work, layout, plan_input.stored.bytes(layout), plan_input.seq_len
    )
    products = product_flops(plan_input.work, layout, plan_input.seq_len)
    return Predicted(resolved.to_dict(), name_of(layout), sum(parts.values()), products)


def product_flops(w: ModelWork, p: Layout, seq_len: int) -> float:
    """Returns the FLOPs of a device's matrix products in a step, without attention and routers."""
    tokens = p.rows * seq_len / p.context  # of a micro-batch
    flops = [2 * tokens * n * k / p.tensor for n, k in w.products]
    layer, turns, again = sum(flops), p.num_microbatches, 0.0
    if p.remat == "full":
        again = layer - flops[-1]  # no gradient needs the result of the last product
    elif p.remat == "dots" and w.num_experts:
        again = flops[-2]  # products of experts have a batch dim, which "dots" does not keep
    if p.pipeline > 1:
        turns = p.table.forward.active.any(1).sum() / p.num_chunks  # idle stages compute too
        again += layer if p.keep == "inputs" else 0.0
    layers = turns * w.num_layers / p.pipeline * (3 * layer + again)
    head = 6 * p.num_microbatches * tokens * w.vocab_size * w.d_model
    return layers + head / p.tensor / p.pipeline


def compiled_errors(number: int) -> list[dict[str, Any]]:
    """Returns a row for each of the first `number` layouts that the compiler accepts."""
    table = []
    for case in COMPILED[:number]:
        name, device, devices, *_ = case
        expected = prediction(case)
        target = f"{device}:{-(-devices // 8)}x{min(8, devices)}"
        audit, fault = compiled.audited(expected.config, target)
        if not audit:
            print(f"{expected.layout}: {fault}")
            continue
        table.append(
            {"config": name, "devices": f"{devices} {device}"} | errors_of(expected, audit)
        )
        print(f"{len(table)} of {number}: {expected.layout}", file=sys.stderr)
    return table


def errors_of(expected: Predicted, audit: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that compare a prediction with the audit of the compiled step."""
    found, roofline = audit["memory"]["peak"], audit["roofline"]
    products = next(row["flops"] for row in roofline["rows"] if row["name"] == "matrix products")
    more = 100 * (products / expected.products - 1)
    mark = "" if abs(more) <= 1 else "more products" if more > 0 else "fewer products"
    if not roofline["has_all_counts"]:
        mark = "loops of unknown length"
    row = {"layout": expected.layout}
    row |= {"predicted, GB": expected.memory / 1e9, "compiled, GB": found / 1e9}
    row |= {"error, %": 100 * (expected.memory / found - 1)}
    row |= {"products, TFLOPs": expected.products / 1e12, "compiled, TFLOPs": products / 1e12}
    return row | {"more, %": more, "mark": mark}


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--group", default="", help="only the rows of this group")
    parser.add_argument(
        "--compile", type=int, default=0, metavar="N", help="compare with N compiled steps"
    )
    args = parser.parse_args()
    chosen = [row for row in rows() if args.group in ("", row["group"])]
    if not chosen:
        parser.error(
            f"--group={args.group}: use one of {', '.join(sorted({r['group'] for r in rows()}))}"
        )
    devices = ["h100-h200-a100-compiled-ahead"] if args.compile else ()
    results = record.about(args, devices=devices)
    results["errors"], results["regrets"] = errors(chosen), regrets(chosen)
    results["held out"] = held_out(chosen)
    record.show(results["errors"])
    record.show(results["held out"])
    record.show(results["regrets"])
    if args.compile:
        results["compiled"] = compiled_errors(args.compile)
        record.show(results["compiled"])
        errors_ = [abs(row["error, %"]) for row in results["compiled"]]
        print(f"median {np.median(errors_):.1f} %, largest {max(errors_):.1f} %")
    record.save(args.output, results, model="plan")


if __name__ == "__main__":
    main()
