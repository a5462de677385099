"""Stacks of a user's own modules, NNX and Linen, and the example of the documentation."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import meshtrain
from meshtrain.data.source import Source
from meshtrain.tools.verify import case, verify
from tests.lib.configs import tiny_config

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "own_model.py"


def samples(indices):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(256, 16)), random.integers(4, size=256)
    return {"x": x[indices], "y": y[indices]}


def loss_of(logits, batch):
    return meshtrain.weighted(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


class Embed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, batch):
        return self.linear(batch["x"])


class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)

    def __call__(self, x, batch):
        return x + meshtrain.dropout(jax.nn.tanh(self.linear(x)), batch, rate=0.25, site=0)


class Head(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, batch):
        return loss_of(self.linear(meshtrain.dropout(x, batch, rate=0.25, site=0)), batch)


class LinenEmbed(linen.Module):
    @linen.compact
    def __call__(self, batch):
        return linen.Dense(8)(batch["x"])


class LinenBlock(linen.Module):
    random: bool = False

    @linen.compact
    def __call__(self, x, batch):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        branch = jax.nn.tanh(linen.Dense(8, kernel_init=init)(x))
        if self.random:
            branch = linen.Dropout(0.5, deterministic=False)(branch)
        return x + meshtrain.dropout(branch, batch, rate=0.25, site=0)


class LinenFaulty(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        return linen.Dense(8)(batch["image"])


class LinenHead(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        x = meshtrain.dropout(x, batch, rate=0.25, site=0)
        return loss_of(linen.Dense(4)(x), batch)


class Sized(nnx.Module):
    """A module in the style of Flax's own: its sizes first, rngs by name."""

    def __init__(self, size, *, out=8, rngs):
        self.linear = nnx.Linear(size, out, rngs=rngs)

    def __call__(self, batch):
        return self.linear(batch["x"])


class Widened(Block):
    def __call__(self, x, batch):
        return jax.numpy.pad(x, ((0, 0), (0, 1)))


