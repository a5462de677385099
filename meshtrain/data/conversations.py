"""Conversations: what a line of the data holds, its text by a chat template, and the replies in it.

The text and its tokens are those of transformers.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from meshtrain import foreign
from meshtrain.data import chat_template
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate, Span

# T tokens of a text

# What `strftime_now` of a template writes into the training data: the default of Llama's templates.
# With the current date the data of a run that resumes tomorrow would differ.
DATE = datetime.datetime(2024, 7, 26)

# Keys of a message in OpenAI's format; templates may read further ones.
MESSAGE_KEYS = {
    *("role", "content", "name", "weight", "tool_calls", "tool_call_id"),
    *chat_template.REASONING,
}


class Conversation(NamedTuple):
    """A line of the data."""

    messages: list[dict[str, Any]]
    first_reply: int = 0  # messages before it are context, also those of the assistant
    tools: list | None = None  # JSON schemas of functions, which some templates write
    context: tuple[int, ...] = ()  # numbers of further messages that are not learned


def parse(line: bytes) -> Conversation:
    """Returns the conversation in a line of JSON; raises ValueError that says what is wrong.

    The line is an object with `messages`, a list of objects with `role` and `content`, or with
    `prompt` and `completion`, each a text or such a list. It may have `tools`. A message of the
    assistant with `weight` 0 is not learned.
    """
    return from_object(foreign.parse_json(line))


def from_object(parsed: Any) -> Conversation:
    """Returns the conversation in an object that `parse` describes."""
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


def check_keys(template: ChatTemplate, conversation: Conversation) -> None:
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


def render(
    template: ChatTemplate,
    conversation: Conversation,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, list[Span]]:
    """Returns the text of a conversation, and the spans of it that the assistant wrote.

    `arguments` are further variables of the template.

    {% generation %} blocks mark them. In a template without such blocks a reply begins where the
    prompt for it ends, and ends where the conversation up to it ends. Raises ValueError if the
    template rejects the conversation, or if the texts of its beginnings are not beginnings of its
    text.
    """
    messages = conversation.messages
    first_reply = conversation.first_reply
    text, generated = template.render(messages, conversation.tools, arguments=arguments)
    replies = []
    for number in range(first_reply, len(messages)):
        if messages[number]["role"] == "assistant":
            replies.append(number)

    def span_of(number: int) -> Span:
        first = _start_of_reply(template, conversation, number, text, arguments)
        return first, _end_of_reply(template, conversation, number, text, arguments)

    spans = []
    if template.marks_replies:
        learned_from = (
            _start_of_reply(template, conversation, first_reply, text, arguments)
            if first_reply
            else 0
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
    template: ChatTemplate,
    conversation: Conversation,
    number: int,
    text: str,
    arguments: Mapping[str, Any],
) -> int:
    """Returns where the reply that is message `number` begins in the text."""
    prompt = template.render(
        conversation.messages[:number],
        conversation.tools,
        add_generation_prompt=True,
        arguments=arguments,
    )
    return _length_of_beginning(prompt.text, text, number)


def _end_of_reply(
    template: ChatTemplate,
    conversation: Conversation,
    number: int,
    text: str,
    arguments: Mapping[str, Any],
) -> int:
    """Returns where message `number` ends in the text."""
    end = number + 1
    if end == len(conversation.messages):
        return len(text)
    beginning = template.render(
        conversation.messages[:end], conversation.tools, arguments=arguments
    )
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
