"""Splash attention: interpreted kernels against the formula, and its place in a sharded step.

Compiled for TPUs, each case in its own process: this file, run as `python tests/ops/test_splash.py
TARGET LAYOUT`, with PYTHONPATH=.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info
from jax.extend.core import jaxprs_in_params

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.ops import attention as attention_module
from meshtrain.ops import splash, splash_kernel
from meshtrain.ops.attention import attention
from meshtrain.parallel import accelerator, context, sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.program import assemble
from meshtrain.tools.audit import audit
from meshtrain.tools.hlo import target
from tests.lib.attention import B, formula
from tests.lib.compare import assert_same
from tests.lib.configs import packed
from tests.lib.paths import ROOT
from tests.lib.runs import Run, one_device

slow = pytest.mark.slow


# ---- the kernels, interpreted ----

# Sequence, heads, key/value heads, head dim, that of values, window, soft cap. The last block is
# padded, a window begins within a block, and blocks are skipped.
CASES = {
    "one block": (100, 2, 1, 8, 8, None, 0.0),
    "window, soft cap": (300, 4, 2, 16, 8, 150, 5.0),
    "two kernels": (300, 2, 2, 8, 8, 100, 0.0),
}


def make_inputs(length, num_heads, num_kv_heads, head_dim, value_dim, dtype=np.float32):
    rng = np.random.default_rng(0)
    dims = (
        (num_heads, head_dim),
        (num_kv_heads, head_dim),
        (num_kv_heads, value_dim),
        (num_heads, value_dim),
    )
    arrays = [rng.normal(size=(B, length, *dim)).astype(dtype) for dim in dims]
    return arrays, np.sort(rng.integers(0, 3, (B, length)), 1).astype(np.int32)


def run(compute, inputs):
    *qkv, weights = inputs

    def summed(*qkv):
        out = compute(*qkv)
        return (out * weights).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(summed, (0, 1, 2), has_aux=True))(*qkv)
    return out, *grads


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_equal_the_formula(case, monkeypatch):
    *shape, window, softcap = CASES[case]
    inputs, segments = make_inputs(*shape)
    monkeypatch.setattr(splash_kernel, "MAX_BLOCK", 128)
    if case == "two kernels":
        monkeypatch.setattr(splash_kernel, "MAX_FUSED_BLOCKS", 0)
    options = dict(window=window, softcap=softcap)
    fused = partial(attention, segments_BS=segments, implementation="splash", **options)
    found = run(fused, inputs)
    plain = partial(formula, segments=segments, scale=shape[3] ** -0.5, **options)
    for a, b in zip(found, run(plain, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_window_applies_to_local_layers_only(is_local, x64):
    inputs, segments = make_inputs(20, 4, 2, 8, 8, np.float64)

    def fused(q, k, v):
        local = jnp.array(is_local)
        return attention(q, k, v, segments, window=5, is_local=local, implementation="splash")

    plain = partial(formula, segments=segments, window=5 if is_local else None, scale=8**-0.5)
    for a, b in zip(run(fused, inputs), run(plain, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 24])
@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("block", [(2, 4), (4, 4), (8, 2)])
def test_the_kernels_visit_the_blocks_of_jaxs_own_mask(window, block, is_backward):
    process = info.process_mask_dkv if is_backward else info.process_mask
    own = masks.MultiHeadMask([splash_kernel.Band(24, window)])
    jaxs = masks.MultiHeadMask([masks.LocalMask((24, 24), (window - 1, 0), 0)])
    (found, sees), (expected, plain) = (process(mask, block) for mask in (own, jaxs))
    for name in ("data_next", "block_mask", "q_sequence", "mask_next", "partial_mask_blocks"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    query, key = np.ogrid[:24, :24]
    np.testing.assert_array_equal(sees(query, key), plain(query, key))


def test_masks_of_other_windows_are_not_mixed_up():
    """jax caches the blocks of a mask by equality."""
    assert splash_kernel.Band(24, 3) == splash_kernel.Band(24, 3)
    assert splash_kernel.Band(24, 3) != splash_kernel.Band(24, 4)
    assert splash_kernel.Band(24, 3) != splash_kernel.Band(48, 3)


@pytest.mark.parametrize("length", [128, 384, 4096, 4224, 4736, 16384, 131072])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256, 576])
def test_blocks_divide_the_sequence_and_fit_the_memory(length, head_dim):
    q = jax.ShapeDtypeStruct((1, 2, length, head_dim), jnp.bfloat16)
    sizes = splash_kernel._kernel(q, q, softcap=0.0, window=0).kwargs["block_sizes"]
    for size in (sizes.block_q, sizes.block_kv, sizes.block_q_dkv, sizes.block_kv_dkv):
        assert length % size == 0 and size % splash.LANES == 0
    assert sizes.block_kv_dkv * 2 * head_dim <= 2048 * 256 or sizes.block_kv_dkv <= 512
    # The fused kernel writes the gradient of the queries once for each block of keys.
    assert not sizes.use_fused_bwd_kernel or length // sizes.block_kv_dkv <= 4


# ---- in a step, in float64 ----

MIXED = {"attention": "lg", "window": 5}
# 4 heads, 2 key/value heads, which tensor=4 does not divide.
STEPS = [
    ({}, {"data": 2, "tensor": 4}, {}),
    ({}, {"pipeline": 2, "data": 2, "tensor": 2}, {"num_microbatches": 2, "remat": "full"}),
    pytest.param(MIXED, {"fsdp": 2, "context": 2, "tensor": 2}, {}, marks=slow),
    pytest.param(MIXED, {"pipeline": 2, "data": 2}, {"num_microbatches": 4}, marks=slow),
    pytest.param({}, {"context": 4}, {"remat": "names:attention"}, marks=slow),
]


@pytest.mark.parametrize(("model", "layout", "train"), STEPS, ids=str)
def test_a_step_equals_one_device(model, layout, train, x64):
    c = packed(attention_impl="splash", **model)
    c.train.update(train)
    c.context.method = "ulysses"
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


def count(jaxpr, kernel):
    """Returns how often a kernel is called in a jaxpr and those inside it."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "pallas_call" and kernel in equation.params["name"]
        found += sum(count(one, kernel) for one in jaxprs_in_params(equation.params))
    return found


