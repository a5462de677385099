"""Files of tokens that count up, and sources that read them."""

import numpy as np

from meshtrain.data import indexed, tokens


def build(path, **changes):
    settings = {
        "dtype": "uint16",
        "pattern": "*.txt",
        "exclude": (),
        "seq_len": 4,
        "vocab_size": 1 << 16,
        "separator": -1,
        "heldout": 0.0,
        "seed": 0,
        "split": "train",
    }
    return tokens.build(path=str(path), **{**settings, **changes})


def starts(source, first, last):
    """Returns the first token of each sample: its position, in a file whose tokens count up."""
    return source.read(np.arange(first, last)).tokens[:, 0].tolist()


def all_tokens(path, length, **changes):
    """Returns all tokens of a source of `length` tokens: its only window."""
    batch = build(path, seq_len=length - 1, **changes).read(np.array([0]))
    return [*batch.tokens[0], batch.targets[0, -1]]


# ---- documents ----


TEXTS = {"a.txt": "first one\n", "b.txt": "second", "c.txt": "3\n3\n", "d.txt": "the last file"}


def write_texts(folder):
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def write_megatron(prefix, *documents):
    joined = np.concatenate(documents).astype(np.uint16)
    joined.tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(one) for one in documents])
    prefix.with_suffix(".idx").write_bytes(indexed.pack_index(lengths, joined.dtype))
    return prefix
