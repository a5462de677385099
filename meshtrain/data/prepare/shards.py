"""Write documents as shards; a run that was killed resumes after its last complete shard.

The journal is progress.jsonl in the folder. Its first line holds the settings. Every other line
describes a complete shard, and the position in the inputs where the next one begins. At the end,
the manifest replaces the journal.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import isal_zlib

from meshtrain import foreign, storage
from meshtrain.data import indexed, prepared
from meshtrain.data.indexed import Shard
from meshtrain.data.prepare.outputs import LOCK, Locked, Output
from meshtrain.data.prepare.records import Position
from meshtrain.errors import ConfigError

FIRST_LINE = b'{"settings": {'  # of a journal
MAX_BYTES = 256 << 20  # of a journal
TEXT = "text"  # extension of the file with the size of each document, in a part
COPY_TOKENS = 1 << 24  # at a time
PARTS = "parts"  # in the settings: the number of parts that are prepared apart, see parts.py
MAX_FAULTS = 20  # messages stored per shard, and in the manifest; further faults are only counted


class Journal:
    """The progress of a prepared folder. Holds a lock on the folder until it is closed."""

    def __init__(self, output: Output, settings: dict[str, Any]):
        """Open or create a folder; raises ConfigError if it holds other files, Locked if locked."""
        folder = output.folder
        self.path = folder / prepared.JOURNAL
        self.settings = settings
        self.is_done = False
        self.shards: list[dict[str, Any]] = []
        self._output = output
        try:
            folder.mkdir(parents=True, exist_ok=True)
            output.acquire()
            output.fetch()
            names = {name for name in output.names() if name != LOCK}
            if names and prepared.MANIFEST not in names and not _is_own(self.path):
                raise ConfigError(
                    f"--output={output.name}: holds other files; use an empty or new folder"
                )
            self._file = open(self.path, "a+b")
        except OSError as error:
            output.release()
            raise ConfigError(
                f"--output={output.name}: {error.strerror}; use another folder"
            ) from None
        except ConfigError:
            output.release()
            raise
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Lock the folder; read the shards that are complete, or write the first line."""
        folder = self.path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(
                f"--output={self._output.name}: another `meshtrain prepare` is running in it; "
                f"wait until it ends"
            ) from None
        if (folder / prepared.MANIFEST).exists():
            self.is_done = True
            check_settings(self._output, read_settings(folder / prepared.MANIFEST), self.settings)
            self.finish()  # it was opened for the lock
            return
        lines = self._read_complete_lines()
        if lines and PARTS in {*lines[0].get("settings", {}), *self.settings}:
            # Their folders are there even if the journal lists no shard.
            check_settings(self._output, lines[0]["settings"], self.settings)
        if len(lines) < 2:  # no complete shard, so there is nothing to resume
            if lines != [{"settings": self.settings}]:
                self._file.truncate(0)
                # The old tokenizer may have been trained with other settings.
                self._output.remove("tokenizer.json")
                self._append({"settings": self.settings})
                storage.sync(folder)
            return
        check_settings(self._output, lines[0]["settings"], self.settings)
        self.shards = lines[1:]
        sizes = {}
        try:
            for shard in self.shards:
                for kind, file in shard["files"].items():
                    name = f"{shard['name']}.{kind}"
                    if not foreign.is_file_name(name):
                        raise TypeError(f"{name!r} is not the name of a file in its folder")
                    sizes[name] = file["size"]
                counts = [shard[key] for key in ("documents", "tokens", "text_bytes", "skipped")]
                numbers = [*counts, *Position(*shard["next"])]
                if not all(isinstance(number, int) and number >= 0 for number in numbers):
                    raise TypeError("a count is not an integer of 0 or more")
                if not isinstance(shard["faults"], list):
                    raise TypeError("its faults are not a list")
        except (KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from error
        missing = self._output.missing(sizes)
        if missing:
            raise ConfigError(
                f"{self._output.name}/{missing[0]}: changed since it was written; remove "
                f"{self._output.name} and start again"
            )

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path}: is damaged: {error!r}; remove {self.path.parent} and start again"
        )

    def _read_complete_lines(self) -> list[dict[str, Any]]:
        """Returns the lines; removes an incomplete last line from the file."""
        self._file.seek(0)
        text = self._file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise self._damaged(ValueError(f"larger than {MAX_BYTES:,} bytes"))
        complete = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(complete))
        try:
            lines = [foreign.parse_json(line) for line in complete.splitlines()]
        except ValueError as error:
            raise self._damaged(error) from error
        if not all(isinstance(line, dict) for line in lines):
            raise self._damaged(ValueError("a line is not an object"))
        return lines

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._output.publish([prepared.JOURNAL])

    def add(self, shard: dict[str, Any]) -> None:
        """Add a shard whose files are complete on the local disk."""
        names = [f"{shard['name']}.{kind}" for kind in shard["files"]]
        self._output.publish(names)
        self._append(shard)
        self._output.discard(names)
        self.shards.append(shard)

    @property
    def next_position(self) -> Position:
        """The position in the inputs where the next shard begins."""
        return Position(*self.shards[-1]["next"]) if self.shards else Position()

    def finish(self) -> None:
        """Remove the journal; the manifest replaces it."""
        self._output.remove(prepared.JOURNAL)

    def close(self) -> None:
        self._file.close()
        self._output.release()


