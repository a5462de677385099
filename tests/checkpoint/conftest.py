"""Fixtures of the tests of checkpoints."""

import shutil

import pytest

from meshtrain.train import train
from tests.lib.checkpoints import saving


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The workdir of a run of six steps with checkpoints of steps 2, 4 and 6; read-only."""
    workdir = tmp_path_factory.mktemp("finished_run")
    train(saving(6), workdir=workdir)
    return workdir


@pytest.fixture
def workdir(finished_run, tmp_path):
    """A copy of `finished_run` that a test may change."""
    return shutil.copytree(finished_run, tmp_path / "run")
