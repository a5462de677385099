"""Writes a Hugging Face folder as a GGUF file, for llama.cpp and what builds on it.

The keys, the order of rows and the tokenizers are those of llama.cpp's convert_hf_to_gguf.py. A
model or tokenizer that llama.cpp would compute in another way is rejected.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import console, foreign, storage
from meshtrain.checkpoint import manifest, run_tokenizer
from meshtrain.data import chat_template, tokenizer
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, import_optional
from meshtrain.huggingface import config_json, files, weights
from meshtrain.huggingface.families import base
from meshtrain.huggingface.families.base import Section

SUFFIX = ".gguf"


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp computes for a class of transformers."""

    name: str
    # Rows of q and k: llama.cpp's rope turns neighbours, transformers' the two halves of a head.
    permuted: bool = False
    # The weights of mixtures: of the chosen experts, or of all.
    router: str | None = None
    # The kinds of layers that it has, repeated over the layers.
    attention: str = "g"


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", permuted=True),
    "MistralForCausalLM": Architecture("llama", permuted=True),
    "MixtralForCausalLM": Architecture("llama", permuted=True, router="topk_softmax"),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", router="topk_softmax"),
    "OlmoeForCausalLM": Architecture("olmoe", router="softmax"),
    "Gemma2ForCausalLM": Architecture("gemma2", attention="lg"),
    "Gemma3ForCausalLM": Architecture("gemma3", attention="lllllg"),
    "GPT2LMHeadModel": Architecture("gpt2"),
}


