"""The inputs of `meshtrain prepare`: finds the files, and reads their records in order.

READERS has one line for each format. Their modules read a file from any position on.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from meshtrain import object_store, storage
from meshtrain.data import files, formats, prepared
from meshtrain.data.prepare import (
    array_records,
    csv_rows,
    json_records,
    saved_datasets,
    sources,
    streams,
    tables,
    text,
)
from meshtrain.data.prepare.records import (
    START,
    Position,
    ReadOptions,
    Record,
    max_document_bytes,
)
from meshtrain.errors import ConfigError

MAX_REQUESTS = 32  # at once
MAX_SHOWN = 5  # lines about files of the same kind


class Reader(NamedTuple):
    """A format with fields; all other files are text."""

    name: str  # in messages
    extensions: tuple[str, ...]
    read: Callable[[Path, ReadOptions, Position], Iterator[Record]]
    may_be_compressed: bool  # as a file; the others compress parts of themselves


READERS = (
    Reader("JSON lines", (".jsonl", ".ndjson", ".json"), json_records.read, True),
    Reader("a table", (".csv", ".tsv"), csv_rows.read, True),
    Reader("a Parquet file", (".parquet",), tables.read_parquet, False),
    Reader("an Arrow file", (".arrow", ".feather", ".ipc"), tables.read_arrow, False),
    Reader("an ArrayRecord file", (".array_record", ".arrayrecord"), array_records.read, False),
)

# Of the files that are read in a folder, without the extension of a compressed file.
EXTENSIONS = (".txt", *(one for reader in READERS for one in reader.extensions))


def find_files(
    inputs: list[str], pattern: str, output: Path, *, split: str = "", skip_bad: bool = False
) -> tuple[list[Path], list[str]]:
    """Returns the input files, including those in input folders, and lines about what is ignored.

    Ignored are hidden files in folders, what `meshtrain prepare` wrote (to `output`, or before), a
    file that another path names too, and with `skip_bad` files of a format that is not read. Of a
    folder with several splits that the library datasets wrote, `split` is read.
    The order is shuffled with a fixed seed: training may hold out the end, which is then a fair
    sample. The files of a saved dataset remain together in their order, as its rows would in one
    file. Raises ConfigError for an input that cannot be read, or a folder without matching files.
    """
    paths: list[Path] = []
    faults: list[str] = []
    ignored_folders: set[Path] = set()
    others: list[Path] = []  # files with other extensions
    splits: list[saved_datasets.Split] = []
    for name in inputs:
        fault = "" if object_store.is_url(name) else files.path_fault(Path(name))
        if fault:
            faults.append(f"{name}: {fault}; give files or folders of text")
            continue
        found = _find(name, pattern)
        others += found.others
        splits += found.splits
        in_output = [file for file in found.files if output.resolve() in file.resolve().parents]
        ignored_folders.update(found.prepared_folders)
        ignored_folders.update(file.parent for file in in_output)
        if in_output and not _is_output(output):
            faults.append(f"--output={output}: holds {in_output[0]}, an input; use another folder")
        elif not found.files and not found.prepared_folders and not found.splits:
            kinds = f"match --pattern={pattern}" if pattern else f"end in {', '.join(EXTENSIONS)}"
            faults.append(
                f"{name}: no files in it {kinds}; give another folder or --pattern"
                f"{_known_format(found.others)}"
            )
        paths += [file for file in found.files if file.parent not in ignored_folders]
    if split and not splits:
        faults.append(
            f"--split={split}: no input is a folder with splits that the library datasets wrote; "
            f"leave it out, or choose files with --pattern"
        )
    if not paths and not splits and not faults:
        faults.append(f"{', '.join(inputs)}: written by `meshtrain prepare`; give the text itself")
    if faults:
        raise ConfigError(*map(storage.readable, faults))
    together: dict[Path, Path] = {}  # file of a saved dataset -> its first file
    for one in saved_datasets.chosen(splits, split):
        paths += one.files
        together.update((file, one.files[0]) for file in one.files)
    if not paths:  # a saved dataset without rows has no files
        raise ConfigError(f"{', '.join(inputs)}: the inputs contain no document; give others")
    notes = []
    for folder in sorted(ignored_folders):
        notes.append(f"ignored: {folder}, which `meshtrain prepare` wrote")
    if others:
        notes.append(
            f"ignored: {len(others):,} files that do not end in {', '.join(EXTENSIONS)}; "
            f"--pattern=GLOB selects others{_known_format(others)}"
        )
    paths, repeated = _without_repeated(paths)
    notes += _first_of(repeated)
    misread = _misread(paths, inputs)
    if misread and not skip_bad:
        raise ConfigError(*map(storage.readable, _first_of([*misread.values()])))
    notes += [f"skipped {fault}" for fault in misread.values()]
    units: dict[Path, list[Path]] = {}
    for path in paths:
        if path not in misread:
            units.setdefault(together.get(path, path), []).append(path)
    order = np.random.default_rng(0).permutation(len(units))
    shuffled = [[*units.values()][number] for number in order]
    return [path for unit in shuffled for path in unit], [*map(storage.readable, notes)]


def _misread(paths: list[Path], inputs: list[str]) -> dict[Path, str]:
    """Returns a line about each file that cannot be read as what its name says."""
    is_url = object_store.is_url
    named = {object_store.scratch_folder(one) if is_url(one) else Path(one) for one in inputs}
    # In threads, since an object takes a request or two.
    with ThreadPoolExecutor(MAX_REQUESTS) as pool:
        faults = [*pool.map(lambda path: format_fault(path, is_named=path in named), paths)]
    return {
        path: f"{path}: {fault}, or leave it out"
        for path, fault in zip(paths, faults, strict=True)
        if fault
    }


class _Found(NamedTuple):
    """What an input names."""

    files: list[Path]
    prepared_folders: list[Path] = []
    others: list[Path] = []  # in a folder, with extensions that are not read
    splits: list[saved_datasets.Split] = []


def _find(name: str, pattern: str) -> _Found:
    """Returns what a path or a URL names; without a pattern, by the extensions of a folder."""
    path = Path(name)
    if object_store.is_url(name):
        found, prepared_folders = _find_objects(name, pattern)
        if found == [object_store.scratch_folder(name)]:
            return _Found(found)
    elif path.is_dir():
        with files.report_errors(name):
            found, prepared_folders = files.find(path, pattern or "*", key="--pattern")
    else:
        folders = [path.parent] if prepared.is_prepared(path.parent) else []
        return _Found([path], folders)
    if pattern:
        return _Found(found, prepared_folders)
    splits, found = saved_datasets.find(found)
    known = []
    others = []
    for file in found:
        same_kind = known if extension_of(file) in EXTENSIONS else others
        same_kind.append(file)
    return _Found(known, prepared_folders, others, splits)


def _find_objects(url: str, pattern: str) -> tuple[list[Path], list[Path]]:
    """Returns the objects under a URL as `files.find` returns the files of a folder."""
    base = object_store.scratch_folder(url)
    objects = sources.list_objects(url)
    if objects == [base]:
        return objects, []
    prepared_folders = set()
    for path in objects:
        if path.name in (prepared.MANIFEST, prepared.JOURNAL):
            with sources.local_copy(path):
                if prepared.is_prepared(path.parent):
                    prepared_folders.add(path.parent)
    found = []
    for path in objects:
        is_prepared = not prepared_folders.isdisjoint(path.parents)
        # A prefix of names is none of their folders.
        inner = PurePosixPath(path.relative_to(base if base in path.parents else base.parent))
        is_hidden = any(part.startswith(".") for part in inner.parts)
        if not is_prepared and not is_hidden and inner.match(pattern or "*"):
            found.append(path)
    return found, sorted(prepared_folders)


def format_fault(path: Path, *, is_named: bool) -> str:
    """Returns why a file cannot be read as what its name says, and the way out; "": it can.

    `is_named` is False for a file of a folder.
    """
    reader = reader_of(path)
    compression = streams.compression_of(path)
    if reader and not reader.may_be_compressed:
        if not compression:
            return ""
        return f"is {reader.name} that is compressed once more; decompress it"
    known = formats.of_input(path, is_named=is_named)
    if known is None:
        return ""
    expected = reader.name if reader else "text"
    return f"is {known.name}, not {expected}; {formats.way_out(known, path, in_prepare=True)}"


def reader_of(path: Path) -> Reader | None:
    """Returns the reader of a file; None: it is text."""
    extension = extension_of(path)
    return next((one for one in READERS if extension in one.extensions), None)


def check_template(paths: list[Path]) -> None:
    """Raises ConfigError if a file has no fields for --template."""
    without = [path for path in paths if reader_of(path) is None and sources.size_of(path)]
    if without:
        raise ConfigError(
            f"--template: {sources.name_of(without[0])} is text, which has no fields; leave out "
            f"the text files ({len(without):,}), or the template"
        )


def check_separator(paths: list[Path], separator: str) -> None:
    """Raises ConfigError if no text file holds the separator; reads up to the first that does."""
    text_files = [path for path in paths if reader_of(path) is None]
    if not text_files:
        raise ConfigError(
            f"--separator={separator!r}: only text files are split, and the inputs have none; "
            f"leave it out"
        )
    if any(_holds(path, separator.encode()) for path in text_files):
        return
    escape = "; in bash, $'\\n' is a newline" if "\\" in separator else ""
    raise ConfigError(
        f"--separator={separator!r}: does not occur in the inputs, of which {len(text_files):,} "
        f"are text files{escape}; give the text between the documents, or leave it out: each file "
        f"is then a document"
    )


def _holds(path: Path, separator: bytes) -> bool:
    """Returns whether a file holds the separator; False if it cannot be read, reported later.

    True for a compressed file with a document that is too large, which is reported later too.
    """
    try:
        if not sources.size_of(path):
            return False  # not opened: a file of /proc may wait for ever
        with streams.open_at(path, 0) as (file, _):
            end = b""  # of the chunk before: the separator may lie between two
            while chunk := file.read(streams.CHUNK):
                if separator in end + chunk or file.tell() > max_document_bytes(path):
                    return True
                end = chunk[-len(separator) :]
    except streams.CORRUPT:
        pass
    return False


def _known_format(others: list[Path]) -> str:
    """Returns what to do with the first of the files that has a known format; "": none has."""
    for path in others:
        known = formats.by_name(path)
        if known:
            return f" ({path} is {known.name}: {formats.way_out(known, path, in_prepare=True)})"
    return ""


def _without_repeated(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Returns the paths without those of a file that an earlier one names, and a line for each.

    Links, `./a` and `a`, or a folder and a file in it name a file more than once.
    """
    first_names: dict[tuple, Path] = {}
    repeated = []
    for path in paths:
        if sources.is_stored(path):
            key = (path,)
        else:
            found = path.stat()
            key = (found.st_dev, found.st_ino)
        first = first_names.setdefault(key, path)
        if first is not path:
            same = "which is named twice" if path == first else f"the same file as {first}"
            repeated.append(f"ignored: {path}, {same}")
    return list(first_names.values()), repeated


