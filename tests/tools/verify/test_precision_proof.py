"""The proof of low precision passes on correct layouts, and finds planted losses of precision."""

import inspect
import textwrap

import jax
import numpy as np
import pytest
from flax import nnx

import meshtrain
from meshtrain import grads, state, step
from meshtrain.data.source import Source
from meshtrain.models import layers, transformer
from meshtrain.ops import blockwise
from meshtrain.optim import base as optim
from meshtrain.pipeline import executor
from meshtrain.tools.verify import case, precision
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.laws import rounding as rounding_laws
from tests.lib.configs import LAYOUT, tiny_config

CUBE = LAYOUT | dict(masks=True)
DATA = LAYOUT | dict(data=8, fsdp=1, tensor=1, remat="none", masks=True)
ONE_BATCH = DATA | dict(num_microbatches=1)
PIPELINE = CUBE | dict(pipeline=2, fsdp=1, schedule="1f1b", num_chunks=1, keep="residuals")
PIPELINE |= dict(remat="none", packing=True)
BLOCKWISE = ONE_BATCH | dict(data=4, tensor=2, attention_impl="blockwise")


@pytest.fixture(scope="module")
def subject():
    c = tiny_config()
    c.model.update(tie_embeddings=True, qkv_bias=True)
    with jax.enable_x64(True):
        subject = VerifyCase(c, None, None, keep_sizes=True)
        for dtype in ("bfloat16", "float16"):  # cached, before any bug is planted
            precision.expect(subject, dtype, False)
        yield subject


def program_of(subject, row):
    """Returns the program, with the attention implementation of the row."""
    if "attention_impl" in row:
        section = {key: value for key, value in subject.raw["model"].items() if key != "build"}
        subject.model = transformer.build(**section | {"attention_impl": row["attention_impl"]})
    return case.program_of(subject, row)


