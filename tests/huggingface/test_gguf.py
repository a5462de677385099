"""GGUF files, read back with the package gguf: values, names, keys and tokenizers."""

import json
import shutil

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.huggingface import weights
from meshtrain.models import rope
from tests.lib.hf import BF16, GOLDEN, arrays

gguf = pytest.importorskip("gguf")


def convert(source, target, *flags):
    return app.main("convert", [str(source), str(target), *flags])


def read(path):
    """Returns the keys and the tensors of a file, with the dims in the order of numpy."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    found = {}
    for one in reader.tensors:
        shape = [int(size) for size in one.shape[::-1]]
        data = one.data.view(BF16) if one.tensor_type.name == "BF16" else one.data
        found[one.name] = data.reshape(shape)
    return keys, found


def test_a_llama_is_read_back(tmp_path):
    """Queries and keys have the order of llama.cpp, whose rope turns neighbours."""
    assert convert(GOLDEN / "llama3", tmp_path / "m.gguf") == 0
    keys, found = read(tmp_path / "m.gguf")
    original = arrays(GOLDEN / "llama3")
    assert keys["general.architecture"] == "llama"
    expected = {
        "block_count": 3,
        "embedding_length": 16,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 6,
        "rope.dimension_count": 6,
        "rope.freq_base": 100.0,
        "feed_forward_length": 24,
        "vocab_size": 61,
        "context_length": 64,
    }
    assert {name: keys[f"llama.{name}"] for name in expected} == expected
    assert "output.weight" not in found  # its embeddings are tied
    np.testing.assert_array_equal(found["token_embd.weight"], original["model.embed_tokens.weight"])
    for name, there, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        plain = original[f"model.layers.1.self_attn.{there}.weight"].reshape(heads, 6, 16)
        values = found[f"blk.1.{name}.weight"].reshape(heads, 6, 16)
        # Row 2 i is row i, and row 2 i + 1 is row i + 3: a pair that rope turns together.
        np.testing.assert_array_equal(values[:, 0::2], plain[:, :3])
        np.testing.assert_array_equal(values[:, 1::2], plain[:, 3:])
    plain = original["model.layers.1.self_attn.v_proj.weight"]
    np.testing.assert_array_equal(found["blk.1.attn_v.weight"], plain)
    # llama.cpp divides the frequencies by these.
    section = weights.model_section(GOLDEN / "llama3")
    scaled = rope.frequencies(6, section["rope_theta"], section["rope_scaling"])
    unscaled = rope.frequencies(6, section["rope_theta"], ())
    np.testing.assert_allclose(unscaled / found["rope_freqs.weight"], scaled, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "name", "there"),
    [
        ("qwen3", "blk.2.attn_q_norm.weight", "model.layers.2.self_attn.q_norm.weight"),
        ("qwen3", "blk.2.attn_k.weight", "model.layers.2.self_attn.k_proj.weight"),
        ("llama2", "blk.0.ffn_up.bias", "model.layers.0.mlp.up_proj.bias"),
        ("olmoe", "blk.0.ffn_gate_inp.weight", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_a_tensor_has_the_name_of_llama_cpp(family, name, there, tmp_path):
    assert convert(GOLDEN / family, tmp_path / "m.gguf") == 0
    _, found = read(tmp_path / "m.gguf")
    np.testing.assert_array_equal(found[name], arrays(GOLDEN / family)[there])


def test_experts_are_one_tensor_and_kernels_of_gpt2_are_transposed(tmp_path):
    assert convert(GOLDEN / "qwen3_moe", tmp_path / "moe.gguf", "--dtype=bfloat16") == 0
    keys, found = read(tmp_path / "moe.gguf")
    original = arrays(GOLDEN / "qwen3_moe")
    experts = [
        original[f"model.layers.1.mlp.experts.{n}.down_proj.weight"].astype(BF16) for n in range(6)
    ]
    np.testing.assert_array_equal(found["blk.1.ffn_down_exps.weight"], experts)
    assert found["blk.1.ffn_gate_inp.weight"].dtype == np.float32
    assert found["blk.1.attn_norm.weight"].dtype == np.float32
    assert keys["qwen3moe.expert_used_count"] == 3 and keys["general.file_type"] == 32
    assert convert(GOLDEN / "gpt2", tmp_path / "gpt2.gguf") == 0
    _, found = read(tmp_path / "gpt2.gguf")
    plain = arrays(GOLDEN / "gpt2")["transformer.h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_qkv.weight"], plain.T)


def test_norms_of_gemma_include_their_one(folder_of, tmp_path):
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = folder_of("gemma2", layer_types=layers, query_pre_attn_scalar=6)
    assert convert(folder, tmp_path / "m.gguf") == 0
    keys, found = read(tmp_path / "m.gguf")
    plain = arrays(folder)["model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(found["blk.0.attn_norm.weight"], plain + 1)
    assert keys["gemma2.attention.sliding_window"] == 5
    assert keys["gemma2.final_logit_softcapping"] > 0


def test_a_run_is_written_by_way_of_a_folder(tmp_path):
    assert convert(GOLDEN / "qwen3", tmp_path / "run") == 0
    assert convert(tmp_path / "run", tmp_path / "run.gguf") == 0
    assert convert(GOLDEN / "qwen3", tmp_path / "folder.gguf") == 0
    (_, one), (_, other) = read(tmp_path / "run.gguf"), read(tmp_path / "folder.gguf")
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run", "run.gguf", "folder.gguf"}


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("mistral", "its layers are 'l' (l: a window of 5 tokens), and llama.cpp computes 'g'"),
        ("deepseek_v3", "DeepseekV3ForCausalLM is not one of LlamaForCausalLM, "),
        ("yarn", "rope_scaling 'yarn' is not written here"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_one_line(family, fault, tmp_path, capsys):
    assert convert(GOLDEN / family, tmp_path / "m.gguf") == 2
    error = capsys.readouterr().err
    assert fault in error and "convert_hf_to_gguf.py" in error and error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_biases_that_llama_cpp_does_not_read_are_one_line(folder_of, tmp_path, capsys):
    def change(tensors):
        for name in list(tensors):
            if name.endswith("_proj.weight") and ".self_attn." in name:
                bias = np.ones(len(tensors[name]), np.float32)
                tensors[name.removesuffix("weight") + "bias"] = bias

    for family, code in [("llama3", 0), ("qwen3", 2)]:
        folder = folder_of(family, change=change, attention_bias=True)
        assert convert(folder, tmp_path / f"{family}.gguf") == code
    assert "its attention has biases, which qwen3 has not in llama.cpp" in capsys.readouterr().err


def with_tokenizer(tmp_path, described):
    folder = shutil.copytree(GOLDEN / "llama3", tmp_path / "folder")
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def bpe(pre_tokenizer, **keys):
    vocab = {letter: number for number, letter in enumerate("abcdefgh")}
    vocab |= {"ab": 8, "cd": 9, "abcd": 10}
    merges = [["a", "b"], ["c", "d"], ["ab", "cd"]]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 11,
                "content": "<|end|>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **keys},
    }


def test_a_tokenizer_of_bytes_is_read_back(tmp_path):
    folder = with_tokenizer(tmp_path, bpe(BYTES))
    (folder / "generation_config.json").write_text('{"eos_token_id": 11}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert convert(folder, tmp_path / "m.gguf") == 0
    keys, _ = read(tmp_path / "m.gguf")
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.pre"] == "gpt-2"
    assert keys["tokenizer.ggml.merges"] == ["a b", "c d", "ab cd"]
    assert keys["tokenizer.ggml.tokens"][8:13] == ["ab", "cd", "abcd", "<|end|>", "[PAD12]"]
    assert len(keys["tokenizer.ggml.tokens"]) == 61
    kinds = gguf.TokenType
    types = [kinds.NORMAL, kinds.CONTROL, kinds.UNUSED]
    assert keys["tokenizer.ggml.token_type"][10:13] == [int(kind) for kind in types]
    assert keys["tokenizer.ggml.eos_token_id"] == 11
    assert keys["tokenizer.chat_template"] == "{{ messages }}"


def test_how_text_is_split_has_a_name_or_is_rejected(tmp_path, capsys):
    digits = {"type": "Digits", "individual_digits": True}
    steps = {"type": "Sequence", "pretokenizers": [digits, BYTES]}
    folder = with_tokenizer(tmp_path, bpe(steps))
    assert convert(folder, tmp_path / "m.gguf") == 0
    assert read(tmp_path / "m.gguf")[0]["tokenizer.ggml.pre"] == "smollm"
    (folder / "tokenizer.json").write_text(json.dumps(bpe({"type": "Whitespace"})))
    assert convert(folder, tmp_path / "other.gguf") == 2
    assert "splits text in a way that has no name in llama.cpp" in capsys.readouterr().err
    assert not (tmp_path / "other.gguf").exists()


def test_a_tokenizer_of_sentencepiece_has_the_order_of_its_merges(tmp_path):
    described = bpe(None, byte_fallback=True)
    described["normalizer"] = {"type": "Prepend", "prepend": "\u2581"}
    folder = with_tokenizer(tmp_path, described)
    assert convert(folder, tmp_path / "m.gguf") == 0
    keys, _ = read(tmp_path / "m.gguf")
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.scores"][7:11] == [-3.0, 0.0, -1.0, -2.0]
    assert keys["tokenizer.ggml.add_space_prefix"]


def test_values_beyond_the_dtype_are_named(folder_of, tmp_path, capsys):
    def change(found):
        found["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6

    folder = folder_of("qwen3", change=change)
    assert convert(folder, tmp_path / "m.gguf", "--dtype=float16") == 2
    assert "blk.0.ffn_up.weight: has values that float16 cannot hold" in capsys.readouterr().err
    assert not (tmp_path / "m.gguf").exists()
