"""Packed documents: each token once, no attention across them, the gradients of one per row."""

import hashlib
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from meshtrain.config import build as builders
from meshtrain.config.parse import parse
from meshtrain.data import corpus, indexed, packing, tokens
from meshtrain.errors import ConfigError
from meshtrain.program import assemble
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.documents import SIZES, build, documents, write


@pytest.fixture(params=["one file", "three files"])
def stream(request, tmp_path, monkeypatch):
    """A path whose documents are `documents()`, in one file or in a dataset of three files."""
    docs = documents()
    if request.param == "one file":
        return write(tmp_path / "all", docs)
    parts = [docs[:2], docs[2:9], docs[9:]]
    shards = [indexed.load(write(tmp_path / f"{i}", part)) for i, part in enumerate(parts)]
    joined = corpus._join_shards("joined", shards)._replace(cache_prefix=str(tmp_path / "joined"))
    monkeypatch.setattr(tokens, "load_corpus", lambda path, **unused: joined)
    return "joined"


def read_epoch(source):
    return source.read(np.arange(source.size))


def check_rows(batch, docs, targets):
    """Checks all guarantees of packing with plain loops; `targets` lists those with weight 1."""
    document_of = {int(token): number for number, doc in enumerate(docs) for token in doc}
    ends = {int(doc[-1]) for doc in docs}
    counted = []
    for row in range(len(batch.tokens)):
        real = [i for i, token in enumerate(batch.tokens[row]) if token]
        for i, j in itertools.combinations(range(batch.tokens.shape[1]), 2):
            a, b = int(batch.tokens[row, i]), int(batch.tokens[row, j])
            same = document_of.get(a) == document_of.get(b)
            assert (batch.segments[row, i] == batch.segments[row, j]) == same, (a, b)
            if same and a:
                assert batch.positions[row, j] - batch.positions[row, i] == b - a
        for i in set(range(batch.tokens.shape[1])) - set(real):
            assert batch.weights[row, i] == 0
        for segment in set(batch.segments[row]):
            assert batch.positions[row][batch.segments[row] == segment].min() == 0
        for i in real:
            token = int(batch.tokens[row, i])
            assert batch.weights[row, i] == (token not in ends)
            if token not in ends:
                assert batch.targets[row, i] == token + 1
                counted.append(token + 1)
    assert sorted(counted) == sorted(targets)
    assert [x.dtype for x in batch[:5]] == ["int32", "int32", "float32", "int32", "int32"]


# ---- windows ----


