"""The tokenizer of a run: copied into its workdir, so that it is there when the data has moved."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import foreign, storage
from meshtrain.checkpoint.find import workdir_of
from meshtrain.config import load, paths
from meshtrain.data import prepared, tokenizer
from meshtrain.data.remote import local_folder
from meshtrain.errors import ConfigError

FOLDER = "tokenizer"  # in a workdir
HUGGINGFACE_CONFIG = "huggingface.json"  # the config.json of a folder that was converted
HUGGINGFACE_NAME = "config.json"  # its name in that folder
GENERATION_CONFIG = "generation_config.json"

# Of a Hugging Face folder, besides its weights and config.json.
FILES = (
    *tokenizer.FILES,
    "tokenizer_config.json",
    GENERATION_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def folders(workdir: Path, config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that may hold a run's tokenizer: its own copy, then where that came from.

    A workdir written by `meshtrain convert` has the files of the Hugging Face folder itself.
    """
    return [workdir / FOLDER, workdir, *_sources(config)]


def imported_config(workdir: Path, config: Mapping[str, Any]) -> Path | None:
    """Returns the config.json of the imported model that a run began with; None: of none.

    `workdir` may be a Hugging Face folder itself.
    """
    files = [folder / HUGGINGFACE_CONFIG for folder in folders(workdir, config)]
    for folder in (workdir, Path(config["checkpoint"].get("init_from") or workdir)):
        if load.is_huggingface(folder):
            files.append(folder / HUGGINGFACE_NAME)
    return next(filter(Path.is_file, files), None)


def with_tokenizer(folders: Iterable[Path], digest: str) -> list[Path]:
    """Returns the folders without those that have another tokenizer, with other ids."""
    fitting = []
    for folder in folders:
        digests = tokenizer.digests_of(folder)
        if not digests or digest in digests:
            fitting.append(folder)
    return fitting


def listed_end_tokens(folders: Sequence[Path]) -> list[int]:
    """Returns the ids that files list as the ends of a text; none if no file lists any.

    As in transformers, generation_config.json comes before the config.json of an imported model.
    """
    for name in (GENERATION_CONFIG, HUGGINGFACE_CONFIG, HUGGINGFACE_NAME):
        for folder in folders:
            if name == HUGGINGFACE_NAME and not load.is_huggingface(folder):
                continue
            if tokens := _end_tokens_in(folder / name):
                return tokens
    return []


def generation_config(folders: Iterable[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Returns the first generation_config.json that can be read, and its object; None: no file."""
    for folder in folders:
        try:
            return folder / GENERATION_CONFIG, foreign.read_json(folder / GENERATION_CONFIG)
        except (OSError, ValueError):
            continue
    return None


def _end_tokens_in(file: Path) -> list[int]:
    try:
        config = foreign.read_json(file)
        language_model = config.get("text_config") or {}  # of a multimodal model
        tokens = config.get("eos_token_id", language_model.get("eos_token_id"))
    except (OSError, ValueError, AttributeError):
        return []
    if not isinstance(tokens, list):
        tokens = [tokens]
    return [token for token in tokens if type(token) is int and token >= 0]


def copy_tokenizer(workdir: Path, config: Mapping[str, Any], known: str) -> None:
    """Copies the tokenizer of the run's data, or of its initial parameters, into the workdir.

    `known` is the digest of the data's tokenizer, or "".
    """
    target = workdir / FOLDER
    sources = _sources(config)
    source = next(filter(tokenizer.has_tokenizer, sources), None)
    has_none = source is None and known != tokenizer.BYTES
    if has_none or source in (workdir, target):
        return
    with contextlib.suppress(ConfigError):  # a damaged copy is replaced
        if tokenizer.digest_of(target) == (tokenizer.digest_of(source) if source else known):
            return
    entry = tokenizer.entry_of(source) if source else tokenizer.BYTES_ENTRY
    named_files = [Path(entry["file"]).name] if entry.get("file") else []
    new = target.with_name(target.name + ".new")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        if entry:
            (new / prepared.MANIFEST).write_text(
                json.dumps({"tokenizer": entry}, indent=2) + "\n", encoding="utf-8"
            )
        if source:
            # What belongs to another tokenizer, such as ids of special tokens, is not copied.
            fitting = with_tokenizer(sources, tokenizer.digest_of(source))
            copy_files([source, *fitting], new, [*named_files, *FILES, HUGGINGFACE_CONFIG])
            start = Path(config["checkpoint"].get("init_from") or workdir)
            if start in fitting and load.is_huggingface(start):
                shutil.copyfile(start / HUGGINGFACE_NAME, new / HUGGINGFACE_CONFIG)
        for path in (*new.iterdir(), new):
            storage.sync(path)
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; make room, or repair it") from error


def copy_files(sources: Iterable[Path], target: Path, names: Iterable[str]) -> None:
    """Copies each file from the first folder that has it."""
    for name in names:
        for folder in sources:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
                break


def digest(workdir: Path, config: Mapping[str, Any]) -> str:
    """Returns the digest of a run's tokenizer; "" if it is unknown."""
    for folder in folders(workdir, config):
        if known := tokenizer.digest_of(folder):
            return known
    return ""


def _sources(config: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that a run's tokenizer may come from: data, initial parameters."""
    data = config["data"]
    # That of chat data first: its path has none.
    named = [data.get("tokenizer_path"), *paths.of_data(data)]
    sources = [local_folder(path) for path in dict.fromkeys(named) if path]
    if init_from := config["checkpoint"].get("init_from"):
        run = workdir_of(Path(init_from))
        sources += [run / FOLDER, run]
    return sources
