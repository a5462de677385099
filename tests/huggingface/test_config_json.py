"""config.json: what transformers computes is imported, the rest is rejected, in both directions."""

import json
import shutil

import numpy as np
import pytest

from meshtrain.errors import ConfigError
from meshtrain.huggingface import config_json, weights
from tests.lib.hf import GOLDEN, assert_same_logits, load

FULL, LOCAL = "full_attention", "sliding_attention"
LINEAR = dict(rope_type="linear", factor=3.0, rope_theta=77.0)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(rope_theta=100.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=100.0)
NULLS = dict(beta_fast=None, beta_slow=0, attention_factor=None, truncate=None)
DEEPSEEK = dict(mscale=1.0, mscale_all_dim=1.0)
DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=100.0)
REMOVED = "removed"
FLAT = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2")  # one rope for all layers


def yarn(fast=32.0, slow=1.0, length=16.0, attention_factor=0.0, truncate=True):
    """Returns the rope_scaling of YARN with other values."""
    return "yarn", 4.0, fast, slow, length, attention_factor, truncate


# (family, changed keys of config.json, changed keys of the section, or a part of the error)
ROWS = [
    # Gemma 3 has no cap in its attention; Gemma 2 has.
    ("gemma3", dict(attn_logit_softcapping=2.0), {}),
    ("gemma3", dict(final_logit_softcapping=2.0), dict(logit_softcap=2.0)),
    ("gemma2", dict(attn_logit_softcapping=2.0), dict(attention_softcap=2.0)),
    ("gemma2", dict(attn_logit_softcapping=None), dict(attention_softcap=0.0)),
    ("llama3", dict(attn_logit_softcapping=2.0, final_logit_softcapping=2.0), {}),
    # The pattern is that of Gemma 3; Gemma 2 alternates.
    ("gemma2", dict(layer_types=REMOVED, sliding_window_pattern=3), {}),
    ("gemma3", dict(layer_types=REMOVED, sliding_window_pattern=3), dict(attention="llg")),
    ("gemma3", dict(layer_types=REMOVED, sliding_window_pattern=2.5), "sliding_window_pattern=2.5"),
    # The window, and the keys that switch it on.
    ("mistral", dict(sliding_window=None), dict(attention="g", window=0)),
    ("mistral", dict(sliding_window=0), "sliding_window=0"),
    ("mistral", dict(sliding_window=-1), "sliding_window=-1"),
    ("mistral", dict(use_sliding_window=False), {}),
    ("qwen2", dict(layer_types=None, sliding_window=0), "sliding_window=0"),
    ("qwen2", dict(layer_types=None, max_window_layers=1), dict(attention="gll")),
    ("qwen2", dict(use_sliding_window=False), "use_sliding_window=False"),
    ("qwen2", dict(use_sliding_window="true"), "use_sliding_window='true'"),
    ("qwen2", dict(max_window_layers=1.5), "max_window_layers=1.5"),
    ("qwen3", dict(layer_types=[LOCAL] * 3, sliding_window=4), "use_sliding_window=False"),
    ("gemma2", dict(sliding_window="5"), "sliding_window='5'"),
    # A rope_scaling replaces rope_parameters and their theta, except in Gemma 3.
    *(
        (f, dict(rope_scaling=LINEAR), dict(rope_theta=77.0, rope_scaling=("linear", 3.0)))
        for f in FLAT
    ),
    (
        "llama3",
        dict(rope_scaling=dict(type="linear", factor=3.0)),
        dict(rope_theta=1e4, rope_scaling=("linear", 3.0)),
    ),
    (
        "llama3",
        dict(rope_scaling=dict(factor=3.0), rope_theta=9),
        dict(rope_theta=9.0, rope_scaling=()),
    ),
    ("llama3", dict(rope_scaling={}), {}),
    ("llama3", dict(rope_scaling=dict(rope_type="longrope", factor=2.0)), "longrope"),
    # YaRN: null and 0 are defaults, except truncate=null; DeepSeek's mscale keys give the attention
    # factor.
    *((f, dict(rope_scaling=YARN), dict(rope_theta=100.0, rope_scaling=yarn())) for f in FLAT),
    (
        "qwen3",
        dict(rope_scaling=dict(type="yarn", factor=4.0), rope_theta=9),
        dict(rope_theta=9.0, rope_scaling=yarn(length=64.0)),
    ),
    ("llama3", dict(rope_parameters=YARN | NULLS), dict(rope_scaling=yarn(truncate=False))),
    (
        "llama3",
        dict(rope_parameters=YARN | dict(beta_fast=2, beta_slow=0.5)),
        dict(rope_scaling=yarn(2.0, 0.5)),
    ),
    (
        "llama3",
        dict(rope_parameters=YARN, original_max_position_embeddings=8),
        dict(rope_scaling=yarn(length=8.0)),
    ),
    (
        "llama3",
        dict(rope_parameters=YARN | DEEPSEEK),
        dict(rope_scaling=yarn(attention_factor=1.0)),
    ),
    (
        "llama3",
        dict(rope_parameters=YARN | DEEPSEEK | dict(attention_factor=1.5)),
        dict(rope_scaling=yarn(attention_factor=1.5)),
    ),
    (
        "llama3",
        dict(rope_parameters=YARN | DEEPSEEK | dict(mscale_all_dim=0)),
        dict(rope_scaling=yarn()),
    ),
    ("llama3", dict(rope_parameters=YARN | DEEPSEEK | dict(mscale=-1.0)), "mscale"),
    ("llama3", dict(rope_parameters=YARN | dict(factor=None)), "factor=None"),
    ("llama3", dict(rope_parameters=YARN | dict(beta_fast="32")), "beta_fast='32'"),
    ("llama3", dict(rope_parameters=YARN | dict(attention_factor=0.0)), "attention_factor=0.0"),
    (
        "gemma3",
        dict(rope_parameters={FULL: YARN, LOCAL: dict(rope_theta=5.0)}),
        dict(rope_theta=100.0, rope_scaling=yarn(), rope_theta_local=5.0),
    ),
    (
        "gemma3",
        dict(rope_parameters={FULL: YARN | dict(truncate=False), LOCAL: {}}),
        "truncate: Gemma3ForCausalLM",
    ),
    # The original length of dynamic rope is that of the model.
    ("llama3", dict(rope_parameters=DYNAMIC), dict(rope_scaling=("dynamic", 2.0, 64.0))),
    (
        "llama3",
        dict(rope_parameters=DYNAMIC | dict(original_max_position_embeddings=8)),
        dict(rope_scaling=("dynamic", 2.0, 64.0)),
    ),
    (
        "gemma3",
        dict(rope_parameters={FULL: DYNAMIC, LOCAL: dict(rope_theta=5.0)}),
        dict(rope_theta=100.0, rope_scaling=("dynamic", 2.0, 64.0), rope_theta_local=5.0),
    ),
    ("gemma3", dict(rope_scaling=LINEAR), dict(rope_theta=77.0, rope_scaling=("linear", 3.0))),
    (
        "gemma3",
        dict(rope_parameters=REMOVED, rope_scaling=dict(type="linear", factor=2.0)),
        "name it rope_type",
    ),
    # Only Gemma 3 has ropes by layer type, and nothing else.
    *(
        (
            f,
            dict(rope_parameters={FULL: LINEAR, LOCAL: dict(rope_theta=5.0)}),
            "same rope in all layers",
        )
        for f in FLAT
    ),
    ("gemma3", dict(rope_parameters=LINEAR), "put them there"),
    (
        "gemma3",
        dict(
            rope_parameters={FULL: dict(rope_theta=12.0), LOCAL: dict(rope_theta=13.0)},
            rope_theta=7.0,
            rope_local_base_freq=8.0,
        ),
        dict(rope_theta=12.0, rope_scaling=(), rope_theta_local=13.0),
    ),
    (
        "gemma3",
        dict(rope_parameters={FULL: {}, LOCAL: None}, rope_theta=7.0, rope_local_base_freq=8.0),
        dict(rope_theta=7.0, rope_scaling=(), rope_theta_local=8.0),
    ),
    ("gemma3", dict(rope_parameters={FULL: {}, LOCAL: LINEAR}), "in sliding_attention"),
    # llama3's original length: next to rope_parameters, in them, or max_position_embeddings.
    (
        "llama3",
        dict(original_max_position_embeddings=8),
        dict(rope_scaling=("llama3", 8.0, 1.0, 4.0, 8.0)),
    ),
    ("llama3", dict(rope_parameters=LLAMA3), dict(rope_scaling=("llama3", 4.0, 1.0, 4.0, 64.0))),
    (
        "llama3",
        dict(original_max_position_embeddings=None),
        "original_max_position_embeddings=None",
    ),
    # transformers chooses the model by model_type, and reads text_config only in a multimodal one.
    ("mistral", dict(model_type="llama"), "model_type='llama'"),
    ("llama3", dict(architectures=["MistralForCausalLM"]), "model_type='llama'"),
    ("llama3", dict(architectures=None), {}),
    ("llama3", dict(model_type=["llama"]), "model_type=['llama']"),
    ("llama3", dict(text_config=dict(rms_norm_eps=0.5)), "text_config="),
    # GPT-2's other names of its sizes have priority.
    ("gpt2", dict(num_attention_heads=4), dict(num_heads=4, num_kv_heads=4, head_dim=4)),
    ("gpt2", dict(n_head=REMOVED, num_attention_heads=2), {}),
    # A null is_causal is not causal.
    *((family, dict(is_causal=None), "is_causal=None") for family in (*FLAT, "gemma3")),
    ("qwen3", dict(per_layer_config={"0": dict(sliding_window=3)}), "per_layer_config="),
    # Experts: their number has two names; the one that is not written has priority.
    ("mixtral", dict(num_experts=3), dict(num_experts=3)),
    ("mixtral", dict(num_local_experts=REMOVED, num_experts=3), dict(num_experts=3)),
    ("olmoe", dict(num_local_experts=3), dict(num_experts=3)),
    ("qwen3_moe", dict(num_experts=3), {}),
    ("qwen3_moe", dict(num_experts=5, num_local_experts=REMOVED), dict(num_experts=5)),
    ("olmoe", dict(num_experts=REMOVED), dict(num_experts=64)),
    ("mixtral", dict(num_experts_per_tok=1), dict(experts_per_token=1)),
    ("mixtral", dict(num_experts_per_tok=0), "num_experts_per_tok=0"),
    ("mixtral", dict(num_local_experts=0), "num_local_experts=0"),
    ("qwen3_moe", dict(moe_intermediate_size=None), "moe_intermediate_size=None"),
    ("qwen3_moe", dict(norm_topk_prob=False), dict(router="softmax")),
    ("qwen3_moe", dict(norm_topk_prob=REMOVED), dict(router="softmax")),
    ("olmoe", dict(norm_topk_prob=True), dict(router="topk_softmax")),
    ("olmoe", dict(norm_topk_prob=None), "norm_topk_prob=None"),
    ("mixtral", dict(norm_topk_prob=False), {}),
    # Only models whose last layers have experts.
    ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    ("qwen3_moe", dict(decoder_sparse_step=4), "decoder_sparse_step=4"),
    ("qwen3_moe", dict(decoder_sparse_step=0), "decoder_sparse_step=0"),
    ("qwen3_moe", dict(mlp_only_layers=[0, 1, 2]), "mlp_only_layers=[0, 1, 2]"),
    ("qwen3_moe", dict(mlp_only_layers=[0, 2]), "mlp_only_layers=[0, 2]"),
    ("qwen3_moe", dict(mlp_only_layers=["0"]), "mlp_only_layers=['0']: is not a list"),
    ("qwen3_moe", dict(mlp_only_layers=[7]), {}),
    ("qwen3_moe", dict(mlp_only_layers=[1]), "mlp_only_layers=[1]"),
    ("qwen3_moe", dict(mlp_only_layers=None), {}),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv=8.0"),
    ("olmoe", dict(sliding_window=4), "sliding_window=4"),
    ("olmoe", dict(head_dim=6), "head_dim=6"),
    (
        "olmoe",
        dict(num_attention_heads=3, num_key_value_heads=1),
        "hidden_size=16: is not a multiple",
    ),
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
    ("mixtral", dict(router_aux_loss_coef=0.0), dict(balance_weight=0.0)),
    ("mixtral", dict(router_aux_loss_coef=-1.0), "router_aux_loss_coef=-1.0"),
    ("mixtral", dict(router_aux_loss_coef=None), "router_aux_loss_coef=None"),
    ("mixtral", dict(sliding_window=None), dict(attention="g", window=0)),
    ("mixtral", dict(rope_parameters=REMOVED), dict(rope_theta=1e6)),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=4), dict(attention="l", window=4)),
    (
        "qwen3_moe",
        dict(use_sliding_window=True, sliding_window=4, max_window_layers=9),
        dict(attention="l", window=4),
    ),
    ("qwen3_moe", dict(use_sliding_window=True, sliding_window=None), {}),
    ("qwen3_moe", dict(use_sliding_window=False, sliding_window=4), {}),
    # OLMo 2 and 3. The top-level theta of OLMo 3 is that of global layers alone.
    ("olmo2", dict(rope_parameters=REMOVED, rms_norm_eps=REMOVED), dict(rope_theta=1e4)),
    ("olmo2", dict(sliding_window=4), "sliding_window=4"),
    ("olmo2", dict(layer_types=[LOCAL] * 3), "layer_types="),
    ("olmo3", dict(layer_types=[FULL] * 4), dict(attention="g", window=0)),
    ("olmo3", dict(sliding_window=None), "sliding_window=None"),
    (
        "olmo3",
        dict(rope_parameters=REMOVED, rope_theta=77.0, rope_local_base_freq=5.0),
        dict(rope_theta=77.0, rope_scaling=(), rope_theta_local=5e5),
    ),
    (
        "olmo3",
        dict(rope_parameters=REMOVED, rope_scaling=YARN),
        dict(rope_theta=100.0, rope_scaling=yarn(), rope_theta_local=5e5),
    ),
    (
        "olmo3",
        dict(rope_parameters={FULL: YARN, LOCAL: dict(rope_theta=5.0)}),
        dict(rope_theta=100.0, rope_scaling=yarn(), rope_theta_local=5.0),
    ),
    ("olmo3", dict(rope_parameters=LINEAR), "reads only those of full_attention"),
    # SmolLM3: a list of the layers with rope, or an interval; layers without may be local.
    (
        "smollm3",
        dict(no_rope_layers=None, no_rope_layer_interval=3, layer_types=None),
        dict(rope_layers="rrn", attention="ggl"),
    ),
    (
        "smollm3",
        dict(no_rope_layers=REMOVED, layer_types=REMOVED, use_sliding_window=REMOVED),
        dict(rope_layers="r", attention="g"),
    ),
    (
        "smollm3",
        dict(no_rope_layers=[0, 0, 2], layer_types=None),
        dict(rope_layers="nnr", attention="llg"),
    ),
    ("smollm3", dict(no_rope_layers=[0] * 3), dict(rope_layers="n")),
    ("smollm3", dict(layer_types=[LOCAL, FULL, LOCAL]), dict(attention="lgl")),
    ("smollm3", dict(use_sliding_window=False), "use_sliding_window=False"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers=[1, 0]"),
    ("smollm3", dict(no_rope_layers=["1"] * 3), "no_rope_layers="),
    (
        "smollm3",
        dict(no_rope_layers=None, no_rope_layer_interval=0, layer_types=None),
        "no_rope_layer_interval=0",
    ),
    ("smollm3", dict(attention_bias=False, mlp_bias=True), "mlp_bias=True, attention_bias=False"),
    # Granite: each factor is 1 if it is missing, that of the scores too.
    ("granite", dict(attention_multiplier=REMOVED), dict(query_scale=1.0)),
    ("granite", dict(embedding_multiplier=REMOVED), dict(embed_scale=1.0)),
    (
        "granite",
        dict(residual_multiplier=1, logits_scaling=REMOVED),
        dict(branch_scale=1.0, logit_scale=1.0),
    ),
    ("granite", dict(logits_scaling=7), dict(logit_scale=1 / 7)),
    ("granite", dict(sliding_window=4), "sliding_window=4"),
    *(
        ("granite", {key: value}, f"{key}={value}")
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
        for value in (None, 0, -1.0, True)
    ),
    ("granitemoe", dict(logits_scaling=REMOVED), dict(logit_scale=1.0)),
    ("granitemoe", dict(num_experts_per_tok=1), dict(experts_per_token=1)),
    # Qwen2-MoE: every second of the first layers is local, not the last ones.
    (
        "qwen2_moe",
        dict(layer_types=None, max_window_layers=9, norm_topk_prob=True),
        dict(attention="lg", router="topk_softmax"),
    ),
    ("qwen2_moe", dict(layer_types=None, use_sliding_window=False), dict(attention="g")),
    (
        "qwen2_moe",
        dict(layer_types=None, use_sliding_window=False, sliding_window=0),
        dict(attention="g"),
    ),
    ("qwen2_moe", dict(sliding_window=0), "sliding_window=0"),
    ("qwen2_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2"),
    ("qwen2_moe", dict(mlp_only_layers=[1]), "mlp_only_layers=[1]"),
    ("qwen2_moe_dense", dict(decoder_sparse_step=REMOVED), {}),
    ("qwen2_moe", dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size=0"),
    # gpt-oss: without any rope it has YaRN; an empty one is none.
    *(
        (
            "gpt_oss",
            dict(rope_parameters=missing, rope_theta=9.0),
            dict(rope_theta=9.0, rope_scaling=("yarn", 32.0, 32.0, 1.0, 4096.0, 0.0, False)),
        )
        for missing in (REMOVED, None)
    ),
    ("gpt_oss", dict(rope_parameters={}), dict(rope_theta=15e4, rope_scaling=())),
    ("gpt_oss", dict(rope_scaling=LINEAR), dict(rope_theta=77.0, rope_scaling=("linear", 3.0))),
    (
        "gpt_oss",
        dict(swiglu_limit=REMOVED, swiglu_alpha=1.25),
        dict(glu_limit=7.0, glu_slope=1.25),
    ),
    ("gpt_oss", dict(swiglu_limit=None), "swiglu_limit=None"),
    ("gpt_oss", dict(sliding_window=None), "sliding_window=None"),
    ("gpt_oss", dict(layer_types=[FULL] * 3), dict(attention="g")),
    # transformers rejects these, too.
    ("gemma2", dict(query_pre_attn_scalar=6.5), "query_pre_attn_scalar=6.5"),
    (
        "llama3",
        dict(num_attention_heads=3, num_key_value_heads=1),
        "hidden_size=16: is not a multiple",
    ),
    # Every number: its type and range.
    *(
        ("llama3", {key: value}, f"{key}=")
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "rms_norm_eps",
        )
        for value in (None, "7", -1, 0, True, [], float("nan"), float("inf"), -(10**400))
    ),
    *(
        ("llama3", {"rope_parameters": None, "rope_theta": value}, "rope_theta=")
        for value in (None, "7", -1, 0, True, [], float("nan"), float("inf"), 10**400)
    ),
    ("llama3", dict(rms_norm_eps=10**400), "rms_norm_eps="),
]


