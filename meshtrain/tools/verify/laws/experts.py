"""Laws of a mixture of experts on one device, each with an exact counterpart."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models import transformer
from meshtrain.models.base import Params
from meshtrain.tools.verify.reference import step as reference_step

# Their kernels have a leading dim of experts after that of layers.
PER_EXPERT = ("gate", "up", "down")

TOLERANCE = 1e-10


def permuted(section: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: the order of the experts does not change the loss, and only the order of gradients."""
    section = {**section, "expert_groups": ()}
    model, params = _start(section)
    order = np.random.default_rng(0).permutation(section["num_experts"])
    plain, moved = _gradients(model, [(params, batch), (reorder(params, order), batch)])
    return _difference(moved, (plain[0], reorder(plain[1], order)), "with permuted experts")


def identical(section: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: equal experts whose weights add up to 1 are an ordinary feed-forward layer."""
    section = {
        **section,
        "num_shared_experts": 0,
        "capacity_factor": 0.0,
        "router": "topk_softmax",
        "router_scale": 1.0,
        "router_z_loss": 0.0,
        "balance": "none",
        "bias": False,
    }
    model, params = _start(section)
    mlp = params["layers"]["mlp"]
    first, same = {}, {}
    for name in PER_EXPERT:
        if name in mlp:
            stacked = mlp[name]["kernel"]
            first[name] = {"kernel": stacked[:, 0]}
            same[name] = {"kernel": jnp.broadcast_to(stacked[:, :1], stacked.shape)}
    width = section["d_expert"] or section["d_ff"]
    dense = transformer.build(**{**section, "num_experts": 0, "d_ff": width})
    ((loss, _),) = _gradients(model, [(_with_mlp(params, {**mlp, **same}), batch)])
    ((expected, _),) = _gradients(dense, [(_with_mlp(params, first), batch)])
    return _difference((loss, {}), (expected, {}), "with identical experts")


def unweighted(section: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: tokens at the end of a row whose weight is 0 change nothing, whatever they are."""
    if section["capacity_factor"]:
        return None  # they take places of an expert, after all tokens before them
    model, params = _start(section)
    half = np.arange(batch.tokens.shape[1]) < batch.tokens.shape[1] // 2
    shorter = batch._replace(weights=batch.weights * half)
    other = np.where(half, batch.tokens, (batch.tokens + 1) % section["vocab_size"])
    plain, changed = _gradients(
        model, [(params, shorter), (params, shorter._replace(tokens=other))]
    )
    return _difference(changed, plain, "with other tokens of weight 0")


def balanced(section: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: a step replaces what was measured, and moves each bias towards an equal load."""
    section = {**section, "balance": "bias", "balance_weight": 0.25}
    model, params = _start(section)
    random, num_experts = np.random.default_rng(2), section["num_experts"]
    means = jax.tree.map(lambda leaf: random.random(leaf.shape) / num_experts, params)
    updated, _ = model.measure(params, means)
    before, mean, after = (tree["layers"]["mlp"]["measured"] for tree in (params, means, updated))
    expected = {name: mean[name] for name in ("load", "score", "log_z", "dropped")}
    too_little = mean["load"] * num_experts < 1
    expected["bias"] = before["bias"] + np.where(too_little, 0.25, -0.25)
    return _difference(dict(after), expected, "after a step")


# Each with a `model` section that has experts, and a batch.
LAWS: dict[str, Callable[[Mapping[str, Any], Batch], str | None]] = {
    "permuted experts": permuted,
    "identical experts": identical,
    "tokens of weight 0": unweighted,
    "balanced experts": balanced,
}


def reorder(params: Params, order: np.ndarray) -> Params:
    """Returns the parameters with expert number order[e] as number e."""
    mlp = dict(params["layers"]["mlp"])
    for name in PER_EXPERT:
        if name in mlp:
            mlp[name] = {"kernel": mlp[name]["kernel"][:, order]}
    mlp["router"] = {"kernel": mlp["router"]["kernel"][..., order]}
    measured = mlp["measured"].items()  # (layers, experts), or of a whole layer
    mlp["measured"] = {name: leaf[:, order] if leaf.ndim == 2 else leaf for name, leaf in measured}
    return _with_mlp(params, mlp)


def _with_mlp(params: Params, mlp: Params) -> Params:
    return {**params, "layers": {**params["layers"], "mlp": mlp}}


def _start(section: Mapping[str, Any]) -> tuple[Any, Params]:
    """Returns the model, and parameters of which none is a constant."""
    model, random = transformer.build(**section), np.random.default_rng(1)
    params = reference_step.run_compiled(model.init, jax.random.key(0))
    return model, jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), params)


def _gradients(model: Any, cases: list[tuple[Params, Batch]]) -> list[tuple[jax.Array, Params]]:
    """Returns loss and gradients of each case."""

    def loss(params, batch):
        return reference_step.loss(model, params, batch).loss

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)
    run = jax.value_and_grad(loss)
    losses, grads = reference_step.run_compiled(
        lambda cases: jax.lax.map(lambda case: run(*case), cases), stacked
    )
    return [(losses[n], jax.tree.map(lambda leaf, n=n: leaf[n], grads)) for n in range(len(cases))]


def _difference(actual: Any, expected: Any, when: str) -> str | None:
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        if not np.abs(a - b).max() <= TOLERANCE * max(1.0, np.abs(b).max()):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return f"{name} differs {when} by {np.abs(a - b).max():.3g}"
    return None
