"""The peak FLOP/s by which the MFU divides, and the files of a workdir."""

import pytest

from meshtrain.errors import ConfigError
from meshtrain.monitor.writer import Writer, peak_flops


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


def test_the_history_of_configs_bears_files_of_others(tmp_path):
    writer = Writer(tmp_path, leader=True)
    (tmp_path / "config_history").mkdir()
    (tmp_path / "config_history" / "0001 copy.json").touch()
    for seed in range(3):
        writer.config({"seed": seed})
    names = {"0001 copy.json", "0001.json", "0002.json"}
    assert {path.name for path in (tmp_path / "config_history").iterdir()} == names


def test_a_history_of_configs_that_is_no_folder_is_one_fault(tmp_path):
    writer = Writer(tmp_path, leader=True)
    (tmp_path / "config_history").touch()
    writer.config({})
    with pytest.raises(ConfigError, match="config_history/0001.json: File exists"):
        writer.config({"seed": 1})


def test_a_file_is_not_replaced_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "config.json.new").symlink_to(tmp_path / "mine")
    Writer(tmp_path, leader=True).config({"seed": 0})
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "config.json").is_symlink()
