"""Conversations: what a line of the data holds, its text by a chat template, and the replies in it.

The text and its tokens are those of transformers.
"""

import datetime
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from meshtrain import foreign
from meshtrain.data import chat_template
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate, Rendered, Span

# T tokens of a text

# What `strftime_now` of a template writes into the training data: the default of Llama's templates.
# With the current date the data of a run that resumes tomorrow would differ.
DATE = datetime.datetime(2024, 7, 26)

# Keys of a message in OpenAI's format; templates may read further ones.
MESSAGE_KEYS = {
    *("role", "content", "name", "weight", "tool_calls", "tool_call_id"),
    *chat_template.REASONING,
}


# The forms of a line: the keys that it needs, and all that are read besides tools and documents.
FORMS = (
    (("messages",), ("messages",)),
    (("prompt", "completion"), ("prompt", "completion")),
    (("conversations",), ("conversations", "system", "id")),
    # Stanford's file repeats it all in `text`, in a template of its own.
    (
        ("instruction", "output"),
        ("instruction", "input", "output", "history", "system", "id", "text"),
    ),
)
# Of a message in ShareGPT's form: its role by the value of `from`.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FUNCTION_CALL = "function_call"  # `from` of a call, whose `value` is JSON with name and arguments
# What a model learns of a conversation: what the assistant says, its last reply alone, or the text.
LEARNED = ("replies", "last_reply", "all")


class Conversation(NamedTuple):
    """A line of the data."""

    messages: list[dict[str, Any]]
    first_reply: int = 0  # messages before it are context, also those of the assistant
    tools: list | None = None  # JSON schemas of functions, which some templates write
    context: tuple[int, ...] = ()  # numbers of further messages that are not learned
    documents: list | None = None  # texts that the replies refer to, which some templates write


def parse(line: bytes) -> Conversation:
    """Returns the conversation in a line of JSON; raises ValueError that says what is wrong.

    The line is an object with `messages`, a list of objects with `role` and `content`, or with
    `prompt` and `completion`, each a text or such a list. ShareGPT's has `conversations`, whose
    messages may have `from` and `value` instead; Alpaca's `instruction`, `output`, perhaps `input`
    and `history`. Both may have `system`. All may have `tools` and `documents`. A message of the
    assistant with `weight` 0 is not learned.
    """
    return from_object(foreign.parse_json(line))


def from_object(parsed: Any) -> Conversation:
    """Returns the conversation in an object that `parse` describes."""
    if not isinstance(parsed, dict):
        raise ValueError('is no object; use {"messages": [...]}')
    # Exported tables have a null where a line has no such key.
    parsed = {key: value for key, value in parsed.items() if value is not None}
    for key in ("tools", "documents"):
        if not isinstance(parsed.get(key), list | None):
            raise ValueError(f"{key} is {type(parsed[key]).__name__}, not a list")
    needed, read = _form_of(parsed)
    prompt: list[dict[str, Any]] = []
    if needed == ("messages",):
        replies = _messages("messages", parsed["messages"], role="")
    elif needed == ("prompt", "completion"):
        prompt = _messages("prompt", parsed["prompt"], role="user")
        replies = _messages("completion", parsed["completion"], role="assistant")
    elif needed == ("conversations",):
        turns = _messages("conversations", _from_sharegpt(parsed["conversations"]), role="")
        replies = [*_system(parsed), *turns]
    elif needed == ("instruction", "output"):
        replies = _messages("the conversation", _system(parsed) + _from_alpaca(parsed), role="")
    else:
        raise ValueError(
            "has neither `messages` nor `prompt` and `completion`, `conversations`, or "
            "`instruction` and `output`"
        )
    for key in parsed:
        if key == "weight":
            raise ValueError("has a weight; put it into the messages of the assistant")
        if key not in (*read, "tools", "documents"):
            raise ValueError(f"has the key {key!r}, which is not read; remove it")
    messages = [*prompt, *replies]
    context = [number for number, message in enumerate(messages) if message.get("weight") == 0]
    learned = [message for message in replies if message.get("weight") != 0]
    if not any(message["role"] == "assistant" for message in learned):
        raise ValueError("no message of the assistant, so there is nothing to learn")
    return Conversation(
        messages,
        first_reply=len(prompt),
        tools=parsed.get("tools"),
        context=tuple(context),
        documents=parsed.get("documents"),
    )


