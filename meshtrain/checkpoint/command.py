"""Looks after the checkpoints of a run.

  meshtrain checkpoint ls WORKDIR                 what there is, and whether it is good
  meshtrain checkpoint verify WORKDIR             the same; exit code 1 if one is bad
  meshtrain checkpoint diff PATH PATH             how far two differ, array by array
  meshtrain checkpoint prune WORKDIR --keep=N     removes all but the newest N, and --quarantine

PATH is a checkpoint, WORKDIR/checkpoints/STEP, or a workdir: its newest good one.
"""

import argparse
import contextlib
import datetime
import shutil
from pathlib import Path

import jax
import numpy as np

from meshtrain import checkpoint
from meshtrain.checkpoint import arrays, lock, manifest
from meshtrain.checkpoint.manifest import BadCheckpoint, Manifest
from meshtrain.errors import ConfigError, minimum_faults


def listing(folder: Path) -> tuple[list[str], bool]:
    """Returns a line for each checkpoint, the oldest first, and whether all are good."""
    lines, all_good = [], True
    for step in reversed(manifest.steps(folder)):
        try:
            lines.append(f"{step:>9}  good  {_described(manifest.verify(folder / str(step)))}")
        except BadCheckpoint as error:
            if not (folder / str(step)).exists():
                continue  # made room for a newer one, while we looked
            lines.append(f"{step:>9}  BAD   {error}")
            all_good = False
    aside = folder / manifest.QUARANTINE
    lines += [f"{path.name:>9}  set aside in {aside}" for path in sorted(aside.glob("*"))]
    return lines, all_good


def _described(one: Manifest) -> str:
    when = datetime.datetime.fromtimestamp(one.time).strftime("%Y-%m-%d %H:%M:%S")
    mesh = " x ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1)
    values = [
        f"{key} {one.metrics[key]:.4f}" for key in ("loss", "eval_loss") if key in one.metrics
    ]
    parts = [when, f"{one.bytes / 1e6:,.1f} MB", mesh or "one device", *values]
    return " · ".join([*parts, f"sample {one.position:,}"])


def differences(a: Path, b: Path) -> tuple[list[str], bool]:
    """Returns a line for each array that is not the same, bit for bit, in two checkpoints."""
    (there, saved_a), (here, saved_b) = checkpoint.find(a), checkpoint.find(b)
    old, new = arrays.as_numpy(there), arrays.as_numpy(here)
    lines = []
    for path in sorted(old.keys() | new.keys()):
        kinds = [some.arrays.get(path, "absent") for some in (saved_a, saved_b)]
        if kinds[0] != kinds[1]:
            lines.append(f"{path}: {kinds[0]}, {kinds[1]}")
        elif old[path].tobytes() != new[path].tobytes():
            x, y = (np.asarray(some[path], np.float64) for some in (old, new))
            largest, size = np.abs(x - y).max(), np.abs(x).max()
            count = np.count_nonzero(x != y)
            relative = f", {largest / size:.1e} of the largest value" if size else ""
            lines.append(
                f"{path}: {count:,} of {x.size:,} differ, by {largest:.3g} at most{relative}"
            )
    told = f"{len(lines)} of {len(old.keys() | new.keys())} arrays differ: {there}, {here}"
    return [*lines, told], not lines


def prune(workdir: Path, args: argparse.Namespace) -> list[str]:
    """Removes checkpoints that are not to be kept, and returns what was removed."""
    folder, found = workdir / checkpoint.FOLDER, []
    for step in manifest.steps(folder):
        with contextlib.suppress(BadCheckpoint):  # a bad one counts for nothing, and is left
            found.append(manifest.verify(folder / str(step)))
    if args.keep_best and not any(args.best_by in one.metrics for one in found):
        raise ConfigError(f"--best_by={args.best_by}: no checkpoint has such a metric")
    keep = dict(keep=args.keep, keep_every=args.keep_every, keep_best=args.keep_best)
    kept = manifest.retained(found, **keep, best_by=args.best_by)
    gone = [folder / str(one.step) for one in found if one.step not in kept]
    for path in gone:
        manifest.remove(path)
    if args.quarantine and (aside := folder / manifest.QUARANTINE).is_dir():
        shutil.rmtree(aside)
        gone.append(aside)
    return [f"removed {path}" for path in gone] or ["nothing to remove"]


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("verb", choices=("ls", "verify", "diff", "prune"))
    flags.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    flags.add_argument("--keep", type=int, metavar="N", help="prune: number of newest ones to keep")
    flags.add_argument("--keep_every", type=int, default=0, metavar="N", help="and every n-th step")
    flags.add_argument("--keep_best", type=int, default=0, metavar="N", help="and the N best")
    flags.add_argument("--best_by", default="eval_loss", metavar="NAME", help="the lowest is best")
    flags.add_argument(
        "--quarantine", action="store_true", help="prune: also remove quarantined checkpoints"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 where `verify` found a corrupt checkpoint, or `diff` a difference."""
    jax.config.update("jax_platforms", "cpu")
    try:
        return _run(args)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error


def _run(args: argparse.Namespace) -> int:
    wanted = 2 if args.verb == "diff" else 1
    if len(args.paths) != wanted:
        raise ConfigError(f"checkpoint {args.verb}: give {wanted} paths, not {len(args.paths)}")
    if args.verb == "diff":
        lines, same = differences(*args.paths)
        print(*lines, sep="\n")
        return 0 if same else 1
    (workdir,) = args.paths
    if not (workdir / checkpoint.FOLDER).is_dir():
        raise ConfigError(f"{workdir}: no {checkpoint.FOLDER} there; give the workdir of a run")
    if args.verb == "prune":
        if args.keep is None:
            raise ConfigError("checkpoint prune: say how many to keep, --keep=N")
        counts = {"--keep_every": args.keep_every, "--keep_best": args.keep_best}
        if faults := minimum_faults(1, {"--keep": args.keep}) + minimum_faults(0, counts):
            raise ConfigError(*faults)
        with lock.held(workdir):
            print(*prune(workdir, args), sep="\n")
        return 0
    lines, all_good = listing(workdir / checkpoint.FOLDER)
    print(*lines or ["no checkpoint yet"], sep="\n")
    return 0 if all_good or args.verb == "ls" else 1
