"""A run begins with an adapter of PEFT: it computes PEFT's logits, and exports what it read."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from meshtrain.checkpoint import arrays
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, peft_reader, start
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import GOLDEN, logits
from tests.lib.paths import ROOT

ADAPTERS = ROOT / "tests" / "huggingface" / "adapters"  # see make_adapters.py
TOKENS = (np.arange(24).reshape(2, 12) * 7 % 61).astype(np.int32)


def config_of(family, adapter, **settings):
    c = tiny_config()
    start.set_model(c, GOLDEN / family)
    c.train.steps, c.eval.batches = 0, 0
    c.adapter.update(init_from=str(adapter), **settings)
    return c


def tensors(folder):
    return {
        name: np.array(one.read())
        for name, one in files.read_header(folder / "adapter_model.safetensors").items()
    }


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_a_run_computes_the_logits_of_peft_and_exports_the_same_adapter(family, tmp_path):
    check_logits_and_export(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "deepseek_v3-all",
        "mixtral",
        "gpt2",
        "phi3",
        "gpt_oss",
        "granitemoe",
        "qwen2_moe",
    ],
)
def test_other_runs_compute_the_logits_of_peft_and_export_the_same_adapter(family, tmp_path):
    check_logits_and_export(family, tmp_path)


def check_logits_and_export(name, tmp_path):
    """Checks the adapter in the folder `name`: of a family, and perhaps - and what is special."""
    family = name.partition("-")[0]
    c = config_of(family, ADAPTERS / name)
    c.mesh.update(data=2, fsdp=2, tensor=2)
    state = train(c, workdir=tmp_path / "run").state
    cfg = peft_reader.with_settings(parse(c, num_devices=8))
    expected = np.load(ADAPTERS / name / "logits.npy")
    num_tokens = expected.shape[-1]
    with jax.default_matmul_precision("highest"):
        model, params = build_model(cfg), jax.device_get(state.params)
        actual = logits(model, params, TOKENS % num_tokens)
    np.testing.assert_allclose(actual[..., :num_tokens], expected, rtol=0, atol=1e-5)

    arguments = [str(tmp_path / "run"), str(tmp_path / "back"), "--adapter"]
    assert app.main("convert", arguments) == 0
    saved = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    original = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(GOLDEN / family)
    assert "began with" in (tmp_path / "back" / "README.md").read_text()
    for key in ("use_rslora", "lora_dropout"):
        assert saved[key] == original[key], key
    again = replace(cfg, adapter=replace(cfg.adapter, init_from=str(tmp_path / "back")))
    first, second = (peft_reader.found_for(one).factors for one in (cfg, again))
    assert first.keys() == second.keys()
    for path, values in first.items():
        np.testing.assert_array_equal(second[path], values, err_msg=path)
    if original["rank_pattern"] or original["alpha_pattern"]:
        return
    # Modules without an update have one of zeros.
    assert (saved["r"], saved["lora_alpha"]) == (original["r"], original["lora_alpha"])
    there, here = tensors(ADAPTERS / name), tensors(tmp_path / "back")
    assert there.keys() <= here.keys()
    for name, values in here.items():
        expected = there.get(name, np.zeros_like(values))
        # Two updates of a parameter have twice the rank: the halves of B are on a diagonal.
        if values.shape == expected.shape:
            np.testing.assert_array_equal(values, expected, err_msg=name)


def test_a_run_resumes_with_the_settings_of_the_folder(tmp_path):
    adapter = shutil.copytree(ADAPTERS / "llama3", tmp_path / "adapter")
    c = config_of("llama3", adapter)
    c.train.steps, c.mesh.data = 1, 8
    first = train(c, workdir=tmp_path / "run").state.params
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["adapter"]
    assert (recorded["rank"], recorded["alpha"], recorded["rslora"]) == (2, 6, True)
    names = ["layers/attention/query", "layers/attention/value", "layers/mlp/down"]
    assert recorded["targets"] == names
    again = train(c, workdir=tmp_path / "run").state.params
    for path, kind in arrays.shapes(first).items():
        assert arrays.shapes(again)[path] == kind
    np.testing.assert_array_equal(
        first["layers"]["mlp"]["down"]["lora_b"], again["layers"]["mlp"]["down"]["lora_b"]
    )


def changed(folder, **keys):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"use_dora": True}, "use_dora=True: is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3': only LORA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the model"),
        ({"bias": "all"}, "biases are not part of an adapter"),
        ({"alpha_pattern": {r"(a)\1": 3}}, r"alpha_pattern='(a)\\1': has '\\'"),
        ({"alpha_pattern": {"(q|v)_proj": 0}}, "'(q|v)_proj': 0 is not a positive number"),
    ],
)
def test_what_an_adapter_here_cannot_be_is_one_line(keys, fault, tmp_path):
    adapter = shutil.copytree(ADAPTERS / "llama3", tmp_path / "adapter")
    changed(adapter, **keys)
    with pytest.raises(ConfigError, match="adapter.init_from=") as caught:
        peft_reader.with_settings(parse(config_of("llama3", adapter), num_devices=8))
    assert fault in str(caught.value) and len(caught.value.faults) == 1


def test_an_adapter_of_another_model_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="use the model that the adapter belongs to"):
        peft_reader.with_settings(parse(config_of("qwen2", ADAPTERS / "llama3"), num_devices=8))
    with pytest.raises(ConfigError, match=r"experts of LlamaForCausalLM has an update"):
        adapter = ADAPTERS / "deepseek_v3"
        peft_reader.with_settings(parse(config_of("llama3", adapter), num_devices=8))


def with_factors(folder, **factors):
    """Writes an adapter of rank 2 with these shapes of lora_A and lora_B, by module."""
    shutil.copytree(ADAPTERS / "llama3", folder)
    changed(folder, use_rslora=False)
    specs = []
    for module, shapes in factors.items():
        for name, shape in zip(("lora_A", "lora_B"), shapes, strict=True):
            name = f"base_model.model.model.layers.0.{module}.{name}.weight"
            specs.append(files.TensorSpec(name, shape, np.dtype("float32")))
    values = [np.ones(spec.shape, np.float32) for spec in specs]
    files.write_file(folder / "adapter_model.safetensors", specs, values)
    return folder


@pytest.mark.parametrize(
    ("family", "module", "factors", "fault"),
    [
        ("gpt_oss", "mlp.experts", ((7, 24), (32, 7)), "lora_A [7, 24] has not 4 experts"),
        ("granitemoe", "block_sparse_moe.experts", ((6, 24), (31, 6)), "its lora_B [31, 6]"),
        ("granitemoe", "block_sparse_moe.experts", ((6, 25), (16, 6)), "its lora_A [2, 25]"),
        # As an earlier version of this package wrote it.
        ("gpt_oss", "mlp.experts.down_proj", ((8, 24), (32, 8)), "update, which is not possible"),
    ],
)
def test_an_update_of_other_experts_is_one_line(family, module, factors, fault, tmp_path):
    folder = with_factors(tmp_path / "adapter", **{module: factors})
    changed(folder, target_parameters=["experts.down_proj"])
    with pytest.raises(ConfigError) as caught:
        peft_reader.with_settings(parse(config_of(family, folder), num_devices=8))
    assert fault in str(caught.value) and len(caught.value.faults) == 1


def test_an_update_of_another_fused_tensor_is_one_line(tmp_path):
    shapes = {"self_attn.qkv_proj": ((2, 32), (31, 2))}
    c = config_of("phi3", with_factors(tmp_path / "adapter", **shapes))
    with pytest.raises(ConfigError, match=r"qkv_proj has \d+ outputs, and its lora_B \[31"):
        peft_reader.with_settings(parse(c, num_devices=8))


def test_the_rank_and_the_base_must_fit(tmp_path):
    c = config_of("llama3", ADAPTERS / "llama3", rank=4)
    with pytest.raises(ConfigError, match="adapter.rank=4: .* has rank 2"):
        peft_reader.with_settings(parse(c, num_devices=8))
    c = config_of("llama3", ADAPTERS / "llama3")
    c.checkpoint.init_from = ""
    with pytest.raises(ConfigError, match="set checkpoint.init_from"):
        peft_reader.with_settings(parse(c, num_devices=8))


def test_settings_of_the_user_keep_the_function(tmp_path):
    """Here alpha / rank instead of alpha / sqrt(rank), and more layers."""
    c = config_of("llama3", ADAPTERS / "llama3", rank=2, alpha=5.0, targets=("layers/*",))
    c.mesh.data = 8
    state = train(c).state
    cfg = parse(c, num_devices=8)
    assert peft_reader.with_settings(cfg) == cfg
    with jax.default_matmul_precision("highest"):
        actual = logits(build_model(cfg), jax.device_get(state.params), TOKENS)
    expected = np.load(ADAPTERS / "llama3" / "logits.npy")
    np.testing.assert_allclose(actual[..., :61], expected, rtol=0, atol=1e-5)


def test_adapters_of_earlier_versions_have_a_module_for_each_expert(tmp_path):
    """As PEFT saved those of transformers 4: the same update as of the joined parameter."""
    source = ADAPTERS / "qwen3_moe"
    found = tensors(source)
    specs, values = [], []
    for name, value in found.items():
        stem, _, rest = name.partition(".experts.base_layer.")
        if not rest:
            continue
        kind = rest.removesuffix(".weight")
        parts = {"gate_proj": 0, "up_proj": 1}
        for leaf, part in parts.items():
            for expert in range(6):
                one = value.reshape(6, 2, -1)[expert]
                if kind == "lora_B":
                    one = np.split(value.reshape(len(value), 2, 6)[..., expert], 2)[part]
                specs.append(f"{stem}.experts.{expert}.{leaf}.{kind}.weight")
                values.append(np.ascontiguousarray(one))
    folder = tmp_path / "adapter"
    folder.mkdir()
    shutil.copyfile(source / "adapter_config.json", folder / "adapter_config.json")
    changed(folder, target_parameters=None)
    named = [
        files.TensorSpec(name, value.shape, value.dtype)
        for name, value in zip(specs, values, strict=True)
    ]
    files.write_file(folder / "adapter_model.safetensors", named, values)
    c = config_of("qwen3_moe", folder)
    cfg = peft_reader.with_settings(parse(c, num_devices=8))
    assert cfg.adapter.targets == ("layers/mlp/gate", "layers/mlp/up") and cfg.adapter.experts
    joined = parse(config_of("qwen3_moe", source), num_devices=8)
    joined = replace(joined, adapter=replace(joined.adapter, init_from=str(source)))
    own, other = (peft_reader.found_for(one).factors for one in (cfg, joined))
    for path, value in own.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


def test_a_config_of_an_earlier_version_has_the_new_keys(tmp_path):
    c = tiny_config().to_dict()
    for key in ("rslora", "experts", "init_from"):
        del c["adapter"][key]
    for key in ("export", "export_every"):
        del c["checkpoint"][key]
    (tmp_path / "config.json").write_text(json.dumps(c))
    cfg = parse(load.load_config(str(tmp_path / "config.json")), num_devices=8)
    assert not cfg.adapter.rslora and not cfg.checkpoint.export
