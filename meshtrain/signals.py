"""Ctrl-C and SIGTERM: the first asks a run to save and stop, the second ends it at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def asking() -> Iterator[threading.Event]:
    """Makes the first signal set an event; a second one acts as ever."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals belong to the main thread
        return

    def ask(signum, frame):
        asked.set()
        signal.signal(signum, before[signum])

    before = {signum: signal.signal(signum, ask) for signum in STOPPING}
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def abort_on_signals() -> None:
    """Makes a signal that nobody handles end this process with a line, whatever its threads wait for."""

    def abort(signum, frame):
        os.write(sys.stderr.fileno(), b"aborted: what was not saved by then is lost\n")
        os._exit(128 + signum)

    for signum in STOPPING:
        signal.signal(signum, abort)
