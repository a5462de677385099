"""Attention against its formula, causality, the code of documents, the choice of implementation."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.ops import attention as attention_module
from meshtrain.ops import blockwise, cudnn
from meshtrain.ops.attention import attention
from meshtrain.parallel import accelerator
from tests.lib.attention import CUDNN_CASES, B, K, S, check_cudnn, formula
from tests.lib.configs import packed
from tests.lib.runs import Run

SEGMENTS = np.int32([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])


def inputs(num_heads, num_kv_heads):
    rng = np.random.default_rng(0)
    heads = num_heads, num_kv_heads, num_kv_heads
    return [rng.normal(size=(B, S, h, K)).astype(np.float32) for h in heads]


def visibility(segments):
    """(B, S, S) bool: whether position s sees position t."""
    causal = np.broadcast_to(np.tril(np.ones((S, S), bool)), (B, S, S))
    return causal if segments is None else causal & (segments[:, :, None] == segments[:, None, :])


def numpy_attention(q, k, v, segments):
    scores = np.einsum("bshk,bthk->bhst", q, k) / np.sqrt(K)
    p = np.exp(scores - scores.max()) * visibility(segments)[:, None]
    return np.einsum("bhst,bthk->bshk", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one segment", "segments"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_is_softmax_over_repeated_key_value_heads(num_kv_heads, segments):
    q, k, v = inputs(4, num_kv_heads)
    repeated = [np.repeat(x, 4 // num_kv_heads, axis=2) for x in (k, v)]
    np.testing.assert_allclose(
        attention(q, k, v, segments),
        numpy_attention(q, *repeated, segments),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float64", 1e-12)])
def test_large_scores_are_computed_in_float32_or_wider(dtype, tolerance):
    rng = np.random.default_rng(0)
    q = np.full((B, S, 1, K), 8.0)
    k = -8 - rng.integers(0, 4, (B, S, 1, K)) / 16  # scores of -128 to -131, in steps of 1/4
    v = rng.integers(-4, 5, (B, S, 1, K)) / 4
    with jax.enable_x64(True):
        out = attention(*(jnp.array(x, dtype) for x in (q, k, v)), None)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.float64(out), numpy_attention(q, k, v, None), atol=tolerance)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_products_and_kept_scores_are_in_the_compute_dtype(softcap):
    """In float32 they would be right too, but slower, and twice as large."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(4, 2))
    step = jax.jit(jax.grad(lambda *qkv: attention(*qkv, None, softcap=softcap).sum(), (0, 1, 2)))
    products = re.findall(r"dot_general.*: \((.*)\) ->", step.lower(q, k, v).as_text())
    assert len(products) == 6
    assert not [types for types in products if "f32" in types]
    _, vjp = jax.vjp(lambda *qkv: attention(*qkv, None, softcap=softcap), q, k, v)
    scores = [leaf for leaf in jax.tree.leaves(vjp) if leaf.ndim and leaf.size == B * 4 * S * S]
    assert len(scores) == (2 if softcap else 1)
    assert {leaf.dtype for leaf in scores} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one segment", "segments"])
def test_gradients_are_zero_at_positions_that_a_query_must_not_see(segments):
    def summed(q, k, v):
        return attention(q, k, v, segments).sum((0, 2))  # (S, K); rows of a batch are independent

    jacobians = jax.jit(jax.jacrev(summed, argnums=(0, 1, 2)))(*inputs(2, 1))
    # Dims: S and K of the output, then B, S, H, K of the input. Keep the maximum of each pair of
    # positions.
    grad_q, grad_k, grad_v = (
        np.moveaxis(np.abs(jacobian).max((1, 4, 5)), 0, 1) for jacobian in jacobians
    )
    np.testing.assert_array_equal(grad_v > 0, visibility(segments))
    assert not grad_k[~visibility(segments)].any()
    assert not grad_q[:, ~np.eye(S, dtype=bool)].any()


def test_attention_within_a_segment_equals_attention_of_the_segment_alone():
    q, k, v = inputs(2, 1)
    segments = np.int32([[0, 0, 0, 1, 1, 1]] * B)
    out = attention(q, k, v, segments)
    for part in np.s_[:, :3], np.s_[:, 3:]:
        alone = attention(q[part], k[part], v[part], None)
        np.testing.assert_allclose(out[part], alone, rtol=1e-5, atol=1e-6)


# ---- xla and blockwise, against autodiff of the formula ----