def _form_of(keys: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the first of FORMS whose needed keys are there; without any, no keys."""
    for needed, read in FORMS:
        if all(key in keys for key in needed):
            return needed, read
    return (), ()


def of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the line that a row of a table stands for: its other columns are not read."""
    filled = {key: value for key, value in row.items() if value is not None}
    _, read = _form_of(filled)
    if not read:
        return filled
    return {key: filled[key] for key in filled if key in (*read, "tools", "documents")}


def _system(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the message in the key `system`, if it has a text."""
    system = parsed.get("system", "")
    if not isinstance(system, str):
        raise ValueError(f"system is {type(system).__name__}, not a text")
    return [{"role": "system", "content": system}] if system else []


def _from_sharegpt(turns: Any) -> Any:
    """Returns messages with `role` and `content`, from those with `from` and `value`."""
    if not isinstance(turns, list):
        return turns
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or "from" not in turn:
            messages.append(turn)
            continue
        if turn["from"] == FUNCTION_CALL:
            messages.append(_call(number, turn.get("value")))
            continue
        role = SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise ValueError(
                f"conversations[{number}] is from {turn['from']!r}; use human, gpt, system or tool"
            )
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": role, "content": turn.get("value"), **others})
    return messages


def _call(number: int, value: Any) -> dict[str, Any]:
    """Returns the message of the assistant with one or more calls of functions."""
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError):
        parsed = None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"conversations[{number}] is from {FUNCTION_CALL}, and is no JSON object")
    functions = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def _from_alpaca(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of an instruction, after those of its history."""
    history = parsed.get("history", [])
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ValueError("history is not a list of pairs, each an instruction and its output")
    question, answer = parsed["instruction"], parsed["output"]
    if extra := parsed.get("input"):
        if not isinstance(question, str) or not isinstance(extra, str):
            raise ValueError("instruction and input are not both texts")
        question = f"{question}\n{extra}" if question else extra
    messages = []
    for asked, said in [*history, [question, answer]]:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": said})
    return messages


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

    It would change nothing. The same is true of documents.
    """
    if conversation.documents and "documents" not in template.names:
        raise ValueError("has documents, which the chat template does not read; remove them")
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
    *,
    learned: str = "replies",
) -> tuple[str, list[Span]]:
    """Returns the text of a conversation, and the spans of it that are learned; see `LEARNED`.

    `arguments` are further variables of the template. {% generation %} blocks mark what the
    assistant wrote. In a template without such blocks a reply begins where the prompt for it ends,
    and ends where the conversation up to it ends; `_Replies` says which differences between these
    texts and the text of the conversation are understood. A reply whose reasoning the template
    leaves out is context. Raises ValueError if the template rejects the conversation, if the
    replies are not found in its text, or if nothing is learned.
    """
    messages = conversation.messages
    first_reply = conversation.first_reply
    texts = _Replies(template, conversation, arguments)
    if learned == "all":
        return texts.text, [(0, len(texts.text))]
    replies = []
    for number in range(first_reply, len(messages)):
        if messages[number]["role"] == "assistant":
            replies.append(number)
    context = {*conversation.context}
    if learned == "last_reply":
        last = max(number for number in replies if number not in context)
        context.update(number for number in replies if number != last)
    spans = []
    if template.marks_replies:
        learned_from = texts.start_of(first_reply) if first_reply else 0
        not_learned = [texts.span_of(number) for number in replies if number in context]
        for first, end in texts.generated:
            is_context = any(start < end and first < stop for start, stop in not_learned)
            if end > learned_from and not is_context:
                spans.append((max(first, learned_from), end))
    else:
        for number in replies:
            if number not in context:
                span = texts.span_of(number)
                if texts.has_reasoning(number, span):
                    spans.append(span)
        if not spans:
            raise ValueError(
                "the chat template leaves out the reasoning of all replies, so there is nothing to "
                "learn; remove the reasoning, or use a template that writes it"
            )
    if not any(first < end for first, end in spans):
        raise ValueError("the chat template writes nothing for the assistant")
    return texts.text, spans


class _Replies:
    """The text of a conversation, and where its replies are in it.

    The places are found in the texts of its beginnings: the first messages with the prompt for the
    next one, and the first messages up to a reply. In the templates that are understood, they may
    differ from the beginning of the text in this:
    - the prompt for a reply has more than the text has there (DeepSeek-R1's <think>),
    - a text ends with a token that is not there if more follow (Phi-3's <|endoftext|>),
    - the text leaves out the reasoning of a reply if more follow (Qwen3).
    """

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, arguments: Mapping[str, Any]
    ):
        self._template = template
        self._conversation = conversation
        self._arguments = arguments
        rendered = self._render(len(conversation.messages))
        self.text, self.generated = rendered

    def span_of(self, number: int) -> Span:
        """Returns where message `number`, a reply, begins and ends in the text."""
        start = self.start_of(number)
        return start, self._end_of(number, start)

    def start_of(self, number: int) -> int:
        """Returns where the reply that is message `number` begins in the text."""
        if number == 0:  # many templates reject a prompt without messages
            prompt = self._prompt_for_more()
            at = self.text.find(prompt)
            if at < 0 or not prompt:
                raise _rewritten(1)
            return at + len(prompt)
        prompt = self._render(number, add_generation_prompt=True).text
        if self.text.startswith(prompt):
            return len(prompt)
        start = self._shared(prompt, self.text)
        # They must differ in the prompt for the reply alone.
        if start < self._shared(prompt, self._render(number).text):
            raise _rewritten(number)
        return start

    def _prompt_for_more(self) -> str:
        """Returns what the prompt for a further reply adds to the text."""
        prompt = self._render(len(self._conversation.messages), add_generation_prompt=True).text
        return prompt[self._shared(prompt, self.text) :]

    def _end_of(self, number: int, start: int) -> int:
        """Returns where the reply that is message `number`, and begins at `start`, ends."""
        num_messages = number + 1
        if num_messages == len(self._conversation.messages):
            return len(self.text)
        beginning = self._render(num_messages).text
        if self.text.startswith(beginning):
            return len(beginning)
        if not beginning.startswith(self.text[:start]):
            raise _rewritten(num_messages)
        # What is written of the reply if no more follow, and the same without its reasoning.
        reply = beginning[start:]
        without_reasoning = reply.partition(END_OF_REASONING)[2].lstrip("\n")
        rest = self.text[start:]
        for written in (reply, without_reasoning):
            size = self._shared(written, rest)
            # Nothing may be missing but a token at the end.
            if size and written[size:].strip() in ("", *self._template.special):
                return start + size
        raise _rewritten(num_messages)

    def has_reasoning(self, number: int, span: Span) -> bool:
        """Returns whether the text has the reasoning of the reply in `span`, if it had one."""
        message = self._conversation.messages[number]
        before_answer, answer, _ = self.text[slice(*span)].rpartition(_visible(message) or "\0")
        return _reasoning(message) in (before_answer if answer else self.text[slice(*span)])

    def _render(self, num_messages: int, *, add_generation_prompt: bool = False) -> Rendered:
        return self._template.render(
            self._conversation.messages[:num_messages],
            self._conversation.tools,
            add_generation_prompt=add_generation_prompt,
            arguments=self._arguments,
            documents=self._conversation.documents,
        )

    def _shared(self, one: str, other: str) -> int:
        """Returns how many characters two texts share at their start, in complete tokens.

        A special token of which only the beginning is shared does not count.
        """
        size = len(os.path.commonprefix([one, other]))
        for token in self._template.special:
            for first in range(max(0, size - len(token) + 1), size):
                if one.startswith(token, first) or other.startswith(token, first):
                    size = first
                    break
        return size


def _rewritten(num_messages: int) -> ValueError:
    return ValueError(
        f"the chat template writes the first {num_messages} messages differently if more "
        f"follow, so the replies cannot be found in its text; use a template with "
        f"{{% generation %}} blocks around them"
    )


END_OF_REASONING = "</think>"


def _visible(message: Mapping[str, Any]) -> str:
    """Returns what a reply says after its reasoning; "" if that is no text."""
    content = message.get("content")
    return content.rpartition(END_OF_REASONING)[2].strip() if isinstance(content, str) else ""


def _reasoning(message: Mapping[str, Any]) -> str:
    """Returns the reasoning of a reply, in a key of its own or in its content; "" without any."""
    for key in chat_template.REASONING:
        if isinstance(message.get(key), str):
            return message[key].strip()
    content = message.get("content")
    if not isinstance(content, str):
        return ""
    return content.rpartition(END_OF_REASONING)[0].rpartition("<think>")[2].strip()


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