def check(subject, row, dtype):
    return precision.check_layout(subject, row, dtype, program_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        (CUBE, "bfloat16"),
        (PIPELINE, "float16"),
        pytest.param(PIPELINE, "bfloat16", marks=pytest.mark.slow),
        pytest.param(BLOCKWISE, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ONE_BATCH, "float16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_correct_layout_passes(subject, row, dtype):
    result = check(subject, row, dtype)
    assert result.fault is None and result.row["dtype"] == dtype
    assert result.differences.keys() == {"loss", "gradients"}
    # Far from the limit, so that it does not depend on the machine.
    assert result.differences["gradients"] < 1.3


# ---- planted bugs ----


def changed(function, old, new):
    """Returns a function of the package with a part of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source
    names = {}
    exec(
        "from __future__ import annotations\n" + source.replace(old, new),
        function.__globals__,
        names,
    )
    return names[function.__name__]


def new_attention():
    """Returns the blockwise attention as a new function: jax caches the traces of the original."""
    attention = jax.custom_vjp(lambda *args: blockwise._forward(*args)[0], nondiff_argnums=(0, 1))
    attention.defvjp(lambda *args: blockwise._forward(*args), blockwise._backward)
    return attention


MUTANTS = {}


def mutant(row, dtype, expected):
    """Registers a planted bug, the layout that shows it, and how the fault begins."""

    def register(plant):
        MUTANTS[plant.__name__] = (plant, row, dtype, expected)
        return plant

    return register


PROMOTED = "jnp.promote_types({}.dtype, jnp.float32)"
DTYPE = "dtype: the trainer "  # the law of dtypes says it first


@mutant(DATA | dict(num_microbatches=6, data=1, fsdp=8), "bfloat16", DTYPE)
def micro_batches_are_added_in_bfloat16(patch):
    bug = changed(grads.accumulate, PROMOTED.format("g"), "g.dtype")
    patch.setattr(grads, "accumulate", bug)


@mutant(ONE_BATCH, "bfloat16", DTYPE)
def data_shards_are_added_in_bfloat16(patch):
    original = grads.synchronise

    def synchronise(sums, *args, **kwargs):
        sums = grads.to_compute_dtype(sums, "bfloat16")
        added, metrics, residual = original(sums, *args, **kwargs)
        return grads.to_compute_dtype(added, "float32"), metrics, residual

    patch.setattr(grads, "synchronise", synchronise)


@mutant(PIPELINE | dict(data=1, fsdp=2), "bfloat16", DTYPE)
def a_pipeline_adds_gradients_in_bfloat16(patch):
    bug = changed(executor._GradLoop.initial_carry, PROMOTED.format("leaf"), "leaf.dtype")
    patch.setattr(executor._GradLoop, "initial_carry", bug)


@mutant(BLOCKWISE, "bfloat16", "dtype: exp in bfloat16")
def softmax_in_bfloat16_on_one_path(patch):
    old = "jnp.exp(scores - new_max[..., None])"
    new = "jnp.exp((scores - new_max[..., None]).astype(q.dtype)).astype(out.dtype)"
    patch.setattr(blockwise, "add_keys", changed(blockwise.add_keys, old, new))
    patch.setattr(blockwise, "_attention", new_attention())


@mutant(PIPELINE | dict(packing=False), "bfloat16", "gradients/")
def a_norm_in_bfloat16_on_one_path(patch):
    def call(self, x):
        normalized = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True, dtype=x.dtype))
        return normalized * self.scale[...][(None,) * (x.ndim - 1)].astype(x.dtype)

    patch.setattr(layers.nnx.RMSNorm, "__call__", call)


@mutant(CUBE, "bfloat16", "loss: ")
def the_loss_in_bfloat16_on_one_path(patch):
    patch.setattr(
        transformer,
        "cross_entropy",
        changed(transformer.cross_entropy, PROMOTED.format("logits_BSV"), "'bfloat16'"),
    )


@mutant(CUBE, "float16", "gradients/")
def parameters_cast_twice(patch):
    cast = grads.to_compute_dtype
    patch.setattr(
        grads, "to_compute_dtype", lambda params, dtype: cast(cast(params, "bfloat16"), dtype)
    )


@mutant(ONE_BATCH, "bfloat16", "update of ")
def parameters_in_bfloat16_are_updated(patch):
    bug = changed(
        step.make_train_step,
        "apply_updates(trained, updates)",
        "apply_updates(jax.tree.map(lambda p: p.astype('bfloat16').astype(p.dtype), trained), "
        "updates)",
    )
    patch.setattr(step, "make_train_step", bug)
    patch.setattr("meshtrain.program.make_train_step", bug)


@mutant(ONE_BATCH, "float16", "skip: ")
def a_skipped_step_changes_the_moments(patch):
    bug = changed(
        step._unless_skipped,
        "opt_state=opt_state",
        "opt_state=new.opt_state",
    )
    patch.setattr(step, "_unless_skipped", bug)


@mutant(ONE_BATCH, "float16", "skip: loss_scale")
def a_skipped_step_keeps_its_loss_scale(patch):
    bug = changed(state.LossScale.after, "1.0), 0.5)", "1.0), 1.0)")
    patch.setattr(state.LossScale, "after", bug)


DEFAULT = {"parameters_cast_twice"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in MUTANTS],
)
@pytest.mark.slow
def test_a_planted_bug_is_found(subject, name, monkeypatch, kill_table):
    plant, row, dtype, expected = MUTANTS[name]
    plant(monkeypatch)
    result = check(subject, row, dtype)
    kill_table[name] = result.fault
    assert result.fault is not None and result.fault.startswith(expected)


def test_stochastic_rounding_that_is_biased_or_correlated_is_found(monkeypatch):
    """The laws themselves hold: tests/test_precision.py."""
    bugs = {
        "not rounded to a neighbour": ("& jnp.uint32(0xFFFF0000)", ""),
        "standard errors off": (
            "_hash(_positions(x.shape) ^ seed) >> 16",
            "_hash(_positions(x.shape) ^ seed) >> 17",
        ),
        "sums of rows is": ("_positions(x.shape) ^ seed", "_positions(x.shape) // 24 ^ seed"),
    }
    original = optim.round_to
    for message, (old, new) in bugs.items():
        monkeypatch.setattr(optim, "round_to", changed(original, old, new))
        assert message in rounding_laws.stochastic_rounding()
    monkeypatch.setattr(optim, "round_to", original)
    one_seed = changed(optim.store_moments, "seeds[number]", "seeds[0]")
    monkeypatch.setattr(optim, "store_moments", one_seed)
    assert "errors of two arrays are correlated" in rounding_laws.stochastic_rounding()


@pytest.mark.slow
def test_a_users_own_model_that_is_not_a_language_model():
    def build(rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        return nnx.Linear(16, 32, rngs=rngs, kernel_init=named("embed", "mlp"))

    def loss(model, batch):
        return meshtrain.weighted((jax.nn.tanh(model(batch["x"])) ** 2).sum(-1))

    data = Source(lambda rows: {"x": np.random.default_rng(0).normal(size=(256, 16))[rows]})
    with jax.enable_x64(True):
        own = VerifyCase(tiny_config(), meshtrain.from_nnx(build, loss), data, keep_sizes=False)
        assert check(own, CUBE | dict(masks=False), "bfloat16").fault is None
