"""Initialises a new run from another run's checkpoint: `checkpoint.init_from`, `init_only`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from meshtrain import storage
from meshtrain.checkpoint import arrays, find, manifest, resume
from meshtrain.checkpoint import vocabulary as vocabularies
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.checkpoint.vocabulary import Growth, Vocabulary
from meshtrain.cluster import distributed
from meshtrain.config import load
from meshtrain.config.schema import AdapterConfig, CheckpointConfig
from meshtrain.errors import ConfigError, TransientError
from meshtrain.models import trees
from meshtrain.models.base import Params
from meshtrain.models.lora_layer import A, B, adapted_layers, is_low_rank
from meshtrain.models.lora_merge import KERNEL, add_updates


class Source(NamedTuple):
    """Where the parameters of a new run come from."""

    path: Path  # of a run, or of one of its checkpoints
    directory: Path  # of the checkpoint


def find_source(
    settings: CheckpointConfig,
    identity: Mapping[str, str],
    params: Params,
    *,
    adapter: AdapterConfig,
    vocabulary: Vocabulary,
    log: Callable[[str], None],
) -> Source | None:
    """Returns the checkpoint named by `checkpoint.init_from`, or None if that is empty.

    All processes call it; process 0 chooses, since a run may be saving there. Raises ConfigError
    if the checkpoint does not fit `params`, which may be abstract; nothing of the arrays is read
    yet. It fits if `vocabulary`, that of this run, has more tokens. Logs if its run had another
    tokenizer than the data of this run; `identity` has their digests.
    """
    if not settings.init_from:
        return None

    def choose() -> str:
        directory, saved = find.find_valid(path, log=log, verify=manifest.check)
        like_saved = _as_saved(params, saved, _growth(saved, vocabulary))
        _check_shapes(directory, saved, like_saved, settings.init_only, adapter)
        changes = resume.identity_changes(saved, identity)
        if "tokenizer" in changes:
            then, now = changes["tokenizer"]
            log(
                f"tokenizer   differs from that of {directory} (digest {now[:12]} instead of "
                f"{then[:12]}), so its embeddings belong to other tokens"
            )
        return str(directory.relative_to(path))

    try:
        with distributed.raise_on_all_processes():
            path = find.download_metadata(Path(settings.init_from))
            if load.is_huggingface(path):  # one on a disk is read by huggingface/start.py
                raise ConfigError(
                    f"{path}: is a Hugging Face folder on an object store; copy it to a disk"
                )
        directory = path / distributed.on_first_process(choose)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={error}") from error
    if distributed.process_id() > 0:
        storage.workdir_at(directory).refresh(directory)  # what this process downloaded is older
    return Source(path, directory)


def load_params(
    params: Params,
    source: Source,
    only: str,
    *,
    look_again: Callable[[], Source | None],
    adapter: AdapterConfig,
    vocabulary: Vocabulary,
    event: Callable[..., None],
    log: Callable[[str], None],
) -> Params:
    """Returns `params` with the parameters that match `only` read from a checkpoint.

    All processes call it. If a run removes the checkpoint in the meantime, the one is read that
    `look_again` then returns. `only` holds comma-separated patterns. If the checkpoint has an
    adapter, the run starts as the model with this adapter: A and B are read if `adapter`, that of
    this run, has the same layers, rank and alpha; otherwise their product is added to the kernels.
    Logs what is loaded, which parameters keep their new initial values, and which parameters of the
    checkpoint are not used.
    """
    for _ in range(find.MAX_LOOKS):
        try:
            return _load_params(
                params,
                source.directory,
                only,
                adapter=adapter,
                vocabulary=vocabulary,
                event=event,
                log=log,
            )
        except ConfigError:  # on all processes
            is_named = source.directory == source.path  # by the user: there is no other
            # Asked on each process, because it downloads what the run has saved since.
            if is_named or not any(distributed.gather(find.was_removed(source.directory))):
                raise
        newer = look_again()
        assert newer is not None  # as at first
        source = newer
    raise find.too_fast(source.path)


def _load_params(
    params: Params,
    directory: Path,
    only: str,
    *,
    adapter: AdapterConfig,
    vocabulary: Vocabulary,
    event: Callable[..., None],
    log: Callable[[str], None],
) -> Params:
    """Returns what `load_params` does. Raises ConfigError on all processes if one cannot read."""
    own = _adapter_of_run(params, adapter)
    found = None  # what is done with the checkpoint's adapter
    try:
        saved = _read_manifest(directory)
        source = _adapter_of(saved)
        growth = _growth(saved, vocabulary)
        like = params
        params, fresh, unused = arrays.restore_params(
            directory,
            _comparable(saved, own),
            _as_saved(params, saved, growth),
            _patterns(only),
            agree=_agree,
        )
        loaded = {trees.name_of(path) for path, _ in jax.tree.leaves_with_path(params)} - {*fresh}
        params = vocabularies.grow(params, like, loaded, growth)

        # ---- the checkpoint's adapter, of the layers that match `only` ----
        if source is not None and source == own:
            if any(f"{layer}/{A}" in loaded for layer in source.layers):
                found = "loaded"
        elif source is not None:
            layers = sorted(layer for layer in source.layers if layer + KERNEL in loaded)
            unused = sorted([*unused, *_factor_paths(source.layers.difference(layers))])
            if layers:
                found = "merged"
                mesh = jax.tree.leaves(params)[0].sharding.mesh
                paths = _factor_paths(layers)
                factors = arrays.read_replicated(directory, saved.arrays, paths, mesh, agree=_agree)
                params = add_updates(params, factors, layers, scale=source.scale)
    except CorruptCheckpoint as error:
        raise ConfigError(f"{directory}: {error}; use another checkpoint") from error

    message = f"parameters of {directory}"
    if source is not None and found:
        how = {"loaded": "", "merged": " merged into the kernels"}[found]
        message += f", with its adapter (rank {source.rank}, alpha {source.alpha:g}){how}"
    if growth:
        message += f" · {growth}"
    if fresh:
        message += f" · new here: {', '.join(fresh)}"
    if unused:
        message += f" · not used: {', '.join(unused)}"
    log(message)
    event("init_from", path=str(directory), new=fresh, unused=unused, adapter=found)
    return params


# Processes read different chunks: all raise the first error of any.
_agree = partial(distributed.raise_first, kinds=(TransientError, CorruptCheckpoint))


def _read_manifest(directory: Path) -> Manifest:
    """Returns the manifest. Raises on all processes if one cannot read it."""
    saved = fault = None
    try:
        saved = manifest.read(directory)
    except (TransientError, CorruptCheckpoint) as error:
        fault = error
    _agree(fault)
    assert saved is not None
    return saved


def _patterns(only: str) -> list[str]:
    return [pattern.strip() for pattern in only.split(",")]


# ---- shapes, before anything is compiled ----


def _growth(saved: Manifest, vocabulary: Vocabulary) -> Growth | None:
    model = saved.config.get("model")
    old = model.get("vocab_size") if isinstance(model, Mapping) else None
    return vocabularies.growth(vocabulary, old)


def _as_saved(params: Params, saved: Manifest, growth: Growth | None) -> Params:
    """Returns `params`, those with a row for each token as they are in the checkpoint."""
    kinds = arrays.saved_params(saved.arrays)
    shapes = {path: arrays.shape_of(kind) for path, kind in kinds.items()}
    return vocabularies.as_saved(params, shapes, growth)


def _check_shapes(
    directory: Path, saved: Manifest, params: Params, only: str, adapter: AdapterConfig
) -> None:
    """Raises ConfigError if a parameter that matches `only` has another shape in the checkpoint.

    It names the first one, and patterns of those that fit.
    """
    there = _shapes(arrays.saved_params(_comparable(saved, _adapter_of_run(params, adapter))))
    here = _shapes(arrays.shapes(params))
    wanted = arrays.wanted_paths(there, [*here], _patterns(only))
    differing = [path for path in here if path in wanted and there.get(path) != here[path]]
    if not differing:
        return
    first = differing[0]
    found = f"has shape {there[first]} there" if first in there else "is not there"
    others = f", and {len(differing) - 1} more do not fit" if len(differing) > 1 else ""
    fits = {path: shape == there.get(path) for path, shape in here.items() if not is_low_rank(path)}
    fitting = ",".join(_patterns_of(fits))
    remedy = "use the sizes of that run"
    if fitting:
        remedy += f', or load only what fits, --config.checkpoint.init_only="{fitting}"'
    raise ConfigError(
        f"{directory}: parameter {first} has shape {here[first]} here and {found}{others}; {remedy}"
    )


def _shapes(kinds: Mapping[str, str]) -> dict[str, str]:
    return {path: kind.rpartition(" ")[0] for path, kind in kinds.items()}


def _patterns_of(fits: Mapping[str, bool], prefix: str = "") -> Iterator[str]:
    """Yields the fewest patterns that match the paths that fit, and no others."""
    children = dict.fromkeys(path.removeprefix(prefix).partition("/")[0] for path in fits)
    for child in children:
        path = prefix + child
        below = {name: fit for name, fit in fits.items() if name.startswith(f"{path}/")}
        if fits.get(path) or (below and all(below.values())):
            yield f"{path}/*" if below else path
        else:
            yield from _patterns_of(below, f"{path}/")


# ---- adapters ----


def _comparable(saved: Manifest, own: "_Adapter") -> Mapping[str, str]:
    """Returns the arrays of a checkpoint; without its adapter if this run has another one."""
    if _adapter_of(saved) in (None, own):
        return saved.arrays
    return {path: kind for path, kind in saved.arrays.items() if not is_low_rank(path)}


def _adapter_of_run(params: Params, adapter: AdapterConfig) -> "_Adapter":
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    return _Adapter(adapter.rank, adapter.alpha, adapter.rslora, frozenset(adapted_layers(paths)))


def _factor_paths(layers: Iterable[str]) -> list[str]:
    return [f"{layer}/{name}" for layer in layers for name in (A, B)]


class _Adapter(NamedTuple):
    """What must be equal for A and B of one run to have the same meaning in another."""

    rank: int
    alpha: float
    rslora: bool
    layers: frozenset[str]

    @property
    def scale(self) -> float:
        return AdapterConfig(rank=self.rank, alpha=self.alpha, rslora=self.rslora).scale


def _adapter_of(saved: Manifest) -> _Adapter | None:
    """Returns the adapter of a checkpoint; None if it has none, or one that no config describes."""
    settings = saved.config.get("adapter", {})
    if not settings.get("rank"):
        return None
    layers = adapted_layers(arrays.saved_params(saved.arrays))
    rslora = settings.get("rslora", False)
    return _Adapter(settings["rank"], settings["alpha"], rslora, frozenset(layers))
