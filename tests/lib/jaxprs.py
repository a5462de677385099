"""What a jaxpr has inside, the jaxprs of its equations included."""

from jax.extend.core import jaxprs_in_params


def count_primitives(jaxpr, name):
    """Returns how many equations of a primitive there are."""
    inside = [
        count_primitives(one, name)
        for equation in jaxpr.eqns
        for one in jaxprs_in_params(equation.params)
    ]
    return sum(inside) + sum(equation.primitive.name == name for equation in jaxpr.eqns)
