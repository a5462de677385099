"""Documents in a new order each epoch: each is there once, near its place, in any read."""

import itertools

import numpy as np
import pytest

from meshtrain.data import corpus, document_order
from meshtrain.data.document_order import DocumentOrder
from meshtrain.errors import ConfigError
from tests.lib.documents import SIZES, build, documents, write
from tests.lib.prepare import prose, run, write_jsonl

S = 8


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "a", documents(SIZES * 3))


def rows_of(batch):
    """Returns the documents' parts: token lists that follow each other in a segment."""
    parts = []
    for row in range(len(batch.tokens)):
        for number in np.unique(batch.segments[row]):
            parts.append(batch.tokens[row][batch.segments[row] == number].tolist())
    return parts


def test_each_epoch_has_every_token_of_its_windows_once_in_another_order(path, monkeypatch):
    monkeypatch.setattr(document_order, "NEIGHBOURS", 10)
    total = 3 * sum(SIZES)
    source = build(path, seq_len=S, shuffle_documents=True)
    firsts = []
    for epoch in range(3):
        batch = source.read(np.arange(epoch * source.size, (epoch + 1) * source.size))
        seen = np.sort(batch.tokens.ravel())
        # All but those after the last complete window.
        assert len(set(seen)) == len(seen) == source.size * S and total - len(seen) < S + 1
        for part in rows_of(batch):
            assert part == [*range(part[0], part[0] + len(part))]  # of one document, in its order
        firsts.append({(*row,) for row in batch.tokens.tolist()})
    for one, other in itertools.pairwise(firsts):  # long documents have windows of their own
        assert len(one & other) < 0.6 * len(one)
    plain = build(path, seq_len=S)
    assert source.size == plain.size and source.identity == plain.identity


def test_documents_stay_among_their_neighbours_and_in_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr(document_order, "NEIGHBOURS", 4)
    texts = [prose(seed, 12) for seed in range(60)]
    file = write_jsonl(tmp_path / "texts", texts)
    assert run(file, f"--output={tmp_path / 'out'}", "--shard_tokens=900") == 0
    data = corpus.load_corpus(
        str(tmp_path / "out"), dtype="", vocab_size=256, pattern="", exclude=()
    )
    assert len(data.files) > 2
    order = DocumentOrder(data, 0, data.num_tokens, lambda epoch, group: 7 * epoch + group)
    ends = data.document_starts[1:] - 1
    plain = corpus.token_range(data, 0, data.num_tokens)
    orders = []
    for epoch in range(3):
        (stream,), (is_start,) = order.read(np.array([epoch]), np.array([0]), len(plain), 256)
        new_ends = np.flatnonzero(stream == 0)
        assert np.flatnonzero(is_start).tolist() == [0, *(new_ends[:-1] + 1)]
        found = np.split(stream, new_ends + 1)[:-1]
        expected = np.split(plain, ends + 1)[:-1]
        numbers = {bytes(one.astype(np.uint8)): number for number, one in enumerate(expected)}
        orders.append([numbers[bytes(one.astype(np.uint8))] for one in found])
        assert sorted(orders[-1]) == [*range(60)]
        for border in data.file_offsets[1:-1]:  # no document is in another file
            before = np.searchsorted(new_ends, border)
            assert sorted(orders[-1][:before]) == [*range(before)]
    moved = np.abs(np.array(orders) - np.arange(60))
    assert moved.max() <= 3 and (moved > 0).mean() > 0.5
    assert orders[0] != orders[1] != orders[2]


def test_any_read_has_the_same_rows_and_targets_follow(path):
    source = build(path, seq_len=S, shuffle_documents=True)
    indices = np.random.default_rng(0).integers(0, 3 * source.size, 50)
    batch = source.read(indices)
    for row, index in enumerate(indices):
        alone = source.read(np.array([index]))
        for field, array in alone._asdict().items():
            if array is not None:
                assert np.array_equal(array[0], getattr(batch, field)[row])
    learned = batch.weights > 0
    assert np.array_equal(batch.targets[learned], batch.tokens[learned] + 1)


def test_the_split_of_training_alone_is_shuffled_and_has_none_of_the_other(path):
    keys = dict(seq_len=S, heldout=0.3)
    heldout = build(path, split="heldout", shuffle_documents=True, **keys)
    plain = build(path, split="heldout", **keys)
    indices = np.arange(plain.size)
    assert np.array_equal(heldout.read(indices).tokens, plain.read(indices).tokens)
    source = build(path, shuffle_documents=True, **keys)
    batch = source.read(np.arange(2 * source.size))
    border = plain.read(indices).tokens.min()
    assert batch.tokens.max() <= border and batch.targets.max() <= border


def test_data_without_documents_and_rows_of_complete_documents_are_rejected(path, tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    with pytest.raises(ConfigError, match="data.shuffle_documents=True: .*does not mark"):
        build(tmp_path / "raw.bin", dtype="uint16", shuffle_documents=True)
    with pytest.raises(ConfigError, match="data.packing=best_fit has complete documents"):
        build(path, packing="best_fit", shuffle_documents=True)
