"""A MapDataset of grain as data: rows by their index, on any mesh, without skipping."""

import numpy as np
import pytest

import meshtrain
from meshtrain.checkpoint import manifest
from meshtrain.config.build import with_steps
from meshtrain.config.parse import parse
from meshtrain.data import map_dataset
from meshtrain.errors import ConfigError
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.epochs import NUM_ROWS, logged, rows, settings

grain = pytest.importorskip("grain", reason="needs the extra rows: grain")


def row(number):
    return {name: column[number] for name, column in rows().items()}


def numbers(*, seed=0):
    return grain.MapDataset.source(range(NUM_ROWS)).seed(seed).shuffle()


def shuffled(**changes):
    return numbers(**changes).map(row)


def expected_rows(dataset, count):
    return [float(dataset[index]["row"]) for index in range(count)]


@pytest.mark.parametrize(
    "make",
    [
        lambda dataset: dataset,
        lambda dataset: dataset.batch(8),
        lambda dataset: dataset.batch(5),
        lambda dataset: dataset.batch(8).map(lambda batch: batch),
    ],
    ids=["rows", "batches", "batches of another size", "a map of batches"],
)
def test_sample_i_is_row_i_of_the_dataset_over_all_epochs(make):
    source = map_dataset.as_source(make(shuffled()))
    assert source.size == NUM_ROWS
    count = 2 * NUM_ROWS + 3
    expected = np.array(expected_rows(shuffled(), count))
    # Of each epoch all rows once; the second one in another order.
    assert sorted(expected[:NUM_ROWS]) == sorted(expected[NUM_ROWS : 2 * NUM_ROWS])
    assert expected[:NUM_ROWS].tolist() != expected[NUM_ROWS : 2 * NUM_ROWS].tolist()
    np.testing.assert_array_equal(source.read(np.arange(count))["row"], expected)
    chosen = np.array([40, 3, 19, 3])
    np.testing.assert_array_equal(source.read(chosen)["row"], expected[chosen])
    assert source.read(chosen)["x"].shape == (4, 4)


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_run_resumes_on_another_mesh_and_skips_without_reading(is_batched, tmp_path):
    read = []

    def noted(number):
        read.append(int(number))
        return {**row(number % NUM_ROWS), "row": np.float32(number)}

    dataset = grain.MapDataset.source(range(400)).seed(0).shuffle()
    order = [int(dataset[index]) for index in range(400)]
    dataset = dataset.map(noted)
    if is_batched:
        dataset = dataset.batch(8, drop_remainder=True).repeat()
    expected, _ = logged(settings(steps=30), dataset)
    c = settings(steps=25)
    logged(c, dataset, workdir=tmp_path)
    assert manifest.read(tmp_path / "checkpoints" / "25").position == 200
    c.train.steps = 30
    c.mesh.update(data=4, tensor=2)
    read.clear()
    second, found = logged(c, dataset, workdir=tmp_path)
    np.testing.assert_allclose(second.state.params["w"], expected.state.params["w"], rtol=1e-5)
    means = [np.mean(order[8 * step : 8 * step + 8]) for step in range(25, 30)]
    assert [one["row"] for one in found if "row" in one] == pytest.approx(means)
    # The first element shows what a row is; others before the position are not read.
    assert not set(read) & set(order[8:200])


def test_another_batch_size_resumes_at_the_same_row(tmp_path):
    dataset = shuffled().batch(8, drop_remainder=True).repeat()
    first, _ = logged(settings(steps=2), dataset, workdir=tmp_path)
    _, found = logged(settings(steps=3, global_batch=16), dataset, workdir=tmp_path)
    source = map_dataset.as_source(dataset)
    expected = source.read(np.arange(16, 32))["row"].mean()
    assert [one["row"] for one in found if "row" in one] == [expected]


def test_epochs_are_those_of_the_dataset():
    cfg = parse(settings(epochs=2.0), num_devices=8)
    assert with_steps(cfg, map_dataset.as_source(shuffled())).train.steps == 5
    endless = map_dataset.as_source(shuffled().batch(8, drop_remainder=True).repeat())
    with pytest.raises(ConfigError, match="train.epochs=2: this data has no size"):
        with_steps(cfg, endless)


