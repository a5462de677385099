"""Models in the format of Hugging Face's transformers, read and written bit for bit.

config_json.py translates config.json, of the architectures in families.py; names.py says which tensor
is which parameter; files.py reads and writes safetensors. Here: parameters from files, and to them.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, files, names
from meshtrain.huggingface.config_json import Section
from meshtrain.huggingface.families import Family
from meshtrain.huggingface.names import Row
from meshtrain.models.base import Params

TOLD = 20  # tensors that a fault names
BLOCK = 1 << 18  # bytes copied at once: they stay in a core's cache, where they are transposed
# What some files hold beside parameters: causal masks, and the angles of rope.
NO_PARAMETER = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")


def model_section(folder: Path) -> Section:
    """Returns the `model` section of a folder's config.json; raises ConfigError for what we do not have."""
    path = folder / config_json.NAME
    config = config_json.read(path)
    try:
        return config_json.to_section(config)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {fault}" for fault in error.faults)) from error


def check_sizes(folder: Path) -> None:
    """Raises ConfigError where config.json has more layers than there are tensors, or a dim no tensor can have.

    To be called before anything is made of these numbers: out of the air, they take all memory.
    """
    family, found = _tensors(folder)
    path = folder / config_json.NAME
    config = config_json.read(path)
    largest = max((math.prod(tensor.shape) for tensor in found.values()), default=0)
    faults = []
    for ours, theirs in family.keys.items():
        value, layers = config.get(theirs), ours == "num_layers"
        # The longest sequence is a dim only where positions are learned.
        if not isinstance(value, int) or ours == "max_seq_len":
            continue
        if value > (len(found) if layers else largest):
            most = f"{len(found)} tensors" if layers else f"no tensor of more than {largest} values"
            faults.append(
                f"{path}: {theirs}={value}: the files beside it hold {most}; get both again"
            )
    if faults:
        raise ConfigError(*faults)


def family_in(folder: Path) -> Family:
    """Returns the family that a folder's config.json names."""
    return config_json.family_of(config_json.read(folder / config_json.NAME))


def dtype_of(folder: Path) -> np.dtype:
    """Returns the narrowest dtype that keeps every parameter in a folder's files as it is."""
    codes = {tensor.code for tensor in _tensors(folder)[1].values()} & files.DTYPES.keys()
    return (
        jnp.result_type(*(files.DTYPES[code] for code in codes)) if codes else np.dtype("float32")
    )


def read(folder: Path, abstract_params: Params, section: Section) -> Params:
    """Returns the parameters in a folder, of the shapes, dtypes and shardings of `abstract_params`.

    `section` is the `model` section that they belong to. Each device gets its share straight from the
    files; beside that a process holds its share of one parameter. Raises ConfigError, before anything is
    allocated, where files are damaged or their tensors are not those of this section.
    """
    checked = check(folder, abstract_params, section)
    leaves, tree = jax.tree.flatten(abstract_params)
    return tree.unflatten(
        _read(tensors, row, leaf) for (row, tensors), leaf in zip(checked, leaves, strict=True)
    )


def check(
    folder: Path, abstract_params: Params, section: Section
) -> list[tuple[Row, list[files.Tensor]]]:
    """Returns where each parameter lies; raises ConfigError as `read` does, which reads no tensor then."""
    family, found = _tensors(folder)
    rows = _rows(family, paths(abstract_params), section)
    _check(folder, family, found, rows)
    return [(row, [found[name] for name in row.tensors]) for row in rows]


def write(
    folder: Path,
    family: Family,
    section: Section,
    load: Callable[[str], np.ndarray],
    *,
    parameters: Iterable[str],
    dtype: np.dtype,
    shard_bytes: int,
) -> None:
    """Writes the files of a model, in `dtype`, in shards of at most so many bytes.

    `load` returns a parameter by its path, of which there are as many as `parameters` says; it is
    called once for each, and what it returned is held until the next.
    """
    tensors: dict[str, list[Row]] = {}  # by name; those of GPT-2 hold three parameters each
    for row in _rows(family, parameters, section):
        tensors.setdefault(row.name, []).append(row)
    planned = [
        files.Planned(name, rows[0].shape, dtype)
        for rows in tensors.values()
        for name in rows[0].tensors
    ]

    def values() -> Iterator[np.ndarray]:
        for rows in tensors.values():
            loaded = [load(row.path) if row.stacked else load(row.path)[None] for row in rows]
            for number, name in enumerate(rows[0].tensors):
                tensor = np.empty(rows[0].shape, dtype)
                for row, stack in zip(rows, loaded, strict=True):
                    view = row.ours(tensor)
                    _cast(stack[number][tuple(map(slice, view.shape))], view, name)
                yield tensor
            del loaded, stack  # before the next is

    files.write(folder, planned, values(), shard_bytes=shard_bytes)


