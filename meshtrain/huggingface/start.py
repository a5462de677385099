"""Starts from a Hugging Face folder itself, without a conversion.

`checkpoint.init_from=FOLDER` begins a run with its parameters, `--config=FOLDER` also has its
model, and `evaluate` and `generate` accept it as a workdir.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshtrain.checkpoint import resume
from meshtrain.checkpoint import vocabulary as vocabularies
from meshtrain.checkpoint.vocabulary import Growth, Vocabulary
from meshtrain.cluster import distributed
from meshtrain.config import load
from meshtrain.config.schema import Config
from meshtrain.data import tokenizer
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, weights
from meshtrain.huggingface.families.base import BUILD, Section
from meshtrain.models.base import Params
from meshtrain.models.lora_layer import is_low_rank

INIT_FROM = "checkpoint.init_from"


def folder_of(path: str) -> Path | None:
    """Returns the Hugging Face folder that a path names, or None if it is something else."""
    folder = Path(os.path.expanduser(path))
    return folder if path and load.is_huggingface(folder) else None


def name_of(folder: Path) -> str:
    """Returns the name of a model on the hub if the folder is in the hub's cache, else its path."""
    path = folder.absolute()
    cached = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", str(path))
    return f"{cached[1]}/{cached[2]}" if cached else str(path)


# ---- a config from a folder ----


def set_model(config: Any, folder: Path) -> None:
    """Sets the section `model` of a ConfigDict to that of a folder, and what depends on it."""
    weights.check_sizes(folder)
    set_section(config, weights.model_section(folder))
    config.checkpoint.init_from = str(folder.absolute())


def set_stored_model(config: Any, folder: Path) -> None:
    """Does the same for a config with which the folder is only read, in the dtype of its files."""
    set_model(config, folder)
    dtypes = weights.dtypes_in(folder)
    trained = [dtype for name, dtype in dtypes.items() if not name.endswith(weights.ROUTER_BIAS)]
    set_dtype(config, stored_dtype(trained))


def set_section(config: Any, section: Section) -> None:
    """Sets the section `model` of a config, and the keys of its data that depend on it."""
    config.model = section
    if "vocab_size" in config.data:
        config.data.vocab_size = section["vocab_size"]
    if config.data.get("seq_len", 0) > section["max_seq_len"]:
        config.data.seq_len = section["max_seq_len"]


def set_dtype(config: Any, dtype: np.dtype) -> None:
    config.train.param_dtype = dtype.name
    config.optim.moment_dtype = dtype.name


def stored_dtype(dtypes: Iterable[np.dtype], flag: str | None = None) -> np.dtype:
    """Returns the dtype of an imported run's parameters.

    It is the smallest that represents every tensor exactly, unless --dtype, `flag`, is given.
    """
    if flag == "float16":
        raise ConfigError(
            "--dtype=float16: a run stores parameters in float32 or bfloat16; use one of them"
        )
    if flag:
        return np.dtype(flag)
    distinct = {*dtypes}
    if np.dtype(np.float64) in distinct:
        raise ConfigError("--dtype: some tensors are float64; set --dtype=float32 to round them")
    dtype = np.dtype(jnp.result_type(*distinct) if distinct else np.float32)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


# ---- parameters from a folder ----


class Start(NamedTuple):
    """A folder that a new run takes parameters from."""

    folder: Path
    section: Section  # of the run; with the vocabulary of the folder if that grows
    patterns: Sequence[str]  # of the parameters to take
    growth: Growth | None

    def has(self, path: str) -> bool:
        """Returns whether the parameter at this path is taken from the folder."""
        is_wanted = any(fnmatch.fnmatchcase(path, pattern) for pattern in self.patterns)
        return is_wanted and not is_low_rank(path)


