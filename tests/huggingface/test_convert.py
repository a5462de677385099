"""Hugging Face folders: imported models compute the logits of transformers, and export to the same bits."""

import functools
import importlib
import json
import math
import os
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import ROOT

from meshtrain.checkpoint import manifest
from meshtrain.cli import app
from meshtrain.config import load as configfile
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, convert, files, names, weights
from meshtrain.inference import generate
from meshtrain.models import blocks
from meshtrain.parallel.mesh import make_mesh

slow = pytest.mark.slow
GOLDEN = Path(__file__).resolve().parent / "golden"  # see make_golden.py
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
BF16 = np.dtype(ml_dtypes.bfloat16)
# Half a unit in the last place of each weight changes Gemma 2's logits by 2e-5, and Gemma 3's by 4e-5.
LOGIT_ATOL = dict.fromkeys(FAMILIES, 1e-5) | {"gemma2": 2e-5, "gemma3": 4e-5}


def tensor_bytes(folder):
    """Returns the bytes, shape and dtype of each tensor in a folder."""
    found = files.tensors(folder)
    return {name: (t.read().tobytes(), t.shape, t.code) for name, t in found.items()}


def save(folder, tensors, shard_bytes=1 << 40):
    """Writes a dict of tensors to a folder."""
    specs = [files.TensorSpec(name, x.shape, x.dtype) for name, x in tensors.items()]
    files.write(folder, specs, tensors.values(), shard_bytes=shard_bytes)


def arrays(folder):
    return {name: np.array(tensor.read()) for name, tensor in files.tensors(folder).items()}


@pytest.fixture
def folder_of(tmp_path):
    """Copies a family's folder, with a changed config.json and changed tensors."""

    def make(family, config=None, change=lambda tensors: None, **keys):
        folder = shutil.copytree(GOLDEN / family, tmp_path / f"changed-{family}")
        original = json.loads((folder / "config.json").read_text())
        text = json.dumps(original | keys if config is None else config)
        (folder / "config.json").write_text(text)
        tensors = arrays(folder)
        change(tensors)
        save(folder, tensors)
        return folder

    return make


def run(*arguments):
    """Runs the verb; raises ConfigError with its exit code and stderr if it fails."""
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(
            "sys.stderr", type("Tee", (), {"write": printed.append, "flush": lambda: None})
        )
        code = app.main("convert", [str(argument) for argument in arguments])
    if code:
        raise ConfigError(f"exit code {code}: " + "".join(printed))


def load(folder, dtype="float32", **sizes):
    """Returns the model and parameters of a folder, on a mesh of 8 devices or of `sizes`."""
    section = weights.model_section(folder)
    model = convert.model_of(section)
    sizes = sizes or {"fsdp": 8}
    mesh = make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    rules = default.get_config().rules
    abstract = convert.abstract_params(model, np.dtype(dtype), rules, mesh)
    return model, weights.read(folder, abstract, section)


def logits(model, params, tokens, positions=None, segments=None):
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), positions, segments)
    x = blocks.run_blocks(
        model.block, model.stack(params["layers"]), model.embed(params, batch), batch
    )
    return model.logits(params, x)


def assert_same_logits(folder, model, params, atol):
    """Compares full rows, rows with padding, and packed documents with logits.npz."""
    golden = np.load(folder / "logits.npz")
    tokens, vocabulary = golden["tokens"].astype(np.int32), golden["logits"].shape[-1]
    positions = np.arange(tokens.shape[1])
    padding = (positions[None] >= golden["lengths"][:, None]).astype(np.int32)
    lengths = golden["documents"]
    documents = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    packed_inputs = (positions - starts).astype(np.int32)[None], documents[None]
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(functools.partial(logits, model))
        full = compiled(params, tokens)
        padded = compiled(params, tokens, np.tile(positions, (2, 1)).astype(np.int32), padding)
        packed = compiled(params, tokens[:1], *packed_inputs)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    assert_close(full[..., :vocabulary], golden["logits"])
    assert_close(np.where(padding[..., None], 0, padded[..., :vocabulary]), golden["padded"])
    assert_close(packed[0, :, :vocabulary], golden["packed"])


# ---- logits and bits ----


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family):
    assert_same_logits(GOLDEN / family, *load(GOLDEN / family), LOGIT_ATOL[family])


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_in_shards_restores_every_bit(family, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "COPY_BYTES", 200)  # so that a tensor needs several copies
    run(GOLDEN / family, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back", "--max_shard_gb=14e-6")
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 2 and all(path.stat().st_size < 18_000 for path in shards)
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(GOLDEN / family)
    original, exported = (
        config_json.read(f / "config.json") for f in (GOLDEN / family, tmp_path / "back")
    )
    made_explicit = {
        "n_inner",
        "max_window_layers",
        *weights.family_in(GOLDEN / family).aliases,
    }
    assert {key for key in original if original[key] != exported.get(key)} <= made_explicit


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_import_of_bfloat16_shards_keeps_every_bit(family, tmp_path):
    shutil.copytree(GOLDEN / family, source := tmp_path / "shards")
    tensors = {name: x.astype(BF16) for name, x in arrays(source).items()}
    (source / files.SINGLE_FILE).unlink()
    save(source, tensors, shard_bytes=7000)
    assert len(list(source.glob("*.safetensors"))) > 2
    run(source, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["param_dtype"] == config["optim"]["moment_dtype"] == "bfloat16"
    run(tmp_path / "run", tmp_path / "back")
    assert (tmp_path / "back" / files.SINGLE_FILE).is_file()
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(source)


def test_an_imported_workdir_can_be_restored_as_a_run(tmp_path):
    run(GOLDEN / "gemma3", tmp_path / "run")
    raw = configfile.load_config(str(tmp_path / "run" / "config.json"))
    assert raw.data.vocab_size == 61 and raw.data.seq_len == 64  # as in the model
    cfg = parse(raw, num_devices=8)
    _, params = generate.restore_params(cfg, tmp_path / "run")
    assert_same_logits(GOLDEN / "gemma3", build_model(cfg), params, LOGIT_ATOL["gemma3"])


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 8}, {"data": 2, "tensor": 2, "fsdp": 2}, {"pipeline": 3}]
    + [{"expert": 2, "fsdp": 2, "tensor": 2}],
)
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe", "olmoe"])
def test_each_byte_is_read_once_on_every_mesh(family, sizes, monkeypatch):
    copied = []
    copy_values = weights._copy_values
    monkeypatch.setattr(
        weights,
        "_copy_values",
        lambda *args, **keys: (copied.append(args[0].nbytes), copy_values(*args, **keys)),
    )
    load(GOLDEN / family, **sizes)
    assert sum(copied) == sum(len(data) for data, _, _ in tensor_bytes(GOLDEN / family).values())


