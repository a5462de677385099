"""Runs the checks of a verification, in this process or in several with devices of their own."""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax

from meshtrain.cluster import signals
from meshtrain.tools.verify import GC_THRESHOLDS
from meshtrain.tools.verify.case import VerifyCase


class Task(NamedTuple):
    """A check: `function(case, argument)`."""

    function: Callable[[VerifyCase, Any], Any]
    argument: Any


def run_tasks(case: VerifyCase, tasks: Sequence[Task], num_jobs: int) -> Iterator[Any]:
    """Yields the result of each task, in the order in which they end."""
    num_jobs = min(num_jobs, len(tasks))
    if num_jobs <= 1:
        for task in tasks:
            yield task.function(case, task.argument)
        return
    # Python's process that tracks semaphores would report those that Ctrl-C leaves.
    filters = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{filters},ignore:resource_tracker".strip(",")
    workers = ProcessPoolExecutor(
        num_jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(case.settings, case.keep_sizes, jax.device_count()),
    )
    # Ctrl-C reaches all processes of a terminal. The workers inherit that it is blocked; this
    # process acts on it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with signals.deferred():
            submitted = [workers.submit(_run, task) for task in tasks]  # starts the workers
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for done in as_completed(submitted):
            yield done.result()
    finally:
        # After an error or Ctrl-C, the checks that are still running must not delay the end.
        workers.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.kill()


# ---- in a worker process ----

_case: VerifyCase | None = None


def _start(settings: dict[str, Any], keep_sizes: bool, num_devices: int) -> None:
    """Prepares the process: as many devices as the parent has, and a case of its own."""
    global _case
    # Ctrl-C reaches all processes; the parent acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.set_threshold(*GC_THRESHOLDS)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", True)
    _case = VerifyCase(settings, None, None, keep_sizes=keep_sizes)


def _run(task: Task) -> Any:
    return task.function(_case, task.argument)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
