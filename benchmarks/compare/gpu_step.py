"""Step time on one GPU in 16 bits: meshtrain compared with bare jax and a compiled torch loop.

  python benchmarks/compare/gpu_step.py --models gpt2-124m [--only NAME ...] [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/compare/gpu_step.py --toy

All implementations have the same maths, initial parameters and tokens. Each runs in its own
process, and the processes alternate every few steps; on a GPU two at a time, meshtrain and one
other. The result is the ratio of the median step times. One model takes some minutes: with a time
limit per call, run one model per call. Model FLOPs are counted in two ways: by PaLM's rule, with
full attention; and with half the attention FLOPs, because of the causal mask. MFU is relative to
the data sheet's peak; the rates of a large matrix product and of a copy, measured in the same run,
show how much of that peak is attainable. On a GPU the run fails if the compiled step does not call
fused attention.

The dtype is float16 below compute capability 8.0, for which only meshtrain scales the loss: the
others do not run. The batch has the rows that fit the memory, and half of them after a step that
runs out of it; a model that does not fit is left out. The last column is the MFU that the compiled
program can reach at most, by the rule of `meshtrain audit`, on devices of
meshtrain/hardware.py.

It needs jax, flax, optax, orbax, ml-collections and isal. Torch is included if it is installed; its
max-autotune mode, which compiles slowly, runs for gpt2-124m only, unless --only names it. Memory is
the compiler's figure for a jax step, and the peak allocation for torch. llama3-8b, with bfloat16
moments and all layers recomputed, runs with meshtrain only: the other implementations have float32
moments, which hardly fit. Its losses are therefore not compared.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import comparison, devices, gpu_models, record, utilization
from benchmarks.lib.devices import Devices
from benchmarks.lib.gpu_models import SHAPES, TOY
from benchmarks.lib.implementation import IMPLEMENTATIONS

DEFAULT_IMPLEMENTATIONS = ("meshtrain", "bare jax, unrolled", "torch compiled")


class DoesNotFit(Exception):
    """Not one row of a model's batch fits the memory."""


def implementations(model: str, only: list[str] | None, dtype: str = "bfloat16") -> list[str]:
    """Returns the implementations for a model; the others are compared with the first."""
    if model == "llama3-8b" or dtype == "float16":
        return ["meshtrain"]
    slow = ["torch compiled, max-autotune"] if model == "gpt2-124m" else []
    only = only or [*DEFAULT_IMPLEMENTATIONS, *slow]
    return comparison.available([name for name in IMPLEMENTATIONS if name in only])


def run_comparison(
    args: argparse.Namespace, model: str, found: Devices
) -> tuple[comparison.Results, Any]:
    """Returns the results and their config, which has half the rows after memory ran out.

    Raises DoesNotFit if no row does.
    """
    names = implementations(model, args.only, found.dtype)
    # Two processes share a GPU. On CPU all do, and the toys are small.
    rows = gpu_models.rows_that_fit(model, found, programs=min(2, len(names)))
    counts = dict(rounds=args.rounds, steps=args.steps)
    while rows:
        c = gpu_models.settings(model, rows=rows, dtype=found.dtype)
        cases = comparison.with_config(c.to_dict(), names)
        results = comparison.run(cases, **counts, pairs=found.is_gpu)
        if not devices.ran_out_of_memory(results.failed.get("meshtrain", "")):
            return results, c
        rows //= 2
    raise DoesNotFit(f"left out, no row fits in {(found.memory or 0) / 1e9:.3g} GB")


def measure(args: argparse.Namespace, model: str, found: Devices, rates: dict) -> list[str]:
    """Prints and saves the results of a model; returns a line for each fault."""
    fields = record.about(args, devices=[found.kind]) | {"rows": [], "ceiling": rates}
    try:
        results, c = run_comparison(args, model, found)
    except DoesNotFit as error:
        print(f"\n{model}: {error}")
        record.save(args.output, fields | {"left_out": str(error)}, model=model)
        return []
    rows = utilization.add_to(
        comparison.table(results),
        results,
        model=model,
        configs=dict.fromkeys(results.facts, c),
        rates=rates,
    )
    if rows:
        count = results.facts["meshtrain"]["parameters"]
        size = f"{c.train.global_batch} x {c.data.seq_len} tokens in {c.train.dtype}"
        print(f"\n{model}: {count:,} parameters, {size}")
        record.show(rows)
    fields |= {"rows": rows, "rules": gpu_models.model_flops(model), "raw": results._asdict()}
    fields |= {"batch": c.train.global_batch, "dtype": c.train.dtype}
    record.save(args.output, fields, model=model)
    faults = comparison.faults(results, rtol=2e-2)
    is_plain = rows and not results.facts["meshtrain"]["fused_attention"]
    if is_plain and found.has_fused_attention and not args.toy:
        faults.append("the compiled step does not call fused attention")
    return [f"{model}: {fault}" for fault in faults]


def main():
    parser = record.parser(__doc__)
    models, names = [*SHAPES, *TOY], list(IMPLEMENTATIONS)
    parser.add_argument("--models", nargs="+", choices=models, metavar="MODEL",
                        help=", ".join(models))  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--toy", action="store_true", help="tiny models, for any device")
    args = parser.parse_args()
    models = args.models or list(TOY if args.toy else SHAPES)
    if args.only and "meshtrain" not in args.only:
        parser.error("--only must name meshtrain, with which the others are compared")
    if args.output and not args.output.is_dir() and len(models) > 1:
        parser.error(f"--output={args.output} is one file for several models; name a folder")
    os.environ |= devices.environment()  # two processes share the GPU
    found, rates = devices.find(), comparison.ceiling()
    utilization.print_rates(found.kind, rates)
    about = dataclasses.asdict(found) | rates
    faults = [fault for model in models for fault in measure(args, model, found, about)]
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
