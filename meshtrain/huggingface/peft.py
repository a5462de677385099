"""Writes adapters in the folder layout of PEFT: adapter_config.json, adapter_model.safetensors.

A linear layer has lora_A (rank, inputs) and lora_B (outputs, rank). transformers holds the kernels
of all experts of a layer in one parameter, such as mlp.experts.gate_up_proj: (experts, outputs,
inputs), with the outputs of gate and up one after the other. Its lora_A is (experts x rank,
inputs), its lora_B (outputs, rank x experts). Two such parameters of a module are nested in PEFT:
the names of the first have `.base_layer`. peft_reader.py reads such folders.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config.schema import AdapterConfig
from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, tensor_rows
from meshtrain.huggingface.families.base import Family, Section
from meshtrain.huggingface.tensor_rows import Row
from meshtrain.models import lora as adapters
from meshtrain.models import lora_merge
from meshtrain.models.base import Model
from meshtrain.models.lora_layer import A, B

# E experts, R rank, I inputs, O outputs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Of the names of modules in PEFT, and of the path of a kernel.
PREFIX, KERNEL = "base_model.model.", "/kernel"


def section_of(adapter: Mapping[str, Any]) -> AdapterConfig:
    """Returns the section `adapter` of a recorded config, also of an earlier version."""
    names = {field.name for field in fields(AdapterConfig)}
    known = {name: value for name, value in adapter.items() if name in names}
    return AdapterConfig(**{**known, "targets": tuple(known.get("targets", ()))})


Factors = tuple[np.ndarray, np.ndarray]  # A (R, I) and B (O, R); of experts (E, R, I), (E, O, R)

# ---- writing ----


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
    base_model: str | None,
) -> None:
    """Writes the adapter of `layers`, the paths of linear layers and of kernels of experts.

    `shapes` are those of the parameters, by path; `load` returns a parameter by its path. `section`
    is the model section, `adapter` the section of this name, `base_model` the name or folder of the
    model that it belongs to, if that is known. Raises ConfigError for a layer that PEFT cannot
    adapt alone.
    """
    if not layers:
        raise ConfigError("--adapter: the run has no adapter (adapter.rank=0); leave out --adapter")
    settings = section_of(adapter)
    kernels = {path + KERNEL: shapes[path + KERNEL] for path in layers}
    rows = tensor_rows.rows(family.names, kernels, section)
    linear_rows = [row for row in rows if not is_of_experts(row)]
    expert_rows = [row for row in rows if is_of_experts(row)]
    if fault := _fault_of(rows, family):
        raise ConfigError(
            f"--adapter: {fault}; export the merged weights, without --adapter, or train without "
            f"such layers in adapter.targets"
        )

    found: dict[str, Factors] = {}
    for row in linear_rows:
        a, b = _load_factors(load, row)
        for number, name in enumerate(row.tensors):
            found[name.removesuffix(".weight")] = a[number], b[number]
    modules = sorted(found)
    parameters = _parameters_of_experts(expert_rows, family)
    rank_pattern = {
        name: settings.rank * len(adapted)
        for name, adapted in parameters.items()
        if len(adapted) > 1
    }
    for name, adapted in parameters.items():
        # Of two parameters of a module, PEFT nests the first in the second.
        is_inner = len(parameters) > 1 and name == next(iter(parameters))
        found |= _factors_of_experts(name, family.fused[name], adapted, load, is_inner=is_inner)
    specs = []
    arrays = []
    for module, factors in found.items():
        for name, value in zip(("lora_A", "lora_B"), factors, strict=True):
            specs.append(files.TensorSpec(f"{PREFIX}{module}.{name}.weight", value.shape, dtype))
            arrays.append(np.ascontiguousarray(value, dtype))
    files.write_file(folder / WEIGHTS, specs, arrays)
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "use_rslora": settings.rslora,
        "lora_dropout": settings.dropout,
        "bias": "none",
        # Whether the kernels in the files are (inputs, outputs), as GPT-2's are.
        "fan_in_fan_out": bool(linear_rows) and all(map(_begins_with_inputs, linear_rows)),
        "target_modules": modules or None,
        "inference_mode": True,
    }
    if parameters:
        described["target_parameters"] = [*parameters]
    if rank_pattern:
        described["rank_pattern"] = rank_pattern
        described["alpha_pattern"] = {
            name: _alpha_of(settings, rank) for name, rank in rank_pattern.items()
        }
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _alpha_of(settings: AdapterConfig, rank: int) -> float:
    """Returns the alpha with which an update of another rank has the same factor."""
    ratio = rank / settings.rank
    return settings.alpha * (math.sqrt(ratio) if settings.rslora else ratio)


def is_of_experts(row: Row) -> bool:
    """Returns whether each expert has a tensor in the files."""
    return row.name.count("*") > 1


def fault_of(
    family: Family, section: Section, shapes: Mapping[str, tuple[int, ...]], layers: Sequence[str]
) -> str | None:
    """Returns why `write` would raise for an adapter of `layers`; None if it would not."""
    kernels = {path + KERNEL: shapes[path + KERNEL] for path in layers}
    return _fault_of(tensor_rows.rows(family.names, kernels, section), family)


def _fault_of(rows: Iterable[Row], family: Family) -> str | None:
    # PEFT (0.21) takes every module of such a name for a part of the fused experts.
    expert_leaves = {_leaf_of(name) for names in family.fused.values() for name in names}
    fused = fused_of_experts(family)
    for row in rows:
        if row.holds_all_experts:
            return (
                f"{row.path}: {family.architecture} holds all experts of a layer in {row.name}, "
                f"of which no adapter can be written"
            )
        if row.fused is not None:
            return (
                f"{row.path} is a part of the tensor {row.name} of {family.architecture}, which "
                f"PEFT cannot adapt alone"
            )
        if is_of_experts(row):
            if not any(row.name.endswith(parts) for parts in fused.values()):
                return (
                    f"{row.path} is {row.name} of {family.architecture}, of which no parameter of "
                    f"transformers is known"
                )
        elif _leaf_of(row.name) in expert_leaves:
            return (
                f"{row.path} is {row.name} of {family.architecture}, and PEFT adapts the routed "
                f"experts in its place, by the name {_leaf_of(row.name)}"
            )
    return None


def _load_factors(load: Callable[[str], np.ndarray], row: Row) -> Factors:
    """Returns the factors of each tensor as PEFT stores them.

    Whatever the order of a kernel's dims, A is (tensor, rank, inputs), B (tensor, outputs, rank).
    """
    path = row.path.removesuffix(KERNEL)
    a, b = load(f"{path}/{A}"), load(f"{path}/{B}")
    num_stacked = len(row.stack)
    rank = a.shape[-1]
    a = a.reshape(*a.shape[:num_stacked], -1, rank).swapaxes(-1, -2)
    b = b.reshape(*b.shape[:num_stacked], rank, -1).swapaxes(-1, -2)
    return a.reshape(-1, *a.shape[num_stacked:]), b.reshape(-1, *b.shape[num_stacked:])


def _leaf_of(tensor: str) -> str:
    """Returns the last name of a tensor's module: gate_proj of model.layers.*.mlp.gate_proj."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


