"""Rows of conversations, of which only the assistant's replies are learned.

Conversations are read from JSON lines, written by the tokenizer's chat template, and tokenized; the
tokens of replies have weight 1.
"""

import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain import foreign
from meshtrain.config.rounding import to_12_digits
from meshtrain.data import chat_template, files, identity, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate, Span
from meshtrain.data.corpus import Corpus
from meshtrain.data.prepare import inputs
from meshtrain.data.source import Batch, Source, check_sizes
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, choice_faults

# T tokens of a text, or of all conversations

EXTENSIONS = (".jsonl", ".ndjson", ".json")  # files to read in a folder, perhaps with .gz

# What `strftime_now` of a template writes into the training data: the default of Llama's templates.
# With the current date the data of a run that resumes tomorrow would differ.
DATE = datetime.datetime(2024, 7, 26)
GROUP = 1000  # conversations that are tokenized together

# Keys of a message in OpenAI's format; templates may read further ones.
MESSAGE_KEYS = {
    *("role", "content", "name", "weight", "tool_calls", "tool_call_id"),
    *chat_template.REASONING,
}

MAX_FAULTS_SHOWN = 5


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
    """Returns the "train" or "heldout" split of the conversations in `path`.

    `path` is a file of JSON lines, or a folder of them; `read_conversations` says what a line
    holds. `tokenizer_path` is a folder with a tokenizer.json and a chat template.
    A token has weight 1 if its target was written by the assistant, which includes what the
    template writes at the end of a reply. `packing` is that of tokens.py, with a conversation as a
    document. The last `heldout` fraction of the conversations is held out, at least one if it is
    above 0. Raises ConfigError if the data is unusable.
    """
    check_sizes(seq_len, vocab_size, seed)
    faults = choice_faults("data.packing", packing, tokens.PACKINGS)
    if not 0 <= heldout < 1:
        faults.append(f"data.heldout={heldout}: use a fraction from 0 to below 1")
    if mixture:
        faults.append(f"data.mixture={mixture}: put the conversations into one folder, data.path")
    if not tokenizer_path:
        faults.append("data.tokenizer_path is empty: give the folder of the model's tokenizer")
    if faults:
        raise ConfigError(*faults)

    learned = load(path, tokenizer_path)
    corpus = learned.corpus
    tokens.check_tokenizers([corpus], vocab_size)
    starts = corpus.document_starts
    num_conversations = len(starts) - 1
    num_train = num_conversations - math.ceil(to_12_digits(num_conversations * heldout))
    border = int(starts[num_train])
    first, last = (0, border) if split == "train" else (border, corpus.num_tokens)

    def rows_of(corpus: Corpus) -> Source:
        name = f"the {split} split of data.heldout={heldout}"
        return tokens.split_source(
            tokens.Split(corpus, first, last, name),
            packing,
            separator=-1,
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
        )

    source = rows_of(corpus)
    marks = rows_of(corpus._replace(file_tokens=[learned.is_learned]))

    def read(indices: np.ndarray) -> Batch:
        batch = source.read(indices)
        # In the same rows, with marks for tokens, the targets say whether the next one is learned.
        return batch._replace(weights=batch.weights * marks.read(indices).targets)

    (all_tokens,) = corpus.file_tokens
    is_learned = learned.is_learned[first:last] > 0
    learned_tokens = all_tokens[first:last][is_learned]
    description = source.description.replace(" documents,", " conversations,", 1)
    return dataclasses.replace(
        source,
        read=read,
        description=f"{description}, {is_learned.mean():.2%} of the tokens learned",
        baseline=tokens.unigram_entropy(learned_tokens, vocab_size),
        warnings=[*learned.warnings, *_length_warnings(starts, packing, seq_len)],
    )


def _length_warnings(starts: np.ndarray, packing: str, seq_len: int) -> list[str]:
    if packing == "windows":
        return [
            "data.packing=windows splits conversations at the ends of rows; best_fit keeps them "
            "together"
        ]
    lengths = np.diff(starts)
    num_long = int(np.sum(lengths > seq_len))
    if not num_long:
        return []
    return [
        f"data.seq_len={seq_len}: {num_long:,} of {len(lengths):,} conversations are longer and "
        f"are split; their later parts do not see the earlier ones"
    ]


