"""Rows of an embedding table; the gradients of equal tokens are added up in float32."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def lookup(table_VD: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `table_VD[index]`, of shape (*index.shape, D).

    The gradient of each row is added up in float32 or wider, and rounded once. The gradient of plain indexing in
    bfloat16 rounds after each term. A token of a text can occur thousands of times in a batch; on a GPU two
    thirds of its gradient were lost, and the additions, which wait for each other, took 35 times as long
    (docs/benchmarks.md).
    """
    return table_VD[index]


def _forward(table_VD, index):
    # Number of rows and dtype; the table itself would be kept for each micro-batch of a pipeline.
    return table_VD[index], (jnp.zeros((len(table_VD), 0), table_VD.dtype), index)


def _backward(kept, grad):
    like_V0, index = kept
    wide = jnp.promote_types(like_V0.dtype, jnp.float32)
    table_VD = jax.ShapeDtypeStruct((len(like_V0), grad.shape[-1]), wide)
    (grad_VD,) = jax.linear_transpose(lambda table_VD: table_VD[index], table_VD)(grad.astype(wide))
    return grad_VD.astype(like_V0.dtype), None


lookup.defvjp(_forward, _backward)
