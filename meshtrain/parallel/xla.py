"""How programs are compiled and run: XLA's options by name, a cache of what it made, memory on CPU."""

import ctypes
import errno
import hashlib
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

from meshtrain.errors import ConfigError

# Options of each preset. An option goes to the compiler by name, which refuses one that it does not
# know with an error; in XLA_FLAGS the same would abort the process.
PRESETS: dict[str, dict[str, bool | int | str]] = {
    "none": {},
    # Collectives run behind computation.
    "overlap": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_p2p": True,
    },
    # Kernels are started many at a time, as CUDA graphs.
    "cuda_graphs": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
NAMES = ("auto", *PRESETS)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
GONE = {  # the first jaxlib whose XLA no longer has them
    "xla_gpu_enable_pipelined_all_gather": (0, 11),
    "xla_gpu_enable_pipelined_reduce_scatter": (0, 11),
    "xla_gpu_enable_pipelined_all_reduce": (0, 11),
}


def options(preset: str, mesh: jax.sharding.Mesh) -> dict[str, bool | int | str]:
    """Returns the options of a preset, those that this version of XLA knows, for programs on this mesh.

    "auto" is "overlap" on several GPUs, else "none".
    """
    if preset == "auto":
        preset = "overlap" if mesh.size > 1 and mesh.devices.flat[0].platform == "gpu" else "none"
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    return {
        name: value
        for name, value in PRESETS[preset].items()
        if name not in GONE or version < GONE[name]
    }


def quickly(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Returns options for a program that runs once: on CPUs, LLVM optimises less, unless XLA_FLAGS says how much.

    What draws the parameters of configs/quickstart.py is then compiled in a sixth of the time, and runs
    as fast.
    """
    level, on_cpu = "xla_backend_optimization_level", mesh.devices.flat[0].platform == "cpu"
    return {level: 1} if on_cpu and level not in os.environ.get("XLA_FLAGS", "") else {}


def compiled(lowered: jax.stages.Lowered, chosen: dict[str, Any]) -> jax.stages.Compiled:
    """Returns the program, compiled; raises ConfigError for an option that XLA does not know."""
    try:
        return lowered.compile(compiler_options=chosen)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None:
            raise
        raise ConfigError(
            f"train.xla_preset: it sets {unknown[1]}, which XLA of jaxlib {jaxlib.__version__} does "
            f"not know; use train.xla_preset=none"
        ) from error


def run_in_place() -> None:
    """Makes a CPU run programs in the thread that asks for them; to be called before a backend starts.

    What a step needs is then on one heap, see `keep_memory`. Other devices do not care.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def keep_memory() -> None:
    """Keeps memory that a step on a CPU gave back, for the next step.

    XLA asks for it anew each time; the C library would give large blocks back to the kernel, which
    clears every page that it hands out: 21 to 29 % of the step of benchmarks/cpu_step.py.
    """
    alone = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if alone and not jax.config.read("jax_cpu_enable_async_dispatch") and mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def use_cache() -> None:
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
    elif folder := _own_folder():
        # What autotuning on a GPU found is kept there too: that is jax's default.
        jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # what it decided in an earlier compilation


def _own_folder() -> Path | None:
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