def find(
    cfg: Config,
    identity: Mapping[str, str],
    params: Params,
    *,
    vocabulary: Vocabulary,
    log: Callable[[str], None],
) -> Start | None:
    """Returns the folder in `checkpoint.init_from`; None if that names something else.

    All processes call it. Raises ConfigError if it does not fit `params`, which may be abstract;
    only headers are read. It fits if `vocabulary`, that of the run, has more tokens. Logs the keys
    of the model that differ from those of its config.json, and another tokenizer than that of the
    data; `identity` has the digest of that one.
    """
    path = cfg.checkpoint.init_from
    folder = folder_of(path)
    if folder is None:
        return None
    with distributed.raise_on_all_processes():
        patterns = [pattern.strip() for pattern in cfg.checkpoint.init_only.split(",")]
        section = _section_of(cfg)
        growth = vocabularies.growth(vocabulary, _tokens_in(folder))
        if growth:
            section["vocab_size"] = growth.old
        start = Start(folder, section, patterns, growth)
        differing = _check(start, params)
    for difference in differing:
        log(f"init_from   {difference}, as {folder / config_json.NAME} has")
    now = identity.get("tokenizer")
    digests = tokenizer.digests_of(folder)
    if now and digests and now not in digests:
        log(
            f"tokenizer   differs from that of {folder} (digest {now[:12]} instead of "
            f"{digests[0][:12]}), so its embeddings belong to other tokens"
        )
    return start


def _section_of(cfg: Config) -> Section:
    if cfg.model.build != BUILD:
        raise ConfigError(
            f"{INIT_FROM}={cfg.checkpoint.init_from}: is a Hugging Face folder, and "
            f"model.build={cfg.model.build} is another model; use {BUILD}"
        )
    return {**config_json.SECTION_DEFAULTS, **cfg.model.options, "build": BUILD}


def _tokens_in(folder: Path) -> int:
    """Returns the number of tokens of the model in a folder."""
    try:
        return weights.model_section(folder)["vocab_size"]
    except ConfigError as error:
        raise ConfigError(*(f"{INIT_FROM}={fault}" for fault in error.faults)) from error


def _check(start: Start, params: Params) -> list[str]:
    """Returns how the run's model differs from the folder's; raises ConfigError for other sizes."""
    folder = start.folder
    paths = weights.paths_of(params)
    for pattern in start.patterns:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"checkpoint.init_only={pattern}: no parameter has such a name; there are "
                f"{', '.join(paths[:5])}, ..."
            )
    try:
        weights.check_sizes(folder)
        differing = config_json.differences(weights.model_section(folder), start.section)
    except ConfigError as error:
        raise ConfigError(*(f"{INIT_FROM}={fault}" for fault in error.faults)) from error
    try:
        weights.check(folder, params, start.section, start.has)
    except ConfigError as error:
        if not differing:
            first, *table = error.faults
            raise ConfigError(f"{INIT_FROM}={first}", *table) from error
        # The keys say more than the tensors of other shapes.
        raise ConfigError(
            *(f"{difference}, as {folder} has" for difference in differing),
            f"{INIT_FROM}={folder}: is another model; use --config={folder}, or with "
            f"checkpoint.init_only the parameters that fit",
        ) from error
    return differing


def load_params(
    params: Params,
    start: Start,
    *,
    event: Callable[..., None],
    log: Callable[[str], None],
) -> Params:
    """Returns `params` with those of the folder; each device reads only its shards.

    All processes call it. `params` of the folder may be abstract, so that they take no memory.
    """
    like = params
    with distributed.raise_on_all_processes():
        params = weights.read(start.folder, params, start.section, start.has)
    message = f"parameters of {start.folder}"
    paths = weights.paths_of(params)
    fresh = [path for path in paths if not start.has(path)]
    params = vocabularies.grow(params, like, {*paths} - {*fresh}, start.growth)
    if start.growth:
        message += f" · {start.growth}"
    if fresh:
        message += f" · new here: {', '.join(fresh)}"
    log(message)
    event("init_from", path=str(start.folder), new=fresh, unused=[], adapter=None)
    return params


def read_params(cfg: Config, folder: Path, params: Params, *, tokenizer_digest: str) -> Params:
    """Returns the parameters of a folder, for inference, like abstract `params`.

    Raises ConfigError if `tokenizer_digest`, of the one in use, is not that of the folder, or if
    the config has another model.
    """
    section = _section_of(cfg)
    faults = [
        f"{difference}, as {folder / config_json.NAME} has; restore the value"
        for difference in config_json.differences(weights.model_section(folder), section)
    ]
    digests = tokenizer.digests_of(folder)
    if tokenizer_digest and digests and tokenizer_digest not in digests:
        faults.append(
            f"tokenizer: {resume.IDENTITY['tokenizer']} than {folder} has (digest "
            f"{tokenizer_digest[:12]} instead of {digests[0][:12]}); use that of the folder"
        )
    if faults:
        raise ConfigError(*faults)
    with distributed.raise_on_all_processes():
        return weights.read(folder, params, section)
