"""Models of users with what modules may hold: tables, masks, numbers, shared parts, names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import meshtrain
from meshtrain import grads as grad_functions
from meshtrain.errors import ConfigError
from meshtrain.models import lora, trees
from meshtrain.ops import dropout
from tests.lib.compare import assert_same
from tests.lib.configs import tiny_config
from tests.lib.runs import Run

NAMES = ("embed", "mlp")
SPLIT = nnx.with_partitioning(nnx.initializers.lecun_normal(), NAMES)
WIDTH, LENGTH, VOCAB, ROWS = 8, 5, 16, 16


def batches(num=4):
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    return [
        {"x": rng.integers(0, VOCAB, shape), "y": rng.integers(0, VOCAB, shape)} for _ in range(num)
    ]


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return meshtrain.weighted(losses.mean(-1))


class Mixer(nnx.Module):
    """A layer with a mask, a table of integers, and a parameter that is a Python number."""

    def __init__(self, rngs):
        self.gain = nnx.Param(0.5)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, kernel_init=SPLIT)
        self.mask = jnp.tril(jnp.ones((LENGTH, LENGTH)))
        self.order = np.roll(np.arange(WIDTH), 1)

    def __call__(self, x):
        return x + self.gain * self.linear((self.mask @ x)[..., self.order])


class Tables(nnx.Module):
    """Tables of jax and numpy, a list of them, a number, and a layer that is used twice."""

    def __init__(self, rngs):
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.layers = nnx.List([Mixer(rngs) for _ in range(2)])
        self.again = self.layers[0]
        self.waves = jnp.sin(jnp.arange(WIDTH))
        self.ranks = np.arange(WIDTH)
        self.features = jax.random.normal(rngs.params(), (WIDTH,))
        self.gains = nnx.List([jnp.ones(WIDTH), jnp.full(WIDTH, 2.0)])
        self.scale = 0.5

    def __call__(self, tokens):
        shift = self.waves + 0.1 * self.ranks + self.features
        gain = self.gains[0] * self.gains[1]
        x = self.scale * self.embedding[tokens] * gain[None, None] + shift[None, None]
        for layer in (*self.layers, self.again):
            x = layer(x)
        return x @ self.embedding.T


class Embedding(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.positions = jnp.cos(jnp.arange(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)

    def __call__(self, batch):
        return self.table[batch["x"]] + self.positions[None]


class Block(Mixer):
    def __call__(self, x, batch):
        return super().__call__(x)


class Head(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, VOCAB, rngs=rngs, kernel_init=SPLIT)
        self.allowed = jnp.where(jnp.arange(VOCAB) < VOCAB, 0.0, -jnp.inf)

    def __call__(self, x, batch):
        return cross_entropy(self.linear(x) + self.allowed[None, None], batch)


class Boxed(linen.Module):
    """A Linen module whose parameters are named by `with_partitioning`."""

    @linen.compact
    def __call__(self, tokens):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), NAMES)
        x = linen.Embed(VOCAB, WIDTH)(tokens) * self.param("gain", lambda key: 0.5)
        return linen.Dense(VOCAB, kernel_init=init)(linen.relu(x))


def boxed():
    def loss(apply, batch):
        return cross_entropy(apply(batch["x"]), batch)

    return meshtrain.from_linen(Boxed(), loss, example=np.zeros((1, LENGTH), np.int32))


def plain_module(build, params):
    """Returns a module as its constructor makes it, with other parameters."""
    with nnx.use_eager_sharding(False):
        module = build(nnx.Rngs(jax.random.key(0)))
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)
    return module


def plain_tables(params, batch):
    return cross_entropy(plain_module(Tables, params)(batch["x"]), batch)


def plain_blocks(params, batch, embed=Embedding, block=Block, head=Head):
    x = plain_module(embed, params["embed"])(batch)
    for number in range(NUM_LAYERS):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        x = plain_module(block, layer)(x, batch)
    return plain_module(head, params["head"])(x, batch)


def plain_boxed(params, batch):
    return cross_entropy(Boxed().apply({"params": params}, batch["x"]), batch)


NUM_LAYERS = 4


def tables():
    return meshtrain.from_nnx(Tables, lambda model, batch: cross_entropy(model(batch["x"]), batch))


def blocks():
    return meshtrain.from_blocks(embed=Embedding, block=Block, head=Head, num_layers=NUM_LAYERS)


# A model, and its loss by plain calls.
MODELS = {
    "tables": (tables, plain_tables),
    "blocks": (blocks, plain_blocks),
    "boxed": (boxed, plain_boxed),
}
MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 4, "expert": 2},
    {"data": 2, "pipeline": 2, "tensor": 2},
]


def config():
    c = tiny_config()
    c.train.global_batch, c.eval.batches = ROWS, 0
    c.optim.clip_norm = float("inf")
    return c


class MixedEmbedding(Embedding):
    """Returns activations of several kinds: numbers with a gradient, integers, bools."""

    def __call__(self, batch):
        x = super().__call__(batch)
        depth = jnp.zeros(len(x), jnp.int32)
        return {"x": x, "tokens": batch["x"], "is_even": batch["x"] % 2 == 0, "depth": depth}


class MixedBlock(Mixer):
    """Reads the integers and bools, and writes others for the next block."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.shift = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))

    def __call__(self, h, batch):
        x = super().__call__(h["x"]) + 0.1 * self.shift[h["tokens"]]
        x = jnp.where(h["is_even"][..., None], x, (1 + h["depth"][:, None, None]) * x)
        tokens = (h["tokens"] + 1 + x.argmax(-1)) % VOCAB
        depth = h["depth"] + 1
        return {"x": x, "tokens": tokens, "is_even": ~h["is_even"], "depth": depth}


