"""Reads and writes the parameters of a model in the files of transformers, bit for bit.

config_json.py converts config.json; tensor_rows.py maps tensors to parameters; files.py reads and
writes safetensors; what belongs to one family lies in families/.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from meshtrain import console
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, files, mxfp4, tensor_rows
from meshtrain.huggingface.families.base import Config, Family, Section
from meshtrain.huggingface.tensor_rows import Row
from meshtrain.models import mixture
from meshtrain.models.base import Params, is_measured
from meshtrain.state import bytes_of

T = TypeVar("T")

Tensor = files.Tensor | mxfp4.Kernel

# ---- a folder ----

# Some files also hold tensors that are not parameters: causal masks, and rope frequencies.
NOT_PARAMETERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

# transformers has them also if there are no shared experts; then they are empty.
SHARED_EXPERTS = re.compile(r"\.shared_experts\.\w+\.weight$")

# Ends of the name of the only tensor that a layer measures.
ROUTER_BIAS = (".e_score_correction_bias", ".expert_bias")


def model_section(folder: Path) -> Section:
    """Returns the `model` section of a folder's config.json.

    Raises ConfigError with all unsupported keys.
    """
    return _convert_config(folder, config_json.to_section)


def family_in(folder: Path) -> Family:
    """Returns the family of a folder's config.json."""
    return _convert_config(folder, config_json.family_of)


def _convert_config(folder: Path, convert: Callable[[Config], T]) -> T:
    """Returns the result of a function of a folder's config.json; its errors name the file."""
    path = folder / config_json.NAME
    config = config_json.read(path)
    try:
        return convert(config)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {fault}" for fault in error.faults)) from error


def check_sizes(folder: Path) -> None:
    """Raises ConfigError if config.json has sizes that the tensors next to it cannot have.

    These are more layers than there are tensors, or a dim larger than any tensor.
    Call it before anything is allocated: absurd sizes would use up all memory.
    """
    family, tensors = _parameter_tensors(folder)
    path = folder / config_json.NAME
    config = config_json.with_defaults(config_json.read(path), family)
    largest = max((math.prod(tensor.shape) for tensor in tensors.values()), default=0)
    indexed = {"num_layers"}
    if any(name.count("*") > 1 for name in family.names.values()):
        indexed.add("num_experts")
    faults = []
    for key, hf_key in family.keys.items():
        value = config.get(hf_key)
        # max_seq_len is a dim of a tensor only for learned positions.
        if not isinstance(value, int) or key == "max_seq_len":
            continue
        is_index = key in indexed
        if value > (len(tensors) if is_index else largest):
            limit = f"{len(tensors)} tensors" if is_index else f"no tensor above {largest} values"
            faults.append(
                f"{path}: {hf_key}={value}: the files next to it have {limit}; download both again"
            )
    if faults:
        raise ConfigError(*faults)


def num_left_out(folder: Path) -> int:
    """Returns the number of tensors of the language model that an import does not convert."""
    prefixes = _left_out_prefixes(folder, family_in(folder))
    return sum(name.startswith(prefixes) for name in files.tensors(folder))


def _left_out_prefixes(folder: Path, family: Family) -> tuple[str, ...]:
    config = config_json.read(folder / config_json.NAME)
    return family.left_out_prefixes(config_json.with_defaults(config, family))


def dtypes_in(folder: Path) -> dict[str, np.dtype]:
    """Returns the dtype of each parameter's tensor in a folder, by the name in Family.names."""
    _, tensors = _parameter_tensors(folder)
    return {
        name: files.DTYPES[tensor.code]
        for name, tensor in tensors.items()
        if tensor.code in files.DTYPES
    }


def parameter_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of parameters in a folder, by the name in Family.names."""
    return _parameter_tensors(folder)[1]


def written_dtype(name: str, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of a tensor in files whose dtype is `dtype`."""
    return np.promote_types(dtype, np.float32) if name.endswith(ROUTER_BIAS) else dtype