def _is_own(journal: Path) -> bool:
    """Returns whether `meshtrain prepare` wrote a journal; it may end within its first line."""
    if not journal.is_file():
        return False
    with foreign.open_file(journal) as file:
        line = file.readline(foreign.MAX_JSON_BYTES)
    is_incomplete = not line.endswith(b"\n") and line.startswith(FIRST_LINE[: len(line)])
    return is_incomplete or prepared.is_prepared(journal.parent)


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the settings in a manifest; {} if it is corrupt."""
    try:
        return dict(foreign.read_json(path).get("settings", {}))
    except (OSError, ValueError, TypeError):
        return {}


def check_settings(output: Output, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ConfigError if the folder was started with different settings."""
    old = old if isinstance(old, dict) else {}
    changes = []
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) == old.get(key):
            continue
        if key == "inputs":
            changes.append("the inputs have changed (files, sizes or times)")
        elif key == PARTS:
            was, now = (f"--part=I/{one[key]}" if key in one else "no --part" for one in (old, new))
            changes.append(f"with {was}, now {now}")
        else:
            changes.append(f"{key} was {old.get(key)!r}, now {new.get(key)!r}")
    if changes:
        raise ConfigError(
            f"--output={output.name}: was started with different settings: {'; '.join(changes)}; "
            f"use another --output, or remove it"
        )


