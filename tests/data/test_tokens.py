"""Files of tokens: every format holds the same, and an unusable file is reported with its key."""

import math

import numpy as np
import pytest

from meshtrain.data import tokens
from meshtrain.errors import ConfigError
from tests.lib.token_files import all_tokens, build, write_megatron, write_texts

# ---- formats ----


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_raw_and_npy_files_hold_the_same_tokens(tmp_path, dtype):
    numbers = np.array([3, 1, 200, 0, 7], dtype)
    numbers.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "array.npy", numbers)
    assert all_tokens(tmp_path / "raw.bin", 5, dtype=dtype) == list(numbers)
    assert all_tokens(tmp_path / "array.npy", 5, dtype="") == list(numbers)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint64", ">i8"])
def test_a_npy_file_may_hold_integers_of_any_size(tmp_path, dtype):
    numbers = np.array([3, 1, 100, 0, 7] * 5, dtype)
    np.save(tmp_path / "array.npy", numbers)
    assert all_tokens(tmp_path / "array.npy", 25, dtype="", vocab_size=101) == list(numbers)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_the_error_for_a_token_in_a_folder_of_text_names_its_file(tmp_path, packing):
    (tmp_path / "deep").mkdir()
    for name in ("a.txt", "b.txt", "deep/c.txt"):
        (tmp_path / name).write_text("plain")
    (tmp_path / "deep" / "bad.txt").write_bytes(b"odd\xe9")
    source = build(tmp_path, dtype="uint8", vocab_size=128, packing=packing)
    place = f"holds token 233 \\(at byte 3 of {tmp_path / 'deep' / 'bad.txt'}\\)"
    with pytest.raises(ConfigError, match=place):
        source.read(np.arange(source.size))


def test_a_seed_of_the_data_may_have_63_bits(tmp_path):
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    firsts = set()
    for seed in (1, 2**32 + 1, 2**62 + 1):
        batch = build(tmp_path / "a.bin", seed=seed).read(np.arange(70))
        firsts.add(tuple(batch.tokens[:, 0]))
    assert len(firsts) == 3


def test_a_token_beyond_32_bits_is_named(tmp_path):
    np.save(tmp_path / "array.npy", np.array([3, 2**32 + 1, 5, 6, 7]))
    with pytest.raises(ConfigError, match=r"holds token 4294967297 \(at byte 8 of "):
        all_tokens(tmp_path / "array.npy", 5, dtype="")


def test_a_folder_is_the_concatenation_of_its_matching_files_each_followed_by_a_zero(tmp_path):
    # `exclude` applies to subfolders, not to the folder itself or its parents.
    root = tmp_path / "skip"
    texts = {
        "a.txt": b"first",
        "deep/b.txt": b"",
        "deep/skip.txt": b"third",
        "deep/two/d.txt": b"4",
    }
    excluded = {"skip/a.txt": b"no", "deep/skip/b.txt": b"no", "c.md": b"no", "not/c.txt": b"no"}
    for name, text in {**texts, **excluded}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    read = bytes(all_tokens(root, 15, exclude=("skip", "not")))
    assert read[-1] == 0 and sorted(read[:-1].split(b"\0")) == sorted(texts.values())
    assert b"no" in bytes(all_tokens(root, 24))


TEXT = "Un café, s'il vous plaît! 東京\n" * 3000
GPT2 = np.random.default_rng(0).integers(0, 50257, 5000).astype(np.uint16)  # nanoGPT's format


