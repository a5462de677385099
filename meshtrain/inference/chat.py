"""Prompts as messages to a chat model, and conversations with it: `meshtrain generate --chat`."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from meshtrain import console
from meshtrain.data import chat_template, conversations
from meshtrain.data.chat_template import ChatTemplate, Message
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

SAID = "Zebra"  # in the example of a reply: a word that no template writes
CLEAR = "/clear"  # as a message: starts a new conversation
# Variables of templates that each conversation sets by itself.
SET_BY_CONVERSATION = ("messages", "tools", "add_generation_prompt")


class Settings(NamedTuple):
    """How a conversation begins, and what its template may read."""

    system: str | None = None  # the message of the system; None: the template's own, or none
    arguments: Mapping[str, Any] = {}  # further variables of the template

    def begin(self) -> list[Message]:
        """Returns the messages before the first of the user."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def argument_faults(arguments: Mapping[str, Any]) -> list[str]:
    """Returns a fault for each variable of a template that the conversation itself sets."""
    return [
        f"--chat_template_kwargs: {name} is set by the conversation; remove it"
        for name in SET_BY_CONVERSATION
        if name in arguments
    ]


def load(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the chat template in the tokenizer's folder; raises ConfigError if there is none."""
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        raise ConfigError(
            f"--chat: a {tokenizer.kind} tokenizer has no chat template; give --tokenizer=PATH of "
            f"a chat model's"
        )
    return chat_template.load(tokenizer.file.parent)


def encode(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    arguments: Mapping[str, Any],
) -> list[int]:
    """Returns the tokens of a conversation, up to where the next reply begins.

    Raises ConfigError with one line if the template rejects it.
    """
    try:
        prompt = template.render(messages, add_generation_prompt=True, arguments=arguments)
    except ValueError as error:
        raise ConfigError(f"--prompt={messages[-1]['content']!r}: {error}") from None
    ((ids, _),) = conversations.reply_encoder(tokenizer.file)([prompt.text])
    return ids.tolist()


def encode_first(
    tokenizer: Tokenizer, template: ChatTemplate, settings: Settings, text: str
) -> list[int]:
    """Returns the tokens of a conversation whose first message of the user is `text`."""
    messages = [*settings.begin(), {"role": "user", "content": text}]
    return encode(tokenizer, template, messages, settings.arguments)


def read_messages() -> Iterator[str]:
    """Yields the lines of stdin that are not empty: what the user says, one message a line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then edits the line, and remembers earlier ones
        console.say(f"{CLEAR} starts a new conversation; Ctrl-D ends", stream="stderr")
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin: is not valid UTF-8: {error}") from None
        # In some locales Python decodes an invalid byte to a surrogate.
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise ConfigError(f"stdin: {line!r} is not valid UTF-8")
        if line.strip():
            yield line


def ends_of_replies(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a reply; none if the tokenizer has no chat template."""
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        return []
    if not chat_template.has_template(tokenizer.file.parent):
        return []
    return end_tokens(tokenizer, load(tokenizer))


def end_tokens(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Returns the tokens that end a reply.

    These are the tokenizer's `eos_token`, and the special token that the template writes after a
    reply.
    """
    assert tokenizer.file is not None  # the template is from its folder
    tokens: set[int] = set()
    encode_texts = conversations.reply_encoder(tokenizer.file)
    ((ids, _),) = encode_texts([template.eos_token])
    if len(ids) == 1:
        tokens.update(ids.tolist())
    # Render an example, and take the first special token after what the assistant says.
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SAID}]
    with contextlib.suppress(ValueError):  # a template that always needs something else
        conversation = conversations.Conversation(messages)
        text, spans = conversations.render(template, conversation, arguments)
        ((ids, offsets),) = encode_texts([text])
        end_of_said = text.rindex(SAID) + len(SAID)
        is_after = conversations.is_inside(offsets, spans) & (offsets[:, 0] >= end_of_said)
        is_special = tokenizer.token_bytes()[ids] == 0
        tokens.update(ids[is_after & is_special][:1].tolist())
    return sorted(tokens)
