"""Fixtures of the tests of Hugging Face folders."""

import json
import shutil

import pytest

from tests.lib.hf import GOLDEN, arrays, save


@pytest.fixture
def folder_of(tmp_path):
    """Copies a family's folder, with a changed config.json and changed tensors."""

    def make(family, config=None, change=lambda tensors: None, **keys):
        folder = shutil.copytree(GOLDEN / family, tmp_path / f"changed-{family}")
        original = json.loads((folder / "config.json").read_text())
        text = json.dumps(original | keys if config is None else config)
        (folder / "config.json").write_text(text)
        tensors = arrays(folder)
        change(tensors)
        save(folder, tensors)
        return folder

    return make
