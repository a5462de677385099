"""The layers compute the same, and have the same gradients, with plain and with fused formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.models import layers
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import kernels
from tests.lib.configs import tiny_config

B, S, D, H, K, F = 2, 5, 16, 3, 4, 24
RNG = np.random.default_rng(0)


def mlp(kind, bias):
    c = tiny_config().model.to_dict() | {"mlp": kind, "bias": bias, "d_model": D}
    del c["build"]
    return layers.MLP(TransformerConfig(**c), nnx.Rngs(0), F)


def norm(kind, bias=False):
    return layers.norm(nnx.Rngs(0), kind, D, epsilon=1e-3, bias=bias)


def norm_of_heads(kind):
    return layers.NormOfAllHeads(kind, (H, K), epsilon=1e-3, names=("heads", "head_dim"))


def linear(dims_in, dims_out, axes):
    return layers.dense(nnx.Rngs(0), dims_in, dims_out, axes=axes, bias=True)


MAKE = {
    "RMSNorm": (lambda: norm("rms"), (D,)),
    "RMSNorm with 1 + scale": (lambda: norm("rms_1p"), (D,)),
    "LayerNorm": (lambda: norm("layer"), (D,)),
    "LayerNorm with bias": (lambda: norm("layer", bias=True), (D,)),
    "RMSNorm of all heads": (lambda: norm_of_heads("rms"), (H, K)),
    "1 + scale of all heads": (lambda: norm_of_heads("rms_1p"), (H, K)),
    "LayerNorm of all heads": (lambda: norm_of_heads("layer"), (H, K)),
    "into heads": (lambda: linear(D, (H, K), ("embed", "heads", "head_dim")), (D,)),
    "out of heads": (lambda: linear((H, K), D, ("heads", "head_dim", "embed")), (H, K)),
    "gelu": (lambda: mlp("gelu", bias=False), (D,)),
    "gelu with bias": (lambda: mlp("gelu", bias=True), (D,)),
    "swiglu": (lambda: mlp("swiglu", bias=False), (D,)),
    "swiglu with bias": (lambda: mlp("swiglu", bias=True), (D,)),
    "geglu": (lambda: mlp("geglu", bias=False), (D,)),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_layer_has_the_same_output_and_gradients(name, x64):
    make, dims = MAKE[name]
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(make())
    state = jax.tree.map(lambda leaf: leaf + RNG.normal(size=leaf.shape), state)
    x = RNG.normal(size=(B, S, *dims))

    def output(state, x):
        module = nnx.merge(graph, state)
        return module(lambda x: x, x) if isinstance(module, layers.MLP) else module(x)

    cotangent = RNG.normal(size=jax.eval_shape(output, state, x).shape)

    def output_and_gradients(formulas):
        with kernels.use(formulas):
            y, vjp = jax.vjp(output, state, x)
            return y, vjp(cotangent)

    plain, fused = output_and_gradients("plain"), output_and_gradients("fused")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), fused, plain
    )
    with kernels.use("fused"):
        assert "custom_vjp" in str(jax.make_jaxpr(output)(state, x))


@pytest.mark.parametrize("norm_kind", ["rms", "rms_1p", "layer"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_with_the_kernel_a_block_has_the_same_output_and_gradients(norm_kind, post_norm, x64):
    c = tiny_config()
    c.model.update(norm=norm_kind, post_norm=post_norm, bias=norm_kind == "layer")
    model = build_model(parse(c, num_devices=1))
    layer = jax.tree.map(lambda leaf: leaf[0], model.init(jax.random.key(0))["layers"])
    layer = jax.tree.map(lambda leaf: leaf + 0.1 * RNG.normal(size=leaf.shape), layer)
    x = RNG.normal(size=(B, S, c.model.d_model))
    batch = Batch(np.zeros((B, S), np.int32), None, None)

    def output_and_gradients(formulas):
        with kernels.use(formulas):
            block = partial(model.block, batch=batch)
            y, vjp = jax.vjp(lambda layer, x: block(layer, x), layer, x)
            text = str(jax.make_jaxpr(lambda layer, x: jax.vjp(block, layer, x)[1](x))(layer, x))
            return (y, vjp(jnp.cos(y))), text.count("pallas_call[")

    (plain, _), (by_kernel, num_kernels) = map(output_and_gradients, ("plain", "pallas"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), by_kernel, plain
    )
    assert num_kernels == 2
