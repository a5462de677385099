"""GPT-2, and GPT-SW3, which transformers computes with it."""

import dataclasses

from meshtrain.huggingface.families.base import Config, Family, Section, is_number

# GPT-2 stores linear layers as [in, out].
NAMES = {
    "tokens/embedding": "transformer.wte.weight V D",
    "positions/embedding": "transformer.wpe.weight P D",
    "final_norm/scale": "transformer.ln_f.weight D",
    "final_norm/bias": "transformer.ln_f.bias D",
    "output/kernel": "lm_head.weight V D",
    "layers/attention_norm/scale": "transformer.h.*.ln_1.weight D",
    "layers/attention_norm/bias": "transformer.h.*.ln_1.bias D",
    "layers/attention/query/kernel": "transformer.h.*.attn.c_attn.weight D 0HK",
    "layers/attention/query/bias": "transformer.h.*.attn.c_attn.bias 0HK",
    "layers/attention/key/kernel": "transformer.h.*.attn.c_attn.weight D 1GK",
    "layers/attention/key/bias": "transformer.h.*.attn.c_attn.bias 1GK",
    "layers/attention/value/kernel": "transformer.h.*.attn.c_attn.weight D 2GK",
    "layers/attention/value/bias": "transformer.h.*.attn.c_attn.bias 2GK",
    "layers/attention/out/kernel": "transformer.h.*.attn.c_proj.weight HW D",
    "layers/attention/out/bias": "transformer.h.*.attn.c_proj.bias D",
    "layers/mlp_norm/scale": "transformer.h.*.ln_2.weight D",
    "layers/mlp_norm/bias": "transformer.h.*.ln_2.bias D",
    "layers/mlp/up/kernel": "transformer.h.*.mlp.c_fc.weight D F",
    "layers/mlp/up/bias": "transformer.h.*.mlp.c_fc.bias F",
    "layers/mlp/down/kernel": "transformer.h.*.mlp.c_proj.weight F D",
    "layers/mlp/down/bias": "transformer.h.*.mlp.c_proj.bias D",
}

# Three rates in a config.json; `model.dropout` is one for all.
DROPOUT_RATES = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
DEFAULT_DROPOUT = 0.1  # of each in transformers


def _to_section(config: Config) -> Section:
    """Returns the width of the MLP, and `dropout`: the rate of all three, or 0 if they differ."""
    rates = [config.get(key, DEFAULT_DROPOUT) for key in DROPOUT_RATES]
    are_equal = rates.count(rates[0]) == len(rates) and is_number(rates[0])
    return {
        "d_ff": config["n_inner"] or 4 * config["n_embd"],
        "dropout": float(rates[0]) if are_equal else 0.0,
    }


def _to_config(section: Section) -> Config:
    return dict.fromkeys(DROPOUT_RATES, section["dropout"])


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    names=NAMES,
    section={"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True},
    defaults={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    supported_values={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    keys={
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    aliases={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    to_section=_to_section,
    to_config=_to_config,
    prefixes=(("transformer.", "transformer."), ("lm_head.", "lm_head."), ("", "transformer.")),
)

GPT_SW3 = dataclasses.replace(GPT2, model_type="gpt-sw3")
