"""What has to hold on one device already: a comparison of layouts has both sides wrong in the same way."""

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

from meshtrain import optim
from meshtrain.config.schema import LEARNING_RATE_SCHEDULES, OptimConfig
from meshtrain.data.source import Batch, Source
from meshtrain.models import transformer
from meshtrain.models.base import Model, Params
from meshtrain.train import train
from meshtrain.verify import certificate
from meshtrain.verify import reference_model as plain
from meshtrain.verify import reference_step as reference
from meshtrain.verify.subject import STEPS, Subject

TOLERANCE = 1e-10
OTHER = {
    "norm": {"rms": "layer", "layer": "rms", "rms_1p": "rms"},
    "positions": {"rope": "learned", "learned": "rope"},
    "mlp": {"swiglu": "gelu", "gelu": "geglu", "geglu": "swiglu"},
}


def broken(subject: Subject) -> list[str]:
    """Returns a line for each law that a subject breaks, which begins with the name of the law."""
    raw = subject.raw
    samples, _ = subject.batches(packing=False, masks=subject.is_text)
    batch = jax.tree.map(lambda leaf: leaf[: subject.global_batch], samples)
    laws: dict[str, Callable[[], str | None]] = {"schedule": lambda: schedule(raw["optim"])}
    if raw["optim"]["build"] == "meshtrain.optim:adamw":
        laws["adamw"] = lambda: adamw(raw["optim"])
    if subject.is_text:
        laws["trainer"] = lambda: trainer(subject)
    if subject.name == "meshtrain.models.transformer:build":
        section = {key: value for key, value in raw["model"].items() if key != "build"}
        section["num_layers"] = 2
        whole = batch._replace(positions=None, segments=None)  # each row one document
        for each in (section, other(section, batch.tokens.shape[1])):
            words = ", ".join(each[key] for key in OTHER)
            laws[f"transformer of {words}"] = lambda each=each: decoder(each, whole)
    else:
        laws["gradient"] = lambda: gradient(subject.model, subject.start.params, batch)
    if subject.is_shifted_by_us:
        laws["targets"] = lambda: "not the tokens that follow" if subject.rows is None else None
    found = [f"{name}: {fault}" for name, law in laws.items() if (fault := _fault_of(law))]
    if subject.is_text:
        size = raw["model"].get("vocab_size")
        found += reference.broken_laws(subject.model, subject.start.params, batch, size)
    return found


