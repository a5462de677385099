"""Sets up jax in this process: devices, the other processes, network, memory, compile cache."""

import argparse
import ctypes
import errno
import faulthandler
import functools
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # whether a backend has started has no public name
from jax.experimental.compilation_cache import compilation_cache

from meshtrain import console
from meshtrain.cluster import distributed, environment, launchers, limits, progress, ray_worker
from meshtrain.errors import (
    EXIT_FAILED,
    EXIT_USER,
    ConfigError,
    TransientError,
    install_command,
    lost_process_fault,
)


def start(args: argparse.Namespace) -> None:
    """Simulates devices if requested, joins the other processes if there are any, then sets up jax.

    `args` has the flags of `environment.add_flags`. Call it before anything starts a backend.
    Raises ConfigError if the other processes cannot be joined.
    """
    if args.platform is not None:
        os.environ["JAX_PLATFORMS"] = args.platform  # for messages, and for processes of this one
        jax.config.update("jax_platforms", args.platform)
    if args.simulate_devices is not None:
        simulate(args.simulate_devices)
    flags = (args.coordinator, args.num_processes, args.process_id)
    if args.num_devices is not None:
        _use_fewer(args.num_devices, environment.process_info(os.environ, flags))
    _join_and_setup(flags, args.join_seconds, args.num_devices)
    if args.num_devices is not None:
        _check_num_devices(args.num_devices)


FORCED_CPUS = r"--xla_force_host_platform_device_count=(\d+)"


def _use_fewer(num_devices: int, process: launchers.ProcessInfo | None) -> None:
    """Makes jax find only the first devices of this process: its part of `num_devices`.

    All other code then sees a machine with fewer devices, and needs no list of those to use.
    """
    num_local = num_devices // (process.num_processes if process else 1)
    # jax makes as many CPU devices as it is asked to: ask for fewer only, since there may be GPUs.
    num_cpus = jax.config.jax_num_cpu_devices
    if num_cpus < 1:
        values = re.findall(FORCED_CPUS, os.environ.get("XLA_FLAGS", ""))
        num_cpus = int(values[-1]) if values else 1
    if num_local < num_cpus:
        jax.config.update("jax_num_cpu_devices", num_local)
    # Of several processes, each gets its GPUs in `distributed.initialize`.
    num_gpus = environment.num_gpus(os.environ)
    if process is None and num_local < num_gpus:
        indices = ",".join(map(str, range(num_local)))
        jax.config.update("jax_cuda_visible_devices", indices)


def _check_num_devices(num_devices: int) -> None:
    """Raises ConfigError unless jax has found this number of devices."""
    there = jax.device_count()
    kind = jax.default_backend()
    given = f"--num_devices={num_devices}"
    if there < num_devices:
        remedy = f"use {there} or fewer" if there > 1 else "omit the flag"
        if kind == "cpu":
            remedy += f", or simulate more with --simulate_devices={num_devices}"
        raise ConfigError(f"{given}: jax finds only {there} of kind {kind}; {remedy}")
    if there > num_devices:
        # Of a TPU only some sets of chips can be used, and which depends on its torus.
        raise ConfigError(
            f"{given}: jax has started {there} devices of kind {kind}, and cannot be given fewer; "
            f"omit the flag, or name the devices in the variables of their driver, such as "
            f"TPU_VISIBLE_CHIPS"
        )


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    simulate_devices: int | None = None,
    join_seconds: float = environment.JOIN_SECONDS,
) -> None:
    """Joins the other processes of this run, if there are any, and sets up jax.

    Call it first in a script of your own, before anything uses a device. The rank of this process
    and the address of process 0 are read from the variables of `meshtrain launch`, torchrun, SLURM,
    Open MPI, Kubernetes or jax, or come from Ray Train within its workers, unless the arguments
    give them: `coordinator` is HOST:PORT of process 0. Without any of them this process is the only
    one. If jax has joined the processes already, as engines do, that is kept. May be called again.

    `simulate_devices` is a number of CPU devices to simulate in this process; `join_seconds` is how
    long to wait for the other processes. A ConfigError that nothing catches ends a script with one
    line for each fault and exit code 2, and with several processes any other error ends this one at
    once, after its traceback.

    Raises ConfigError if the description is wrong, a process is missing after `join_seconds`, or
    jax has started its devices without the other processes.
    """
    flags: tuple[Any, ...] = (coordinator, num_processes, process_id)
    if not distributed.is_joined():
        if flags == (None, None, None):
            # Before the variables: a worker has those of the launcher that started Ray on its host.
            flags = ray_worker.flags() or flags
        _end_in_one_line()
        process = environment.process_info(os.environ, flags)
        if process:
            # On SIGUSR1, print the stacks of all threads, even in a stuck process: the supervisor
            # sends it.
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
        if xla_bridge.backends_are_initialized() and (process or simulate_devices is not None):
            what = f"simulate_devices={simulate_devices}"
            if process:
                what = f"{process.names[1]}={process.num_processes}"
            raise ConfigError(
                f"{what}: jax has started the devices of this process alone; call "
                f"meshtrain.initialize() first in the script, before anything uses a device"
            )
        if simulate_devices is not None:
            limits.check_devices(simulate_devices, os.environ, force=False)
            simulate(simulate_devices)
        if process:
            _join_and_setup(flags, join_seconds)
            return
    setup()


