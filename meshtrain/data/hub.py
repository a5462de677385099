"""Models and tokenizers that are named as on the Hugging Face hub: the command that downloads them.

`download` runs the same through huggingface_hub, which honours HF_TOKEN, HF_HOME, HF_ENDPOINT and
HF_HUB_OFFLINE.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshtrain import errors
from meshtrain.errors import ConfigError

# Patterns of the files that are read. Without subfolders, which hold the model in other formats.
MODEL = ("*.json", "model*.safetensors", "tokenizer.model", "merges.txt", "*.jinja")
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "*.jinja")
SUBFOLDERS = "*/*"

OLDEST = (2, 4)  # version of huggingface_hub that the extra hub accepts

NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)
MAX_NAME_CHARS = 96
FILE_SUFFIXES = (".json", ".model", ".safetensors", ".git")  # of a path, not of a name


def is_name(text: str) -> bool:
    """Returns whether the hub may have a model of this name; a relative path can look the same."""
    return (
        NAME.fullmatch(text) is not None
        and len(text) <= MAX_NAME_CHARS
        and "--" not in text
        and ".." not in text
        and not text.endswith(FILE_SUFFIXES)
    )


def name_faults(key: str, text: str) -> list[str]:
    """Returns why --download does not accept the name `text`; `key` is its flag, or empty."""
    if os.path.lexists(text):
        return [f"--download: {key}{text} exists here; leave --download out to use it"]
    if not is_name(text):
        return [
            f"--download: {key}{text} is no name on the Hugging Face hub; use one such as "
            f"HuggingFaceTB/SmolLM2-135M"
        ]
    return []


def folder_of(name: str) -> str:
    """Returns the folder that `command` downloads to: models/ and the last part of the name."""
    return f"models/{name.rpartition('/')[2]}"


def command(name: str, patterns: Sequence[str]) -> str:
    """Returns the shell command that downloads the files that match `patterns`."""
    words = ["hf", "download", name, "--local-dir", folder_of(name)]
    for pattern in patterns:
        words += ["--include", pattern]
    return shlex.join([*words, "--exclude", SUBFOLDERS])


def download(
    name: str, patterns: Sequence[str], *, required: str, advised: Sequence[str] = ()
) -> Path:
    """Downloads the files that match `patterns` to the cache of the hub, and returns their folder.

    Files that the cache has are not downloaded again. Raises ConfigError with the way out if the
    hub has no such model or no file that matches `required`, wants a login, or cannot be reached;
    then the command that it names downloads the files that match `advised` (default: `patterns`).
    """
    hub = _huggingface_hub()
    hub_errors = errors.import_optional("huggingface_hub.errors", "hub")
    api = hub.HfApi()
    address = api.endpoint
    try:
        folder = api.snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=SUBFOLDERS)
    except hub_errors.GatedRepoError:
        raise ConfigError(
            f"{name}: is gated; accept its terms at {address}/{name}, then set HF_TOKEN, or run: "
            f"hf auth login"
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name}: {address} has no public model of this name; correct it, or for a private "
            f"one set HF_TOKEN, or run: hf auth login"
        ) from None
    except hub_errors.LocalEntryNotFoundError as error:
        by_hand = command(name, advised or patterns)
        elsewhere = f"or copy the folder that this command makes elsewhere: {by_hand}"
        if hub.is_offline_mode():
            fault = f"HF_HUB_OFFLINE is set, and the cache lacks its files; unset it, {elsewhere}"
        else:
            reason = errors.first_line(error.__cause__ or error)
            fault = f"{address} cannot be reached: {reason}; try again, {elsewhere}"
        raise ConfigError(f"{name}: {fault}") from error
    except Exception as error:  # of its client, whose classes depend on its version; a full disk
        raise ConfigError(
            f"{name}: cannot be downloaded from {address}: {errors.first_line(error)}; try again: "
            f"files that are complete are kept"
        ) from error
    if not any(Path(folder).glob(required)):
        raise ConfigError(f"{name}: has no {required} on the hub; choose a model that has")
    return Path(folder)


def _huggingface_hub() -> Any:
    """Returns the package; raises ConfigError if it is missing, or older than OLDEST."""
    hub = errors.import_optional("huggingface_hub", "hub")
    version = tuple(int(part) for part in hub.__version__.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"the package huggingface_hub {hub.__version__} is too old: --download needs {oldest} "
            f"or newer; {errors.install_command('hub')}"
        )
    return hub
