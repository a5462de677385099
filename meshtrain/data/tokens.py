"""Rows of tokens from files: windows of a long stream, or packed complete documents.

corpus.py reads the files.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshtrain import object_store
from meshtrain.config.rounding import to_12_digits
from meshtrain.data import fim, prepared, tokenizer
from meshtrain.data.corpus import (
    Corpus,
    is_document_start,
    load_corpus,
    prefetch,
    read_windows,
    token_range,
)
from meshtrain.data.document_order import DocumentOrder
from meshtrain.data.mixture import Shares, describe, digest, mix, permute
from meshtrain.data.packing import load_or_pack, ranges_of, read_rows
from meshtrain.data.phases import Entry, first_steps, parse, parse_parts, place
from meshtrain.data.remote import CACHE_GB
from meshtrain.data.source import (
    Batch,
    Part,
    Source,
    Timeline,
    check_sizes,
    last_sample,
    split_documents,
    to_batch,
    to_segmented_batch,
)
from meshtrain.errors import ConfigError, choice_faults, minimum_faults

# B batch, S sequence

PACKINGS = ("windows", "best_fit")
WEIGHTS = ("tokens", "documents")  # what the weights of a mixture are shares of
EMPTY = {"data.path": "data.path=''", "data.mixture": "data.mixture=()"}
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
    heldout_path: str = "",
    phases: tuple = (),
    weights: str = "tokens",
    max_epochs: float = 0.0,
    shuffle_documents: bool = False,
    fim_rate: float = 0.0,
    fim_spm_rate: float = 0.5,
    fim_tokens: tuple = (),
    cache_gb: float = CACHE_GB,
    field: str = "text",
    template: str = "",
    num_workers: int = 0,  # for rows:build, as index_path
    index_path: str = "",
    learned: str = "replies",  # for chat:build
) -> Source:
    """Returns the "train" or "heldout" split of `path`; raises ConfigError if the data is unusable.

    A file is memory-mapped: `.npy`, raw numbers of `dtype` ("": the bytes of a text), or
    Megatron-LM's PREFIX.bin with its PREFIX.idx. The shards of a folder written by
    `meshtrain prepare` are mapped too, and train.bin and val.bin of a folder of nanoGPT. Any other
    folder is read into memory: the bytes of all files that match `pattern`, except those in
    subfolders named in `exclude`.
    The last `heldout` fraction of the tokens is held out; the files of a folder are shuffled first.
    With `heldout_path` all of that is held out instead, and nothing of the others.
    Each epoch visits each row once, in a new random order; sample i is the i-th over all epochs.

    Packing "windows": the stream is split into rows of `seq_len` tokens, even within documents; a
    last row that is too short is dropped. The last target of a row is the token after the row.
    "best_fit": rows of complete documents; only documents longer than `seq_len` are split. With
    both, attention stays within a document, and each token of a document except the first is a
    target once. With `shuffle_documents` the documents of windows have a new order in each epoch:
    see document_order.py.
    Each file of a folder of text is a document. A raw file does not mark documents: each row is
    one, and "best_fit" is an error. The token `separator` ends documents as well, in any data; -1:
    no token does.
    `mixture` ((path, weight), ...) replaces `path`: samples come from each path in proportion to
    its weight, which is a share of the tokens, or of the documents if `weights` says so. `phases`
    ((length, mixture), ...) are mixtures of parts of the run, one after the other: see phases.py.
    Of them the last one is held out. A run that would read a path more than `max_epochs` times is
    rejected; 0: there is no limit.
    A share `fim_rate` of the documents of training rows is written for filling in the middle: see
    fim.py.
    A path may be the URL of a prepared folder on an object store; up to `cache_gb` of all data are
    cached on the local disk.
    """
    faults = _row_faults(tokenizer_path, field, template)
    faults += learned_faults(learned)
    faults += minimum_faults(0, {"data.cache_gb": cache_gb})

    def open_split(one: str, *, is_heldout: bool) -> Split:
        split = _split_of(
            one,
            heldout,
            heldout_path,
            is_heldout=is_heldout,
            dtype=dtype,
            vocab_size=vocab_size,
            pattern=pattern,
            exclude=exclude,
            cache_gb=cache_gb,
        )
        return _with_warnings(split, dtype, separator)

    return assemble(
        open_split,
        faults,
        path=path,
        seq_len=seq_len,
        vocab_size=vocab_size,
        separator=separator,
        heldout=heldout,
        seed=seed,
        split=split,
        packing=packing,
        mixture=mixture,
        heldout_path=heldout_path,
        phases=phases,
        weights=weights,
        max_epochs=max_epochs,
        shuffle_documents=shuffle_documents,
        fim_rate=fim_rate,
        fim_spm_rate=fim_spm_rate,
        fim_tokens=fim_tokens,
    )


class OpenSplit(Protocol):
    def __call__(self, path: str, /, *, is_heldout: bool) -> "Split": ...


def assemble(
    open_split: OpenSplit,
    faults: Sequence[str],
    *,
    path: str,
    seq_len: int,
    vocab_size: int,
    heldout: float,
    seed: int,
    split: str,
    separator: int = -1,
    packing: str = "windows",
    mixture: tuple = (),
    heldout_path: str = "",
    phases: tuple = (),
    weights: str = "tokens",
    max_epochs: float = 0.0,
    shuffle_documents: bool = False,
    fim_rate: float = 0.0,
    fim_spm_rate: float = 0.5,
    fim_tokens: tuple = (),
) -> Source:
    """Returns the source of a run from the splits of its paths; the settings are those of `build`.

    `open_split` opens the training part of a path, or the held-out one. Raises ConfigError for
    `faults`, which the caller found, and for those of these settings.
    """
    check_sizes(seq_len, vocab_size, seed, separator)
    faults = [*_packing_faults(packing, shuffle_documents=shuffle_documents), *faults]
    faults += choice_faults("data.weights", weights, WEIGHTS)
    faults += minimum_faults(0, {"data.max_epochs": max_epochs})
    faults += fim.rate_faults(fim_rate, fim_spm_rate)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    entries = _entries(path, mixture, phases)
    if faults:
        raise ConfigError(*faults)

    is_heldout = split != "train"
    if is_heldout and heldout_path:
        entries = [Entry(1.0, ((heldout_path, 1.0),), is_path=True)]
    elif is_heldout:
        entries = entries[-1:]
    paths, shares = _shares(entries)
    splits = []
    for one in paths:
        with _named(heldout_path if one == heldout_path else ""):
            splits.append(open_split(one, is_heldout=is_heldout))
    corpora = [one.corpus for one in splits]
    check_tokenizers(corpora, vocab_size)

    sources = []
    for number, one in enumerate(splits):
        source = split_source(
            one,
            packing,
            separator=separator,
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
            number=number,
            shuffle_documents=shuffle_documents and not is_heldout,
        )
        sources.append(source)
    if weights == "documents" and not all(entry.is_path for entry in entries):
        shares = [np.multiply(row, [_document_tokens(one) for one in splits]) for row in shares]
    for_filling = fim.load(
        fim_rate,
        fim_spm_rate,
        fim_tokens,
        corpora[0],
        separator=separator,
        vocab_size=vocab_size,
    )

    def complete(source: Source, warnings: Sequence[str] = ()) -> Source:
        of_corpora = [line for corpus in corpora for line in corpus.warnings]
        read = source.read
        if for_filling and not is_heldout:
            read = fim.reader(read, for_filling, seed)
        return dataclasses.replace(source, read=read, warnings=[*of_corpora, *warnings])

    def mixed(first_samples: Sequence[int]) -> Source:
        return mix(sources, paths, _phases_of(entries, shares, first_samples, seed))

    if len(entries) == 1 and entries[0].is_path:
        source = dataclasses.replace(
            sources[0],
            parts=lambda first, last: [Part(paths[0], last - first, sources[0].size)],
        )
    else:
        source = mixed(range(len(entries)))

    def in_run(run: Timeline) -> Source:
        first = first_steps(entries, run.num_steps)
        phases = _phases_of(entries, shares, first, seed)
        digests = [digest(sources, phase) for phase in phases]
        placed = place(first, digests, run)
        ran = dataclasses.replace(source, phases=placed)
        if len(entries) > 1:
            begin = zip(first, phases, strict=True)
            texts = [
                f"from step {step:,} {', '.join(describe(phase, paths))}" for step, phase in begin
            ]
            ran = dataclasses.replace(
                mixed([phase.sample for phase in placed]),
                description="; ".join(texts),
                phases=placed,
            )
        check_epochs(ran, run, max_epochs)
        late = [number for number, step in enumerate(first) if step >= run.num_steps > 0]
        return complete(
            ran,
            [
                f"data.phases[{number}]: begins at step {first[number]:,}, and "
                f"train.steps={run.num_steps:,}: the run does not read it"
                for number in late
            ],
        )

    return dataclasses.replace(complete(source), in_run=None if is_heldout else in_run)


def _row_faults(tokenizer_path: str, field: str, template: str) -> list[str]:
    """Returns a fault for each key that only data of another kind reads."""
    faults = []
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
    return faults


def learned_faults(learned: str) -> list[str]:
    if learned == "replies":
        return []
    return [
        f"data.learned={learned}: only data.build=meshtrain.data.chat:build reads it; leave it out"
    ]


def unread_faults(name: str, unread: Mapping[str, Any]) -> list[str]:
    """Returns a fault for each of these keys that is set, and that only `build` reads.

    `name` is the function that does not read them.
    """
    parameters = inspect.signature(build).parameters
    return [
        f"data.{key}={value}: only data.build=meshtrain.data.tokens:build reads it, not {name}; "
        f"leave it out"
        for key, value in unread.items()
        if key in parameters and parameters[key].default not in (inspect.Parameter.empty, value)
    ]


def _packing_faults(packing: str, *, shuffle_documents: bool) -> list[str]:
    if packing == "best_fit" and shuffle_documents:
        return [
            "data.shuffle_documents=True: data.packing=best_fit has complete documents in its "
            "rows, which are shuffled already; set it to False"
        ]
    return choice_faults("data.packing", packing, PACKINGS)


def _entries(path: str, mixture: tuple, phases: tuple) -> list[Entry]:
    """Returns the mixtures of the run; raises ConfigError unless one of the three is given."""
    given = {"data.path": path, "data.mixture": mixture, "data.phases": phases}
    given = {key: value for key, value in given.items() if value}
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(f'{key}={value}' for key, value in given.items())}: give one of them; "
            f"{[*given][-1]} needs {' and '.join(EMPTY[key] for key in [*given][:-1])}"
        )
    if phases:
        return parse(phases)
    if mixture:
        return [Entry(1.0, tuple(parse_parts("data.mixture", mixture)))]
    return [Entry(1.0, ((path, 1.0),), is_path=True)]


def _shares(entries: list[Entry]) -> tuple[list[str], list[np.ndarray]]:
    """Returns all paths, and for each entry the weight of each path."""
    if len(entries) == 1:  # a path may be named twice
        named, weights = zip(*entries[0].parts, strict=True)
        return list(named), [np.array(weights, np.float64)]
    weights_of_entries = [dict(entry.parts) for entry in entries]
    # In the order of their first phases, so that phases ahead change no number of a path.
    paths: list[str] = []
    for weight_of in weights_of_entries:
        paths += [path for path in weight_of if path not in paths]
    shares = []
    for weight_of in weights_of_entries:
        of_paths = [weight_of.get(path, 0.0) for path in paths]
        shares.append(np.array(of_paths, np.float64))
    return paths, shares


def _phases_of(
    entries: list[Entry], shares: list[np.ndarray], first_samples: Sequence[int], seed: int
) -> list[Shares]:
    phases = []
    given = zip(entries, shares, first_samples, strict=True)
    for number, (entry, weights, first) in enumerate(given):
        # The last number is odd: those of the sources' own orders are even.
        key = functools.partial(_block_key, seed, 2 * number + 1)
        phases.append(Shares.of(weights, first, None if entry.is_path else key))
    return phases


def _block_key(seed: int, number: int, block: int) -> int:
    return _shuffle_key(seed, block, number)


def check_epochs(source: Source, run: Timeline, max_epochs: float) -> None:
    """Raises ConfigError if the run would read a part of its data more often than `max_epochs`."""
    if not max_epochs:
        return
    faults = []
    for part in source.parts(0, last_sample(run)):
        epochs = part.samples / part.size if part.size else 0.0
        if epochs > max_epochs:
            faults.append(
                f"data.max_epochs={max_epochs:g}: the run would read {part.name} {epochs:.3g} "
                f"times; lower its weight, or take fewer train.steps"
            )
    if faults:
        raise ConfigError(*faults)


def _split_of(
    path: str,
    heldout: float,
    heldout_path: str,
    *,
    is_heldout: bool,
    **corpus_settings: Any,
) -> "Split":
    """Returns the split of a path; `corpus_settings` are those of `load_corpus`."""
    share, key = heldout, f"data.heldout={heldout}"
    files = nanogpt_files(path)
    if files:
        path = files.heldout if is_heldout and files.heldout else files.train
        corpus_settings["dtype"] = corpus_settings["dtype"] or "uint16"
        if files.heldout:
            share, key = float(is_heldout), files.heldout
    if heldout_path:
        share, key = float(is_heldout), f"data.heldout_path={heldout_path}"
    return split_of(load_corpus(path, **corpus_settings), share, key, is_heldout=is_heldout)


def split_of(corpus: Corpus, share: float, key: str, *, is_heldout: bool) -> "Split":
    """Returns the last `share` of the tokens, or those before; `key` is for messages."""
    border = corpus.num_tokens - math.floor(to_12_digits(corpus.num_tokens * share))
    first, last = (border, corpus.num_tokens) if is_heldout else (0, border)
    name = "heldout" if is_heldout else "train"
    return Split(corpus, first, last, f"the {name} split of {key}")


@contextlib.contextmanager
def _named(heldout_path: str) -> Iterator[None]:
    """Names the key of held-out data of its own in errors; "": it is other data."""
    try:
        yield
    except ConfigError as error:
        if not heldout_path:
            raise
        faults = [one.replace("data.path=", "data.heldout_path=", 1) for one in error.faults]
        raise ConfigError(*faults) from error


class NanogptFiles(NamedTuple):
    """The token files of a folder that nanoGPT's prepare.py wrote."""

    train: str
    heldout: str  # "": there is none