@pytest.mark.parametrize(
    ("content", "vocab_size", "expected"),
    [
        (TEXT.encode(), 256, ""),
        (TEXT.encode("latin-1", errors="ignore"), 256, ""),
        (b"one\0two\0three", 256, ""),
        (np.random.default_rng(0).bytes(3000), 256, ""),
        (np.random.default_rng(0).bytes(40), 256, ""),
        (bytes(range(256)) * 4, 256, ""),
        (TEXT.encode(), 257, "data.vocab_size=257"),
        (GPT2.tobytes(), 50257, "data.vocab_size=50257"),
        (GPT2.tobytes(), 256, "16 bits or more"),
        (
            np.frombuffer(b"shakespeare" * 90, np.uint8).astype(np.uint16).tobytes(),
            256,
            "16 bits or more",
        ),
        (GPT2.astype(np.int32).tobytes(), 256, "16 bits or more"),
        (TEXT.encode("utf-16"), 256, "16 bits or more"),
        (b"", 256, "0 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["train.bin", "train.txt"])
def test_without_a_dtype_only_bytes_are_read_and_only_with_their_vocabulary(
    tmp_path, content, vocab_size, expected, name
):
    (tmp_path / name).write_bytes(content)
    if not expected:
        settings = dict(dtype="", vocab_size=vocab_size)
        assert bytes(all_tokens(tmp_path / name, len(content), **settings)) == content
        return
    with pytest.raises(ConfigError) as error:
        build(tmp_path / name, dtype="", vocab_size=vocab_size)
    found = str(error.value)
    assert expected in found and "\n" not in found and found.startswith("data.path=")
    if content:
        assert "set data.dtype" in found and "uint16" in found
        # A dtype that is given is used: older config.json files have "uint8" written.
        assert build(tmp_path / name, dtype="uint8", vocab_size=vocab_size).read(np.array([0]))


def test_a_folder_of_text_is_not_read_as_bytes_with_a_larger_vocabulary_unless_it_is_asked_for(
    tmp_path,
):
    write_texts(tmp_path / "in")
    with pytest.raises(ConfigError, match="data.vocab_size=50257.*meshtrain prepare.*dtype=uint8"):
        build(tmp_path / "in", dtype="", vocab_size=50257)
    assert build(tmp_path / "in", dtype="uint8", vocab_size=50257).size > 3


def test_files_that_know_their_dtype_need_none_for_any_vocabulary(tmp_path):
    np.save(tmp_path / "array.npy", GPT2)
    assert build(tmp_path / "array.npy", dtype="", vocab_size=50257).size > 3
    path = write_megatron(tmp_path / "marked", GPT2)
    assert build(path, dtype="", vocab_size=50257).size > 3


# ---- faults ----


@pytest.mark.parametrize(
    ("content", "changes", "expected"),
    [
        (np.uint16([1, 2, 3, 4]), {}, ["data.path=", "4 tokens, too few", "data.seq_len=4"]),
        (np.arange(50), {"split": "heldout"}, ["data.path=", "0 tokens", "data.heldout=0.0"]),
        (np.arange(50), {"heldout": 1.0}, ["data.heldout=1.0", "fraction"]),
        (np.arange(50), {"heldout": -0.1}, ["data.heldout=-0.1", "fraction"]),
        (np.arange(50), {"seq_len": 0}, ["data.seq_len=0"]),
        (np.arange(50), {"dtype": "float32"}, ["data.dtype='float32'", "uint16"]),
        (np.uint8([0] * 33), {}, ["data.path=", "33 bytes", "data.dtype=uint16"]),
        (np.uint8([]), {}, ["data.path=", "0 bytes"]),
    ],
)
def test_the_error_for_an_unusable_file_names_the_key(tmp_path, content, changes, expected):
    content.tofile(tmp_path / "faulty.bin")
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "faulty.bin", **changes)
    assert [part for part in expected if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("array", "expected"),
    [(np.ones(9), "float64"), (np.ones((9, 9), np.uint16), "uint16[9, 9]"), (np.int64(3), "int64")],
)
def test_an_npy_file_without_tokens_is_rejected(tmp_path, array, expected):
    np.save(tmp_path / "faulty.npy", array)
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "faulty.npy")
    assert "data.path=" in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize(
    ("token", "dtype"), [(10, "uint16"), (-1, "int32"), ((1 << 32) - 1, "uint32")]
)
def test_the_error_for_a_token_outside_the_vocabulary_names_the_token(tmp_path, token, dtype):
    np.array([1, 2, 3, token, 5], dtype).tofile(tmp_path / "tokens.bin")
    with pytest.raises(ConfigError, match=rf"data.path=.* {token}\b.*data.vocab_size=10"):
        build(tmp_path / "tokens.bin", dtype=dtype, vocab_size=10).read(np.array([0]))


@pytest.mark.parametrize("path", ["", "missing.bin"])
def test_the_error_for_a_missing_path_names_the_key(path):
    with pytest.raises(ConfigError, match=f"data.path={path}"):
        build(path)


def test_the_error_for_a_folder_without_matching_files_names_the_pattern(tmp_path):
    (tmp_path / "a.md").touch()
    with pytest.raises(ConfigError, match=r"data.path=.*data.pattern='\*.txt'"):
        build(tmp_path)


# ---- the baseline ----


@pytest.mark.parametrize(
    ("numbers", "nats"),
    [
        ([5] * 7, 0.0),
        (range(16), math.log(16)),
        ([0, 0, 0, 9], 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        ([0] * (1 << 20) + [1] * (1 << 20), math.log(2)),  # more than one chunk of the count
    ],
)
def test_unigram_entropy_is_minus_p_log_p(numbers, nats):
    assert tokens.unigram_entropy(np.array(numbers), 16) == pytest.approx(nats, abs=1e-12)


def test_the_baseline_is_the_entropy_of_the_split(tmp_path):
    np.uint16([0, 1] * 20 + [2] * 40).tofile(tmp_path / "tokens.bin")
    baselines = {
        split: build(tmp_path / "tokens.bin", heldout=0.5, split=split).baseline
        for split in ("train", "heldout")
    }
    assert baselines == pytest.approx({"train": math.log(2), "heldout": 0}, abs=1e-12)


def test_what_is_learned_of_conversations_is_no_setting_of_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc " * 100)
    with pytest.raises(ConfigError, match="data.learned=all: only .*chat:build reads it"):
        tokens.build(
            path=str(tmp_path),
            dtype="",
            pattern="*.txt",
            exclude=(),
            seq_len=8,
            vocab_size=256,
            separator=-1,
            heldout=0.0,
            seed=0,
            split="train",
            learned="all",
        )