def write(folder: Path, target: Path, *, dtype: str | None) -> str:
    """Writes the model of a Hugging Face folder to a new file; returns a summary.

    `dtype` is that of matrices, by default their own. Vectors, routers and positions are float32.
    Raises ConfigError for a model or tokenizer that llama.cpp does not compute as transformers.
    """
    gguf = import_optional("gguf", "gguf")
    family = weights.family_in(folder)
    section = {**config_json.SECTION_DEFAULTS, **weights.model_section(folder)}
    architecture = ARCHITECTURES.get(family.architecture)
    faults = [f"{family.architecture} is not one of {', '.join(ARCHITECTURES)}"]
    if architecture is not None:
        faults = _faults(section, architecture)
    if faults:
        remedy = "llama.cpp's own convert_hf_to_gguf.py may convert the folder"
        raise ConfigError(*(f"{folder}: {fault}; {remedy}" for fault in faults))
    assert architecture is not None
    found = _tensors(folder, section, architecture, gguf)

    partial = target.with_name(target.name + manifest.PARTIAL)
    writer = gguf.GGUFWriter(path=None, arch=architecture.name)
    try:
        _add_settings(writer, section, architecture, gguf)
        note = _add_tokenizer(writer, folder, section, gguf)
        for tensor in found:
            kind = np.dtype(dtype) if dtype and tensor.is_matrix else tensor.dtype
            tensor.add_info(writer, _kind_of(kind, gguf))
        stored = {_kind_of(np.dtype(dtype) if dtype else one.dtype, gguf) for one in found}
        stored.discard(gguf.GGMLQuantizationType.F32)
        names = {kind.name for kind in stored} or {"F32"}
        file_types = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
        writer.add_file_type(gguf.LlamaFileType[file_types[sorted(names)[0]]])
        writer.write_header_to_file(path=partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with console.progress("writing", len(found)) as advance:
            for tensor in found:
                kind = np.dtype(dtype) if dtype and tensor.is_matrix else tensor.dtype
                values = tensor.read()
                with np.errstate(over="ignore"):
                    cast = np.ascontiguousarray(values.astype(kind))
                if not np.isfinite(cast.astype(np.float32)).all():
                    raise ConfigError(f"{tensor.name}: has values that {kind} cannot hold")
                writer.write_tensor_data(cast.view(np.uint16) if kind.itemsize == 2 else cast)
                advance(1)
        writer.close()
        storage.sync(partial)
        os.rename(partial, target)
        storage.sync(target.parent)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return f"a {architecture.name} of {len(found)} tensors in {'/'.join(sorted(names))}{note}"


# ---- what llama.cpp computes ----


def _faults(section: Section, architecture: Architecture) -> list[str]:
    """Returns a fault for each key of a model that llama.cpp would ignore."""
    faults = []
    letters = base.repeat_to(section["num_layers"], section["attention"])
    expected = base.repeat_to(section["num_layers"], architecture.attention)
    if letters != expected:
        faults.append(
            f"its layers are {section['attention']!r} (l: a window of {section['window']} tokens), "
            f"and llama.cpp computes {architecture.attention!r} for {architecture.name}"
        )
    scaling = tuple(section["rope_scaling"])
    if scaling and scaling[0] not in ("linear", "llama3"):
        faults.append(f"rope_scaling {scaling[0]!r} is not written here")
    if scaling and scaling[0] == "llama3" and architecture.name != "llama":
        faults.append(f"rope_scaling 'llama3' is not one of {architecture.name} in llama.cpp")
    if architecture.router and section["router"] != architecture.router:
        faults.append(
            f"its router is {section['router']!r} (norm_topk_prob), and llama.cpp computes "
            f"{architecture.router!r}"
        )
    if section["out_bias"] and architecture.name != "llama":
        faults.append(f"its attention has biases, which {architecture.name} has not in llama.cpp")
    head_dim = config_json.head_dim(section)
    scale = section["query_scale"] or head_dim**-0.5
    if not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        faults.append(f"the factor of its attention scores is {scale:g}, not 1 / sqrt({head_dim})")
    return faults


def _add_settings(writer: Any, section: Section, architecture: Architecture, gguf: Any) -> None:
    """Adds the sizes of a model and what else llama.cpp reads."""
    head_dim = config_json.head_dim(section)
    writer.add_vocab_size(section["vocab_size"])
    writer.add_block_count(section["num_layers"])
    writer.add_context_length(section["max_seq_len"])
    writer.add_embedding_length(section["d_model"])
    writer.add_feed_forward_length(section["d_ff"])
    writer.add_head_count(section["num_heads"])
    writer.add_head_count_kv(section["num_kv_heads"])
    if section["norm"] == "layer":
        writer.add_layer_norm_eps(section["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(section["norm_epsilon"])
    if section["positions"] == "rope":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(section["rope_theta"])
        if section["rope_theta_local"]:
            writer.add_rope_freq_base_swa(section["rope_theta_local"])
        scaling = tuple(section["rope_scaling"])
        if scaling and scaling[0] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling[1])
    if "l" in architecture.attention:
        writer.add_sliding_window(section["window"])
    if section["attention_softcap"]:
        writer.add_attn_logit_softcapping(section["attention_softcap"])
    if section["logit_softcap"]:
        writer.add_final_logit_softcapping(section["logit_softcap"])
    if section["num_experts"]:
        writer.add_expert_count(section["num_experts"])
        writer.add_expert_used_count(section["experts_per_token"])
        writer.add_expert_feed_forward_length(section["d_expert"] or section["d_ff"])


# ---- tensors ----


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: how to read it, and its shape."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def is_matrix(self) -> bool:
        """Returns whether it may have another dtype than float32."""
        is_wide = self.name.endswith("ffn_gate_inp.weight") or self.name.startswith("position")
        return len(self.shape) > 1 and not is_wide

    def add_info(self, writer: Any, kind: Any) -> None:
        itemsize = 4 if kind.name == "F32" else 2
        dtype = np.dtype(np.float32 if kind.name == "F32" else np.uint16)
        size = itemsize * math.prod(self.shape)
        writer.add_tensor_info(self.name, self.shape, dtype, size, raw_dtype=kind)


def _kind_of(dtype: np.dtype, gguf: Any) -> Any:
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    return gguf.GGMLQuantizationType[kinds.get(dtype.name, "F32")]


EXPERT = re.compile(r"model\.layers\.(\d+)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")


def _tensors(folder: Path, section: Section, architecture: Architecture, gguf: Any) -> list[Tensor]:
    """Returns the tensors of a folder by the names of llama.cpp; those of experts are joined."""
    number = {name: index for index, name in gguf.MODEL_ARCH_NAMES.items()}[architecture.name]
    names = gguf.get_tensor_name_map(number, section["num_layers"])
    experts: dict[str, list[files.Tensor]] = {}
    found = []
    for name, tensor in sorted(weights.parameter_tensors(folder).items(), key=_order):
        if match := EXPERT.fullmatch(name):
            layer, kind, _, leaf = match.groups()
            joined = f"model.layers.{layer}.mlp.experts.{leaf}.weight"
            if kind == "block_sparse_moe":
                joined = f"layers.{layer}.feed_forward.experts.{leaf}.weight"
            experts.setdefault(joined, []).append(tensor)
            continue
        # llama.cpp uses the embedding where the head is tied.
        if name == "lm_head.weight" and section["tie_embeddings"]:
            continue
        found.append(_tensor(name, [tensor], names, section, architecture))
    for name, parts in experts.items():
        if len(parts) != section["num_experts"]:
            raise ConfigError(f"{folder}: {name} has {len(parts)} experts")
        found.append(_tensor(name, parts, names, section, architecture))
    scaling = tuple(section["rope_scaling"])
    if scaling and scaling[0] == "llama3":
        factors = _llama3_factors(section)
        found.append(Tensor("rope_freqs.weight", factors.shape, factors.dtype, lambda: factors))
    return found


def _order(item: tuple[str, Any]) -> list[Any]:
    """Sorts numbers in names as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in item[0].split(".")]


def _tensor(
    name: str,
    parts: list[files.Tensor],
    names: Any,
    section: Section,
    architecture: Architecture,
) -> Tensor:
    new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if new_name is None:
        raise ConfigError(f"{name}: llama.cpp has no name for it in {architecture.name}")
    shape = parts[0].shape
    is_transposed = bool(re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name))
    if is_transposed:  # the kernels of GPT-2 are (inputs, outputs)
        shape = shape[::-1]
    if len(parts) > 1 or EXPERT_NAME.search(name):
        shape = (len(parts), *shape)
    num_heads = 0
    if architecture.permuted and re.search(r"\.q_proj\.(weight|bias)$", name):
        num_heads = section["num_heads"]
    if architecture.permuted and re.search(r"\.k_proj\.(weight|bias)$", name):
        num_heads = section["num_kv_heads"]
    adds_one = section["norm"] == "rms_1p" and name.endswith("norm.weight")

    def read() -> np.ndarray:
        arrays = [part.read() for part in parts]
        values = np.stack(arrays) if len(shape) > arrays[0].ndim else np.asarray(arrays[0])
        if is_transposed:
            values = values.T
        if num_heads:
            values = permuted(values, num_heads)
        return values.astype(np.float32) + 1 if adds_one else values

    dtype = files.DTYPES[parts[0].code]
    tensor = Tensor(new_name, shape, dtype, read)
    if not tensor.is_matrix or dtype == np.float64:
        tensor = Tensor(new_name, shape, np.dtype(np.float32), read)
    return tensor


EXPERT_NAME = re.compile(r"\.experts\.\w+\.weight$")


def permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns rows (H, 2, K/2) of transformers in the order (H, K/2, 2) of llama.cpp."""
    split = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(section: Section) -> np.ndarray:
    """Returns what llama.cpp divides the rope frequencies by."""
    _, factor, low, high, length = section["rope_scaling"]
    head_dim = config_json.head_dim(section)
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    wavelengths = 2 * np.pi * section["rope_theta"] ** exponents
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelengths > length / low, factor, between)
    return np.where(wavelengths < length / high, 1.0, factors).astype(np.float32)


# ---- the tokenizer ----

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPLIT = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp knows how text is split by a name.
PRE_TOKENIZERS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (SPLIT % r"\p{N}{1,3}",): "llama-bpe",
    (SPLIT % r"\p{N}",): "qwen2",
}


