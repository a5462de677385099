"""Rows of tokens from files: windows of a long stream, or whole documents packed; see corpus.py for what is read."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.data import corpus as corpora
from meshtrain.data import mixture as mixtures
from meshtrain.data import packing as packings
from meshtrain.data.corpus import Corpus
from meshtrain.data.permute import permute
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError, choice_faults, minimum_faults

ENTROPY_TOKENS = 1 << 26  # the unigram entropy is taken over at most so many
BLOCK = 1 << 10  # samples whose rows are found at a time: they are mostly read one after the other
PACKINGS = ("windows", "best_fit")


def build(
    *,
    path: str,
    dtype: str,
    pattern: str,
    exclude: tuple,
    seq_len: int,
    vocab_size: int,
    separator: int,
    heldout: float,
    seed: int,
    split: str,
    packing: str = "windows",  # the configs of older runs have neither
    mixture: tuple = (),
) -> Source:
    """Returns the "train" or "heldout" split of `path`; raises ConfigError where it cannot be used.

    A file is mapped, not read: `.npy`, or raw numbers of `dtype` ("uint8" for any text), or Megatron's
    PREFIX.bin with its PREFIX.idx. A folder that `meshtrain prepare` made is its shards; any other is
    read into memory: the bytes of its files that match `pattern`, outside folders named in `exclude`.
    The last `heldout` of the tokens are held out; the files of a folder are shuffled first.
    An epoch visits each row once, in an order of its own; sample i is the i-th over all epochs.

    Packing "windows": the stream is cut into rows of `seq_len` tokens, documents too; what is too short
    for a row at the end is left out. The token after a row is the target of its last. "best_fit": rows
    of whole documents, only those longer than `seq_len` are cut. In both attention stays within a
    document, and each token of it but the first is a target once.
    `mixture` ((path, weight), ...), in place of `path`, takes samples of each by weight.
    """
    check_sizes(seq_len, vocab_size, seed)
    faults = choice_faults("data.packing", packing, PACKINGS)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    paths, weights = _check_mixture(path, mixture)
    if faults:
        raise ConfigError(*faults)
    found = [
        corpora.load(one, dtype=dtype, pattern=pattern, exclude=tuple(exclude)) for one in paths
    ]
    _check_tokenizers(found, vocab_size)
    sources = []
    for corpus in found:
        border = corpus.num_tokens - int(corpus.num_tokens * heldout)
        first, last = (0, border) if split == "train" else (border, corpus.num_tokens)
        part = Split(corpus, first, last, f"the {split} split of data.heldout={heldout}")
        sizes = dict(seq_len=seq_len, vocab_size=vocab_size, seed=seed)
        sources.append(
            _packed(part, **sizes)
            if packing == "best_fit"
            else _windows(part, separator=separator, **sizes)
        )
    if not mixture:
        return sources[0]
    return mixtures.mix(sources, weights, key=lambda block: _key(seed, block, 1))


class Split(NamedTuple):
    """Tokens `first` ... `last` - 1 of a corpus."""

    corpus: Corpus
    first: int
    last: int
    name: str  # for messages


def _check_mixture(path: str, mixture: tuple) -> tuple[list[str], list[float]]:
    """Returns paths and weights."""
    if not mixture:
        return [path], [1.0]
    if path:
        raise ConfigError(
            f"data.path={path} and data.mixture={mixture}: give one of them, data.path=''"
        )
    for pair in mixture:
        match pair:
            case [str(), int() | float() as weight] if 0 < weight < float("inf"):
                pass
            case _:
                raise ConfigError(f"data.mixture: {pair!r} is no (path, weight above 0)")
    return [one for one, _ in mixture], [weight for _, weight in mixture]


def _check_tokenizers(found: list[Corpus], vocab_size: int) -> None:
    faults = [
        f"data.path={one.path}: data.vocab_size={vocab_size} is less than the {one.vocab_size} tokens of its "
        f"tokenizer; set model.vocab_size={one.vocab_size}"
        for one in found
        if one.vocab_size > vocab_size
    ]
    known = [one for one in found if one.tokenizer]
    faults += [
        f"data.mixture: {one.path} has another tokenizer than {known[0].path}; prepare both with the same"
        for one in known
        if one.tokenizer != known[0].tokenizer
    ]
    if faults:
        raise ConfigError(*faults)


def _windows(split: Split, *, separator: int, seq_len: int, vocab_size: int, seed: int) -> Source:
    """Returns windows of `seq_len` + 1 tokens, of which the last is only a target."""
    corpus, first, last, name = split
    num_windows = (last - first - 1) // seq_len
    if num_windows < 1:
        raise ConfigError(
            f"data.path={corpus.path}: {name} has {last - first} tokens, too few for one window of "
            f"data.seq_len={seq_len} + 1; use more text, a shorter seq_len, or another data.heldout"
        )

    order = _order(num_windows, seed)

    def read(indices: np.ndarray) -> Batch:
        starts = first + seq_len * order(indices)
        rows = corpora.windows(corpus, starts, seq_len + 1, vocab_size)
        if corpus.starts is None:
            return to_batch(rows, separator)
        return segmented(rows, corpora.begins(corpus, starts, seq_len + 1))

    return _source(split, read, vocab_size, num_windows, f"windows of {seq_len}")


def _packed(split: Split, *, seq_len: int, vocab_size: int, seed: int) -> Source:
    """Returns rows of whole documents."""
    corpus, first, last, name = split
    if corpus.starts is None:
        raise ConfigError(
            f"data.packing=best_fit: data.path={corpus.path} does not tell documents apart; "
            f"use what `meshtrain prepare` makes of it, or data.packing=windows"
        )
    if first == last:
        raise ConfigError(
            f"data.path={corpus.path}: {name} has 0 tokens; use more text, or another data.heldout"
        )
    packing = packings.load(corpus, first, last, seq_len)
    num_rows = len(packing.rows) - 1
    order = _order(num_rows, seed)

    def read(indices: np.ndarray) -> Batch:
        return packings.read(corpus, packing, order(indices), seq_len, vocab_size)

    filled = (last - first) / (num_rows * seq_len)
    return _source(split, read, vocab_size, num_rows, f"rows of {seq_len}, {filled:.2%} filled")


def _source(split: Split, read: Callable, vocab_size: int, size: int, kind: str) -> Source:
    corpus, first, last, _ = split
    documents = ""
    if corpus.starts is not None:
        begun = np.searchsorted(corpus.starts, (first, last - 1), side="right")
        documents = f"{begun[1] - begun[0] + 1:,} documents, "
    seen = corpora.head(corpus, first, min(last, first + ENTROPY_TOKENS))
    return Source(
        read,
        description=f"{corpus.path}: {documents}{last - first:,} tokens, {size:,} {kind}",
        baseline=unigram_entropy(seen, vocab_size),
        size=size,
        token_bytes=corpus.token_bytes,
    )


def check_sizes(seq_len: int, vocab_size: int, seed: int) -> None:
    """Raises ConfigError for sizes that no data has."""
    faults = minimum_faults(1, {"data.seq_len": seq_len, "data.vocab_size": vocab_size})
    if faults := faults + minimum_faults(0, {"data.seed": seed}):
        raise ConfigError(*faults)


def to_batch(rows: np.ndarray, separator: int = -1) -> Batch:
    """Makes a Batch of (B, S + 1) tokens; where `separator` >= 0 ends documents, each is its own segment.

    The target that follows a separator belongs to another document and weighs nothing.
    """
    if separator < 0:
        tokens, targets = rows[:, :-1], rows[:, 1:]
        return Batch(tokens, targets, np.ones(tokens.shape, np.float32))
    begins = np.zeros(rows.shape, bool)
    begins[:, 1:] = rows[:, :-1] == separator
    return segmented(rows, begins)


def segmented(rows: np.ndarray, begins: np.ndarray) -> Batch:
    """Makes a Batch of (B, S + 1) tokens, and where documents begin; each is its own segment."""
    tokens, targets = rows[:, :-1], rows[:, 1:]
    weights = (~begins[:, 1:]).astype(np.float32)
    starts = begins[:, :-1].copy()
    starts[:, 0] = True
    S = tokens.shape[1]
    # Segments are few and tokens many, so each number is found once and repeated.
    at = np.flatnonzero(starts)
    lengths = np.diff(at, append=tokens.size)
    numbers = np.arange(at.size) - np.searchsorted(at, at - at % S)
    positions = np.arange(tokens.size, dtype=np.int32) - np.repeat(at.astype(np.int32), lengths)
    segments = np.repeat(numbers.astype(np.int32), lengths)
    return Batch(tokens, targets, weights, positions.reshape(-1, S), segments.reshape(-1, S))


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Returns the entropy of the token frequencies, in nats: the loss of guessing without context."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 20):
        part = tokens[start : start + (1 << 20)]
        counts += np.bincount(part[(part >= 0) & (part < vocab_size)], minlength=vocab_size)
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _order(size: int, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function from samples to rows: each epoch of `size` has an order of its own."""

    @functools.lru_cache(maxsize=8)
    def of_block(block: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), size)
        result = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = permute(places[here], size, key=_key(seed, epoch))
        return result

    def order(indices: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(indices, BLOCK)
        result = np.empty_like(within)
        for block in np.unique(blocks):
            here = blocks == block
            result[here] = of_block(int(block))[within[here]]
        return result

    return order


def _key(seed: int, *more: int) -> int:
    return int(np.random.SeedSequence((seed, *map(int, more))).generate_state(1, np.uint64)[0])