def _join_and_setup(
    flags: Sequence[Any], join_seconds: float, num_devices: int | None = None
) -> None:
    """Joins the processes that flags or variables describe, if any, and sets up jax."""
    logging.getLogger("absl").setLevel(logging.WARNING)
    # Orbax logs a traceback of each failed save here; `checkpoint.saver` logs one line.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    distributed.initialize(*flags, join_seconds=join_seconds, num_devices=num_devices)
    line = launchers.batch_script_line(os.environ)
    if line:
        print(line, file=sys.stderr)
    setup()
    _log_unused_adapters(flags)


@functools.cache  # once
def _end_in_one_line() -> None:
    """Makes an error that nothing catches end this script without waiting for other processes.

    At a normal exit jax waits for them, and they may be waiting for this one. A ConfigError is
    printed as one line for each fault.
    """
    print_error = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        code = EXIT_FAILED
        if isinstance(error, ConfigError):
            console.say(*map(console.line_of, error.faults), stream="stderr")
            may_pass = isinstance(error, TransientError) and progress.VARIABLE in os.environ
            code = EXIT_FAILED if may_pass else EXIT_USER
        elif distributed.num_processes() > 1 and (fault := lost_process_fault(error)):
            console.say(fault, stream="stderr")
        else:
            print_error(kind, error, trace)
        distributed.exit_failed_process(code, wait_for_others=isinstance(error, ConfigError))
        if not hasattr(sys, "ps1"):  # else a person types the lines of this process
            sys.exit(code)

    sys.excepthook = end


def simulate(num_devices: int) -> None:
    """Makes this process use simulated CPU devices. Call it before anything starts a backend."""
    if num_devices < 1:
        raise ConfigError(f"--simulate_devices={num_devices}: use 1 or more")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    if num_devices > 1:  # see `_use_cache`
        jax.config.update("jax_enable_compilation_cache", False)


def setup() -> None:
    """Sets up dispatch, memory and the compile cache, and starts the backend. May be called again.

    On CPU, programs run in the thread that dispatches them, so that all memory of a step is on one
    heap (see `_keep_memory`). This has to be set before the backend starts; other devices ignore
    it.
    """
    if jax.config.jax_disable_jit:
        raise ConfigError(
            "JAX_DISABLE_JIT=1: a step runs only as a compiled program; unset it, or set it to 0"
        )
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    set_num_threads(jax.config.jax_num_cpu_devices)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # see `_log_unused_gpus`
    distributed.start_backend()
    _log_unused_gpus()
    _use_cache()
    _keep_memory()


def set_num_threads(num_devices: int) -> None:
    """Gives XLA several threads for each simulated device; it reads this when the backend starts.

    A device may wait in several collectives at once, each in a thread, until all devices have
    reached them. By default there are as many threads as devices or cores: all may wait, so that
    none is left for what they wait for (a pipeline with experts on data 2 x fsdp 2 x pipeline 2
    hung; jaxlib 0.10.2).
    """
    if num_devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(4 * num_devices))


@functools.cache  # logs it once
def _log_unused_gpus() -> None:
    """Logs if this machine has NVIDIA GPUs, and jax uses the CPU without being asked to."""
    is_chosen = jax.config.jax_platforms or os.environ.get("JAX_PLATFORM_NAME")
    if is_chosen or jax.default_backend() != "cpu":
        return
    num_gpus = environment.num_gpus(os.environ)
    if num_gpus and distributed.process_id() == 0:
        print(
            f"this machine has {num_gpus} NVIDIA GPUs and jax uses only the CPU; set "
            f"JAX_PLATFORMS=cpu, or install the extra cuda12 or cuda13, "
            f"{install_command('cuda12')}",
            file=sys.stderr,
        )


# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def _keep_memory() -> None:
    """Keeps the memory that a step on CPU frees, for the next step.

    XLA allocates memory in each step. By default the C library returns large freed blocks to the
    kernel, which clears each page before it is used again: 21 to 29 % of the step of
    benchmarks/compare/cpu_step.py.
    """
    on_one_cpu_device = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    is_async = jax.config.read("jax_cpu_enable_async_dispatch")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if on_one_cpu_device and not is_async and mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


# ---- the compile cache ----


