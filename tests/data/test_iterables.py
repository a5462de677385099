"""Iterables as data: epochs, short last batches, rows of one process; the guide's recipes."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshtrain
from meshtrain.checkpoint import manifest, resume
from meshtrain.cli import app
from meshtrain.cluster import distributed
from meshtrain.config.build import with_steps
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.data import loader
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.monitor import heldout
from meshtrain.train import train
from tests.lib.configs import quick, tiny_config
from tests.lib.epochs import batches, linear, logged, rows, settings
from tests.lib.paths import ROOT
from tests.lib.processes import free_port


def test_an_epoch_counts_each_row_once_and_padding_not_at_all():
    result, found = logged(settings(epochs=2.0), batches())
    assert result.step == 6
    assert [row["row"] for row in found] == [3.5, 11.5, 17.0] * 2
    assert [row["tokens"] for row in found] == [8, 16, 19, 27, 35, 38]


NO_NUMBERS = {
    "strings": ({"text": np.array(["a"] * 8)}, "'text' of a batch holds strings, not numbers"),
    "bytes": ({"text": np.array([b"a"] * 8)}, "'text' of a batch holds strings"),
    "objects": ({"text": np.array(["a"] * 8, object)}, "'text' of a batch holds object values"),
    "a list": ({"text": ["a"] * 8}, "'text.0' of a batch holds strings"),
    "one string": ({"text": "a"}, "'text' of a batch holds strings"),
    "nested": ({"inputs": {"text": np.array(["a"] * 8)}}, "'inputs.text' of a batch holds strings"),
    "dates": ({"day": np.zeros(8, "datetime64[D]")}, "'day' of a batch holds datetime64.D. values"),
    "a scalar": (
        {"scale": 0.5},
        r"'scale' of a batch has the shape \(\), and train.global_batch=8",
    ),
    "3 rows": ({"y": np.zeros(3)}, r"'y' of a batch has the shape \(3,\), and "),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
@pytest.mark.parametrize("is_source", [False, True])
def test_an_array_that_is_no_row_of_numbers_is_named(name, is_source):
    added, fault = NO_NUMBERS[name]
    batch = {**batches()[0], **added}
    data = Source(lambda indices: batch, size=8) if is_source else [batch]
    if is_source:
        fault = fault.partition(", and ")[0]
    with pytest.raises(ConfigError, match=f"data: {fault}"):
        train(settings(), model=linear(), data=data)


def test_rows_of_bfloat16_and_bool_are_numbers():
    batch = {"x": np.zeros(8, jnp.bfloat16), "mask": np.ones(8, bool)}
    assert loader.as_arrays(batch)["x"].dtype == jnp.bfloat16


def test_epochs_resume_and_continue_to_more(tmp_path):
    expected, _ = logged(settings(epochs=2.0), batches())
    first, _ = logged(settings(epochs=1.0), batches(), workdir=tmp_path)
    second, found = logged(settings(epochs=2.0), batches(), workdir=tmp_path)
    assert (first.step, second.step) == (3, 6) and [row["row"] for row in found][0] == 3.5
    np.testing.assert_array_equal(second.state.params["w"], expected.state.params["w"])
    record = meshtrain.load_config(str(tmp_path / "config.json")).train
    assert (record.steps, record.epochs) == (6, 0.0)


@pytest.mark.slow
def test_a_run_with_data_of_ones_own_records_no_other_data(tmp_path, capsys):
    """The config's data was not read: other verbs say so, and may name other data."""
    c = quick(steps=1)
    c.update(data=dict(path="elsewhere", build="meshtrain.data.tokens:build"))
    draw = np.random.default_rng(0)

    def token_batches(seq_len):
        tokens = draw.integers(0, 64, (16, seq_len), np.int32)
        return [meshtrain.Batch(tokens, tokens, np.ones(tokens.shape, np.float32))] * 2

    workdir = tmp_path / "run"
    train(c, workdir=workdir, data=token_batches(8))
    recorded = json.loads((workdir / "config.json").read_text())
    assert recorded["data"] == {"build": "train(data=...)", "per_process": False, "seq_len": 8}
    saved = manifest.read(workdir / "checkpoints" / "1")
    assert saved.config["data"] == recorded["data"]

    # With other lengths it resumes, and says so; the data of the config is another run's.
    c.train.steps = 2
    assert train(c, workdir=workdir, data=token_batches(16)).step == 2
    assert "changed     data.seq_len: 8 -> 16" in capsys.readouterr().out
    c.update(train=dict(steps=3), data=dict(build="meshtrain.data.synthetic:build", path=""))
    with pytest.raises(ConfigError, match=r"^data.build=.* with .train\(data=.*allow_change"):
        train(c, workdir=workdir)

    # Other verbs need data with a name.
    evaluate = ["evaluate", f"--workdir={workdir}", "--split=all"]
    assert app.command(evaluate) == 2
    assert "the data of this run was passed in Python" in capsys.readouterr().err
    named = ["build=meshtrain.data.tokens:build", f"path={tmp_path / 'text.txt'}", "dtype=uint8"]
    (tmp_path / "text.txt").write_bytes(bytes(range(64)) * 9)
    flags = [f"--config.data.{setting}" for setting in (*named, "vocab_size=64")]
    assert app.command([*evaluate, *flags]) == 0, capsys.readouterr().err
    assert "nats per token" in capsys.readouterr().out

    # A workdir of an earlier version recorded the data of the config.
    saved.config["data"] = default.get_config().data.to_dict()
    own = parse(c, num_devices=8).of_own_data(seq_len=16).to_dict()
    found = resume.check(saved, own, {}, source=workdir / "checkpoints" / "1")
    assert not [key for key in found if key.startswith("data.")]


