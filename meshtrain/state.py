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

# Other trainers start at 2^16, for the gradients of a mean. Here the loss is a sum over tokens, and its
# gradients are thousands of times larger: with 4,096 tokens per micro-batch they fit in float16 up to a
# scale of 2^3, with 256 tokens up to 2^8. A scale that is too high costs one skipped step per halving.
# Scales are powers of two, so that dividing by them is exact.
FIRST_LOSS_SCALE = 2.0**4

GROWTH_INTERVAL = 2000  # finite steps before the loss scale doubles, as in PyTorch's GradScaler


class LossScale(NamedTuple):
    """The factor that keeps float16 gradients from underflow and overflow."""

    scale: jax.Array  # () float32, may be below 1
    good_steps: jax.Array  # () int32, finite steps since the scale last changed

    def after(self, finite: jax.Array) -> "LossScale":
        """Returns the next loss scale: halved if not `finite`, doubled after GROWTH_INTERVAL finite steps."""
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= GROWTH_INTERVAL
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5).astype(jnp.float32)
        return LossScale(self.scale * factor, jnp.where(grow, 0, good_steps))


def start_loss_scale() -> LossScale:
    """Returns the loss scale of the first step."""
    return LossScale(jnp.float32(FIRST_LOSS_SCALE), jnp.int32(0))


class TrainState(NamedTuple):
    step: jax.Array  # () int32, batches seen
    params: Params
    opt_state: Any
    loss_scale: LossScale | None = None  # with train.dtype=float16 only
    residual: Any = None  # with error feedback only, see `parallel.sync.Sync`


def initializer(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    param_dtype: str,
    dtype: str,
    start_residual: Callable[[Params], Any] = lambda params: None,
) -> Callable:
    """Returns the function key -> TrainState at step 0; `start_residual` is that of `parallel.sync.Sync`."""

    def init(key):
        def cast(path, leaf):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return leaf
            wide = jnp.promote_types(param_dtype, jnp.float32)
            return leaf.astype(wide if is_measured(path) else param_dtype)

        params = jax.tree.map_with_path(cast, model.init(key))
        loss_scale = start_loss_scale() if dtype == "float16" else None
        trained = trained_part(params, model.is_trained)
        residual = start_residual(trained)
        return TrainState(jnp.int32(0), params, optimizer.init(trained), loss_scale, residual)

    return init


