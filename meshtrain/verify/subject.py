"""What `verify` works on: a small enough model, samples for it, and the steps that one device takes."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain import optim
from meshtrain.config.build import Parts, build, build_model
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, MeshConfig
from meshtrain.data import synthetic
from meshtrain.data.source import Batch, Source
from meshtrain.data.tokens import to_batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import assemble
from meshtrain.verify import reference_step as reference

LAYERS = 4  # two chunks on each of two stages, or one on each of four
STEPS = 2  # the second one starts from an optimizer state that is not zero
SEPARATOR = 0  # token that ends a document, where rows are packed


class Subject:
    """A model in float64 with its first state, samples, and what training makes of them on one device."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        model: Model | None,
        data: Source | Iterable[Any] | None,
        *,
        keep_sizes: bool,
    ):
        raw = copy.deepcopy(settings.to_dict() if hasattr(settings, "to_dict") else dict(settings))
        _check_unchanged(raw, model)
        if not keep_sizes and model is None:
            shrink(raw)
        prepare(raw, jax.device_count())
        cfg = parse(raw, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        self.raw, self.global_batch = raw, cfg.train.global_batch
        self.name = "your model" if model else raw["model"]["build"]
        self.model = without_dropout(parts.model)
        self.samples = read(parts.train_data, STEPS * self.global_batch)
        self.rows = _rows_of(self.samples)
        ours = data is None and raw["data"]["build"].startswith("meshtrain.data.")
        self.is_shifted_by_us = (
            ours and self.is_text
        )  # so that each target has to be the next token
        schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        optimizer = parts.make_optimizer(schedule)
        program = assemble(
            dataclasses.replace(cfg, mesh=MeshConfig()),
            Parts(self.model, lambda _: keep_gradients(optimizer)),
            devices=jax.devices()[:1],
        )
        with program.active():
            self.start = jax.device_get(program.start(cfg.train.seed))
        self._step = jax.jit(reference.make_step(self.model, optimizer, schedule))
        self._steps: dict[tuple[bool, bool], list[reference.Step]] = {}
        # Half of what the first gradients need, so that clipping has something to do.
        self.clip_norm = np.inf
        self.clip_norm = float(self.steps(packing=False, masks=False)[0].norm) / 2
        self._steps.clear()

    @property
    def is_text(self) -> bool:
        """Whether samples are token sequences, so that weights and packing can be varied."""
        return isinstance(self.samples, Batch)

    def steps(self, *, packing: bool, masks: bool) -> list[reference.Step]:
        """Returns the steps that one device takes, each document alone."""
        if (packing, masks) not in self._steps:
            params, opt_state, steps = self.start.params, self.start.opt_state[1], []
            for number, batch in enumerate(self.batches(packing=packing, masks=masks)[1]):
                step = self._step(np.int32(number), params, opt_state, batch, self.clip_norm)
                steps.append(jax.device_get(step))
                params, opt_state = steps[-1].params, steps[-1].opt_state
            self._steps[packing, masks] = steps
        return self._steps[packing, masks]

    def batches(self, *, packing: bool, masks: bool) -> tuple[Any, list[Any]]:
        """Returns the samples of all steps, and each step's batch anew, with each document alone."""
        random = np.random.default_rng(0)
        weights = self.samples.weights if self.is_text else None
        if masks:  # uneven over rows, so over devices and micro-batches; one row counts nothing
            share = random.permutation(np.linspace(0, 1, len(weights)))[:, None]
            drawn = random.choice([0.25, 1.0], weights.shape) * (
                random.random(weights.shape) < share
            )
            weights = (weights * drawn).astype(np.float32)
        if self.rows is None:
            samples = self.samples._replace(weights=weights) if self.is_text else self.samples
            return samples, self._cut(samples)
        rows = self.rows
        if packing:
            rows = np.where(rows == SEPARATOR, SEPARATOR + 1, rows)
            for row in rows:
                row[random.integers(0, rows.shape[1] - 1, 2)] = SEPARATOR
        separator = SEPARATOR if packing else None
        packed = to_batch(rows, SEPARATOR if packing else -1)
        alone = [
            reference.alone(part, weight, separator, 3 * self.global_batch)
            for part, weight in zip(self._cut(rows), self._cut(weights), strict=True)
        ]
        return packed._replace(weights=packed.weights * weights), alone

    def _cut(self, samples: Any) -> list[Any]:
        """Returns the part of each step."""
        size = self.global_batch
        return [
            jax.tree.map(lambda leaf, n=n: leaf[n * size : (n + 1) * size], samples)
            for n in range(STEPS)
        ]


def _check_unchanged(raw: dict[str, Any], model: Model | None) -> None:
    """Raises ConfigError for faults of the config as the user wrote it, whatever devices there are."""
    cfg = parse(raw)
    if model is None:
        build_model(cfg)


def shrink(raw: dict[str, Any]) -> None:
    """Makes the model small by the keys that models have in common; its structure stays.

    A fault of parallel code shows at any size; heads keep their ratio, and the vocabulary becomes
    one that has to be padded.
    """
    model, data = raw["model"], raw["data"]
    if {"num_heads", "num_kv_heads", "d_model"} <= model.keys():
        ratio = model["num_heads"] // model["num_kv_heads"]
        model["num_kv_heads"] = min(model["num_kv_heads"], max(1, 8 // ratio))
        model["num_heads"] = model["num_kv_heads"] * ratio
        model["d_model"] = min(model["d_model"], 8 * model["num_heads"])
        if model.get("head_dim"):
            model["head_dim"] = min(model["head_dim"], 16)
    if "num_layers" in model:
        model["num_layers"] = LAYERS
    small = {"d_ff": 64, "vocab_size": 125, "max_seq_len": 16, "seq_len": 16, "window": 5}
    for section in (model, data):
        section.update({key: min(n, section[key]) for key, n in small.items() if key in section})


def prepare(raw: dict[str, Any], num_devices: int) -> None:
    """Sets what a proof needs: float64, a batch that every layout divides, tokens without a file."""
    if raw["data"]["build"] == synthetic.FILES_BUILD:
        raw["data"].update(build=synthetic.SYNTHETIC_BUILD, separator=-1)
    if raw["model"].get("attention_impl") == "cudnn":  # which has no float64
        raw["model"].update(attention_impl="auto")
    raw["mesh"] = {**dict.fromkeys(AXES, 1), "data": num_devices}
    raw["train"].update(
        steps=STEPS,
        dtype="float64",
        param_dtype="float64",
        global_batch=4 * num_devices,
        num_microbatches=1,
        unroll=1,
    )
    raw["optim"].update(warmup_steps=0, moment_dtype="float64")
    if "epsilon" in raw["optim"]:
        raw["optim"].update(epsilon=1e-6)  # where Adam has only rounding noise, it divides by this
    raw["eval"].update(batches=0)


def read(data: Source | Iterable[Any], num: int) -> Any:
    """Returns the first `num` samples as one pytree of arrays."""
    if isinstance(data, Source):
        return data.read(np.arange(num))
    batches, found = [], 0
    for batch in data:
        batches.append(batch)
        found += len(jax.tree.leaves(batch)[0])
        if found >= num:
            return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:num], *batches)
    raise ConfigError(f"data: the iterable ended after {found} samples; verifying takes {num}")


def without_dropout(model: Model) -> Model:
    """Returns the model with dropout off: each layout draws its own."""
    if model.loss is None:
        return model
    return dataclasses.replace(model, loss=lambda params, batch, _: model.loss(params, batch, None))


def keep_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes the optimizer's state hold, first, the gradients that it was last given."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )
    return optax.chain(keep, optimizer)


def _rows_of(samples: Any) -> np.ndarray | None:
    """Returns (B, S + 1) tokens, where each target is the next token; None for anything else."""
    if not isinstance(samples, Batch) or samples.segments is not None:
        return None
    if not np.array_equal(samples.tokens[:, 1:], samples.targets[:, :-1]):
        return None
    return np.concatenate([samples.tokens, samples.targets[:, -1:]], axis=1)
