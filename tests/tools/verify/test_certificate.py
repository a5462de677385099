"""The certificate: what it says about layouts, and what it says that it does not cover."""

import json

import jax
import numpy as np

from meshtrain.tools.verify import certificate
from meshtrain.tools.verify.certificate import Certificate, Result, describe
from tests.lib.configs import LAYOUT, tiny_config

ROW = LAYOUT | {"schedule": None, "num_chunks": None, "keep": None}


def test_a_layout_is_described_by_all_its_settings():
    plain = "data 2 x fsdp 2 x tensor 2 · zero 2 · 2 micro-batches · remat full"
    assert describe(ROW) == plain
    described = describe(
        ROW | dict(packing=True, attention_impl="blockwise", loss_chunks=3, unroll=2)
    )
    assert described == f"{plain} · packed · blockwise attention · 3 loss chunks · unroll 2"
    pipeline = dict(pipeline=4, schedule="interleaved", num_chunks=3, keep="inputs")
    assert describe(ROW | pipeline).endswith("· interleaved of 3 chunks, inputs kept")
    assert describe(ROW | {"dtype": "float64"}) == plain
    assert "tensor 2 · bfloat16 · zero 2" in describe(ROW | {"dtype": "bfloat16"})


def test_a_setting_that_the_description_does_not_know_is_not_lost():
    row = ROW | {"dropout": 0.5, "keys": True, "window": 0}
    assert describe(row).endswith("remat full · dropout 0.5 · keys")


def written(folder, **fields):
    low = Result(ROW | {"dtype": "bfloat16"}, {"gradients": 1.0733}, None, 1.0)
    exact = Result(ROW, {"gradients": 3.3e-13, "loss": 1e-14}, None, 1.0)
    one = Certificate("model", 1e-10, (), (exact, low), **fields)
    one.write(folder)
    return one, json.loads((folder / "verify.json").read_text()), (folder / "verify.md").read_text()


def test_low_precision_has_its_own_table(tmp_path):
    one, record, page = written(tmp_path)
    exact, low = page.split("1 layouts in low precision")
    assert "| 3.3e-13 | 1.0e-14 | ok |" in exact and "| 1.07 | ok |" in low
    assert "1e-10 is allowed" in exact and "Not covered" not in page
    assert certificate.summary_line(one.results[1]).startswith("   1.07x")
    assert record["passed"] and record["not_covered"] == []


def test_what_is_not_covered_is_in_both_files(tmp_path):
    lines = ("cuDNN", "larger sizes")
    _, record, page = written(tmp_path, not_covered=lines)
    assert page.endswith("## Not covered\n\n- cuDNN\n- larger sizes\n")
    assert record["not_covered"] == list(lines)


def test_not_covered_names_what_a_verification_leaves_out():
    configured = tiny_config().to_dict()
    verified = {**configured, "model": configured["model"] | {"num_layers": 4, "d_model": 16}}
    configured["model"]["num_layers"] = 32
    verified["data"] = configured["data"] | {"separator": -1}
    configured["data"]["separator"] = 10  # not a size
    lines = certificate.not_covered(
        configured, verified, [ROW], without=["packing"], left_out=["12 layouts (--quick)"]
    )
    page = "\n".join(lines)
    assert lines[:2] == ("12 layouts (--quick)", "checks left out with --without: packing")
    assert "model.d_model=16 instead of 32, model.num_layers=4 instead of 32\n" in page
    assert "train.dtype=float32; no layout was verified in it" in page
    assert "cuDNN's attention kernels, which run on NVIDIA GPUs" in page and "GPU and TPU" in page
    assert "more than 8 devices (cpu), more than 1 process" in page
    assert f"other versions than jax {jax.__version__}" in page
    assert "dropout; no layout was verified with it" in page
    assert "adapters; no layout was verified with one" in page
    here = ROW | {"dtype": "float32", "attention_impl": "cudnn", "dropout": True, "adapter": "own"}
    same = "\n".join(certificate.not_covered(configured, configured, [here]))
    assert not any(words in same for words in ("larger sizes", "no layout", "cuDNN", "left out"))
    rows = [ROW | {"adapter": "rank 2"}, here | {"adapter": None}]
    some = "\n".join(certificate.not_covered(configured, configured, rows))
    assert "adapters in low precision" in some and "adapters" not in same


def test_trees_of_other_leaves_are_reported_by_name():
    """Such as the moments of a parameter that should be frozen."""
    first, second = {"a": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}
    for actual, expected, text in ((second, first, "not expected"), (first, second, "missing")):
        _, fault = certificate.compare(
            {"optimizer state": actual}, {"optimizer state": expected}, tolerance=1e-10
        )
        assert fault == f"optimizer state b: is {text} here"
