"""What a block's backward pass keeps with train.remat=none, counted in the residuals of its vjp."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from meshtrain.config.build import build_model
from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.grads import make_loss
from meshtrain.monitor.warnings import marked_names
from meshtrain.ops import kernels
from meshtrain.parallel.remat import CUDNN_ATTENTION, rematerialised
from tests.lib.jaxprs import count_primitives

ROWS, LENGTH = 2, 128


def kept_arrays(name, formulas="plain", *overrides):
    """Returns d_model, and shape and dtype of each array per token that a bfloat16 block keeps."""
    keys = ["--config.train.dtype=bfloat16", f"--config.data.seq_len={LENGTH}", *overrides]
    c = load_config(name, keys)
    model = build_model(parse(c, num_devices=1))

    def abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape[1:], jnp.bfloat16)

    layer = jax.tree.map(abstract, jax.eval_shape(model.init, jax.random.key(0))["layers"])
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, c.model.d_model), jnp.bfloat16)
    batch = Batch(jnp.zeros((ROWS, LENGTH), jnp.int32), None, None)

    def vjp(layer, x):
        return jax.vjp(lambda layer, x: model.block(layer, x, batch), layer, x)[1]

    with kernels.use(formulas):
        jaxpr = jax.make_jaxpr(vjp)(layer, x).jaxpr
    weights = {id(var) for var in jaxpr.invars[:-1]}
    residuals = {id(var): var.aval for var in jaxpr.outvars if id(var) not in weights}
    return c.model.d_model, [aval for aval in residuals.values() if aval.shape[:1] == (ROWS,)]


# x, q, k, v, the result of attention, the input of the second norm, and the feed-forward's
# projections: 2 bytes each. GPT-2: (6 + 4) x 2; Llama 3: (4 + 2 / 4 + 2 x 3.5) x 2. The softmax has
# 4 bytes per head.
@pytest.mark.parametrize(("name", "num_bytes", "heads"), [("gpt2", 20, 12), ("llama3", 23, 32)])
def test_a_block_keeps_only_the_inputs_and_results_of_its_products(
    name, num_bytes, heads, simulated_gpu
):
    d_model, arrays = kept_arrays(name)
    kept = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays) / (ROWS * LENGTH)
    assert kept == num_bytes * d_model + 4 * heads
    assert [one.shape for one in arrays if one.dtype == jnp.float32] == [(ROWS, heads, LENGTH)]


# The statistics of two norms, of 4 bytes each, and of GPT-2 also GELU: 4 x 2 bytes.
@pytest.mark.parametrize(
    ("name", "num_bytes", "heads", "statistics"), [("gpt2", 28, 12, 4), ("llama3", 23, 32, 2)]
)
def test_the_fused_formulas_keep_statistics_and_the_epilogue_too(
    name, num_bytes, heads, statistics, simulated_gpu
):
    d_model, arrays = kept_arrays(name, "auto")
    kept = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays) / (ROWS * LENGTH)
    assert kept == num_bytes * d_model + 4 * heads + 4 * statistics


def test_with_adapters_the_fused_formulas_keep_the_projections_too(simulated_gpu):
    adapter = "--config.adapter.rank=4"
    sizes = []
    for formulas in ("plain", "fused"):
        _, arrays = kept_arrays("llama3", formulas, adapter)
        wide = [one for one in arrays if one.shape[-1] == 14336]
        sizes.append(sum(math.prod(one.shape) for one in wide))
    up_and_gate = 2 * ROWS * LENGTH * 14336
    assert sizes[0] >= up_and_gate and sizes[1] >= up_and_gate


def num_checkpoints(jaxpr, depth=0):
    """Returns how many calls of jax.checkpoint are inside each other, at most."""
    inside = depth + 1
    depths = [depth]
    for equation in jaxpr.eqns:
        deeper = inside if equation.primitive.name in ("checkpoint", "remat2", "remat") else depth
        depths += [num_checkpoints(one, deeper) for one in jaxprs_in_params(equation.params)]
    return max(depths)


@pytest.mark.parametrize("remat", ["none", "full", "dots", "names:attention"])
def test_no_recomputation_is_inside_another(remat):
    c = load_config("llama3", [f"--config.data.seq_len={LENGTH}"])
    model = build_model(parse(c, num_devices=1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    loss = make_loss(model, remat=remat)
    jaxpr = jax.make_jaxpr(loss)(params, Batch(tokens, tokens, None), None).jaxpr
    assert num_checkpoints(jaxpr) == 1


@pytest.mark.parametrize("windows", [(), (("attention", "lg"), ("window", 32))], ids=["", "mixed"])
def test_cudnn_keeps_attention_and_its_statistics_once(windows, simulated_gpu):
    """Where windows differ by layer too: then the kernels of both are in branches."""
    keys = [f"--config.model.{key}={value}" for key, value in windows]
    c = load_config("llama3", ["--config.train.dtype=bfloat16", *keys])
    model = build_model(parse(c, num_devices=1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    layers = jax.eval_shape(model.stack, params["layers"])
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, c.model.d_model), jnp.bfloat16)
    batch = Batch(jnp.zeros((ROWS, LENGTH), jnp.int32), None, None)
    block = rematerialised(partial(model.block, batch=batch), "names:attention", in_loop=True)
    jaxpr = jax.make_jaxpr(lambda layer, x: jax.vjp(block, layer, x)[1])(layer, x).jaxpr
    given = {id(var) for var in jaxpr.invars}
    kept = {id(var): var.aval for var in jaxpr.outvars if id(var) not in given}
    num_heads = c.model.num_heads
    out, statistics = (ROWS, LENGTH, num_heads, 128), (ROWS, num_heads, LENGTH)
    assert sorted(aval.shape for aval in kept.values() if aval.ndim > 2) == [statistics, out]


@pytest.mark.parametrize(("remat", "num_kernels"), [("full", 2), ("names:attention", 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_named_attention_has_the_statistics_of_cudnn(
    remat, num_kernels, packed, simulated_gpu
):
    """Without the log-sum-exp the backward pass would call the kernel again."""
    c = load_config("llama3", ["--config.train.dtype=bfloat16", f"--config.data.seq_len={LENGTH}"])
    model = build_model(parse(c, num_devices=1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    positions = jnp.zeros_like(tokens) if packed else None
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), positions, positions)
    loss = make_loss(model, remat=remat)

    def grad(params):
        return jax.grad(lambda params: loss(params, batch, None).loss)(params)

    jaxpr = jax.make_jaxpr(grad)(params).jaxpr
    assert count_primitives(jaxpr, CUDNN_ATTENTION) == num_kernels
    assert marked_names(model, params, batch, "bfloat16") == {"attention", "mlp"}
