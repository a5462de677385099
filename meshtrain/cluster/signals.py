"""Ctrl-C and SIGTERM: the first one asks a run to save and stop, the second one ends it at once."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)

_thread_active = False  # whether `handled_in_thread` is in effect
_stop_requested: threading.Event | None = None  # of the current run


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets; the second signal has the effect it had before."""
    global _stop_requested
    event = threading.Event()
    # Only the main thread can set handlers; `handled_in_thread` has set its own.
    if _thread_active or threading.current_thread() is not threading.main_thread():
        _stop_requested = event
        try:
            yield event
        finally:
            _stop_requested = None
        return

    def handler(signum, frame):
        event.set()
        for number in STOPPING:
            signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        signal.signal(number, handler)
    try:
        yield event
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def handled_in_thread() -> Iterator[None]:
    """Handles signals in a thread: the main thread may wait in native code for another process.

    The first signal during a run sets its `stop_event`. Any other signal logs a line and ends this
    process at once. Enter this context in the main thread.
    """
    global _thread_active
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    before = {number: signal.signal(number, lambda *args: None) for number in STOPPING}
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=(receiver,), name="signals", daemon=True).start()
    _thread_active = True
    try:
        yield
    finally:
        _thread_active = False
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()  # ends the thread


def _handle_signals(receiver: socket.socket) -> None:
    with receiver:
        while received := receiver.recv(1):
            number = received[0]
            if number not in STOPPING:
                continue
            if _stop_requested is not None and not _stop_requested.is_set():
                _stop_requested.set()
                continue
            message = b"aborted: everything since the last save is lost\n"
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.__stderr__.fileno(), message)
            os._exit(128 + number)