@pytest.mark.parametrize(("then", "now"), [(8, 16), (16, 8)])
def test_epochs_that_resume_with_another_batch_size_read_what_remains(tmp_path, then, now):
    table = {name: np.resize(column, (96, *column.shape[1:])) for name, column in rows().items()}
    table["row"] = np.arange(96, dtype=np.float32)
    data = Source(lambda indices: {k: v[indices % 96] for k, v in table.items()}, size=96)
    first, before = logged(settings(epochs=0.5, global_batch=then), data, workdir=tmp_path)
    second, after = logged(settings(epochs=1.0, global_batch=now), data, workdir=tmp_path)
    assert (first.step, second.step) == (48 // then, 48 // then + 48 // now)
    # The mean row of each batch: all rows once.
    seen = sum(row["row"] * then for row in before) + sum(row["row"] * now for row in after)
    assert seen == np.arange(96).sum()
    assert manifest.read(tmp_path / "checkpoints" / str(second.step)).position == 96
    record = meshtrain.load_config(str(tmp_path / "config.json")).train
    assert (record.steps, record.epochs, record.global_batch) == (second.step, 0.0, now)
    # A third start finds nothing left.
    third, _ = logged(settings(epochs=1.0, global_batch=now), data, workdir=tmp_path)
    assert third.step == second.step


@pytest.mark.parametrize(
    ("data", "epochs", "steps"),
    [
        (Source(lambda indices: indices, size=20), 1.0, 3),
        (Source(lambda indices: indices, size=16), 1.5, 3),
        (Source(lambda indices: indices, size=24), 1 / 3, 1),
        ([0] * 5, 2.0, 10),
    ],
    ids=["once", "one and a half times", "a third", "a list"],
)
def test_the_steps_of_epochs(data, epochs, steps):
    cfg = with_steps(parse(settings(epochs=epochs), num_devices=8), data)
    assert (cfg.train.steps, cfg.train.epochs) == (steps, 0.0)


@pytest.mark.parametrize(
    "data", [Source(lambda indices: indices), iter([1])], ids=["source", "iterator"]
)
def test_epochs_of_data_without_a_size_are_an_error(data):
    with pytest.raises(ConfigError, match="train.epochs=2: this data has no size.*set train.steps"):
        with_steps(parse(settings(epochs=2.0), num_devices=8), data)


def test_the_batch_per_device_counts_the_devices_that_shard_rows():
    c = settings(batch_per_device=3)
    c.mesh.update(data=-1, tensor=2)
    record = parse(c, num_devices=8).to_dict()["train"]
    assert (record["global_batch"], record["batch_per_device"]) == (12, 0)
    with pytest.raises(ConfigError, match="train.batch_per_device=-1: use 0 or more"):
        parse(settings(batch_per_device=-1))


def batch_of(length=16, **changed):
    """Returns a batch of 16 rows for the model of tiny_config, with one number changed."""
    tokens = np.arange(16 * length, dtype=np.int32).reshape(16, length) % 60
    batch = meshtrain.Batch(
        tokens,
        targets=tokens.copy(),
        weights=np.ones(tokens.shape, np.float32),
        positions=np.tile(np.arange(length, dtype=np.int32), (16, 1)),
        segments=np.zeros(tokens.shape, np.int32),
    )
    for name, number in changed.items():
        getattr(batch, name)[3, 5] = number
    return batch


OUTSIDE = [
    (batch_of(tokens=64), "holds token 64 .in row 3, at 5., outside model.vocab_size=64"),
    (batch_of(tokens=-1), "holds token -1 "),
    (batch_of(targets=64), "holds target 64 .*give the target weight 0"),
    (batch_of(targets=-100), "holds target -100 "),
    (batch_of(positions=16), "holds position 16 .*outside model.max_seq_len=16"),
    (batch_of(length=24)._replace(positions=None), "holds position 16 .*use shorter rows"),
]


@pytest.mark.parametrize(("batch", "message"), OUTSIDE)
@pytest.mark.parametrize("kind", ["list", "source", "evaluation"])
def test_numbers_outside_the_tables_of_the_model_are_rejected(batch, message, kind):
    c = tiny_config()
    c.model.positions = "learned"
    source = Source(lambda indices: jax.tree.map(lambda leaf: leaf[indices % 16], batch))
    data = {"list": {"data": [batch]}, "source": {"data": source}, "evaluation": {}}[kind]
    with pytest.raises(ConfigError, match=f"data: a batch {message}"):
        train(c, **(data or {"data": [batch_of()], "eval_data": [batch]}))


@pytest.mark.slow
def test_a_target_of_weight_0_may_be_any_number():
    c = tiny_config()
    c.train.steps, c.eval.every = 1, 1
    losses = []
    for target in (0, -100, 64):
        batch = batch_of(targets=target, weights=0)
        losses.append(train(c, data=[batch], eval_data=[batch]).eval_loss)
    assert losses == losses[:1] * 3 and np.isfinite(losses[0])


def test_a_source_is_not_per_process():
    c = settings()
    c.data.per_process = True
    with pytest.raises(ConfigError, match="data.per_process=True: the data is a Source"):
        train(c)


class DataLoader:
    """Like that of PyTorch with its defaults: it shuffles, and the last batch is short."""

    def __init__(self, dataset, batch_size=8, drop_last=False, shuffle=True):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.sampler = range(len(dataset["row"]))
        self.random = np.random.default_rng(0) if shuffle else None

    def __len__(self):
        num_rows = len(self.sampler)
        return num_rows // self.batch_size if self.drop_last else -(-num_rows // self.batch_size)

    def __iter__(self):
        order = np.array(self.sampler)
        if self.random:
            order = self.random.permutation(order)
        for at in range(0, len(self) * self.batch_size, self.batch_size):
            chosen = order[at : at + self.batch_size]
            yield {name: column[chosen] for name, column in self.dataset.items()}


def unweighted():
    """Returns the model of `linear` with a loss that has no weights."""

    def loss(params, batch, key):
        losses = jnp.square(batch["x"] @ params["w"] - batch["y"])
        return meshtrain.weighted(losses, row=batch["row"])

    return Model(lambda key: {"w": jnp.zeros(4)}, {"w": ("embed",)}, loss=loss)


def train_unweighted(c, data, **options):
    found = []
    result = train(c, model=unweighted(), data=data, on_metrics=found.append, **options)
    return result, [row["row"] for row in found if "row" in row]


def without_weights():
    return {name: column for name, column in rows().items() if name != "weights"}


def test_a_default_data_loader_trains_on_each_row_once_an_epoch(tmp_path):
    """Without weights: the rows of the next epoch fill a short last batch."""
    result, means = train_unweighted(settings(epochs=8.0), DataLoader(without_weights()))
    # 8 epochs of 19 rows are 19 batches of 8.
    assert result.step == len(means) == 19
    assert sum(means) * 8 == pytest.approx(8 * sum(range(19)))
    # A run that resumes reads the rows that are left.
    first, before = train_unweighted(
        settings(epochs=1.0), DataLoader(without_weights()), workdir=tmp_path
    )
    second, after = train_unweighted(
        settings(epochs=8.0), DataLoader(without_weights()), workdir=tmp_path
    )
    assert (first.step, second.step) == (3, 19)
    assert [*before, *after] == pytest.approx(means)
    np.testing.assert_array_equal(second.state.params["w"], result.state.params["w"])


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        (DataLoader(without_weights(), shuffle=False), 5),
        (DataLoader(without_weights(), drop_last=True), 4),
        ([*DataLoader(without_weights(), shuffle=False)], 5),
        ([*DataLoader(rows(), shuffle=False)], 6),  # the weights pad it: a batch of its own
    ],
    ids=["data loader", "drop_last", "list", "weights"],
)
def test_the_steps_of_two_epochs_with_a_short_batch(data, steps):
    first, data = loader.peek(data)
    num_rows = loader.rows_of_epoch(data, first)
    cfg = with_steps(parse(settings(epochs=2.0), num_devices=8), data, num_rows=num_rows)
    assert cfg.train.steps == steps


