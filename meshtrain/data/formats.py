"""File formats that are neither plain text nor raw tokens: read as such, they would be noise."""

import shlex
from pathlib import Path
from typing import NamedTuple

from meshtrain import foreign
from meshtrain.data.prepare import sources, streams

PREPARE = "tokenize it with `meshtrain prepare`, and set data.path to its --output"
CONVERT = (
    "convert it to JSON lines or Parquet with a column of text and tokenize that with `meshtrain "
    "prepare`, or to a .npy file of token ids"
)
EXPORT = "save it as text"
# Commands that write the decompressed file to the standard output.
DECOMPRESS = {
    ".gz": "gzip -dc",
    ".zst": "zstd -dc",
    ".zstd": "zstd -dc",
    ".xz": "xz -dc",
    ".lzma": "xz -dc",
    ".bz2": "bzip2 -dc",
}
LOOK_AT = 1 << 16  # bytes of the first line that are read


class Format(NamedTuple):
    """A file format: how to recognise it, and what to do with such a file."""

    name: str
    way_out: str  # for data.path; FILE stands for the file, LINES for the same with .jsonl
    extensions: tuple[str, ...]
    magic: bytes = b""  # the first bytes; b"": it has none
    in_prepare: str = ""  # the way out for an input of `meshtrain prepare`; "": the same


def _stream(extensions: tuple[str, ...], magic: bytes = b"") -> Format:
    """Returns a compression that `meshtrain prepare` reads."""
    return Format(
        "compressed",
        PREPARE,
        extensions,
        magic,
        in_prepare=f"rename it to end in {extensions[0]}",
    )


def _compressed(command: str, extensions: tuple[str, ...], magic: bytes = b"") -> Format:
    return Format("compressed", f"decompress it first: `{command} FILE`", extensions, magic)


def _archive(command: str, extensions: tuple[str, ...], magic: bytes = b"") -> Format:
    return Format("an archive", f"unpack it first: `{command} FILE`", extensions, magic)


JSON_LINES = Format(
    "JSON lines",
    PREPARE,
    (".jsonl", ".ndjson"),
    in_prepare="rename it to end in .jsonl",
)
JSON = Format("JSON", PREPARE, (".json",))


def _json(name: str, command: str) -> Format:
    """Returns what a file with the name of JSON lines may hold instead."""
    return Format(
        name,
        f"{command}, and tokenize that with `meshtrain prepare`",
        (),
        in_prepare=command,
    )


JSON_ARRAY = _json("a JSON array", "convert it with `jq -c '.[]' FILE > LINES`")
JSON_TEXTS = _json(
    "a JSON array of texts", "convert it with `jq -c '.[] | {text: .}' FILE > LINES`"
)
JSON_OBJECT = _json(
    "a JSON object over several lines",
    "write each object on one line with `jq -c . FILE > LINES` (`.NAME[]` in place of `.` for a "
    "list in it)",
)
FEATHER_1 = Format(
    "a Feather file of version 1",
    "write its table (pyarrow.feather.read_table) as version 2 with pyarrow.feather.write_feather",
    (),
    b"FEA1",
)
TABLE = Format("a table", PREPARE, (".csv", ".tsv"))
# Text that may well be a document itself, among the files of a folder.
TEXTS = (JSON, TABLE)
FORMATS = (
    JSON_LINES,
    Format(
        "a Parquet file",
        PREPARE,
        (".parquet",),
        b"PAR1",
        in_prepare="rename it to end in .parquet",
    ),
    Format(
        "an Arrow file",
        PREPARE,
        (".arrow", ".feather", ".ipc"),
        b"ARROW1",
        in_prepare="rename it to end in .arrow",
    ),
    Format("an ArrayRecord file", PREPARE, (".array_record", ".arrayrecord")),
    FEATHER_1,
    Format("an ORC file", CONVERT, (".orc",)),
    Format("an Avro file", CONVERT, (".avro",), b"Obj\x01"),
    Format("an HDF5 file", CONVERT, (".h5", ".hdf5"), b"\x89HDF\r\n\x1a\n"),
    Format("a SQLite database", CONVERT, (".sqlite", ".sqlite3"), b"SQLite format 3\0"),
    Format("a TFRecord file", CONVERT, (".tfrecord", ".tfrecords")),
    Format("a PyTorch file", CONVERT, (".pt", ".pth")),
    Format("a safetensors file", CONVERT, (".safetensors",)),
    Format("a file of Python objects", CONVERT, (".pkl",)),
    Format("a PDF", EXPORT, (".pdf",), b"%PDF-"),
    Format("a document", EXPORT, (".docx", ".odt", ".epub", ".rtf")),
    Format("a spreadsheet", CONVERT, (".xlsx", ".ods")),
    Format(
        "a NumPy array",
        "rename it to end in .npy",
        (),
        b"\x93NUMPY",
        in_prepare="if it holds token ids, set data.path to it: a .npy file needs no preparation",
    ),
    Format("a NumPy archive", "save its array of token ids as .npy", (".npz",)),
    _stream((".gz",), b"\x1f\x8b\x08"),
    _stream((".zst", ".zstd"), b"\x28\xb5\x2f\xfd"),
    _stream((".bz2",), b"BZh91AY&SY"),
    _stream((".xz",), b"\xfd7zXZ\0"),
    _stream((".lzma",)),
    _compressed("lz4 -d", (".lz4",), b"\x04\x22\x4d\x18"),
    _compressed("brotli -d", (".br",)),
    _compressed("gzip -dk", (".z",)),
    _archive("unzip", (".zip",), b"PK\x03\x04"),
    _archive("7z x", (".7z",), b"7z\xbc\xaf\x27\x1c"),
    _archive("unrar x", (".rar",), b"Rar!\x1a\x07"),
    _archive("tar -xf", (".tar", ".tgz", ".tbz2", ".txz")),
)