def _parameter_tensors(folder: Path) -> tuple[Family, dict[str, Tensor]]:
    """Returns the family of a folder, and the tensors that may be parameters, by Family.names."""
    family = family_in(folder)
    config = config_json.read(folder / config_json.NAME)
    ignored = family.ignored_prefixes + _left_out_prefixes(folder, family)
    found = files.tensors(folder)
    tensors = {}
    for name, tensor in (mxfp4.join(found) if mxfp4.is_used(config) else found).items():
        if NOT_PARAMETERS.search(name) or name.startswith(ignored):
            continue
        if not math.prod(tensor.shape) and SHARED_EXPERTS.search(name):
            continue
        for prefix, replacement in family.prefixes:
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
                break
        tensors |= _unfuse(name, tensor, family)
    return family, tensors


def _unfuse(name: str, tensor: Tensor, family: Family) -> Mapping[str, Tensor]:
    """Returns the tensors of each expert that a tensor of all experts holds, or the tensor itself.

    In the bytes of the fused tensor they lie one after the other.
    """
    end = next((end for end in family.fused if name.endswith(f".{end}")), None)
    if end is None or isinstance(tensor, mxfp4.Kernel):
        return {name: tensor}
    parts = family.fused[end]
    stem = name.removesuffix(end)
    if "*" not in parts[0]:
        return {stem + parts[0]: tensor}
    shape = tensor.shape
    # `check` reports a tensor of a wrong shape under its own name.
    if len(shape) != 3 or not math.prod(shape) or shape[1] % len(parts):
        return {name: tensor}
    tensors = {}
    for number, expert in enumerate(tensor.split(shape[0])):
        matrix = dataclasses.replace(expert, shape=shape[1:])
        for part, part_tensor in zip(parts, matrix.split(len(parts)), strict=True):
            tensors[stem + part.replace("*", str(number))] = part_tensor
    return tensors


# ---- parameters and their tensors ----


def shapes_in_files(params: Params, family: Family) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter that the files of a family have, by path.

    They are in the leaf order of JAX.
    """
    return {
        _path_name(path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
        if _is_in_files(path, family)
    }


def paths_of(params: Params) -> list[str]:
    """Returns the paths of all parameters."""
    return [_path_name(path) for path, _ in jax.tree.leaves_with_path(params)]


def _path_name(path: tuple) -> str:
    return "/".join(entry.key for entry in path)


def _is_in_files(path: tuple, family: Family) -> bool:
    """Returns whether the files have a parameter: all but measured ones without a tensor name."""
    return not is_measured(path) or _path_name(path) in family.names


def _rows(family: Family, shapes: Mapping[str, tuple[int, ...]], section: Section) -> list[Row]:
    try:
        return tensor_rows.rows(family.names, shapes, section)
    except KeyError as error:
        raise ConfigError(f"{family.architecture} has no parameter {error.args[0]}") from error


# ---- reading ----


def read(
    folder: Path,
    abstract_params: Params,
    section: Section,
    is_wanted: Callable[[str], bool] | None = None,
) -> Params:
    """Returns the parameters in a folder; those for whose path `is_wanted` is False as they are.

    They have the shapes, dtypes and shardings of `abstract_params`; `section` is the `model`
    section of the same model. Each device reads its shard from the files; a process holds extra
    host memory only for its shards of one parameter, and with MXFP4 for those of one layer more.
    Raises ConfigError, before anything is allocated, if a file is damaged or a tensor does not
    match `section`.
    """
    family = family_in(folder)
    checked = iter(check(folder, abstract_params, section, is_wanted))
    leaves, tree = jax.tree.flatten_with_path(abstract_params)
    params = []
    with console.progress("reading", bytes_of(abstract_params)) as advance:
        for path, leaf in leaves:
            if is_wanted is not None and not is_wanted(_path_name(path)):
                params.append(leaf)
            elif _is_in_files(path, family):
                row, tensors = next(checked)
                params.append(_read_parameter(row, tensors, leaf, advance))
            else:
                params.append(_initial_measured(path[-1].key, leaf))
    return tree.unflatten(params)


def _initial_measured(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns what a layer has measured before the first step, for all layers."""
    num_experts = leaf.shape[-1] if leaf.ndim == 2 else 1
    value = np.asarray(getattr(mixture.RouterStats(num_experts), name)[...], leaf.dtype)
    values = np.broadcast_to(value, leaf.shape)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])


