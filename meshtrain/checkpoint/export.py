"""Exports checkpoints of a run as model folders, in the background: `checkpoint.export`.

An export is `meshtrain convert` of a saved checkpoint, in a process of its own: training continues,
and neither its devices nor its memory are used. It writes to WORKDIR/model/STEP.partial, which
becomes WORKDIR/model/STEP when it is complete. A checkpoint is kept until its export has ended.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from meshtrain import storage
from meshtrain.checkpoint import find, manifest
from meshtrain.cluster import progress
from meshtrain.cluster.launchers import JAX_VARIABLES
from meshtrain.config.schema import CheckpointConfig

FOLDER = storage.MODELS

# Ends with the run, and leaves it the cores.
START = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.nice(10)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


class Exporter:
    """Exports one checkpoint after the other; close it when done.

    Only process 0 has one. Outcomes go to `event(name, **fields)` and `log(text)`, when
    `report` is called.
    """

    def __init__(
        self,
        workdir: Path,
        settings: CheckpointConfig,
        *,
        event: Callable[..., None],
        log: Callable[[str], None],
    ):
        self._checkpoints = workdir / find.FOLDER
        self._folder = workdir / FOLDER
        self._every = settings.export_every
        self._event = event
        self._log = log
        # What an interrupted run has left; the workdir is locked.
        _remove_partial(self._folder)
        self._lock = threading.Lock()
        # Steps to export, the one in progress included.
        self._waiting: list[int] = []
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[str, str, dict[str, Any]]] = queue.SimpleQueue()
        self._process: subprocess.Popen | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Returns whether the checkpoint of this step is to be exported."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def catch_up(self, steps: Iterable[int]) -> None:
        """Exports those of these steps that an earlier run has not exported."""
        for step in sorted(steps):
            if self.due(step):
                self.add_missing(step)

    def add_missing(self, step: int) -> None:
        """Exports the checkpoint of a step unless that is done, or is waiting."""
        if not (self._folder / str(step)).exists() and step not in self.waiting():
            self.add(step)

    def add(self, step: int) -> None:
        """Exports the checkpoint of a step, over an earlier export."""
        with self._lock:
            self._waiting.append(step)
        self._queue.put(step)

    def waiting(self) -> list[int]:
        """Returns the steps that are not exported yet; their checkpoints must stay."""
        with self._lock:
            return [*self._waiting]

    def report(self) -> None:
        """Logs the exports that have ended since the last call."""
        while not self._outcomes.empty():
            name, text, fields = self._outcomes.get()
            self._event(name, **fields)
            self._log(text)

    def close(self) -> None:
        """Ends an export in progress; the next start of the run begins it again."""
        self._closed = True
        self._queue.put(None)
        with self._lock:
            process = self._process
        if process:
            with contextlib.suppress(OSError):
                process.kill()
        self._thread.join()
        self.report()
        _remove_partial(self._folder)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            began = time.perf_counter()
            what = fault = ""
            try:
                what = self._export(step)
            except (OSError, _Failed) as error:
                fault = str(error) or type(error).__name__
            if self._closed:
                return
            seconds = time.perf_counter() - began
            target = self._folder / str(step)
            if not fault:
                text = f"exported    {target}: {what}, in {seconds:.0f} s in the background"
                fields = {"step": step, "path": str(target), "seconds": seconds}
                self._outcomes.put(("export", text, fields))
            else:
                text = f"step {step} could not be exported: {fault}; later: meshtrain convert "
                text += f"{self._checkpoints / str(step)} FOLDER"
                self._outcomes.put(("export_failed", text, {"step": step, "error": fault}))
            with self._lock:
                self._waiting.remove(step)

    def _export(self, step: int) -> str:
        """Exports a checkpoint and returns what it is; raises OSError, or _Failed."""
        target = self._folder / str(step)
        self._folder.mkdir(parents=True, exist_ok=True)
        if target.exists():  # of a checkpoint that this one has replaced
            partial = target.with_name(target.name + manifest.PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            target.rename(partial)
        convert = ["-m", "meshtrain", "convert", str(self._checkpoints / str(step)), str(target)]
        command = [sys.executable, "-I", "-S", "-c", START, str(os.getpid()), sys.executable]
        with self._lock:
            if self._closed:
                raise _Failed("the run has ended")
            self._process = subprocess.Popen(
                [*command, *convert],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the run, which ends its export itself
            )
        stdout, stderr = self._process.communicate()
        if self._process.returncode:
            lines = stderr.strip().splitlines() or [f"exit code {self._process.returncode}"]
            raise _Failed(lines[0])
        storage.sync(self._folder)
        return stdout.strip().removeprefix(f"{target}: ")


class _Failed(Exception):
    """An export has failed; the message says why."""


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(f"*{manifest.PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Returns the environment of an export: one process, which uses no devices."""
    environ = {name: value for name, value in os.environ.items() if name not in JAX_VARIABLES}
    environ.pop(progress.VARIABLE, None)
    _, num_processes, _ = JAX_VARIABLES
    environ |= {num_processes: "1", "JAX_PLATFORMS": "cpu"}
    # The package may lie where only the path of this program says.
    root = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    return environ
