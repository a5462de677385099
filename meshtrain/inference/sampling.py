"""Tokens drawn one after the other from a model, whose keys and values of earlier tokens are kept."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import grads
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError, minimum_faults, seed_faults
from meshtrain.models.base import Model, Params, Past
from meshtrain.parallel import sharding
from meshtrain.program import Program

# B rows, S positions that a call adds, T positions in the cache, V vocabulary, D model


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: the likeliest at temperature 0; else from those that are left."""

    temperature: float = 1.0
    top_k: int = 0  # of so many likeliest; 0: all
    top_p: float = (
        1.0  # of the fewest likeliest that have this probability together (arXiv 1904.09751)
    )
    seed: int = 0
    vocab_size: int = 0  # of the first so many, those that the tokenizer has; 0: all

    def __post_init__(self):
        faults = minimum_faults(0, {"--temperature": self.temperature, "--top_k": self.top_k})
        faults += seed_faults("--seed", self.seed)
        if not 0 < self.top_p <= 1:
            faults.append(f"--top_p={self.top_p}: use a number above 0, up to 1")
        if not math.isfinite(self.temperature):
            faults.append(f"--temperature={self.temperature}: use a finite number")
        if faults:
            raise ConfigError(*faults)

    def draw(self, logits_BV: jax.Array, number: jax.Array) -> jax.Array:
        """Returns token `number` of each row; what a row draws depends on no other row."""
        logits_BV = jnp.asarray(logits_BV, jnp.float32)
        if self.vocab_size:
            is_token_V = jnp.arange(logits_BV.shape[-1]) < self.vocab_size
            logits_BV = jnp.where(is_token_V[None], logits_BV, -jnp.inf)
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1)
        below_best_BV = logits_BV - logits_BV.max(
            -1, keepdims=True
        )  # which no division makes too large
        logits_BV = self._likely(below_best_BV / self.temperature)
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        keys_B = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(logits_BV)))
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV)

    def _likely(self, logits_BV: jax.Array) -> jax.Array:
        V = logits_BV.shape[-1]
        if self.top_p == 1 and not 0 < self.top_k < V:
            return logits_BV
        ranked_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        if 0 < self.top_k < V:
            ranked_BV = jnp.where(jnp.arange(V)[None] < self.top_k, ranked_BV, -jnp.inf)
        probs_BV = jax.nn.softmax(ranked_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        last_B = jnp.sum((before_BV < self.top_p) & (ranked_BV > -jnp.inf), axis=-1) - 1
        least_B = jnp.take_along_axis(ranked_BV, last_B[:, None], axis=-1)
        return jnp.where(logits_BV >= least_B, logits_BV, -jnp.inf)


def generate(
    program: Program,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    context: int,
    dtype: str,
    sampling: Sampling,
    stop: Sequence[int] = (),
) -> Iterator[list[int | None]]:
    """Yields a token of each row, up to `length` times; None after one of `stop`, which is not given.

    Prompts are lists of 1 or more tokens, of any lengths. The model sees the last `context` tokens at
    most: where they are used up, it goes on from the newer half of them, read anew.
    """
    model = program.model
    if model.cached_block is None:
        raise ConfigError(
            "model: has no cached_block to generate with; see meshtrain/models/base.py"
        )
    with program.active():
        _, shares = sharding.batch_slices(tuple(program.mesh.shape))
    rows = [list(prompt) for prompt in prompts]
    rows += [[0] for _ in range(-len(rows) % shares)]  # so that each device has as many
    running = [True] * len(prompts) + [False] * (len(rows) - len(prompts))
    whole = jax.NamedSharding(program.mesh, jax.P())
    advance = jax.jit(
        partial(_advance, model, sampling),
        static_argnames=("size", "dtype"),
        donate_argnames="cache",
        out_shardings=(whole, None),
    )
    params = _cast(program, params, dtype)
    number, width = 0, min(context, max(map(len, rows)))
    while number < length and any(running):
        size = min(context, width + length - number)
        window, pads = _window(rows, width)
        call = partial(advance, params, pads=pads, size=size, dtype=dtype)
        with program.active():
            drawn, cache = call(tokens=window, start=0, number=number, cache=None)
        for start in range(width, size + 1):
            # Waited for before the next is begun: see `train._heldout_loss`.
            for row, token in zip(rows, np.asarray(drawn).tolist(), strict=True):
                row.append(token)
            running = [on and row[-1] not in stop for on, row in zip(running, rows, strict=True)]
            number += 1
            yield [row[-1] if on else None for row, on in zip(rows, running, strict=True)][
                : len(prompts)
            ]
            if number == length or not any(running):
                return
            if start < size:
                with program.active():
                    newest = drawn[:, None]
                    drawn, cache = call(tokens=newest, start=start, number=number, cache=cache)
        width = max(1, context // 2)


def _advance(
    model: Model,
    sampling: Sampling,
    params: Params,
    *,
    tokens,
    pads,
    start,
    number,
    cache,
    size,
    dtype,
) -> tuple[jax.Array, Any]:
    """Returns the token that follows `tokens` (B, S), which stand at `start` of a cache, and the cache.

    The first `pads` (B,) positions of a row hold nothing; a cache that is None begins, with T = `size`.
    """
    B, S = tokens.shape
    tokens = sharding.constrain(tokens, "batch", "seq")
    cache = model.empty_cache(B, size, dtype) if cache is None else cache
    place_BS = jnp.broadcast_to(start + jnp.arange(S)[None], (B, S))
    batch = Batch(
        tokens,
        tokens,
        jnp.ones((B, S), jnp.float32),
        positions=jnp.maximum(place_BS - pads[:, None], 0),
        segments=(place_BS >= pads[:, None]).astype(jnp.int32),
    )
    filled_BT = jnp.arange(size)[None] >= pads[:, None]
    past = Past(jnp.asarray(start, jnp.int32), filled_BT.astype(jnp.int32))

    def block(x_BSD, layer_and_cache):
        layer, cache = layer_and_cache
        return model.cached_block(layer, x_BSD, batch, cache, past)

    x_BSD = model.embed(params, batch)
    x_BSD, cache = jax.lax.scan(block, x_BSD, (model.stack(params["layers"]), cache))
    logits_BV = model.logits(params, x_BSD[:, -1:])[:, 0]
    return sampling.draw(logits_BV, number), cache


def _window(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the last `width` tokens of each row, at the right of (B, S), and how much is empty (B,)."""
    window = np.zeros((len(rows), width), np.int32)
    for line, row in zip(window, rows, strict=True):
        line[width - len(row[-width:]) :] = row[-width:]
    return window, np.array([width - len(row[-width:]) for row in rows], np.int32)


def _cast(program: Program, params: Params, dtype: str) -> Params:
    places = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.params)
    with program.active():
        return jax.jit(partial(grads.cast, dtype=dtype), out_shardings=places)(params)
