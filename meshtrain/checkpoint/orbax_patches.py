"""Changes what Orbax has no options for, in the range of versions that pyproject.toml allows.

Each chunk of an array ends with its CRC-32C, which TensorStore computes when it writes the chunk
and checks when it reads it. The arrays of a workdir on an object store are in the store. After an
error no read or write is left behind. The name of a folder is neither a pattern nor a URL.
"""

import asyncio
import functools
import glob
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import jax
from etils import epath
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import future, synchronization
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

from meshtrain import storage


@functools.cache
def apply() -> None:
    """Replaces functions of Orbax, once."""
    for module, name, change in (
        (tensorstore_utils, "build_array_write_spec", _with_checksums),
        (tensorstore_utils, "build_kvstore_tspec", _where_the_workdir_is),
        (ocdbt_utils, "merge_ocdbt_per_process_files", _with_folders),
        (array_metadata_store.Store, "_maybe_create_base_dir", _creates_folder),
        (array_metadata_store, "validate_all_array_metadatas", _validates_if_shared),
        (asyncio_utils, "_run_sync_via_new_loop", _waits_for_all),
        (type(epath.Path("/")), "glob", _with_escaped_folder),
        (tensorstore_utils, "_normalize_path", _without_urls_in_paths),
    ):
        setattr(module, name, change(getattr(module, name)))


def _with_checksums(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that says how an array is written, with a CRC-32C for each chunk."""

    def build_with_checksums(*args: Any, **kwargs: Any) -> Any:
        spec = build(*args, **kwargs)
        array = spec.json.get("base", spec.json)  # within a cast
        if array["driver"] == "zarr3":  # the format of AsyncWriter
            (sharding,) = array["metadata"]["codecs"]
            sharding["configuration"]["codecs"].append({"name": "crc32c"})
        return spec

    return build_with_checksums


def _where_the_workdir_is(build: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that says where the files of arrays are: perhaps in a store."""

    def build_where_the_workdir_is(*args: Any, **kwargs: Any) -> Any:
        spec = build(*args, **kwargs)
        if spec["driver"] != "ocdbt":
            return spec
        return storage.workdir_at(Path(spec["base"]["path"])).array_store(spec)

    return build_where_the_workdir_is


def _with_folders(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that merges what all processes wrote, each in a folder."""

    async def merge_with_folders(directory: Any, *args: Any, **kwargs: Any) -> None:
        workdir = storage.workdir_at(Path(directory))
        workdir.confirm_lock()  # another run may have committed this step
        if not workdir.shared:
            for process in range(jax.process_count()):
                (Path(directory) / f"ocdbt.process_{process}").mkdir(exist_ok=True)
        await merge(directory, *args, **kwargs)

    return merge_with_folders


def _creates_folder(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that creates a folder for metadata, in every process.

    Orbax's waits 10 minutes for process 0, which may have failed, or write to another folder.
    """

    async def create(store: Any, folder: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    return create


def _validates_if_shared(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that compares what all processes wrote, if process 0 sees it."""

    async def validate_if_shared(validator: Any, store: Any, folder: Any) -> None:
        if storage.workdir_at(Path(folder)).shared:
            await validate(validator, store, folder)

    return validate_if_shared


def _waits_for_all(run: Callable[[Coroutine], Any]) -> Callable[[Coroutine], Any]:
    """Returns the function that runs a coroutine; after an error it waits for all others.

    Orbax would close their event loop at once, and Python print a traceback for each.
    """

    async def waited(coroutine: Coroutine) -> Any:
        try:
            return await coroutine
        except BaseException:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            # A cancelled read may still answer.
            await asyncio.gather(*others, return_exceptions=True)
            raise

    return lambda coroutine: run(waited(coroutine))


def _with_escaped_folder(find: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that finds the files in a folder that match a pattern.

    The folder's own name is no pattern: Orbax would find nothing in `exp[lr=3e-3]`, and would skip
    the merge of what the processes wrote.
    """

    def find_in_escaped(folder: Any, pattern: str) -> Any:
        return find(type(folder)(glob.escape(os.fspath(folder))), pattern)

    return find_in_escaped


def _without_urls_in_paths(normalize: Callable[[str], str]) -> Callable[[str], str]:
    """Returns the function that normalises a path: Orbax makes a URL of a folder named `gs:`."""

    def normalize_path(path: str) -> str:
        return os.path.normpath(path) if os.path.isabs(path) else normalize(path)

    return normalize_path


def end_waits_for_folders() -> None:
    """Ends the waits of other processes for a folder that this one could not create."""
    signals = synchronization.HandlerAwaitableSignal
    future.set_signals(
        [signals.STEP_DIRECTORY_CREATION, signals.ITEM_DIRECTORY_CREATION],
        operation_id=synchronization.OperationIdGenerator.get_current_operation_id(),
    )
