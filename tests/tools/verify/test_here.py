"""`meshtrain verify --here`: the dtype of the config and the kernels of these devices."""

import json

import pytest

from meshtrain import ConfigError
from meshtrain.cli import app
from meshtrain.tools.verify import on_devices, precision
from tests.lib.configs import tiny_config


@pytest.mark.slow
def test_layouts_in_bfloat16_pass_and_the_certificate_says_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    for name, value in {"QUICK_LAYOUTS": 2, "HEAD_DIM": 8, "SEQ_LEN": 16}.items():
        monkeypatch.setattr(on_devices, name, value)  # for speed
    monkeypatch.setattr(precision, "NUM_DRAWS", 4)
    overrides = {
        "train.dtype": "bfloat16",
        "model.attention_impl": "blockwise",
        "model.head_dim": 128,
        "train.num_microbatches": 1,
    }
    arguments = [f"--config.{key}={value}" for key, value in overrides.items()]
    options = ["--config=configs/quickstart.py", "--here", "--quick", f"--output={tmp_path}"]
    assert app.main("verify", [*options, *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 layouts of 8 devices in bfloat16" in out
    assert "no layout is less precise than one device" in out
    record = json.loads((tmp_path / "verify.json").read_text())
    rows = [result["row"] for result in record["results"]]
    assert [(row["dtype"], row["attention_impl"]) for row in rows] == [
        ("bfloat16", "blockwise")
    ] * 2
    assert all(result["differences"]["gradients"] < 1.5 for result in record["results"])
    missing = "\n".join(record["not_covered"])
    assert "layouts that --quick leaves out" in missing and "cuDNN's attention kernels" in missing
    assert "model.head_dim=8 instead of 128" in missing


def test_float64_is_compared_without_here():
    c = tiny_config()
    c.train.dtype = "float64"
    with pytest.raises(ConfigError, match="train.dtype=float64: verify compares float64"):
        on_devices.verify_here(c)


def test_sizes_are_reduced_to_what_fused_kernels_support():
    raw = tiny_config().to_dict()
    raw["model"].update(d_model=4096, num_heads=32, num_kv_heads=8, max_seq_len=8192)
    raw["data"]["seq_len"] = 8192
    on_devices.shrink_for_kernels(raw)
    model = raw["model"]
    assert model["d_model"] == 64 * model["num_heads"] and model["num_heads"] < 32
    assert (raw["data"]["seq_len"], model["max_seq_len"]) == (64, 64)
    small = tiny_config().to_dict()
    on_devices.shrink_for_kernels(small)
    assert small["model"]["d_model"] == 32 and small["data"]["seq_len"] == 16
