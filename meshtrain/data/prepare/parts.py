"""Parts of a preparation, each in a process of its own: `meshtrain prepare --part=I/N`.

The output has a folder for each part while they are prepared, with shards of its own files. The
process that finishes last copies their tokens to the shards of the output. These are the same as
those of a single process, since the parts are consecutive ranges of the files, and a shard ends
after the document that fills it.

The journal of the output is created by the part that starts first. Its settings are those of all
parts, and its lines the shards that were copied.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshtrain.data.prepare import sources
from meshtrain.errors import ConfigError

FOLDER = "parts"  # in the output


class Part(NamedTuple):
    """Part number `index` of `count`, from 0."""

    index: int
    count: int

    @property
    def folder(self) -> str:
        """The folder in the output."""
        return f"{FOLDER}/{self.index:05d}-of-{self.count:05d}"

    def files(self, files: list[Path]) -> list[Path]:
        """Returns the files of this part: consecutive ones, with about the same bytes in each part.

        A file is in the part in which the middle of its bytes lies.
        """
        sizes = np.array([sources.size_of(path) for path in files], np.int64)
        middles_twice = 2 * np.cumsum(sizes) - sizes
        total_twice = max(1, 2 * int(sizes.sum()))
        parts = [int(middle) * self.count // total_twice for middle in middles_twice]
        # Empty files at the end have their middle at the end of all.
        return [
            path
            for path, part in zip(files, parts, strict=True)
            if min(part, self.count - 1) == self.index
        ]


def all_parts(count: int) -> list[Part]:
    return [Part(index, count) for index in range(count)]


def parse(text: str) -> Part:
    """Returns the part that I/N names; raises ConfigError."""
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
    if not match:
        raise ConfigError(f"--part={text}: write I/N, such as 0/8 for the first part of 8")
    index, count = int(match[1]), int(match[2])
    if index >= count:
        last = f"0 to {count - 1}" if count else "0 to N - 1"
        raise ConfigError(f"--part={text}: I is from {last}; jobs of an array are numbered from 0")
    return Part(index, count)
