"""The pure functions of a run on one mesh, and the shardings of what they read and return."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax

from meshtrain import grads
from meshtrain import state as states
from meshtrain.config.build import RunParts
from meshtrain.config.checks import layer_faults
from meshtrain.config.schema import (
    LAYER_INPUT,
    Config,
    changed_sync_key,
    has_sync_feedback,
    is_offloaded,
    remat_names,
)
from meshtrain.errors import ConfigError, did_you_mean
from meshtrain.metrics import GradFn, Metrics
from meshtrain.models import trees
from meshtrain.models.base import STATS_KEY, Model, Params
from meshtrain.ops import dropout, experts, kernels
from meshtrain.optim import base as optim
from meshtrain.parallel import context, expert, grad_sync, sharding, xla
from meshtrain.parallel.mesh import make_mesh, network_of
from meshtrain.pipeline import executor
from meshtrain.schedules import SCHEDULES, Table
from meshtrain.state import TrainState
from meshtrain.step import Scalars, make_train_step


@dataclass(frozen=True)
class Program:
    """What `train` runs, `verify` compares and `audit` compiles."""

    mesh: jax.sharding.Mesh
    rules: sharding.Rules
    model: Model
    optimizer: optax.GradientTransformation
    abstract_state: TrainState  # shapes, dtypes, shardings
    grad_shardings: Any
    # None of these functions is compiled.
    init_params: Callable[[jax.Array], Params]  # of a PRNG key
    init_state: Callable[[Params], TrainState]
    grad_fn: GradFn
    train_step: Callable[[TrainState, Any], tuple[TrainState, Scalars]]
    eval_step: Callable[[Params, Any], Metrics]
    # (model, number of micro-batches) -> the eval_step of a model with the same parameters, of
    # which `head` returns other sums.
    eval_step_of: Callable[[Model, int], Callable[[Params, Any], Metrics]]
    compiler_options: dict[str, bool | int | str]
    context_method: str = "gather"  # see `context.choose`
    expert_method: str = "gather"  # see `expert.choose`
    expert_kernel: str = "batched"  # see `experts.chosen_kernel`
    kernels: str = "plain"  # see `kernels.use`
    sync: grad_sync.Sync | None = None  # None: XLA adds the gradients of the batch shards

    def optimizer_and_state_of(
        self, cfg: Config, parts: RunParts, mesh: Any
    ) -> "OptimizerAndState":
        """Returns `optimizer_and_state` of changed settings, on a mesh that need not have devices.

        A method, so that advice about memory needs no import of this module.
        """
        return optimizer_and_state(cfg, parts, mesh)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Sets the mesh and the rules. Trace, compile and run the functions inside this context."""
        with (
            jax.set_mesh(self.mesh),
            sharding.use_rules(self.rules),
            context.active_method(self.context_method),
            expert.active_method(self.expert_method),
            experts.active_kernel(self.expert_kernel),
            kernels.use(self.kernels),
        ):
            yield

    def initial_state(
        self,
        seed: int,
        load: Callable[[Params], Params] | None = None,
        *,
        is_loaded: Callable[[str], bool] | None = None,
    ) -> TrainState:
        """Returns the state before the first step; each device initialises its own shards.

        `load` replaces the parameters, before the optimizer sees them. It gets those for whose path
        `is_loaded` returns True without values, as shapes with shardings: they take no memory.
        """
        shardings = states.shardings_of(self.abstract_state)
        options = xla.quick_compile_options(self.mesh)

        def fresh_part(params: Params) -> Params:
            """Returns the parameters that `load` does not replace."""
            if is_loaded is None:
                return params
            return trees.matching(params, lambda path: not is_loaded(path))

        init_params = jax.jit(
            lambda key: fresh_part(self.init_params(key)),
            out_shardings=fresh_part(shardings.params),
            compiler_options=options,
        )
        init_state = jax.jit(
            self.init_state,
            donate_argnums=0,
            out_shardings=shardings,
            compiler_options=options,
        )
        params: Params = {}
        if fresh_part(self.abstract_state.params):
            params = init_params(jax.random.key(seed))
        if is_loaded is not None:
            params = trees.merge(self.abstract_state.params, params)
        if load is not None:
            params = load(params)
        # Last, because some optimizers keep a copy of the first parameters.
        return init_state(params)

    def compile(self, batch: Any) -> jax.stages.Compiled:
        """Returns the train step, compiled for these shapes of batches. It donates the state."""
        shardings = states.shardings_of(self.abstract_state)
        # Scalars are replicated, so that process 0 can read them; XLA would shard those of each
        # layer over the stages.
        replicated = shardings.step
        jitted = jax.jit(
            self.train_step,
            donate_argnums=0,
            out_shardings=(shardings, replicated),
        )
        lowered = jitted.lower(self.abstract_state, batch)
        return xla.compile_with(lowered, self.compiler_options)


