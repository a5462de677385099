"""Rematerialisation: the backward pass computes whole layers, or cheap regions, again."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config.schema import LAYER_INPUT, is_offloaded, remat_names
from meshtrain.parallel import accelerator

# Names of arrays that also a `recomputed` region keeps: those of the formulas with derivatives of
# their own, in ops/.
STATISTICS, MLP_UP, MLP_GATE, MLP_GELU = "norm_statistics", "mlp_up", "mlp_gate", "mlp_gelu"
KEPT = (STATISTICS, MLP_UP, MLP_GATE, MLP_GELU)

ATTENTION = "attention"  # the name of attention's output
# jax's primitive of cuDNN's attention. Its backward pass needs its output and the log-sum-exp of
# each row of scores; without both, the kernel would run again. They are kept as the kernel returns
# them: with dims that fill up the values, and, by "ulysses", before the exchange, which the
# backward pass repeats.
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"

# The answer of a policy for a value that is kept in the host's memory, and copied back for the
# backward pass. jax has no public name for it, only policies that give it, such as this one.
_offload_products = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
IN_HOST_MEMORY = _offload_products(
    jax.lax.dot_general_p, dimension_numbers=(((0,), (0,)), ((), ()))
)

# Part of the key of jax's caches of traces, as the rules of `sharding` are.
_in_rematerialised = jax.make_user_context(default_value=False)


def rematerialised(function: Callable, remat: str, *, in_loop: bool = False) -> Callable:
    """Returns `function`, whose backward pass keeps what config key `train.remat` selects.

    It decides for all that the function calls: `recomputed` has no effect inside. `in_loop`: it is
    the body of a loop, of which each iteration runs it once. The second argument of the function is
    the input of a layer, and named LAYER_INPUT, if `remat` offloads that.
    """
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    else:
        names = remat_names(remat)
        kept = IN_HOST_MEMORY if is_offloaded(remat) else True

        def policy(primitive, *_, **parameters):
            return kept if name_of(primitive, parameters) in names else False

    offloads_input = is_offloaded(remat) and LAYER_INPUT in remat_names(remat)

    def inside(*args):
        if offloads_input:
            # By its name here it is a value that the policy sees; as an argument of
            # jax.checkpoint it would stay in the device's memory.
            layer, x, *others = args
            x = jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_INPUT), x)
            args = (layer, x, *others)
        with _in_rematerialised(True):
            return function(*args)

    def run(*args):
        # The barrier keeps XLA from merging the recomputation with the forward pass. That is in
        # another loop, so none is needed; and it ties the weights of a layer to the gradient that
        # arrives there, so that GPUs could not gather them earlier.
        barrier = not (in_loop and accelerator.platform() == "gpu")
        return jax.checkpoint(inside, policy=policy, prevent_cse=barrier)(*args)

    return run


def name_of(primitive: Any, parameters: dict[str, Any]) -> str:
    """Returns the name that a primitive gives its results, as `checkpoint_name` does, or ""."""
    if primitive.name == CUDNN_ATTENTION:
        return ATTENTION
    return parameters["name"] if primitive.name == "name" else ""


def recomputed(function: Callable, *args: jax.Array) -> Any:
    """Returns `function(*args)`; its backward pass keeps `args` and KEPT, and runs it again.

    For cheap operations followed by a matrix product: the product's result is kept by its consumer,
    so no product is computed twice.
    """
    if _in_rematerialised.value:
        return function(*args)
    # Without a barrier XLA merges the recomputation with the forward pass if both are in one
    # computation, that is if all layers are unrolled. On CPU that is welcome: time is scarce there,
    # not memory.
    barrier = accelerator.platform() != "cpu"
    policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
    return jax.checkpoint(function, prevent_cse=barrier, policy=policy)(*args)
