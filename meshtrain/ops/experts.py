"""The feed-forward layers of a mixture of experts: each expert computes the rows routed to it.

A row is a token and one of its experts. Rows are sorted by expert. There are two ways, by config
key `expert.kernel`:

  batched    a first pass computes an equal share of rows for each expert, as one batch of matrix
             products. The rows that are left, those of experts with more than their share, are
             computed in blocks of rows of one expert, in a loop
  grouped    a pass computes the rows of all experts, however many each has, by the kernels of
             grouped.py. A device that holds some of the experts has a buffer of SLACK times its
             share of all rows; the rows that are left are computed in further passes, in a loop

Loops have as many iterations as the most loaded device needs, and the backward pass computes them
again. So nothing is dropped, shapes are static, and the memory does not depend on the imbalance:
only the time does.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.errors import ConfigError
from meshtrain.ops import grouped
from meshtrain.parallel import accelerator, dispatch, sharding
from meshtrain.parallel.remat import recomputed

# T tokens, k experts per token, R = T k rows, n experts, C rows per expert in the first pass, or of
# all experts in a pass of grouped products, b rows of a block, D model, F feed-forward

# The value of config key `expert.kernel`; a part of the key of jax's caches of traces, as the rules
# are.
active_kernel = jax.make_user_context(default_value="batched")

# Rows of a block: fewer waste less where experts have few rows left. On accelerators a block reads
# the weights of its expert from memory: in bfloat16 256 rows are 256 FLOPs per byte read, and an
# H100 does 295 in that time.
BLOCK, BLOCK_OF_ACCELERATORS = 64, 256

# Name of the loop over blocks, or over further passes, in compiled programs, for the audit.
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
    has_bias: bool = False,
    num_rows: int | None = None,
    block: int | None = None,
) -> jax.Array:
    """Returns the weighted sum of the outputs of experts `first` to `first` + n - 1: (T, D).

    `experts` are numbers below `num_experts`, or DROPPED. `kernels` are the projections (n, D, F),
    whose results `combine` accepts, and last the output projection (n, F, D). With `has_bias` their
    biases (n, F) and (n, D) follow. `num_rows` are the rows of all experts, also those of other
    shards; by default T k.
    """
    n = len(kernels[0])
    num_rows = experts_Tk.size if num_rows is None else num_rows
    local_R = experts_Tk.reshape(-1) - first
    local_R = jnp.where((local_R >= 0) & (local_R < n), local_R, n)  # n: not one of these experts
    order_R = jnp.argsort(local_R, stable=True)
    sizes_n = (local_R[:, None] == jnp.arange(n)[None]).sum(0)
    if chosen_kernel(x_TD.dtype, *kernels[0].shape[1:]) == "grouped":
        passes = _Passes.of(experts_Tk, num_rows, num_experts, n, has_bias=has_bias)
        with jax.named_scope(EXPERTS):
            return _in_passes(combine, passes, x_TD, weights_Tk, kernels, order_R, sizes_n)
    # With fewer rows than experts, the first pass would read the weights of experts that have none.
    share = -(-num_rows // num_experts) if num_rows >= num_experts else 0
    default = BLOCK if accelerator.platform() == "cpu" else BLOCK_OF_ACCELERATORS
    size = _Size(
        share=share,
        block=min(block or default, experts_Tk.size),
        k=experts_Tk.shape[1],
        has_bias=has_bias,
    )
    with jax.named_scope(EXPERTS):
        return _batched(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n)


def chosen_kernel(dtype: jax.typing.DTypeLike, d_model: int, d_expert: int) -> str:
    """Returns "batched" or "grouped", by the active `expert.kernel`.

    "auto" is batched: no grouped kernel was measured yet, and with equal loads its compiled program
    is no faster. Raises ConfigError as `check`.
    """
    kernel = active_kernel.value
    if kernel == "auto":
        return "batched"
    check(kernel, dtype, d_model, d_expert)
    return kernel


def check(kernel: str, dtype: jax.typing.DTypeLike, *dims: int) -> None:
    """Raises ConfigError if the kernels of `expert.kernel` do not support a dtype or dims."""
    if kernel == "grouped" and (reason := grouped.why_not(dtype, *dims)):
        raise ConfigError(f"expert.kernel='grouped': {reason}; use 'batched'")


# ---- batched: equal shares, and blocks of what is left ----


class _Size(NamedTuple):
    share: int  # rows per expert in the first pass
    block: int  # rows of a block
    k: int  # rows of a token
    has_bias: bool


class _Rows(NamedTuple):
    """Rows of one expert, or of each expert."""

    row: jax.Array  # (..., b) numbers of rows
    token: jax.Array  # (..., b)
    valid: jax.Array  # (..., b) False: beyond the last row of the expert


def _compute(
    combine: Combine, has_bias: bool, rows: _Rows, x_TD, weights_R, *kernels: jax.Array
) -> jax.Array:
    """Returns the weighted outputs of rows (..., b) for kernels (..., D, F): (..., b, D)."""
    *projections, down = _with_biases(kernels, has_bias)

    def project(x_TD, *projections):
        x_bD = x_TD[rows.token]
        return [_plus(x_bD @ kernel, bias) for kernel, bias in projections]

    def output(down, weights_R, *projected):
        kernel, bias = down
        weights_b = jnp.where(rows.valid, weights_R[rows.row], 0)
        y_bD = _weighted(combine(*projected), weights_b) @ kernel
        return y_bD if bias is None else _plus(y_bD, bias, weights_b)

    projected = recomputed(project, x_TD, *projections)
    return recomputed(output, down, weights_R, *projected)


def _with_biases(
    kernels: tuple[jax.Array, ...], has_bias: bool
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Returns each kernel with its bias: all biases follow all kernels."""
    if not has_bias:
        return [(kernel, None) for kernel in kernels]
    half = len(kernels) // 2
    return list(zip(kernels[:half], kernels[half:], strict=True))