class OptimizerAndState(NamedTuple):
    """The optimizer, and the state without values: shapes, dtypes and shardings."""

    schedule: optim.Schedule  # step -> learning rate
    optimizer: optax.GradientTransformation
    init_params: Callable[[jax.Array], Params]  # of a PRNG key; not compiled
    init_state: Callable[[Params], TrainState]  # not compiled
    state: TrainState
    grad_shardings: Any


def optimizer_and_state(
    cfg: Config,
    parts: RunParts,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    sync: grad_sync.Sync | None = None,
) -> OptimizerAndState:
    """Returns optimizer and abstract state on a mesh, which may have no devices."""
    train = cfg.train
    schedule = optim.make_schedule(cfg.optim, steps=train.steps)
    optimizer = optim.store_moments(
        parts.make_optimizer(schedule),
        moment_dtype=cfg.optim.moment_dtype,
        param_dtype=train.param_dtype,
    )
    init_params = states.params_initializer(parts.model, param_dtype=train.param_dtype)
    init_state = states.state_initializer(
        parts.model,
        optimizer,
        dtype=train.dtype,
        start_residual=sync.start_residual if sync else None,
    )
    params = jax.eval_shape(init_params, jax.random.key(0))
    states.check_trained(params, parts.model.is_trained)
    shapes = jax.eval_shape(init_state, params)
    states.check_axes(parts.model.axes, shapes.params, mesh)
    shardings, grad_shardings = states.state_shardings(
        shapes,
        parts.model.axes,
        optimizer,
        cfg.rules,
        mesh,
        zero_stage=train.zero_stage,
        is_trained=parts.model.is_trained,
        residual_shardings=sync.residual_shardings if sync else None,
        offload=cfg.optim.offload,
    )
    state = states.with_shardings(shapes, shardings)
    return OptimizerAndState(
        schedule=schedule,
        optimizer=optimizer,
        init_params=init_params,
        init_state=init_state,
        state=state,
        grad_shardings=grad_shardings,
    )


