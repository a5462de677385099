"""What the assistant wrote in the text of a conversation: its characters, and its tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data.chat_template import ChatTemplate, Span
from meshtrain.data.tokenizer import import_optional

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
            (_start_of_reply(template, one, number, full), _end(template, one, number, full))
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


def _end(template: ChatTemplate, one: Conversation, number: int, full: str) -> int:
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


def encoder(file: Path) -> Encode:
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
