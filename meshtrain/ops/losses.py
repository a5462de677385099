"""Losses as weighted sums: those of micro-batches add up, and are divided once by the weight."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from meshtrain.config.schema import AXES
from meshtrain.metrics import Metrics, weighted
from meshtrain.parallel import sharding

# B batch, S sequence, D model, V vocabulary, N batch slices, C chunks

MIB = 1 << 20


def cross_entropy(
    logits_BSV: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, *, z_loss: float
) -> Metrics:
    """Returns the weighted sum of -log softmax(logits)[target], in nats, at least in float32.

    `z_loss` > 0 adds z_loss * logsumexp(logits)^2 per token, which keeps the logits from drifting
    (PaLM, arXiv 2204.02311, section 5); the cross-entropy without it is then in `extra`.
    """
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # Compare instead of gather: XLA partitions the comparison over a sharded vocabulary and fuses
    # it into one pass; a gather from sharded operands can abort the process.
    vocab_V = jnp.arange(logits_BSV.shape[-1], dtype=targets_BS.dtype)
    is_target_BSV = vocab_V[None, None, :] == targets_BS[..., None]
    nll_BS = log_z_BS - jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0), axis=-1)
    if z_loss == 0:
        return weighted(nll_BS, weights_BS)
    return weighted(nll_BS + z_loss * log_z_BS**2, weights_BS, cross_entropy=nll_BS)


def chunked_cross_entropy(
    project: Callable[[jax.Array, jax.Array], jax.Array],
    kernel_DV: jax.Array,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    z_loss: float,
    mib: float,
) -> Metrics:
    """Returns the `cross_entropy` of the logits `project(kernel, x)`, computed in chunks of tokens.

    A chunk has at most `mib` MiB of float32 logits on each device. There is one chunk if `mib` is
    0, or in float16, where the loss must be scaled before its gradient is computed. The gradients
    of a chunk are computed together with its loss, so logits are neither stored nor recomputed.
    Only Metrics.loss has a gradient. `project` must not close over arrays.
    """
    loss = partial(_chunk_loss, project, z_loss)
    # Each slice of the batch and of the sequence sums its own chunks; otherwise XLA would
    # all-reduce in every chunk.
    axes, num_rows, num_parts = sharding.token_slices(AXES, targets_BS.shape[1])
    num_slices = num_rows * num_parts
    num_tokens = targets_BS.size // num_slices
    num_chunks = _num_chunks(num_tokens, kernel_DV.shape[-1], mib)
    if num_chunks == 1 or kernel_DV.dtype == jnp.float16:
        return loss(kernel_DV, (x_BSD, targets_BS, weights_BS))

    def slice_loss(kernel_DV, chunks):
        with sharding.partial_axes(axes):
            return _sum_over_chunks(loss, kernel_DV, chunks)

    def split(leaf):
        S, rest = leaf.shape[1], leaf.shape[2:]
        leaf = leaf.reshape(num_rows, -1, num_parts, S // num_parts, *rest)
        leaf = jnp.moveaxis(leaf, 2, 1).reshape(num_slices, num_tokens, *rest)
        padding = [(0, 0), (0, -num_tokens % num_chunks)]  # tokens of weight 0
        leaf = jnp.pad(leaf, padding + [(0, 0)] * (leaf.ndim - 2))
        return leaf.reshape(num_slices, num_chunks, 1, -1, *leaf.shape[2:])

    chunks = jax.tree.map(split, (x_BSD, targets_BS, weights_BS))
    metrics = jax.vmap(slice_loss, (None, 0), spmd_axis_name=axes or None)(kernel_DV, chunks)
    return jax.tree.map(lambda values: values.sum(0), metrics)


def _num_chunks(num_tokens: int, vocab: int, mib: float) -> int:
    """Returns the fewest chunks that fit in `mib`, or a divisor of the tokens up to 25 % larger."""
    size = num_tokens * vocab * 4 // sharding.num_shards("vocab", vocab)
    fewest = min(num_tokens, math.ceil(size / (mib * MIB))) if mib else 1
    # Each chunk reads and writes the kernel's gradient, which costs more than padding the tokens.
    divisors = (n for n in range(fewest, fewest * 5 // 4 + 1) if num_tokens % n == 0)
    return next(divisors, fewest)


def _chunk_loss(project: Callable, z_loss: float, kernel_DV: jax.Array, chunk: tuple) -> Metrics:
    x_BSD, targets_BS, weights_BS = chunk
    return cross_entropy(project(kernel_DV, x_BSD), targets_BS, weights_BS, z_loss=z_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_chunks(loss: Callable, kernel_DV: jax.Array, chunks: tuple) -> Metrics:
    """Returns the sums of `loss(kernel, chunk)` over chunks (C, ...)."""
    metrics = jax.lax.map(lambda chunk: loss(kernel_DV, chunk), chunks)
    return jax.tree.map(lambda values: values.sum(0), metrics)


def _forward(loss, kernel_DV, chunks):
    """Returns the sums, and as residuals the gradients of the loss for kernel and x."""
    dtype = jnp.promote_types(kernel_DV.dtype, jnp.float32)

    def add_chunk(sums, chunk):
        x, *rest = chunk

        def loss_and_metrics(kernel_DV, x):
            metrics = loss(kernel_DV, (x, *rest))
            return metrics.loss, metrics

        (grad_kernel, grad_x), metrics = jax.grad(loss_and_metrics, (0, 1), has_aux=True)(
            kernel_DV, x
        )
        terms = metrics, grad_kernel.astype(dtype)
        return jax.tree.map(jnp.add, sums, terms), grad_x

    metrics = jax.eval_shape(loss, kernel_DV, jax.tree.map(lambda leaf: leaf[0], chunks))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    start = zeros, jnp.zeros(kernel_DV.shape, dtype)
    (metrics, grad_kernel), grad_x = jax.lax.scan(add_chunk, start, chunks)
    return metrics, (grad_kernel.astype(kernel_DV.dtype), grad_x)


def _backward(loss, residuals, cotangents):
    grad_kernel, grad_x = jax.tree.map(
        lambda grad: (grad * cotangents.loss).astype(grad.dtype), residuals
    )
    return grad_kernel, (grad_x, None, None)


_sum_over_chunks.defvjp(_forward, _backward)
