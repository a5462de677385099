"""The result of a verification: differences from one device, and the certificate that lists them."""

import json
import math
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from meshtrain.config.schema import AXES
from meshtrain.verify.covering import Row

Trees = dict[str, Any]  # kind of value -> pytree of arrays


@dataclass(frozen=True)
class Result:
    """The result of one layout."""

    row: Row
    differences: dict[str, float]  # largest relative difference of each kind of value
    fault: str | None  # describes the first difference above the tolerance, or an error
    seconds: float


@dataclass(frozen=True)
class Certificate:
    """The results of all layouts."""

    subject: str
    tolerance: float
    broken_laws: tuple[str, ...]  # errors of the model on one device, see laws.py
    results: tuple[Result, ...]

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
        kinds = list(dict.fromkeys(kind for result in self.results for kind in result.differences))
        verdict = "passed" if self.passed else "FAILED"
        used_versions = " · ".join(f"{name} {version}" for name, version in versions().items())
        rows = [
            [
                describe(r.row),
                *(f"{r.differences[k]:.1e}" if k in r.differences else "" for k in kinds),
            ]
            + ["FAILED: " + r.fault.replace("|", "\\|") if r.fault else "ok"]
            for r in self.results
        ]
        table = [["layout", *kinds, ""], ["---"] * (len(kinds) + 2), *rows]
        return "\n".join(
            [
                f"# {self.subject}: {verdict}",
                "",
                f"{len(self.results)} layouts compared with one device, in float64. Each figure is the largest",
                f"relative difference; {self.tolerance:g} is allowed. {used_versions}",
                "",
                *(f"- FAILED on one device: {fault}" for fault in self.broken_laws),
                *("| " + " | ".join(cells) + " |" for cells in table),
                "",
            ]
        )


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on."""
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }


def describe(row: Row) -> str:
    """Describes a layout: 'data 2 x fsdp 4 · zero 3 · 2 micro-batches · remat full · packed'."""
    sizes = [f"{axis} {row[axis]}" for axis in AXES if row.get(axis, 1) > 1]
    words = {"packing": "packed", "masks": "masked", "sequence_parallel": "sequence-sharded"}
    words["loss_scale"] = "loss scaled"
    return " · ".join(
        [
            " x ".join(sizes) or "one device",
            f"zero {row['zero_stage']}",
            f"{row['num_microbatches']} micro-batches",
            f"remat {row['remat']}",
            *([f"{row['schedule']}, {row['keep']} kept"] if row.get("schedule") else []),
            *(word for key, word in words.items() if row.get(key)),
        ]
    )


def summary_line(result: Result) -> str:
    """Returns the line that is logged for a layout: largest difference, seconds, layout, verdict."""
    largest = max(result.differences.values(), default=math.nan)
    verdict = f"FAILED {result.fault}" if result.fault else "ok"
    return f"{largest:8.1e}  {result.seconds:4.1f} s  {describe(result.row)}  {verdict}"


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
