"""The result of a verification: differences from one device, and the certificate that lists them."""

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
    # of each kind of value, the largest relative difference; in low precision the largest error, as a
    # multiple of the error on one device
    differences: dict[str, float]
    fault: str | None  # describes the first difference above the tolerance, or an error
    seconds: float


def result_of(row: Row, differences: dict[str, float], check: Callable[[], str | None]) -> Result:
    """Returns the result of `check()`, which returns a fault or None; an exception is a fault too."""
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

    subject: str
    tolerance: float
    broken_laws: tuple[str, ...]  # errors of the model on one device, see laws.py
    results: tuple[Result, ...]
    not_covered: tuple[str, ...] = ()  # what the results do not show, see `not_covered`

    @property
    def passed(self) -> bool:
        return not self.broken_laws and all(result.fault is None for result in self.results)

    def write(self, folder: Path) -> None:
        """Writes verify.json and verify.md into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"passed": self.passed, "versions": versions(), **asdict(self)}
        for result in record["results"]:
            values = result["differences"]  # JSON has no infinity
            values |= {kind: None for kind, value in values.items() if not math.isfinite(value)}
        (folder / "verify.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "verify.md").write_text(self._markdown())

    def _markdown(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        used_versions = " · ".join(f"{name} {version}" for name, version in versions().items())
        exact = [result for result in self.results if not is_low_precision(result.row)]
        low = [result for result in self.results if is_low_precision(result.row)]
        lines = [f"# {self.subject}: {verdict}", "", used_versions, ""]
        lines += [f"- FAILED on one device: {fault}" for fault in self.broken_laws]
        if exact:
            lines += [
                f"{len(exact)} layouts compared with one device, in float64. Each figure is the largest",
                f"relative difference; {self.tolerance:g} is allowed.",
                "",
                *_table(exact, "{:.1e}"),
                "",
            ]
        if low:
            lines += [
                f"{len(low)} layouts in low precision. Each figure is the largest error, compared with float64,",
                f"as a multiple of the error of one device in the same dtype; {MAX_RATIO} is allowed (the loss: see",
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
        values = [
            number.format(result.differences[kind]) if kind in result.differences else ""
            for kind in kinds
        ]
        verdict = "FAILED: " + result.fault.replace("|", "\\|") if result.fault else "ok"
        table.append([describe(result.row), *values, verdict])
    return ["| " + " | ".join(cells) + " |" for cells in table]


def is_low_precision(row: Row) -> bool:
    """Whether a layout is compared by its errors, see precision.py; rows in float64 need no "dtype"."""
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

    `configured` are the settings of the user, `verified` those with smaller sizes. `without` are the
    checks that the user left out; `left_out` are further lines, such as the layouts that `quick` skips.
    """
    lines, device = list(left_out), jax.devices()[0]
    if without:
        lines.append(f"checks left out with --without: {', '.join(without)}")
    reduced = [
        f"{section}.{key}={verified[section][key]} instead of {value}"
        for section in ("model", "data")
        for key, value in configured[section].items()
        if type(value) is int and 0 < verified[section].get(key, value) < value
    ]
    if reduced:
        lines.append(f"larger sizes; verified with {', '.join(reduced)}")
    dtype = configured["train"]["dtype"]
    if dtype not in {row.get("dtype", "float64") for row in rows}:
        lines.append(f"train.dtype={dtype}; no layout was verified in it")
    if not any(row.get("dropout") for row in rows):
        lines.append("dropout; no layout was verified with it")
    if not any(row.get("attention_impl") == "cudnn" for row in rows):
        lines.append("cuDNN's attention kernels, which run on NVIDIA GPUs in bfloat16 and float16")
    kinds = {"cpu": "GPU and TPU", "gpu": "CPU and TPU", "tpu": "CPU and GPU"}
    lines.append(
        f"XLA's compilers for {kinds.get(device.platform, 'other devices')}; "
        f"run verify --here on those devices"
    )
    if not any(is_low_precision(row) for row in rows) or device.platform == "cpu":
        lines.append(
            "kernels and rounding of the devices that will train; run verify --here on them"
        )
    lines.append(
        f"more than {jax.device_count()} devices ({device.device_kind}), more than "
        f"{jax.process_count()} {'process' if jax.process_count() == 1 else 'processes'}"
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
    "attention_impl": "{} attention",
    "loss_chunks": "{} loss chunks",
    "unroll": "unroll {}",
    "sync_pattern": "{} sums",
}


