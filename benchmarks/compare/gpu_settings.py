"""Step time of meshtrain on one GPU with several settings, which alternate.

  python benchmarks/compare/gpu_settings.py --model=gpt2-124m \\
      --settings "train.xla_preset=none" "train.xla_preset=cuda_graphs"
  JAX_PLATFORMS=cpu python benchmarks/compare/gpu_settings.py --model=gpt2-toy \\
      --settings "train.remat=none" "train.remat=full"

Each text of --settings is a row: config keys with their values. Each row runs in its own process,
from an empty compile cache, and the processes alternate every few steps; the result is the median
over rounds. All have the same initial parameters and tokens, and losses that differ by more than
2 % from those of the first row are an error. A row whose key or value this version does not know is
skipped, and says why.

The batch has the rows that fit the memory with the largest estimate; settings with
train.global_batch are run as they are. If the programs of all rows together do not fit, each runs
only together with the first. --minutes limits the time: no program is started and no round begun
afterwards, so that what was measured is saved. The time to the first step is from an empty compile
cache; that of the first row may include reading packages from the disk. Rates, MFU and memory are
those of benchmarks/compare/gpu_step.py.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import comparison, devices, gpu_models, record, settings, utilization
from benchmarks.lib.devices import Devices
from benchmarks.lib.gpu_models import SHAPES, TOY

RTOL = 0.02  # between the losses of two rows, in 16 bits


def configs_that_fit(
    model: str, texts: list[str], found: Devices
) -> tuple[dict[str, Any], dict[str, str], bool]:
    """Returns the configs by text, why others are skipped, and whether all fit together.

    The first and the largest fit at the same time, by the estimate of benchmarks/lib/devices.py.
    Without an estimate for the device the batch is that of the table in gpu_models.py.
    """
    rows = SHAPES.get(model, TOY.get(model))[7]
    while True:
        base = gpu_models.settings(model, rows=rows, dtype=found.dtype)
        configs, skipped = settings.apply_each(base, texts)
        sizes = [
            devices.bytes_of_step(c, rows=c.train.global_batch, fused=found.has_fused_attention)
            for c in configs.values()
        ]
        if not found.memory or not sizes:
            return configs, skipped, True
        usable = devices.USABLE * found.memory
        largest_pair = sizes[0] + max(sizes[1:], default=0)
        if rows == 1 or largest_pair <= usable:
            return configs, skipped, sum(sizes) <= usable
        rows //= 2


def faults_of(
    results: comparison.Results, texts: Mapping[str, Any], found: Devices, *, is_toy: bool
) -> list[str]:
    """Returns a line for each row that failed, has other losses, or has no fused attention."""
    faults = comparison.faults(results, rtol=RTOL)
    first = next(iter(texts))
    faults += [f"{name} failed: {error}" for name, error in results.failed.items() if name != first]
    if found.has_fused_attention and not is_toy:
        for name, facts in results.facts.items():
            if not facts["fused_attention"]:
                faults.append(f"{name}: the compiled step does not call fused attention")
    return faults


def measure(args: argparse.Namespace, found: Devices) -> list[str]:
    """Prints and saves the table; returns a line for each fault."""
    configs, skipped, all_fit = configs_that_fit(args.model, args.settings, found)
    for text, why in skipped.items():
        print(f"skipped: {text}: {why}")
    if not configs:
        return ["this version knows none of the settings"]
    fields = record.about(args, devices=[found.kind])
    rates = comparison.ceiling()
    utilization.print_rates(found.kind, rates)
    rates |= dataclasses.asdict(found)
    cases = [
        comparison.Case(text or "default", "meshtrain", config.to_dict())
        for text, config in configs.items()
    ]
    configs = {case.name: config for case, config in zip(cases, configs.values(), strict=True)}
    results = comparison.run(
        cases,
        rounds=args.rounds,
        steps=args.steps,
        pairs=not all_fit,
        warm=False,
        seconds=60 * args.minutes,
    )
    rows = utilization.add_to(
        comparison.table(results, column="settings", ratio="speed / first"),
        results,
        model=args.model,
        configs=configs,
        rates=rates,
    )
    for row in rows:
        row["rows"] = configs[row["settings"]].train.global_batch
        del row["warm s"]
    if rows:
        record.show(rows)
    fields |= {"model": args.model, "rows": rows, "skipped": skipped, "ceiling": rates}
    fields |= {"rules": gpu_models.model_flops(args.model), "raw": results._asdict()}
    record.save(args.output, fields, model=f"settings-{args.model}")
    return faults_of(results, configs, found, is_toy=args.model in TOY)


def main():
    parser = record.parser(__doc__)
    models = [*SHAPES, *TOY]
    parser.add_argument("--model", required=True, choices=models, metavar="MODEL",
                        help=", ".join(models))  # fmt: skip
    parser.add_argument("--settings", nargs="+", required=True, metavar="KEYS",
                        help='rows, such as "train.remat=full train.unroll=1"')  # fmt: skip
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="default: no limit")
    args = parser.parse_args()
    os.environ |= devices.environment()  # the processes share the GPU
    sys.exit("\n".join(measure(args, devices.find())) or None)


if __name__ == "__main__":
    main()