class MixedHead(Head):
    def __call__(self, h, batch):
        scale = 1 + h["is_even"] + 0.1 * (h["depth"][:, None] + h["tokens"])
        return super().__call__(h["x"] * scale[..., None], batch)


def mixed():
    return meshtrain.from_blocks(
        embed=MixedEmbedding, block=MixedBlock, head=MixedHead, num_layers=NUM_LAYERS
    )


def plain_mixed(params, batch):
    return plain_blocks(params, batch, MixedEmbedding, MixedBlock, MixedHead)


MODELS["mixed"] = mixed, plain_mixed


class LinenEmbedding(linen.Module):
    @linen.compact
    def __call__(self, batch):
        return linen.Dense(WIDTH)(linen.Embed(VOCAB, WIDTH)(batch["x"]))


class LinenBlock(linen.Module):
    """A layer with attention, whose projections have kernels of three dims."""

    @linen.compact
    def __call__(self, x, batch):
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(x)
        init = linen.with_partitioning(linen.initializers.lecun_normal(), NAMES)
        return x + linen.Dense(WIDTH, kernel_init=init)(jnp.tanh(x))


class LinenHead(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        return cross_entropy(linen.Dense(VOCAB)(x), batch)


LINEN = {"embed": LinenEmbedding(), "block": LinenBlock(), "head": LinenHead()}


def linen_blocks():
    return meshtrain.from_blocks(**LINEN, num_layers=NUM_LAYERS, example=batches()[0])


def plain_linen_blocks(params, batch):
    x = LINEN["embed"].apply({"params": params["embed"]}, batch)
    for number in range(NUM_LAYERS):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        x = LINEN["block"].apply({"params": layer}, x, batch)
    return LINEN["head"].apply({"params": params["head"]}, x, batch)


MODELS["linen blocks"] = linen_blocks, plain_linen_blocks


@functools.cache
def plain_step(kind):
    """Returns loss and gradients of the first batch on one device, by plain calls."""
    make_model, loss = MODELS[kind]
    start = Run(config(), dtype="float64", model=make_model(), batches=batches()).start()
    params, batch = start.params, batches()[0]

    def mean_loss(params):
        metrics = loss(params, batch)
        return metrics.loss.sum() / metrics.weight.sum()

    return jax.device_get(jax.value_and_grad(mean_loss)(params))


STEPS = [(kind, mesh) for kind in MODELS for mesh in MESHES if "pipeline" not in mesh]
STEPS += [
    (kind, mesh)
    for kind in ("blocks", "mixed", "linen blocks")
    for mesh in MESHES
    if "pipeline" in mesh
]
FEW = [("mixed", MESHES[3])]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [pytest.param(*step, marks=[] if step in FEW else pytest.mark.slow) for step in STEPS],
    ids=str,
)
def test_a_step_on_a_mesh_equals_plain_calls_on_one_device(kind, mesh, x64):
    c = config()
    c.train.num_microbatches = mesh.get("pipeline", 1)
    run = Run(c, dtype="float64", model=MODELS[kind][0](), batches=batches(), **mesh)
    grads, _, scalars = run.one_step()
    expected_loss, expected_grads = plain_step(kind)
    np.testing.assert_allclose(scalars["loss"], expected_loss, rtol=1e-10)
    assert_same((grads,), (expected_grads,), rtol=1e-10)


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "keep"),
    [
        ("interleaved", 2, "residuals"),
        pytest.param("interleaved", 2, "inputs", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, "residuals", marks=pytest.mark.slow),
        pytest.param("gpipe", 1, "inputs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_activations_may_be_integers_and_bools_in_a_pipeline(schedule, num_chunks, keep, x64):
    c = config()
    c.train.num_microbatches = 4
    c.pipeline.update(schedule=schedule, num_chunks=num_chunks, keep=keep)
    run = Run(c, dtype="float64", model=mixed(), batches=batches(), pipeline=2, fsdp=2, tensor=2)
    grads, _, scalars = run.one_step()
    expected_loss, expected_grads = plain_step("mixed")
    np.testing.assert_allclose(scalars["loss"], expected_loss, rtol=1e-10)
    assert_same((grads,), (expected_grads,), rtol=1e-10)
    with run.program.active():
        sums = jax.jit(run.program.eval_step)(run.start().params, batches()[0])
    np.testing.assert_allclose(sums.loss / sums.weight, expected_loss, rtol=1e-10)


def test_a_constant_that_is_a_variable_is_rejected_with_the_way_out():
    class Masked(Tables):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.mask = nnx.Variable(jnp.ones(WIDTH))

    with pytest.raises(ConfigError, match="mask is a Variable.*for a constant a plain array"):
        meshtrain.from_nnx(Masked, lambda model, batch: None)


ADAPTED = {
    "tables": (2, MESHES[3]),
    "blocks": (2, MESHES[5]),
    "boxed": (1, MESHES[3]),
    "linen blocks": (7, MESHES[5]),
}
RANK, ALPHA = 2, 6.0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "blocks")) for kind in ADAPTED],
)
@pytest.mark.slow
def test_adapters_of_own_layers_equal_merged_kernels_by_plain_calls(kind, x64):
    num_layers, mesh = ADAPTED[kind]
    c = config()
    c.train.num_microbatches = mesh.get("pipeline", 1)
    c.adapter.update(rank=RANK, alpha=ALPHA, targets=("*",))
    make_model, loss = MODELS[kind]
    run = Run(c, dtype="float64", model=make_model(), batches=batches(), **mesh)
    start = run.start()
    params = shifted(start.params)
    params_on_host, batch = jax.device_get(params), batches()[0]
    with run.program.active():
        state, scalars = jax.jit(run.program.train_step)(start._replace(params=params), run.batch())
    found = jax.device_get(state.opt_state[0])

    def mean_loss(factors):
        metrics = loss(merged(params_on_host, factors), batch)
        return metrics.loss.sum() / metrics.weight.sum()

    factors = trees.matching(params_on_host, lambda path: "lora_" in path)
    expected_loss, expected_grads = jax.device_get(jax.value_and_grad(mean_loss)(factors))
    assert len(jax.tree.leaves(factors)) == 2 * num_layers
    np.testing.assert_allclose(scalars["loss"], expected_loss, rtol=1e-10)
    assert_same((found,), (expected_grads,), rtol=1e-10)


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.slow) for part in ("embed", "layers")] + ["head"],
)
@pytest.mark.slow
def test_dropout_of_adapters_in_all_parts_of_a_stack(part):
    targets = (f"{part}/*",)
    model = lora.lora(linen_blocks(), rank=RANK, alpha=ALPHA, targets=targets, dropout=0.5)
    params = shifted(model.init(jax.random.key(0)))
    loss = jax.jit(grad_functions.make_loss(model))
    keyed = dropout.with_row_keys(batches()[0], jax.random.key(0))
    without, found = (loss(params, batch, None).loss for batch in (batches()[0], keyed))
    assert abs(found - without) > 1e-3


