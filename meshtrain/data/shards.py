"""Writes documents as shards, so that a run that was killed goes on after the last whole one.

progress.jsonl in the folder says how far it is: its first line are the settings, every other one a shard
that is whole, with the place in the inputs where the next begins. The manifest takes its place at the end.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshtrain.data import indexed
from meshtrain.data import prepared as manifest
from meshtrain.data.inputs import Place
from meshtrain.errors import ConfigError

KEPT = 20  # faults of a shard, or of all, that are kept in words


class Journal:
    """What is done in a folder; keeps other processes out of it until it is closed."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        """Opens or begins a folder; raises ConfigError where it holds anything else, or is in use."""
        self.path = folder / manifest.JOURNAL
        self.is_done = False
        self.shards: list[dict[str, Any]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            others = {path.name for path in folder.iterdir()}
            if others and not others & {manifest.NAME, manifest.JOURNAL}:
                raise ConfigError(
                    f"--output={folder}: holds other files; use an empty or new folder"
                )
            self._file = open(self.path, "a+b")
        except OSError as error:
            raise ConfigError(f"--output={folder}: {error.strerror}; use another folder") from None
        try:
            self._begin(folder, settings)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, folder: Path, settings: dict[str, Any]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--output={folder}: another prepare is at work in it; let it end"
            ) from None
        if (folder / manifest.NAME).exists():
            self.is_done = True
            _check_same(folder, manifest.read(folder)["settings"], settings)
            self.finish()
            return
        lines = self._whole_lines()
        if len(lines) < 2:  # no shard yet: nothing is lost
            self._file.truncate(0)
            if lines != [{"settings": settings}]:
                (folder / "tokenizer.json").unlink(missing_ok=True)  # learned for other settings
            self._append({"settings": settings})
            manifest.sync(folder)
            return
        _check_same(folder, lines[0]["settings"], settings)
        self.shards = lines[1:]
        for shard in self.shards:
            for kind, file in shard["files"].items():
                path = folder / f"{shard['name']}.{kind}"
                if not path.is_file() or path.stat().st_size != file["size"]:
                    raise ConfigError(
                        f"{path}: was whole and is not; remove {folder} and start again"
                    )

    def _whole_lines(self) -> list[dict[str, Any]]:
        """Returns the lines; cuts off the last where it was not written to its end."""
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, shard: dict[str, Any]) -> None:
        self._append(shard)
        self.shards.append(shard)

    @property
    def next(self) -> Place:
        """Where in the inputs the next shard begins."""
        return Place(*self.shards[-1]["next"]) if self.shards else Place()

    def finish(self) -> None:
        """Removes the journal; the manifest is there."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def close(self) -> None:
        self._file.close()


def _check_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    differ = [key for key in here.keys() | there.keys() if here.get(key) != there.get(key)]
    told = [
        "the inputs have changed (files, sizes or times)"
        if key == "inputs"
        else f"{key} was {there.get(key)!r}, and is {here.get(key)!r}"
        for key in sorted(differ)
    ]
    if told:
        raise ConfigError(
            f"--output={folder}: was begun otherwise: {'; '.join(told)}; use another --output, or remove it"
        )


class Shards:
    """Takes documents one after the other; a shard is closed by the document that fills it."""

    def __init__(self, folder: Path, journal: Journal, *, dtype: np.dtype, shard_tokens: int):
        self._folder, self._journal = folder, journal
        self._dtype, self._shard_tokens = dtype, shard_tokens
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._name = f"{len(self._journal.shards):05d}"
        self._lengths: list[int] = []
        self._tokens = self._in_document = self._text_bytes = self._num_faults = 0
        self._faults: list[str] = []
        self._hash = hashlib.sha256()

    @property
    def _new(self) -> Path:
        return self._folder / f"{self._name}.bin.new"

    def write(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Adds tokens to the document that is being written."""
        if self._file is None:
            self._file = open(self._new, "wb")
        data = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._in_document += len(tokens)
        self._text_bytes += text_bytes

    def end(self, after: Place) -> None:
        """Ends the document; the next one begins at `after`."""
        self._lengths.append(self._in_document)
        self._tokens += self._in_document
        self._in_document = 0
        if self._tokens >= self._shard_tokens:
            self._close(after)

    def skip(self, fault: str) -> None:
        """Takes note of a document that is left out."""
        self._num_faults += 1
        if len(self._faults) < KEPT:
            self._faults.append(fault)

    def _close(self, after: Place) -> None:
        files = {}
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            os.replace(self._new, self._folder / f"{self._name}.bin")
            index = indexed.pack_index(np.array(self._lengths, np.int64), self._dtype)
            manifest.write(self._folder / f"{self._name}.idx", index)
            size = self._tokens * self._dtype.itemsize
            files["bin"] = {"size": size, "sha256": self._hash.hexdigest()}
            files["idx"] = {"size": len(index), "sha256": hashlib.sha256(index).hexdigest()}
        self._journal.add(
            {
                "name": self._name,
                "documents": len(self._lengths),
                "tokens": self._tokens,
                "text_bytes": self._text_bytes,
                "files": files,
                "skipped": self._num_faults,
                "faults": self._faults,
                "next": after,
            }
        )
        self._begin()

    def close(self, after: Place) -> None:
        """Writes what is left, at the end of all inputs."""
        if self._lengths or self._num_faults:
            self._close(after)

    def abandon(self) -> None:
        """Leaves a shard that is not whole; it is written anew when the run goes on."""
        if self._file is not None:
            self._file.close()


def summary(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the manifest says of the shards, and of all together."""
    kept = ("name", "documents", "tokens", "text_bytes", "files")
    totals = {key: sum(one[key] for one in shards) for key in ("documents", "tokens", "text_bytes")}
    faults = [fault for one in shards for fault in one["faults"]]
    skipped = {"count": sum(one["skipped"] for one in shards), "first": faults[:KEPT]}
    written = [{key: one[key] for key in kept} for one in shards if one["files"]]
    return totals | {"skipped": skipped, "shards": written}
