"""The cross-entropy and its gradient, in one kernel that writes the gradient over the logits.

Pallas, Triton. A program has one row: it reads the logits of a token for the statistics, and again
for the gradient: from the GPU's cache, if the rows of all programs that run at a time fit there.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from meshtrain.parallel import accelerator, sharding

# B batch, S sequence, V vocabulary, N tokens

BLOCK = 2048  # logits that a program reads at a time


def statistics_and_gradient(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    *,
    vocab_size: int,
    softcap: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logsumexp and score of the target, each (B, S), and the gradient of the logits.

    That is the gradient of the weighted sum of -log softmax(scores)[target] + z_loss logsumexp^2,
    where the scores are the logits with a soft cap (0: none), without the padding from `vocab_size`
    on. Computed in float32 or wider; the gradient has the dtype of the logits.
    """
    logits = sharding.active_spec(logits_BSV.shape, "batch", "seq", "vocab")
    tokens = PartitionSpec(*logits[:2])
    of_part = functools.partial(_of_part, vocab_size=vocab_size, softcap=softcap, z_loss=z_loss)
    on_each_device = sharding.per_device(
        of_part, in_specs=(logits, tokens, tokens), out_specs=(tokens, tokens, logits)
    )
    return on_each_device(logits_BSV, targets_BS, weights_BS)


def _of_part(logits_BSV, targets_BS, weights_BS, **options):
    """Returns what `statistics_and_gradient` does, on one device."""
    V, num_tokens = logits_BSV.shape[-1], math.prod(targets_BS.shape)
    wide = jnp.promote_types(logits_BSV.dtype, jnp.float32)
    row = pl.BlockSpec((1, V), lambda token: (token, 0))
    number = pl.BlockSpec((1,), lambda token: (token,))
    numbers = jax.ShapeDtypeStruct((num_tokens,), wide)
    call = pl.pallas_call(
        functools.partial(_kernel, block=min(BLOCK, pl.next_power_of_2(V)), **options),
        grid=(num_tokens,),
        in_specs=(row, number, number),
        out_specs=(number, number, row),
        out_shape=(numbers, numbers, jax.ShapeDtypeStruct((num_tokens, V), logits_BSV.dtype)),
        input_output_aliases={0: 2},
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=accelerator.platform() == "cpu",
        name="cross_entropy",
    )
    tokens = targets_BS.reshape(num_tokens), weights_BS.reshape(num_tokens).astype(wide)
    log_z, target, grad = call(logits_BSV.reshape(num_tokens, V), *tokens)
    return (
        log_z.reshape(targets_BS.shape),
        target.reshape(targets_BS.shape),
        grad.reshape(logits_BSV.shape),
    )


def _kernel(
    logits_ref,
    target_ref,
    weight_ref,
    log_z_ref,
    target_score_ref,
    grad_ref,
    *,
    block,
    vocab_size,
    softcap,
    z_loss,
):
    wide, V = log_z_ref.dtype, logits_ref.shape[-1]
    lowest = jnp.finfo(wide).min / 2  # as in ops/losses.py
    num_blocks = -(-V // block)
    target, weight = target_ref[0], weight_ref[0]

    def part(number):
        """Returns the slice of a block, the numbers of its tokens, and its scores."""
        where = (pl.ds(0, 1), pl.ds(number * block, block))
        token = number * block + jnp.arange(block)
        is_token = token < vocab_size
        logits = triton.load(logits_ref.at[where], mask=is_token[None, :], other=0)
        scores = logits.reshape(block).astype(wide)
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        return where, token, jnp.where(is_token, scores, lowest)

    # One maximum and one sum for each place in a block, so that the loop has no sum over a block. A
    # place that has seen only padding counts for 0 at the end, as its maximum is the lowest number.
    def add_block(number, sums):
        largest, total, target_score = sums
        _, token, scores = part(number)
        new = jnp.maximum(largest, scores)
        total = total * jnp.exp(largest - new) + jnp.exp(scores - new)
        is_target = (token == target) & (token < V)
        return new, total, target_score + jnp.where(is_target, scores, 0)

    zeros = jnp.zeros(block, wide)
    start = jnp.full(block, lowest, wide), zeros, zeros
    largest, total, target_score = jax.lax.fori_loop(0, num_blocks, add_block, start)
    maximum = jnp.max(largest)
    log_z = maximum + jnp.log(jnp.sum(total * jnp.exp(largest - maximum)))
    log_z_ref[0] = log_z
    target_score_ref[0] = jnp.sum(target_score)

    def write_block(number, _):
        where, token, scores = part(number)
        grad = jnp.exp(scores - log_z) * (1 + 2 * z_loss * log_z)
        grad = weight * jnp.where(token == target, grad - 1, grad)
        if softcap:
            grad = grad * (1 - jnp.square(scores / softcap))
        grad = jnp.where((token < vocab_size) & (weight != 0), grad, 0)
        grad = grad.astype(grad_ref.dtype)[None, :]
        triton.store(grad_ref.at[where], grad, mask=(token < V)[None, :])

    jax.lax.fori_loop(0, num_blocks, write_block, None)
