"""Muon: orthogonalized momentum, for matrices that are stacked and sharded.

A matrix is orthogonalized by products with itself, so a device needs all its rows and columns. If
the devices can share the stacked matrices among them, an all-to-all gives each device some complete
ones, and another one returns its shards; otherwise each device gathers them all.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib

from meshtrain.errors import ConfigError
from meshtrain.optim import base as optim
from meshtrain.optim.base import Schedule
from meshtrain.parallel import sharding
from meshtrain.parallel.sharding import Rules

NS_STEPS = 5  # Newton-Schulz iterations


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
    """Muon for matrices, AdamW for all other parameters.

    arXiv 2502.16982, Algorithm 1 and section 2.2. `axes` are the model's: from the names of the
    dims `matrices` finds which parameters are matrices, one for each layer and expert. Their update
    is the Nesterov momentum, orthogonalized by `ns_steps` Newton-Schulz iterations and scaled to
    about `rms` per element, the RMS of AdamW's updates, so that both have one learning rate and
    weight decay. b1, b2 and epsilon are AdamW's. Raises ConfigError if a number is out of range, or
    if no parameter is a matrix.
    """
    adamw = optim.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        no_decay=no_decay,
    )
    matrix_of_param = matrices(axes)
    faults = []
    if not 0 <= momentum < 1:
        faults.append(f"optim.momentum={momentum}: must be from 0 to below 1")
    if ns_steps <= 0:
        faults.append(f"optim.ns_steps={ns_steps}: must be at least 1")
    if not rms > 0:
        faults.append(f"optim.rms={rms}: must be above 0")
    if not any(jax.tree.leaves(matrix_of_param, is_leaf=is_entry)):
        faults.append(
            "optim.build=meshtrain.optim.muon:muon: the names of their dims make no parameter a "
            'matrix; name them (nnx.with_partitioning(init, ("embed", "mlp"))), or use '
            "meshtrain.optim.base:adamw"
        )
    if faults:
        raise ConfigError(*faults)
    muon_of_matrices = optax.chain(
        optax.trace(momentum, nesterov=True),
        orthogonalize(axes, num_steps=ns_steps, rms=rms),
        optax.add_decayed_weights(weight_decay, mask=optim.decay_mask(no_decay)),
        optax.scale_by_learning_rate(learning_rate),
    )
    labels = jax.tree.map(
        lambda matrix: "muon" if matrix else "adamw", matrix_of_param, is_leaf=is_entry
    )
    return optax.partition({"muon": muon_of_matrices, "adamw": adamw}, labels)


# ---- the parameters that are matrices ----

HEADS = ("heads", "kv_heads", "head_dim")  # dims that are one side of a matrix together


class Matrix(NamedTuple):
    """The stacked dims of a parameter, and its rows (summed over in x W) and columns."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def num_rows_and_columns(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the size of a matrix in a parameter of this shape."""
        num_rows = math.prod(shape[dim] for dim in self.rows)
        num_columns = math.prod(shape[dim] for dim in self.columns)
        return num_rows, num_columns


def matrices(axes: Any) -> Any:
    """Returns a tree like `axes`: a Matrix for each parameter that is one, else None.

    The names of its dims decide. Stacked dims come first. The other dims must be two, where "heads"
    and "head_dim" count as one. Embeddings and heads, with a dim "vocab" or the key "embedding",
    are none, nor are biases and parameters without names.
    """

    def matrix(path, names):
        stacked = stacked_dims(names)
        key = getattr(path[-1], "key", None)
        is_table = "vocab" in names or key == "embedding"
        # The biases of experts have two dims.
        if is_table or key == "bias" or not any(names[len(stacked) :]):
            return None
        dims_of_side: dict[Any, tuple[int, ...]] = {}
        for dim in range(len(stacked), len(names)):
            side = "heads" if names[dim] in HEADS else dim
            dims_of_side[side] = (*dims_of_side.get(side, ()), dim)
        if len(dims_of_side) != 2:
            return None
        rows, columns = dims_of_side.values()
        return Matrix(stacked, rows, columns)

    return jax.tree.map_with_path(matrix, axes, is_leaf=is_entry)


def stacked_dims(names: sharding.Names) -> tuple[int, ...]:
    """Returns the dims along which a parameter is stacked: `layers`, and `expert` of matrices."""
    stacked = 1 if names[:1] == ("layers",) else 0
    if names[stacked : stacked + 1] == ("expert",) and len(names) - stacked > 2:
        stacked += 1
    return tuple(range(stacked))


def is_entry(node: Any) -> bool:
    """Returns whether a node of `axes`, or of `matrices(axes)`, belongs to one parameter."""
    return node is None or isinstance(node, tuple)


# ---- the orthogonal updates ----