def test_a_short_held_out_batch_without_weights_is_left_out():
    c = settings(steps=1)
    c.eval.update(every=1, batches=3)
    full = [*DataLoader(without_weights(), shuffle=False)]
    losses = [
        train_unweighted(c, full, eval_data=eval_data)[0].eval_loss
        for eval_data in (full, full[:2], full[:1])
    ]
    assert losses[0] == losses[1] != losses[2]
    with pytest.raises(ConfigError, match="eval_data: its only batch has fewer rows than train.gl"):
        train_unweighted(c, full, eval_data=full[2:])


def run_two(program, file):
    """Runs a program in two processes; returns what process 0 writes to the file."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "2"}
    environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(file)],
            cwd=ROOT,
            env={**environ, "JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_fill_short_batches_from_rows_of_their_own(tmp_path):
    """One has 10 rows an epoch, the other 9: each reads its own rows without end."""
    program = """
import json, sys, jax
sys.path[:0] = ["."]
import jax.numpy as jnp
import meshtrain
from meshtrain.cluster import distributed
from meshtrain.models.base import Model
from meshtrain.train import train
from tests.lib.epochs import batches, settings
jax.config.update("jax_num_cpu_devices", 4)
distributed.initialize()
def loss(params, batch, key):
    return meshtrain.weighted(jnp.square(batch["x"] @ params["w"] - batch["y"]), row=batch["row"])
