"""Reads of objects that are repeated while their store does not answer, and the threads that wait.

They end with the process, whatever they wait for. object_store.py has the client.
"""

import atexit
import contextlib
import math
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any

from meshtrain import console, object_store
from meshtrain.cluster import progress
from meshtrain.errors import ConfigError, TransientError, first_line

# Seconds from the first failed request, without a successful one, to the error that ends the run.
# A supervisor restarts a run that waits for a minute, which does not say why.
PATIENCE = 120.0
PATIENCE_SUPERVISED = 45.0
OPEN_PATIENCE = 3.0  # before anything was read: a mistake is more likely than an outage
LOG_AFTER = 2.0  # seconds without an answer
MAX_DELAY = 4.0  # seconds between two attempts
BLOCK_THREADS = 24  # blocks that a process fetches at the same time
PART_THREADS = 64  # parts, which are smaller
# Answers of a store that another attempt does not change.
PERMANENT = re.compile(r"http_response_code='(30\d|400|401|403|405|410|411|412|413|414|501)'")


class Store:
    """The objects under the URL of a folder. Reads are repeated for a while, then end the run."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._folder = object_store.scratch_folder(self.url)
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._newest_failure = 0.0
        self._is_logged = False
        self._has_answered = False
        self._kvstore: Any = None

    def _open(self) -> Any:
        with self._lock:
            if self._kvstore is None:
                self._kvstore = object_store.open_for_reading(self._folder)
            return self._kvstore

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns bytes `start` ... `end` - 1 of an object, or all.

        Raises FileNotFoundError if there is none, ConfigError for an answer that will not change,
        TransientError if the store is away for too long.
        """
        attempt = 0
        while True:
            _raise_if_closing()
            began = time.monotonic()
            try:
                future = self._open().read(name, byte_range=slice(start, end))
                result = _wait(future, OPEN_PATIENCE + 2 if not self._has_answered else math.inf)
            except TransientError:
                raise
            except Exception as error:  # ValueError of TensorStore for most, TimeoutError
                self._failed(name, error, began)
                attempt += 1
                time.sleep(random.uniform(0.5, 1) * min(MAX_DELAY, 0.1 * 2**attempt))
                continue
            with self._lock:
                if self._failing_since is not None and self._is_logged:
                    log(f"{self.url}: answers again")
                self._failing_since = None
                self._has_answered = True
            if result.state != "value":
                raise FileNotFoundError(None, "no such object", f"{self.url}/{name}")
            return result.value

    def _failed(self, name: str, error: Exception, began: float) -> None:
        """Raises an error if another attempt than the one that `began` then is of no use."""
        text = str(error)
        cause = self._cause(text) or first_line(error)
        if "OUT_OF_RANGE" in text or "Content-Range" in text:
            raise ConfigError(
                f"{self.url}/{name}: is shorter than manifest.json lists; upload it again"
            ) from error
        if PERMANENT.search(text) or "PERMISSION_DENIED" in text:
            raise ConfigError(f"{self.url}/{name}: {cause}; {_WAY_OUT}") from error
        now = time.monotonic()
        with self._lock:
            # After a pause without requests it is another outage.
            if self._failing_since is None or began - self._newest_failure > _patience():
                self._failing_since = began
                self._is_logged = False
            self._newest_failure = now
            waited = now - self._failing_since
            limit = _patience() if self._has_answered else OPEN_PATIENCE
            is_due = self._has_answered and LOG_AFTER < waited <= limit and not self._is_logged
            self._is_logged |= is_due
        if waited > limit:
            raise TransientError(
                f"{self.url}/{name}: no answer from the store for {waited:.0f} s: {cause}; "
                f"{_WAY_OUT}"
            ) from error
        if is_due:
            log(f"{self.url}: {cause}; tries again for {limit:.0f} s")

    def _cause(self, text: str) -> str:
        """Returns the last cause in a message of TensorStore: an answer, or why none came."""
        cause = object_store.request_error(text, self._folder).strerror or ""
        cause = cause.rpartition("retry attempts failed: ")[2]
        if code := re.search(r"http_response_code='(\d+)'", text):
            with contextlib.suppress(ValueError):
                return f"HTTP {code[1]} {HTTPStatus(int(code[1])).phrase}"
        return cause

    def names(self) -> list[str] | None:
        """Returns the names of all objects; None if the store does not list them."""
        try:
            return [key.decode() for key in _wait(self._open().list(), 60.0)]
        except Exception:  # who may read may not always list
            return None


_WAY_OUT = (
    "check the address, region and credentials "
    "(AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID; GOOGLE_APPLICATION_CREDENTIALS), "
    "or that the bucket may be read without (AWS_NO_SIGN_REQUEST=1)"
)


def _patience() -> float:
    return PATIENCE_SUPERVISED if progress.VARIABLE in os.environ else PATIENCE


def _wait(future: Any, seconds: float) -> Any:
    """Returns the result of a future of TensorStore; raises TransientError if the process ends.

    Raises TimeoutError after `seconds`; with inf, TensorStore itself gives up when nothing has come
    for a while (object_store.TIMEOUTS).
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return future.result(timeout=0.5)
        except TimeoutError:
            _raise_if_closing()
            if time.monotonic() > end:
                future.cancel()
                raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def log(text: str) -> None:
    console.say(console.line_of(f"data: {text}"), stream="stderr")


# ---- threads that end with the process ----

_closing = threading.Event()


def _raise_if_closing() -> None:
    if _closing.is_set():
        raise TransientError("data: the process ends")


class _Threads:
    """Daemon threads that run functions in order. Those of `concurrent.futures` would keep a
    process from ending until all that was read ahead has come."""

    def __init__(self, number: int):
        self._queue: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._number = number
        self._lock = threading.Lock()

    def submit(self, function: Callable, *args: Any) -> Future:
        future: Future = Future()
        with self._lock:
            self._queue.put((future, function, args))
            if len(self._threads) < self._number:
                thread = threading.Thread(target=self._work, name="remote", daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while (task := self._queue.get()) is not None and not _closing.is_set():
            future, function, args = task
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, function, args

    def join(self, seconds: float) -> None:
        """Ends the threads, after `_closing` was set; waits for them for some seconds."""
        end = time.monotonic() + seconds
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


block_threads = _Threads(BLOCK_THREADS)
part_threads = _Threads(PART_THREADS)


def _close() -> None:
    """Ends the threads before Python's end, when those in native code would abort the process."""
    _closing.set()
    block_threads.join(3.0)
    part_threads.join(1.0)


atexit.register(_close)
