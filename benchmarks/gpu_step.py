"""Step time on one GPU in bfloat16: the trainer's own step, a bare jax step and a compiled torch loop.

  python benchmarks/gpu_step.py --models gpt2-124m [--only NAME ...] [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/gpu_step.py --toy

The same maths, initial parameters and tokens; contestants are processes that take turns, on a GPU two at
a time, the trainer and a peer: what counts is the ratio of their medians. One model takes some minutes,
so where a call may not take long: one model per call. Model FLOPs are counted twice: by PaLM's rule,
attention in full, and with attention halved, for half of it is in the future. Utilisation is of the data
sheet's rate; the rates of a large matrix product and of a copy, measured in the same run, say what of it
can be had. On a GPU the run fails where the compiled step does not call fused attention.

It needs jax, flax, optax, orbax, ml-collections, isal and rich; torch takes part where it is installed,
its max-autotune, slow to compile, with gpt2-124m unless it is asked for. Memory is what the compiler
says of a jax step, and what torch allocated at most. The Llama-3-8B shape, with bfloat16 moments and all
layers recomputed, has no peer, neither in jax nor in torch: they have float32 moments, which hardly fit. So
nothing is compared with its losses.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import contest, record
from benchmarks.contestant import PEERS
from configs import default
from meshtrain.models.transformer_config import TransformerConfig, flops_per_token
from meshtrain.monitor.writer import peak_flops

GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
SHAPES = {  # layers, width, heads, key/value heads, feed-forward, vocabulary, tokens, rows, the rest
    "gpt2-124m": (12, 768, 12, 12, 3072, 50257, 1024, 64, GPT2),
    "gpt2-350m": (24, 1024, 16, 16, 4096, 50257, 1024, 32, GPT2),
    "gpt2-1.3b": (24, 2048, 16, 16, 8192, 50257, 2048, 8, GPT2),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 4096, 1, dict(rope_theta=500000.0)),
}
TOY = {
    "gpt2-toy": (2, 64, 4, 4, 128, 300, 32, 4, GPT2),
    "llama3-toy": (2, 64, 4, 2, 96, 300, 32, 4, {}),
}
NAMES = ("meshtrain", "bare jax, unrolled", "torch compiled")


def settings(model: str):
    layers, width, heads, kv_heads, hidden, vocab, length, rows, rest = (SHAPES | TOY)[model]
    c = default.get_config()
    c.model.update(num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads)
    c.model.update(d_ff=hidden, vocab_size=vocab, max_seq_len=length, **rest)
    c.data.update(seq_len=length, build="meshtrain.data.synthetic:build")
    c.optim.update(schedule="constant", warmup_steps=0, learning_rate=1e-4)
    c.train.update(global_batch=rows, dtype="bfloat16", unroll=layers)
    if model == "llama3-8b":
        c.train.remat, c.optim.moment_dtype = "full", "bfloat16"
    return c


def contestants(model: str, only: list[str] | None) -> list[str]:
    """Returns who takes part; the first is the one that others are compared with."""
    if model == "llama3-8b":
        return ["meshtrain"]
    only = only or [*NAMES, *(["torch compiled, max-autotune"] if model == "gpt2-124m" else [])]
    return contest.present([name for name in PEERS if name in only])


def rules(model: str) -> dict[str, float]:
    """Returns the FLOPs of a token, forward and backward, by each way to count."""
    section = settings(model).model.to_dict()
    c = TransformerConfig(**{key: value for key, value in section.items() if key != "build"})
    length = (SHAPES | TOY)[model][6]
    palm = flops_per_token(c, length)
    return {"PaLM": palm, "causal": palm - 6.0 * c.num_layers * c.num_heads * c.head_size * length}


def report(model: str, found: contest.Results, top: dict) -> list[dict]:
    """Returns the contest's table, and what the steps come to."""
    length, rows = (SHAPES | TOY)[model][6:8]
    peak, flops = peak_flops(top["device"]), rules(model)
    table = []
    for row in contest.table(found):
        rate = 1e3 * rows * length / row["ms"]
        used = {
            f"MFU %, {rule}": 100 * rate * count / peak if peak else None
            for rule, count in flops.items()
        }
        used["of matmul %"] = 100 * rate * flops["PaLM"] / top["matmul_flops"]
        table.append(row | {"tokens/s": rate} | used)
    return table


def measure(args: argparse.Namespace, model: str, top: dict) -> list[str]:
    """Prints and saves the figures of a model, and returns what is wrong with them."""
    about, on_gpu = record.about(args, devices=[top["device"]]), top["platform"] != "cpu"
    names, turns = contestants(model, args.only), dict(rounds=args.rounds, steps=args.steps)
    found = contest.hold(settings(model).to_dict(), names, **turns, pairs=on_gpu)
    rows = report(model, found, top)
    if rows:
        print(f"\n{model}: {found.facts['meshtrain']['parameters']:,} parameters")
        record.show(rows)
    kept = about | {"rows": rows, "ceiling": top, "rules": rules(model), "raw": found._asdict()}
    record.save(args.output, kept, model=model)
    faults = contest.faults(found, rtol=2e-2)
    if rows and on_gpu and not args.toy and not found.facts["meshtrain"]["fused_attention"]:
        faults.append("the compiled step calls no fused attention")
    return [f"{model}: {fault}" for fault in faults]


def main():
    parser = record.parser(__doc__)
    models, names = [*SHAPES, *TOY], list(PEERS)
    parser.add_argument("--models", nargs="+", choices=models, metavar="MODEL",
                        help=", ".join(models))  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--toy", action="store_true", help="tiny models, on anything")
    args = parser.parse_args()
    models = args.models or list(TOY if args.toy else SHAPES)
    if args.only and "meshtrain" not in args.only:
        parser.error("--only has to name meshtrain, which the others are compared with")
    if args.output and not args.output.is_dir() and len(models) > 1:
        parser.error(f"--output={args.output} is one file for several models; name a folder")
    # Two contestants share the memory: each takes what it needs, of nearly all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    fraction = os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # its old name
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", fraction)
    top = contest.ceiling()
    print(f"{top['device']}: matrix product {top['matmul_flops'] / 1e12:.4g} TFLOP/s, "
          f"copy {top['copy_bytes'] / 1e12:.4g} TB/s")  # fmt: skip
    faults = [fault for model in models for fault in measure(args, model, top)]
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
