"""Reads and writes models in the format of Hugging Face's transformers, bit for bit.

config_json.py converts config.json, for the families in architectures.py; names.py maps tensors to
parameters; files.py reads and writes safetensors. This file reads and writes the parameters of a model.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from meshtrain import console
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, experts, files, names
from meshtrain.huggingface.config_json import Section
from meshtrain.huggingface.families import deepseek
from meshtrain.huggingface.families.base import Family
from meshtrain.huggingface.names import Row
from meshtrain.models.base import Params, is_measured
from meshtrain.state import bytes_of

T = TypeVar("T")

MAX_LISTED = 20  # tensors that an error message lists

COPY_BYTES = 1 << 18  # bytes copied at once: small enough to be transposed within a core's cache

# Some files also hold tensors that are not parameters: causal masks, and rope frequencies.
NOT_PARAMETERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def model_section(folder: Path) -> Section:
    """Returns the `model` section of a folder's config.json; raises ConfigError with all unsupported keys."""
    return _of_config(folder, config_json.to_section)


def check_sizes(folder: Path) -> None:
    """Raises ConfigError if config.json has more layers than there are tensors, or a dim larger than any tensor.

    Call it before anything is allocated: absurd sizes would use up all memory.
    """
    family, found = _parameter_tensors(folder)
    path = folder / config_json.NAME
    config = config_json.with_defaults(config_json.read(path), family)
    largest = max((math.prod(tensor.shape) for tensor in found.values()), default=0)
    faults = []
    for key, hf_key in family.keys.items():
        value = config.get(hf_key)
        # max_seq_len is a dim of a tensor only for learned positions.
        if not isinstance(value, int) or key == "max_seq_len":
            continue
        is_index = key in ("num_layers", "num_experts")
        if value > (len(found) if is_index else largest):
            limit = f"{len(found)} tensors" if is_index else f"no tensor above {largest} values"
            faults.append(
                f"{path}: {hf_key}={value}: the files next to it have {limit}; download both again"
            )
    if faults:
        raise ConfigError(*faults)


def family_in(folder: Path) -> Family:
    """Returns the family of a folder's config.json."""
    return _of_config(folder, config_json.family_of)


def num_left_out(folder: Path) -> int:
    """Returns the number of tensors of DeepSeek-V3's layers for further tokens, which are not converted."""
    prefixes = _of_config(folder, deepseek.mtp_prefixes)
    return sum(name.startswith(prefixes) for name in files.tensors(folder))


def _of_config(folder: Path, function: Callable[[config_json.Config], T]) -> T:
    """Returns the result of a function of a folder's config.json; its errors name the file."""
    path = folder / config_json.NAME
    config = config_json.read(path)
    try:
        return function(config)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {fault}" for fault in error.faults)) from error


def dtypes_in(folder: Path) -> dict[str, np.dtype]:
    """Returns the dtype of each parameter's tensor in a folder, by the name in names.py."""
    tensors = _parameter_tensors(folder)[1]
    return {
        name: files.DTYPES[tensor.code]
        for name, tensor in tensors.items()
        if tensor.code in files.DTYPES
    }


def read(folder: Path, abstract_params: Params, section: Section) -> Params:
    """Returns the parameters in a folder, with the shapes, dtypes and shardings of `abstract_params`.

    `section` is the `model` section of the same model. Each device reads its shard from the files; a
    process holds extra host memory only for its shards of one parameter. Raises ConfigError, before
    anything is allocated, if a file is damaged or a tensor does not match `section`.
    """
    checked, family = check(folder, abstract_params, section), family_in(folder)
    leaves, tree = jax.tree.flatten_with_path(abstract_params)
    rows = iter(checked)
    with console.progress("reading", bytes_of(abstract_params)) as advance:
        return tree.unflatten(
            _read_parameter(*next(rows), leaf, advance)
            if _is_in_files(path, family)
            else experts.initial_measured(path[-1].key, leaf)
            for path, leaf in leaves
        )


