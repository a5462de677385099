"""The tokenizer of a run: copied into its workdir, so that it is there when the data has moved."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.find import workdir_of
from meshtrain.data import prepared, tokenizer
from meshtrain.errors import ConfigError

FOLDER = "tokenizer"  # in a workdir

HUGGINGFACE_CONFIG = "huggingface.json"  # the config.json of a folder that was converted

# Of a Hugging Face folder, besides its weights and config.json.
FILES = (*tokenizer.FILES, "tokenizer_config.json", "generation_config.json")

FILES += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")

FILES += ("chat_template.jinja",)


def folders(workdir: Path, config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that may hold a run's tokenizer: its own copy, then where that came from.

    A workdir written by `meshtrain convert` has the files of the Hugging Face folder itself.
    """
    return [workdir / FOLDER, workdir, *_sources(config)]


def copy_tokenizer(workdir: Path, config: Mapping[str, Any], known: str) -> None:
    """Copies the tokenizer of the run's data, or of the parameters that it starts from, into the workdir.

    `known` is the digest of the data's tokenizer, or "".
    """
    target, sources = workdir / FOLDER, _sources(config)
    source = next(filter(tokenizer.has_tokenizer, sources), None)
    if (source is None and known != tokenizer.BYTES) or source in (workdir, target):
        return
    with contextlib.suppress(ConfigError):  # a damaged copy is replaced
        if tokenizer.digest_of(target) == (tokenizer.digest_of(source) if source else known):
            return
    entry = tokenizer.entry_of(source) if source else tokenizer.BYTES_ENTRY
    names = [Path(entry["file"]).name] if entry.get("file") else []
    new = target.with_name(target.name + ".new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if entry:
            (new / prepared.MANIFEST).write_text(json.dumps({"tokenizer": entry}, indent=2) + "\n")
        if source:
            copy_files([source, *sources], new, [*names, *FILES, HUGGINGFACE_CONFIG])
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; make room, or repair it") from error


def copy_files(sources: list[Path], target: Path, names: list[str] | tuple[str, ...]) -> None:
    """Copies each file from the first folder that has it."""
    for name in names:
        if found := next((folder / name for folder in sources if (folder / name).is_file()), None):
            shutil.copyfile(found, target / name)


def digest(workdir: Path, config: Mapping[str, Any]) -> str:
    """Returns the digest of a run's tokenizer; "" if it is unknown."""
    return next(filter(None, map(tokenizer.digest_of, folders(workdir, config))), "")


def _sources(config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that a run's tokenizer may come from: its data, the source of its parameters."""
    init_from, data = config["checkpoint"].get("init_from"), config["data"].get("path")
    found = [Path(data)] if data else []
    if own := config["data"].get("tokenizer_path"):
        found = [Path(own), *found]
    found += [Path(path) for path, _ in config["data"].get("mixture", ())]
    if init_from:
        initial = workdir_of(Path(init_from))
        found += [initial / FOLDER, initial]
    return found