def nanogpt_files(path: str) -> NanogptFiles | None:
    """Returns train.bin and val.bin of a folder; None if it has none, or files of another kind."""
    if object_store.is_url(path) or not os.path.isdir(path):
        return None
    train, heldout = (os.path.join(path, name) for name in ("train.bin", "val.bin"))
    others = [os.path.join(path, name) for name in ("train.idx", prepared.MANIFEST)]
    if not os.path.isfile(train) or any(map(os.path.exists, others)):
        return None
    return NanogptFiles(train, heldout if os.path.isfile(heldout) else "")


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


def _with_warnings(split: "Split", dtype: str, separator: int) -> "Split":
    """Adds a line if the tokens do not mark their documents.

    A file of text, without a dtype, may well be one document.
    """
    corpus = split.corpus
    is_marked = corpus.document_starts is not None or separator >= 0
    holds_numbers = dtype or corpus.path.endswith(".npy")
    if is_marked or not holds_numbers:
        return split
    line = (
        f"data.path={corpus.path}: nothing marks the documents of these tokens, so attention "
        f"crosses them; set data.separator to the token that ends a document"
    )
    return split._replace(corpus=corpus._replace(warnings=[*corpus.warnings, line]))


# ---- one split of one corpus ----


class Split(NamedTuple):
    """Tokens `first` ... `last` - 1 of a corpus."""

    corpus: Corpus
    first: int
    last: int
    name: str  # for messages
    documents: str = "documents"  # what they are called, for the description
    baseline: float | None = None  # of Source; None: estimated from the first tokens