def check(
    folder: Path, abstract_params: Params, section: Section
) -> list[tuple[Row, list[files.Tensor]]]:
    """Returns the tensors of each parameter; reads only headers. Raises the same errors as `read`."""
    family, found = _parameter_tensors(folder)
    rows = _rows(family, shapes_in_files(abstract_params, family), section)
    _check_tensors(folder, family, found, rows)
    return [(row, [found[name] for name in row.tensors]) for row in rows]


def write(
    folder: Path,
    family: Family,
    section: Section,
    load: Callable[[str], np.ndarray],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    dtypes: Mapping[str, np.dtype],
    shard_bytes: int,
) -> None:
    """Writes the tensors of a model to files of at most `shard_bytes`.

    Their dtype is `dtype`, except those in `dtypes`, by name, which must represent the values exactly, and the bias
    of a router, which is not narrower than float32.
    `shapes` are those of the parameters, by path. `load` returns a parameter by its path; it is called
    once for each. Memory holds only the parameters of one tensor at a time.
    """
    tensors: dict[str, list[Row]] = {}  # by name; a fused tensor of GPT-2 holds three parameters
    for row in _rows(family, shapes, section):
        tensors.setdefault(row.name, []).append(row)

    def dtype_of(name: str) -> np.dtype:
        return dtypes.get(name, experts.written_dtype(name, dtype))

    specs = [
        files.TensorSpec(name, rows[0].shape, dtype_of(name))
        for rows in tensors.values()
        for name in rows[0].tensors
    ]

    def values() -> Iterator[np.ndarray]:
        for rows in tensors.values():
            loaded = [_flat(load(row.path), row) for row in rows]
            for number, name in enumerate(rows[0].tensors):
                tensor = np.empty(rows[0].shape, dtype_of(name))
                for row, stack in zip(rows, loaded, strict=True):
                    view = row.parameter_view(tensor)
                    values = stack[number][tuple(map(slice, view.shape))]
                    _copy_values(values, view, name, advice="export an earlier checkpoint")
                    if name in dtypes and not _equal_values(values, view):
                        raise ConfigError(
                            f"{name}: {view.dtype} does not represent its values; use --dtype={dtype}"
                        )
                yield tensor
                advance(1)
            del loaded, stack  # free the memory before the next load

    with console.progress("writing", len(specs)) as advance:
        files.write(folder, specs, values(), shard_bytes=shard_bytes)


def shapes_in_files(params: Params, family: Family) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter that the files of a family have, by path.

    They are in the leaf order of JAX.
    """
    return {
        _name(path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
        if _is_in_files(path, family)
    }


def _name(path: tuple) -> str:
    return "/".join(entry.key for entry in path)


def _is_in_files(path: tuple, family: Family) -> bool:
    """Whether the files have a parameter: all but measured ones, of which DeepSeek's have the bias."""
    return not is_measured(path) or _name(path) in family.names


def _rows(family: Family, shapes: Mapping[str, tuple[int, ...]], section: Section) -> list[Row]:
    try:
        return names.rows(family.names, shapes, section)
    except KeyError as error:
        raise ConfigError(f"{family.architecture} has no parameter {error.args[0]}") from error


def _parameter_tensors(folder: Path) -> tuple[Family, dict[str, files.Tensor]]:
    """Returns the family of a folder, and the tensors that may be parameters, by their names in names.py."""
    family, found = family_in(folder), {}
    ignored = family.ignored_prefixes + _of_config(folder, deepseek.mtp_prefixes)
    for name, tensor in files.tensors(folder).items():
        if not NOT_PARAMETERS.search(name) and not name.startswith(ignored):
            for prefix, replacement in family.prefixes:
                if name.startswith(prefix):
                    name = replacement + name.removeprefix(prefix)
                    break
            found |= experts.unfuse(name, tensor, family)
    return family, found


