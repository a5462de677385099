"""Laws of a model on one device without which no layouts can agree: `verify` says them first.

A row has the same result alone and in a batch, in any place; a document has the same result in a
row of its own and packed with others; two calls have the same result; all numbers are in float64.
If a law is violated, the message names the line of the model that is the cause.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model, Params
from meshtrain.tools.verify import causes, certificate
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.reference import step as reference_step

NUM_ROWS = 7  # for the search of a line: a number that is no size of an array
NUM_LAYERS = 2  # that a search of a line looks at

# Allowed differences, relative to the largest value of a leaf: in float64, and in fewer bits.
TOLERANCE, NARROW_TOLERANCE = 1e-10, 1e-2
FLOAT32_TOLERANCE = 1e-5  # of sums in float32


def violations(case: VerifyCase, without: Iterable[str]) -> list[str]:
    """Returns a line for each law of rows and of numbers that is violated, with the cause."""
    samples, _ = case.batches(packing=False, masks=case.is_text and "masks" not in without)
    params, few = case.start.params, _rows(samples, np.arange(NUM_ROWS))

    def trace() -> Any:
        def loss(params, batch):
            return forward(case.model, params, batch).loss

        return jax.make_jaxpr(lambda *args: jax.value_and_grad(loss)(*args))(params, few)

    try:
        jaxpr = trace()
    except ConfigError:
        # Blocks reject activations that are narrower than the parameters.
        if case.model.embed is None:
            raise
        narrowed = causes.narrowing(jax.make_jaxpr(case.model.embed)(params, few))
        if narrowed is None:
            raise
        return [_narrowed_line(narrowed)]
    fault = causes.nondeterminism(trace)
    if fault:
        return [fault]
    narrowed = causes.narrowing(jaxpr)
    lines = [_narrowed_line(narrowed)] if narrowed else []
    tolerance = NARROW_TOLERANCE if narrowed else TOLERANCE
    fault = rows(case, samples, tolerance)
    if fault and tolerance == TOLERANCE and rows(case, samples, FLOAT32_TOLERANCE) is None:
        narrow_sum = causes.narrow_sum(jaxpr)
        fault = _narrowed_line(narrow_sum) if narrow_sum else fault
    return lines + [fault] if fault else lines


def _narrowed_line(narrowed: str) -> str:
    return (
        f"float64: the model {narrowed}, and layouts differ by its rounding; keep the dtype of the "
        "parameters, which is float64 in verify: jnp.promote_types(x.dtype, jnp.float32) is "
        "float32 or more"
    )


def forward(model: Model, params: Params, batch: Any) -> Any:
    """Returns the model's Metrics of the batch, from its first layers, which have names."""
    if model.block is None:
        return model.loss(params, batch, None)
    with jax.named_scope("embed"):
        x = model.embed(params, batch)
    layers = model.stack(params["layers"])
    num_layers = len(jax.tree.leaves(layers)[0])
    for number in range(min(NUM_LAYERS, num_layers)):
        with jax.named_scope(f"layer {number}"):
            layer = jax.tree.map(lambda leaf, number=number: leaf[number], layers)
            x = model.block(layer, x, batch)
    with jax.named_scope("head"):
        return model.head(params, x, batch)


def _rows(samples: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda leaf: leaf[rows], samples)


def _compiled(model: Model) -> Callable[..., Any]:
    """Returns the compiled function (params, batch) -> sums and the gradients of the loss."""

    def loss(params, batch):
        metrics = reference_step.loss(model, params, batch)
        return metrics.loss, {"loss": metrics.loss, "weight": metrics.weight, **metrics.extra}

    def sums(params, batch):
        grads, values = jax.grad(loss, has_aux=True)(params, batch)
        return {"sums": values, "gradients": grads}

    return jax.jit(sums)


# ---- rows ----