def _num_documents(split: Split) -> int:
    """Returns the number of documents of a split of a corpus that marks them."""
    ends = (split.first, split.last - 1)
    # The numbers of the documents, from 1, that hold the first and the last token.
    numbers = np.searchsorted(split.corpus.document_starts, ends, side="right")
    return int(numbers[1] - numbers[0] + 1)


def _document_tokens(split: Split) -> float:
    """Returns the mean length of the documents; raises ConfigError if they are not marked."""
    if split.corpus.document_starts is None:
        raise ConfigError(
            f"data.weights=documents: data.path={split.corpus.path} does not mark its documents; "
            f"prepare the text with `meshtrain prepare`, or use data.weights=tokens"
        )
    return (split.last - split.first) / _num_documents(split)


def split_source(
    split: Split,
    packing: str,
    *,
    separator: int,
    seq_len: int,
    vocab_size: int,
    seed: int,
    number: int = 0,
    shuffle_documents: bool = False,
    stride: int = 0,
) -> Source:
    """Returns the source of the rows of a split, which is source `number` of a mixture.

    `stride` is that of `with_stride`. The other settings are those of `build`.
    """

    # Each source of a mixture has orders of its own. Else sources of the same size, perhaps the
    # same texts in two languages, would all give their row i at the same time.
    def order_key(epoch: int) -> int:
        return _shuffle_key(seed, epoch, 2 * number)

    if stride:
        rows = _strided_rows(split, seq_len, vocab_size, order_key, stride)
    elif packing == "best_fit":
        rows = _packed_rows(split, seq_len, vocab_size, order_key)
    else:
        document_order = None
        if shuffle_documents:
            document_order = _document_order(split, seed, 2 * number)
        rows = _window_rows(split, seq_len, vocab_size, order_key, document_order)
    corpus, first, last = split.corpus, split.first, split.last
    documents = "" if separator >= 0 else "no document boundaries, "
    if corpus.document_starts is not None:
        documents = f"{_num_documents(split):,} {split.documents}, "
    if separator >= 0:
        documents += f"token {separator} ends documents, "
    baseline = split.baseline
    if baseline is None:
        sample = token_range(corpus, first, min(last, first + ENTROPY_TOKENS))
        baseline = unigram_entropy(sample, vocab_size)
    added_bytes = None
    if corpus.tokenizer_path:
        added_bytes = functools.partial(tokenizer.added_bytes, corpus.tokenizer_path)

    def strided(stride: int) -> Source:
        return split_source(
            split._replace(baseline=baseline),
            packing,
            separator=separator,
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
            number=number,
            stride=stride,
        )

    return Source(
        lambda indices: split_documents(rows.read(indices), separator),
        description=f"{corpus.path}: {documents}{last - first:,} tokens, {rows.size:,} {rows.kind}",
        baseline=baseline,
        size=rows.size,
        token_bytes=corpus.token_bytes,
        added_bytes=added_bytes,
        identity={"data": corpus.digest, "tokenizer": corpus.tokenizer},
        prefetch=rows.prefetch if corpus.is_remote else None,
        strided=None if packing == "best_fit" else strided,
    )


