"""A folder that nanoGPT's prepare.py wrote: train.bin is trained on, val.bin is held out."""

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import tokens
from meshtrain.errors import ConfigError
from tests.lib.documents import write
from tests.lib.token_files import build


@pytest.fixture
def folder(tmp_path):
    np.arange(1, 1001, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(5001, 5101, dtype=np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"not read")
    return tmp_path


def all_rows(source):
    return np.sort(source.read(np.arange(source.size)).tokens.ravel())


def test_the_folder_is_its_two_files(folder):
    train = build(folder, dtype="", heldout=0.05)
    heldout = build(folder, dtype="", heldout=0.05, split="heldout")
    assert all_rows(train).tolist() == [*range(1, 997)]
    assert all_rows(heldout).tolist() == [*range(5001, 5097)]
    alone = build(folder / "train.bin", heldout=0.0)
    assert train.identity == alone.identity
    indices = np.arange(300)
    assert np.array_equal(train.read(indices).tokens, alone.read(indices).tokens)


def test_without_val_bin_a_share_is_held_out_and_the_dtype_may_be_wider(folder):
    (folder / "val.bin").unlink()
    np.arange(70_000, 70_500, dtype=np.uint32).tofile(folder / "train.bin")
    keys = dict(dtype="uint32", heldout=0.2, vocab_size=1 << 17)
    assert all_rows(build(folder, **keys)).max() < 70_400
    assert all_rows(build(folder, split="heldout", **keys)).min() == 70_400


def test_other_data_may_be_held_out(folder, tmp_path):
    other = write(tmp_path / "other", [np.arange(9001, 9201)])
    train = build(folder, dtype="", heldout_path=other)
    assert all_rows(train).tolist() == [*range(1, 997)]
    heldout = build(folder, dtype="", heldout_path=other, split="heldout")
    assert all_rows(heldout).tolist() == [*range(9001, 9197)]
    with pytest.raises(ConfigError, match="data.heldout_path=missing: no such file"):
        build(folder, dtype="", heldout_path="missing", split="heldout")


def test_files_of_other_kinds_are_no_such_folder(folder):
    assert tokens.nanogpt_files(str(folder)).heldout
    write(folder / "train", [np.arange(1, 100)])  # Megatron-LM's train.bin and train.idx
    assert tokens.nanogpt_files(str(folder)) is None
    assert tokens.nanogpt_files(str(folder / "train.bin")) is None


@pytest.mark.slow
def test_generate_says_which_tokenizer_such_a_run_lacks(folder, tmp_path_factory, capsys):
    np.tile(np.arange(65, dtype=np.uint16), 40).tofile(folder / "train.bin")
    np.tile(np.arange(65, dtype=np.uint16), 4).tofile(folder / "val.bin")
    keys = ["model.num_layers=1", "model.d_model=32", "model.d_ff=32", "train.steps=1"]
    keys += [f"data.path={folder}", "data.seq_len=16", "eval.batches=1"]
    flags = [f"--config.{key}" for key in keys]
    run = f"--workdir={tmp_path_factory.mktemp('runs') / 'run'}"
    assert app.main("train", ["--config=configs/quickstart.py", run, *flags]) == 0
    capsys.readouterr()
    assert app.main("generate", [run, "--prompt=a"]) == 2
    error = capsys.readouterr().err
    assert f"it was trained on the token ids in {folder}, of which no file says" in error
    assert "--tokenizer=PATH" in error and len(error.splitlines()) == 1
