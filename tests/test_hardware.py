"""The table of devices."""

import pytest

from meshtrain import hardware
from meshtrain.hardware import peak_flops


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA L40S", 362),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
    ],
)
def test_the_peak_is_that_of_the_variant(kind, tera):
    assert peak_flops(kind) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100X",
        "NVIDIA A10G",
        "NVIDIA H20",
        "NVIDIA H200 NVL",
        "TPU v4 lite",
        "TPU v5 something",
    ],
)
def test_an_unknown_variant_has_no_peak(kind):
    """No MFU is better than a wrong one."""
    assert peak_flops(kind) is None


def test_a_peak_that_is_given_counts_for_every_device():
    assert peak_flops("cpu", 5e12) == peak_flops("NVIDIA H200", 5e12) == 5e12


@pytest.mark.parametrize("device", hardware.devices().values(), ids=lambda device: device.name)
def test_figures_have_their_units(device):
    """Finds a wrong power of ten: products need 20 to 600 FLOPs a byte, memory is 10 to 200 GB."""
    assert 20 < device.flops_16 / device.bandwidth < 600
    assert 10e9 < device.memory < 200e9
    assert device.network <= device.link < device.bandwidth
    assert device.flops_32 <= device.flops_16 <= (device.flops_8 or device.flops_16)
    assert device.peak(4) == device.flops_32 and device.peak(2) == device.flops_16