def assemble(cfg: Config, parts: RunParts, *, devices: list[jax.Device] | None = None) -> Program:
    """Returns the program of these settings and parts, on all devices or on the given ones."""
    model, train = parts.model, cfg.train
    mesh = make_mesh(cfg.mesh, devices=devices)
    # Axes over which gradients stay partial sums until the end of the step, when they are summed
    # once. Where gradients are not sharded over fsdp, it is one of them.
    unreduced_axes = ("data",) if train.zero_stage >= 2 else ("data", "fsdp")
    if model.block is None and train.num_microbatches == 1:
        unreduced_axes = ()  # a user's loss may mix rows, for example a contrastive loss
    # Only the abstract mesh: optax computes its counters here, and the devices may be a topology
    # description for ahead-of-time compilation, which cannot run anything.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), sharding.use_rules(cfg.rules):
        sync = _sync(cfg, mesh, unreduced_axes)
        abstract = optimizer_and_state(cfg, parts, mesh, sync)
        experts.check(cfg.expert.kernel, train.dtype)
    check_saved_names(train.remat, model.saved_names, has_layers=model.block is not None)
    kernels.check(train.kernels, mesh.devices.flat[0])
    _check_context(cfg.mesh.context, model)

    # Every kind of gradient function has the type GradFn, so the step knows none of them.
    if cfg.mesh.pipeline > 1:
        table = _make_table(cfg, model, abstract.state.params)
        grad_fn = executor.pipelined(
            model,
            table,
            keep=cfg.pipeline.keep,
            dtype=train.dtype,
            remat=train.remat,
            unroll=train.unroll,
            grad_shardings=abstract.grad_shardings,
            unreduced_axes=unreduced_axes,
            grad_sync=sync,
        )

        def eval_step_of(model: Model, num_microbatches: int) -> Callable[[Params, Any], Metrics]:
            # The schedule fixes the number of micro-batches.
            assert num_microbatches == train.num_microbatches
            return executor.make_eval_step(
                model, table, dtype=train.dtype, unreduced_axes=unreduced_axes
            )
    else:
        loss_fn = grads.make_loss(model, remat=train.remat, unroll=train.unroll)
        grad_fn = grads.accumulate(
            loss_fn,
            dtype=train.dtype,
            num_microbatches=train.num_microbatches,
            grad_shardings=abstract.grad_shardings,
            unreduced_axes=unreduced_axes,
            grad_sync=sync,
        )

        def eval_step_of(model: Model, num_microbatches: int) -> Callable[[Params, Any], Metrics]:
            return grads.make_eval_step(
                grads.make_loss(model, remat=train.remat, unroll=train.unroll),
                dtype=train.dtype,
                num_microbatches=num_microbatches,
            )

    train_step = make_train_step(
        grad_fn,
        abstract.optimizer,
        abstract.schedule,
        clip_norm=cfg.optim.clip_norm,
        seed=train.seed,
        with_row_keys=dropout.with_row_keys if model.row_keys else None,
        measure=model.measure,
    )
    if cfg.optim.offload:
        train_step = states.with_moments_on_host(train_step, abstract.state)
    without = []
    # With pipelined all-gathers XLA would copy the loop over micro-batches, keep their activations
    # and compute products twice (jaxlib 0.10.2).
    if train.num_microbatches > 1:
        without.append(xla.PIPELINED_ALL_GATHER)
    # The step of Qwen3-MoE is slower with it (jaxlib 0.12).
    if cfg.model.options.get("num_experts"):
        without.append(xla.OPTIMIZATION_LEVEL)
    return Program(
        mesh=mesh,
        rules=cfg.rules,
        model=model,
        optimizer=abstract.optimizer,
        abstract_state=abstract.state,
        grad_shardings=abstract.grad_shardings,
        init_params=abstract.init_params,
        init_state=abstract.init_state,
        grad_fn=grad_fn,
        train_step=train_step,
        eval_step=eval_step_of(model, train.num_microbatches),
        eval_step_of=eval_step_of,
        compiler_options=xla.options(train.xla_preset, mesh, without=without),
        context_method=_context_method(cfg, mesh),
        expert_method=cfg.expert.method,
        expert_kernel=cfg.expert.kernel,
        kernels=train.kernels,
        sync=sync,
    )


def _sync(
    cfg: Config, mesh: jax.sharding.Mesh, unreduced_axes: Sequence[str]
) -> grad_sync.Sync | None:
    """Returns how partial gradients are summed over `unreduced_axes`; None: XLA adds them.

    Call it with the rules active. Raises ConfigError for settings that the model or the mesh does
    not support.
    """
    changed = changed_sync_key(cfg.sync)
    if not changed:
        return None
    if not unreduced_axes:
        raise ConfigError(
            f"{changed}: the model is one loss, which may mix rows, so that no sum per shard "
            "exists; use train.num_microbatches=2 or more, or a model that is a stack of blocks"
        )
    axes, num_shards = sharding.batch_slices(unreduced_axes)
    if num_shards == 1:
        return None
    network = network_of(mesh, cfg.mesh.slices)
    num_islands = network.num_islands(*axes)
    if cfg.sync.pattern == "hierarchical" and num_islands == 1:
        link = network.link_along(*axes)
        if link == "host":
            return None  # nothing leaves a host
        raise ConfigError(
            f"sync.pattern=hierarchical: {link} do not hold equal, contiguous parts of "
            f"{' x '.join(axes)}; use another mesh, or sync.pattern=xla"
        )
    has_feedback = has_sync_feedback(cfg.sync)
    wire = None
    if cfg.sync.dtype != "float32":
        # Without feedback, nearest rounding of so few bits would lose small gradients in every
        # step.
        is_stochastic = cfg.sync.dtype == "int4" and not has_feedback
        wire = grad_sync.Wire(grad_sync.BITS[cfg.sync.dtype], cfg.sync.block_size, is_stochastic)
    levels = grad_sync.levels_of(cfg.sync.pattern, num_shards, num_islands)
    exact = (*cfg.sync.uncompressed, STATS_KEY)
    return grad_sync.Sync(
        axes=axes,
        levels=levels,
        wire=wire,
        exact=exact,
        feedback=has_feedback,
    )