@pytest.mark.slow
def test_dropout_of_adapters_of_own_layers_is_the_same_on_a_mesh(x64):
    steps = []
    for mesh in ({}, MESHES[5]):
        c = config()
        c.train.num_microbatches = mesh.get("pipeline", 1)
        c.adapter.update(rank=RANK, alpha=ALPHA, targets=("*",), dropout=0.3)
        model = linen_blocks()
        run = Run(c, dtype="float64", model=model, batches=batches(), **mesh)
        start = run.start()
        params = shifted(start.params)
        with run.program.active():
            step = jax.jit(run.program.train_step)
            state, scalars = step(start._replace(params=params), run.batch())
        steps.append(jax.device_get((state.opt_state[0], scalars["loss"])))
    assert_same(*steps, rtol=1e-10)


def shifted(params):
    """Returns the parameters plus numbers: at the start B is zero, and A has no gradient."""

    def shift(leaf):
        numbers = 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape)
        return jax.device_put(np.asarray(leaf) + numbers, leaf.sharding)

    return jax.tree.map(shift, params)


def merged(params, factors):
    """Returns the parameters without A and B, whose kernels have the products added."""
    if "lora_a" in factors:
        kernel, a, b = params["kernel"], factors["lora_a"], factors["lora_b"]
        # Layers that are stacked have their number first.
        stacked = a.ndim + b.ndim - 2 - kernel.ndim
        lead = a.shape[:stacked]
        product = a.reshape(*lead, -1, RANK) @ b.reshape(*lead, RANK, -1)
        kernel = kernel + ALPHA / RANK * product.reshape(kernel.shape)
        return {"kernel": kernel, **({"bias": params["bias"]} if "bias" in params else {})}
    return {
        name: merged(value, factors[name]) if name in factors else value
        for name, value in params.items()
    }


