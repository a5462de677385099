"""Synthetic sequences that a model can learn, for tests and benchmarks without data files."""

import numpy as np

from meshtrain.data.source import Batch, Source, check_sizes, to_batch

SYNTHETIC_BUILD = "meshtrain.data.synthetic:build"
FILES_BUILDS = (  # they read files
    "meshtrain.data.tokens:build",
    "meshtrain.data.chat:build",
    "meshtrain.data.rows:build",
)


def without_files(build: str) -> str:
    """Returns the `data.build` to use if only shapes matter: files become synthetic data."""
    return SYNTHETIC_BUILD if build in FILES_BUILDS else build


def build(
    *, seq_len: int, vocab_size: int, separator: int, seed: int, split: str, **unused
) -> Source:
    """Returns a source of arithmetic progressions modulo `vocab_size`.

    Each sample has a random start and stride, which depend on the seed, the split and its index.
    """
    check_sizes(seq_len, vocab_size, seed, separator)

    def read(indices: np.ndarray) -> Batch:
        rows = np.empty((len(indices), seq_len + 1), np.int32)
        for row, index in enumerate(indices):
            rng = np.random.default_rng([seed, split == "train", index])
            start, stride = rng.integers(0, vocab_size, 2)
            rows[row] = (start + stride * np.arange(seq_len + 1)) % vocab_size
        return to_batch(rows, separator)

    description = f"synthetic progressions modulo {vocab_size}"
    # As with files, the seed and the length of a row do not belong to the identity of the data.
    return Source(
        read,
        description=description,
        identity={"data": description, "tokenizer": ""},
    )