class Dropping(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Paired(Block):
    def __call__(self, x, batch):
        return x, batch["x"]


LINEN_INPUT = np.zeros((2, 8))


def linen_model(module=None, loss=loss_of, example=LINEN_INPUT):
    return meshtrain.from_linen(module or linen.Dense(8), loss, example=example)


PARTS = {
    "nnx": dict(embed=Embed, block=Block, head=Head),
    "linen": dict(embed=LinenEmbed(), block=LinenBlock(), head=LinenHead()),
}
EXAMPLE_BATCH = samples(np.arange(2))


def stack(kind, num_layers=4, **parts):
    parts = PARTS[kind] | parts
    return meshtrain.from_blocks(**parts, num_layers=num_layers, example=EXAMPLE_BATCH)


@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_stack_of_own_modules_is_verified_in_a_pipeline(kind):
    row = dict(pipeline=2, data=2, tensor=2, zero_stage=3, num_microbatches=3, remat="full")
    row |= dict(schedule="interleaved", num_chunks=2, keep="inputs", dropout=True)
    row |= dict(packing=False, masks=False, sequence_parallel=False)
    with jax.enable_x64(True):
        own = case.VerifyCase(tiny_config(), stack(kind), Source(samples), keep_sizes=False)
        result = verify.check_layout(own, row)
    assert result.fault is None and result.differences["gradients"] < 1e-12


def test_a_class_may_take_rngs_by_name():
    model = stack("nnx", embed=functools.partial(Sized, 16))
    assert model.embed(model.init(jax.random.key(0)), EXAMPLE_BATCH).shape == (2, 8)


def test_masks_differ_between_layers():
    model, x = stack("nnx"), np.ones((64, 8), np.float32)
    batch = {"row_keys": np.random.default_rng(0).integers(2**32, size=(64, 2), dtype=np.uint32)}
    shapes = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    layer = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    stacked = model.stack(layer)
    kept = [
        np.asarray(model.block(jax.tree.map(lambda leaf, n=n: leaf[n], stacked), x, batch)) > 1
        for n in range(4)
    ]
    assert len({one.tobytes() for one in kept}) == 4


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: stack("nnx", num_layers=0), "from_blocks: num_layers=0: use 1 or more"),
        (
            lambda: meshtrain.from_blocks(**PARTS["linen"], num_layers=2),
            "LinenEmbed is a Linen module, .*; pass example=BATCH",
        ),
        (
            lambda: stack("nnx", block=Dropping),
            r"Dropout with rate 0.5, is inside a stack: .*use meshtrain.dropout\(x, batch",
        ),
        (
            lambda: stack("nnx", block=lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
            "model state .* is a BatchStat: .*LayerNorm",
        ),
        (lambda: run(stack("linen", block=LinenBlock(True))), "LinenBlock draws random numbers"),
        (
            lambda: run(stack("nnx", head=Block)),
            "the head returned .*; return meshtrain.weighted",
        ),
        (
            lambda: run(stack("nnx", block=Widened)),
            r"^from_blocks: the block returned float32\[2, 9\] for x of float32\[2, 8\]; return",
        ),
        (
            lambda: run(stack("nnx", block=Paired)),
            r"^from_blocks: the block returned \('float32\[2, 8\]', .*\) for x of float32",
        ),
        (
            lambda: stack("nnx", block=Head(nnx.Rngs(0))),
            "^from_blocks: block is a Head that is made already; pass its class, or a function",
        ),
        (
            lambda: stack("nnx", head=lambda: Head(nnx.Rngs(0))),
            "^from_blocks: head: <lambda> has no parameter rngs; pass a function of rngs alone",
        ),
        (
            lambda: stack("nnx", embed=Block),
            r"^from_blocks: Block cannot be called as embed\(batch\): missing .*'batch'",
        ),
        (
            lambda: stack("linen", head=LinenEmbed()),
            r"^from_blocks: LinenEmbed cannot be called as head\(x, batch\): too many",
        ),
        (
            lambda: stack("linen", block=LinenBlock),
            r"^from_blocks: block is a class of Linen modules; pass a module: block=LinenBlock\(",
        ),
        (
            lambda: meshtrain.from_nnx(Sized(8, rngs=nnx.Rngs(0)), loss_of),
            "^from_nnx: build is a Sized that is made already; pass its class, or a function",
        ),
        (
            lambda: meshtrain.from_nnx(Sized, loss_of),
            r"^from_nnx: build: Sized also needs size; pass .*: lambda rngs: Sized\(size=..., rngs",
        ),
        (
            lambda: meshtrain.from_nnx(loss_of, Block),
            "^from_nnx: build: loss_of also needs batch; pass a function of rngs alone",
        ),
        (
            lambda: meshtrain.from_nnx(lambda rngs: None, loss_of),
            "^from_nnx: build: <lambda> returned a NoneType, which is no nnx.Module",
        ),
        (
            lambda: meshtrain.from_nnx("Block", loss_of),
            "^from_nnx: build is a str; pass a function rngs -> module",
        ),
        (
            lambda: meshtrain.from_nnx(Block, None),
            r"^from_nnx: loss is NoneType; pass a function loss\(module, batch\) that returns",
        ),
        (
            lambda: meshtrain.from_nnx(Block, lambda module: 0),
            r"^from_nnx: loss is <lambda>; pass a function loss\(module, batch\) that returns",
        ),
        (
            lambda: meshtrain.from_nnx(linen.Dense(8), loss_of),
            "^from_nnx: Dense is a Linen module; use meshtrain.from_linen",
        ),
        (
            lambda: linen_model(module=linen.Dense),
            r"^from_linen: module is Dense, .*; pass a module: Dense\(...\)",
        ),
        (
            lambda: linen_model(module=Block),
            "^from_linen: module is Block, which is no Linen module; use meshtrain.from_nnx",
        ),
        (
            lambda: linen_model(loss="mse"),
            r"^from_linen: loss is str; pass a function loss\(apply, batch\) that returns",
        ),
        (
            lambda: linen_model(example=EXAMPLE_BATCH),
            r"^from_linen: example: Dense cannot be called with {.*}: .*, such as batch\['x'\]",
        ),
        (
            lambda: linen_model(example=meshtrain.Batch(*[np.zeros((2, 8))] * 3)),
            r"^from_linen: example: Dense cannot be called with Batch\(.*, such as batch.tokens",
        ),
        (
            lambda: linen_model(module=linen.Embed(8, 8)),
            r"^from_linen: example: Embed cannot be called with float\d+\[2, 8\]: ValueError: "
            r"Input type must be an integer.*; pass inputs like those",
        ),
        (
            lambda: linen_model(module=LinenBlock()),
            r"LinenBlock cannot be called with float\d+\[2, 8\]: TypeError: .*__call__",
        ),
        (
            lambda: stack("linen", block=LinenFaulty()),
            r"^from_blocks: LinenFaulty cannot .*KeyError: 'image' \(test_own_model.py:\d+\); exam",
        ),
        (lambda: linen_model(example="x"), "^from_linen: example=str: pass an array like the inp"),
        (lambda: linen_model(example=None), "^from_linen: example=NoneType: pass an array like"),
    ],
)
def test_a_mistake_is_one_line(build, error):
    with pytest.raises(meshtrain.ConfigError, match=error) as found:
        build()
    assert str(found.value).count("\n") == 0


def run(model):
    def loss(params, batch):
        x = model.embed(params, batch)
        layer = jax.tree.map(lambda leaf: leaf[0], model.stack(params["layers"]))
        return model.head(params, model.block(layer, x, batch), batch)

    return jax.eval_shape(loss, jax.eval_shape(model.init, jax.random.key(0)), EXAMPLE_BATCH)


def command(folder, *arguments):
    shutil.copy(EXAMPLE, folder)
    environ = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[2])}
    flags = ["--config=own_model.py", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "meshtrain", *flags[1:2], flags[0], *flags[2:]],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_example_trains_through_a_pipeline_outside_of_the_repository(tmp_path):
    flags = ["--simulate_devices=2", "--config.mesh.pipeline=2", "--config.train.steps=30"]
    done = command(tmp_path, "train", "--workdir=runs/vit", *flags)
    assert done.returncode == 0, done.stderr
    assert "1f1b, 2 stages" in done.stdout and "done: 30 steps · held-out loss " in done.stdout


@pytest.mark.slow
def test_the_example_passes_verify_and_imports_nothing_private(tmp_path):
    text = EXAMPLE.read_text()
    used = {name for name in meshtrain.__all__ if f"meshtrain.{name}" in text}
    assert used >= {"from_blocks", "dropout", "weighted", "Source"} and "._" not in text
    done = command(tmp_path, "verify", "--quick", "--simulate_devices=4", "--output=certificate")
    assert done.returncode == 0 and "all equal to one device" in done.stdout, done.stdout
