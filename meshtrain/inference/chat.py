"""Prompts as messages of a user to a chat model: `meshtrain generate --chat`."""

import contextlib
from pathlib import Path

from meshtrain import foreign
from meshtrain.data import chat, chat_template
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError


def load(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the chat template in the tokenizer's folder; raises ConfigError if there is none."""
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        raise ConfigError(
            f"--chat: a {tokenizer.kind} tokenizer has no chat template; give --tokenizer=PATH of "
            f"a chat model's"
        )
    return chat_template.load(tokenizer.file.parent)


def encode(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    """Returns the tokens of a conversation with this message, up to where the reply begins."""
    try:
        prompt = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    except ValueError as error:
        raise ConfigError(f"--prompt={text!r}: {error}") from None
    ((ids, _),) = chat.reply_encoder(tokenizer.file)([prompt.text])
    return ids.tolist()


def end_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Returns the tokens that end a reply.

    These are the tokenizer's end of a document, its `eos_token`, those that generation_config.json
    lists, and the special token that the template writes after a reply.
    """
    assert tokenizer.file is not None  # the template is from its folder
    tokens = set(_listed_end_tokens(tokenizer.file.parent / "generation_config.json"))
    if tokenizer.eos is not None:
        tokens.add(tokenizer.eos)
    encode_texts = chat.reply_encoder(tokenizer.file)
    ((ids, _),) = encode_texts([template.eos_token])
    if len(ids) == 1:
        tokens.update(ids.tolist())
    # Render an example, and take the first special token of its reply.
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    with contextlib.suppress(ValueError):  # a template that always needs something else
        text, spans = chat.render(template, chat.Conversation(messages))
        ((ids, offsets),) = encode_texts([text])
        reply = ids[chat.is_inside(offsets, spans)]
        is_special = tokenizer.token_bytes()[reply] == 0
        tokens.update(reply[is_special][:1].tolist())
    return sorted(tokens)


def _listed_end_tokens(file: Path) -> list[int]:
    """Returns the end tokens that a generation_config.json lists; none if it cannot be read."""
    try:
        tokens = foreign.read_json(file).get("eos_token_id")
    except (OSError, ValueError):
        return []
    if not isinstance(tokens, list):
        tokens = [tokens]
    return [token for token in tokens if isinstance(token, int)]
