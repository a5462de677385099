"""Writes what an export says about text: its tokenizer, and the tokens that begin and end a text.

transformers generates until a token of `eos_token_id`, in generation_config.json or config.json.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain import foreign
from meshtrain.checkpoint import run_tokenizer
from meshtrain.data import chat_template
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json
from meshtrain.huggingface.families.base import Config

# All versions of transformers know this name of the class that reads a tokenizer.json as it is.
CLASS = "PreTrainedTokenizerFast"
NEW_CLASS = "TokenizersBackend"  # the name that transformers 5 writes, and 4 does not know


@dataclass(frozen=True)
class TextFiles:
    """The files of a run's tokenizer, and the tokens that they do not tell."""

    folders: list[Path]  # that have the files, all of the same tokenizer
    tokenizer: Tokenizer | None  # None: there is none, or none that can be read
    is_imported: bool  # whether the files are those of a model that was not trained further
    begin: int | None  # the token before a text; None: as the files say
    ends: list[int]  # the tokens that end a text; none: as the files say
    generation: dict[str, Any]  # generation_config.json
    notes: list[str]  # what could not be found out, one line each


def find(
    folders: Iterable[Path],
    config: Mapping[str, Any],
    *,
    is_imported: bool,
    ends_of_replies: Callable[[Tokenizer], list[int]],
) -> TextFiles:
    """Returns the text files of a run; `folders` are those of `run_tokenizer.folders`.

    A text ends with a token that the run's files list, that ends a document of the data, or that
    ends a reply in a chat. The files of an imported model that list any are right as they are.
    """
    folders = [*folders]
    source = next(filter(tokenizers.has_tokenizer, folders), None)
    if source is not None:
        folders = run_tokenizer.with_tokenizer(folders, tokenizers.digest_of(source))
    notes = []
    used = None
    try:
        used = tokenizers.load(source) if source is not None else None
    except ConfigError as error:
        notes.append(f"the export may not say what ends a text: {error}")

    ends = run_tokenizer.listed_end_tokens(folders)
    begin = None
    if is_imported and ends:
        ends = []
    else:
        ends += _ends_of_documents(used, config["data"])
        try:
            ends += ends_of_replies(used) if used is not None else []
        except ConfigError as error:
            notes.append(f"the export may not say what ends a reply in a chat: {error}")
        begin = used.bos if used is not None and used.adds_bos else None

    generation = {}
    files = [folder / run_tokenizer.GENERATION_CONFIG for folder in folders]
    if file := next(filter(Path.is_file, files), None):
        try:
            generation = chat_template.read_json(file)
        except ConfigError as error:
            notes.append(f"{error}; the export has another one")
    return TextFiles(
        folders,
        used,
        is_imported=is_imported,
        begin=begin,
        ends=[*dict.fromkeys(ends)],
        generation=generation,
        notes=notes,
    )


def _ends_of_documents(used: Tokenizer | None, data: Mapping[str, Any]) -> list[int]:
    eos = used.eos if used is not None else None
    return [token for token in (eos, data.get("separator")) if token is not None and token >= 0]


def with_token_ids(config: Config, text: TextFiles, original: Path | None) -> Config:
    """Returns a config.json with the ids of the tokens that begin and end a text.

    `original` is the config.json that the model was imported with. Its ids are left out if they
    are of another tokenizer.
    """
    ids: Config = {}
    if original is not None and original.parent not in text.folders:
        ids |= config_json.NULL_TOKEN_IDS
    return config | ids | _token_ids(text)


def _token_ids(text: TextFiles) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if text.begin is not None:
        ids["bos_token_id"] = text.begin
    if text.ends:
        ids["eos_token_id"] = text.ends[0] if len(text.ends) == 1 else text.ends
    return ids


def write(folder: Path, text: TextFiles) -> None:
    """Writes the tokenizer's files and generation_config.json into a folder."""
    run_tokenizer.copy_files(text.folders, folder, run_tokenizer.FILES)
    if text.ends:
        _write_json(folder / run_tokenizer.GENERATION_CONFIG, text.generation | _token_ids(text))
    if text.tokenizer is not None and text.tokenizer.file is not None:
        _write_tokenizer_config(folder, text.tokenizer, is_imported=text.is_imported)


def _write_tokenizer_config(folder: Path, used: Tokenizer, *, is_imported: bool) -> None:
    """Writes tokenizer_config.json, or completes one that does not name the tokenizer's class.

    Without the class, some versions of transformers take that of the model's family, which
    changes the tokens of a text. What an imported model has is kept.
    """
    assert used.file is not None  # bytes have no files
    file = folder / chat_template.CONFIG
    found = chat_template.read_json(file)
    if found.get("tokenizer_class") == NEW_CLASS:
        del found["tokenizer_class"]
    if found.get("tokenizer_class") or (is_imported and file.is_file()):
        return
    settings: dict[str, Any] = {}
    if used.kind == "huggingface":
        settings["tokenizer_class"] = CLASS
        described = foreign.read_json(used.file, max_bytes=tokenizers.MAX_FILE_BYTES)
        # transformers 4.57 sets it to false in tokenizer.json if it is not here.
        if (described["pre_tokenizer"] or {}).get("add_prefix_space"):
            settings["add_prefix_space"] = True
        if used.adds_bos:
            settings["add_bos_token"] = True
    else:
        settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        settings |= {"add_bos_token": used.adds_bos, "add_eos_token": False}
    # Otherwise decoding removes the space before a comma.
    settings["clean_up_tokenization_spaces"] = False
    for key, token in (("bos_token", used.bos), ("eos_token", used.eos)):
        if token is not None:
            settings[key] = used.spelling(token)
    # Older versions of transformers do not read the template in its own file.
    template = folder / chat_template.FILE
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    _write_json(file, settings | {key: value for key, value in found.items() if value is not None})


def _write_json(file: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