@pytest.mark.parametrize(
    ("stored", "flag", "imported"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float64", "float32", "float32"),
    ],
)
def test_a_dtype_is_converted_by_rounding(stored, flag, imported, tmp_path, folder_of):
    def change(tensors):
        tensors.update({name: x.astype(stored) for name, x in tensors.items()})

    source = folder_of("qwen3", change=change)
    run(source, tmp_path / "run", *([f"--dtype={flag}"] if flag else []))
    run(tmp_path / "run", tmp_path / "back")
    expected = {name: x.astype(imported) for name, x in arrays(source).items()}
    found = arrays(tmp_path / "back")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype and found[name].tobytes() == x.tobytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == imported


MIXES = {
    "float16": ["float16"],
    "norms in float32": ["float16", "float32"],
    "three dtypes": ["float16", "bfloat16", "float32"],
    "bfloat16 and float32": ["bfloat16", "float32"],
}


@slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("mix", MIXES)
def test_each_tensor_keeps_its_dtype(mix, family, tmp_path, folder_of):
    def change(tensors):
        for number, name in enumerate(tensors):
            dtype = MIXES[mix][number % len(MIXES[mix])]
            tensors[name] = tensors[name].astype(dtype)

    source = folder_of(family, change=change, dtype="float16")
    run(source, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(source)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"
    run(tmp_path / "run", tmp_path / "wide", "--dtype=float32")
    assert {x.dtype for x in arrays(tmp_path / "wide").values()} == {np.dtype("float32")}


def test_trained_parameters_have_the_dtype_of_the_run(tmp_path, folder_of):
    def change(tensors):
        tensors.update({name: x.astype("float16") for name, x in tensors.items()})

    run(folder_of("qwen3", change=change), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = manifest.read(checkpoints / "0")
    (checkpoints / "0").rename(checkpoints / "5.partial")
    (checkpoints / "5.partial" / "MANIFEST.json").unlink()
    facts = {
        key: getattr(saved, key)
        for key in ("position", "time", "metrics", "loss_statistics", "mesh")
    }
    facts |= dict(processes=1, versions={}, config=saved.config, arrays=saved.arrays)
    manifest.commit(checkpoints, 5, **facts)
    run(tmp_path / "run", tmp_path / "back")
    assert {x.dtype for x in arrays(tmp_path / "back").values()} == {np.dtype("float32")}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("text", ["[]", "{", '{"model.norm.weight": "int8"}', '{"a": []}', "7"])
def test_a_damaged_list_of_dtypes_is_reported(text, tmp_path):
    run(GOLDEN / "qwen3", tmp_path / "run")
    (tmp_path / "run" / "huggingface_dtypes.json").write_text(text)
    with pytest.raises(ConfigError, match="exit code 2: .*huggingface_dtypes.json: is damaged"):
        run(tmp_path / "run", tmp_path / "back")
    (tmp_path / "run" / "huggingface_dtypes.json").write_text('{"model.norm.weight": "float16"}')
    with pytest.raises(ConfigError, match="model.norm.weight: float16 does not represent its val"):
        run(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_rejected(dtype, value, tmp_path, folder_of):
    def change(tensors):
        tensors.update({name: x.astype(dtype) for name, x in tensors.items()})
        tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value

    name = "model.layers.1.mlp.up_proj.weight has values that are NaN or infinite; download"
    with pytest.raises(ConfigError, match=f"exit code 2: .*model.safetensors: {name}"):
        run(folder_of("llama3", change=change), tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


def test_a_run_with_values_that_are_not_finite_is_not_exported(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(weights.np, "isfinite", lambda x: np.ones(x.shape, bool))
        folder = shutil.copytree(GOLDEN / "gpt2", tmp_path / "nan")
        tensors = arrays(folder)
        tensors["transformer.h.1.attn.c_attn.bias"][0] = np.nan
        save(folder, tensors)
        run(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match="h.1.attn.c_attn.bias has values .* earlier checkpoint"):
        run(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_value_beyond_the_range_of_the_dtype_is_rejected(tmp_path, folder_of):
    def change(tensors):
        tensors["model.norm.weight"][3] = 1e6

    run(folder_of("qwen3", change=change), tmp_path / "run")
    with pytest.raises(ConfigError, match="--dtype=float16: model.norm.weight has values beyond"):
        run(tmp_path / "run", tmp_path / "back", "--dtype=float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed-qwen3", "run"]


# ---- config.json ----

LLAMA = dict(hidden_act="silu", rms_norm_eps=1e-5, vocab_size=32000)
HUB = {  # config.json of well-known models (the keys of the model), and their number of parameters
    "gpt2": (
        dict(
            architectures=["GPT2LMHeadModel"],
            activation_function="gelu_new",
            n_ctx=1024,
            n_embd=768,
            n_head=12,
            n_layer=12,
            n_positions=1024,
            vocab_size=50257,
        ),
        124_439_808,
    ),
    "Llama-2-7b": (
        LLAMA
        | dict(
            architectures=["LlamaForCausalLM"],
            hidden_size=4096,
            intermediate_size=11008,
            max_position_embeddings=4096,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=32,
            rope_scaling=None,
            tie_word_embeddings=False,
        ),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        LLAMA
        | dict(
            architectures=["LlamaForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=131072,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rope_theta=500000.0,
            rope_scaling=dict(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            vocab_size=128256,
        ),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        LLAMA
        | dict(
            architectures=["MistralForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        dict(
            architectures=["Qwen2ForCausalLM"],
            hidden_act="silu",
            hidden_size=896,
            intermediate_size=4864,
            max_position_embeddings=32768,
            max_window_layers=24,
            num_attention_heads=14,
            num_hidden_layers=24,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        dict(
            architectures=["Qwen3ForCausalLM"],
            attention_bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=1024,
            intermediate_size=3072,
            max_position_embeddings=40960,
            max_window_layers=28,
            num_attention_heads=16,
            num_hidden_layers=28,
            num_key_value_heads=8,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            tie_word_embeddings=True,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        596_049_920,
    ),
    "Mixtral-8x7B-v0.1": (
        LLAMA
        | dict(
            architectures=["MixtralForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_experts_per_tok=2,
            num_hidden_layers=32,
            num_key_value_heads=8,
            num_local_experts=8,
            output_router_logits=False,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        dict(
            architectures=["Qwen3MoeForCausalLM"],
            attention_bias=False,
            decoder_sparse_step=1,
            head_dim=128,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=6144,
            max_position_embeddings=40960,
            max_window_layers=48,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
            output_router_logits=False,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.001,
            sliding_window=None,
            tie_word_embeddings=False,
            use_sliding_window=False,
            vocab_size=151936,
        ),
        30_532_122_624,
    ),
    "OLMoE-1B-7B-0924": (
        dict(
            architectures=["OlmoeForCausalLM"],
            attention_bias=False,
            clip_qkv=None,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=1024,
            max_position_embeddings=4096,
            norm_topk_prob=False,
            num_attention_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            num_hidden_layers=16,
            num_key_value_heads=16,
            output_router_logits=False,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=10000.0,
            router_aux_loss_coef=0.01,
            tie_word_embeddings=False,
            vocab_size=50304,
        ),
        6_919_161_856,
    ),
    "gemma-2-2b": (
        dict(
            architectures=["Gemma2ForCausalLM"],
            attention_bias=False,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            hidden_size=2304,
            intermediate_size=9216,
            max_position_embeddings=8192,
            num_attention_heads=8,
            num_hidden_layers=26,
            num_key_value_heads=4,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            sliding_window=4096,
            vocab_size=256000,
        ),
        2_614_341_888,
    ),
    "gemma-3-1b": (
        dict(
            architectures=["Gemma3ForCausalLM"],
            attn_logit_softcapping=None,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            num_attention_heads=4,
            num_hidden_layers=26,
            num_key_value_heads=1,
            query_pre_attn_scalar=256,
            rms_norm_eps=1e-6,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            vocab_size=262144,
        ),
        999_885_952,
    ),
    "gemma-3-4b": (
        dict(
            architectures=["Gemma3ForConditionalGeneration"],
            eos_token_id=[1, 106],
            text_config=dict(
                hidden_size=2560,
                intermediate_size=10240,
                model_type="gemma3_text",
                num_hidden_layers=34,
                rope_scaling=dict(factor=8.0, rope_type="linear"),
                sliding_window=1024,
            ),
            vision_config=dict(hidden_size=1152, num_hidden_layers=27),
        ),
        3_880_263_168,
    ),
}


def write_config(path, config):
    path.write_text(json.dumps(config))
    return path.parent


@pytest.mark.parametrize("model", HUB)
def test_a_hub_config_gives_the_number_of_parameters_of_its_model(model, tmp_path):
    config, num_parameters = HUB[model]
    folder = write_config(tmp_path / "config.json", config)
    section = weights.model_section(folder)
    family, init = weights.family_in(folder), convert.model_of(section).init
    paths = weights.paths(jax.eval_shape(init, jax.random.key(0)), family)
    rows = names.rows(family.names, paths, section)
    sizes = {name: math.prod(row.shape) for row in rows for name in row.tensors}
    assert sum(sizes.values()) == num_parameters


def test_a_hub_config_gives_the_attention_and_rope_of_each_layer(tmp_path):
    found = {}
    for model, (config, _) in HUB.items():
        s = weights.model_section(write_config(tmp_path / "config.json", config))
        found[model] = s["attention"], s["window"], s["rope_theta"], s["rope_theta_local"]
        found[model] += (s["rope_scaling"],)
    assert found == {
        "gpt2": ("g", 0, 1e4, 0.0, ()),
        "Llama-2-7b": ("g", 0, 1e4, 0.0, ()),
        "Llama-3.1-8B": ("g", 0, 5e5, 0.0, ("llama3", 8.0, 1.0, 4.0, 8192.0)),
        "Mistral-7B-v0.1": ("l", 4096, 1e4, 0.0, ()),
        "Qwen2.5-0.5B": ("g", 0, 1e6, 0.0, ()),
        "Qwen3-0.6B": ("g", 0, 1e6, 0.0, ()),
        "Mixtral-8x7B-v0.1": ("g", 0, 1e6, 0.0, ()),
        "Qwen3-30B-A3B": ("g", 0, 1e6, 0.0, ()),
        "OLMoE-1B-7B-0924": ("g", 0, 1e4, 0.0, ()),
        "gemma-2-2b": ("lg", 4096, 1e4, 0.0, ()),
        "gemma-3-1b": ("lllllg", 512, 1e6, 1e4, ()),
        "gemma-3-4b": ("lllllg", 1024, 1e6, 1e4, ("linear", 8.0)),
    }


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Mixtral-8x7B-v0.1", "mixtral"),
        ("Qwen3-30B-A3B", "qwen3_moe"),
        ("OLMoE-1B-7B-0924", "olmoe"),
    ],
)
def test_a_config_of_a_mixture_is_that_of_its_model_on_the_hub(model, name):
    section = importlib.import_module(f"configs.{name}").get_config().model.to_dict()
    hub = config_json.to_section(HUB[model][0])
    assert config_json.differences(section, hub) == []
    keys = ("balance", "balance_weight", "max_seq_len")
    assert [section[key] for key in keys] == [hub[key] for key in keys]


EXTRA_KEYS = {  # keys of newer and older versions of transformers that do not change the logits
    "any": dict(
        use_cache=False,
        initializer_range=0.01,
        attention_dropout=0.0,
        dtype="bfloat16",
        torch_dtype="bfloat16",
        rope_scaling=None,
        partial_rotary_factor=1.0,
        is_causal=True,
        quantization_config=None,
        transformers_version="4.31.0",
    ),
    "llama2": dict(pretraining_tp=1, layer_types=["full_attention"] * 3, sliding_window=None),
    "llama3": dict(mlp_bias=False, use_sliding_window=False, max_window_layers=3),
    "mistral": dict(layer_types=["sliding_attention"] * 3, attention_bias=False, mlp_bias=False),
    "qwen2": dict(attention_bias=False, mlp_bias=False, use_mrope=False),
    "qwen3": dict(attention_bias=None, layer_types=None, sliding_window=4096),
    "yarn": dict(sliding_window=4096, rope_theta=7.0, original_max_position_embeddings=8),
    "mixtral": dict(layer_types=["sliding_attention"] * 3, output_router_logits=True),
    "qwen3_moe": dict(attention_bias=None, mlp_only_layers=None, max_window_layers=1),
    "dots1": dict(num_local_experts=6, max_window_layers=9, output_router_logits=True),
    "deepseek_v2": dict(n_group=None, topk_group=None, seq_aux=True, scoring_func="softmax"),
    "deepseek_v2_groups": dict(moe_layer_freq=1, ep_size=1, num_experts=6, head_dim=4),
    "deepseek_v3": dict(topk_method="noaux_tc", scoring_func="sigmoid", rope_interleave=True),
    "olmoe": dict(head_dim=4, num_local_experts=5, output_router_logits=True),
    "gemma2": dict(attention_bias=None, hidden_act="gelu_pytorch_tanh", layer_types=None),
    "gemma3": dict(layer_types=None, sliding_window_pattern=2, use_bidirectional_attention=None),
    "gpt2": dict(n_ctx=32, gradient_checkpointing=False, layer_types=["full_attention"] * 3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_do_not_change_the_logits_are_accepted(family):
    config = config_json.read(GOLDEN / family / "config.json")
    more = EXTRA_KEYS["any"] | EXTRA_KEYS[family]
    assert config_json.to_section(config | more) == config_json.to_section(config)


def test_a_null_window_means_global_attention():
    windowed = HUB["Qwen2.5-0.5B"][0] | dict(use_sliding_window=True, max_window_layers=0)
    assert config_json.to_section(windowed | dict(sliding_window=None))["attention"] == "g"


NEW_KEYS = ("rope_parameters", "dtype")
OLD_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype")


@pytest.mark.parametrize("removed", [NEW_KEYS, OLD_KEYS, ()], ids=["old keys", "new keys", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_config_can_be_read_by_old_and_new_keys(family, removed):
    section = weights.model_section(GOLDEN / family)
    config = config_json.to_config(section)
    partial = {key: value for key, value in config.items() if key not in removed}
    assert config_json.to_section(partial) == section
    assert (
        config["architectures"]
        == config_json.read(GOLDEN / family / "config.json")["architectures"]
    )


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        (dict(attention="l", window=7), "MistralForCausalLM"),
        (dict(qkv_bias=True), "Qwen2ForCausalLM"),
        (dict(qk_norm=True, attention="ggl", window=3, head_dim=6), "Qwen3ForCausalLM"),
        (dict(norm="layer", positions="learned", mlp="gelu", bias=True), "GPT2LMHeadModel"),
    ],
    ids=str,
)
def test_a_run_trained_here_is_exported_as_the_matching_family(tiny, changes, architecture):
    section = {**tiny.model.to_dict(), "num_kv_heads": 4, "num_layers": 3} | changes
    config = config_json.to_config(section)
    assert config["architectures"] == [architecture]
    assert config_json.differences(section, config_json.to_section(config)) == []


def test_defaults_of_transformers_that_do_not_apply_are_overridden(tiny):
    """Token ids must be null; Gemma 2 of transformers rejects a null window, so it gets the default."""
    assert config_json.to_config(tiny.model.to_dict())["eos_token_id"] is None
    section = weights.model_section(GOLDEN / "gemma2") | {"attention": "g", "window": 0}
    assert config_json.to_config(section)["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("keys", "attention"),
    [
        (dict(use_sliding_window=True, max_window_layers=21), "g" * 21 + "l" * 3),
        (dict(use_sliding_window=True, max_window_layers=0), "l"),
        (dict(use_sliding_window=False, max_window_layers=0), "g"),
    ],
    ids=str,
)
def test_the_last_layers_of_qwen_are_local_if_layer_types_is_missing(keys, attention):
    assert config_json.to_section(HUB["Qwen2.5-0.5B"][0] | keys)["attention"] == attention


def test_a_model_without_a_family_is_reported_with_the_nearest_one(tiny):
    section = {**tiny.model.to_dict(), "attention": "lg", "window": 4, "embed_scale": 2.0}
    with pytest.raises(ConfigError) as error:
        config_json.to_config(section)
    assert "nearest is Qwen2ForCausalLM" in str(error.value)
    assert "model.embed_scale is 1.0, not 2.0" in str(error.value)


@pytest.mark.parametrize(
    ("family", "keys", "parts"),
    [
        ("llama3", dict(architectures=["BertModel"]), ["BertModel", "GPT2LMHeadModel"]),
        ("llama3", dict(architectures=[], model_type="t5"), ["architectures=[]"]),
        ("llama3", dict(hidden_act="gelu"), ["hidden_act='gelu'", "'silu'"]),
        ("llama3", dict(attention_bias=True), ["attention_bias=True", "mlp_bias=False"]),
        ("qwen3", dict(attention_bias=True), ["attention_bias=True"]),
        ("llama3", dict(rope_parameters=dict(rope_type="longrope")), ["longrope", "llama3"]),
        ("llama3", dict(rope_parameters=dict(rope_type="yarn")), ["factor=None"]),
        ("llama3", dict(rope_parameters=dict(rope_type="dynamic")), ["factor=None"]),
        ("llama3", dict(rope_parameters=dict(rope_type="linear")), ["factor=None"]),
        ("llama3", dict(rope_parameters=7), ["rope_parameters=7"]),
        ("llama3", dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5"]),
        ("llama3", dict(quantization_config=dict(bits=4)), ["quantization_config="]),
        ("llama3", dict(hidden_size=0, vocab_size="61"), ["hidden_size=0", "vocab_size='61'"]),
        ("llama3", dict(hidden_size=True), ["hidden_size=True", "bool"]),
        ("llama3", dict(num_hidden_layers=None), ["num_hidden_layers=None"]),
        ("llama3", dict(is_causal=False), ["is_causal=False"]),
        ("llama3", dict(architectures=7), ["architectures=7"]),
        ("llama3", dict(layer_types=["sliding_attention"] * 3), ["layer_types=", "full_attention"]),
        ("mistral", dict(layer_types=["full_attention"] * 3), ["layer_types=", "sliding_att"]),
        ("mistral", dict(layer_types=["sliding_attention"] * 2), ["layer_types="]),
        ("qwen2", dict(layer_types=[{}] * 3), ["layer_types="]),
        ("qwen2", dict(max_window_layers=None), ["max_window_layers=None"]),
        ("gemma3", dict(query_pre_attn_scalar=0), ["query_pre_attn_scalar=0"]),
        ("gemma3", dict(sliding_window_pattern="6"), ["sliding_window_pattern='6'"]),
        ("qwen2", dict(layer_types=["chunked_attention"] * 3), ["chunked_attention"]),
        ("qwen2", dict(layer_types=["full_attention"]), ["layer_types="]),
        ("qwen2", dict(sliding_window=None), ["sliding_window=None"]),
        ("gpt2", dict(activation_function="relu"), ["activation_function='relu'"]),
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), ["scale_attn_by_inverse_layer_idx"]),
        ("gemma2", dict(hidden_activation="gelu"), ["hidden_activation='gelu'", "tanh"]),
        ("gemma3", dict(use_bidirectional_attention=True), ["use_bidirectional_attention"]),
    ],
    ids=str,
)
def test_unsupported_keys_are_reported(family, keys, parts, tmp_path):
    config = json.loads((GOLDEN / family / "config.json").read_text())
    folder = write_config(tmp_path / "config.json", config | keys)
    with pytest.raises(ConfigError) as error:
        weights.model_section(folder)
    assert [part for part in (*parts, "config.json: ") if part not in str(error.value)] == []


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"a": 1}', "\0", "[" * 100_000])
def test_an_unreadable_config_is_reported(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json: "):
        weights.model_section(tmp_path)


def test_a_config_may_have_a_byte_order_mark_and_crlf(tmp_path):
    text = (GOLDEN / "llama3" / "config.json").read_text().replace("\n", "\r\n")
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert weights.model_section(tmp_path) == weights.model_section(GOLDEN / "llama3")


# ---- alternative names, extra tensors ----


def test_gpt2_files_without_prefix_and_with_masks_are_accepted(folder_of):
    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
        tensors["h.0.attn.masked_bias"] = np.ones((1,), np.float32)

    model, params = load(folder_of("gpt2", change=change))
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "gpt2")[1])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_multimodal_gemma3_is_imported(prefix, folder_of):
    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        tensors["vision_tower.x"] = tensors["multi_modal_projector.y"] = np.ones(3, np.float32)

    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    del text["architectures"]
    config = dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    _, params = load(folder_of("gemma3", config=config, change=change))
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "gemma3")[1])


def test_a_tied_head_in_the_file_is_accepted_if_it_equals_the_embedding(folder_of):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)

    _, params = load(folder_of("llama3", change=change))
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "llama3")[1])


def test_a_tied_head_that_differs_from_the_embedding_is_rejected(folder_of):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1e-7)

    with pytest.raises(ConfigError, match="lm_head.weight is not equal to .*tie_word_embeddings"):
        load(folder_of("llama3", change=change))


def test_tensors_that_do_not_match_the_config_are_listed(folder_of):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.self_attn.q_proj.weight"] = np.ones((16, 24), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(24, np.float32)

    with pytest.raises(ConfigError) as error:
        load(folder_of("llama3", change=change))
    head, *table = error.value.faults
    assert "3 tensors" in head and "LlamaForCausalLM" in head
    assert [line.split() for line in table] == [
        "model.layers.0.self_attn.q_proj.bias expected none found [24] F32".split(),
        "model.layers.1.mlp.up_proj.weight expected [24, 16] found none".split(),
        "model.layers.2.self_attn.q_proj.weight expected [24, 16] found [16, 24] F32".split(),
    ]


@pytest.mark.parametrize(
    ("family", "key", "number"),
    [("llama3", "num_hidden_layers", 10**12), ("gemma3", "num_hidden_layers", 10**12)]
    + [("gpt2", "n_layer", 10**12), ("gpt2", "n_embd", 2**61), ("gemma3", "head_dim", 2**63)]
    + [("mixtral", "num_local_experts", 900), ("olmoe", "num_experts", 2**61)],
)
def test_absurd_sizes_are_reported_before_anything_is_allocated(
    family, key, number, folder_of, tmp_path
):
    folder = folder_of(family, **{key: number}, layer_types=None)
    with pytest.raises(ConfigError, match=f"exit code 2: .*config.json: {key}={number}: .*tensor"):
        run(folder, tmp_path / "run")


def test_tensors_are_checked_before_free_space(folder_of, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "check_free_space", lambda *_: pytest.fail("checked free space"))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight .*\[62, 16\]"):
        run(folder_of("llama3", vocab_size=62), tmp_path / "run")


# ---- damaged files ----


def change_header(data, **fields):
    """Returns the bytes of a file with changed header fields of its first tensor."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= fields
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def file_bytes(text, data=b""):
    return struct.pack("<Q", len(text)) + text + data


DAMAGE = {
    "empty": lambda data: b"",
    "truncated in the length": lambda data: data[:5],
    "truncated in the header": lambda data: data[:100],
    "truncated in the tensors": lambda data: data[:-1],
    "extra byte": lambda data: data + b"\0",
    "huge header": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    "invalid JSON": lambda data: data[:8] + b"x" + data[9:],
    "a list": lambda data: file_bytes(b"[]"),
    "a number": lambda data: file_bytes(b'{"a": 1}'),
    "no offsets": lambda data: file_bytes(b'{"a": {"dtype": "F32", "shape": []}}'),
    "duplicate name": lambda data: file_bytes(
        b'{"a": %s, "a": %s}' % (2 * (b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}',)),
        b"x",
    ),
    "deeply nested": lambda data: file_bytes(b"[" * 100_000),
    "not UTF-8": lambda data: file_bytes(b"\xff\xfe"),
    "unknown dtype": lambda data: change_header(data, dtype="F4"),
    "a gap": lambda data: change_header(data, shape=[1], data_offsets=[4, 8]),
    "an overlap": lambda data: change_header(data, shape=[1], data_offsets=[0, 4]),
    "another shape": lambda data: change_header(data, shape=[3]),
    "a negative shape": lambda data: change_header(data, shape=[-1, -61]),
    "a float": lambda data: change_header(data, shape=[1.0]),
    "beyond the end": lambda data: change_header(
        data, shape=[1], data_offsets=[1 << 70, (1 << 70) + 4]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_reported_by_name(damage, folder_of, tmp_path):
    folder = folder_of("llama3")
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ConfigError, match="exit code 2: .*model.safetensors: is damaged"):
        run(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.partial").exists()


def test_files_are_compatible_with_the_safetensors_package(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, BF16)}
    tensors["ü/\u4e2d"] = np.ones((2, 1, 2), np.float16)
    numpy.save_file(tensors, tmp_path / files.SINGLE_FILE)
    assert {name: x.tobytes() for name, x in arrays(tmp_path).items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }
    save(tmp_path, tensors)
    for name, x in numpy.load_file(tmp_path / files.SINGLE_FILE).items():
        assert x.dtype == tensors[name].dtype and (x == tensors[name]).all()


INDEXES = {
    "invalid JSON": ("{", "is damaged"),
    "no weight_map": ("{}", "is damaged"),
    "a list": ('{"weight_map": []}', "is damaged"),
    "numbers": ('{"weight_map": {"a": 1}}', "is damaged"),
    "a file outside": ('{"weight_map": {"a": "../x.safetensors"}}', "not the name of a file"),
    "a missing file": (
        '{"weight_map": {"a": "x.safetensors"}}',
        "x.safetensors: No such",
    ),
    "a missing tensor": ('{"weight_map": {"a": "one.safetensors"}}', "has no tensor a,"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_damaged_index_is_reported_by_name(case, folder_of):
    text, message = INDEXES[case]
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).rename(folder / "one.safetensors")
    (folder / files.INDEX).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_fifo_is_not_waited_for(folder_of):
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).unlink()
    os.mkfifo(folder / "x.safetensors")
    (folder / files.INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    with pytest.raises(ConfigError, match="x.safetensors: is not a file"):
        load(folder)


@pytest.mark.parametrize("left", ["nothing", "a folder", "a link to nowhere", "a link to itself"])
def test_a_folder_without_parameters_is_reported(left, folder_of, tmp_path):
    path = folder_of("llama3") / files.SINGLE_FILE
    path.unlink()
    if left == "a folder":
        path.mkdir()
    elif left != "nothing":
        path.symlink_to(path if "itself" in left else "nowhere")
    with pytest.raises(ConfigError, match="exit code 2: .*has neither model.safetensors nor"):
        run(path.parent, tmp_path / "run")


def test_a_link_to_a_file_elsewhere_is_followed_as_in_the_cache_of_the_hub(folder_of, tmp_path):
    path = folder_of("llama3") / files.SINGLE_FILE
    path.rename(tmp_path / "blob")
    path.symlink_to("../blob")
    _, params = load(path.parent)
    jax.tree.map(np.testing.assert_array_equal, params, load(GOLDEN / "llama3")[1])


def test_pickled_parameters_are_not_read(folder_of):
    folder = folder_of("llama3")
    (folder / files.SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pytorch_model.bin can run code"):
        load(folder)


# ---- folders ----


def test_a_target_inside_the_source_is_rejected(tmp_path, folder_of):
    source = folder_of("gpt2")
    run(source, tmp_path / "run")
    (tmp_path / "link").symlink_to(source)
    before = sorted(tmp_path.rglob("*"))
    for folder, target in [
        (source, source / "run"),
        (source, tmp_path / "link" / "deep" / "run"),
        (tmp_path / "run", tmp_path / "run" / "checkpoints" / "7"),
        (tmp_path / "run" / "checkpoints" / "0", tmp_path / "run" / "checkpoints" / "0" / "hf"),
    ]:
        with pytest.raises(ConfigError, match="exit code 2: .*: is inside .*; use a TARGET"):
            run(folder, target)
    assert sorted(tmp_path.rglob("*")) == before


TENSORSTORE = (
    "RESOURCE_EXHAUSTED: Error writing local file: Failed writing: Failed to write 5307 bytes to "
    "file 4: No space left on device [os_error_code='28']"
)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError(TENSORSTORE)], ids=type
)
def test_a_full_disk_is_one_line_and_leaves_nothing(error, tmp_path, monkeypatch):
    def full(*_, **__):
        raise error

    run(GOLDEN / "gpt2", tmp_path / "run")
    monkeypatch.setattr(convert.AsyncWriter, "wait", full)
    monkeypatch.setattr(weights, "write", full)
    for source in (GOLDEN / "gpt2", tmp_path / "run"):
        with pytest.raises(ConfigError, match="exit code 2: .*new: No space left on device\\n$"):
            run(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_float64_is_rounded_only_if_the_flag_says_so(tmp_path, folder_of):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float64")

    with pytest.raises(ConfigError, match="exit code 2: .*float64; set --dtype=float32"):
        run(folder_of("qwen3", change=change), tmp_path / "run")


@pytest.mark.parametrize("config", [{}, [], None, {"model": {}}, {"model": 7, "rules": ()}])
def test_a_manifest_without_a_config_is_reported(config, tmp_path):
    run(GOLDEN / "gpt2", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = manifest.read(checkpoints / "0")
    (checkpoints / "0").rename(checkpoints / "1.partial")
    (checkpoints / "1.partial" / "MANIFEST.json").unlink()
    facts = {
        key: getattr(saved, key)
        for key in ("position", "time", "metrics", "loss_statistics", "mesh")
    }
    facts |= dict(processes=1, versions={}, config=config, arrays=saved.arrays)
    manifest.commit(checkpoints, 1, **facts)
    with pytest.raises(ConfigError, match="exit code 2: "):
        run(tmp_path / "run", tmp_path / "back")


def test_an_existing_target_is_not_changed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("run", "link"):
        with pytest.raises(ConfigError, match="exists already"):
            run(GOLDEN / "gpt2", tmp_path / name)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "new"], "nowhere: neither"),
        ([".", "new"], "neither"),
        ([GOLDEN / "gpt2", "new", "--max_shard_gb=0"], "--max_shard_gb=0.0"),
        ([GOLDEN / "gpt2", "new", "--max_shard_gb=nan"], "--max_shard_gb=nan"),
        ([GOLDEN / "gpt2", "new", "--dtype=float16"], "--dtype=float16"),
        ([GOLDEN / "gpt2", "new", "--dtype=int8"], "--dtype"),
        ([GOLDEN / "gpt2", "new", "--config=nowhere.py"], "--config=nowhere.py"),
        ([GOLDEN / "gpt2"], "TARGET"),
    ],
    ids=str,
)
def test_invalid_flags_are_reported(arguments, message, tmp_path, monkeypatch):
    source, *rest = arguments
    rest = [str(tmp_path / "new") if arg == "new" else arg for arg in rest]
    with pytest.raises(ConfigError, match=f"exit code 2: .*{message}"):
        run(tmp_path if source == "." else source, *rest)
    assert not (tmp_path / "new").exists()


def test_a_failed_conversion_leaves_nothing_and_a_killed_one_can_be_repeated(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(GOLDEN / "gpt2", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.partial" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run.partial" / "tokenizer.json").touch()
    run(GOLDEN / "gpt2", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.json",
        "huggingface.json",
    ]


def test_an_export_has_the_tokenizer_even_if_the_run_started_from_an_import(tmp_path, folder_of):
    folder = folder_of("llama3", bos_token_id=7)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "README.md").touch()
    run(folder, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "tuned")
    for name in ("tokenizer.json", "tokenizer_config.json", "huggingface.json"):
        (tmp_path / "tuned" / name).unlink()
    directory = tmp_path / "tuned" / "checkpoints"
    saved = manifest.read(directory / "0")
    saved.config["checkpoint"]["init_from"] = str(tmp_path / "run" / "checkpoints" / "0")
    facts = {
        key: getattr(saved, key)
        for key in ("position", "time", "metrics", "loss_statistics", "mesh")
    }
    facts |= dict(processes=1, versions={}, config=saved.config, arrays=saved.arrays)
    (directory / "0").rename(directory / "0.partial")
    (directory / "0.partial" / "MANIFEST.json").unlink()
    manifest.commit(directory, 0, **facts)
    for name in ("run", "tuned"):
        run(tmp_path / name, tmp_path / f"{name}-back")
        back = {path.name for path in (tmp_path / f"{name}-back").iterdir()}
        assert back == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert json.loads((tmp_path / f"{name}-back/config.json").read_text())["bos_token_id"] == 7


# ---- with transformers installed ----


def random_config(family, seed):
    """Returns a config of transformers with random sizes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    kv_heads = int(pick(1, 2, 3))
    heads = kv_heads * int(pick(1, 2))
    d_model = heads * int(pick(4, 6))
    common = dict(vocab_size=int(rng.integers(40, 140)), tie_word_embeddings=bool(pick(0, 1)))
    if family == "gpt2":
        sizes = dict(n_embd=d_model, n_head=heads, n_layer=int(pick(1, 2, 4)), n_positions=40)
        return transformers.GPT2Config(**common, **sizes, n_inner=pick(None, 20))
    layers = int(pick(1, 3, 5))
    linear = dict(rope_type="linear", factor=float(pick(1.5, 4.0)))
    llama3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0)
    llama3["original_max_position_embeddings"] = int(pick(12, 30))
    rope = {"rope_theta": float(pick(50.0, 1e4)), **pick({}, linear, llama3)}
    common |= dict(
        hidden_size=d_model,
        intermediate_size=int(rng.integers(5, 40)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=float(pick(1e-6, 1e-5)),
        rope_parameters=rope,
        head_dim=int(pick(2, 4, 10)),
    )
    window = int(pick(1, 3, 8))
    types = [pick("full_attention", "sliding_attention") for _ in range(layers)]
    if family == "llama":
        biased = bool(pick(0, 1))
        return transformers.LlamaConfig(**common, attention_bias=biased, mlp_bias=biased)
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=pick(None, window))
    if family in ("mixtral", "qwen3_moe", "olmoe"):
        experts = int(pick(3, 4, 7))
        common |= dict(num_experts_per_tok=int(rng.integers(1, experts + 1)))
        names = ("num_local_experts", "num_experts")
        common |= {names[family != "mixtral"]: experts}
    if family == "dots1":
        groups, size = int(pick(1, 2, 3)), int(pick(2, 3))
        chosen = int(rng.integers(1, groups + 1))
        return transformers.Dots1Config(
            **common,
            sliding_window=window,
            layer_types=types,
            n_routed_experts=groups * size,
            n_shared_experts=int(pick(1, 3)),
            num_experts_per_tok=int(rng.integers(1, chosen * size + 1)),
            n_group=groups,
            topk_group=chosen,
            moe_intermediate_size=int(pick(5, 12)),
            first_k_dense_replace=int(rng.integers(0, layers)),
            norm_topk_prob=True,
            routed_scaling_factor=float(pick(1.0, 2.5)),
        )
    if family in ("deepseek_v2", "deepseek_v3"):
        return random_deepseek(transformers, family, common, pick)
    if family == "mixtral":
        return transformers.MixtralConfig(**common, sliding_window=pick(None, window))
    if family == "qwen3_moe":
        common |= dict(norm_topk_prob=bool(pick(0, 1)), moe_intermediate_size=int(pick(5, 12)))
        local = dict(use_sliding_window=True, sliding_window=window)
        return transformers.Qwen3MoeConfig(**common, **pick({}, local))
    if family == "olmoe":
        del common["head_dim"]
        return transformers.OlmoeConfig(**common, norm_topk_prob=bool(pick(0, 1)))
    if family in ("qwen2", "qwen3"):
        local = dict(use_sliding_window=True, sliding_window=window, layer_types=types)
        make = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[family]
        return make(**common, **pick({}, local))
    caps = dict(attn_logit_softcapping=pick(None, 2.0), final_logit_softcapping=pick(None, 4.0))
    common |= dict(sliding_window=window, layer_types=types, query_pre_attn_scalar=int(pick(3, 9)))
    if family == "gemma2":
        return transformers.Gemma2Config(**common, **caps)
    by_layer = dict(
        full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=70.0)
    )
    return transformers.Gemma3TextConfig(**common | dict(rope_parameters=by_layer))


def random_deepseek(transformers, family, common, pick):
    """Returns a config of DeepSeek-V2 or V3 with random sizes, with and without latent queries and YaRN."""
    rope = dict(rope_type="yarn", factor=float(pick(4.0, 8.0)), rope_theta=100.0)
    rope |= dict(beta_fast=1.0, beta_slow=0.1, original_max_position_embeddings=8)
    both = dict(mscale=pick(0.3, 0.707), mscale_all_dim=pick(0.707, 1.0))
    rope |= pick({}, dict(mscale_all_dim=0.5), both)
    groups, size = int(pick(1, 2, 3)), int(pick(2, 3))
    chosen = int(pick(1, groups))
    common |= dict(num_key_value_heads=None, rope_parameters=pick(common["rope_parameters"], rope))
    del common["head_dim"]
    is_grouped = bool(pick(0, 1))
    sizes = dict(
        kv_lora_rank=int(pick(4, 10)),
        q_lora_rank=pick(None, 7),
        qk_nope_head_dim=int(pick(2, 6)),  # even: torch views pairs of dims as complex numbers
        qk_rope_head_dim=int(pick(4, 6)),
        v_head_dim=int(pick(2, 5, 14)),
        moe_intermediate_size=int(pick(5, 12)),
        n_routed_experts=groups * size + (0 if is_grouped or family == "deepseek_v3" else 1),
        n_shared_experts=int(pick(1, 3)),
        num_experts_per_tok=int(pick(1, chosen * size)),
        first_k_dense_replace=int(pick(0, common["num_hidden_layers"] - 1)),
        n_group=groups,
        topk_group=chosen,
        routed_scaling_factor=float(pick(1.0, 2.5)),
    )
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(**common, **sizes, num_mtp_layers=0)
    method = "group_limited_greedy" if is_grouped else "greedy"
    return transformers.DeepseekV2Config(**common, **sizes, topk_method=method)


@slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
    + ["mixtral", "qwen3_moe", "olmoe", "dots1", "deepseek_v2", "deepseek_v3"],
)
def test_random_models_round_trip_with_transformers(family, seed, tmp_path):
    """Logits stay the same after an import, and after an export loaded by transformers."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    from tests.huggingface import make_golden

    model = make_golden.model_of(random_config(family, seed), seed)
    model.save_pretrained(tmp_path / "original", max_shard_size="20KB")
    vocabulary = model.config.vocab_size
    tokens = np.random.default_rng(seed).integers(0, vocabulary, (2, make_golden.SEQ_LEN))
    np.savez(tmp_path / "original" / "logits.npz", **make_golden.logits_of(model, tokens))
    assert_same_logits(tmp_path / "original", *load(tmp_path / "original"), 1e-4)
    run(tmp_path / "original", tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back", "--max_shard_gb=2e-5")
    exported, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back",
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading_info.values()) and type(exported) is type(model)
    with torch.no_grad():
        after, before = (m.float().eval()(torch.tensor(tokens)).logits for m in (exported, model))
    assert torch.equal(after, before)
