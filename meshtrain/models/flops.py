"""The arithmetic of a transformer: FLOPs per token, and the weights that a token does not use."""

import numpy as np

from meshtrain.models.transformer_config import TransformerConfig


def flops_per_token(c: TransformerConfig, seq_len: int) -> float:
    """Returns 6 N + 12 L d S, forward and backward (PaLM, arXiv 2204.02311, appendix B).

    N is the number of weights in matrix products, including the output head, but not embeddings, norm scales
    or biases; of the routed experts those that a token uses. d = heads x head dim, the mean of that of keys and that
    of values. Attention counts in full, not halved for causality. In local layers the window replaces S.
    """
    dense = (3 if c.gated else 2) * c.d_model * c.d_ff
    active = c.experts_per_token + c.num_shared_experts
    sparse = active * _expert_weights(c) + c.d_model * c.num_experts
    num_sparse = c.num_layers - c.first_dense_layers if c.num_experts else 0
    weights = c.num_layers * _attention_weights(c) + c.d_model * c.vocab_size
    weights += num_sparse * sparse + (c.num_layers - num_sparse) * dense
    visible = np.where(c.is_local, min(c.window, seq_len), seq_len).sum()
    return 6.0 * weights + 6.0 * c.num_heads * (c.query_size + c.value_size) * float(visible)


def _attention_weights(c: TransformerConfig) -> int:
    """Returns the number of weights in the projections of a layer's attention."""
    H, D, C = c.num_heads, c.d_model, c.kv_lora_rank
    if not C:
        return D * c.head_size * (2 * H + 2 * c.num_kv_heads)
    queries, out = H * c.query_size, H * c.value_size * D
    of_queries = (D + queries) * c.q_lora_rank if c.q_lora_rank else D * queries
    return of_queries + D * (C + c.rope_head_dim) + C * H * (c.head_size + c.value_size) + out


def inactive_parameters(c: TransformerConfig) -> int:
    """Returns the number of weights of all routed experts that a token does not use."""
    unused = c.num_experts - c.experts_per_token if c.num_experts else 0
    return (c.num_layers - c.first_dense_layers) * unused * _expert_weights(c)


def _expert_weights(c: TransformerConfig) -> int:
    return (3 if c.gated else 2) * c.d_model * c.expert_size