def orthogonalize(axes: Any, *, num_steps: int, rms: float) -> optax.GradientTransformation:
    """Returns the transformation of updates to about `rms` sqrt(max(rows, columns)) U V^T.

    U and V are those of their SVD. Updates whose parameter is no matrix must be masked. Quintic
    Newton-Schulz iterations as in optax.contrib.muon: the singular values end between 0.7 and 1.2.
    """
    matrix_of_param = matrices(axes)

    def orthogonalize_leaf(names, matrix, update):
        if isinstance(update, optax.MaskedNode):
            return update
        specs = _specs(names, matrix, update.shape)
        # To complete matrices, each step one collective ...
        for spec in specs:
            update = sharding.shard_over(update, *spec)
        iterate = _newton_schulz(matrix, num_steps)
        for _ in matrix.stacked:
            iterate = jax.vmap(iterate)
        update = iterate(update)
        # ... and back to the shards of the parameter.
        for spec in reversed(specs):
            update = sharding.shard_over(update, *spec)
        return update * (rms * math.sqrt(max(matrix.num_rows_and_columns(update.shape))))

    def update(updates, state, params=None):
        updates = jax.tree.map(orthogonalize_leaf, axes, matrix_of_param, updates, is_leaf=is_entry)
        return updates, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _newton_schulz(matrix: Matrix, num_steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns the iterations for one matrix, without its stacked dims."""
    num_stacked = len(matrix.stacked)
    rows = tuple(dim - num_stacked for dim in matrix.rows)
    columns = tuple(dim - num_stacked for dim in matrix.columns)
    # Without momentum of its own, whose state is then not used: `muon` keeps the momentum, sharded
    # as the parameters are.
    steps = contrib.scale_by_muon(
        ns_steps=num_steps,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=contrib.MuonDimensionNumbers(rows, columns),
    )

    def iterate(x):
        update, _ = steps.update(x, steps.init(x))
        return update

    return iterate


# ---- where each device computes them, and the cost ----

Spec = tuple[tuple[str, ...], ...]  # for each dim, the mesh axes that shard it


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
    """Returns the sharding of a parameter, and the steps from it to complete matrices.

    One mesh axis at a time, the innermost of a dim first: it moves to a stacked dim that it
    divides, which is one all-to-all. An axis that divides none is dropped, which gathers the
    matrices.
    """
    # Axes of size 1 shard nothing.
    spec = [
        tuple(axis for axis in sharding.axes_of(entry) if sizes[axis] > 1)
        for entry in sharding.spec_for(names, shape, rules, sizes)
    ]
    start = tuple(spec)
    steps = []
    for dim in (*matrix.rows, *matrix.columns):
        while spec[dim]:
            axis = spec[dim][-1]
            spec[dim] = spec[dim][:-1]
            is_gather = True
            for target in matrix.stacked:
                num_shards = math.prod(sizes[a] for a in (*spec[target], axis))
                if shape[target] % num_shards == 0:
                    spec[target] = (*spec[target], axis)
                    is_gather = False
                    break
            steps.append(ReshardStep(tuple(spec), axis, is_gather))
    return start, steps


def _specs(names: sharding.Names, matrix: Matrix, shape: tuple[int, ...]) -> list[Spec]:
    """Returns the shardings of `route` on the active mesh; none without active rules."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = sharding.active_rules()
    if mesh.empty or rules is None:
        return []
    start, steps = route(names, matrix, shape, rules, mesh.shape)
    return [start, *(step.spec for step in steps)]


class Cost(NamedTuple):
    """The cost of the Newton-Schulz iterations of one update, on a device."""

    flops: float
    num_bytes: float  # received from other devices

    def describe(self) -> str:
        return f"{self.flops:.3g} FLOPs and {self.num_bytes / 1e6:,.2f} MB received"


def cost(params: Any, axes: Any, rules: Rules, sizes: Mapping[str, int], *, num_steps: int) -> Cost:
    """Returns the cost of orthogonalizing the updates of `params`, shaped leaves, on such a mesh.

    An iteration of a matrix (m, n), m <= n, has the products X X^T, A A and B X: 4 m^2 n + 2 m^3
    FLOPs. An all-to-all over k devices receives (k - 1) / k of a shard, there and back; a gather
    k - 1 shards, only there.
    """
    flops = 0.0
    num_bytes = 0.0
    leaves = jax.tree.leaves(params)
    names_of_leaf = jax.tree.leaves(axes, is_leaf=is_entry)
    matrix_of_leaf = jax.tree.leaves(matrices(axes), is_leaf=is_entry)
    for leaf, names, matrix in zip(leaves, names_of_leaf, matrix_of_leaf, strict=True):
        if matrix is None:
            continue
        start, steps = route(names, matrix, leaf.shape, rules, sizes)
        num_shards = math.prod(sizes[axis] for entry in start for axis in entry)
        local_elements = leaf.size / num_shards
        for step in steps:
            k = sizes[step.axis]
            shards_received = k - 1 if step.is_gather else 2 * (k - 1) / k
            num_bytes += local_elements * leaf.dtype.itemsize * shards_received
            if step.is_gather:
                local_elements *= k
        m, n = sorted(matrix.num_rows_and_columns(leaf.shape))
        flops += num_steps * (4 * m * m * n + 2 * m**3) * local_elements / (m * n)
    return Cost(flops, num_bytes)
