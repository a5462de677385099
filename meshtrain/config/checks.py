"""Checks across sections, mostly of divisibility. Each returns a list of faults, one line each."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshtrain import object_store, storage
from meshtrain.config import paths
from meshtrain.config.schema import (
    AXES,
    BATCH_AXES,
    OWN_MODEL,
    Config,
    MeshConfig,
    TrainConfig,
    is_offloaded,
)
from meshtrain.errors import ConfigError, did_you_mean, nearest_multiples


def workdir_faults(workdir: str, data: Iterable[str] = ()) -> list[str]:
    """Returns the faults of a workdir's place.

    Faults are a URL that names no run, the root, a folder of another run, such as one of its
    checkpoints, and a folder in or around one of `data`.
    """
    place = storage.open_workdir(workdir)
    return place.name_faults("--workdir=") or place.place_faults(data)


def check_place(workdir: str | Path | None, cfg: Config, faults: list[str]) -> None:
    """Raises ConfigError for these faults, and those of a run's workdir by `workdir_faults`."""
    if workdir:
        faults = faults + workdir_faults(str(workdir), paths.of_data(cfg.data.options))
    if faults:
        raise ConfigError(*faults)


def data_urls(cfg: Config) -> list[str]:
    """Returns the URLs of object stores among the data that the config names."""
    if cfg.data.build != "meshtrain.data.tokens:build":
        return []
    named = paths.of_data(cfg.data.options)
    return [path for path in named if isinstance(path, str) and object_store.is_url(path)]


def missing_data(cfg: Config) -> list[str]:
    """Returns a fault if the package's own readers would find nothing at `data.path`.

    Other readers may have paths of any kind.
    """
    path = cfg.data.options.get("path")
    is_path = isinstance(path, str) and path
    if path in data_urls(cfg):  # data.remote.url_fault checks these
        return []
    if not is_path or not cfg.data.build.startswith("meshtrain.data."):
        return []
    # A path may also be the prefix of a pair of files.
    is_mixed = cfg.data.options.get("mixture") or cfg.data.options.get("phases")
    if is_mixed or os.path.exists(path) or os.path.exists(f"{path}.idx"):
        return []
    return [f"data.path={path}: no such file or folder; give a file or a folder of data"]


def is_auto(config: Mapping[str, Any]) -> bool:
    """Returns whether the planner chooses the mesh of a config.

    Other parts of the config may be wrong.
    """
    try:
        return config["mesh"]["auto"] is True
    except (KeyError, TypeError):
        return False


def batch_faults(mesh: MeshConfig, *, global_batch: int, num_microbatches: int) -> list[str]:
    """Returns a fault if the batch cannot be split evenly. An axis that is still -1 counts as 1."""
    sizes = {axis: max(1, getattr(mesh, axis)) for axis in BATCH_AXES}
    multiple = math.prod(sizes.values()) * num_microbatches
    if global_batch >= 1 and global_batch % multiple == 0:
        return []
    return [
        f"train.global_batch={global_batch} is not divisible by {batch_sizes(mesh)} x "
        f"train.num_microbatches={num_microbatches}; use "
        f"{nearest_multiples(global_batch, multiple)}"
    ]


def batch_sizes(mesh: MeshConfig) -> str:
    """Returns the sizes of the axes that shard the rows of the batch, as text.

    An example is mesh.data=2 x mesh.fsdp=1.
    """
    sizes = {axis: max(1, getattr(mesh, axis)) for axis in BATCH_AXES}
    return " x ".join(f"mesh.{axis}={n}" for axis, n in sizes.items() if n > 1 or axis != "expert")


def own_model_faults(cfg: Config) -> list[str]:
    """Returns a fault if the run had a model of the user's, which no config describes."""
    if cfg.model.build != OWN_MODEL:
        return []
    return [
        f"model.build={OWN_MODEL}: the model of this run was passed in Python, and only Python can "
        f"build it again; pass it to train, or set --config.model.build=MODULE:FUNCTION, a "
        f"function of yours that returns it, with --trust_code"
    ]


def model_faults(cfg: Config) -> list[str]:
    """Returns the faults of a `model` section that does not fit the mesh or the pipeline."""
    options = cfg.model.options
    faults = tensor_faults(options, max(1, cfg.mesh.tensor))
    faults += expert_faults(options, cfg.mesh.expert)
    num_layers = options.get("num_layers")
    num_first = options.get("first_dense_layers", 0)
    if cfg.mesh.pipeline > 1 and isinstance(num_layers, int) and isinstance(num_first, int):
        faults += layer_faults(
            num_layers - num_first,
            num_stages=cfg.mesh.pipeline,
            num_chunks=cfg.pipeline.num_chunks,
            num_first=num_first,
        )
    return faults


