"""Which formulas `train.kernels` selects, and where its kernels run."""

from types import SimpleNamespace

import pytest

from meshtrain.errors import ConfigError
from meshtrain.ops import kernels


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


@pytest.mark.parametrize(
    ("value", "are_fused", "are_pallas"),
    [
        ("plain", False, False),
        ("auto", False, False),
        ("fused", True, False),
        ("pallas", True, True),
    ],
)
def test_the_kernels_are_used_with_the_fused_formulas(value, are_fused, are_pallas):
    with kernels.use(value):
        assert (kernels.are_fused(), kernels.are_pallas()) == (are_fused, are_pallas)
    assert not kernels.are_fused()


def device(platform, capability=None):
    return SimpleNamespace(platform=platform, device_kind="a device", compute_capability=capability)


@pytest.mark.parametrize(
    "found", [device("cpu"), device("gpu", "9.0"), device("gpu", "12.0"), device("cuda")]
)
def test_the_kernels_run_on_cpus_and_on_gpus_from_ampere_on(found):
    kernels.check("pallas", found)


@pytest.mark.parametrize("found", [device("tpu"), device("gpu", "7.5"), device("gpu", "gfx942")])
def test_on_other_devices_they_are_an_error(found):
    with pytest.raises(ConfigError, match=f"this is {found.platform} a device; use 'auto'"):
        kernels.check("pallas", found)
    kernels.check("fused", found)
