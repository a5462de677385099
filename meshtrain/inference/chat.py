"""Prompts as messages of a user to a chat model: `meshtrain generate --chat`."""

import contextlib
import json
from pathlib import Path

from meshtrain.data import chat, chat_template
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError


def load(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the chat template in the tokenizer's folder; raises ConfigError if there is none."""
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        raise ConfigError(
            f"--chat: a {tokenizer.kind} tokenizer has no chat template; give --tokenizer=PATH of a chat model's"
        )
    return chat_template.load(tokenizer.file.parent)


def encode(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    """Returns the tokens of a conversation that begins with this message, up to where the reply begins."""
    try:
        prompt = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    except ValueError as error:
        raise ConfigError(f"--prompt={text!r}: {error}") from None
    ((ids, _),) = chat.reply_encoder(tokenizer.file)([prompt.text])
    return ids.tolist()


def end_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Returns the tokens that end a reply.

    These are the tokenizer's end of a document, its `eos_token`, those that generation_config.json lists, and the
    special token that the template writes after a reply.
    """
    read = chat.reply_encoder(tokenizer.file)
    found = [tokenizer.eos, *_listed(tokenizer.file.parent / "generation_config.json")]
    ((ids, _),) = read([template.eos_token])
    found += ids.tolist() if len(ids) == 1 else []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    with contextlib.suppress(ValueError):  # a template that always needs something else
        text, spans = chat.render(template, chat.Conversation(messages))
        ((ids, offsets),) = read([text])
        replied = ids[chat.is_inside(offsets, spans)]
        found += replied[tokenizer.token_bytes()[replied] == 0][:1].tolist()
    return sorted({token for token in found if token is not None})


def _listed(file: Path) -> list[int]:
    try:
        found = json.loads(file.read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = found if isinstance(found, list) else [found]
    return [token for token in found if isinstance(token, int)]
