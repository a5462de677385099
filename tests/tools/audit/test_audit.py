"""The bytes that a compiled step sends, compared with the minimum of each layout."""

import dataclasses

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.models import layers, transformer
from meshtrain.ops import losses
from meshtrain.parallel import sharding
from meshtrain.program import assemble
from meshtrain.tools.audit import audit
from meshtrain.tools.hlo import collective_ops
from tests.lib.audits import ONE_BY_ONE, assert_explained, audited
from tests.lib.configs import tiny_config

GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)


@pytest.mark.slow
def test_gradients_are_summed_over_data_once_for_any_number_of_microbatches():
    # The bytes of all parameters, including the tied embedding, times 2 (n - 1) / n.
    results = [
        audited(GPT2, train=dict(global_batch=128, num_microbatches=m), data=8) for m in (1, 4, 16)
    ]
    for result in results:
        assert_explained(result)
        assert [total.name for total in result.axes] == ["data"]
        assert result.total("data").ratio <= 1.05
        gradients = result.bytes_for("gradients summed", "data")
        assert gradients == 7 / 4 * result.param_bytes
        assert result.total("data").bytes == pytest.approx(gradients, rel=1e-3)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
@pytest.mark.slow
def test_a_packed_config_is_compiled_with_segments(packing):
    c = default.get_config()
    c.data.packing = packing
    source = build(audit._without_files(parse(c, num_devices=1))).train_data
    assert (source.read(np.arange(2)).segments is not None) == (packing == "best_fit")


def test_of_a_source_one_row_is_read_whatever_the_size_of_the_batch():
    c = tiny_config()
    c.train.global_batch = 10**8
    cfg = parse(c, num_devices=8)
    parts = build(cfg)
    read = []

    def read_few(indices):
        read.append(len(indices))
        return parts.train_data.read(indices)

    source = dataclasses.replace(parts.train_data, read=read_few)
    batch = audit._batch_like(cfg, assemble(cfg, parts), source)
    assert batch.tokens.shape == (10**8, 16) and read == [1]


def test_fsdp_gathers_twice_and_scatters_once():
    result = audited(fsdp=8)
    assert_explained(result)
    assert result.total("fsdp").ratio <= 1.005
    all_bytes = 8 * result.param_bytes
    assert result.bytes_for("gradients summed", "fsdp") == 7 / 8 * all_bytes
    # Embedding, head and last norm are gathered once: the backward pass follows, or does not need
    # them.
    ends = 2 * 128 * 32 * 4 + 32 * 4
    assert result.unsent_bytes == [("fsdp", "parameters gathered", 7 / 8 * ends)]
    assert result.bytes_for("parameters gathered", "fsdp") == 7 / 8 * (2 * all_bytes - ends)
    collectives = [one.collective for one in result.explanations]
    of_layers = [c for c in collectives if "layers/" in c.origin]
    assert all("meshtrain/models/layers.py" in c.source for c in of_layers)
    # The line of the caller is shown: all projections go through one helper.
    functions = {c.source.split()[-1] for c in collectives if c.source}
    assert {"Attention._project", "Attention._combine", "MLP._project", "MLP._combine"} <= functions
    assert not functions & {*collective_ops.HELPERS}
    names = [layers, sharding, transformer]
    assert all(any(hasattr(m, name) for m in names) for name in collective_ops.HELPERS)


