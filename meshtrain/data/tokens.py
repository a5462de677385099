"""Rows of tokens from files: windows of a long stream, or packed complete documents.

corpus.py reads the files.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.config.rounding import to_12_digits
from meshtrain.data import tokenizer
from meshtrain.data.corpus import (
    Corpus,
    is_document_start,
    load_corpus,
    read_windows,
    token_range,
)
from meshtrain.data.mixture import mix, permute
from meshtrain.data.packing import load_or_pack, read_rows
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

PACKINGS = ("windows", "best_fit")
ENTROPY_TOKENS = 1 << 26  # the unigram entropy is estimated from at most this many tokens
BLOCK = 1 << 10  # samples whose rows are computed together: most samples are read in order


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
    field: str = "text",
    template: str = "",
    num_workers: int = 0,  # for rows:build, as index_path
    index_path: str = "",
) -> Source:
    """Returns the "train" or "heldout" split of `path`; raises ConfigError if the data is unusable.

    A file is memory-mapped: `.npy`, raw numbers of `dtype` ("": the bytes of a text), or
    Megatron-LM's PREFIX.bin with its PREFIX.idx. The shards of a folder written by
    `meshtrain prepare` are mapped too. Any other folder is read into memory: the bytes of all files
    that match `pattern`, except those in subfolders named in `exclude`.
    The last `heldout` fraction of the tokens is held out; the files of a folder are shuffled first.
    Each epoch visits each row once, in a new random order; sample i is the i-th over all epochs.

    Packing "windows": the stream is split into rows of `seq_len` tokens, even within documents; a
    last row that is too short is dropped. The last target of a row is the token after the row.
    "best_fit": rows of complete documents; only documents longer than `seq_len` are split. With
    both, attention stays within a document, and each token of a document except the first is a
    target once.
    Each file of a folder of text is a document. A raw file does not mark documents: each row is
    one, and "best_fit" is an error. The token `separator` ends documents as well, in any data; -1:
    no token does.
    `mixture` ((path, weight), ...) replaces `path`: samples come from each path in proportion to
    its weight.
    """
    check_sizes(seq_len, vocab_size, seed, separator)
    faults = choice_faults("data.packing", packing, PACKINGS)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    if tokenizer_path:
        faults.append(
            f"data.tokenizer_path={tokenizer_path}: only data.build=meshtrain.data.rows:build and "
            f"meshtrain.data.chat:build read it"
        )
    if template or field != "text":
        faults.append(
            f"data.field={field}, data.template={template!r}: only data.build="
            f"meshtrain.data.rows:build reads them; `meshtrain prepare` has flags of these names"
        )
    paths, weights = _parse_mixture(path, mixture)
    if faults:
        raise ConfigError(*faults)

    corpora = []
    for path in paths:
        corpus = load_corpus(
            path,
            dtype=dtype,
            vocab_size=vocab_size,
            pattern=pattern,
            exclude=exclude,
        )
        corpora.append(corpus)
    check_tokenizers(corpora, vocab_size)

    sources = []
    for number, corpus in enumerate(corpora):
        num_train = corpus.num_tokens - math.floor(to_12_digits(corpus.num_tokens * heldout))
        source = split_source(
            Split(
                corpus,
                first=0 if split == "train" else num_train,
                last=num_train if split == "train" else corpus.num_tokens,
                name=f"the {split} split of data.heldout={heldout}",
            ),
            packing,
            separator=separator,
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
            number=number,
        )
        sources.append(source)
    if mixture:
        # The last number is odd: those of the sources' own orders are even.
        source = mix(sources, weights, lambda block: _shuffle_key(seed, block, 1))
    else:
        (source,) = sources
    return dataclasses.replace(source, warnings=_warnings(corpora, dtype, separator))


def _parse_mixture(path: str, mixture: tuple) -> tuple[list[str], list[float]]:
    """Returns the paths and their weights; raises ConfigError if they are invalid."""
    if not mixture:
        return [path], [1.0]
    if path:
        raise ConfigError(
            f"data.path={path} and data.mixture={mixture}: give one of them; "
            f"a mixture needs data.path=''"
        )
    for pair in mixture:
        match pair:
            case [str(), int() | float() as weight] if 0 < weight < float("inf"):
                pass
            case _:
                raise ConfigError(f"data.mixture: {pair!r} is not a (path, weight above 0)")
    return [path for path, _ in mixture], [weight for _, weight in mixture]


def check_tokenizers(corpora: list[Corpus], vocab_size: int) -> None:
    """Raises ConfigError if a tokenizer has more than `vocab_size` tokens, or if two differ."""
    faults = []
    for corpus in corpora:
        faults += vocabulary_faults(corpus.path, corpus.vocab_size, vocab_size)
    tokenized = [corpus for corpus in corpora if corpus.tokenizer]
    for corpus in tokenized:
        if corpus.tokenizer != tokenized[0].tokenizer:
            faults.append(
                f"data.mixture: {corpus.path} has another tokenizer than {tokenized[0].path}; "
                f"prepare both with the same"
            )
    if faults:
        raise ConfigError(*faults)


def vocabulary_faults(path: str, num_tokens: int, vocab_size: int) -> list[str]:
    """Returns a fault if a tokenizer has more than `vocab_size` tokens."""
    if num_tokens <= vocab_size:
        return []
    return [
        f"data.path={path}: data.vocab_size={vocab_size} is less than the {num_tokens} tokens of "
        f"its tokenizer; set model.vocab_size={num_tokens}"
    ]


def _warnings(corpora: list[Corpus], dtype: str, separator: int) -> list[str]:
    """Returns a line for each file of tokens that does not mark its documents.

    A file of text, without a dtype, may well be one document.
    """
    warnings = []
    for corpus in corpora:
        is_marked = corpus.document_starts is not None or separator >= 0
        holds_numbers = dtype or corpus.path.endswith(".npy")
        if holds_numbers and not is_marked:
            warnings.append(
                f"data.path={corpus.path}: nothing marks the documents of these tokens, so "
                f"attention crosses them; set data.separator to the token that ends a document"
            )
    return warnings


# ---- one split of one corpus ----


class Split(NamedTuple):
    """Tokens `first` ... `last` - 1 of a corpus."""

    corpus: Corpus
    first: int
    last: int
    name: str  # for messages


def split_source(
    split: Split,
    packing: str,
    *,
    separator: int,
    seq_len: int,
    vocab_size: int,
    seed: int,
    number: int = 0,
    baseline: float | None = None,
) -> Source:
    """Returns the source of the rows of a split, which is source `number` of a mixture.

    `baseline` is that of a Source; without it, it is estimated from the first tokens. The other
    settings are those of `build`.
    """

    # Each source of a mixture has orders of its own. Else sources of the same size, perhaps the
    # same texts in two languages, would all give their row i at the same time.
    def order_key(epoch: int) -> int:
        return _shuffle_key(seed, epoch, 2 * number)

    if packing == "best_fit":
        read, size, kind = _packed_rows(split, seq_len, vocab_size, order_key)
    else:
        read, size, kind = _window_rows(split, seq_len, vocab_size, order_key)
    corpus, first, last = split.corpus, split.first, split.last
    documents = "" if separator >= 0 else "no document boundaries, "
    if corpus.document_starts is not None:
        # The numbers of the documents, from 1, that hold the first and the last token.
        numbers = np.searchsorted(corpus.document_starts, (first, last - 1), side="right")
        documents = f"{numbers[1] - numbers[0] + 1:,} documents, "
    if separator >= 0:
        documents += f"token {separator} ends documents, "
    if baseline is None:
        sample = token_range(corpus, first, min(last, first + ENTROPY_TOKENS))
        baseline = unigram_entropy(sample, vocab_size)
    added_bytes = None
    if corpus.tokenizer_folder:
        added_bytes = functools.partial(tokenizer.added_bytes, corpus.tokenizer_folder)
    return Source(
        lambda indices: split_documents(read(indices), separator),
        description=f"{corpus.path}: {documents}{last - first:,} tokens, {size:,} {kind}",
        baseline=baseline,
        size=size,
        token_bytes=corpus.token_bytes,
        added_bytes=added_bytes,
        identity={"data": corpus.digest, "tokenizer": corpus.tokenizer},
    )


class _Rows(NamedTuple):
    """The rows of a split, before a separator splits them further."""

    read: Callable[[np.ndarray], Batch]  # of sample indices
    size: int  # rows per epoch
    kind: str  # for the description


def _window_rows(
    split: Split, seq_len: int, vocab_size: int, order_key: Callable[[int], int]
) -> _Rows:
    """Returns windows of `seq_len` + 1 tokens; the last of them is only a target."""
    corpus = split.corpus
    num_tokens = split.last - split.first
    num_windows = (num_tokens - 1) // seq_len
    if num_windows < 1:
        raise ConfigError(
            f"data.path={corpus.path}: {split.name} has {num_tokens} tokens, too few for one "
            f"window of data.seq_len={seq_len} + 1; use more text, a shorter seq_len, or another "
            f"data.heldout"
        )
    order = _epoch_order(num_windows, order_key)

    def read(indices: np.ndarray) -> Batch:
        starts = split.first + seq_len * order(indices)
        rows = read_windows(corpus, starts, seq_len + 1, vocab_size)
        if corpus.document_starts is None:
            return to_batch(rows)
        return to_segmented_batch(rows, is_document_start(corpus, starts, seq_len + 1))

    return _Rows(read, num_windows, f"windows of {seq_len}")


def _packed_rows(
    split: Split, seq_len: int, vocab_size: int, order_key: Callable[[int], int]
) -> _Rows:
    """Returns rows of complete documents."""
    corpus = split.corpus
    num_tokens = split.last - split.first
    if corpus.document_starts is None:
        raise ConfigError(
            f"data.packing=best_fit: data.path={corpus.path} does not mark where documents begin; "
            f"prepare the text with `meshtrain prepare`, or use data.packing=windows"
        )
    if not num_tokens:
        raise ConfigError(
            f"data.path={corpus.path}: {split.name} has 0 tokens; use more text, or another "
            f"data.heldout"
        )
    packing = load_or_pack(corpus, split.first, split.last, seq_len)
    num_rows = len(packing.rows) - 1
    order = _epoch_order(num_rows, order_key)

    def read(indices: np.ndarray) -> Batch:
        return read_rows(corpus, packing, order(indices), seq_len, vocab_size)

    filled = num_tokens / (num_rows * seq_len)
    return _Rows(read, num_rows, f"rows of {seq_len}, {filled:.2%} filled")


def unigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """Returns the entropy of the frequencies of these tokens."""
    return entropy(count_tokens(tokens, vocab_size))


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns how often each token below `vocab_size` occurs, (V,) int64."""
    counts = np.zeros(vocab_size, np.int64)
    chunk = 1 << 20  # tokens counted at a time
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        is_valid = (part >= 0) & (part < vocab_size)
        # bincount accepts no uint64.
        counts += np.bincount(part[is_valid].astype(np.int64), minlength=vocab_size)
    return counts


def entropy(counts: np.ndarray) -> float:
    """Returns the entropy of the token frequencies, in nats: the loss without any context."""
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


# ---- the order of the rows ----


def _epoch_order(size: int, order_key: Callable[[int], int]) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from sample indices to rows.

    Each epoch of `size` samples is shuffled with its own key, `order_key(epoch)`.
    """

    @functools.lru_cache(maxsize=8)
    def rows_of_block(block: int) -> np.ndarray:
        samples = np.arange(block * BLOCK, (block + 1) * BLOCK)
        epochs, within = np.divmod(samples, size)
        rows = np.empty_like(within)
        for epoch in np.unique(epochs):
            selected = epochs == epoch
            rows[selected] = permute(within[selected], size, key=order_key(int(epoch)))
        return rows

    def order(indices: np.ndarray) -> np.ndarray:
        blocks, within = np.divmod(indices, BLOCK)
        rows = np.empty_like(within)
        for block in np.unique(blocks):
            selected = blocks == block
            rows[selected] = rows_of_block(int(block))[within[selected]]
        return rows

    return order


def _shuffle_key(seed: int, *numbers: int) -> int:
    # A last number of 0 changes nothing: numpy fills the entropy with zeros.
    entropy = (seed, *map(int, numbers))
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
