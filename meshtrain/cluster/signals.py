"""Handles Ctrl-C, SIGTERM and a closed terminal: the first asks to save and stop, the second ends.

SIGHUP never counts as the second signal: a terminal that is closed may send it more than once. A
process that is started with SIGHUP ignored (nohup) ignores it.
"""

import atexit
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshtrain import console

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_thread_active = False  # whether `handled_in_thread` is in effect
_receive: Callable[[int], None] | None = None  # of the innermost `received_by`


@contextlib.contextmanager
def stop_event() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets; the second one has the effect it had before."""
    event = threading.Event()

    def receive(number: int) -> None:
        if not event.is_set():
            event.set()
        elif number == signal.SIGHUP:
            return
        elif number in handlers:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        else:
            _end("aborted: everything since the last save is lost", number)

    with received_by(receive) as handlers:
        yield event


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within the context signals wait: the first one has its effect afterwards.

    A process that is being started prints a traceback if its parent ends meanwhile.
    """
    received: list[int] = []
    with received_by(received.append):
        yield
    if received:
        signal.raise_signal(received[0])


@contextlib.contextmanager
def received_by(receive: Callable[[int], None]) -> Iterator[Mapping[int, Any]]:
    """Calls `receive(number)` for each signal; yields the handlers that it has replaced.

    Outside the main thread `receive` is called only if `handled_in_thread` is in effect: only the
    main thread can set handlers.
    """
    global _receive
    if _thread_active or threading.current_thread() is not threading.main_thread():
        previous = _receive
        _receive = receive
        try:
            yield {}
        finally:
            _receive = previous
        return
    handlers = {number: signal.getsignal(number) for number in _handled()}
    for number in handlers:
        signal.signal(number, lambda number, frame: receive(number))
    try:
        yield handlers
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def handled_in_thread() -> Iterator[None]:
    """Handles signals in a thread: the main thread may be in native code, or wait for a process.

    A signal that no `received_by` receives logs a line and ends this process at once, in any state:
    all that it writes is safe against SIGKILL too. Enter this context in the main thread.
    """
    global _thread_active
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    # The handlers do nothing: Python writes the number of each signal to `sender`, for the thread
    # to read.
    handlers = {number: signal.signal(number, lambda *args: None) for number in _handled()}
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_handle_signals, args=(receiver,), name="signals", daemon=True).start()
    _thread_active = True
    try:
        yield
    finally:
        _thread_active = False
        signal.set_wakeup_fd(previous_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        sender.close()  # ends the thread
        # While Python exits, KeyboardInterrupt would print a traceback.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def _handled() -> list[int]:
    """Returns the signals to handle."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return [number for number in STOPPING if number != signal.SIGHUP]
    return list(STOPPING)


def _handle_signals(receiver: socket.socket) -> None:
    """Reads the numbers of signals until the other end is closed."""
    with receiver:
        while received := receiver.recv(1):
            number = received[0]
            if number not in STOPPING:
                continue
            if _receive is not None:
                _receive(number)
            else:
                _end("interrupted", number)


def _end(message: str, number: int) -> None:
    console.write_now(f"{message}\n")
    os._exit(128 + number)