def token_row(number):
    tokens = (np.arange(16, dtype=np.int32) + number) % 60
    return meshtrain.Batch(tokens, tokens, np.ones(16, np.float32))


@pytest.mark.parametrize("is_batched", [False, True])
def test_rows_or_batches_of_the_type_batch_train_the_transformer(is_batched):
    c = tiny_config()
    c.train.steps, c.eval.batches = 2, 1
    dataset = grain.MapDataset.source(range(64)).map(token_row)
    if is_batched:
        # A pipeline of somebody else's classes shows nothing; the arrays do.
        dataset = Stacked(dataset)
    result = train(c, data=dataset, eval_data=dataset)
    assert result.step == 2 and np.isfinite(result.eval_loss)


class Stacked(grain.MapDataset):
    """Batches of 4 rows."""

    def __len__(self):
        return len(self._parent) // 4

    def __getitem__(self, index):
        parts = [self._parent[4 * index + number] for number in range(4)]
        return meshtrain.Batch(
            *[np.stack(leaves) for leaves in zip(*[part[:3] for part in parts], strict=True)]
        )


FAULTS = {
    "empty": (lambda: grain.MapDataset.source([]), "the MapDataset is empty"),
    "filtered": (
        lambda: shuffled().filter(lambda one: one["row"] % 2 == 0),
        "of the MapDataset is None; a filter",
    ),
    "ragged": (
        lambda: numbers().map(lambda number: {"x": np.zeros(number + 1)}),
        "do not fit in one batch: .*same keys and shapes",
    ),
    "other keys": (
        lambda: numbers().map(lambda number: {f"x{number % 2}": np.zeros(1)}),
        "do not fit in one batch: ",
    ),
    "strings": (
        lambda: numbers().map(lambda number: {"text": "a"}),
        "'text' of a batch holds strings",
    ),
    "short batches": (
        lambda: shuffled().batch(8).repeat(),
        r"element 2 of the MapDataset has 3 rows.*use .batch\(8, drop_remainder=True\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_rows_that_make_no_batch_are_named_in_one_line(name):
    make, fault = FAULTS[name]
    with pytest.raises(ConfigError, match=fault) as error:
        logged(settings(steps=6), make())
    assert "\n" not in str(error.value)


def test_other_data_stays_as_it_is():
    iterable = shuffled().to_iter_dataset()
    for data in (None, [1], iterable, map_dataset.as_source(shuffled())):
        assert map_dataset.as_source(data) is data


def test_an_iter_dataset_trains_as_an_iterable():
    dataset = shuffled().batch(8, drop_remainder=True).repeat().to_iter_dataset()
    by_index, _ = logged(settings(steps=3), shuffled().batch(8, drop_remainder=True).repeat())
    as_iterable, _ = logged(settings(steps=3), dataset)
    np.testing.assert_array_equal(by_index.state.params["w"], as_iterable.state.params["w"])


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (
            lambda data: data.map(lambda row: {"tokens": row.tokens, "weights": row.weights}),
            r"a batch is a dict of 'tokens', 'weights', .*map\(lambda row: meshtrain.Batch\(",
        ),
        (lambda data: data.map(lambda row: row.tokens), r"a batch is a ndarray, and the"),
        (lambda data: data.to_iter_dataset(), r"has the shape \(16,\), not .*with .batch\(n\)"),
    ],
    ids=["dicts", "arrays", "an iterable of rows"],
)
def test_rows_of_another_type_are_named_to_who_trains_the_transformer(make, fault):
    c = tiny_config()
    c.train.steps = 2
    dataset = grain.MapDataset.source(range(64)).map(token_row)
    with pytest.raises(ConfigError, match=fault) as error:
        train(c, data=make(dataset))
    assert "\n" not in str(error.value)


def test_the_way_out_for_a_filter_works():
    c = tiny_config()
    c.train.steps = 2
    dataset = grain.MapDataset.source(range(64)).map(token_row)
    dataset = dataset.filter(lambda row: row.tokens[0] % 2 == 0)
    with pytest.raises(
        ConfigError, match=r"to_iter_dataset\(\).batch\(n\) with n=train.global_batch"
    ):
        train(c, data=dataset)
    assert train(c, data=dataset.to_iter_dataset().batch(c.train.global_batch)).step == 2