def way_out(known: Format, path: Path, *, in_prepare: bool = False) -> str:
    """Returns what to do with a file of this format, with its name in the command."""
    text = (in_prepare and known.in_prepare) or known.way_out
    file = shlex.quote(str(path))
    command = DECOMPRESS.get(streams.compression_of(path))
    if command and " FILE > " in text:
        text = text.replace("`jq", f"`{command} {file} | jq").replace(" FILE > ", " > ")
        path = path.with_suffix("")
    lines = path.with_suffix(".jsonl")
    if lines.exists():  # perhaps the file itself
        lines = path.with_name(f"{path.stem}-lines.jsonl")
    return text.replace("FILE", file).replace("LINES", shlex.quote(str(lines)))


def of_file(path: str | Path) -> Format | None:
    """Returns the format of a file, by its name or its first bytes; None: text or raw tokens.

    A text whose first line is a JSON object is JSON lines, whatever its name is.
    """
    path = Path(path)
    found = by_name(path)
    if found in (JSON, JSON_LINES):
        return of_json(first_line(path)) or found
    if found:
        return found
    return _of_text(first_line(path))


def of_input(path: Path, *, is_named: bool) -> Format | None:
    """Returns the format of a file that `meshtrain prepare` would misread; None: it reads the file.

    `is_named` is False for a file of a folder, in which a table or an object may be a document.
    """
    inner = path.with_suffix("") if streams.compression_of(path) else path
    found = by_name(inner)
    line = first_line(path)
    if found in (JSON, JSON_LINES):
        known = of_json(line)
        return None if known in (JSON_ARRAY, JSON_TEXTS) else known
    if found == TABLE:
        return by_magic(line)
    if found and (is_named or found not in TEXTS):
        return found
    return _of_text(line) if is_named else by_magic(line)


def in_folder(path: Path) -> Format | None:
    """Returns the format of a file in a folder of text; None: it is a text, perhaps of data."""
    found = by_name(path, FORMATS)
    if found or not path.stat().st_size:
        return found
    with open(path, "rb") as file:
        return by_magic(file.read(16))


def by_name(path: Path, formats: tuple[Format, ...] = (*TEXTS, *FORMATS)) -> Format | None:
    """Returns the format that the extension names; rows.csv.gz is a table."""
    extensions = [path.suffix.lower()]
    if extensions == [".gz"]:
        extensions.insert(0, path.with_suffix("").suffix.lower())
    for extension in extensions:
        for one in formats:
            if extension in one.extensions:
                return one
    return None


def by_magic(first_bytes: bytes) -> Format | None:
    """Returns the format that the first bytes of a file tell."""
    for one in FORMATS:
        if one.magic and first_bytes.startswith(one.magic):
            return one
    return None


def _of_text(line: bytes) -> Format | None:
    """Returns the format of a file whose name tells none; None: text or raw tokens."""
    found = by_magic(line)
    if found is None and is_json_object(line):
        return JSON_LINES
    return found


def of_json(line: bytes) -> Format | None:
    """Returns what a file with the name of JSON lines holds instead, by its first line; or None."""
    found = by_magic(line)
    if found:
        return found
    text = line.strip()
    if text.startswith(b"["):
        return JSON_TEXTS if text[1:].lstrip().startswith(b'"') else JSON_ARRAY
    return JSON_OBJECT if text == b"{" else None


def first_line(path: Path) -> bytes:
    """Returns the first line of a file that is not blank, or its beginning.

    It is decompressed if its name says so. Returns b"" for what cannot be read: opening the data
    reports it.
    """
    try:
        if not sources.size_of(path):
            return b""  # not opened: a file of /proc may wait for ever
        with streams.open_at(path, 0, read_ahead=LOOK_AT) as (file, _):
            beginning = file.read(LOOK_AT)
    except streams.CORRUPT:
        return b""
    return beginning.lstrip().partition(b"\n")[0]


def is_json_object(line: bytes) -> bool:
    """Returns whether a line is one: then the file is JSON lines."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(foreign.parse_json(line), dict)
    except ValueError:
        return False
