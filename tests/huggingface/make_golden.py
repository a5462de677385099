"""Writes the folders in golden/: a tiny random model of each family, and transformers' logits.

  python tests/huggingface/make_golden.py [FAMILY ...]       # torch 2.13.0, transformers 5.23.0

logits.npz has `tokens` (2, S) and their `logits` (2, S, V); `lengths` (2,), and the logits with
each row truncated to its length (`padded`, 0 elsewhere); `documents` (3,), lengths whose sum is S,
and the logits of the first row with each document computed separately (`packed`, (S, V)). Those of
WITH_GENERATION also have, of each step of generation with a cache, the token and its logits
(`generated` (2, N), `steps` (2, N, V)).

rope.json has the frequencies and attention factors of ROPE_INIT_FUNCTIONS for the ropes in ROPES.
The folder dynamic/ has a model with dynamic rope, the `logits` of rows longer than its original
length, `generated` and `steps`.

The folder mxfp4/ has a gpt-oss whose experts are in MXFP4, its `logits`, and the kernels of its
first layer as transformers reads them, in bfloat16 (`gate_up_proj`, `down_proj`, as uint16).
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "golden"
SEQ_LEN, LENGTHS, DOCUMENTS = 22, (22, 13), (6, 11, 5)
SIZES = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    head_dim=6,
)
ROPE = {"rope_theta": 100.0}  # transformers adds a rope_type to it, so it comes first
# Heads of 6 dims have frequencies that are kept, divided, and in between.
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 0.1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MSCALES = {"mscale": 0.5, "mscale_all_dim": 0.707}
TOKEN_IDS = {"pad_token_id": None, "eos_token_id": None}  # the defaults exceed the vocabulary
LATENT = SIZES | dict(
    **TOKEN_IDS,
    bos_token_id=None,
    num_key_value_heads=4,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
    moe_intermediate_size=10,
    n_shared_experts=2,
)
del LATENT["head_dim"]
SMALL = SIZES | dict(**TOKEN_IDS, vocab_size=31, num_hidden_layers=2, bos_token_id=None)
NO_HEAD_DIM = {key: size for key, size in SMALL.items() if key != "head_dim"}
SMALL_LATENT = LATENT | dict(vocab_size=31, num_hidden_layers=2)
EXPERTS = dict(
    moe_intermediate_size=10,
    n_routed_experts=6,
    n_shared_experts=1,
    num_experts_per_tok=3,
    routed_scaling_factor=1.5,
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [2.0, 5.0, 9.0],
}
FAMILIES = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=32
    ),
    "llama2": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={"rope_type": "linear", "factor": 3.0, **ROPE},
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama3": lambda: transformers.LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 16, **ROPE},
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, rope_parameters=ROPE, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**SIZES, "head_dim": 4},
        rope_parameters=ROPE,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, rope_parameters=ROPE),
    "yarn": lambda: transformers.Qwen3Config(
        **SIZES, rope_parameters={**ROPE, **YARN, "original_max_position_embeddings": 8}
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, rope_parameters=ROPE, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        rope_parameters=ROPE,
        moe_intermediate_size=10,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{key: size for key, size in SIZES.items() if key != "head_dim"},
        **TOKEN_IDS,
        rope_parameters=ROPE,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
    "olmo2": lambda: transformers.Olmo2Config(
        **SIZES, **TOKEN_IDS, rope_parameters=ROPE, attention_bias=True
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **{**SIZES, "num_hidden_layers": 4},
        **TOKEN_IDS,
        rope_parameters={
            "full_attention": {**ROPE, **YARN, "original_max_position_embeddings": 8},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
        sliding_window=5,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **SIZES,
        **TOKEN_IDS,
        bos_token_id=None,
        rope_parameters=ROPE,
        no_rope_layers=[1, 0, 1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES,
        rope_parameters=ROPE,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        logits_scaling=6.0,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **SIZES,
        rope_parameters=ROPE,
        attention_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=0.7,
        num_local_experts=3,
        num_experts_per_tok=2,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **{**SIZES, "head_dim": 4},
        rope_parameters=ROPE,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=14,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
    ),
    "qwen2_moe_dense": lambda: transformers.Qwen2MoeConfig(
        **{**SMALL, "head_dim": 4, "num_hidden_layers": 3},
        rope_parameters=ROPE,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=14,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        rope_parameters={
            **ROPE,
            **YARN,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
        sliding_window=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        swiglu_alpha=1.5,
    ),
    "dots1": lambda: transformers.Dots1Config(
        **{**SIZES, "num_hidden_layers": 4},
        rope_parameters=ROPE,
        sliding_window=5,
        max_window_layers=3,
        first_k_dense_replace=2,
        moe_intermediate_size=10,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **LATENT,
        rope_parameters={**ROPE, **YARN, **MSCALES, "original_max_position_embeddings": 8},
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=5,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    ),
    "deepseek_v2_groups": lambda: transformers.DeepseekV2Config(
        **LATENT,
        rope_parameters=ROPE,
        q_lora_rank=9,
        first_k_dense_replace=0,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**LATENT, "qk_nope_head_dim": 4, "v_head_dim": 12},
        rope_parameters={
            **ROPE,
            **YARN,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,
        },
        q_lora_rank=9,
        first_k_dense_replace=2,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_mtp_layers=0,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        rope_parameters=ROPE,
        sliding_window=5,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", **ROPE},
        },
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=5,
    ),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, rope_parameters=ROPE),
    "vaultgemma": lambda: transformers.VaultGemmaConfig(
        **SMALL, rope_parameters=ROPE, sliding_window=5, query_pre_attn_scalar=7
    ),
    "seed_oss": lambda: transformers.SeedOssConfig(**SMALL, rope_parameters=ROPE),
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL,
        rope_parameters=ROPE,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **SMALL,
        rope_parameters={
            **ROPE,
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.4,
        },
        sliding_window=15,
    ),
    "cwm": lambda: transformers.CwmConfig(
        **{**SMALL, "bos_token_id": 0},
        rope_parameters={**ROPE, **LLAMA3, "original_max_position_embeddings": 16},
        sliding_window=5,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **NO_HEAD_DIM, rope_parameters=ROPE, sliding_window=5
    ),
    "stablelm": lambda: transformers.StableLmConfig(
        **{**NO_HEAD_DIM, "hidden_size": 32},
        rope_parameters={**ROPE, "partial_rotary_factor": 0.25},
        use_qkv_bias=True,
    ),
    "phi3": lambda: transformers.Phi3Config(**NO_HEAD_DIM, rope_parameters=dict(ROPE)),
    "phi3_longrope": lambda: transformers.Phi3Config(
        **{**NO_HEAD_DIM, "hidden_size": 32},
        rope_parameters={**ROPE, **LONGROPE, "partial_rotary_factor": 0.75},
        original_max_position_embeddings=32,  # more than a row has
    ),
    "glm": lambda: transformers.GlmConfig(
        **{**SMALL, "head_dim": 8}, rope_parameters={**ROPE, "partial_rotary_factor": 0.5}
    ),
    "glm4": lambda: transformers.Glm4Config(
        **{**SMALL, "head_dim": 8},
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
        attention_bias=False,
    ),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**SMALL, rope_parameters=ROPE, use_bias=True),
    "helium": lambda: transformers.HeliumConfig(**{**SMALL, "head_dim": 4}, rope_parameters=ROPE),
    "youtu": lambda: transformers.YoutuConfig(
        **{key: size for key, size in SMALL_LATENT.items() if key not in EXPERTS},
        rope_parameters={**ROPE, **YARN, **MSCALES, "original_max_position_embeddings": 8},
        q_lora_rank=9,
    ),
    "solar_open": lambda: transformers.SolarOpenConfig(
        **{key: size for key, size in SMALL.items() if key != "intermediate_size"},
        **EXPERTS,
        rope_parameters=ROPE,
        attention_bias=True,
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **{**SMALL, "head_dim": 8},
        **EXPERTS,
        rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
        use_qk_norm=True,
        attention_bias=True,
        num_mtp_layers=0,
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **NO_HEAD_DIM,
        rope_parameters=ROPE,
        moe_intermediate_size=10,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=2,
    ),
    "minimax_m2": lambda: transformers.MiniMaxM2Config(
        **{**SMALL, "head_dim": 8},
        rope_parameters=dict(ROPE),
        rotary_dim=4,
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    "hy_v3": lambda: transformers.HYV3Config(
        **SMALL,
        rope_parameters=dict(ROPE),
        moe_intermediate_size=10,
        num_experts=6,
        num_experts_per_tok=3,
        num_shared_experts=2,
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(
        **{**SMALL_LATENT, **EXPERTS}, rope_parameters=ROPE, q_lora_rank=9
    ),
}
DEEPSEEK_FAMILIES = (
    "deepseek_v2",
    "deepseek_v2_groups",
    "deepseek_v3",
)  # written by transformers 5.24.0
NEW_MIXTURES = ("solar_open", "glm4_moe", "ernie4_5_moe", "glm4_moe_lite", "minimax_m2", "hy_v3")
NEW_MIXTURES += ("granitemoe", "qwen2_moe", "qwen2_moe_dense", "gpt_oss")
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "dots1", *DEEPSEEK_FAMILIES, *NEW_MIXTURES)
# Families without experts whose cache is tested: the kinds of rope, and other pieces of maths.
CACHED = ("ministral3", "glm4", "stablelm", "youtu", "olmo2", "olmo3", "smollm3", "granite")
WITH_GENERATION = (*MIXTURES, *CACHED)

# (head dim, max_position_embeddings, length of the row, rope_parameters)
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
DEEPSEEK |= {"beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
ROPES = [
    (128, 131072, 131072, {**QWEN_YARN, "rope_theta": 1e6}),
    (64, 32768, 32768, {**QWEN_YARN, "rope_theta": 1e6, "truncate": False}),
    (128, 32768, 32768, {**QWEN_YARN, "rope_theta": 1e6, "attention_factor": 1.25}),
    (64, 163840, 163840, {**DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}),
    (64, 163840, 163840, {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 1.0}),
    (64, 163840, 163840, {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0}),
    (64, 163840, 163840, {**DEEPSEEK, "beta_fast": None, "beta_slow": 0, "truncate": None}),
    (6, 64, 64, {**YARN, **ROPE}),
    (8, 64, 64, {**YARN, **ROPE, "beta_fast": 40, "beta_slow": 20}),  # no frequency is divided
    (8, 64, 64, {**YARN, **ROPE, "beta_fast": 0.01, "beta_slow": 0.001}),
    (128, 4096, 2048, DYNAMIC),
    (128, 4096, 4096, DYNAMIC),
    (128, 4096, 16384, DYNAMIC),
    (6, 64, 16, {**ROPE, **LONGROPE, "original_max_position_embeddings": 16}),
    (6, 64, 17, {**ROPE, **LONGROPE, "original_max_position_embeddings": 16}),
    (6, 64, 64, {**ROPE, **LONGROPE, "factor": 32.0, "original_max_position_embeddings": 16}),
    (6, 64, 64, {**ROPE, **LONGROPE, "attention_factor": 1.5, "factor": 4.0}),
    (64, 2048, 5000, {**DYNAMIC, "factor": 4.0, "original_max_position_embeddings": 512}),
]


def model_of(config: transformers.PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Returns a model with random parameters, large enough that all logits differ."""
    config._attn_implementation = "eager"  # the only implementation with soft caps
    config._experts_implementation = "eager"  # the only one for matrices of any size
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name or ".ln_" in name else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of logits.npz."""

    def run(rows, **options):
        with torch.no_grad():
            return model(torch.tensor(rows), **options).logits.numpy()

    mask = np.arange(SEQ_LEN)[None] < np.array(LENGTHS)[:, None]
    padded = run(tokens, attention_mask=torch.tensor(mask.astype(np.int64)))
    ends = np.cumsum(DOCUMENTS)[:-1]
    packed = np.concatenate([run(document[None])[0] for document in np.split(tokens[0], ends)])
    return dict(
        tokens=tokens,
        logits=run(tokens),
        lengths=np.array(LENGTHS),
        padded=np.where(mask[:, :, None], padded, 0),
        documents=np.array(DOCUMENTS),
        packed=packed,
    )


def frequencies_of(head_dim: int, length: int, row_length: int, rope: dict) -> dict:
    """Returns an entry of rope.json."""
    sizes = SIZES | dict(head_dim=head_dim, max_position_embeddings=length)
    config = transformers.LlamaConfig(**sizes, rope_parameters=dict(rope))
    frequency_k, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=row_length)
    entry = dict(head_dim=head_dim, max_position_embeddings=length, row_length=row_length)
    return entry | dict(rope=rope, frequencies=frequency_k.tolist(), attention_factor=factor)


def write_dynamic(folder: Path, tokens: np.ndarray) -> None:
    """Writes the model with dynamic rope."""
    parameters = {**ROPE, "rope_type": "dynamic", "factor": 4.0}
    sizes = SIZES | dict(max_position_embeddings=16)
    model = model_of(transformers.LlamaConfig(**sizes, rope_parameters=parameters))
    save(model, folder)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    # Generation leads from within the original length to beyond it.
    arrays = dict(tokens=tokens, logits=logits, **generation_of(model, tokens))
    np.savez_compressed(folder / "logits.npz", **arrays)


def write_mxfp4(folder: Path, tokens: np.ndarray) -> None:
    """Writes the model with experts in MXFP4; the first block of each kernel has all values."""
    options = dict(sliding_window=5, num_local_experts=3, num_experts_per_tok=2)
    sizes = SMALL | dict(hidden_size=64, intermediate_size=32)
    config = transformers.GptOssConfig(**sizes, **options, rope_parameters=dict(ROPE))
    tensors = model_of(config).to(torch.bfloat16).state_dict()
    generator = torch.Generator().manual_seed(0)

    def random_bytes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    kernels = {}
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        blocks = random_bytes(0, 256, num_experts, num_out, num_in // 32, 16)
        blocks[0, :16, 0] = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
        scales = random_bytes(121, 126, num_experts, num_out, num_in // 32)
        scales[0, 0, 0] = 0  # the smallest one
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        if ".layers.0." in name:
            values = convert_moe_packed_tensors(blocks, scales)
            kernels[name.rpartition(".")[2]] = values.view(torch.uint16).numpy()
    shutil.rmtree(folder, ignore_errors=True)
    config.dtype = torch.bfloat16
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # float32: the kernels have the same values.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    rows = tokens % config.vocab_size
    np.savez_compressed(folder / "logits.npz", **logits_of(model, rows), **kernels)


def generation_of(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tokens (`generated`) after the first 10 of each row, and logits (`steps`)."""
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    options |= dict(return_dict_in_generate=True, output_logits=True)
    prompt = torch.tensor(tokens[:, :10])
    with torch.no_grad():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return dict(generated=out.sequences[:, 10:].numpy(), steps=torch.stack(out.logits, 1).numpy())


def save(model: torch.nn.Module, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main(*chosen: str):
    """Writes all folders, or only those of the families that are named."""
    tokens = np.random.default_rng(0).integers(0, 61, (2, SEQ_LEN))
    for name, config in FAMILIES.items():
        if chosen and name not in chosen:
            continue
        folder = FOLDER / name
        model = model_of(config())
        save(model, folder)
        rows = tokens % model.config.vocab_size
        generation = generation_of(model, rows) if name in WITH_GENERATION else {}
        np.savez_compressed(folder / "logits.npz", **logits_of(model, rows), **generation)
    if chosen:
        return
    write_dynamic(HERE / "dynamic", tokens)
    write_mxfp4(HERE / "mxfp4", tokens)
    entries = [frequencies_of(*row) for row in ROPES]
    (HERE / "rope.json").write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
