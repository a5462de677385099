"""Whether cuDNN's attention for chunks of the keys can be merged, as ring attention needs it.

  python benchmarks/gpu/attention_statistics.py [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/gpu/attention_statistics.py --toy

The forward pass of cuDNN returns a statistic for each query and head. If it is the natural
logarithm of the sum of exp(score), of scaled scores, two results merge by it: each is weighted with
exp(statistic - log-sum-exp of both). The backward pass of a chunk is then the kernel's own, with
the merged output and the merged statistic.

Three comparisons. The statistic: with the log-sum-exp of the formula in float32 and, to see what
else it may be, with the same in base 2, and of scores without their scale. The output, and the
gradients: of two merged chunks, and of one call for all keys, each with the formula in float32.
Errors are mean differences, relative to the mean value. The script fails if the statistic is
something else, if one call is wrong, or if an error of the merged chunks is more than twice as
large. --toy compares the formula with itself, on any device.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import devices, record
from meshtrain.ops import chunk_kernels

# B batch, S queries, T keys, H heads, G key/value heads, K head dim

SHAPES = ((4, 2048, 12, 12, 64), (1, 4096, 32, 8, 128))  # B, S, H, G, K: GPT-2 and Llama
TOY = ((2, 32, 4, 2, 16),)
STATISTIC_ERROR = 0.01  # another base or scale changes it by much more
MAX_RATIO = 2.0  # error of merged chunks / error of one call
MAX_ERROR = 0.05  # of one call in 16 bits; more is another result
ROUNDING = 1e-5  # errors below are those of float32, and not compared


class Kernel(NamedTuple):
    """Attention, its statistic, and its backward pass from output and statistic.

    forward: (q, k, v, is_causal) -> (out (B, S, H, K), statistic (B, H, S))
    backward: (q, k, v, (out, statistic), gradient of out, is_causal) -> gradients of q, k and v
    """

    forward: Callable
    backward: Callable


# ---- the formula ----


def formula_forward(q_BSHK, k_BTGK, v_BTGK, is_causal):
    scores_BHST = scores(q_BSHK, k_BTGK, q_BSHK.shape[-1] ** -0.5, is_causal)
    statistic_BHS = jax.nn.logsumexp(scores_BHST, -1)
    probs_BHST = jnp.exp(scores_BHST - statistic_BHS[..., None])
    v_BTHK = jnp.repeat(v_BTGK, q_BSHK.shape[2] // v_BTGK.shape[2], 2)
    return jnp.einsum("bhst,bthk->bshk", probs_BHST, v_BTHK), statistic_BHS


def formula_backward(q_BSHK, k_BTGK, v_BTGK, results, grad_BSHK, is_causal):
    """FlashAttention's: probabilities from the statistic, and their gradient by out x grad."""
    out_BSHK, statistic_BHS = results
    H, G, scale = q_BSHK.shape[2], k_BTGK.shape[2], q_BSHK.shape[-1] ** -0.5
    k_BTHK, v_BTHK = (jnp.repeat(x, H // G, 2) for x in (k_BTGK, v_BTGK))
    probs_BHST = jnp.exp(scores(q_BSHK, k_BTGK, scale, is_causal) - statistic_BHS[..., None])
    grad_probs_BHST = jnp.einsum("bshk,bthk->bhst", grad_BSHK, v_BTHK)
    mean_BHS = jnp.einsum("bshk,bshk->bhs", out_BSHK, grad_BSHK)
    grad_scores_BHST = scale * probs_BHST * (grad_probs_BHST - mean_BHS[..., None])
    dq_BSHK = jnp.einsum("bhst,bthk->bshk", grad_scores_BHST, k_BTHK)
    dk_BTHK = jnp.einsum("bhst,bshk->bthk", grad_scores_BHST, q_BSHK)
    dv_BTHK = jnp.einsum("bhst,bshk->bthk", probs_BHST, grad_BSHK)
    shape = (*k_BTGK.shape[:2], G, H // G, -1)
    return dq_BSHK, dk_BTHK.reshape(shape).sum(3), dv_BTHK.reshape(shape).sum(3)


def scores(q_BSHK, k_BTGK, scale, is_causal):
    k_BTHK = jnp.repeat(k_BTGK, q_BSHK.shape[2] // k_BTGK.shape[2], 2)
    scores_BHST = scale * jnp.einsum("bshk,bthk->bhst", q_BSHK, k_BTHK)
    if is_causal:
        scores_BHST = jnp.where(np.tri(*scores_BHST.shape[2:], dtype=bool), scores_BHST, -jnp.inf)
    return scores_BHST


FORMULA = Kernel(formula_forward, formula_backward)


# ---- cuDNN ----


def cudnn_kernel() -> Kernel:
    """Returns the calls of cuDNN's attention that `context.method` ring and gather have."""

    def forward(q_BSHK, k_BTGK, v_BTGK, is_causal):
        options = dict(scale=q_BSHK.shape[-1] ** -0.5, causal=is_causal)
        return chunk_kernels.CUDNN.forward(q_BSHK, k_BTGK, v_BTGK, **options)

    def backward(q_BSHK, k_BTGK, v_BTGK, results, grad_BSHK, is_causal):
        options = dict(scale=q_BSHK.shape[-1] ** -0.5, causal=is_causal)
        inputs = q_BSHK, k_BTGK, v_BTGK, *results, grad_BSHK
        return chunk_kernels.CUDNN.backward(*inputs, **options)

    return Kernel(forward, backward)


# ---- the comparison ----


def one_call(kernel: Kernel, q_BSHK, k_BSGK, v_BSGK, grad_BSHK):
    """Returns output, statistic and gradients of causal attention."""
    results = kernel.forward(q_BSHK, k_BSGK, v_BSGK, True)
    return *results, *kernel.backward(q_BSHK, k_BSGK, v_BSGK, results, grad_BSHK, True)


def by_autodiff(q_BSHK, k_BSGK, v_BSGK, grad_BSHK):
    """Returns the same by the formula, with the gradients of jax."""
    forward = partial(formula_forward, is_causal=True)
    out_BSHK, vjp, statistic_BHS = jax.vjp(forward, q_BSHK, k_BSGK, v_BSGK, has_aux=True)
    return out_BSHK, statistic_BHS, *vjp(grad_BSHK)


def two_chunks(kernel: Kernel, q_BSHK, k_BSGK, v_BSGK, grad_BSHK):
    """Returns the same from two chunks of the keys, as a device of a ring computes it.

    Queries of the first half see only the first chunk, of which they are the diagonal. Those of the
    second half see all keys of the first chunk, and are the diagonal of the second.
    """
    (q1, q2), (k1, k2), (v1, v2), (grad1, grad2) = (
        jnp.split(x, 2, axis=1) for x in (q_BSHK, k_BSGK, v_BSGK, grad_BSHK)
    )
    out1, statistic1, dq1, dk1, dv1 = one_call(kernel, q1, k1, v1, grad1)
    chunks = [kernel.forward(q2, k1, v1, False), kernel.forward(q2, k2, v2, True)]
    statistic2 = jnp.logaddexp(*(statistic for _, statistic in chunks))
    out2 = 0.0
    for out, statistic in chunks:
        weight_BHS = jnp.exp(statistic - statistic2)
        out2 += jnp.moveaxis(weight_BHS, 1, 2)[..., None] * out.astype(jnp.float32)
    out2 = out2.astype(out1.dtype)
    first = kernel.backward(q2, k1, v1, (out2, statistic2), grad2, False)
    second = kernel.backward(q2, k2, v2, (out2, statistic2), grad2, True)

    def add(a, b):
        return a.astype(jnp.float32) + b.astype(jnp.float32)

    def join(a, b):
        return jnp.concatenate([a.astype(jnp.float32), b.astype(jnp.float32)], 1)

    dq = join(dq1, add(first[0], second[0]))
    dk = join(add(dk1, first[1]), second[1])
    dv = join(add(dv1, first[2]), second[2])
    return join(out1, out2), jnp.concatenate([statistic1, statistic2], 2), dq, dk, dv


def relative_error(found, expected) -> float:
    """Returns the mean difference, relative to the mean value."""
    return float(np.abs(np.float32(found) - expected).mean() / np.abs(expected).mean())


def measure(shape: tuple[int, ...], kernel: Kernel, dtype: str) -> tuple[list[dict], list[str]]:
    """Returns the rows of the table for a shape, and a line for each fault."""
    B, S, H, G, K = shape
    keys = jax.random.split(jax.random.key(0), 4)
    inputs = [
        jax.random.normal(key, (B, S, heads, K)).astype(dtype)
        for key, heads in zip(keys, (H, G, G, H), strict=True)
    ]
    exact_inputs = [x.astype(jnp.float32) for x in inputs]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(by_autodiff)(*exact_inputs)
        unscaled_BHS = jax.jit(lambda q, k: jax.nn.logsumexp(scores(q, k, 1.0, True), -1))(
            *exact_inputs[:2]
        )
        single = jax.jit(partial(one_call, kernel))(*inputs)
        merged = jax.jit(partial(two_chunks, kernel))(*inputs)
    exact = [np.asarray(x) for x in exact]
    where = f"{B} x {S}, {H} heads, {G} of keys, head dim {K}"
    meanings = {
        "log-sum-exp of scaled scores": exact[1],
        "the same in base 2": exact[1] / np.log(2, dtype=np.float32),
        "log-sum-exp of scores without scale": np.asarray(unscaled_BHS),
    }
    errors = {name: relative_error(single[1], value) for name, value in meanings.items()}
    rows = [
        {"case": where, "compared": f"statistic, {name}", "one call": error, "two chunks": None}
        for name, error in errors.items()
    ]
    faults = []
    meaning = min(errors, key=errors.get)
    if meaning != "log-sum-exp of scaled scores" or not errors[meaning] <= STATISTIC_ERROR:
        faults.append(
            f"{where}: the statistic is closest to {meaning}, error {errors[meaning]:.3g}"
        )
    names = ("output", "statistic", "gradient of q", "gradient of k", "gradient of v")
    for name, expected, one, two in zip(names, exact, single, merged, strict=True):
        row = {"case": where, "compared": name}
        row["one call"] = relative_error(one, expected)
        row["two chunks"] = relative_error(two, expected)
        rows.append(row)
        if not row["one call"] <= MAX_ERROR and name != "statistic":
            faults.append(f"{where}: {name}: the error of one call is {row['one call']:.3g}")
        if not row["two chunks"] <= MAX_RATIO * max(row["one call"], ROUNDING):
            faults.append(f"{where}: {name}: the error of two chunks is {row['two chunks']:.3g}, "
                          f"of one call {row['one call']:.3g}")  # fmt: skip
    return rows, faults


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="the formula, tiny, for any device")
    args = parser.parse_args()
    found = devices.describe()
    if not args.toy and not found.has_fused_attention:
        sys.exit(f"{found.kind} has no fused attention: use --toy, or an NVIDIA GPU of compute "
                 f"capability {devices.AMPERE} or later")  # fmt: skip
    kernel = FORMULA if args.toy else cudnn_kernel()
    dtype = "float32" if args.toy else "bfloat16"
    results = record.about(args) | {"dtype": dtype, "rows": []}
    faults = []
    for shape in TOY if args.toy else SHAPES:
        rows, new_faults = measure(shape, kernel, dtype)
        results["rows"] += rows
        faults += new_faults
    record.show(results["rows"])
    record.save(args.output, results | {"faults": faults}, model="attention-statistics")
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
