"""Samples tokens autoregressively from a model, with a key/value cache."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
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

# B rows, S positions of a call, T positions in the cache, H tokens of a row so far, V vocabulary,
# N tokens of an n-gram, D model

ROUNDING = 1e-6  # of a sum of probabilities
NO_TOKEN = -1  # fills the beginning of a shorter row
GROWTH = 512  # tokens for which a cache has room, if few shapes are compiled


@dataclass(frozen=True)
class Sampling:
    """How to sample a token from logits.

    First the penalties, then temperature, top_k, top_p and min_p, in the order of transformers.
    Temperature 0 selects the most likely token, after the penalties.
    """

    temperature: float = 1.0
    top_k: int = 0  # sample from the k most likely tokens; 0: all
    # Nucleus sampling (arXiv 1904.09751): from the smallest set of most likely tokens with this
    # total probability.
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int = 0  # of the tokenizer, if smaller than the model's; 0: the model's
    # From the tokens with at least this share of the most likely one's probability (arXiv
    # 2407.01082).
    min_p: float = 0.0
    # Divides positive logits of the tokens in prompt and text so far, multiplies negative ones
    # (arXiv 1909.05858).
    repetition_penalty: float = 1.0
    # Subtracted from the logits of the tokens generated so far: once, and for each time that they
    # were generated; as OpenAI's API defines them, without the prompt.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # No sequence of this many tokens occurs twice in prompt and text; 0: any may.
    no_repeat_ngram_size: int = 0

    def __post_init__(self):
        faults = minimum_faults(
            0,
            {
                "--temperature": self.temperature,
                "--top_k": self.top_k,
                "--no_repeat_ngram_size": self.no_repeat_ngram_size,
            },
        )
        faults += seed_faults("--seed", self.seed)
        if not 0 < self.top_p <= 1:
            faults.append(f"--top_p={self.top_p}: use a number above 0, up to 1")
        if not 0 <= self.min_p <= 1:
            faults.append(f"--min_p={self.min_p}: use a number from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            faults.append(
                f"--repetition_penalty={self.repetition_penalty}: use a finite number above 0; "
                f"1 changes nothing"
            )
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not math.isfinite(value):
                faults.append(f"--{name}={value}: use a finite number")
        if faults:
            raise ConfigError(*faults)

    @property
    def reads_tokens(self) -> bool:
        """Returns whether a token depends on those before it, not on the logits alone."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.no_repeat_ngram_size
        )

    def draw(
        self,
        logits_BV: jax.Array,
        number: jax.Array,
        tokens_BH: jax.Array | None = None,
        stream: jax.Array | int = 0,
    ) -> jax.Array:
        """Returns the token of each row (B,) at step `number`; it does not depend on other rows.

        With `reads_tokens`, `tokens_BH` are the rows so far, aligned at their ends, with NO_TOKEN
        before the beginning of shorter ones; the last `number` tokens of a row were generated.
        Each `stream` has other random numbers.
        """
        logits_BV = jnp.asarray(logits_BV, jnp.float32)
        if self.vocab_size:
            is_token_V = jnp.arange(logits_BV.shape[-1]) < self.vocab_size
            logits_BV = jnp.where(is_token_V[None], logits_BV, -jnp.inf)
        if self.reads_tokens:
            assert tokens_BH is not None
            logits_BV = self._penalize(logits_BV, number, tokens_BH)
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1)
        # At most 0, so that dividing by a small temperature cannot overflow to +inf.
        below_best_BV = logits_BV - logits_BV.max(-1, keepdims=True)
        # XLA takes smaller numbers for 0, and 0 / 0 for NaN, of which top_k and top_p keep nothing.
        temperature = max(self.temperature, float(jnp.finfo(jnp.float32).tiny))
        logits_BV = self._mask_unlikely(below_best_BV / temperature)
        key = jax.random.key(jnp.uint32(self.seed) + jnp.asarray(stream, jnp.uint32))
        key = jax.random.fold_in(key, number)
        keys_B = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(logits_BV)))
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV)

    def _penalize(self, logits_BV: jax.Array, number: jax.Array, tokens_BH: jax.Array) -> jax.Array:
        """Returns the logits after the penalties for the tokens of each row so far."""
        B, V = logits_BV.shape
        H = tokens_BH.shape[1]
        row_B1 = jnp.arange(B)[:, None]
        # NO_TOKEN counts for a column beyond the vocabulary, which is dropped.
        column_BH = jnp.where(tokens_BH == NO_TOKEN, V, tokens_BH)
        if self.repetition_penalty != 1:
            occurs_BV = jnp.zeros((B, V + 1), bool).at[row_B1, column_BH].set(True)[:, :V]
            divided_BV = logits_BV / self.repetition_penalty
            multiplied_BV = logits_BV * self.repetition_penalty
            penalized_BV = jnp.where(logits_BV < 0, multiplied_BV, divided_BV)
            logits_BV = jnp.where(occurs_BV, penalized_BV, logits_BV)
        if self.presence_penalty or self.frequency_penalty:
            is_generated_H = jnp.arange(H) >= H - number
            added_BH = jnp.broadcast_to(is_generated_H, (B, H)).astype(jnp.float32)
            counts_BV = jnp.zeros((B, V + 1)).at[row_B1, column_BH].add(added_BH)[:, :V]
            logits_BV -= self.frequency_penalty * counts_BV
            logits_BV -= self.presence_penalty * (counts_BV > 0)
        if 0 < self.no_repeat_ngram_size <= H:
            is_banned_BV = self._ends_of_ngrams(tokens_BH, V)
            # A small vocabulary may be used up; then any token may follow.
            may_follow_BV = (logits_BV > -jnp.inf) & ~is_banned_BV
            is_banned_BV &= may_follow_BV.any(-1, keepdims=True)
            logits_BV = jnp.where(is_banned_BV, -jnp.inf, logits_BV)
        return logits_BV

    def _ends_of_ngrams(self, tokens_BH: jax.Array, V: int) -> jax.Array:
        """Returns the tokens (B, V) that would repeat an n-gram of the row."""
        B, H = tokens_BH.shape
        N = self.no_repeat_ngram_size
        num_windows = H - N + 1
        matches_BW = jnp.ones((B, num_windows), bool)
        for offset in range(N - 1):
            token_B1 = tokens_BH[:, H - N + 1 + offset][:, None]
            matches_BW &= tokens_BH[:, offset : offset + num_windows] == token_B1
        # A row with fewer than N tokens matches nowhere: earlier windows have more padding.
        end_BW = jnp.where(matches_BW, tokens_BH[:, N - 1 :], V)
        row_B1 = jnp.arange(B)[:, None]
        return jnp.zeros((B, V + 1), bool).at[row_B1, end_BW].set(True)[:, :V]

    def _mask_unlikely(self, logits_BV: jax.Array) -> jax.Array:
        """Returns the logits, with -inf for the tokens outside top_k, top_p or min_p.

        Ties are those of transformers: top_k keeps all tokens as likely as the k-th, top_p no more
        than it needs, of equally likely ones those with the highest ids, and min_p all.
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
        if self.min_p > 0:
            probs_BV = jax.nn.softmax(logits_BV, axis=-1)
            is_likely_BV = probs_BV >= self.min_p * probs_BV.max(-1, keepdims=True)
            logits_BV = jnp.where(is_likely_BV, logits_BV, -jnp.inf)
        return logits_BV


Generate = Callable[..., Iterator[list[int | None]]]
Decode = Callable[..., tuple[jax.Array, Any]]  # `_decode` of a model and a sampling


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
    ended: Collection[int] = (),
) -> Iterator[list[int | None]]:
    """Yields the next token of each row, up to `length` times; see `generator`."""
    run = generator(program, params, context=context, dtype=dtype, sampling=sampling)
    return run(prompts, length=length, stop=stop, ended=ended)


def generator(
    program: Program,
    params: Params,
    *,
    context: int,
    dtype: str,
    sampling: Sampling,
    few_shapes: bool = False,
    decode: Decode | None = None,
) -> Generate:
    """Returns the function (prompts, *, length, stop=(), ended=(), stream=0) that generates text.

    It yields the next token of each row, up to `length` times. From a row's first `stop` token on,
    it is None; so it is from the next step on for the rows in `ended`, to which the caller may add
    rows between two steps. Each prompt has 1 or more tokens; lengths may differ. The model sees at
    most the last `context` tokens of a row: when it has seen as many, it continues with the newer
    half of them, computed anew. Longer rows do not shorten it.

    Calls of the function share compiled programs. With `few_shapes`, prompts and caches are padded
    to powers of two, so that prompts of other lengths share them too. So do other parameters, if
    both calls of `generator` get the same `decode`, of `make_decode`.
    """
    model = program.model
    for name in ("cached_embed", "cached_block"):
        if getattr(model, name) is None:
            raise ConfigError(
                f"model: has no {name}, which generation needs; see meshtrain/models/base.py"
            )
    with program.active():
        _, num_shards = sharding.batch_slices(tuple(program.mesh.shape))
    decode = decode or make_decode(program, sampling)
    params = _to_compute_dtype(program, params, dtype)

    def decode_step(**inputs: Any) -> tuple[jax.Array, Any]:
        with program.active():
            return decode(params, dtype=dtype, **inputs)

    return partial(
        _generate,
        decode_step,
        context=context,
        num_shards=num_shards,
        reads_tokens=sampling.reads_tokens,
        few_shapes=few_shapes,
    )


def make_decode(program: Program, sampling: Sampling) -> Decode:
    """Returns the program that `generator` runs; it is compiled for each shape when it is used."""
    return jax.jit(
        partial(_decode, program.model, sampling),
        static_argnames=("size", "dtype"),
        donate_argnames="cache",
        out_shardings=(jax.NamedSharding(program.mesh, jax.P()), None),
    )


def _generate(
    decode_step: Callable[..., tuple[jax.Array, Any]],
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    stop: Collection[int | None] = (),
    ended: Collection[int] = (),
    stream: int = 0,
    context: int,
    num_shards: int,
    reads_tokens: bool,
    few_shapes: bool,
) -> Iterator[list[int | None]]:
    """Yields the next token of each row; see `generator`. `decode_step` is `_decode`."""

    def padded(width: int, limit: int) -> int:
        return max(width, min(limit, 1 << (width - 1).bit_length())) if few_shapes else width

    # Add rows that are never active, so that all batch shards have the same size.
    num_prompts = len(prompts)
    num_added = -num_prompts % num_shards
    rows = [list(prompt) for prompt in prompts] + [[0] for _ in range(num_added)]
    is_active = [True] * num_prompts + [False] * num_added
    # Tokens of the longest row at the end, for the penalties.
    longest = max(len(row) for row in rows) + length
    longest = padded(longest, limit=2 * longest)

    def newest_tokens() -> np.ndarray | None:
        return _window(rows, longest, empty=NO_TOKEN)[0] if reads_tokens else None

    number = 0  # tokens generated so far
    num_seen = [min(context, len(row)) for row in rows]  # of each row, its last in the cache
    half = kept_tokens(context)
    # Tokens that can be added until the context of a row is full.
    room = context - max(num_seen)
    # Tokens that a new cache begins with, some of them padding.
    width = padded(max(num_seen), limit=context)
    growth = min(GROWTH, length) if few_shapes else length
    while number < length and any(is_active):
        # Prefill: compute a new cache from the last tokens of each row.
        size = width + min(room, growth, length - number)
        window, num_pads = _window(rows, width, num_seen)
        step = partial(
            decode_step,
            num_pads=num_pads,
            stream=stream,
            size=padded(size, limit=2 * size),
        )
        sampled, cache = step(
            tokens=window, start=0, number=number, newest=newest_tokens(), cache=None
        )

        # Decode one token of each row at a time, until the context of a row is full.
        for start in range(width, size + 1):
            # Wait for this step before the next starts: on CPU, processes confuse the messages
            # of two programs in flight, and hang.
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
            for index in ended:
                is_active[index] = False
            if number == length or not any(is_active):
                return
            is_full = [n > context for n in num_seen]
            if start == size or any(np.logical_and(is_full, is_active)):
                break
            sampled, cache = step(
                tokens=sampled[:, None],
                start=start,
                number=number,
                newest=newest_tokens(),
                cache=cache,
            )
        for index, active in enumerate(is_active):
            if num_seen[index] > context or not active:
                num_seen[index] = half
        if few_shapes:
            width = padded(max(num_seen), limit=context)
            room = context - max(num_seen)
        else:
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
    newest: jax.Array | None,
    stream: jax.Array | int,
    cache: Any,
    size: int,
    dtype: str,
) -> tuple[jax.Array, Any]:
    """Appends `tokens` (B, S) to the cache at `start`; returns the next token (B,) and the cache.

    The first `num_pads` (B,) positions of a row are padding. `newest` (B, H) are the rows so far,
    if the sampling reads them. If `cache` is None, a new one of T = `size` is used.
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
    return sampling.draw(logits_BV, number, newest, stream), (embed_cache, layer_caches)


def _window(
    rows: Sequence[Sequence[int]],
    width: int,
    num_seen: Sequence[int] | None = None,
    *,
    empty: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the last tokens of rows (B, width), right-aligned, and their pads (B,).

    Of each row these are `num_seen`; None: all that it has. `empty` fills what is left.
    """
    window_BS = np.full((len(rows), width), empty, np.int32)
    num_pads_B = np.zeros(len(rows), np.int32)
    for index, row in enumerate(rows):
        newest = row if num_seen is None else row[-num_seen[index] :]
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
