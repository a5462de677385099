"""Writes and restores arrays with Orbax: each process its shards, whose chunks it verifies.

The residual of compressed gradients has one row per batch shard. Only its sum over the shards
matters: on the same number of shards each gets its own row back, on another number the sum is split
equally.
"""

import ast
import contextlib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata import array_metadata_store

from meshtrain import storage
from meshtrain.checkpoint import manifest, orbax_patches
from meshtrain.checkpoint.manifest import CorruptCheckpoint
from meshtrain.errors import ConfigError, TransientError, first_line
from meshtrain.models import trees
from meshtrain.models.base import Params
from meshtrain.models.lora_layer import is_low_rank
from meshtrain.state import LossScale, TrainState, averages, start_loss_scale

orbax_patches.apply()

FOLDER = "arrays"  # in a checkpoint

# Gets what went wrong in this process, or None, and raises what all processes are to raise.
Agree = Callable[[CorruptCheckpoint | TransientError | None], None]


def _raise(fault: Exception | None) -> None:
    if fault:
        raise fault


# ---- writing ----

NUM_BARRIERS = 2  # of a save of Orbax: all have written; process 0 has merged what they wrote
# Replicas of an array each write a part of it, if the part has at least this many bytes. For each
# part XLA compiles a program that cuts it out, which takes longer than to write a small array.
MIN_PART_OF_REPLICA = 2**20


class Barriers(Protocol):
    """Those of `cluster.distributed`."""

    def wait(self, seconds: float) -> None: ...
    def fail(self, reason: str) -> None: ...
    def forget(self) -> None: ...


def _handlers_of_arrays() -> ocp.type_handlers.TypeHandlerRegistry:
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=MIN_PART_OF_REPLICA,
        array_metadata_store=array_metadata_store.Store(),  # as Orbax's default
    )
    return ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))


class AsyncWriter:
    """Writes trees of arrays in the background, one at a time.

    With several processes `make_barriers(number)` returns the barriers of a save; an error of one
    process is then raised on all.
    """

    def __init__(self, make_barriers: Callable[[int], Barriers] | None = None):
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(
                use_zarr3=True, type_handler_registry=_handlers_of_arrays()
            ),
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._wait_for_all),
        )
        self._make_barriers = make_barriers
        self._barriers: Barriers | None = None

    def _wait_for_all(self, *, key: str, timeout_ms: int) -> None:
        assert self._barriers is not None  # Orbax calls it if there are several processes
        self._barriers.wait(timeout_ms / 1000)

    def save(self, folder: Path, tree: Any) -> None:
        """Starts to write to a new folder; returns after the copy to the host.

        Then the arrays may be donated. No process may still be in the last save.
        """
        if self._barriers:
            self._barriers.forget()
        if self._make_barriers:
            self._barriers = self._make_barriers(NUM_BARRIERS)
        with self._first_error():
            self._orbax.save(storage.absolute(folder), args=ocp.args.PyTreeSave(tree), force=True)

    def wait(self) -> None:
        """Waits until all processes have written their arrays; raises the first error."""
        with self._first_error():
            self._orbax.wait_until_finished()

    @contextlib.contextmanager
    def _first_error(self) -> Iterator[None]:
        """Drops all errors of a save but the first.

        Orbax raises one per call, and would raise the next in `close`.
        """
        try:
            yield
        except Exception as error:
            if self._barriers:
                self._barriers.fail(first_line(error))
            orbax_patches.end_waits_for_folders()
            with contextlib.suppress(Exception):
                self._orbax.wait_until_finished()
            raise

    def close(self) -> None:
        self._orbax.close()


