"""Step time on one GPU in bfloat16: meshtrain compared with a bare jax step and a compiled torch loop.

  python benchmarks/gpu_step.py --models gpt2-124m [--only NAME ...] [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/gpu_step.py --toy

All implementations have the same maths, initial parameters and tokens. Each runs in its own process, and the
processes alternate every few steps; on a GPU two at a time, meshtrain and one other. The result is the ratio of
the median step times. One model takes some minutes: with a time limit per call, run one model per call. Model
FLOPs are counted in two ways: by PaLM's rule, with full attention; and with half the attention FLOPs, because of
the causal mask. MFU is relative to the data sheet's peak; the rates of a large matrix product and of a copy,
measured in the same run, show how much of that peak is attainable. On a GPU the run fails if the compiled step
does not call fused attention.

It needs jax, flax, optax, orbax, ml-collections and isal. Torch is included if it is installed; its
max-autotune mode, which compiles slowly, runs for gpt2-124m only, unless --only names it. Memory is the compiler's
figure for a jax step, and the peak allocation for torch. llama3-8b, with bfloat16 moments and all layers
recomputed, runs with meshtrain only: the other implementations have float32 moments, which hardly fit. Its losses
are therefore not compared.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import contest, record
from benchmarks.contestant import CONTESTANTS
from meshtrain.analysis.hardware import peak_flops
from meshtrain.configs import default
from meshtrain.models.transformer_config import TransformerConfig, flops_per_token

GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
SHAPES = {  # layers, width, heads, key/value heads, feed-forward, vocabulary, tokens, rows, other keys
    "gpt2-124m": (12, 768, 12, 12, 3072, 50257, 1024, 64, GPT2),
    "gpt2-350m": (24, 1024, 16, 16, 4096, 50257, 1024, 32, GPT2),
    "gpt2-1.3b": (24, 2048, 16, 16, 8192, 50257, 2048, 8, GPT2),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 4096, 1, dict(rope_theta=500000.0)),
}
TOY = {
    "gpt2-toy": (2, 64, 4, 4, 128, 300, 32, 4, GPT2),
    "llama3-toy": (2, 64, 4, 2, 96, 300, 32, 4, {}),
}
DEFAULT_CONTESTANTS = ("meshtrain", "bare jax, unrolled", "torch compiled")


def settings(model: str):
    """Returns the config of a model."""
    layers, width, heads, kv_heads, hidden, vocab, length, rows, other = (SHAPES | TOY)[model]
    c = default.get_config()
    c.model.update(num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads)
    c.model.update(d_ff=hidden, vocab_size=vocab, max_seq_len=length, **other)
    c.data.update(seq_len=length, build="meshtrain.data.synthetic:build")
    c.optim.update(schedule="constant", warmup_steps=0, learning_rate=1e-4)
    c.train.update(global_batch=rows, dtype="bfloat16", unroll=layers)
    if model == "llama3-8b":
        c.train.remat, c.optim.moment_dtype = "full", "bfloat16"
    return c


def contestants(model: str, only: list[str] | None) -> list[str]:
    """Returns the contestants for a model; the others are compared with the first."""
    if model == "llama3-8b":
        return ["meshtrain"]
    slow = ["torch compiled, max-autotune"] if model == "gpt2-124m" else []
    only = only or [*DEFAULT_CONTESTANTS, *slow]
    return contest.available([name for name in CONTESTANTS if name in only])


def model_flops(model: str) -> dict[str, float]:
    """Returns the FLOPs per token, forward and backward, under each counting rule."""
    section = settings(model).model.to_dict()
    c = TransformerConfig(**{key: value for key, value in section.items() if key != "build"})
    length = (SHAPES | TOY)[model][6]
    palm = flops_per_token(c, length)
    return {"PaLM": palm, "causal": palm - 6.0 * c.num_layers * c.num_heads * c.head_size * length}


def add_utilization(model: str, results: contest.Results, ceiling: dict) -> list[dict]:
    """Returns the table of the contest with tokens per second and utilization."""
    length, rows = (SHAPES | TOY)[model][6:8]
    peak, flops = peak_flops(ceiling["device"]), model_flops(model)
    table = []
    for row in contest.table(results):
        rate = 1e3 * rows * length / row["ms per step"]
        utilization = {
            f"MFU %, {rule}": 100 * rate * count / peak if peak else None
            for rule, count in flops.items()
        }
        utilization["% of matmul rate"] = 100 * rate * flops["PaLM"] / ceiling["matmul_flops"]
        table.append(row | {"tokens/s": rate} | utilization)
    return table


def measure(args: argparse.Namespace, model: str, ceiling: dict) -> list[str]:
    """Prints and saves the results of a model; returns a line for each fault."""
    about, on_gpu = record.about(args, devices=[ceiling["device"]]), ceiling["platform"] != "cpu"
    names, counts = contestants(model, args.only), dict(rounds=args.rounds, steps=args.steps)
    results = contest.run(settings(model).to_dict(), names, **counts, pairs=on_gpu)
    rows = add_utilization(model, results, ceiling)
    if rows:
        print(f"\n{model}: {results.facts['meshtrain']['parameters']:,} parameters")
        record.show(rows)
    fields = about | {"rows": rows, "ceiling": ceiling, "rules": model_flops(model)}
    record.save(args.output, fields | {"raw": results._asdict()}, model=model)
    faults = contest.faults(results, rtol=2e-2)
    if rows and on_gpu and not args.toy and not results.facts["meshtrain"]["fused_attention"]:
        faults.append("the compiled step does not call fused attention")
    return [f"{model}: {fault}" for fault in faults]


def main():
    parser = record.parser(__doc__)
    models, names = [*SHAPES, *TOY], list(CONTESTANTS)
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
    # Two processes share the GPU: each allocates only what it needs, up to nearly all of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # The first variable is the old name of the second.
    fraction = os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", fraction)
    ceiling = contest.ceiling()
    print(f"{ceiling['device']}: matrix product {ceiling['matmul_flops'] / 1e12:.4g} TFLOP/s, "
          f"copy {ceiling['copy_bytes'] / 1e12:.4g} TB/s")  # fmt: skip
    faults = [fault for model in models for fault in measure(args, model, ceiling)]
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
