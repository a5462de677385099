"""Mixtures of experts in Hugging Face folders: what the tests of every family leave out."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.checkpoint import arrays as saved_arrays
from meshtrain.checkpoint import manifest
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.config import load as configfile
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, files, weights
from meshtrain.huggingface.families import hunyuan
from meshtrain.inference import generate as inference_generate
from meshtrain.inference.sampling import Sampling, generate
from meshtrain.state import TrainState
from tests.lib.hf import BF16, GOLDEN, arrays, assert_same_generation, load, run, save, tensor_bytes

SLOW = pytest.mark.slow
FAMILIES = ("dots1", "mixtral", "olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
FAMILIES += ("solar_open", "glm4_moe", "ernie4_5_moe", "glm4_moe_lite", "hy_v3", "minimax_m2")
GATED = ("mlp.experts", ("gate_proj", "up_proj", "down_proj"))
# By family: the names that save_pretrained(save_original_format=False) of transformers writes.
FUSED = {
    "deepseek_v2": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v3": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "dots1": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "olmoe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    **dict.fromkeys(("solar_open", "glm4_moe", "ernie4_5_moe", "glm4_moe_lite", "hy_v3"), GATED),
    "minimax_m2": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
RENAMED = {
    "minimax_m2": {"mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias"},
    "ernie4_5_moe": {
        "mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"
    },
    "hy_v3": {name: in_file for name, (in_file,) in hunyuan.RENAMED.items()},
}


def fused(family):
    """Returns the tensors of a golden folder, those of the experts of a layer in one."""
    tensors, (stem, names) = arrays(GOLDEN / family), FUSED[family]
    config = config_json.read(GOLDEN / family / "config.json")
    section = config_json.to_section(config)
    num_experts = section["num_experts"]
    for layer in range(section["first_dense_layers"], config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}{stem}.{e}.{name}.weight") for e in range(num_experts)])
            for name in names
        )
        tensors[f"{prefix}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}mlp.experts.down_proj"] = down
        if family in ("mixtral", "minimax_m2"):
            name = f"{prefix}block_sparse_moe.gate.weight"
            tensors[f"{prefix}mlp.gate.weight"] = tensors.pop(name)
        for name, in_file in RENAMED.get(family, {}).items():
            tensors[f"{prefix}{name}"] = tensors.pop(f"{prefix}{in_file}")
    return tensors


@pytest.fixture
def fused_folder(tmp_path):
    def make(family, change=lambda name, x: x):
        folder = shutil.copytree(GOLDEN / family, tmp_path / "fused")
        save(folder, {name: change(name, x) for name, x in fused(family).items()})
        return folder

    return make


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("mixtral", "deepseek_v3") else SLOW)
        for family in FAMILIES
    ],
)
def test_tensors_of_all_experts_are_imported_and_exported_one_by_one(
    family, fused_folder, tmp_path
):
    folder = fused_folder(family)
    assert not any(".experts.0." in name for name in files.tensors(folder))
    run(folder, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(GOLDEN / family)


def test_each_tensor_of_a_fused_one_gets_its_dtype_back(fused_folder, tmp_path):
    def change(name, x):
        return x.astype(BF16) if name.endswith("1.mlp.experts.gate_up_proj") else x

    run(fused_folder("qwen3_moe", change), tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    found = arrays(tmp_path / "back")
    narrow = {name for name, x in found.items() if x.dtype == BF16}
    names = ("gate_proj", "up_proj")
    prefix = "model.layers.1.mlp.experts"
    assert narrow == {f"{prefix}.{e}.{name}.weight" for e in range(6) for name in names}


@pytest.mark.parametrize("shape", [(6, 21, 16), (6, 16), (0, 20, 16)], ids=str)
def test_a_fused_tensor_of_another_shape_is_reported_by_its_name(shape, fused_folder):
    def change(name, x):
        return np.ones(shape, np.float32) if name.endswith("0.mlp.experts.gate_up_proj") else x

    with pytest.raises(ConfigError, match="layers.0.mlp.experts.gate_up_proj +expected none"):
        load(fused_folder("qwen3_moe", change))


# ---- what layers measure ----


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_an_import_has_what_layers_measure_before_the_first_step(dtype, tmp_path):
    run(GOLDEN / "olmoe", tmp_path / "run", f"--dtype={dtype}")
    cfg = parse(configfile.load_config(str(tmp_path / "run" / "config.json")), num_devices=8)
    program, params = inference_generate.restore_params(cfg, tmp_path / "run")
    with program.active():
        fresh = program.initial_state(0).params
    found, expected = (p["layers"]["mlp"]["measured"] for p in (params, fresh))
    assert found["load"].shape == (3, 5) and float(found["load"][2, 4]) == np.float32(0.2)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    assert params["layers"]["mlp"]["router"]["kernel"].dtype == jnp.dtype(dtype)


def rewrite(workdir, path, change):
    """Changes a parameter in the checkpoint of a run at step 0, and writes it as step 1."""
    cfg = parse(configfile.load_config(str(workdir / "config.json")), num_devices=8)
    _, params = inference_generate.restore_params(cfg, workdir)
    changed = jax.tree.map_with_path(
        lambda keys, leaf: change(leaf) if "/".join(k.key for k in keys) == path else leaf, params
    )
    directory = workdir / "checkpoints"
    saved = manifest.read(directory / "0")
    state = TrainState(jnp.int32(1), changed, opt_state=None)
    folder = manifest.partial_folder(directory, 1)
    folder.mkdir()
    writer = AsyncWriter()
    writer.save(folder / saved_arrays.FOLDER, saved_arrays.fields(state))
    writer.wait()
    writer.close()
    facts = {
        key: getattr(saved, key)
        for key in ("position", "time", "metrics", "loss_statistics", "mesh")
    }
    facts |= dict(processes=1, versions={}, config=saved.config)
    facts |= dict(arrays=saved_arrays.shapes_of(state))
    manifest.commit(directory, 1, **facts)


def test_what_layers_measured_is_not_exported_but_a_bias_is_an_error(tmp_path):
    run(GOLDEN / "qwen3_moe", tmp_path / "run")
    rewrite(tmp_path / "run", "layers/mlp/measured/load", lambda leaf: leaf + 0.5)
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(GOLDEN / "qwen3_moe")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "1")
    rewrite(tmp_path / "run", "layers/mlp/measured/bias", lambda leaf: leaf.at[2, 1].set(1e-3))
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "run", tmp_path / "biased")
    message = "layers/mlp/measured/bias is not 0 (model.balance='batch'), and Qwen3MoeForCausalLM"
    assert message in str(error.value) and not (tmp_path / "biased").exists()


@pytest.mark.slow
def test_the_bias_of_a_router_is_exported_in_float32(tmp_path):
    run(GOLDEN / "dots1", tmp_path / "run", "--dtype=bfloat16")
    path = "layers/mlp/measured/bias"
    rewrite(tmp_path / "run", path, lambda leaf: leaf.at[1, 2].set(1 + 2**-20))
    run(tmp_path / "run", tmp_path / "back")
    found = arrays(tmp_path / "back")
    assert found["model.layers.3.mlp.gate.e_score_correction_bias"][2] == 1 + 2**-20
    assert found["model.layers.3.mlp.gate.weight"].dtype == BF16


# ---- generation ----


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("mixtral", {"expert": 2, "tensor": 2, "data": 2}, marks=SLOW),
        pytest.param("mixtral", {"expert": 4, "fsdp": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"expert": 2, "tensor": 2, "fsdp": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"fsdp": 8}, marks=SLOW),
        # The 5 experts of olmoe cannot be sharded.
        pytest.param("olmoe", {"tensor": 4, "data": 2}, marks=SLOW),
        ("dots1", {"expert": 2, "tensor": 2, "fsdp": 2}),
        pytest.param("deepseek_v2", {"tensor": 4, "data": 2}, marks=SLOW),
        pytest.param("deepseek_v2_groups", {"expert": 2, "fsdp": 4}, marks=SLOW),
        pytest.param("deepseek_v3", {"expert": 2, "tensor": 2, "fsdp": 2}, marks=SLOW),
        pytest.param("glm4_moe", {"expert": 2, "tensor": 2, "fsdp": 2}, marks=SLOW),
        pytest.param("ernie4_5_moe", {"expert": 2, "fsdp": 4}, marks=SLOW),
        pytest.param("minimax_m2", {"tensor": 2, "data": 4}, marks=SLOW),
        pytest.param("glm4", {"tensor": 2, "fsdp": 4}, marks=SLOW),
        pytest.param("stablelm", {"tensor": 2, "fsdp": 4}, marks=SLOW),
        pytest.param("youtu", {"tensor": 4, "data": 2}, marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.slow
def test_generation_with_a_cache_has_the_logits_and_tokens_of_transformers(
    family, layout, tmp_path
):
    run(GOLDEN / family, tmp_path / "run")
    raw = configfile.load_config(str(tmp_path / "run" / "config.json"))
    raw.mesh.update({"data": 1, **layout})
    cfg = parse(raw, num_devices=8)
    program, params = inference_generate.restore_params(cfg, tmp_path / "run")
    golden = np.load(GOLDEN / family / "logits.npz")
    vocabulary = golden["steps"].shape[-1]
    with program.active():
        assert_same_generation(GOLDEN / family, program.model, params)
    settings = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, vocab_size=vocabulary)
    options = dict(length=12, context=64, dtype="float32", sampling=settings, stop=[])
    prompts = golden["tokens"][:, :10].tolist()
    with jax.default_matmul_precision("highest"):
        steps = list(generate(program, params, prompts, **options))
    np.testing.assert_array_equal(np.array(steps).T, golden["generated"])


# ---- config.json ----


def test_a_run_with_experts_is_exported_as_the_first_family_that_computes_it(tiny):
    tiny.model.update(num_experts=4, num_kv_heads=4)
    deepseek = dict(qk_norm=True, router="sigmoid", router_scale=2.5, num_shared_experts=1)
    deepseek |= dict(first_dense_layers=1)
    for changes, architecture in [
        (dict(), "MixtralForCausalLM"),
        (dict(d_expert=12, balance="bias", balance_weight=0.5), "MixtralForCausalLM"),
        (dict(qk_norm=True, d_expert=12, head_dim=6), "Qwen3MoeForCausalLM"),
        (dict(qk_norm=True, router="softmax", attention="l", window=3), "Qwen3MoeForCausalLM"),
        (dict(qk_norm=True, qk_norm_heads="all", d_expert=12), "OlmoeForCausalLM"),
        (dict(router="sigmoid", d_expert=12), "SolarOpenForCausalLM"),
        (deepseek | dict(d_expert=12, expert_groups=(2, 1)), "Dots1ForCausalLM"),
    ]:
        section = tiny.model.to_dict() | changes
        config = config_json.to_config(section)
        assert config["architectures"] == [architecture]
        assert config_json.differences(section, config_json.to_section(config)) == []
        if "router_aux_loss_coef" in config:
            weight = 0.0 if changes.get("balance") else 0.01
            assert config["router_aux_loss_coef"] == weight


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (dict(num_shared_experts=1), "model.shared_gate is True, not False"),
        (dict(router="sigmoid", mlp="geglu"), "model.mlp"),
        (dict(router_scale=2.0), "model.router_scale is 1.0, not 2.0"),
        (dict(expert_groups=(4, 2)), "model.expert_groups is (), not (4, 2)"),
        (dict(capacity_factor=1.5), "model.capacity_factor is 0.0, not 1.5"),
        (dict(router="softmax"), "model.router is 'topk_softmax', not 'softmax'"),
        (dict(mlp="geglu"), "model.mlp"),
        (dict(qk_norm=True, qk_norm_heads="all", head_dim=6), "model.qk_norm_heads"),
        (dict(attention="lg", window=3, qk_norm=True), "model.router is 'sigmoid', not"),
        (
            dict(router="sigmoid", qk_norm=True, num_shared_experts=1, expert_groups=(4, 2)),
            "model.expert_groups is (), not (4, 2)",
        ),
    ],
    ids=str,
)
def test_a_mixture_that_transformers_computes_otherwise_is_not_exported(changes, part, tiny):
    tiny.model.update(num_experts=4, **changes)
    with pytest.raises(ConfigError) as error:
        config_json.to_config(tiny.model.to_dict())
    assert part in str(error.value)


@pytest.mark.parametrize("family", FAMILIES[1:4])
def test_a_run_with_experts_is_exported_as_its_original_family_with_new_weights_of_the_loss(family):
    section = weights.model_section(GOLDEN / family) | dict(balance_weight=0.125)
    original = json.loads((GOLDEN / family / "config.json").read_text())
    config = config_json.to_config(section, original)
    assert config["architectures"] == original["architectures"]
    assert config["router_aux_loss_coef"] == 0.125


def test_the_width_of_dense_layers_makes_another_model():
    section = weights.model_section(GOLDEN / "dots1")
    found = config_json.differences(section, section | dict(d_ff=32))
    assert found == ["model.d_ff is 32, not 24"]
