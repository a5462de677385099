"""Model families as keys of the transformer."""

FAMILIES = {
    "llama 2": dict(rope_scaling=("linear", 4.0)),
    "llama 3": dict(rope_theta=5e5, rope_scaling=("llama3", 8.0, 1.0, 4.0, 64), z_loss=1e-3),
    "mistral": dict(attention="l", window=7, head_dim=6),
    "qwen 2": dict(qkv_bias=True, tie_embeddings=True),
    "qwen 3": dict(qk_norm=True, head_dim=16),
    "olmoe": dict(
        **dict(qk_norm=True, qk_norm_heads="all", num_kv_heads=2, num_experts=5),
        **dict(experts_per_token=2, router="softmax"),
    ),
    "dots.llm1": dict(
        **dict(qk_norm=True, num_layers=3, first_dense_layers=1, attention="lg", window=5),
        **dict(num_experts=6, experts_per_token=2, d_expert=24, num_shared_experts=1),
        **dict(router="sigmoid", router_scale=2.5, expert_groups=(3, 2)),
    ),
    "all heads, layer norm": dict(qk_norm=True, qk_norm_heads="all", norm="layer", bias=True),
    "all heads, rms_1p": dict(qk_norm=True, qk_norm_heads="all", norm="rms_1p", head_dim=6),
    "qwen 3, yarn": dict(
        **dict(qk_norm=True, head_dim=16, rope_scaling=("yarn", 4.0, 8.0, 1.0, 64, 0.0, True))
    ),
    "yarn, not truncated": dict(
        **dict(rope_theta=100.0, rope_scaling=("yarn", 8.0, 2.0, 0.1, 8, 1.5, False)),
    ),
    "dynamic": dict(rope_scaling=("dynamic", 4.0, 8)),
    "dynamic, short rows": dict(rope_scaling=("dynamic", 4.0, 32)),
    "gemma 2": dict(
        **dict(norm="rms_1p", mlp="geglu", post_norm=True, tie_embeddings=True, head_dim=16),
        **dict(attention="lg", window=5, query_scale=0.3, embed_scale=32**0.5),
        **dict(attention_softcap=5.0, logit_softcap=3.0),
    ),
    "gemma 3": dict(
        **dict(norm="rms_1p", mlp="geglu", post_norm=True, qk_norm=True, attention="gl", window=4),
        **dict(rope_theta=1e6, rope_theta_local=1e4, rope_scaling=("linear", 8.0)),
    ),
    "gemma 3, yarn": dict(
        **dict(qk_norm=True, attention="gl", window=4, rope_theta=1e6, rope_theta_local=1e4),
        **dict(rope_scaling=("yarn", 8.0, 2.0, 0.01, 8, 0.0, True)),
    ),
    "dynamic in global layers": dict(
        **dict(attention="gl", window=4, rope_theta_local=100.0, rope_scaling=("dynamic", 2.0, 4)),
    ),
    "olmo 3": dict(
        **dict(qk_norm=True, qk_norm_heads="all", num_kv_heads=2, pre_norm=False, post_norm=True),
        **dict(attention="lg", window=5, rope_theta_local=1e4, branch_scale=0.4),
        **dict(rope_scaling=("yarn", 8.0, 2.0, 0.01, 8, 0.0, True)),
    ),
    "smollm 3": dict(
        **dict(rope_layers="rn", num_layers=3, tie_embeddings=True, qkv_bias=True, out_bias=True),
    ),
    "rope pattern after a dense layer": dict(
        **dict(rope_layers="rn", num_layers=4, first_dense_layers=1, attention="gl", window=4),
        **dict(num_experts=4, experts_per_token=2, d_expert=12),
    ),
    "granite": dict(
        **dict(embed_scale=12.0, branch_scale=0.22, query_scale=0.05, logit_scale=0.125),
        **dict(logit_softcap=3.0),
    ),
    "qwen 2 moe": dict(
        **dict(qkv_bias=True, num_experts=5, experts_per_token=2, d_expert=12, router="softmax"),
        **dict(num_shared_experts=1, d_shared=20, shared_gate=True),
    ),
    "gpt-oss": dict(
        **dict(attention="lg", window=5, attention_sinks=True, qkv_bias=True, out_bias=True),
        **dict(num_experts=4, experts_per_token=2, expert_bias=True, d_expert=12, head_dim=6),
        **dict(mlp="clamped_swiglu", glu_limit=0.4, rope_layers="nr"),
    ),
    "glm 4": dict(
        rope_fraction=0.5, rope_interleaved=True, head_dim=12, qkv_bias=True, post_norm=True
    ),
    "ministral 3": dict(
        **dict(query_growth=0.5, query_growth_length=3, attention="gl", window=5),
        **dict(rope_scaling=("yarn", 4.0, 32.0, 1.0, 8.0, 1.2, True)),
    ),
    "ernie 4.5": dict(rope_interleaved=True, rope_theta=5e5, qk_norm=True),
    "stablelm": dict(norm="layer", norm_bias=True, rope_fraction=0.25, head_dim=16),
    "longrope": dict(head_dim=8, rope_scaling=("longrope", 8, 1.2, 1, 1.5, 2, 3, 1, 4, 8, 9)),
    "longrope, short rows, partial": dict(
        **dict(head_dim=8, rope_fraction=0.5, rope_scaling=("longrope", 32, 1.2, 1.5, 2, 3, 4)),
    ),
    "gpt-2": dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True),
}
