"""Selects the adapters that the layouts of `verify` train: a factor of their covering table."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax

from meshtrain.models import trees
from meshtrain.models.base import FIRST_LAYERS_KEY, Model
from meshtrain.tools.verify.reference.adapter import Adapter

NONE = None  # name of the choice that trains everything, without an adapter


def choices(settings: Mapping[str, Any], model: Model) -> dict[str | None, Adapter]:
    """Returns what layouts train, by a name to print: everything; parts of it, with an adapter.

    The adapters are one of every linear layer, with dropout; one of some of the layers, with the
    scale of rsLoRA, next to which the head and the experts are trained; one of the experts; and
    that of the settings. A model without linear layers has none of them.
    """
    found: dict[str | None, Adapter] = {NONE: Adapter()}
    if model.linears:
        # Of the stack, if the model has one.
        layer = min(model.linears, key=lambda path: (not path.startswith("layers/"), path))
        group = layer.rpartition("/")[0]
        targets = (f"{group}/*" if group else layer, *model.named_linears)
        found[f"rank 2 of {', '.join(targets)} and own heads"] = Adapter(
            2, 7.0, targets, trainable=",".join(_heads(model)), rslora=True
        )
        found["rank 3 of all layers"] = Adapter(3, 12.0, ("*",), dropout=0.25)
    if model.expert_linears:
        found["rank 2 of all experts"] = Adapter(2, 6.0, model.expert_linears, experts=True)
    section, trainable = settings["adapter"], settings["train"]["trainable"]
    if section["rank"] or trainable != "*":
        names = ("rank", "alpha", "targets", "dropout", "rslora", "experts")
        keys = {name: section[name] for name in names}
        configured = _fitting(Adapter(**keys, trainable=trainable), model)
        if configured is not None:
            found["of the config"] = configured
    if not model.row_keys:
        # Without keys of rows there is no dropout.
        found = {name: dataclasses.replace(one, dropout=0.0) for name, one in found.items()}
    return found


def _heads(model: Model) -> list[str]:
    """Returns patterns of what is outside of the layers but the embedding, and of experts."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    outside = sorted({path.split("/")[0] for path in paths} - {"layers", FIRST_LAYERS_KEY})
    heads = [name for name in outside if name not in ("tokens", "positions")] or outside
    patterns = [f"{name}*" for name in heads]
    experts = "layers/mlp/up/kernel"
    return patterns + [experts] * (experts in paths and "layers/mlp/up" not in model.linears)


def _fitting(adapter: Adapter, model: Model) -> Adapter | None:
    """Returns the adapter with the patterns that match something in the smaller model, or None."""
    linears = [*model.linears, *(model.expert_linears if adapter.experts else ())]
    targets = tuple(name for name in adapter.targets if fnmatch.filter(linears, name))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    wanted = [name.strip() for name in adapter.trainable.split(",")]
    trainable = ",".join(name for name in wanted if fnmatch.filter(paths, name))
    if (adapter.rank and not targets) or not trainable:
        return None
    return dataclasses.replace(adapter, targets=targets, trainable=trainable)
