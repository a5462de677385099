"""Mixtures of sources: exact shares in each block, and no sample twice."""

import itertools
import math

import numpy as np
import pytest

from meshtrain.data import mixture
from meshtrain.data.source import Source, to_batch
from meshtrain.errors import ConfigError
from tests.lib.documents import SIZES, build, documents, write


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


def excess(counts, degrees):
    """Returns by how many standard deviations the chi-square of equal counts is exceeded."""
    expected = counts.mean()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("n", range(2, 17))
def test_every_order_of_a_few_samples_is_as_likely(n):
    keys = np.random.SeedSequence(0).generate_state(10_000, np.uint64).tolist()
    orders = np.stack([mixture.permute(np.arange(n), n, key) for key in keys])
    assert (np.sort(orders) == np.arange(n)).all()
    places = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    assert excess(places, (n - 1) ** 2) < 4
    firsts = np.bincount(orders[:, 0] * n + orders[:, 1], minlength=n * n).reshape(n, n)
    assert excess(firsts[~np.eye(n, dtype=bool)], n * (n - 1) - 1) < 4
    if n <= 6:
        number_of = {order: number for number, order in enumerate(itertools.permutations(range(n)))}
        numbers = [number_of[tuple(order)] for order in orders.tolist()]
        counts = np.bincount(numbers, minlength=len(number_of))
        assert excess(counts, len(number_of) - 1) < 4


def test_the_order_of_2_or_more_than_16_samples_stays_the_same_between_versions():
    # A run that resumes reads the samples that it has not read: these orders must not change.
    expected = {
        2: [1, 0],
        17: [15, 14, 4, 3, 16, 12, 8, 1],
        100: [14, 15, 50, 32, 80, 38, 27, 73],
    }
    for n, order in expected.items():
        assert mixture.permute(np.arange(min(n, 8)), n, 12345).tolist() == order


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
