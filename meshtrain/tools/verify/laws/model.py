"""Laws of the loss of a model and of its gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.models import lora, transformer
from meshtrain.models.base import Model, Params, is_measured
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.ops import kernels
from meshtrain.tools.verify import certificate, variants
from meshtrain.tools.verify.laws import starting_values
from meshtrain.tools.verify.reference import adapter as reference_adapter
from meshtrain.tools.verify.reference import model as reference_model
from meshtrain.tools.verify.reference import step as reference_step

TOLERANCE = 1e-10

STEP = 1e-5  # of the central differences

SLOPE_TOLERANCE = 1e-6  # relative to the norm of the gradient


def gradient(model: Model, params: Params, batch: Any) -> str | None:
    """Law: each gradient of the mean loss is its central difference; see `slope_fault`."""
    paths_and_leaves, tree = jax.tree.flatten_with_path(params)
    names = [certificate.name_of(path) for path, _ in paths_and_leaves]
    measured = [
        name for name, (path, _) in zip(names, paths_and_leaves, strict=True) if is_measured(path)
    ]

    def mean(leaves):
        sums = reference_step.loss(model, jax.tree.unflatten(tree, leaves), batch)
        return sums.loss / sums.weight

    return slope_fault(mean, [leaf for _, leaf in paths_and_leaves], names, skip=measured)


def slope_fault(
    loss: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    skip: Collection[str] = (),
) -> str | None:
    """Returns the first array whose gradient is not the central difference of the loss, or None.

    The direction of each is halfway between its gradient, which shows a wrong size, and a random
    direction, which shows a part that is missing.
    """
    random = np.random.default_rng(0)
    noise = [_unit(random.normal(size=np.shape(leaf))) for leaf in leaves]

    def slopes(leaves, noise):
        grads = jax.grad(loss)(leaves)
        directions = [_unit(_unit(grad) + one) for grad, one in zip(grads, noise, strict=True)]

        def loss_moved(number, distance):
            """Returns the loss with leaf `number` moved along its direction."""
            moved = []
            for n, (leaf, direction) in enumerate(zip(leaves, directions, strict=True)):
                moved.append(leaf + distance * (number == n) * direction)
            return loss(moved)

        numbers = jnp.arange(len(leaves)).repeat(2)
        distances = jnp.tile(jnp.array([-STEP, STEP]), len(leaves))
        losses = jax.lax.map(lambda move: loss_moved(*move), (numbers, distances))
        pairs = zip(grads, directions, strict=True)
        return grads, jnp.stack([(grad * one).sum() for grad, one in pairs]), losses

    grads, actual, losses = reference_step.run_compiled(slopes, list(leaves), noise)
    expected = (losses[1::2] - losses[::2]) / (2 * STEP)
    norm = np.sqrt(sum((grad**2).sum() for grad in grads))
    for name, slope, wanted in zip(names, actual, expected, strict=True):
        if name not in skip and not abs(slope - wanted) <= SLOPE_TOLERANCE * norm:
            return (
                f"{name}: directional derivative {slope:.9g}, "
                f"but {wanted:.9g} by central differences"
            )
    return None


def _unit(array: Any) -> Any:
    """Returns an array divided by its norm; zero stays zero."""
    norm = (array**2).sum() ** 0.5
    return array / (norm + (norm == 0))


def decoder_of(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Returns the fault of `decoder`, with the section."""
    fault = decoder(c, batch)
    return fault and f"{fault} ({variants.describe(c)})"


def decoder(c: Mapping[str, Any], batch: Batch) -> str | None:
    """Law: a transformer has the initial values, loss and gradients of the reference model.

    Of the initial values, the distributions are compared, see starting_values.py. `c` is a `model`
    section; besides, it may have an adapter, and the formulas of the layers.
    """
    section = {key: value for key, value in c.items() if key not in variants.NOT_OF_MODEL}
    adapter = c.get(variants.ADAPTER)
    model, random = transformer.build(**section), np.random.default_rng(0)
    typed = TransformerConfig(**section)
    if adapter is not None:
        model = lora.lora(
            model,
            rank=adapter.rank,
            alpha=adapter.alpha,
            targets=adapter.targets,
            dropout=adapter.dropout,
            rslora=adapter.rslora,
            experts=adapter.experts and bool(typed.num_experts),
        )
    if typed.dropout or (adapter is not None and adapter.dropout):
        row_keys = random.integers(2**32, size=(len(batch.tokens), 2), dtype=np.uint32)
        batch = batch._replace(row_keys=row_keys)
    initial = reference_step.run_compiled(model.init, jax.random.key(0))
    leaves = {certificate.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(initial)}
    stddevs = reference_model.initial_stddevs(typed)
    if adapter is not None:
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        stddevs |= reference_adapter.initial_stddevs(stddevs, shapes, adapter)
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
        with kernels.use(c.get(variants.FORMULAS, "plain")):
            actual = jax.value_and_grad(model_loss)(params)
        return actual, jax.value_and_grad(reference_model.loss)(params, batch, typed, adapter)

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
