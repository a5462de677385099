"""Fixtures of the tests of data."""

import numpy as np
import pytest


@pytest.fixture
def counting(tmp_path):
    """A file of 101 tokens that count up: 25 windows of 4 + 1."""
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "counting.bin")
    return tmp_path / "counting.bin"
