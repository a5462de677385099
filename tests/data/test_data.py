"""Data: each sample is a pure function of seed and index, and each device gets its rows."""

import contextlib
import itertools
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.config import build as builders
from meshtrain.config.parse import parse
from meshtrain.data import indexed, loader, synthetic, tokens
from meshtrain.data.mixture import permute
from meshtrain.data.source import Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.parallel import mesh

RULES = (("batch", ("data", "fsdp")),)


def build(path, **changes):
    settings = {
        "dtype": "uint16",
        "pattern": "*.txt",
        "exclude": (),
        "seq_len": 4,
        "vocab_size": 1 << 16,
        "separator": -1,
        "heldout": 0.0,
        "seed": 0,
        "split": "train",
    }
    return tokens.build(path=str(path), **{**settings, **changes})


def starts(source, first, last):
    """Returns the first token of each sample: its position, in a file whose tokens count up."""
    return source.read(np.arange(first, last)).tokens[:, 0].tolist()


def all_tokens(path, length, **changes):
    """Returns all tokens of a source of `length` tokens: its only window."""
    batch = build(path, seq_len=length - 1, **changes).read(np.array([0]))
    return [*batch.tokens[0], batch.targets[0, -1]]


@pytest.fixture
def counting(tmp_path):
    """A file of 101 tokens that count up: 25 windows of 4 + 1."""
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "counting.bin")
    return tmp_path / "counting.bin"


# ---- the shuffle ----


@pytest.mark.parametrize("key", [0, 1, (3 << 32) + 7])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_permute_is_a_bijection(n, key):
    assert sorted(permute(np.arange(n), n, key)) == list(range(n))


@pytest.mark.parametrize("n", [(1 << 40) + 1, (1 << 45) - 1, 1 << 62])
def test_permute_stays_below_n_for_n_larger_than_memory(n):
    images = permute(np.r_[0:500, n - 500 : n], n, key=1)
    assert images.dtype == np.int64 and 0 <= images.min() and images.max() < n
    assert len(set(images)) == 1000
    assert abs(images.mean() / n - 0.5) < 0.05


def test_permute_of_an_index_does_not_depend_on_the_other_indices():
    together = permute(np.arange(1000), 1000, key=5)
    assert permute(np.array([7, 999, 7]), 1000, key=5).tolist() == list(together[[7, 999, 7]])
    assert permute(np.array([], np.int64), 1000, key=5).shape == (0,)


# ---- windows of a file ----


def test_each_epoch_visits_each_window_once_in_a_different_order(counting):
    source, other_seed = build(counting), build(counting, seed=1)
    epochs = [starts(source, 0, 25), starts(source, 25, 50), starts(other_seed, 0, 25)]
    assert all(sorted(epoch) == list(range(0, 100, 4)) for epoch in epochs)
    assert all(a != b for a, b in itertools.combinations([*epochs, sorted(epochs[0])], 2))


@pytest.mark.parametrize("seed", [1, 1 << 30])
def test_another_seed_gives_another_order(counting, seed):
    assert starts(build(counting, seed=seed), 0, 25) != starts(build(counting), 0, 25)


def test_samples_read_together_or_one_by_one_are_the_same_in_all_blocks_of_the_order(counting):
    indices = np.arange(tokens.BLOCK - 40, tokens.BLOCK + 40)
    together = build(counting).read(indices).tokens[:, 0].tolist()
    assert together == [starts(build(counting), i, i + 1)[0] for i in indices]
    first = -(-indices[0] // 25) * 25  # the first sample of an epoch
    assert sorted(starts(build(counting), first, first + 25)) == list(range(0, 100, 4))
    large = 10**12 + 7
    assert starts(build(counting), large, large + 3) == [
        starts(build(counting), large + i, large + i + 1)[0] for i in range(3)
    ]


def test_a_source_has_the_number_of_samples_of_an_epoch(counting, tmp_path):
    assert build(counting).size == 25 and build(counting, heldout=0.3).size == 17
    assert build(counting, heldout=0.3, split="heldout").size == 7
    assert build(counting).token_bytes is None  # unknown for raw numbers
    (tmp_path / "a.txt").write_text("some text")
    assert build(tmp_path).token_bytes.tolist() == [0] + [1] * 255


def test_a_window_has_consecutive_tokens_and_the_next_tokens_as_targets(counting):
    batch = build(counting).read(np.arange(3))
    np.testing.assert_array_equal(batch.tokens, batch.tokens[:, :1] + np.arange(4)[None])
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    assert [x.dtype for x in batch[:3]] == ["int32", "int32", "float32"]
    assert (batch.weights == 1).all() and batch.positions is None and batch.segments is None


@pytest.mark.parametrize("kind", ["tokens", "synthetic"])
def test_a_sample_depends_only_on_its_index(counting, kind):
    def source():
        if kind == "tokens":
            return build(counting, separator=8)
        return synthetic.build(seq_len=4, vocab_size=99, separator=8, seed=0, split="train")

    indices = np.array([70, 3, 24, 25, 3])  # from three epochs
    together, again = source().read(indices), source()
    for row in reversed(range(5)):
        alone = again.read(indices[row : row + 1])
        jax.tree.map(
            lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[0]), together, alone
        )


