"""Train a byte-level BPE tokenizer on the inputs of `meshtrain prepare`."""

import sys
from collections.abc import Iterator
from pathlib import Path

from meshtrain.data import prepared
from meshtrain.data.inputs import ReadOptions, read_records, text_of
from meshtrain.data.tokenizer import import_optional
from meshtrain.errors import ConfigError

EOS = "<|endoftext|>"
SAMPLE_CHARS = 1 << 28  # train on at most this many characters, from the start of the inputs
MIN_VOCAB_SIZE = 257  # all bytes, and EOS


def train(files: list[Path], options: ReadOptions, vocab_size: int, output: Path) -> None:
    """Write a tokenizer.json with `vocab_size` tokens; the same inputs give the same file.

    Raises ConfigError if the text is too short for `vocab_size` tokens.
    """
    tokenizers = import_optional("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_sample_texts(files, options), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"--train_bpe={vocab_size}: the text is enough for only {tokenizer.get_vocab_size()} "
            f"tokens; use that number, or more text"
        )
    prepared.write_durably(output, tokenizer.to_str(pretty=True))


def _sample_texts(files: list[Path], options: ReadOptions) -> Iterator[str]:
    """Yields up to SAMPLE_CHARS characters of text; skips faulty records, which are reported later."""
    chars_left = SAMPLE_CHARS
    for record in read_records(files, options, len):
        if chars_left <= 0:
            return
        try:
            text = text_of(record, options)
        except ValueError:
            continue
        chars_left -= len(text)
        yield text
