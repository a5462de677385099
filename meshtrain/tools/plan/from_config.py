"""Reads the planner's input from a config. Nothing is compiled, and no file is read."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.config.build import adapted, build_model, optimizer_builder
from meshtrain.config.schema import Config
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.ops import kernels
from meshtrain.optim import base as optim
from meshtrain.tools.plan import work as works
from meshtrain.tools.plan.layout import REMATS
from meshtrain.tools.plan.plan_input import PlanInput, StoredState
from meshtrain.tools.plan.sizes import ModelWork

# Attention that keeps no scores, as the kernels of accelerators do; the host that plans has none of
# them.
TRACED_ATTENTION = "blockwise:512"


def plan_input(
    cfg: Config, *, platform: str, model: Model | None = None, row: Any = None
) -> PlanInput:
    """Returns what the planner reads from a config; `model` is a user's own, as for `train`.

    `platform` is that of the devices: "gpu", "tpu" or "cpu". `row` has the shapes of a batch of one
    row; by default it is one of text. Raises ConfigError for a config that the trainer rejects on
    every mesh.
    """
    if cfg.train.batch_per_device:
        raise ConfigError(
            f"train.batch_per_device={cfg.train.batch_per_device}: the planner compares layouts of "
            f"one batch; set train.global_batch, and train.batch_per_device=0"
        )
    model = build_model(cfg) if model is None else adapted(model, cfg)
    stored = _stored_state(cfg, model)
    row = abstract_row(cfg) if row is None else row
    with kernels.use(kernels.resolved(cfg.train.kernels, platform)):
        work = _work(cfg, model, stored.shapes.params, row)
    return PlanInput(cfg, model, work, stored, works.tokens_of(row))


def abstract_row(cfg: Config) -> Batch:
    """Returns the shapes of a batch of one row of text."""
    tokens = jax.ShapeDtypeStruct((1, cfg.data.options.get("seq_len", 1)), np.int32)
    return Batch(tokens, tokens, tokens.update(dtype=np.float32))


def _stored_state(cfg: Config, model: Model) -> StoredState:
    schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
    optimizer = optim.store_moments(
        optimizer_builder(cfg, model)(schedule),
        moment_dtype=cfg.optim.moment_dtype,
        param_dtype=cfg.train.param_dtype,
    )
    init_params = states.params_initializer(model, param_dtype=cfg.train.param_dtype)
    init_state = states.state_initializer(model, optimizer, dtype=cfg.train.dtype)
    shapes = jax.eval_shape(init_state, jax.eval_shape(init_params, jax.random.key(0)))
    return StoredState(
        shapes, model.axes, optimizer, cfg.rules, model.is_trained, cfg.optim.offload
    )


def first_row(batch: Any) -> Any:
    """Returns the shapes of a batch of one row, of a batch of any number of rows."""

    def row_of(leaf: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(leaf)
        return jax.ShapeDtypeStruct(
            (1, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype)
        )

    return jax.tree.map(row_of, batch)


def _work(cfg: Config, model: Model, params: Any, batch: Any) -> ModelWork:
    """Returns the model's work, with the bytes that a layer keeps for its backward pass."""
    work = replace(
        works.work_of(cfg, model, params, batch),
        unroll=cfg.train.unroll,
        # Two moments are read and written; the rest is that of `ModelWork.update_bytes`.
        update_bytes=18 + 4 * np.dtype(cfg.optim.moment_dtype).itemsize,
    )
    remats = [*REMATS] + [cfg.train.remat] * (cfg.train.remat not in REMATS)
    if cfg.model.build != works.TRANSFORMER:
        return works.with_kept(work, model, params, batch, cfg.train.dtype, remats)

    # What a layer keeps is traced: with attention that keeps what the kernels keep.
    def traced(**changes: Any) -> ModelWork:
        keys = {"model.attention_impl": TRACED_ATTENTION, **changes}
        traced_model = build_model(cfg.with_keys(keys))
        shapes = params
        if changes:
            init = states.params_initializer(traced_model, param_dtype=cfg.train.param_dtype)
            shapes = jax.eval_shape(init, jax.random.key(0))
        return works.with_kept(work, traced_model, shapes, batch, cfg.train.dtype, remats)

    found = traced()
    heads = (work.heads, work.kv_heads)
    if work.d_model not in [num * work.head_dim for num in heads]:
        return found
    # Flat queries or keys are as wide as the residual stream, but sharded. With heads of another
    # width (even, as rotations need) they are not.
    wider = itertools.count(work.head_dim + 2, 2)
    head_dim = next(K for K in wider if work.d_model not in [num * K for num in heads])
    other_heads = traced(**{"model.head_dim": head_dim})
    kept = []
    for (remat, wide, other), (_, without_heads, _) in zip(
        found.kept, other_heads.kept, strict=True
    ):
        kept.append((remat, without_heads, wide + other - without_heads))
    return replace(found, kept=tuple(kept))
