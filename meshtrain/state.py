"""The state that a run carries from step to step, and the sharding of each array in it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax import contrib

from meshtrain.errors import ConfigError
from meshtrain.models import trees
from meshtrain.models.base import Axes, Model, Params, is_measured, trained_part
from meshtrain.parallel import sharding

# Other trainers start at 2^16, for the gradients of a mean. Here the loss is a sum over tokens, and
# its gradients are thousands of times larger: with 4,096 tokens per micro-batch they fit in float16
# up to a scale of 2^3, with 256 tokens up to 2^8. A scale that is too high costs one skipped step
# per halving. Scales are powers of two, so that dividing by them is exact.
FIRST_LOSS_SCALE = 2.0**4
GROWTH_INTERVAL = 2000  # finite steps before the loss scale doubles, as in PyTorch's GradScaler


class LossScale(NamedTuple):
    """The factor that keeps float16 gradients from underflow and overflow."""

    scale: jax.Array  # () float32, may be below 1
    good_steps: jax.Array  # () int32, finite steps since the scale last changed

    def after(self, finite: jax.Array) -> "LossScale":
        """Returns the next loss scale.

        It is halved if not `finite`, and doubled after GROWTH_INTERVAL finite steps.
        """
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= GROWTH_INTERVAL
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5).astype(jnp.float32)
        return LossScale(self.scale * factor, jnp.where(grow, 0, good_steps))


def start_loss_scale() -> LossScale:
    """Returns the loss scale of the first step."""
    return LossScale(jnp.float32(FIRST_LOSS_SCALE), jnp.int32(0))


class TrainState(NamedTuple):
    """All that a step updates, and that a checkpoint holds."""

    step: jax.Array  # () int32, batches seen
    params: Params
    opt_state: Any
    loss_scale: LossScale | None = None  # with train.dtype=float16 only
    residual: Any = None  # with error feedback only, see `grad_sync.Sync`


def params_initializer(model: Model, *, param_dtype: str) -> Callable[[jax.Array], Params]:
    """Returns the function key -> parameters, in `param_dtype`."""
    # What a model measures stays at least float32, whatever the parameters are.
    stats_dtype = jnp.promote_types(param_dtype, jnp.float32)

    def cast(path, leaf):
        leaf = jnp.asarray(leaf)  # a model may have Python numbers too
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf.astype(stats_dtype if is_measured(path) else param_dtype)

    def init_params(key):
        return jax.tree.map_with_path(cast, model.init(key))

    return init_params


def state_initializer(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    dtype: str,
    start_residual: Callable[[Params], Any] | None = None,
) -> Callable[[Params], TrainState]:
    """Returns the function parameters -> TrainState at step 0; `start_residual` is of `Sync`."""

    def init_state(params):
        trained = trained_part(params, model.is_trained)
        residual = None if start_residual is None else start_residual(trained)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(trained),
            loss_scale=start_loss_scale() if dtype == "float16" else None,
            residual=residual,
        )

    return init_state


def with_shardings(shapes: TrainState, shardings: TrainState) -> TrainState:
    """Returns the abstract state: `shapes`, each with its sharding."""
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def state_shardings(
    shapes: TrainState,
    axes: Axes,
    optimizer: optax.GradientTransformation,
    rules: sharding.Rules,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    zero_stage: int,
    is_trained: Callable[[str], bool] | None = None,
    residual_shardings: Callable[[Any], Any] | None = None,
    offload: bool = False,
) -> tuple[TrainState, Any]:
    """Returns the shardings of the state, and those of the gradients.

    Only trained parameters have gradients. The ZeRO stage (arXiv 1910.02054) selects what is
    sharded over ZERO_AXES: nothing at stage 0, optimizer state from stage 1, gradients from stage
    2, parameters at stage 3. `residual_shardings` is that of `grad_sync.Sync`. `offload` puts the
    moments, the arrays of the optimizer with the shape of their parameter, in the host's memory.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    rules_without_zero = sharding.rules_without(rules, *sharding.ZERO_AXES)

    def shardings_from(first_stage: int):
        """Returns the shardings of arrays like the parameters, sharded from this ZeRO stage on."""
        active_rules = rules if zero_stage >= first_stage else rules_without_zero
        return sharding.shardings(axes, shapes.params, active_rules, mesh)

    def like_its_parameter(leaf, param_sharding, parameter):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        # Arrays of another shape, such as factored moments, are replicated.
        if leaf.shape != parameter.shape:
            return replicated
        return on_host(param_sharding) if offload else param_sharding

    opt_state = optax.tree.map_params(
        optimizer,
        like_its_parameter,
        shapes.opt_state,
        trained_part(shardings_from(1), is_trained),
        trained_part(shapes.params, is_trained),
        transform_non_params=lambda _: replicated,
        # a leaf: optax's placeholder for a parameter that a masked optimizer does not update
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    grad_shardings = trained_part(shardings_from(2), is_trained)
    residual = None if residual_shardings is None else residual_shardings(grad_shardings)
    shardings = TrainState(
        step=replicated,
        params=shardings_from(3),
        opt_state=opt_state,
        loss_scale=jax.tree.map(lambda _: replicated, shapes.loss_scale),
        residual=residual,
    )
    return shardings, grad_shardings


def check_trained(params: Params, is_trained: Callable[[str], bool] | None) -> None:
    """Raises ConfigError if a parameter that is to be trained is not a real number.

    `is_trained` is `Model.is_trained`.
    """
    faults = []
    for path, leaf in jax.tree.leaves_with_path(trained_part(params, is_trained)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            way_out = "use two real arrays"
        else:
            way_out = (
                "make it a plain array of the module, which is a constant, or a float, or leave "
                "it out of the patterns in train.trainable"
            )
        name = trees.name_of(path)
        faults.append(
            f"model: parameter {name} is {leaf.dtype}, which cannot be trained; {way_out}"
        )
    if faults:
        raise ConfigError(*faults[:3])


def check_axes(axes: Axes, params: Params, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError unless each parameter has a name or None for each of its dims.

    A mesh that shards parameters needs at least one name.
    """

    def is_names(node):
        return node is None or isinstance(node, tuple)

    names_of_path = dict(jax.tree.leaves_with_path(axes, is_leaf=is_names))
    faults = []
    for path, leaf in jax.tree.leaves_with_path(params):
        names = names_of_path.get(path)
        if names is None or len(names) != leaf.ndim:
            faults.append(
                f"model.axes: parameter {trees.name_of(path)} of shape {leaf.shape} has {names}; "
                f"give a tuple with a name, or None, for each dim"
            )
    if faults:
        raise ConfigError(*faults[:3])

    has_names = any(any(names) for names in names_of_path.values() if names)
    for axis in (*sharding.ZERO_AXES, "tensor"):
        if mesh.shape[axis] > 1 and not has_names:
            raise ConfigError(
                f"mesh.{axis}={mesh.shape[axis]}: no parameter of the model names its dims, so "
                f"nothing can be sharded; name them "
                f'(nnx.with_partitioning(init, ("embed", "mlp"))), or use mesh.data alone'
            )


# ---- schedule-free optimizers ----


def evaluation_params(state: TrainState) -> Params:
    """Returns the parameters to evaluate and to use, sharded like those of the state.

    They are the state's own, unless its optimizer is schedule-free: then they are its averages. An
    optimizer may have several such states, each of some of the parameters (`optax.partition`).
    """

    def is_schedule_free(node):
        return isinstance(node, contrib.ScheduleFreeState)

    params = state.params
    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_schedule_free)
    for node in filter(is_schedule_free, nodes):
        # Frozen parameters have no averages. Those of other states have a placeholder here.
        own = {trees.name_of(path) for path, _ in jax.tree.leaves_with_path(node.z)}
        z = trees.matching(node.z, own.__contains__)
        y = trees.intersect(params, z)
        params = trees.merge(params, averages(y, z, node.b1))
    return params


def averages(y: Params, z: Params, b1: jax.Array) -> Params:
    """Returns the x of y = b1 x + (1 - b1) z (arXiv 2405.15682), with y's dtypes and shardings."""
    on_devices = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(y))
    z = to_device(z)
    shardings = shardings_of(y) if on_devices else None
    compute = jax.jit(_averages, out_shardings=shardings)
    # Waits, because on CPU the collectives of two programs in flight mix their messages.
    return jax.block_until_ready(compute(y, z, b1))


def _averages(y: Params, z: Params, b1: jax.Array) -> Params:
    return jax.tree.map(lambda y, z: ((y - (1 - b1) * z) / b1).astype(y.dtype), y, z)


# ---- the host's memory ----


HOST_MEMORY = "pinned_host"  # jax's name of the memory from which a device copies by itself


def on_host(device_sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding with its shards in the host's memory."""
    mesh = device_sharding.mesh
    if isinstance(mesh, jax.sharding.Mesh) and not mesh.devices.flat[0].addressable_memories():
        # Devices that are only compiled for have no memories, and a sharding on them would drop the
        # kind of its memory without an error.
        mesh = mesh.abstract_mesh
    return NamedSharding(mesh, device_sharding.spec, memory_kind=HOST_MEMORY)


def to_device(tree: Any, *, after: jax.Array | None = None) -> Any:
    """Returns the arrays of a tree, all in the memory of the devices.

    An operation has all its operands in one memory. In a traced function nothing is copied before
    `after` is computed: by itself XLA would copy at the start of the program.
    """

    def move(leaf):
        if jax.typeof(leaf).memory_space != jax.memory.Space.Host:
            return leaf
        if after is not None:
            leaf, _ = jax.lax.optimization_barrier((leaf, after))
        return jax.device_put(leaf, jax.memory.Space.Device)

    return jax.tree.map(move, tree)


def with_moments_on_host(train_step: Callable, abstract: TrainState) -> Callable:
    """Returns the train step that leaves in the host's memory what is there in `abstract`."""

    def to_its_memory(leaf, like):
        return jax.device_put(leaf, jax.memory.Space.Host) if is_on_host(like) else leaf

    def step(state: TrainState, batch: Any):
        new, scalars = train_step(state, batch)
        opt_state = jax.tree.map(to_its_memory, new.opt_state, abstract.opt_state)
        return new._replace(opt_state=opt_state), scalars

    return step


def is_on_host(leaf: Any) -> bool:
    """Returns whether an array, or an abstract array, is in the host's memory."""
    return leaf.sharding.memory_kind == HOST_MEMORY


# ---- shardings and sizes of trees ----


def shardings_of(abstract: Any) -> Any:
    """Returns the shardings in a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of an abstract tree's shards in the memory of one device."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree) if not is_on_host(leaf))


def host_bytes_per_device(tree: Any) -> int:
    """Returns the bytes of an abstract tree's shards in the host's memory, for one device."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree) if is_on_host(leaf))


def _shard_bytes(leaf: Any) -> int:
    return leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))


def bytes_of(tree: Any) -> int:
    """Returns the bytes of a tree of shaped leaves, as if on one device."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def count(tree: Any) -> int:
    """Returns the number of elements in a tree of shaped leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
