"""The laws of experts hold for every family that has some, whatever else its layers have."""

import numpy as np
import pytest

from meshtrain.data.source import Batch
from meshtrain.tools.verify.laws import experts
from tests.lib.configs import tiny_config
from tests.lib.families import FAMILIES

SPARSE = [name for name, keys in FAMILIES.items() if keys.get("num_experts")]


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, 64, (3, 17))
    weights = np.ones((3, 16))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("law", experts.LAWS)
@pytest.mark.parametrize("family", SPARSE)
def test_the_laws_hold(family, law, batch, x64):
    c = tiny_config()
    c.model.update(FAMILIES[family])
    section = {**c.model.to_dict(), "num_layers": 2, "first_dense_layers": 0}
    section.pop("build")
    assert experts.LAWS[law](section, batch) is None
