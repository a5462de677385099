"""The settings of a run: one frozen tree of typed sections, each checked when made, without jax."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from meshtrain.config import paths
from meshtrain.errors import (
    ConfigError,
    choice_faults,
    minimum_faults,
    nearest_divisors,
    nearest_multiples,
    seed_faults,
    x64_faults,
)
from meshtrain.schedules import SCHEDULES

# The options are passed to the compiler by name: for an unknown one it raises an error. In
# XLA_FLAGS an unknown option would abort the process.
XLA_PRESETS: dict[str, dict[str, bool | int | str]] = {
    "none": {},
    # Collectives overlap with computation.
    "overlap": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_p2p": True,
        # How many collectives the scheduler keeps in flight; by default one, so that only one of a
        # layer's weights is gathered while something else is computed.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
        # Gradients are scattered while the next layer's are computed.
        "optimization_level": "O1",
        # Otherwise XLA runs matrix products again to free memory that the step does not need: 5 to
        # 20 % more FLOPs.
        "xla_disable_hlo_passes": "rematerialization",
    },
    # cuBLAS computes matrix products, with bias and activation in the same kernel. XLA's own Triton
    # kernels take each product before that is seen, also where cuBLAS is faster.
    "cublas": {"xla_gpu_enable_triton_gemm": False},
    # Kernels are launched in groups, as CUDA graphs.
    "cuda_graphs": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
        "xla_gpu_graph_min_graph_size": 1,
    },
}

KERNELS = ("auto", "plain", "fused", "pallas")

XLA_PRESET_NAMES = ("auto", *XLA_PRESETS)

# First jaxlib version that knows the option by this value.
XLA_OPTIONS_ADDED_IN = {"optimization_level": (0, 12)}

XLA_OPTIONS_REMOVED_IN = {  # first jaxlib version whose XLA rejects the option
    "xla_gpu_enable_pipelined_all_gather": (0, 11),
    "xla_gpu_enable_pipelined_reduce_scatter": (0, 11),
    "xla_gpu_enable_pipelined_all_reduce": (0, 11),
}


def fill_mesh_sizes(sizes: Mapping[str, int], num_devices: int) -> tuple[dict[str, int], str]:
    """Returns the sizes with the -1 replaced, and a fault or "".

    The fault is a product other than `num_devices`.
    """
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            return {}, (
                f"mesh.{axis}={size} is not an axis size; use 1 or more, or -1 for all remaining "
                "devices"
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        return {}, f"{' and '.join(f'mesh.{axis}' for axis in free)} are -1; only one axis may be"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(
        f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)
    )
    if free and num_devices % fixed:
        return {}, (
            f"{product} needs a multiple of {fixed} devices for mesh.{free[0]}=-1 and there are "
            f"{num_devices}; use sizes whose product divides {num_devices}, or "
            f"--simulate_devices={fixed}"
        )
    if not free and fixed != num_devices:
        return {}, (
            f"{product or 'a mesh with all axes 1'} needs {fixed} devices and there are "
            f"{num_devices}; use --simulate_devices={fixed}, or set one axis to -1"
        )
    return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}, ""


SYNC_DTYPES = ("float32", "bfloat16", "int8", "int4")
SYNC_PATTERNS = ("xla", "hierarchical", "ring", "tree")
SYNC_FEEDBACK = ("auto", "on", "off")


def sync_faults(settings: Any) -> list[str]:
    """Returns the faults of a SyncConfig whose choices are known."""
    found, wire, pattern = [], settings.dtype, settings.pattern
    if settings.block_size < 2 or settings.block_size % 2:
        found.append(
            f"sync.block_size={settings.block_size}: use an even number of elements, such as 256"
        )
    if wire != "float32" and pattern in ("ring", "tree"):
        found.append(
            f"sync.pattern={pattern}: each of its steps would round what sync.dtype={wire} sends "
            "once more; use sync.pattern=hierarchical or xla"
        )
    if wire == "float32" and settings.feedback == "on":
        found.append("sync.feedback=on: sync.dtype=float32 loses nothing; use sync.feedback=auto")
    return found


def has_sync_feedback(settings: Any) -> bool:
    """Returns whether what a step loses is added to the gradients of the next."""
    return settings.feedback == "on" or (settings.feedback == "auto" and settings.dtype == "int4")


def remat_names(remat: str) -> list[str]:
    """Returns the names of the values that `train.remat` keeps; [] if it has no names."""
    kind, _, names = remat.partition(":")
    if remat == "offload":
        return [LAYER_INPUT]
    return names.split(",") if kind in ("names", "offload") else []


def is_offloaded(remat: str) -> bool:
    """Returns whether the values that `train.remat` keeps are in the host's memory."""
    return remat.partition(":")[0] == "offload"


