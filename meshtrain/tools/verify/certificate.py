"""The result of a verification: differences from one device; the certificate that lists them."""

import json
import math
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from meshtrain.config.schema import AXES
from meshtrain.errors import ConfigError
from meshtrain.tools.verify.pairwise import Row

# The largest error of a gradient in low precision, as a multiple of the error on one device.
MAX_RATIO = 1.5
Trees = dict[str, Any]  # kind of value -> pytree of arrays


@dataclass(frozen=True)
class Result:
    """The result of one layout."""

    row: Row
    # Of each kind of value, the largest relative difference; in low precision the largest error, as
    # a multiple of the error on one device.
    differences: dict[str, float]
    fault: str | None  # describes the first difference above the tolerance, or an error
    seconds: float


def result_of(row: Row, differences: dict[str, float], check: Callable[[], str | None]) -> Result:
    """Returns the result of `check()`, which returns a fault or None and fills `differences`.

    An exception is a fault too, unless it is a mistake of the user.
    """
    began = time.perf_counter()
    try:
        fault = check()
    except ConfigError:
        raise
    except Exception as error:  # XLA raises many types; each of them is a failure of the layout
        fault = describe_error(error)
    return Result(row, differences, fault, time.perf_counter() - began)


def describe_error(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@dataclass(frozen=True)
class Certificate:
    """The results of all layouts."""

    subject: str  # name of the model
    tolerance: float
    broken_laws: tuple[str, ...]  # errors on one device: violations of laws/
    results: tuple[Result, ...]
    not_covered: tuple[str, ...] = ()  # see the function of this name

    @property
    def passed(self) -> bool:
        return not self.broken_laws and all(result.fault is None for result in self.results)

    def write(self, folder: Path) -> None:
        """Writes verify.json and verify.md into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"passed": self.passed, "versions": versions(), **asdict(self)}
        for result in record["results"]:
            # JSON has no infinity.
            for kind, difference in result["differences"].items():
                if not math.isfinite(difference):
                    result["differences"][kind] = None
        (folder / "verify.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (folder / "verify.md").write_text(self._markdown(), encoding="utf-8")

    def _markdown(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        used_versions = " · ".join(f"{name} {version}" for name, version in versions().items())
        exact = [result for result in self.results if not is_low_precision(result.row)]
        low = [result for result in self.results if is_low_precision(result.row)]
        lines = [f"# {self.subject}: {verdict}", "", used_versions, ""]
        lines += [f"- FAILED on one device: {fault}" for fault in self.broken_laws]
        if exact:
            lines += [
                (
                    f"{len(exact)} layouts compared with one device, in float64. "
                    "Each figure is the largest"
                ),
                f"relative difference; {self.tolerance:g} is allowed.",
                "",
                *_table(exact, "{:.1e}"),
                "",
            ]
        if low:
            lines += [
                (
                    f"{len(low)} layouts in low precision. "
                    "Each figure is the largest error, compared with float64,"
                ),
                (
                    "as a multiple of the error of one device in the same dtype; "
                    f"{MAX_RATIO} is allowed (the loss: see"
                ),
                "meshtrain/tools/verify/precision.py).",
                "",
                *_table(low, "{:.2f}"),
                "",
            ]
        if self.not_covered:
            lines += ["## Not covered", "", *(f"- {line}" for line in self.not_covered), ""]
        return "\n".join(lines)


def _table(results: Collection[Result], number: str) -> list[str]:
    """Returns the rows of a Markdown table: layout, difference of each kind, verdict."""
    kinds = list(dict.fromkeys(kind for result in results for kind in result.differences))
    table = [["layout", *kinds, ""], ["---"] * (len(kinds) + 2)]
    for result in results:
        cells = [describe(result.row)]
        for kind in kinds:
            has_kind = kind in result.differences
            cells.append(number.format(result.differences[kind]) if has_kind else "")
        cells.append("FAILED: " + result.fault.replace("|", "\\|") if result.fault else "ok")
        table.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in table]


def is_low_precision(row: Row) -> bool:
    """Returns whether a layout is compared by its errors, see precision.py.

    Rows in float64 need no "dtype".
    """
    return row.get("dtype", "float64") != "float64"


def not_covered(
    configured: Mapping[str, Any],
    verified: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    without: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> tuple[str, ...]:
    """Returns a line for everything that a verification of `rows` does not show.

    `configured` are the settings of the user, `verified` those with smaller sizes. `without` are
    the checks that the user left out; `left_out` are further lines, such as the layouts that
    `quick` skips.
    """
    device = jax.devices()[0]
    lines = list(left_out)
    if without:
        lines.append(f"checks left out with --without: {', '.join(without)}")
    reduced = []
    for section in ("model", "data"):
        for key, value in configured[section].items():
            if type(value) is int and 0 < verified[section].get(key, value) < value:
                reduced.append(f"{section}.{key}={verified[section][key]} instead of {value}")
    if reduced:
        lines.append(f"larger sizes; verified with {', '.join(reduced)}")
    dtype = configured["train"]["dtype"]
    if dtype not in {row.get("dtype", "float64") for row in rows}:
        lines.append(f"train.dtype={dtype}; no layout was verified in it")
    if not any(row.get("dropout") for row in rows):
        lines.append("dropout; no layout was verified with it")
    low_rows = [row for row in rows if is_low_precision(row)]
    if not any(row.get("adapter") for row in rows):
        lines.append("adapters; no layout was verified with one")
    elif low_rows and not any(row.get("adapter") for row in low_rows):
        lines.append("adapters in low precision; they were verified in float64")
    if not any(row.get("attention_impl") == "cudnn" for row in rows):
        lines.append("cuDNN's attention kernels, which run on NVIDIA GPUs in bfloat16 and float16")
    platforms = {"cpu": "GPU and TPU", "gpu": "CPU and TPU", "tpu": "CPU and GPU"}
    lines.append(
        f"XLA's compilers for {platforms.get(device.platform, 'other devices')}; "
        f"run verify --here on those devices"
    )
    if not low_rows or device.platform == "cpu":
        lines.append(
            "kernels and rounding of the devices that will train; run verify --here on them"
        )
    processes = "process" if jax.process_count() == 1 else "processes"
    lines.append(
        f"more than {jax.device_count()} devices ({device.device_kind}), more than "
        f"{jax.process_count()} {processes}"
    )
    used = " · ".join(f"{name} {version}" for name, version in versions().items())
    lines.append(f"other versions than {used}")
    return tuple(lines)


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }


# How `describe` writes the settings of a row; others appear as "name value".
_WORDS = {
    "packing": "packed",
    "masks": "masked",
    "sequence_parallel": "sequence-sharded",
    "loss_scale": "loss scaled",
    "context_method": "context by {}",
    "expert_method": "experts by {}",
    "expert_kernel": "{} experts",
    "attention_impl": "{} attention",
    "loss_chunks": "{} loss chunks",
    "unroll": "unroll {}",
    "kernels": "{} kernels",
    "sync_pattern": "{} sums",
    "adapter": "adapter {}",
}

# What `describe` writes by itself.
_DESCRIBED = {*AXES, "dtype", "zero_stage", "num_microbatches", "remat"}
_DESCRIBED |= {"schedule", "num_chunks", "keep"}

_DEFAULTS = (
    ("unroll", 1),
    ("sync_pattern", "xla"),
    ("kernels", "plain"),
    ("expert_kernel", "batched"),
)


def describe(row: Row) -> str:
    """Describes a layout: 'data 2 x fsdp 4 · zero 3 · 2 micro-batches · remat full · packed'.

    Every setting of the row appears, except those that are off (None, False, 0) or the default.
    """
    sizes = [f"{axis} {row[axis]}" for axis in AXES if row.get(axis, 1) > 1]
    words = [" x ".join(sizes) or "one device"]
    if is_low_precision(row):
        words.append(row["dtype"])
    words.append(f"zero {row['zero_stage']}")
    words.append(f"{row['num_microbatches']} micro-batches")
    words.append(f"remat {row['remat']}")
    if row.get("schedule"):
        chunks = f" of {row['num_chunks']} chunks" if row.get("num_chunks", 1) > 1 else ""
        words.append(f"{row['schedule']}{chunks}, {row['keep']} kept")
    for name, value in row.items():
        is_off = value in (None, False, 0)
        if name in _DESCRIBED or is_off or (name, value) in _DEFAULTS:
            continue
        default = name if value is True else f"{name} {value}"
        words.append(_WORDS.get(name, default).format(value))
    return " · ".join(words)


def summary_line(result: Result) -> str:
    """Returns the line to log for a layout: largest difference, seconds, layout, verdict."""
    largest = max(result.differences.values(), default=math.nan)
    figure = f"{largest:7.2f}x" if is_low_precision(result.row) else f"{largest:8.1e}"
    verdict = f"FAILED {result.fault}" if result.fault else "ok"
    return f"{figure}  {result.seconds:4.1f} s  {describe(result.row)}  {verdict}"


# ---- comparison of trees ----


def compare(
    actual: Trees,
    expected: Trees,
    *,
    tolerance: float,
    zero_gradients: Collection[str] = (),
    where: str = "on one device",
) -> tuple[dict[str, float], str | None]:
    """Returns the largest relative difference by kind; a message about the first above `tolerance`.

    The message calls the actual value "here", the expected one as `where` says. Differences are
    relative to the largest value of a leaf. The parameters in `zero_gradients` have a gradient that
    is zero except for rounding noise: its difference is relative to 1 % of the largest gradient,
    and their other values are not compared, because the optimizer computes them from the noise.
    """
    differences, fault = {}, None
    for kind, tree in actual.items():
        leaves = jax.tree.leaves_with_path(expected[kind])
        names = {name_of(path) for path, _ in leaves}
        differing = sorted(names ^ {name_of(path) for path, _ in jax.tree.leaves_with_path(tree)})
        if differing:
            is_here = "not expected" if differing[0] not in names else "missing"
            return {**differences, kind: math.inf}, f"{kind} {differing[0]}: is {is_here} here"
        largest = max(np.abs(leaf).max() for _, leaf in leaves)
        differences[kind] = 0.0
        for (path, wanted), value in zip(leaves, jax.tree.leaves(tree), strict=True):
            name = name_of(path)
            value, wanted = np.asarray(value), np.asarray(wanted)
            is_noise = name.endswith(tuple(zero_gradients))
            if is_noise and kind != "gradients":
                continue
            scale = max(np.abs(wanted).max(), 0.01 * largest if is_noise else 0.0) or 1.0
            errors = np.nan_to_num(np.abs(value - wanted), nan=math.inf)
            worst = np.unravel_index(errors.argmax(), errors.shape)
            differences[kind] = max(differences[kind], float(errors[worst] / scale))
            if fault is None and not errors[worst] <= tolerance * scale:
                index = str([int(n) for n in worst]) if worst else ""
                leaf = f"{kind} {name}".strip() + index
                fault = f"{leaf}: {value[worst]:.12g} here, {wanted[worst]:.12g} {where}"
    return differences, fault


def zero_gradient_names(grads: Any) -> list[str]:
    """Returns the names of the gradients that are zero except for rounding noise."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    leaves = jax.tree.leaves_with_path(grads)
    return [name_of(path) for path, leaf in leaves if np.abs(leaf).max() < 1e-12 * largest]


def name_of(path: tuple) -> str:
    """Returns the path of a leaf as text, for example 'layers/mlp/up/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
