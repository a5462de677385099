"""Biases and activations of a feed-forward layer, so that a GPU computes them with the products.

cuBLAS adds a bias, and applies GELU, before it writes a product (an epilogue); then XLA has to see
a two-dimensional product, a bias of its dtype, and an activation whose input is kept.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.parallel.remat import MLP_GATE, MLP_GELU, MLP_UP

# N tokens, D model, F feed-forward


@jax.custom_vjp
def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x + bias in the dtype of `x`; the dims of `bias` are the last ones of `x`.

    The gradient of the bias, a sum over all tokens, is added in float32 or wider. As an epilogue
    the bias is added in float32 too.
    """
    return x + bias.astype(x.dtype)[(None,) * (x.ndim - bias.ndim)]


def _add_bias_forward(x, bias):
    return add_bias(x, bias), bias


def _add_bias_backward(bias, grad):
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    return grad, wide.sum(tuple(range(grad.ndim - bias.ndim))).astype(bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Returns GELU by tanh; the backward pass keeps `x`, the product with its bias, and GELU."""
    return jax.nn.gelu(x)


def _gelu_forward(x):
    # Named after its use: jax rounds a named array, which would separate product and epilogue.
    return checkpoint_name(jax.nn.gelu(x), MLP_GELU), checkpoint_name(x, MLP_UP)


def _gelu_backward(x, grad):
    # Otherwise XLA would take tanh from the forward pass, which then is no epilogue any more.
    x, grad = jax.lax.optimization_barrier((x, grad))
    _, vjp = jax.vjp(jax.nn.gelu, x)
    return vjp(grad)


gelu.defvjp(_gelu_forward, _gelu_backward)


def clamped_swiglu(up: jax.Array, gate: jax.Array, *, limit: float, slope: float) -> jax.Array:
    """Returns (up + 1) gate sigmoid(slope gate), with clamped up and gate (gpt-oss)."""
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(slope * gate))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_product(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    up: jax.Array,
    gate: jax.Array,
    kernel: jax.Array,
) -> jax.Array:
    """Returns product(gated(up, gate), kernel), such as SwiGLU or GeGLU (arXiv 2002.05202).

    The backward pass reads up, gate and the gradient of the hidden activations once, and writes
    their gradients and, for the gradient of the kernel, the hidden activations in the same pass.
    `product` is linear in both arguments, and neither function closes over arrays.
    """
    return product(gated(up, gate), kernel)


def _gated_product_forward(product, gated, up, gate, kernel):
    up, gate = checkpoint_name(up, MLP_UP), checkpoint_name(gate, MLP_GATE)
    return product(gated(up, gate), kernel), (up, gate, kernel)


def _gated_product_backward(product, gated, residuals, grad):
    up, gate, kernel = residuals
    like_hidden = jax.ShapeDtypeStruct(up.shape, up.dtype)
    (grad_hidden,) = jax.linear_transpose(lambda hidden: product(hidden, kernel), like_hidden)(grad)
    # Otherwise XLA would compute the hidden activations in a pass of their own, before grad_hidden.
    up, gate, grad_hidden = jax.lax.optimization_barrier((up, gate, grad_hidden))
    hidden, vjp = jax.vjp(gated, up, gate)
    grad_up, grad_gate = vjp(grad_hidden)
    (grad_kernel,) = jax.linear_transpose(lambda kernel: product(hidden, kernel), kernel)(grad)
    return grad_up, grad_gate, grad_kernel


gated_product.defvjp(_gated_product_forward, _gated_product_backward)
