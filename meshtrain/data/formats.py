"""File formats that are neither plain text nor raw tokens: read as such, they would be noise."""

from pathlib import Path
from typing import NamedTuple

from meshtrain import foreign

PREPARE = "tokenize it with `meshtrain prepare`, and set data.path to its --output"
CONVERT = (
    "convert it to JSON lines or Parquet with a column of text and tokenize that with `meshtrain "
    "prepare`, or to a .npy file of token ids"
)
DECOMPRESS = "decompress it first"
UNPACK = "unpack it first"


class Format(NamedTuple):
    """A file format: how to recognise it, and what to do with such a file."""

    name: str
    way_out: str
    extensions: tuple[str, ...]
    magic: bytes = b""  # the first bytes; b"": it has none


JSON_LINES = Format("JSON lines", PREPARE, (".jsonl", ".ndjson"))
# Text that may well be a document itself, among the files of a folder.
TEXTS = (
    Format("JSON", PREPARE, (".json",)),
    Format("a table", CONVERT, (".csv", ".tsv")),
)
FORMATS = (
    JSON_LINES,
    Format("a Parquet file", PREPARE, (".parquet",), b"PAR1"),
    Format("an Arrow file", CONVERT, (".arrow", ".feather"), b"ARROW1"),
    Format("a Feather file", CONVERT, (), b"FEA1"),
    Format("an ORC file", CONVERT, (".orc",)),
    Format("an Avro file", CONVERT, (".avro",), b"Obj\x01"),
    Format("an HDF5 file", CONVERT, (".h5", ".hdf5"), b"\x89HDF\r\n\x1a\n"),
    Format("a SQLite database", CONVERT, (".sqlite", ".sqlite3"), b"SQLite format 3\0"),
    Format("a TFRecord file", CONVERT, (".tfrecord", ".tfrecords")),
    Format("a PyTorch file", CONVERT, (".pt", ".pth")),
    Format("a safetensors file", CONVERT, (".safetensors",)),
    Format("a PDF", CONVERT, (".pdf",), b"%PDF-"),
    Format("a NumPy array", "rename it to end in .npy", (), b"\x93NUMPY"),
    Format("a NumPy archive", "save its array of token ids as .npy", (".npz",)),
    Format("compressed", PREPARE, (".gz",), b"\x1f\x8b"),
    Format("compressed", DECOMPRESS, (".zst", ".zstd"), b"\x28\xb5\x2f\xfd"),
    Format("compressed", DECOMPRESS, (".bz2",), b"BZh91AY&SY"),
    Format("compressed", DECOMPRESS, (".xz",), b"\xfd7zXZ\0"),
    Format("compressed", DECOMPRESS, (".lz4",), b"\x04\x22\x4d\x18"),
    Format("an archive", UNPACK, (".zip",), b"PK\x03\x04"),
    Format("an archive", UNPACK, (".7z",), b"7z\xbc\xaf\x27\x1c"),
    Format("an archive", UNPACK, (".tar", ".tgz")),
)


def of_file(path: str | Path) -> Format | None:
    """Returns the format of a file, by its name or its first bytes; None: text or raw tokens.

    A text whose first line is a JSON object is JSON lines, whatever its name is.
    """
    path = Path(path)
    found = _by_name(path, (*TEXTS, *FORMATS))
    if found:
        return found
    with open(path, "rb") as file:
        first_line = file.readline(1 << 16)
    found = _by_magic(first_line)
    if found is None and _is_json_object(first_line):
        found = JSON_LINES
    return found


def in_folder(path: Path) -> Format | None:
    """Returns the format of a file in a folder of text; None: it is a text, perhaps of data."""
    found = _by_name(path, FORMATS)
    if found or not path.stat().st_size:
        return found
    with open(path, "rb") as file:
        return _by_magic(file.read(16))


def _by_name(path: Path, formats: tuple[Format, ...]) -> Format | None:
    """Returns the format that the extension names; rows.csv.gz is a table."""
    extensions = [path.suffix.lower()]
    if extensions == [".gz"]:
        extensions.insert(0, path.with_suffix("").suffix.lower())
    for extension in extensions:
        for one in formats:
            if extension in one.extensions:
                return one
    return None


def _by_magic(first_bytes: bytes) -> Format | None:
    for one in FORMATS:
        if one.magic and first_bytes.startswith(one.magic):
            return one
    return None


def _is_json_object(line: bytes) -> bool:
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(foreign.parse_json(line), dict)
    except ValueError:
        return False
