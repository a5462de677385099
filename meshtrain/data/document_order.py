"""A new order of the documents in each epoch, for windows of the stream.

The documents of a file are shuffled among NEIGHBOURS that follow each other there: windows begin in
the same places of the stream, and hold other documents together. So a token's place is computed
from few lengths, of any number of documents, and what is read of a file lies near by.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from meshtrain.data.corpus import Corpus, check_ids, concatenate_ranges, gather
from meshtrain.data.mixture import permute

# B windows, W tokens of a window

NEIGHBOURS = 4096  # documents that are shuffled together
GROUPS = 256  # groups of them whose order is remembered: 64 bytes for each document


class _Group(NamedTuple):
    """Documents that are shuffled together, in their new order."""

    starts: np.ndarray  # first token of each document in the stream
    ends: np.ndarray  # where its last token is now, + 1
    lengths: np.ndarray

    @property
    def last(self) -> int:
        """Returns where the group ends, which does not depend on its order."""
        return int(self.ends[-1])


class Pieces(NamedTuple):
    """Parts of documents that follow each other in windows."""

    starts: np.ndarray  # first token of each in the stream
    lengths: np.ndarray
    is_document_start: np.ndarray  # whether a document begins with it


class DocumentOrder:
    """The documents of tokens `first` ... `last` - 1 of a stream, shuffled in each epoch.

    `key(epoch, group)` is that of the order of a group.
    """

    def __init__(self, corpus: Corpus, first: int, last: int, key: Callable[[int, int], int]):
        assert corpus.document_starts is not None
        self._corpus = corpus
        self._first, self._last = first, last
        self._key = key
        # First document of each file, and their number.
        self._files = np.searchsorted(corpus.document_starts, corpus.file_offsets)
        self._group = functools.lru_cache(maxsize=GROUPS)(self._compute_group)

    def pieces(self, epochs_B: np.ndarray, starts_B: np.ndarray, width: int) -> Pieces:
        """Returns what windows of `width` tokens hold that begin at `starts_B` in the new order."""
        starts, lengths, is_start = [], [], []
        for epoch, start in zip(epochs_B.tolist(), starts_B.tolist(), strict=True):
            position, end = start, start + width
            while position < end:
                group = self._group_at(epoch, position)
                number = int(np.searchsorted(group.ends, position, side="right"))
                while position < min(end, group.last):
                    left = int(group.ends[number]) - position  # of this document
                    offset = int(group.lengths[number]) - left
                    starts.append(int(group.starts[number]) + offset)
                    lengths.append(min(left, end - position))
                    is_start.append(offset == 0)
                    position += lengths[-1]
                    number += 1
        return Pieces(np.array(starts), np.array(lengths), np.array(is_start))

    def read(
        self, epochs_B: np.ndarray, starts_B: np.ndarray, width: int, vocab_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns windows (B, W) int32, and whether a token begins a document (B, W) bool."""
        pieces = self.pieces(epochs_B, starts_B, width)
        offsets = self._corpus.file_offsets
        places = np.cumsum(pieces.lengths) - pieces.lengths
        tokens = np.empty(len(starts_B) * width, np.int32)
        files = np.searchsorted(offsets, pieces.starts, side="right") - 1
        for file in np.unique(files):
            selected = files == file
            starts, lengths = pieces.starts[selected] - offsets[file], pieces.lengths[selected]
            part = gather(self._corpus.file_tokens[file], starts, lengths)
            check_ids(self._corpus, part, vocab_size)
            tokens[concatenate_ranges(places[selected], lengths)] = part
        is_start = np.zeros(len(tokens), bool)
        is_start[places] = pieces.is_document_start
        return tokens.reshape(-1, width), is_start.reshape(-1, width)

    def _group_at(self, epoch: int, position: int) -> _Group:
        """Returns the group that holds a token of the stream, in the order of an epoch."""
        starts = self._corpus.document_starts
        document = int(np.searchsorted(starts, position, side="right")) - 1
        file = int(np.searchsorted(self._files, document, side="right")) - 1
        number = (document - int(self._files[file])) // NEIGHBOURS
        return self._group(epoch, file, number)

    def _compute_group(self, epoch: int, file: int, number: int) -> _Group:
        begin = int(self._files[file]) + number * NEIGHBOURS
        end = min(begin + NEIGHBOURS, int(self._files[file + 1]))
        borders = np.asarray(self._corpus.document_starts[begin : end + 1])
        # Of documents that the border of a split cuts, the part in this split.
        borders = np.clip(borders, self._first, self._last)
        lengths = np.diff(borders)
        documents = np.flatnonzero(lengths)
        key = self._key(epoch, begin)
        order = documents[permute(np.arange(len(documents)), len(documents), key)]
        ends = borders[0] + np.cumsum(lengths[order])
        return _Group(borders[:-1][order], ends, lengths[order])