def _plus(
    x_bF: jax.Array, bias_F: jax.Array | None, weights_b: jax.Array | None = None
) -> jax.Array:
    """Returns x (..., b, F) plus a bias (..., F), which is first multiplied by each row's weight.

    In float32, because the gradient of the bias is a sum over rows.
    """
    if bias_F is None:
        return x_bF
    wide = jnp.promote_types(x_bF.dtype, jnp.float32)
    bias_bF = bias_F.astype(wide)[..., None, :]
    if weights_b is not None:
        bias_bF = bias_bF * weights_b.astype(wide)[..., None]
    return (x_bF.astype(wide) + bias_bF).astype(x_bF.dtype)


def _weighted(hidden_bF: jax.Array, weights_b: jax.Array) -> jax.Array:
    """Returns each row times its weight.

    In float32, because the gradient of a weight is a sum over F. The product is exact, so it is
    rounded once.
    """
    wide = jnp.promote_types(hidden_bF.dtype, jnp.float32)
    weighted_bF = hidden_bF.astype(wide) * weights_b.astype(wide)[..., None]
    return weighted_bF.astype(hidden_bF.dtype)


class _Plan:
    """The rows that the first pass computes, and the rows of each block."""

    def __init__(self, size: _Size, order_R: jax.Array, sizes_n: jax.Array):
        num_rows, n = len(order_R), len(sizes_n)
        share, self.block, self.k, _ = size
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
        self.num_blocks = end_n[-1]

    def _rows(self, row: jax.Array, valid: jax.Array) -> _Rows:
        return _Rows(row, row // self.k, valid)

    def rows_of(self, number: jax.Array) -> _Rows:
        """Returns the rows of a block."""
        row = jax.lax.dynamic_slice_in_dim(self.padded, self.start[number], self.block)
        return self._rows(row, jnp.arange(self.block) < self.count[number])

    def for_each_block(self, add: Callable, carry: tuple) -> tuple:
        """Returns `carry` after `carry = add(number, *carry)` for each block."""
        return sharding.repeat_on_all(add, carry, first=0, end=self.num_blocks, scope=LEFTOVER)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _batched(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n):
    return _forward(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n)[0]


def _forward(combine, size, x_TD, weights_Tk, kernels, order_R, sizes_n):
    plan = _Plan(size, order_R, sizes_n)
    weights_R = weights_Tk.reshape(-1)

    def first_pass(x_TD, weights_R, *kernels):
        y_nCD = _compute(combine, size.has_bias, plan.first, x_TD, weights_R, *kernels)
        return jnp.zeros_like(x_TD).at[plan.first.token].add(y_nCD)

    def add_block(number, out_TD):
        rows, expert = plan.rows_of(number), plan.expert[number]
        own = [_entry(one, expert) for one in kernels]
        y_bD = _compute(combine, size.has_bias, rows, x_TD, weights_R, *own)
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
        compute = partial(_compute, combine, size.has_bias, inside)
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


_batched.defvjp(_forward, _backward)


# ---- grouped: passes of rows of all experts ----


class _Passes(NamedTuple):
    size: int  # C
    expected: int  # rows of all these experts, if all experts are used equally
    has_more: bool  # whether there may be further passes
    k: int  # rows of a token
    has_bias: bool

    @classmethod
    def of(
        cls, experts_Tk: jax.Array, num_rows: int, num_experts: int, n: int, *, has_bias: bool
    ) -> "_Passes":
        """Returns the passes for `n` of the experts; `num_rows` are those of all experts."""
        # Rows of a tile are computed together, so that fewer would not be faster.
        tile = 1 if accelerator.platform() == "cpu" else grouped.TILE
        all_rows = -(-experts_Tk.size // tile) * tile
        expected = min(experts_Tk.size, -(-num_rows * n // num_experts))
        size = max(1, math.floor(dispatch.SLACK * expected))
        size = min(all_rows, -(-size // tile) * tile)
        if n == num_experts:
            size = all_rows
        return cls(
            size=size,
            expected=expected,
            has_more=size < experts_Tk.size,
            k=experts_Tk.shape[1],
            has_bias=has_bias,
        )


class _Order(NamedTuple):
    """The rows of these experts, sorted by expert."""

    padded: jax.Array  # (R + C,) numbers of rows; those of other experts are last
    place_Tk: jax.Array  # of each row in this order
    end_n: jax.Array  # of each expert's rows


def _order_of(c: _Passes, weights_Tk: jax.Array, order_R, sizes_n) -> _Order:
    num_rows = len(order_R)
    place_R = jnp.zeros(num_rows, jnp.int32).at[order_R].set(jnp.arange(num_rows, dtype=jnp.int32))
    return _Order(
        padded=jnp.pad(order_R, (0, c.size)),
        place_Tk=place_R.reshape(weights_Tk.shape),
        end_n=jnp.cumsum(sizes_n, dtype=jnp.int32),
    )


def _pass(
    combine: Combine,
    c: _Passes,
    order: _Order,
    number: jax.Array | int,
    x_TD: jax.Array,
    weights_Tk: jax.Array,
    *kernels: jax.Array,
) -> jax.Array:
    """Returns what the rows of pass `number` add to each token: (T, D)."""
    *projections, down = _with_biases(kernels, c.has_bias)
    start = number * c.size
    row_C = jax.lax.dynamic_slice_in_dim(order.padded, start, c.size)
    ends_n = jnp.clip(order.end_n - start, 0, c.size)
    sizes_n = jnp.diff(ends_n, prepend=0)
    own_Tk = order.place_Tk - start
    is_filled_C = jnp.arange(c.size) < ends_n[-1]
    is_own_Tk = (own_Tk >= 0) & (own_Tk < ends_n[-1])
    # As of one buffer that is sent to this device.
    places = dispatch.Places(
        token_dC=row_C[None] // c.k,
        is_filled_dC=is_filled_C[None],
        place_tm=jnp.where(is_own_Tk, own_Tk, 0),
        is_sent_tm=is_own_Tk,
    )
    product = partial(grouped.grouped_dot, sizes_G=sizes_n, expected_rows=c.expected)
    expert_C = jnp.minimum(
        jnp.searchsorted(ends_n, jnp.arange(c.size), side="right"), len(ends_n) - 1
    )

    def plus(x_CF, bias_nF, weights_C=None):
        if bias_nF is None:
            return x_CF
        wide = jnp.promote_types(x_CF.dtype, jnp.float32)
        # Rows beyond all groups may hold NaN, so that their gradients are masked as well.
        bias_CF = jnp.where(is_filled_C[:, None], bias_nF.astype(wide)[expert_C], 0)
        if weights_C is not None:
            bias_CF = bias_CF * weights_C.astype(wide)[:, None]
        return (x_CF.astype(wide) + bias_CF).astype(x_CF.dtype)

    def project(x_TD, *projections):
        (x_CD,) = dispatch.send(x_TD, places)
        return [plus(product(x_CD, kernel), bias) for kernel, bias in projections]

    def output(down, weights_Tk, *projected):
        kernel, bias = down
        weights_C = jnp.where(is_filled_C, weights_Tk.reshape(-1)[row_C], 0)
        y_CD = product(_weighted(combine(*projected), weights_C), kernel)
        return plus(y_CD, bias, weights_C)

    projected = recomputed(project, x_TD, *projections)
    y_CD = recomputed(output, down, weights_Tk, *projected)
    return dispatch.collect(y_CD[None], places)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_passes(combine, c, x_TD, weights_Tk, kernels, order_R, sizes_n):
    return _forward_in_passes(combine, c, x_TD, weights_Tk, kernels, order_R, sizes_n)[0]


def _forward_in_passes(combine, c, x_TD, weights_Tk, kernels, order_R, sizes_n):
    order = _order_of(c, weights_Tk, order_R, sizes_n)
    compute = partial(_pass, combine, c, order)

    def compute_pass(number):
        return (compute(number, x_TD, weights_Tk, *kernels),)

    out_TD, vjp = jax.vjp(partial(compute, 0), x_TD, weights_Tk, *kernels)
    (out_TD,) = _with_further_passes(c, order, compute_pass, (out_TD,))
    return out_TD, (vjp, order, x_TD, weights_Tk, kernels)


def _backward_in_passes(combine, c, kept, grad_TD):
    vjp, order, x_TD, weights_Tk, kernels = kept
    compute = partial(_pass, combine, c, order)

    def compute_pass(number):
        _, vjp = jax.vjp(partial(compute, number), x_TD, weights_Tk, *kernels)
        return vjp(grad_TD)

    sums = _with_further_passes(c, order, compute_pass, vjp(grad_TD))
    grad_x, grad_weights, *grad_kernels = sums
    return grad_x, grad_weights, tuple(grad_kernels), None, None


_in_passes.defvjp(_forward_in_passes, _backward_in_passes)


def _with_further_passes(
    c: _Passes, order: _Order, compute: Callable[[jax.Array], tuple], first: tuple
) -> tuple:
    """Returns `first`, the results of the first pass, plus `compute(number)` of each other one."""
    if not c.has_more:
        return first
    num_passes = -(-order.end_n[-1] // c.size)
    return sharding.sum_on_all(compute, first, end=num_passes, scope=LEFTOVER)