def check(
    folder: Path,
    abstract_params: Params,
    section: Section,
    is_wanted: Callable[[str], bool] | None = None,
) -> list[tuple[Row, list[Tensor]]]:
    """Returns the tensors of each parameter; reads only headers.

    Raises the same errors as `read`.
    """
    family, tensors = _parameter_tensors(folder)
    shapes = shapes_in_files(abstract_params, family)
    if is_wanted is not None:
        shapes = {path: shape for path, shape in shapes.items() if is_wanted(path)}
    rows = _rows(family, shapes, section)
    if is_wanted is not None:
        names = {name for row in rows for name in row.tensors}
        tensors = {name: tensor for name, tensor in tensors.items() if name in names}
    _check_tensors(folder, family, tensors, rows)
    return [(row, [tensors[name] for name in row.tensors]) for row in rows]


MAX_LISTED = 20  # tensors that an error message lists


def _check_tensors(
    folder: Path, family: Family, tensors: Mapping[str, Tensor], rows: Iterable[Row]
) -> None:
    """Raises ConfigError, with a table, unless the tensors have the names and shapes of `rows`."""
    shapes = {name: row.shape for row in rows for name in row.tensors}
    head = family.names["output/kernel"].split()[0]
    embedding = family.names["tokens/embedding"].split()[0]
    # The files of a model with tied embeddings may hold them twice.
    if head not in shapes and head in tensors and embedding in tensors:
        if not files.equal(tensors[head], tensors[embedding]):
            raise ConfigError(
                f"{folder}: {head} is not equal to {embedding}, but config.json has "
                f"tie_word_embeddings; set it to false"
            )
        shapes[head] = shapes[embedding]
    faults = []
    for name in sorted(shapes.keys() | tensors.keys()):
        tensor = tensors.get(name)
        matches = tensor and tensor.shape == shapes.get(name) and tensor.code in files.DTYPES
        if not matches:
            expected = list(shapes[name]) if name in shapes else "none"
            actual = f"{list(tensor.shape)} {tensor.code}" if tensor else "none"
            faults.append((name, f"expected {expected}", f"found {actual}"))
    if faults:
        listed = faults[:MAX_LISTED]
        name_width, expected_width = (max(len(row[column]) for row in listed) for column in (0, 1))
        lines = [
            f"  {name:{name_width}}  {expected:{expected_width}}  {actual}"
            for name, expected, actual in listed
        ]
        if len(faults) > MAX_LISTED:
            lines.append(f"  ... and {len(faults) - MAX_LISTED} more")
        raise ConfigError(
            f"{folder}: {len(faults)} tensors do not match the {family.architecture} of "
            f"config.json (dtypes: {', '.join(files.DTYPES)})",
            *lines,
        )


def _read_parameter(
    row: Row,
    tensors: list[Tensor],
    leaf: jax.ShapeDtypeStruct,
    advance: Callable[[int], None],
) -> jax.Array:
    """Returns a parameter; each shard is read once, even if several devices hold it.

    `advance` is called with the bytes of each tensor.
    """
    shards: dict[str, np.ndarray] = {}
    names = row.tensors
    num_stacked = len(row.stack)
    numbers = np.arange(len(tensors)).reshape(row.stack)

    def read_shard(index: tuple[slice, ...]) -> np.ndarray:
        key = str(index)
        if key in shards:
            return shards[key]
        ranges = (range(size)[part] for part, size in zip(index, leaf.shape, strict=True))
        shape = [len(dim_range) for dim_range in ranges]
        # Rows that pad the vocabulary stay 0.
        shards[key] = np.zeros(shape, leaf.dtype)
        targets = _flatten_stack(shards[key], row)
        for number, target in zip(np.ravel(numbers[index[:num_stacked]]), targets, strict=True):
            tensor = tensors[number]
            in_layer = index[num_stacked:]
            if isinstance(tensor, mxfp4.Kernel):
                stored = tensor.read_within(row.box(in_layer))
            else:
                stored = tensor.read()
            values = row.parameter_view(stored)[in_layer]
            part = target[tuple(map(slice, values.shape))]
            name = f"{tensor.path}: {names[number]}"
            _copy_values(values, part, name, advice="download it again")
            advance(target.nbytes)
        return shards[key]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, read_shard)