def _add_tokenizer(writer: Any, folder: Path, section: Section, gguf: Any) -> str:
    """Adds the tokenizer in a folder; returns a note for the summary."""
    if not tokenizer.has_tokenizer(folder):
        writer.add_tokenizer_model("none")
        return ", without a tokenizer"
    used = tokenizer.load(folder)
    assert used.file is not None  # bytes have no files
    if used.kind == "huggingface":
        described = foreign.read_json(used.file, max_bytes=tokenizer.MAX_FILE_BYTES)
        tokens, scores, types = _add_json(writer, described, used.file, gguf)
    else:
        tokens, scores, types = _pieces(used, gguf)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(section["norm"] != "rms_1p")  # Gemma adds none
    kinds = gguf.TokenType
    for number in range(len(tokens), section["vocab_size"]):
        tokens.append(f"[PAD{number}]")
        scores.append(-1e4)
        types.append(kinds.UNUSED)
    if len(tokens) > section["vocab_size"]:
        raise ConfigError(
            f"{used.file}: has {len(tokens)} tokens, and the model {section['vocab_size']}"
        )
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    if used.bos is not None:
        writer.add_bos_token_id(used.bos)
    writer.add_add_bos_token(used.adds_bos)
    ends = run_tokenizer.listed_end_tokens([folder])
    end = ends[0] if ends else used.eos
    if end is not None:
        writer.add_eos_token_id(end)
    if chat_template.has_template(folder):
        file = folder / chat_template.FILE
        if file.is_file():
            writer.add_chat_template(file.read_text(encoding="utf-8"))
        else:
            template = chat_template.read_json(folder / chat_template.CONFIG).get("chat_template")
            if isinstance(template, str):
                writer.add_chat_template(template)
    return ""


