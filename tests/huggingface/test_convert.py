"""`meshtrain convert`: exports have the bits of the import, in every dtype.

A failure leaves nothing.
"""

import json
import shutil

import numpy as np
import pytest

from meshtrain.checkpoint import manifest
from meshtrain.config import load as configfile
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, convert, files, weights
from meshtrain.inference import generate
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import (
    BF16,
    FAMILIES,
    GOLDEN,
    LOGIT_ATOL,
    arrays,
    assert_same_logits,
    load,
    run,
    save,
    tensor_bytes,
)

# ---- logits and bits ----


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_in_shards_restores_every_bit(family, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "COPY_BYTES", 200)  # so that a tensor needs several copies
    run(GOLDEN / family, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back", "--max_shard_gb=14e-6")
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 1 and all(path.stat().st_size <= 14_000 for path in shards)
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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_import_of_bfloat16_shards_keeps_every_bit(family, tmp_path):
    shutil.copytree(GOLDEN / family, source := tmp_path / "shards")
    tensors = {name: x.astype(BF16) for name, x in arrays(source).items()}
    (source / files.SINGLE_FILE).unlink()
    save(source, tensors, shard_bytes=7000)
    assert len(list(source.glob("*.safetensors"))) > 1
    run(source, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["param_dtype"] == config["optim"]["moment_dtype"] == "bfloat16"
    run(tmp_path / "run", tmp_path / "back")
    assert (tmp_path / "back" / files.SINGLE_FILE).is_file()
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(source)


@pytest.mark.slow
def test_an_imported_workdir_can_be_restored_as_a_run(tmp_path):
    run(GOLDEN / "gemma3", tmp_path / "run")
    raw = configfile.load_config(str(tmp_path / "run" / "config.json"))
    assert raw.data.vocab_size == 61 and raw.data.seq_len == 64  # as in the model
    cfg = parse(raw, num_devices=8)
    _, params = generate.restore_params(cfg, tmp_path / "run")
    assert_same_logits(GOLDEN / "gemma3", build_model(cfg), params, LOGIT_ATOL["gemma3"])


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


@pytest.mark.slow
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


def test_a_run_of_an_earlier_version_is_exported_with_the_defaults_of_later_keys(tmp_path):
    run(GOLDEN / "qwen3", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = manifest.read(checkpoints / "0")
    for key in ("rope_fraction", "rope_interleaved", "norm_bias", "router_z_loss"):
        del saved.config["model"][key]
    (checkpoints / "0").rename(checkpoints / "0.partial")
    (checkpoints / "0.partial" / "MANIFEST.json").unlink()
    facts = {
        key: getattr(saved, key)
        for key in ("position", "time", "metrics", "loss_statistics", "mesh")
    }
    facts |= dict(processes=1, versions={}, config=saved.config, arrays=saved.arrays)
    manifest.commit(checkpoints, 0, **facts)
    run(tmp_path / "run", tmp_path / "back")
    assert tensor_bytes(tmp_path / "back") == tensor_bytes(GOLDEN / "qwen3")


@pytest.mark.parametrize("text", ["[]", "{", '{"model.norm.weight": "int8"}', '{"a": []}', "7"])
@pytest.mark.slow
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


# ---- alternative names, extra tensors ----


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
        (["nowhere", "new"], "nowhere: no such folder"),
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
        names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        # An imported model has the files that it came with.
        added = {"generation_config.json", "README.md"} if name == "tuned" else set()
        assert back == names | added
        assert json.loads((tmp_path / f"{name}-back/config.json").read_text())["bos_token_id"] == 7


@pytest.mark.parametrize(("positions", "length"), [("rope", 32), ("learned", 64)])
@pytest.mark.slow
def test_an_export_can_see_the_rows_that_it_was_trained_with(positions, length, tmp_path):
    c = tiny_config()
    c.train.steps, c.eval.batches, c.data.seq_len = 0, 0, 32
    c.model.positions, c.model.max_seq_len = positions, 16 if positions == "rope" else 64
    if positions == "learned":
        c.model.update(norm="layer", mlp="gelu", bias=True, tie_embeddings=True, num_kv_heads=4)
    train(c, workdir=tmp_path / "run")
    run(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.get("max_position_embeddings", config.get("n_positions")) == length
    run(tmp_path / "hf", tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["model"]["max_seq_len"] == length


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
    if family in NEW_FAMILIES:
        return NEW_FAMILIES[family](transformers, common, pick, window, types)
    if family == "llama":
        biases = pick({}, dict(attention_bias=True), dict(attention_bias=True, mlp_bias=True))
        return transformers.LlamaConfig(**common, **biases)
    if family == "mistral":
        return transformers.MistralConfig(**common, sliding_window=pick(None, window))
    has_bias = bool(pick(0, 1))
    if family in ("qwen3", "qwen3_moe", "olmoe", "dots1", "gemma2", "gemma3"):
        common["attention_bias"] = has_bias
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
    if family in PIECES:
        return random_piece(transformers, family, common, pick, window=window, types=types)
    if family == "mixtral":
        return transformers.MixtralConfig(**common, sliding_window=pick(None, window))
    if family == "qwen3_moe":
        common |= dict(norm_topk_prob=bool(pick(0, 1)), moe_intermediate_size=int(pick(5, 12)))
        local = dict(use_sliding_window=True, sliding_window=window)
        common |= random_dense_layers(pick, layers)
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


PIECES = ("olmo2", "olmo3", "smollm3", "granite", "granitemoe", "qwen2_moe", "gpt_oss")


def random_piece(transformers, family, common, pick, *, window, types):
    """Returns a config of a family that has a piece of maths of its own."""
    num_layers = common["num_hidden_layers"]
    has_bias = bool(pick(0, 1))
    common |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    experts = dict(num_experts_per_tok=int(pick(1, 2, 3)))
    factors = dict(
        embedding_multiplier=float(pick(1.0, 12.0)),
        residual_multiplier=float(pick(0.22, 1.5)),
        attention_multiplier=float(pick(0.05, 0.5)),
        logits_scaling=float(pick(0.3, 7.0)),
    )
    if family == "olmo2":
        return transformers.Olmo2Config(**common, attention_bias=has_bias)
    if family == "olmo3":
        full = dict(rope_type="default", rope_theta=9.0)
        local = dict(rope_type="default", rope_theta=70.0)
        common["rope_parameters"] = pick(
            {"full_attention": full, "sliding_attention": local},
            {"full_attention": common["rope_parameters"], "sliding_attention": local},
        )
        options = dict(sliding_window=window, layer_types=types, attention_bias=has_bias)
        return transformers.Olmo3Config(**common, **options)
    if family == "smollm3":
        yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
        common["rope_parameters"] |= pick({}, yarn)
        return transformers.SmolLM3Config(
            **common,
            attention_bias=has_bias,
            mlp_bias=has_bias and bool(pick(0, 1)),
            no_rope_layers=pick(None, [int(pick(0, 1)) for _ in range(num_layers)]),
            no_rope_layer_interval=int(pick(1, 2)),
            use_sliding_window=bool(pick(0, 1)),
            sliding_window=window,
        )
    if family == "granite":
        return transformers.GraniteConfig(
            **common, **factors, attention_bias=has_bias, mlp_bias=has_bias and bool(pick(0, 1))
        )
    if family == "granitemoe":
        return transformers.GraniteMoeConfig(
            **common, **factors, **experts, attention_bias=has_bias, num_local_experts=4
        )
    if family == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            **common,
            **experts,
            **random_dense_layers(pick, num_layers),
            num_experts=int(pick(3, 5)),
            moe_intermediate_size=int(pick(5, 12)),
            shared_expert_intermediate_size=int(pick(3, 24)),
            norm_topk_prob=bool(pick(0, 1)),
            qkv_bias=has_bias,
            use_sliding_window=bool(pick(0, 1)),
            sliding_window=window,
            max_window_layers=int(pick(0, 2, 9)),
        )
    return transformers.GptOssConfig(
        **common,
        **experts,
        num_local_experts=int(pick(3, 5)),
        attention_bias=has_bias,
        sliding_window=window,
        layer_types=types,
        swiglu_limit=float(pick(0.3, 7.0)),
        swiglu_alpha=float(pick(0.5, 1.702)),
    )


def random_dense_layers(pick, num_layers):
    """Returns the keys of Qwen for layers with experts after dense ones."""
    num_first = int(pick(0, num_layers - 1))
    return pick(
        {},
        dict(mlp_only_layers=[*range(num_first)]),
        dict(decoder_sparse_step=num_layers),
    )


def random_deepseek(transformers, family, common, pick):
    """Returns a config of DeepSeek-V2 or V3, with random sizes.

    Some have latent queries or YaRN, others not.
    """
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


def without(common, *keys):
    return {key: value for key, value in common.items() if key not in keys}


def partly_rotated(common, pick):
    """Returns the keys with rope in some of the dims of a head."""
    head_dim = common["head_dim"] = int(pick(8, 12))
    rotated = int(pick(2, 4, head_dim))
    return common | dict(
        rope_parameters=common["rope_parameters"] | dict(partial_rotary_factor=rotated / head_dim)
    )


def random_experts(pick, layers):
    groups, size = int(pick(1, 2)), int(pick(2, 3))
    chosen = int(pick(1, groups))
    return dict(
        n_routed_experts=groups * size,
        num_experts_per_tok=int(pick(1, chosen * size)),
        n_group=groups,
        topk_group=chosen,
        moe_intermediate_size=int(pick(5, 12)),
        n_shared_experts=int(pick(1, 3)),
        routed_scaling_factor=float(pick(1.0, 2.5)),
    )


def random_latent(common, pick):
    return without(common, "head_dim") | dict(
        kv_lora_rank=int(pick(4, 10)),
        q_lora_rank=pick(None, 7),
        qk_nope_head_dim=int(pick(2, 5)),
        qk_rope_head_dim=int(pick(4, 6)),
        v_head_dim=int(pick(2, 5, 14)),
        num_key_value_heads=common["num_attention_heads"],
    )


def random_phi3(transformers, common, pick, window, types):
    common = common | dict(hidden_size=8 * common["num_attention_heads"])
    rope = dict(rope_theta=100.0, partial_rotary_factor=pick(0.5, 0.75, 1.0))
    num_factors = int(4 * rope["partial_rotary_factor"])
    long = dict(
        rope_type="longrope",
        short_factor=[1.0 + number for number in range(num_factors)],
        long_factor=[2.0 + 3 * number for number in range(num_factors)],
    )
    common |= dict(rope_parameters=rope | pick({}, long))
    common |= dict(original_max_position_embeddings=40)
    return transformers.Phi3Config(
        **without(common, "head_dim"), sliding_window=pick(None, window), pad_token_id=None
    )


def random_glm(name):
    def make(transformers, common, pick, window, types):
        common = partly_rotated(common, pick) | dict(pad_token_id=None)
        return getattr(transformers, name)(**common, attention_bias=bool(pick(0, 1)))

    return make


def random_glm_moe(transformers, common, pick, window, types):
    layers = common["num_hidden_layers"]
    return transformers.Glm4MoeConfig(
        **partly_rotated(common, pick),
        **random_experts(pick, layers),
        first_k_dense_replace=int(pick(0, layers - 1)),
        use_qk_norm=bool(pick(0, 1)),
        attention_bias=bool(pick(0, 1)),
        num_mtp_layers=0,
    )


def random_glm_lite(transformers, common, pick, window, types):
    num_dense = int(pick(0, common["num_hidden_layers"] - 1))
    num_sparse = common["num_hidden_layers"] - num_dense
    return transformers.Glm4MoeLiteConfig(
        **random_latent(common, pick),
        **random_experts(pick, common["num_hidden_layers"]),
        mlp_layer_types=["dense"] * num_dense + ["sparse"] * num_sparse,
    )


def random_ernie_moe(transformers, common, pick, window, types):
    num_experts = int(pick(3, 6))
    return transformers.Ernie4_5_MoeConfig(
        **common,
        moe_intermediate_size=int(pick(5, 12)),
        moe_num_experts=num_experts,
        moe_k=int(pick(1, num_experts)),
        moe_num_shared_experts=int(pick(0, 2)),
        moe_layer_start_index=int(pick(0, common["num_hidden_layers"] - 1)),
    )


def random_starcoder2(transformers, common, pick, window, types):
    return transformers.Starcoder2Config(
        **without(common, "rms_norm_eps"),
        norm_epsilon=1e-4,
        use_bias=bool(pick(0, 1)),
        sliding_window=pick(None, window),
    )


def random_stablelm(transformers, common, pick, window, types):
    common = without(common, "head_dim", "rms_norm_eps")
    common |= dict(hidden_size=8 * common["num_attention_heads"])
    fraction = float(pick(0.25, 0.5, 1.0))
    common["rope_parameters"]["partial_rotary_factor"] = fraction
    return transformers.StableLmConfig(**common, use_qkv_bias=bool(pick(0, 1)), layer_norm_eps=1e-4)


def random_seed_oss(transformers, common, pick, window, types):
    biases = pick(
        (False,) * 3, (True, False, False), (True, True, False), (False, True, False), (True,) * 3
    )
    keys = ("attention_bias", "attention_out_bias", "mlp_bias")
    return transformers.SeedOssConfig(**common, **dict(zip(keys, map(bool, biases), strict=True)))


# Of a config: (transformers, keys, pick, window, layer_types) -> config
NEW_FAMILIES = {
    "gemma": lambda t, common, pick, window, types: t.GemmaConfig(
        **common, attention_bias=bool(pick(0, 1))
    ),
    "vaultgemma": lambda t, common, pick, window, types: t.VaultGemmaConfig(
        **common,
        attention_bias=bool(pick(0, 1)),
        sliding_window=window,
        layer_types=types,
        query_pre_attn_scalar=int(pick(3, 9)),
        attn_logit_softcapping=pick(None, 2.0),
        final_logit_softcapping=pick(None, 4.0),
    ),
    "seed_oss": random_seed_oss,
    "ministral": lambda t, common, pick, window, types: t.MinistralConfig(
        **common, sliding_window=window, layer_types=pick(None, types)
    ),
    "ministral3": lambda t, common, pick, window, types: t.Ministral3Config(
        **common
        | dict(
            rope_parameters=common["rope_parameters"]
            | dict(llama_4_scaling_beta=float(pick(0.0, 0.3)))
            | pick(
                dict(original_max_position_embeddings=9),
                dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=11),
            )
        ),
        sliding_window=pick(None, window),
    ),
    "cwm": lambda t, common, pick, window, types: t.CwmConfig(
        **common, sliding_window=window, layer_types=pick(None, types)
    ),
    "starcoder2": random_starcoder2,
    "stablelm": random_stablelm,
    "phi3": random_phi3,
    "glm": random_glm("GlmConfig"),
    "glm4": random_glm("Glm4Config"),
    "ernie4_5": lambda t, common, pick, window, types: t.Ernie4_5Config(
        **common, use_bias=bool(pick(0, 1))
    ),
    "helium": lambda t, common, pick, window, types: t.HeliumConfig(
        **common
        | dict(head_dim=common["hidden_size"] // common["num_attention_heads"], pad_token_id=None),
        attention_bias=bool(pick(0, 1)),
    ),
    "youtu": lambda t, common, pick, window, types: t.YoutuConfig(**random_latent(common, pick)),
    "solar_open": lambda t, common, pick, window, types: t.SolarOpenConfig(
        **without(common, "intermediate_size"),
        **random_experts(pick, common["num_hidden_layers"]),
        attention_bias=bool(pick(0, 1)),
    ),
    "glm4_moe": random_glm_moe,
    "ernie4_5_moe": random_ernie_moe,
    "glm4_moe_lite": random_glm_lite,
    "minimax_m2": lambda t, common, pick, window, types: t.MiniMaxM2Config(
        **partly_rotated(common, pick),
        num_local_experts=int(pick(4, 6)),
        num_experts_per_tok=int(pick(1, 3)),
    ),
    "hy_v3": lambda t, common, pick, window, types: t.HYV3Config(
        **common,
        moe_intermediate_size=int(pick(5, 12)),
        num_experts=int(pick(4, 6)),
        num_experts_per_tok=int(pick(1, 3)),
        num_shared_experts=int(pick(1, 2)),
        attention_bias=bool(pick(0, 1)),
        mlp_layer_types=["sparse"] * common["num_hidden_layers"],
    ),
    "internlm3": lambda t, common, pick, window, types: t.InternLM3Config(**common),
    "exaone": lambda t, common, pick, window, types: t.ExaoneConfig(**common),
    "iquestcoder": lambda t, common, pick, window, types: t.IQuestCoderConfig(**common),
    "sarvam_mla": lambda t, common, pick, window, types: t.SarvamMLAConfig(
        **random_latent(common, pick),
        **random_experts(pick, common["num_hidden_layers"]),
        first_k_dense_replace=int(pick(0, common["num_hidden_layers"] - 1)),
    ),
    "sarvam_moe": lambda t, common, pick, window, types: t.SarvamMoEConfig(
        **common,
        **random_experts(pick, common["num_hidden_layers"]),
        first_k_dense_replace=int(pick(0, common["num_hidden_layers"] - 1)),
        use_qk_norm=bool(pick(0, 1)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
    + ["mixtral", "qwen3_moe", "olmoe", "dots1", "deepseek_v2", "deepseek_v3"]
    + [*NEW_FAMILIES, *PIECES],
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
