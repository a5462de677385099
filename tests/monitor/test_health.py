"""Replica divergence (silent data corruption) and slow processes are detected, and named."""

import json
import re

import jax
import numpy as np
import pytest

from meshtrain import program
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import HealthConfig
from meshtrain.monitor import health
from meshtrain.train import train


def flipped(array, device, bit):
    """Returns the array with one bit flipped in one device's replica."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.parametrize(
    ("layout", "device", "message"),
    [
        ({"data": 8}, 5, "on device 5 of process 0 from 7 other replicas"),
        ({"data": 4, "tensor": 2}, 3, "on device 3 of process 0 from 3 other replicas"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 6, "between device .* without a majority"),
    ],
)
def test_one_flipped_bit_in_a_replica_names_the_device(tiny, layout, device, message):
    tiny.mesh.update(**layout)
    cfg = parse(tiny, num_devices=8)
    parts = build(cfg)
    one = program.assemble(cfg, parts)
    with one.active():
        state = one.initial_state(0)
        digest = health.make_digest(state, one.mesh)

        def faults(state):
            return health.replica_faults(state, [health.local_digests(digest(state))])

        assert faults(state) == []
        for bit in (0, 31, 1000):
            leaves, tree = jax.tree.flatten(state)
            sizes = [leaf.addressable_shards[0].data.nbytes for leaf in leaves]
            index = int(np.argmax(sizes))
            leaves[index] = flipped(leaves[index], device, bit)
            (fault,) = faults(tree.unflatten(leaves))
            assert "differs" in fault and re.search(message, fault), fault


def test_a_diverged_replica_ends_the_run_and_is_not_saved(tiny, tmp_path, monkeypatch):
    tiny.mesh.data = 8
    tiny.train.steps, tiny.checkpoint.every, tiny.health.every = 8, 2, 3
    original = program.Program.compile

    def compile_with_fault(self, batch):
        step = original(self, batch)

        def run(state, batch):
            state, report = step(state, batch)
            if int(state.step) == 5:
                leaves, tree = jax.tree.flatten(state.params)
                leaves[0] = flipped(leaves[0], 2, 7)
                state = state._replace(params=tree.unflatten(leaves))
            return state, report

        run.memory_analysis, run.as_text = step.memory_analysis, step.as_text
        return run

    monkeypatch.setattr(program.Program, "compile", compile_with_fault)
    with pytest.raises(health.CorruptState, match="step 6: .* differs on device 2"):
        train(tiny, workdir=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["step"] for row in events if row["event"] == "save"] == [2, 4]
    assert [row["step"] for row in events if row["event"] == "corrupt"] == [6]


def test_speeds_are_fractions_of_the_median():
    # Seconds: the wait for data in a step, the rest of the step, a matrix product.
    even = [(0.0, 1.0, 0.1)] * 4
    assert health.relative_speeds(even) == [1.0] * 4
    late_data = [(0.0, 1.5, 0.1), (0.0, 1.5, 0.1), (0.5, 1.0, 0.1)]
    assert health.relative_speeds(late_data) == pytest.approx([1, 1, 2 / 3])
    slow_device = [(0.0, 2.0, 0.1), (0.0, 2.0, 0.2), (0.0, 2.0, 0.1)]
    assert health.relative_speeds(slow_device) == pytest.approx([1, 0.5, 1])
    assert health.relative_speeds(slow_device[:2]) == pytest.approx([1, 0.5])
    assert health.time_product() > 0


def test_a_slow_process_is_logged_soon_after_the_start(monkeypatch):
    page, logged = {"data": 0.0, "step": 0.0, "first_step": 1003.0}, []
    check = health.ReplicaCheck(
        type("", (), {"every": 500}), None, page, event=lambda *_, **fields: None, log=logged.append
    )
    monkeypatch.setattr(health, "time_product", lambda: 0.01)
    monkeypatch.setattr(health, "make_digest", lambda state, mesh: lambda state: None)
    monkeypatch.setattr(health, "local_digests", lambda rows: None)
    monkeypatch.setattr(health, "replica_faults", lambda state, digests: [])
    monkeypatch.setattr(health.distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(
        health.distributed, "gather", lambda timing: [timing, timing and [50.0, *timing[1:]]]
    )
    steps = []
    for step in range(1003, 3001):
        if check.due(step, saving=False):
            steps.append(step)
            check.run(step, None)
            assert bool(logged) == (step >= 1083)
        page["step"] += 1.0
    assert steps == [1013, 1023, 1043, 1083, 1500, 2000, 2500, 3000]
    monkeypatch.setattr(health.distributed, "num_processes", lambda: 1)
    assert not check.due(1013, saving=False)  # nothing to compare with


def test_a_process_that_is_slow_three_times_in_a_row_is_logged(monkeypatch):
    lines, events = [], []
    page = {"data": 0.0, "step": 0.0}
    check = health.ReplicaCheck(
        type("", (), {"every": 10}),
        None,
        page,
        event=lambda name, **fields: events.append((name, fields)),
        log=lines.append,
    )
    monkeypatch.setattr(health, "time_product", lambda: 0.01)
    data_wait = [1.0]  # of the other process

    def gather(timing):
        return [timing, [data_wait[0], timing[1], timing[2], "other"]]

    monkeypatch.setattr(health.distributed, "gather", gather)
    for step in range(0, 60, 10):
        page["step"] += 1.0
        data_wait[0] = 0.0 if step == 30 else 1.0
        check._compare_speeds(step)
    assert lines == [] and events == []
    page["step"] += 1.0
    check._compare_speeds(60)
    ((name, fields),) = events
    assert name == "straggler" and (fields["process"], fields["host"]) == (1, "other")
    assert "process 1 on other is slow: 0.09 of the median speed" in lines[0]


def test_replicas_are_compared_before_each_save():
    quiet = {"event": lambda *_, **__: None, "log": lambda _: None}
    check = health.ReplicaCheck(HealthConfig(every=5), None, {"first_step": 0}, **quiet)
    assert [step for step in range(11) if check.due(step, saving=False)] == [5, 10]
    assert [step for step in range(4) if check.due(step, saving=True)] == [1, 2, 3]
    never = health.ReplicaCheck(HealthConfig(every=0), None, {"first_step": 0}, **quiet)
    assert not never.due(5, saving=True)