def _pieces(used: Tokenizer, gguf: Any) -> tuple[list[str], list[float], list[int]]:
    """Returns tokens, scores and types of a SentencePiece model."""
    sentencepiece = import_optional("sentencepiece")
    model = sentencepiece.SentencePieceProcessor(model_file=str(used.file))
    kinds = gguf.TokenType
    tokens, scores, types = [], [], []
    for number in range(model.vocab_size()):
        tokens.append(model.id_to_piece(number))
        scores.append(model.get_score(number))
        kind = kinds.NORMAL
        if model.is_unknown(number):
            kind = kinds.UNKNOWN
        elif model.is_control(number):
            kind = kinds.CONTROL
        elif model.is_unused(number):
            kind = kinds.UNUSED
        elif model.is_byte(number):
            kind = kinds.BYTE
        types.append(kind)
    return tokens, scores, types


def _add_json(
    writer: Any, described: Mapping[str, Any], file: Path, gguf: Any
) -> tuple[list[str], list[float], list[int]]:
    """Adds how a tokenizer.json splits text; returns tokens, scores and types."""
    model = described.get("model") or {}
    merges = [_merge(one) for one in model.get("merges") or []]
    if model.get("type", "BPE") != "BPE" or not merges:
        raise ConfigError(
            f"{file}: is a {model.get('type')} tokenizer; only BPE is written as GGUF"
        )
    kinds = gguf.TokenType
    ids = {number: token for token, number in model["vocab"].items()}
    added = {one["id"]: one for one in described.get("added_tokens") or []}
    ranks = {"".join(pair): number for number, pair in enumerate(merges)}
    tokens, scores, types = [], [], []
    for number in range(max([*ids, *added]) + 1):
        token = ids.get(number, f"[PAD{number}]")
        kind = kinds.NORMAL if number in ids else kinds.UNUSED
        if number in added:
            token = added[number]["content"]
            kind = kinds.CONTROL if added[number].get("special") else kinds.USER_DEFINED
        elif model.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            kind = kinds.BYTE
        tokens.append(token)
        # SentencePiece joins the pair with the highest score first.
        scores.append(-float(ranks.get(token, len(merges))))
        types.append(kind)
    steps = list(_steps(described.get("pre_tokenizer")))
    if model.get("byte_fallback") and "bytes" not in steps:
        normalizer = json.dumps(described.get("normalizer") or {})
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix('"Prepend"' in normalizer)
        return tokens, scores, types
    known = PRE_TOKENIZERS.get(tuple(step for step in steps if step != "bytes without split"))
    if known is None or not any(step.startswith("bytes") for step in steps):
        raise ConfigError(
            f"{file}: splits text in a way that has no name in llama.cpp here; "
            f"use llama.cpp's own convert_hf_to_gguf.py on the folder"
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    return tokens, scores, types


def _merge(entry: Any) -> list[str]:
    return entry.split(" ") if isinstance(entry, str) else [*entry]


def _steps(pre_tokenizer: Any) -> Iterator[str]:
    """Yields what a pre-tokenizer does: a pattern, "digits", "bytes" or what else its type is."""
    if not isinstance(pre_tokenizer, Mapping):
        return
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        for step in pre_tokenizer.get("pretokenizers") or []:
            yield from _steps(step)
    elif kind == "ByteLevel":
        yield "bytes" if pre_tokenizer.get("use_regex", True) else "bytes without split"
    elif kind == "Digits" and pre_tokenizer.get("individual_digits"):
        yield "digits"
    elif kind == "Split":
        yield str((pre_tokenizer.get("pattern") or {}).get("Regex"))
    else:
        yield str(kind)
