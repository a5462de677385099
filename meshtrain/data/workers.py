"""Processes that read and tokenize for this one, in the order of the items that they get.

They are programs of their own, not of `multiprocessing`, which runs the main script of the user
again in each of them: a script that trains without `if __name__ == "__main__"` would train there.
A message is a line of JSON, and then the bytes of its arrays.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import meshtrain
from meshtrain.errors import ConfigError, TransientError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Message(NamedTuple):
    """An item or a result."""

    value: Any  # what JSON can spell
    arrays: Sequence[np.ndarray] = ()  # of numbers


Function = Callable[[Message], Message]


class WorkerEnded(TransientError):
    """A worker process has ended before it answered."""


class Workers:
    """Applies the function that `make(settings)` returns to items, in `num_workers` processes.

    A process runs the module of `make`, which calls `serve`. With 0 processes the function is
    applied here. The processes start when they are first needed, and end with this object, or with
    this process however it ends.
    """

    def __init__(self, make: Callable[[Any], Function], settings: Any, num_workers: int):
        self.num_workers = num_workers
        self._make = make
        self._settings = settings  # what JSON can spell
        self._function: Function | None = None  # of this process
        self._processes: list[subprocess.Popen] = []
        self._lock = threading.Lock()  # training and evaluation read in threads of their own
        weakref.finalize(self, _end, self._processes)

    def map(self, items: Iterable[Message]) -> Generator[Message, None, None]:
        """Yields the results in the order of the items; raises the ConfigError of an item.

        Raises WorkerEnded if a process has ended, perhaps since the machine ran out of memory.
        """
        with self._lock:
            if not self.num_workers:
                if self._function is None:
                    self._function = self._make(self._settings)
                yield from map(self._function, items)
                return
            self._start()
            is_done = False
            try:
                yield from self._answers(iter(items))
                is_done = True
            finally:
                if not is_done:
                    self._stop()  # answers that nobody reads may be on their way

    def run(self, items: list[Message]) -> list[Message]:
        """Returns the results; if a process ends, all are computed once more, in new processes."""
        try:
            return list(self.map(items))
        except WorkerEnded:
            return list(self.map(items))

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _answers(self, items: Iterator[Message]) -> Iterator[Message]:
        """Yields the results; each process has one item at a time, so no pipe can fill up."""
        busy: list[subprocess.Popen] = []
        for process, item in zip(self._processes, items, strict=False):
            self._send(process, item)
            busy.append(process)
        while busy:
            process = busy.pop(0)
            result = self._receive(process)
            for item in items:
                self._send(process, item)
                busy.append(process)
                break
            yield result

    def _start(self) -> None:
        if self._processes:
            return
        environment = {**os.environ}
        # Each process has one thread: there are as many as shall be busy.
        environment.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
        # The module of this package, whatever the folder of the script holds.
        root = str(Path(meshtrain.__file__).resolve().parents[1])
        inherited = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([root, inherited] if inherited else [root])
        for _ in range(self.num_workers):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._make.__module__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            self._processes.append(process)
        for process in self._processes:
            self._send(process, Message(self._settings))

    def _stop(self) -> None:
        _end(self._processes)
        self._processes.clear()

    def _send(self, process: subprocess.Popen, item: Message) -> None:
        assert process.stdin is not None
        try:
            _write(process.stdin, "item", item)
        except OSError:
            raise self._ended(process) from None

    def _receive(self, process: subprocess.Popen) -> Message:
        assert process.stdout is not None
        try:
            kind, message = _read(process.stdout)
        except EOFError:
            raise self._ended(process) from None
        if kind == "faults":
            raise ConfigError(*message.value)
        if kind == "error":
            raise RuntimeError(f"in a worker process:\n{message.value}")
        return message

    def _ended(self, process: subprocess.Popen) -> WorkerEnded:
        code = process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerEnded(
            f"data.num_workers={self.num_workers}: a worker process has ended with {how}; if the "
            f"machine ran out of memory, use fewer"
        )


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


# ---- in a worker process ----


def serve(make: Callable[[Any], Function]) -> None:
    """Answers the items on stdin with the function that `make(settings)` returns, until it ends."""
    # A signal to all processes of a job is for the parent, which finishes its step and saves; this
    # process ends with it, since stdin ends then.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Nothing that a library prints may come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function: Function | None = None
    try:
        _, settings = _read(sys.stdin.buffer)
        while True:
            _, item = _read(sys.stdin.buffer)
            kind = "result"
            try:
                if function is None:
                    function = make(settings.value)
                answer = function(item)
            except ConfigError as error:
                kind, answer = "faults", Message(error.faults)
            except Exception:
                kind, answer = "error", Message(traceback.format_exc())
            _write(answers, kind, answer)
    except (EOFError, BrokenPipeError):  # the parent has ended, or needs no more
        os._exit(0)


# ---- messages ----


def _write(file: BinaryIO, kind: str, message: Message) -> None:
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    header = [kind, message.value, [[array.dtype.str, array.size] for array in arrays]]
    file.write(json.dumps(header).encode() + b"\n")
    for array in arrays:
        file.write(array.data)
    file.flush()


def _read(file: BinaryIO) -> tuple[str, Message]:
    """Returns the kind of the next message, and the message; raises EOFError at the end."""
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    kind, value, described = json.loads(line)
    arrays = []
    for dtype, size in described:
        num_bytes = size * np.dtype(dtype).itemsize
        content = file.read(num_bytes)
        if len(content) < num_bytes:
            raise EOFError
        arrays.append(np.frombuffer(content, dtype))
    return kind, Message(value, arrays)
