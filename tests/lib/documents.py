"""Documents whose tokens count up, in Megatron-LM's format."""

import numpy as np

from meshtrain.data import indexed, tokens

SIZES = (3, 40, 1, 7, 8, 9, 16, 2, 25, 6, 5, 1, 33, 8, 4)


def documents(sizes=SIZES):
    """Returns documents with the tokens 1, 2, 3, ...: each token is its position in the stream."""
    ends = np.cumsum(sizes)
    return [np.arange(1 + end - size, 1 + end) for size, end in zip(sizes, ends, strict=True)]


def write(prefix, docs, dtype="uint16"):
    dtype = np.dtype(dtype)
    np.concatenate(docs).astype(dtype).tofile(f"{prefix}.bin")
    index = indexed.pack_index(np.array([len(one) for one in docs]), dtype)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return str(prefix)


def build(path, **changes):
    settings = {"dtype": "", "pattern": "", "exclude": (), "seq_len": 8, "vocab_size": 1 << 15}
    settings |= {"separator": -1, "heldout": 0.0, "seed": 0, "split": "train"}
    return tokens.build(path=str(path), **{**settings, **changes})