def rows(case: VerifyCase, samples: Any, tolerance: float = TOLERANCE) -> str | None:
    """Law: sums and gradients of a batch are the sums of those of two halves of its rows.

    Micro-batches and the shards of a batch are such parts.
    """
    params, run = case.start.params, _compiled(case.model)
    num = min(8, case.global_batch // 2 * 2)
    every, again = (jax.device_get(run(params, _rows(samples, np.arange(num)))) for _ in range(2))
    if str(every) != str(again):
        return "not deterministic: two calls of the loss with the same arguments differ"
    halves = [jax.device_get(run(params, _rows(samples, np.arange(n, num, 2)))) for n in (0, 1)]
    _, fault = certificate.compare(
        {kind: every[kind] for kind in ("sums", "gradients")},
        jax.tree.map(np.add, *halves),
        tolerance=tolerance,
        zero_gradients=certificate.zero_gradient_names(every["gradients"]),
        where="as the sum of two halves",
    )
    if fault is None:
        return None
    fault = fault.replace(" here, ", " of all rows, ")
    mixed = _mixed_rows(case.model, params, samples)
    if mixed:
        return (
            f"rows: the result of a row depends on other rows of the batch, at {mixed} (statistics "
            f"of the batch?): {fault}. Micro-batches and shards of the batch change the loss; "
            "compute with each row alone, for example with LayerNorm"
        )
    numbered = _numbered_rows(case.model, params, samples)
    if numbered:
        return (
            f"rows: the result of a row depends on its place in the batch, at {numbered}: {fault}. "
            "Use meshtrain.dropout, or the key of the loss, for random numbers, and no number of "
            "a row"
        )
    return (
        f"rows: {fault}. The loss of a batch must be the sum over its rows; return "
        "meshtrain.weighted(loss of each example)"
    )


def _mixed_rows(model: Model, params: Params, samples: Any) -> str | None:
    """Returns the first place where a row's result depends on another row."""
    rows = np.arange(NUM_ROWS)
    other = rows.copy()
    other[-1] = NUM_ROWS  # another sample in the last row

    def differs(a: np.ndarray, b: np.ndarray) -> bool:
        parts = [_by_row(one) for one in (a, b)]
        return parts[0] is not None and causes.differ(parts[0][:-1], parts[1][:-1])

    return _first_difference(model, params, _rows(samples, rows), _rows(samples, other), differs)


def _numbered_rows(model: Model, params: Params, samples: Any) -> str | None:
    """Returns the first place where a row's result depends on its number."""
    rows = np.arange(NUM_ROWS)

    def differs(a: np.ndarray, b: np.ndarray) -> bool:
        parts = [_by_row(one) for one in (a, b)]
        return parts[0] is not None and causes.differ(parts[0], parts[1][::-1])

    reverse = _rows(samples, rows[::-1])
    return _first_difference(model, params, _rows(samples, rows), reverse, differs)


def _by_row(array: np.ndarray) -> np.ndarray | None:
    """Returns an intermediate result with a leading dim of rows; None if it has none."""
    if not array.ndim or not array.shape[0] or array.shape[0] % NUM_ROWS:
        return None
    return array.reshape(NUM_ROWS, -1)


def _first_difference(
    model: Model, params: Params, batch: Any, other: Any, differs: Callable
) -> str | None:
    def loss(params, batch):
        return forward(model, params, batch).loss

    return causes.first_difference(loss, (params, batch), (params, other), differs)


# ---- documents packed in a row ----

WITHOUT_PACKING = (
    "use segments and positions as meshtrain.ops.attention does, or pass --without=packing if each "
    "row of your data is one document"
)


def packing(case: VerifyCase) -> str | None:
    """Law: documents in a row have the losses that they have in rows of their own."""
    if not case.can_pack:
        return None
    packed, (unpacked, *_) = case.batches(packing=True, masks=False)
    packed = _rows(packed, np.arange(case.global_batch))
    params = case.start.params
    loss = jax.jit(lambda params, batch: reference_step.loss(case.model, params, batch).loss)
    together, apart = (float(loss(params, batch)) for batch in (packed, unpacked))
    if abs(together - apart) <= TOLERANCE * abs(apart):
        return None
    # What the model ignores can be replaced without an effect.
    same_segment = packed._replace(segments=np.zeros_like(packed.segments))
    in_order = np.broadcast_to(np.arange(packed.tokens.shape[1]), packed.tokens.shape)
    by_row = packed._replace(positions=in_order.astype(packed.positions.dtype))
    ignored = []
    for name, batch in (("segments", same_segment), ("positions", by_row)):
        if float(loss(params, batch)) == together:
            ignored.append(f"batch.{name}")
    what = f"the model ignores {' and '.join(ignored)}" if ignored else "documents see each other"
    seen = _seen_documents(case.model, params, packed)
    if seen:
        what += f"; at {seen} a document depends on the one before it"
    return (
        f"{what}: the loss is {together:.12g} of packed documents, {apart:.12g} of the "
        f"same in separate rows; {WITHOUT_PACKING}"
    )


def _seen_documents(model: Model, params: Params, packed: Batch) -> str | None:
    """Returns the first place where a document depends on the one before it in its row."""
    rows = np.flatnonzero(np.max(packed.segments, axis=1) > 0)[:NUM_ROWS]
    if len(rows) < NUM_ROWS:
        return None
    batch = _rows(packed, rows)
    is_first = batch.segments == 0
    other = batch._replace(tokens=np.where(is_first, batch.tokens[::-1], batch.tokens))

    def differs(a: np.ndarray, b: np.ndarray) -> bool:
        # Scores of attention (B, S, S) may depend on other documents, until they are masked.
        num_sequences = a.shape.count(is_first.shape[1])
        if a.shape[:2] != is_first.shape or num_sequences > 1:
            return False
        return causes.differ(a[~is_first], b[~is_first])

    return _first_difference(model, params, batch, other, differs)
