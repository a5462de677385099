"""The case of `verify`: a small model, its samples, the expected steps, programs of layouts."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshtrain.config.build import (
    RunParts,
    adapted,
    build,
    build_model,
    optimizer_builder,
)
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES, BATCH_AXES, AdapterConfig, Config, MeshConfig
from meshtrain.data import synthetic
from meshtrain.data.source import Batch, Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.models import lora_layer, rope, trees
from meshtrain.models.base import Model, Params
from meshtrain.models.transformer_config import VOCAB_MULTIPLE
from meshtrain.ops import dropout as masks
from meshtrain.ops.losses import MIB
from meshtrain.optim import base as optim
from meshtrain.parallel import sharding
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState
from meshtrain.tools.verify import adapters
from meshtrain.tools.verify.pairwise import Row
from meshtrain.tools.verify.reference import adapter as reference_adapter
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.tools.verify.reference.adapter import Adapter

# Two layers in each of three chunks on each of four stages; in `VerifyCase.shallow`, in each of
# four chunks. Both are extended to a multiple of the length of the attention pattern.
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
        self.settings = copy.deepcopy(raw)
        self.keep_sizes = keep_sizes
        _check_unchanged(raw, model)
        self.is_shrunk = not keep_sizes and model is None
        if self.is_shrunk:
            shrink(raw, num_layers)
        adjust_settings(raw, jax.device_count())
        cfg = parse(raw, num_devices=jax.device_count())
        parts = build(cfg, model=model, data=data)
        self.raw, self.cfg = raw, cfg
        self.global_batch = cfg.train.global_batch
        self.name = "your model" if model else raw["model"]["build"]
        self.is_transformer = self.name == TRANSFORMER
        self.model = without_dropout(parts.model)
        self.samples = read_samples(parts.train_data, STEPS * self.global_batch)
        self.rows = _token_rows(self.samples)
        # In data of this package each target has to be the next token.
        own_data = data is None and raw["data"]["build"].startswith("meshtrain.data.")
        self.must_predict_next_token = own_data and self.is_text
        self.schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        self.optimizer = parts.make_optimizer(self.schedule)
        # What layouts train, by the name of the adapter.
        choices = adapters.choices(self.settings, self.model)
        self.adapters = {name: AdapterCase(self, adapter) for name, adapter in choices.items()}
        # By packing, masks, dropout and adapter.
        self._steps: dict[tuple[bool, bool, bool, str | None], list[reference_step.Step]] = {}

    @cached_property
    def shallow(self) -> "VerifyCase":
        """The same case with FEW_LAYERS; itself if its number of layers is the user's."""
        if not self.is_shrunk or "num_layers" not in self.raw["model"]:
            return self
        return VerifyCase(self.settings, None, None, keep_sizes=False, num_layers=FEW_LAYERS)

    def for_layout(self, row: Mapping[str, Any]) -> "VerifyCase":
        """Returns `shallow` if it has two layers for each chunk of a layout, else itself."""
        num_chunks = row.get("pipeline", 1) * (row.get("num_chunks") or 1)
        return self if 2 * num_chunks > FEW_LAYERS else self.shallow

    @cached_property
    def start(self) -> TrainState:
        """The state before the first step; its optimizer state also holds the gradients."""
        program = assemble(
            dataclasses.replace(self.cfg, mesh=MeshConfig()),
            RunParts(self.model, lambda _: keep_gradients(self.optimizer)),
            devices=jax.devices()[:1],
        )
        with program.active():
            return jax.device_get(program.initial_state(self.cfg.train.seed))

    @cached_property
    def clip_norm(self) -> float:
        """Half of the first gradient norm, so that clipping has an effect."""
        return self.adapters[adapters.NONE].clip_norm

    @cached_property
    def abstract_params(self) -> Params:
        return jax.eval_shape(self.model.init, jax.random.key(0))

    @property
    def num_layers(self) -> int:
        return jax.tree.leaves(self.abstract_params["layers"])[0].shape[0]

    @property
    def is_text(self) -> bool:
        """Returns whether samples are token sequences, whose weights and packing can be varied."""
        return isinstance(self.samples, Batch)

    @property
    def can_pack(self) -> bool:
        """Returns whether rows can hold several documents.

        The capacity of experts is that of a row, and the reference has a row for each document.
        """
        return self.rows is not None and not self.raw["model"].get("capacity_factor")

    def steps(
        self,
        *,
        packing: bool,
        masks: bool,
        dropout: bool,
        adapter: str | None = adapters.NONE,
    ) -> list[reference_step.Step]:
        """Returns the expected steps on one device, with each document in a separate row.

        With dropout rows stay as they are: its masks depend on the position in the row.
        """
        variant = packing, masks, dropout, adapter
        if variant not in self._steps:
            samples, batches = self.batches(packing=packing, masks=masks)
            if dropout:
                with_keys = partial(reference_step.with_row_keys, self.cfg.train.seed)
                batches = map(with_keys, range(STEPS), self._split(samples))
            adapted_case = self.adapters[adapter]
            state = adapted_case.start
            params, (_, opt_state) = state.params, state.opt_state
            steps = []
            for number, batch in enumerate(batches):
                clip_norm = adapted_case.clip_norm
                step = adapted_case.step(number, params, opt_state, batch, clip_norm)
                params, opt_state = step.params, step.opt_state
                steps.append(step)
            self._steps[variant] = steps
        return self._steps[variant]

    @cached_property
    def gradients(self) -> Callable:
        """The compiled function (params, batch) -> sums, gradients of the model itself."""
        return jax.jit(reference_step.make_gradients(self.model))

    def batches(self, *, packing: bool, masks: bool) -> tuple[Any, list[Any]]:
        """Returns the samples of all steps; for each step, its batch with one document per row."""
        random = np.random.default_rng(0)
        weights = self.samples.weights if self.is_text else None
        # Weights differ between rows, hence between devices and micro-batches; one row has
        # weight 0.
        if masks and weights is not None:
            share = random.permutation(np.linspace(0, 1, len(weights)))[:, None]
            factors = random.choice([0.25, 1.0], weights.shape)
            factors *= random.random(weights.shape) < share
            weights = (weights * factors).astype(np.float32)
        if self.rows is None:
            samples = self.samples._replace(weights=weights) if self.is_text else self.samples
            return samples, self._split(samples)

        rows, separator = self.rows, None
        if packing:
            separator = SEPARATOR
            rows = np.where(rows == SEPARATOR, SEPARATOR + 1, rows)
            for number, row in enumerate(rows):  # up to three documents in every second row
                row[random.integers(0, rows.shape[1] - 1, 2 * (number % 2))] = SEPARATOR
        packed = to_batch(rows, SEPARATOR if packing else -1)
        unpacked = []
        for part, weight in zip(self._split(rows), self._split(weights), strict=True):
            unpacked.append(
                reference_step.unpack_documents(part, weight, separator, 2 * self.global_batch)
            )
        return packed._replace(weights=packed.weights * weights), unpacked

    def _split(self, samples: Any) -> list[Any]:
        """Returns the batch of each step."""
        size = self.global_batch
        return [
            jax.tree.map(lambda leaf, n=n: leaf[n * size : (n + 1) * size], samples)
            for n in range(STEPS)
        ]


