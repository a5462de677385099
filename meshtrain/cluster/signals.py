"""Ctrl-C and SIGTERM: the first asks a run to save and stop, the second ends it at once."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)

_watched = False
_asked: threading.Event | None = None  # of the run that goes on


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Makes the first signal set an event; a second one acts as ever."""
    global _asked
    asked = threading.Event()
    if _watched or threading.current_thread() is not threading.main_thread():
        _asked = asked  # signals belong to the main thread, or are heeded already
        try:
            yield asked
        finally:
            _asked = None
        return

    def ask(signum, frame):
        asked.set()
        for number in STOPPING:
            signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handled_in_thread() -> Iterator[None]:
    """Heeds signals in a thread of its own: the main one may wait in native code for another process.

    The first sets the event of the run that goes on, if one does; else, and the second time, a signal
    ends this process with a line, at once. To be entered in the main thread.
    """
    global _watched
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {number: signal.signal(number, lambda *args: None) for number in STOPPING}
    old = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_heed, args=(ours,), name="signals", daemon=True).start()
    _watched = True
    try:
        yield
    finally:
        _watched = False
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()  # ends the thread


def _heed(ours: socket.socket) -> None:
    with ours:
        while said := ours.recv(1):
            if said[0] not in STOPPING:
                continue
            if _asked is not None and not _asked.is_set():
                _asked.set()
                continue
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.__stderr__.fileno(), b"aborted: what was not saved by then is lost\n")
            os._exit(128 + said[0])