CASES = {  # sequence, block, options; the last block is padded, and windows begin within blocks
    "causal": (13, 4, {}),
    "segments": (13, 4, {"segments": True}),
    "window": (13, 4, {"window": 3, "segments": True}),
    "window of one": (13, 4, {"window": 1}),
    "soft cap": (13, 4, {"softcap": 1.5, "scale": 0.7}),
    "one block": (5, 8, {"segments": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "num_kv_heads",
    [pytest.param(4, marks=pytest.mark.slow), 2, pytest.param(1, marks=pytest.mark.slow)],
)
def test_results_and_gradients_of_blocks_equal_the_formula(case, num_kv_heads):
    length, block, options = CASES[case]
    options = dict(options)
    rng = np.random.default_rng(0)
    shapes = [(B, length, heads, K) for heads in (4, num_kv_heads, num_kv_heads, 4)]
    *inputs, weights = (rng.normal(size=shape) for shape in shapes)
    segments = np.sort(rng.integers(0, 3, (B, length)), 1) if options.pop("segments", 0) else None
    window = options.pop("window", None)

    def run(compute, window=window):
        def summed(q, k, v):
            out = compute(q, k, v, segments, window=window, **options)
            return (out * weights).sum(), out

        (_, out), grads = jax.jit(jax.value_and_grad(summed, (0, 1, 2), has_aux=True))(*inputs)
        return out, *grads

    with jax.enable_x64(True):
        expected, found = run(formula), []
        for name in ("xla", "blockwise"):
            compute = partial(attention, implementation=f"{name}:{block}")
            found.append(run(compute))
            if window:  # traced, as with alternating local and global layers
                found.append(jax.jit(partial(run, compute))(window))
    for result in found:
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["xla", "blockwise:4"])
def test_a_window_applies_to_local_layers_only(name):
    run = jax.jit(partial(attention, implementation=name, window=2))
    with jax.enable_x64(True):
        args = [*(np.float64(x) for x in inputs(2, 1)), SEGMENTS]
        for is_local, window in ((True, 2), (False, None)):
            found = run(*args, is_local=is_local)
            np.testing.assert_allclose(found, formula(*args, window=window), rtol=1e-12)


def test_blockwise_attention_with_a_cache_equals_xla():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, 2, K)) for n in (3, 21, 21))
    segments = np.zeros((B, 3), int), np.int32([[1] * 4 + [0] * 17, [0] * 21])
    with jax.enable_x64(True):
        options = dict(start=jnp.int32(15), scale=0.4, softcap=0.0, window=9)
        found = blockwise.attention(q, k, v, *segments, block=4, **options)
        expected = attention(q, k, v, *segments, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# ---- the code of documents ----


# Neighbours whose numbers differ in one digit; negative and repeated numbers, and documents that
# return
NUMBERS = np.int32(
    [[0, 0, 1, 1, 3, 3, 3, 2, 7, 7, 7], [5, -6, -6, 5, 5, 2**31 - 1, 5, -(2**31), 9, 9, 8]]
)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_the_code_of_documents_replaces_the_mask(num_kv_heads, window):
    rng = np.random.default_rng(0)
    shapes = [(B, NUMBERS.shape[1], heads, K) for heads in (4, num_kv_heads, num_kv_heads, 4)]
    *inputs, weights = (rng.normal(size=shape) for shape in shapes)

    def coded(q, k, v, segments, **options):
        qkv = cudnn.append_segment_dims(q, k, v, segments, K**-0.5)
        return attention(*qkv, None, scale=K**-0.5, **options)[..., :K]

    def run(compute):
        def summed(q, k, v):
            out = compute(q, k, v, NUMBERS, window=window)
            return (out * weights).sum(), out

        (_, out), grads = jax.value_and_grad(summed, (0, 1, 2), has_aux=True)(*inputs)
        return out, *grads

    with jax.enable_x64(True):
        for a, b in zip(run(coded), run(formula), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)
    in_float32 = coded(*(np.float32(x) for x in inputs), NUMBERS, window=window)
    np.testing.assert_allclose(in_float32, formula(*inputs, NUMBERS, window=window), atol=3e-3)


@pytest.mark.slow
def test_each_token_of_a_row_may_be_a_document():
    q, k, v = (np.random.default_rng(0).normal(size=(1, 300, 1, 8)).astype("f") for _ in range(3))
    coded = cudnn.append_segment_dims(q, k, v, np.arange(300)[None], 8**-0.5)
    np.testing.assert_allclose(attention(*coded, None, scale=8**-0.5)[..., :8], v, rtol=1e-6)


def test_keys_of_other_documents_have_no_weight_even_if_their_scores_are_400_higher():
    q, k, v = (np.ones((1, 4, 1, 8), np.float32) for _ in range(3))
    k[:, :2], v[:, :2] = 1 + 400 / 8**0.5, 1e30
    segments = np.int32([[6, 6, 7, 7]])
    out = attention(*cudnn.append_segment_dims(q, k, v, segments, 8**-0.5), None, scale=8**-0.5)
    np.testing.assert_array_equal(out[:, 2:, :, :8], 1)


@pytest.mark.parametrize(
    "name", ["flash", "xla:", "xla:0", "blockwise:-1", "blockwise:x", "cudnn:64"]
)
def test_an_unknown_implementation_or_block_size_is_rejected(name):
    with pytest.raises(ConfigError, match=f"model.attention_impl='{name}': use"):
        build_model(parse(packed(attention_impl=name)))


def test_memory_of_blockwise_attention_is_linear_in_the_sequence():
    def peak(length, implementation):
        def summed(x):
            return attention(x, x, x, None, implementation=implementation).sum()

        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        return jax.jit(jax.grad(summed)).lower(x).compile().memory_analysis().temp_size_in_bytes

    at_2k, at_8k = peak(2048, "blockwise"), peak(8192, "blockwise")
    assert at_8k < 6 * at_2k
    assert at_8k < peak(8192, "xla") / 20


# ---- the choice of implementation ----


def choice(name="auto", platform="gpu", capability="9.0", monkeypatch=None, **changes):
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    monkeypatch.setattr(cudnn, "capability_of_target", lambda: capability)
    shape = dict(
        seq_len=1024, head_dim=64, dtype="bfloat16", softcap=0.0, packed=False, dropout=False
    )
    return attention_module.choose_implementation(name, **shape | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu", "capability": ""}, "it runs on NVIDIA GPUs only, and this is cpu"),
        ({"dropout": True}, "its masks differ between layouts, and model.dropout is more than 0"),
        ({"capability": "gfx90a"}, "it runs on NVIDIA GPUs only, and this is gfx90a"),
        ({"dtype": "float32"}, "bfloat16 or float16, and train.dtype is float32"),
        ({"softcap": 50.0}, "model.attention_softcap is 50.0"),
        ({"sinks": True}, "it does not support model.attention_sinks"),
        ({"capability": "7.0"}, "it needs compute capability 8.0 or later, and this GPU has 7.0"),
        ({"head_dim": 100}, "the head dim is 100"),
        ({"head_dim": 512}, "up to 256 on this GPU, in multiples of 8, and the head dim is 512"),
        ({"head_dim": 256, "capability": "8.6"}, "up to 128 on this GPU, in multiples of 8, and"),
        ({"head_dim": 256, "capability": "10.0"}, "up to 128 on this GPU, in multiples of 8, and"),
        (
            {"head_dim": 128, "capability": "8.0", "packed": True},
            "128, and packed rows need 8 more",
        ),
        ({"head_dim": 256, "packed": True}, "the head dim is 256, and packed rows need 8 more"),
    ],
)
def test_without_cudnn_support_cudnn_is_rejected_and_auto_falls_back(changes, reason, monkeypatch):
    with pytest.raises(ConfigError, match="model.attention_impl='cudnn'.*") as raised:
        choice("cudnn", monkeypatch=monkeypatch, **changes)
    assert reason in str(raised.value)
    for seq_len, expected in ((2048, "xla"), (2049, "blockwise")):
        name, text = choice(monkeypatch=monkeypatch, seq_len=seq_len, **changes)
        assert name == expected
        assert text.startswith(f"{expected}; not cudnn: ") and reason in text


