"""Step time on CPU: the trainer's own step, a bare jax step and a torch loop, with the same maths.

  python benchmarks/cpu_step.py [--rounds=10] [--steps=3] [--layers=4] [--vocab=4096] [--output=PATH]

A float32 Llama-style model (6.3 M parameters), the same initial parameters, tokens and threads. Each
contestant is a process of its own, and they take turns of a few steps; what counts is the ratio of the
medians. Torch takes part where it is installed. To the first step is from the start of a process, with
empty compile caches, and with what the first start left in them.
"""

import argparse
import functools
import importlib.util
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from benchmarks import contest, llama, record
from meshtrain import compiler, config


def prepare(args: argparse.Namespace, name: str):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    if name == "meshtrain":
        compiler.run_in_place()  # as train() does
    c = llama.settings(
        args,
        train={"global_batch": args.rows},
        model={"num_kv_heads": args.kv_heads, "vocab_size": args.vocab},
        optim={"schedule": "constant", "warmup_steps": 0},
    )
    return contest.prepare(name, config.parse(c, num_devices=1), threads=args.threads)


def main():
    parser = record.parser(__doc__)
    numbers = {"rounds": 10, "steps": 3, "layers": 4, "width": 256, "kv-heads": 8, "vocab": 4096}
    numbers |= {"rows": 8, "seq-len": 256, "threads": len(os.sched_getaffinity(0))}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    peers = [name for name in contest.PEERS if "max-autotune" not in name]
    parser.add_argument("--only", nargs="*", default=peers, metavar="NAME", help=", ".join(peers))
    args = parser.parse_args()
    about = record.about(args, devices=["cpu"])
    has_torch = importlib.util.find_spec("torch") is not None
    names = [name for name in args.only if has_torch or not name.startswith("torch")]
    found = contest.hold(
        functools.partial(prepare, args), names, rounds=args.rounds, steps=args.steps
    )
    contest.compare(found.losses, rtol=1e-3)
    medians = {name: statistics.median(values) for name, values in found.seconds.items()}
    first = names[0]
    rows = [
        {
            "step of": name,
            "ms": 1e3 * medians[name],
            f"{first} / it": medians[first] / medians[name],
            "compiled in s": found.facts[name].get("compile_seconds", float("nan")),
            "first step, cold s": found.facts[name]["cold_seconds"],
            "warm s": found.facts[name]["warm_seconds"],
            "loss": found.losses[name][-1],
        }
        for name in names
    ]
    count = found.facts[first]["parameters"]
    print(f"{count:,} parameters, {args.rows} x {args.seq_len} tokens, {args.threads} threads")
    record.show(rows)
    size = f"llama-{count / 1e6:.0f}m"
    record.save(args.output, about | {"rows": rows, "raw": found._asdict()}, model=size)


if __name__ == "__main__":
    main()
