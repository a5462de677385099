"""Writes adapters in the folder layout of PEFT: adapter_config.json, adapter_model.safetensors.

A linear layer has lora_A (rank, inputs) and lora_B (outputs, rank). transformers holds the kernels
of all experts of a layer in one parameter, such as mlp.experts.gate_up_proj. Its lora_A is
(experts x rank, inputs), its lora_B (outputs, rank x experts). Two such parameters of a module are
nested in PEFT: the names of the first have `.base_layer`. peft_layout.py says which kernels such a
layer or parameter holds, peft_reader.py reads such folders.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config.schema import AdapterConfig
from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, peft_layout, tensor_rows
from meshtrain.huggingface.families.base import Family, Section
from meshtrain.huggingface.peft_layout import Factors, Target
from meshtrain.huggingface.tensor_rows import Row
from meshtrain.models import lora as adapters
from meshtrain.models import lora_merge
from meshtrain.models.base import Model
from meshtrain.models.lora_layer import A, B

# L layers, E experts, R rank, I inputs, O outputs. A linear layer is one with E = 1.

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Of the names of modules in PEFT, and of the path of a kernel.
PREFIX, KERNEL = "base_model.model.", "/kernel"


def section_of(adapter: Mapping[str, Any]) -> AdapterConfig:
    """Returns the section `adapter` of a recorded config, also of an earlier version."""
    names = {field.name for field in fields(AdapterConfig)}
    known = {name: value for name, value in adapter.items() if name in names}
    return AdapterConfig(**{**known, "targets": tuple(known.get("targets", ()))})


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
    model that it belongs to, if that is known. Raises ConfigError for a run without an adapter.
    """
    if not layers:
        raise ConfigError("--adapter: the run has no adapter (adapter.rank=0); leave out --adapter")
    settings = section_of(adapter)
    kernels = {path + KERNEL: shapes[path + KERNEL] for path in layers}
    rows = tensor_rows.rows(family.names, kernels, section)
    targets = peft_layout.targets(rows, family)
    linear_rows = [row for row in rows if not row.is_of_experts]
    parameters = [_parameter_name(target) for target in targets if _is_parameter(target, family)]
    layer_targets = [target for target in targets if not _is_parameter(target, family)]
    modules = sorted(name for target in layer_targets for name in target.names)

    found: dict[str, Factors] = {}
    ranks: dict[str, int] = {}
    for target in targets:
        loaded = [_load_factors(load, row) for row in target.rows]
        for layer, name in enumerate(target.names):
            module = peft_layout.module_of(target, name, targets)
            found[module] = peft_layout.joined(target, [(a[layer], b[layer]) for a, b in loaded])
            ranks[name] = settings.rank * len(target.rows)
    rank_pattern = _rank_pattern(ranks, settings.rank)
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
        # PEFT has none of the updates of parameters.
        "lora_dropout": 0.0 if parameters else settings.dropout,
        "bias": "none",
        # Whether the kernels in the files are (inputs, outputs), as GPT-2's are.
        "fan_in_fan_out": bool(linear_rows) and all(row.has_inputs_first for row in linear_rows),
        "target_modules": modules or None,
        "inference_mode": True,
    }
    if parameters:
        described["target_parameters"] = parameters
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


def _is_parameter(target: Target, family: Family) -> bool:
    """Returns whether PEFT gets a target by the name of a parameter, not by that of a layer.

    Routers and experts are no linear layers in transformers. PEFT (0.21) takes each layer that has
    the name of one of an expert's projections for the routed experts: also a shared expert's.
    """
    names_of_experts = {_leaf_of(name) for names in family.fused.values() for name in names}
    return target.is_of_experts or target.is_router or _leaf_of(target.name) in names_of_experts


def _parameter_name(target: Target) -> str:
    """Returns the end of the names of a parameter in all layers."""
    name = target.name if target.is_of_experts else f"{target.name}.weight"
    return name.rpartition("*.")[2]


def _in_layer(name: str) -> str:
    """Returns what follows the index of the layer in a name."""
    return re.sub(r"^.*?\.\d+\.", "", name)


def _rank_pattern(ranks: Mapping[str, int], common: int) -> dict[str, int]:
    """Returns the ranks other than `common`, by the end of a name if that says it for all layers.

    `ranks` are those of all names. PEFT takes a pattern for every name that ends with it.
    """
    pattern = {}
    for name, rank in ranks.items():
        end = _in_layer(name)
        of_end = {
            other_rank
            for other, other_rank in ranks.items()
            if other == end or other.endswith(f".{end}")
        }
        if rank != common:
            pattern[end if of_end == {rank} else name] = rank
    return pattern


def _load_factors(load: Callable[[str], np.ndarray], row: Row) -> Factors:
    """Returns A (L, E, R, I) and B (L, E, O, R) of a kernel, whatever the order of its dims."""
    path = row.path.removesuffix(KERNEL)
    a, b = load(f"{path}/{A}"), load(f"{path}/{B}")
    lead = row.layers_and_experts
    rank = a.shape[-1]
    a_LERI = a.reshape(*lead, -1, rank).swapaxes(-1, -2)
    b_LEOR = b.reshape(*lead, rank, -1).swapaxes(-1, -2)
    return a_LERI, b_LEOR


def _leaf_of(tensor: str) -> str:
    """Returns the last name of a tensor's module: gate_proj of model.layers.*.mlp.gate_proj."""
    return tensor.removesuffix(".weight").rpartition(".")[2]


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
