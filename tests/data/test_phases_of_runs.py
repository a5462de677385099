"""Runs with phases: resumed on another mesh with other phases ahead, they read what they say."""

import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib.configs import quick
from tests.lib.documents import write
from tests.lib.rows import losses


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    rng = np.random.default_rng(0)
    return [write(folder / name, [rng.integers(0, 60, 4000)]) for name in "abc"]


def phased(*entries, steps, **changes):
    c = quick(steps=steps, **changes)
    c.data.build = "meshtrain.data.tokens:build"
    c.data.path = ""
    c.data.phases = entries
    c.checkpoint.every = 1
    return c


def test_phases_ahead_change_on_another_mesh(parts, tmp_path):
    a, b, c = parts
    plan = (2, a), (2, ((a, 1), (b, 3))), (1, c)
    train(phased(*plan, steps=6), workdir=tmp_path / "uninterrupted")
    # Begun without the last phase, and with a longer second one.
    train(phased(*plan[:1], (0.9, plan[1][1]), steps=3), workdir=tmp_path / "resumed")
    config = phased(*plan, steps=6)
    config.mesh.update(data=2, fsdp=2, tensor=2)
    train(config, workdir=tmp_path / "resumed")
    found, expected = losses(tmp_path / "resumed"), losses(tmp_path / "uninterrupted")
    np.testing.assert_allclose([*found.values()], [*expected.values()], rtol=1e-5)

    # What has begun stays, and nothing of the run is lost.
    for wrong in ((plan[0], (1, plan[1][1]), (1, c)), (plan[0], (2, b), (1, c))):
        with pytest.raises(ConfigError, match=r"data.phases\[[12]\]: the run is at step 6"):
            train(phased(*wrong, steps=8), workdir=tmp_path / "resumed")
    config = phased(*wrong, steps=7)
    config.checkpoint.allow_change = "data"
    assert train(config, workdir=tmp_path / "resumed").step == 7