def test_auto_chooses_cudnn_if_it_is_supported(monkeypatch):
    assert choice(monkeypatch=monkeypatch) == ("cudnn", "cudnn")
    assert choice(monkeypatch=monkeypatch, head_dim=256) == ("cudnn", "cudnn")
    assert choice(monkeypatch=monkeypatch, head_dim=128, packed=True) == ("cudnn", "cudnn")
    for capability in ("8.0", "10.0"):
        options = dict(capability=capability, monkeypatch=monkeypatch)
        assert choice(**options, head_dim=120, packed=True) == ("cudnn", "cudnn")
    assert choice("xla", monkeypatch=monkeypatch) == ("xla", "xla")


@pytest.mark.parametrize(
    ("kind", "capability"),
    [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA B200", "10.0"), ("TPU v5p", ""), ("cpu", "")],
)
def test_the_capability_is_that_of_the_devices_of_the_mesh(kind, capability):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert cudnn.capability_of_target() == capability


@pytest.mark.parametrize("name", ["auto", "xla", "blockwise", "cudnn"])
def test_long_prompts_use_blockwise_attention(name):
    is_auto = name not in ("xla", "blockwise")
    assert attention_module.choose_for_generation(name, 1, 4096) == "xla"
    assert attention_module.choose_for_generation(name, 9, 4096) == (
        "blockwise" if is_auto else name
    )
    assert attention_module.choose_for_generation(name, 9, 2048) == ("xla" if is_auto else name)
    blocks = {"xla:4": "xla", "blockwise:4": "blockwise:4"}.get(f"{name}:4")
    assert is_auto or attention_module.choose_for_generation(f"{name}:4", 9, 2048) == blocks


# ---- cuDNN, lowered for a simulated GPU ----


def squares(text, length):
    """The arrays of a lowered program whose last two dims have this length."""
    return re.findall(rf"<(?:\d+x)*{length}x{length}x\w+>", text)


@pytest.fixture
def lower_for_cuda(simulated_gpu):
    def lower(segments, options, length=S):
        def summed(q, k, v, is_local):
            local = {"is_local": is_local} if options.get("mixed") else {}
            out = attention(
                *(q, k, v, segments), window=options.get("window"), **local, implementation="cudnn"
            )
            return out.astype(jnp.float32).sum()

        shapes = [jax.ShapeDtypeStruct((B, length, heads, 64), jnp.bfloat16) for heads in (4, 2, 2)]
        shapes.append(jax.ShapeDtypeStruct((), bool))
        traced = jax.jit(jax.grad(summed, (0, 1, 2))).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


def calls(text):
    return [line for line in text.splitlines() if "@__cudnn$fmha" in line]


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one segment", "segments"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 3, "mixed": True}], ids=str)
def test_cudnn_calls_its_fused_kernels_without_a_mask(segments, options, lower_for_cuda):
    text = lower_for_cuda(segments, options)
    windows = {"", options.get("window", 0) and "3"} if options.get("mixed") else {""}
    found = calls(text)
    assert len(found) == 2 * len(windows) and not squares(text, S)
    for kind in ("Softmax(", "SoftmaxBackward("):
        assert sum(f"__cudnn$fmha{kind}" in line for line in found) == len(windows)
    lengths = {re.search(r"sliding_window_length\\22: (\d+)", line)[1] for line in found}
    expected = {"0", "3"} if options.get("mixed") else {str(options.get("window", 0))}
    assert lengths == expected


def test_cudnn_gets_even_lengths_and_equally_sharded_heads(monkeypatch, lower_for_cuda):
    for segments, width in ((None, 64), (SEGMENTS[:, :5], 64 + cudnn.SEGMENT_DIMS)):
        found = calls(lower_for_cuda(segments, {}, length=5))
        assert len(found) == 2 and all(f"x6x4x{width}xbf16" in line for line in found)
    shards = {"heads": 4, "kv_heads": 1, "seq": 1}
    monkeypatch.setattr(attention_module.sharding, "num_shards", lambda name, _: shards[name])
    found = calls(lower_for_cuda(None, {}))
    assert len(found) == 2 and not any("x2x64xbf16" in line for line in found)


def test_a_layer_of_either_kind_shards_its_heads_by_their_number(monkeypatch, lower_for_cuda):
    numbers, plain = [], cudnn.constrain

    def constrain(x, *, num_heads):
        numbers.append(num_heads)
        return plain(x, num_heads=num_heads)

    monkeypatch.setattr(cudnn, "constrain", constrain)
    lower_for_cuda(None, {"window": 3, "mixed": True})
    assert set(numbers) == {4}


LENGTH = 22  # unlike all other sizes


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2}, {"tensor": 4}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("model", [{}, {"attention": "lg", "window": 5}], ids=["global", "mixed"])
def test_a_train_step_with_packed_rows_calls_cudnn_without_a_mask(layout, model, simulated_gpu):
    c = packed(attention_impl="cudnn", **model)
    c.train.update(dtype="bfloat16", num_microbatches=2)
    c.data.seq_len = c.model.max_seq_len = LENGTH
    run = Run(c, **layout)
    with run.program.active():
        step = jax.jit(run.program.train_step)
        traced = step.trace(run.program.abstract_state, run.batch())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # On several devices the kernel gets its own name only when XLA partitions the program.
    assert ("CustomSPMDPartitioning" if layout else "__cudnn$fmhaSoftmax(") in text
    assert not squares(text, LENGTH)


# ---- cuDNN's results ----


@pytest.mark.parametrize("case", CUDNN_CASES)
def test_what_cudnn_is_asked_for_equals_the_formula(case, simulated_gpu, monkeypatch):
    plain = partial(jax.nn.dot_product_attention, implementation="xla")
    as_plain = lambda *args, implementation, **options: plain(*args, **options)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", as_plain)
    check_cudnn(case, length=13, head_dim=8)
