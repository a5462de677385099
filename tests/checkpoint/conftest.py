"""Fixtures of the tests of checkpoints."""

import shutil

import pytest

from meshtrain.checkpoint import arrays
from meshtrain.train import train
from tests.lib.checkpoints import saving


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The workdir of a run of six steps with checkpoints of steps 2, 4 and 6; read-only.

    Each replica has written a part of each array, as it does of large ones.
    """
    workdir = tmp_path_factory.mktemp("finished_run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "MIN_PART_OF_REPLICA", 0)
        train(saving(6), workdir=workdir)
    return workdir


@pytest.fixture
def workdir(finished_run, tmp_path):
    """A copy of `finished_run` that a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")
