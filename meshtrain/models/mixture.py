"""A mixture of experts: a feed-forward layer whose router sends each token to a few experts.

A layer adds to the loss of each token, in a sum that is carried next to its activations: the
model's head adds the weighted sum, so that it is the same with any split of the batch. Through the
same sum each layer measures what its router does in the global batch, see `observe`. Tokens of
weight 0 count neither there nor in the loss; they are computed like all others, because later
tokens may attend to them.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config.rounding import to_12_digits
from meshtrain.data.source import Batch
from meshtrain.models.base import STATS_KEY, Params
from meshtrain.models.layers import MLP, dense, gated_activation, normal_initializer
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import experts
from meshtrain.parallel import context, expert
from meshtrain.parallel.remat import recomputed
from meshtrain.parallel.sharding import constrain, gathered, num_shards

# B batch, S sequence, D model, F feed-forward of an expert, E experts, k experts per token, L
# layers


class ExpertKernel(nnx.Module):
    """A matrix for each expert, (E, in, out), and perhaps a bias (E, out)."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        shape: tuple[int, int, int],
        axes: tuple,
        *,
        bias: bool,
        scale: float = 1.0,
    ):
        init = normal_initializer(scale * shape[1] ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), shape), out_sharding=axes)
        self.axes, self.bias_axes = axes, (axes[0], axes[2])
        zeros = jnp.zeros((shape[0], shape[2]))
        self.bias = nnx.Param(zeros, out_sharding=self.bias_axes) if bias else None
        self.add_update: Callable[[jax.Array], jax.Array] | None = None  # of an adapter

    def matrices(self) -> jax.Array:
        """Returns the matrices, sharded over devices by expert alone."""
        kernel = self.kernel[...]
        if self.add_update is not None:
            kernel = self.add_update(kernel)
        return gathered(kernel, self.axes, ("expert", None, None))

    def biases(self) -> jax.Array:
        """Returns the biases, sharded over devices by expert alone."""
        return gathered(self.bias[...], self.bias_axes, ("expert", None))


class RouterStats(nnx.Module):
    """Router statistics of the last step and the load-balancing bias; `measure` updates both."""

    def __init__(self, num_experts: int):
        E = num_experts
        self.load = nnx.Param(jnp.full(E, 1 / E))  # share of the assignments to each expert
        self.score = nnx.Param(jnp.full(E, 1 / E))  # mean router probability of each expert
        self.log_z = nnx.Param(jnp.zeros(()))  # mean logsumexp of the router's logits
        self.dropped = nnx.Param(jnp.zeros(()))  # share of the assignments that were dropped
        self.bias = nnx.Param(jnp.zeros(E))  # is added to the scores by which experts are chosen