@pytest.mark.parametrize(
    "layout", [{"fsdp": 8}, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
def test_loss_chunks_send_no_extra_bytes(layout, monkeypatch):
    """Each device sums the chunks of its rows; one all-reduce then adds the sums of all devices."""
    monkeypatch.setattr(losses, "MIB", 1024)
    unchunked, chunked = (audited(dict(loss_chunk_mib=mib), **layout) for mib in (0, 1))
    assert [total.bytes for total in chunked.axes] == [total.bytes for total in unchunked.axes]


def test_tensor_sums_activations_four_times_per_layer():
    result = audited(dict(num_kv_heads=4), tensor=4)
    assert_explained(result)
    all_reduce = 2 * 3 / 4 * 16 * 16 * 32 * 4  # of B x S x D
    statistics = 3 * 2 * 3 / 4 * 16 * 16 * 4
    assert result.total("tensor").minimum == (4 * 2 + 2) * all_reduce + statistics
    # query, key, value and gate, up: five sums per layer in the backward pass instead of two
    assert result.bytes_for(ONE_BY_ONE, "tensor") == 2 * 3 * all_reduce
    assert {label for _, label, _, _ in result.extra_bytes} == {ONE_BY_ONE, "scalars"}


def test_the_command_prints_all_sections_for_a_product_of_axes(capsys):
    mesh = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    model = ["--config.model.num_layers=2", "--config.model.d_model=64", "--config.model.d_ff=96"]
    # configs/default.py names no token file, and none is needed.
    assert app.main("audit", ["--config=configs/default.py", *mesh, *model]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 100 and printed[-1] == "no warnings"
    ratios = {line.split()[0]: float(line.split()[3]) for line in printed[4:7]}
    assert ratios["data"] <= 1.05 and ratios["fsdp"] <= 1.05 and ratios["tensor"] > 1.05
    sums = [f"{axis}: gradients summed" for axis in ("data", "fsdp")]
    assert {*sums, "fsdp: parameters gathered", "tensor: activations"} <= {*printed}
    assert any("reduce-scatter" in line and "models/layers.py:" in line for line in printed)
    extra = [line for line in printed if line.lstrip().startswith("+")]
    assert "tensor: " + ONE_BY_ONE in extra[0] and all("scalars" in line for line in extra[1:])


@pytest.mark.slow
def test_gathers_that_are_avoided_are_reported_and_not_in_the_minimum():
    # XLA gathers parameters once, before the first of the micro-batches that use them.
    result = audited(train=dict(global_batch=16, num_microbatches=2), fsdp=8)
    assert_explained(result)
    assert 1 <= result.total("fsdp").ratio <= 1.005
    ((axes, role, num_bytes),) = result.unsent_bytes
    assert (axes, role) == ("fsdp", "parameters gathered") and num_bytes > 0


@pytest.mark.slow
def test_gradients_summed_in_each_microbatch_are_reported(monkeypatch):
    # Without per-device batch slices, XLA sums the gradients over data in every iteration.
    monkeypatch.setattr(sharding, "batch_slices", lambda axes: ((), 1))
    result = audited(train=dict(global_batch=32, num_microbatches=4), data=8)
    assert result.total("data").ratio > 3
    warnings = [warning for warning in result.warnings if "summed more often" in warning]
    assert warnings and all("all-reduce over data" in warning for warning in warnings)
    assert any("meshtrain/models/layers.py" in warning for warning in warnings)


def test_a_replicated_embedding_and_an_idle_axis_are_reported():
    result = audited(rules=[("vocab", None), ("batch", None)], data=2, tensor=4)
    (warning,) = [line for line in result.warnings if "tokens/embedding (128, 32)" in line]
    assert "replicated over tensor=4" in warning
    assert any("mesh.data=2 shards neither" in warning for warning in result.warnings)
    assert "data" not in {total.name for total in result.axes}


def test_the_audit_warns_of_what_train_warns_of():
    (warning,) = audited(train=dict(global_batch=10), fsdp=5).warnings
    assert warning.startswith("mesh.fsdp=5 does not divide model.d_model=32: 0.11 MB of parameters")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config.train.stepz=1"], 'did you mean "train.steps"?'),
        (["--config.train.zero_stage=4"], "train.zero_stage=4: use 0, 1, 2 or 3"),
        (["--simulate_device=8"], 'did you mean "--simulate_devices"?'),
        (["--simulate_devices=x"], "--simulate_devices: invalid int value: 'x'"),
        (["--config.mesh.data=2"], "mesh.data=2 needs 2 devices and there are 8"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, line, capsys):
    assert app.main("audit", ["--config=configs/default.py", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and line in printed.err.splitlines()[0]
