"""A step of a mixture of experts on fsdp, compiled for H200 GPUs: what is sent, and what is kept.

No GPU is needed, only the wheels of the extra aot-gpu.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.errors import ConfigError
from meshtrain.tools.hlo import hlo, target, traffic
from tests.lib.paths import ROOT

pytestmark = pytest.mark.slow
TARGET, NUM_LAYERS, NUM_KERNELS = "h200:8", 4, 3
E, D, F = 8, 4096, 14336  # experts, model, feed-forward
KERNEL_DIMS = {E, D, F}


@functools.cache
def compiled():
    """Returns the audit of the step as `figures`, and its program as `module`."""
    try:
        target.parse(TARGET)
    except ConfigError as error:
        pytest.skip(str(error))
    sections = {
        "mesh": {"data": 1, "expert": 1, "fsdp": 8},
        "model": {"num_layers": NUM_LAYERS},
        "train": {"global_batch": 32, "num_microbatches": 1, "remat": "none"},
        "data": {"packing": "windows"},
    }
    flags = [
        f"--config.{name}.{key}={x}" for name, one in sections.items() for key, x in one.items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        figures, text = Path(folder, "audit.json"), Path(folder, "step.hlo")
        flags += ["--config=mixtral", f"--target={TARGET}"]
        flags += [f"--output={figures}", f"--keep_hlo={text}"]
        done = subprocess.run(
            [sys.executable, "-m", "meshtrain", "audit", *flags],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return SimpleNamespace(
            figures=json.loads(figures.read_text()), module=hlo.parse(text.read_text())
        )


def sent_kernels(module, opcode):
    """Returns how often kernels of experts are sent by such operations, and their dtypes."""
    runs, dtypes = 0, set()
    for computation, count in traffic.executed(module):
        for one in module.computations[computation].values():
            if one.opcode != opcode:
                continue
            shapes = [shape for shape in one.results if KERNEL_DIMS <= set(shape.shape)]
            runs += count * bool(shapes)
            dtypes |= {shape.dtype for shape in shapes}
    return runs, dtypes


def test_gradients_of_experts_are_scattered_once_in_the_compute_dtype():
    found = sent_kernels(compiled().module, "reduce-scatter-start")
    assert found == (NUM_KERNELS * NUM_LAYERS, {"bf16"})


def test_gradients_are_scattered_while_those_of_the_layer_before_are_computed():
    """At the end of the step nothing would hide most of that: 65 % would be exposed."""
    sent = compiled().figures["roofline"]["transfers"]
    (scattered,) = [one for one in sent if one["kind"] == "reduce-scatter"]
    assert scattered["exposed"] < 0.2 * scattered["seconds"]
