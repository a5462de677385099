"""Starting values have the distribution that the table says, and are independent of each other."""

import dataclasses

import jax
import numpy as np
import pytest

from meshtrain.models import lora, transformer
from meshtrain.models.layers import normal_initializer
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.laws import starting_values
from meshtrain.tools.verify.reference import model as reference_model
from tests.lib.configs import GPT2, packed

LATENT = dict(num_heads=8, num_kv_heads=8, kv_lora_rank=24, q_lora_rank=20, rope_head_dim=8)
LATENT |= dict(num_experts=8, experts_per_token=2, first_dense_layers=1, d_model=64, num_layers=3)
MODELS = {
    "llama": {},
    "gpt2": GPT2,
    "gemma": dict(norm="rms_1p", qk_norm=True, post_norm=True),
    "latent": LATENT,
    "mixture": dict(num_experts=4, experts_per_token=2, num_shared_experts=1),
}


def table_of(name):
    """Returns a model, the standard deviations of its starting values, and the constant ones."""
    section = packed(**MODELS[name]).model.to_dict()
    del section["build"]
    c = TransformerConfig(**section)
    stddevs = reference_model.initial_stddevs(c)
    constants = {}
    for path, stddev in stddevs.items():
        if not stddev:
            constants[path] = reference_model.initial_constant(path, c)
    return transformer.build(**section), stddevs, constants


def leaves_of(model, seed=0):
    params = jax.jit(model.init)(jax.random.key(seed))
    return {
        certificate.name_of(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_leaf_starts_as_the_table_says(name):
    model, stddevs, constants = table_of(name)
    assert starting_values.fault_of(leaves_of(model), stddevs, constants) is None


def test_adapters_start_with_the_variance_of_peft_and_independent_of_the_model():
    model, stddevs, constants = table_of("llama")
    adapted = lora.lora(model, rank=4, alpha=8.0, targets=("layers/*",))
    leaves = leaves_of(adapted)
    for path, leaf in leaves.items():
        if path.endswith(lora.A):
            stddevs[path] = (3 * np.prod(leaf.shape[1:-1])) ** -0.5
        elif path.endswith(lora.B):
            constants[path] = 0.0
    assert starting_values.fault_of(leaves, stddevs, constants) is None
    same_key = dataclasses.replace(adapted, init=lambda key: with_equal_keys(adapted, key))
    fault = starting_values.fault_of(leaves_of(same_key), stddevs, constants)
    assert "are repeated" in fault


def with_equal_keys(adapted, key):
    """Returns starting values whose factors A are all drawn with the same key."""

    def draw(path, leaf):
        if path[-1].key != lora.A:
            return leaf
        return normal_initializer((3 * np.prod(leaf.shape[1:-1])) ** -0.5)(key, leaf.shape)

    return jax.tree.map_with_path(draw, adapted.init(key))


# ---- faults of single leaves ----


def drawn(shape=(4, 32, 24), seed=0):
    return np.asarray(normal_initializer(0.1)(jax.random.key(seed), shape))


def with_layers(change):
    values = drawn().copy()
    change(values)
    return values


def shift_an_expert(values):
    values[2] += 0.05


def double_a_row(values):
    values[:, 5] *= 1.7


def raise_a_value(values):
    values[0, 0, 0] = 0.38


def repeat_a_layer(values):
    values[3] = values[1]


def negate_a_layer(values):
    values[3] = -values[1]


def smooth_columns(values):
    values[:] = (values + np.roll(values, 1, axis=2)) / np.sqrt(2)


random = np.random.default_rng(0)
BUGS = {
    "mean": (drawn() + 0.02, "mean 0.0"),
    "deviation": (1.1 * drawn(), "initial standard deviation 0.11"),
    "skewed": (0.1 * (random.exponential(size=(64, 64)) - 1), "skewness"),
    "uniform": (0.1 * random.uniform(-(3**0.5), 3**0.5, (64, 64)), "kurtosis"),
    "not bounded": (with_layers(raise_a_value), "3.80 standard deviations"),
    "another expert": (with_layers(shift_an_expert), "mean"),
    "another row": (with_layers(double_a_row), "variance"),
    "equal layers": (with_layers(repeat_a_layer), "slices 1 and 3 along dim 0"),
    "opposite layers": (with_layers(negate_a_layer), "slices 1 and 3 along dim 0"),
    "neighbours": (with_layers(smooth_columns), "neighbours along dim 2 are correlated"),
}


@pytest.mark.parametrize(("values", "message"), BUGS.values(), ids=BUGS.keys())
def test_a_fault_of_a_leaf_is_found(values, message):
    fault = starting_values.fault_of({"layers/kernel": values}, {"layers/kernel": 0.1}, {})
    assert fault.startswith("layers/kernel") and message in fault


def test_right_values_pass_with_every_seed():
    for seed in range(50):
        leaves = {"layers/kernel": drawn(seed=seed), "tokens/embedding": drawn((64, 32), seed + 99)}
        assert starting_values.fault_of(leaves, dict.fromkeys(leaves, 0.1), {}) is None


def test_leaves_of_the_same_key_are_found_although_their_shapes_differ():
    leaves = {"a": drawn((40, 30)), "b": drawn((16, 20))}
    fault = starting_values.fault_of(leaves, dict.fromkeys(leaves, 0.1), {})
    assert fault == "a: initial values are repeated: they are correlated with those of b"


def test_a_constant_that_differs_is_found():
    fault = starting_values.fault_of({"norm/scale": np.zeros(8)}, {}, {"norm/scale": 1.0})
    assert fault == "norm/scale: starts with 0, not 1"
