"""Step time on CPU: the trainer's own step, a bare jax step and a torch loop, with the same maths.

  python benchmarks/cpu_step.py [--rounds=10] [--steps=3] [--layers=4] [--vocab=4096] [--output=PATH]

A float32 Llama-style model (6.3 M parameters), the same initial parameters, tokens and threads. Each
contestant is a process of its own, and they take turns of a few steps; what counts is the ratio of the
medians. Torch takes part where it is installed. To the first step is from the start of a process, with
empty compile caches, and with what the first start left in them; peers read the initial parameters from
a file, where the trainer draws its own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import contest, llama, record
from benchmarks.contestant import PEERS


def main():
    parser = record.parser(__doc__)
    numbers = {"rounds": 10, "steps": 3, "layers": 4, "width": 256, "kv-heads": 8, "vocab": 4096}
    numbers |= {"rows": 8, "seq-len": 256, "threads": len(os.sched_getaffinity(0))}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    peers = [name for name in PEERS if "max-autotune" not in name]
    parser.add_argument("--only", nargs="+", default=peers, choices=PEERS, metavar="NAME",
                        help=", ".join(PEERS))  # fmt: skip
    args = parser.parse_args()
    about = record.about(args, devices=["cpu"])
    # Contestants inherit both.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    c = llama.settings(
        args,
        train={"global_batch": args.rows},
        model={"num_kv_heads": args.kv_heads, "vocab_size": args.vocab},
        optim={"schedule": "constant", "warmup_steps": 0},
    )
    names = contest.present(args.only)
    turns = dict(rounds=args.rounds, steps=args.steps)
    found = contest.hold(c.to_dict(), names, **turns, pairs=False)
    rows = contest.table(found)
    if rows:
        count = found.facts[names[0]]["parameters"]
        print(f"{count:,} parameters, {args.rows} x {args.seq_len} tokens, {args.threads} threads")
        record.show(rows)
        kept = about | {"rows": rows, "raw": found._asdict()}
        record.save(args.output, kept, model=f"llama-{count / 1e6:.0f}m")
    sys.exit("\n".join(contest.faults(found, rtol=1e-3)) or None)


if __name__ == "__main__":
    main()
