"""A model of one's own, on every mesh: a vision transformer on scikit-learn's digits.

It is the ViT of arXiv 2010.11929.

  meshtrain train --config=own_model.py --workdir=runs/vit --simulate_devices=4 \\
      --config.mesh.pipeline=2
  meshtrain verify --config=own_model.py --simulate_devices=8 --quick

The modules are ordinary Flax modules. Only names of dims say that they will be sharded:
`config.rules` map the names to axes of the mesh. Nothing here knows of pipelines, remat or
micro-batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meshtrain
from meshtrain.configs import default

# B images, P = 16 patches of 2 x 2 pixels, D width, H heads, K head dim
NUM_CLASSES, PATCH, NUM_PATCHES = 10, 2, 16


def linear(rngs, dims_in, dims_out, names):
    """Returns a linear layer whose kernel has these names of its dims."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    axis = tuple(range(-len(dims_in), 0))
    return nnx.LinearGeneral(
        dims_in, dims_out, axis=axis, kernel_init=init, use_bias=False, rngs=rngs
    )


class Patches(nnx.Module):
    def __init__(self, width, dropout, rngs):
        self.project = linear(rngs, (PATCH * PATCH,), (width,), (None, "embed"))
        self.positions = nnx.Param(0.02 * rngs.params.normal((NUM_PATCHES, width)))
        self.dropout = dropout

    def __call__(self, batch):
        image = batch["image"].reshape(-1, 4, PATCH, 4, PATCH)
        patches_BPp = image.transpose(0, 1, 3, 2, 4).reshape(-1, NUM_PATCHES, PATCH * PATCH)
        x_BPD = self.project(patches_BPp) + self.positions[...][None]
        return meshtrain.dropout(x_BPD, batch, rate=self.dropout, site=0)


class Block(nnx.Module):
    """Pre-norm layer whose attention sees all patches."""

    def __init__(self, width, num_heads, dropout, rngs):
        heads = num_heads, width // num_heads
        self.attention_norm, self.mlp_norm = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.qkv = linear(rngs, (width,), (3, *heads), ("embed", None, "heads", "head_dim"))
        self.out = linear(rngs, heads, (width,), ("heads", "head_dim", "embed"))
        self.up = linear(rngs, (width,), (4 * width,), ("embed", "mlp"))
        self.down = linear(rngs, (4 * width,), (width,), ("mlp", "embed"))
        self.dropout = dropout

    def __call__(self, x_BPD, batch):
        # Each call of dropout in a block has a number of its own.
        branch_BPD = self.attention(self.attention_norm(x_BPD))
        x_BPD += meshtrain.dropout(branch_BPD, batch, rate=self.dropout, site=0)
        branch_BPD = self.down(jax.nn.gelu(self.up(self.mlp_norm(x_BPD))))
        return x_BPD + meshtrain.dropout(branch_BPD, batch, rate=self.dropout, site=1)

    def attention(self, x_BPD):
        q_BPHK, k_BPHK, v_BPHK = jnp.moveaxis(self.qkv(x_BPD), 2, 0)
        scores_BHPQ = jnp.einsum("bphk,bqhk->bhpq", q_BPHK, k_BPHK) * q_BPHK.shape[-1] ** -0.5
        return self.out(jnp.einsum("bhpq,bqhk->bphk", jax.nn.softmax(scores_BHPQ), v_BPHK))


class Head(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.classes = linear(rngs, (width,), (NUM_CLASSES,), ("embed", None))

    def __call__(self, x_BPD, batch):
        logits = self.classes(self.norm(x_BPD).mean(1))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        # Sums: the trainer divides once, by the weight of the global batch.
        correct = (logits.argmax(-1) == batch["label"]).astype(losses.dtype)
        return meshtrain.weighted(losses, correct=correct)


def build(*, num_layers, width, num_heads, dropout) -> meshtrain.Model:
    """Returns the model of section `model` of the config below."""
    return meshtrain.from_blocks(
        embed=lambda rngs: Patches(width, dropout, rngs),
        block=lambda rngs: Block(width, num_heads, dropout, rngs),
        head=lambda rngs: Head(width, rngs),
        num_layers=num_layers,
    )


def digits(*, seed, split) -> meshtrain.Source:
    """Returns 1,536 images for training, in another order in each epoch, and 256 for evaluation."""
    images, labels = load_digits(return_X_y=True)
    rows = slice(0, 1536) if split == "train" else slice(-256, None)
    images, labels = (images[rows] / 16).astype(np.float32), labels[rows].astype(np.int32)
    size = len(labels)

    def read(indices):  # a function of the global sample numbers alone, so that a run can resume
        epochs = {
            n: np.random.default_rng([seed, n]).permutation(size) for n in {*(indices // size)}
        }
        rows = [epochs[index // size][index % size] for index in indices]
        return {"image": images[rows], "label": labels[rows]}

    return meshtrain.Source(read, description="8 x 8 images of digits", size=size)


def get_config():
    config = default.get_config()
    config.model = dict(build="own_model:build", num_layers=4, width=32, num_heads=4, dropout=0.1)
    config.data = dict(build="own_model:digits", seed=0)
    config.train.update(steps=200, global_batch=128, num_microbatches=4, log_every=50)
    config.optim.update(learning_rate=3e-3, warmup_steps=20)
    config.eval.batches = 2
    return config
