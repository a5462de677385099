"""Sharded checkpoints through Orbax: each process writes its shards, any mesh can read them."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshtrain.errors import ConfigError
from meshtrain.state import LossScale, TrainState, start_loss_scale


class Checkpointer:
    """Saves a state with the data position beside it; close it so that the last save is finished."""

    def __init__(self, directory: Path, *, keep: int | None = None):
        """Opens a run's checkpoints; without `keep` only to read them, beside a run that writes."""
        writing = dict(max_to_keep=keep, cleanup_tmp_directories=True)
        options = ocp.CheckpointManagerOptions(**(writing if keep else dict(read_only=True)))
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            directory.absolute(), options=options, item_handlers=handlers
        )

    def save(self, step: int, state: TrainState, *, position: int) -> bool:
        """Starts saving, unless this step is saved already; `position` is the next sample to train on."""
        if step in self._manager.all_steps():
            return False
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_fields(state)),
            data=ocp.args.JsonSave({"position": position}),
        )
        return self._manager.save(step, args=items)

    def latest(self) -> int | None:
        """Returns the newest step that was saved whole."""
        return self._manager.latest_step()

    def position(self, step: int) -> int:
        """Returns the next sample to train on after this step."""
        return self._manager.restore(
            step, args=ocp.args.Composite(data=ocp.args.JsonRestore())
        ).data["position"]

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Returns the state, placed as `abstract_state` says.

        A run may change to float16 or away from it: a loss scale that was not saved starts anew, one
        that is not wanted is left behind.
        Raises ConfigError when the saved arrays are not those of this model and optimizer.
        """
        saved = self._manager.item_metadata(step).state
        saved = _shapes(saved.tree if hasattr(saved, "tree") else saved)
        place = abstract_state.step.sharding
        fresh = jax.jit(start_loss_scale, out_shardings=LossScale(place, place))
        scaled = any(path.startswith("loss_scale") for path in saved)
        there = abstract_state._replace(loss_scale=fresh.eval_shape() if scaled else None)
        _check_same(saved, _shapes(there), step)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_fields(there)))
        state = TrainState(**self._manager.restore(step, args=items).state)
        if abstract_state.loss_scale is None:
            return state._replace(loss_scale=None)
        return state if scaled else state._replace(loss_scale=fresh())

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _fields(state: TrainState) -> dict[str, Any]:
    """What there is of a state: Orbax would put a None on record as well, and miss it in older checkpoints."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def _shapes(tree: Any) -> dict[str, str]:
    """Shape and dtype by path, a path of bare names: Orbax turns every container into a dict."""
    leaves = jax.tree.leaves_with_path(tree)
    return {
        _name(path): f"{tuple(leaf.shape)} {leaf.dtype}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }


def _name(path: tuple) -> str:
    return "/".join(str(getattr(e, "key", getattr(e, "name", getattr(e, "idx", e)))) for e in path)


def _check_same(saved: dict[str, str], wanted: dict[str, str], step: int) -> None:
    paths = sorted(
        saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params"), path)
    )
    differing = [path for path in paths if saved.get(path) != wanted.get(path)]
    if differing:
        there, here = (some.get(differing[0], "absent") for some in (saved, wanted))
        raise ConfigError(
            f"checkpoint of step {step} is of another model or optimizer: {differing[0]} is {there} there and "
            f"{here} in this config ({len(differing)} arrays differ); use its config, or another --workdir"
        )
