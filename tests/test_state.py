"""What the parameters of a model may be, and which names their dims need."""

import re

import jax
import jax.numpy as jnp
import pytest

from meshtrain import state
from meshtrain.errors import ConfigError
from meshtrain.parallel import mesh

PARAMS = {"a": {"kernel": jnp.zeros((4, 6))}, "b": jnp.zeros(3)}


def test_a_model_may_have_python_numbers():
    class Model:
        def init(self, key):
            return {"a": 0.5, "b": jnp.ones(2), "count": 3}

    params = jax.jit(state.params_initializer(Model(), param_dtype="bfloat16"))(jax.random.key(0))
    assert {name: leaf.dtype.name for name, leaf in params.items()} == {
        "a": "bfloat16",
        "b": "bfloat16",
        "count": "int32",
    }
    eager = state.params_initializer(Model(), param_dtype="float32")(jax.random.key(0))
    assert eager["a"].dtype == jnp.float32 and eager["a"] == 0.5


def check(axes, **sizes):
    state.check_axes(axes, PARAMS, mesh.make_mesh(**{"data": 1} | sizes))


@pytest.mark.parametrize(
    ("axes", "faults"),
    [
        ({"a": {"kernel": ("embed",)}, "b": (None,)}, ["a/kernel of shape (4, 6) has ('embed',)"]),
        ({"a": {"kernel": ("embed", "mlp")}}, ["b of shape (3,) has None"]),
        ({"a": {"kernel": None}, "b": None}, ["a/kernel of shape (4, 6) has None", "b of shape"]),
    ],
    ids=["too few", "no entry", "None"],
)
def test_a_parameter_without_a_name_for_each_dim_is_reported(axes, faults):
    with pytest.raises(ConfigError) as error:
        check(axes, data=8)
    assert len(error.value.faults) == len(faults)
    for line, fault in zip(error.value.faults, faults, strict=True):
        assert line.startswith(f"model.axes: parameter {fault}") and line.endswith("for each dim")


def test_a_mesh_that_shards_parameters_needs_a_name():
    nameless = {"a": {"kernel": (None, None)}, "b": (None,)}
    check(nameless, data=8)
    for axis in ("fsdp", "context", "tensor"):
        fault = f"mesh.{axis}=8: no parameter of the model names its dims"
        with pytest.raises(ConfigError, match=f"^{re.escape(fault)}"):
            check(nameless, **{axis: 8})
    check({"a": {"kernel": ("embed", None)}, "b": (None,)}, fsdp=8)