class AdapterCase:
    """What an adapter makes of a case: its model, its first state and its steps on one device."""

    def __init__(self, case: VerifyCase, adapter: Adapter):
        self.case, self.adapter = case, adapter

    @cached_property
    def model(self) -> Model:
        return adapted(self.case.model, with_adapter(self.case.cfg, self.adapter))

    @cached_property
    def initial_params(self) -> Params:
        """The first parameters of a run with this adapter."""
        params = self.case.start.params
        if not self.adapter.rank:
            return params

        def new_params(key: jax.Array) -> Params:
            return trees.matching(self.model.init(key), lora_layer.is_low_rank)

        train = self.case.cfg.train
        found = reference_step.run_compiled(new_params, jax.random.key(train.seed))
        found = jax.tree.map(lambda leaf: leaf.astype(train.param_dtype), found)
        return trees.merge(params, found)

    @cached_property
    def start(self) -> TrainState:
        """The state before the first step; its optimizer state also holds the gradients.

        B is not zero, as it is in `initial_params`: the gradient of A would be zero.
        """
        if self.adapter == Adapter():
            return self.case.start
        random = np.random.default_rng(0)

        def fill(path, leaf):
            is_b = path[-1].key == reference_adapter.B
            return random.normal(0, 0.05, leaf.shape).astype(leaf.dtype) if is_b else leaf

        params = jax.tree.map_with_path(fill, self.initial_params)
        trained = reference_adapter.trained_part(params, self.adapter)
        opt_state = jax.device_get(keep_gradients(self._optimizer).init(trained))
        return self.case.start._replace(params=params, opt_state=opt_state)

    @cached_property
    def clip_norm(self) -> float:
        """Half of the first gradient norm, so that clipping has an effect."""
        _, (batch, *_) = self.case.batches(packing=False, masks=False)
        params, (_, opt_state) = self.start.params, self.start.opt_state
        return float(self.step(0, params, opt_state, batch, np.inf).norm) / 2

    def step(
        self, number: int, params: Params, opt_state: Any, batch: Any, clip_norm: float
    ) -> reference_step.Step:
        """Returns the expected step `number`, of these parameters and this optimizer state."""
        if self.adapter.dropout and masks.row_keys(batch) is not None:
            # A product A B has no place for it; laws/model.py compares this model with formulas.
            sums, grads = jax.device_get(self._gradients(params, batch))
        else:
            merged = reference_adapter.merged(params, self.adapter.scale)
            sums, grads = jax.device_get(self.case.gradients(merged, batch))
            grads = reference_adapter.gradients(grads, params, self.adapter.scale)
        grads = reference_adapter.trained_part(grads, self.adapter)
        step = self._update(np.int32(number), params, opt_state, sums, grads, clip_norm)
        return jax.device_get(step)

    @cached_property
    def _gradients(self) -> Callable:
        """The compiled function (params, batch) -> sums, gradients of the adapted model."""
        return jax.jit(reference_step.make_gradients(self.model))

    @cached_property
    def _update(self) -> Callable:
        """The compiled update of a step."""
        return jax.jit(
            reference_step.make_update(
                self.case.model, self._optimizer, self.case.schedule, self.adapter
            )
        )

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return optimizer_builder(self.case.cfg, self.model)(self.case.schedule)


