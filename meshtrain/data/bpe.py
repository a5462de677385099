"""A tokenizer of one's own: byte-level BPE, learned from the inputs."""

from collections.abc import Iterator
from pathlib import Path

from meshtrain.data import prepared as manifest
from meshtrain.data.inputs import Reading, records, text_of
from meshtrain.data.tokenizer import needed
from meshtrain.errors import ConfigError

EOS = "<|endoftext|>"
SAMPLE = 1 << 28  # bytes of text that are learned from, at most: the first
SMALLEST = 257  # all bytes, and EOS


def train(files: list[Path], how: Reading, vocab_size: int, output: Path) -> None:
    """Writes a tokenizer.json with so many tokens, the same whenever the inputs are the same."""
    tokenizers = needed("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(files, how), trainer)
    if made.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"--train_bpe={vocab_size}: the text has only enough for {made.get_vocab_size()} tokens; "
            f"use that, or more text"
        )
    manifest.write(output, made.to_str(pretty=True))


def _texts(files: list[Path], how: Reading) -> Iterator[str]:
    """Yields text in parts of a size that is good to learn from; what is wrong with it comes out later."""
    left = SAMPLE
    for record in records(files, how, lambda text: len(text)):
        if left <= 0:
            return
        try:
            text = text_of(record, how)
        except ValueError:
            continue
        left -= len(text)
        yield text
