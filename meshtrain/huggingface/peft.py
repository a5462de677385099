"""Adapters in the folder layout of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, names
from meshtrain.huggingface.families.base import Family
from meshtrain.models import lora as adapters
from meshtrain.models.base import Model
from meshtrain.models.lora_layer import A, B

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PREFIX, KERNEL = "base_model.model.", "/kernel"


def write(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    load: Callable[[str], np.ndarray],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Sequence[str],
    adapter: Mapping[str, Any],
    dtype: np.dtype,
) -> None:
    """Writes the adapter of `layers`, the paths of linear layers.

    `shapes` are those of the parameters, by path; `load` returns a parameter by its path. `config`
    is the model section, `adapter` the section of this name. Raises ConfigError for a layer that
    has no tensor of its own in the family's files.

    PEFT's A is (rank, inputs), its B (outputs, rank), whatever the order of the kernel's dims.
    """
    if not layers:
        raise ConfigError("--adapter: the run has no adapter (adapter.rank=0); leave out --adapter")
    kernels = {path + KERNEL: shapes[path + KERNEL] for path in layers}
    rows = names.rows(family.names, kernels, config)
    specs, arrays, targets = [], [], set()
    for row in rows:
        if any(letter.isdigit() for dim in row.dims for letter in dim):
            raise ConfigError(
                f"--adapter: {row.path} is a part of the tensor {row.name} of {family.architecture}, which PEFT "
                f"cannot adapt alone; export the merged weights, without --adapter"
            )
        path, lead = row.path.removesuffix(KERNEL), len(row.stack)
        a, b = load(f"{path}/{A}"), load(f"{path}/{B}")
        rank = a.shape[-1]
        a = a.reshape(*a.shape[:lead], -1, rank).swapaxes(-1, -2)
        b = b.reshape(*b.shape[:lead], rank, -1).swapaxes(-1, -2)
        a, b = (one.reshape(-1, *one.shape[lead:]) for one in (a, b))
        for number, name in enumerate(row.tensors):
            module = name.removesuffix(".weight")
            targets.add(module)
            for factor, value in (("lora_A", a[number]), ("lora_B", b[number])):
                tensor = np.ascontiguousarray(value, dtype)
                specs.append(
                    files.TensorSpec(f"{PREFIX}{module}.{factor}.weight", value.shape, dtype)
                )
                arrays.append(tensor)
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
        "target_modules": sorted(targets),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _begins_with_inputs(row: names.Row) -> bool:
    return row.dims[0].startswith(names.DIMS[names.in_stack(row.path)][0])


def adapted(model: Model, adapter: Mapping[str, Any]) -> Model:
    """Returns the model with the adapter of a run, from the section `adapter` of its config."""
    rank = adapter.get("rank", 0)
    options = dict(alpha=adapter.get("alpha"), targets=tuple(adapter.get("targets", ())))
    return adapters.lora(model, rank=rank, **options) if rank else model


def layers_in(saved: Iterable[str]) -> list[str]:
    """Returns the paths of the adapted layers among the arrays of a checkpoint."""
    start, end = "params/", f"/{A}"
    paths = [path for path in saved if path.startswith(start) and path.endswith(end)]
    return [path.removeprefix(start).removesuffix(end) for path in paths]


def merging(
    load: Callable[[str], np.ndarray], adapter: Mapping[str, Any], adapted_layers: Iterable[str]
) -> Callable[[str], np.ndarray]:
    """Returns `load` with the adapter of each kernel added to it, in float32 or float64."""
    layers = {*adapted_layers}

    def load_merged(path: str) -> np.ndarray:
        kernel, layer = load(path), path.removesuffix(KERNEL)
        if layer == path or layer not in layers:
            return kernel
        dtype = np.promote_types(np.float32, kernel.dtype)
        parts = [one.astype(dtype) for one in (kernel, load(f"{layer}/{A}"), load(f"{layer}/{B}"))]
        lead, scale = adapters.num_lead(path), adapter["alpha"] / adapter["rank"]
        return adapters.merged(*parts, scale=scale, num_lead=lead).astype(kernel.dtype)

    return load_merged
