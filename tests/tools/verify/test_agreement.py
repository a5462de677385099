"""Models of users that one device computes in different ways: `verify` names the line first."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import meshtrain
from meshtrain.data.source import Source
from meshtrain.tools.verify import case, causes, verify
from tests.lib.configs import tiny_config

WIDTH, VOCAB, LENGTH = 8, 64, 16
SPLIT = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))


def samples(indices):
    x, y = np.random.default_rng(0).normal(size=(2, 256, WIDTH)).astype("f")
    return {"x": x[indices], "y": y[indices]}


def own_case(model, data=None):
    return case.VerifyCase(tiny_config(), model, data, keep_sizes=False)


def faults_of(model, data=None, without=()):
    with jax.enable_x64(True):
        subject = own_case(model, data)
        laws = verify.laws_of_the_model(subject, True)
        return verify._disagreements(subject, laws, list(without))


class Net(nnx.Module):
    """A net with one more operation."""

    def __init__(self, rngs, change, dtype=None):
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_init=SPLIT, dtype=dtype)
        self.change = change

    def __call__(self, x):
        return self.change(jnp.tanh(self.hidden(x)))


def errors_of(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


def net(change=lambda h: h, dtype=None, loss=None):
    sums = loss or (lambda model, batch: meshtrain.weighted(errors_of(model, batch)))
    return meshtrain.from_nnx(lambda rngs: Net(rngs, change, dtype), sums)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.Dense(WIDTH)(x)
        return linen.Dense(WIDTH, name="second")(h - h.mean(0, keepdims=True))


def linen_net():
    def loss(apply, batch):
        return meshtrain.weighted(((apply(batch["x"]) - batch["y"]) ** 2).sum(-1))

    return meshtrain.from_linen(LinenNet(), loss, example=np.zeros((2, WIDTH)))


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, grad: (x * grad,))


def centred(h):
    return h - h.mean(0, keepdims=True)


def random_with_a_fixed_key(h):
    return h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)


def mean_of_the_batch(model, batch):
    return meshtrain.Metrics(errors_of(model, batch).mean(), jnp.ones(()))


HERE = r"test_agreement.py:\d+ \("
WRONG = {
    "a cast": (
        lambda: net(lambda h: h.astype(jnp.float32)),
        rf"^float64: the model casts float64 to float32 at {HERE}<lambda>\), and layouts differ",
    ),
    "a layer's dtype": (
        lambda: net(dtype=jnp.bfloat16),
        rf"^float64: .* to bfloat16 at {HERE}Net.__call__\), in flax's Linear, and",
    ),
    "a cast in a checkpoint": (
        lambda: net(jax.checkpoint(lambda h: h.astype(jnp.float16) * 2)),
        "^float64: the model casts float64 to float16 at test_agreement",
    ),
    "statistics of the batch": (
        lambda: net(centred),
        rf"^rows: the result of a row depends on other rows of the batch, at {HERE}centred\) \(st",
    ),
    "statistics in jit": (
        lambda: net(jax.jit(centred)),
        rf"^rows: the result of a row depends on other rows of the batch, at {HERE}centred\)",
    ),
    "statistics in a loop": (
        lambda: net(lambda h: jax.lax.fori_loop(0, 2, lambda _, h: centred(h), h)),
        rf"^rows: the result of a row depends on other rows of the batch, at {HERE}",
    ),
    "a shift of the rows": (
        lambda: net(lambda h: h + jnp.roll(h, 1, 0)),
        rf"^rows: .* other rows of the batch, at {HERE}<lambda>\)",
    ),
    "a Linen module": (
        linen_net,
        rf"^rows: .* other rows of the batch, at {HERE}LinenNet.__call__\), in LinenNet \(",
    ),
    "a fixed key": (
        lambda: net(random_with_a_fixed_key),
        rf"^rows: .* on its place in the batch, at {HERE}random_with_a_fixed_key\): sums loss: .*, "
        r".* Use meshtrain.dropout",
    ),
    "a row's number": (
        lambda: net(lambda h: h * (1 + jnp.arange(len(h)))[:, None]),
        rf"^rows: .* on its place in the batch, at {HERE}<lambda>\)",
    ),
    "a mean of the batch": (
        lambda: net(loss=mean_of_the_batch),
        r"^rows: sums loss: [\d.]+ of all rows, [\d.]+ as the sum of two halves. The loss of a",
    ),
    "numbers from outside of jax": (
        lambda: net(lambda h: h * np.random.rand()),
        rf"^not deterministic: two traces of the loss differ at {HERE}<lambda>\)",
    ),
    "a callback": (
        lambda: net(
            lambda h: h + jax.pure_callback(np.random.rand, jax.ShapeDtypeStruct((), h.dtype))
        ),
        "^not deterministic: two calls of the loss",
    ),
    "a wrong custom_vjp": (
        lambda: net(lambda h: squared(h)),
        r"^gradient: hidden/\w+: directional derivative .* by central differences",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_the_cause_is_one_line(kind):
    make_model, line = WRONG[kind]
    faults = faults_of(make_model(), Source(samples))
    assert len(faults) == 1 and "\n" not in faults[0]
    assert re.search(line, faults[0]), faults[0]


def test_a_model_without_faults_has_none():
    assert faults_of(net(), Source(samples)) == []


def test_no_layouts_are_listed_if_one_device_disagrees_with_itself():
    lines = []
    certificate = verify.verify(
        tiny_config(), model=net(centred), data=Source(samples), log=lines.append
    )
    assert not certificate.passed and certificate.results == ()
    assert len(certificate.broken_laws) == 1
    assert lines[-2] == f"FAILED on one device: {certificate.broken_laws[0]}"
    assert lines[-1].endswith("layouts were not compared: one device disagrees with itself")
    assert "layouts: one device disagrees with itself" in certificate.not_covered[0]


# ---- documents in a row ----


class Embed(nnx.Module):
    def __init__(self, rngs, uses_positions=True):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.uses_positions = uses_positions

    def __call__(self, batch):
        x = self.table[batch.tokens]
        if self.uses_positions and batch.positions is not None:
            return x + self.positions[batch.positions]
        return x + self.positions[jnp.arange(LENGTH)][None]


class Block(nnx.Module):
    """Attention to earlier tokens of the document."""

    def __init__(self, rngs, uses_segments=True):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_init=SPLIT)
        self.uses_segments = uses_segments

    def __call__(self, x, batch):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
        if self.uses_segments and batch.segments is not None:
            mask &= batch.segments[:, :, None] == batch.segments[:, None]
        scores = jnp.where(mask, jnp.einsum("bsd,btd->bst", x, x), -1e30)
        return x + self.linear(jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), x))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, x, batch):
        logits = self.linear(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return meshtrain.weighted(losses, batch.weights)


def language_model(uses_positions=True, uses_segments=True, embed=Embed):
    return meshtrain.from_blocks(
        embed=functools.partial(embed, uses_positions=uses_positions),
        block=functools.partial(Block, uses_segments=uses_segments),
        head=Head,
        num_layers=2,
    )


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"uses_segments": False},
            r"^packing: the model ignores batch.segments; at test_agreement.py:\d+ "
            r"\(Block.__call__\), in layer 0 a document .* or pass --without=packing",
        ),
        ({"uses_positions": False}, "^packing: the model ignores batch.positions: the loss is"),
    ],
)
def test_a_model_that_ignores_fields_of_packed_rows(options, line):
    (fault,) = faults_of(language_model(**options))
    assert re.search(line, fault), fault


def test_packing_can_be_left_out():
    assert faults_of(language_model(uses_segments=False), without=["packing"]) == []


class NarrowEmbed(nnx.Module):
    """nnx.Embed has the dtype in which its table was made."""

    def __init__(self, rngs, uses_positions):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

    def __call__(self, batch):
        return self.table(batch.tokens)


def test_an_embedding_in_float32_is_named_before_the_blocks_reject_it():
    (fault,) = faults_of(language_model(embed=NarrowEmbed))
    assert "casts float64 to float32 at test_agreement.py:" in fault and "flax's Embed" in fault


def test_a_sum_in_float32_is_a_cause_if_it_shows():
    def loss(model, batch):
        errors = errors_of(model, batch)
        return meshtrain.Metrics(
            errors.sum() + (batch["y"] ** 2).sum(), jnp.ones_like(errors).sum()
        )

    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(lambda x: (x.sum() * 2.0).astype(float))(np.ones(3, "f"))
    assert causes.narrowing(jaxpr) is None
    assert causes.narrow_sum(jaxpr).startswith("adds up in float32 at test_agreement.py:")
    (fault,) = faults_of(net(loss=loss), Source(samples))
    assert fault.startswith("float64: the model adds up in float32 at test_agreement.py:")
