"""`meshtrain verify` on our models and on users' models; test_mutations.py shows which bugs it finds."""

import itertools
import json

import jax
import numpy as np
import pytest
from conftest import LAYOUT, tiny_config
from flax import nnx

import meshtrain
from meshtrain import cli
from meshtrain.data.source import Source
from meshtrain.train import train
from meshtrain.verify import laws, reference_step, subject, verify
from meshtrain.verify.certificate import compare
from meshtrain.verify.covering import pairwise


def test_pairwise_covers_every_possible_pair_of_levels():
    factors = {"a": [1, 2, 4], "b": [1, 2, 4], "c": ["x", None], "d": [True, False]}

    def possible(row):
        return row["a"] * row["b"] <= 4 and (row["c"] == "x" or not row["d"])

    def pairs(rows):
        return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}

    rows = [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]
    chosen = pairwise(filter(possible, rows))
    assert all(map(possible, chosen))
    assert pairs(chosen) == pairs(filter(possible, rows))
    assert len(chosen) < len(list(filter(possible, rows)))
    assert pairwise([]) == []


def test_packed_documents_are_unpacked_to_separate_rows():
    rows = np.array([[5, 0, 6, 7, 8], [1, 2, 3, 4, 0]])  # 0 ends a document
    weights = np.array([[1, 1, 0.5, 1], [1, 0, 1, 1]])
    batch = reference_step.unpack_documents(rows, weights, 0, num_rows=4)
    assert batch.tokens.tolist() == [[5, 0, 0, 0], [6, 7, 0, 0], [1, 2, 3, 4], [0] * 4]
    assert batch.targets.tolist() == [[0, 6, 0, 0], [7, 8, 0, 0], [2, 3, 4, 0], [0] * 4]
    assert batch.weights.tolist() == [[1, 0, 0, 0], [0.5, 1, 0, 0], [1, 0, 1, 1], [0] * 4]
    one_per_row = reference_step.unpack_documents(rows, weights, None, num_rows=3)
    assert one_per_row.tokens[:2].tolist() == rows[:, :-1].tolist()
    assert not one_per_row.weights[2].any()


def test_a_difference_is_reported_with_leaf_index_and_both_values():
    expected = {"gradients": {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": np.array([1e-17, 0])}}
    actual = {"gradients": {"w": np.array([[1.0, 2.0], [3.5, 4.0]]), "b": np.array([0, 1e-17])}}
    differences, fault = compare(actual, expected, tolerance=1e-10, zero_gradients=["b"])
    assert fault == "gradients w[1, 0]: 3.5 here, 3 on one device"
    assert differences == {"gradients": 0.125}
    not_finite = {"gradients": {"w": np.full((2, 2), np.nan), "b": np.zeros(2)}}
    assert "nan here" in compare(not_finite, expected, tolerance=1e-10, zero_gradients=["b"])[1]


def test_a_quick_verification_of_the_quickstart_passes_and_is_written(tmp_path, capsys):
    options = ["--config=configs/quickstart.py", "--quick", f"--output={tmp_path}"]
    assert cli.main("verify", options) == 0
    assert "all equal to one device" in capsys.readouterr().out
    record = json.loads((tmp_path / "verify.json").read_text())
    assert record["passed"] and len(record["results"]) == verify.QUICK_LAYOUTS
    kinds = {"start", "evaluation", "schedule", "loss", "norm", "gradients", "parameters"}
    for result in record["results"]:
        assert result["differences"].keys() == kinds | {"optimizer state"}
        assert max(result["differences"].values()) < verify.TOLERANCE
    page = (tmp_path / "verify.md").read_text()
    assert page.startswith("# meshtrain.models.transformer:build: passed")
    assert page.count("\n| ") == verify.QUICK_LAYOUTS + 2


@pytest.mark.slow
def test_the_full_verification_of_the_quickstart_passes(tmp_path):
    assert cli.main("verify", ["--config=configs/quickstart.py", f"--output={tmp_path}"]) == 0


class Digits(nnx.Module):
    """A model with dropout that is neither a stack of blocks nor a language model."""

    def __init__(self, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.hidden = nnx.Linear(16, 32, rngs=rngs, kernel_init=named("embed", "mlp"))
        self.out = nnx.Linear(32, 4, rngs=rngs, kernel_init=named("mlp", None))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.tanh(self.hidden(x))))


def squares(model, batch):
    return meshtrain.weighted(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


def samples(indices):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(256, 16)), random.normal(size=(256, 4))
    return {"x": x[indices], "y": y[indices]}


@pytest.mark.parametrize("kind", ["source", "iterable"])
def test_a_users_own_model_is_verified(kind):
    data = Source(samples)
    if kind == "iterable":
        data = [samples(slice(start, start + 16)) for start in range(0, 256, 16)]
    model = meshtrain.from_nnx(Digits, squares)
    with jax.enable_x64(True):
        own = subject.Subject(tiny_config(), model, data, keep_sizes=False)
        assert not own.is_text and laws.violations(own) == []
        result = verify.check_layout(own, LAYOUT)
    assert result.fault is None and result.differences["gradients"] < 1e-12


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (dict(num_heads=12, num_kv_heads=3, d_model=96), dict(data=1, fsdp=2, tensor=4)),
        (dict(num_heads=8, num_kv_heads=1, d_model=64), dict(data=1, fsdp=1, tensor=8)),
    ],
    ids=str,
)
def test_heads_and_a_vocabulary_that_are_not_divisible_by_the_tensor_axis(sizes, axes):
    c = tiny_config()
    c.model.update(sizes)
    c.model.vocab_size = 61
    row = {**LAYOUT, **axes, "packing": True, "masks": True, "sequence_parallel": True}
    with jax.enable_x64(True):
        own = subject.Subject(c, None, None, keep_sizes=True)
        assert verify.check_layout(own, row).fault is None


