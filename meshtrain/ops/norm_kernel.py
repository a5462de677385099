"""The backward pass of a norm and of the residual around it, in one kernel (Pallas, Triton).

XLA reduces along rows in one kernel and along columns in another, each of which reads the input and
its gradient. Here a program has some rows: it writes the gradient of each, and adds up the columns.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec

from meshtrain.parallel import accelerator, sharding

# B batch, S sequence, D model, N rows, P programs, W the next power of two from D on

# Arrays of TILE numbers fit the registers of 8 warps; wider rows take 16 warps. Few rows of a
# program would write many sums of columns.
TILE = 4096
MAX_ROWS = 64


def gradients(
    x_BSD: jax.Array,
    mean_BS1: jax.Array | None,
    reciprocal_BS1: jax.Array,
    scale_D: jax.Array,
    grad_BSD: jax.Array,
    residual_BSD: jax.Array | None,
    spec: PartitionSpec,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of `x`, the scale and the bias of y = scale (x - mean) r + bias.

    `mean` is None for RMSNorm. `grad` is that of y; `residual` is added to the gradient of `x`.
    Computed in the dtype of `reciprocal`, which the gradients of scale and bias also have. `spec`
    is that of `x`; D is not sharded.
    """
    rows = x_BSD, grad_BSD, residual_BSD
    statistics = mean_BS1, reciprocal_BS1
    on_each_device = sharding.per_device(
        _of_part,
        in_specs=(*jax.tree.map(lambda _: spec, (rows, statistics)), PartitionSpec()),
        out_specs=(spec, spec, spec),
    )
    grad_x, grad_scale, grad_bias = on_each_device(rows, statistics, scale_D)
    return grad_x, grad_scale.sum((0, 1)), grad_bias.sum((0, 1))


def _of_part(rows, statistics, scale_D):
    """Returns the gradients on one device; those of scale and bias as (1, 1, D).

    A program has as many rows as a power of two that divides them: if the number of rows is odd,
    one, and then the sums of columns are as many as the rows.
    """
    x_BSD, wide = rows[0], statistics[1].dtype
    *lead, D = x_BSD.shape
    N = math.prod(lead)
    width = pl.next_power_of_2(D)
    rows_of_program = math.gcd(N, MAX_ROWS)
    rows_at_once = min(rows_of_program, max(1, TILE // width))
    num_programs = N // rows_of_program

    block = pl.BlockSpec((rows_of_program, D), lambda program: (program, 0))
    numbers = pl.BlockSpec((rows_of_program,), lambda program: (program,))
    sums = jax.ShapeDtypeStruct((num_programs, D), wide)
    one_row = pl.BlockSpec((1, D), lambda program: (program, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, D=D, width=width, num_steps=rows_of_program // rows_at_once),
        grid=(num_programs,),
        in_specs=(
            jax.tree.map(lambda _: block, rows),
            jax.tree.map(lambda _: numbers, statistics),
            pl.BlockSpec((D,), lambda program: (0,)),
        ),
        out_specs=(block, one_row, one_row),
        out_shape=(jax.ShapeDtypeStruct((N, D), x_BSD.dtype), sums, sums),
        compiler_params=triton.CompilerParams(num_warps=8 if width <= TILE else 16, num_stages=1),
        interpret=accelerator.platform() == "cpu",
        name="norm_backward",
    )
    rows = jax.tree.map(lambda array: array.reshape(N, D), rows)
    statistics = jax.tree.map(lambda array: array.reshape(N), statistics)
    grad_x, *of_columns = call(rows, statistics, scale_D.astype(wide))
    return grad_x.reshape(x_BSD.shape), *(sums.sum(0)[None, None] for sums in of_columns)


def _kernel(
    rows, statistics, scale_ref, grad_x_ref, grad_scale_ref, grad_bias_ref, *, D, width, num_steps
):
    x_ref, grad_ref, residual_ref = rows
    mean_ref, reciprocal_ref = statistics
    wide = reciprocal_ref.dtype
    num_rows = x_ref.shape[0] // num_steps
    column = jnp.arange(width)
    is_column = column < D
    scale = triton.load(scale_ref.at[column], mask=is_column, other=0)
    mask = jnp.broadcast_to(is_column[None, :], (num_rows, width))

    def add_rows(step, sums):
        grad_scale, grad_bias = sums
        row = step * num_rows + jnp.arange(num_rows)
        place = row[:, None], column[None, :]

        def load(ref):
            return triton.load(ref.at[place], mask=mask, other=0).astype(wide)

        reciprocal = reciprocal_ref[row][:, None]
        normalised = load(x_ref)
        if mean_ref is not None:
            normalised = normalised - mean_ref[row][:, None]
        normalised = normalised * reciprocal
        grad = load(grad_ref)  # 0 beyond the row
        # As in ops/norms.py.
        grad_normalised = grad * scale[None, :]
        along = jnp.sum(grad_normalised * normalised, 1) / D
        grad_x = grad_normalised - normalised * along[:, None]
        if mean_ref is not None:
            grad_x = grad_x - (jnp.sum(grad_normalised, 1) / D)[:, None]
        grad_x = grad_x * reciprocal
        if residual_ref is not None:
            grad_x = grad_x + load(residual_ref)
        triton.store(grad_x_ref.at[place], grad_x.astype(grad_x_ref.dtype), mask=mask)
        return grad_scale + jnp.sum(grad * normalised, 0), grad_bias + jnp.sum(grad, 0)

    zeros = jnp.zeros(width, wide)
    sums = jax.lax.fori_loop(0, num_steps, add_rows, (zeros, zeros))
    for ref, sum_of_column in zip((grad_scale_ref, grad_bias_ref), sums, strict=True):
        triton.store(ref.at[0, column], sum_of_column, mask=is_column)
