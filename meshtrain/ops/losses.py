"""Losses as sums, so that micro-batches and masks add up exactly."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from meshtrain.config.schema import AXES
from meshtrain.metrics import Metrics, weighted
from meshtrain.parallel import sharding

# B batch, S sequence, D model, V vocabulary, N slices of the batch, C chunks, T tokens of a chunk

MIB = 1 << 20


def cross_entropy(
    logits_BSV: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, *, z_loss: float
) -> Metrics:
    """Returns the weighted sum of -log softmax(logits)[target], in nats, computed in float32 or wider.

    `z_loss` > 0 adds z_loss * logsumexp(logits)^2 per token, which keeps the logits from drifting
    (PaLM, arXiv 2204.02311, section 5); the cross-entropy alone is then reported beside the loss.
    """
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # A comparison instead of a gather: XLA partitions it over a sharded vocabulary, where gathers
    # with sharded operands can abort the process, and fuses it into one pass.
    vocab_V = jnp.arange(logits_BSV.shape[-1], dtype=targets_BS.dtype)
    is_target_BSV = vocab_V[None, None, :] == targets_BS[..., None]
    nll_BS = log_z_BS - jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0), axis=-1)
    if z_loss == 0:
        return weighted(nll_BS, weights_BS)
    return weighted(nll_BS + z_loss * log_z_BS**2, weights_BS, cross_entropy=nll_BS)


def in_chunks(
    project: Callable[[jax.Array, jax.Array], jax.Array],
    kernel_DV: jax.Array,
    x_BSD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    z_loss: float,
    mib: int,
) -> Metrics:
    """Returns the `cross_entropy` of `project(kernel, x)`, with no more float32 logits at a time than `mib` MiB.

    That is on each device, by chunks of tokens: the larger the vocabulary, the fewer in a chunk. 0: all
    at once, and so is float16, whose gradients have to be scaled before they are made. They are made
    along with the loss, so that no logits are kept or made again; it is the gradient of `loss` alone,
    what else Metrics hold is for reports. `project` must close over no arrays.
    """
    loss = partial(_of_part, project, z_loss)
    # Each slice of the batch adds up its own chunks, or XLA would add up over devices in each.
    axes, num_slices = sharding.batch_slices(AXES)
    num_tokens = targets_BS.size // num_slices
    num_chunks = _num_chunks(num_tokens, kernel_DV.shape[-1], mib)
    if num_chunks == 1 or kernel_DV.dtype == jnp.float16:
        return loss(kernel_DV, (x_BSD, targets_BS, weights_BS))

    def of_slice(kernel_DV, parts):
        with sharding.partial_axes(axes):
            return _summed(loss, kernel_DV, parts)

    def cut(leaf):
        leaf = leaf.reshape(num_slices, num_tokens, *leaf.shape[2:])
        missing = [(0, 0), (0, -num_tokens % num_chunks)]  # tokens of weight 0
        leaf = jnp.pad(leaf, missing + [(0, 0)] * (leaf.ndim - 2))
        return leaf.reshape(num_slices, num_chunks, 1, -1, *leaf.shape[2:])

    parts = jax.tree.map(cut, (x_BSD, targets_BS, weights_BS))
    metrics = jax.vmap(of_slice, (None, 0), spmd_axis_name=axes or None)(kernel_DV, parts)
    return jax.tree.map(lambda values: values.sum(0), metrics)


def _num_chunks(num_tokens: int, vocab: int, mib: int) -> int:
    """Returns the fewest chunks that are small enough; up to twice as many if those divide the tokens."""
    size = num_tokens * vocab * 4 // sharding.num_shards("vocab", vocab)
    fewest = min(num_tokens, -(-size // (mib * MIB))) if mib else 1
    return next((n for n in range(fewest, 2 * fewest) if num_tokens % n == 0), fewest)


def _of_part(project: Callable, z_loss: float, kernel_DV: jax.Array, part: tuple) -> Metrics:
    x_BSD, targets_BS, weights_BS = part
    return cross_entropy(project(kernel_DV, x_BSD), targets_BS, weights_BS, z_loss=z_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(loss: Callable, kernel_DV: jax.Array, parts: tuple) -> Metrics:
    """Returns the sums of `loss(kernel, part)` over parts (C, ...)."""
    return jax.tree.map(
        lambda values: values.sum(0), jax.lax.map(lambda part: loss(kernel_DV, part), parts)
    )


def _forward(loss, kernel_DV, parts):
    wide = jnp.promote_types(kernel_DV.dtype, jnp.float32)

    def add(sums, part):
        x, *rest = part

        def of(kernel_DV, x):
            metrics = loss(kernel_DV, (x, *rest))
            return metrics.loss, metrics

        (grad_kernel, grad_x), metrics = jax.grad(of, (0, 1), has_aux=True)(kernel_DV, x)
        new = metrics, grad_kernel.astype(wide)
        return jax.tree.map(jnp.add, sums, new), grad_x

    one = jax.tree.map(lambda leaf: leaf[0], parts)
    metrics = jax.eval_shape(loss, kernel_DV, one)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
    start = zeros, jnp.zeros(kernel_DV.shape, wide)
    (metrics, grad_kernel), grad_x = jax.lax.scan(add, start, parts)
    return metrics, (grad_kernel.astype(kernel_DV.dtype), grad_x)


def _backward(loss, kept, grads):
    grad_kernel, grad_x = jax.tree.map(lambda leaf: (leaf * grads.loss).astype(leaf.dtype), kept)
    return grad_kernel, (grad_x, None, None)


_summed.defvjp(_forward, _backward)
