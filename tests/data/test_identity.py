"""The identity of a source is what it reads, wherever that lies."""

import json

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import identity, indexed, loader, synthetic, tokens

NUMBERS = np.arange(3, 203)


def identity_of(path="", **changes):
    settings = {"dtype": "uint16", "pattern": "*.txt", "exclude": (), "seq_len": 4}
    settings |= {"vocab_size": 1 << 16, "separator": -1, "heldout": 0.1, "seed": 0}
    settings |= {"split": "train", **changes}
    return dict(tokens.build(path=str(path), **settings).identity)


def write_raw(folder, numbers=NUMBERS):
    numbers.astype(np.uint16).tofile(folder / "data")
    return folder / "data"


def write_npy(folder, numbers=NUMBERS):
    np.save(folder / "data.npy", numbers.astype(np.uint16))
    return folder / "data.npy"


def write_megatron(folder, numbers=NUMBERS, lengths=(50, 150)):
    numbers.astype(np.uint16).tofile(folder / "data.bin")
    packed = indexed.pack_index(np.array(lengths), np.dtype(np.uint16))
    (folder / "data.idx").write_bytes(packed)
    return folder / "data"


def write_text(folder, numbers=NUMBERS):
    (folder / "a").mkdir()
    (folder / "a" / "first.txt").write_text(str(numbers))
    (folder / "a" / "second.txt").write_text("the same")
    return folder / "a"


def write_prepared(folder, numbers=NUMBERS):
    (folder / "in.jsonl").write_text(json.dumps({"text": str(numbers)}) + "\n")
    output = f"--output={folder / 'out'}"
    assert app.main("prepare", ["--num_workers=1", str(folder / "in.jsonl"), output]) == 0
    return folder / "out"


KINDS = [write_raw, write_npy, write_megatron, write_text, write_prepared]


@pytest.mark.parametrize("write", KINDS)
def test_moved_data_and_both_splits_have_one_identity_and_changed_data_another(tmp_path, write):
    changed = NUMBERS.copy()
    changed[100] += 1  # as many bytes as before
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    path = write(tmp_path / "one")
    found = identity_of(path)
    assert len(found["data"]) == 64
    assert found["tokenizer"] == ("bytes" if write in (write_text, write_prepared) else "")
    others = dict(split="heldout", seq_len=8, seed=1, heldout=0.2)
    assert identity_of(path, **others) == found
    (tmp_path / "one").rename(tmp_path / "moved")
    assert identity_of(tmp_path / "moved" / path.name) == found
    assert identity_of(write(tmp_path / "two")) == found  # other times and paths in the manifest
    assert identity_of(write(tmp_path / "three", changed))["data"] != found["data"]


def test_a_raw_file_read_as_another_dtype_has_another_identity(tmp_path):
    path = write_raw(tmp_path)
    found = {dtype: identity_of(path, dtype=dtype)["data"] for dtype in ("uint8", "uint16")}
    # Of uint32 and int32, the bytes and the number of tokens are the same.
    np.ones(50, np.uint32).tofile(path)
    found |= {dtype: identity_of(path, dtype=dtype)["data"] for dtype in ("uint32", "int32")}
    assert len(set(found.values())) == 4


def test_other_documents_of_the_same_tokens_have_another_identity(tmp_path):
    found = identity_of(write_megatron(tmp_path))
    assert identity_of(write_megatron(tmp_path, lengths=(51, 149))) != found


def test_the_names_of_text_files_do_not_matter_but_what_is_read_does(tmp_path):
    folder = write_text(tmp_path)
    found = identity_of(folder)
    assert identity_of(folder, pattern="f*.txt") != found
    (folder / "notes.md").write_text("not read")
    assert identity_of(folder) == found
    assert identity_of(folder, pattern="*") != found


def test_another_tokenizer_gives_a_prepared_folder_another_identity():
    manifest = {"tokenizer": {"sha256": "a"}, "dtype": "uint8", "settings": {}, "shards": []}
    manifest["shards"] = [{"files": {"bin": {"sha256": "1"}, "idx": {"sha256": "2"}}}]
    found = identity.of_manifest(manifest)
    assert identity.of_manifest({**manifest, "settings": {"inputs": "x"}}) == found
    assert identity.of_manifest({**manifest, "tokenizer": {"sha256": "b"}}) != found
    assert identity.of_manifest({**manifest, "dtype": "uint16"}) != found


def test_the_identity_of_a_mixture_follows_from_its_parts_and_weights(tmp_path):
    for name in ("text", "raw"):
        (tmp_path / name).mkdir()
    text, raw = write_text(tmp_path / "text"), write_raw(tmp_path / "raw")

    def of(*parts):
        return identity_of(mixture=tuple((str(path), weight) for path, weight in parts))

    found = of((text, 1), (raw, 3))
    assert found["tokenizer"] == "bytes"
    assert of((text, 0.25), (raw, 0.75)) == found
    assert of((text, 1), (raw, 2))["data"] != found["data"]
    assert of((text, 1), (text, 3))["data"] != found["data"]
    np.ones(50, np.uint16).tofile(raw)
    assert of((text, 1), (raw, 3))["data"] != found["data"]


@pytest.mark.parametrize("place", [0, 1 << 18, -1])
def test_of_a_large_file_only_samples_are_read(place):
    large = np.zeros(identity.NUM_BLOCKS * identity.BLOCK + (1 << 22), np.uint8)
    found = identity.of_tokens(large), identity.of_tokens(large, full=True)
    large[place] = 1  # in the first block, behind it, in the last
    assert (identity.of_tokens(large) == found[0]) == (place == 1 << 18)
    assert identity.of_tokens(large, full=True) != found[1]
    assert identity.of_tokens(large[:-1]) != found[0]


def test_synthetic_data_has_the_identity_of_its_vocabulary_and_an_iterable_has_none():
    settings = {"seq_len": 4, "separator": -1, "seed": 0, "split": "train"}
    found = [dict(synthetic.build(vocab_size=size, **settings).identity) for size in (8, 8, 9)]
    assert found[0] == found[1] != found[2]
    assert loader.from_iterable([], global_batch=8).identity == {}
