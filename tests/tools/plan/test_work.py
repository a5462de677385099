"""The work of a step: the FLOPs of the model, and the bubble of a schedule."""

import pytest

from meshtrain.config.parse import parse
from meshtrain.configs import gpt2, llama3, qwen2
from meshtrain.tools.plan import from_config, work
from meshtrain.tools.plan.layout import Layout
from tests.lib.plans import CONFIGS, H100, SMALL, cost


def test_products_are_those_of_the_models_flops():
    """A step of one device without attention takes once to twice its FLOPs at the peak."""
    layout = Layout(rows=1)
    parts = cost(layout).parts
    flops = 6 * (SMALL.num_layers * SMALL.layer + 4096 * 128256) * 8192
    flops += 3 * 2 * 8192**2 * SMALL.heads * SMALL.head_dim * SMALL.num_layers  # causal attention
    least = flops / H100.flops_16
    assert least < parts["products and attention"] + parts["head"] < 2 * least


def test_a_bubble_shrinks_with_chunks():
    one = cost(Layout(pipeline=4, num_microbatches=8)).parts
    four = cost(Layout(pipeline=4, num_microbatches=8, schedule="interleaved", num_chunks=4)).parts
    assert one["bubble"] == pytest.approx(4 * four["bubble"])
    work = one["products and attention"]
    assert one["bubble"] == pytest.approx(3 / 8 * work, rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_traced_products_are_those_of_the_config(name):
    """The same model, once as the planner reads it and once traced, as it sees a user's own."""
    c = CONFIGS[name].get_config()
    c.model.update(num_layers=2, d_model=64, num_heads=8, num_kv_heads=4, d_ff=128, vocab_size=256)
    c.model.head_dim = 0
    c.data.seq_len = c.model.max_seq_len = 64
    c.model.attention_impl = "xla"
    plan_input = from_config.plan_input(parse(c), platform="gpu")
    shapes = plan_input.stored.shapes.params
    batch = from_config.abstract_row(plan_input.cfg)
    traced = work.of_traced(plan_input.model, shapes, batch, "float32")
    read = sum(n * k for n, k in plan_input.work.products)
    attention = 2 * 64 * plan_input.work.heads * plan_input.work.head_dim
    found = sum(n * k for n, k in traced.products)
    if name != "mixtral":  # whose blocks of tokens are padded
        assert found == pytest.approx(read + attention, rel=0.01)
    assert traced.num_layers == plan_input.work.num_layers == 2
    assert (traced.layer, traced.others) == (plan_input.work.layer, plan_input.work.others)


@pytest.mark.parametrize(("platform", "extra"), [("gpu", 2 * 4 * 64 + 16), ("cpu", 0), ("tpu", 0)])
def test_what_a_layer_keeps_is_that_of_the_formulas_on_the_devices(platform, extra):
    """On GPUs the fused ones of GPT-2 keep GELU (d_ff in 16 bits), and two numbers of each norm."""
    c = CONFIGS["gpt2"].get_config()
    c.model.update(num_layers=2, d_model=64, num_heads=8, num_kv_heads=8, d_ff=4 * 64)
    c.model.vocab_size = 256
    c.data.seq_len = c.model.max_seq_len = 64

    def kept(kernels, platform):
        c.train.kernels = kernels
        found = from_config.plan_input(parse(c), platform=platform).work
        return sum(found.kept_bytes("none"))

    assert kept("auto", platform) == kept("plain", platform) + extra
    assert kept("fused", platform) == kept("plain", platform) + 2 * 4 * 64 + 16


@pytest.mark.parametrize("tokens", [32, 64])
@pytest.mark.parametrize(
    ("config", "num_kv_heads", "is_gated"), [(gpt2, 8, False), (qwen2, 4, True), (llama3, 4, True)]
)
def test_flat_queries_are_sharded_over_tensor(config, num_kv_heads, is_gated, tokens):
    """They are as wide as the residual stream, but sharded with the heads.

    With "dots" a layer keeps its input and the last product of attention, which are not. That there
    are as many tokens as the model is wide changes nothing. On GPUs products with a bias are flat.
    """
    c = config.get_config()
    c.model.update(num_layers=2, d_model=64, num_heads=8, num_kv_heads=num_kv_heads, d_ff=160)
    c.model.update(head_dim=0, vocab_size=256)
    c.data.seq_len = c.model.max_seq_len = tokens
    found = from_config.plan_input(parse(c), platform="gpu").work
    wide, other = found.kept_bytes("dots")
    assert wide == 2 * 2 * 64
    # Queries, keys, values, the hidden layer and its gate; statistics in float32.
    least = 2 * (64 + 2 * num_kv_heads * 8 + 160 * (1 + is_gated))
    assert least <= other <= least + 16


def test_names_that_save_nothing_keep_nothing_more():
    c = CONFIGS["llama3"].get_config()
    c.model.update(num_layers=2, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=256)
    c.data.seq_len = c.model.max_seq_len = 32

    def kept(remat):
        c.train.remat = remat
        return from_config.plan_input(parse(c), platform="gpu").work.kept_bytes(remat)

    assert kept("names:mlp") == kept("full")
    assert sum(kept("names:mlp_up,mlp_gate")) == sum(kept("full")) + 2 * 2 * 160


def test_offloaded_values_take_no_memory_of_the_device():
    c = CONFIGS["llama3"].get_config()
    c.model.update(num_layers=2, d_model=64, num_heads=8, num_kv_heads=4, d_ff=160, vocab_size=256)
    c.data.seq_len = c.model.max_seq_len = 32

    def kept(remat):
        c.train.remat = remat
        return from_config.plan_input(parse(c), platform="gpu").work.kept_bytes(remat)

    wide, other = kept("full")
    assert wide > 0 and kept("offload") == (0, other)
    assert sum(kept("offload:attention")) == wide + other < sum(kept("names:attention"))
