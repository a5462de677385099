"""A run whose loss falls, as a command: with data that are slow, so that it can be interrupted."""

import os

import numpy as np

from meshtrain.config import load as configfile
from meshtrain.train import train
from tests.lib.paths import ROOT
from tests.lib.rows import losses

# A run whose loss falls; SLOW_DATA makes it slow enough to interrupt.
TINY = [
    "--config=configs/default.py",
    "--config.train.global_batch=16",
    "--config.train.log_every=1",
    "--config.model.num_layers=1",
    "--config.model.d_model=32",
    "--config.model.num_heads=4",
    "--config.model.num_kv_heads=2",
    "--config.model.d_ff=64",
    "--config.model.vocab_size=64",
    "--config.data.seq_len=16",
    "--config.optim.schedule=constant",
    "--config.optim.warmup_steps=0",
    "--config.eval.batches=0",
    "--config.checkpoint.every=10",
]
SLOW_DATA = """
import time
from meshtrain.data import synthetic
from meshtrain.data.source import Source

def build(**keys):
    read = synthetic.build(**keys).read
    return Source(lambda indices: (time.sleep(0.1), read(indices))[1])
"""


def tiny_run(folder, *, steps):
    """Returns the arguments and the environment of a run in `folder`."""
    (folder / "slow_data.py").write_text(SLOW_DATA)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [*TINY, f"--config.train.steps={steps}", "--config.data.build=slow_data:build"]
    return [*arguments, f"--workdir={folder / 'run'}"], {**os.environ, **environ}


def assert_losses_equal_uninterrupted(folder, *, steps):
    """Asserts that the losses equal a run of one process without interruption."""
    overrides = [
        f"--config.train.steps={steps}",
        "--config.data.build=meshtrain.data.synthetic:build",
    ]
    config = configfile.load_config(str(ROOT / "configs" / "default.py"), [*TINY[1:], *overrides])
    train(config, workdir=folder / "uninterrupted")
    found, expected = losses(folder / "run"), losses(folder / "uninterrupted")
    assert list(found) == list(expected) == list(range(steps))
    assert expected[steps - 1] < expected[0]
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
