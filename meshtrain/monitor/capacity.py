"""Rejects a run for which a machine has far too little memory, before its data is read.

What is counted are lower bounds, which no compiler and no setting of memory can go below: a run
that might fit starts. If memory runs out then, tools/hlo/oom_advice.py lists what needs less.
"""

import math
from typing import Any

import jax
import numpy as np

from meshtrain import hardware
from meshtrain import state as states
from meshtrain.cluster import distributed, limits
from meshtrain.config import schema
from meshtrain.config.schema import BATCH_AXES, Config
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params
from meshtrain.state import TrainState

TOKEN_BYTES = 12  # of a Batch: token, target and weight

# What the size of the built-in transformer depends on most.
SIZES = ("num_layers", "d_model", "d_ff", "vocab_size", "num_experts")


def check_fits(cfg: Config, model: Model, abstract_state: TrainState) -> None:
    """Raises ConfigError if the state, a batch or the activations cannot fit.

    Batches are those of the package's own data: of others the sizes are not known yet.
    """
    on_device = device_memory()
    state = states.bytes_per_device(abstract_state)
    if state > on_device:
        sizes = [
            f"model.{name}={value}" for name in SIZES if (value := cfg.model.options.get(name))
        ]
        named = f" ({', '.join(sizes)})" if sizes else ""
        raise ConfigError(
            f"model: parameters and optimizer state take {_gigabytes(state)} on each device, which "
            f"has {_gigabytes(on_device)}; use a smaller model{named}, or shard it over more "
            f"devices with mesh.fsdp"
        )

    seq_len = cfg.data.options.get("seq_len")
    if not cfg.data.build.startswith("meshtrain.data.") or not isinstance(seq_len, int):
        return
    train = cfg.train
    size = f"train.global_batch={train.global_batch} x data.seq_len={seq_len}"
    on_host = limits.total_memory()
    # Devices along other axes hold the same rows, so a process may read more.
    batch = TOKEN_BYTES * seq_len * train.global_batch / distributed.num_processes()
    if batch > on_host:
        raise ConfigError(
            f"{size}: the rows of each process take {_gigabytes(batch)}, and this machine has "
            f"{_gigabytes(on_host)}; lower them"
        )
    activations = _least_kept_bytes(cfg, model, abstract_state.params, seq_len)
    if state + activations > on_device:
        raise ConfigError(
            f"{size}: the inputs of the layers, which the backward pass reads, take "
            f"{_gigabytes(activations)} on each device, which has {_gigabytes(on_device)}; lower "
            f"them, raise train.num_microbatches={train.num_microbatches}, or use more devices"
        )


def device_memory() -> float:
    """Returns the bytes of a device, those in use included; infinite if unknown.

    Simulated devices share the memory of the host.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return limits.total_memory() / jax.local_device_count()
    reported = (device.memory_stats() or {}).get("bytes_limit")
    known = hardware.device_of(device.device_kind)
    return reported or (known.memory if known else math.inf)


def _least_kept_bytes(cfg: Config, model: Model, params: Params, seq_len: int) -> float:
    """Returns the bytes of the inputs of layers that a device keeps, even with train.remat=full.

    In a pipeline, and if they are in the host's memory, only those of one layer are counted.
    """
    if model.block is None:
        return 0.0
    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    row = Batch(tokens, tokens, tokens.update(dtype=np.float32))

    def embed(params: Params, row: Batch) -> Any:
        return model.embed(blocks.to_compute_dtype(params, cfg.train.dtype), row)

    stream = states.bytes_of(jax.eval_shape(embed, params, row))
    num_layers = 1
    if cfg.mesh.pipeline == 1 and schema.LAYER_INPUT not in schema.remat_names(cfg.train.remat):
        num_layers = len(jax.tree.leaves(params["layers"])[0])
    num_shards = math.prod(getattr(cfg.mesh, axis) for axis in (*BATCH_AXES, "context", "tensor"))
    rows = cfg.train.global_batch / cfg.train.num_microbatches
    return rows * stream * num_layers / num_shards


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
