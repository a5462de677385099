"""The list of all families. A new one is a file here and its line below."""

from meshtrain.huggingface.families import (
    deepseek,
    dots1,
    gemma,
    gpt2,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo,
    olmoe,
    qwen,
    qwen2_moe,
    smollm3,
)

# A model without a config.json is exported as the first family that computes the same.
FAMILIES = (
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    olmo.OLMO2,
    olmo.OLMO3,
    smollm3.SMOLLM3,
    granite.GRANITE,
    mixtral.MIXTRAL,
    qwen.QWEN3_MOE,
    olmoe.OLMOE,
    qwen2_moe.QWEN2_MOE,
    granite.GRANITE_MOE,
    gpt_oss.GPT_OSS,
    dots1.DOTS1,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    gpt2.GPT2,
)
