"""Starts, observes and kills the processes of a run on one host, with all their subprocesses."""

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

from meshtrain import console
from meshtrain.cluster import progress, rendezvous, signature
from meshtrain.supervise.running_clock import RunningClock

MAX_FINAL_READS = 100  # of 64 KiB, from a process that has ended
KILL_TIMEOUT = 30.0  # seconds; a process may be blocked in the kernel
MAX_LINE = 1 << 16  # bytes; a longer line is split
TAIL = 30  # last lines of each process, shown if it fails

# Executes a command after asking Linux to kill it when the thread that started it dies (1:
# PR_SET_PDEATHSIG). A preexec_fn, between fork and exec, would not be safe with jax's threads.
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
    """The phase, step and signs of life of a process; times in seconds."""

    rank: int
    pid: int
    phase: str
    current_step: int
    first_step: int  # of this attempt; -1 before it
    phase_age: float  # time in this phase
    heartbeat_age: float  # time since the last heartbeat; 0 before the first one
    stopped_for: float  # time since a signal stopped it; 0 if it is running
    step_seconds: float  # median duration of a step; 0 if unknown


@dataclass(frozen=True)
class Exit:
    """The end of a process."""

    rank: int
    code: int  # negative: the signal that killed it
    status: ProcessStatus  # the last one
    tail: list[str]


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of the processes of one host in an attempt."""

    address: str  # of process 0
    num_processes: int  # over all hosts
    first_rank: int
    num_local: int
    nonce: str = ""  # a random one for each attempt, from which the token of its processes is made


class _Child:
    def __init__(
        self, rank: int, process: subprocess.Popen, path: Path, page: progress.ProgressPage
    ):
        assert process.stdout is not None  # it is a pipe
        self.rank = rank
        self.process = process
        self.output = process.stdout
        self.path = path  # of its progress page
        self.page = page
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self.partial_line = b""
        self.stopped_since: float | None = None
        self.ended = False
        self.is_fault_shown = False  # of its page
        # The last value of each name, and when this supervisor first saw it: the clock of a process
        # may differ from its own, or jump.
        self._seen: dict[str, tuple[tuple, float]] = {}

    def changed_at(self, name: str, value: tuple, now: float) -> float:
        """Returns the time, by this supervisor's clock, at which `value` had last changed."""
        if self._seen.get(name, (None, 0.0))[0] != value:
            self._seen[name] = value, now
        return self._seen[name][1]