def test_a_loss_that_mixes_rows_is_detected():
    def centred(model, batch):
        values = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
        return meshtrain.weighted(values - values.mean() ** 2)

    with jax.enable_x64(True):
        model = meshtrain.from_nnx(Digits, centred)
        own = subject.Subject(tiny_config(), model, Source(samples), keep_sizes=False)
        assert verify.check_layout(own, LAYOUT).fault.startswith("evaluation loss: ")
        one_microbatch = {**LAYOUT, "num_microbatches": 1}
        assert verify.check_layout(own, one_microbatch).fault is None


def test_shrinking_keeps_the_structure():
    raw = tiny_config().to_dict()
    raw["model"].update(num_layers=32, num_heads=32, num_kv_heads=8, d_model=4096, d_ff=14336)
    raw["model"].update(vocab_size=128256)
    subject.shrink(raw)
    model = raw["model"]
    assert (model["num_layers"], model["num_heads"], model["num_kv_heads"]) == (
        subject.NUM_LAYERS,
        8,
        2,
    )
    assert (model["d_model"], model["d_ff"], model["vocab_size"]) == (64, 64, 125)


def test_cudnn_is_replaced_by_an_implementation_with_float64():
    c = tiny_config()
    c.model.attention_impl = "cudnn"
    with jax.enable_x64(True):
        own = subject.Subject(c, None, None, keep_sizes=False)
        assert verify.check_layout(own, LAYOUT).fault is None
    assert own.raw["model"]["attention_impl"] == "auto"  # also for the models of laws.py


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--without=magic"], "without='magic': use one of packing, masks"),
        (["--config.model.num_layers=0"], "model.num_layers=0: use 1 or more"),
        (["--config.train.remat=all"], "train.remat='all': use one of"),
    ],
)
def test_a_user_mistake_is_one_line(options, line, capsys, tmp_path):
    arguments = ["--config=configs/quickstart.py", f"--output={tmp_path}", *options]
    assert cli.main("verify", arguments) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_a_model_without_dim_names_is_an_error_on_a_sharded_mesh():
    nameless = meshtrain.from_nnx(lambda rngs: nnx.Linear(16, 4, rngs=rngs), squares)
    c = tiny_config()
    c.mesh.update(data=1, fsdp=8)
    with pytest.raises(meshtrain.ConfigError, match="mesh.fsdp=8: no parameter .* names its dims"):
        train(c, model=nameless, data=Source(samples))
    with pytest.raises(meshtrain.ConfigError, match="names its dims"):
        verify.verify(c, model=nameless, data=Source(samples), log=lambda line: None)
