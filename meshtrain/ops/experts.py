"""The feed-forward layers of a mixture of experts: each expert computes the rows routed to it.

A row is a token and one of its experts. Rows are sorted by expert. A first pass computes an equal
share of rows for each expert, as one batch of matrix products. The rows that are left, those of
experts with more than their share, are computed in blocks of rows of one expert, in a loop with as
many iterations as the most loaded device needs; the backward pass computes them again. So nothing
is dropped, shapes are static, and the memory does not depend on the imbalance: only the time does.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.parallel import accelerator, dispatch, sharding
from meshtrain.parallel.remat import recomputed

# T tokens, k experts per token, R = T k rows, n experts, C rows per expert in the first pass, b
# rows of a block, D model, F feed-forward

# Rows of a block: fewer waste less where experts have few rows left. On accelerators a block reads
# the weights of its expert from memory: in bfloat16 256 rows are 256 FLOPs per byte read, and an
# H100 does 295 in that time.
BLOCK, BLOCK_OF_ACCELERATORS = 64, 256

# Name of the loop over blocks in compiled programs, for the audit.
LEFTOVER = "leftover_blocks"
# Name of all operations of the experts, in traces and compiled programs.
EXPERTS = "experts"
DROPPED = dispatch.DROPPED  # the expert of a row that is dropped

# (up, gate) or (up,), each (..., F) -> hidden (..., F)
Combine = Callable[..., jax.Array]


def feed_forward(
    combine: Combine,
    num_experts: int,
    x_TD: jax.Array,
    experts_Tk: jax.Array,
    weights_Tk: jax.Array,
    first: jax.Array | int,
    kernels: tuple[jax.Array, ...],
    *,
    num_rows: int | None = None,
    block: int | None = None,
) -> jax.Array:
    """Returns the weighted sum of the outputs of experts `first` to `first` + n - 1: (T, D).

    `experts` are numbers below `num_experts`, or DROPPED. `kernels` are the projections (n, D, F),
    whose results `combine` accepts, and last the output projection (n, F, D). `num_rows` are the
    rows of all experts, also those of other shards; by default T k.
    """
    n = len(kernels[0])
    num_rows = experts_Tk.size if num_rows is None else num_rows
    local_R = experts_Tk.reshape(-1) - first
    local_R = jnp.where((local_R >= 0) & (local_R < n), local_R, n)  # n: not one of these experts
    order_R = jnp.argsort(local_R, stable=True)
    sizes_n = (local_R[:, None] == jnp.arange(n)[None]).sum(0)
    # With fewer rows than experts, the first pass would read the weights of experts that have none.
    share = -(-num_rows // num_experts) if num_rows >= num_experts else 0
    default = BLOCK if accelerator.platform() == "cpu" else BLOCK_OF_ACCELERATORS
    size = _Size(share, min(block or default, experts_Tk.size), experts_Tk.shape[1])
    with jax.named_scope(EXPERTS):
        return _grouped(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n)


class _Size(NamedTuple):
    share: int  # rows per expert in the first pass
    block: int  # rows of a block
    k: int  # rows of a token


class _Rows(NamedTuple):
    """Rows of one expert, or of each expert."""

    row: jax.Array  # (..., b) numbers of rows
    token: jax.Array  # (..., b)
    valid: jax.Array  # (..., b) False: beyond the last row of the expert


def _compute(combine: Combine, rows: _Rows, x_TD, weights_R, *kernels: jax.Array) -> jax.Array:
    """Returns the weighted outputs of rows (..., b) for kernels (..., D, F): (..., b, D)."""
    *projections, down = kernels

    def project(x_TD, *projections):
        x_bD = x_TD[rows.token]
        return [x_bD @ kernel for kernel in projections]

    def output(down, weights_R, *projected):
        weights_b = jnp.where(rows.valid, weights_R[rows.row], 0)
        hidden_bF = combine(*projected)
        # In float32, because the gradient of a weight is a sum over F. The product is exact, so it
        # is rounded once.
        wide = jnp.promote_types(hidden_bF.dtype, jnp.float32)
        weighted_bF = hidden_bF.astype(wide) * weights_b.astype(wide)[..., None]
        return weighted_bF.astype(hidden_bF.dtype) @ down

    projected = recomputed(project, x_TD, *projections)
    return recomputed(output, down, weights_R, *projected)


class _Plan:
    """The rows that the first pass computes, and the rows of each block."""

    def __init__(self, size: _Size, order_R: jax.Array, sizes_n: jax.Array):
        num_rows, n = len(order_R), len(sizes_n)
        share, self.block, self.k = size
        self.padded = jnp.pad(order_R, (0, max(share, self.block)))
        start_n = jnp.cumsum(sizes_n) - sizes_n
        place_nC = start_n[:, None] + jnp.arange(share)[None]
        self.first = self._rows(self.padded[place_nC], jnp.arange(share)[None] < sizes_n[:, None])
        left_n = jnp.maximum(sizes_n - share, 0)
        blocks_n = -(-left_n // self.block)
        end_n = jnp.cumsum(blocks_n)
        number = jnp.arange(num_rows // self.block + n)
        # Blocks beyond the last one have no valid rows: devices with fewer blocks wait for the
        # others.
        self.expert = jnp.minimum(jnp.searchsorted(end_n, number, side="right"), n - 1)
        before = (number - (end_n - blocks_n)[self.expert]) * self.block  # rows of earlier blocks
        self.start = jnp.minimum(start_n[self.expert] + share + before, num_rows)
        self.count = left_n[self.expert] - before
        self.num_blocks = sharding.largest_of_mapped(end_n[-1])

    def _rows(self, row: jax.Array, valid: jax.Array) -> _Rows:
        return _Rows(row, row // self.k, valid)

    def rows_of(self, number: jax.Array) -> _Rows:
        """Returns the rows of a block."""
        row = jax.lax.dynamic_slice_in_dim(self.padded, self.start[number], self.block)
        return self._rows(row, jnp.arange(self.block) < self.count[number])

    def for_each_block(self, add: Callable, carry: tuple) -> tuple:
        """Returns `carry` after `carry = add(number, *carry)` for each block."""

        def body(state):
            return state[0] + 1, *add(*state)

        start = (jnp.zeros((), jnp.int32), *carry)
        with jax.named_scope(LEFTOVER):
            return jax.lax.while_loop(lambda state: state[0] < self.num_blocks, body, start)[1:]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n):
    return _forward(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n)[0]


def _forward(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n):
    plan = _Plan(size, order_R, sizes_n)
    weights_R = weights_Tk.reshape(-1)

    def first_pass(x_TD, weights_R, *kernels):
        y_nCD = _compute(combine, plan.first, x_TD, weights_R, *kernels)
        return jnp.zeros_like(x_TD).at[plan.first.token].add(y_nCD)

    def add_block(number, out_TD):
        rows, expert = plan.rows_of(number), plan.expert[number]
        y_bD = _compute(combine, rows, x_TD, weights_R, *(_entry(one, expert) for one in kernels))
        return (out_TD.at[rows.token].add(y_bD),)

    out_TD, vjp = jax.vjp(first_pass, x_TD, weights_R, *kernels)
    (out_TD,) = plan.for_each_block(add_block, (out_TD,))
    return out_TD, (vjp, x_TD, weights_Tk, kernels, order_R, sizes_n)


def _backward(combine, size, kept, grad_TD):
    vjp, x_TD, weights_Tk, kernels, order_R, sizes_n = kept
    plan = _Plan(size, order_R, sizes_n)
    weights_R = weights_Tk.reshape(-1)

    def add_block(number, grad_x, grad_weights, *grad_kernels):
        rows, expert = plan.rows_of(number), plan.expert[number]
        own = [_entry(one, expert) for one in kernels]
        # Its own rows alone: a gradient of all tokens in every block would cost more than the
        # block.
        inside = _Rows(jnp.arange(plan.block), jnp.arange(plan.block), rows.valid)
        compute = partial(_compute, combine, inside)
        _, block_vjp = jax.vjp(compute, x_TD[rows.token], weights_R[rows.row], *own)
        grad_rows, grad_b, *grads = block_vjp(grad_TD[rows.token])
        added = [
            jax.lax.dynamic_update_index_in_dim(total, _entry(total, expert) + new, expert, 0)
            for total, new in zip(grad_kernels, grads, strict=True)
        ]
        grad_x = grad_x.at[rows.token].add(grad_rows)
        return grad_x, grad_weights.at[rows.row].add(grad_b), *added

    first = vjp(grad_TD)
    # In bfloat16, sums over many blocks would lose small terms.
    wide = [grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) for grad in first]
    sums = plan.for_each_block(add_block, tuple(wide))
    sums = [total.astype(grad.dtype) for total, grad in zip(sums, first, strict=True)]
    grad_x, grad_weights, *grad_kernels = sums
    return grad_x, grad_weights.reshape(weights_Tk.shape), tuple(grad_kernels), None, None


def _entry(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


_grouped.defvjp(_forward, _backward)