def _fault_of(law: Callable[[], str | None]) -> str | None:
    try:
        return law()
    except Exception as error:  # of whatever it calls, and a finding
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def gradient(model: Model, params: Params, batch: Any) -> str | None:
    """Each parameter's gradient is the slope of the loss: along one direction, by differences."""
    leaves, tree = jax.tree.flatten(params)
    random, length = np.random.default_rng(0), 1e-5
    ways = [random.normal(size=leaf.shape) for leaf in leaves]
    ways = [way / np.linalg.norm(way) for way in ways]

    def mean(leaves):
        sums = reference.loss(model, jax.tree.unflatten(tree, leaves), batch)
        return sums.loss / sums.weight

    def moved(number, far):
        pairs = enumerate(zip(leaves, ways, strict=True))
        return mean([leaf + far * (number == n) * way for n, (leaf, way) in pairs])

    def both(leaves):
        numbers = jnp.arange(len(leaves)).repeat(2)
        far = jnp.tile(jnp.array([-length, length]), len(leaves))
        return jax.grad(mean)(leaves), jax.lax.map(lambda at: moved(*at), (numbers, far))

    grads, means = reference.run(both, leaves)
    slopes = (means[1::2] - means[::2]) / (2 * length)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in grads))
    names = [certificate.name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    for name, grad, way, due in zip(names, grads, ways, slopes, strict=True):
        seen = (grad * way).sum()
        if not abs(seen - due) <= 1e-6 * norm:
            return f"{name}: {seen:.9g} along a direction in which the loss rises by {due:.9g}"
    return None


def other(c: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """Returns the `model` section with every choice made the other way."""
    switched = {key: choice[c[key]] for key, choice in OTHER.items()}
    switched |= {key: not c[key] for key in ("bias", "tie_embeddings", "qk_norm", "post_norm")}
    local = {"attention": "l", "window": max(1, seq_len // 3)}
    switched |= {"attention": "g", "window": 0} if "l" in c["attention"] else local
    switched |= {key: 0.0 if c[key] else 3.0 for key in ("attention_softcap", "logit_softcap")}
    switched |= {"embed_scale": 1.0 if c["embed_scale"] != 1 else 2.0}
    return {
        **c,
        **switched,
        "num_layers": 1,
        "z_loss": 0.0 if c["z_loss"] else 1e-3,
        "max_seq_len": seq_len,
    }


def decoder(c: Mapping[str, Any], batch: Batch) -> str | None:
    """The transformer of a section starts, computes and has the gradients as plain maths says."""
    model, random = transformer.build(**c), np.random.default_rng(0)
    born = reference.run(model.init, jax.random.key(0))
    leaves = {certificate.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(born)}
    spreads = plain.initial_stddevs(c)
    if wrong := sorted(spreads.keys() ^ leaves.keys()):
        return f"{wrong[0]} is {'missing' if wrong[0] in spreads else 'too much'}"
    for name, leaf in leaves.items():
        if abs(leaf.std() - spreads[name]) > 4 * spreads[name] / leaf.size**0.5:
            return f"{name} starts with a deviation of {leaf.std():.3g}, not {spreads[name]:.3g}"
        if spreads[name] and np.unique(leaf).size < leaf.size / 2:
            return f"{name} starts with the same numbers more than once"
    # Off its start, where scales are one and biases zero.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), born)

    def both(params):
        ours = jax.value_and_grad(lambda params: reference.loss(model, params, batch).loss)
        return ours(params), jax.value_and_grad(plain.loss)(params, batch, c)

    ours, theirs = reference.run(both, params)
    seen, due = ({"loss": loss, "gradients": grads} for loss, grads in (ours, theirs))
    return _differ(seen, due, zero=certificate.without_gradient(theirs[1]))


def adamw(c: Mapping[str, Any]) -> str | None:
    """AdamW makes of parameters and gradients what plain maths makes of them."""
    random, rates = np.random.default_rng(0), [1e-2, 3e-2, 2e-2]
    params = {name: random.normal(size=64) for name in ("kernel", *c["no_decay"])}
    grads = [
        {name: random.normal(size=64) * 10 ** random.uniform(-9, 1, 64) for name in params}
        for _ in rates
    ]
    keys = ("b1", "b2", "epsilon", "weight_decay", "no_decay")
    optimizer = optim.adamw(lambda n: jnp.array(rates)[n], **{key: c[key] for key in keys})
    due, seen, state = plain.adamw(params, grads, rates, c), params, optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, seen)
        seen = jax.tree.map(lambda leaf, update: leaf + np.asarray(update), seen, updates)
    return _differ({"parameters": seen}, {"parameters": due})


def schedule(c: Mapping[str, Any]) -> str | None:
    """Learning rates of each kind of schedule are those of its formula."""
    keys, steps = [field.name for field in fields(OptimConfig)], 20
    for kind in LEARNING_RATE_SCHEDULES:
        for warmup in (0, 5):
            section = {**c, "schedule": kind, "warmup_steps": warmup}
            rates = optim.make_schedule(OptimConfig(**{k: section[k] for k in keys}), steps=steps)
            every = rates(jnp.arange(steps + 2))
            for step, seen in enumerate(np.broadcast_to(every, steps + 2)):
                due = plain.learning_rate(step, section, steps)
                if not abs(seen - due) <= 1e-6 * c["learning_rate"]:
                    return f"{kind}, {warmup} steps of warm-up, step {step} of {steps}: {seen:.9g} is not {due:.9g}"
    return None


def trainer(subject: Subject) -> str | None:
    """`train` takes the steps that it should, batch after batch, and evaluates where they end."""
    raw, varied = copy.deepcopy(subject.raw), {"packing": False, "masks": True}
    raw["optim"]["clip_norm"] = subject.clip_norm
    raw["eval"]["batches"] = STEPS
    (samples, alone), steps = subject.batches(**varied), subject.steps(**varied)
    # The loader reads ahead of what is asked for.
    source = Source(lambda at: jax.tree.map(lambda leaf: leaf[at % len(leaf)], samples))
    with contextlib.redirect_stdout(io.StringIO()):
        result = train(raw, model=subject.model, data=source, eval_data=source)
    last = steps[-1].params
    loss = jax.jit(partial(reference.loss, subject.model))
    sums = [loss(last, part) for part in alone]
    total = sum(part.extra.get("cross_entropy", part.loss) for part in sums)
    return _differ(
        {"parameters": jax.device_get(result.state.params), "evaluation": result.eval_loss},
        {"parameters": last, "evaluation": total / sum(part.weight for part in sums)},
        zero=certificate.without_gradient(steps[0].grads),
    )


def _differ(seen: dict, due: dict, zero: list[str] = ()) -> str | None:
    _, fault = certificate.compare(seen, due, tolerance=TOLERANCE, zero=zero)
    return fault and fault.removesuffix("on one device") + "by plain maths"
