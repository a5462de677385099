"""What a verification found: differences from one device, and the certificate to keep of them."""

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
    """What came of one layout."""

    row: Row
    differences: dict[str, float]  # largest relative difference of each kind of value
    fault: str | None  # the first that is too large, or what went wrong
    seconds: float


@dataclass(frozen=True)
class Certificate:
    """What came of all layouts."""

    subject: str
    tolerance: float
    broken_laws: tuple[str, ...]  # faults of the model on one device
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        return not self.broken_laws and all(result.fault is None for result in self.results)

    def write(self, folder: Path) -> None:
        """Writes verify.json and verify.md into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {"passed": self.passed, "versions": versions(), **asdict(self)}
        for result in record["results"]:
            found = result["differences"]  # JSON knows no infinity
            found.update({kind: None for kind, value in found.items() if not math.isfinite(value)})
        (folder / "verify.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "verify.md").write_text(self._markdown())

    def _markdown(self) -> str:
        kinds = list(dict.fromkeys(kind for result in self.results for kind in result.differences))
        verdict = "passed" if self.passed else "FAILED"
        used = " · ".join(f"{name} {version}" for name, version in versions().items())
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
                f"{len(self.results)} layouts against one device, in float64. Each figure is the largest relative",
                f"difference; {self.tolerance:g} is allowed. {used}",
                "",
                *(f"- FAILED on one device: {law}" for law in self.broken_laws),
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
    """Returns a layout in words: 'data 2 x fsdp 4 · zero 3 · 2 micro-batches · remat full · packed'."""
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


def line(result: Result) -> str:
    """Returns a layout's line of the table."""
    largest = max(result.differences.values(), default=math.nan)
    verdict = f"FAILED {result.fault}" if result.fault else "ok"
    return f"{largest:8.1e}  {result.seconds:4.1f} s  {describe(result.row)}  {verdict}"


def compare(
    seen: Trees, due: Trees, *, tolerance: float, zero: Collection[str] = ()
) -> tuple[dict[str, float], str | None]:
    """Returns the largest relative difference of each kind, and the first leaf that exceeds `tolerance`.

    Differences are relative to the largest value of a leaf. Parameters named in `zero` have no
    gradient by the maths, so theirs is compared with 1 % of the largest, and what an optimizer makes
    of such noise is not compared.
    """
    differences, fault = {}, None
    for kind, tree in seen.items():
        leaves = jax.tree.leaves_with_path(due[kind])
        largest = max(np.abs(leaf).max() for _, leaf in leaves)
        differences[kind] = 0.0
        for (path, there), here in zip(leaves, jax.tree.leaves(tree), strict=True):
            name, here, there = name_of(path), np.asarray(here), np.asarray(there)
            noise = name.endswith(tuple(zero))
            if noise and kind != "gradients":
                continue
            scale = max(np.abs(there).max(), 0.01 * largest if noise else 0.0) or 1.0
            gaps = np.nan_to_num(np.abs(here - there), nan=math.inf)
            worst = np.unravel_index(gaps.argmax(), gaps.shape)
            differences[kind] = max(differences[kind], float(gaps[worst] / scale))
            if fault is None and not gaps[worst] <= tolerance * scale:
                place = str([int(n) for n in worst]) if worst else ""
                leaf = f"{kind} {name}".strip() + place
                fault = f"{leaf}: {here[worst]:.12g} here, {there[worst]:.12g} on one device"
    return differences, fault


def without_gradient(grads: Any) -> list[str]:
    """Returns the names of those that are zero by the maths, but for rounding."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
    leaves = jax.tree.leaves_with_path(grads)
    return [name_of(path) for path, leaf in leaves if np.abs(leaf).max() < 1e-12 * largest]


def name_of(path: tuple) -> str:
    """Returns a leaf's path as 'layers/mlp/up/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
