"""Step time on CPU: meshtrain compared with a bare jax step and a torch loop, with the same maths.

  python benchmarks/compare/cpu_step.py [--rounds=10] [--steps=3] [--layers=4] [--output=PATH]

A float32 Llama-style model (6.3 M parameters); all implementations have the same initial
parameters, tokens and number of threads. Each runs in its own process, and the processes alternate
every few steps; the result is the ratio of the median step times. Torch is included if it is
installed. The time to the first step is measured from the start of the process, once with empty
compile caches (cold) and once with caches that the first start filled (warm); bare jax and torch
read the initial parameters from a file, meshtrain generates them.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import comparison, llama, record
from benchmarks.lib.implementation import IMPLEMENTATIONS


def main():
    parser = record.parser(__doc__)
    numbers = {"rounds": 10, "steps": 3, "layers": 4, "width": 256, "kv-heads": 8, "vocab": 4096}
    numbers |= {"rows": 8, "seq-len": 256, "threads": len(os.sched_getaffinity(0))}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    # max-autotune compiles slowly
    quick = [name for name in IMPLEMENTATIONS if "max-autotune" not in name]
    parser.add_argument("--only", nargs="+", default=quick, choices=IMPLEMENTATIONS, metavar="NAME",
                        help=f"implementations to time: {', '.join(IMPLEMENTATIONS)}")  # fmt: skip
    args = parser.parse_args()
    about = record.about(args, devices=["cpu"])
    # The processes of the implementations inherit the variable and the cores.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    c = llama.settings(
        args,
        train={"global_batch": args.rows},
        model={"num_kv_heads": args.kv_heads, "vocab_size": args.vocab},
        optim={"schedule": "constant", "warmup_steps": 0},
    )
    names = comparison.available(args.only)
    cases = comparison.with_config(c.to_dict(), names)
    results = comparison.run(cases, rounds=args.rounds, steps=args.steps, pairs=False)
    rows = comparison.table(results)
    if rows:
        count = results.facts[names[0]]["parameters"]
        print(f"{count:,} parameters, {args.rows} x {args.seq_len} tokens, {args.threads} threads")
        record.show(rows)
        fields = about | {"rows": rows, "raw": results._asdict()}
        record.save(args.output, fields, model=f"llama-{count / 1e6:.0f}m")
    sys.exit("\n".join(comparison.faults(results, rtol=1e-3)) or None)


if __name__ == "__main__":
    main()
