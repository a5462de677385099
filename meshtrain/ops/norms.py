"""LayerNorm and RMSNorm whose backward pass reads each array twice: once by row, once by column.

The forward pass keeps the mean and the reciprocal deviation of each row. `jax.grad` of the plain
formula computes them again, and writes the product of gradient and normalised input in float32:
seven kernels on a GPU instead of two.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.parallel import sharding
from meshtrain.parallel.remat import STATISTICS


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalise(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    is_centred: bool,
    epsilon: float,
) -> jax.Array:
    """Returns LayerNorm (`is_centred`, arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) of `x`.

    The dims of `scale`, and of `bias`, are the last ones of `x`, over which it is normalised. All
    is computed in float32 or wider; the result has the dtype of `x`.
    """
    return _forward(x, scale, bias, is_centred, epsilon)[0]


def _forward(x, scale, bias, is_centred, epsilon):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = tuple(range(x.ndim - scale.ndim, x.ndim))
    if is_centred:
        mean, variance = _mean_and_variance(wide, dims)
        mean = checkpoint_name(mean, STATISTICS)
        wide = wide - mean
    else:
        mean, variance = None, jnp.square(wide).mean(dims, keepdims=True)
    reciprocal = checkpoint_name(jax.lax.rsqrt(variance + epsilon), STATISTICS)
    y = wide * (reciprocal * _along(scale, wide))
    if bias is not None:
        y = y + _along(bias, wide)
    return y.astype(x.dtype), (x, scale, bias, mean, reciprocal)


def _mean_and_variance(x: jax.Array, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance over `dims`, which are kept with size 1, from one pass.

    Merges parts of a row by their mean and their sum of squared distances from it (Chan, Golub and
    LeVeque 1979), which loses no digits to outliers as a sum of squares does. GPUs merge as a tree;
    CPUs one element at a time, which rounds more often.
    """

    def merge(first, second):
        count = first[0] + second[0]
        share = second[0] / jnp.maximum(count, 1)  # 0 of 0: where a reduction starts
        distance = second[1] - first[1]
        mean = first[1] + distance * share
        squares = first[2] + second[2] + (distance * first[0]) * (distance * share)
        return count, mean, squares

    zero = jnp.zeros((), x.dtype)
    operands = jnp.ones_like(x), x, jnp.zeros_like(x)
    count, mean, squares = jax.lax.reduce(operands, (zero, zero, zero), merge, dims)
    return jnp.expand_dims(mean, dims), jnp.expand_dims(squares / count, dims)


def _backward(is_centred, epsilon, residuals, grad):
    x, scale, bias, mean, reciprocal = residuals
    # Otherwise XLA would keep the float32 input minus the mean of the forward pass.
    x = jax.lax.optimization_barrier(x)
    rows = tuple(range(x.ndim - scale.ndim))
    dims = tuple(range(x.ndim - scale.ndim, x.ndim))
    wide_grad = grad.astype(reciprocal.dtype)
    normalised = x.astype(reciprocal.dtype)
    if is_centred:
        normalised = normalised - mean
    normalised = normalised * reciprocal
    # With y = scale n + bias, n = (x - mean) r: the part of dn along n, and along the vector of
    # ones if the mean is subtracted, does not change n.
    grad_normalised = wide_grad * _along(scale, wide_grad)
    along = (grad_normalised * normalised).mean(dims, keepdims=True)
    grad_x = grad_normalised - normalised * along
    if is_centred:
        grad_x = grad_x - grad_normalised.mean(dims, keepdims=True)
    grad_x = (grad_x * reciprocal).astype(x.dtype)
    grad_scale = (wide_grad * normalised).sum(rows).astype(scale.dtype)
    grad_bias = None if bias is None else wide_grad.sum(rows).astype(bias.dtype)
    return grad_x, grad_scale, grad_bias


def _along(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a vector in the dtype of `x`, with leading dims of size 1 to the rank of `x`."""
    return vector.astype(x.dtype)[(None,) * (x.ndim - vector.ndim)]


normalise.defvjp(_forward, _backward)


def normalise_and_pass(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    is_centred: bool,
    epsilon: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns `normalise` of x (B, S, D), and x itself, for the residual that passes the norm by.

    The backward pass is one kernel, which adds the gradients of both. `kernels.uses_norm_kernel`
    says for which inputs.
    """
    # Here, as other rules may be active where the backward pass is traced.
    spec = sharding.active_spec(x.shape, "batch", "residual_seq", "residual")
    return _normalise_and_pass(x, scale, bias, is_centred, epsilon, spec)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _normalise_and_pass(x, scale, bias, is_centred, epsilon, spec):
    return normalise(x, scale, bias, is_centred, epsilon), x


def _forward_and_pass(x, scale, bias, is_centred, epsilon, spec):
    y, residuals = _forward(x, scale, bias, is_centred, epsilon)
    return (y, x), residuals


def _backward_and_pass(is_centred, epsilon, spec, residuals, grads):
    from meshtrain.ops import norm_kernel  # Pallas takes 0.2 s to import

    x, scale, bias, mean, reciprocal = residuals
    grad_y, grad_residual = grads
    grad_x, grad_scale, grad_bias = norm_kernel.gradients(
        x, mean, reciprocal, scale, grad_y, grad_residual, spec
    )
    grad_bias = None if bias is None else grad_bias.astype(bias.dtype)
    return grad_x, grad_scale.astype(scale.dtype), grad_bias


_normalise_and_pass.defvjp(_forward_and_pass, _backward_and_pass)
