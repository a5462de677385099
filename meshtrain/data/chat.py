"""Rows of conversations, written by the tokenizer's chat template: only what the assistant says is learned.

Conversations are read from JSON lines, rendered, and reduced to the tokens of the replies.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data import chat_template, files, identity, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate, Span
from meshtrain.data.corpus import Corpus
from meshtrain.data.prepare import inputs
from meshtrain.data.source import Batch, Source, check_sizes
from meshtrain.errors import ConfigError, choice_faults, import_optional

# T tokens of a text

Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    first_reply: int = 0  # messages before it are context, also those of the assistant
    tools: list | None = None  # JSON schemas of functions, which some templates write


def render(template: ChatTemplate, one: Conversation) -> tuple[str, list[Span]]:
    """Returns the text of a conversation, and the spans of it that are learned: what the assistant wrote.

    {% generation %} blocks mark them. In a template without such blocks a reply begins where the prompt for it ends,
    and ends where the conversation up to it ends. Raises ValueError if the template rejects the conversation, or if
    the texts of its beginnings are not beginnings of its text.
    """
    full, generated = template.render(one.messages, one.tools)
    if template.marks_replies:
        start = _start_of_reply(template, one, one.first_reply, full) if one.first_reply else 0
        spans = [(max(first, start), last) for first, last in generated if last > start]
    else:
        spans = [
            (
                _start_of_reply(template, one, number, full),
                _end_of_reply(template, one, number, full),
            )
            for number, message in enumerate(one.messages)
            if message["role"] == "assistant" and number >= one.first_reply
        ]
    if not any(first < last for first, last in spans):
        raise ValueError("the chat template writes nothing for the assistant")
    return full, spans


def _start_of_reply(template: ChatTemplate, one: Conversation, number: int, full: str) -> int:
    """Returns where the reply that is message `number` begins in the text."""
    prompt = template.render(one.messages[:number], one.tools, add_generation_prompt=True).text
    return _checked_length(prompt, full, number)


def _end_of_reply(template: ChatTemplate, one: Conversation, number: int, full: str) -> int:
    """Returns where message `number` ends in the text."""
    if number + 1 == len(one.messages):
        return len(full)
    text = template.render(one.messages[: number + 1], one.tools).text
    return _checked_length(text, full, number + 1)


def _checked_length(text: str, full: str, number: int) -> int:
    if not full.startswith(text):
        raise ValueError(
            f"the chat template writes the first {number} messages differently if more follow, so the replies cannot "
            f"be found in its text; use a template with {{% generation %}} blocks around them"
        )
    return len(text)


def reply_encoder(file: Path) -> Encode:
    """Returns the function from texts to token ids (T,) int32 and the characters of each, (T, 2).

    Unlike `Tokenizer.encode`, special tokens that are spelled in a text become these tokens, as transformers has it
    for what a chat template wrote.
    """
    package = import_optional("tokenizers")
    model = package.Tokenizer.from_file(str(file))
    model.no_truncation()
    model.no_padding()

    def encode(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [
            (np.array(one.ids, np.int32), np.array(one.offsets, np.int64).reshape(-1, 2))
            for one in model.encode_batch([*texts], add_special_tokens=False)
        ]

    return encode


def is_inside(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Returns which tokens (T,) overlap one of the spans; `offsets` (T, 2) are their characters."""
    first, last = offsets.T
    found = np.zeros(len(offsets), bool)
    for start, end in spans:
        found |= (first < end) & (last > start)
    return found


MAX_FAULTS_SHOWN = 5


def read_conversations(files: list[Path]) -> Iterator[tuple[str, Conversation]]:
    """Yields FILE:LINE and the conversation of each line; raises ConfigError that names every faulty line.

    A line is an object with `messages`, a list of objects with `role` and `content`, or with `prompt` and
    `completion`, each a text or such a list. Blank lines are ignored; `.gz` files are decompressed.
    """
    faults = []
    options = inputs.ReadOptions(field="", separator="", forbidden="")
    for record in inputs.read_records(files, options, len):
        place = f"{files[record.next_position.file]}:{record.next_position.number}"
        try:
            yield place, _parse_conversation(record.data)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    report_faults(faults)


def report_faults(faults: list[str]) -> None:
    """Raises ConfigError with the first faults, if there are any."""
    if not faults:
        return
    num_more = len(faults) - MAX_FAULTS_SHOWN
    more = [f"and {num_more} more"] if num_more > 0 else []
    raise ConfigError(*faults[:MAX_FAULTS_SHOWN], *more)


def _parse_conversation(line: bytes) -> Conversation:
    found = inputs.parse_json(line)
    if not isinstance(found, dict):
        raise ValueError('is no object; use {"messages": [...]}')
    tools = found.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools is {type(tools).__name__}, not a list")
    if "messages" in found:
        prompt, replies = [], _messages("messages", found["messages"], role="")
    elif {"prompt", "completion"} <= found.keys():
        prompt = _messages("prompt", found["prompt"], role="user")
        replies = _messages("completion", found["completion"], role="assistant")
    else:
        raise ValueError("has neither `messages` nor `prompt` and `completion`")
    if not any(message["role"] == "assistant" for message in replies):
        raise ValueError("no message of the assistant, so there is nothing to learn")
    return Conversation([*prompt, *replies], len(prompt), tools or None)


def _messages(name: str, found: Any, *, role: str) -> list[dict[str, Any]]:
    """Returns a list of messages; a text is one of `role`, unless that is ""."""
    if role and isinstance(found, str):
        found = [{"role": role, "content": found}]
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else type(found).__name__
        raise ValueError(f"{name} is {kind}, not a list of messages")
    for number, message in enumerate(found):
        where = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {type(message).__name__}, not an object")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where} has no role; use user, assistant, system or tool")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content")
        if not isinstance(content, str | list | None):
            raise ValueError(f"{where}: content is {type(content).__name__}, not a text")
    return found


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
    for place, one in read_conversations([*found]):
        try:
            text, found_spans = render(template, one)
            texts.append(text)
            spans.append(found_spans)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    report_faults(faults)
    if not texts:
        raise ConfigError(
            f"data.path={path}: holds no conversation; give JSON lines with `messages`"
        )
    # A fixed seed, so that the held-out end is a fair sample, and the same on every machine.
    order = np.random.default_rng(0).permutation(len(texts))
    encode = reply_encoder(tokenizer.file)
    ids, masks = [], []
    for group in np.array_split(order, -(-len(order) // GROUP)):
        for number, (one, offsets) in zip(group, encode([texts[i] for i in group]), strict=True):
            ids.append(one)
            masks.append(is_inside(offsets, spans[number]))
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