@pytest.mark.parametrize(("remat", "num_forward"), [("full", 2), ("names:attention", 1)])
def test_what_is_named_attention_is_not_computed_again(remat, num_forward):
    c = packed(attention_impl="splash")
    c.train.update(remat=remat, dtype="bfloat16", num_microbatches=1)
    step = Run(c)
    with step.program.active():
        traced = jax.jit(step.program.train_step).trace(step.program.abstract_state, step.batch())
    assert count(traced.jaxpr.jaxpr, "splash_mha_dkv") == 1
    assert count(traced.jaxpr.jaxpr, "splash_mha_fwd") == num_forward


# ---- the choice ----


def choose(name, platform, monkeypatch, **changes):
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    shape = dict(
        seq_len=4096, head_dim=100, dtype="bfloat16", softcap=50.0, packed=True, dropout=False
    )
    return attention_module.choose_implementation(name, **shape | changes)


def test_auto_chooses_splash_on_tpus_only(monkeypatch):
    assert choose("auto", "tpu", monkeypatch) == ("splash", "splash")
    assert choose("splash", "cpu", monkeypatch, dtype="float64") == ("splash", "splash")
    assert choose("auto", "cpu", monkeypatch)[0] == "blockwise"
    assert choose("auto", "gpu", monkeypatch)[0] == "blockwise"  # the soft cap


