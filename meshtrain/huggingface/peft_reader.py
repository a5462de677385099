"""Reads an adapter in the folder layout of PEFT, with which a run begins: `adapter.init_from`.

peft.py describes the layout. Adapters of older versions of transformers have a module for each
expert.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain import foreign
from meshtrain.checkpoint import run_tokenizer
from meshtrain.cluster import distributed
from meshtrain.config.schema import AdapterConfig, Config
from meshtrain.errors import ConfigError
from meshtrain.huggingface import (
    config_json,
    convert,
    files,
    name_pattern,
    peft_layout,
    tensor_rows,
)
from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import BUILD, Family, Section
from meshtrain.huggingface.peft import CONFIG, KERNEL, PREFIX, WEIGHTS
from meshtrain.huggingface.peft_layout import Factors, Target
from meshtrain.huggingface.tensor_rows import Row
from meshtrain.models import trees
from meshtrain.models.base import Params
from meshtrain.models.lora_layer import A, B

# E experts, R rank, I inputs, O outputs

INIT_FROM = "adapter.init_from"


# ---- of a run ----


def with_settings(cfg: Config) -> Config:
    """Returns the config with the section `adapter` of the folder in `adapter.init_from`.

    With `adapter.rank` the section stays as it is. Raises ConfigError if the folder does not fit.
    """
    own = cfg.adapter
    if not own.init_from:
        return cfg
    if not cfg.checkpoint.init_from:
        raise ConfigError(
            f"{INIT_FROM}={own.init_from}: belongs to a model; set checkpoint.init_from to its "
            f"Hugging Face folder, or to a run"
        )
    found = found_for(cfg)
    if not own.rank:
        return replace(cfg, adapter=replace(found.settings, init_from=own.init_from))
    if own.rank != found.settings.rank:
        raise ConfigError(
            f"adapter.rank={own.rank}: {own.init_from} has rank {found.settings.rank}; leave out "
            f"adapter.rank"
        )
    return cfg


def load_params(
    params: Params, cfg: Config, *, event: Callable[..., None], log: Callable[[str], None]
) -> Params:
    """Returns `params` with the A and B of the folder in `adapter.init_from`.

    All processes call it. Logs what is loaded, and which modules of the same layers have no update.
    """
    with distributed.raise_on_all_processes():
        found = found_for(cfg)
        paths = {trees.name_of(path) for path, _ in jax.tree.leaves_with_path(params)}
        if absent := sorted(found.factors.keys() - paths):
            layer = absent[0].rpartition("/")[0]
            raise ConfigError(
                f"{INIT_FROM}={cfg.adapter.init_from}: has an update of {layer}, which "
                f"adapter.targets does not match; leave out adapter.rank, or add it"
            )
    # The factor of the run may be another one.
    ratio = found.settings.scale / cfg.adapter.scale
    for path, value in found.factors.items():
        leaf = trees.leaf(params, path)
        if path.endswith(f"/{B}") and not math.isclose(ratio, 1.0):
            value = value * ratio
        value = value.astype(leaf.dtype)
        array = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index, value=value: value[index]
        )
        params = trees.merge(params, trees.nested(path, array))
    settings = found.settings
    message = f"adapter of {cfg.adapter.init_from} (rank {settings.rank}, alpha {settings.alpha:g}"
    message += ", rsLoRA)" if settings.rslora else ")"
    if found.base_model:
        message += f", trained with {found.base_model}"
    if found.missing:
        message += f" · without an update: {', '.join(found.missing[:5])}"
        message += ", ..." if len(found.missing) > 5 else ""
    log(message)
    event("adapter_init_from", path=cfg.adapter.init_from, base=found.base_model)
    return params


def found_for(cfg: Config) -> "Found":
    """Returns the adapter in `adapter.init_from`; its faults begin with the key."""
    place = cfg.adapter.init_from
    if cfg.model.build != BUILD:
        raise ConfigError(f"{INIT_FROM}={place}: model.build={cfg.model.build}: use {BUILD}")
    section = {**config_json.SECTION_DEFAULTS, **cfg.model.options, "build": BUILD}
    original = run_tokenizer.imported_config(Path(cfg.checkpoint.init_from), cfg.to_dict())
    try:
        config = config_json.to_config(section, config_json.read(original) if original else None)
        model = convert.model_of(section)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        paths = [path + KERNEL for path in (*model.linears, *model.expert_linears)]
        kernels = {path: trees.leaf(shapes, path).shape for path in paths}
        return read(Path(place), config_json.family_of(config), section, kernels)
    except ConfigError as error:
        raise ConfigError(*(f"{INIT_FROM}={place}: {fault}" for fault in error.faults)) from error


# ---- a folder ----


# Keys of adapter_config.json that change nothing here: what PEFT adapts is seen from the tensors.
IGNORED = (
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "peft_version", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "megatron_core"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying", "eva_config"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    # Of initial values, or of variants that another key switches on.
    *("direction", "scale", "stable_gamma", "num_samples", "use_entropy", "dirichlet_prior"),
    *("sample_scaler", "kl_loss_weight", "buffer_size"),
)
# With any other initial values PEFT also changes the weights of the model.
INITIAL_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Found:
    """An adapter in a folder, as parameters of a run."""

    base_model: str | None  # the model that it was trained with
    settings: AdapterConfig  # with the paths of its layers as targets
    # By path: A (layers, inputs, rank), B (layers, rank, outputs); those of experts have one more
    # dim, after that of the layers.
    factors: Mapping[str, np.ndarray]
    missing: Sequence[str]  # modules of these layers that have no update


def read(folder: Path, family: Family, section: Section, kernels: Mapping[str, tuple]) -> Found:
    """Returns the adapter in a folder for a model of `family`.

    `section` is its `model` section, `kernels` the shapes of all kernels that may have an update,
    by path. Raises ConfigError, with a line for each key or tensor that this package does not
    support.
    """
    config = _read_config(folder)
    modules = _read_modules(folder, family)
    rank, alpha, rslora = config["r"], config["lora_alpha"], bool(config.get("use_rslora"))
    used: set[str] = set()
    factors: dict[str, tuple[list[Factors | None], Row, list[str]]] = {}
    missing: dict[str, None] = {}  # in their order
    targets = peft_layout.targets(tensor_rows.rows(family.names, kernels, section), family)
    for target in targets:
        found = _factors_of(target, targets, modules, config, used)
        for row, of_row in zip(target.rows, found, strict=True):
            if any(one is not None for one in of_row):
                names = _module_names(row, target)
                factors[row.path.removesuffix(KERNEL)] = of_row, row, names
                absent = (number for number, one in enumerate(of_row) if one is None)
                missing |= dict.fromkeys(names[number] for number in absent)
    if unused := sorted(modules.keys() - used):
        raise ConfigError(
            f"{folder / WEIGHTS}: {unused[0]} of {family.architecture} has an update, which is not "
            f"possible here ({len(unused)} such modules); there may be one of the projections of "
            f"attention, feed-forward and experts"
        )
    found_ranks = [one[0].shape[-2] for many, *_ in factors.values() for one in many if one]
    settings = AdapterConfig(
        rank=max(found_ranks, default=rank),
        alpha=alpha,
        targets=tuple(sorted(factors)),
        dropout=config.get("lora_dropout") or 0.0,
        rslora=rslora,
        experts=any(row.is_of_experts for _, row, _ in factors.values()),
    )
    # The factor of another rank than `r` stays the same.
    scale = AdapterConfig(rank=rank, alpha=alpha, rslora=rslora).scale
    settings = replace(settings, alpha=alpha * scale / settings.scale)
    arrays: dict[str, np.ndarray] = {}
    for path, (many, row, names) in factors.items():
        a, b = _stacked(many, row, names, kernels[path + KERNEL], settings.rank)
        arrays |= {f"{path}/{A}": a, f"{path}/{B}": b}
    return Found(config.get("base_model_name_or_path"), settings, arrays, [*missing])


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = foreign.read_json(path)
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    faults = []
    if config.get("peft_type") != "LORA":
        faults.append(f"peft_type={config.get('peft_type')!r}: only LORA is supported")
    if not base.is_count(config.get("r")):
        faults.append(f"r={config.get('r')!r}: is not an integer of at least 1")
    if not base.is_positive(config.get("lora_alpha")):
        faults.append(f"lora_alpha={config.get('lora_alpha')!r}: is not a positive number")
    dropout = config.get("lora_dropout") or 0.0
    if not base.is_number(dropout) or not 0 <= dropout < 1:
        faults.append(f"lora_dropout={dropout!r}: is not a probability below 1")
    if config.get("bias", "none") != "none":
        faults.append(f"bias={config['bias']!r}: biases are not part of an adapter here")
    if config.get("init_lora_weights") not in INITIAL_VALUES:
        faults.append(
            f"init_lora_weights={config['init_lora_weights']!r}: changes the weights of the model "
            f"too; save it with path_initial_model_for_weight_conversion"
        )
    known = (*IGNORED, "bias", "init_lora_weights")
    for key, value in config.items():
        if key not in known and value not in (None, False, {}, [], ""):
            faults.append(f"{key}={value!r}: is not supported")
    if faults:
        raise ConfigError(*(f"{path}: {fault}" for fault in faults))
    return config


def _read_modules(folder: Path, family: Family) -> dict[str, Factors]:
    """Returns A and B of each module, by its name in the files of the model."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"{path}: is missing; an adapter is read from safetensors only, since .bin can run code"
        )
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in files.read_header(path).items():
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        known = tensor.code in files.DTYPES and len(tensor.shape) == 2
        if not name.endswith(".weight") or factor not in ("lora_A", "lora_B") or not known:
            raise ConfigError(
                f"{path}: {name} is no factor of a linear layer; an adapter here has only lora_A "
                f"and lora_B"
            )
        halves.setdefault(_in_model(module, family), {})[factor] = np.array(tensor.read())
    modules = {}
    for module, found in halves.items():
        if found.keys() != {"lora_A", "lora_B"} or not found["lora_A"].size:
            raise ConfigError(f"{path}: {module} has only {', '.join(found)}")
        a, b = found["lora_A"], found["lora_B"]
        if a.shape[0] != b.shape[1]:
            raise ConfigError(
                f"{path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            )
        modules[module] = a, b
    if not modules:
        raise ConfigError(f"{path}: has no lora_A and lora_B")
    return modules


def _in_model(module: str, family: Family) -> str:
    """Returns the name of a module in the files of a family, without the prefixes of PEFT."""
    module = module.removeprefix(PREFIX)
    for prefix, replacement in family.prefixes:
        if module.startswith(prefix):
            return replacement + module.removeprefix(prefix)
    return module


def _factors_of(
    target: Target,
    targets: Sequence[Target],
    modules: Mapping[str, Factors],
    config: Mapping[str, Any],
    used: set[str],
) -> list[list[Factors | None]]:
    """Returns A (R, I) and B (O, R) of each of a target's kernels, by layer and expert.

    None stands for those without an update. B includes what the factor of the module differs from
    that of the adapter. Adds the modules to `used`.
    """
    num_experts = target.num_experts
    found: list[list[Factors | None]] = [[] for _ in target.rows]
    for layer, name in enumerate(target.names):
        module = _module_of(target, name, targets, modules, config)
        if module is not None:
            used.add(module)
            factors = _with_factor(modules[module], name, config, num_experts=num_experts)
            num_outputs = len(factors[1])
            if num_outputs != target.num_outputs:
                raise ConfigError(
                    f"{WEIGHTS}: {name} has {target.num_outputs} outputs, and its lora_B "
                    f"{list(factors[1].shape)}; use the model that the adapter belongs to"
                )
            of_kernels = peft_layout.split(target, factors, config["r"])
            for of_row, of_kernel in zip(found, of_kernels, strict=True):
                for expert in range(num_experts):
                    one = of_kernel and (of_kernel[0][expert], of_kernel[1][expert])
                    of_row.append(one)
            continue
        # Adapters of earlier versions of transformers have the names of the tensors in the files.
        for row, of_row in zip(target.rows, found, strict=True):
            first = layer * num_experts
            for own_module in _module_names(row, target)[first : first + num_experts]:
                has_own = not target.is_of_experts or peft_layout.is_split_by_expert(row)
                own_factors = modules.get(own_module) if has_own else None
                if own_factors is not None:
                    used.add(own_module)
                    own_factors = _with_factor(own_factors, own_module, config)
                of_row.append(own_factors)
    return found


def _module_names(row: Row, target: Target) -> list[str]:
    """Returns the names in the files of a kernel's modules, by layer and expert."""
    if target.is_of_experts and not peft_layout.is_split_by_expert(row):
        return [name for name in target.names for _ in range(target.num_experts)]
    return [name.removesuffix(".weight") for name in row.tensors]


def _module_of(
    target: Target,
    name: str,
    targets: Sequence[Target],
    modules: Mapping[str, Factors],
    config: Mapping[str, Any],
) -> str | None:
    """Returns the module that has the factors of `name`, of `target.names`; None if none has."""
    if not target.is_of_experts:
        return name if name in modules else None
    folder, _, leaf = name.rpartition(".")
    if f"{folder}.base_layer" in modules:
        module = peft_layout.module_of(target, name, targets)
    else:
        # There is one, whose name only adapter_config.json has.
        named = [str(one).rpartition(".")[2] for one in config.get("target_parameters") or []]
        module = folder if leaf in named else None
    return module if module in modules else None


def _with_factor(
    factors: Factors, module: str, config: Mapping[str, Any], *, num_experts: int = 1
) -> Factors:
    """Returns the factors; B times the factor of this module, relative to that of the adapter."""
    a, b = factors
    if a.shape[0] % num_experts:
        raise ConfigError(
            f"{WEIGHTS}: {module}: lora_A {list(a.shape)} has not {num_experts} experts"
        )
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            is_match = name_pattern.matches(pattern, module)
        except ValueError as error:
            raise ConfigError(f"{CONFIG}: alpha_pattern={pattern!r}: {error}") from error
        if not base.is_positive(value):
            raise ConfigError(
                f"{CONFIG}: alpha_pattern={pattern!r}: {value!r} is not a positive number"
            )
        if is_match:
            alpha = value
            break
    rslora = bool(config.get("use_rslora"))
    own = AdapterConfig(rank=a.shape[0] // num_experts, alpha=alpha, rslora=rslora).scale
    common = AdapterConfig(rank=config["r"], alpha=config["lora_alpha"], rslora=rslora).scale
    ratio = own / common
    return (a, b) if math.isclose(ratio, 1.0) else (a, b * np.asarray(ratio, b.dtype))


def _stacked(
    many: Sequence[Factors | None],
    row: Row,
    names: Sequence[str],
    kernel: tuple[int, ...],
    rank: int,
) -> Factors:
    """Returns A and B of all tensors of a kernel, of shape `kernel`, as parameters.

    `names` are those of the modules. Ranks that a tensor lacks are zeros, which stay zeros in
    training.
    """
    num_stacked = ("L" in row.sizes) + row.is_of_experts
    stack, dims = kernel[:num_stacked], kernel[num_stacked:]
    num_in, num_out = next((a.shape[-1], len(b)) for a, b in filter(None, many))
    into = next(
        (n for n in range(1, len(dims)) if math.prod(dims[:n]) == num_in),
        len(dims) - 1,
    )
    expected = (math.prod(dims[:into]), math.prod(dims[into:]))
    first = next(one for one in many if one is not None)
    a = np.zeros((len(many), num_in, rank), np.promote_types(np.float32, first[0].dtype))
    b = np.zeros((len(many), rank, num_out), a.dtype)
    for number, factors in enumerate(many):
        if factors is None:
            continue
        a_RI, b_OR = factors
        if (a_RI.shape[-1], len(b_OR)) != expected:
            raise ConfigError(
                f"{WEIGHTS}: {names[number]} has {expected[0]} inputs and {expected[1]} "
                f"outputs, and its lora_A {list(a_RI.shape)}, its lora_B {list(b_OR.shape)}; use "
                f"the model that the adapter belongs to"
            )
        a[number, :, : len(a_RI)] = a_RI.T
        b[number, : len(a_RI)] = b_OR.T
    return (
        a.reshape(*stack, *dims[:into], rank),
        b.reshape(*stack, rank, *dims[into:]),
    )