def abstract_state(
    init: Callable,
    axes: Axes,
    optimizer: optax.GradientTransformation,
    rules: sharding.Rules,
    mesh,
    *,
    zero_stage: int,
    is_trained: Callable[[str], bool] | None = None,
    residual_shardings: Callable[[Any], Any] = lambda shardings: None,
) -> tuple[TrainState, Any]:
    """Returns the abstract state of `init`, each array with its sharding, and the gradients' shardings."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    _check_axes(axes, shapes.params, mesh)
    made = {"zero_stage": zero_stage, "residual_shardings": residual_shardings}
    made |= {"is_trained": is_trained}
    shardings, of_gradients = state_shardings(shapes, axes, optimizer, rules, mesh, **made)
    abstract = jax.tree.map(lambda leaf, one: leaf.update(sharding=one), shapes, shardings)
    return abstract, of_gradients


def state_shardings(
    shapes: TrainState,
    axes: Axes,
    optimizer: optax.GradientTransformation,
    rules: sharding.Rules,
    mesh,
    *,
    zero_stage: int,
    is_trained: Callable[[str], bool] | None = None,
    residual_shardings: Callable[[Any], Any] = lambda shardings: None,
) -> tuple[TrainState, Any]:
    """Returns the shardings of the state, and those of the gradients, which only trained parameters have.

    The ZeRO stage (arXiv 1910.02054) selects what is sharded over ZERO_AXES: nothing at stage 0, optimizer
    state from stage 1, gradients from stage 2, parameters at stage 3.
    """

    def shardings_from(first_stage: int):
        below = sharding.rules_without(rules, *sharding.ZERO_AXES)
        active = rules if zero_stage >= first_stage else below
        return sharding.shardings(axes, shapes.params, active, mesh)

    replicated = NamedSharding(mesh, PartitionSpec())

    def is_masked(
        leaf,
    ):  # optax's placeholder for a parameter that a masked optimizer does not update
        return isinstance(leaf, optax.MaskedNode)

    def like_its_parameter(leaf, of_parameter, parameter):
        if is_masked(leaf):
            return leaf
        # Arrays of another shape, such as factored moments, are replicated.
        return of_parameter if leaf.shape == parameter.shape else replicated

    opt_state = optax.tree.map_params(
        optimizer,
        like_its_parameter,
        shapes.opt_state,
        trained_part(shardings_from(1), is_trained),
        trained_part(shapes.params, is_trained),
        transform_non_params=lambda _: replicated,
        is_leaf=is_masked,
    )
    loss_scale = jax.tree.map(lambda _: replicated, shapes.loss_scale)
    of_gradients = trained_part(shardings_from(2), is_trained)
    residual = residual_shardings(of_gradients)
    placed = TrainState(replicated, shardings_from(3), opt_state, loss_scale, residual)
    return placed, of_gradients


def _check_axes(axes: Axes, params: Params, mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError unless each parameter has a name or None per dim; fsdp and tensor need a name."""

    def is_names(node):
        return node is None or isinstance(node, tuple)

    given = dict(jax.tree.leaves_with_path(axes, is_leaf=is_names))
    faults = []
    for path, leaf in jax.tree.leaves_with_path(params):
        if given.get(path) is None or len(given[path]) != leaf.ndim:
            faults.append(
                f"model.axes: parameter {jax.tree_util.keystr(path, simple=True, separator='/')} of shape "
                f"{leaf.shape} has {given.get(path)}; give a tuple with a name, or None, for each dim"
            )
    if faults:
        raise ConfigError(*faults[:3])
    used = [axis for axis in (*sharding.ZERO_AXES, "tensor") if mesh.shape[axis] > 1]
    if used and not any(name for names in given.values() for name in names):
        raise ConfigError(
            f"mesh.{used[0]}={mesh.shape[used[0]]}: no parameter of the model names its dims, so nothing can be "
            f'sharded; name them (nnx.with_partitioning(init, ("embed", "mlp"))), or use mesh.data alone'
        )


def evaluation_params(state: TrainState) -> Params:
    """Returns the parameters to evaluate and to use, sharded like those of the state.

    They are the state's own, unless its optimizer is schedule-free: then they are its averages.
    """

    def is_schedule_free(node):
        return isinstance(node, contrib.ScheduleFreeState)

    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_schedule_free)
    found = [node for node in nodes if is_schedule_free(node)]
    if not found:
        return state.params
    y = trees.intersect(state.params, found[0].z)  # frozen parameters have no averages
    return trees.merge(state.params, averages(y, found[0].z, found[0].b1))


def averages(y: Params, z: Params, b1: jax.Array) -> Params:
    """Returns the x of y = b1 x + (1 - b1) z (arXiv 2405.15682), with the dtypes and shardings of y."""
    on_devices = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(y))
    shardings = shardings_of(y) if on_devices else None
    # Waits, because on CPU the collectives of two programs in flight mix their messages.
    return jax.block_until_ready(jax.jit(_averages, out_shardings=shardings)(y, z, b1))


def _averages(y: Params, z: Params, b1: jax.Array) -> Params:
    return jax.tree.map(lambda y, z: ((y - (1 - b1) * z) / b1).astype(y.dtype), y, z)


def shardings_of(abstract: Any) -> Any:
    """Returns the shardings in a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes of an abstract tree's shards on one device."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def bytes_of(tree: Any) -> int:
    """Returns the bytes of a tree of shaped leaves, each element counted once, whatever the sharding."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def count(tree: Any) -> int:
    """Returns the number of elements in a tree of shaped leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
