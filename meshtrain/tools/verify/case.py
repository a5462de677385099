"""The subject of `verify`: a small model, its samples, and the expected steps on one device."""

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.config.build import Parts, build, build_model
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, MeshConfig
from meshtrain.data import synthetic
from meshtrain.data.source import Batch, Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.optim import base as optim
from meshtrain.program import assemble
from meshtrain.tools.verify.reference import step as reference_step

# Two layers in each of three chunks on each of four stages; in `Subject.shallow`, in each of four chunks. Both are
# extended to a multiple of the length of the attention pattern.
NUM_LAYERS, FEW_LAYERS = 24, 8

ROWS_PER_DEVICE = 6

DROPOUT = 0.25  # of a transformer without it; a layout may switch it off

TRANSFORMER = "meshtrain.models.transformer:build"

STEPS = 2  # the second starts from an optimizer state that is not zero

SEPARATOR = 0  # token that ends a document in packed rows


class VerifyCase:
    """A model in float64, its initial state, samples, and the expected steps on one device."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        model: Model | None,
        data: Source | Iterable[Any] | None,
        *,
        keep_sizes: bool,
        num_layers: int = NUM_LAYERS,
    ):
        raw = copy.deepcopy(settings.to_dict() if hasattr(settings, "to_dict") else dict(settings))
        self.settings, self.keep_sizes = copy.deepcopy(raw), keep_sizes
        _check_unchanged(raw, model)
        self.is_shrunk = not keep_sizes and model is None
        if self.is_shrunk:
            shrink(raw, num_layers)
        adjust_settings(raw, jax.device_count())
        cfg = parse(raw, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        self.raw, self.cfg, self.global_batch = raw, cfg, cfg.train.global_batch
        self.name = "your model" if model else raw["model"]["build"]
        self.is_transformer = self.name == TRANSFORMER
        self.model = without_dropout(parts.model)
        self.samples = read_samples(parts.train_data, STEPS * self.global_batch)
        self.rows = _rows_of(self.samples)
        # In data of this package each target has to be the next token.
        own_data = data is None and raw["data"]["build"].startswith("meshtrain.data.")
        self.must_predict_next_token = own_data and self.is_text
        self.schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        self.optimizer = parts.make_optimizer(self.schedule)
        self._steps: dict[tuple[bool, bool, bool], list[reference_step.Step]] = {}

    @cached_property
    def shallow(self) -> "VerifyCase":
        """The same subject with FEW_LAYERS; itself if its number of layers is the user's."""
        if not self.is_shrunk or "num_layers" not in self.raw["model"]:
            return self
        return VerifyCase(self.settings, None, None, keep_sizes=False, num_layers=FEW_LAYERS)

    def for_layout(self, row: Mapping[str, Any]) -> "VerifyCase":
        """Returns `shallow` if that leaves at least two layers for each chunk of the layout's stages, else itself."""
        num_chunks = row.get("pipeline", 1) * (row.get("num_chunks") or 1)
        return self if 2 * num_chunks > FEW_LAYERS else self.shallow

    @cached_property
    def start(self) -> Any:
        """The TrainState before the first step; its optimizer state also holds the gradients."""
        program = assemble(
            dataclasses.replace(self.cfg, mesh=MeshConfig()),
            Parts(self.model, lambda _: keep_gradients(self.optimizer)),
            devices=jax.devices()[:1],
        )
        with program.active():
            return jax.device_get(program.start(self.cfg.train.seed))

    @cached_property
    def clip_norm(self) -> float:
        """Half of the first gradient norm, so that clipping has an effect."""
        batch = self.batches(packing=False, masks=False)[1][0]
        return float(self._step(0, self.start.params, self.start.opt_state[1], batch).norm) / 2

    @cached_property
    def abstract_params(self) -> Any:
        return jax.eval_shape(self.model.init, jax.random.key(0))

    @property
    def num_layers(self) -> int:
        return jax.tree.leaves(self.abstract_params["layers"])[0].shape[0]

    @property
    def is_text(self) -> bool:
        """Whether samples are token sequences, whose weights and packing can be varied."""
        return isinstance(self.samples, Batch)

    def steps(self, *, packing: bool, masks: bool, dropout: bool) -> list[reference_step.Step]:
        """Returns the expected steps on one device, with each document in a separate row.

        With dropout rows stay as they are: its masks depend on the position in the row.
        """
        if (packing, masks, dropout) not in self._steps:
            params, opt_state, steps = self.start.params, self.start.opt_state[1], []
            samples, batches = self.batches(packing=packing, masks=masks)
            if dropout:
                seed = self.cfg.train.seed
                batches = map(
                    partial(reference_step.with_row_keys, seed), range(STEPS), self._split(samples)
                )
            for number, batch in enumerate(batches):
                steps.append(self._step(number, params, opt_state, batch, self.clip_norm))
                params, opt_state = steps[-1].params, steps[-1].opt_state
            self._steps[packing, masks, dropout] = steps
        return self._steps[packing, masks, dropout]

    @cached_property
    def _compiled_step(self) -> Any:
        return jax.jit(reference_step.make_step(self.model, self.optimizer, self.schedule))

    def _step(self, number, params, opt_state, batch, clip_norm=np.inf) -> reference_step.Step:
        step = self._compiled_step(np.int32(number), params, opt_state, batch, clip_norm)
        return jax.device_get(step)

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
            for number, row in enumerate(rows):  # up to three documents in every second row
                row[random.integers(0, rows.shape[1] - 1, 2 * (number % 2))] = SEPARATOR
        separator = SEPARATOR if packing else None
        packed = to_batch(rows, SEPARATOR if packing else -1)
        unpacked = [
            reference_step.unpack_documents(part, weight, separator, 2 * self.global_batch)
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


def shrink(raw: dict[str, Any], num_layers: int = NUM_LAYERS) -> None:
    """Reduces the sizes of the model, which it recognises by their usual keys.

    The structure stays the same: the ratio of query to key/value heads, and the pattern of the layers. The
    new size of the vocabulary needs padding.
    """
    model, data = raw["model"], raw["data"]
    if {"num_heads", "num_kv_heads", "d_model"} <= model.keys():
        ratio = model["num_heads"] // model["num_kv_heads"]
        model["num_kv_heads"] = min(model["num_kv_heads"], max(1, 8 // ratio))
        model["num_heads"] = model["num_kv_heads"] * ratio
        model["d_model"] = min(model["d_model"], 8 * model["num_heads"])
        if model.get("head_dim"):
            model["head_dim"] = min(model["head_dim"], 16)
    if model.get("num_experts"):
        shrink_experts(model)
    set_num_layers(model, num_layers)
    small = {
        "d_ff": 64,
        "d_expert": 32,
        "vocab_size": 125,
        "max_seq_len": 16,
        "seq_len": 16,
        "window": 5,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "rope_head_dim": 8,
        "v_head_dim": 12,
    }
    for section in (model, data):
        section.update({key: min(n, section[key]) for key, n in small.items() if key in section})


def set_num_layers(model: dict[str, Any], num_layers: int) -> None:
    """Gives the model `num_layers` layers alike, or more for a whole pattern, and at most one before them."""
    if "num_layers" in model:
        if model.get("first_dense_layers"):
            model["first_dense_layers"] = 1
        first = model.get("first_dense_layers", 0)
        model["num_layers"] = first + math.lcm(num_layers, len(model.get("attention") or "g"))


def shrink_experts(model: dict[str, Any]) -> None:
    """Reduces the number of experts, if 16 devices can share fewer; the groups of experts keep their number."""
    k, (num_groups, groups_per_token) = model["experts_per_token"], model["expert_groups"] or (1, 1)
    least, step = max(2 * k, k * num_groups // groups_per_token), math.lcm(16, num_groups)
    if model["num_experts"] % 16 == 0:
        model["num_experts"] = min(model["num_experts"], -(-least // step) * step)


def adjust_settings(raw: dict[str, Any], num_devices: int) -> None:
    """Sets float64, a batch that fits the devices, and synthetic tokens instead of files.

    Attention and loss are computed in one block, and there is dropout; the layouts vary that.
    """
    # The laws are those of the model itself; tests/models/test_adapter.py has those of an adapter.
    raw["adapter"]["rank"], raw["train"]["only"] = 0, "*"
    if raw["data"]["build"] in synthetic.FILES_BUILDS:
        raw["data"].update(build=synthetic.SYNTHETIC_BUILD, separator=-1)
    plain = {"attention_impl": "xla", "loss_chunk_mib": 0.0}
    raw["model"].update({key: value for key, value in plain.items() if key in raw["model"]})
    if raw["model"]["build"] == TRANSFORMER:
        raw["model"]["dropout"] = raw["model"]["dropout"] or DROPOUT
    raw["mesh"] = {**dict.fromkeys(AXES, 1), "data": num_devices}
    # Exact sums; `sync_laws` verifies what narrow formats do.
    raw["sync"].update(wire="float32", feedback="auto", pattern="xla")
    raw["train"].update(
        steps=STEPS,
        dtype="float64",
        param_dtype="float64",
        epochs=0.0,
        global_batch=ROWS_PER_DEVICE * num_devices,
        batch_per_device=0,
        num_microbatches=1,
        unroll=1,
    )
    raw["optim"].update(warmup_steps=0, moment_dtype="float64")
    if "epsilon" in raw["optim"]:
        # Adam divides a gradient of rounding noise by epsilon; a larger epsilon keeps the update small.
        raw["optim"].update(epsilon=1e-6)
    raw["eval"].update(batches=0)
    raw["checkpoint"].update(init_from="")


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
    """Returns the model without the dropout of a loss, whose masks differ between layouts."""
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