def paths(params: Params) -> list[str]:
    """Returns the path of each parameter, in the order of jax."""
    return ["/".join(entry.key for entry in path) for path, _ in jax.tree.leaves_with_path(params)]


def _rows(family: Family, parameters: Iterable[str], section: Section) -> list[Row]:
    try:
        return names.rows(family.names, parameters, section)
    except KeyError as error:
        raise ConfigError(f"{family.architecture} has no parameter {error.args[0]}") from error


def _tensors(folder: Path) -> tuple[Family, dict[str, files.Tensor]]:
    """Returns the family of a folder, and its tensors that may be parameters, named as in names.py."""
    family, found = family_in(folder), {}
    for name, tensor in files.tensors(folder).items():
        if not NO_PARAMETER.search(name) and not name.startswith(family.others):
            for prefix, stands_for in family.prefixes:
                if name.startswith(prefix):
                    name = stands_for + name.removeprefix(prefix)
                    break
            found[name] = tensor
    return family, found


def _check(
    folder: Path, family: Family, found: dict[str, files.Tensor], rows: Iterable[Row]
) -> None:
    """Raises ConfigError, with a table, where tensors are not those that are wanted."""
    wanted = {name: row.shape for row in rows for name in row.tensors}
    head, table = (family.names[path].split()[0] for path in ("output/kernel", "tokens/embedding"))
    if head not in wanted and head in found and table in found:
        if not files.same(found[head], found[table]):
            raise ConfigError(
                f"{folder}: {head} is not {table}, and config.json has tie_word_embeddings; set it to false"
            )
        wanted[head] = wanted[table]
    faults = []
    for name in sorted(wanted.keys() | found.keys()):
        there = found.get(name)
        fits = there and there.shape == wanted.get(name) and there.code in files.DTYPES
        if not fits:
            expected = list(wanted[name]) if name in wanted else "none"
            shown = f"{list(there.shape)} {there.code}" if there else "none"
            faults.append((name, f"expected {expected}", f"found {shown}"))
    if faults:
        widths = [max(len(fault[column]) for fault in faults[:TOLD]) for column in (0, 1)]
        told = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in faults[:TOLD]]
        told += [f"  ... and {len(faults) - TOLD} more"] if len(faults) > TOLD else []
        codes = ", ".join(files.DTYPES)
        raise ConfigError(
            f"{folder}: {len(faults)} tensors are not those of such a {family.architecture} in {codes}",
            *told,
        )


def _read(tensors: list[files.Tensor], row: Row, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a parameter, each device's part read from its tensors, a part of several devices once."""
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        if (key := str(index)) not in parts:
            shape = [
                len(range(*cut.indices(size))) for cut, size in zip(index, leaf.shape, strict=True)
            ]
            parts[key] = np.zeros(shape, leaf.dtype)  # rows that pad the vocabulary stay 0
            layers = tensors[index[0]] if row.stacked else tensors
            targets = parts[key] if row.stacked else parts[key][None]
            for target, tensor in zip(targets, layers, strict=True):
                values = row.ours(tensor.read())[index[row.stacked :]]
                _cast(values, target[tuple(map(slice, values.shape))], row.path)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _cast(values: np.ndarray, target: np.ndarray, name: str) -> None:
    """Copies values into an array; raises ConfigError where its dtype is too narrow for one."""
    outer = int(np.argmax(values.strides))
    step = max(1, BLOCK // values.strides[outer])
    with np.errstate(over="ignore"):
        for start in range(0, values.shape[outer], step):
            cut = (slice(None),) * outer + (slice(start, start + step),)
            target[cut] = values[cut]
    if jnp.promote_types(values.dtype, target.dtype) != target.dtype:
        if np.count_nonzero(np.isinf(target)) > np.count_nonzero(np.isinf(values)):
            raise ConfigError(f"--dtype={target.dtype}: {name} has values beyond it; use float32")
