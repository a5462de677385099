"""Initialises a new run from another run's checkpoint: `checkpoint.init_from`, `init_only`."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from meshtrain.checkpoint import arrays, find, manifest, resume
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import load
from meshtrain.config.schema import AdapterConfig, CheckpointConfig
from meshtrain.errors import ConfigError
from meshtrain.models import trees
from meshtrain.models.base import Params
from meshtrain.models.lora_layer import A, B, adapted_layers, is_low_rank
from meshtrain.models.lora_merge import KERNEL, add_updates


def find_source(
    settings: CheckpointConfig, identity: Mapping[str, str], *, log: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Returns the checkpoint named by `checkpoint.init_from`, or None if that is empty.

    Logs if its run had another tokenizer than the data of this run; `identity` has their digests.
    """
    if not settings.init_from:
        return None
    try:
        path = find.download_metadata(Path(settings.init_from))
        load.reject_huggingface(path)
        directory, saved = find.find_valid(path, log=log, verify=manifest.check)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={error}") from error
    changes = resume.identity_changes(saved, identity)
    if "tokenizer" in changes:
        then, now = changes["tokenizer"]
        log(
            f"tokenizer   differs from that of {directory} (digest {now[:12]} instead of "
            f"{then[:12]}), so its embeddings belong to other tokens"
        )
    return directory, saved


def load_params(
    params: Params,
    directory: Path,
    saved: Manifest,
    only: str,
    *,
    adapter: AdapterConfig,
    event: Callable[..., None],
    log: Callable[[str], None],
) -> Params:
    """Returns `params` with the parameters that match `only` read from a checkpoint.

    `only` holds comma-separated patterns. If the checkpoint has an adapter, the run starts as the
    model with this adapter: A and B are read if `adapter`, that of this run, has the same layers,
    rank and alpha; otherwise their product is added to the kernels. Logs what is loaded, which
    parameters keep their new initial values, and which parameters of the checkpoint are not used.
    """
    patterns = [pattern.strip() for pattern in only.split(",")]
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    own = _Adapter(adapter.rank, adapter.alpha, frozenset(adapted_layers(paths)))
    source = _adapter_of(saved)
    if source is None or source == own:
        params, fresh, unused = arrays.restore_params(directory, saved.arrays, params, patterns)
    else:
        others = {path: kind for path, kind in saved.arrays.items() if not is_low_rank(path)}
        params, fresh, unused = arrays.restore_params(directory, others, params, patterns)
    loaded = {*paths} - {*fresh}

    # ---- the checkpoint's adapter, of the layers that match `only` ----
    found = None  # what is done with it
    if source is not None and source == own:
        if any(f"{layer}/{A}" in loaded for layer in source.layers):
            found = "loaded"
    elif source is not None:
        layers = sorted(layer for layer in source.layers if layer + KERNEL in loaded)
        unused = sorted([*unused, *_factor_paths(source.layers.difference(layers))])
        if layers:
            found = "merged"
            mesh = jax.tree.leaves(params)[0].sharding.mesh
            factors = arrays.read_replicated(directory, saved.arrays, _factor_paths(layers), mesh)
            scale = source.alpha / source.rank
            params = add_updates(params, factors, layers, scale=scale)

    message = f"parameters of {directory}"
    if source is not None and found:
        how = {"loaded": "", "merged": " merged into the kernels"}[found]
        message += f", with its adapter (rank {source.rank}, alpha {source.alpha:g}){how}"
    if fresh:
        message += f" · new here: {', '.join(fresh)}"
    if unused:
        message += f" · not used: {', '.join(unused)}"
    log(message)
    event("init_from", path=str(directory), new=fresh, unused=unused, adapter=found)
    return params


def _factor_paths(layers: Iterable[str]) -> list[str]:
    return [f"{layer}/{name}" for layer in layers for name in (A, B)]


class _Adapter(NamedTuple):
    """What must be equal for A and B of one run to have the same meaning in another."""

    rank: int
    alpha: float
    layers: frozenset[str]


def _adapter_of(saved: Manifest) -> _Adapter | None:
    """Returns the adapter of a checkpoint; None if it has none, or one that no config describes."""
    settings = saved.config.get("adapter", {})
    if not settings.get("rank"):
        return None
    layers = adapted_layers(arrays.saved_params(saved.arrays))
    return _Adapter(settings["rank"], settings["alpha"], frozenset(layers))
