"""A new run's parameters from another run's checkpoint: `checkpoint.init_from` and `init_only`."""

from collections.abc import Callable
from pathlib import Path

from meshtrain import checkpoint
from meshtrain.checkpoint import arrays
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import files
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError
from meshtrain.models.base import Params


def source(
    settings: CheckpointConfig, *, tell: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Returns the checkpoint that a new run's parameters come from, if it is to be one."""
    path = Path(settings.init_from)
    try:
        if not settings.init_from:
            return None
        files.reject_huggingface(path)
        return checkpoint.find(path, tell=tell)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={error}") from error


def take(
    params: Params,
    directory: Path,
    saved: Manifest,
    only: str,
    *,
    event: Callable[..., None],
    line: Callable[[str], None],
) -> Params:
    """Returns the parameters with those of a checkpoint that `only` names; tells what is left."""
    patterns = [pattern.strip() for pattern in only.split(",")]
    params, fresh, unused = arrays.restore_params(directory, saved.arrays, params, patterns)
    told = f"parameters of {directory}"
    told += f" · new here: {', '.join(fresh)}" if fresh else ""
    told += f" · not used: {', '.join(unused)}" if unused else ""
    line(told)
    event("init_from", path=str(directory), new=fresh, unused=unused)
    return params
