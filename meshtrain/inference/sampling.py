"""Samples tokens autoregressively from a model, with a key/value cache."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import state
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError, minimum_faults, seed_faults
from meshtrain.models import blocks
from meshtrain.models.base import CacheState, Model, Params
from meshtrain.parallel import sharding
from meshtrain.program import Program

# B rows, S positions of a call, T positions in the cache, V vocabulary, D model

ROUNDING = 1e-6  # of a sum of probabilities


@dataclass(frozen=True)
class Sampling:
    """How to sample a token from logits. Temperature 0 selects the most likely token."""

    temperature: float = 1.0
    top_k: int = 0  # sample from the k most likely tokens; 0: all
    # Nucleus sampling (arXiv 1904.09751): from the smallest set of most likely tokens with this
    # total probability.
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int = 0  # of the tokenizer, if smaller than the model's; 0: the model's

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
        """Returns the token of each row (B,) at step `number`; it does not depend on other rows."""
        logits_BV = jnp.asarray(logits_BV, jnp.float32)
        if self.vocab_size:
            is_token_V = jnp.arange(logits_BV.shape[-1]) < self.vocab_size
            logits_BV = jnp.where(is_token_V[None], logits_BV, -jnp.inf)
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1)
        # At most 0, so that dividing by a small temperature cannot overflow to +inf.
        below_best_BV = logits_BV - logits_BV.max(-1, keepdims=True)
        # XLA takes smaller numbers for 0, and 0 / 0 for NaN, of which top_k and top_p keep nothing.
        temperature = max(self.temperature, float(jnp.finfo(jnp.float32).tiny))
        logits_BV = self._mask_unlikely(below_best_BV / temperature)
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        keys_B = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(logits_BV)))
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV)

    def _mask_unlikely(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits, with -inf for the tokens outside top_k or top_p.

        Ties are those of transformers: top_k keeps all tokens as likely as the k-th, top_p no more
        than it needs, of equally likely ones those with the highest ids.
        """
        V = logits_BV.shape[-1]
        if 0 < self.top_k < V:
            best_Bk, _ = jax.lax.top_k(logits_BV, self.top_k)
            logits_BV = jnp.where(logits_BV >= best_Bk[:, -1:], logits_BV, -jnp.inf)
        if self.top_p < 1:
            ranked_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            probs_BV = jax.nn.softmax(ranked_BV, axis=-1)
            before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
            # Rounding must not add a token where the probabilities add up to top_p.
            is_needed_BV = before_BV < self.top_p - ROUNDING
            num_kept_B1 = jnp.maximum(is_needed_BV.sum(-1, keepdims=True), 1)
            last_B1 = jnp.take_along_axis(ranked_BV, num_kept_B1 - 1, axis=-1)
            is_above_BV = logits_BV > last_B1
            is_tied_BV = logits_BV == last_B1
            tie_BV = jax.lax.cumsum(is_tied_BV.astype(jnp.int32), axis=1, reverse=True)
            num_ties_B1 = num_kept_B1 - is_above_BV.sum(-1, keepdims=True)
            is_kept_BV = is_above_BV | is_tied_BV & (tie_BV <= num_ties_B1)
            logits_BV = jnp.where(is_kept_BV, logits_BV, -jnp.inf)
        return logits_BV


