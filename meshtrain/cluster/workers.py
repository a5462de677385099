"""The processes of one host: started in groups of their own, looked at, and killed with all they started."""

import collections
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.cluster import progress

LAST_READS = 100  # of 64 KiB, of a process that has ended
UNKILLABLE = 30.0  # seconds after which a process that waits in the kernel is left behind
LONGEST_LINE = 1 << 16  # bytes; a longer one is cut
TAIL = 30  # lines of each process that are kept, to be shown if it fails
# Becomes the command that follows, after asking Linux to end it when the thread that started it dies
# (1: PR_SET_PDEATHSIG). Not between fork and exec: a fork among jax's threads is a gamble.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


@dataclass(frozen=True)
class ProcessStatus:
    """What a process is doing; times in seconds."""

    rank: int
    pid: int
    phase: str
    reached: int  # step
    first: int  # step that it began with, -1: it has not begun
    age: float  # since the phase began
    silent: float  # since the last heartbeat; 0 before the first one
    stopped: float  # since a signal stopped it; 0: it runs
    typical: float  # of a step


@dataclass(frozen=True)
class Exit:
    rank: int
    code: int  # negative: the signal that killed it
    look: ProcessStatus  # the last one
    tail: list[str]


@dataclass(frozen=True)
class Start:
    """What the processes of a host need to know to join an attempt."""

    address: str  # of process 0
    count: int  # of all processes
    first_rank: int
    num_local: int


class _Child:
    def __init__(
        self, rank: int, process: subprocess.Popen, path: Path, page: progress.ProgressPage
    ):
        self.rank, self.process, self.path, self.page = rank, process, path, page
        self.tail: collections.deque = collections.deque(maxlen=TAIL)
        self.part = b""  # of a line
        self.stopped_since = 0.0
        self.gone = False


class Workers:
    """Close it to kill what still runs. `show(rank, line)` is given each line of output."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        local_id: int = 0,
        num_supervisors: int = 1,
        logs: Path | None,
        show: Callable[[int, str], None],
    ):
        """`local_id` of `num_supervisors` says which this one is, where several share the host."""
        self._command, self._environ, self._logs, self._show = command, dict(environ), logs, show
        self._local_id, self._num_supervisors = local_id, num_supervisors
        self._children: list[_Child] = []
        self._ready = selectors.DefaultSelector()
        self._folder = tempfile.TemporaryDirectory(prefix="meshtrain-")
        self._attempt, self._polled, self._floor = 0, time.monotonic(), 0.0

    def start(self, how: Start) -> None:
        self._attempt += 1
        self._children = []
        for i in range(how.num_local):
            rank = how.first_rank + i
            path = Path(self._folder.name) / f"{self._attempt}-{rank}"
            path.parent.mkdir(exist_ok=True)  # in weeks somebody may have tidied up
            page = progress.ProgressPage.create(path)
            environ = {
                **self._environ,
                "JAX_COORDINATOR_ADDRESS": how.address,
                "JAX_NUM_PROCESSES": str(how.count),
                "JAX_PROCESS_ID": str(rank),
                "LOCAL_RANK": str(self._local_id * how.num_local + i),
                "LOCAL_WORLD_SIZE": str(self._num_supervisors * how.num_local),
                "PYTHONUNBUFFERED": "1",
                progress.VARIABLE: str(path),
            }
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    DIE_WITH_PARENT,
                    str(os.getpid()),
                    *self._command,
                ],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: Ctrl-C reaches the supervisor alone
            )
            os.set_blocking(process.stdout.fileno(), False)
            child = _Child(rank, process, path, page)
            self._ready.register(process.stdout, selectors.EVENT_READ, child)
            self._children.append(child)
            self._log(rank, f"---- attempt {self._attempt}, pid {process.pid} ----\n".encode())

    def pump(self, seconds: float) -> None:
        """Waits at most so long for output, and passes on what there is."""
        now = time.monotonic()
        if now - self._polled > 5 + seconds:
            self._floor = now  # the supervisor itself was stopped: nobody was late meanwhile
        self._polled = now
        for key, _ in self._ready.select(seconds):
            self._read(key.data)

    def _read(self, child: _Child) -> None:
        """Once, so that one who never stops talking leaves time for the others."""
        try:
            said = os.read(child.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not said:
            self._ready.unregister(child.process.stdout)
            return
        self._log(child.rank, said)
        *lines, child.part = (child.part + said).split(b"\n")
        if len(child.part) > LONGEST_LINE:
            lines, child.part = [*lines, child.part], b""
        for line in lines:
            self._tell(child, line)

    def _tell(self, child: _Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        child.tail.append(text)
        self._show(child.rank, text)

    def _log(self, rank: int, said: bytes) -> None:
        if self._logs:
            with contextlib.suppress(OSError):  # a full disk: the training goes on
                with open(self._logs / f"rank-{rank}.log", "ab") as file:
                    file.write(said)

    def exits(self) -> list[Exit]:
        """Returns the processes that have ended since the last call."""
        found = []
        for child in self._children:
            if child.gone or child.process.poll() is None:
                continue
            child.gone = True
            self._drain(child)
            found.append(
                Exit(child.rank, child.process.returncode, self._look(child), list(child.tail))
            )
        return found

    def _drain(self, child: _Child) -> None:
        pipe = child.process.stdout
        for _ in range(LAST_READS):
            if pipe in self._ready.get_map():
                self._read(child)
        if pipe in self._ready.get_map():  # what it started has it open as well
            self._ready.unregister(pipe)
        if child.part:
            self._tell(child, child.part)
        pipe.close()

    def looks(self) -> list[ProcessStatus]:
        """Returns what the processes that still run are doing."""
        return [self._look(child) for child in self._children if not child.gone]

    def _look(self, child: _Child) -> ProcessStatus:
        page, now = child.page, time.monotonic()
        if not _is_stopped(child.process.pid):
            child.stopped_since = 0.0
        elif not child.stopped_since:
            child.stopped_since = now
        beat = page["beat"] and max(page["beat"], self._floor)
        return ProcessStatus(
            rank=child.rank,
            pid=child.process.pid,
            phase=page.phase,
            reached=int(page["reached"]),
            first=int(page["first"]),
            age=now - max(page["since"], self._floor),
            silent=now - beat if beat else 0.0,
            stopped=now - child.stopped_since if child.stopped_since else 0.0,
            typical=page["typical"],
        )

    def first(self) -> ProcessStatus | None:
        """Returns what the first process here did last."""
        return self._look(self._children[0]) if self._children else None

    def seconds(self) -> dict[str, float]:
        """Returns how the first process here has spent its time."""
        return self._children[0].page.seconds() if self._children else {}

    def ask(self) -> None:
        """Asks all to save and stop; not by a signal, which a cluster may have sent them as well."""
        for child in self._children:
            child.page["stop"] = 1

    def dump(self) -> None:
        """Makes all write their stacks."""
        for child in self._children:
            if not child.gone:
                child.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills every group, also those whose first process has ended, and waits."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        for child in self._children:
            try:
                child.process.wait(UNKILLABLE)
            except subprocess.TimeoutExpired:
                self._show(
                    child.rank, f"pid {child.process.pid} cannot be killed; going on without"
                )
            if not child.gone:
                self._drain(child)
            child.path.unlink(missing_ok=True)
        self._children = []  # their numbers may belong to others from now on

    def close(self) -> None:
        self.kill()
        self._ready.close()
        self._folder.cleanup()


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
