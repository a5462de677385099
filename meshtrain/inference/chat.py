"""Prompts as messages of a user to a chat model: `meshtrain generate --chat`."""

import contextlib

from meshtrain.data import chat_template, conversations
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

SAID = "Zebra"  # in the example of a reply: a word that no template writes


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
    ((ids, _),) = conversations.reply_encoder(tokenizer.file)([prompt.text])
    return ids.tolist()


def ends_of_replies(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a reply; none if the tokenizer has no chat template."""
    if tokenizer.file is None or tokenizer.kind != "huggingface":
        return []
    if not chat_template.has_template(tokenizer.file.parent):
        return []
    return end_tokens(tokenizer, load(tokenizer))


def end_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
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
        text, spans = conversations.render(template, conversations.Conversation(messages))
        ((ids, offsets),) = encode_texts([text])
        end_of_said = text.rindex(SAID) + len(SAID)
        is_after = conversations.is_inside(offsets, spans) & (offsets[:, 0] >= end_of_said)
        is_special = tokenizer.token_bytes()[ids] == 0
        tokens.update(ids[is_after & is_special][:1].tolist())
    return sorted(tokens)