def generate(
    program: Program,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    context: int,
    dtype: str,
    sampling: Sampling,
    stop: Collection[int | None] = (),
) -> Iterator[list[int | None]]:
    """Yields the next token of each row, up to `length` times.

    From a row's first `stop` token on, it is None. Each prompt has 1 or more tokens; lengths may
    differ. The model sees at most the last `context` tokens of a row: when it has seen as many, it
    continues with the newer half of them, computed anew. Longer rows do not shorten it.
    """
    model = program.model
    for name in ("cached_embed", "cached_block"):
        if getattr(model, name) is None:
            raise ConfigError(
                f"model: has no {name}, which generation needs; see meshtrain/models/base.py"
            )
    with program.active():
        _, num_shards = sharding.batch_slices(tuple(program.mesh.shape))
    # Add rows that are never active, so that all batch shards have the same size.
    num_prompts = len(prompts)
    num_added = -num_prompts % num_shards
    rows = [list(prompt) for prompt in prompts] + [[0] for _ in range(num_added)]
    is_active = [True] * num_prompts + [False] * num_added

    replicated = jax.NamedSharding(program.mesh, jax.P())
    decode = jax.jit(
        partial(_decode, model, sampling),
        static_argnames=("size", "dtype"),
        donate_argnames="cache",
        out_shardings=(replicated, None),
    )
    params = _to_compute_dtype(program, params, dtype)
    number = 0  # tokens generated so far
    num_seen = [min(context, len(row)) for row in rows]  # the last tokens of each row in the cache
    half = kept_tokens(context)
    width = max(num_seen)  # tokens that a new cache begins with, some of them padding
    room = context - width  # tokens that can be added until the context of a row is full
    while number < length and any(is_active):
        # Prefill: compute a new cache from the last tokens of each row.
        size = width + min(room, length - number)
        window, num_pads = _window(rows, num_seen, width)
        decode_step = partial(decode, params, num_pads=num_pads, size=size, dtype=dtype)
        with program.active():
            sampled, cache = decode_step(tokens=window, start=0, number=number, cache=None)

        # Decode one token of each row at a time, until the context of a row is full.
        for start in range(width, size + 1):
            # Wait for this step before the next starts: on CPU, processes confuse the messages of
            # two programs in flight, and hang.
            tokens = np.asarray(sampled).tolist()
            for index, token in enumerate(tokens):
                rows[index].append(token)
                num_seen[index] += 1
                if token in stop:
                    is_active[index] = False
            number += 1
            newest = []
            for token, active in zip(tokens, is_active, strict=True):
                newest.append(token if active else None)
            yield newest[:num_prompts]
            if number == length or not any(is_active):
                return
            is_full = [n > context for n in num_seen]
            if start == size or any(np.logical_and(is_full, is_active)):
                break
            with program.active():
                sampled, cache = decode_step(
                    tokens=sampled[:, None], start=start, number=number, cache=cache
                )
        for index, active in enumerate(is_active):
            if num_seen[index] > context or not active:
                num_seen[index] = half
        # Each width is compiled, so there are two: for full rows alone, and for any rows.
        width = half if max(num_seen) == half else context
        room = context - half


def kept_tokens(context: int) -> int:
    """Returns how many of the newest tokens a row continues with once its context is full."""
    return max(1, context // 2)


def _decode(
    model: Model,
    sampling: Sampling,
    params: Params,
    *,
    tokens: jax.Array,
    num_pads: jax.Array,
    start: jax.Array | int,
    number: jax.Array | int,
    cache: Any,
    size: int,
    dtype: str,
) -> tuple[jax.Array, Any]:
    """Appends `tokens` (B, S) to the cache at `start`; returns the next token (B,) and the cache.

    The first `num_pads` (B,) positions of a row are padding. If `cache` is None, a new one of
    T = `size` is used.
    """
    B, S = tokens.shape
    tokens = sharding.constrain(tokens, "batch", "seq")
    embed_cache, layer_caches = model.empty_cache(B, size, dtype) if cache is None else cache
    slot_BS = jnp.broadcast_to(start + jnp.arange(S)[None], (B, S))
    batch = Batch(
        tokens,
        tokens,
        jnp.ones((B, S), jnp.float32),
        positions=jnp.maximum(slot_BS - num_pads[:, None], 0),
        segments=(slot_BS >= num_pads[:, None]).astype(jnp.int32),
        num_pads=jnp.clip(num_pads - start, 0, S),
    )
    filled_BT = jnp.arange(size)[None] >= num_pads[:, None]
    past = CacheState(jnp.asarray(start, jnp.int32), filled_BT.astype(jnp.int32))

    def block(x: Any, layer_and_cache: tuple[Any, Any]) -> tuple[Any, Any]:
        layer, cache = layer_and_cache
        return model.cached_block(layer, x, batch, cache, past)

    x, embed_cache = model.cached_embed(params, batch, embed_cache, past)
    x, layer_caches = jax.lax.scan(block, x, (model.stack(params["layers"]), layer_caches))
    last = jax.tree.map(lambda leaf: leaf[:, -1:], x)
    logits_BV = model.logits(params, last)[:, 0]
    return sampling.draw(logits_BV, number), (embed_cache, layer_caches)


def _window(
    rows: Sequence[Sequence[int]], num_seen: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the last `num_seen` tokens of rows (B, width), right-aligned, and their pads (B,)."""
    window_BS = np.zeros((len(rows), width), np.int32)
    num_pads_B = np.zeros(len(rows), np.int32)
    for index, row in enumerate(rows):
        newest = row[-num_seen[index] :]
        num_pads_B[index] = width - len(newest)
        window_BS[index, width - len(newest) :] = newest
    return window_BS, num_pads_B


def _to_compute_dtype(program: Program, params: Params, dtype: str) -> Params:
    """Returns the parameters in the compute dtype, with the shardings that they have."""
    cast = jax.jit(
        partial(blocks.to_compute_dtype, dtype=dtype),
        out_shardings=state.shardings_of(program.abstract_state.params),
    )
    with program.active():
        return cast(params)
