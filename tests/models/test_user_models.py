"""Train users' own Flax models on their own data."""

import json
import re
from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from sklearn.datasets import load_digits

import meshtrain
from meshtrain.checkpoint import find, resume
from meshtrain.cli import app
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.models import base
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.paths import ROOT


def digits(train):
    """Real 8 x 8 images of digits: the first 1,536 for training, the last 256 for evaluation."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rows = slice(0, 1536) if train else slice(-256, None)
    return [
        {"image": image, "label": label}
        for image, label in zip(
            np.split(images[rows], len(images[rows]) // 128),
            np.split(labels[rows], len(labels[rows]) // 128),
            strict=True,
        )
    ]


def classify(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return meshtrain.weighted(
        losses, correct=(logits.argmax(-1) == batch["label"]).astype(np.float32)
    )


class MLP(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.hidden = nnx.Linear(64, 128, rngs=rngs, kernel_init=split)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        x = linen.relu(linen.Dense(128, kernel_init=init)(x))
        return linen.Dense(10)(linen.Dropout(0.1, deterministic=False)(x))


def digits_config(**mesh):
    c = tiny_config()
    c.train.steps, c.train.global_batch, c.train.log_every = 60, 128, 20
    c.optim.learning_rate, c.eval.batches = 1e-2, 2
    c.mesh.update(mesh)
    return c


LINEN_INPUT = np.zeros((1, 64), np.float32)
MODELS = {
    "nnx": lambda: meshtrain.from_nnx(MLP, classify),
    "linen": lambda: meshtrain.from_linen(LinenMLP(), classify, example=LINEN_INPUT),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_classifier_of_digits_learns_on_a_sharded_mesh(kind, tmp_path, capsys):
    c = digits_config(data=2, fsdp=2, tensor=2)
    data = dict(data=digits(train=True), eval_data=digits(train=False))
    result = train(c, workdir=tmp_path, model=MODELS[kind](), **data)
    assert result.eval_loss < 0.6
    sharded = [
        leaf for leaf in jax.tree.leaves(result.state.params) if not leaf.is_fully_replicated
    ]
    assert [leaf.sharding.spec for leaf in sharded] == [jax.P(("fsdp", "context"), "tensor")]
    assert "examples/s" in capsys.readouterr().out
    assert '"correct": 0.' in (tmp_path / "metrics.jsonl").read_text()


def test_a_run_with_a_model_of_ones_own_records_no_other_model(tmp_path, capsys):
    """Verbs that would build the built-in transformer say what is missing, and a run resumes."""
    c = digits_config()
    c.eval.batches = 0
    for steps in (1, 2):
        c.train.steps = steps
        given = dict(model=MODELS["nnx"](), data=digits(train=True))
        assert train(c, workdir=tmp_path, **given).step == steps
    recorded = json.loads((tmp_path / "config.json").read_text())
    assert recorded["model"] == {"build": "train(model=...)"}
    capsys.readouterr()
    for verb, *flags in (["generate", "--prompt=x"], ["evaluate"]):
        assert app.main(verb, [f"--workdir={tmp_path}", *flags]) == 2
        error = capsys.readouterr().err
        assert "the model of this run was passed in Python" in error and "absent" not in error

    # A workdir of an earlier version, which recorded the built-in transformer.
    directory, saved = find.find_valid(tmp_path, log=print)
    saved.config["model"] = default.get_config().model.to_dict()
    own = parse(c, num_devices=8).of_own_model().of_own_data().to_dict()
    found = resume.check(saved, own, {}, source=directory)
    assert not [key for key in found if key.startswith("model.")]


def test_a_resumed_run_continues_its_iterable_where_it_stopped(tmp_path):
    def run(folder, steps):
        c = digits_config()
        c.optim.schedule, c.train.steps, c.eval.batches = "constant", steps, 0
        return train(c, workdir=tmp_path / folder, model=MODELS["nnx"](), data=digits(True))

    uninterrupted, _ = run("uninterrupted", 14), run("resumed", 5)
    resumed = run("resumed", 14)
    chex.assert_trees_all_equal(resumed.state.params, uninterrupted.state.params, strict=True)


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_depends_on_the_key_and_is_off_without_one(kind):
    model, batch = MODELS[kind](), digits(train=True)[0]
    params = model.init(jax.random.key(0))
    one, same, other = (float(model.loss(params, batch, jax.random.key(k)).loss) for k in (1, 1, 2))
    assert one == same != other
    hidden = np.maximum(batch["image"] @ first_kernel(params), 0)
    logits = hidden @ last_kernel(params)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).sum()
    assert float(model.loss(params, batch, None).loss) == pytest.approx(float(expected), rel=1e-5)


def first_kernel(params):
    return (params.get("hidden") or params["Dense_0"])["kernel"]


def last_kernel(params):
    return (params.get("out") or params["Dense_1"])["kernel"]


def test_each_dropout_layer_has_its_own_mask():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))

    module = base.functional(Twice).bind({}, jax.random.key(0))
    x = np.ones((64,), np.float32)
    assert not np.array_equal(module.one(x), module.two(x))


class DropoutBlock(nnx.Module):
    """A residual layer of width 64; `dropout` returns its last layer."""

    def __init__(self, rngs, dropout=lambda rngs: nnx.Dropout(0.5, rngs=rngs)):
        self.linear, self.last = nnx.Linear(64, 64, rngs=rngs), dropout(rngs)

    def __call__(self, x, **options):
        return x + self.last(self.linear(x), **options)


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs

    def __call__(self, x):
        return x + jax.random.normal(self.rngs.noise(), x.shape)


ON = {
    "Dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "Dropout with rate 0.1": lambda rngs: nnx.Dropout(0.1, deterministic=None, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nnx.MultiHeadAttention(
        2, 64, dropout_rate=0.5, decode=False, rngs=rngs
    ),
}
OFF = {
    "rate 0": lambda rngs: nnx.Dropout(0.0, rngs=rngs),
    "deterministic": lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs),
    "unused": lambda rngs: nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), lambda x: x, Keep(rngs)),
}


class Keep(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs

    def __call__(self, x):
        return x


@pytest.mark.parametrize("name", ON)
def test_dropout_inside_a_stack_is_rejected(name):
    """Blocks get no key, so it would be off in training."""
    block = base.functional(lambda rngs: DropoutBlock(rngs, ON[name]))
    with pytest.raises(meshtrain.ConfigError, match=f"^model: last, a {name}.*stack.* rate 0"):
        base.stack(block, 2)


@pytest.mark.parametrize("name", OFF)
def test_dropout_that_is_off_may_be_inside_a_stack(name):
    block = base.functional(lambda rngs: DropoutBlock(rngs, OFF[name]))
    init, _ = base.stack(block, 2)
    layer = jax.tree.map(lambda leaf: leaf[0], init(jax.random.key(0)))
    assert block.bind(layer)(np.ones((2, 64), np.float32)).shape == (2, 64)


@pytest.mark.parametrize("build", [Noise, DropoutBlock])
def test_a_random_number_in_any_part_of_a_stack_is_an_error(build):
    """The embedding and the head of a stack get no key either."""
    part = base.functional(build)
    with pytest.raises(meshtrain.ConfigError, match="a layer of a stack draws from .*no random"):
        jax.eval_shape(lambda params, x: part.bind(params)(x), *shapes_of(part))
    jax.eval_shape(lambda params, x: part.bind(params, jax.random.key(0))(x), *shapes_of(part))


def shapes_of(part):
    x = jax.ShapeDtypeStruct((2, 64), np.float32)
    return jax.eval_shape(part.init, jax.random.key(0)), x


def test_dropout_is_off_in_evaluation_whatever_its_caller_says():
    for options in ({"deterministic": False}, {"rngs": nnx.Rngs(0), "deterministic": False}):
        part = base.functional(DropoutBlock)
        params = part.init(jax.random.key(0))
        x = np.ones((2, 64), np.float32)
        expected = x + part.bind(params, None).linear(x)
        np.testing.assert_array_equal(part.bind(params, None)(x, **options), expected)


def test_layers_that_a_module_stacks_itself_have_their_own_dropout_masks():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
            self.layers = make(rngs.split(2))

        def __call__(self, x):
            scan = nnx.scan(lambda carry, layer: (carry, layer(x)), in_axes=(nnx.Carry, 0))
            return scan(0, self.layers)[1]

    part = base.functional(Scanned)
    x = np.ones((64,), np.float32)
    one, two = part.bind({}, jax.random.key(0))(x)
    assert not np.array_equal(one, two) and {*one.tolist()} == {*two.tolist()} == {0.0, 2.0}
    np.testing.assert_array_equal(part.bind({}, None)(x), [x, x])


def test_a_linen_module_that_needs_another_random_stream_is_rejected():
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(10)(x) + jax.random.normal(self.make_rng("noise"), (1, 10))

    class Attention(linen.Module):
        @linen.compact
        def __call__(self, x):
            attention = linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=False)
            x = attention(x[:, None])
            return linen.Dense(10)(x[:, 0])

    batch = digits(train=True)[0]
    for module, key in ((Noisy(), jax.random.key(0)), (Attention(), None)):
        model = meshtrain.from_linen(module, classify, example=LINEN_INPUT)
        params = jax.eval_shape(model.init, jax.random.key(0))
        with pytest.raises(
            meshtrain.ConfigError, match="model: .* needs PRNG .*only the stream 'dropout'"
        ):
            jax.eval_shape(model.loss, params, batch, key)


def test_a_loss_function_that_returns_no_metrics_is_rejected():
    model = meshtrain.from_nnx(MLP, lambda module, batch: module(batch["image"]).sum())
    with pytest.raises(meshtrain.ConfigError, match="its loss returned .*meshtrain.weighted"):
        train(digits_config(), model=model, data=digits(train=True))


def test_a_users_language_model_trains_on_the_built_in_data():
    class Bigram(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(64, 64, rngs=rngs)

    def loss(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.table(batch.tokens), batch.targets
        )
        return meshtrain.weighted(losses, batch.weights)

    result = train(tiny_config(), model=meshtrain.from_nnx(Bigram, loss))
    assert result.step == 3 and result.eval_loss > 0


def test_a_model_with_running_state_is_rejected():
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.BatchNorm(use_running_average=False)(x)

    with pytest.raises(meshtrain.ConfigError, match="batch_stats.*LayerNorm"):
        meshtrain.from_linen(Normed(), classify, example=LINEN_INPUT)
    with pytest.raises(meshtrain.ConfigError, match="mean.*BatchStat.*LayerNorm"):
        meshtrain.from_nnx(lambda rngs: nnx.BatchNorm(4, rngs=rngs), classify)


@pytest.mark.slow
def test_evaluation_data_may_be_an_iterator_of_any_length():
    """Each evaluation uses the same batches, and none of them counts twice."""
    c = digits_config()
    c.train.steps, c.eval.every, c.eval.batches = 4, 2, 9
    evaluation = digits(train=True)[:3]
    run = partial(train, c, model=MODELS["nnx"](), data=digits(train=True))
    as_list, as_iterator = run(eval_data=evaluation), run(eval_data=iter(evaluation))
    c.eval.batches = 3
    assert as_list.eval_loss == as_iterator.eval_loss == run(eval_data=evaluation).eval_loss
    with pytest.raises(meshtrain.ConfigError, match="eval_data: it yields no batch"):
        run(eval_data=iter([]))
    c.eval.batches = 0
    assert run(eval_data=iter([])).eval_loss is None


@pytest.mark.slow
def test_an_iterator_of_evaluation_data_replaces_that_of_the_config():
    c = tiny_config()
    c.eval.update(every=1, batches=2)
    source = build(parse(c, num_devices=8)).heldout_data
    batches = [source.read(np.arange(16) + 16 * n) for n in range(2)]
    assert train(c, eval_data=iter(batches)).eval_loss == train(c).eval_loss


@pytest.mark.parametrize("name", ["tokens", "grad_norm", "step"])
def test_a_metric_named_as_one_of_every_row_is_rejected(name):
    def loss(model, batch):
        metrics = classify(model, batch)
        return meshtrain.weighted(metrics.loss[None], **{name: metrics.loss[None]})

    with pytest.raises(meshtrain.ConfigError, match=f"its loss returned a metric named '{name}'"):
        train(digits_config(), model=meshtrain.from_nnx(MLP, loss), data=digits(train=True))


def test_the_names_of_every_row_are_those_of_the_page():
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {*base.OWN_NAMES} <= documented
