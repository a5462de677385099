"""Losses as sums, so that micro-batches and masks add up exactly."""

import jax
import jax.numpy as jnp

from meshtrain.metrics import Metrics, weighted

# B batch, S sequence, V vocabulary


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
