"""Initialises a new run from another run's checkpoint: `checkpoint.init_from`, `init_only`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from meshtrain.checkpoint import arrays, find, manifest, resume
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import load
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError
from meshtrain.models.base import Params


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
    event: Callable[..., None],
    log: Callable[[str], None],
) -> Params:
    """Returns `params` with the parameters that match `only` read from a checkpoint.

    `only` holds comma-separated patterns. Logs which parameters keep their new initial values, and
    which parameters of the checkpoint are not used.
    """
    patterns = [pattern.strip() for pattern in only.split(",")]
    params, fresh, unused = arrays.restore_params(directory, saved.arrays, params, patterns)
    message = f"parameters of {directory}"
    if fresh:
        message += f" · new here: {', '.join(fresh)}"
    if unused:
        message += f" · not used: {', '.join(unused)}"
    log(message)
    event("init_from", path=str(directory), new=fresh, unused=unused)
    return params
