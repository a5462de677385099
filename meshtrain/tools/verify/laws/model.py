"""Laws that a model must satisfy on one device.

A comparison of layouts with one device cannot find an error that both make.
"""

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.config.schema import LEARNING_RATE_SCHEDULES, OptimConfig
from meshtrain.data.source import Batch, Source
from meshtrain.models import transformer
from meshtrain.models.base import Model, Params, is_measured
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.optim import base as optim
from meshtrain.state import TrainState, evaluation_params
from meshtrain.tools.verify import certificate, variants
from meshtrain.tools.verify.case import STEPS, VerifyCase
from meshtrain.tools.verify.laws import dropout as dropout_laws
from meshtrain.tools.verify.laws import experts as expert_laws
from meshtrain.tools.verify.laws import grad_sync as sync_laws
from meshtrain.tools.verify.laws import keys as key_laws
from meshtrain.tools.verify.laws import optimizers as optimizer_laws
from meshtrain.tools.verify.laws import precision as precision_laws
from meshtrain.tools.verify.reference import model as reference_model
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train

TOLERANCE = 1e-10


def laws(subject: VerifyCase, *, quick: bool = False) -> dict[str, Callable[[], list[str]]]:
    """Returns the laws that apply to the subject, by name: functions that return a line per violation."""
    raw, found = subject.raw, {}

    def add(name: str, law: Callable[[], str | None]) -> None:
        found[name] = lambda: [f"{name}: {fault}"] if (fault := _fault_of(law)) else []

    def batch() -> Any:
        samples, _ = subject.batches(packing=False, masks=subject.is_text)
        return jax.tree.map(lambda leaf: leaf[: subject.global_batch], samples)

    if not quick:
        found["runs"] = lambda: runs(subject)
        for name, law in precision_laws.laws().items():
            add(name, law)
    if subject.is_text:
        add("trainer", lambda: trainer(subject.shallow))
    if jax.device_count() > 1:
        add("narrow sums", sync_laws.compressed)
    add("schedule", lambda: schedule(raw["optim"]))
    add("keys", lambda: key_laws.repeated(raw))
    if subject.model.row_keys:
        add("dropout", dropout_laws.independent)
    if raw["optim"]["build"] == "meshtrain.optim.base:adamw":
        add("adamw", lambda: adamw(raw["optim"]))
    if of_optimizer := optimizer_laws.LAWS.get(raw["optim"]["build"]):
        add("optimizer", lambda: of_optimizer(raw["optim"]))
    if subject.is_transformer:
        section = {key: value for key, value in raw["model"].items() if key != "build"}
        chosen = variants.select(section)[: variants.NUM_QUICK if quick else None]
        for number, c in enumerate(chosen):
            add(f"transformer {number}", lambda c=c: decoder_of(c, _rows(batch(), 5)))
        if section["num_experts"]:
            few = {**section, "num_layers": 2, "first_dense_layers": 0}
            for name in expert_laws.LAWS:
                add(name, lambda name=name: expert_laws.LAWS[name](few, _rows(batch(), 5)))
    else:
        add("gradient", lambda: gradient(subject.model, subject.start.params, batch()))
    if subject.must_predict_next_token:
        add("targets", lambda: "not the next tokens" if subject.rows is None else None)
    if subject.is_text:
        size, model = raw["model"].get("vocab_size"), subject.model
        found["language model"] = lambda: reference_step.violations(
            model, subject.start.params, batch(), size
        )
    return found


def check(subject: VerifyCase, name: str) -> list[str]:
    """Returns a line for each violation of the law of this name, starting with the name."""
    return laws(subject)[name]()


def runs(subject: VerifyCase) -> list[str]:
    """Returns a line for each violation of the laws of runs, which share a few runs of `train`."""
    from meshtrain.tools.verify.laws import runs as run_laws  # not needed for --quick

    laws = run_laws.laws(subject)
    return [f"{name}: {fault}" for name, law in laws.items() if (fault := _fault_of(law))]


def _rows(batch: Batch, num: int) -> Batch:
    """Returns the first rows of a batch, as one document each."""
    parts = (leaf[:num] for leaf in (batch.tokens, batch.targets, batch.weights))
    return Batch(*parts, None, None)


def _fault_of(law: Callable[[], str | None]) -> str | None:
    try:
        return law()
    except Exception as error:  # any error of the code under test is a violation
        return certificate.describe_error(error)


def gradient(model: Model, params: Params, batch: Any) -> str | None:
    """Law: each parameter's gradient along one random direction equals a central difference of the loss."""
    leaves, tree = jax.tree.flatten(params)
    random, length = np.random.default_rng(0), 1e-5
    directions = [random.normal(size=leaf.shape) for leaf in leaves]
    directions = [direction / np.linalg.norm(direction) for direction in directions]

    def mean(leaves):
        sums = reference_step.loss(model, jax.tree.unflatten(tree, leaves), batch)
        return sums.loss / sums.weight

    def mean_moved(number, distance):
        pairs = enumerate(zip(leaves, directions, strict=True))
        return mean([leaf + distance * (number == n) * d for n, (leaf, d) in pairs])

    def gradients_and_means(leaves):
        numbers = jnp.arange(len(leaves)).repeat(2)
        distances = jnp.tile(jnp.array([-length, length]), len(leaves))
        means = jax.lax.map(lambda move: mean_moved(*move), (numbers, distances))
        return jax.grad(mean)(leaves), means

    grads, means = reference_step.run_compiled(gradients_and_means, leaves)
    slopes = (means[1::2] - means[::2]) / (2 * length)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in grads))
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    names = [certificate.name_of(path) for path in paths]
    measured = {certificate.name_of(path) for path in paths if is_measured(path)}
    for name, grad, direction, slope in zip(names, grads, directions, slopes, strict=True):
        actual = (grad * direction).sum()
        if name not in measured and not abs(actual - slope) <= 1e-6 * norm:
            return f"{name}: directional derivative {actual:.9g}, but {slope:.9g} by central differences"
    return None


