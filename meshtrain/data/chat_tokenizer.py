"""Tokenizes conversations, in the worker processes that workers.py starts."""

from typing import Any

import numpy as np

from meshtrain.data import chat_template, conversations, workers
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import Span
from meshtrain.data.workers import Message
from meshtrain.errors import ConfigError


class ConversationTokenizer:
    """Writes conversations by the template of a tokenizer's folder, and tokenizes them."""

    def __init__(self, settings: dict[str, Any]):
        tokenizer = tokenizers.load(settings["tokenizer_path"])
        assert tokenizer.file is not None
        self._template = chat_template.load(tokenizer.file.parent, now=conversations.DATE)
        self._encode = conversations.reply_encoder(tokenizer.file)
        self._learned = settings["learned"]

    def __call__(self, lines: Message) -> Message:
        """Returns the tokens of lines of JSON, which `conversations.parse` describes.

        The arrays are the bytes of all lines, and the length of each. Those of the result are the
        tokens (int32), 1 for each that is learned (uint8), and the number of tokens of
        each line. The value has the numbers and the faults of lines that are no conversation.
        """
        content, lengths = lines.arrays
        ends = np.cumsum(lengths).tolist()
        starts = [0, *ends[:-1]]
        texts: list[str] = []
        spans: list[list[Span]] = []
        faults: list[tuple[int, str]] = []
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            try:
                conversation = conversations.parse(content[start:end].tobytes())
                conversations.check_keys(self._template, conversation)
                text, text_spans = conversations.render(
                    self._template, conversation, learned=self._learned
                )
            except ConfigError:
                raise  # the template's own fault
            except ValueError as error:
                faults.append((number, str(error)))
                continue
            texts.append(text)
            spans.append(text_spans)
        ids = [np.zeros(0, np.int32)]
        masks = [np.zeros(0, np.uint8)]
        for (text_ids, offsets), text_spans in zip(self._encode(texts), spans, strict=True):
            ids.append(text_ids)
            masks.append(conversations.is_inside(offsets, text_spans).astype(np.uint8))
        num_tokens = np.array([len(text_ids) for text_ids in ids[1:]], np.int64)
        return Message(faults, [np.concatenate(ids), np.concatenate(masks), num_tokens])


if __name__ == "__main__":
    workers.serve(ConversationTokenizer)
