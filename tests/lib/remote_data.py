"""A source of prepared data, on a disk or a store; also for programs in other processes."""

from meshtrain.data import tokens

SETTINGS = {
    "dtype": "",
    "pattern": "*",
    "exclude": (),
    "seq_len": 64,
    "vocab_size": 256,
    "separator": -1,
    "heldout": 0.05,
    "seed": 3,
    "split": "train",
}


def build(path, **changes):
    return tokens.build(path=str(path), **{**SETTINGS, **changes})
