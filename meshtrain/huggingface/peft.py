"""Adapters in the folder layout of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, tensor_rows
from meshtrain.huggingface.families.base import Family, Section
from meshtrain.huggingface.tensor_rows import Row
from meshtrain.models import lora as adapters
from meshtrain.models import lora_merge
from meshtrain.models.base import Model
from meshtrain.models.lora_layer import A, B

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Of the names of modules in PEFT, and of the path of a kernel.
PREFIX, KERNEL = "base_model.model.", "/kernel"


def write(
    folder: Path,
    family: Family,
    section: Section,
    load: Callable[[str], np.ndarray],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Sequence[str],
    adapter: Mapping[str, Any],
    dtype: np.dtype,
) -> None:
    """Writes the adapter of `layers`, the paths of linear layers.

    `shapes` are those of the parameters, by path; `load` returns a parameter by its path. `section`
    is the model section, `adapter` the section of this name. Raises ConfigError for a layer that
    has no tensor of its own in the family's files.
    """
    if not layers:
        raise ConfigError("--adapter: the run has no adapter (adapter.rank=0); leave out --adapter")
    kernels = {path + KERNEL: shapes[path + KERNEL] for path in layers}
    rows = tensor_rows.rows(family.names, kernels, section)
    # PEFT (0.21) takes every module of such a name for a part of the fused experts.
    expert_leaves = {_leaf_of(name) for names in family.fused.values() for name in names}
    specs = []
    arrays = []
    modules = set()
    for row in rows:
        if any(letter.isdigit() for dim in row.dims for letter in dim):
            raise ConfigError(
                f"--adapter: {row.path} is a part of the tensor {row.name} of "
                f"{family.architecture}, which PEFT cannot adapt alone; export the merged weights, "
                f"without --adapter"
            )
        if _leaf_of(row.name) in expert_leaves:
            raise ConfigError(
                f"--adapter: {row.path} is {row.name} of {family.architecture}, and PEFT adapts "
                f"the routed experts in its place, by the name {_leaf_of(row.name)}; export the "
                f"merged weights, without --adapter"
            )
        path = row.path.removesuffix(KERNEL)
        a, b = _factors(load(f"{path}/{A}"), load(f"{path}/{B}"), num_stacked=len(row.stack))
        for number, name in enumerate(row.tensors):
            module = name.removesuffix(".weight")
            modules.add(module)
            for factor, value in (("lora_A", a[number]), ("lora_B", b[number])):
                name_in_peft = f"{PREFIX}{module}.{factor}.weight"
                specs.append(files.TensorSpec(name_in_peft, value.shape, dtype))
                arrays.append(np.ascontiguousarray(value, dtype))
    files.write_file(folder / WEIGHTS, specs, arrays)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter["rank"],
        "lora_alpha": adapter["alpha"],
        "lora_dropout": adapter.get("dropout", 0.0),
        "bias": "none",
        # Whether the kernels in the files are (inputs, outputs), as GPT-2's are.
        "fan_in_fan_out": all(_begins_with_inputs(row) for row in rows),
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _factors(a: np.ndarray, b: np.ndarray, *, num_stacked: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of each tensor as PEFT stores them.

    Whatever the order of a kernel's dims, A is (tensor, rank, inputs), B (tensor, outputs, rank).
    """
    rank = a.shape[-1]
    a = a.reshape(*a.shape[:num_stacked], -1, rank).swapaxes(-1, -2)
    b = b.reshape(*b.shape[:num_stacked], rank, -1).swapaxes(-1, -2)
    return a.reshape(-1, *a.shape[num_stacked:]), b.reshape(-1, *b.shape[num_stacked:])


def _leaf_of(tensor: str) -> str:
    """Returns the last name of a tensor's module: gate_proj of model.layers.*.mlp.gate_proj."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _begins_with_inputs(row: Row) -> bool:
    return row.dims[0].startswith(tensor_rows.DIMS[tensor_rows.in_stack(row.path)][0])


def adapted(model: Model, adapter: Mapping[str, Any]) -> Model:
    """Returns the model with the adapter of a run, from the section `adapter` of its config."""
    rank = adapter.get("rank", 0)
    if not rank:
        return model
    return adapters.lora(
        model,
        rank=rank,
        alpha=adapter.get("alpha"),
        targets=tuple(adapter.get("targets", ())),
    )


def merging(
    load: Callable[[str], np.ndarray], adapter: Mapping[str, Any], adapted_layers: Iterable[str]
) -> Callable[[str], np.ndarray]:
    """Returns `load` with the adapter of each kernel added to it, in float32 or float64."""
    layers = {*adapted_layers}

    def load_merged(path: str) -> np.ndarray:
        kernel = load(path)
        layer = path.removesuffix(KERNEL)
        if layer == path or layer not in layers:
            return kernel
        dtype = np.promote_types(np.float32, kernel.dtype)
        merged = lora_merge.merged(
            kernel.astype(dtype),
            load(f"{layer}/{A}").astype(dtype),
            load(f"{layer}/{B}").astype(dtype),
            scale=adapter["alpha"] / adapter["rank"],
        )
        return merged.astype(kernel.dtype)

    return load_merged
