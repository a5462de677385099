"""The loader: each device gets its rows, from a source or from an iterable."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from meshtrain.data import loader
from meshtrain.data.source import Source, to_batch
from meshtrain.errors import ConfigError
from meshtrain.parallel import mesh

RULES = (("batch", ("data", "fsdp")),)


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


def test_without_weights_rows_of_the_next_epoch_fill_a_short_last_batch():
    found = [batch["x"].tolist() for batch in read(short_epoch(weights=False), 19)]
    assert found[2] == [16, 17, 18, 0, 1, 2, 3, 4] and found[4] == [13, 14, 15, 16, 17, 18, 0, 1]
    # In 8 epochs each row counts 8 times, and the next one starts with a batch.
    assert sum(found, []) == [*range(19)] * 8
    (resumed,) = read(short_epoch(weights=False), 1, position=24)
    assert resumed["x"].tolist() == found[3]
    # An epoch may have fewer rows than a batch.
    (first,) = read([{"x": np.arange(3)}], 1)
    assert first["x"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_rows_of_other_shapes_cannot_fill_a_short_batch():
    batches = [{"x": np.zeros((8, 5))}, {"x": np.zeros((3, 4))}]
    with pytest.raises(
        ConfigError, match="of an epoch is short.*other arrays.*drop_last=True"
    ) as e:
        read(batches, 2)
    assert "\n" not in str(e.value)


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
