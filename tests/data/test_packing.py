"""Packed documents: each token once, no attention across documents, the gradients of one document per row."""

import itertools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from conftest import tiny_config

from meshtrain.config import build as builders
from meshtrain.config.parse import parse
from meshtrain.data import corpus, indexed, mixture, packing, tokens
from meshtrain.data.source import Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.program import assemble
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train

SIZES = (3, 40, 1, 7, 8, 9, 16, 2, 25, 6, 5, 1, 33, 8, 4)


def documents(sizes=SIZES):
    """Returns documents with the tokens 1, 2, 3, ...: each token is its position in the stream."""
    ends = np.cumsum(sizes)
    return [np.arange(1 + end - size, 1 + end) for size, end in zip(sizes, ends, strict=True)]


def write(prefix, docs, dtype="uint16"):
    dtype = np.dtype(dtype)
    np.concatenate(docs).astype(dtype).tofile(f"{prefix}.bin")
    index = indexed.pack_index(np.array([len(one) for one in docs]), dtype)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return str(prefix)


def build(path, **changes):
    settings = {"dtype": "", "pattern": "", "exclude": (), "seq_len": 8, "vocab_size": 1 << 15}
    settings |= {"separator": -1, "heldout": 0.0, "seed": 0, "split": "train"}
    return tokens.build(path=str(path), **{**settings, **changes})


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
    """Checks all guarantees of packing with plain loops; `targets` lists the targets with weight 1."""
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
    row, slot = packing.best_fit(lengths, seq_len)
    used = np.bincount(row, lengths).astype(int)
    assert sorted(seq_len - used) == naive_best_fit(lengths, seq_len)
    assert sorted(zip(row, slot, strict=True)) == [
        (r, s) for r, n in enumerate(np.bincount(row)) for s in range(n)
    ]


def test_a_million_documents_are_packed_to_more_than_99_9_percent():
    lengths = np.minimum(
        2048, np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(int) + 1
    )
    row, _ = packing.best_fit(lengths, 2048)
    assert lengths.sum() / (2048 * (row.max() + 1)) > 0.999


def test_the_description_has_the_filled_fraction_of_the_rows(tmp_path):
    source = build(write(tmp_path / "a", documents((6, 6, 2))), packing="best_fit")
    assert source.size == 2 and "3 documents" in source.description
    assert "2 rows of 8, 87.50% filled" in source.description


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
    monkeypatch.setattr(packing, "pack", None)  # must not be called
    jax.tree.map(
        np.testing.assert_array_equal, read_epoch(build(prefix, packing="best_fit")), fresh
    )
    monkeypatch.undo()
    write(tmp_path / "a", documents(SIZES[::-1]))
    assert (read_epoch(build(prefix, packing="best_fit")).tokens != fresh.tokens).any()
    assert len(list(tmp_path.glob("a.best_fit-*"))) == 2


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


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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


@pytest.mark.parametrize("kind", ["windows", "best_fit"])
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


# ---- mixtures ----


def numbered(which, size):
    def read(indices):
        one = np.asarray(indices)[:, None].astype(np.int32)
        return to_batch(np.concatenate([one, one * 0 + which, one], axis=1))

    return Source(read, size=size)


def block_key(block):
    return block * 7 + 1


def test_each_block_of_a_mixture_has_the_exact_shares_and_no_sample_twice():
    counts = mixture.block_counts([0.7, 0.2, 0.1])
    assert counts.sum() == mixture.BLOCK
    assert np.abs(counts / mixture.BLOCK - [0.7, 0.2, 0.1]).max() < 1e-5
    sources, numbers = mixture.assign(np.arange(3 * mixture.BLOCK), counts, block_key)
    for block in np.split(sources, 3):
        assert np.bincount(block).tolist() == counts.tolist()
        assert abs((block[:2000] == 0).mean() - 0.7) < 0.05  # well mixed within a block
    for one, count in enumerate(counts):
        assert sorted(numbers[sources == one]) == list(range(3 * count))