# ---- writing ----


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

    Their dtype is `dtype`, except those in `dtypes`, by name, which must represent the values
    exactly, and the bias of a router, which is not narrower than float32. `shapes` are those of the
    parameters, by path. `load` returns a parameter by its path; it is called once for each. Memory
    holds only the parameters of one tensor at a time.
    """
    # By name: a fused tensor of GPT-2 holds three parameters.
    rows_by_name: dict[str, list[Row]] = {}
    shapes = {**shapes, **_empty_shapes(family, shapes, section)}
    for row in _rows(family, shapes, section):
        rows_by_name.setdefault(row.name, []).append(row)

    def dtype_of(name: str) -> np.dtype:
        return dtypes.get(name, written_dtype(name, dtype))

    specs = [
        files.TensorSpec(name, rows[0].shape, dtype_of(name))
        for rows in rows_by_name.values()
        for name in rows[0].tensors
    ]

    def join(name: str, rows: list[Row], parts: list[np.ndarray]) -> np.ndarray:
        """Returns the tensor that consists of these parts, one of each parameter."""
        tensor = np.empty(rows[0].shape, dtype_of(name))
        for row, part in zip(rows, parts, strict=True):
            view = row.parameter_view(tensor)
            # Without the rows that pad the vocabulary.
            values = part[tuple(map(slice, view.shape))]
            _copy_values(values, view, name, advice="export an earlier checkpoint")
            if name in dtypes and not _equal_values(values, view):
                raise ConfigError(
                    f"{name}: {view.dtype} does not represent its values; use --dtype={dtype}"
                )
        return tensor

    def tensors() -> Iterator[np.ndarray]:
        for rows in rows_by_name.values():
            if not math.prod(rows[0].shape):
                for name in rows[0].tensors:
                    yield np.empty(rows[0].shape, dtype_of(name))
                    advance(1)
                continue
            stacks = [_flatten_stack(load(row.path), row) for row in rows]
            for number, name in enumerate(rows[0].tensors):
                yield join(name, rows, [stack[number] for stack in stacks])
                advance(1)
            # Free the memory before the next load.
            del stacks

    with console.progress("writing", len(specs)) as advance:
        files.write(folder, specs, tensors(), shard_bytes=shard_bytes)


def _empty_shapes(
    family: Family, shapes: Mapping[str, tuple[int, ...]], section: Section
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the shared experts that transformers has if there are none, by path."""
    if not (family.is_mixture and family.has_empty_shared_experts) or section["num_shared_experts"]:
        return {}
    num_layers, d_model, _ = shapes["layers/mlp/router/kernel"]
    down = "layers/mlp/shared/down/kernel"
    into = ("layers/mlp/shared/gate/kernel", "layers/mlp/shared/up/kernel")
    return {**dict.fromkeys(into, (num_layers, d_model, 0)), down: (num_layers, 0, d_model)}


# ---- values ----

COPY_BYTES = 1 << 18  # bytes copied at once: small enough to be transposed within a core's cache


def _flatten_stack(parameter: np.ndarray, row: Row) -> np.ndarray:
    """Returns a view of a parameter whose first dim is the number of the tensor."""
    return parameter.reshape(-1, *parameter.shape[len(row.stack) :])


def _copy_values(values: np.ndarray, target: np.ndarray, name: str, *, advice: str) -> None:
    """Copies values into an array of any dtype.

    Raises ConfigError for a value that is not finite or overflows.
    """
    # Blocks of the dim that is outermost in memory: each reads bytes that lie together.
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
