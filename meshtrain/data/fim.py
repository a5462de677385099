"""Documents written for filling in the middle: a model learns to write text between two others.

A document is cut at two places into prefix, middle and suffix, and written as PSM,

    <prefix> PREFIX <suffix> SUFFIX <middle> MIDDLE

or as SPM, <prefix> <suffix> SUFFIX <middle> PREFIX MIDDLE, where <...> are tokens of their own
(Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022, with joint
training and its second SPM). The places are between characters, and the three texts are tokenized
each by itself, as they are when the model is used. What can't be read as text is cut between
tokens: part of a character, or special tokens.

Rows keep their length. The documents of a row get longer by three tokens, and what no longer fits
at its end is left out. The choices depend on the seed and the index of the sample alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.corpus import Corpus
from meshtrain.data.source import Batch
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

# B batch, S sequence, F tokens of a document in a row

# The tokens of prefix, suffix and middle in well-known tokenizers.
SPELLINGS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
NUMBER = 1 << 20  # of this use of the seed; other uses have small numbers


class Filling(NamedTuple):
    """How documents are written."""

    rate: float  # share of the documents
    spm_rate: float  # share of these that are written as SPM
    prefix: int
    suffix: int
    middle: int
    end: int | None  # the token that ends documents, which stays there; None: unknown
    tokenizer: Tokenizer | None  # None: documents are cut between tokens
    token_bytes: np.ndarray | None  # (V,) of the tokenizer: 0 for special tokens


def rate_faults(rate: float, spm_rate: float) -> list[str]:
    """Returns a fault for each of the rates that is no share."""
    rates = {"data.fim_rate": rate, "data.fim_spm_rate": spm_rate}
    return [
        f"{key}={value}: use a share from 0.0 to 1.0"
        for key, value in rates.items()
        if not 0 <= value <= 1
    ]


def load(
    rate: float,
    spm_rate: float,
    tokens: Sequence[int | str],
    corpus: Corpus,
    *,
    separator: int,
    vocab_size: int,
) -> Filling | None:
    """Returns how the documents of a corpus are written; None for a rate of 0.

    `tokens` are those of prefix, suffix and middle, as ids or as their tokenizer spells them;
    empty: the tokenizer has one of SPELLINGS. `separator` ends documents if the tokenizer is not
    known. Raises ConfigError if there are no such tokens.
    """
    if not rate:
        return None
    tokenizer = None
    if corpus.tokenizer_path:
        tokenizer = tokenizers.load(corpus.tokenizer_path)
    elif corpus.tokenizer == tokenizers.BYTES:
        tokenizer = tokenizers.load(tokenizers.BYTES)
    prefix, suffix, middle = _ids(tokens, tokenizer, corpus.path, vocab_size)
    end = tokenizer.eos if tokenizer else separator if separator >= 0 else None
    token_bytes = tokenizer.token_bytes() if tokenizer else None
    return Filling(rate, spm_rate, prefix, suffix, middle, end, tokenizer, token_bytes)


def _ids(
    tokens: Sequence[int | str], tokenizer: Tokenizer | None, path: str, vocab_size: int
) -> list[int]:
    """Returns the ids of the three tokens."""
    ways = "set data.fim_tokens to those of prefix, suffix and middle, as ids or texts"
    ids_of = {}
    if tokenizer:
        ids_of = {tokenizer.spelling(number): number for number in range(tokenizer.vocab_size)}
    if not tokens:
        found = next((names for names in SPELLINGS if ids_of.keys() >= {*names}), None)
        if found is None:
            known = "its tokenizer has none" if tokenizer else "it has no tokenizer"
            raise ConfigError(
                f"data.fim_rate: data.path={path} needs tokens such as <|fim_prefix|>, and {known}"
                f"; {ways}"
            )
        tokens = found
    if len(tokens) != 3:
        raise ConfigError(f"data.fim_tokens={tokens}: are {len(tokens)}, not three; {ways}")
    ids = [ids_of.get(token, -1) if isinstance(token, str) else token for token in tokens]
    for token, number in zip(tokens, ids, strict=True):
        if not isinstance(number, int) or not 0 <= number < vocab_size:
            raise ConfigError(
                f"data.fim_tokens={tokens}: {token!r} is no token below "
                f"data.vocab_size={vocab_size}; {ways}"
            )
    if len(set(ids)) < 3:
        raise ConfigError(f"data.fim_tokens={tokens}: two are the same; {ways}")
    return ids


def reader(
    read: Callable[[np.ndarray], Batch], filling: Filling, seed: int
) -> Callable[[np.ndarray], Batch]:
    """Returns the function that reads samples and writes some of their documents for filling."""

    def read_filled(indices: np.ndarray) -> Batch:
        batch = read(indices)
        rows = [_documents(batch, row) for row in range(len(indices))]
        chosen: list[_Cut] = []
        for row, index in enumerate(indices):
            rng = np.random.default_rng((seed, int(index), NUMBER))
            for number, document in enumerate(rows[row]):
                is_filled, *choices = rng.random(4)
                if is_filled < filling.rate and _content(document, filling.end).size > 1:
                    chosen.append(_Cut(row, number, *choices))
        if not chosen:
            return batch
        contents = [_content(rows[cut.row][cut.number], filling.end) for cut in chosen]
        pieces = _cut_all(contents, chosen, filling)
        for cut, content, (prefix, middle, suffix) in zip(chosen, contents, pieces, strict=True):
            rest = rows[cut.row][cut.number][len(content) :]
            if cut.spm < filling.spm_rate:
                order = [filling.prefix, filling.suffix], suffix, [filling.middle], prefix, middle
            else:
                order = [filling.prefix], prefix, [filling.suffix], suffix, [filling.middle], middle
            rows[cut.row][cut.number] = np.concatenate([*order, rest]).astype(np.int32)
        changed = sorted({cut.row for cut in chosen})
        return _rewritten(batch, changed, rows)

    return read_filled


class _Cut(NamedTuple):
    """A document to write for filling: document `number` of a row, and what is drawn for it."""

    row: int
    number: int
    spm: float
    first: float
    second: float


def _content(document_F: np.ndarray, end: int | None) -> np.ndarray:
    """Returns the document without the token that ends it."""
    return document_F[:-1] if end is not None and document_F[-1:] == end else document_F


def _documents(batch: Batch, row: int) -> list[np.ndarray]:
    """Returns the tokens (F,) of each document in a row, with the last target if it counts."""
    tokens, targets, weights = batch.tokens[row], batch.targets[row], batch.weights[row]
    starts = [0]
    if batch.positions is not None:
        starts = np.flatnonzero(batch.positions[row] == 0).tolist()
    documents = []
    for first, last in zip(starts, [*starts[1:], len(tokens)], strict=True):
        if last - first > 1 and not weights[first:last].any():
            continue  # padding
        document = tokens[first:last]
        if weights[last - 1]:
            document = np.append(document, targets[last - 1])
        documents.append(document)
    return documents


def _cut_all(
    contents: list[np.ndarray], cuts: list[_Cut], filling: Filling
) -> list[list[np.ndarray]]:
    """Returns prefix, middle and suffix of each document, as tokens."""
    pieces: list[list[np.ndarray]] = []
    texts: list[str] = []
    of_texts: list[int] = []  # documents whose pieces are tokenized
    for content, cut in zip(contents, cuts, strict=True):
        text = _text_of(content, filling)
        if text is None:
            pieces.append(_cut_at(content, cut))
            continue
        of_texts.append(len(pieces))
        pieces.append([])
        texts += _cut_at(text, cut)
    if filling.tokenizer and texts:
        encoded = filling.tokenizer.encode_batch(texts)
        for number, document in enumerate(of_texts):
            pieces[document] = encoded[3 * number : 3 * number + 3]
    return pieces


def _cut_at(content: str | np.ndarray, cut: _Cut) -> list:
    """Returns the three parts of a text or of tokens."""
    first, second = sorted(int(share * (len(content) + 1)) for share in (cut.first, cut.second))
    return [content[:first], content[first:second], content[second:]]


def _text_of(content: np.ndarray, filling: Filling) -> str | None:
    """Returns the text of a document; None if its tokens are not the tokens of a text."""
    if filling.tokenizer is None or not filling.token_bytes[content].all():
        return None
    text = filling.tokenizer.decode(content)
    return None if "\N{REPLACEMENT CHARACTER}" in text else text


def _rewritten(batch: Batch, changed: list[int], rows: list[list[np.ndarray]]) -> Batch:
    """Returns the batch with the documents `rows[row]` in each of the rows `changed`."""
    new = Batch(*(None if array is None else array.copy() for array in batch))
    length = batch.tokens.shape[1]
    for row in changed:
        for array in new:
            if array is not None:
                array[row] = 0
        first = 0
        for number, document in enumerate(rows[row]):
            last = min(length, first + len(document))
            # A target is the next token, which the last one of a document lacks.
            with_target = min(last, first + len(document) - 1)
            new.tokens[row, first:last] = document[: last - first]
            new.targets[row, first:with_target] = document[1 : with_target - first + 1]
            new.weights[row, first:with_target] = 1
            _mark_segment(new, row, slice(first, last), number)
            first = last
        _mark_segment(new, row, slice(first, length), len(rows[row]))  # padding
    return new


def _mark_segment(batch: Batch, row: int, place: slice, number: int) -> None:
    if batch.positions is not None and batch.segments is not None:
        batch.positions[row, place] = np.arange(place.stop - place.start)
        batch.segments[row, place] = number
