"""Moments in the host's memory: bit-equal steps and checkpoints, and no memory of the device."""

import jax
import numpy as np
import pytest

from meshtrain import state as states
from meshtrain.monitor import health
from meshtrain.train import train
from tests.lib.configs import packed, quick
from tests.lib.runs import Run

LAYOUTS = [
    {"data": 2, "fsdp": 2},
    pytest.param({"pipeline": 2, "fsdp": 2}, marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "context": 2}, marks=pytest.mark.slow),
]


def assert_bit_equal(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), jax.device_get(expected))


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def two_steps(layout, **optim):
    """Returns the program, the state after two steps and the scalars of the second."""
    c = packed()
    c.optim.update(optim)
    if layout.get("pipeline", 1) > 1:
        c.train.num_microbatches = 2
    run = Run(c, **layout)
    with run.program.active():
        state = run.program.initial_state(0)
        step = run.program.compile(run.batch())
        for number in range(2):
            state, scalars = step(state, run.batch(number))
    return run.program, state, scalars


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_moments_in_host_memory_give_bit_equal_steps(layout):
    program, state, scalars = two_steps(layout, offload=True)
    _, *expected = two_steps(layout)
    assert_bit_equal([state, scalars], expected)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert memory_kinds(moments) == {states.HOST_MEMORY}
    assert states.HOST_MEMORY not in memory_kinds([state.params, scalars, state.step])
    on_device = states.bytes_per_device(program.abstract_state.opt_state)
    on_host = states.host_bytes_per_device(program.abstract_state.opt_state)
    assert on_device < 100 < on_host


@pytest.mark.parametrize("moment_dtype", ["bfloat16", "float32"])
def test_moments_of_another_dtype_are_offloaded_too(moment_dtype):
    layout, keys = {"fsdp": 2}, dict(moment_dtype=moment_dtype)
    _, state, _ = two_steps(layout, offload=True, **keys)
    assert_bit_equal(state, two_steps(layout, **keys)[1])


def test_a_skipped_step_keeps_the_moments():
    c = packed()
    c.optim.offload = True
    run = Run(c, fsdp=2)
    with run.program.active():
        start = run.program.initial_state(0)
        start = start._replace(params=jax.tree.map(lambda leaf: leaf * np.nan, start.params))
        before = jax.device_get(start.opt_state)
        state, scalars = run.program.compile(run.batch())(start, run.batch())
    assert scalars["skipped"]
    assert_bit_equal(state.opt_state, before)


def trained(workdir, steps, offload, layout):
    """Returns the state after a run of `steps` on 8 devices that saves every 2 steps."""
    c = quick(steps=steps)
    c.mesh.update({"data": 1, **layout})
    c.optim.offload = offload
    c.checkpoint.every = 2
    return train(c, workdir=workdir).state


# what saves a checkpoint, what reads it: (optim.offload, mesh)
RESUMES = [
    ((True, {"fsdp": 8}), (True, {"data": 2, "fsdp": 4})),
    ((True, {"data": 2, "fsdp": 4}), (False, {"fsdp": 8})),
    ((False, {"data": 2, "fsdp": 4}), (True, {"fsdp": 8})),
]


@pytest.mark.parametrize("saves, resumes", RESUMES, ids=str)
def test_a_checkpoint_is_read_with_and_without_offload(saves, resumes, tmp_path):
    saved = trained(tmp_path, 2, *saves)
    read = trained(tmp_path, 2, *resumes)
    assert_bit_equal(read, saved)
    moments = [leaf for leaf in jax.tree.leaves(read.opt_state) if leaf.ndim]
    assert (memory_kinds(moments) == {states.HOST_MEMORY}) == resumes[0]


@pytest.mark.parametrize("offloads", [(True, True), (True, False), (False, True)], ids=str)
def test_a_resumed_run_is_bit_equal(offloads, tmp_path):
    before, after = offloads
    trained(tmp_path, 2, before, {"fsdp": 8})
    resumed = trained(tmp_path, 4, after, {"fsdp": 8})
    assert_bit_equal(resumed, trained(None, 4, False, {"fsdp": 8}))


def test_replicas_in_host_memory_are_digested():
    program, state, _ = two_steps({"data": 2, "fsdp": 2}, offload=True)
    with program.active():
        digest = health.make_digest(program.abstract_state, program.mesh)
        rows = jax.device_get(digest(state))
    _, on_device, _ = two_steps({"data": 2, "fsdp": 2})
    with program.active():
        assert_bit_equal(rows, health.make_digest(on_device, program.mesh)(on_device))


def test_averages_of_a_schedule_free_optimizer_are_those_without_offload():
    keys = dict(build="meshtrain.optim.others:schedule_free_adamw")
    _, state, _ = two_steps({"fsdp": 2}, offload=True, **keys)
    _, expected, _ = two_steps({"fsdp": 2}, **keys)
    assert states.HOST_MEMORY in memory_kinds(state.opt_state)
    assert_bit_equal(states.evaluation_params(state), states.evaluation_params(expected))


def test_activations_in_host_memory_give_bit_equal_steps():
    def state_after_two_steps(remat):
        c = packed()
        c.train.remat, c.train.num_microbatches = remat, 2
        run = Run(c, data=2, fsdp=2)
        with run.program.active():
            state = run.program.initial_state(0)
            step = run.program.compile(run.batch())
            for number in range(2):
                state, _ = step(state, run.batch(number))
        return state

    assert_bit_equal(state_after_two_steps("offload"), state_after_two_steps("full"))


def test_moments_arrive_after_the_gradients():
    c = packed()
    c.optim.offload = True
    run = Run(c, fsdp=2)
    with run.program.active():
        jaxpr = jax.make_jaxpr(run.program.train_step)(run.program.abstract_state, run.batch())
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    arrivals = []
    for eqn in jaxpr.eqns:
        [operand, *_] = [*eqn.invars, None]
        if eqn.primitive.name == "device_put" and "<host>" in str(operand.aval):
            arrivals.append(made_by.get(id(operand)))
    leaves = jax.tree.leaves(run.program.abstract_state.opt_state)
    assert len(arrivals) == len([leaf for leaf in leaves if states.is_on_host(leaf)]) > 0
    for barrier in arrivals:
        assert barrier is not None  # an argument of the step, copied at once
        assert barrier.primitive.name == "optimization_barrier"
        _, norm = barrier.invars
        assert norm.aval.shape == () and id(norm) in made_by
