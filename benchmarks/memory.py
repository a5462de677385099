"""Bytes per device of the compiled train step, beside the arithmetic, on simulated devices.

  python benchmarks/memory.py [--sweeps zero remat schedule] [--output=PATH]

A float32 Llama-style model (8.0 M parameters). Nothing is run: `memory_analysis()` of the step says
argument + output - alias + temporary bytes, all of one device. That is XLA's plan for CPU; for an
accelerator it fuses other operations and orders them otherwise. The arithmetic is the least that
does, in values of 4 bytes, for P parameters (of one stage) and n devices along fsdp:

  state        3 P: parameters (/ n in zero stage 3), two moments (/ n from stage 1 on), and the batch
  gradients    P (/ n from stage 2 on), twice where those of micro-batches are added up
  activations  what is kept for the backward pass of each layer, and for the layer that goes back
               what was not kept and the gradients of all; logits and their gradients
  kept         of a layer for each token, with width D, F = 4 D, H heads, G key/value heads, S tokens
               a row: remat none 6 D + 2 D G / H + 3 F + H S, dots 3 D + 2 D G / H + 2 F, full D
  pipeline     in each slot of the schedule a chunk's input, or (residuals) what remat none keeps of
               its layers; the chunk that goes back has them all there

With remat none more is kept than the least: autodiff saves a softmax's masked scores and exponentials
beside its probabilities, and three values within a silu. For each pipeline a line is fitted through its
temporary bytes by number of micro-batches: flat but for gpipe. (The batch is an argument, and grows.)
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import llama, record
from meshtrain import state
from meshtrain.cluster import runtime
from meshtrain.parallel.pipeline.schedules import SCHEDULES

DEVICES, STAGES, MB = 8, 4, 1e6
# name, chunks a stage, what is kept of each
PIPELINES = [("gpipe", 1, "inputs"), ("1f1b", 1, "inputs"), ("interleaved", 2, "inputs")]
PIPELINES += [("gpipe", 1, "residuals"), ("1f1b", 1, "residuals"), ("interleaved", 2, "residuals")]


def cases(args):
    """Yields sweep, name, number of devices and sections of each config."""
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
    """Returns what XLA says of the step on one device."""
    with program.active():
        found = program.compile(batch).memory_analysis()
    parts = {"argument": found.argument_size_in_bytes, "output": found.output_size_in_bytes}
    parts |= {"alias": found.alias_size_in_bytes, "temporary": found.temp_size_in_bytes}
    total = parts["argument"] + parts["output"] - parts["alias"] + parts["temporary"]
    return {**parts, "total": total}


def arithmetic(cfg, program) -> dict[str, float]:
    """Returns the bytes of one device by the formulas above."""
    model, mesh, train = cfg.model.options, cfg.mesh, cfg.train
    D, F, H, G = (model[key] for key in ("d_model", "d_ff", "num_heads", "num_kv_heads"))
    S, V, L = cfg.data.options["seq_len"], model["vocab_size"], model["num_layers"]
    num, parts, stages = mesh.data * mesh.fsdp, train.num_microbatches, mesh.pipeline
    rows = train.global_batch // num
    # A pipeline cuts the layers, and by the rules the tables as well.
    P = state.count(program.abstract_state.params) / stages
    shared = [mesh.fsdp if train.zero_stage >= first else 1 for first in (1, 2, 3)]

    thin = 2 * D * G / H
    everything = 6 * D + thin + 3 * F + H * S
    kept = {"none": everything, "dots": 3 * D + thin + 2 * F, "full": D}[train.remat]
    tokens = rows // parts * S
    if stages == 1:
        chunks = L * kept
    else:
        schedule = cfg.pipeline
        table = SCHEDULES[schedule.schedule](stages, parts, schedule.num_chunks)
        layers = L / stages / schedule.num_chunks
        chunk = D if schedule.keep == "inputs" else layers * everything
        chunks = table.num_slots * chunk + layers * everything
    back = everything + (everything - kept)
    return {
        "state": 4 * (P / shared[2] + 2 * P / shared[0] + 3 * rows * S),
        "gradients": 4 * P / shared[1] * (1 + (parts > 1)),
        "activations": 4 * tokens * (chunks + back + 2 * V / stages),
    }


def measure(args) -> list[dict]:
    """Returns a row of each case, after printing the tables."""
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
        print(f"\n{sweep}: MB of one device")
        table = []
        for row in (row for row in rows if row["sweep"] == sweep):
            least, found = row["arithmetic"], row["compiled"]
            line = {"": row["case"], **{name: size / MB for name, size in least.items()}}
            line |= {"sum": sum(least.values()) / MB, "compiled": found["total"] / MB}
            line |= {"argument": found["argument"] / MB, "temporary": found["temporary"] / MB}
            table.append(line | {"ratio": found["total"] / sum(least.values())})
        record.show(table)


def slopes(rows: list[dict]) -> list[dict]:
    """Returns bytes for each micro-batch more, of every pipeline: fitted, and by arithmetic."""
    found = []
    of = [row for row in rows if row["sweep"] == "schedule"]
    for name in dict.fromkeys(row["case"].rpartition(",")[0] for row in of):
        group = [row for row in of if row["case"].startswith(name)]
        numbers = [row["microbatches"] for row in group]
        line = {"": name}
        for kind, part in (("compiled", "temporary"), ("arithmetic", "activations")):
            slope = np.polyfit(numbers, [row[kind][part] for row in group], 1)[0]
            line[f"{kind}, KB a micro-batch"] = round(float(slope) / 1e3, 3) + 0.0  # no -0
        found.append(line)
    return found


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, rows=2)  # of a micro-batch on one device
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    sweeps = ("zero", "remat", "schedule")
    parser.add_argument("--sweeps", nargs="+", default=sweeps, choices=sweeps)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {llama.QUICK}".strip()
    runtime.simulate(DEVICES)
    found = record.about(args)
    found["rows"] = measure(args)
    show(found["rows"])
    if fits := slopes(found["rows"]):
        found["slopes"] = fits
        print()
        record.show(fits)
    record.save(args.output, found, model=f"memory-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
