"""gpt-oss with experts in MXFP4, as OpenAI publishes it."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, mxfp4, tensor_rows, weights
from tests.lib.hf import assert_same_logits, load, run, tensor_bytes
from tests.lib.paths import ROOT

FOLDER = ROOT / "tests" / "huggingface" / "mxfp4"  # see make_golden.py
EXPERTS = "model.layers.0.mlp.experts"
BF16 = np.dtype(ml_dtypes.bfloat16)


def bits(array):
    return np.asarray(array).view(np.uint16)


def test_kernels_have_the_bits_of_transformers():
    _, params = load(FOLDER, dtype="bfloat16")
    golden = np.load(FOLDER / "logits.npz")
    mlp = params["layers"]["mlp"]
    np.testing.assert_array_equal(bits(mlp["gate"]["kernel"][0]), golden["gate_up_proj"][..., ::2])
    np.testing.assert_array_equal(bits(mlp["up"]["kernel"][0]), golden["gate_up_proj"][..., 1::2])
    np.testing.assert_array_equal(bits(mlp["down"]["kernel"][0]), golden["down_proj"])
    values = golden["gate_up_proj"].view(BF16).astype(np.float64)
    # Subnormal numbers, and both zeros.
    assert 0 < np.abs(values[values != 0]).min() == 2.0**-128
    assert {0, 0x8000} <= {*np.unique(golden["gate_up_proj"]).tolist()}


def test_every_byte_with_every_scale_is_two_values():
    table = mxfp4.TABLE.view(BF16).reshape(256, 256, 2).astype(np.float64)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    for scale in range(253):  # from there on, bfloat16 ends below the largest value
        expected = np.stack([values[low], values[high]], axis=1) * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(table[scale], expected)
    assert np.isnan(table[255]).all()


def test_logits_match_transformers():
    assert_same_logits(FOLDER, *load(FOLDER), 1e-5)


# Bytes of blocks in a layer: 3 experts of 64 x 64 (gate and up), and of 32 x 64 values (down).
GATE_UP, DOWN = 3 * 64 * 64 // 2, 3 * 32 * 64 // 2


@pytest.mark.parametrize(
    ("sizes", "num_bytes"),
    [
        ({"data": 1}, GATE_UP + DOWN),
        ({"data": 2}, GATE_UP + DOWN),
        ({"fsdp": 2}, GATE_UP + DOWN),
        ({"expert": 3}, GATE_UP + DOWN),
        # A quarter of the inputs of gate and up is half a block of 32: two shards need it.
        ({"fsdp": 4}, 2 * GATE_UP + DOWN),
    ],
    ids=str,
)
def test_only_the_blocks_of_a_shard_are_read(sizes, num_bytes, monkeypatch):
    read = []

    class Recorded(np.ndarray):
        def __getitem__(self, index):
            found = np.asarray(self)[index]
            read.append(found.nbytes if self.ndim == 4 else 0)
            return found

    map_bytes = mxfp4.map_bytes
    monkeypatch.setattr(mxfp4, "map_bytes", lambda tensor: map_bytes(tensor).view(Recorded))
    _, params = load(FOLDER, dtype="bfloat16", **sizes)
    assert sum(read) == 2 * num_bytes  # of two layers
    monkeypatch.undo()
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)),
        params,
        load(FOLDER, dtype="bfloat16", data=1)[1],
    )


def test_the_box_of_a_shard_has_the_steps_of_alternating_parts():
    name = "layers/mlp/up/kernel"
    shapes = {name: (2, 3, 64, 32)}
    section = dict(num_heads=4, num_kv_heads=2, first_dense_layers=0)
    (row,) = tensor_rows.rows({name: "x.* E D Fb"}, shapes, section)
    box = row.box((slice(1, 3), slice(32, 64), slice(4, 8)))
    assert box == (slice(1, 3, 1), slice(32, 64, 1), slice(9, 16, 2))


def test_an_export_is_plain_bfloat16(tmp_path):
    run(FOLDER, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    stored = tensor_bytes(tmp_path / "back")
    golden = np.load(FOLDER / "logits.npz")
    for name in ("gate_up_proj", "down_proj"):
        data, shape, code = stored.pop(f"{EXPERTS}.{name}")
        assert (shape, code) == (golden[name].shape, "BF16")
        assert data == golden[name].tobytes()
    for name, tensor in files.tensors(FOLDER).items():
        if name in stored:
            assert stored[name][0] == tensor.read().tobytes()
    assert not any("_blocks" in name or "_scales" in name for name in stored)


@pytest.mark.slow
def test_an_export_has_the_logits_of_the_original_in_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run(FOLDER, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    golden = np.load(FOLDER / "logits.npz")
    with torch.no_grad():
        logits = model(torch.tensor(golden["tokens"])).logits.numpy()
    assert not any(info.values())
    np.testing.assert_array_equal(logits, golden["logits"])


# ---- faults ----


def changed_folder(tmp_path, change=lambda header: None, **keys):
    """Copies the folder, with other keys of config.json, and another header of its tensors."""
    folder = shutil.copytree(FOLDER, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return folder


def test_blocks_without_their_config_are_tensors_that_no_model_has(tmp_path):
    with pytest.raises(ConfigError, match="12 tensors") as error:
        load(changed_folder(tmp_path, quantization_config=None))
    assert any("gate_up_proj_blocks" in line for line in error.value.faults)


def test_scales_that_do_not_fit_their_blocks_are_listed(tmp_path):
    def change(header):
        header[f"{EXPERTS}.down_proj_scales"]["shape"] = [3, 32, 2]

    with pytest.raises(ConfigError) as error:
        load(changed_folder(tmp_path, change))
    lines = [line.split()[0] for line in error.value.faults[1:]]
    assert lines == [f"{EXPERTS}.down_proj{end}" for end in ("", "_blocks", "_scales")]


def test_kernels_of_another_size_are_listed(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(changed_folder(tmp_path, intermediate_size=16))
    assert any(
        line.split()[0] == f"{EXPERTS}.down_proj" and "found [3, 32, 64] BF16" in line
        for line in error.value.faults
    )


def test_a_scale_that_is_not_a_number_is_rejected(tmp_path):
    folder = changed_folder(tmp_path)
    scales = files.tensors(folder)[f"{EXPERTS}.down_proj_scales"]
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[scales.start + 5] = 255
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="down_proj has values that are NaN or infinite"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama3", {"quant_method": "mxfp4"}),
        ("gpt_oss", {"quant_method": "fp8"}),
        ("gpt_oss", {"quant_method": None}),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_other_quantized_folders_are_one_line(family, quantization, folder_of):
    folder = folder_of(family, quantization_config=quantization)
    with pytest.raises(ConfigError, match="quantization_config=.*: not supported") as error:
        weights.model_section(folder)
    assert len(error.value.faults) == 1
