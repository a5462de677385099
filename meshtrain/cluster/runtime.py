"""The jax runtime of this process: which devices it has, which processes it joins, where it caches programs."""

import argparse
import ctypes
import errno
import hashlib
import logging
import os
import stat
import sys
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def start(args: argparse.Namespace) -> None:
    """Simulates devices if asked to, joins the other processes if there are any, then sets jax up.

    `args` has the flags of `environment.add_flags`. To be called before anything starts a backend.
    Raises ConfigError where the other processes cannot be joined.
    """
    logging.getLogger("absl").setLevel(logging.WARNING)
    # Of Orbax, which logs every failed save at length; `checkpoint.saver` reports it in a line.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    if args.simulate_devices is not None:
        simulate(args.simulate_devices)
    distributed.initialize(
        args.coordinator, args.num_processes, args.process_id, join_seconds=args.join_seconds
    )
    setup()


def simulate(num_devices: int) -> None:
    """Makes this process use simulated CPU devices. To be called before anything starts a backend."""
    if num_devices < 1:
        raise ConfigError(f"--simulate_devices={num_devices}: use 1 or more")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    if num_devices > 1:  # see `_use_cache`
        jax.config.update("jax_enable_compilation_cache", False)


def setup() -> None:
    """Sets dispatch, memory and the compile cache of this process; starts the backend. Repeating it is harmless.

    On a CPU, programs run in the thread that dispatches them, so that all memory of a step is on one
    heap (see `_keep_memory`); that needs to be set before the backend starts. Other devices ignore it.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    _use_cache()
    _keep_memory()


def _keep_memory() -> None:
    """Keeps the memory that a step on a CPU has freed, for the next step.

    XLA allocates it anew in each step, and the C library would return large blocks to the kernel, which
    clears every page that it hands out: 21 to 29 % of the step of benchmarks/cpu_step.py.
    """
    alone = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if alone and not jax.config.read("jax_cpu_enable_async_dispatch") and mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _use_cache() -> None:
    """Turns jax's persistent compile cache on, in a folder of one's own, unless the user has chosen one.

    It stays off where it is dangerous: a program of several CPU devices, of one process or of more, has
    no order of its collectives any more when it is read back, and hangs (jax 0.10.2 and 0.12.0.1).
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.jax_compilation_cache_dir:
        return
    elif folder := _cache_folder():
        # What autotuning on a GPU found is kept there too: that is jax's default.
        jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # what it decided in an earlier compilation


def _cache_folder() -> Path | None:
    """Returns the folder of the cache, made if need be; None where others could write to it.

    What is in it is run: so it must be ours alone, and nobody else may replace it in the one above. Programs
    for CPU are for the features of one.
    """
    folder, name = Path("~/.cache/meshtrain"), f"{jax.default_backend()}-{_features()}"
    try:
        caches = os.environ.get("XDG_CACHE_HOME")
        folder = Path(caches, "meshtrain") if caches else folder.expanduser()
        _claim(folder, others=0o055)
        folder /= name
        _claim(folder, others=0)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        reason = getattr(error, "strerror", error)
        print(f"no compile cache in {folder}: {reason}", file=sys.stderr)
        return None
    return folder


def _claim(folder: Path, *, others: int) -> None:
    """Makes the folder if need be; raises OSError unless it is ours and others have these rights at most."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid() or mode & 0o077 & ~others:
        most = 0o700 | others
        reason = (
            f"it is of user {found.st_uid} with mode {mode:o}, and has to be ours with {most:o}"
        )
        raise PermissionError(errno.EPERM, reason)


def _features() -> str:
    """Returns a short name of this CPU's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(found.encode()).hexdigest()[:12]
