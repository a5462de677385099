"""Grouped products: each group of rows times its own matrix, and the gradients of both."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from meshtrain.errors import ConfigError
from meshtrain.ops import experts, grouped, grouped_gpu, grouped_kernel
from meshtrain.parallel import accelerator

# Sizes of groups, rows, K and N. The last rows may belong to no group.
CASES = {
    "equal": ([128, 128], 256, 16, 24),
    "empty ones, and parts of tiles": ([0, 70, 0, 0, 200, 1, 0], 300, 24, 16),
    "one huge group": ([0, 0, 300, 0], 300, 8, 40),
    "several groups in a tile, and rows of none": ([1, 63, 64, 5], 200, 16, 16),
    "no rows in groups": ([0, 0], 40, 16, 16),
    "fewer rows than a tile": ([3, 2], 7, 16, 16),
}


def operands(case, dtype):
    sizes, num_rows, K, N = CASES[case]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(num_rows, K))
    direction = rng.normal(size=(num_rows, N))
    # Nobody may read these.
    rows[sum(sizes) :] = direction[sum(sizes) :] = np.nan
    weights = rng.normal(size=(len(sizes), K, N))
    return np.int32(sizes), *(jnp.asarray(x, dtype) for x in (rows, weights, direction))


def plain(sizes, rows, weights, direction):
    """Returns the products and both gradients, group by group, in float64."""
    rows, weights, direction = (np.asarray(x, np.float64) for x in (rows, weights, direction))
    out, grad_rows = np.zeros_like(direction), np.zeros_like(rows)
    grad_weights, start = np.zeros_like(weights), 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        out[own] = rows[own] @ weights[group]
        grad_rows[own] = direction[own] @ weights[group].T
        grad_weights[group] = rows[own].T @ direction[own]
        start += size
    return out[:start], grad_rows[:start], grad_weights


def compare(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        one = np.asarray(one, np.float64)[: len(other)]
        np.testing.assert_allclose(one, other, atol=tolerance * (1 + np.abs(other).max(initial=0)))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6), ("bfloat16", 1e-2)]
)
@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_equal_plain_maths(case, dtype, tolerance):
    """Megablox interpreted, and the twin of float64."""
    with jax.enable_x64(dtype == "float64"):
        sizes, rows, weights, direction = operands(case, dtype)

        @jax.jit
        def run(rows, weights, direction):
            out, vjp = jax.vjp(lambda *xs: grouped.grouped_dot(*xs, sizes), rows, weights)
            return out, *vjp(direction)

        found = run(rows, weights, direction)
        assert [x.dtype for x in found] == [rows.dtype] * 3
        compare(found, plain(sizes, rows, weights, direction), tolerance)


@pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="jax before 0.12 cannot interpret these kernels",
)
@pytest.mark.parametrize(
    ("sizes", "K", "N"),
    [
        ([70, 0, 122], 64, 128),
        ([0, 0, 256], 128, 64),
        ([1, 63, 64, 65, 0, 100], 64, 192),
        ([128, 128, 0, 5], 128, 64),
    ],
)
def test_interpreted_gpu_kernels_equal_plain_maths(sizes, K, N):
    num_rows = 384
    rng = np.random.default_rng(0)
    rows, direction = rng.normal(size=(num_rows, K)), rng.normal(size=(num_rows, N))
    rows[sum(sizes) :] = direction[sum(sizes) :] = np.nan
    weights = rng.normal(size=(len(sizes), K, N))
    rows, weights, direction = (jnp.asarray(x, jnp.bfloat16) for x in (rows, weights, direction))
    options = dict(num_cores=3, interpret=plgpu.InterpretGPUParams())
    sizes_G = np.int32(sizes)
    found = (
        grouped_gpu.product(rows, weights, sizes_G, transposed=False, **options),
        grouped_gpu.product(direction, weights, sizes_G, transposed=True, **options),
        grouped_gpu.product_of_rows(rows, direction, sizes_G, **options),
    )
    compare(found, plain(sizes, rows, weights, direction), 4e-3)


@pytest.mark.parametrize("case", CASES)
def test_tiles_of_a_gpu_have_each_row_of_a_group_once(case):
    sizes, num_rows, _, _ = CASES[case]
    tiles = grouped_gpu.tiles_of(np.int32(sizes), num_rows, 64)
    groups = np.full(num_rows, -1)
    for group, block, start, size in zip(*map(np.asarray, tiles), strict=True):
        if not size:
            continue  # the tile is skipped
        own = slice(block * 64 + start, block * 64 + start + size)
        assert start + size <= 64 and (groups[own] == -1).all()
        groups[own] = group
    rest = num_rows - sum(sizes)
    np.testing.assert_array_equal(groups, np.repeat([*range(len(sizes)), -1], [*sizes, rest]))


@pytest.mark.parametrize(
    ("size", "tile"), [(14336, 1024), (768, 768), (1408, 768), (2880, 1024), (96, 96)]
)
def test_a_tile_of_a_tpu_needs_little_padding(size, tile):
    assert grouped_kernel._tile(size, 1024) == tile


def chosen(monkeypatch, kernel, platform, kind, dtype="bfloat16", dims=(128, 256)):
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    monkeypatch.setattr(accelerator, "device_kind", lambda: kind)
    with experts.active_kernel(kernel):
        return experts.chosen_kernel(dtype, *dims)


def test_auto_is_batched(monkeypatch):
    for platform, kind in (("gpu", "NVIDIA H200"), ("tpu", "TPU v5"), ("cpu", "cpu")):
        assert chosen(monkeypatch, "auto", platform, kind) == "batched"
        assert chosen(monkeypatch, "grouped", platform, kind) == "grouped"
    assert chosen(monkeypatch, "grouped", "cpu", "cpu", "float64") == "grouped"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(kind="NVIDIA A100-SXM4-40GB"), "Hopper GPUs and on TPUs, and this is NVIDIA A100"),
        (dict(kind="NVIDIA B200"), "Hopper GPUs and on TPUs, and this is NVIDIA B200"),
        (dict(kind="AMD Instinct MI300X"), "Hopper GPUs and on TPUs, and this is AMD"),
        (dict(dtype="float32"), "16 bits on GPUs, and train.dtype is float32"),
        (dict(dims=(128, 100)), "multiples of 64, and an expert has a dim of 100"),
        (dict(platform="tpu", kind="TPU v5", dtype="float16"), "train.dtype is float16"),
        (dict(platform="rocm", kind="x"), "Hopper GPUs and on TPUs, and this is rocm"),
    ],
)
def test_what_the_kernels_cannot_do_is_one_line(monkeypatch, changes, reason):
    settings = {"platform": "gpu", "kind": "NVIDIA H200", **changes}
    with pytest.raises(ConfigError) as raised:
        chosen(monkeypatch, "grouped", **settings)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("expert.kernel='grouped': its kernels ")
    assert reason in line and line.endswith("; use 'batched'")


def test_a_gpu_that_the_table_lacks_is_asked_for_its_capability(monkeypatch):
    device = SimpleNamespace(compute_capability="9.0", core_count=78)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert chosen(monkeypatch, "grouped", "gpu", "NVIDIA H20X") == "grouped"
    assert grouped_kernel._num_cores() == 78
    device.compute_capability = "12.0"
    with pytest.raises(ConfigError, match="this is NVIDIA H20X"):
        chosen(monkeypatch, "grouped", "gpu", "NVIDIA H20X")
