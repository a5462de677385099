"""The manifest of a checkpoint: written last, verified first; and what else its folder may contain.

A checkpoint is the folder `STEP`. It is written in four stages: the arrays go to `STEP.partial/`;
all files are flushed to disk (fsync); MANIFEST.json is written, which lists size and CRC-32 of
every file; the folder is renamed to `STEP`. A crash in any stage is harmless. What a restore needs
must be there before the manifest is written: every chunk of every array. Nothing here needs jax.

Files of arrays have no CRC-32 there: each of their chunks ends with its CRC-32C, so no file is read
a second time, and each process verifies what it reads (`verify`: all). The manifest lists these
CRC-32C by array and chunk, so that no chunk can stand in for another one. On object stores such
files have no size either. Corrupt checkpoints are quarantined, not removed. Files that no manifest
lists are reported.
"""

import contextlib
import errno
import fnmatch
import itertools
import json
import operator
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from isal import isal_zlib  # CRC-32 at the speed of memory

from meshtrain import console, foreign, object_store, storage
from meshtrain.errors import ConfigError, TransientError

NAME = storage.MANIFEST
PARTIAL = ".partial"

# 1: every file has a CRC-32, chunks have none; 2: chunks end with a CRC-32C; 3: and are listed.
FORMAT = 3


class CorruptCheckpoint(Exception):
    """A checkpoint that must not be used; the message says why.

    Only a checkpoint that is certainly corrupt may be quarantined. A checkpoint that cannot be read
    here and now (another format, an error of the disk or the network) may be valid: that is a
    ConfigError.
    """


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint: the progress of training, the arrays and the files."""

    step: int  # steps taken, skipped steps included
    position: int  # index of the next sample to train on
    time: float  # seconds since 1970
    metrics: dict[str, float]  # of the last step; plus eval_loss if held-out data was evaluated
    loss_statistics: dict[str, float]  # `LossMonitor.statistics`, see monitor/divergence.py
    mesh: dict[str, int]
    processes: int
    versions: dict[str, str]
    config: dict[str, Any]
    arrays: dict[str, str]  # path in the state -> "(shape) dtype"
    # path -> size in bytes and CRC-32; None and "" where there is none, see above
    files: dict[str, tuple[int | None, str]]
    identity: dict[str, str] = field(default_factory=dict)  # digests of data and tokenizer
    # `source.Phase` of each phase of the data, those ahead included, as lists
    phases: list[list[Any]] = field(default_factory=list)
    # path in the state -> key of a chunk -> CRC-32C; empty before format 3
    chunks: dict[str, dict[str, str]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int | None:
        """Total size of the files; None if it is unknown."""
        sizes = [size for size, _ in self.files.values()]
        return None if None in sizes else sum(sizes)


KEYS = {"loss_statistics": "watch"}  # field -> its key in the file, where they differ


# ---- writing ----


def partial_folder(folder: Path, step: int) -> Path:
    """Returns the folder that a checkpoint is written to before it is committed."""
    return folder / f"{step}{PARTIAL}"


def commit(folder: Path, step: int, **fields: Any) -> Manifest:
    """Commits what is in `partial_folder` as a checkpoint; `fields` are the manifest's others.

    Raises OSError, also if something is missing that a restore needs, or if another run has
    committed this step in an object store.
    """
    workdir = storage.workdir_at(folder)
    written = partial_folder(folder, step)
    # On an object store the chunks are not files of this folder, and have no size here.
    remote_chunks = workdir.fetch(written)
    files = _measure(written, list(_files(written)), sync=True)
    try:
        _check_needed(files)
        with reading_chunks(written):
            chunks = _chunk_checksums(written, fields["arrays"])
    except CorruptCheckpoint as error:
        raise OSError(None, f"incomplete, {error}", str(written)) from error
    for name in remote_chunks:
        files[name] = (None, "")
    manifest = Manifest(step=step, files=files, chunks=chunks, **fields)
    write(written, manifest)
    for directory in {written, *(path.parent for path in written.rglob("*"))}:
        storage.sync(directory)
    os.rename(written, folder / str(step))
    storage.sync(folder)
    workdir.publish(folder / str(step), manifest.files.keys())
    return manifest


def write(directory: Path, manifest: Manifest) -> None:
    """Writes or replaces a manifest: after a crash it is the new one or the old one."""
    values = {KEYS.get(name, name): value for name, value in asdict(manifest).items()}
    record = json.loads(json.dumps(values, default=str))
    text = json.dumps({**record, "crc32": checksum(record)}, indent=1) + "\n"
    if directory.is_symlink():  # it may belong to another run
        raise OSError(errno.ELOOP, "is a link", str(directory))
    new = directory / f"._{NAME}"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, directory / NAME)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    storage.sync(directory)


def checksum(value: Any) -> str:
    """Returns the CRC-32 of a value as JSON."""
    return f"{isal_zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode()):08x}"


# ---- reading ----

MAX_BYTES = 256 << 20  # of a manifest; a larger file is not read


def read(directory: Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises CorruptCheckpoint if it is invalid, and ConfigError if it may be valid but cannot be
    read.
    """
    data = _read_file(directory)
    try:
        manifest = _parse(data, directory)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{NAME} is damaged") from error
    if str(manifest.step) != directory.name:
        raise ConfigError(
            f"{directory}: {NAME} belongs to step {manifest.step}; "
            f"rename the folder, or move it away"
        )
    return manifest