def changed_config(family, keys):
    config = json.loads((GOLDEN / family / "config.json").read_text()) | keys
    return {key: value for key, value in config.items() if value != REMOVED}


def row_id(value):
    return value if isinstance(value, str) else str(value)[:60]


@pytest.mark.parametrize(("family", "keys", "expected"), ROWS, ids=row_id)
def test_a_key_has_the_effect_that_it_has_in_transformers(family, keys, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed_config(family, keys)))
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as error:
            weights.model_section(tmp_path)
        assert [fault for fault in error.value.faults if "config.json: " not in fault] == []
        assert any(expected in fault for fault in error.value.faults)
        return
    original = weights.model_section(GOLDEN / family)
    found = weights.model_section(tmp_path)
    assert config_json.differences(original | expected, found) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "keys"), [row[:2] for row in ROWS if not isinstance(row[2], str)], ids=row_id
)
def test_a_changed_key_gives_the_logits_of_transformers(family, keys, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    from tests.huggingface import make_golden

    folder = shutil.copytree(GOLDEN / family, tmp_path / "changed")
    (folder / "config.json").write_text(json.dumps(changed_config(family, keys)))
    config = transformers.AutoConfig.from_pretrained(folder)
    section = weights.model_section(folder)
    if section["num_experts"] != weights.model_section(GOLDEN / family)["num_experts"]:
        assert (
            section["num_experts"] == config.num_local_experts
        )  # the tensors are of another number
        return
    implementations = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **implementations)
    tokens = np.load(GOLDEN / family / "logits.npz")["tokens"]
    np.savez(folder / "logits.npz", **make_golden.logits_of(model.float().eval(), tokens))
    assert_same_logits(folder, *load(folder), 1e-4)


