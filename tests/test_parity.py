"""Any layout trains like one device: the same initial parameters, losses, gradients and updates."""

import jax
import numpy as np
import pytest

from meshtrain import config, grads, optim, sharding, state
from meshtrain.data.loader import Loader
from meshtrain.mesh import make_mesh
from meshtrain.step import make_train_step

LAYOUTS = [
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 4},
    {"data": 2, "fsdp": 2, "tensor": 2},
]
LLAMA = {}
GPT2 = dict(
    norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True, z_loss=1e-3
)


class Run:
    """The parts of a run on one mesh, built as train() builds them."""

    def __init__(self, c, dtype=None, **layout):
        layout = {"data": 1, **layout}
        c.mesh.update(layout)
        if dtype:
            c.train.dtype = c.train.param_dtype = dtype
        num_devices = int(np.prod(list(layout.values())))
        self.cfg = cfg = config.parse(c, num_devices=num_devices)
        self.mesh = make_mesh(cfg.mesh, devices=jax.devices()[:num_devices])
        schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
        optimizer = cfg.build_optimizer(schedule)
        self.init = state.initializer(cfg.model, optimizer, param_dtype=cfg.train.param_dtype)
        with jax.set_mesh(self.mesh):
            self.abstract, grad_places = state.plan(
                self.init,
                cfg.model.axes,
                optimizer,
                cfg.rules,
                self.mesh,
                zero_stage=cfg.train.zero_stage,
            )
        loss = grads.make_loss(cfg.model, dtype=cfg.train.dtype, remat=cfg.train.remat)
        self.grad_fn = grads.accumulate(
            loss, num_microbatches=cfg.train.num_microbatches, grad_shardings=grad_places
        )
        self.step = make_train_step(
            self.grad_fn, optimizer, schedule, clip_norm=cfg.optim.clip_norm, seed=cfg.train.seed
        )

    def start(self):
        places = state.places_of(self.abstract)
        return self._on_mesh(jax.jit(self.init, out_shardings=places), jax.random.key(0))

    def batch(self, number=0):
        size = self.cfg.train.global_batch
        loader = Loader(self.cfg.train_data, self.mesh, self.cfg.rules, global_batch=size)
        try:
            return loader.read(number * size)
        finally:
            loader.close()

    def one_step(self):
        """Returns gradients, the state after one step, and its report, all from the same start."""

        def both(start, batch):
            return self.grad_fn(start.params, batch, jax.random.key(0))[0], *self.step(start, batch)

        return jax.device_get(self._on_mesh(jax.jit(both), self.start(), self.batch()))

    def _on_mesh(self, function, *args):
        with jax.set_mesh(self.mesh), sharding.use_rules(self.cfg.rules):
            return function(*args)


def assert_same(ours, theirs, rtol):
    """Compares leaf by leaf, relative to the largest value of each leaf."""

    def compare(path, a, b):
        scale = np.abs(b).max() if np.size(b) else 1
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(scale, 1e-30), err_msg=name)

    jax.tree_util.tree_map_with_path(compare, ours, theirs)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_seed_gives_bit_equal_parameters_on_every_mesh(tiny, layout):
    ours, alone = Run(tiny.copy_and_resolve_references(), **layout), Run(tiny)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (ours.start(), alone.start())))


@pytest.mark.parametrize("variant", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_and_updates_are_those_of_one_device_in_float64(tiny, layout, variant, x64):
    tiny.model.update(variant)
    tiny.data.separator = 7  # packed rows: positions, segments and masks take part
    ours = Run(tiny.copy_and_resolve_references(), dtype="float64", **layout).one_step()
    assert_same(ours, Run(tiny, dtype="float64").one_step(), rtol=1e-10)


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("layout", [{}, {"data": 2, "fsdp": 2}], ids=str)
def test_microbatches_add_up_to_the_whole_batch(tiny, layout, num_microbatches, x64):
    tiny.data.separator = 7  # uneven weights: a mean of means would differ
    whole = Run(tiny.copy_and_resolve_references(), dtype="float64").one_step()
    tiny.train.num_microbatches = num_microbatches
    assert_same(Run(tiny, dtype="float64", **layout).one_step(), whole, rtol=1e-10)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_zero_stages_change_where_things_live_and_nothing_else(tiny, zero_stage, x64):
    layout = {"data": 2, "fsdp": 4}
    whole = Run(tiny.copy_and_resolve_references(), dtype="float64", **layout)
    tiny.train.zero_stage = zero_stage
    ours = Run(tiny, dtype="float64", **layout)
    assert_same(ours.one_step(), whole.one_step(), rtol=1e-10)
    sizes = [state.bytes_per_device(t) for t in (ours.abstract.params, ours.abstract.opt_state)]
    cut = [state.bytes_per_device(t) for t in (whole.abstract.params, whole.abstract.opt_state)]
    assert (sizes[0] > 3 * cut[0], sizes[1] > 3 * cut[1]) == (True, zero_stage < 1)


@pytest.mark.parametrize("remat", ["full", "dots", "names:attention,mlp"])
def test_remat_changes_no_gradient(tiny, remat, x64):
    plain = Run(tiny.copy_and_resolve_references(), dtype="float64").one_step()
    tiny.train.remat = remat
    assert_same(Run(tiny, dtype="float64").one_step(), plain, rtol=1e-10)


def test_remat_keeps_less_for_the_backward_pass(tiny):
    tiny.data.seq_len = 64

    def temporary_bytes(remat):
        c = tiny.copy_and_resolve_references()
        c.train.remat = remat
        run = Run(c)
        with jax.set_mesh(run.mesh), sharding.use_rules(run.cfg.rules):
            compiled = jax.jit(run.step).lower(run.abstract, run.batch()).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < 0.8 * temporary_bytes("none")


def test_bfloat16_computes_near_float32_and_updates_float32_parameters(tiny):
    exact = Run(tiny.copy_and_resolve_references()).one_step()
    tiny.train.dtype = "bfloat16"
    mixed = Run(tiny).one_step()
    assert {leaf.dtype.name for leaf in jax.tree.leaves((mixed[0], mixed[1].params))} == {"float32"}
    assert_same(mixed[0], exact[0], rtol=0.1)
    assert all(
        np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (mixed[0], exact[0])), strict=True)
    )
