"""Each sample is a pure function of seed and index: the shuffle, windows and documents."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import synthetic, tokens
from meshtrain.data.mixture import permute
from meshtrain.data.source import to_batch
from meshtrain.errors import ConfigError
from tests.lib.token_files import TEXTS, build, starts, write_megatron, write_texts

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
