"""Models of which a part is trained: updates of low rank (LoRA), and parameters by pattern."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from meshtrain.config.schema import AdapterConfig, Config
from meshtrain.errors import ConfigError, did_you_mean, minimum_faults
from meshtrain.metrics import Metrics
from meshtrain.models import lora_layer, trees
from meshtrain.models.base import (
    FIRST_LAYERS_KEY,
    LAYER_NUMBER_KEY,
    ROUTER_BIAS,
    STATS_KEY,
    Model,
    Params,
)
from meshtrain.models.layers import normal_initializer
from meshtrain.models.lora_layer import DROP, A, B
from meshtrain.models.lora_merge import KERNEL
from meshtrain.ops import dropout as masks

AT_ADAPTER = 2**32 - 1  # the number by which the key of the initial parameters is folded
FIRST_SITE = 2**16  # of the masks of an adapter, see ops/dropout.py; those of models are smaller


def adapt(model: Model, cfg: Config) -> Model:
    """Returns the model with `adapter` and `train.trainable` applied.

    Raises ConfigError if they do not fit it.
    """
    c, only = cfg.adapter, cfg.train.trainable
    if not c.rank and only == "*":
        return model
    patterns: list[str] = []
    if c.rank:
        _check(c)
        model = lora(
            model,
            rank=c.rank,
            alpha=c.alpha,
            targets=c.targets,
            dropout=c.dropout,
            rslora=c.rslora,
            experts=c.experts,
        )
    if only != "*":
        patterns = [pattern.strip() for pattern in only.split(",")]
        model = train_only(model, patterns)
    if not _matches(ROUTER_BIAS, patterns):
        model = _with_frozen_bias(model)
    return model


def _check(c: AdapterConfig) -> None:
    faults = minimum_faults(0, {"adapter.rank": c.rank})
    if not c.alpha > 0:
        faults.append(f"adapter.alpha={c.alpha}: use a positive number")
    if not 0 <= c.dropout < 1:
        faults.append(
            f"adapter.dropout={c.dropout}: is a probability; use 0 or more, and less than 1"
        )
    if not c.targets or not all(isinstance(pattern, str) for pattern in c.targets):
        faults.append(f"adapter.targets={c.targets!r}: use patterns, such as ('layers/*',)")
    if faults:
        raise ConfigError(*faults)


def lora(
    model: Model,
    *,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    dropout: float = 0.0,
    rslora: bool = False,
    experts: bool = False,
) -> Model:
    """Returns the model with kernels W + scale A B, of which only A and B are trained.

    (LoRA, arXiv 2106.09685; for the scale see `AdapterConfig.scale`.)

    `targets` are patterns of paths of linear layers, such as layers/attention/*; with `experts`
    also of kernels that each expert has. A is drawn with the variance of PEFT's, 1 / (3 inputs), B
    starts at zero. In training each element of the input of A is dropped with the probability
    `dropout`. Raises ConfigError for a pattern without a linear layer, or if the model does not
    support dropout.
    """
    layers = sorted(_matching(model, targets, experts=experts))
    if dropout and any(path in model.expert_linears for path in layers):
        raise ConfigError(
            f"adapter.dropout={dropout}: the update of an expert is added to its kernel, so its "
            "input has no dropout; use adapter.dropout=0, or adapter.experts=False"
        )
    shapes = {path: _factor_shapes(model, path, rank) for path in layers}
    model = _with_dropout(model, layers, dropout) if dropout else model

    def init(key):
        params = model.init(key)
        # The model draws its own parameters from fold_in(key, 0), fold_in(key, 1), ...
        key = jax.random.fold_in(key, AT_ADAPTER)
        for number, path in enumerate(layers):
            shape_a, shape_b, num_in = shapes[path]
            draw = normal_initializer((3 * num_in) ** -0.5)
            a = draw(jax.random.fold_in(key, number), shape_a)
            factors = {A: a, B: jax.numpy.zeros(shape_b, a.dtype)}
            params = trees.merge(params, trees.nested(path, factors))
        return params

    axes = model.axes
    for path in layers:
        axes = trees.merge(axes, trees.nested(path, _factor_axes(model, path)))
    # The scale is applied to B, which is small, before the layers see it.
    scale = AdapterConfig(rank=rank, alpha=alpha, rslora=rslora).scale
    functions = {}
    for name in ("loss", "embed", "block", "head", "logits", "cached_embed", "cached_block"):
        if (function := getattr(model, name)) is not None:
            functions[name] = _scaled(function, scale)
    return dataclasses.replace(
        model,
        init=init,
        axes=axes,
        is_trained=_is_added,
        flops_per_token=None,
        **functions,
    )


def _with_dropout(model: Model, layers: Sequence[str], rate: float) -> Model:
    """Returns the model whose layers get the dropout of A's input, next to A and B.

    Each adapted layer has masks of its own, as in PEFT. Raises ConfigError for a model that is not
    a stack.
    """
    if model.block is None:
        raise ConfigError(
            f"adapter.dropout={rate}: the model is one loss, in which nothing tells the rows and "
            "positions that a linear layer gets, so its masks would depend on the mesh; use "
            "adapter.dropout=0"
        )

    # The first name in the paths of layers outside the stack, which run once.
    outer_names = {path.split("/")[0] for path in layers} - {"layers", FIRST_LAYERS_KEY}

    def with_drop(part: Params, name: str, batch: Any) -> Params:
        """Returns `part`, the parameters at the path `name`, with the dropout of its layers."""
        keys_BW = masks.row_keys(batch)
        if keys_BW is None:  # evaluation and generation
            return part
        tree = trees.nested(name, part)
        for number, path in enumerate(layers):
            if path == name or path.startswith(f"{name}/"):
                drop = jax.tree_util.Partial(partial(_drop, rate, FIRST_SITE + number), keys_BW)
                tree = trees.merge(tree, trees.nested(path, {DROP: drop}))
        return trees.leaf(tree, name)

    def with_outer_drop(params: Params, batch: Any) -> Params:
        outer = {name: with_drop(params[name], name, batch) for name in outer_names}
        return {**params, **outer}

    def block(layer: Params, x: Any, batch: Any) -> Any:
        layer_batch = masks.at_layer(batch, layer[LAYER_NUMBER_KEY])
        return model.block(with_drop(layer, "layers", layer_batch), x, batch)

    def head(params: Params, x: Any, batch: Any) -> Metrics:
        return model.head(with_outer_drop(params, batch), x, batch)

    def embed(params: Params, batch: Any) -> Any:
        params = with_outer_drop(params, batch)
        for number in params.get(FIRST_LAYERS_KEY, {}):
            name = f"{FIRST_LAYERS_KEY}/{number}"
            layer_batch = masks.at_layer(batch, int(number))
            layer = with_drop(trees.leaf(params, name), name, layer_batch)
            params = trees.merge(params, trees.nested(name, layer))
        return model.embed(params, batch)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    num_first = len(shapes.get(FIRST_LAYERS_KEY, {}))
    numbers = num_first + np.arange(len(jax.tree.leaves(shapes["layers"])[0]), dtype=np.int32)
    constants = {LAYER_NUMBER_KEY: numbers, **model.constants}
    return dataclasses.replace(
        model,
        block=block,
        embed=embed,
        head=head,
        constants=constants,
        row_keys=True,
    )


def _drop(rate: float, site: int, keys_BW: jax.Array, x: jax.Array) -> jax.Array:
    return masks.dropout(x, {masks.NAME: keys_BW}, rate=rate, site=site)


def _is_added(path: str) -> bool:
    """Returns whether a parameter has a gradient although no pattern names it.

    So have A and B, and router statistics.
    """
    return lora_layer.is_low_rank(path) or STATS_KEY in path.split("/")


def train_only(model: Model, patterns: list[str]) -> Model:
    """Returns the model that trains only the parameters that match a pattern, and A and B.

    Raises ConfigError for a pattern without a parameter.
    """
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    if unmatched := [pattern for pattern in patterns if not fnmatch.filter(paths, pattern)]:
        raise ConfigError(
            f"train.trainable={','.join(unmatched)}: no parameter has such a "
            f"path{did_you_mean(unmatched[0], paths)}; there are {', '.join(paths[:5])}, ..."
        )
    before = model.is_trained or _is_added

    def is_trained(path: str) -> bool:
        return before(path) or _matches(path, patterns)

    return dataclasses.replace(model, is_trained=is_trained, flops_per_token=None)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def _with_frozen_bias(model: Model) -> Model:
    """Returns the model whose router keeps the bias that balances its experts.

    The other leaves of `measured` are statistics, and are updated in every run.
    """
    measure = model.measure
    if measure is None:
        return model

    def measure_without_bias(params, means):
        return measure(params, trees.matching(means, lambda path: path != ROUTER_BIAS))

    return dataclasses.replace(model, measure=measure_without_bias)


def _matching(model: Model, targets: tuple[str, ...], *, experts: bool) -> set[str]:
    """Returns the paths of the linear layers that match a pattern."""
    linears = [*model.linears, *(model.expert_linears if experts else ())]
    if experts and not model.expert_linears:
        raise ConfigError(
            "adapter.experts=True: the model has no routed experts; use adapter.experts=False"
        )
    if not linears:
        raise ConfigError(
            f"adapter.targets={','.join(targets)}: the model has no layer that an adapter can "
            "change: nnx.Linear, nnx.LinearGeneral, linen.Dense or linen.DenseGeneral; use "
            "adapter.rank=0, and train.trainable to train a part of the model"
        )
    paths: set[str] = set()
    faults = []
    for pattern in targets:
        name = pattern.rpartition("/")[2]
        matches = [
            path
            for path in fnmatch.filter(linears, pattern)
            if path not in model.named_linears or path.endswith(f"/{name}")
        ]
        if not matches:
            hint = ""
            if fnmatch.filter(model.expert_linears, pattern):
                hint = "; it is of routed experts, which adapter.experts=True adapts"
            faults.append(
                f"adapter.targets={pattern!r}: no linear layer has such a "
                f"path{did_you_mean(pattern, linears)}; there are {', '.join(linears)}{hint}"
            )
        paths |= {*matches}
    if faults:
        raise ConfigError(*faults)
    return paths


def _factor_shapes(model: Model, path: str, rank: int) -> tuple[tuple, tuple, int]:
    """Returns the shapes of A and B, and the number of inputs of a linear layer."""
    kernel = trees.leaf(jax.eval_shape(model.init, jax.random.key(0)), path + KERNEL).shape
    num_lead = _num_lead(model, path)
    lead, dims = kernel[:num_lead], kernel[num_lead:]
    num_in = _num_in(model, path)
    into, out = dims[:num_in], dims[num_in:]
    return (*lead, *into, rank), (*lead, rank, *out), math.prod(into)


def _factor_axes(model: Model, path: str) -> dict[str, tuple]:
    """Returns the logical names of the dims of A and B of a linear layer."""
    names = trees.leaf(model.axes, path + KERNEL)
    num_lead = _num_lead(model, path)
    lead, dims = names[:num_lead], names[num_lead:]
    num_in = _num_in(model, path)
    into, out = dims[:num_in], dims[num_in:]
    return {A: (*lead, *into, None), B: (*lead, None, *out)}


def _num_in(model: Model, path: str) -> int:
    """Returns the number of dims of the input of a linear layer, or of an expert's kernel."""
    return 1 if path in model.expert_linears else model.linears[path]


def _num_lead(model: Model, path: str) -> int:
    """Returns the number of leading dims of a linear layer's parameters: of layers, of experts."""
    is_stacked = model.block is not None and path.split("/")[0] == "layers"
    return int(is_stacked) + int(path in model.expert_linears)


def _scaled(function: Callable, scale: float) -> Callable:
    """Returns a function of parameters that gets every B times `scale`."""

    def scaled(path, leaf):
        return leaf * jax.numpy.asarray(scale, leaf.dtype) if path[-1].key == B else leaf

    def call(params, *args):
        return function(jax.tree.map_with_path(scaled, params), *args)

    return call