def remat_faults(cfg: Config) -> list[str]:
    """Returns a fault if `train.remat` offloads activations of a pipeline.

    With pipeline.keep=inputs that would save nothing: what a stage keeps for long are inputs of
    chunks. With pipeline.keep=residuals it keeps them in slots, which are arrays of the device.
    """
    if cfg.mesh.pipeline == 1 or not is_offloaded(cfg.train.remat):
        return []
    return [
        f"train.remat={cfg.train.remat}: with mesh.pipeline={cfg.mesh.pipeline} the stages keep "
        f"activations in slots in the memory of their device, so nothing would be saved; use "
        f"train.remat=full with pipeline.keep=inputs"
    ]


def tensor_faults(model: Mapping[str, Any], tensor: int) -> list[str]:
    """Returns a fault for each size that `mesh.tensor` shards and does not divide."""
    return [
        f"model.{key}={value} is not divisible by mesh.tensor={tensor}; "
        f"use {nearest_multiples(value, tensor)}, or another mesh.tensor"
        for key in ("num_heads", "d_ff")
        if isinstance(value := model.get(key), int) and value % tensor
    ]


def expert_faults(model: Mapping[str, Any], expert: int) -> list[str]:
    """Returns a fault if the model does not have a multiple of `mesh.expert` experts.

    Other models may name theirs.
    """
    num_experts = model.get("num_experts")
    if expert <= 1 or not isinstance(num_experts, int):
        return []
    if num_experts == 0:
        return [
            f"mesh.expert={expert}: the model has no experts; put the devices on data or fsdp, or "
            "set model.num_experts"
        ]
    if num_experts % expert == 0:
        return []
    return [
        f"model.num_experts={num_experts} is not divisible by mesh.expert={expert}; "
        f"use {nearest_multiples(num_experts, expert)}, or another mesh.expert"
    ]


def layer_faults(
    num_layers: int, num_stages: int, num_chunks: int, *, num_first: int = 0
) -> list[str]:
    """Returns a fault if chunks would differ in length: all stages would wait for the longest one.

    `num_layers` does not include the `num_first` layers before the stack, which belong to no stage.
    """
    pieces = num_stages * num_chunks
    if num_layers % pieces == 0:
        return []
    less = f", less model.first_dense_layers={num_first}," if num_first else ""
    return [
        f"model.num_layers={num_first + num_layers}{less} is not divisible by "
        f"mesh.pipeline={num_stages} x pipeline.num_chunks={num_chunks}; use "
        f"{nearest_multiples(num_layers, pieces, num_first)}"
    ]


def position_faults(cfg: Config) -> list[str]:
    """Returns a fault if sequences are longer than the table of learned positions.

    Otherwise jax would clamp the index.
    """
    rows, seq_len = cfg.model.options.get("max_seq_len"), cfg.data.options.get("seq_len")
    if cfg.model.options.get("positions") != "learned":
        return []
    if not (isinstance(rows, int) and isinstance(seq_len, int)) or seq_len <= rows:
        return []
    return [
        f"data.seq_len={seq_len} is more than model.max_seq_len={rows}; use the same, or "
        "positions='rope'"
    ]


def sequence_faults(data: Mapping[str, Any], num_devices: int) -> list[str]:
    """Returns a fault if devices along `context` cannot hold two equal chunks of each sequence."""
    length = data.get("seq_len")
    if not isinstance(length, int) or num_devices <= 1 or length % (2 * num_devices) == 0:
        return []
    return [
        f"data.seq_len={length} is not divisible by 2 x mesh.context={num_devices}; "
        f"use {nearest_multiples(length, 2 * num_devices)}"
    ]


def rule_faults(rules: Any) -> list[str]:
    """Returns the faults of `config.rules`."""
    faults = []
    for rule in rules if isinstance(rules, (tuple, list)) else [rules]:
        axes = rule[1] if isinstance(rule, (tuple, list)) and len(rule) == 2 else 0
        axes = (axes,) if isinstance(axes, str) else () if axes is None else axes
        if not isinstance(axes, (tuple, list)) or not isinstance(rule[0], str):
            faults.append(
                f"config.rules: {rule!r} is not (logical name, mesh axis or axes or None)"
            )
            continue
        for axis in axes:
            if axis not in AXES:
                faults.append(
                    f"config.rules maps {rule[0]!r} to {axis!r}, not a mesh "
                    f"axis{did_you_mean(axis, AXES)}"
                )
        if len({*axes}) < len(axes):
            faults.append(f"config.rules maps {rule[0]!r} to {rule[1]!r}; use each axis once")
    return faults


def train_faults(mesh: MeshConfig, train: TrainConfig) -> list[str]:
    """Returns the faults of the mesh, and of the batch on it if its size is known."""
    if train.batch_per_device:
        return []
    return batch_faults(
        mesh,
        global_batch=train.global_batch,
        num_microbatches=train.num_microbatches,
    )
