"""Exit codes, and ConfigError: one line per fault, with the key, its value and what to do."""

import difflib
import errno
import importlib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

# Exit codes; 0 is done.
EXIT_FAILED = 1  # a crash, a lost process, silent data corruption: worth a restart
EXIT_USER = 2  # the configuration or the data is wrong
EXIT_NOT_FINITE = 17
EXIT_STALLED = 18  # no process makes progress
EXIT_PREEMPTED = 75  # stopped by a signal, state saved


class ConfigError(ValueError):
    """A mistake of the user; `faults` has one line for each thing to change."""

    def __init__(self, *faults: str):
        super().__init__("\n".join(faults))
        self.faults = faults


class TransientError(ConfigError):
    """A fault of the machines that may pass: under a supervisor it is worth a restart."""


class OutOfMemory(MemoryError):
    """Memory ran out; the message says what the step needs, and what each way out saves."""


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error; messages of libraries can be a page long."""
    lines = str(error).strip().removeprefix("[Errno None] ").splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def memory_fault(error: BaseException, verb: str | None = "train") -> str | None:
    """Returns what ran out of memory and what to lower, as text; None if nothing did.

    Without a verb it does not say what to lower.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutOfMemory):
            return str(cause)
        # A part, since the search below takes the square of the time for some texts.
        text = str(cause)[:MAX_SEARCHED]
        # jax.errors.JaxRuntimeError, by name: nothing here imports jax.
        of_device = type(cause).__name__ == "JaxRuntimeError" and OUT_OF_MEMORY.search(text)
        if of_device or isinstance(cause, MemoryError):
            size = re.search(r"allocat\w+ (\d+) bytes", text)
            first_line = text.strip().partition("\n")[0][:200].rstrip(". ")
            what = f"{int(size[1]) / 1e9:,.3f} GB could not be allocated" if size else first_line
            remedy = f"; {LOWER.get(verb, LOWER_OTHERS)}" if verb else ""
            return f"out of memory{': ' if what else ''}{what}{remedy}"
        cause = cause.__cause__
    return None


def disk_fault(error: BaseException) -> str | None:
    """Returns which file could not be written on a full or read-only disk; None if that is not it.

    An error while a file is written has no name. TensorStore raises ValueError.
    """
    cause: BaseException | None = error
    while cause is not None:
        code = cause.errno if isinstance(cause, OSError) else None
        if number := OS_ERROR_CODE.search(str(cause)[:MAX_SEARCHED]):
            code = int(number[1])
        if code in DISK_ERRORS:
            name = getattr(cause, "filename", None) or "a file that is written"
            return f"{name}: {os.strerror(code)}; make room, or use another disk"
        cause = cause.__cause__
    return None


def lost_process_fault(error: BaseException) -> str | None:
    """Returns that another process of the run has ended or hangs; None if that is not it."""
    if not LOST_PROCESS.search(str(error)[:MAX_SEARCHED]):
        return None
    return (
        f"lost contact with another process of this run: {first_line(error)}; the output of that "
        f"process may say why. Start all processes again: with a workdir they resume from the "
        f"newest checkpoint"
    )


