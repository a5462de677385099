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

# Their kernels and biases have a dim of experts after that of layers.
PER_EXPERT = ("gate", "up", "down")

TOLERANCE = 1e-10
BALANCE = ("none", "batch", "sequence", "bias")  # values of model.balance
WEIGHT = 0.25  # model.balance_weight of the law `balanced`


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
        "shared_gate": False,
        "d_shared": 0,
        "capacity_factor": 0.0,
        "router": "topk_softmax",
        "router_scale": 1.0,
        "router_z_loss": 0.0,
        "balance": "none",
        "bias": False,
        "expert_bias": False,
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
    """Law: a step replaces what was measured; only balance="bias" moves a bias.

    Over several steps, each bias changes by `balance_weight` towards an equal load (arXiv
    2408.15664), whatever the size of the difference, unless it is one of rounding. Nothing centres
    the biases, and no other parameter changes. The scalars of a step are those of its own load.
    """
    _, params = _start(section)
    random, num_experts = np.random.default_rng(2), section["num_experts"]
    for balance in BALANCE:
        own = {**section, "balance": balance, "balance_weight": WEIGHT}
        model, updated = transformer.build(**own), params
        expected = dict(params["layers"]["mlp"]["measured"])
        for number in range(3):
            means = jax.tree.map(lambda leaf: random.random(leaf.shape), params)
            mean = means["layers"]["mlp"]["measured"]
            mean["load"][0] = 1 + 1e-7 * random.random(num_experts)
            mean["load"] /= mean["load"].sum(-1, keepdims=True)
            updated, scalars = model.measure(updated, means)
            too_little = np.sign(1 / num_experts - mean["load"])
            too_little[0] = 0
            moved = expected["bias"] + (balance == "bias") * WEIGHT * too_little
            expected = {**{name: mean[name] for name in expected}, "bias": moved}
            found = updated["layers"]["mlp"]["measured"]
            when = f"after step {number} with balance={balance}"
            fault = _difference(dict(found), expected, when)
            fault = fault or _difference(scalars, _scalars(expected, balance), when)
            if fault:
                return fault
        rest = {**params["layers"]["mlp"], "measured": found}
        fault = _difference(updated, _with_mlp(params, rest), f"by what balance={balance} measures")
        if fault:
            return fault
    return None


def _scalars(measured: Mapping[str, np.ndarray], balance: str) -> dict[str, np.ndarray]:
    """Returns what a step logs of each layer, from the statistics after it."""
    load = measured["load"]
    num_experts = load.shape[-1]
    scalars = {
        # 1 if the load is equal, the number of experts if one of them gets all tokens.
        "expert_load_max": load.max(-1) / load.mean(-1),
        # 1 if the load is equal, 0 if one of them gets all tokens.
        "expert_load_entropy": -(load * np.log(load)).sum(-1) / np.log(num_experts),
        "expert_dropped": measured["dropped"],
        "router_log_z": measured["log_z"],
        # Switch Transformers (arXiv 2101.03961), equation 4, without its factor.
        "balance_loss": num_experts * np.einsum("le,le->l", load, measured["score"]),
    }
    if balance == "bias":
        scalars["router_bias_range"] = np.ptp(measured["bias"], axis=-1)
    return scalars


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
            mlp[name] = {kind: leaf[:, order] for kind, leaf in mlp[name].items()}
    mlp["router"] = {kind: leaf[..., order] for kind, leaf in mlp["router"].items()}
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