@pytest.mark.parametrize("heldout", [0.1, 0.29, 0.5])
def test_no_held_out_token_is_trained_on(counting, heldout):
    seen = {}
    for split in ("train", "heldout"):
        source = build(counting, heldout=heldout, split=split)
        batch = source.read(np.arange(100))
        seen[split] = {*batch.tokens.ravel(), *batch.targets.ravel()}
    assert max(seen["train"]) < 101 - int(101 * heldout) <= min(seen["heldout"])
    assert len(seen["heldout"]) > 101 * heldout - 5


def test_tokens_beyond_position_2_to_the_31_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "ENTROPY_TOKENS", 1000)
    monkeypatch.setattr(tokens, "permute", lambda indices, n, key: indices)
    seq_len, num_windows = 1 << 16, (1 << 15) + 9
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(seq_len * num_windows + 1)
        file.seek(seq_len * (num_windows - 1))
        file.write(bytes([1, 2, 3]))
        file.seek(seq_len * num_windows)
        file.write(bytes([9]))
    source = build(tmp_path / "sparse.bin", dtype="uint8", seq_len=seq_len, vocab_size=256)
    batch = source.read(np.array([num_windows - 1]))
    assert (*batch.tokens[0, :4], batch.targets[0, -1]) == (1, 2, 3, 0, 9)


# ---- documents ----


