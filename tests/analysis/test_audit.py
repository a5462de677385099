"""What the compiled step moves, beside the least that it could: budgets for each layout."""

import jax
import pytest
from conftest import tiny_config

from meshtrain import cli
from meshtrain.analysis import audit
from meshtrain.ops import losses
from meshtrain.parallel import sharding

GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
# What XLA on CPU moves beyond the minimum of a layout, and TPU does not.
ONE_BY_ONE = "input gradients summed one by one"


def audited(model=None, rules=(), train=None, schedule=None, **mesh):
    c = tiny_config()
    c.mesh.update({"data": 1, **mesh})
    c.model.update(model or {})
    c.train.update(train or {})
    c.pipeline.update(schedule or {})
    c.rules = (*rules, *c.rules)
    num_devices = 1
    for size in mesh.values():
        num_devices *= size
    return audit.audit(c, devices=jax.devices()[:num_devices])


def assert_explained(result):
    """Every byte beyond the minimum has its reason."""
    assert result.warnings == []
    assert all(one.reason for one in result.explained if one.excess > 0.01 * one.needed + 0.5)
    assert all(one.excess >= 0 for one in result.explained)
    for total in result.axes:
        more = sum(moved for name, _, _, moved in result.excess if name == total.name)
        assert total.bytes == pytest.approx(total.minimum + more, abs=1)


def test_gradients_cross_data_once_however_many_microbatches():
    # The bytes of all parameters, tied table included, times 2 (n - 1) / n.
    results = [
        audited(GPT2, train=dict(global_batch=128, num_microbatches=m), data=8) for m in (1, 4, 16)
    ]
    for result in results:
        assert_explained(result)
        assert [total.name for total in result.axes] == ["data"]
        assert result.total("data").ratio <= 1.05
        moved = result.moved("gradients summed", "data")
        assert moved == 7 / 4 * result.held
        assert result.total("data").bytes == pytest.approx(moved, rel=1e-3)


def test_fsdp_gathers_twice_and_scatters_once():
    result = audited(fsdp=8)
    assert_explained(result)
    assert result.total("fsdp").ratio <= 1.005
    whole = 8 * result.held
    assert result.moved("gradients summed", "fsdp") == 7 / 8 * whole
    # The tables of both ends are gathered once: nothing needs them again, or at once.
    ends = 2 * 128 * 32 * 4
    assert result.saved == [("fsdp", "parameters gathered", 7 / 8 * ends)]
    assert result.moved("parameters gathered", "fsdp") == 7 / 8 * (2 * whole - ends)
    of_layers = [one.collective for one in result.explained if "layers/" in one.collective.origin]
    assert all("meshtrain/models/layers.py" in c.source for c in of_layers)


@pytest.mark.parametrize("layout", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_chunks_of_the_loss_send_nothing_more(layout, monkeypatch):
    """Each device adds up the chunks of its rows; the sums cross the wire once."""
    monkeypatch.setattr(losses, "MIB", 1024)
    whole, chunks = (audited(dict(loss_chunk_mib=mib), **layout) for mib in (0, 1))
    assert [total.bytes for total in chunks.axes] == [total.bytes for total in whole.axes]


def test_tensor_sums_activations_four_times_a_layer():
    result = audited(dict(num_kv_heads=4), tensor=4)
    assert_explained(result)
    one = 2 * 3 / 4 * 16 * 16 * 32 * 4  # an all-reduce of B x S x D
    statistics = 3 * 2 * 3 / 4 * 16 * 16 * 4
    assert result.total("tensor").minimum == (4 * 2 + 2) * one + statistics
    # query, key, value and gate, up: five sums a layer on the way back instead of two
    assert result.moved(ONE_BY_ONE, "tensor") == 2 * 3 * one
    assert {label for _, label, _, _ in result.excess} == {ONE_BY_ONE, "scalars"}


def test_the_command_says_all_of_it_for_a_product_of_axes(capsys):
    mesh = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    model = ["--config.model.num_layers=2", "--config.model.d_model=64", "--config.model.d_ff=96"]
    # No token file: configs/default.py names none, and none is needed.
    assert cli.main("audit", ["--config=configs/default.py", *mesh, *model]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 100 and printed[-1] == "no warnings"
    ratios = {line.split()[0]: float(line.split()[3]) for line in printed[4:7]}
    assert ratios["data"] <= 1.05 and ratios["fsdp"] <= 1.05 and ratios["tensor"] > 1.05
    moves = [f"{axis}: gradients summed" for axis in ("data", "fsdp")]
    assert {*moves, "fsdp: parameters gathered", "tensor: activations"} <= {*printed}
    assert any("reduce-scatter" in line and "models/layers.py:" in line for line in printed)
    beyond = [line for line in printed if line.lstrip().startswith("+")]
    assert "tensor: " + ONE_BY_ONE in beyond[0] and all("scalars" in line for line in beyond[1:])


def test_parameters_that_are_kept_whole_are_told_and_not_in_the_minimum():
    # XLA gathers what all micro-batches read before the first of them.
    result = audited(train=dict(global_batch=16, num_microbatches=2), fsdp=8)
    assert_explained(result)
    assert 1 <= result.total("fsdp").ratio <= 1.005
    ((axes, role, kept),) = result.saved
    assert (axes, role) == ("fsdp", "parameters gathered") and kept > 0


def test_gradients_summed_in_each_microbatch_are_told(monkeypatch):
    # Without slices of its own, XLA sums the gradients over data in each turn of the loop.
    monkeypatch.setattr(sharding, "batch_slices", lambda axes: ((), 1))
    result = audited(train=dict(global_batch=32, num_microbatches=4), data=8)
    assert result.total("data").ratio > 3
    told = [warning for warning in result.warnings if "summed more often" in warning]
    assert told and all("all-reduce over data" in warning for warning in told)
    assert any("meshtrain/models/layers.py" in warning for warning in told)


def test_a_table_that_no_rule_cuts_and_an_axis_without_work_are_told():
    result = audited(rules=[("vocab", None), ("batch", None)], data=2, tensor=4)
    told = [warning for warning in result.warnings if "tokens/embedding (128, 32)" in warning]
    assert len(told) == 1 and "whole along tensor=4" in told[0]
    assert any("mesh.data=2 cuts neither" in warning for warning in result.warnings)
    assert "data" not in {total.name for total in result.axes}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config.train.stepz=1"], 'did you mean "train.steps"?'),
        (["--config.train.zero_stage=4"], "train.zero_stage=4: use 0, 1, 2 or 3"),
        (["--simulate_device=8"], 'did you mean "--simulate_devices"?'),
        (["--simulate_devices=x"], "--simulate_devices: invalid int value: 'x'"),
        (["--config.mesh.data=3"], "mesh.data=3 needs 3 devices and there are 8"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, line, capsys):
    assert cli.main("audit", ["--config=configs/default.py", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and line in printed.err.splitlines()[0]
