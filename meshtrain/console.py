"""The output of this process: stdout and stderr that never fail, and a progress bar below them.

Text that cannot be written (the reader of a pipe has ended, the disk is full, the terminal is
closed) goes to a log file instead. Nothing here needs more than the standard library.
"""

import contextlib
import errno
import io
import os
import re
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

LOG = "log.txt"  # in a workdir
QUIET_VARIABLE = "MESHTRAIN_QUIET"  # "1": the supervisor asks for no progress
LOG_VARIABLE = "MESHTRAIN_LOG"  # path of the log that the supervisor writes of this process
MAX_KEPT = 1 << 16  # last bytes of lost output that are kept until there is a log file
ERASE = b"\r\x1b[K"  # a terminal's line

# The state of the output, of which a process has one; _lock guards it.

faults: dict[str, Exception] = {}  # the first fault of each stream that broke
_lock = threading.RLock()
_outputs: dict[str, "_Output"] = {}  # by "stdout" and "stderr"; empty until `guard`
_reported: set[str] = set()  # the streams whose fault `new_faults` has returned
_log: Path | None = None
_kept = bytearray()  # lost output, until there is a log file
_bar_line = b""  # what the bar shows; empty: nothing
_in_line = False  # whether the last byte on the terminal is not a line's end
_is_quiet = False  # whether what only shows progress is left out
_display: "Display | None" = None  # shows bars in place of the terminal


# ---- streams that never fail ----


