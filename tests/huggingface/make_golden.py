"""Writes the folders in golden/: a tiny random model of each family, and its logits by transformers.

  python tests/huggingface/make_golden.py        # torch 2.13.0, transformers 5.23.0

logits.npz has `tokens` (2, S) and their `logits` (2, S, V); `lengths` (2,), and the logits with each row
truncated to its length (`padded`, 0 elsewhere); `documents` (3,), lengths whose sum is S, and the logits of
the first row with each document computed separately (`packed`, (S, V)).
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).resolve().parent / "golden"
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
ROPE = {"rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
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
}


def model_of(config: transformers.PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Returns a model with random parameters, large enough that all logits differ."""
    config._attn_implementation = "eager"  # the only implementation with soft caps
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name or ".ln_" in name else noise)
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


def main():
    tokens = np.random.default_rng(0).integers(0, 61, (2, SEQ_LEN))
    for name, config in FAMILIES.items():
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model = model_of(config())
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "logits.npz", **logits_of(model, tokens))


if __name__ == "__main__":
    main()