def test_the_source_of_a_sample_depends_only_on_its_index_beyond_10_to_the_12():
    counts = mixture.block_counts([1, 2, 5])
    indices = 10**13 + np.arange(-300, 300)
    sources, numbers = mixture.assign(indices, counts, block_key)
    assert numbers.dtype == np.int64
    assert np.abs(numbers / (indices * (counts[sources] / mixture.BLOCK)) - 1).max() < 1e-6
    for at in (0, 299, 300, 599):
        alone = mixture.assign(indices[at : at + 1], counts, block_key)
        assert (alone[0][0], alone[1][0]) == (sources[at], numbers[at])


@pytest.mark.parametrize(
    "weights", [[1], [3, 1], [1 / 3, 1 / 3, 1 / 3], [1e-4, 1, 1e4], [5, 5, 5, 5, 1]]
)
def test_block_counts_add_up_for_any_weights(weights):
    counts = mixture.block_counts(weights)
    assert counts.sum() == mixture.BLOCK
    assert np.abs(counts - mixture.BLOCK * np.array(weights) / np.sum(weights)).max() < 1


def test_a_mixture_reads_each_sample_from_its_source():
    mixed = mixture.mix([numbered(0, 9), numbered(1, 9), numbered(2, 9)], [3, 1, 2], block_key)
    indices = np.random.default_rng(0).integers(0, 3 * mixture.BLOCK, 60)
    sources, numbers = mixture.assign(indices, mixture.block_counts([3, 1, 2]), block_key)
    batch = mixed.read(indices)
    assert batch.tokens.tolist() == np.stack([numbers, sources], axis=1).tolist()
    assert batch.segments.tolist() == [[0, 0]] * 60 and batch.positions.tolist() == [[0, 1]] * 60
    with pytest.raises(ConfigError, match="less than one sample in 65536"):
        mixture.mix([numbered(0, 9), numbered(1, 9)], [1, 1e-6], block_key)


def test_a_mixture_of_packed_files_reads_all_tokens_of_a_file(tmp_path):
    a = write(tmp_path / "a", documents())
    b = write(tmp_path / "b", [doc + 1000 for doc in documents()])
    source = build("", mixture=((a, 3), [b, 1.0]), packing="best_fit")
    batch = source.read(np.arange(400))
    from_b = (batch.tokens >= 1000).any(axis=1)
    assert 0.15 < from_b.mean() < 0.35
    assert not ((batch.tokens < 1000) & (batch.tokens > 0))[from_b].any()
    assert set(range(1, 1 + sum(SIZES))) <= set(batch.tokens.ravel())
    assert "75.00% " in source.description and source.size is None


@pytest.mark.parametrize(
    ("path", "mixed", "expected"),
    [
        ("x", (("y", 1),), "data.path=x and data.mixture=.*give one"),
        ("", (("y", 0),), r"\('y', 0\) is not a \(path, weight above 0\)"),
        ("", (("y", float("nan")),), "weight above 0"),
        ("", (("y", float("inf")),), "weight above 0"),
        ("", ("y",), "'y' is not a"),
        ("", (("y", "z"),), "is not a"),
        ("", ((1, 1),), "is not a"),
        ("", (("missing", 1),), "data.path=missing: no such file"),
    ],
)
def test_an_invalid_mixture_is_rejected(path, mixed, expected):
    with pytest.raises(ConfigError, match=expected):
        build(path, mixture=mixed)


# ---- Megatron-LM files ----


def test_an_index_equals_megatrons_byte_for_byte(tmp_path):
    """The expected bytes follow the layout of megatron-core 0.16's IndexedDataset."""
    found = indexed.pack_index(np.array([3, 1, 2]), np.dtype("uint16"))
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8])
    head += (3).to_bytes(8, "little") + (4).to_bytes(8, "little")
    lengths = b"".join(n.to_bytes(4, "little") for n in (3, 1, 2))
    pointers = b"".join(n.to_bytes(8, "little") for n in (0, 6, 8))
    assert found == head + lengths + pointers + b"".join(n.to_bytes(8, "little") for n in range(4))


