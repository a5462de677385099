"""Rows of conversations, written by the tokenizer's chat template: only what the assistant says is learned."""

import dataclasses
import datetime
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.data import chat_template, conversations, files, identity, inputs, replies, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.corpus import Corpus
from meshtrain.data.source import Batch, Source, check_sizes
from meshtrain.errors import ConfigError, choice_faults

# N conversations, T tokens of all of them

EXTENSIONS = (".jsonl", ".ndjson", ".json")  # files to read in a folder, perhaps with .gz
# What `strftime_now` of a template writes into the training data: the date that Llama's templates have by default.
# With the current date the data of a run that resumes tomorrow would differ.
DATE = datetime.datetime(2024, 7, 26)
GROUP = 1000  # conversations that are tokenized together


class Learned(NamedTuple):
    """Conversations as one stream of tokens, shuffled with a fixed seed, and which of the tokens are learned."""

    corpus: Corpus
    is_learned: np.ndarray  # (T,) uint8
    warnings: list[str]


def build(
    *,
    path: str,
    tokenizer_path: str,
    seq_len: int,
    vocab_size: int,
    heldout: float,
    seed: int,
    split: str,
    packing: str = "windows",
    mixture: tuple = (),
    **unused,
) -> Source:
    """Returns the "train" or "heldout" split of the conversations in `path`: JSON lines, or a folder of them.

    conversations.py says what a line holds. `tokenizer_path` is a folder with a tokenizer.json and a chat template.
    A token has weight 1 if its target was written by the assistant, which includes what the template writes at the
    end of a reply. `packing` is that of tokens.py, with a conversation as a document. The last `heldout` fraction of
    the conversations is held out, at least one if it is above 0. Raises ConfigError if the data is unusable.
    """
    check_sizes(seq_len, vocab_size, seed)
    _check(tokenizer_path, heldout=heldout, packing=packing, mixture=mixture)
    learned = load(path, tokenizer_path)
    tokens.check_tokenizers([learned.corpus], vocab_size)
    starts = learned.corpus.document_starts
    num_train = len(starts) - 1 - int(np.ceil((len(starts) - 1) * heldout))
    border, end = int(starts[num_train]), learned.corpus.num_tokens
    first, last = (0, border) if split == "train" else (border, end)
    settings = dict(seq_len=seq_len, vocab_size=vocab_size, seed=seed, separator=-1)
    name = f"the {split} split of data.heldout={heldout}"
    source, marks = (
        tokens.of_split(tokens.Split(corpus, first, last, name), packing, **settings)
        for corpus in (
            learned.corpus,
            learned.corpus._replace(file_tokens=[learned.is_learned]),
        )
    )

    def read(indices: np.ndarray) -> Batch:
        batch = source.read(indices)
        # In the same rows, with marks in place of tokens, the targets say whether the next token is learned.
        return batch._replace(weights=batch.weights * marks.read(indices).targets)

    found = learned.is_learned[first:last] > 0
    description = source.description.replace(" documents,", " conversations,", 1)
    return dataclasses.replace(
        source,
        read=read,
        description=f"{description}, {found.mean():.2%} of the tokens learned",
        baseline=tokens.unigram_entropy(
            learned.corpus.file_tokens[0][first:last][found], vocab_size
        ),
        warnings=[*learned.warnings, *_length_warnings(starts, packing, seq_len)],
    )


def _check(tokenizer_path: str, *, heldout: float, packing: str, mixture: tuple) -> None:
    """Raises ConfigError with every fault of these settings."""
    faults = choice_faults("data.packing", packing, tokens.PACKINGS)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    if mixture:
        faults.append(f"data.mixture={mixture}: put the conversations into one folder, data.path")
    if not tokenizer_path:
        faults.append("data.tokenizer_path is empty: give the folder of the model's tokenizer")
    if faults:
        raise ConfigError(*faults)


def _length_warnings(starts: np.ndarray, packing: str, seq_len: int) -> list[str]:
    num_long = int(np.sum(np.diff(starts) > seq_len))
    if packing == "windows":
        return [
            "data.packing=windows splits conversations at the ends of rows; best_fit keeps them together"
        ]
    if not num_long:
        return []
    return [
        f"data.seq_len={seq_len}: {num_long:,} of {len(starts) - 1:,} conversations are longer and are split; their "
        f"later parts do not see the earlier ones"
    ]


def load(path: str, tokenizer_path: str) -> Learned:
    """Returns the conversations in a file or a folder; raises ConfigError that names every faulty line."""
    with files.report_errors(f"data.path={path}"):
        found = _find(path)
        # Both splits need the same conversations, which are tokenized once.
        return _load(path, tuple(found), inputs.fingerprint(found), tokenizer_path)


def _find(path: str) -> list[Path]:
    if fault := files.path_fault(path):
        raise ConfigError(f"data.path={path}: {fault}; give a .jsonl file or a folder of them")
    found = [Path(path)]
    if found[0].is_dir():
        names, _ = files.find(found[0], "*", key="data.path", skip=lambda name: name[0] == ".")
        found = [name for name in names if inputs.extension_of(name) in EXTENSIONS]
    if not found or inputs.extension_of(found[0]) not in EXTENSIONS:
        raise ConfigError(
            f"data.path={path}: no file ends in {', '.join(EXTENSIONS)}; give conversations as JSON lines"
        )
    return found


@functools.lru_cache(maxsize=1)
def _load(path: str, found: tuple[Path, ...], fingerprint: str, tokenizer_path: str) -> Learned:
    tokenizer = tokenizers.load(tokenizer_path)
    if tokenizer.kind != "huggingface":
        raise ConfigError(
            f"data.tokenizer_path={tokenizer_path}: chat templates need a tokenizer.json, and this is a "
            f"{tokenizer.kind} tokenizer; give the folder of a Hugging Face model"
        )
    template = chat_template.load(tokenizer.file.parent, now=DATE)
    texts, spans, faults = [], [], []
    for place, one in conversations.read([*found]):
        try:
            text, found_spans = replies.render(template, one)
            texts.append(text)
            spans.append(found_spans)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    conversations.report(faults)
    if not texts:
        raise ConfigError(
            f"data.path={path}: holds no conversation; give JSON lines with `messages`"
        )
    # A fixed seed, so that the held-out end is a fair sample, and the same on every machine.
    order = np.random.default_rng(0).permutation(len(texts))
    encode = replies.encoder(tokenizer.file)
    ids, masks = [], []
    for group in np.array_split(order, -(-len(order) // GROUP)):
        for number, (one, offsets) in zip(group, encode([texts[i] for i in group]), strict=True):
            ids.append(one)
            masks.append(replies.is_inside(offsets, spans[number]))
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    stream, is_learned = np.concatenate(ids), np.concatenate(masks).astype(np.uint8)
    digests = [
        identity.of_tokens(stream, starts, full=True),
        identity.of_tokens(is_learned, full=True),
    ]
    corpus = Corpus(
        path,
        [path],
        [stream],
        np.array([0, len(stream)]),
        document_starts=starts,
        digest=identity.of_parts(digests),
        tokenizer=tokenizers.digest(tokenizer),
        vocab_size=tokenizer.vocab_size,
        token_bytes=tokenizer.token_bytes(),
    )
    date = f"data.path={path}: the chat template asks for the date; the training data says {DATE:%d %b %Y}"
    return Learned(corpus, is_learned, [date] if template.reads_clock else [])
