"""Lists, verifies, compares and removes the checkpoints of a run.

  meshtrain checkpoint ls WORKDIR              list all checkpoints, valid or corrupt
  meshtrain checkpoint verify WORKDIR          the same; exit code 1 if one is corrupt or unreadable
  meshtrain checkpoint diff PATH PATH          list the arrays that differ; exit code 1 if any does
  meshtrain checkpoint prune WORKDIR --keep=N  remove valid checkpoints except the N newest

PATH is a checkpoint (WORKDIR/checkpoints/STEP), or a workdir, which stands for its newest valid
checkpoint.
"""

import argparse
import datetime
import shutil
from pathlib import Path

from meshtrain import console, storage
from meshtrain.checkpoint import find, manifest
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import AXES
from meshtrain.errors import ConfigError, minimum_faults


def listing(folder: Path) -> tuple[list[str], bool]:
    """Returns a line for each checkpoint, and whether all are valid.

    The oldest is first, and quarantined ones are last.

    A checkpoint that cannot be read (another format, no permission) is neither valid nor corrupt.
    One that a run removes in the meantime is left out, and what the run has saved since is read.
    """
    lines: dict[int, str] = {}
    all_valid = True
    for _ in range(find.MAX_LOOKS):
        is_removed = False
        for step in sorted({*find.steps(folder)} - lines.keys()):
            directory = folder / str(step)
            try:
                one = manifest.verify(directory)
                parts = filter(
                    None, (_described(one), manifest.describe_unlisted_files(directory, one))
                )
                lines[step] = f"{step:>9}  valid    {' · '.join(parts)}"
            except (CorruptCheckpoint, ConfigError) as error:
                if find.was_removed(directory):
                    is_removed = True
                    continue
                kind = "corrupt" if isinstance(error, CorruptCheckpoint) else "unreadable"
                lines[step] = f"{step:>9}  {kind}  {error}"
                all_valid = False
        if not is_removed:
            break
    quarantined = [
        f"{path.name:>9}  quarantined in {path.parent}" for path in find.quarantined_paths(folder)
    ]
    return [*lines.values(), *quarantined], all_valid


def _described(one: Manifest) -> str:
    when = datetime.datetime.fromtimestamp(one.time).strftime("%Y-%m-%d %H:%M:%S")
    mesh = " x ".join(
        f"{axis} {size}" for axis, size in one.mesh.items() if axis in AXES and size > 1
    )
    values = [
        f"{key} {one.metrics[key]:.4f}" for key in ("loss", "eval_loss") if key in one.metrics
    ]
    size = None if one.bytes is None else f"{one.bytes / 1e6:,.1f} MB"
    parts = [when, size, mesh or "one device", *values, f"sample {one.position:,}"]
    return " · ".join(filter(None, parts))


def differences(a: Path, b: Path) -> tuple[list[str], bool]:
    """Returns a line for each array that is not bit-equal, a summary, and whether all are."""
    import jax
    import numpy as np

    from meshtrain.checkpoint import arrays

    jax.config.update("jax_platforms", "cpu")

    def read(directory: Path, saved: Manifest) -> tuple[Path, Manifest, dict[str, np.ndarray]]:
        return directory, saved, arrays.as_numpy(directory)

    directory_a, saved_a, old = find.read_valid(a, read)
    directory_b, saved_b, new = find.read_valid(b, read)
    lines = []
    for path in sorted(old.keys() | new.keys()):
        kind_a, kind_b = (saved.arrays.get(path, "absent") for saved in (saved_a, saved_b))
        if kind_a != kind_b:
            lines.append(f"{path}: {kind_a}, {kind_b}")
        elif old[path].tobytes() != new[path].tobytes():
            x, y = (np.asarray(values[path], np.float64) for values in (old, new))
            largest, size = np.abs(x - y).max(), np.abs(x).max()
            count = np.count_nonzero(x != y)
            relative = f", {largest / size:.1e} of the largest value" if size else ""
            lines.append(
                f"{path}: {count:,} of {x.size:,} differ, by {largest:.3g} at most{relative}"
            )
    num_arrays = len(old.keys() | new.keys())
    summary = f"{len(lines)} of {num_arrays} arrays differ: {directory_a}, {directory_b}"
    return [*lines, summary], not lines


