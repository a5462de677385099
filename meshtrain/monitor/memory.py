"""What memory is in use: of the devices and of this process, for metrics and on request."""

import re
from collections.abc import Callable
from pathlib import Path

import jax

from meshtrain import console
from meshtrain.cluster import distributed
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError
from meshtrain.storage import MEMORY, Workdir

PROCESS_STATUS = Path("/proc/self/status")  # proc_pid_status(5)


def peak_bytes_in_use() -> int | None:
    """Returns the most bytes that a device of this process has held; None if it is unknown."""
    peaks = []
    for device in jax.local_devices():
        report = device.memory_stats() or {}
        peaks.append(report.get("peak_bytes_in_use", 0))
    return max(peaks, default=0) or None


def of_process() -> dict[str, int]:
    """Returns the resident bytes of this process on its host, now and at most so far.

    The names are those of metrics.jsonl. Returns {} where the system does not report them.
    """
    try:
        status = PROCESS_STATUS.read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {}
    # The peak is not getrusage's, which starts with the size of the parent process.
    for name, field in (("host_memory", "VmRSS"), ("peak_host_memory", "VmHWM")):
        if size := re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE):
            found[name] = int(size[1]) * 1024
    return found


# ---- the profile of monitor.memory_profile_step ----


def check_profile(cfg: Config, *, has_workdir: bool) -> None:
    """Raises ConfigError if the step of the profile is after the last one, or has no place."""
    step = cfg.monitor.memory_profile_step
    if not step:
        return
    faults = []
    if step > cfg.train.steps:
        faults.append(
            f"monitor.memory_profile_step={step}: the run has train.steps={cfg.train.steps}; use "
            f"one of 1 to {cfg.train.steps}, or 0 for no profile"
        )
    if not has_workdir:
        faults.append(
            f"monitor.memory_profile_step={step}: there is no folder for its file; use --workdir"
        )
    if faults:
        raise ConfigError(*faults)


def missed_profile(cfg: Config, first_step: int, folder: Path) -> str | None:
    """Returns a line if a run that starts at `first_step` is past the step of its profile.

    And no earlier part of it, in the same folder, has written the profile.
    """
    step = cfg.monitor.memory_profile_step
    if not 0 < step <= first_step or (folder / MEMORY / str(step)).exists():
        return None
    return f"no memory profile: the run starts at step {first_step}, after step {step}"


def save_profile(
    step: int,
    *,
    workdir: Workdir,
    event: Callable[..., None],
    log: Callable[[str], None],
) -> None:
    """Writes what the devices of this process hold after `step` steps, in the format of pprof.

    The run continues if the file cannot be written.
    """
    path = workdir.folder / MEMORY / str(step) / f"rank-{distributed.process_id()}.pprof"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(path))
        workdir.upload(path)
    except OSError as error:
        log(f"no memory profile of step {step}: {path}: {console.describe(error)}")
        return
    event("memory_profile", step=step, path=str(path.relative_to(workdir.folder)))
    log(f"memory profile of step {step} in {path}")