def _check_unchanged(raw: dict[str, Any], model: Model | None) -> None:
    """Raises ConfigError for mistakes in the user's config on any number of devices."""
    cfg = parse(raw)
    if model is None:
        build_model(cfg)


# ---- the program of a layout ----


def program_of(
    case: VerifyCase, row: Row, change_model: Callable[[Model], Model] | None = None
) -> Program:
    """Returns the trainer's program for a layout; its optimizer state also holds the gradients.

    `change_model` is applied to the model first.
    """
    raw = copy.deepcopy(case.raw)
    raw["mesh"] = {axis: row.get(axis, 1) for axis in AXES}
    name = row.get("adapter", adapters.NONE)
    # In low precision `case.clip_norm` is infinite.
    is_full = name == adapters.NONE
    raw["optim"]["offload"] = row.get("optim_offload", False)
    raw["optim"]["clip_norm"] = case.clip_norm if is_full else case.adapters[name].clip_norm
    for key in ("zero_stage", "num_microbatches", "remat", "unroll", "kernels"):
        if key in row:
            raw["train"][key] = row[key]
    if row.get("schedule"):
        raw["pipeline"].update({key: row[key] for key in ("schedule", "num_chunks", "keep")})
    if row.get("context_method"):
        raw["context"] = {"method": row["context_method"]}
    for key in ("method", "kernel"):
        if row.get(f"expert_{key}"):
            raw["expert"][key] = row[f"expert_{key}"]
    if row.get("sync_pattern") is not None:
        raw["sync"]["pattern"] = row["sync_pattern"]
        # Devices of one host as two slices, so that a hierarchy has levels.
        raw["mesh"]["slices"] = math.gcd(2, raw["mesh"]["data"])
    if row["sequence_parallel"]:
        raw["rules"] = (("residual_seq", ("context", "tensor")), *raw["rules"])
    if "attention_impl" in row:
        raw["model"]["attention_impl"] = row["attention_impl"]
    if row.get("loss_chunks"):
        raw["model"]["loss_chunk_mib"] = _loss_chunk_mib(case, raw, row["loss_chunks"])
    cfg = parse(raw, num_devices=jax.device_count())
    model = case.model if raw["model"] == case.raw["model"] else build_model(cfg)
    if not is_full:
        cfg = with_adapter(cfg, case.adapters[name].adapter)
        model = adapted(model, cfg)
    make_optimizer = optimizer_builder(cfg, model)
    model = dataclasses.replace(model, row_keys=bool(row.get("dropout")))
    if change_model is not None:
        model = change_model(model)
    parts = RunParts(model, lambda schedule: keep_gradients(make_optimizer(schedule)))
    return assemble(cfg, parts)