class _Output(io.RawIOBase):
    """File descriptor 1 or 2; `write` always succeeds."""

    def __init__(self, stream: str, fd: int, *, is_open: bool):
        self.name = f"<{stream}>"
        self._stream = stream
        self._fd = fd
        self._is_open = is_open
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
            before = after = b""
            if self.is_terminal:
                # A line takes the place of the bar, which is then drawn below it.
                ends_line = data.endswith(b"\n")
                if _bar_line and not _in_line:
                    before = ERASE
                if ends_line:
                    after = _bar_line
                _in_line = not ends_line
            try:
                if not self._is_open:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                _write_all(self._fd, before + data + after)
            except OSError as error:
                lost(self._stream, error, data)
        return len(data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            written = os.write(fd, data)
            data = data[written:]
        except BlockingIOError:  # another program has made the pipe or terminal non-blocking
            select.select([], [fd], [])


def guard() -> None:
    """Makes sys.stdout and sys.stderr streams whose writes always succeed, from now on.

    A character that the encoding does not have is written as a question mark. Descriptors that are
    closed are opened on /dev/null: otherwise the next file to be opened would get the output. A
    stream that the caller has replaced is left alone.
    """
    closed = {fd for fd in range(3) if not _is_open(fd)}
    # A new descriptor gets the lowest free number: open until 0, 1 and 2 are taken.
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        fd = os.open(os.devnull, os.O_RDWR)
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
    before = {name: getattr(sys, name) for name in names}
    guarded_before = set(_outputs)
    guard()
    try:
        yield
    finally:
        faults.clear()  # the caller's next command starts anew
        for name in set(_outputs) - guarded_before:
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
    """Records that a stream broke, and writes the data to the log file.

    The data is kept until there is such a file.
    """
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
    streams = faults.keys() - _reported
    _reported.update(streams)
    return [{"stream": name, "error": describe(faults[name])} for name in sorted(streams)]


def describe(error: Exception) -> str:
    """Returns the text of an error, without its number."""
    return getattr(error, "strerror", None) or str(error)


def say(*lines: str, stream: str = "stdout", end: str = "\n") -> None:
    """Prints lines, `printable`, also to a stream of the caller's own that may fail."""
    text = printable("\n".join(lines))
    try:
        print(text, end=end, file=getattr(sys, stream), flush=True)
    except (OSError, ValueError) as error:
        lost(stream, error, f"{text}{end}".encode(errors="replace"))


def say_progress(*lines: str) -> None:
    """Prints lines that only show how a run progresses, unless `quiet` leaves them out.

    The log of a process that `meshtrain launch` has started gets them in any case.
    """
    if not _is_quiet:
        say(*lines)
    elif path := os.environ.get(LOG_VARIABLE):
        with contextlib.suppress(OSError), open(path, "ab") as file:
            file.write(printable("\n".join((*lines, ""))).encode(errors="replace"))


@contextlib.contextmanager
def quiet(is_quiet: bool = True) -> Iterator[None]:
    """Leaves out bars and lines of progress during the context: faults and results stay."""
    global _is_quiet
    before = _is_quiet
    _is_quiet = before or is_quiet
    try:
        yield
    finally:
        _is_quiet = before


def log_to(path: Path | None) -> None:
    """Sets the file for output that cannot be written elsewhere; its folder must exist by then."""
    global _log
    with _lock:
        _log = path
        _reported.clear()
        if _kept:
            stream, error = next(iter(faults.items()))
            lost(stream, error, b"")  # writes what is kept


@contextlib.contextmanager
def keeping_stderr() -> Iterator[Callable[[], None]]:
    """Keeps what arrives at file descriptor 2 during the block, and writes it there at its end.

    Yields a function that discards what was kept. Several threads may be in such blocks: the last
    one that leaves them writes. `write_now` writes at once.
    """
    global _kept_stderr
    with _lock:
        kept = _kept_stderr = _kept_stderr or _KeptStderr()
        kept.num_blocks += 1
    try:
        yield kept.discard
    finally:
        with _lock:
            kept.num_blocks -= 1
            if not kept.num_blocks:
                _kept_stderr = None
                kept.close()


class _KeptStderr:
    """Stands in for file descriptor 2 until it is closed."""

    def __init__(self):
        self.num_blocks = 0
        self.stderr = os.dup(2)
        self._kept = tempfile.TemporaryFile()
        os.dup2(self._kept.fileno(), 2)

    def discard(self) -> None:
        self._kept.seek(0)
        self._kept.truncate()

    def close(self) -> None:
        os.dup2(self.stderr, 2)
        with contextlib.suppress(OSError):
            os.write(2, os.pread(self._kept.fileno(), MAX_KEPT, 0))
        os.close(self.stderr)
        self._kept.close()


_kept_stderr: _KeptStderr | None = None


def write_now(text: str) -> None:
    """Writes to stderr without waiting for another thread, in place of the bar."""
    kept = _kept_stderr
    with contextlib.suppress(OSError):
        os.write(
            kept.stderr if kept else 2,
            (ERASE if _bar_line else b"") + text.encode("ascii", "replace"),
        )


# ---- text of others, such as the names of files ----

# What a terminal obeys, what reverses the order of the text after it, and halves of surrogate pairs
# (Python's stand-ins for bytes that are not UTF-8). A \r before a \n is the end of a line.
UNPRINTABLE = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
MAX_LINE_CHARS = 4000


def printable(text: str) -> str:
    r"""Returns a text that does nothing to a terminal but add text: the code ESC becomes \x1b.

    Newlines and tabs stay. It is the same for a pipe, whose reader may print on a terminal.
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def line_of(text: str) -> str:
    """Returns a text as one printable line; a very long text is cut."""
    line = printable(" ".join(line.strip() for line in text.strip().split("\n")))
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]} ..."


# ---- the bar ----

DRAW_SECONDS = 0.05  # between two drawings of the bar
CELLS = 20  # of a bar
DISPLAY_COLUMNS = 100


class Display(Protocol):
    """Shows bars elsewhere than in a terminal: below the cell of a notebook."""

    shows_rows: bool  # whether it shows the rows of a run too, so that they need no lines

    def due(self, *, is_phase: bool) -> bool: ...

    def show(self, line: str) -> None: ...

    def hide(self) -> None: ...


def set_display(display: Display | None) -> None:
    """Shows the bars that are made from now on in `display`; None: in the terminal again."""
    global _display
    _display = display


class Bar:
    """The progress of a task, in the last line of a terminal, or in the `Display` of a notebook.

    Elsewhere it shows nothing.

    Without a total, of which nothing is known but that it is not done, it has only text.
    """

    def __init__(self, total: float, *, stream: str = "stderr"):
        self._total = total
        output = _outputs.get(stream)
        is_shown = output and output.is_terminal and not _is_quiet
        self._output = output if is_shown else None
        self._display = _display
        self._next = 0.0

    @property
    def is_shown(self) -> bool:
        """True if there is a display, or the stream is a terminal."""
        return self._display is not None or self._output is not None

    @property
    def shows_rows(self) -> bool:
        """True if there is a display that shows the rows of a run as well."""
        return self._display is not None and self._display.shows_rows

    def due(self) -> bool:
        """Returns whether `show` draws: in a terminal, not within DRAW_SECONDS of the last time."""
        if self._display is not None:
            return self._display.due(is_phase=self._total <= 0)
        return self._output is not None and time.monotonic() >= self._next

    def show(self, done: float, *parts: str) -> None:
        """Draws the bar, and the parts of a text behind it, as far as the terminal has space."""
        global _bar_line
        if not self.due():
            return
        fraction = min(done / self._total, 1.0) if self._total > 0 else None
        lines = tuple(map(line_of, parts))
        if self._display is not None:
            with _lock:
                self._display.show(_line(DISPLAY_COLUMNS, fraction, lines))
            return
        if self._output is None:
            return
        fd = self._output.fileno()
        with _lock, contextlib.suppress(OSError):  # a closed terminal: the next line reports it
            self._next = time.monotonic() + DRAW_SECONDS
            columns = os.get_terminal_size(fd).columns or 80
            # The last column stays free: some terminals begin a new line after it.
            text = _line(columns - 1, fraction, lines)
            _bar_line = text.encode(sys.stdout.encoding or "ascii", "replace")
            if not _in_line:
                _write_all(fd, ERASE + _bar_line)

    def close(self) -> None:
        """Removes the bar."""
        global _bar_line
        if self._display is not None:
            self._display.hide()
        with _lock, contextlib.suppress(OSError):
            if self._output and _bar_line:
                _bar_line = b""
                if not _in_line:
                    _write_all(self._output.fileno(), ERASE)


def _line(columns: int, fraction: float | None, parts: tuple[str, ...]) -> str:
    """Returns the bar and the parts, in at most `columns` characters."""
    for separator in (" · ", " "):
        text = separator.join(parts)
        if len(text) <= columns:
            break
    if fraction is None:
        return text[:columns]
    cells = min(CELLS, columns - len(text) - 3)
    bar = f"[{'=' * round(fraction * cells):{cells}}] " if cells > 4 else ""
    return (bar + text)[:columns]


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds: 26:03:04."""
    minutes, rest = divmod(round(min(seconds, 1e9)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@contextlib.contextmanager
def progress(label: str, total: float, *, stream: str = "stderr") -> Iterator[Callable]:
    """Shows a bar. Yields a function that adds to what is done of `total`; threads may call it."""
    bar = Bar(total, stream=stream)
    began = time.monotonic()
    done = 0.0

    def advance(more: float = 1) -> None:
        nonlocal done
        with _lock:
            done += more
        if not bar.due():
            return
        fraction = min(done / max(total, 1e-9), 1.0)
        parts = [label]
        if total:
            parts.append(f"{fraction:.0%}")
        if done:
            seconds_left = (time.monotonic() - began) * (1 - fraction) / max(fraction, 1e-9)
            parts.append(f"{duration(seconds_left)} left")
        bar.show(done, *parts)

    advance(0)
    try:
        yield advance
    finally:
        bar.close()