def changed_sync_key(settings: Any) -> str:
    """Returns the key and value that ask for more than XLA's sum, as KEY=VALUE; "" if none does."""
    if settings.dtype != "float32":
        return f"sync.dtype={settings.dtype}"
    return "" if settings.pattern == "xla" else f"sync.pattern={settings.pattern}"


@dataclass(frozen=True)
class AdapterConfig:
    """Values are checked where they are used, in models/lora.py."""

    rank: int = 0
    alpha: float = 16.0
    targets: tuple = ("layers/*",)
    dropout: float = 0.0
    rslora: bool = False
    experts: bool = False
    init_from: str = ""

    @property
    def scale(self) -> float:
        """Returns the factor of A B: alpha / rank (arXiv 2106.09685), or alpha / sqrt(rank).

        The latter is rsLoRA (arXiv 2312.03732).
        """
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# From the slowest links to the fastest: neighbours along `tensor` exchange the most data.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")  # shard the rows of the batch
DTYPES = ("float32", "bfloat16", "float16", "float64")  # compute dtypes
STORED_DTYPES = ("float32", "bfloat16", "float64")  # float16 would lose most updates
REMAT = ("none", "full", "dots", "names:NAME,NAME", "offload", "offload:NAME,NAME")
LAYER_INPUT = "layer_input"  # the name of each layer's input, for train.remat=offload
LEARNING_RATE_SCHEDULES = ("constant", "cosine", "linear", "wsd")
KEEP = ("inputs", "residuals")
CONTEXT_METHODS = ("auto", "ring", "gather", "ulysses")
EXPERT_METHODS = ("auto", "gather", "dispatch")
EXPERT_KERNELS = ("auto", "batched", "grouped")
EXPORTS = ("", "hf")