def with_adapter(cfg: Config, adapter: Adapter) -> Config:
    """Returns the settings of a run that trains what `adapter` says."""
    section = AdapterConfig(
        rank=adapter.rank,
        alpha=adapter.alpha,
        targets=adapter.targets,
        dropout=adapter.dropout,
        rslora=adapter.rslora,
        experts=adapter.experts,
    )
    train = dataclasses.replace(cfg.train, trainable=adapter.trainable)
    return dataclasses.replace(cfg, adapter=section, train=train)


def _loss_chunk_mib(case: VerifyCase, raw: Mapping[str, Any], num_chunks: int) -> float:
    """Returns the `loss_chunk_mib` with which each device has `num_chunks` chunks of the loss."""
    mesh = raw["mesh"]
    vocab = -(-raw["model"]["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    token_shards = math.prod(mesh[axis] for axis in (*BATCH_AXES, "context"))
    token_shards *= raw["train"]["num_microbatches"]
    num_tokens = case.samples.tokens[: case.global_batch].size // token_shards
    (axes,) = sharding.spec_for(("vocab",), (vocab,), raw["rules"], mesh)
    vocab_shards = math.prod(mesh[axis] for axis in sharding.axes_of(axes))
    size = num_tokens * vocab * 4 / vocab_shards
    return size / MIB / (num_chunks - 0.5)


def keep_gradients(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the optimizer with the latest gradients as the first entry of its state."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )
    return optax.chain(keep, optimizer)


# ---- the settings ----


def shrink(raw: dict[str, Any], num_layers: int = NUM_LAYERS) -> None:
    """Reduces the sizes of the model, which it recognises by their usual keys.

    The structure stays the same: the ratio of query to key/value heads, and the pattern of the
    layers. The new size of the vocabulary needs padding.
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
        _shrink_experts(model)
    set_num_layers(model, num_layers)
    small = {
        "d_ff": 64,
        "d_expert": 32,
        "d_shared": 48,
        "vocab_size": 125,
        "max_seq_len": 16,
        "seq_len": 16,
        "window": 5,
        "query_growth_length": 5,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "rope_head_dim": 8,
        "v_head_dim": 12,
    }
    for section in (model, data):
        section.update({key: min(n, section[key]) for key, n in small.items() if key in section})
    if model.get("rope_scaling"):
        head_dim = model.get("head_dim") or model["d_model"] // model["num_heads"]
        num_rotated = model.get("rope_head_dim") or int(head_dim * model.get("rope_fraction", 1.0))
        model["rope_scaling"] = rope.with_num_factors(tuple(model["rope_scaling"]), num_rotated)


def set_num_layers(model: dict[str, Any], num_layers: int) -> None:
    """Gives the model `num_layers` layers alike, or more for a whole pattern.

    A mixture has at most one dense layer before them.
    """
    if "num_layers" in model:
        if model.get("first_dense_layers"):
            model["first_dense_layers"] = 1
        first = model.get("first_dense_layers", 0)
        patterns = (model.get(key) or "-" for key in ("attention", "rope_layers"))
        model["num_layers"] = first + math.lcm(num_layers, *map(len, patterns))


def _shrink_experts(model: dict[str, Any]) -> None:
    """Reduces the number of experts, if 16 devices can share fewer; the number of groups stays."""
    if model["num_experts"] % 16:
        return
    per_token = model["experts_per_token"]
    num_groups, groups_per_token = model["expert_groups"] or (1, 1)
    # The groups of a token must hold the experts that it uses, and there are others.
    least = max(2 * per_token, per_token * num_groups // groups_per_token)
    multiple = math.lcm(16, num_groups)
    model["num_experts"] = min(model["num_experts"], -(-least // multiple) * multiple)


def adjust_settings(raw: dict[str, Any], num_devices: int) -> None:
    """Sets float64, a batch that fits the devices, and synthetic tokens instead of files.

    Attention and loss are computed in one block, by plain formulas, and there is dropout; the
    layouts vary that.
    """
    # The layouts vary what is trained, and the laws of the model do.
    raw["adapter"]["rank"] = 0
    raw["train"]["trainable"] = "*"
    if raw["data"]["build"] in synthetic.FILES_BUILDS:
        raw["data"].update(build=synthetic.SYNTHETIC_BUILD, separator=-1)
    plain = {"attention_impl": "xla", "loss_chunk_mib": 0.0}
    raw["model"].update({key: value for key, value in plain.items() if key in raw["model"]})
    if raw["model"]["build"] == TRANSFORMER:
        raw["model"]["dropout"] = raw["model"]["dropout"] or DROPOUT
    raw["mesh"] = {**dict.fromkeys(AXES, 1), "data": num_devices}
    # Exact sums; laws/grad_sync.py verifies what narrow formats do.
    raw["sync"].update(dtype="float32", feedback="auto", pattern="xla")
    raw["train"].update(
        steps=STEPS,
        dtype="float64",
        param_dtype="float64",
        epochs=0.0,
        global_batch=ROWS_PER_DEVICE * num_devices,
        batch_per_device=0,
        num_microbatches=1,
        unroll=1,
        kernels="plain",
    )
    raw["optim"].update(warmup_steps=0, moment_dtype="float64")
    if "epsilon" in raw["optim"]:
        # Adam divides a gradient of rounding noise by epsilon; a larger epsilon keeps the update
        # small.
        raw["optim"].update(epsilon=1e-6)
    raw["eval"].update(batches=0)
    raw["checkpoint"].update(init_from="")


# ---- the model and the samples ----


def without_dropout(model: Model) -> Model:
    """Returns the model without the dropout of a loss, whose masks differ between layouts."""
    if model.loss is None:
        return model
    return dataclasses.replace(model, loss=lambda params, batch, _: model.loss(params, batch, None))


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


def _token_rows(samples: Any) -> np.ndarray | None:
    """Returns tokens (B, S + 1) if each target is the next token, else None."""
    if not isinstance(samples, Batch) or samples.segments is not None:
        return None
    if not np.array_equal(samples.tokens[:, 1:], samples.targets[:, :-1]):
        return None
    return np.concatenate([samples.tokens, samples.targets[:, -1:]], axis=1)
