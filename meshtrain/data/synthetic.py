"""Synthetic sequences that a model can learn, for tests and benchmarks without data files."""

import numpy as np

from meshtrain.data.source import Batch, Source, check_sizes, to_batch

SYNTHETIC_BUILD = "meshtrain.data.synthetic:build"

FILES_BUILDS = ("meshtrain.data.tokens:build", "meshtrain.data.chat:build")  # they read files


def without_files(build: str) -> str:
    """Returns the `data.build` to use if only shapes matter: files become synthetic data."""
    return SYNTHETIC_BUILD if build in FILES_BUILDS else build


def build(
    *, seq_len: int, vocab_size: int, separator: int, seed: int, split: str, **unused
) -> Source:
    """Returns a source of arithmetic progressions modulo `vocab_size`, each with a random start and stride."""
    check_sizes(seq_len, vocab_size, seed, separator)

    def read(indices: np.ndarray) -> Batch:
        rows = np.stack(
            [
                _progression(index, seq_len + 1, vocab_size, (seed, split == "train"))
                for index in indices
            ]
        )
        return to_batch(rows.astype(np.int32), separator)

    description = f"synthetic progressions modulo {vocab_size}"
    # As with files, the seed and the length of a row do not belong to the identity of the data.
    return Source(read, description=description, identity={"data": description, "tokenizer": ""})


def _progression(index: int, length: int, modulus: int, seed: tuple) -> np.ndarray:
    start, stride = np.random.default_rng([*seed, index]).integers(0, modulus, 2)
    return (start + stride * np.arange(length)) % modulus