# ---- load all conversations ----


class Learned(NamedTuple):
    """Conversations as one stream of tokens, shuffled with a fixed seed."""

    corpus: Corpus
    is_learned: np.ndarray  # (T,) uint8: the assistant wrote the token
    warnings: list[str]


def load(path: str, tokenizer_path: str) -> Learned:
    """Returns the conversations in a file or a folder; a ConfigError names every faulty line."""
    with files.report_errors(f"data.path={path}"):
        paths = _find(path)
        # Both splits need the same conversations, which are tokenized once.
        return _load(path, tuple(paths), inputs.fingerprint(paths), tokenizer_path)


def _find(path: str) -> list[Path]:
    fault = files.path_fault(path)
    if fault:
        raise ConfigError(f"data.path={path}: {fault}; give a .jsonl file or a folder of them")
    paths = [Path(path)]
    is_folder = paths[0].is_dir()
    if is_folder:
        paths, _ = files.find(paths[0], "*", key="data.path")
    faults = []
    for file in paths:
        if is_folder and inputs.extension_of(file) not in EXTENSIONS:
            continue
        fault = inputs.format_fault(file, is_named=not is_folder)
        if fault:
            faults.append(f"data.path={path}: {file} {fault}, or leave it out")
    _report_faults(faults)
    paths = [file for file in paths if inputs.extension_of(file) in EXTENSIONS]
    if not paths:
        raise ConfigError(
            f"data.path={path}: no file ends in {', '.join(EXTENSIONS)}; give conversations as "
            f"JSON lines"
        )
    return paths


@functools.lru_cache(maxsize=1)
def _load(path: str, paths: tuple[Path, ...], fingerprint: str, tokenizer_path: str) -> Learned:
    """Returns the conversations in files; the fingerprint tells changed files from cached ones."""
    tokenizer = tokenizers.load(tokenizer_path)
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        raise ConfigError(
            f"data.tokenizer_path={tokenizer_path}: chat templates need a tokenizer.json, and this "
            f"is a {tokenizer.kind} tokenizer; give the folder of a Hugging Face model"
        )
    template = chat_template.load(tokenizer.file.parent, now=DATE)
    texts = []
    spans = []
    faults = []
    for place, conversation in read_conversations([*paths]):
        try:
            _check_keys(template, conversation)
            text, text_spans = render(template, conversation)
        except ConfigError:
            raise  # the template's own fault
        except ValueError as error:
            faults.append(f"{place}: {error}")
            continue
        texts.append(text)
        spans.append(text_spans)
    _report_faults(faults)
    if not texts:
        raise ConfigError(
            f"data.path={path}: holds no conversation; give JSON lines with `messages`"
        )
    corpus, is_learned = _tokenize(path, tokenizer, texts, spans)
    warnings = [*tokenizer.warnings]
    if template.reads_clock:
        warnings.append(
            f"data.path={path}: the chat template asks for the date; the training data says "
            f"{DATE:%d %b %Y}"
        )
    return Learned(corpus, is_learned, warnings)