def test_a_separator_ends_a_document():
    batch = to_batch(np.int32([[5, 0, 7, 8, 0, 0, 9], [0, 1, 2, 3, 4, 5, 0]]), separator=0)
    assert batch.tokens.tolist() == [[5, 0, 7, 8, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [[0, 7, 8, 0, 0, 9], [1, 2, 3, 4, 5, 0]]
    assert batch.weights.tolist() == [[1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert [x.dtype for x in batch[:5]] == ["int32", "int32", "float32", "int32", "int32"]


def test_the_separator_of_a_config_reaches_the_batch(counting):
    batch = build(counting, separator=50).read(np.arange(25))
    assert batch.weights.sum() == batch.weights.size - 1
    assert batch.tokens[batch.weights == 0] == [50]


TEXTS = {"a.txt": "first one\n", "b.txt": "second", "c.txt": "3\n3\n", "d.txt": "the last file"}


def write_texts(folder):
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_files_of_a_folder_are_documents_as_in_a_prepared_folder(tmp_path, packing, split):
    folder, prepared = write_texts(tmp_path / "in"), tmp_path / "out"
    assert app.main("prepare", ["--num_workers=1", str(folder), f"--output={prepared}"]) == 0
    settings = dict(seq_len=8, vocab_size=256, packing=packing, split=split, heldout=0.6)
    sources = [build(path, **settings) for path in (folder, prepared)]
    batches = [source.read(np.arange(sources[1].size)) for source in sources]
    jax.tree.map(np.testing.assert_array_equal, *batches)
    assert batches[0].segments.max() > 0
    assert sources[0].size == sources[1].size and sources[0].baseline == sources[1].baseline
    assert sorted(path.name for path in folder.iterdir()) == list(TEXTS)  # no cache in it
    assert not list(Path().glob("*.best_fit-*"))


def write_megatron(prefix, *documents):
    joined = np.concatenate(documents).astype(np.uint16)
    joined.tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(one) for one in documents])
    prefix.with_suffix(".idx").write_bytes(indexed.pack_index(lengths, joined.dtype))
    return prefix


def documents_of(batch):
    """Returns the tokens of each segment of each row, without the padding."""
    rows = zip(batch.tokens.tolist(), batch.segments.tolist(), strict=True)
    pairs = [
        itertools.groupby(zip(row, numbers, strict=True), lambda p: p[1]) for row, numbers in rows
    ]
    found = [[token for token, _ in group] for row in pairs for _, group in row]
    return sorted(one for one in found if any(one))


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_separator_ends_documents_besides_the_marks_of_the_files(tmp_path, packing):
    path = write_megatron(tmp_path / "marked", [1, 2, 9, 3, 4], [5, 6, 9], [7, 9, 9], [8])
    source = build(path, seq_len=11, separator=9, packing=packing)
    batch = source.read(np.arange(source.size))
    last = [] if packing == "windows" else [[8]]  # in windows, only a target
    assert documents_of(batch) == sorted([[1, 2, 9], [3, 4], [5, 6, 9], [7, 9], [9], *last])
    ends = [9, 4, 9, 9, 9, *sum(last, [])]
    real = batch.tokens > 0
    assert sorted(batch.tokens[real & (batch.weights == 0)]) == sorted(ends)
    starts = batch.positions == 0
    assert (np.diff(batch.segments) == starts[:, 1:]).all() and starts[:, 0].all()


def test_a_separator_ends_documents_within_the_files_of_a_folder(tmp_path):
    folder = write_texts(tmp_path / "in")
    source = build(folder, seq_len=20, vocab_size=256, separator=ord("\n"), packing="best_fit")
    found = documents_of(source.read(np.arange(source.size)))
    expected = [b"first one\n", b"\0", b"second\0", b"3\n", b"3\n", b"\0", b"the last file\0"]
    assert found == sorted(list(one) for one in expected if any(one))


def test_a_raw_file_is_one_document_until_a_separator_is_set_and_its_description_says_so(counting):
    alone, split = build(counting), build(counting, separator=50)
    assert alone.read(np.arange(25)).segments is None
    assert "no document boundaries" in alone.description
    assert "token 50 ends documents" in split.description
    assert split.read(np.arange(25)).segments.max() == 1


@pytest.mark.parametrize("separator", [256, 50256, -2])
def test_a_separator_that_is_no_token_is_rejected(counting, separator):
    with pytest.raises(ConfigError, match=f"data.separator={separator}: .*vocab_size"):
        build(counting, separator=separator, vocab_size=256)


# ---- formats ----


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_raw_and_npy_files_hold_the_same_tokens(tmp_path, dtype):
    numbers = np.array([3, 1, 200, 0, 7], dtype)
    numbers.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "array.npy", numbers)
    assert all_tokens(tmp_path / "raw.bin", 5, dtype=dtype) == list(numbers)
    assert all_tokens(tmp_path / "array.npy", 5, dtype="") == list(numbers)


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


# ---- synthetic sequences ----


def test_synthetic_sequences_are_progressions_within_the_vocabulary(tiny):
    parts = builders.build(parse(tiny, num_devices=8))
    batch, heldout = (s.read(np.arange(16)) for s in (parts.train_data, parts.heldout_data))
    rows = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
    assert rows.shape == (16, 17) and rows.min() >= 0 and rows.max() < 64
    strides = np.diff(rows, axis=1) % 64
    assert (strides == strides[:, :1]).all() and len(set(strides[:, 0])) > 8
    assert (batch.tokens != heldout.tokens).any()


# ---- the loader ----


def numbered(indices):
    return {"x": 10 * indices[:, None] + np.arange(3)[None], "y": indices.astype(np.float32)}


@contextlib.contextmanager
def loading(source, *, global_batch=8, position=0, **sizes):
    devices = mesh.make_mesh(**(sizes or {"data": 8}))
    batches = loader.Loader(source, devices, RULES, global_batch=global_batch, position=position)
    with contextlib.closing(batches):
        yield batches


@pytest.mark.parametrize("position", [0, 40])
def test_the_loader_returns_what_the_source_reads_in_order(position):
    with loading(Source(numbered), position=position) as batches:
        for first in range(position, position + 40, 8):
            batch, expected = next(batches), numbered(np.arange(first, first + 8))
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
            assert isinstance(batch["x"], jax.Array)


def test_peek_does_not_consume_the_batch():
    with loading(Source(numbered)) as batches:
        assert [batches.peek()["y"][0], next(batches)["y"][0], next(batches)["y"][0]] == [0, 0, 8]


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_each_device_holds_its_rows(sizes):
    with loading(Source(numbered), global_batch=16, **sizes) as batches:
        x = next(batches)["x"]
    rows_of = {shard.device: shard.data for shard in x.addressable_shards}
    grid = mesh.make_mesh(**sizes).devices  # pipeline, data, fsdp, expert, context, tensor
    grid = np.moveaxis(grid, (1, 2), (0, 1)).reshape(grid.shape[1] * grid.shape[2], -1)
    for devices, rows in zip(grid, np.split(numbered(np.arange(16))["x"], len(grid)), strict=True):
        for device in devices:
            np.testing.assert_array_equal(rows_of[device], rows)


def test_an_error_of_the_source_is_raised_at_its_batch():
    def read(indices):
        if 20 in indices:
            raise ConfigError("sample 20 is broken")
        return numbered(indices)

    with loading(Source(read)) as batches:
        assert [next(batches)["y"][0], next(batches)["y"][0]] == [0, 8]
        with pytest.raises(ConfigError, match="sample 20 is broken"):
            next(batches)


# ---- your iterable ----


def take(batches, count, *, position=0):
    """Returns the first number of each of `count` batches of 8."""
    source = loader.from_iterable(batches, global_batch=8, position=position)
    with loading(source, position=position) as loaded:
        return [int(next(loaded)["x"][0]) for _ in range(count)]


def three_batches():
    return [{"x": np.arange(first, first + 8)} for first in (100, 200, 300)]


@pytest.mark.parametrize("position", [0, 8, 24, 32])
def test_a_list_starts_again_and_a_resumed_run_continues_in_it(position):
    done = position // 8
    expected = list(itertools.islice(itertools.cycle([100, 200, 300]), done, done + 7))
    assert take(three_batches(), 7, position=position) == expected


def test_the_error_for_an_exhausted_generator_says_what_to_do():
    assert take(iter(three_batches()), 3) == [100, 200, 300]
    assert take(iter(three_batches()), 1, position=16) == [300]
    with pytest.raises(ConfigError, match="iterable ended.*a list.*fewer train.steps"):
        take(iter(three_batches()), 4)
    with pytest.raises(ConfigError, match="iterable ended.*epoch 0"):
        take([], 1)


@pytest.mark.parametrize("wrong", [np.zeros((7, 2)), np.zeros((2, 8)), np.float32(1)])
def test_the_error_for_a_batch_of_another_size_names_its_shape(wrong):
    with pytest.raises(ConfigError) as error:
        take([{"x": np.zeros(8), "y": wrong}], 1)
    assert str(np.shape(wrong)) in str(error.value)
    assert "train.global_batch=8" in str(error.value)


def test_a_position_within_a_batch_is_rejected():
    with pytest.raises(ConfigError, match="train.global_batch=8 .* 12 samples"):
        take(three_batches(), 1, position=12)


# ---- a short last batch, rows of one process, epochs ----


def short_epoch(*, last=3, weights=True):
    """Returns batches of 8, 8 and `last` rows, numbered through."""
    sizes = np.cumsum([0, 8, 8, last])
    rows = [np.arange(a, b) for a, b in itertools.pairwise(sizes)]
    return [{"x": x, **({"weights": np.ones((len(x), 2), "f")} if weights else {})} for x in rows]


def read(batches, count, *, position=0, **options):
    source = loader.from_iterable(batches, global_batch=8, position=position, **options)
    rows = np.arange(8)
    return [source.read(position + number * 8 + rows) for number in range(count)]


def test_the_last_batch_of_an_epoch_is_padded_with_rows_of_weight_0():
    *_, last, again = read(short_epoch(), 4)
    assert last["x"].tolist() == [16, 17, 18, 16, 17, 18, 16, 17]
    assert last["weights"].tolist() == [[1, 1]] * 3 + [[0, 0]] * 5
    assert again["x"].tolist() == list(range(8)) and again["weights"].all()
    assert read(short_epoch(), 1, position=24)[0]["x"][0] == 0  # a resumed run counts the padding


def test_a_short_batch_of_tokens_has_weights_already():
    rows = np.arange(3 * 5, dtype=np.int32).reshape(3, 5)
    (padded,) = read([to_batch(rows)], 1)
    assert padded.tokens.shape == (8, 4) and padded.weights.sum(1).tolist() == [4] * 3 + [0] * 5


def test_without_weights_a_short_last_batch_is_an_error():
    with pytest.raises(ConfigError, match="last batch has 3 rows.*drop_last.*array `weights`"):
        read(short_epoch(weights=False), 3)


def test_a_short_batch_before_the_last_is_an_error():
    batches = short_epoch()
    with pytest.raises(ConfigError, match="a batch has 3 rows, and train.global_batch=8; only the"):
        read([batches[2], batches[0]], 1)


def test_a_process_that_yields_its_own_rows_keeps_their_order():
    batches = [{"x": np.arange(4)}, {"x": np.arange(4, 8)}]
    source = loader.from_iterable(batches, global_batch=8, num_local=4)
    found = [source.read(number * 8 + np.arange(4, 8))["x"].tolist() for number in range(3)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(ConfigError, match=r"\(5,\).*per_process=True, 4 on this process"):
        loader.from_iterable([{"x": np.arange(5)}], global_batch=8, num_local=4).read(np.arange(4))