def test_the_final_cap_of_a_multimodal_gemma3_is_ignored(tmp_path):
    text = changed_config("gemma3", dict(architectures=REMOVED, final_logit_softcapping=2.0))
    config = dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3")
    (tmp_path / "config.json").write_text(json.dumps(config | dict(text_config=text)))
    assert weights.model_section(tmp_path)["logit_softcap"] == 0.0


# (family, changed keys of its section, the key that no family has)
NOT_EXPORTED = [
    ("gemma3", dict(attention_softcap=3.0), "model.attention_softcap is 0.0, not 3.0"),
    ("gemma2", dict(rope_theta_local=9.0), "model.rope_theta_local"),
    ("gemma2", dict(attention="llg", qk_norm=True), "model."),
    ("gemma2", dict(query_scale=0.3), "model.query_scale"),
    ("gemma3", dict(embed_scale=1.0), "model.embed_scale"),
    ("llama3", dict(attention_softcap=3.0), "model.attention_softcap is 0.0, not 3.0"),
    ("llama3", dict(logit_softcap=3.0), "model.logit_softcap is 0.0, not 3.0"),
    ("llama3", dict(post_norm=True), "model.post_norm"),
    ("llama3", dict(rope_scaling=("dynamic", 2.0, 8)), "model.rope_scaling"),
    ("gemma3", dict(rope_scaling=("yarn", 2.0, 32.0, 1.0, 8, 0.0, False)), "truncate"),
    ("llama3", dict(mlp="geglu"), "model.mlp"),
    ("llama3", dict(rope_theta_local=7.0, attention="lg", window=3), "model.rope_theta_local"),
    ("llama3", dict(qk_norm=True, qkv_bias=True), "model.q"),
    ("mistral", dict(qk_norm=True, bias=True), "model."),
    ("gpt2", dict(attention="l", window=3), "model.attention"),
    ("gpt2", dict(head_dim=6), "model.head_dim is 8, not 6"),
    ("gpt2", dict(num_kv_heads=1), "model.num_kv_heads is 2, not 1"),
    ("gpt2", dict(bias=False), "model.bias"),
    ("gemma2", dict(num_heads=3, num_kv_heads=3), "hidden_size=16: is not a multiple"),
]


