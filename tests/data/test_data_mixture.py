"""Mixtures of sources: exact shares in each block, and no sample twice."""

import itertools
import math

import numpy as np
import pytest

from meshtrain.data import mixture, tokens
from meshtrain.data.source import Source, to_batch
from meshtrain.errors import ConfigError
from tests.lib import permutations
from tests.lib.documents import SIZES, build, documents, write
from tests.lib.permutations import LIMIT, excess


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


def keys_of(seed, count):
    return np.random.SeedSequence(seed).generate_state(count, np.uint64).tolist()


# Primes, powers of 2 and 4, and one more and one less.
SIZES_OF_ORDERS = [3, 4, 7, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128]


@pytest.mark.parametrize("n", SIZES_OF_ORDERS)
def test_orders_have_the_statistics_of_uniform_ones_and_so_have_those_of_numpy(n):
    keys = keys_of(n, 6_000 if n < 60 else 2_000)
    orders = np.stack([mixture.permute(np.arange(n), n, key) for key in keys])
    rng = np.random.default_rng(n)
    of_numpy = rng.permuted(np.tile(np.arange(n), (len(keys), 1)), axis=1)
    for which in (of_numpy, orders):
        found = permutations.deviations(which)
        assert {name: value for name, value in found.items() if abs(value) > LIMIT} == {}


