"""Warns about layouts and settings of a run that have no effect, or that cost memory or time.

No step is compiled yet: `layout_warnings` needs only shapes, `setting_warnings` only the config,
`rounding_warnings` the parameters.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import state as states
from meshtrain.config import schema
from meshtrain.config.schema import AXES, Config
from meshtrain.data.source import Source
from meshtrain.errors import nearest_multiples
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params, trained_part
from meshtrain.models.transformer_config import VOCAB_MULTIPLE
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import network_of
from meshtrain.parallel.remat import name_of


class RunWarning(NamedTuple):
    text: str
    fields: Mapping[str, Any]  # of the event


def layout_warnings(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params, batch: Any
) -> Iterator[RunWarning]:
    """Yields the warnings that need shapes; mesh and rules are active, `params` has shardings."""
    yield from unsharded(cfg, model, mesh, params)
    yield from crossing(mesh)
    yield from _unmarked_names(cfg, model, params, batch)


# ---- parameters that stay replicated ----

# Replicated parameters are reported from this fraction of the parameter bytes on a device, or these
# bytes.
MIN_FRACTION = 0.01
MIN_BYTES = 64 << 20

# The key of section `model` that sets the size of a dim of meshtrain's own models.
MODEL_KEYS = {
    "embed": "d_model",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "mlp": "d_ff",
    "vocab": "vocab_size",
}


def unsharded(
    cfg: Config, model: Model, mesh: jax.sharding.Mesh, params: Params
) -> Iterator[RunWarning]:
    """Warns about parameters that stay replicated because an axis does not divide a dim of theirs.

    One warning for each axis and dim. At ZeRO stage 1 and 2, `fsdp` shards optimizer state, at
    stage 0 nothing.
    """
    mesh_sizes = mesh.shape
    rules = cfg.rules
    if cfg.train.zero_stage == 0:
        rules = sharding.rules_without(cfg.rules, *sharding.ZERO_AXES)

    # The parameters with the same dim that the same axes do not divide.
    groups: dict[tuple, list[tuple[Any, jax.ShapeDtypeStruct]]] = defaultdict(list)
    dims_of_leaves = jax.tree.leaves(model.axes, is_leaf=lambda node: isinstance(node, tuple))
    for (path, leaf), dims in zip(jax.tree.leaves_with_path(params), dims_of_leaves, strict=True):
        undivided = sharding.not_divisible(dims, leaf.shape, rules, mesh_sizes)
        for axis, (dim, axes) in undivided.items():
            axes = tuple(other for other in axes if mesh_sizes[other] > 1)
            groups[axis, dims[dim], leaf.shape[dim], axes].append((path, leaf))

    enough = min(MIN_FRACTION * states.bytes_per_device(params), MIN_BYTES)
    for (axis, name, size, axes), leaves in groups.items():
        num_bytes = states.bytes_per_device([leaf for _, leaf in leaves])
        if num_bytes < enough:
            continue
        largest, _ = max(leaves, key=lambda item: states.bytes_per_device(item[1]))
        largest_name = jax.tree_util.keystr(largest, simple=True, separator="/")
        key = MODEL_KEYS.get(name) if model.attention else None
        is_key_size = key and cfg.model.options.get(key) == size  # a vocabulary may be padded
        dim = f"model.{key}={size}" if is_key_size else f"dim {name!r} of {size}"
        is_optimizer_state = cfg.train.zero_stage < 3 and axis in sharding.ZERO_AXES
        verb = "have their optimizer state" if is_optimizer_state else "are"
        if name == "kv_heads":
            verb += " by design"
        remedy = _sizes_that_divide(
            axis,
            axes,
            mesh_sizes,
            name=name,
            size=size,
            key=key,
        )
        yield RunWarning(
            f"{' x '.join(f'mesh.{other}={mesh_sizes[other]}' for other in axes)} does not divide "
            f"{dim}: "
            f"{num_bytes / 1e6:,.2f} MB of parameters on each device, such as {largest_name}, "
            f"{verb} replicated over {axis}; use {remedy}",
            dict(about="unsharded", axis=axis, dim=name, size=size, bytes=num_bytes),
        )


def _sizes_that_divide(
    axis: str,
    axes: tuple[str, ...],
    mesh_sizes: Mapping[str, int],
    *,
    name: str,
    size: int,
    key: str | None,
) -> str:
    """Returns the nearest sizes of axis and dim with which the axes divide the dim."""
    product = math.prod(mesh_sizes[other] for other in axes)
    others = product // mesh_sizes[axis]
    divisors = [n for n in range(1, size // others + 1) if size % (n * others) == 0]
    below = [n for n in divisors if n < mesh_sizes[axis]][-1:]
    above = [n for n in divisors if n > mesh_sizes[axis]][:1]
    axis_sizes = " or ".join(map(str, below + above))
    step = math.lcm(product, VOCAB_MULTIPLE) if key == "vocab_size" else product
    dim = f"model.{key}=" if key else f"{name!r} of "
    dim_sizes = f"{dim}{nearest_multiples(size, step)}"
    return f"mesh.{axis}={axis_sizes}, or {dim_sizes}" if axis_sizes else dim_sizes


# ---- axes that cross the slow network ----

# Axes along which every layer communicates, from the outermost to the innermost.
LAYER_AXES = ("expert", "context", "tensor")


def crossing(mesh: jax.sharding.Mesh) -> Iterator[RunWarning]:
    """Warns about axes of LAYER_AXES whose groups of devices are not within one fast network."""
    kind = {"cpu": "processes", "tpu": "slices"}.get(mesh.devices.flat[0].platform, "hosts")
    network = network_of(mesh)
    num_inside = int(np.unique(network.hosts, return_counts=True)[1].min())
    for axis in LAYER_AXES:
        if network.link_along(axis) == "host":
            continue
        number = AXES.index(axis)
        size = mesh.shape[axis]
        inner = math.prod(mesh.shape[other] for other in AXES[number + 1 :])
        fits = math.gcd(size, max(1, num_inside // inner))
        yield RunWarning(
            f"mesh.{axis}={size} crosses {kind}, and every layer communicates along {axis}: "
            f"mesh.{axis}={fits} stays within each of them",
            dict(about="crossing", axis=axis, size=size, inside=fits),
        )


# ---- names of `train.remat` ----


def _unmarked_names(cfg: Config, model: Model, params: Params, batch: Any) -> Iterator[RunWarning]:
    """Warns about names in `train.remat` that the model does not mark; program.py checks others."""
    remat = cfg.train.remat
    names = [name for name in schema.remat_names(remat) if name != schema.LAYER_INPUT]
    if not names:
        return
    marked = marked_names(model, params, batch, cfg.train.dtype)
    known = f"; it marks {', '.join(sorted(marked))}" if marked else " with checkpoint_name"
    for name in names:
        if name not in marked:
            yield RunWarning(
                f"train.remat={remat}: nothing is saved for {name!r}, because the model marks no "
                f"value "
                f"of that name{known}",
                dict(about="remat", name=name, marked=sorted(marked)),
            )


def marked_names(model: Model, params: Params, batch: Any, dtype: str) -> set[str]:
    """Returns the names of `checkpoint_name` in a block, or in the loss if there are no blocks."""
    names: set[str] = set()

    # The policy sees what `train.remat` may save, the forward passes of custom gradients too.
    def policy(primitive, *_, **parameters):
        names.add(name_of(primitive, parameters))
        return False

    def trace(params, batch):
        params = blocks.to_compute_dtype(params, dtype)
        if model.block is None:

            def loss(params):
                return model.loss(params, batch, jax.random.key(0))

            return jax.vjp(jax.checkpoint(loss, policy=policy), params)[0]

        def block(layer, hidden):
            return model.block(layer, hidden, batch)

        layer = jax.tree.map(lambda stacked: stacked[0], model.stack(params["layers"]))
        hidden = model.embed(params, batch)
        return jax.vjp(jax.checkpoint(block, policy=policy), layer, hidden)[0]

    jax.eval_shape(trace, params, batch)
    return names - {""}


# ---- settings ----


def setting_warnings(cfg: Config, data: Any) -> Iterator[RunWarning]:
    """Yields the warnings that need only the config and the description of the data."""
    warmup, steps = cfg.optim.warmup_steps, cfg.train.steps
    if warmup >= steps > 0:
        yield RunWarning(
            f"optim.warmup_steps={warmup} is not below train.steps={steps}: the run ends before "
            f"optim.learning_rate={cfg.optim.learning_rate:g} is reached",
            dict(about="warmup", warmup_steps=warmup, steps=steps),
        )
    if cfg.optimizer.build == "meshtrain.optim.others:schedule_free_adamw":
        if cfg.optim.schedule != "constant":
            yield RunWarning(
                f"optim.schedule={cfg.optim.schedule}: schedule-free AdamW averages the parameters "
                f"in "
                f"place of a decay; use optim.schedule=constant, with a warm-up",
                dict(about="schedule", schedule=cfg.optim.schedule),
            )
        if "bfloat16" in (cfg.optim.moment_dtype, cfg.train.param_dtype):
            yield RunWarning(
                "optim.build=meshtrain.optim.others:schedule_free_adamw: its averages are a "
                "difference of "
                "parameters that bfloat16 rounds; use float32 for optim.moment_dtype and "
                "train.param_dtype",
                dict(about="dtype", moment_dtype=cfg.optim.moment_dtype),
            )
    if isinstance(data, Source):
        for text in data.warnings:
            yield RunWarning(text, dict(about="data"))


# ---- parameters that are stored in bfloat16 ----

MOVES = 0.9  # the fraction of parameters, below which a step is called lost in rounding


def rounding_warnings(cfg: Config, model: Model, params: Params) -> Iterator[RunWarning]:
    """Warns if a step is lost in the rounding of most parameters; `params` are those of the state.

    A step of Adam and its like is about as large as the learning rate. A bfloat16 number that is
    256 to 512 times larger keeps its value.
    """
    rate = cfg.optim.learning_rate
    if cfg.train.param_dtype != "bfloat16" or not rate:
        return
    fraction = float(_fraction_moved(trained_part(params, model.is_trained), rate))
    if fraction < MOVES:
        yield RunWarning(
            f"train.param_dtype=bfloat16: a step of optim.learning_rate={rate:g} changes only "
            f"{100 * fraction:.2g} % of the parameters, and is rounded away in the others; set "
            "train.param_dtype=float32 (train.dtype=bfloat16 still computes in bfloat16)",
            dict(about="rounding", learning_rate=rate, fraction=fraction),
        )


@jax.jit
def _fraction_moved(params: Params, rate: float) -> jax.Array:
    """Returns the fraction of the bfloat16 parameters that differ after adding `rate`."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.dtype == jnp.bfloat16]
    moved = [(leaf.astype(jnp.float32) + rate).astype(leaf.dtype) != leaf for leaf in leaves]
    num_moved = sum(leaf.sum(dtype=jnp.float32) for leaf in moved)
    return num_moved / max(1, sum(leaf.size for leaf in leaves))