@pytest.mark.parametrize(
    ("platform", "changes", "reason"),
    [
        ("gpu", {}, "it runs on TPUs only, and this is gpu"),
        ("tpu", {"dtype": "float16"}, "bfloat16 or float32, and train.dtype is float16"),
        ("tpu", {"dtype": "float64"}, "bfloat16 or float32, and train.dtype is float64"),
        ("tpu", {"dropout": True}, "it has no dropout, and model.dropout is more than 0"),
    ],
)
def test_what_splash_does_not_support_is_rejected_and_auto_falls_back(
    platform, changes, reason, monkeypatch
):
    with pytest.raises(ConfigError, match="model.attention_impl='splash'.*") as raised:
        choose("splash", platform, monkeypatch, **changes)
    assert reason in str(raised.value)
    if platform == "tpu":
        name, text = choose("auto", platform, monkeypatch, **changes)
        assert name == "blockwise" and text == f"blockwise; not splash: {splash_reason(changes)}"


def splash_reason(changes):
    return splash.why_not(changes.get("dtype", "bfloat16"), changes.get("dropout", False))


def test_ulysses_is_chosen_for_it_and_other_methods_are_rejected(monkeypatch):
    monkeypatch.setattr(accelerator, "platform", lambda: "tpu")
    mesh = make_mesh(devices=jax.devices()[:4], context=4)
    shapes = dict(seq_len=64, head_dim=8, dtype="bfloat16", softcap=0.0, packed=True, dropout=False)
    rules = parse(packed(), num_devices=1).rules
    with jax.set_mesh(mesh), sharding.use_rules(rules):
        with context.active_method("auto:gather"):
            heads = dict(num_heads=8, num_kv_heads=2)
            choice = attention_module.choose_for_context("auto", **heads, **shapes)
            assert choice == ("ulysses", "ulysses over 4 devices, splash")
            heads = dict(num_heads=6, num_kv_heads=2)
            assert attention_module.choose_for_context("auto", **heads, **shapes) == (
                "gather",
                "gather over 4 devices, blockwise; not splash: it computes whole sequences only",
            )
            with pytest.raises(ConfigError, match="attention_impl='splash': context.method='gath"):
                attention_module.choose_for_context("splash", **heads, **shapes)


# ---- compiled for TPUs ----

LAYOUTS = {
    "pipeline, data, tensor": ("v5e:4x4", {"pipeline": 2, "data": 2, "tensor": 4}),
    "ulysses": ("v5p:2x2x2", {"fsdp": 2, "context": 4}),
}


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_for_tpus_calls_the_kernels_once_a_pass(layout):
    name, _ = LAYOUTS[layout]
    try:
        target.parse(name)
    except ConfigError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, __file__, layout],
        cwd=ROOT,
        env={
            **os.environ,
            **target.SETTINGS,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, squares = json.loads(done.stdout.splitlines()[-1])
    forward, backward = (
        "splash_mha_fwd_segmented_residuals",
        "splash_mha_dkv_segmented_no_residuals",
    )
    assert {*kernels} == {forward, backward} and squares == []
    if layout == "ulysses":
        # Forward, and again in the backward pass, which keeps the inputs of layers alone. In a
        # pipeline several phases of the schedule call them.
        assert (kernels.count(forward), kernels.count(backward)) == (2, 1)


def main(layout):
    """Compiles a step; prints the kernels that it calls, and its arrays of S x S scores."""
    name, sizes = LAYOUTS[layout]
    target.prepare()  # jax is imported, but no backend has started
    devices = target.devices_of(name)
    c = packed(num_heads=8, num_kv_heads=2, d_model=512, head_dim=64, max_seq_len=640)
    c.mesh.update({"data": 1, **sizes})
    c.data.seq_len = 640
    c.train.update(dtype="bfloat16", remat="full", num_microbatches=2)
    cfg = parse(c, num_devices=len(devices))
    parts = build(cfg)
    program = assemble(cfg, parts, devices=devices)
    batch = audit._batch_like(cfg, program, parts.train_data)
    with program.active():
        text = program.compile(batch).as_text()
    kernels = re.findall(r"%(splash\w+?)[.\d]* = ", text)
    print(json.dumps([kernels, re.findall(r"\[[\d,]*640,640\]", text)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
