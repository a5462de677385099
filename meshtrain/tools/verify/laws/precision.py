"""Laws of low precision that a comparison of layouts with one device cannot find broken."""

from collections.abc import Iterator
from typing import Any

import jax

# Operations of softmax, norms, rope and the loss: their errors grow with the values or the number
# of terms.
FLOAT32_OPERATIONS = ("exp", "exp2", "log", "log1p", "rsqrt", "sqrt", "sin", "cos", "reduce_max")


def low_precision_operation(jaxpr: Any) -> str | None:
    """Returns an operation of FLOAT32_OPERATIONS in 16 bits, for example "exp of bfloat16"."""
    for equation in equations(jaxpr):
        if equation.primitive.name in FLOAT32_OPERATIONS:
            for value in equation.invars:
                dtype = str(getattr(value.aval, "dtype", ""))
                if dtype in ("bfloat16", "float16"):
                    return f"{equation.primitive.name} of {dtype}"
    return None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, and of those within its equations."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from equations(inner)