# What Gloo (CPU), NCCL (GPU) and jax's coordination service say, after the code of a status of
# XLA: an error of the user's own may have such words too.
LOST_PROCESS = re.compile(
    r"\A(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
    r".*(Gloo [\w-]+ failed|remote process (has )?exited|CoordinationServiceError|"
    r"heartbeat timeout)",
    re.DOTALL,
)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
OS_ERROR_CODE = re.compile(r"os_error_code='(\d{1,4})'")
MAX_SEARCHED = 20_000  # characters of a message
# What XLA and its libraries say, on CPU, GPU and TPU. (RESOURCE_EXHAUSTED alone may also be a full
# disk.)
OUT_OF_MEMORY = re.compile(
    "(?i)out.of.memory|memory space|(failed|trying|unable) to allocate|attempting to "
    "(reserve|allocate)|alloc_failed"
)
LOWER_TRAIN = (
    "raise train.num_microbatches, set train.remat=full, lower train.global_batch or the model's "
    "sizes, or shard over more devices with mesh.fsdp"
)
LOWER = {
    "train": LOWER_TRAIN,
    "profile": LOWER_TRAIN,
    "audit": LOWER_TRAIN,
    "verify": LOWER_TRAIN,
    "evaluate": "lower --batch, or use more devices",
    "generate": "use fewer prompts or samples, a lower --length, or more devices",
}
LOWER_OTHERS = "use smaller inputs, or a machine with more memory"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns ' (did you mean "x"?)' with the most similar known name, or '' if none is near."""
    near = nearest(str(name), known)
    return f' (did you mean "{near}"?)' if near else ""


SIMILAR = 0.65  # of difflib's ratio: swapped, missing or added letters; not half of another word


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is most similar, or "" if none is near."""
    # Without the dashes of flags, which make all flags a little similar.
    by_letters = {one.lstrip("-"): one for one in known}
    near = difflib.get_close_matches(name.lstrip("-"), list(by_letters), n=1, cutoff=SIMILAR)
    return by_letters[near[0]] if near else ""


def choice_faults(key: str, value: Any, choices: Iterable[str]) -> list[str]:
    """Returns a fault if `value` is not one of `choices`."""
    return [] if value in choices else [f"{key}={value!r}: use one of {', '.join(choices)}"]


def minimum_faults(low: float, values: dict[str, float]) -> list[str]:
    """Returns a fault for each of `values` below `low`, and for NaN."""
    return [
        f"{key}={value}: use {low} or more" for key, value in values.items() if not value >= low
    ]


def seed_faults(key: str, seed: int) -> list[str]:
    """Returns a fault for a seed out of range.

    Without jax_enable_x64, jax drops all bits above the lowest 32.
    """
    if seed < 2**32:
        return minimum_faults(0, {key: seed})
    return [f"{key}={seed}: use a number below 2^32"]


def nearest_multiples(value: int, step: int, more: int = 0) -> str:
    """Returns the positive multiples of `step` next to `value`, as text: '24 or 32'.

    `more` is added to each.
    """
    down, up = value // step * step, (value // step + 1) * step
    return f"{down + more} or {up + more}" if down > 0 else f"{max(up, step) + more}"


def nearest_divisors(value: int, near: int) -> str:
    """Returns the divisors of `value` below and above `near`, as text: '2 or 4'."""
    below = [one for one in divisors(value) if one < near][-1:]
    above = [one for one in divisors(value) if one > near][:1]
    return " or ".join(map(str, below + above))


def divisors(value: int) -> list[int]:
    """Returns the positive divisors, in ascending order; [] of a number below 1."""
    small = [one for one in range(1, math.isqrt(max(value, 0)) + 1) if value % one == 0]
    return sorted({*small, *(value // one for one in small)})


def x64_faults(dtypes: Mapping[str, str]) -> list[str]:
    """Returns a fault for each key whose dtype is float64, if jax computes in 32 bits."""
    return [
        f"{key}=float64: jax computes it in float32; set JAX_ENABLE_X64=1 as well"
        for key, dtype in dtypes.items()
        if dtype == "float64" and not _x64_enabled()
    ]


def _x64_enabled() -> bool:
    """Whether jax computes in 64 bits: its setting if imported, else its environment variable."""
    if "jax" in sys.modules:
        return sys.modules["jax"].config.jax_enable_x64
    return os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "t", "yes", "y", "on")


def import_optional(package: str, extra: str = "tokenizers") -> Any:
    """Returns an optional package; raises ConfigError with the install command if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"the package {package} is missing; {install_command(extra)}") from None


def install_command(extra: str) -> str:
    """Returns how to install an extra of pyproject.toml, for the end of a message."""
    # Without a name to look up in an index: meshtrain on PyPI is a project of others.
    return (
        f"in a checkout: bash launch/setup.sh {extra}; elsewhere: pip install "
        f"'PATH_OR_URL[{extra}]', with the path or URL of meshtrain"
    )