def _use_cache() -> None:
    """Turns on jax's persistent compile cache, in a private folder unless the user has chosen one.

    With several CPU devices, in one process or more, turns it off: a program that is read from the
    cache has lost the order of its collectives and hangs (jax 0.10.2 and 0.12.0.1).
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.jax_compilation_cache_dir:
        return
    else:
        folder = _cache_folder()
        if folder:
            # By default jax also caches GPU autotuning results there.
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # If the disk is full later, jax warns of each program, of which a run may have 100.
            warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    compilation_cache.reset_cache()  # it may have been initialized with other settings


MIN_CACHE_SPACE = 16 << 20  # free bytes; a compiled step takes a few MB


def _cache_folder() -> Path | None:
    """Returns the cache folder, created if necessary; None if another user could write to it.

    The programs in it are executed: it must be private, and no other user may be able to write to
    its parent. Its name includes the CPU's features, because CPU programs depend on them.
    """
    folder = Path("~/.cache/meshtrain")
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if caches.is_absolute():  # others are to be ignored: XDG Base Directory Specification
            folder = caches / "meshtrain"
        elif not Path(os.environ.get("HOME", "/")).is_absolute():
            raise RuntimeError(f"HOME={os.environ['HOME']}: not an absolute path")
        else:
            folder = folder.expanduser()
        _make_private(folder, others=0o055)
        folder /= f"{jax.default_backend()}-{_cpu_features()}"
        _make_private(folder, others=0)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason = getattr(error, "strerror", error)
        console.say(f"no compile cache in {folder}: {reason}", stream="stderr")
        return None
    return folder


def _make_private(folder: Path, *, others: int) -> None:
    """Creates the folder if necessary; raises OSError unless this user owns it and its mode fits.

    `others` are the permissions that group and others may have.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or mode & 0o077 & ~others:
        allowed = 0o700 | others
        reason = (
            f"owned by user {status.st_uid} with mode {mode:o}; "
            f"you must own it, with mode {allowed:o}"
        )
        raise PermissionError(errno.EPERM, reason)
    if shutil.disk_usage(folder).free < MIN_CACHE_SPACE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cpu_features() -> str:
    """Returns a short hash of this CPU's instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]  # one per core
    first = features[0] if features else ""
    return hashlib.sha256(first.encode()).hexdigest()[:12]


# ---- Amazon's EFA network adapters ----

AMAZON_VENDOR = "0x1d0f"  # the PCI vendor in sysfs
EFA_PLUGIN = "libnccl-net{}.so"  # of aws-ofi-nccl; NCCL loads it by this name


def _log_unused_adapters(flags: Sequence[Any]) -> None:
    """Logs if GPUs of several hosts communicate without the EFA adapters of this host.

    The first process of each host does.
    """
    process = environment.process_info(os.environ, flags)
    if not process or process.local_id or process.on_one_host or jax.default_backend() != "gpu":
        return
    line = efa_fault(os.environ)
    if line:
        print(line, file=sys.stderr)


def efa_fault(
    environ: Mapping[str, str], *, root: Path = Path("/"), load: Callable[[str], Any] = ctypes.CDLL
) -> str:
    """Returns a line to log if this host has EFA adapters that NCCL will not use, or "".

    `root` is the root of the file system, `load` raises OSError for a library that cannot be
    loaded.
    """
    count = _num_efa_adapters(root)
    chosen = environ.get("NCCL_NET", "").lower()
    if not count or chosen in ("socket", "ib") or environ.get("NCCL_NET_PLUGIN") == "none":
        return ""  # there are none, or another network is chosen
    start = f"this host has {count} EFA adapter{'s' * (count > 1)}, and NCCL cannot use them:"
    if not any(root.glob("dev/infiniband/uverbs*")):
        return f"{start} none is in this container; request vpc.amazonaws.com/efa in its resources"
    provider = environ.get("FI_PROVIDER", "efa")
    if "efa" not in provider and not provider.startswith("^"):
        return f"{start} FI_PROVIDER={provider}; unset it, or set FI_PROVIDER=efa"
    error = _load_error(environ.get("NCCL_NET_PLUGIN", ""), load)
    if error:
        return f"{start} {error}; add aws-ofi-nccl to the image, and its folder to LD_LIBRARY_PATH"
    return ""


def _num_efa_adapters(root: Path) -> int:
    """Returns the number of RDMA devices that Amazon makes."""
    vendors = root.glob("sys/class/infiniband/*/device/vendor")
    return sum(path.read_text(encoding="utf-8").strip() == AMAZON_VENDOR for path in vendors)


def _load_error(plugin: str, load: Callable[[str], Any]) -> str:
    """Returns why the plugin cannot be loaded, or ""; NCCL tries the same names."""
    names = [EFA_PLUGIN.format("")]
    if plugin:
        names = [plugin, EFA_PLUGIN.format(f"-{plugin}")]
    reason = ""
    for name in names:
        try:
            load(name)
            return ""
        except OSError as error:
            reason = str(error)
    return reason