def test_windows_separate_documents_and_predict_each_token_once(stream):
    docs = documents()
    batch = read_epoch(build(stream))
    seen = np.arange(1, 1 + 8 * ((sum(SIZES) - 1) // 8) + 1)
    first = {int(doc[0]) for doc in docs}
    check_rows(batch, docs, targets=[token for token in seen if token not in first])
    assert sorted(batch.tokens.ravel()) == list(seen[:-1])


def test_a_separator_in_a_raw_file_gives_the_same_rows_as_an_index(tmp_path):
    docs = [np.append(doc, 0) for doc in documents((3, 4, 9, 1, 6))]
    np.concatenate(docs).astype(np.uint16).tofile(tmp_path / "raw.bin")
    raw = read_epoch(build(tmp_path / "raw.bin", dtype="uint16", separator=0))
    jax.tree.map(
        np.testing.assert_array_equal, raw, read_epoch(build(write(tmp_path / "idx", docs)))
    )


# ---- best fit ----


def test_best_fit_splits_only_documents_longer_than_a_row(stream):
    docs = documents()
    batch = read_epoch(build(stream, packing="best_fit"))
    predicted = [int(token) for doc in docs for token in doc[1:]]
    check_rows(batch, docs, targets=predicted)
    assert sorted(batch.tokens[batch.tokens > 0]) == list(range(1, 1 + sum(SIZES)))
    for doc in docs:
        segments = {
            (row, int(batch.segments[row, at]))
            for row, at in np.argwhere(np.isin(batch.tokens, doc))
        }
        assert len(segments) == -(-len(doc) // 8)


def naive_best_fit(lengths, seq_len):
    """Returns the room left in each row by textbook best fit: longest first, least room left."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= length]
        if fits:
            rooms[min(fits, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(seq_len - length)
    return sorted(rooms)


def rows_of(lengths, seq_len):
    """Returns row and slot of each piece, longest first, from the runs of `best_fit`."""
    runs, _ = packing.best_fit(np.bincount(lengths, minlength=seq_len + 1))
    places = []
    for _, first_row, num_rows, per_row, slot in zip(*runs, strict=True):
        for row in range(first_row, first_row + num_rows):
            places += [(row, slot + index) for index in range(per_row)]
    return np.array(places).T


@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
@pytest.mark.parametrize("kind", ["uniform", "short", "few", "same", "long"])
def test_best_fit_equals_the_textbook_algorithm(kind, seq_len):
    random = np.random.default_rng(seq_len)
    lengths = {
        "uniform": random.integers(1, seq_len + 1, 300),
        "short": np.minimum(seq_len, random.geometric(0.2, 300)),
        "few": random.choice([1, seq_len, seq_len // 2 + 1, seq_len // 3 + 1], 300),
        "same": np.full(300, seq_len // 3 + 1),
        "long": seq_len - np.minimum(seq_len - 1, random.geometric(0.2, 300) - 1),
    }[kind]
    row, slot = rows_of(lengths, seq_len)
    used = np.bincount(row, np.sort(lengths)[::-1]).astype(int)
    assert sorted(seq_len - used) == naive_best_fit(lengths, seq_len)
    assert sorted(zip(row, slot, strict=True)) == [
        (r, s) for r, n in enumerate(np.bincount(row)) for s in range(n)
    ]


def test_a_million_documents_are_packed_to_more_than_99_9_percent():
    lengths = np.minimum(
        2048, np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(int) + 1
    )
    _, num_rows = packing.best_fit(np.bincount(lengths, minlength=2048 + 1))
    assert lengths.sum() / (2048 * num_rows) > 0.999


def test_the_description_has_the_filled_fraction_of_the_rows(tmp_path):
    source = build(write(tmp_path / "a", documents((6, 6, 2))), packing="best_fit")
    assert source.size == 2 and "3 documents" in source.description
    assert "2 rows of 8, 87.50% filled" in source.description


def test_a_cache_file_is_made_in_its_folder(tmp_path, monkeypatch):
    """On another file system it could not be moved into its place."""
    folders = []
    mkstemp = tempfile.mkstemp

    def recorded(dir, **options):
        folders.append(dir)
        return mkstemp(dir=dir, **options)

    monkeypatch.setattr(tempfile, "mkstemp", recorded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    packing._write_cache(str(tmp_path / "data" / "a.npy"), lambda file: np.save(file, np.arange(3)))
    packing._write_cache("b.npy", lambda file: np.save(file, np.arange(3)))
    assert folders == [str(tmp_path / "data"), "."]
    assert np.load("b.npy").tolist() == np.load("data/a.npy").tolist() == [0, 1, 2]


def test_the_packing_is_cached_and_a_corrupt_cache_file_is_replaced(tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", documents())
    fresh = read_epoch(build(prefix, packing="best_fit"))
    (file,) = tmp_path.glob("a.best_fit-8-0-*.npy")
    valid = file.read_bytes()
    for corrupt in (valid[:-8], valid[:-1] + b"x", b"", valid[:100]):
        file.write_bytes(corrupt)
        jax.tree.map(
            np.testing.assert_array_equal, read_epoch(build(prefix, packing="best_fit")), fresh
        )
        assert file.read_bytes() == valid
    monkeypatch.setattr(packing, "plan_packing", None)  # must not be called
    jax.tree.map(
        np.testing.assert_array_equal, read_epoch(build(prefix, packing="best_fit")), fresh
    )
    monkeypatch.undo()
    write(tmp_path / "a", documents(SIZES[::-1]))
    assert (read_epoch(build(prefix, packing="best_fit")).tokens != fresh.tokens).any()
    assert len(list(tmp_path.glob("a.best_fit-*"))) == 2


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_packing_in_a_file_is_that_in_memory_however_few_pieces_are_read_at_a_time(
    tmp_path, monkeypatch, chunk
):
    """The digests are those of the packings of version 1, which had all pieces in memory."""
    random = np.random.default_rng(0)
    parts = [
        [np.ones(size, np.uint16) for size in random.integers(1, 40, count)]
        for count in (90, 1, 55)
    ]
    prefixes = [write(tmp_path / f"{number}", part) for number, part in enumerate(parts)]
    joined = corpus._join_shards("joined", [indexed.load(prefix) for prefix in prefixes])
    joined = joined._replace(cache_prefix=str(tmp_path / "joined"))
    monkeypatch.setattr(packing, "CHUNK", chunk)
    first, last = 17, joined.num_tokens - 5
    in_memory = packing.pack(joined, first, last, seq_len=16)
    in_file = packing.load_or_pack(joined, first, last, seq_len=16)
    (file,) = tmp_path.glob("joined.best_fit-16-17-*.npy")
    assert len(np.load(file)) == 3 + sum(map(len, in_memory))
    for one, other in zip(in_memory, in_file, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin"] * 3 + [".idx"] * 3 + [
        ".npy"
    ]
    digests = [hashlib.sha256(array).hexdigest()[:8] for array in in_memory]
    assert digests == ["76e1106c", "67684598", "f1cdd39b"]


def test_starts_of_documents_in_files_are_searched_and_indexed_as_an_array(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "SPARSE", 3)
    monkeypatch.setattr(indexed, "CHUNK", 4)
    monkeypatch.setattr(indexed, "MAX_SEQUENCE_LENGTH", 5)
    sizes = [(0, 3, 0, 0, 9, 1), (4,), (0, 1, 1, 20, 1, 1, 1, 0, 0), (2, 2, 2, 2, 0)]
    files = [write(tmp_path / f"{i}", [np.ones(n) for n in part]) for i, part in enumerate(sizes)]
    starts = indexed.DocumentStarts([indexed.load(file).index for file in files])
    expected = np.cumsum([0, *np.concatenate(sizes)])
    values = np.arange(-2, expected[-1] + 3)
    for side in ("left", "right"):
        found = np.searchsorted(starts, values, side=side)
        np.testing.assert_array_equal(found, np.searchsorted(expected, values, side=side))
        assert np.searchsorted(starts, 4, side=side) == np.searchsorted(expected, 4, side=side)
    np.testing.assert_array_equal(np.asarray(starts), expected)
    for key in (0, -1, slice(3, 9), slice(None, None, 2), slice(5, 5), np.array([[4, 0], [-2, 7]])):
        np.testing.assert_array_equal(starts[key], expected[key])
    assert len(starts) == starts.size == len(expected) and starts.shape == expected.shape
    with pytest.raises(IndexError):
        starts[len(expected)]


def test_packing_works_in_many_threads_at_once_and_without_a_writable_folder(tmp_path, monkeypatch):
    prefix = write(tmp_path / "a", documents())
    with ThreadPoolExecutor(8) as pool:
        sources = list(pool.map(lambda _: build(prefix, packing="best_fit"), range(16)))
    assert len(os.listdir(tmp_path)) == 3 and len(list(tmp_path.glob("a.best_fit-8-*.npy"))) == 1

    def deny(*args):
        raise PermissionError

    monkeypatch.setattr(packing, "_write_cache", deny)
    uncached = build(prefix, packing="best_fit", seq_len=16)
    assert len(read_epoch(uncached).tokens) == uncached.size and sources[0].size > uncached.size


@pytest.mark.parametrize("kind", ["windows", "best_fit"])
def test_no_held_out_token_is_trained_on(stream, kind):
    seen = {}
    for split in ("train", "heldout"):
        batch = read_epoch(build(stream, heldout=0.3, split=split, packing=kind))
        counted = batch.targets[batch.weights > 0]
        seen[split] = {*batch.tokens[batch.segments >= 0].ravel(), *counted} - {0}
    border = sum(SIZES) - int(sum(SIZES) * 0.3)
    assert max(seen["train"]) <= border < min(seen["heldout"])
    if kind == "best_fit":
        assert seen["train"] | seen["heldout"] == set(range(1, sum(SIZES) + 1))


@pytest.mark.parametrize("kind", ["windows", "best_fit"])
def test_each_epoch_visits_each_row_once_in_a_different_order_and_a_sample_depends_on_its_index(
    stream, kind
):
    source = build(stream, packing=kind)
    n = source.size
    together = source.read(np.arange(3 * n))
    epochs = [row.tolist() for row in together.tokens[:, 0].reshape(3, n)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[0])
    again = build(stream, packing=kind)
    for i in reversed(range(3 * n)):
        alone = again.read(np.array([i]))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b[0]), together, alone)


def test_best_fit_without_document_boundaries_is_rejected(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    with pytest.raises(ConfigError, match="data.packing=best_fit.*meshtrain prepare"):
        build(tmp_path / "raw.bin", dtype="uint16", packing="best_fit")
    with pytest.raises(ConfigError, match="data.packing='tight': use one of windows, best_fit"):
        build(tmp_path / "raw.bin", dtype="uint16", packing="tight")


@pytest.mark.parametrize("kind", ["windows", "best_fit"])
def test_the_error_for_a_token_outside_the_vocabulary_names_its_offset(tmp_path, kind):
    prefix = write(tmp_path / "a", [np.arange(1, 30), np.array([7, 7, 500, 7, 7, 7, 7, 7, 7])])
    source = build(prefix, vocab_size=100, packing=kind)
    with pytest.raises(
        ConfigError, match=r"holds token 500 \(at byte 62 of .*a.bin\).*vocab_size=100"
    ):
        read_epoch(source)


# ---- larger than memory ----


def test_documents_beyond_10_to_the_12_tokens_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "ENTROPY_TOKENS", 1000)
    monkeypatch.setattr(tokens, "permute", lambda indices, n, key: indices)
    seq_len, size = 1 << 16, 10**12 + 77
    with open(tmp_path / "huge.bin", "wb") as file:
        file.truncate(size)
        file.seek(size - 10)
        file.write(bytes(range(1, 11)))
    lengths = np.array([size - 7, 3, 4])
    (tmp_path / "huge.idx").write_bytes(indexed.pack_index(lengths, np.dtype("uint8")))
    source = build(tmp_path / "huge", seq_len=seq_len, vocab_size=256)
    assert source.size == (size - 1) // seq_len
    row = source.read(np.array([source.size - 1]))
    assert row.tokens.sum() == 0 and (row.weights == 1).all()
    shifted = build(tmp_path / "huge", seq_len=seq_len, vocab_size=256, heldout=(1 << 17) / size)
    assert "1,000,000," not in shifted.description  # the description counts the split only
    late = build(tmp_path / "huge", seq_len=8, vocab_size=256, heldout=10 / size, split="heldout")
    row = late.read(np.array([0]))
    assert row.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and row.targets[0, -1] == 9
    assert row.segments.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
    assert row.weights.tolist() == [[1, 1, 0, 1, 1, 0, 1, 1]]
    late = build(
        tmp_path / "huge",
        seq_len=8,
        vocab_size=256,
        heldout=10 / size,
        split="heldout",
        packing="best_fit",
    )
    assert sorted(read_epoch(late).tokens[read_epoch(late).tokens > 0]) == list(range(1, 11))


# ---- gradients ----


def one_document_per_row(docs, first, last, seq_len):
    """Returns a batch with one document per row, from tokens first ... last - 1 of documents()."""
    rows = []
    for doc in docs:
        inside = doc[(doc > first) & (doc <= last)]
        rows += [(inside[at : at + seq_len], doc[-1]) for at in range(0, len(inside), seq_len)]
    batch = np.zeros((2, len(rows), seq_len), np.int32)
    weights = np.zeros((len(rows), seq_len), np.float32)
    for number, (row, end) in enumerate(rows):
        batch[0, number, : len(row)] = row
        batch[1, number, : len(row)] = np.where(row < end, row + 1, 0)
        weights[number, : len(row)] = row < end
    return reference_step.Batch(*batch, weights)


@pytest.mark.parametrize("kind", [pytest.param("windows", marks=pytest.mark.slow), "best_fit"])
def test_packed_rows_have_the_gradients_of_one_document_per_row(tmp_path, x64, kind):
    # Windows of 16 must not split these documents: the second part would not see the first.
    sizes = (5, 11, 16, 3, 6, 7, 15, 1, 30) if kind == "best_fit" else (5, 11, 16, 3, 6, 7, 15, 1)
    docs = documents(sizes)
    extra = [] if kind == "best_fit" else [np.array([63])]  # the target of the last window
    source = build(
        write(tmp_path / "a", docs + extra), seq_len=16, vocab_size=64 + 32, packing=kind
    )
    c = tiny_config()
    c.model.vocab_size = 64 + 32
    cfg = parse(c, num_devices=1)
    parts = builders.build(cfg)
    program = assemble(cfg, parts, devices=jax.devices()[:1])
    with program.active():
        start = parts.model.init(jax.random.key(0))
        params = jax.tree.map(lambda leaf: leaf.astype(np.float64), start)

        def gradients(batch):
            def total(params):
                sums = reference_step.loss(parts.model, params, batch)
                return sums.loss, sums.weight

            (loss, weight), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
            return {"loss": loss, "weight": weight, "grads": grads}

        packed = gradients(read_epoch(source))
        separate = gradients(one_document_per_row(docs, 0, sum(sizes), 16))
    assert packed["weight"] == sum(sizes) - len(sizes)

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, np.abs(b).max()))

    jax.tree.map(compare, packed, separate)


# ---- through the trainer ----


@pytest.mark.parametrize("kind", ["windows", pytest.param("best_fit", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_trains_on_packed_rows(tmp_path, kind):
    parsed = tiny_config().to_dict()
    docs = [doc % 63 + 1 for doc in documents(SIZES * 8)]
    parsed["data"] = {
        "build": "meshtrain.data.tokens:build",
        **{"path": write(tmp_path / "a", docs), "dtype": "", "pattern": "", "exclude": ()},
        **{"seq_len": 16, "vocab_size": 64, "separator": -1, "heldout": 0.2, "seed": 0},
        **{"packing": kind, "mixture": ()},
    }
    result = train(parsed)
    assert result.step == 3 and np.isfinite(result.eval_loss)
