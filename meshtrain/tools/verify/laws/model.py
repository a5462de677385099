"""Laws of the loss of a model and of its gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models import transformer
from meshtrain.models.base import Model, Params, is_measured
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.tools.verify import certificate, variants
from meshtrain.tools.verify.laws import starting_values
from meshtrain.tools.verify.reference import model as reference_model
from meshtrain.tools.verify.reference import step as reference_step

TOLERANCE = 1e-10

STEP = 1e-5  # of the central differences

SLOPE_TOLERANCE = 1e-6  # relative to the norm of the gradient


def gradient(model: Model, params: Params, batch: Any) -> str | None:
    """Law: along a random direction, each gradient is the central difference of the loss."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    directions = [random.normal(size=leaf.shape) for leaf in leaves]
    directions = [direction / np.linalg.norm(direction) for direction in directions]

    def mean(leaves):
        sums = reference_step.loss(model, jax.tree.unflatten(tree, leaves), batch)
        return sums.loss / sums.weight

    def mean_moved(number, distance):
        """Returns the mean with leaf `number` moved along its direction."""
        pairs = enumerate(zip(leaves, directions, strict=True))
        return mean([leaf + distance * (number == n) * d for n, (leaf, d) in pairs])

    def gradients_and_means(leaves):
        numbers = jnp.arange(len(leaves)).repeat(2)
        distances = jnp.tile(jnp.array([-STEP, STEP]), len(leaves))
        means = jax.lax.map(lambda move: mean_moved(*move), (numbers, distances))
        return jax.grad(mean)(leaves), means

    grads, means = reference_step.run_compiled(gradients_and_means, leaves)
    slopes = (means[1::2] - means[::2]) / (2 * STEP)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in grads))
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    for path, grad, direction, slope in zip(paths, grads, directions, slopes, strict=True):
        if is_measured(path):
            continue
        actual = (grad * direction).sum()
        if not abs(actual - slope) <= SLOPE_TOLERANCE * norm:
            return (
                f"{certificate.name_of(path)}: directional derivative {actual:.9g}, "
                f"but {slope:.9g} by central differences"
            )
    return None


def decoder_of(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Returns the fault of `decoder`, with the section."""
    fault = decoder(c, batch)
    return fault and f"{fault} ({variants.describe(c)})"


def decoder(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: a transformer has the initial values, loss and gradients of the reference model.

    Of the initial values, the distributions are compared, see starting_values.py.
    """
    model, random = transformer.build(**c), np.random.default_rng(0)
    typed = TransformerConfig(**c)
    if typed.dropout:
        row_keys = random.integers(2**32, size=(len(batch.tokens), 2), dtype=np.uint32)
        batch = batch._replace(row_keys=row_keys)
    initial = reference_step.run_compiled(model.init, jax.random.key(0))
    leaves = {certificate.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(initial)}
    stddevs = reference_model.initial_stddevs(typed)
    differing = sorted(stddevs.keys() ^ leaves.keys())
    if differing:
        return f"{differing[0]} is {'missing' if differing[0] in stddevs else 'not expected'}"
    constants = {
        name: reference_model.initial_constant(name, typed)
        for name, stddev in stddevs.items()
        if not stddev
    }
    fault = starting_values.fault_of(leaves, stddevs, constants)
    if fault:
        return fault

    # Perturbed, because an error in a scale of one or a bias of zero would not show.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(size=leaf.shape), initial)

    def model_loss(params):
        return reference_step.loss(model, params, batch).loss

    def losses_and_gradients(params):
        actual = jax.value_and_grad(model_loss)(params)
        return actual, jax.value_and_grad(reference_model.loss)(params, batch, typed)

    results = reference_step.run_compiled(losses_and_gradients, params)
    (loss, grads), (expected_loss, expected_grads) = results
    _, fault = certificate.compare(
        {"loss": loss, "gradients": grads},
        {"loss": expected_loss, "gradients": expected_grads},
        tolerance=TOLERANCE,
        zero_gradients=certificate.zero_gradient_names(expected_grads),
        where="in the reference",
    )
    return fault