def _begins_with_inputs(row: Row) -> bool:
    return row.dims[0].startswith(tensor_rows.DIMS[tensor_rows.in_stack(row.path)][0])


# ---- the experts of a layer ----


def fused_of_experts(family: Family) -> dict[str, tuple[str, ...]]:
    """Returns the parts of the parameters that hold the kernels of all experts, in their order."""
    return {name: parts for name, parts in family.fused.items() if "*" in parts[0]}


def _parameters_of_experts(rows: Sequence[Row], family: Family) -> dict[str, list[Row]]:
    """Returns the rows that each parameter of transformers consists of, by its name."""
    fused = fused_of_experts(family)
    found = {}
    for name, parts in fused.items():
        if adapted := [row for part in parts for row in rows if row.name.endswith(part)]:
            found[name] = adapted
    return found


def _factors_of_experts(
    parameter: str,
    parts: Sequence[str],
    rows: Sequence[Row],
    load: Callable[[str], np.ndarray],
    *,
    is_inner: bool,
) -> dict[str, Factors]:
    """Returns the factors of a parameter of each layer, by the name of its module in PEFT.

    `rows` are the parts that have an update. Two of them have twice the rank: their A are one after
    the other, and their B are blocks of a diagonal.
    """
    num_layers, num_experts = rows[0].stack
    loaded = [_load_factors(load, row) for row in rows]
    numbers = [next(n for n, part in enumerate(parts) if row.name.endswith(part)) for row in rows]
    stem = rows[0].name.removesuffix(parts[numbers[0]])
    found = {}
    for layer in range(num_layers):
        chosen = slice(layer * num_experts, (layer + 1) * num_experts)
        a_ERI = np.concatenate([a[chosen] for a, _ in loaded], axis=1)
        num_out, rank = loaded[0][1].shape[1:]
        # The parts have equally many outputs.
        b_EOR = np.zeros((num_experts, len(parts) * num_out, len(rows) * rank), a_ERI.dtype)
        for column, (row, (_, b)) in enumerate(zip(numbers, loaded, strict=True)):
            outputs = slice(row * num_out, (row + 1) * num_out)
            ranks = slice(column * rank, (column + 1) * rank)
            b_EOR[:, outputs, ranks] = b[chosen]
        folder = stem.replace("*", str(layer + rows[0].first)) + parameter.rpartition(".")[0]
        module = f"{folder}.base_layer" if is_inner else folder
        found[module] = (
            a_ERI.reshape(-1, a_ERI.shape[-1]),
            b_EOR.transpose(1, 2, 0).reshape(b_EOR.shape[1], -1),
        )
    return found


# ---- a run with an adapter ----


def adapted(model: Model, adapter: Mapping[str, Any]) -> Model:
    """Returns the model with the adapter of a run, from the section `adapter` of its config."""
    settings = section_of(adapter)
    if not settings.rank:
        return model
    return adapters.lora(
        model,
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        rslora=settings.rslora,
        experts=settings.experts,
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
            scale=section_of(adapter).scale,
        )
        return merged.astype(kernel.dtype)

    return load_merged