@pytest.mark.parametrize(("family", "keys", "part"), NOT_EXPORTED, ids=row_id)
def test_a_model_that_transformers_computes_otherwise_is_not_exported(family, keys, part):
    section = weights.model_section(GOLDEN / family) | keys
    original = config_json.read(GOLDEN / family / "config.json")
    for known in (None, original):
        with pytest.raises(ConfigError) as error:
            config_json.to_config(section, known)
        (line,) = error.value.faults
        assert "no supported architecture of transformers computes this model" in line
        assert part in line


def test_the_other_names_of_gpt2_in_the_original_do_not_override_the_export():
    section = weights.model_section(GOLDEN / "gpt2")
    original = config_json.read(GOLDEN / "gpt2" / "config.json") | dict(num_attention_heads=4)
    config = config_json.to_config(section, original)
    assert config["n_head"] == 2 and "num_attention_heads" not in config


# Values that no key of a config.json expects, or of another type.
HOSTILE = (None, "x", "", True, -1, 0, 1.5, float("nan"), float("inf"), 10**18, 10**400)
HOSTILE += ([], [1], {}, {"a": 1}, {"rope_type": []}, {"type": "yarn", "factor": "x"})


@pytest.mark.parametrize(
    "family", sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
)
def test_any_value_of_any_key_is_read_or_is_one_fault(family):
    original = json.loads((GOLDEN / family / "config.json").read_text())
    paths = [(key,) for key in (*original, "rope_scaling", "rope_parameters", "layer_types")]
    for key, value in original.items():
        if isinstance(value, dict):
            paths += [(key, inner) for inner in value]
    for path in paths:
        for value in HOSTILE:
            config = json.loads(json.dumps(original))
            section = config
            for key in path[:-1]:
                section = section[key]
            section[path[-1]] = value
            try:
                config_json.to_section(config)
            except ConfigError as error:
                assert all(0 < len(fault) < 2000 for fault in error.faults)