MEGATRON = os.environ.get("MEGATRON")  # path of a Python with torch and megatron-core 0.16


@pytest.mark.skipif(not MEGATRON, reason="needs MEGATRON=PATH, a Python with megatron-core")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_megatron_reads_our_files_and_writes_the_same_bytes(tmp_path, dtype):
    write(tmp_path / "meshtrain", documents(), dtype)
    program = f"""
import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
dataset = IndexedDataset({str(tmp_path / "meshtrain")!r})
builder = IndexedDatasetBuilder({str(tmp_path / "megatron.bin")!r}, dtype=numpy.{dtype})
for i in range(len(dataset)):
    builder.add_document(dataset[i].tolist(), [len(dataset[i])])
builder.finalize({str(tmp_path / "megatron.idx")!r})
"""
    subprocess.run([MEGATRON, "-c", program], check=True, capture_output=True)
    for kind in ("bin", "idx"):
        written, expected = (tmp_path / f"{name}.{kind}" for name in ("meshtrain", "megatron"))
        assert written.read_bytes() == expected.read_bytes()


def test_a_document_longer_than_the_longest_sequence_is_stored_as_several(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "MAX_SEQUENCE_LENGTH", 8)
    docs = documents((8, 30, 1, 0, 16))
    shard = indexed.load(write(tmp_path / "a", docs))
    assert shard.starts.tolist() == [0, 8, 38, 39, 39, 55]
    num_sequences = 1 + 4 + 1 + 1 + 2
    assert (tmp_path / "a.idx").read_bytes()[18:26] == num_sequences.to_bytes(8, "little")


def test_the_dtype_is_the_smallest_that_holds_the_vocabulary():
    sizes = (256, 257, 1 << 16, (1 << 16) + 1)
    assert [indexed.smallest_dtype(n).name for n in sizes] == ["uint8", "uint16", "uint16", "int32"]


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
def test_a_prefix_and_both_of_its_files_name_the_same_data(tmp_path, name):
    write(tmp_path / "a", documents())
    assert build(tmp_path / name).size == (sum(SIZES) - 1) // 8


@pytest.mark.parametrize(
    ("at", "new", "expected"),
    [
        (0, b"X", "at byte 0: begins with"),
        (9, b"\x02", "at byte 9: version 2"),
        (17, b"\x07", "at byte 17: dtype 7"),
        (18, b"\xff", "at byte 18: 255 sequences"),
        (25, b"\xff", "at byte 18"),
        (34 + 8 + 3, b"\x80", "at byte 42: length -2147483647"),
        (34 + 4, b"\x29", "at byte 110: pointer 86 is not where sequence 2"),
        (34 + 60 + 8, b"\x00", "at byte 102: pointer 0"),
        (34 + 60 + 120 + 16, b"\x77", "document indices do not increase from 0 to 15"),
        (34 + 60 + 120 + 120, b"\x01", "document indices do not increase"),
        (None, b"", "at byte 18"),  # the last byte is missing
    ],
)
def test_the_error_for_a_corrupt_index_names_file_and_offset(tmp_path, at, new, expected):
    write(tmp_path / "a", documents())
    index = (tmp_path / "a.idx").read_bytes()
    index = index[:-1] if at is None else index[:at] + new + index[at + len(new) :]
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ConfigError, match="a.idx.*" + expected):
        build(tmp_path / "a")


def test_a_truncated_or_empty_bin_is_rejected(tmp_path):
    write(tmp_path / "a", documents())
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(335)
    with pytest.raises(ConfigError, match="a.bin has 335 bytes, but its .idx lists 336"):
        build(tmp_path / "a")
    write(tmp_path / "b", [np.zeros(0)])
    with pytest.raises(ConfigError, match="b.bin has 0 bytes"):
        build(tmp_path / "b")


# ---- through the trainer ----


@pytest.mark.parametrize("kind", ["windows", "best_fit"])
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
