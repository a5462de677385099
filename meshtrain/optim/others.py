"""Lion, Adafactor and schedule-free AdamW, for parameters that are stacked over layers.

Each is a function for `optim.build`. Each repeats the keys of AdamW, also those without a use,
since the keys that section `optim` may have are read from the signature.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from meshtrain.errors import ConfigError
from meshtrain.optim import base as optim
from meshtrain.optim import muon
from meshtrain.optim.base import Schedule


def lion(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
) -> optax.GradientTransformation:
    """Lion (arXiv 2302.06675, Algorithm 2), with one moment; `epsilon` is not used.

    The paper's b2 is 0.99. The sign of an interpolated gradient is larger than AdamW's update: the
    paper uses a learning rate 3 to 10 times smaller, and a weight decay larger by the same factor.
    Raises ConfigError if a number is out of range.
    """
    _check_keys_of_adamw(
        b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, no_decay=no_decay
    )
    return optax.lion(
        learning_rate,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        mask=optim.decay_mask(no_decay),
    )


def adafactor(
    learning_rate: Schedule,
    *,
    axes: Any,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
    decay_rate: float = 0.8,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Adafactor (arXiv 1804.04235, Algorithm 4): factored second moments, no first moment.

    The learning rate is relative to the RMS of a parameter, at least 1e-3. b1, b2 and epsilon are
    not used: the second moment decays with 1 - step^-decay_rate. Layers stacked into one array, and
    experts, are factored, clipped and scaled each by itself. An array is factored along its two
    largest dims, if both have `min_dim_size_to_factor` elements; otherwise as the matrix of its
    inputs and outputs, such as (embed, heads x head_dim), if this one is large enough. Weight decay
    is that of AdamW. Raises ConfigError if a number is out of range.
    """
    _check_keys_of_adamw(
        b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, no_decay=no_decay
    )
    if decay_rate <= 0:
        raise ConfigError(f"optim.decay_rate={decay_rate}: must be above 0")
    adafactor_of_array = optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor
        ),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    # By the number of stacked dims: layers, and experts.
    optimizers = {
        "stacked_0": adafactor_of_array,
        "stacked_1": _mapped(adafactor_of_array, num_stacked=1),
        "stacked_2": _mapped(adafactor_of_array, num_stacked=2),
    }
    labels = jax.tree.map(
        lambda names: f"stacked_{len(muon.stacked_dims(names))}", axes, is_leaf=muon.is_entry
    )
    return optax.chain(
        _on_matrices(optax.partition(optimizers, labels), axes, min_size=min_dim_size_to_factor),
        optax.add_decayed_weights(weight_decay, mask=optim.decay_mask(no_decay)),
        optax.scale_by_learning_rate(learning_rate),
    )


def schedule_free_adamw(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
) -> optax.GradientTransformation:
    """Schedule-free AdamW (arXiv 2405.15682): an average of the iterates replaces the decay.

    Use a constant learning rate. The train state holds the parameters y at which gradients are
    computed. Those to evaluate and to use are the averages x, which `state.evaluation_params`
    returns; b1 interpolates between both. Raises ConfigError if a number is out of range.
    """
    _check_keys_of_adamw(
        b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay, no_decay=no_decay
    )
    if b1 == 0:
        raise ConfigError("optim.b1=0: schedule-free AdamW divides by it; use 0.9")
    # Adam without its first moment, whose place the averaging takes.
    base = optax.chain(
        optax.scale_by_rms(b2, epsilon, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask=optim.decay_mask(no_decay)),
        optax.scale_by_learning_rate(learning_rate),
    )
    averaged = contrib.schedule_free(base, learning_rate, b1=b1)

    # An iterate is weighted by the learning rate that made it. optax counts from 1 and takes that
    # of the next update (google-deepmind/optax#1744), which matters while the rate changes.
    def init(params):
        return averaged.init(params)._replace(step_count=jnp.int32(0))

    return optax.GradientTransformation(init, averaged.update)