def _read_file(directory: Path) -> bytes:
    """Returns the content of a manifest; raises as `read` does."""
    path = directory / NAME
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{NAME} is not a file")
        return foreign.read_bytes(path, max_bytes=MAX_BYTES)
    except ValueError as error:
        raise CorruptCheckpoint(f"{NAME}: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_symlink() and not directory.exists():
            raise TransientError(
                f"{directory}: links to {os.readlink(directory)}, which does not exist; "
                f"mount its disk, or remove the link"
            ) from None
        raise CorruptCheckpoint(f"{NAME} is missing") from None
    except OSError as error:
        raise unreadable(path, error) from error


def _parse(data: bytes, directory: Path) -> Manifest:
    """Returns the manifest in a file's content.

    Raises CorruptCheckpoint for another checksum, ConfigError for another format, and other
    exceptions for damage.
    """
    record = foreign.parse_json(data)
    # First: another version may also have another checksum.
    number = record.get("format")
    if isinstance(number, int) and not 1 <= number <= FORMAT:
        raise ConfigError(
            f"{directory}: format {number} is not one of 1 to {FORMAT}, which this version reads; "
            f"use the version of meshtrain that wrote it"
        )
    crc32 = record.pop("crc32")
    if checksum(record) != crc32:
        raise CorruptCheckpoint(f"{NAME} fails its checksum")
    # Other versions may write fields that this one does not know.
    keys = {field.name: KEYS.get(field.name, field.name) for field in fields(Manifest)}
    values = {name: record[key] for name, key in keys.items() if key in record}
    values["files"] = {name: (size, crc) for name, (size, crc) in values["files"].items()}
    manifest = Manifest(**values)
    if not isinstance(manifest.format, int) or not isinstance(manifest.arrays, dict):
        raise TypeError
    if not all(isinstance(chunks, dict) for chunks in manifest.chunks.values()):
        raise TypeError
    if not isinstance(manifest.step, int) or not 0 <= operator.index(manifest.position):
        raise TypeError
    if not isinstance(manifest.config, dict) or not isinstance(manifest.identity, dict):
        raise TypeError
    for step, sample, digest in manifest.phases:
        if not isinstance(step, int) or not isinstance(sample, int) or not isinstance(digest, str):
            raise TypeError
    numbers = [manifest.time]
    for by_name in (manifest.metrics, manifest.loss_statistics, manifest.mesh):
        numbers += by_name.values()
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError
    return manifest


def check(directory: Path) -> Manifest:
    """Returns the manifest after checking size and, if it has one, CRC-32 of each listed file.

    See `unlisted_files` for other files. Raises CorruptCheckpoint, and ConfigError if the
    checkpoint may be valid but cannot be read.
    """
    manifest = check_sizes(directory)
    try:
        sizes = {name: size for name, (size, crc) in manifest.files.items() if crc}
        with console.progress(f"checking {directory}", sum(sizes.values())) as advance:
            files = _measure(directory, sizes, sync=False, advance=advance)
        for name, measured in files.items():
            if measured != manifest.files[name]:
                raise CorruptCheckpoint(f"{name} fails its checksum")
    except OSError as error:
        raise unreadable(directory, error) from error
    with reading_chunks(directory):
        _check_chunks(directory, manifest)
    return manifest


def check_sizes(directory: Path) -> Manifest:
    """Returns the manifest after checking that each listed file exists and has its size.

    No other file is read. Raises as `check` does.
    """
    manifest = read(directory)
    try:
        elsewhere = {*storage.workdir_at(directory).chunk_names(directory)}
        for name, (size, _) in manifest.files.items():
            if size is not None or name not in elsewhere:
                _check_file(directory, name, size)
    except OSError as error:
        raise unreadable(directory, error) from error
    _check_needed(manifest.files)
    return manifest


def _check_needed(names: Collection[str]) -> None:
    """Raises CorruptCheckpoint unless all files without which nothing can be read are listed."""
    for name in NEEDED:
        if name not in names:
            raise CorruptCheckpoint(f"{name} is missing")


def _check_file(directory: Path, name: str, size: int | None) -> None:
    """Raises CorruptCheckpoint unless the folder has a file of this name and, if given, size.

    A file behind a link does not count.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CorruptCheckpoint(f"{name!r} points outside the checkpoint")
    try:
        for parent in path.parents[:-1]:
            if not stat.S_ISDIR((directory / parent).lstat().st_mode):
                raise CorruptCheckpoint(f"{parent} is not a folder")
        status = (directory / name).lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpoint(f"{name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpoint(f"{name} is not a file")
    if size is not None and status.st_size != size:
        raise CorruptCheckpoint(f"{name} has {status.st_size} bytes of {size}")


def unreadable(path: Path, error: OSError) -> TransientError:
    """Returns the error of a checkpoint that cannot be read here and now."""
    return TransientError(
        f"{error.filename or path}: {error.strerror or error}; the checkpoint may be valid: "
        f"repair the disk, the network or the permissions, or move it away"
    )


# In the messages of TensorStore and Orbax: what is missing, what only damage causes (decoders say
# at which byte they failed), the key of the chunk, errors of the disk and of a store.
MISSING = re.compile(r"NOT_FOUND: |http_response_code='404'|Found incomplete checkpoint")
DAMAGED = re.compile(
    r"DATA_LOSS|; at byte \d|Requested byte range .{0,200} is not valid|http_response_code='416'"
)

# What Orbax raises if its own files are missing or damaged.
ORBAX_ERRORS = (FileNotFoundError, json.JSONDecodeError, KeyError)

KEY_IN_ERROR = re.compile('"([^"]+)" in OCDBT')
OS_ERROR = re.compile(r"os_error_code='(\d+)'")
STORE_ERROR = re.compile("http_response_code=|curl_code=")


@contextlib.contextmanager
def reading_chunks(directory: Path) -> Iterator[None]:
    """Translates the errors of Orbax and TensorStore for the arrays that the block reads.

    Raises CorruptCheckpoint for damaged or missing chunks, and ConfigError for errors of the disk
    or the store.
    """
    try:
        yield
    except (CorruptCheckpoint, ConfigError):
        raise
    except Exception as error:
        text = str(error)
        cause = error.__cause__  # Orbax raises errors of its own
        while cause:
            text += f"\n{cause}"
            cause = cause.__cause__
        key = KEY_IN_ERROR.search(text)
        name = f"arrays/{key[1]}" if key else "a chunk of arrays"
        if MISSING.search(text):
            raise CorruptCheckpoint(f"{name} is missing") from error
        if code := OS_ERROR.search(text):
            disk_error = OSError(int(code[1]), os.strerror(int(code[1])))
            raise unreadable(directory, disk_error) from error
        if DAMAGED.search(text):
            raise CorruptCheckpoint(f"{name} fails its checksum") from error
        if STORE_ERROR.search(text):
            store_error = object_store.request_error(text, directory)
            raise unreadable(directory, store_error) from error
        if isinstance(error, ORBAX_ERRORS):
            why = f"{error}".partition("\n")[0]
            raise CorruptCheckpoint(f"the arrays cannot be read: {why}") from error
        raise


MAX_VERIFY_THREADS = 4  # each holds one chunk, which may be as large as the shard of a device


def verify(directory: Path) -> Manifest:
    """Returns the manifest after verifying every byte that a run can read.

    Raises CorruptCheckpoint, and ConfigError if the checkpoint may be valid but cannot be read.
    """
    manifest = check(directory)
    if all(crc for _, crc in manifest.files.values()):
        return manifest
    with reading_chunks(directory):
        arrays = _open_arrays(directory)
        size = sum(array.size * array.dtype.numpy_dtype.itemsize for array in arrays)
        num_threads = min(MAX_VERIFY_THREADS, os.cpu_count() or 1)
        with (
            console.progress(f"reading {directory}", size) as advance,
            ThreadPoolExecutor(num_threads) as threads,
        ):
            chunks = (array[box] for array in arrays for box in _chunk_boxes(array))
            for num_bytes in threads.map(lambda chunk: chunk.read().result().nbytes, chunks):
                advance(num_bytes)
    return manifest


ARRAY_METADATA = "zarr.json"  # the key in the store that describes an array


def _store(directory: Path) -> storage.Spec:
    """Returns TensorStore's description of the arrays of a checkpoint."""
    folder = {"driver": "file", "path": f"{storage.absolute(directory)}/arrays/"}
    return storage.workdir_at(directory).array_store({"driver": "ocdbt", "base": folder})


# A chunk ends with its CRC-32C, offset and size (as the only one in its shard), and their CRC-32C.
CHUNK_END = struct.Struct("<4sQQ4s")


def _chunk_checksums(directory: Path, arrays: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns the CRC-32C of each chunk of each array, as TensorStore wrote it.

    The result has them by the path of the array and the key of the chunk, such as c/0/1. `arrays`
    are those of a manifest. Raises CorruptCheckpoint if an array has not its shape and dtype, or
    if it or one of its chunks is missing. Only the end of each chunk is read.
    """
    import tensorstore  # here, since it takes a while and `--help` does not need it

    store = tensorstore.KvStore.open(_store(directory)).result()
    keys = {key.decode() for key in store.list().result()}
    ends: dict[str, dict[str, Any]] = {}
    with tensorstore.Batch() as batch:
        for path, expected in arrays.items():
            name = path.replace("/", ".")  # as Orbax names it
            if f"{name}/{ARRAY_METADATA}" not in keys:
                raise CorruptCheckpoint(f"arrays/{name} is missing")
            try:
                metadata = foreign.parse_json(store[f"{name}/{ARRAY_METADATA}"])
                kind = f"{tuple(metadata['shape'])} {metadata['data_type']}"
                chunk_counts = _chunk_counts(metadata)
            except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
                raise CorruptCheckpoint(f"arrays/{name}/{ARRAY_METADATA} is damaged") from error
            if kind != expected:
                raise CorruptCheckpoint(f"arrays/{name} is {kind} instead of {expected}")
            ends[path] = {}
            # A loop that ends at the first missing chunk, whatever number the metadata claims.
            for index in itertools.product(*map(range, chunk_counts)):
                chunk = "/".join(("c", *map(str, index)))
                if f"{name}/{chunk}" not in keys:
                    raise CorruptCheckpoint(f"arrays/{name}/{chunk} is missing")
                end = slice(-CHUNK_END.size, None)
                ends[path][chunk] = store.read(f"{name}/{chunk}", byte_range=end, batch=batch)
    checksums: dict[str, dict[str, str]] = {}
    for path, futures in ends.items():
        checksums[path] = {}
        for chunk, future in futures.items():
            name = f"arrays/{path.replace('/', '.')}/{chunk}"
            end = future.result().value
            if len(end) != CHUNK_END.size:  # without its file, TensorStore returns no bytes
                raise CorruptCheckpoint(f"{name} is missing")
            crc32c, *_ = CHUNK_END.unpack(end)
            checksums[path][chunk] = crc32c.hex()
    return checksums


def _check_chunks(directory: Path, manifest: Manifest) -> None:
    """Raises CorruptCheckpoint unless all chunks are those that were committed.

    That a chunk has the checksum at its end is verified when it is read; here, that this checksum
    is the one of its place. Chunks of format 1 have none, and manifests of format 2 do not list
    them.
    """
    if manifest.format == 1:
        return
    found = _chunk_checksums(directory, manifest.arrays)
    if manifest.format == 2:
        return
    for path in manifest.arrays:
        for chunk, crc32c in found[path].items():
            if manifest.chunks.get(path, {}).get(chunk) != crc32c:
                name = path.replace("/", ".")
                raise CorruptCheckpoint(f"arrays/{name}/{chunk} fails its checksum")


def _chunk_counts(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the number of chunks of an array in each dim, from the metadata of zarr."""
    sizes = metadata["shape"]
    lengths = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-size // length) for size, length in zip(sizes, lengths, strict=True)]


def _open_arrays(directory: Path) -> list[Any]:
    """Returns a TensorStore for each array of a checkpoint; they are opened in parallel."""
    import tensorstore  # here, since it takes a while and `--help` does not need it

    store = _store(directory)
    futures = []
    for key in tensorstore.KvStore.open(store).result().list().result():
        if key.endswith(f"/{ARRAY_METADATA}".encode()):
            spec = {
                "driver": "zarr3",
                "kvstore": {**store, "path": key.decode().removesuffix(ARRAY_METADATA)},
                # Otherwise a missing chunk would be read as zeros.
                "fill_missing_data_reads": False,
            }
            futures.append(tensorstore.open(spec, read=True))
    return [future.result() for future in futures]


def _chunk_boxes(array: Any) -> Iterator[tuple[slice, ...]]:
    """Yields the index of each chunk of an array."""
    chunk_shape = array.chunk_layout.read_chunk.shape or ()  # None for a scalar
    sizes = list(zip(array.shape, chunk_shape, strict=True))
    for corner in itertools.product(*(range(0, size, length) for size, length in sizes)):
        yield tuple(
            slice(start, min(start + length, size))
            for start, (size, length) in zip(corner, sizes, strict=True)
        )


# ---- the files of a checkpoint ----

NEEDED = ("arrays/_METADATA", "arrays/manifest.ocdbt")  # Orbax and TensorStore read these first
CHUNKS = "arrays/ocdbt.process_*/d/*"  # files whose chunks have checksums of their own
BLOCK_BYTES = 256 << 10  # read at once; fits in a core's cache

# Files of NFS and macOS that come and go: a manifest that lists one would make its checkpoint
# corrupt.
TRANSIENT_FILES = (".nfs", "._", ".DS_Store")


def _files(directory: Path) -> Iterator[str]:
    """Yields the paths of the files to list in a manifest."""
    for path in directory.rglob("*"):
        if not path.name.startswith(TRANSIENT_FILES) and stat.S_ISREG(path.lstat().st_mode):
            yield path.relative_to(directory).as_posix()


def _measure(
    directory: Path,
    names: Iterable[str],
    *,
    sync: bool,
    advance: Callable[[int], Any] = lambda size: None,
) -> dict[str, tuple[int, str]]:
    """Returns size and CRC-32 of each file; `advance` gets each block's size.

    `sync` is for a new checkpoint: files are flushed to disk, and files of chunks are not read.
    """

    def measure(name: str) -> tuple[int, str]:
        size = crc = 0
        with open(directory / name, "rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
                if fnmatch.fnmatchcase(name, CHUNKS):
                    return os.fstat(file.fileno()).st_size, ""
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := file.readinto(buffer):
                size += count
                crc = isal_zlib.crc32(buffer[:count], crc)
                advance(count)
        return size, f"{crc:08x}"

    # Largest first: otherwise one thread may still read a large file after all others have
    # finished.
    names = sorted(names, key=lambda name: -(directory / name).stat().st_size)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(measure, names), strict=True))


def unlisted_files(directory: Path, manifest: Manifest) -> list[str]:
    """Returns the paths not in the manifest; of a folder without listed files, only its own."""
    files = {NAME, f"._{NAME}", *manifest.files}  # the second: of a crash while it was replaced
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    unlisted = []
    for root, subfolders, names in os.walk(directory):
        inside = Path(root).relative_to(directory)
        paths = [str(inside / name) for name in (*subfolders, *names)]
        unlisted += [path for path in paths if path not in files | folders]
        subfolders[:] = [name for name in subfolders if str(inside / name) in folders]
    return sorted(unlisted)


def describe_unlisted_files(directory: Path, manifest: Manifest) -> str:
    """Returns a note on the files that the manifest does not list, or an empty string."""
    unlisted = unlisted_files(directory, manifest)
    if not unlisted:
        return ""
    more = f" and {len(unlisted) - 3} more" if len(unlisted) > 3 else ""
    return f"ignores {', '.join(unlisted[:3])}{more}: not in the manifest"