class Workers:
    """The processes on one host. `show(rank, line)` gets each line; `close` kills them."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        local_id: int = 0,
        num_supervisors: int = 1,
        secret: str = "",
        logs: Path | None,
        show: Callable[[int, str], None],
        clock: RunningClock | None = None,
    ):
        """`local_id` is the rank of this supervisor among the `num_supervisors` of this host.

        `secret` is the one of the supervisors; processes get only a token made from it.
        """
        self._command = command
        self._environ = dict(environ)
        self._logs = logs
        self._show = show
        self._clock = clock or RunningClock()
        self._local_id = local_id
        self._num_supervisors = num_supervisors
        self._secret = secret
        self._children: list[_Child] = []
        self._ready = selectors.DefaultSelector()
        self._folder = tempfile.TemporaryDirectory(prefix="meshtrain-")
        self._attempt = 0

    def start(self, ranks: RankAssignment) -> None:
        """Starts the processes of an attempt; the last attempt must have been killed."""
        self._attempt += 1
        self._children = []
        for i in range(ranks.num_local):
            rank = ranks.first_rank + i
            path = Path(self._folder.name) / f"{self._attempt}-{rank}"
            path.parent.mkdir(exist_ok=True)  # in a long run, a cleaner of /tmp may have deleted it
            page = progress.ProgressPage.create(path)
            environ = {
                **self._environ,
                "JAX_COORDINATOR_ADDRESS": ranks.address,
                "JAX_NUM_PROCESSES": str(ranks.num_processes),
                "JAX_PROCESS_ID": str(rank),
                "LOCAL_RANK": str(self._local_id * ranks.num_local + i),
                "LOCAL_WORLD_SIZE": str(self._num_supervisors * ranks.num_local),
                "PYTHONUNBUFFERED": "1",
                progress.VARIABLE: str(path),
                rendezvous.TOKEN_VARIABLE: signature.attempt_token(self._secret, ranks.nonce),
            }
            if self._logs:
                environ[console.LOG_VARIABLE] = str(self._log_file(rank))
            wrapper = [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid())]
            process = subprocess.Popen(
                [*wrapper, *self._command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own process group: Ctrl-C reaches only the supervisor
            )
            child = _Child(rank, process, path, page)
            os.set_blocking(child.output.fileno(), False)
            self._ready.register(child.output, selectors.EVENT_READ, child)
            self._children.append(child)
            self._log(rank, f"---- attempt {self._attempt}, pid {process.pid} ----\n".encode())

    def poll(self, seconds: float) -> None:
        """Waits at most `seconds` for output, then shows and logs it."""
        for key, _ in self._ready.select(seconds):
            self._read(key.data)

    def _read(self, child: _Child) -> None:
        """Reads once only: a process that prints without pause must not block the others."""
        try:
            output = os.read(child.output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not output:
            self._ready.unregister(child.output)
            return
        self._log(child.rank, output)
        *lines, child.partial_line = (child.partial_line + output).split(b"\n")
        if len(child.partial_line) > MAX_LINE:
            lines.append(child.partial_line)
            child.partial_line = b""
        for line in lines:
            self._show_line(child, line)

    def _show_line(self, child: _Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        child.tail.append(text)
        self._show(child.rank, text)

    def _log(self, rank: int, output: bytes) -> None:
        if self._logs:
            with contextlib.suppress(OSError):  # a full disk must not stop the training
                with open(self._log_file(rank), "ab") as file:
                    file.write(output)

    def _log_file(self, rank: int) -> Path:
        assert self._logs is not None
        return self._logs / f"rank-{rank}.log"

    def new_exits(self) -> list[Exit]:
        """Returns the processes that have ended since the last call."""
        exits = []
        for child in self._children:
            if child.ended or child.process.poll() is None:
                continue
            child.ended = True
            self._drain(child)
            code = child.process.returncode
            exits.append(Exit(child.rank, code, self._status(child), list(child.tail)))
        return exits

    def _drain(self, child: _Child) -> None:
        """Reads the rest of the output of a process that has ended."""
        pipe = child.output
        for _ in range(MAX_FINAL_READS):
            if pipe in self._ready.get_map():
                self._read(child)
        if pipe in self._ready.get_map():  # a subprocess still has it open
            self._ready.unregister(pipe)
        if child.partial_line:
            self._show_line(child, child.partial_line)
        pipe.close()

    def statuses(self) -> list[ProcessStatus]:
        """Returns the status of each process that is still running."""
        return [self._status(child) for child in self._children if not child.ended]

    def _status(self, child: _Child) -> ProcessStatus:
        page = child.page
        now = self._clock.now()
        if not _is_stopped(child.process.pid):
            child.stopped_since = None
        elif child.stopped_since is None:
            child.stopped_since = now
        stopped_for = 0.0 if child.stopped_since is None else now - child.stopped_since

        heartbeat_at = child.changed_at("heartbeat", (page["heartbeat"],), now)
        heartbeat_age = now - heartbeat_at if page["heartbeat"] else 0.0
        phase = (page.phase, page["phase_start"], page["current_step"])
        phase_age = now - child.changed_at("phase", phase, now)
        if page.fault and not child.is_fault_shown:
            child.is_fault_shown = True
            text = f"its progress page is damaged: {page.fault}; the last valid values count"
            self._show(child.rank, text)
        return ProcessStatus(
            rank=child.rank,
            pid=child.process.pid,
            phase=page.phase,
            current_step=int(page["current_step"]),
            first_step=int(page["first_step"]),
            phase_age=phase_age,
            heartbeat_age=heartbeat_age,
            stopped_for=stopped_for,
            step_seconds=page["step_seconds"],
        )

    def first_status(self) -> ProcessStatus | None:
        """Returns the last status of the first process on this host."""
        return self._status(self._children[0]) if self._children else None

    def first_phase_seconds(self) -> dict[str, float]:
        """Returns the time that the first process on this host has spent in each phase."""
        return self._children[0].page.seconds() if self._children else {}

    def request_stop(self) -> None:
        """Asks all processes to save and stop.

        Not with a signal: if the cluster sends one too, it would be the second one, which aborts.
        """
        for child in self._children:
            child.page["stop_requested"] = 1

    def dump_stacks(self) -> None:
        """Makes all processes print their stacks."""
        for child in self._children:
            if not child.ended:
                child.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills each process group, even if its first process has ended, and waits for it."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                message = f"pid {child.process.pid} cannot be killed; continuing without it"
                self._show(child.rank, message)
            if not child.ended:
                self._drain(child)
            child.path.unlink(missing_ok=True)
        self._children = []  # from now on the system may reuse their pids

    def close(self) -> None:
        self.kill()
        self._ready.close()
        self._folder.cleanup()


def _is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process."""
    try:
        # The state is the first field after the name of the program, which may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0] == "T"
    except (OSError, IndexError):
        return False