def _raise(faults: list[str]) -> None:
    if faults:
        raise ConfigError(*faults)


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis; at most one may be -1: all remaining devices.

    `slices` is not an axis: it says into how many slow-linked parts `data` is split.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    slices: int = 1
    auto: bool = False  # `tools.plan.auto` replaces the sizes, before they are resolved

    def __post_init__(self):
        _raise(minimum_faults(1, {"mesh.slices": self.slices}))

    def resolve(self, num_devices: int) -> "MeshConfig":
        """Replaces the -1, for a product of `num_devices`, or raises ConfigError."""
        if self.auto:
            raise ConfigError(
                "mesh.auto=True: only train, audit and profile choose a mesh; set the sizes of mesh"
            )
        # In the order of the fields, which messages have too.
        sizes = asdict(self)
        del sizes["slices"], sizes["auto"]
        sizes, fault = fill_mesh_sizes(sizes, num_devices)
        if fault:
            raise ConfigError(fault)
        data, slices = sizes["data"], self.slices
        if data % slices:
            raise ConfigError(
                f"mesh.slices={slices} does not divide mesh.data={data}; use "
                f"mesh.slices={nearest_divisors(data, slices)}, or "
                f"mesh.data={nearest_multiples(data, slices)}"
            )
        return MeshConfig(**sizes, slices=slices)


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    global_batch: int
    num_microbatches: int
    seed: int
    log_every: int
    zero_stage: int
    remat: str
    unroll: int
    xla_preset: str
    dtype: str
    param_dtype: str
    kernels: str = "auto"
    trainable: str = "*"
    epochs: float = 0.0
    batch_per_device: int = 0

    def __post_init__(self):
        faults = minimum_faults(
            1,
            {
                "train.num_microbatches": self.num_microbatches,
                "train.log_every": self.log_every,
                "train.unroll": self.unroll,
            },
        )
        faults += minimum_faults(
            0,
            {
                "train.steps": self.steps,
                "train.epochs": self.epochs,
                "train.batch_per_device": self.batch_per_device,
            },
        )
        faults += seed_faults("train.seed", self.seed)
        for preset in self.xla_preset.split(","):
            faults += choice_faults("train.xla_preset", preset, XLA_PRESET_NAMES)
        faults += choice_faults("train.kernels", self.kernels, KERNELS)
        faults += choice_faults("train.dtype", self.dtype, DTYPES)
        faults += choice_faults("train.param_dtype", self.param_dtype, STORED_DTYPES)
        faults += x64_faults({"train.dtype": self.dtype, "train.param_dtype": self.param_dtype})
        names = remat_names(self.remat)
        if not names or not all(names):
            faults += choice_faults("train.remat", self.remat, REMAT)
        if self.zero_stage not in range(4):
            faults.append(f"train.zero_stage={self.zero_stage}: use 0, 1, 2 or 3")
        _raise(faults)

    def with_batch(self, mesh: MeshConfig) -> "TrainConfig":
        """Returns the section with the global batch of `batch_per_device`.

        It stays unknown if the sizes of the mesh are, or if `tools.plan.auto` will choose them.
        """
        sizes = [getattr(mesh, axis) for axis in BATCH_AXES]
        if not self.batch_per_device or min(sizes) < 1 or mesh.auto:
            return self
        global_batch = self.batch_per_device * math.prod(sizes)
        return replace(self, global_batch=global_batch, batch_per_device=0)


@dataclass(frozen=True)
class PipelineConfig:
    schedule: str
    num_chunks: int
    keep: str

    def __post_init__(self):
        faults = choice_faults("pipeline.schedule", self.schedule, SCHEDULES)
        faults += choice_faults("pipeline.keep", self.keep, KEEP)
        faults += minimum_faults(1, {"pipeline.num_chunks": self.num_chunks})
        if not faults and self.num_chunks > 1 and self.schedule != "interleaved":
            faults.append(
                f"pipeline.num_chunks={self.num_chunks}: {self.schedule} has one chunk per stage; "
                f"use pipeline.schedule='interleaved', or num_chunks=1"
            )
        _raise(faults)


@dataclass(frozen=True)
class ContextConfig:
    method: str

    def __post_init__(self):
        _raise(choice_faults("context.method", self.method, CONTEXT_METHODS))


@dataclass(frozen=True)
class ExpertConfig:
    method: str = "auto"
    kernel: str = "auto"

    def __post_init__(self):
        faults = choice_faults("expert.method", self.method, EXPERT_METHODS)
        faults += choice_faults("expert.kernel", self.kernel, EXPERT_KERNELS)
        _raise(faults)


@dataclass(frozen=True)
class SyncConfig:
    dtype: str = "float32"
    block_size: int = 256
    uncompressed: tuple = ("scale", "bias")
    feedback: str = "auto"
    pattern: str = "xla"

    def __post_init__(self):
        faults = choice_faults("sync.dtype", self.dtype, SYNC_DTYPES)
        faults += choice_faults("sync.pattern", self.pattern, SYNC_PATTERNS)
        faults += choice_faults("sync.feedback", self.feedback, SYNC_FEEDBACK)
        _raise(faults or sync_faults(self))