class ShardWriter:
    """Writes documents to shards. A shard is finished after the document that fills it."""

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        *,
        dtype: np.dtype,
        shard_tokens: int,
        keeps_text_bytes: bool = False,
    ):
        """With `keeps_text_bytes` a shard has a further file, NAME.text: int64 of each document."""
        self._folder = folder
        self._keeps_text_bytes = keeps_text_bytes
        self._journal = journal
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._start_shard()

    def _start_shard(self) -> None:
        self._name = f"{len(self._journal.shards):05d}"
        self._lengths: list[int] = []  # tokens of each document
        self._text_lengths: list[int] = []  # bytes of each document, before it was tokenized
        self._document_tokens = 0  # of the current document
        self._document_text_bytes = 0
        self._tokens = 0  # of all documents before it
        self._text_bytes = 0  # of all documents, and of the current one
        self._num_faults = 0
        self._faults: list[str] = []
        self._hash = hashlib.sha256()
        self._size = 0  # bytes written
        self._checksums = [0]  # CRC-32 of each part; the last is of what is written so far

    @property
    def _partial_path(self) -> Path:
        return self._folder / f"{self._name}.bin.new"

    def write(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append tokens to the current document."""
        self._write(tokens)
        self._document_tokens += len(tokens)
        self._document_text_bytes += text_bytes
        self._text_bytes += text_bytes

    def _write(self, tokens: np.ndarray) -> None:
        if self._file is None:
            self._file = open(self._partial_path, "wb")
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._add_checksums(data)

    def _add_checksums(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = len(self._checksums) * prepared.PART_BYTES - self._size
            self._checksums[-1] = isal_zlib.crc32(view[:room], self._checksums[-1])
            self._size += min(room, len(view))
            if len(view) > room:
                self._checksums.append(0)
            view = view[room:]

    def end_document(self, next_position: Position) -> None:
        """End the current document; the next one begins at `next_position` in the inputs."""
        self._lengths.append(self._document_tokens)
        self._text_lengths.append(self._document_text_bytes)
        self._tokens += self._document_tokens
        self._document_tokens = self._document_text_bytes = 0
        if self._tokens >= self._shard_tokens:
            self._finish_shard(next_position)

    def copy(self, shard: Shard, text_lengths: np.ndarray, *, number: int, first: int) -> None:
        """Append the documents of shard `number` of the parts, from document `first` on.

        The shards are those that `write` and `end_document` would make of the same documents.
        """
        num_documents = len(shard.starts) - 1
        while first < num_documents:
            ends = self._tokens + shard.starts[first + 1 :] - shard.starts[first]
            # Up to the document that fills the shard.
            end = first + int(np.searchsorted(ends, self._shard_tokens)) + 1
            end = min(end, num_documents)
            for start in range(shard.starts[first], shard.starts[end], COPY_TOKENS):
                self._write(shard.tokens[start : min(start + COPY_TOKENS, shard.starts[end])])
            self._lengths += np.diff(shard.starts[first : end + 1]).tolist()
            self._tokens += int(shard.starts[end] - shard.starts[first])
            self._text_lengths += text_lengths[first:end].tolist()
            self._text_bytes += int(text_lengths[first:end].sum())
            first = end
            if self._tokens >= self._shard_tokens:
                self._finish_shard(Position(number, first))

    def add_fault(self, fault: str) -> None:
        """Count a skipped document, and store its fault."""
        self._num_faults += 1
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(fault)

    def _finish_shard(self, next_position: Position) -> None:
        files = {}
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            os.replace(self._partial_path, self._folder / f"{self._name}.bin")
            index = indexed.pack_index(np.array(self._lengths, np.int64), self._dtype)
            prepared.write_durably(self._folder / f"{self._name}.idx", index)
            files["bin"] = {
                "size": self._tokens * self._dtype.itemsize,
                "sha256": self._hash.hexdigest(),
                "part_bytes": prepared.PART_BYTES,
                "crc32": "".join(f"{checksum:08x}" for checksum in self._checksums),
            }
            files["idx"] = {"size": len(index), "sha256": hashlib.sha256(index).hexdigest()}
            if self._keeps_text_bytes:
                data = np.array(self._text_lengths, "<i8").tobytes()
                prepared.write_durably(self._folder / f"{self._name}.{TEXT}", data)
                files[TEXT] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        # The files are on disk, so the journal may list them.
        self._journal.add(
            {
                "name": self._name,
                "documents": len(self._lengths),
                "tokens": self._tokens,
                "text_bytes": self._text_bytes,
                "files": files,
                "skipped": self._num_faults,
                "faults": self._faults,
                "next": next_position,
            }
        )
        self._start_shard()

    def finish(self, next_position: Position) -> None:
        """Finish the last shard, at the end of all inputs."""
        if self._lengths or self._num_faults:
            self._finish_shard(next_position)

    def close(self) -> None:
        """Close the file of an unfinished shard; a resumed run writes the shard again."""
        if self._file is not None:
            self._file.close()


def summary(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entries of the shards in the manifest, and their totals."""
    entries = []
    faults = []
    for shard in shards:
        faults += shard["faults"]
        if shard["files"]:  # a shard of skipped documents has none
            keys = ("name", "documents", "tokens", "text_bytes", "files")
            entries.append({key: shard[key] for key in keys})
    return {
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "text_bytes": sum(shard["text_bytes"] for shard in shards),
        "skipped": {
            "count": sum(shard["skipped"] for shard in shards),
            "first": faults[:MAX_FAULTS],
        },
        "shards": entries,
    }
