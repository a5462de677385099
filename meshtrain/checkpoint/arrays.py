"""The arrays of a state through Orbax: each process writes its shards, and reads those that it needs."""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain.errors import ConfigError
from meshtrain.models.base import Params
from meshtrain.state import LossScale, TrainState, start_loss_scale

FOLDER = "arrays"  # in a checkpoint
TOLD = 20  # differing arrays that a fault names


class Arrays:
    """Writes states in the background, one at a time."""

    def __init__(self):
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, directory: Path, state: TrainState) -> None:
        """Returns when the arrays are copied off the devices; so the state may be given away."""
        args = ocp.args.PyTreeSave(_fields(state))
        self._orbax.save((directory / FOLDER).absolute(), args=args, force=True)

    def wait(self) -> None:
        """Returns when they are written, by all processes; raises what went wrong."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        self._orbax.close()


def restore(
    directory: Path, saved: Mapping[str, str], abstract: TrainState, *, allow_cast: bool = False
) -> TrainState:
    """Returns the state in a checkpoint whose arrays are `saved`, placed as `abstract` says.

    A run may change to float16 or away from it: a loss scale that was not saved starts anew, one that
    is not wanted is left behind. Raises ConfigError where other arrays are missing, of another shape,
    or, without `allow_cast`, of another dtype.
    """
    place = abstract.step.sharding
    fresh = jax.jit(start_loss_scale, out_shardings=LossScale(place, place))
    scaled = any(path.startswith("loss_scale") for path in saved)
    there = abstract._replace(loss_scale=fresh.eval_shape() if scaled else None)
    _check_same(saved, shapes(_fields(there)), directory, allow_cast)
    state = TrainState(**_read(directory, saved, _fields(there)))
    if abstract.loss_scale is None:
        return state._replace(loss_scale=None)
    return state if scaled else state._replace(loss_scale=fresh())


def restore_params(
    directory: Path, saved: Mapping[str, str], params: Params, patterns: Sequence[str] = ("*",)
) -> tuple[Params, list[str], list[str]]:
    """Returns `params` with those that match a pattern taken from a checkpoint of any optimizer.

    Beside them it names the parameters that are left as they were, and those there that nobody took.
    A pattern is a glob over paths such as layers/attention/*. Raises ConfigError where one that
    matches is not there, or has another shape; its dtype becomes the one in `params`.
    """
    flat = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    wanted = {
        path: leaf
        for path, leaf in flat.items()
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }
    if idle := [one for one in patterns if not fnmatch.filter(flat, one)]:
        raise ConfigError(
            f"checkpoint.init_only={','.join(idle)}: no parameter has such a name; "
            f"there are {', '.join(list(flat)[:5])}, ..."
        )
    prefix = "params/"
    there = {path.removeprefix(prefix): s for path, s in saved.items() if path.startswith(prefix)}
    _check_same(
        {path: shape for path, shape in there.items() if path in wanted},
        shapes(wanted),
        directory,
        allow_cast=True,
    )
    read = _read(directory, saved, {"params": _only(params, wanted)})["params"]
    new = {_name(path): leaf for path, leaf in jax.tree.leaves_with_path(read)}
    taken = jax.tree.map_with_path(lambda path, leaf: new.get(_name(path), leaf), params)
    return (
        taken,
        [path for path in flat if path not in wanted],
        sorted(there.keys() - wanted.keys()),
    )


def _only(tree: Params, wanted: Mapping[str, Any], prefix: str = "") -> Params:
    """Returns what a nested dict has at the paths that are wanted."""
    kept = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if inner := _only(value, wanted, f"{path}/"):
                kept[key] = inner
        elif path in wanted:
            kept[key] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return kept


def as_numpy(directory: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by path, on the host."""
    path = (directory / FOLDER).absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        there = orbax.metadata(path).item_metadata.tree
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), there)
        tree = orbax.restore(path, args=ocp.args.PyTreeRestore(restore_args=on_host))
    return {_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def shapes(tree: Any) -> dict[str, str]:
    """Returns shape and dtype by path, a path of bare names: Orbax turns every container into a dict."""
    return {
        _name(path): f"{tuple(leaf.shape)} {leaf.dtype}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def shapes_of(state: TrainState) -> dict[str, str]:
    return shapes(_fields(state))


def _read(directory: Path, saved: Mapping[str, str], wanted: Any) -> Any:
    """Reads arrays in their own dtype, which Orbax would change without a word, then casts."""

    target = jax.tree.map_with_path(
        lambda path, leaf: leaf.update(dtype=saved[_name(path)].rpartition(" ")[2]), wanted
    )
    args = ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        read = orbax.restore((directory / FOLDER).absolute(), args=args)
    return jax.tree.map(
        lambda new, leaf: new if new.dtype == leaf.dtype else new.astype(leaf.dtype), read, wanted
    )


def _fields(state: TrainState) -> dict[str, Any]:
    """What there is of a state: Orbax would put a None on record as well."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def _name(path: tuple) -> str:
    return "/".join(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in path)


def _check_same(
    saved: Mapping[str, str], wanted: Mapping[str, str], directory: Path, allow_cast: bool
) -> None:
    """Raises ConfigError, with a table, where the arrays there are not those wanted here."""

    def kind(some: Mapping[str, str], path: str) -> str:
        shape = some.get(path, "absent")
        return shape.rpartition(" ")[0] if allow_cast and path in some else shape

    paths = sorted(
        saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params"), path)
    )
    differing = [path for path in paths if kind(saved, path) != kind(wanted, path)]
    if not differing:
        return
    width = max(map(len, differing[:TOLD]))
    table = [
        f"  {path:{width}}  {saved.get(path, 'absent')} there, {wanted.get(path, 'absent')} here"
        for path in differing[:TOLD]
    ]
    if len(differing) > TOLD:
        table.append(f"  ... and {len(differing) - TOLD} more")
    others = [
        path for path in differing if _shape(saved.get(path, "")) != _shape(wanted.get(path, ""))
    ]
    if not others:
        advice = "only dtypes differ: allow it with checkpoint.allow_cast=True, or keep them"
    elif not any(path.startswith("params") for path in others):
        advice = "keep the optimizer, or take the parameters alone: another --workdir, with checkpoint.init_from"
    else:
        advice = "use its config, or another --workdir"
    raise ConfigError(
        f"{directory}: {len(differing)} arrays are not those of this model and optimizer; {advice}",
        *table,
    )


def _shape(described: str) -> str:
    return described.rpartition(" ")[0]