def _first_of(lines: list[str]) -> list[str]:
    """Returns the first MAX_SHOWN lines, and the number of further ones."""
    num_more = len(lines) - MAX_SHOWN
    return lines if num_more <= 0 else [*lines[:MAX_SHOWN], f"and {num_more:,} more"]


def _is_output(folder: Path) -> bool:
    """Returns whether `meshtrain prepare` wrote a folder, even if it was killed at once."""
    return (folder / prepared.JOURNAL).exists() or prepared.is_prepared(folder)


def extension_of(path: Path) -> str:
    """Returns the extension without that of compression: a.txt.gz -> .txt

    TensorFlow's datasets have it before the number: a.array_record-00000-of-00010 -> .array_record
    """
    if streams.compression_of(path):
        path = path.with_suffix("")
    suffix = path.suffix.lower()
    return ".array_record" if suffix.startswith(".array_record-") else suffix


def fingerprint(files: list[Path]) -> str:
    """Returns a hash of the paths, sizes and modification times of the files."""
    stats = [(sources.name_of(path), *sources.stamp_of(path)) for path in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def read_records(
    files: list[Path],
    options: ReadOptions,
    last_split_point: Callable[[str], int],
    start: Position = START,
) -> Iterator[Record]:
    """Yields the records of the files, starting at `start`.

    `last_split_point` returns where a long text can be split; see tokenizer.py. Raises ConfigError
    for a file that cannot be read.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        begin = start if number == start.file else Position(file=number)
        reader = reader_of(path)
        try:
            if not sources.size_of(path):
                continue  # not opened: a file of /proc may wait for ever
            if reader:
                yield from reader.read(path, options, begin)
            elif options.separator:
                yield from text.read_separated(path, options, begin)
            elif not begin.number:
                yield from text.read_document(path, options, begin, last_split_point)
        except streams.CORRUPT as error:
            cause = str(error).strip().partition("\n")[0][:300]
            fault = f"{sources.name_of(path)}: cannot be read: {cause}; repair it or leave it out"
            raise ConfigError(fault) from None
