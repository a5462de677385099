"""Opens inputs as streams of bytes, decompressed by the extension of their name."""

import bz2
import codecs
import contextlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import igzip

from meshtrain.data.prepare import sources
from meshtrain.errors import import_optional

CHUNK = 1 << 20  # bytes read at a time

# Errors of a file that is truncated, or not what its name says.
CORRUPT = (OSError, EOFError, zlib.error, lzma.LZMAError)


def _gzip(raw: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(igzip.IGzipFile(fileobj=raw), CHUNK)


def _zstd(raw: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(_Zstandard(raw), CHUNK)


def _xz(raw: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor, is_padded=True), CHUNK)


def _bzip2(raw: BinaryIO) -> io.BufferedReader:
    return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), CHUNK)


# Extension -> function that returns the decompressed file. Each reads files of several streams.
DECOMPRESSED: dict[str, Callable[[BinaryIO], io.BufferedReader]] = {
    ".gz": _gzip,
    ".zst": _zstd,
    ".zstd": _zstd,
    ".xz": _xz,
    ".lzma": _xz,
    ".bz2": _bzip2,
}


class _Zstandard(io.RawIOBase):
    """Decompresses the frames of a file.

    The library's own reader ends without an error where a file is truncated.
    """

    MAX_WINDOW = 1 << 31  # bytes, of `zstd --long=31`
    # Bytes that are decompressed at a time: a run of 128 KiB is compressed to 4 bytes, so they may
    # become 32 MiB.
    INPUT = 1 << 10

    def __init__(self, raw: BinaryIO):
        self._library = import_optional("zstandard", "data")
        self._raw = raw
        self._frame: Any = None  # None: before a frame
        self._compressed = b""
        self._output = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._compressed = self._compressed or self._raw.read(self.INPUT)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file ends within a frame")
                return 0
            self._output = memoryview(self._decompress())
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        self._position += size
        return size

    def _decompress(self) -> bytes:
        try:
            if self._frame is None:
                decompressor = self._library.ZstdDecompressor(max_window_size=self.MAX_WINDOW)
                self._frame = decompressor.decompressobj()
            output = self._frame.decompress(self._compressed)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from None
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = None
        return output


class _Streams(io.RawIOBase):
    """Decompresses the streams of a .xz or .bz2 file.

    The library's own readers end without an error where something else follows a stream.
    """

    INPUT = 1 << 13  # bytes: what follows a stream is copied, and there may be many small ones
    PADDING = 4  # zero bytes may follow a stream of .xz, a multiple of this

    def __init__(self, raw: BinaryIO, begin: Callable[[], Any], *, is_padded: bool = False):
        self._raw = raw
        self._begin = begin  # returns a decompressor of one stream
        self._is_padded = is_padded
        self._stream: Any = None  # None: before a stream
        self._is_first = True
        self._compressed = b""
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        output = b""
        while not output and (self._stream is not None or self._next_stream()):
            if self._stream.needs_input and not self._compressed:
                self._compressed = self._raw.read(self.INPUT)
                if not self._compressed:
                    raise EOFError("the compressed file ends within a stream")
            output = self._stream.decompress(self._compressed, len(buffer))
            self._compressed = b""
            if self._stream.eof:
                self._compressed = self._stream.unused_data
                self._stream = None
                self._is_first = False
        buffer[: len(output)] = output
        self._position += len(output)
        return len(output)

    def _next_stream(self) -> bool:
        """Reads the padding before a stream; returns whether there is one."""
        num_zeros = 0
        while True:
            compressed = self._compressed or self._raw.read(self.INPUT)
            self._compressed = compressed.lstrip(b"\0") if self._is_padded else compressed
            num_zeros += len(compressed) - len(self._compressed)
            if self._compressed or not compressed:
                break
        if num_zeros % self.PADDING or (num_zeros and self._is_first):
            raise OSError("zero bytes where a compressed stream should begin")
        if self._compressed:
            self._stream = self._begin()
        return bool(self._compressed)


def compression_of(path: Path) -> str:
    """Returns the extension of a compressed file; "": it is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in DECOMPRESSED else ""


@contextlib.contextmanager
def open_at(
    path: Path, offset: int, *, read_ahead: int = sources.READ_AHEAD
) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Yields the decompressed file at an offset, and a function without parameters.

    It returns how many bytes of the file were read so far, before decompression. A byte order mark
    at the beginning is left out.
    """
    compression = compression_of(path)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(sources.open_source(path, read_ahead=read_ahead))
        file = stack.enter_context(DECOMPRESSED[compression](raw)) if compression else raw
        if not offset and file.peek(3)[:3] == codecs.BOM_UTF8:
            offset = len(codecs.BOM_UTF8)
        if compression:
            _skip(file, offset)
        else:
            file.seek(offset)
        yield file, raw.tell


def _skip(file: BinaryIO, size: int) -> None:
    """Reads over the first bytes: a compressed file has no other way to a position."""
    while size > 0:
        chunk = file.read(min(size, 1 << 20))
        if not chunk:
            raise EOFError("the file is shorter than it was")
        size -= len(chunk)
