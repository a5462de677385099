"""One step of a config on a mesh, built as in train()."""

import functools
import math

import jax

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.program import assemble
from meshtrain.tools.verify.case import keep_gradients
from tests.lib.configs import packed


class Run:
    """The parts of a run on one mesh, built as in train().

    `model` and `batches` replace what the config names.
    """

    def __init__(self, c, dtype=None, model=None, batches=None, **layout):
        layout = {"data": 1, **layout}
        c.mesh.update(layout)
        if dtype:
            c.train.dtype = c.train.param_dtype = dtype
        num_devices = math.prod(size for axis, size in layout.items() if axis != "slices")
        self.cfg = parse(c, num_devices=num_devices)
        data = None
        if batches is not None:
            data = from_iterable(batches, global_batch=self.cfg.train.global_batch)
        parts = build(self.cfg, model=model, data=data)
        make_optimizer = parts.make_optimizer
        self.parts = parts._replace(
            make_optimizer=lambda rate: keep_gradients(make_optimizer(rate))
        )
        self.program = assemble(self.cfg, self.parts, devices=jax.devices()[:num_devices])

    def start(self):
        with self.program.active():
            return self.program.initial_state(0)

    def batch(self, number=0):
        size = self.cfg.train.global_batch
        loader = Loader(self.parts.train_data, self.program.mesh, self.cfg.rules, global_batch=size)
        try:
            return loader.read(number * size)
        finally:
            loader.close()

    def one_step(self):
        """Returns the gradients of one step, the state after it, and its scalars."""
        with self.program.active():
            start, batch = self.start(), self.batch()
            state, scalars = self.program.compile(batch)(start, batch)
            # Process 0 reads them.
            assert all(scalar.is_fully_replicated for scalar in jax.tree.leaves(scalars))
            return jax.device_get((state.opt_state[0], state, scalars))


@functools.cache
def one_device(**model):
    """Returns gradients, next state and scalars of one step on one device, in float64."""
    return Run(packed(**model), dtype="float64").one_step()
