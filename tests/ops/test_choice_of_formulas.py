"""Which formulas `train.kernels` selects, and where its kernels run."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from meshtrain.errors import ConfigError
from meshtrain.ops import kernels
from meshtrain.parallel import sharding


@pytest.mark.parametrize(
    ("value", "platform", "expected"),
    [
        ("auto", "cpu", "plain"),
        ("auto", "tpu", "plain"),
        ("auto", "gpu", "fused"),
        ("plain", "gpu", "plain"),
        ("pallas", "cpu", "pallas"),
    ],
)
def test_auto_is_fused_on_gpus(value, platform, expected):
    assert kernels.resolved(value, platform) == expected


def zeros(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("value", "are_fused", "by_hand"),
    [
        ("plain", False, False),
        ("auto", False, False),
        ("fused", True, False),
        ("pallas", True, True),
    ],
)
def test_the_kernels_are_used_with_the_fused_formulas(value, are_fused, by_hand):
    with kernels.use(value):
        assert kernels.are_fused() == are_fused
        assert kernels.uses_norm_kernel(zeros(1, 8, 64)) == by_hand
        assert kernels.uses_loss_kernel(zeros(1, 8, 64)) == by_hand
    assert not kernels.are_fused()


def test_the_kernel_of_norms_takes_rows_that_fit_the_registers_and_are_not_sharded():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with kernels.use("pallas"):
        assert kernels.uses_norm_kernel(zeros(1, 1, 8192))
        assert not kernels.uses_norm_kernel(zeros(1, 1, 8193))
        assert not kernels.uses_norm_kernel(zeros(8, 64))
        with jax.set_mesh(mesh), sharding.use_rules([("residual", "tensor")]):
            assert not kernels.uses_norm_kernel(zeros(1, 8, 64))
            assert kernels.uses_norm_kernel(zeros(1, 8, 63))


def test_the_kernel_of_the_loss_takes_all_but_float16_and_a_sharded_vocabulary():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    with kernels.use("pallas"):
        assert not kernels.uses_loss_kernel(zeros(1, 8, 64, dtype="float16"))
        with jax.set_mesh(mesh), sharding.use_rules([("vocab", "tensor")]):
            assert not kernels.uses_loss_kernel(zeros(1, 8, 64))
            assert kernels.uses_loss_kernel(zeros(1, 8, 63))


def test_pallas_is_imported_only_where_its_kernels_are_used():
    command = (
        "import sys, meshtrain.models.transformer; print('jax.experimental.pallas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def device(platform, capability=None):
    return SimpleNamespace(platform=platform, device_kind="a device", compute_capability=capability)


@pytest.mark.parametrize(
    "found", [device("cpu"), device("gpu", "9.0"), device("gpu", "12.0"), device("cuda")]
)
def test_the_kernels_run_on_cpus_and_on_gpus_from_ampere_on(found):
    kernels.check("pallas", found)


# As it is compiled for where there is none.
V100 = SimpleNamespace(platform="gpu", device_kind="Tesla V100-SXM2-16GB")


@pytest.mark.parametrize(
    "found", [device("tpu"), device("gpu", "7.5"), device("gpu", "gfx942"), V100]
)
def test_on_other_devices_they_are_an_error(found):
    with pytest.raises(
        ConfigError, match=f"this is {found.platform} {found.device_kind}; use 'auto'"
    ):
        kernels.check("pallas", found)
    kernels.check("fused", found)