def _on_matrices(
    optimizer: optax.GradientTransformation, axes: Any, *, min_size: int
) -> optax.GradientTransformation:
    """Returns the transformation that applies the optimizer to kernels of heads as matrices.

    Only to those whose moments it factors then, and not otherwise. A merged dim is sharded as its
    first dim, the heads, is: no element moves.
    """
    matrix_of_param = muon.matrices(axes)

    def matrices_of(tree):
        def reshape(names, matrix, leaf):
            if matrix is None or not hasattr(leaf, "shape"):
                return leaf
            return leaf.reshape(_factored_shape(matrix, leaf.shape, min_size))

        # As in `_mapped`, optax also passes trees without arrays.
        if not jax.tree.leaves(tree):
            return tree
        return jax.tree.map(reshape, axes, matrix_of_param, tree, is_leaf=muon.is_entry)

    def init(params):
        return optimizer.init(matrices_of(params))

    def update(grads, state, params):
        updates, state = optimizer.update(matrices_of(grads), state, matrices_of(params))
        return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), updates, grads), state

    return optax.GradientTransformation(init, update)


def _factored_shape(matrix: muon.Matrix, shape: tuple[int, ...], min_size: int) -> tuple[int, ...]:
    """Returns the shape in which a parameter's second moment is factored, if there is one."""
    stacked = tuple(shape[dim] for dim in matrix.stacked)
    sizes = matrix.num_rows_and_columns(shape)
    is_factored = sorted(shape[len(stacked) :])[-2] >= min_size
    is_contiguous = (*matrix.stacked, *matrix.rows, *matrix.columns) == tuple(range(len(shape)))
    if is_factored or not is_contiguous or min(sizes) < min_size:
        return shape
    return (*stacked, *sizes)


def _mapped(
    adafactor_of_array: optax.GradientTransformation, *, num_stacked: int
) -> optax.GradientTransformation:
    """Returns the transformation that applies Adafactor to each array along the stacked dims.

    Each parameter is mapped by itself, since they may have different numbers of layers or experts.
    """
    init_arrays, update_arrays = adafactor_of_array
    for _ in range(num_stacked):
        init_arrays, update_arrays = jax.vmap(init_arrays), jax.vmap(update_arrays)

    # `jax.vmap` needs an array, but optax also passes trees without arrays: to ask for the
    # structure of the state, and if no parameter has this number of stacked dims.
    def init(params):
        if not jax.tree.leaves(params):
            return adafactor_of_array.init(params)
        leaves, tree = jax.tree.flatten(params)
        return joined([init_arrays(leaf) for leaf in leaves], tree)

    def update(grads, state, params):
        if not jax.tree.leaves(params):
            return grads, state
        moments, *stateless = state
        count = moments.count.ravel()[0]

        def update_leaf(grad, v_row, v_col, v, param):
            counts = jnp.broadcast_to(count, grad.shape[:num_stacked])
            own = moments._replace(count=counts, v_row=v_row, v_col=v_col, v=v)
            return update_arrays(grad, (own, *stateless), param)

        leaves, tree = jax.tree.flatten(grads)
        others = (moments.v_row, moments.v_col, moments.v, params)
        leaves_of_others = [jax.tree.leaves(one) for one in others]
        results = [update_leaf(*each) for each in zip(leaves, *leaves_of_others, strict=True)]
        updates = tree.unflatten(update for update, _ in results)
        return updates, joined([state for _, state in results], tree)

    def joined(states, tree):
        """Returns the state of all parameters from that of each; all have the same count."""
        first, *stateless = states[0]

        def of_all(field):
            return tree.unflatten(getattr(moments, field) for moments, *_ in states)

        moments = first._replace(v_row=of_all("v_row"), v_col=of_all("v_col"), v=of_all("v"))
        return (moments, *stateless)

    return optax.GradientTransformation(init, update)


def _check_keys_of_adamw(
    *, b1: float, b2: float, epsilon: float, weight_decay: float, no_decay: tuple
) -> None:
    """Raises ConfigError for values that AdamW rejects too."""
    optim.adamw(
        lambda step: 0.0,
        b1=b1,
        b2=b2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        no_decay=no_decay,
    )