class Mixture(nnx.Module):
    """A feed-forward layer of `experts_per_token` routed experts, and experts that all share."""

    def __init__(self, c: TransformerConfig, rngs: nnx.Rngs):
        self.c = c
        E, D, F = c.num_experts, c.d_model, c.expert_size
        bias = c.expert_bias
        self.router = dense(rngs, D, E, axes=("embed", None), bias=bias)
        into, out_of = ("expert", "embed", None), ("expert", None, "embed")
        self.gate = ExpertKernel(rngs, (E, D, F), into, bias=bias) if c.gated else None
        self.up = ExpertKernel(rngs, (E, D, F), into, bias=bias)
        self.down = ExpertKernel(rngs, (E, F, D), out_of, bias=bias, scale=c.residual_scale)
        self.gated = gated_activation(c)
        self.shared = MLP(c, rngs, c.shared_size) if c.num_shared_experts else None
        gate_axes = ("embed", None)
        self.shared_gate = dense(rngs, D, 1, axes=gate_axes, bias=False) if c.shared_gate else None
        self.measured = RouterStats(E)

    def __call__(
        self, norm: Callable[[jax.Array], jax.Array], x_BSD: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the feed-forward of `norm(x)`, and the loss that it adds per token (B, S)."""
        c = self.c
        x_BSD = constrain(norm(x_BSD), "batch", "seq", "residual")
        experts_BSk, weights_BSk, loss_BS = recomputed(
            lambda x_BSD: self._route(x_BSD, batch), x_BSD
        )
        layers = [layer for layer in (self.up, self.gate, self.down) if layer is not None]
        kernels = [layer.matrices() for layer in layers]
        if c.expert_bias:
            kernels += [layer.biases() for layer in layers]
        feed_forward = partial(
            experts.feed_forward, self._combine, c.num_experts, has_bias=c.expert_bias
        )
        y_BSD = expert.run_experts(
            feed_forward,
            x_BSD,
            experts_BSk,
            weights_BSk,
            kernels,
            expert_groups=c.expert_groups,
        )
        if self.shared is not None:
            shared_BSD = self.shared(lambda x_BSD: x_BSD, x_BSD)
            if self.shared_gate is not None:
                shared_BSD = recomputed(self._gate_shared, x_BSD, shared_BSD)
            y_BSD += shared_BSD
        return y_BSD, loss_BS

    def _gate_shared(self, x_BSD: jax.Array, shared_BSD: jax.Array) -> jax.Array:
        # In float32, because the gradient of the gate is a sum over D.
        wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
        gate_BS1 = jax.nn.sigmoid(self.shared_gate(x_BSD).astype(wide))
        return (gate_BS1 * shared_BSD.astype(wide)).astype(shared_BSD.dtype)

    def _combine(self, up, gate=None):
        hidden = jax.nn.gelu(up) if gate is None else self.gated(up, gate)
        return checkpoint_name(hidden, "mlp")

    def _route(self, x_BSD: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the experts of each token (B, S, k), their weights, and the added loss (B, S)."""
        c = self.c
        wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
        logits_BSE = constrain(self.router(x_BSD.astype(wide)), "batch", "seq", None)
        log_z_BS = jax.nn.logsumexp(logits_BSE, axis=-1)
        if c.router == "sigmoid":
            scores_BSE = jax.nn.sigmoid(logits_BSE)
            share_BSE = scores_BSE / scores_BSE.sum(-1, keepdims=True)
        else:
            scores_BSE = share_BSE = jnp.exp(logits_BSE - log_z_BS[..., None])
        experts_BSk = self._choose(jax.lax.stop_gradient(scores_BSE))
        is_chosen_BSkE = experts_BSk[..., None] == jnp.arange(c.num_experts)[None, None, None]
        with jax.named_scope("share"):  # all terms but one are zero
            weights_BSk = jnp.where(is_chosen_BSkE, scores_BSE[:, :, None], 0).sum(-1)
        if c.router != "softmax":
            weights_BSk /= weights_BSk.sum(-1, keepdims=True) + jnp.finfo(wide).tiny
        load_BSE = is_chosen_BSkE.mean(2, dtype=wide)
        kept_BSk = within_capacity(c, experts_BSk, batch)
        loss_BS = self._balance_loss(share_BSE, load_BSE, batch)
        if c.router_z_loss:
            loss_BS += c.router_z_loss * log_z_BS**2
        loss_BS += observe(
            self.measured,
            load=load_BSE,
            score=share_BSE,
            log_z=log_z_BS,
            dropped=(~kept_BSk).mean(-1, dtype=wide),
        )
        experts_BSk = jnp.where(kept_BSk, experts_BSk, experts.DROPPED)
        weights_BSk = (c.router_scale * weights_BSk).astype(x_BSD.dtype)
        return experts_BSk, weights_BSk, constrain(loss_BS, "batch", "seq")

    def _choose(self, scores_BSE: jax.Array) -> jax.Array:
        """Returns the k experts with the highest scores; of equal scores, the lower numbers."""
        c = self.c
        scores_BSE += jax.lax.stop_gradient(self.measured.bias[...])[None, None]
        if c.expert_groups:
            num_groups, groups_per_token = c.expert_groups
            by_group = scores_BSE.reshape(*scores_BSE.shape[:2], num_groups, -1)
            # DeepSeek-V3 (arXiv 2412.19437) adds up the two highest scores of a group, V2 takes the
            # highest.
            num_best = min(2 if c.router == "sigmoid" else 1, by_group.shape[-1])
            best, _ = jax.lax.top_k(by_group, num_best)
            _, groups = jax.lax.top_k(best.sum(-1), groups_per_token)
            number = jnp.arange(num_groups)[None, None, None]
            allowed = (groups[..., None] == number).any(-2)[..., None]
            scores_BSE = jnp.where(allowed, by_group, -jnp.inf).reshape(scores_BSE.shape)
        return jax.lax.top_k(scores_BSE, c.experts_per_token)[1]

    def _balance_loss(self, share_BSE: jax.Array, load_BSE: jax.Array, batch: Batch) -> jax.Array:
        """Returns the balance loss of each token (B, S): weight x E x sum of load x share.

        It is the weight if the load is balanced.

        As in Switch Transformers (arXiv 2101.03961), but the load is that of the global batch of
        the step before ("batch"): all micro-batches and devices use the same one before any of them
        is complete. Or it is the document's own ("sequence", arXiv 2412.19437).
        """
        c = self.c
        if c.balance == "batch":
            load = jax.lax.stop_gradient(self.measured.load[...])[None, None]
        elif c.balance == "sequence":
            load = jax.lax.stop_gradient(_mean_of_documents(load_BSE, batch))
        else:
            return jnp.zeros(share_BSE.shape[:2], share_BSE.dtype)
        return c.balance_weight * c.num_experts * (load * share_BSE).sum(-1)


def observe(measured: RouterStats, **values_BS: jax.Array) -> jax.Array:
    """Returns zeros (B, S) whose gradient with respect to a leaf of `measured` is its value.

    The gradients of the global batch are therefore weighted sums of these values, whatever
    micro-batches, stages and devices it is split into. Values are (B, S) or (B, S, E).
    """
    total = 0
    for name, value in values_BS.items():
        leaf = getattr(measured, name)[...]
        zero = (leaf - jax.lax.stop_gradient(leaf)).astype(value.dtype)
        terms = zero[(None,) * 2] * jax.lax.stop_gradient(value)
        total += terms.sum(-1) if value.ndim == 3 else terms
    return total


def within_capacity(c: TransformerConfig, experts_BSk: jax.Array, batch: Batch) -> jax.Array:
    """Returns which assignments an expert accepts (B, S, k): all if `capacity_factor` is 0.

    In each row of the batch an expert accepts the first capacity_factor x S x k / E assignments,
    rounded up, in the order of positions: so later tokens have no effect on earlier ones. In
    generation, S is the number of tokens in the row without padding, which takes no capacity.
    """
    (S, k), E = experts_BSk.shape[1:], c.num_experts
    if not c.capacity_factor:
        return jnp.ones(experts_BSk.shape, bool)
    if batch.num_pads is None:
        order = context.order(S, num_shards("seq", S))
        num_pads_B1 = jnp.zeros((1, 1), jnp.int32)
    else:
        order = np.arange(S)
        num_pads_B1 = batch.num_pads[:, None]
    # The capacity of an expert, by the number of tokens in a row.
    capacities = [math.ceil(to_12_digits(c.capacity_factor * n * k / E)) for n in range(S + 1)]
    capacity_B1 = jnp.array(capacities)[S - num_pads_B1]
    natural = jnp.argsort(order)
    ranked = constrain(experts_BSk, "batch", None, None)[:, natural]
    is_pad_BS = jnp.arange(S)[None] < num_pads_B1
    ranked = jnp.where(is_pad_BS[..., None], experts.DROPPED, ranked)
    is_chosen = ranked.reshape(-1, S * k)[..., None] == jnp.arange(E)[None, None]
    rank = jnp.where(is_chosen, jnp.cumsum(is_chosen, axis=1), 0).sum(-1)
    kept = (rank <= capacity_B1).reshape(-1, S, k)[:, jnp.asarray(order)]
    return constrain(kept, "batch", "seq", None)


def _mean_of_documents(values_BSE: jax.Array, batch: Batch) -> jax.Array:
    """Returns the weighted mean over the document of each token; broadcasts to (B, S, E)."""
    weights_BS1 = batch.weights[..., None].astype(values_BSE.dtype)
    weighted = values_BSE * weights_BS1
    if batch.segments is None:
        total, weight = weighted.sum(1, keepdims=True), weights_BS1.sum(1, keepdims=True)
    else:

        def per_row(values, segments):
            sums = jax.ops.segment_sum(values, segments, num_segments=segments.shape[0])
            return sums[segments]

        total = jax.vmap(per_row)(weighted, batch.segments)
        weight = jax.vmap(per_row)(weights_BS1, batch.segments)
    return total / jnp.where(weight == 0, 1, weight)


ROUNDING = 1e-5  # of a share of the load, relative to an equal one


def measure(
    c: TransformerConfig, params: Params, means: Params
) -> tuple[Params, dict[str, jax.Array]]:
    """Updates the router statistics; returns the parameters, and scalars to log (L,) by name.

    `means` are the gradients with respect to the parameters, per unit of weight. With
    balance="bias" an expert's bias changes by `balance_weight` towards an equal load (arXiv
    2408.15664), unless it is frozen: then `means` lack it.
    """
    layers, E = params["layers"], c.num_experts
    old, mean = layers["mlp"][STATS_KEY], means["layers"]["mlp"][STATS_KEY]
    new = {"bias": old["bias"]}
    for name, leaf in old.items():
        if name != "bias":
            new[name] = mean[name].astype(leaf.dtype)
    if c.balance == "bias" and "bias" in mean:
        # A load that is equal but for rounding, which differs between meshes, changes nothing.
        missing = 1 / E - new["load"]
        missing = jnp.where(jnp.abs(missing) < ROUNDING / E, 0, missing)
        new["bias"] += c.balance_weight * jnp.sign(missing)
    load = new["load"]
    entropy = -(load * jnp.log(jnp.where(load > 0, load, 1))).sum(-1)
    scalars = {
        "expert_load_max": E * load.max(-1),
        "expert_load_entropy": entropy / max(math.log(E), 1e-9),
        "expert_dropped": new["dropped"],
        "router_log_z": new["log_z"],
        "balance_loss": E * (load * new["score"]).sum(-1),
    }
    if c.balance == "bias":
        scalars["router_bias_range"] = new["bias"].max(-1) - new["bias"].min(-1)
    mlp = {**layers["mlp"], STATS_KEY: new}
    return {**params, "layers": {**layers, "mlp": mlp}}, scalars
