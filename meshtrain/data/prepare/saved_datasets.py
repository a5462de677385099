"""Folders that the library datasets wrote: `save_to_disk`, or its cache. They hold Arrow files.

A saved dataset has state.json, which lists its files; a DatasetDict has a folder for each split and
dataset_dict.json, which names them. A folder of the cache has dataset_info.json and files of all
splits, NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow. pyarrow reads the files; the library is
not needed.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain import foreign
from meshtrain.data.prepare import sources
from meshtrain.errors import ConfigError

STATE = "state.json"
INFO = "dataset_info.json"
DICT = "dataset_dict.json"
OF_CACHE = "cache-"  # files of `map` and `filter`


class Split(NamedTuple):
    name: str  # "": it has none
    folder: Path  # whose splits are alternatives
    files: list[Path]  # in the order of its rows


def find(paths: list[Path]) -> tuple[list[Split], list[Path]]:
    """Returns the splits of the saved datasets among the files of a folder, and the other files."""
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.parent, []).append(path)
    splits: list[Split] = []
    others: list[Path] = []
    for folder, found in by_folder.items():
        names = {path.name for path in found}
        arrow = [path for path in found if path.suffix == ".arrow"]
        if STATE in names and INFO in names:
            parent = folder.parent / DICT in by_folder.get(folder.parent, [])
            splits.append(_saved(folder, is_in_dict=parent))
        elif INFO in names and arrow:
            splits += _cached(folder, arrow)
        else:
            others += [path for path in found if path.name != DICT]
    return splits, others


def chosen(splits: list[Split], split: str, *, key: str = "--split") -> list[Split]:
    """Returns the splits of this name; with "" all, each the only one of its folder.

    Raises ConfigError that names the splits of a folder. `key` is the flag that chooses a split, or
    the config key of the path.
    """
    by_folder: dict[Path, list[Split]] = {}
    for one in splits:
        by_folder.setdefault(one.folder, []).append(one)
    found = []
    faults = []
    for folder, here in by_folder.items():
        names = ", ".join(sorted(one.name for one in here))
        named = [one for one in here if not split or one.name == split]
        if not named:
            has = f"has {names}" if names else "has no splits; leave --split out"
            faults.append(f"--split={split}: {sources.name_of(folder)} {has}")
        elif len(named) > 1 and not split:
            way_out = f"choose one with {key}=NAME"
            if key != "--split":
                way_out = f"set {key} to one: {', '.join(sorted(map(_path_of, here)))}"
            faults.append(f"{sources.name_of(folder)}: has the splits {names}; {way_out}")
        found += named
    if faults:
        raise ConfigError(*faults)
    return found


def _path_of(split: Split) -> str:
    """Returns a path, or a pattern, that names the files of a split alone."""
    if any(file.parent == split.folder for file in split.files):  # of the cache
        return str(split.folder / f"*-{split.name}*.arrow")
    return str(split.folder / split.name)


def _saved(folder: Path, *, is_in_dict: bool) -> Split:
    state = _read(folder / STATE)
    try:
        names = [one["filename"] for one in state["_data_files"]]
        if not all(foreign.is_file_name(name) for name in names):
            raise TypeError("a name leads out of the folder")
    except (KeyError, TypeError) as error:
        raise _corrupt(folder / STATE, error) from None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigError(
            f"{sources.name_of(folder)}: an old version of datasets has stored its rows in another "
            f"order than its files; save it again with flatten_indices()"
        )
    name = folder.name if is_in_dict else state.get("_split") or ""
    return Split(
        str(name), folder.parent if is_in_dict else folder, [folder / one for one in names]
    )


def _cached(folder: Path, arrow: list[Path]) -> list[Split]:
    """Returns the splits in a folder of the cache."""
    try:
        names = [*_read(folder / INFO)["splits"]]
    except (KeyError, TypeError) as error:
        raise _corrupt(folder / INFO, error) from None
    splits = []
    for name in names:
        of_split = re.compile(rf".+-{re.escape(str(name))}(-\d+-of-\d+)?\.arrow")
        files = [path for path in arrow if of_split.fullmatch(path.name)]
        files = [path for path in files if not path.name.startswith(OF_CACHE)]
        if files:
            splits.append(Split(str(name), folder, sorted(files)))
    return splits


def _read(path: Path) -> dict[str, Any]:
    try:
        with sources.local_copy(path) as local:
            return foreign.read_json(local)
    except (OSError, ValueError) as error:
        raise _corrupt(path, error) from None


def _corrupt(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{sources.name_of(path)}: cannot be read: {error}; save the dataset again")
