"""Losses as weighted sums: those of micro-batches add up, and are divided once by the weight."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from meshtrain.config.schema import AXES
from meshtrain.metrics import Metrics, weighted
from meshtrain.ops import kernels
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
    is_target_BSV = _is_target(logits_BSV, targets_BS)
    target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0), axis=-1)
    return _sums(log_z_BS, target_BS, weights_BS, z_loss)


def fused_cross_entropy(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    z_loss: float,
    vocab_size: int,
    softcap: float,
) -> Metrics:
    """Returns the `cross_entropy` of logits with a soft cap (0: none) and without the padding.

    The forward pass reads the logits once, and the backward pass once, where it writes their
    gradients. `jax.grad` of the plain formula reads them twice, and selects what is padding. If
    `kernels.uses_loss_kernel` one kernel does both.
    """
    if kernels.uses_loss_kernel(logits_BSV):
        return _in_place(logits_BSV, targets_BS, weights_BS, z_loss, vocab_size, softcap)
    log_z_BS, target_BS = _log_z_and_target(logits_BSV, targets_BS, vocab_size, softcap)
    return _sums(log_z_BS, target_BS, weights_BS, z_loss)


def _sums(
    log_z_BS: jax.Array, target_BS: jax.Array, weights_BS: jax.Array, z_loss: float
) -> Metrics:
    nll_BS = log_z_BS - target_BS
    if z_loss == 0:
        return weighted(nll_BS, weights_BS)
    return weighted(nll_BS + z_loss * log_z_BS**2, weights_BS, cross_entropy=nll_BS)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _log_z_and_target(
    logits_BSV: jax.Array, targets_BS: jax.Array, vocab_size: int, softcap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the logsumexp of the scores, and the score of the target, each (B, S)."""
    return _read_once(logits_BSV, targets_BS, vocab_size, softcap)[0]


def _read_once(logits_BSV, targets_BS, vocab_size, softcap):
    """Adds up exponentials relative to the largest score so far (arXiv 1805.02867)."""
    scores_BSV = _without_padding(_capped(logits_BSV, softcap), vocab_size)

    def merge(first, second):
        largest = jnp.maximum(first[0], second[0])
        factor = jnp.exp(-jnp.abs(first[0] - second[0]))  # of the sum with the smaller maximum
        is_first = first[0] >= second[0]
        total = jnp.where(is_first, first[1] + second[1] * factor, first[1] * factor + second[1])
        return largest, total, first[2] + second[2]

    is_target_BSV = _is_target(scores_BSV, targets_BS)
    operands = scores_BSV, jnp.ones_like(scores_BSV), jnp.where(is_target_BSV, scores_BSV, 0)
    zero = jnp.zeros((), scores_BSV.dtype)
    start = jnp.full_like(zero, jnp.finfo(zero.dtype).min), zero, zero
    largest_BS, total_BS, target_BS = jax.lax.reduce(operands, start, merge, (2,))
    log_z_BS = largest_BS + jnp.log(total_BS)
    return (log_z_BS, target_BS), (logits_BSV, targets_BS, log_z_BS)


def _gradient_of_logits(vocab_size, softcap, residuals, grads):
    logits_BSV, targets_BS, log_z_BS = residuals
    grad_log_z_BS, grad_target_BS = grads
    capped_BSV = _capped(logits_BSV, softcap)
    scores_BSV = _without_padding(capped_BSV, vocab_size)
    grad_BSV = jnp.exp(scores_BSV - log_z_BS[..., None]) * grad_log_z_BS[..., None]
    grad_BSV += jnp.where(_is_target(scores_BSV, targets_BS), grad_target_BS[..., None], 0)
    if softcap:
        grad_BSV *= 1 - jnp.square(capped_BSV / softcap)
    return grad_BSV.astype(logits_BSV.dtype), None


def _capped(logits_BSV: jax.Array, softcap: float) -> jax.Array:
    """Returns the logits in float32 or wider, with a soft cap (arXiv 2408.00118; 0: none)."""
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    return softcap * jnp.tanh(logits_BSV / softcap) if softcap else logits_BSV


def _without_padding(scores_BSV: jax.Array, vocab_size: int) -> jax.Array:
    """Returns scores whose exponentials are 0 from `vocab_size` on.

    They are finite: a device may have nothing but padding. An addition costs less than a selection.
    """
    padded = scores_BSV.shape[-1]
    if padded == vocab_size:
        return scores_BSV
    lowest = jnp.finfo(scores_BSV.dtype).min / 2
    padding_V = jnp.where(jnp.arange(padded) < vocab_size, 0, lowest).astype(scores_BSV.dtype)
    return scores_BSV + padding_V[None, None]


def _is_target(scores_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    vocab_V = jnp.arange(scores_BSV.shape[-1], dtype=targets_BS.dtype)
    return vocab_V[None, None, :] == targets_BS[..., None]


_log_z_and_target.defvjp(_read_once, _gradient_of_logits)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _in_place(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    z_loss: float,
    vocab_size: int,
    softcap: float,
) -> Metrics:
    """Returns what `fused_cross_entropy` does. The forward pass writes the gradient of the logits.

    Only Metrics.loss has a gradient.
    """
    log_z_BS, target_BS = _log_z_and_target(logits_BSV, targets_BS, vocab_size, softcap)
    return _sums(log_z_BS, target_BS, weights_BS, z_loss)


def _in_place_forward(logits_BSV, targets_BS, weights_BS, z_loss, vocab_size, softcap):
    from meshtrain.ops import loss_kernel  # Pallas takes 0.2 s to import

    log_z_BS, target_BS, grad_BSV = loss_kernel.statistics_and_gradient(
        logits_BSV,
        targets_BS,
        weights_BS,
        vocab_size=vocab_size,
        softcap=softcap,
        z_loss=z_loss,
    )
    return _sums(log_z_BS, target_BS, weights_BS, z_loss), grad_BSV


def _in_place_backward(z_loss, vocab_size, softcap, grad_BSV, cotangents):
    # The loss of a step is a sum, so this is a product with 1, which XLA leaves out.
    return (grad_BSV * cotangents.loss).astype(grad_BSV.dtype), None, None


_in_place.defvjp(_in_place_forward, _in_place_backward)


def chunked_cross_entropy(
    project: Callable[[jax.Array, jax.Array], jax.Array],
    kernel_DV: jax.Array,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    loss_of: Callable[[jax.Array, jax.Array, jax.Array], Metrics],
    mib: float,
) -> Metrics:
    """Returns the loss of the logits `project(kernel, x)`, computed in chunks of tokens.

    `loss_of` is a function of logits, targets and weights, such as `cross_entropy`.

    A chunk has at most `mib` MiB of float32 logits on each device. There is one chunk if `mib` is
    0, or in float16, where the loss must be scaled before its gradient is computed. The gradients
    of a chunk are computed together with its loss, so logits are neither stored nor recomputed.
    Only Metrics.loss has a gradient. `project` must not close over arrays.
    """
    loss = partial(_chunk_loss, project, loss_of)
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


def _chunk_loss(
    project: Callable, loss_of: Callable, kernel_DV: jax.Array, chunk: tuple
) -> Metrics:
    x_BSD, targets_BS, weights_BS = chunk
    return loss_of(project(kernel_DV, x_BSD), targets_BS, weights_BS)


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