def _check_context(size: int, model: Model) -> None:
    if size > 1 and not model.shards_sequences:
        raise ConfigError(
            f"mesh.context={size}: the model does not say that its sequences may be sharded "
            "(Model.shards_sequences, see meshtrain/models/base.py); put the devices on data or "
            "fsdp"
        )


def _context_method(cfg: Config, mesh: jax.sharding.Mesh) -> str:
    if cfg.context.method != "auto":
        return cfg.context.method
    # A ring can send the next keys while it computes, which matters between hosts; gathering is one
    # collective.
    is_fast = network_of(mesh).link_along("context") == "host"
    return "auto:gather" if is_fast else "auto:ring"


def check_saved_names(remat: str, known: tuple[str, ...], *, has_layers: bool) -> None:
    """Raises ConfigError if `remat` names a value that no layer marks.

    Nothing would be saved for it.
    """
    if is_offloaded(remat) and LAYER_INPUT in remat_names(remat) and not has_layers:
        raise ConfigError(
            f"train.remat={remat}: the model is one loss, without layers whose inputs could be "
            f"kept; use train.remat=offload:NAMES, of values that it marks with checkpoint_name"
        )
    if is_offloaded(remat):
        known = (*known, LAYER_INPUT) if known else ()
    if unknown := [name for name in remat_names(remat) if known and name not in known]:
        raise ConfigError(
            f"train.remat={remat}: no layer of the model has the name "
            f"{unknown[0]!r}{did_you_mean(unknown[0], known)}; it has {', '.join(known)}"
        )


# Names in the lists of the default config, which not all models have.
COMMON_NAMES = ("bias", "scale")


def check_parameter_names(cfg: Config, params: Params) -> None:
    """Raises ConfigError for a name in a list of the config that no parameter has.

    Without the check a misspelt name would change nothing.
    """
    paths = []
    for path, _ in jax.tree.leaves_with_path(params):
        paths.append([str(entry.key) for entry in path])
    last = {path[-1] for path in paths}
    anywhere = {name for path in paths for name in path}
    lists = [("sync.uncompressed", cfg.sync.uncompressed, anywhere)]
    if cfg.optimizer.build.startswith("meshtrain."):  # others may read the key in another way
        lists.append(("optim.no_decay", cfg.optimizer.options.get("no_decay", ()), last))
    faults = []
    for key, names, known in lists:
        for name in names:
            if name not in known and name not in COMMON_NAMES:
                faults.append(
                    f"{key}={','.join(map(str, names))}: no parameter has the name "
                    f"{name!r}{did_you_mean(name, known)}; the names are "
                    f"{', '.join(sorted(known))}"
                )
    if faults:
        raise ConfigError(*faults)


def _make_table(cfg: Config, model: Model, params: Params) -> Table:
    """Returns the schedule's table.

    Raises ConfigError for a model that cannot be split into stages.
    """
    num_stages = cfg.mesh.pipeline
    num_chunks = cfg.pipeline.num_chunks
    if model.block is None:
        raise ConfigError(
            f"mesh.pipeline={num_stages}: the model is not a stack of blocks (embed, block, head), "
            f"only a loss; use mesh.pipeline=1"
        )
    num_layers = len(jax.tree.leaves(params["layers"])[0])
    faults = layer_faults(num_layers, num_stages, num_chunks)
    if faults:
        raise ConfigError(*faults)
    make_schedule_table = SCHEDULES[cfg.pipeline.schedule]
    return make_schedule_table(num_stages, cfg.train.num_microbatches, num_chunks)