def with_parameter(value):
    """Returns a Model with a parameter `extra` in its layers."""

    class Extra(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.extra = nnx.Param(value)

        def __call__(self, x, batch):
            return super().__call__(x, batch) * jnp.where(self.extra[...] == 1, 1, 0)

    return meshtrain.from_blocks(embed=Embedding, block=Extra, head=Head, num_layers=NUM_LAYERS)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (1, "int32, .*; make it a plain array .* or a float"),
        (np.ones(1, bool), "bool, .*; make it a plain array .* or a float"),
        (np.ones(1, np.complex64), "complex64, .*; use two real arrays"),
    ],
    ids=["integer", "bool", "complex"],
)
def test_a_parameter_without_a_gradient_is_rejected_unless_it_is_frozen(value, fault):
    model = with_parameter(value)
    with pytest.raises(ConfigError, match=f"^model: parameter layers/extra is {fault}") as error:
        Run(config(), model=model, batches=batches())
    assert len(error.value.faults) == 1 and "\n" not in str(error.value)
    c = config()
    c.train.trainable = "embed/*,head/*,layers/linear/*"
    assert "extra" not in Run(c, model=model, batches=batches()).program.grad_shardings["layers"]


@pytest.mark.slow
def test_a_frozen_integer_is_a_constant_in_a_pipeline(x64):
    c = config()
    c.train.trainable, c.train.num_microbatches = "embed/*,head/*,layers/linear/*", 2
    model = with_parameter(1)
    run = Run(c, dtype="float64", model=model, batches=batches(), pipeline=2, data=2)
    grads, state, scalars = run.one_step()
    expected_loss, expected_grads = plain_step("blocks")
    np.testing.assert_allclose(scalars["loss"], expected_loss, rtol=1e-10)
    assert state.params["layers"]["extra"].tolist() == [1] * NUM_LAYERS
    del expected_grads["layers"]["gain"]
    assert_same((grads,), (expected_grads,), rtol=1e-10)
