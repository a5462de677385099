"""Imported models compute transformers' logits, whatever names and extra tensors a file has."""

import json

import jax
import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import weights
from tests.lib.hf import FAMILIES, GOLDEN, LOGIT_ATOL, assert_same_logits, load, tensor_bytes

# ---- logits and bits ----


FEW_FAMILIES = (
    "gpt2",
    "llama3",
    "gemma3",
    "olmoe",
    "glm4",
    "granite",
    "gpt_oss",
    "qwen2_moe_dense",
    "ministral3",
)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in FEW_FAMILIES else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_logits_match_transformers(family):
    assert_same_logits(GOLDEN / family, *load(GOLDEN / family), LOGIT_ATOL[family])


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
