"""Experts of one GPU by grouped products against batched ones: time, and whether they agree.

  python benchmarks/gpu/grouped_experts.py [--output=PATH]
  python benchmarks/gpu/grouped_experts.py --toy        # tiny, interpreted on CPU

The feed-forward layers of Mixtral 8x7B and Qwen3-MoE 30B-A3B, as one device of several computes
them, forward and backward (meshtrain/ops/experts.py): `expert.kernel` batched and grouped. Loads of
the experts: all equal; random, as of a router without preferences; Zipf's law, a few experts have
most rows. Runs alternate between the two, and the times are medians. "TFLOP/s" counts the products
of the rows that there are, without padding. The script fails if gradients differ by more than
rounding in 16 bits, relative to the mean value.
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
from meshtrain.ops import experts, grouped

# Model, experts of the device, tokens, experts of a token, model width, width of an expert. Each
# token has its experts on this device.
SIZES = (
    ("mixtral, 8 experts", 8, 4096, 2, 4096, 14336),
    ("mixtral, 1 of 8 experts", 1, 8192, 1, 4096, 14336),
    ("qwen3-moe, 16 of 128 experts", 16, 8192, 4, 2048, 768),
    ("qwen3-moe, 128 experts", 128, 4096, 8, 2048, 768),
)
TOY = (("toy, 4 experts", 4, 64, 2, 64, 128),)
LOADS = ("equal", "random", "Zipf")
KERNELS = ("batched", "grouped")
RUNS, TOY_RUNS = 15, 2
MAX_ERROR = 0.05


def swiglu(up, gate):
    return jax.nn.silu(gate) * up


def routes(load: str, num_experts: int, num_tokens: int, per_token: int) -> np.ndarray:
    """Returns the experts of each token, (T, k), all different."""
    if load == "equal":
        first = np.arange(num_tokens) * per_token
        return np.int32((first[:, None] + np.arange(per_token)) % num_experts)
    random = np.random.default_rng(0)
    scores = random.gumbel(size=(num_tokens, num_experts))
    if load == "Zipf":
        scores -= np.log(np.arange(1, num_experts + 1))
    return np.int32(np.argsort(-scores, axis=1)[:, :per_token])


def operands(size: tuple, dtype: str) -> tuple:
    """Returns tokens, weights of their experts, kernels, and a gradient of the output."""
    _, num_experts, num_tokens, per_token, d_model, d_expert = size
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [
        (num_tokens, d_model),
        (num_tokens, per_token),
        (num_experts, d_model, d_expert),
        (num_experts, d_model, d_expert),
        (num_experts, d_expert, d_model),
        (num_tokens, d_model),
    ]
    scales = [1.0, 1.0, d_model**-0.5, d_model**-0.5, d_expert**-0.5, 1.0]
    arrays = []
    for key, shape, scale in zip(keys, shapes, scales, strict=True):
        arrays.append((scale * jax.random.normal(key, shape)).astype(dtype))
    x_TD, weights_Tk, *kernels, grad_TD = arrays
    return x_TD, weights_Tk, tuple(kernels), grad_TD


def make_step(kernel: str, num_experts: int):
    """Returns the compiled function of the experts of tokens and `operands`: all gradients."""

    def step(assigned_Tk, x_TD, weights_Tk, kernels, grad_TD):
        def compute(x_TD, weights_Tk, *kernels):
            return experts.feed_forward(
                swiglu, num_experts, x_TD, assigned_Tk, weights_Tk, 0, kernels
            )

        out_TD, vjp = jax.vjp(compute, x_TD, weights_Tk, *kernels)
        return out_TD, *vjp(grad_TD)

    compiled = jax.jit(step)

    def run(*args):
        with experts.active_kernel(kernel):
            return jax.block_until_ready(compiled(*args))

    return run


def measure(size: tuple, load: str, *, dtype: str, runs: int) -> tuple[list[dict], list[str]]:
    """Returns a row of the table for each kernel, and a line for each fault."""
    name, num_experts, num_tokens, per_token, d_model, d_expert = size
    args = [routes(load, num_experts, num_tokens, per_token), *operands(size, dtype)]
    steps = {kernel: make_step(kernel, num_experts) for kernel in KERNELS}
    results = {kernel: step(*args) for kernel, step in steps.items()}
    error = max(map(relative_error, results["grouped"], results["batched"]))
    del results
    seconds: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for _ in range(runs):
        for kernel, step in steps.items():
            began = time.perf_counter()
            step(*args)
            seconds[kernel].append(time.perf_counter() - began)
    # Three products forward, and two for each of them backward.
    flops = 2 * 9 * num_tokens * per_token * d_model * d_expert
    batched = statistics.median(seconds["batched"])
    rows = []
    for kernel in KERNELS:
        median = statistics.median(seconds[kernel])
        rows.append(
            {
                "model": name,
                "load": load,
                "kernel": kernel,
                "ms": 1e3 * median,
                "TFLOP/s": flops / median / 1e12,
                "speed / batched": batched / median,
                "difference": error if kernel == "grouped" else None,
            }
        )
    is_right = error <= MAX_ERROR  # False for NaN
    return rows, [] if is_right else [f"{name}, {load}: results differ by {error:.3g}"]


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Returns the mean difference, relative to the mean value."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.abs(found - expected).mean() / jnp.abs(expected).mean())


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny, for any device")
    args = parser.parse_args()
    dtype = "bfloat16"
    sizes = TOY if args.toy else SIZES
    for *_, d_model, d_expert in sizes:
        if reason := grouped.why_not(dtype, d_model, d_expert):
            sys.exit(f"grouped products: {reason}")
    results = record.about(args) | {"dtype": dtype, "rows": []}
    faults = []
    for size in sizes:
        for load in LOADS:
            rows, new_faults = measure(size, load, dtype=dtype, runs=TOY_RUNS if args.toy else RUNS)
            results["rows"] += rows
            faults += new_faults
    record.show(results["rows"])
    record.save(args.output, results | {"faults": faults}, model="grouped-experts")
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
