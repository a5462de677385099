"""The pure functions that make up a run on one mesh, and where what they take lives."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax

from meshtrain import grads, optim
from meshtrain import state as states
from meshtrain.config.build import Parts
from meshtrain.config.checks import layer_faults
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params
from meshtrain.parallel import sharding, xla
from meshtrain.parallel.mesh import make_mesh
from meshtrain.parallel.pipeline import executor
from meshtrain.parallel.pipeline.schedules import SCHEDULES, Table
from meshtrain.state import TrainState
from meshtrain.step import Report, make_train_step


@dataclass(frozen=True)
class Program:
    """What `train` runs, `verify` compares and `audit` compiles: assembled in one place for all."""

    mesh: jax.sharding.Mesh
    rules: sharding.Rules
    model: Model
    optimizer: optax.GradientTransformation
    abstract_state: TrainState  # shapes, dtypes, shardings
    grad_shardings: Any
    init: Callable[[jax.Array], TrainState]  # of a PRNG key; not yet compiled, as the rest
    grad_fn: grads.GradFn
    train_step: Callable[[TrainState, Any], tuple[TrainState, Report]]
    eval_step: Callable[[Params, Any], Metrics]
    compiler_options: dict[str, bool | int | str]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it the functions can be traced, compiled and run."""
        with jax.set_mesh(self.mesh), sharding.use_rules(self.rules):
            yield

    def start(self, seed: int) -> TrainState:
        """Returns the state before the first step: every parameter is born where it lives."""
        places, key = states.shardings_of(self.abstract_state), jax.random.key(seed)
        options = xla.quick_compile_options(self.mesh)
        return jax.jit(self.init, out_shardings=places, compiler_options=options)(key)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Returns the train step for batches like this one; it takes over the state that it is given."""
        places = states.shardings_of(self.abstract_state)
        jitted = jax.jit(self.train_step, donate_argnums=0, out_shardings=(places, None))
        lowered = jitted.lower(self.abstract_state, batch)
        return xla.compile_with(lowered, self.compiler_options)


def assemble(cfg: Config, parts: Parts, *, devices: list[jax.Device] | None = None) -> Program:
    """Returns the program of these settings and parts, on all devices or on the given ones."""
    model = parts.model
    mesh = make_mesh(cfg.mesh, devices=devices)
    c = cfg.train
    schedule = optim.make_schedule(cfg.optim, steps=c.steps)
    optimizer = optim.keep_moments(
        parts.make_optimizer(schedule),
        moment_dtype=cfg.optim.moment_dtype,
        param_dtype=c.param_dtype,
    )
    init = states.initializer(model, optimizer, param_dtype=c.param_dtype, dtype=c.dtype)
    # Of the mesh only its axes: what is computed here, optax's counters, must not run on its devices,
    # which may be those of a topology, to be compiled for and no more.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        abstract_state, grad_places = states.plan(
            init, model.axes, optimizer, cfg.rules, mesh, zero_stage=c.zero_stage
        )
    # Where each device holds whole gradients anyway, those of fsdp can wait for the end as well.
    partial_over = ("data",) if c.zero_stage >= 2 else ("data", "fsdp")
    if model.block is None and c.num_microbatches == 1:
        partial_over = ()  # a loss of one's own may mix its rows: a contrastive one, say
    run = {"remat": c.remat, "unroll": c.unroll}
    sync = {"grad_shardings": grad_places, "partial_over": partial_over}
    if cfg.mesh.pipeline > 1:
        table = _table_of(cfg, model, abstract_state.params)
        grad_fn = executor.pipelined(
            model, table, keep=cfg.pipeline.keep, dtype=c.dtype, **run, **sync
        )
        eval_step = executor.evaluate(model, table, dtype=c.dtype, partial_over=partial_over)
    else:
        loss_fn = grads.make_loss(model, **run)
        how = {"dtype": c.dtype, "num_microbatches": c.num_microbatches}
        grad_fn = grads.accumulate(loss_fn, **how, **sync)
        eval_step = grads.evaluate(loss_fn, **how)
    train_step = make_train_step(
        grad_fn, optimizer, schedule, clip_norm=cfg.optim.clip_norm, seed=c.seed
    )
    return Program(
        mesh=mesh,
        rules=cfg.rules,
        model=model,
        optimizer=optimizer,
        abstract_state=abstract_state,
        grad_shardings=grad_places,
        init=init,
        grad_fn=grad_fn,
        train_step=train_step,
        eval_step=eval_step,
        compiler_options=xla.options(c.xla_preset, mesh),
    )


def _table_of(cfg: Config, model: Model, params: Params) -> Table:
    """Returns the schedule written out; raises ConfigError for a model that stages cannot share."""
    P, M, V = cfg.mesh.pipeline, cfg.train.num_microbatches, cfg.pipeline.num_chunks
    if model.block is None:
        raise ConfigError(
            f"mesh.pipeline={P}: the model is no stack of blocks (embed, block, head), only a loss; "
            f"use mesh.pipeline=1"
        )
    if faults := layer_faults(len(jax.tree.leaves(params["layers"])[0]), P, V):
        raise ConfigError(*faults)
    return SCHEDULES[cfg.pipeline.schedule](P, M, V)