def fields(state: TrainState) -> dict[str, Any]:
    """Returns the fields of a state except None, which Orbax would save too."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def shapes(tree: Any) -> dict[str, str]:
    """Returns "(shape) dtype" by path; as in Orbax, every container is a dict."""
    return {
        trees.name_of(path): f"{tuple(leaf.shape)} {leaf.dtype}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def shape_of(kind: str) -> tuple[int, ...]:
    """Returns the shape in a "(shape) dtype"."""
    return ast.literal_eval(_shape(kind))


def shapes_of(state: TrainState) -> dict[str, str]:
    return shapes(fields(state))


def check_kinds(abstract: TrainState) -> None:
    """Raises ConfigError if checkpoints do not support an array of states like `abstract`."""
    for path, leaf in jax.tree.leaves_with_path(fields(abstract)):
        name = trees.name_of(path)
        key = "model.build" if name.startswith("params/") else "optim.build"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(
                f"{key}: {name} is a typed PRNG key, which checkpoints cannot store; "
                f"use jax.random.PRNGKey, or no --workdir"
            )
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ConfigError(
                f"{key}: {name} is {leaf.dtype}, which checkpoints cannot store; "
                f"use two real arrays, or no --workdir"
            )
        if leaf.size == 0:
            raise ConfigError(
                f"{key}: {name} has shape {leaf.shape}, no elements, which checkpoints cannot "
                f"store; leave it out, or use no --workdir"
            )


# ---- reading a state ----


def restore(
    directory: Path,
    saved: Mapping[str, str],
    abstract: TrainState,
    *,
    allow_cast: bool = False,
    agree: Agree = _raise,
) -> TrainState:
    """Returns the state in a checkpoint, with the shardings of `abstract`.

    `saved` is the manifest's `arrays`. A run may switch to or from float16: a loss scale that was
    not saved is initialised, and a loss scale that is not needed is dropped; so is a residual,
    which fits any number of batch shards. Raises ConfigError if any other array is missing, has
    another shape or, without `allow_cast`, has another dtype. After reading, each process calls
    `agree` with None, CorruptCheckpoint if a chunk is damaged, or TransientError.
    """
    replicated = abstract.step.sharding
    init_loss_scale = jax.jit(start_loss_scale, out_shardings=LossScale(replicated, replicated))
    has_loss_scale = any(path.startswith("loss_scale") for path in saved)
    target = abstract._replace(
        loss_scale=init_loss_scale.eval_shape() if has_loss_scale else None,
        residual=saved_residual(saved, abstract.residual) or None,
    )
    wanted = shapes(fields(target))
    # A residual that is not wanted is not read, so it is no mismatch.
    compared = {
        path: kind
        for path, kind in saved.items()
        if path in wanted or not path.startswith(RESIDUAL_PREFIX)
    }
    _check_same(compared, wanted, directory, allow_cast)
    state = TrainState(**_read(directory, saved, fields(target), agree))
    state = state._replace(residual=share_residual(state.residual or {}, abstract.residual))
    if abstract.loss_scale is None:
        return state._replace(loss_scale=None)
    return state if has_loss_scale else state._replace(loss_scale=init_loss_scale())


# ---- reading only parameters ----


def restore_params(
    directory: Path,
    saved: Mapping[str, str],
    params: Params,
    patterns: Sequence[str] = ("*",),
    *,
    agree: Agree = _raise,
) -> tuple[Params, list[str], list[str]]:
    """Returns `params` after reading the parameters that match a pattern from a checkpoint.

    Also returns the paths of the parameters left unchanged, and the paths in the checkpoint not
    used. Values are cast to the dtypes of `params`; those of a schedule-free optimizer are its
    averages. A pattern is a glob over paths such as layers/attention/*. The checkpoint may have
    another optimizer, and lack an adapter, which then keeps its initial values. Raises ConfigError
    if another matching parameter is missing or has another shape, or if the checkpoint is corrupt.
    For `agree` see `restore`.
    """
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    available = saved_params(saved)
    wanted = wanted_paths(available, paths, patterns)
    wanted_params = trees.matching(params, wanted.__contains__)
    _check_same(
        {path: kind for path, kind in available.items() if path in wanted},
        shapes(wanted_params),
        directory,
        allow_cast=True,
    )
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        wanted_params,
    )
    try:
        new_params = _read_params(directory, saved, abstract, agree)
    except CorruptCheckpoint as error:
        raise ConfigError(f"{directory}: {error}; use another checkpoint") from error
    unchanged = [path for path in paths if path not in wanted]
    return trees.merge(params, new_params), unchanged, sorted(available.keys() - wanted)


def wanted_paths(
    available: Collection[str], paths: Sequence[str], patterns: Sequence[str]
) -> set[str]:
    """Returns the paths of the parameters to read: those that match a pattern.

    Those of an adapter only if they are `available` in the checkpoint. Raises ConfigError if a
    pattern matches nothing.
    """
    if unmatched := [pattern for pattern in patterns if not fnmatch.filter(paths, pattern)]:
        raise ConfigError(
            f"checkpoint.init_only={','.join(unmatched)}: no parameter has such a name; "
            f"there are {', '.join(paths[:5])}, ..."
        )
    wanted = set()
    for path in paths:
        is_matching = any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
        if is_matching and (path in available or not is_low_rank(path)):
            wanted.add(path)
    return wanted


def saved_params(saved: Mapping[str, str]) -> dict[str, str]:
    """Returns "(shape) dtype" of the parameters among the arrays of a manifest, by path."""
    prefix = "params/"
    return {
        path.removeprefix(prefix): kind for path, kind in saved.items() if path.startswith(prefix)
    }


def read_replicated(
    directory: Path,
    saved: Mapping[str, str],
    paths: Sequence[str],
    mesh: jax.sharding.Mesh,
    *,
    agree: Agree = _raise,
) -> dict[str, jax.Array]:
    """Returns parameters of a checkpoint by path, replicated over the mesh.

    They have float32, or their own dtype if that is wider. `saved` is the manifest's `arrays`.
    Raises ConfigError if the checkpoint is corrupt. For `agree` see `restore`.
    """
    available = saved_params(saved)
    wanted: Params = {}
    for path in paths:
        kind = available[path]
        leaf: Any = jax.ShapeDtypeStruct(
            ast.literal_eval(_shape(kind)),
            jnp.promote_types(_dtype(kind), jnp.float32),
            sharding=NamedSharding(mesh, PartitionSpec()),
        )
        for key in reversed(path.split("/")):
            leaf = {key: leaf}
        wanted = trees.merge(wanted, leaf)
    params, _, _ = restore_params(directory, saved, wanted, agree=agree)
    return {trees.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def _read_params(directory: Path, saved: Mapping[str, str], wanted: Params, agree: Agree) -> Params:
    """Returns the parameters to use: those of the state, or their averages (`state.averages`)."""
    wide = jax.tree.map(
        lambda leaf: leaf.update(dtype=jnp.promote_types(leaf.dtype, jnp.float32)), wanted
    )
    # A schedule-free optimizer keeps `z`, `b1` and `weight_sum` side by side. There may be several,
    # each of some of the parameters.
    optimizer_states: dict[str, Any] = {}  # by path: what to read
    for path, kind in saved.items():
        prefix = path.removesuffix("/b1")
        if prefix == path or f"{prefix}/weight_sum" not in saved:
            continue
        z = trees.matching(wide, lambda name, prefix=prefix: f"{prefix}/z/{name}" in saved)
        if z:  # of parameters that are wanted
            mesh = jax.tree.leaves(z)[0].sharding.mesh
            replicated = NamedSharding(mesh, PartitionSpec())
            b1 = jax.ShapeDtypeStruct((), _dtype(kind), sharding=replicated)
            optimizer_states[prefix] = {"z": z, "b1": b1}
    if not optimizer_states:
        return _read(directory, saved, {"params": wanted}, agree)["params"]
    arrays: Any = {"params": wide}
    for prefix, optimizer_state in optimizer_states.items():
        arrays = trees.merge(arrays, trees.nested(prefix, optimizer_state))
    read = _read(directory, saved, arrays, agree)
    params = read["params"]
    for prefix in optimizer_states:
        optimizer_state = trees.leaf(read, prefix)
        z = optimizer_state["z"]
        x = averages(trees.intersect(params, z), z, optimizer_state["b1"])
        params = trees.merge(params, x)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, wanted)


# ---- both ----


def as_numpy(directory: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by path, on the host."""
    with (
        manifest.reading_chunks(directory),
        _listed_files(directory) as folder,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax,
    ):
        metadata = orbax.metadata(folder).item_metadata
        if metadata is None:
            raise CorruptCheckpoint("the metadata of the arrays is missing")
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        tree = orbax.restore(folder, args=ocp.args.PyTreeRestore(restore_args=on_host))
    leaves = jax.tree.leaves_with_path(tree)
    return {trees.name_of(path): np.asarray(leaf) for path, leaf in leaves}


def _read(directory: Path, saved: Mapping[str, str], wanted: Any, agree: Agree = _raise) -> Any:
    """Reads arrays in their saved dtype, then casts: Orbax itself would cast silently."""
    target = jax.tree.map_with_path(
        lambda path, leaf: leaf.update(dtype=_dtype(saved[trees.name_of(path)])), wanted
    )
    args = ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    arrays = fault = None
    try:
        with _listed_files(directory) as folder, manifest.reading_chunks(directory):
            # Without a Checkpointer, which would wait for processes that failed.
            arrays = ocp.PyTreeCheckpointHandler().restore(folder, args=args)
    except (CorruptCheckpoint, TransientError) as error:
        fault = error
    except OSError as error:  # a run may be removing the files
        fault = manifest.unreadable(directory, error)
    agree(fault)
    return jax.tree.map(
        lambda new, leaf: new if new.dtype == leaf.dtype else new.astype(leaf.dtype),
        arrays,
        wanted,
    )


@contextlib.contextmanager
def _listed_files(directory: Path) -> Iterator[Path]:
    """Yields the folder of the arrays with only listed files: Orbax would read others too."""
    saved = manifest.read(directory)
    if not manifest.unlisted_files(directory, saved):
        yield storage.absolute(directory / FOLDER)
        return
    with storage.workdir_at(directory).only(directory, saved.files.keys()) as folder:
        yield folder / FOLDER


MAX_LISTED = 20  # mismatched arrays that an error message lists


def _check_same(
    saved: Mapping[str, str], wanted: Mapping[str, str], directory: Path, allow_cast: bool
) -> None:
    """Raises ConfigError, with a table, if the saved arrays differ from the wanted ones."""

    def compared(arrays: Mapping[str, str], path: str) -> str:
        kind = arrays.get(path, "absent")
        return _shape(kind) if allow_cast and path in arrays else kind

    # The parameters first: what is wrong with them is wrong with the optimizer's state too.
    paths = sorted(
        saved.keys() | wanted.keys(), key=lambda path: (not path.startswith("params"), path)
    )
    differing = [path for path in paths if compared(saved, path) != compared(wanted, path)]
    if not differing:
        return
    width = max(map(len, differing[:MAX_LISTED]))
    table = [
        f"  {path:{width}}  {saved.get(path, 'absent')} in the checkpoint, "
        f"{wanted.get(path, 'absent')} here"
        for path in differing[:MAX_LISTED]
    ]
    if len(differing) > MAX_LISTED:
        table.append(f"  ... and {len(differing) - MAX_LISTED} more")
    other_shape = [
        path for path in differing if _shape(saved.get(path, "")) != _shape(wanted.get(path, ""))
    ]
    if not other_shape:
        advice = "only dtypes differ: set checkpoint.allow_cast=True, or use the saved dtypes"
    elif not any(path.startswith("params") for path in other_shape):
        advice = (
            "use its optimizer, or load only the parameters: "
            "use another --workdir, with checkpoint.init_from"
        )
    else:
        advice = "use its config, or another --workdir"
    raise ConfigError(
        f"{directory}: {len(differing)} arrays do not match this model and optimizer; {advice}",
        *table,
    )


def _shape(kind: str) -> str:
    return kind.rpartition(" ")[0]


def _dtype(kind: str) -> str:
    return kind.rpartition(" ")[2]


# ---- the residual of compressed gradients ----

RESIDUAL_PREFIX = "residual/"
Residual = Mapping[str, jax.Array]  # by the path of the parameter: (N, ...)


def saved_residual(
    saved: Mapping[str, str], wanted: Residual | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays in `wanted` that were saved, with the saved number of shards.

    `saved` is the manifest's `arrays`. An array of a parameter of another shape is read as it is
    wanted.
    """
    arrays = {}
    for name, leaf in (wanted or {}).items():
        if RESIDUAL_PREFIX + name not in saved:
            continue
        num_shards, *shape = ast.literal_eval(_shape(saved[RESIDUAL_PREFIX + name]))
        if tuple(shape) != leaf.shape[1:]:
            arrays[name] = leaf
            continue
        spec = leaf.sharding.spec
        if num_shards % leaf.shape[0]:
            spec = jax.P(None, *spec[1:])  # the devices along its axes cannot share the rows
        sharding = jax.NamedSharding(leaf.sharding.mesh, spec)
        arrays[name] = leaf.update(shape=(num_shards, *shape), sharding=sharding)
    return arrays


def share_residual(read: Residual, wanted: Residual | None) -> dict[str, jax.Array] | None:
    """Returns the residual for as many shards as `wanted`; zeros for what was not saved."""
    if wanted is None:
        return None
    return {name: _share(read.get(name), leaf) for name, leaf in wanted.items()}


def _share(rows: jax.Array | None, leaf: jax.Array) -> jax.Array:
    """Returns the residual of a parameter for as many shards as `leaf` has rows."""
    if rows is None:
        zeros = jax.jit(
            lambda: jnp.zeros(leaf.shape, leaf.dtype),
            out_shardings=leaf.sharding,
        )
        return zeros()
    if rows.shape == leaf.shape:
        return rows
    share = jax.jit(
        lambda rows: jnp.broadcast_to(rows.sum(0) / leaf.shape[0], leaf.shape),
        out_shardings=leaf.sharding,
    )
    return share(rows)