def _tokenize(
    path: str, tokenizer: Tokenizer, texts: list[str], spans: list[list[Span]]
) -> tuple[Corpus, np.ndarray]:
    """Returns the shuffled texts as a corpus, and whether each token is in a span (T,) uint8."""
    # A fixed seed, so that the held-out end is a fair sample, and the same on every machine.
    order = np.random.default_rng(0).permutation(len(texts))
    encode = reply_encoder(tokenizer.file)
    num_groups = -(-len(order) // GROUP)
    ids = []
    masks = []
    for group in np.array_split(order, num_groups):
        encoded = encode([texts[number] for number in group])
        for number, (text_ids, offsets) in zip(group, encoded, strict=True):
            ids.append(text_ids)
            masks.append(is_inside(offsets, spans[number]))
    starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    stream = np.concatenate(ids)
    is_learned = np.concatenate(masks).astype(np.uint8)
    # The marks are part of what is trained on, so they are part of the identity.
    digests = [
        identity.of_tokens(stream, starts, full=True),
        identity.of_tokens(is_learned, full=True),
    ]
    corpus = Corpus(
        path,
        files=[path],
        file_tokens=[stream],
        file_offsets=np.array([0, len(stream)]),
        document_starts=starts,
        digest=identity.of_parts(digests),
        tokenizer=tokenizers.digest(tokenizer),
        vocab_size=tokenizer.vocab_size,
        token_bytes=tokenizer.token_bytes(),
    )
    return corpus, is_learned


# ---- conversations in JSON lines ----


class Conversation(NamedTuple):
    """A line of the data."""

    messages: list[dict[str, Any]]
    first_reply: int = 0  # messages before it are context, also those of the assistant
    tools: list | None = None  # JSON schemas of functions, which some templates write
    context: tuple[int, ...] = ()  # numbers of further messages that are not learned


def read_conversations(files: list[Path]) -> Iterator[tuple[str, Conversation]]:
    """Yields FILE:LINE and the conversation of each line; a ConfigError names every faulty line.

    A line, or an element of a JSON array, is an object with `messages`, a list of objects with
    `role` and `content`, or with `prompt` and `completion`, each a text or such a list. It may have
    `tools`. A message of the assistant with `weight` 0 is not learned. Blank lines are ignored;
    compressed files are decompressed.
    """
    faults = []
    options = inputs.ReadOptions(field="", separator="", forbidden="")
    for record in inputs.read_records(files, options, len):
        place = f"{files[record.next_position.file]}:{record.next_position.number}"
        try:
            yield place, _parse_conversation(record.data)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    _report_faults(faults)


def _report_faults(faults: list[str]) -> None:
    """Raises ConfigError with the first faults, if there are any."""
    if not faults:
        return
    shown = faults[:MAX_FAULTS_SHOWN]
    num_more = len(faults) - len(shown)
    if num_more:
        shown.append(f"and {num_more} more")
    raise ConfigError(*shown)


def _parse_conversation(line: bytes | str) -> Conversation:
    """Returns the conversation in a line; raises ValueError that says what is wrong with it."""
    if isinstance(line, str):  # an element of a JSON array
        raise ValueError('is a text, no object; use {"messages": [...]}')
    parsed = foreign.parse_json(line)
    if not isinstance(parsed, dict):
        raise ValueError('is no object; use {"messages": [...]}')
    # Exported tables have a null where a line has no such key.
    parsed = {key: value for key, value in parsed.items() if value is not None}
    tools = parsed.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools is {type(tools).__name__}, not a list")
    if "messages" in parsed:
        prompt = []
        replies = _messages("messages", parsed["messages"], role="")
    elif {"prompt", "completion"} <= parsed.keys():
        prompt = _messages("prompt", parsed["prompt"], role="user")
        replies = _messages("completion", parsed["completion"], role="assistant")
    else:
        raise ValueError("has neither `messages` nor `prompt` and `completion`")
    read = {"tools", "messages"} if "messages" in parsed else {"tools", "prompt", "completion"}
    for key in parsed:
        if key == "weight":
            raise ValueError("has a weight; put it into the messages of the assistant")
        if key not in read:
            raise ValueError(f"has the key {key!r}, which is not read; remove it")
    messages = [*prompt, *replies]
    context = [number for number, message in enumerate(messages) if message.get("weight") == 0]
    learned = [message for message in replies if message.get("weight") != 0]
    if not any(message["role"] == "assistant" for message in learned):
        raise ValueError("no message of the assistant, so there is nothing to learn")
    return Conversation(messages, first_reply=len(prompt), tools=tools, context=tuple(context))


def _messages(name: str, value: Any, *, role: str) -> list[dict[str, Any]]:
    """Returns a list of messages; a text is one of `role`, unless that is ""."""
    if role and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{name} is {kind}, not a list of messages")
    for number, message in enumerate(value):
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
        weight = message.get("weight")
        if weight not in (None, 0, 1) or (weight == 1 and message["role"] != "assistant"):
            raise ValueError(f"{where}: weight is {weight!r}; use 0, or 1 for the assistant")
    return value


def _check_keys(template: ChatTemplate, conversation: Conversation) -> None:
    """Raises ValueError for a key of a message that neither the format has nor the template reads.

    It would change nothing.
    """
    for number, message in enumerate(conversation.messages):
        for key, value in message.items():
            if value is not None and key not in MESSAGE_KEYS and key not in template.names:
                raise ValueError(
                    f"message {number + 1} has the key {key!r}, which the chat template does not "
                    f"read; remove it"
                )


# ---- replies in the text of a conversation ----


def render(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[Span]]:
    """Returns the text of a conversation, and the spans of it that the assistant wrote.

    {% generation %} blocks mark them. In a template without such blocks a reply begins where the
    prompt for it ends, and ends where the conversation up to it ends. Raises ValueError if the
    template rejects the conversation, or if the texts of its beginnings are not beginnings of its
    text.
    """
    messages = conversation.messages
    first_reply = conversation.first_reply
    text, generated = template.render(messages, conversation.tools)
    replies = []
    for number in range(first_reply, len(messages)):
        if messages[number]["role"] == "assistant":
            replies.append(number)

    def span_of(number: int) -> Span:
        first = _start_of_reply(template, conversation, number, text)
        return first, _end_of_reply(template, conversation, number, text)

    spans = []
    if template.marks_replies:
        learned_from = (
            _start_of_reply(template, conversation, first_reply, text) if first_reply else 0
        )
        context = [span_of(number) for number in replies if number in conversation.context]
        for first, last in generated:
            is_context = any(start < last and first < end for start, end in context)
            if last > learned_from and not is_context:
                spans.append((max(first, learned_from), last))
    else:
        spans = [span_of(number) for number in replies if number not in conversation.context]
    if not any(first < last for first, last in spans):
        raise ValueError("the chat template writes nothing for the assistant")
    return text, spans


def _start_of_reply(
    template: ChatTemplate, conversation: Conversation, number: int, text: str
) -> int:
    """Returns where the reply that is message `number` begins in the text."""
    prompt = template.render(
        conversation.messages[:number], conversation.tools, add_generation_prompt=True
    )
    return _length_of_beginning(prompt.text, text, number)


def _end_of_reply(
    template: ChatTemplate, conversation: Conversation, number: int, text: str
) -> int:
    """Returns where message `number` ends in the text."""
    end = number + 1
    if end == len(conversation.messages):
        return len(text)
    beginning = template.render(conversation.messages[:end], conversation.tools)
    return _length_of_beginning(beginning.text, text, end)


def _length_of_beginning(beginning: str, text: str, num_messages: int) -> int:
    if not text.startswith(beginning):
        raise ValueError(
            f"the chat template writes the first {num_messages} messages differently if more "
            f"follow, so the replies cannot be found in its text; use a template with "
            f"{{% generation %}} blocks around them"
        )
    return len(beginning)


Encode = Callable[[Sequence[str]], list[tuple[np.ndarray, np.ndarray]]]


def reply_encoder(file: Path) -> Encode:
    """Returns the function from texts to token ids (T,) int32 and the characters of each, (T, 2).

    Unlike `Tokenizer.encode`, special tokens that are spelled in a text become these tokens, as
    transformers has it for the text of a chat template.
    """
    model, _ = tokenizers.read_model(file)

    def encode(texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        arrays = []
        with tokenizers.reporting_faults(file, "fails"):
            encodings = model.encode_batch([*texts], add_special_tokens=False)
        for encoding in encodings:
            ids = np.array(encoding.ids, np.int32)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            arrays.append((ids, offsets))
        return arrays

    return encode


def is_inside(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Returns which tokens (T,) overlap one of the spans; `offsets` (T, 2) are their characters."""
    first, last = offsets.T
    inside = np.zeros(len(offsets), bool)
    for start, end in spans:
        inside |= (first < end) & (last > start)
    return inside