@pytest.mark.parametrize("n", [1023, 1024, 4093])
def test_larger_orders_have_the_statistics_of_uniform_ones(n):
    orders = np.stack([mixture.permute(np.arange(n), n, key) for key in keys_of(n, 300)])
    assert (np.sort(orders) == np.arange(n)).all()
    ranks = orders - (n - 1) / 2
    parity = (n - permutations.num_cycles(orders)) % 2
    assert abs(parity.mean() - 1 / 2) < LIMIT / 2 / math.sqrt(300)
    correlations = ranks @ (np.arange(n) - (n - 1) / 2) / (n * (n**2 - 1) / 12)
    variance = (correlations**2).mean() * (n - 1)
    assert abs(variance - 1) < LIMIT * math.sqrt(2 / 300)
    opposites = (orders - np.roll(orders, -(n // 2), axis=1)) % n
    assert excess(np.bincount(opposites.ravel(), minlength=n)[1:]) < LIMIT


@pytest.mark.parametrize("n", [2**16 - 1, 2**16, 2**16 + 1, 99_991, 2**18])
def test_every_number_of_a_large_order_comes_once(n):
    order = mixture.permute(np.arange(n), n, keys_of(0, 1)[0])
    assert (np.bincount(order, minlength=n) == 1).all()


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 10**6 + 3, 2**20 - 1, 2**40 + 15, 2**62])
def test_a_sample_of_a_large_order_is_uniform_and_without_serial_correlation(n):
    """Of numpy's integers the same is tested, since its permutation of 2^62 fits in no memory."""
    first, second = keys_of(n % 2**32, 2)
    at = n // 3 + np.arange(20_000) % (n // 2)
    rng = np.random.default_rng(0)
    of_numpy = rng.integers(0, n, 20_000), rng.integers(0, n, 20_000)
    ours = mixture.permute(at, n, first), mixture.permute(at, n, second)
    for one, other in (of_numpy, ours):
        assert one.min() >= 0 and one.max() < n
        shares, other_shares = one / n, other / n
        assert excess(np.bincount((shares * 64).astype(int), minlength=64)) < LIMIT
        # Neighbours, the next key at the same place, and the place itself
        for lag in (1, 2, 16, 256):
            pairs = (shares[lag:] * 8).astype(int) * 8 + (shares[:-lag] * 8).astype(int)
            assert excess(np.bincount(pairs, minlength=64)) < LIMIT, lag
            steps = ((shares[lag:] - shares[:-lag]) % 1 * 64).astype(int)
            assert excess(np.bincount(steps, minlength=64)) < LIMIT, lag
        for x in (other_shares, np.arange(20_000)):
            assert abs(np.corrcoef(shares, x)[0, 1]) < LIMIT / math.sqrt(20_000)


def test_the_orders_of_epochs_and_seeds_are_independent():
    def orders_of(seed, epochs, n=19):
        order = tokens._epoch_order(n, lambda epoch: tokens._shuffle_key(seed, epoch, 0))
        return order(np.arange(n * epochs)).reshape(epochs, n)

    by_epoch = orders_of(0, 1_000)
    by_seed = np.stack([orders_of(seed, 1)[0] for seed in range(400)])
    for orders in (by_epoch, by_seed):
        found = permutations.deviations(orders)
        assert {name: value for name, value in found.items() if abs(value) > LIMIT} == {}
    # Seed 1 is not seed 0 an epoch later.
    grid = np.concatenate([orders_of(seed, 20) for seed in range(20)])
    assert len(np.unique(grid, axis=0)) == 400


def test_orders_stay_the_same_between_versions():
    # A run that resumes reads the samples that it has not read: these orders must not change.
    expected = {
        2: [1, 0],
        17: [16, 5, 2, 9, 15, 1, 13, 7],
        100: [87, 81, 16, 74, 57, 23, 68, 43],
        100_000: [81102, 21159, 79806, 89529, 29597, 56329, 31907, 42899],
    }
    for n, order in expected.items():
        assert mixture.permute(np.arange(min(n, 8)), n, 12345).tolist() == order
    assert tokens._shuffle_key(7, 3, 0) == 5061563556724077661
    assert tokens._shuffle_key(2**62 + 1, 3, 0) == 4087151167134949851


@pytest.mark.parametrize(
    "weights", [[1], [3, 1], [1 / 3, 1 / 3, 1 / 3], [1e-4, 1, 1e4], [5, 5, 5, 5, 1]]
)
def test_block_counts_add_up_for_any_weights(weights):
    counts = mixture.block_counts(weights)
    assert counts.sum() == mixture.BLOCK
    assert np.abs(counts - mixture.BLOCK * np.array(weights) / np.sum(weights)).max() < 1


def test_a_mixture_reads_each_sample_from_its_source():
    shares = mixture.Shares.of([3, 1, 2], 0, block_key)
    mixed = mixture.mix([numbered(one, 9) for one in range(3)], "abc", [shares])
    indices = np.random.default_rng(0).integers(0, 3 * mixture.BLOCK, 60)
    sources, numbers = mixture.assign(indices, mixture.block_counts([3, 1, 2]), block_key)
    batch = mixed.read(indices)
    assert batch.tokens.tolist() == np.stack([numbers, sources], axis=1).tolist()
    assert batch.segments.tolist() == [[0, 0]] * 60 and batch.positions.tolist() == [[0, 1]] * 60
    with pytest.raises(ConfigError, match="less than one sample in 65536"):
        mixture.Shares.of([1, 1e-6], 0, block_key)


def test_sources_of_a_mixture_have_independent_orders(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "BLOCK", 2)  # a sample of each source: in their own orders
    size = 40  # windows of each source
    stream = [np.arange(1, 8 * size + 2)]
    a, b = write(tmp_path / "a", stream), write(tmp_path / "b", [stream[0] + 10_000])
    source = build("", mixture=((a, 1), (b, 1)))
    first = source.read(np.arange(6_000)).tokens[:, 0]
    orders = []
    for rows in (first[first < 10_000], first[first > 10_000] - 10_000):
        epochs = len(rows) // size - 1
        orders.append((rows[: epochs * size].reshape(epochs, size) - 1) // 8)
        assert (np.sort(orders[-1]) == np.arange(size)).all()
    ranks = [one[:70] - (size - 1) / 2 for one in orders]
    between = (ranks[0] * ranks[1]).sum(1) / (size * (size**2 - 1) / 12)
    assert abs(between.mean()) < LIMIT / math.sqrt((size - 1) * 70)
    # A single source has the order that it has without a mixture.
    alone = (build(a).read(np.arange(size)).tokens[:, 0] - 1) // 8
    assert orders[0][0].tolist() == alone.tolist()


def test_the_sources_of_successive_samples_are_independent():
    counts = mixture.block_counts([3, 1])
    sources, _ = mixture.assign(np.arange(4 * mixture.BLOCK), counts, lambda block: 97 * block)
    for block in sources.reshape(4, -1):
        # As in a shuffled block of numpy: each pair is as likely as its shares say.
        for lag in (1, 2, 3, 256, mixture.BLOCK // 2):
            both = (block * np.roll(block, lag)).mean()
            assert abs(both - 1 / 16) < LIMIT * math.sqrt(1 / 16 * 15 / 16 / mixture.BLOCK), lag
        parts = block.reshape(256, 256).sum(1)
        assert 0.6 < parts.var() / (256 * 3 / 16) < 1.5
    agreeing = (sources[: mixture.BLOCK] == sources[mixture.BLOCK : 2 * mixture.BLOCK]).mean()
    assert abs(agreeing - 10 / 16) < LIMIT * math.sqrt(10 / 16 * 6 / 16 / mixture.BLOCK)


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
