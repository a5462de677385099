"""Orthogonalized updates of matrices that are stacked and sharded: where each device computes them, and the cost.

A matrix is orthogonalized by products with itself, so a device needs all its rows and columns. If the stacked matrices
can be shared out, an all-to-all gives each device some complete ones, and another one returns its shards; otherwise
each device gathers them all.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib

from meshtrain.errors import ConfigError
from meshtrain.optim import base as optim
from meshtrain.optim.base import Schedule
from meshtrain.parallel import sharding
from meshtrain.parallel.sharding import Rules

STACKED = ("layers", "expert")  # dims along which matrices are stacked

HEADS = ("heads", "kv_heads", "head_dim")  # dims that are one side of a matrix together

Spec = tuple[tuple[str, ...], ...]  # for each dim, the mesh axes that shard it


class Matrix(NamedTuple):
    """Which dims of a parameter are stacked, and which are rows (summed over in x W) and columns of a matrix."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def is_entry(node: Any) -> bool:
    """Whether a node of `axes`, or of the result of `matrices`, belongs to one parameter."""
    return node is None or isinstance(node, tuple)


def stacked_dims(names: sharding.Names) -> tuple[int, ...]:
    """Returns the leading dims along which a parameter is stacked: `layers`, and `expert` of matrices."""
    dims = [dim for dim, name in enumerate(names) if name == "layers" and dim == 0]
    if names[len(dims) : len(dims) + 1] == ("expert",) and len(names) - len(dims) > 2:
        dims.append(len(dims))
    return tuple(dims)


def matrices(axes: Any) -> Any:
    """Returns a tree like `axes`: a Matrix for each parameter that is one by the names of its dims, else None.

    Stacked dims come first. The other dims must be two, where "heads" and "head_dim" count as one. Embeddings and
    heads, with a dim "vocab" or the key "embedding", are none, nor are parameters without names.
    """

    def matrix(path, names):
        stacked = stacked_dims(names)
        is_table = "vocab" in names or getattr(path[-1], "key", None) == "embedding"
        if is_table or not any(names[len(stacked) :]):
            return None
        sides: dict[Any, list[int]] = {}
        for dim in range(len(stacked), len(names)):
            sides.setdefault("heads" if names[dim] in HEADS else dim, []).append(dim)
        return Matrix(stacked, *map(tuple, sides.values())) if len(sides) == 2 else None

    return jax.tree.map_with_path(matrix, axes, is_leaf=is_entry)


def orthogonalize(axes: Any, *, num_steps: int, rms: float) -> optax.GradientTransformation:
    """Returns the transformation of updates to `rms` sqrt(max(rows, columns)) U V^T of their SVD, approximately.

    Updates whose parameter is no matrix must be masked. Quintic Newton-Schulz iterations as in optax.contrib.muon:
    the singular values end between 0.7 and 1.2.
    """
    found = matrices(axes)

    def one(names, matrix, update):
        if isinstance(update, optax.MaskedNode):
            return update
        specs = _specs(names, matrix, update.shape)
        for spec in specs:
            update = sharding.shard_over(update, *spec)
        run = _newton_schulz(matrix, num_steps)
        for _ in matrix.stacked:
            run = jax.vmap(run)
        update = run(update)
        for spec in reversed(specs):
            update = sharding.shard_over(update, *spec)
        return update * (rms * math.sqrt(max(sizes_of(matrix, update.shape))))

    def update(updates, state, params=None):
        return jax.tree.map(one, axes, found, updates, is_leaf=is_entry), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _specs(names: sharding.Names, matrix: Matrix, shape: tuple[int, ...]) -> list[Spec]:
    """Returns the shardings of `route` on the active mesh; none without active rules."""
    mesh, rules = jax.sharding.get_abstract_mesh(), sharding.active_rules()
    if mesh.empty or rules is None:
        return []
    start, moves = route(names, matrix, shape, rules, mesh.shape)
    return [start, *(move.spec for move in moves)]


def _newton_schulz(matrix: Matrix, num_steps: int) -> Any:
    shift = len(matrix.stacked)
    rows, columns = (tuple(dim - shift for dim in side) for side in (matrix.rows, matrix.columns))
    numbers = contrib.MuonDimensionNumbers(rows, columns)
    # Without momentum of its own, whose state is then not used: `muon` keeps that sharded as the parameters are.
    steps = contrib.scale_by_muon(
        ns_steps=num_steps, beta=0.0, nesterov=False, weight_dimension_numbers=numbers
    )
    return lambda x: steps.update(x, steps.init(x))[0]


