"""The sections of a config that are the trainer's own, each checked when it is made."""

import math
from dataclasses import dataclass

import jax

from meshtrain.errors import ConfigError, below, no_seed, not_one_of
from meshtrain.parallel import xla as compiler
from meshtrain.parallel.pipeline.schedules import SCHEDULES

DTYPES = ("float32", "bfloat16", "float16", "float64")  # to compute in
KEPT_DTYPES = ("float32", "bfloat16", "float64")  # updates would be lost in float16's narrow range
REMAT = ("none", "full", "dots", "names:NAME,NAME")
RATES = ("constant", "cosine", "linear", "wsd")
KEPT = ("inputs", "residuals")


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

    def __post_init__(self):
        counts = ("num_microbatches", "log_every", "unroll")
        faults = below(1, {f"train.{key}": getattr(self, key) for key in counts})
        faults += below(0, {"train.steps": self.steps}) + no_seed("train.seed", self.seed)
        faults += not_one_of("train.xla_preset", self.xla_preset, compiler.NAMES)
        faults += not_one_of("train.dtype", self.dtype, DTYPES)
        faults += not_one_of("train.param_dtype", self.param_dtype, KEPT_DTYPES)
        faults += _without_x64(
            {f"train.{key}": getattr(self, key) for key in ("dtype", "param_dtype")}
        )
        if not self.remat.startswith("names:") or not all(
            self.remat.removeprefix("names:").split(",")
        ):
            faults += not_one_of("train.remat", self.remat, REMAT)
        if self.zero_stage not in range(4):
            faults.append(f"train.zero_stage={self.zero_stage}: use 0, 1, 2 or 3")
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class PipelineConfig:
    schedule: str
    num_chunks: int
    keep: str

    def __post_init__(self):
        faults = not_one_of("pipeline.schedule", self.schedule, SCHEDULES)
        faults += not_one_of("pipeline.keep", self.keep, KEPT)
        faults += below(1, {"pipeline.num_chunks": self.num_chunks})
        if not faults and self.num_chunks > 1 and self.schedule != "interleaved":
            faults.append(
                f"pipeline.num_chunks={self.num_chunks}: {self.schedule} has one chunk a stage; "
                f"use pipeline.schedule='interleaved', or num_chunks=1"
            )
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class OptimConfig:
    """What the trainer itself needs of the `optim` section; the builder gets the rest."""

    learning_rate: float
    schedule: str
    warmup_steps: int
    decay_fraction: float
    final_fraction: float
    clip_norm: float
    moment_dtype: str

    def __post_init__(self):
        faults = not_one_of("optim.schedule", self.schedule, RATES)
        faults += not_one_of("optim.moment_dtype", self.moment_dtype, KEPT_DTYPES)
        faults += _without_x64({"optim.moment_dtype": self.moment_dtype})
        faults += below(
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
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class EvalConfig:
    every: int
    batches: int

    def __post_init__(self):
        if faults := below(0, {"eval.every": self.every, "eval.batches": self.batches}):
            raise ConfigError(*faults)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int
    every_minutes: float
    keep: int
    keep_every: int
    keep_best: int
    best_by: str
    allow_cast: bool
    init_from: str
    init_only: str

    def __post_init__(self):
        counts = ("every", "every_minutes", "keep_every", "keep_best")
        faults = below(0, {f"checkpoint.{key}": getattr(self, key) for key in counts})
        faults += below(1, {"checkpoint.keep": self.keep})
        if not all(self.init_only.split(",")):
            faults.append(
                f"checkpoint.init_only={self.init_only!r}: use patterns such as layers/attention/*, "
                f"with commas between, or * for all parameters"
            )
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class DivergenceConfig:
    max_skips: int
    spike: float
    rollback: bool

    def __post_init__(self):
        faults = below(1, {"divergence.max_skips": self.max_skips})
        if not self.spike > 0:
            faults.append(f"divergence.spike={self.spike}: use a positive number; inf sees none")
        if faults:
            raise ConfigError(*faults)


@dataclass(frozen=True)
class HealthConfig:
    every: int

    def __post_init__(self):
        if faults := below(0, {"health.every": self.every}):
            raise ConfigError(*faults)


def _without_x64(dtypes: dict[str, str]) -> list[str]:
    return [
        f"{key}=float64: jax computes it in float32; set JAX_ENABLE_X64=1 as well"
        for key, dtype in dtypes.items()
        if dtype == "float64" and not jax.config.jax_enable_x64
    ]
