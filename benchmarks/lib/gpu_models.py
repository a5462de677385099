"""The GPT-2 and Llama models that the benchmarks on GPUs train, and the rows of a batch that fit.

`TOY` has tiny models, for any device.
"""

import dataclasses
import itertools

from benchmarks.lib import devices
from benchmarks.lib.devices import Devices
from meshtrain.configs import default
from meshtrain.models import transformer

GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
# layers, width, heads, key/value heads, feed-forward, vocabulary, tokens, rows, other keys
SHAPES = {
    "gpt2-124m": (12, 768, 12, 12, 3072, 50257, 1024, 64, GPT2),
    "gpt2-350m": (24, 1024, 16, 16, 4096, 50257, 1024, 32, GPT2),
    "gpt2-1.3b": (24, 2048, 16, 16, 8192, 50257, 2048, 8, GPT2),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 4096, 1, dict(rope_theta=500000.0)),
}
TOY = {
    "gpt2-toy": (2, 64, 4, 4, 128, 300, 32, 4, GPT2),
    "llama3-toy": (2, 64, 4, 2, 96, 300, 32, 4, {}),
}


def settings(model: str, *, rows: int = 0, dtype: str = "bfloat16"):
    """Returns the config of a model; `rows` 0: as many as its row of the table has."""
    layers, width, heads, kv_heads, hidden, vocab, length, most, other = (SHAPES | TOY)[model]
    c = default.get_config()
    c.model.update(num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv_heads)
    c.model.update(d_ff=hidden, vocab_size=vocab, max_seq_len=length, **other)
    c.data.update(seq_len=length, build="meshtrain.data.synthetic:build")
    c.optim.update(schedule="constant", warmup_steps=0, learning_rate=1e-4)
    c.train.update(global_batch=rows or most, dtype=dtype, unroll=layers)
    if model == "llama3-8b":
        c.train.remat, c.optim.moment_dtype = "full", "bfloat16"
    return c


def rows_that_fit(model: str, found: Devices, *, programs: int = 1) -> int:
    """Returns the rows of a batch with which the step fits, 0 if not one does.

    With `programs` 2 the step of bare jax must fit at the same time.
    """
    rows, c = (SHAPES | TOY)[model][7], settings(model)
    while found.memory and rows:
        size = dict(rows=rows, fused=found.has_fused_attention)
        needed = (devices.bytes_of_step(c, **size, is_bare=is_bare) for is_bare in (False, True))
        if sum(itertools.islice(needed, programs)) <= devices.USABLE * found.memory:
            break
        rows //= 2
    return rows


def model_flops(model: str) -> dict[str, float]:
    """Returns the FLOPs per token, forward and backward, under each counting rule."""
    c = devices.transformer_of(settings(model))
    length = (SHAPES | TOY)[model][6]
    palm = transformer.build(**dataclasses.asdict(c)).flops_per_token(length)
    return {"PaLM": palm, "causal": palm - 6.0 * c.num_layers * c.num_heads * c.head_size * length}
