"""The layouts that the planner chooses."""

import math

import pytest

from meshtrain.config.parse import on_devices
from meshtrain.configs import llama3
from meshtrain.errors import divisors
from meshtrain.tools.plan import constraints, search
from meshtrain.tools.plan.layout import overrides, with_layout
from tests.lib.plans import CONFIGS, plan_of


@pytest.mark.parametrize("name", ["llama3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_layouts_are_legal_fit_and_are_ranked(name):
    c = CONFIGS[name].get_config()
    c.train.global_batch = 128
    plan_input, machine, plan = plan_of(c, "h200", 64)
    assert 5 < len(plan.candidates) <= 20 and plan.num_tried > 1000
    for one in plan.candidates:
        assert math.prod(one.layout.sizes().values()) == 64
        assert one.memory_bytes <= 0.9 * 141e9
        on_devices(with_layout(plan_input.cfg, one.layout), 64)
    best = plan.candidates[0].seconds
    assert all(one.seconds > best * 0.97 for one in plan.candidates)
    assert plan.candidates[-1].seconds >= best


def test_fixed_keys_hold_for_all():
    c = llama3.get_config()
    c.train.global_batch = 64
    wanted = {
        **{"mesh.tensor": 4, "mesh.pipeline": 2, "mesh.data": 2, "train.zero_stage": 2},
        **{"train.remat": "dots", "train.num_microbatches": 4, "pipeline.keep": "inputs"},
    }
    flags = [f"{key}={value}" for key, value in wanted.items()]
    *_, plan = plan_of(c, "h200", 64, fixed=flags)
    assert plan.candidates
    for one in plan.candidates:
        assert wanted.items() <= overrides(one.layout).items()


def test_gradients_are_sent_as_the_config_says():
    """Compression is never chosen; the pattern of compressed gradients is."""
    c = llama3.get_config()
    c.train.global_batch = 64
    fixed = ["mesh.data=16", "mesh.fsdp=4", "mesh.tensor=1", "mesh.context=1", "mesh.pipeline=1"]
    *_, plan = plan_of(c, "h200", 64, fixed=fixed)
    assert {one.layout.sync.dtype for one in plan.candidates} == {"float32"}
    c.sync.dtype = "int8"
    *_, plan = plan_of(c, "h200", 64, fixed=fixed)
    (best,) = {(one.layout.sync.dtype, one.layout.sync.pattern) for one in plan.candidates}
    assert best == ("int8", "hierarchical")
    *_, plan = plan_of(c, "h200", 64, fixed=[*fixed, "sync.pattern=xla", "sync.dtype=bfloat16"])
    keys = overrides(plan.candidates[0].layout)
    assert (keys["sync.dtype"], keys["sync.pattern"]) == ("bfloat16", "xla")


def test_loss_chunks_are_small_where_they_make_a_layout_fit():
    c = llama3.get_config()
    c.train.global_batch = 8
    fixed = ["mesh.fsdp=8", "train.remat=full", "train.num_microbatches=1"]
    _, _, plan = plan_of(c, "h200", 8, fixed=fixed)
    (one,) = plan.candidates
    assert overrides(one.layout)["model.loss_chunk_mib"] == 2048
    _, machine, plan = plan_of(c, "h200", 8, fixed=fixed, limit=(one.memory_bytes - 1e9) / 141e9)
    (smaller,) = plan.candidates
    assert overrides(smaller.layout)["model.loss_chunk_mib"] == search.SMALL_LOSS_CHUNK
    logits = 4 * 8192 * 128256  # bytes, in chunks of equal size
    assert one.memory_bytes - smaller.memory_bytes == logits / 2 - logits / 16
    assert smaller.seconds > one.seconds
    _, _, plan = plan_of(c, "h200", 8, fixed=[*fixed, "model.loss_chunk_mib=64"])
    assert overrides(plan.candidates[0].layout)["model.loss_chunk_mib"] == 64


@pytest.mark.slow
def test_tensor_stays_inside_a_host_and_rows_of_a_tpu_are_wide():
    c = llama3.get_config()
    c.train.global_batch = 256
    *_, plan = plan_of(c, "h100", 32, per_host=4)
    assert plan.candidates and all(one.layout.tensor <= 4 for one in plan.candidates)
    *_, plan = plan_of(c, "v5p", 256, per_host=256)
    assert plan.candidates and all(4096 // one.layout.fsdp >= 128 for one in plan.candidates)


def test_divisors_are_those_of_the_definition_and_of_large_numbers():
    for number in range(-1, 200):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]
    assert len(divisors(10**8)) == 81 and divisors(2**31 - 1) == [1, 2**31 - 1]


@pytest.mark.parametrize(
    ("flags", "most_memory"),
    [(["train.remat=none", "mesh.tensor=1"], 0.9), (["train.remat=full"], 0.3)],
    ids=["no remat", "a third of the memory"],
)
def test_one_row_more_than_the_largest_batch_does_not_fit(flags, most_memory):
    c = CONFIGS["gpt2"].get_config()
    c.train.global_batch = 8
    fixed = constraints.values([("--fix", flag) for flag in (*flags, "train.num_microbatches=1")])
    plan_input, machine, _ = plan_of(c, "h100", 8)
    limit = most_memory * machine.device.memory
    largest = search.with_largest_batch(plan_input, machine, limit=limit, fixed=fixed)
    num_rows = largest.cfg.train.global_batch
    assert num_rows % 8 == 0 and num_rows > 8

    def fitting(num_rows):
        c.train.global_batch = num_rows
        plan_input, machine, _ = plan_of(c, "h100", 8)
        return search.search(plan_input, machine, limit=limit, fixed=fixed).candidates

    best = fitting(num_rows)[0]
    assert best.memory_bytes <= limit and best.layout.num_microbatches == 1
    assert not fitting(num_rows + 8)
    # Nearly all of the memory is used.
    assert best.memory_bytes > 0.98 * limit


def test_without_a_layout_there_is_no_largest_batch():
    c = CONFIGS["llama3"].get_config()
    plan_input, machine, _ = plan_of(c, "h100", 64)
    found = search.with_largest_batch(plan_input, machine, limit=1e9, fixed={"num_microbatches": 1})
    assert found is None
