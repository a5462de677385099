"""What a model computes for each token, and what it keeps: read from its config, or traced."""

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.config.schema import Config
from meshtrain.models import blocks
from meshtrain.models.base import Model, Params
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.parallel.remat import rematerialised
from meshtrain.tools.plan.sizes import ModelWork, decoder

TRANSFORMER = "meshtrain.models.transformer:build"

# T tokens


def work_of(cfg: Config, model: Model, params: Params, batch: Any) -> ModelWork:
    """Returns the work of a config's model.

    That of the built-in transformer is computed from its sizes; any other is traced.
    """
    options = dict(cfg.model.options)
    if cfg.model.build == TRANSFORMER and model.block is not None and "attention_impl" in options:
        return of_transformer(TransformerConfig(**options), tokens_of(batch), params)
    return of_traced(model, params, batch, cfg.train.dtype)


def tokens_of(row: Any) -> int:
    """Returns the number of tokens of a batch of one row: what its first array has along it."""
    return math.prod(jax.tree.leaves(row)[0].shape[:2])


def of_transformer(c: TransformerConfig, seq_len: int, params: Params) -> ModelWork:
    """Returns the work of the built-in transformer; of experts, what a token uses.

    Latent attention counts as ordinary attention with its heads.
    """
    work = decoder(
        num_layers=c.num_layers,
        d_model=c.d_model,
        d_ff=c.used_mlp_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.query_size,
        vocab_size=c.vocab_size,
        gated=c.gated,
        tied=c.tie_embeddings,
    )
    return replace(
        work,
        **_weights(params),
        num_layers=_depth(params),
        window=float(c.visible_positions(seq_len).mean()) / seq_len,
        num_experts=c.num_experts,
    )


def of_traced(model: Model, params: Params, batch: Any, dtype: str) -> ModelWork:
    """Returns the work of any model, by its products.

    Products of two activations count as attention of one head.
    """
    num_tokens = tokens_of(batch)
    if model.block is None:
        found = jax.make_jaxpr(lambda p, b: model.loss(p, b, jax.random.key(0)))(params, batch)
        return ModelWork(1, 1, _products(found, num_tokens), 0, layer=_count(params), others=0)
    layer, x = _block_arguments(model, params, batch, dtype)
    found = jax.make_jaxpr(model.block)(layer, x, batch)
    width = jax.tree.leaves(x)[0].shape[-1]
    head = jax.make_jaxpr(model.head)(params, x, batch)
    largest = max((n for n, _ in _products(head, num_tokens)), default=0)
    return ModelWork(
        _depth(params),
        width,
        _products(found, num_tokens),
        int(largest),
        **_weights(params),
        width=max((n for n, _ in _products(found, num_tokens)), default=0) / 2,
    )


def with_kept(
    work: ModelWork, model: Model, params: Params, batch: Any, dtype: str, remats
) -> ModelWork:
    """Returns the work with the bytes that a layer keeps for its backward pass.

    They are listed for each of `remats`, without what is in the host's memory.
    """
    if model.block is None:
        return replace(work, kept=tuple((remat, 0.0, 0.0) for remat in remats))
    # So many rows that no array of tokens has the shape of a parameter.
    sizes = {size for leaf in jax.tree.leaves(params) for size in leaf.shape}
    rows = next(n for n in itertools.count(1) if n * tokens_of(batch) not in sizes)
    batch = jax.tree.map(lambda leaf: leaf.update(shape=(rows, *leaf.shape[1:])), batch)
    layer, x = _block_arguments(model, params, batch, dtype)
    num_tokens = tokens_of(batch)
    parameters = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(layer)}
    kept = []
    for remat in remats:
        block = rematerialised(model.block, remat)

        def residuals_of(layer, x, batch, block=block):
            return jax.vjp(lambda *args: block(*args, batch), layer, x)[1]

        # Not by jax.eval_shape, whose shapes do not say in which memory an array is.
        residuals = jax.make_jaxpr(residuals_of)(layer, x, batch).out_avals
        wide = other = 0.0
        for leaf in residuals:
            if leaf.memory_space == jax.memory.Space.Host:
                continue
            # Scalars and parameters are not kept for each token.
            if not leaf.shape or leaf.size < num_tokens:
                continue
            if (leaf.shape, leaf.dtype) in parameters:
                continue
            size = leaf.size * leaf.dtype.itemsize / num_tokens
            if leaf.shape[-1] == work.d_model:
                wide += size
            else:
                other += size
        kept.append((remat, wide, other))
    return replace(work, kept=tuple(kept))


def _block_arguments(model: Model, params: Params, batch: Any, dtype: str):
    def make(params, batch):
        cast = blocks.to_compute_dtype(params, dtype)
        layer = jax.tree.map(lambda stacked: jnp.asarray(stacked)[0], model.stack(cast["layers"]))
        return layer, model.embed(cast, batch)

    return jax.eval_shape(make, params, batch)


def _depth(params: Params) -> int:
    return jax.tree.leaves(params["layers"])[0].shape[0]


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _weights(params: Params) -> dict[str, int]:
    in_layers = _count(params["layers"])
    return {"layer": in_layers // _depth(params), "others": _count(params) - in_layers}


def _products(jaxpr: Any, num_tokens: int) -> tuple[tuple[float, int], ...]:
    """Returns (n, k) of each matrix product, so that 2 T n k are its FLOPs."""
    return tuple((flops / (2 * num_tokens * k), k) for flops, k in _dots(jaxpr.jaxpr, 1) if flops)


def _dots(jaxpr: Any, times: int):
    """Yields FLOPs and contracted size of each matrix product.

    A loop counts as often as it runs.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left, out = eqn.invars[0].aval, eqn.outvars[0].aval
            k = math.prod(left.shape[d] for d in contracted)
            yield 2.0 * times * math.prod(out.shape) * k, k
        elif eqn.primitive.name == "cond":
            branches = [[*_dots(one.jaxpr, times)] for one in eqn.params["branches"]]
            yield from max(branches, key=lambda dots: sum(flops for flops, _ in dots))
        else:
            inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
            for value in eqn.params.values():
                for one in value if isinstance(value, (tuple, list)) else [value]:
                    if hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                        yield from _dots(one.jaxpr, inner)
                    elif hasattr(one, "eqns"):
                        yield from _dots(one, inner)
