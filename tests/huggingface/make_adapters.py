"""Writes the folders in adapters/: an adapter of a golden model as PEFT saves it, and its logits.

  python tests/huggingface/make_adapters.py [NAME ...]

It ran with torch 2.13.0, transformers 5.24 and peft 0.21.2.

logits.npy has the logits of `TOKENS` that PEFT computes. B is random, as after training.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
TOKENS = np.arange(24).reshape(2, 12) * 7 % 61
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {  # family, or its name and another: its settings
    "llama3": dict(use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    "qwen3_moe": dict(target_modules=["q_proj", "o_proj"], target_parameters=EXPERTS),
    "deepseek_v3": dict(use_rslora=True, target_parameters=EXPERTS[:1]),
    "mixtral": dict(target_modules=["k_proj"], layers_to_transform=[1], lora_dropout=0.25),
    "phi3": dict(target_modules=["qkv_proj", "gate_up_proj"], rank_pattern={"qkv_proj": 3}),
    "gpt2": dict(target_modules=["c_attn", "c_fc"], alpha_pattern={r".*\.c_fc": 3}),
    "gpt_oss": dict(target_modules=["q_proj"], target_parameters=EXPERTS),
    "deepseek_v3-all": dict(target_modules="all-linear"),  # with routers and kv_b_proj
    "qwen2_moe": dict(
        target_modules="all-linear",  # with shared_expert_gate
        alpha_pattern={r"layers\.(0|2)\..*\.(q_proj|up_proj)": 5, "down_proj": 9},
    ),
    "granitemoe": dict(use_rslora=True, target_parameters=["block_sparse_moe.experts.down_proj"]),
}


def main() -> None:
    names = sys.argv[1:] or [*ADAPTERS]
    for name in names:
        settings = ADAPTERS[name]
        family = name.partition("-")[0]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(
            HERE / "golden" / family, dtype=torch.float32, experts_implementation="eager"
        )
        config = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=6, **settings)
        adapted = get_peft_model(model, config).eval()
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = HERE / "adapters" / name
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink()
        file = folder / "adapter_config.json"
        saved = json.loads(file.read_text())
        saved["base_model_name_or_path"] = f"tiny/{family}"
        file.write_text(json.dumps(saved, indent=2) + "\n")
        tokens = torch.tensor(TOKENS % model.config.vocab_size)
        np.save(folder / "logits.npy", adapted(tokens).logits.detach().numpy())


if __name__ == "__main__":
    main()