model = Model(lambda key: {"w": jnp.zeros(4)}, {"w": ("embed",)}, loss=loss)
c = settings(steps=7)
c.data.per_process = True
own = batches(process=jax.process_index(), num_processes=2)
for batch in own:
    del batch["weights"]
found = []
train(c, model=model, data=own, on_metrics=found.append)
if jax.process_index() == 0:
    json.dump([row["row"] for row in found], open(sys.argv[1], "w"))
"""
    found = run_two(program, tmp_path / "found.json")
    streams = []
    for process in range(2):
        epoch = np.concatenate([part["row"] for part in batches(process=process, num_processes=2)])
        streams.append(np.resize(epoch, 28).reshape(7, 4))
    np.testing.assert_allclose(found, np.concatenate(streams, 1).mean(1), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_that_yield_their_own_rows_train_like_one(tmp_path):
    """Both processes pad their part of the last batch.

    Processes that hold the same rows are an error.
    """
    _, expected = logged(settings(epochs=2.0), batches())
    program = """
import json, sys, jax
sys.path[:0] = ["."]
from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError
from tests.lib.epochs import batches, linear, logged, rows, settings
jax.config.update("jax_num_cpu_devices", 4)
distributed.initialize()
c = settings(epochs=2.0)
c.data.per_process = True
own = batches(process=jax.process_index(), num_processes=2)
assert [len(batch["x"]) for batch in own] == [4, 4, 2 - jax.process_index()]
result, found = logged(c, own)
if jax.process_index() == 0:
    json.dump([[row["loss"], row["row"]] for row in found], open(sys.argv[1], "w"))
c.mesh.update(data=1, tensor=8)
try:
    logged(c, own)
except ConfigError as error:
    assert "processes along mesh.tensor" in str(error), error
else:
    raise AssertionError("both processes hold all rows")
"""
    found = run_two(program, tmp_path / "found.json")
    np.testing.assert_allclose(found, [[row["loss"], row["row"]] for row in expected], rtol=1e-5)


# ---- the recipes of docs/guides/loaders.md ----


def recipes():
    """Returns the Python blocks of the guide, by the package that they need."""
    text = (ROOT / "docs" / "guides" / "loaders.md").read_text()
    found = re.findall(r"<!-- not run: needs (\w+);.*?-->\n```python\n(.*?)```", text, re.DOTALL)
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "grain"])
def test_a_recipe_of_the_guide_trains(package, tmp_path):
    """In a process of its own, which has the filters for warnings of neither package."""
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed; `pip install {package}` to run the recipe")
    done = subprocess.run(
        [sys.executable, "-c", recipes()[package]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "done: " in done.stdout


@pytest.mark.parametrize(
    ("rows", "number_of_others", "expected"),
    [
        ([4, 4], 2, 2),
        ([4, 4, 2], 2, 2),  # without its short batch, as many as the other
        ([4, 4], 3, "eval_data: the processes have 2, 3 batches; give each the same number"),
        ([2], 1, "eval_data: its only batch has fewer rows"),
    ],
    ids=str,
)
def test_all_processes_evaluate_the_same_number_of_their_own_batches(
    rows, number_of_others, expected, monkeypatch
):
    c = quick(global_batch=8)
    c.data.per_process = True
    c.eval.batches = 5
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda number: [number, number_of_others])
    batches = [{"x": np.ones((number, 3))} for number in rows]
    if isinstance(expected, int):
        assert len(heldout.fixed_batches(batches, parse(c))) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        heldout.fixed_batches(batches, parse(c))
