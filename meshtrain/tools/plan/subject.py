"""What the planner knows of a config: its work, what it stores, and the batch."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshtrain import state as states
from meshtrain.config.build import adapted, build_model, optimizer_builder
from meshtrain.config.parse import parse
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.optim import base as optim
from meshtrain.tools.plan import sizes
from meshtrain.tools.plan import work as works
from meshtrain.tools.plan.layout import REMATS
from meshtrain.tools.plan.memory import StoredState

# Attention that keeps no scores, as the kernels of accelerators do; the host that plans has none of them.
TRACED_ATTENTION = "blockwise:512"


class PlanInput:
    """A config without its mesh. Nothing is compiled, and no file is read."""

    def __init__(self, config: Mapping[str, Any], *, model: Model | None = None):
        self.raw = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        self.cfg = cfg = parse(self.raw)
        if cfg.train.batch_per_device:
            raise ConfigError(
                f"train.batch_per_device={cfg.train.batch_per_device}: the planner compares layouts of one batch; set "
                f"train.global_batch, and train.batch_per_device=0"
            )
        self.model = build_model(cfg) if model is None else adapted(model, cfg)
        schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        optimizer = optim.store_moments(
            optimizer_builder(cfg, self.model)(schedule),
            moment_dtype=cfg.optim.moment_dtype,
            param_dtype=cfg.train.param_dtype,
        )
        dtypes = {"param_dtype": cfg.train.param_dtype, "dtype": cfg.train.dtype}
        init = states.initializer(self.model, optimizer, **dtypes)
        shapes = jax.eval_shape(init, jax.random.key(0))
        self.stored = StoredState(
            shapes, self.model.axes, optimizer, cfg.rules, self.model.is_trained
        )
        self.seq_len = cfg.data.options.get("seq_len", 1)
        self.global_batch = cfg.train.global_batch
        self.loss_chunk_mib = cfg.model.options.get("loss_chunk_mib")  # None: no such key
        of_row = jax.ShapeDtypeStruct((1, self.seq_len), np.int32)
        self.batch = Batch(of_row, of_row, of_row.update(dtype=np.float32))
        self.work = self._work(shapes.params)

    @property
    def has_blocks(self) -> bool:
        return self.model.block is not None

    @property
    def shards_sequences(self) -> bool:
        return self.model.shards_sequences

    def _work(self, params: Any) -> sizes.ModelWork:
        model, dtype, batch = self.model, self.cfg.train.dtype, self.batch
        work = works.work_of(self.cfg, model, params, batch)
        if self.raw["model"]["build"] == works.TRANSFORMER:
            traced = {
                **self.raw,
                "model": {**self.raw["model"], "attention_impl": TRACED_ATTENTION},
            }
            model = build_model(parse(traced))
        return works.with_kept(work, model, params, batch, dtype, REMATS)