def _check_tensors(
    folder: Path, family: Family, found: dict[str, files.Tensor], rows: Iterable[Row]
) -> None:
    """Raises ConfigError, with a table, if names, shapes or dtypes of the tensors differ from `rows`."""
    wanted = {name: row.shape for row in rows for name in row.tensors}
    head, table = (family.names[path].split()[0] for path in ("output/kernel", "tokens/embedding"))
    if head not in wanted and head in found and table in found:
        if not files.equal(found[head], found[table]):
            raise ConfigError(
                f"{folder}: {head} is not equal to {table}, but config.json has tie_word_embeddings; set it to false"
            )
        wanted[head] = wanted[table]
    faults = []
    for name in sorted(wanted.keys() | found.keys()):
        tensor = found.get(name)
        matches = tensor and tensor.shape == wanted.get(name) and tensor.code in files.DTYPES
        if not matches:
            expected = list(wanted[name]) if name in wanted else "none"
            actual = f"{list(tensor.shape)} {tensor.code}" if tensor else "none"
            faults.append((name, f"expected {expected}", f"found {actual}"))
    if faults:
        widths = [max(len(fault[column]) for fault in faults[:MAX_LISTED]) for column in (0, 1)]
        lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in faults[:MAX_LISTED]]
        lines += [f"  ... and {len(faults) - MAX_LISTED} more"] if len(faults) > MAX_LISTED else []
        raise ConfigError(
            f"{folder}: {len(faults)} tensors do not match the {family.architecture} of config.json "
            f"(dtypes: {', '.join(files.DTYPES)})",
            *lines,
        )


def _read_parameter(
    row: Row,
    tensors: list[files.Tensor],
    leaf: jax.ShapeDtypeStruct,
    advance: Callable[[int], None],
) -> jax.Array:
    """Returns a parameter; each shard is read once, even if several devices hold it.

    `advance` is called with the bytes of each tensor.
    """
    shards: dict[str, np.ndarray] = {}
    names, num_stacked = row.tensors, len(row.stack)
    numbers = np.arange(len(tensors)).reshape(row.stack)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if (key := str(index)) not in shards:
            shape = [
                len(range(*part.indices(size)))
                for part, size in zip(index, leaf.shape, strict=True)
            ]
            shards[key] = np.zeros(shape, leaf.dtype)  # rows that pad the vocabulary stay 0
            targets = _flat(shards[key], row)
            for number, target in zip(np.ravel(numbers[index[:num_stacked]]), targets, strict=True):
                tensor = tensors[number]
                values = row.parameter_view(tensor.read())[index[num_stacked:]]
                part = target[tuple(map(slice, values.shape))]
                name = f"{tensor.path}: {names[number]}"
                _copy_values(values, part, name, advice="download it again")
                advance(target.nbytes)
        return shards[key]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


def _flat(parameter: np.ndarray, row: Row) -> np.ndarray:
    """Returns a view of a parameter whose first dim is the number of the tensor."""
    return parameter.reshape(-1, *parameter.shape[len(row.stack) :])


def _copy_values(values: np.ndarray, target: np.ndarray, name: str, *, advice: str) -> None:
    """Copies values into an array of any dtype; raises ConfigError for a value that is not finite or overflows."""
    outer = int(np.argmax(values.strides))
    step = max(1, COPY_BYTES // values.strides[outer])
    is_finite = True
    with np.errstate(over="ignore"):
        for start in range(0, values.shape[outer], step):
            block = (slice(None),) * outer + (slice(start, start + step),)
            target[block] = values[block]
            is_finite = is_finite and bool(np.isfinite(target[block]).all())
    if is_finite:
        return
    if np.isfinite(values).all():
        raise ConfigError(
            f"--dtype={target.dtype}: {name} has values beyond its range; use float32"
        )
    raise ConfigError(f"{name} has values that are NaN or infinite; {advice}")


def _equal_values(values: np.ndarray, copy: np.ndarray) -> bool:
    return all(np.array_equal(a, b.astype(a.dtype)) for a, b in zip(values, copy, strict=True))
