"""Starts parts of a preparation, and copies their shards to the output when all are finished."""

import json
import time
from typing import Any

import numpy as np

from meshtrain import console, foreign
from meshtrain.data import indexed, prepared
from meshtrain.data.prepare import folder, parts, shards
from meshtrain.data.prepare.outputs import LOCK, Locked, Output
from meshtrain.data.prepare.parts import Part
from meshtrain.data.prepare.records import Position
from meshtrain.errors import ConfigError

MAX_SHOWN = 10  # missing parts


def is_finished(output: Output, settings: dict[str, Any]) -> bool:
    """Returns whether the output has its manifest; raises ConfigError if with other settings."""
    output.fetch([prepared.MANIFEST])
    path = output.folder / prepared.MANIFEST
    if not path.is_file():
        return False
    shards.check_settings(output, shards.read_settings(path), settings)
    return True


def begin(output: Output, settings: dict[str, Any], count: int) -> None:
    """Create the journal of the output, or check that it has these settings and parts.

    Raises ConfigError if it has others, or if the output holds other files.
    """
    expected = {**settings, shards.PARTS: count}
    others = {*output.names()} - {prepared.JOURNAL, LOCK}
    if output.missing({prepared.JOURNAL: None}):
        if [name for name in others if not name.startswith((".", parts.FOLDER))]:
            raise ConfigError(
                f"--output={output.name}: holds other files; use an empty or new folder"
            )
        line = json.dumps({"settings": expected}).encode() + b"\n"
        if output.create(prepared.JOURNAL, line):
            return
    found = _settings(output)
    if found:  # otherwise another part has finished all
        shards.check_settings(output, found, expected)


def num_parts(output: Output) -> int:
    """Returns the number of parts with which the output was started; 0: it was not."""
    return int(_settings(output).get(shards.PARTS, 0))


def _settings(output: Output) -> dict[str, Any]:
    """Returns the settings in the journal of the output; {} if there is none."""
    output.fetch([prepared.JOURNAL])
    try:
        with foreign.open_file(output.folder / prepared.JOURNAL) as file:
            return dict(foreign.parse_json(file.readline(foreign.MAX_JSON_BYTES))["settings"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{output.name}/{prepared.JOURNAL}: is damaged: {error}; remove {output.name} and "
            f"start again"
        ) from None


def missing_parts(output: Output, count: int) -> list[Part]:
    """Returns the parts that are not finished."""
    manifests = {f"{part.folder}/{prepared.MANIFEST}": part for part in parts.all_parts(count)}
    missing = output.missing(dict.fromkeys(manifests))
    return [manifests[name] for name in missing]


def finish(output: Output, settings: dict[str, Any], count: int) -> None:
    """Copy the shards of all parts to the output, and remove the parts; or log which are missing.

    Nothing is done if another process does it, or has done it.
    """
    if is_finished(output, settings):
        clean(output)
        return
    missing = missing_parts(output, count)
    if missing:
        shown = ", ".join(str(part.index) for part in missing[:MAX_SHOWN])
        more = f" and {len(missing) - MAX_SHOWN:,} more" if len(missing) > MAX_SHOWN else ""
        console.say(
            f"{output.name}: {count - len(missing)} of {count} parts are finished; missing: "
            f"{shown}{more}. The last one writes the output"
        )
        return
    began = time.monotonic()
    try:
        journal = shards.Journal(output, {**settings, shards.PARTS: count})
    except Locked:
        console.say(f"{output.name}: all parts are finished; another process writes the output")
        return
    try:
        if not journal.is_done:
            _merge(output, settings, journal, count, began)
        clean(output)
    finally:
        journal.close()


def clean(output: Output) -> None:
    """Remove the parts and the journal of a finished output; another process may do so too."""
    output.remove(parts.FOLDER)
    output.remove(prepared.JOURNAL)


def _merge(
    output: Output, settings: dict[str, Any], journal: shards.Journal, count: int, began: float
) -> None:
    manifests = []
    for part in parts.all_parts(count):
        of_part = output.subfolder(part.folder)
        of_part.fetch([prepared.MANIFEST])
        manifests.append(foreign.read_json(of_part.folder / prepared.MANIFEST))
    first = manifests[0]
    for part, manifest in zip(parts.all_parts(count), manifests, strict=True):
        if manifest["tokenizer"] != first["tokenizer"]:
            raise ConfigError(
                f"{output.name}/{part.folder}: its tokenizer is not that of part 0; remove "
                f"{output.name} and start again with the same versions on all machines"
            )
    of_first = output.subfolder(parts.Part(0, count).folder)
    names = [name for name in (prepared.TOKEN_BYTES, first["tokenizer"]["file"]) if name]
    of_first.fetch(names)
    for name in names:
        prepared.write_durably(output.folder / name, (of_first.folder / name).read_bytes())
    output.publish(names)

    writer = shards.ShardWriter(
        output.folder,
        journal,
        dtype=np.dtype(first["dtype"]),
        shard_tokens=settings["shard_tokens"],
    )
    start = journal.next_position
    entries = [
        (part, entry)
        for part, manifest in zip(parts.all_parts(count), manifests, strict=True)
        for entry in manifest["shards"]
    ]
    try:
        with console.progress("writing", sum(entry["tokens"] for _, entry in entries)) as advance:
            for number, (part, entry) in enumerate(entries):
                if number >= start.file:
                    begin_at = start.offset if number == start.file else 0
                    _copy(writer, output.subfolder(part.folder), entry, number, begin_at)
                advance(entry["tokens"])
        writer.finish(Position(len(entries)))
    finally:
        writer.close()
    faults = [fault for manifest in manifests for fault in manifest["skipped"]["first"]]
    manifest = {
        **{key: first[key] for key in ("version", "tokenizer")},
        "settings": settings,
        "dtype": first["dtype"],
        **shards.summary(journal.shards),
        "skipped": {
            "count": sum(manifest["skipped"]["count"] for manifest in manifests),
            "first": faults[: shards.MAX_FAULTS],
        },
    }
    folder.finish(output, manifest, time.monotonic() - began)


def _copy(
    writer: shards.ShardWriter, of_part: Output, entry: dict[str, Any], number: int, first: int
) -> None:
    """Copy the documents of a shard of a part, from document `first` on."""
    names = [f"{entry['name']}.{kind}" for kind in ("bin", "idx", shards.TEXT)]
    of_part.fetch(names)
    text_lengths = np.fromfile(of_part.folder / names[2], "<i8")
    shard = indexed.load(str(of_part.folder / entry["name"]))
    writer.copy(shard, text_lengths, number=number, first=first)
    of_part.discard(names)
