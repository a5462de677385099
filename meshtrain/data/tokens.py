"""Rows of tokens from files: windows of a long stream, or packed complete documents. corpus.py reads the files."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.data import corpus, mixture, packing
from meshtrain.data.corpus import Corpus
from meshtrain.data.mixture import permute
from meshtrain.data.source import (
    Batch,
    Source,
    check_sizes,
    split_documents,
    to_batch,
    to_segmented_batch,
)
from meshtrain.errors import ConfigError, choice_faults

# B batch, S sequence

ENTROPY_TOKENS = 1 << 26  # the unigram entropy is estimated from at most this many tokens

BLOCK = 1 << 10  # samples whose rows are computed together: most samples are read in order

PACKINGS = ("windows", "best_fit")

CHAT_BUILD = "data.build=meshtrain.data.chat:build"


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
    packing: str = "windows",  # older configs lack these
    mixture: tuple = (),
    tokenizer_path: str = "",
) -> Source:
    """Returns the "train" or "heldout" split of `path`; raises ConfigError if the data is unusable.

    A file is memory-mapped: `.npy`, raw numbers of `dtype` ("": the bytes of a text), or Megatron-LM's
    PREFIX.bin with its PREFIX.idx. The shards of a folder written by `meshtrain prepare` are mapped too.
    Any other folder is read into memory: the bytes of all files that match `pattern`, except those in
    subfolders named in `exclude`.
    The last `heldout` fraction of the tokens is held out; the files of a folder are shuffled first.
    Each epoch visits each row once, in a new random order; sample i is the i-th over all epochs.

    Packing "windows": the stream is split into rows of `seq_len` tokens, even within documents; a last
    row that is too short is dropped. The last target of a row is the token after the row. "best_fit":
    rows of complete documents; only documents longer than `seq_len` are split. With both, attention stays
    within a document, and each token of a document except the first is a target once.
    Each file of a folder of text is a document. A raw file does not mark documents: each row is one, and
    "best_fit" is an error. The token `separator` ends documents as well, in any data; -1: no token does.
    `mixture` ((path, weight), ...) replaces `path`: samples come from each path in proportion to its weight.
    """
    check_sizes(seq_len, vocab_size, seed, separator)
    faults = choice_faults("data.packing", packing, PACKINGS)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    if tokenizer_path:
        faults.append(f"data.tokenizer_path={tokenizer_path}: only {CHAT_BUILD} reads it")
    paths, weights = _parse_mixture(path, mixture)
    if faults:
        raise ConfigError(*faults)
    found = [
        corpus.load(
            one, dtype=dtype, vocab_size=vocab_size, pattern=pattern, exclude=tuple(exclude)
        )
        for one in paths
    ]
    check_tokenizers(found, vocab_size)
    sources = []
    for one in found:
        border = one.num_tokens - int(one.num_tokens * heldout)
        first, last = (0, border) if split == "train" else (border, one.num_tokens)
        part = Split(one, first, last, f"the {split} split of data.heldout={heldout}")
        sizes = dict(separator=separator, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
        sources.append(of_split(part, packing, **sizes))
    source = _mix(sources, weights, seed) if mixture else sources[0]
    return dataclasses.replace(source, warnings=_warnings(found, dtype, separator))


def _mix(sources: list[Source], weights: list[float], seed: int) -> Source:
    return mixture.mix(sources, weights, lambda block: _shuffle_key(seed, block, 1))


def _warnings(found: list[Corpus], dtype: str, separator: int) -> list[str]:
    """Returns a line for each file of tokens that are one stream; a file of text may well be one document."""
    return [
        f"data.path={one.path}: nothing marks the documents of these tokens, so attention crosses them; set "
        f"data.separator to the token that ends a document"
        for one in found
        if one.document_starts is None and separator < 0 and (dtype or one.path.endswith(".npy"))
    ]


class Split(NamedTuple):
    """Tokens `first` ... `last` - 1 of a corpus."""

    corpus: Corpus
    first: int
    last: int
    name: str  # for messages


def of_split(split: Split, packing: str, **settings: int) -> Source:
    """Returns the rows of a split; `settings` are separator, seq_len, vocab_size and seed, as of `build`."""
    make = _packed_source if packing == "best_fit" else _window_source
    return make(split, **settings)


def _parse_mixture(path: str, mixture: tuple) -> tuple[list[str], list[float]]:
    """Returns the paths and their weights; raises ConfigError if they are invalid."""
    if not mixture:
        return [path], [1.0]
    if path:
        raise ConfigError(
            f"data.path={path} and data.mixture={mixture}: give one of them; a mixture needs data.path=''"
        )
    for pair in mixture:
        match pair:
            case [str(), int() | float() as weight] if 0 < weight < float("inf"):
                pass
            case _:
                raise ConfigError(f"data.mixture: {pair!r} is not a (path, weight above 0)")
    return [one for one, _ in mixture], [weight for _, weight in mixture]


def check_tokenizers(found: list[Corpus], vocab_size: int) -> None:
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


def _window_source(
    split: Split, *, separator: int, seq_len: int, vocab_size: int, seed: int
) -> Source:
    """Returns windows of `seq_len` + 1 tokens; the last of them is only a target."""
    num_tokens = split.last - split.first
    num_windows = (num_tokens - 1) // seq_len
    if num_windows < 1:
        raise ConfigError(
            f"data.path={split.corpus.path}: {split.name} has {num_tokens} tokens, too few for one window of "
            f"data.seq_len={seq_len} + 1; use more text, a shorter seq_len, or another data.heldout"
        )

    order = _epoch_order(num_windows, seed)

    def read(indices: np.ndarray) -> Batch:
        starts = split.first + seq_len * order(indices)
        rows = corpus.read_windows(split.corpus, starts, seq_len + 1, vocab_size)
        if split.corpus.document_starts is None:
            return to_batch(rows)
        is_start = corpus.is_document_start(split.corpus, starts, seq_len + 1)
        return to_segmented_batch(rows, is_start)

    return _make_source(split, read, separator, vocab_size, num_windows, f"windows of {seq_len}")


def _packed_source(
    split: Split, *, separator: int, seq_len: int, vocab_size: int, seed: int
) -> Source:
    """Returns the source of rows of complete documents."""
    num_tokens = split.last - split.first
    if split.corpus.document_starts is None:
        raise ConfigError(
            f"data.packing=best_fit: data.path={split.corpus.path} does not mark where documents begin; "
            f"prepare the text with `meshtrain prepare`, or use data.packing=windows"
        )
    if not num_tokens:
        raise ConfigError(
            f"data.path={split.corpus.path}: {split.name} has 0 tokens; use more text, or another data.heldout"
        )
    packed = packing.load_or_pack(split.corpus, split.first, split.last, seq_len)
    num_rows = len(packed.rows) - 1
    order = _epoch_order(num_rows, seed)

    def read(indices: np.ndarray) -> Batch:
        return packing.read_rows(split.corpus, packed, order(indices), seq_len, vocab_size)

    filled = num_tokens / (num_rows * seq_len)
    kind = f"rows of {seq_len}, {filled:.2%} filled"
    return _make_source(split, read, separator, vocab_size, num_rows, kind)


def _make_source(
    split: Split, read: Callable, separator: int, vocab_size: int, size: int, kind: str
) -> Source:
    first, last = split.first, split.last
    documents = "" if separator >= 0 else "no document boundaries, "
    if split.corpus.document_starts is not None:
        ends = np.searchsorted(split.corpus.document_starts, (first, last - 1), side="right")
        documents = f"{ends[1] - ends[0] + 1:,} documents, "
    if separator >= 0:
        documents += f"token {separator} ends documents, "
    sample = corpus.token_range(split.corpus, first, min(last, first + ENTROPY_TOKENS))
    return Source(
        lambda indices: split_documents(read(indices), separator),
        description=f"{split.corpus.path}: {documents}{last - first:,} tokens, {size:,} {kind}",
        baseline=unigram_entropy(sample, vocab_size),
        size=size,
        token_bytes=split.corpus.token_bytes,
        identity={"data": split.corpus.digest, "tokenizer": split.corpus.tokenizer},
    )


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Returns the entropy of the token frequencies, in nats: the loss of guessing without context."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), 1 << 20):
        part = tokens[start : start + (1 << 20)]
        counts += np.bincount(part[(part >= 0) & (part < vocab_size)], minlength=vocab_size)
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _epoch_order(size: int, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from sample indices to rows; each epoch of `size` samples has its own shuffle."""

    @functools.lru_cache(maxsize=8)
    def rows_of_block(block: int) -> np.ndarray:
        epochs, within = np.divmod(np.arange(block * BLOCK, (block + 1) * BLOCK), size)
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permute(within[here], size, key=_shuffle_key(seed, epoch))
        return rows

    def order(indices: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(indices, BLOCK)
        rows = np.empty_like(within)
        for block in np.unique(blocks):
            here = blocks == block
            rows[here] = rows_of_block(int(block))[within[here]]
        return rows

    return order


def _shuffle_key(seed: int, *numbers: int) -> int:
    return int(np.random.SeedSequence((seed, *map(int, numbers))).generate_state(1, np.uint64)[0])
