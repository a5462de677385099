"""Which checkpoints of a run are kept, and the removal of all others."""

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path

from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError


def remove_old(folder: Path, settings: CheckpointConfig) -> None:
    """Removes the checkpoints that the settings do not keep."""
    s, found = settings, []
    for step in manifest.steps(folder):
        try:
            found.append(manifest.read(folder / str(step)))
        except (CorruptCheckpoint, ConfigError):
            continue  # left as it is; the next start reports it
    keep = steps_to_keep(
        found, keep=s.keep, keep_every=s.keep_every, keep_best=s.keep_best, best_by=s.best_by
    )
    for one in found:
        if one.step not in keep:
            with contextlib.suppress(OSError):  # the next save tries again
                manifest.remove(folder / str(one.step))


def steps_to_keep(
    manifests: Iterable[Manifest], *, keep: int, keep_every: int, keep_best: int, best_by: str
) -> set[int]:
    """Returns the steps to keep: the `keep` newest, the multiples of `keep_every`, the `keep_best` best.

    The best have the lowest metric `best_by`; values that are not finite are ignored.
    """
    manifests = sorted(manifests, key=lambda manifest: -manifest.step)
    selected = {manifest.step for manifest in manifests[:keep]}
    if keep_every:
        selected |= {manifest.step for manifest in manifests if manifest.step % keep_every == 0}
    ranked = [m for m in manifests if math.isfinite(m.metrics.get(best_by, math.nan))]
    best = sorted(ranked, key=lambda manifest: manifest.metrics[best_by])[:keep_best]
    return selected | {manifest.step for manifest in best}
