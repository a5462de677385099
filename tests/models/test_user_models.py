"""Train users' own Flax models on their own data."""

import jax
import numpy as np
import optax
import pytest
from conftest import tiny_config
from flax import linen, nnx
from sklearn.datasets import load_digits

import meshtrain
from meshtrain.models import base
from meshtrain.train import train


def digits(train):
    """Real 8 x 8 images of digits (1,797): the first 1,536 for training, the last 256 for evaluation."""
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
    assert [leaf.sharding.spec for leaf in sharded] == [jax.P("fsdp", "tensor")]
    assert "examples/s" in capsys.readouterr().out
    assert '"correct": 0.' in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_continues_its_iterable_where_it_stopped(tmp_path):
    def run(folder, steps):
        c = digits_config()
        c.optim.schedule, c.train.steps, c.eval.batches = "constant", steps, 0
        return train(c, workdir=tmp_path / folder, model=MODELS["nnx"](), data=digits(True))

    uninterrupted, _ = run("uninterrupted", 14), run("resumed", 5)
    resumed = run("resumed", 14)
    jax.tree.map(np.testing.assert_array_equal, resumed.state.params, uninterrupted.state.params)


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
