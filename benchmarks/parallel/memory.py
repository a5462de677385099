"""Bytes per device of the compiled train step, compared with a formula, on simulated devices.

  python benchmarks/parallel/memory.py [--sweeps zero remat schedule] [--output=PATH]

A float32 Llama-style model (8.0 M parameters). Nothing is run: `memory_analysis()` of the step
gives argument + output - alias + temporary bytes of one device. This is XLA's plan for CPU; for an
accelerator XLA fuses and orders operations differently. The formula (`arithmetic`) gives the
minimum, in values of 4 bytes, for P parameters (of one stage) and n devices along fsdp:

  state        3 P: parameters (/ n in zero stage 3), two moments (/ n from stage 1 on); and the
               batch
  gradients    P (/ n from stage 2 on); twice that if gradients of micro-batches are accumulated
  activations  the residuals of every layer; for the layer in its backward pass also the values that
               were not stored, and the gradients of all; the logits and their gradients
  residuals    of a layer per token, with width D, F = 4 D, H heads, G key/value heads, S tokens per
               row: remat none 6 D + 2 D G / H + 3 F + H S, dots 3 D + 2 D G / H + 2 F, full D
  pipeline     in each slot of the schedule the input of a chunk or, with keep=residuals, the
               residuals of its layers (remat none); all residuals of the chunk in its backward pass

With remat none more than the minimum is stored: autodiff saves the masked scores and exponentials
of a softmax in addition to its probabilities, and three values within a silu. For each pipeline a
line is fitted to its temporary bytes over the number of micro-batches: only those for gpipe grow.
(The batch grows too, but as an argument.)
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.lib import llama, record
from meshtrain import state
from meshtrain.cluster import runtime
from meshtrain.schedules import SCHEDULES

DEVICES, STAGES, MB = 8, 4, 1e6
# schedule, chunks per stage, pipeline.keep
PIPELINES = [("gpipe", 1, "inputs"), ("1f1b", 1, "inputs"), ("interleaved", 2, "inputs")]
PIPELINES += [("gpipe", 1, "residuals"), ("1f1b", 1, "residuals"), ("interleaved", 2, "residuals")]


def cases(args):
    """Yields the sweep, name, number of devices and config sections of each case."""
    for remat in ("none", "full"):
        for stage in range(4):
            train = {"global_batch": DEVICES * args.rows, "zero_stage": stage, "remat": remat}
            sections = {"mesh": {"fsdp": DEVICES}, "train": train}
            yield "zero", f"stage {stage}, remat {remat}", DEVICES, sections
    for remat in ("none", "dots", "full"):
        for parts in (1, 2, 4):
            train = {"global_batch": 4 * args.rows, "num_microbatches": parts, "remat": remat}
            yield "remat", f"remat {remat}, {parts} micro-batches", 1, {"train": train}
    for schedule, chunks, keep in PIPELINES:
        for parts in args.microbatches:
            train = {"global_batch": parts * args.rows, "num_microbatches": parts}
            pipeline = {"schedule": schedule, "num_chunks": chunks, "keep": keep}
            sections = {"mesh": {"pipeline": STAGES}, "train": train, "pipeline": pipeline}
            yield "schedule", f"{schedule}, {keep}, {parts} micro-batches", STAGES, sections


def compiled_bytes(program, batch) -> dict[str, int]:
    """Returns the bytes of the compiled step on one device, by kind."""
    with program.active():
        sizes = program.compile(batch).memory_analysis()
    parts = {"argument": sizes.argument_size_in_bytes, "output": sizes.output_size_in_bytes}
    parts |= {"alias": sizes.alias_size_in_bytes, "temporary": sizes.temp_size_in_bytes}
    total = parts["argument"] + parts["output"] - parts["alias"] + parts["temporary"]
    return {**parts, "total": total}


def arithmetic(cfg, program) -> dict[str, float]:
    """Returns the minimum bytes of one device, by the formulas in the module docstring."""
    model, mesh, train = cfg.model.options, cfg.mesh, cfg.train
    D, F, H, G = (model[key] for key in ("d_model", "d_ff", "num_heads", "num_kv_heads"))
    S, V, L = cfg.data.options["seq_len"], model["vocab_size"], model["num_layers"]
    parts, stages = train.num_microbatches, mesh.pipeline
    rows = train.global_batch // (mesh.data * mesh.fsdp)
    # A pipeline splits the layers over its stages; by config.rules the vocabulary tables too.
    P = state.count(program.abstract_state.params) / stages
    shards = [mesh.fsdp if train.zero_stage >= first else 1 for first in (1, 2, 3)]

    keys_and_values = 2 * D * G / H
    residuals = 6 * D + keys_and_values + 3 * F + H * S
    stored = {"none": residuals, "dots": 3 * D + keys_and_values + 2 * F, "full": D}[train.remat]
    tokens = rows // parts * S
    if stages == 1:
        chunks = L * stored
    else:
        schedule = cfg.pipeline
        table = SCHEDULES[schedule.schedule](stages, parts, schedule.num_chunks)
        layers = L / stages / schedule.num_chunks
        chunk = D if schedule.keep == "inputs" else layers * residuals
        chunks = table.num_slots * chunk + layers * residuals
    backward = residuals + (residuals - stored)
    return {
        "state": 4 * (P / shards[2] + 2 * P / shards[0] + 3 * rows * S),
        "gradients": 4 * P / shards[1] * (1 + (parts > 1)),
        "activations": 4 * tokens * (chunks + backward + 2 * V / stages),
    }


def measure(args) -> list[dict]:
    """Returns a row for each case of args.sweeps."""
    rows = []
    for sweep, name, num_devices, sections in cases(args):
        if sweep not in args.sweeps:
            continue
        began = time.perf_counter()
        c = llama.settings(args, **sections)
        cfg, program, batch = llama.program_of(c, jax.devices()[:num_devices])
        row = {"sweep": sweep, "case": name, "microbatches": cfg.train.num_microbatches}
        row |= {"parameters": state.count(program.abstract_state.params)}
        row |= {"arithmetic": arithmetic(cfg, program), "compiled": compiled_bytes(program, batch)}
        rows.append(row | {"compile_seconds": time.perf_counter() - began})
        print(f"compiled: {sweep}, {name}", file=sys.stderr, flush=True)
    return rows


def show(rows: list[dict]) -> None:
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        print(f"\n{sweep}: MB per device")
        table = []
        for row in (row for row in rows if row["sweep"] == sweep):
            minimum, compiled = row["arithmetic"], row["compiled"]
            line = {"": row["case"], **{name: size / MB for name, size in minimum.items()}}
            line |= {"sum": sum(minimum.values()) / MB, "compiled": compiled["total"] / MB}
            line |= {"argument": compiled["argument"] / MB, "temporary": compiled["temporary"] / MB}
            table.append(line | {"ratio": compiled["total"] / sum(minimum.values())})
        record.show(table)


def slopes(rows: list[dict]) -> list[dict]:
    """Returns for each pipeline the bytes per additional micro-batch: fitted, and by arithmetic."""
    lines = []
    rows = [row for row in rows if row["sweep"] == "schedule"]
    for name in dict.fromkeys(row["case"].rpartition(",")[0] for row in rows):
        group = [row for row in rows if row["case"].startswith(name)]
        numbers = [row["microbatches"] for row in group]
        line = {"": name}
        for kind, part in (("compiled", "temporary"), ("arithmetic", "activations")):
            slope = np.polyfit(numbers, [row[kind][part] for row in group], 1)[0]
            line[f"{kind}, KB per micro-batch"] = round(float(slope) / 1e3, 3) + 0.0  # no -0
        lines.append(line)
    return lines


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, rows=2)  # per micro-batch and device
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    sweeps = ("zero", "remat", "schedule")
    parser.add_argument("--sweeps", nargs="+", default=sweeps, choices=sweeps)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {llama.QUICK_FLAGS}".strip()
    runtime.simulate(DEVICES)
    results = record.about(args)
    results["rows"] = measure(args)
    show(results["rows"])
    if fits := slopes(results["rows"]):
        results["slopes"] = fits
        print()
        record.show(fits)
    record.save(args.output, results, model=f"memory-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
