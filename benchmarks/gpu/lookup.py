"""Gradient of an embedding lookup in bfloat16: its time, and its error for the most frequent token.

  python benchmarks/gpu/lookup.py [--toy] [--output=PATH]

Plain indexing adds up the gradients of equal tokens in bfloat16; meshtrain/ops/embedding.py adds
them up in float32. Tokens are uniform, or distributed like the words of a text (Zipf's law).
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import record
from meshtrain.ops.embedding import lookup

SIZES = ((64, 1024, 50304, 768), (2, 4096, 128256, 4096))  # rows, tokens per row, vocabulary, width
TOY = ((4, 64, 512, 16),)
LOOKUPS = {"plain indexing": lambda table_VD, index: table_VD[index], "meshtrain": lookup}
RUNS = 15


def tokens_of(rows: int, length: int, vocab: int, *, zipf: bool) -> np.ndarray:
    frequency = 1 / np.arange(1, vocab + 1) if zipf else np.ones(vocab)
    random = np.random.default_rng(0)
    return np.int32(random.choice(vocab, (rows, length), p=frequency / frequency.sum()))


def measure(size: tuple[int, ...], *, zipf: bool) -> list[dict]:
    """Returns a row of the table for each lookup."""
    *shape, vocab, width = size
    tokens = tokens_of(*shape, vocab, zipf=zipf)
    random = np.random.default_rng(1)
    grad = jnp.asarray(random.normal(0.5, 1, (*shape, width)), jnp.bfloat16)
    token = np.bincount(tokens.ravel()).argmax()
    exact = np.float64(grad)[tokens == token].sum(0)
    rows = []
    for name, look_up in LOOKUPS.items():

        @jax.jit
        def gradient(table, grad, look_up=look_up):
            return jax.vjp(lambda table: look_up(table, tokens), table)[1](grad)[0]

        table = jnp.zeros((vocab, width), jnp.bfloat16)
        found = jax.block_until_ready(gradient(table, grad))
        seconds = []
        for _ in range(RUNS):
            began = time.perf_counter()
            jax.block_until_ready(gradient(table, grad))
            seconds.append(time.perf_counter() - began)
        error = np.abs(np.float64(found[token]) - exact).max() / np.abs(exact).max()
        rows.append(
            {
                "rows x tokens": "x".join(map(str, shape)),
                "vocabulary": vocab,
                "width": width,
                "tokens": "Zipf" if zipf else "uniform",
                "of the most frequent": int((tokens == token).sum()),
                "gradient": name,
                "ms": 1e3 * statistics.median(seconds),
                "error %": 100 * error,
            }
        )
    return rows


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny, for any device")
    args = parser.parse_args()
    results = record.about(args)
    sizes = TOY if args.toy else SIZES
    results["rows"] = [
        row for size in sizes for zipf in (False, True) for row in measure(size, zipf=zipf)
    ]
    record.show(results["rows"])
    record.save(args.output, results, model="lookup")


if __name__ == "__main__":
    main()
