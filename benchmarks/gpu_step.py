"""Step time on one GPU in bfloat16: the trainer's own step, a bare jax step and a compiled torch loop.

  python benchmarks/gpu_step.py [--models gpt2-124m gpt2-350m gpt2-1.3b llama3-8b] [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/gpu_step.py --toy

The same maths, initial parameters and tokens; contestants are processes that take turns, and what counts
is the median. Model FLOPs are counted twice: by PaLM's rule, attention in full, and with attention
halved, for half of it is in the future. Utilisation is of the data sheet's rate; the rates of a large
matrix product and of a copy, measured in the same run, say what of it can be had. On a GPU the run fails
where the compiled step does not call fused attention.

It needs jax, flax, optax, orbax, ml-collections, isal and rich; torch takes part where it is installed.
The Llama-3-8B shape, with bfloat16 moments and all layers recomputed, has no torch peer: its AdamW would
not fit.
"""

import argparse
import functools
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # contestants share the memory

import jax
import jax.numpy as jnp

from benchmarks import contest, record
from configs import default
from meshtrain import config
from meshtrain.models.section import TransformerConfig, flops_per_token
from meshtrain.writer import peak_flops

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
NAMES = ("meshtrain", "bare jax, unrolled", "torch compiled", "torch compiled, max-autotune")
SIDE, COPIED = 8192, 1 << 30  # of the matrices, bytes of the copy


def settings(model: str):
    layers, width, heads, kv_heads, hidden, vocab, length, rows, rest = (SHAPES | TOY)[model]
    c = default.get_config()
    c.model.update(num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads)
    c.model.update(d_ff=hidden, vocab_size=vocab, max_seq_len=length, **rest)
    c.data.update(seq_len=length, build="meshtrain.data.synthetic:build")
    c.optim.update(schedule="constant", warmup_steps=0)
    c.train.update(global_batch=rows, dtype="bfloat16", unroll=layers)
    if model == "llama3-8b":
        c.train.remat, c.optim.moment_dtype = "full", "bfloat16"
    return c


def prepare(model: str, name: str):
    cfg = config.parse(settings(model), num_devices=1)
    return contest.prepare(name, cfg, threads=len(os.sched_getaffinity(0)))


def ceiling(side: int, copied: int) -> dict[str, float]:
    """Returns the FLOP/s of a bfloat16 matrix product, and the bytes/s that a copy reads and writes."""

    def seconds(compute, *args):
        compute = jax.jit(compute)
        jax.block_until_ready(compute(*args))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready([compute(*args) for _ in range(10)])
            times.append((time.perf_counter() - began) / 10)
        return statistics.median(times)

    a = jnp.ones((side, side), jnp.bfloat16)
    x = jnp.ones(copied // 4, jnp.float32)
    return {
        "matmul_flops": 2 * side**3 / seconds(lambda a: a @ a, a),
        "copy_bytes": 2 * copied / seconds(lambda x: x + 1, x),
    }


def measure_ceiling(args: argparse.Namespace, _: str):
    """A contestant of its own, so that its memory is free again."""
    found = ceiling(64, 1 << 16) if args.toy else ceiling(SIDE, COPIED)
    return (lambda: 0.0), found | {"device": jax.devices()[0].device_kind}


def rules(model: str) -> dict[str, float]:
    """Returns the FLOPs of a token, forward and backward, by each way to count."""
    section = settings(model).model.to_dict()
    c = TransformerConfig(**{key: value for key, value in section.items() if key != "build"})
    length = (SHAPES | TOY)[model][6]
    palm = flops_per_token(c, length)
    return {"PaLM": palm, "causal": palm - 6.0 * c.num_layers * c.num_heads * c.head_size * length}


def report(model: str, found: contest.Results, top: dict) -> list[dict]:
    length, rows = (SHAPES | TOY)[model][6:8]
    medians = {name: statistics.median(values) for name, values in found.seconds.items()}
    peak, table = peak_flops(top["device"]), []
    for name, seconds in medians.items():
        rate = rows * length / seconds
        row = {"step of": name, "ms": 1e3 * seconds, "tokens/s": rate}
        row["meshtrain / it"] = medians["meshtrain"] / seconds
        for rule, flops in rules(model).items():
            row[f"MFU %, {rule}"] = 100 * rate * flops / peak if peak else float("nan")
        row["of matmul %"] = 100 * rate * rules(model)["PaLM"] / top["matmul_flops"]
        row |= {
            "cold s": found.facts[name]["cold_seconds"],
            "warm s": found.facts[name]["warm_seconds"],
        }
        row["GB"] = found.facts[name].get("bytes", float("nan")) / 1e9
        table.append(row | {"loss": found.losses[name][-1]})
    return table


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--models", nargs="*", metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--only", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--toy", action="store_true", help="tiny models, on anything")
    args = parser.parse_args()
    models = args.models or list(TOY if args.toy else SHAPES)
    has_torch = importlib.util.find_spec("torch") is not None
    top = contest.hold(functools.partial(measure_ceiling, args), ["ceiling"], rounds=0, steps=0)
    top = top.facts["ceiling"]
    print(f"{top['device']}: matrix product {top['matmul_flops'] / 1e12:.4g} TFLOP/s, "
          f"copy {top['copy_bytes'] / 1e12:.4g} TB/s")  # fmt: skip
    for model in models:
        about = record.about(args, devices=[top["device"]])
        names = [name for name in args.only if has_torch or not name.startswith("torch")]
        if model == "llama3-8b":
            names = names[:1]
        made = functools.partial(prepare, model)
        found = contest.hold(made, names, rounds=args.rounds, steps=args.steps)
        contest.compare(found.losses, rtol=2e-2)
        if not args.toy and not found.facts["meshtrain"]["fused_attention"]:
            raise SystemExit("the compiled step calls no fused attention")
        print(f"\n{model}: {found.facts['meshtrain']['parameters']:,} parameters")
        rows = report(model, found, top)
        record.show(rows)
        kept = about | {"rows": rows, "ceiling": top, "rules": rules(model), "raw": found._asdict()}
        record.save(args.output, kept, model=model)


if __name__ == "__main__":
    main()
