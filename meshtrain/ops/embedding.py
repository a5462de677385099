"""Rows of an embedding table; the gradients of equal tokens are added up in float32."""

import jax
import jax.numpy as jnp

from meshtrain.config.schema import AXES
from meshtrain.parallel import sharding

# B batch, S sequence, V rows of the table, D model


def lookup(table_VD: jax.Array, index_BS: jax.Array, *, names: sharding.Names = ()) -> jax.Array:
    """Returns `table_VD[index_BS]` (B, S, D).

    `names` are the logical names of the table's dims, if it has any.

    The gradient of each row is added up in float32 or wider, and rounded once. The gradient of
    plain indexing is rounded after each term: in bfloat16, up to two thirds of the gradient of a
    token that occurs thousands of times in a batch were lost (benchmarks/README.md).
    """

    def look_up(table_VD, index):
        return _lookup(sharding.constrain(table_VD, *names) if names else table_VD, index)

    B, S = index_BS.shape
    axes, num_rows, num_parts = sharding.token_slices(AXES, S)
    # Positions that all rows share are not split.
    if num_rows * num_parts == 1 or B % num_rows or S % num_parts:
        return look_up(table_VD, index_BS)
    # Each slice of the batch and of the sequence rounds its own sum: XLA adds them up in the dtype
    # of the table.
    index = index_BS.reshape(num_rows, B // num_rows, num_parts, S // num_parts).swapaxes(1, 2)
    index = index.reshape(-1, *index.shape[2:])
    table_VD = sharding.constrain(table_VD, *names) if names else table_VD
    tables = jnp.broadcast_to(table_VD, (len(index), *table_VD.shape))
    with sharding.partial_axes(axes):
        out = jax.vmap(look_up, spmd_axis_name=axes)(tables, index)
    out = out.reshape(num_rows, num_parts, *out.shape[1:]).swapaxes(1, 2)
    return out.reshape(B, S, -1)


@jax.custom_vjp
def _lookup(table_VD: jax.Array, index: jax.Array) -> jax.Array:
    return table_VD[index]


def _forward(table_VD, index):
    # Number of rows and dtype; the table itself would be kept for each micro-batch of a pipeline.
    return table_VD[index], (jnp.zeros((len(table_VD), 0), table_VD.dtype), index)


def _backward(kept, grad):
    like_V0, index = kept
    sum_dtype = jnp.promote_types(like_V0.dtype, jnp.float32)
    table_VD = jax.ShapeDtypeStruct((len(like_V0), grad.shape[-1]), sum_dtype)
    add_up = jax.linear_transpose(lambda table_VD: table_VD[index], table_VD)
    (grad_VD,) = add_up(grad.astype(sum_dtype))
    return grad_VD.astype(like_V0.dtype), None


_lookup.defvjp(_forward, _backward)
