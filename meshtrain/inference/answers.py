"""Answers of a model that a file keeps, so that an interrupted evaluation continues.

The file has a line for each answer: the digest of the request, and the answer as JSON.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain import foreign, storage
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError

LINES_AT_ONCE = 64


class Answers:
    """The answers of one model. Without a file nothing is kept."""

    def __init__(self, file: Path | None = None, *, identity: str = ""):
        """`identity` is that of the model: answers of others are not used.

        Raises ConfigError if the file cannot be read or written.
        """
        self._file = file
        self._identity = identity
        self._known: dict[str, Any] = {}
        self._new: list[str] = []
        # Process 0 alone reads and writes it.
        self._is_leader = distributed.process_id() == 0
        if file is not None and self._is_leader:
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"--cache={file}: {error.strerror}; use another file") from None
        for line in lines:
            try:
                entry = foreign.parse_json(line)
                self._known[entry["key"]] = entry["answer"]
            except (ValueError, KeyError, TypeError):
                continue  # a line that is not complete

    def known(self, requests: Sequence[Any]) -> dict[int, Any]:
        """Returns the known answers by the number of their request, the same on all processes."""
        if self._file is None:
            return {}
        found = {}
        if self._is_leader:
            for number, request in enumerate(requests):
                key = self._key(request)
                if key in self._known:
                    found[str(number)] = self._known[key]
        return {int(number): answer for number, answer in distributed.broadcast(found).items()}

    def add(self, request: Any, answer: Any) -> None:
        """Keeps an answer; `flush` writes it, or one of the next calls."""
        if self._file is None or not self._is_leader:
            return
        self._new.append(json.dumps({"key": self._key(request), "answer": answer}) + "\n")
        if len(self._new) >= LINES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Writes the answers that are not written yet."""
        if not self._new:
            return
        try:
            storage.append_lines(self._file, self._new)
        except OSError as error:
            raise ConfigError(
                f"--cache={self._file}: {error.strerror}; make room, or use another file"
            ) from None
        self._new.clear()

    def _key(self, request: Any) -> str:
        text = json.dumps([self._identity, request], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
