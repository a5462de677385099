"""Stacks of a user's own modules, NNX and Linen, and the example of the documentation."""

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


class LinenHead(linen.Module):
    @linen.compact
    def __call__(self, x, batch):
        x = meshtrain.dropout(x, batch, rate=0.25, site=0)
        return loss_of(linen.Dense(4)(x), batch)


PARTS = {
    "nnx": dict(embed=Embed, block=Block, head=Head),
    "linen": dict(embed=LinenEmbed(), block=LinenBlock(), head=LinenHead()),
}
EXAMPLE_BATCH = samples(np.arange(2))


def stack(kind, num_layers=4, **parts):
    parts = PARTS[kind] | parts
    return meshtrain.from_blocks(**parts, num_layers=num_layers, example=EXAMPLE_BATCH)


@pytest.mark.parametrize("kind", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_a_stack_of_own_modules_is_verified_in_a_pipeline(kind):
    row = dict(pipeline=2, data=2, tensor=2, zero_stage=3, num_microbatches=3, remat="full")
    row |= dict(schedule="interleaved", num_chunks=2, keep="inputs", dropout=True)
    row |= dict(packing=False, masks=False, sequence_parallel=False)
    with jax.enable_x64(True):
        own = case.VerifyCase(tiny_config(), stack(kind), Source(samples), keep_sizes=False)
        result = verify.check_layout(own, row)
    assert result.fault is None and result.differences["gradients"] < 1e-12


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
            lambda: stack("nnx", block=lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
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
