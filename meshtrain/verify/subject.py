"""The subject of `verify`: a small model, its samples, and the expected steps on one device."""

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
from meshtrain.data.source import Batch, Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import assemble
from meshtrain.verify import reference_step

NUM_LAYERS = 4  # enough for two chunks on each of two stages, or one on each of four
STEPS = 2  # the second starts from an optimizer state that is not zero
SEPARATOR = 0  # token that ends a document in packed rows


class Subject:
    """A model in float64, its initial state, samples, and the expected steps on one device."""

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
        adjust_settings(raw, jax.device_count())
        cfg = parse(raw, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        self.raw, self.global_batch = raw, cfg.train.global_batch
        self.name = "your model" if model else raw["model"]["build"]
        self.model = without_dropout(parts.model)
        self.samples = read_samples(parts.train_data, STEPS * self.global_batch)
        self.rows = _rows_of(self.samples)
        # In data of this package each target has to be the next token.
        own_data = data is None and raw["data"]["build"].startswith("meshtrain.data.")
        self.must_predict_next_token = own_data and self.is_text
        schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        optimizer = parts.make_optimizer(schedule)
        program = assemble(
            dataclasses.replace(cfg, mesh=MeshConfig()),
            Parts(self.model, lambda _: keep_gradients(optimizer)),
            devices=jax.devices()[:1],
        )
        with program.active():
            self.start = jax.device_get(program.start(cfg.train.seed))
        self._step = jax.jit(reference_step.make_step(self.model, optimizer, schedule))
        self._steps: dict[tuple[bool, bool], list[reference_step.Step]] = {}
        # Half of the first gradient norm, so that clipping has an effect.
        self.clip_norm = np.inf
        self.clip_norm = float(self.steps(packing=False, masks=False)[0].norm) / 2
        self._steps.clear()

    @property
    def is_text(self) -> bool:
        """Whether samples are token sequences, whose weights and packing can be varied."""
        return isinstance(self.samples, Batch)

    def steps(self, *, packing: bool, masks: bool) -> list[reference_step.Step]:
        """Returns the expected steps on one device, with each document in a separate row."""
        if (packing, masks) not in self._steps:
            params, opt_state, steps = self.start.params, self.start.opt_state[1], []
            for number, batch in enumerate(self.batches(packing=packing, masks=masks)[1]):
                step = self._step(np.int32(number), params, opt_state, batch, self.clip_norm)
                steps.append(jax.device_get(step))
                params, opt_state = steps[-1].params, steps[-1].opt_state
            self._steps[packing, masks] = steps
        return self._steps[packing, masks]

    def batches(self, *, packing: bool, masks: bool) -> tuple[Any, list[Any]]:
        """Returns the samples of all steps, and for each step its batch with one document per row."""
        random = np.random.default_rng(0)
        weights = self.samples.weights if self.is_text else None
        # Weights differ between rows, hence between devices and micro-batches; one row has weight 0.
        if masks:
            share = random.permutation(np.linspace(0, 1, len(weights)))[:, None]
            factors = random.choice([0.25, 1.0], weights.shape)
            factors *= random.random(weights.shape) < share
            weights = (weights * factors).astype(np.float32)
        if self.rows is None:
            samples = self.samples._replace(weights=weights) if self.is_text else self.samples
            return samples, self._split(samples)
        rows = self.rows
        if packing:
            rows = np.where(rows == SEPARATOR, SEPARATOR + 1, rows)
            for row in rows:
                row[random.integers(0, rows.shape[1] - 1, 2)] = SEPARATOR
        separator = SEPARATOR if packing else None
        packed = to_batch(rows, SEPARATOR if packing else -1)
        unpacked = [
            reference_step.unpack_documents(part, weight, separator, 3 * self.global_batch)
            for part, weight in zip(self._split(rows), self._split(weights), strict=True)
        ]
        return packed._replace(weights=packed.weights * weights), unpacked

    def _split(self, samples: Any) -> list[Any]:
        """Returns the batch of each step."""
        size = self.global_batch
        return [
            jax.tree.map(lambda leaf, n=n: leaf[n * size : (n + 1) * size], samples)
            for n in range(STEPS)
        ]


def _check_unchanged(raw: dict[str, Any], model: Model | None) -> None:
    """Raises ConfigError for mistakes in the user's config that do not depend on the number of devices."""
    cfg = parse(raw)
    if model is None:
        build_model(cfg)


def shrink(raw: dict[str, Any]) -> None:
    """Reduces the sizes of the model, which it recognises by their usual keys.

    Bugs of parallel code show at any size. The structure and the ratio of query to key/value heads stay
    the same; the new size of the vocabulary needs padding.
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
        model["num_layers"] = NUM_LAYERS
    small = {"d_ff": 64, "vocab_size": 125, "max_seq_len": 16, "seq_len": 16, "window": 5}
    for section in (model, data):
        section.update({key: min(n, section[key]) for key, n in small.items() if key in section})


def adjust_settings(raw: dict[str, Any], num_devices: int) -> None:
    """Sets float64, a batch of 4 rows per device, and synthetic tokens instead of files."""
    if raw["data"]["build"] == synthetic.FILES_BUILD:
        raw["data"].update(build=synthetic.SYNTHETIC_BUILD, separator=-1)
    if raw["model"].get("attention_impl") == "cudnn":  # does not support float64
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
        # Adam divides a gradient of rounding noise by epsilon; a larger epsilon keeps the update small.
        raw["optim"].update(epsilon=1e-6)
    raw["eval"].update(batches=0)


def read_samples(data: Source | Iterable[Any], num: int) -> Any:
    """Returns the first `num` samples as one pytree of arrays."""
    if isinstance(data, Source):
        return data.read(np.arange(num))
    batches, count = [], 0
    for batch in data:
        batches.append(batch)
        count += len(jax.tree.leaves(batch)[0])
        if count >= num:
            return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:num], *batches)
    raise ConfigError(f"data: the iterable ended after {count} samples; verify needs {num}")


def without_dropout(model: Model) -> Model:
    """Returns the model without dropout, whose masks differ between layouts."""
    if model.loss is None:
        return model
    return dataclasses.replace(model, loss=lambda params, batch, _: model.loss(params, batch, None))


def keep_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with the latest gradients as the first entry of its state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )
    return optax.chain(keep, optimizer)


def _rows_of(samples: Any) -> np.ndarray | None:
    """Returns tokens (B, S + 1) if each target is the next token, else None."""
    if not isinstance(samples, Batch) or samples.segments is not None:
        return None
    if not np.array_equal(samples.tokens[:, 1:], samples.targets[:, :-1]):
        return None
    return np.concatenate([samples.tokens, samples.targets[:, -1:]], axis=1)
