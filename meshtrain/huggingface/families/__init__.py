"""The list of all families. A new one is a file here and its line below."""

from meshtrain.huggingface.families import (
    deepseek,
    dots1,
    gemma,
    gpt2,
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen,
)

# A model without a config.json is exported as the first family that computes the same.
FAMILIES = (
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    mixtral.MIXTRAL,
    qwen.QWEN3_MOE,
    olmoe.OLMOE,
    dots1.DOTS1,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    gpt2.GPT2,
)