@dataclass(frozen=True)
class OptimConfig:
    """The keys of section `optim` that the trainer itself reads; the builder gets the others."""

    learning_rate: float
    schedule: str
    warmup_steps: int
    decay_fraction: float
    final_fraction: float
    clip_norm: float
    moment_dtype: str
    offload: bool = False

    def __post_init__(self):
        faults = choice_faults("optim.schedule", self.schedule, LEARNING_RATE_SCHEDULES)
        faults += choice_faults("optim.moment_dtype", self.moment_dtype, STORED_DTYPES)
        faults += x64_faults({"optim.moment_dtype": self.moment_dtype})
        faults += minimum_faults(
            0, {f"optim.{key}": getattr(self, key) for key in ("learning_rate", "warmup_steps")}
        )
        if self.learning_rate == math.inf:
            faults.append(f"optim.learning_rate={self.learning_rate}: use a finite number")
        for key in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, key) <= 1:
                faults.append(f"optim.{key}={getattr(self, key)}: use a number from 0 to 1")
        if not self.clip_norm > 0:
            faults.append(
                f"optim.clip_norm={self.clip_norm}: use a positive norm; inf does not clip"
            )
        _raise(faults)


TASK_PREFIX = "eval/"  # metrics.jsonl has the metrics of tasks as eval/TASK/METRIC


@dataclass(frozen=True)
class EvalConfig:
    every: int
    batches: int
    stride: int = 0
    tasks: str = ""
    tasks_every: int = 0
    tasks_path: str = ""
    tasks_limit: float = 0.0
    tasks_fewshot: int = -1
    tasks_chat_template: bool = False

    def __post_init__(self):
        counts = ("every", "batches", "stride", "tasks_every", "tasks_limit")
        faults = minimum_faults(0, {f"eval.{key}": getattr(self, key) for key in counts})
        faults += minimum_faults(-1, {"eval.tasks_fewshot": self.tasks_fewshot})
        if self.tasks and not all(self.tasks.split(",")):
            faults.append(f"eval.tasks={self.tasks}: use names, with commas between")
        of_tasks = ("tasks_every", "tasks_path", "tasks_limit", "tasks_fewshot")
        for key in () if self.tasks else (*of_tasks, "tasks_chat_template"):
            value = getattr(self, key)
            if value != getattr(EvalConfig, key):  # its default
                faults.append(f"eval.{key}={value}: there are no tasks; set eval.tasks=NAMES")
        _raise(faults)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    every_minutes: float
    keep_last: int
    keep_every: int
    keep_best: int
    best_by: str
    allow_cast: bool
    allow_change: str
    init_from: str
    init_only: str
    export: str = ""
    export_every: int = 0

    def __post_init__(self):
        counts = ("every", "every_minutes", "keep_every", "keep_best", "export_every")
        faults = minimum_faults(0, {f"checkpoint.{key}": getattr(self, key) for key in counts})
        faults += minimum_faults(1, {"checkpoint.keep_last": self.keep_last})
        if self.export not in EXPORTS:
            faults.append(f"checkpoint.export={self.export!r}: use hf, or nothing for no export")
        if self.export_every and not self.export:
            faults.append(
                f"checkpoint.export_every={self.export_every}: nothing is exported; set "
                "checkpoint.export=hf"
            )
        if not all(self.init_only.split(",")):
            faults.append(
                f"checkpoint.init_only={self.init_only!r}: use patterns such as "
                "layers/attention/*, with commas between, or * for all parameters"
            )
        _raise(faults)


@dataclass(frozen=True)
class DivergenceConfig:
    max_skips: int
    spike_sigmas: float
    rollback: bool

    def __post_init__(self):
        faults = minimum_faults(1, {"divergence.max_skips": self.max_skips})
        if not self.spike_sigmas > 0:
            faults.append(
                f"divergence.spike_sigmas={self.spike_sigmas}: use a positive number; inf detects "
                "no spikes"
            )
        _raise(faults)


