"""Hugging Face folders: their tensors, models and logits."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.configs import default
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.huggingface import convert, files, weights
from meshtrain.models import blocks
from meshtrain.models.base import CacheState
from meshtrain.parallel.mesh import make_mesh
from tests.lib.paths import ROOT

GOLDEN = ROOT / "tests" / "huggingface" / "golden"  # see make_golden.py
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
BF16 = np.dtype(ml_dtypes.bfloat16)
# Half a unit in the last place of each weight changes Gemma 2's logits by 2e-5, and Gemma 3's by
# 4e-5.
LOGIT_ATOL = dict.fromkeys(FAMILIES, 1e-5) | {"gemma2": 2e-5, "gemma3": 4e-5}


def tensor_bytes(folder):
    """Returns the bytes, shape and dtype of each tensor in a folder."""
    found = files.tensors(folder)
    return {name: (t.read().tobytes(), t.shape, t.code) for name, t in found.items()}


def save(folder, tensors, shard_bytes=1 << 40):
    """Writes a dict of tensors to a folder."""
    specs = [files.TensorSpec(name, x.shape, x.dtype) for name, x in tensors.items()]
    files.write(folder, specs, tensors.values(), shard_bytes=shard_bytes)


def arrays(folder):
    return {name: np.array(tensor.read()) for name, tensor in files.tensors(folder).items()}


def run(*arguments):
    """Runs the verb; raises ConfigError with its exit code and stderr if it fails."""
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(
            "sys.stderr", type("Tee", (), {"write": printed.append, "flush": lambda: None})
        )
        code = app.main("convert", [str(argument) for argument in arguments])
    if code:
        raise ConfigError(f"exit code {code}: " + "".join(printed))


def load(folder, dtype="float32", **sizes):
    """Returns the model and parameters of a folder, on a mesh of 8 devices or of `sizes`."""
    section = weights.model_section(folder)
    model = convert.model_of(section)
    sizes = sizes or {"fsdp": 8}
    mesh = make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    rules = default.get_config().rules
    abstract = convert.abstract_params(model, np.dtype(dtype), rules, mesh)
    return model, weights.read(folder, abstract, section)


def logits(model, params, tokens, positions=None, segments=None):
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), positions, segments)
    x = blocks.run_blocks(
        model.block, model.stack(params["layers"]), model.embed(params, batch), batch
    )
    return model.logits(params, x)


def assert_same_logits(folder, model, params, atol):
    """Compares full rows, rows with padding, and packed documents with logits.npz."""
    golden = np.load(folder / "logits.npz")
    tokens, vocabulary = golden["tokens"].astype(np.int32), golden["logits"].shape[-1]
    positions = np.arange(tokens.shape[1])
    padding = (positions[None] >= golden["lengths"][:, None]).astype(np.int32)
    lengths = golden["documents"]
    documents = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    packed_inputs = (positions - starts).astype(np.int32)[None], documents[None]
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(functools.partial(logits, model))
        full = compiled(params, tokens)
        padded = compiled(params, tokens, np.tile(positions, (2, 1)).astype(np.int32), padding)
        packed = compiled(params, tokens[:1], *packed_inputs)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    assert_close(full[..., :vocabulary], golden["logits"])
    assert_close(np.where(padding[..., None], 0, padded[..., :vocabulary]), golden["padded"])
    assert_close(packed[0, :, :vocabulary], golden["packed"])


ATOL = 1e-5


def assert_same_generation(folder, model, params):
    """Compares the logits of each step of generation with a cache with those of transformers."""
    golden = np.load(folder / "logits.npz")
    prompt, generated = golden["tokens"][:, :10], golden["generated"]
    num_rows, num_steps = generated.shape
    num_tokens = golden["steps"].shape[-1]
    cache = model.empty_cache(num_rows, 10 + num_steps, jnp.float32)
    segments_BT = jnp.zeros((num_rows, 10 + num_steps), jnp.int32)

    @jax.jit
    def call(tokens, start, cache):
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None], tokens.shape)
        zeros = jnp.zeros(tokens.shape, jnp.int32)
        batch = Batch(tokens, tokens, jnp.ones(tokens.shape), positions, zeros)

        past = CacheState(start, segments_BT)

        def block(x_BSD, layer_and_cache):
            layer, cache = layer_and_cache
            return model.cached_block(layer, x_BSD, batch, cache, past)

        x_BSD, of_embed = model.cached_embed(params, batch, cache[0], past)
        x_BSD, cache = jax.lax.scan(block, x_BSD, (model.stack(params["layers"]), cache[1]))
        return model.logits(params, x_BSD)[:, -1, :num_tokens], (of_embed, cache)

    calls = [prompt, *np.split(generated[:, :-1], num_steps - 1, axis=1)]
    start = 0
    with jax.default_matmul_precision("highest"):
        for tokens, expected in zip(calls, golden["steps"].swapaxes(0, 1), strict=True):
            actual, cache = call(tokens.astype(np.int32), jnp.int32(start), cache)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=ATOL)
            start += tokens.shape[1]