def describe(row: Row) -> str:
    """Describes a layout: 'data 2 x fsdp 4 · zero 3 · 2 micro-batches · remat full · packed'.

    Every setting of the row appears, except those that are off (None, False, 0) or the default.
    """
    sizes = [f"{axis} {row[axis]}" for axis in AXES if row.get(axis, 1) > 1]
    words = [" x ".join(sizes) or "one device"]
    words += [row["dtype"]] if is_low_precision(row) else []
    words += [f"zero {row['zero_stage']}", f"{row['num_microbatches']} micro-batches"]
    words += [f"remat {row['remat']}"]
    if row.get("schedule"):
        chunks = f" of {row['num_chunks']} chunks" if row.get("num_chunks", 1) > 1 else ""
        words.append(f"{row['schedule']}{chunks}, {row['keep']} kept")
    described = {*AXES, "dtype", "zero_stage", "num_microbatches", "remat"}
    described |= {"schedule", "num_chunks", "keep"}
    for name, value in row.items():
        if (
            name not in described
            and value not in (None, False, 0)
            and (name, value) not in (("unroll", 1), ("sync_pattern", "xla"))
        ):
            default = name if value is True else f"{name} {value}"
            words.append(_WORDS.get(name, default).format(value))
    return " · ".join(words)


def summary_line(result: Result) -> str:
    """Returns the line that is logged for a layout: largest difference, seconds, layout, verdict."""
    largest = max(result.differences.values(), default=math.nan)
    figure = f"{largest:7.2f}x" if is_low_precision(result.row) else f"{largest:8.1e}"
    verdict = f"FAILED {result.fault}" if result.fault else "ok"
    return f"{figure}  {result.seconds:4.1f} s  {describe(result.row)}  {verdict}"


def compare(
    actual: Trees, expected: Trees, *, tolerance: float, zero_gradients: Collection[str] = ()
) -> tuple[dict[str, float], str | None]:
    """Returns the largest relative difference by kind, and a message about the first above `tolerance`.

    Differences are relative to the largest value of a leaf. The parameters in `zero_gradients` have a
    gradient that is zero except for rounding noise. Its difference is relative to 1 % of the largest
    gradient. Their other values are not compared: the optimizer computes them from the noise.
    """
    differences, fault = {}, None
    for kind, tree in actual.items():
        leaves = jax.tree.leaves_with_path(expected[kind])
        largest = max(np.abs(leaf).max() for _, leaf in leaves)
        differences[kind] = 0.0
        for (path, wanted), found in zip(leaves, jax.tree.leaves(tree), strict=True):
            name, found, wanted = name_of(path), np.asarray(found), np.asarray(wanted)
            is_noise = name.endswith(tuple(zero_gradients))
            if is_noise and kind != "gradients":
                continue
            scale = max(np.abs(wanted).max(), 0.01 * largest if is_noise else 0.0) or 1.0
            errors = np.nan_to_num(np.abs(found - wanted), nan=math.inf)
            worst = np.unravel_index(errors.argmax(), errors.shape)
            differences[kind] = max(differences[kind], float(errors[worst] / scale))
            if fault is None and not errors[worst] <= tolerance * scale:
                index = str([int(n) for n in worst]) if worst else ""
                leaf = f"{kind} {name}".strip() + index
                fault = f"{leaf}: {found[worst]:.12g} here, {wanted[worst]:.12g} on one device"
    return differences, fault


def zero_gradient_names(grads: Any) -> list[str]:
    """Returns the names of the gradients that are zero except for rounding noise."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    leaves = jax.tree.leaves_with_path(grads)
    return [name_of(path) for path, leaf in leaves if np.abs(leaf).max() < 1e-12 * largest]


def name_of(path: tuple) -> str:
    """Returns the path of a leaf as text, for example 'layers/mlp/up/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
