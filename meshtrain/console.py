"""The output of this process: stdout and stderr that never fail, and a progress bar below the lines.

Text that cannot be written (the reader of a pipe has ended, the disk is full, the terminal is closed)
goes to a log file instead. Nothing here needs more than the standard library.
"""

import contextlib
import errno
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOG = "log.txt"  # in a workdir

MAX_KEPT = 1 << 16  # last bytes of lost output that are kept until there is a log file

DRAW_SECONDS = 0.05  # between two drawings of the bar

ERASE = b"\r\x1b[K"  # a terminal's line

CELLS = 20  # of a bar

faults: dict[str, Exception] = {}  # the first fault of each stream that broke

_lock = threading.RLock()

_outputs: dict[str, "_Output"] = {}  # by "stdout" and "stderr"; empty until `guard`

_reported: set[str] = set()  # the streams whose fault `new_faults` has returned

_log: Path | None = None

_kept = bytearray()

_bar_line = b""  # what the bar shows; empty: nothing

_in_line = False  # whether the last byte on the terminal is not a line's end


class _Output(io.RawIOBase):
    """File descriptor 1 or 2; `write` always succeeds."""

    def __init__(self, stream: str, fd: int, *, is_open: bool):
        self.name, self._stream, self._fd, self._is_open = f"<{stream}>", stream, fd, is_open
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM") not in ("dumb", "unknown")

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        global _in_line
        data = bytes(data)
        with _lock:
            ends_line = data.endswith(b"\n")
            around = (b"", b"")
            if self.is_terminal:
                around = (ERASE if _bar_line and not _in_line else b"", _bar_line * ends_line)
                _in_line = not ends_line
            try:
                if not self._is_open:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                _write_all(self._fd, around[0] + data + around[1])
            except OSError as error:
                lost(self._stream, error, data)
        return len(data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # another program has made the pipe or terminal non-blocking
            select.select([], [fd], [])


def guard() -> None:
    """Makes sys.stdout and sys.stderr streams whose writes always succeed, for the rest of this process.

    A character that the encoding does not have is written as a question mark. Descriptors that are
    closed are opened on /dev/null: otherwise the next file to be opened would get the output. A stream that the
    caller has replaced is left alone.
    """
    closed = {fd for fd in range(3) if not _is_open(fd)}
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if name in _outputs or old is not getattr(sys, f"__{name}__"):
            continue
        if old is not None:
            with contextlib.suppress(OSError, ValueError):
                old.flush()
        _outputs[name] = _Output(name, fd, is_open=fd not in closed)
        new = io.TextIOWrapper(
            io.BufferedWriter(_outputs[name]),
            encoding=old.encoding if old else "utf-8",
            errors="replace",
            line_buffering=True,  # a process that is killed has shown all its lines
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Calls `guard` for the duration of the context, unless it is in effect already."""
    names = ("stdout", "stderr", "__stdout__", "__stderr__")
    before, guarded_before = {name: getattr(sys, name) for name in names}, {*_outputs}
    guard()
    try:
        yield
    finally:
        faults.clear()  # the caller's next command starts anew
        for name in {*_outputs} - guarded_before:
            getattr(sys, f"__{name}__").flush()
            del _outputs[name]
            if getattr(sys, name) is getattr(sys, f"__{name}__"):
                setattr(sys, name, before[name])
            setattr(sys, f"__{name}__", before[f"__{name}__"])


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False


def lost(stream: str, error: Exception, data: bytes) -> None:
    """Records that a stream broke, and writes the data to the log file; keeps it until there is one."""
    with _lock:
        faults.setdefault(stream, error)
        _kept.extend(data)
        del _kept[:-MAX_KEPT]
        if _log is None:
            return
        with contextlib.suppress(OSError), open(_log, "ab") as file:
            file.write(_kept)
            _kept.clear()


def new_faults() -> list[dict[str, str]]:
    """Returns the stream and the error of each fault that has not been returned yet."""
    new = faults.keys() - _reported
    _reported.update(new)
    return [{"stream": name, "error": describe(faults[name])} for name in sorted(new)]


def describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def say(text: str, *, stream: str = "stdout") -> None:
    """Prints a line, also to a stream that the caller of meshtrain has replaced by one that may fail."""
    try:
        print(text, file=getattr(sys, stream), flush=True)
    except (OSError, ValueError) as error:
        lost(stream, error, f"{text}\n".encode(errors="replace"))


def log_to(path: Path | None) -> None:
    """Sets the file for output that cannot be written elsewhere; its folder must exist by then."""
    global _log
    with _lock:
        _log = path
        _reported.clear()
        if _kept:
            lost(*next(iter(faults.items())), b"")


def write_now(text: str) -> None:
    """Writes to stderr without waiting for another thread, in place of the bar."""
    with contextlib.suppress(OSError):
        os.write(2, (ERASE if _bar_line else b"") + text.encode("ascii", "replace"))


class Bar:
    """The progress of a task, in the last line of a terminal; elsewhere it shows nothing."""

    def __init__(self, total: float, *, stream: str = "stderr"):
        self._total = max(total, 1e-9)
        output = _outputs.get(stream)
        self._output = output if output and output.is_terminal else None
        self._next = 0.0

    @property
    def is_shown(self) -> bool:
        """Whether the stream is a terminal."""
        return self._output is not None

    def due(self) -> bool:
        """Whether `show` draws: it does not, within DRAW_SECONDS of the last time."""
        return self._output is not None and time.monotonic() >= self._next

    def show(self, done: float, *parts: str) -> None:
        """Draws the bar, and the parts of a text behind it, as far as the terminal has space."""
        global _bar_line
        if not self.due():
            return
        fd = self._output.fileno()
        with _lock, contextlib.suppress(OSError):  # a closed terminal: the next line reports it
            self._next = time.monotonic() + DRAW_SECONDS
            columns = os.get_terminal_size(fd).columns or 80
            text = _line(columns - 1, min(done / self._total, 1.0), parts)
            _bar_line = text.encode(sys.stdout.encoding or "ascii", "replace")
            if not _in_line:
                _write_all(fd, ERASE + _bar_line)

    def close(self) -> None:
        """Removes the bar."""
        global _bar_line
        with _lock, contextlib.suppress(OSError):
            if self._output and _bar_line:
                _bar_line = b""
                if not _in_line:
                    _write_all(self._output.fileno(), ERASE)


def _line(columns: int, fraction: float, parts: tuple[str, ...]) -> str:
    for separator in (" · ", " "):
        text = separator.join(parts)
        if len(text) <= columns:
            break
    cells = min(CELLS, columns - len(text) - 3)
    bar = f"[{'=' * round(fraction * cells):{cells}}] " if cells > 4 else ""
    return (bar + text)[:columns]


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds: 26:03:04."""
    minutes, rest = divmod(round(min(seconds, 1e9)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextlib.contextmanager
def progress(label: str, total: float, *, stream: str = "stderr") -> Iterator[Callable]:
    """Shows a bar. Yields a function that adds to the part of `total` that is done; threads may call it."""
    bar, began, done = Bar(total, stream=stream), time.monotonic(), 0.0

    def advance(more: float = 1) -> None:
        nonlocal done
        with _lock:
            done += more
        if bar.due():
            part = min(done / max(total, 1e-9), 1.0)
            left = (time.monotonic() - began) * (1 - part) / max(part, 1e-9)
            known = [f"{part:.0%}"] if total else []  # else nothing measures it
            bar.show(done, label, *known, *([f"{duration(left)} left"] if done else []))

    advance(0)
    try:
        yield advance
    finally:
        bar.close()