def decoder_of(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Returns the fault of `decoder`, with the section."""
    fault = decoder(c, batch)
    return fault and f"{fault} ({variants.describe(c)})"


def decoder(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: a transformer has the initial standard deviations, loss and gradients of the reference model."""
    model, random = transformer.build(**c), np.random.default_rng(0)
    typed = TransformerConfig(**c)
    if typed.dropout:
        row_keys = random.integers(2**32, size=(len(batch.tokens), 2), dtype=np.uint32)
        batch = batch._replace(row_keys=row_keys)
    initial = reference_step.run_compiled(model.init, jax.random.key(0))
    leaves = {certificate.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(initial)}
    stddevs = reference_model.initial_stddevs(typed)
    if wrong := sorted(stddevs.keys() ^ leaves.keys()):
        return f"{wrong[0]} is {'missing' if wrong[0] in stddevs else 'not expected'}"
    for name, leaf in leaves.items():
        if abs(leaf.std() - stddevs[name]) > 4 * stddevs[name] / leaf.size**0.5:
            return f"{name}: initial standard deviation {leaf.std():.3g}, not {stddevs[name]:.3g}"
        if stddevs[name] and np.unique(leaf).size < leaf.size / 2:
            return f"{name}: initial values are repeated"
    # Perturbed, because an error in a scale of one or a bias of zero would not show.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), initial)

    def losses_and_gradients(params):
        of_model = jax.value_and_grad(lambda params: reference_step.loss(model, params, batch).loss)
        return of_model(params), jax.value_and_grad(reference_model.loss)(params, batch, typed)

    results = reference_step.run_compiled(losses_and_gradients, params)
    actual, expected = ({"loss": loss, "gradients": grads} for loss, grads in results)
    return _difference(actual, expected, certificate.zero_gradient_names(expected["gradients"]))


def adamw(c: Mapping[str, Any]) -> str | None:
    """Law: the AdamW of optim.py computes the same parameters as reference_model.py."""
    random, rates = np.random.default_rng(0), [1e-2, 3e-2, 2e-2]
    # Whether a parameter decays depends on the last key of its path, not on the others.
    names = ("kernel", *c["no_decay"])
    params = {f"{outer}/{name}": random.normal(size=64) for outer in names for name in names}
    grads = [
        {path: random.normal(size=64) * 10 ** random.uniform(-9, 1, 64) for path in params}
        for _ in rates
    ]
    keys = ("b1", "b2", "epsilon", "weight_decay", "no_decay")
    optimizer = optim.adamw(lambda n: jnp.array(rates)[n], **{key: c[key] for key in keys})
    expected = reference_model.adamw(params, grads, rates, c)
    actual = _nested(params)
    state = optimizer.init(actual)
    for grad in grads:
        updates, state = optimizer.update(_nested(grad), state, actual)
        actual = jax.tree.map(lambda leaf, update: leaf + np.asarray(update), actual, updates)
    return _difference({"parameters": actual}, {"parameters": _nested(expected)})


def _nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns a dict of dicts from paths of two names."""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        outer, name = path.split("/")
        nested.setdefault(outer, {})[name] = value
    return nested


def schedule(c: Mapping[str, Any]) -> str | None:
    """Law: each kind of learning-rate schedule follows its formula in reference_model.py."""
    keys, steps = [field.name for field in fields(OptimConfig)], 20
    for kind in LEARNING_RATE_SCHEDULES:
        for warmup in (0, 5):
            section = {**c, "schedule": kind, "warmup_steps": warmup}
            rates = optim.make_schedule(OptimConfig(**{k: section[k] for k in keys}), steps=steps)
            values = rates(jnp.arange(steps + 2))
            for step, actual in enumerate(np.broadcast_to(values, steps + 2)):
                expected = reference_model.learning_rate(step, section, steps)
                if not abs(actual - expected) <= 1e-6 * c["learning_rate"]:
                    where = f"{kind}, {warmup} steps of warm-up, step {step} of {steps}"
                    return f"{where}: {actual:.9g} is not {expected:.9g}"
    return None


def trainer(subject: VerifyCase) -> str | None:
    """Law: `train` computes the expected steps, in the order of the data, and the held-out loss."""
    raw, variant = copy.deepcopy(subject.raw), {"packing": False, "masks": True}
    raw["optim"]["clip_norm"] = subject.clip_norm
    raw["eval"]["batches"] = STEPS
    (samples, unpacked), steps = (
        subject.batches(**variant),
        subject.steps(**variant, dropout=subject.model.row_keys),
    )
    # Modulo, because the loader prefetches beyond the last step.
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices % len(leaf)], samples))
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(raw, model=subject.model, data=source, eval_data=source)
    last = steps[-1].params
    used = evaluation_params(TrainState(None, last, steps[-1].opt_state))
    loss = jax.jit(partial(reference_step.loss, subject.model))
    sums = [loss(used, batch) for batch in unpacked]
    total = sum(one.extra.get("cross_entropy", one.loss) for one in sums)
    return _difference(
        {"parameters": jax.device_get(result.state.params), "evaluation": result.eval_loss},
        {"parameters": last, "evaluation": total / sum(one.weight for one in sums)},
        certificate.zero_gradient_names(steps[0].grads),
    )


def _difference(actual: dict, expected: dict, zero_gradients: list[str] = ()) -> str | None:
    _, fault = certificate.compare(
        actual, expected, tolerance=TOLERANCE, zero_gradients=zero_gradients
    )
    return fault and fault.removesuffix("on one device") + "in the reference"