def sizes_of(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a matrix in a parameter of this shape."""
    rows, columns = (math.prod(shape[dim] for dim in side) for side in matrix[1:])
    return rows, columns


class ReshardStep(NamedTuple):
    """A step of a route: all arrays along `axis` exchange parts, or gather them if `is_gather`."""

    spec: Spec  # after the step
    axis: str
    is_gather: bool


def route(
    names: sharding.Names,
    matrix: Matrix,
    shape: tuple[int, ...],
    rules: Rules,
    sizes: Mapping[str, int],
) -> tuple[Spec, list[ReshardStep]]:
    """Returns the sharding of a parameter, and the steps from it to complete matrices on each device.

    One mesh axis at a time: it moves to a stacked dim that it divides, which is one all-to-all. An axis that divides
    none is dropped, which gathers the matrices.
    """
    found = sharding.spec_for(names, shape, rules, sizes)
    spec = [tuple(a for a in sharding.axes_of(entry) if sizes[a] > 1) for entry in found]
    start, moves = tuple(spec), []
    for dim in (*matrix.rows, *matrix.columns):
        while spec[dim]:
            *spec[dim], axis = spec[dim]
            spec[dim] = tuple(spec[dim])
            shards = (math.prod(sizes[a] for a in (*spec[to], axis)) for to in matrix.stacked)
            fits = [to for to, n in zip(matrix.stacked, shards, strict=True) if shape[to] % n == 0]
            if fits:
                spec[fits[0]] = (*spec[fits[0]], axis)
            moves.append(ReshardStep(tuple(spec), axis, not fits))
    return start, moves


class Cost(NamedTuple):
    """What the Newton-Schulz iterations of one update cost a device."""

    flops: float
    num_bytes: float  # received from other devices

    def describe(self) -> str:
        return f"{self.flops:.3g} FLOPs and {self.num_bytes / 1e6:,.2f} MB received"


def cost(params: Any, axes: Any, rules: Rules, sizes: Mapping[str, int], *, num_steps: int) -> Cost:
    """Returns the cost of orthogonalizing the updates of `params`, shaped leaves, on a mesh of these sizes.

    An iteration of a matrix (m, n), m <= n, has the products X X^T, A A and B X: 4 m^2 n + 2 m^3 FLOPs. An
    all-to-all over k devices receives (k - 1) / k of a shard, there and back; a gather k - 1 shards, only there.
    """
    flops = num_bytes = 0.0
    found = jax.tree.leaves(matrices(axes), is_leaf=is_entry)
    all_names = jax.tree.leaves(axes, is_leaf=is_entry)
    for leaf, names, matrix in zip(jax.tree.leaves(params), all_names, found, strict=True):
        if matrix is None:
            continue
        start, moves = route(names, matrix, leaf.shape, rules, sizes)
        local = leaf.size / math.prod(sizes[axis] for entry in start for axis in entry)
        for move in moves:
            k = sizes[move.axis]
            received = k - 1 if move.is_gather else 2 * (k - 1) / k
            num_bytes += local * leaf.dtype.itemsize * received
            local *= k if move.is_gather else 1
        m, n = sorted(sizes_of(matrix, leaf.shape))
        flops += num_steps * (4 * m * m * n + 2 * m**3) * local / (m * n)
    return Cost(flops, num_bytes)


NS_STEPS = 5  # Newton-Schulz iterations of Muon


def muon(
    learning_rate: Schedule,
    *,
    axes: Any,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
    momentum: float = 0.95,
    ns_steps: int = NS_STEPS,
    rms: float = 0.2,
) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for all other parameters (arXiv 2502.16982, Algorithm 1 and section 2.2).

    `axes` are the model's: `orthogonal.matrices` tells from the names of the dims which parameters are matrices,
    each layer and expert one of its own. Their update is the Nesterov momentum, orthogonalized by `ns_steps`
    Newton-Schulz iterations and scaled to about `rms` per element, the RMS of AdamW's updates, so that both have
    one learning rate and weight decay. b1, b2 and epsilon are AdamW's. Raises ConfigError if a number is out of
    range, or if no parameter is a matrix.
    """
    adam = dict(b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, no_decay=no_decay)
    others = optim.adamw(learning_rate, **adam)
    faults = [] if 0 <= momentum < 1 else [f"optim.momentum={momentum}: must be from 0 to below 1"]
    faults += [] if ns_steps > 0 else [f"optim.ns_steps={ns_steps}: must be at least 1"]
    faults += [] if rms > 0 else [f"optim.rms={rms}: must be above 0"]
    found = matrices(axes)
    if not any(jax.tree.leaves(found, is_leaf=is_entry)):
        faults.append(
            "optim.build=meshtrain.optim.muon:muon: the names of their dims make no parameter a matrix; name them "
            '(nnx.with_partitioning(init, ("embed", "mlp"))), or use meshtrain.optim.base:adamw'
        )
    if faults:
        raise ConfigError(*faults)
    of_matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonalize(axes, num_steps=ns_steps, rms=rms),
        optax.add_decayed_weights(weight_decay, mask=optim.decay_mask(no_decay)),
        optax.scale_by_learning_rate(learning_rate),
    )
    labels = jax.tree.map(lambda entry: "muon" if entry else "adamw", found, is_leaf=is_entry)
    return optax.partition({"muon": of_matrices, "adamw": others}, labels)