def prune(workdir: Path, args: argparse.Namespace) -> list[str]:
    """Removes the checkpoints that the flags do not keep, and returns a line for each."""
    folder, valid, kept = workdir / find.FOLDER, [], []
    for step in find.steps(folder):
        try:
            valid.append(manifest.verify(folder / str(step)))
        except (CorruptCheckpoint, ConfigError) as error:
            kept.append(f"neither counted nor removed: step {step}: {error}")
    if args.keep_best and not any(args.best_by in one.metrics for one in valid):
        raise ConfigError(f"--best_by={args.best_by}: no checkpoint has such a metric")
    counts = dict(keep=args.keep, keep_every=args.keep_every, keep_best=args.keep_best)
    keep = find.steps_to_keep(valid, **counts, best_by=args.best_by)
    removed = [folder / str(one.step) for one in valid if one.step not in keep]
    for path in removed:
        find.remove(path)
    if args.quarantine and (kept_apart := folder / find.QUARANTINE).is_dir():
        shutil.rmtree(kept_apart)
        removed.append(kept_apart)
    return kept + ([f"removed {path}" for path in removed] or ["nothing to remove"])


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("verb", choices=("ls", "verify", "diff", "prune"))
    flags.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    flags.add_argument(
        "--keep", type=int, metavar="N", help="prune: number of newest checkpoints to keep"
    )
    flags.add_argument(
        "--keep_every",
        type=int,
        default=0,
        metavar="N",
        help="prune: also keep steps that are multiples of N",
    )
    flags.add_argument(
        "--keep_best",
        type=int,
        default=0,
        metavar="N",
        help="prune: also keep the N best checkpoints",
    )
    flags.add_argument(
        "--best_by",
        default="eval_loss",
        metavar="NAME",
        help="prune: metric that ranks checkpoints; lowest is best",
    )
    flags.add_argument(
        "--quarantine", action="store_true", help="prune: also remove quarantined checkpoints"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 if `verify` found a corrupt checkpoint, or `diff` a difference."""
    try:
        return _run(args)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or args.paths[0]}: {error.strerror or error}"
        ) from error


def _run(args: argparse.Namespace) -> int:
    num_paths = 2 if args.verb == "diff" else 1
    if len(args.paths) != num_paths:
        raise ConfigError(f"checkpoint {args.verb}: give {num_paths} paths, not {len(args.paths)}")
    given = (args.keep, args.keep_every, args.keep_best, args.quarantine)
    if args.verb != "prune" and any(one not in (None, 0) for one in given):
        raise ConfigError(
            f"checkpoint {args.verb}: --keep, --keep_every, --keep_best and --quarantine are of "
            "prune"
        )
    if args.verb == "diff":
        lines, same = differences(*args.paths)
        console.say(*map(storage.readable, lines))
        return 0 if same else 1
    (workdir,) = args.paths
    if not (workdir / find.FOLDER).is_dir():
        raise ConfigError(f"{workdir}: has no folder {find.FOLDER}; give the workdir of a run")
    if args.verb == "prune":
        if args.keep is None:
            raise ConfigError("checkpoint prune: say how many to keep, --keep=N")
        counts = {"--keep_every": args.keep_every, "--keep_best": args.keep_best}
        if faults := minimum_faults(1, {"--keep": args.keep}) + minimum_faults(0, counts):
            raise ConfigError(*faults)
        from meshtrain.checkpoint import lock

        with lock.held(storage.workdir_at(workdir)):
            console.say(*map(storage.readable, prune(workdir, args)))
        return 0
    lines, all_valid = listing(workdir / find.FOLDER)
    console.say(*map(storage.readable, lines or ["no checkpoint yet"]))
    return 0 if all_valid or args.verb == "ls" else 1


VERB = Verb(
    summary="list, verify, compare, remove checkpoints",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