class _Rows(NamedTuple):
    """The rows of a split, before a separator splits them further."""

    read: Callable[[np.ndarray], Batch]  # of sample indices
    size: int  # rows per epoch
    kind: str  # for the description
    prefetch: Callable[[np.ndarray], None]  # of samples whose data is on a store


def _document_order(split: Split, seed: int, number: int) -> DocumentOrder:
    corpus = split.corpus
    if corpus.document_starts is None:
        raise ConfigError(
            f"data.shuffle_documents=True: data.path={corpus.path} does not mark its documents; "
            f"prepare the text with `meshtrain prepare`, or set it to False"
        )
    return DocumentOrder(
        corpus,
        split.first,
        split.last,
        # Not 0, with which the key would be that of the order of windows.
        lambda epoch, group: _shuffle_key(seed, epoch, number, group + 1),
    )


def _window_rows(
    split: Split,
    seq_len: int,
    vocab_size: int,
    order_key: Callable[[int], int],
    document_order: DocumentOrder | None = None,
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
        if document_order:
            epochs = indices // num_windows
            read = document_order.read(epochs, starts, seq_len + 1, vocab_size)
            return to_segmented_batch(*read)
        rows = read_windows(corpus, starts, seq_len + 1, vocab_size)
        if corpus.document_starts is None:
            return to_batch(rows)
        return to_segmented_batch(rows, is_document_start(corpus, starts, seq_len + 1))

    def prefetch_windows(indices: np.ndarray) -> None:
        starts = split.first + seq_len * order(indices)
        if document_order:
            pieces = document_order.pieces(indices // num_windows, starts, seq_len + 1)
            prefetch(corpus, pieces.starts, pieces.lengths)
        else:
            prefetch(corpus, starts, np.full_like(starts, seq_len + 1))

    return _Rows(read, num_windows, f"windows of {seq_len}", prefetch_windows)


def _strided_rows(
    split: Split,
    seq_len: int,
    vocab_size: int,
    order_key: Callable[[int], int],
    stride: int,
) -> _Rows:
    """Returns windows of `seq_len` tokens that begin `stride` tokens apart.

    A window's targets are those of its tokens that no window before it has, so each token but the
    first of the stream is a target once. The last window ends where the stream ends. These are the
    windows of "Perplexity of fixed-length models" in the documentation of transformers.
    """
    corpus = split.corpus
    num_tokens = split.last - split.first
    if not 0 < stride < seq_len:
        raise ConfigError(
            f"eval.stride={stride}: windows have data.seq_len={seq_len} tokens, and must overlap; "
            f"use 1 to {seq_len - 1}"
        )
    if num_tokens < 2:
        raise ConfigError(
            f"data.path={corpus.path}: {split.name} has {num_tokens} tokens, too few to predict "
            f"one; use more text, or another data.heldout"
        )
    num_windows = 1 + max(0, -(-(num_tokens - seq_len) // stride))
    order = _epoch_order(num_windows, order_key)
    width = min(seq_len, num_tokens)

    def starts_of(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where windows begin, and where their tokens are read: no later than possible."""
        starts = split.first + stride * order(indices)
        return starts, np.minimum(starts, split.last - width)

    def read(indices: np.ndarray) -> Batch:
        starts, read_starts = starts_of(indices)
        read_BW = read_windows(corpus, read_starts, width, vocab_size)
        is_start_BW = np.zeros(read_BW.shape, bool)
        if corpus.document_starts is not None:
            is_start_BW = is_document_start(corpus, read_starts, width)
        # One column more than the model reads, and padding after the end of the stream.
        columns = np.arange(seq_len + 1)[None] + (starts - read_starts)[:, None]
        is_read = (columns < width) & (np.arange(seq_len + 1) < seq_len)[None]
        columns = np.minimum(columns, width - 1)
        rows = np.where(is_read, np.take_along_axis(read_BW, columns, axis=1), 0)
        is_start = is_read & np.take_along_axis(is_start_BW, columns, axis=1)
        if corpus.document_starts is None:
            batch = to_batch(rows)
        else:
            batch = to_segmented_batch(rows, is_start)
        # Tokens before this one are targets of the window before.
        first_new = np.where(starts == split.first, 1, seq_len - stride)
        is_new = np.arange(1, seq_len + 1)[None] >= first_new[:, None]
        return batch._replace(weights=batch.weights * (is_read[:, 1:] & is_new))

    def prefetch_windows(indices: np.ndarray) -> None:
        _, read_starts = starts_of(indices)
        prefetch(corpus, read_starts, np.full_like(read_starts, width))

    kind = f"windows of {seq_len} that begin {stride} apart"
    return _Rows(read, num_windows, kind, prefetch_windows)


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

    def prefetch_pieces(indices: np.ndarray) -> None:
        prefetch(corpus, *ranges_of(packing, order(indices)))

    filled = num_tokens / (num_rows * seq_len)
    return _Rows(read, num_rows, f"rows of {seq_len}, {filled:.2%} filled", prefetch_pieces)


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