@dataclass(frozen=True)
class HealthConfig:
    every: int

    def __post_init__(self):
        _raise(minimum_faults(0, {"health.every": self.every}))


@dataclass(frozen=True)
class MonitorConfig:
    tensorboard: bool = False
    wandb: str = ""
    memory_profile_step: int = 0

    def __post_init__(self):
        _raise(minimum_faults(0, {"monitor.memory_profile_step": self.memory_profile_step}))


@dataclass(frozen=True)
class HardwareConfig:
    peak_flops: float

    def __post_init__(self):
        _raise(minimum_faults(0, {"hardware.peak_flops": self.peak_flops}))


OWN_MODEL = "train(model=...)"  # model.build of a run whose model is passed in Python
OWN_DATA = "train(data=...)"  # data.build, if its data is


@dataclass(frozen=True)
class BuildConfig:
    """A section whose `build` names a function, and the keyword arguments to call it with."""

    build: str  # "package.module:function"
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The settings of a run. `config.build` builds what they name."""

    mesh: MeshConfig
    rules: tuple  # ((logical name, mesh axes), ...)
    train: TrainConfig
    pipeline: PipelineConfig
    context: ContextConfig
    expert: ExpertConfig
    sync: SyncConfig
    model: BuildConfig
    data: BuildConfig
    optim: OptimConfig  # what the trainer itself reads
    optimizer: BuildConfig  # the other keys of section `optim`
    adapter: AdapterConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    divergence: DivergenceConfig
    health: HealthConfig
    monitor: MonitorConfig
    hardware: HardwareConfig
    layout_reasons: tuple[str, ...] = ()  # why mesh.auto chose this layout; a run logs them

    def with_keys(self, values: Mapping[str, Any]) -> "Config":
        """Returns a copy with other values of keys such as "mesh.data"."""
        by_section: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, key_in_section = key.partition(".")
            by_section.setdefault(name, {})[key_in_section] = value
        sections: dict[str, Any] = {}
        for name, keys in by_section.items():
            section = getattr(self, name)
            if isinstance(section, BuildConfig):
                keys = {"options": MappingProxyType({**section.options, **keys})}
            # All keys of a section at once: it is checked as a whole.
            sections[name] = replace(section, **keys)
        return replace(self, **sections)

    def of_own_model(self) -> "Config":
        """Returns the config of a run whose model is passed to `train`, not built.

        Its section `model` names no model of this package, which would be another one.
        """
        if not self.model.build.startswith("meshtrain."):
            return self
        return replace(self, model=BuildConfig(OWN_MODEL, MappingProxyType({})))

    def of_own_data(self, *, seq_len: int | None = None) -> "Config":
        """Returns the config of a run whose data is passed to `train`, not built.

        Its section `data` has what the run uses of it, and the length of the sequences in the data,
        if that has any.
        """
        if not self.data.build.startswith("meshtrain."):
            return self
        options = {
            name: value for name, value in self.data.options.items() if name == "per_process"
        }
        if seq_len is not None:
            options["seq_len"] = seq_len
        return replace(self, data=BuildConfig(OWN_DATA, MappingProxyType(options)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the sections as a config file has them: mesh sizes resolved, paths absolute."""
        raw: dict[str, Any] = {}
        for name in SECTIONS:
            section = getattr(self, name)
            if name == "rules":
                raw[name] = section
            elif isinstance(section, BuildConfig):
                raw[name] = {"build": section.build, **section.options}
            else:
                raw[name] = asdict(section)
        raw["optim"] = {"build": self.optimizer.build, **raw["optim"], **self.optimizer.options}
        return paths.absolute(raw)


# The sections of a config file. `optim` is two fields of Config.
SECTIONS = tuple(
    field.name for field in fields(Config) if field.name not in ("optimizer", "layout_reasons")
)
