"""The devices of this host, found in a child process; memory and ceiling of a step on them.

A process that starts jax's backend holds memory of its GPUs, so the scripts leave that to their
children.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from meshtrain import hardware
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.program import Program
from meshtrain.tools.hlo import collective_ops, hlo
from meshtrain.tools.hlo.roofline import roofline

AMPERE = 8.0  # compute capability: the first with bfloat16 and with fused attention
# Variables of child processes that run on simulated devices instead.
TOY = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
USABLE = 0.9  # of the memory that jax may allocate; the rest is fragmentation


@dataclass(frozen=True)
class Devices:
    platform: str  # cpu, gpu, ...
    kind: str  # as jax names it
    count: int
    capability: str  # compute capability of a GPU, "9.0"; else ""
    memory: float | None  # bytes that jax may allocate on each; None if unknown

    @property
    def is_gpu(self) -> bool:
        return self.platform == "gpu"

    @property
    def has_fused_attention(self) -> bool:
        return self.is_gpu and _is_number(self.capability) and float(self.capability) >= AMPERE

    @property
    def dtype(self) -> str:
        """The 16-bit dtype that the device multiplies at full speed."""
        is_older = self.is_gpu and _is_number(self.capability) and not self.has_fused_attention
        return "float16" if is_older else "bfloat16"


def _is_number(capability: str) -> bool:
    return capability.replace(".", "", 1).isdigit()  # AMD's is a name, "gfx90a"


def describe() -> Devices:
    """Returns this process's devices."""
    device, count = jax.local_devices()[0], jax.local_device_count()
    memory = (device.memory_stats() or {}).get("bytes_limit")
    capability = str(getattr(device, "compute_capability", ""))
    return Devices(device.platform, device.device_kind, count, capability, memory)


def environment() -> dict[str, str]:
    """Returns the variables with which processes share a GPU: each allocates only what it needs."""
    # The first variable is the old name of the second.
    fraction = os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    names = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": fraction}
    return {name: os.environ.get(name, value) for name, value in names.items()}


def find() -> Devices:
    """Returns the devices that a child process finds. Raises SystemExit if it finds none."""
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    if child.returncode:
        raise SystemExit(f"jax finds no device: {child.stderr.strip().splitlines()[-1]}")
    return Devices(**json.loads(child.stdout.splitlines()[-1]))


def transformer_of(c: Any) -> TransformerConfig:
    """Returns the typed section `model` of a config."""
    section = c.model.to_dict()
    return TransformerConfig(**{key: value for key, value in section.items() if key != "build"})


def bytes_of_step(c: Any, *, rows: int, fused: bool, is_bare: bool = False) -> float:
    """Returns about the peak memory of a step on one device, of meshtrain or of bare jax.

    State, gradients and the parameters in 16 bits; the activations that are kept; the scores if
    attention is not fused; and the logits, which meshtrain computes in chunks. The factors fit
    programs that were compiled for h200, rtx4090 and v100.
    """
    m, length = transformer_of(c), c.data.seq_len
    kv_width = m.num_kv_heads * m.head_size
    mlp = (2 if m.mlp == "gelu" else 3) * m.d_ff
    layer = m.d_model * (2 * (m.d_model + kv_width) + mlp)
    embeddings = (1 if m.tie_embeddings else 2) * m.vocab_size * m.d_model
    moments = 4 if c.optim.moment_dtype == "bfloat16" else 8
    state = (10 + moments) * (m.num_layers * layer + embeddings)
    kept = 2 if c.train.remat == "full" else 48 if is_bare else 24
    if m.mlp == "gelu" and c.train.kernels != "plain" and c.train.remat != "full":
        kept += 2 * m.d_ff / m.d_model  # the fused formulas keep the result of GELU too
    logits = (6 if is_bare else 2) * rows * length * m.vocab_size
    if fused and not is_bare:  # with float16 there are no chunks
        logits = min(logits, c.model.loss_chunk_mib * (1 << 20))
    scores = 0 if fused else (4 * m.num_layers + 10) * m.num_heads * length
    return state + logits + rows * length * (m.num_layers * kept * m.d_model + scores)


def ran_out_of_memory(error: str) -> bool:
    return "RESOURCE_EXHAUSTED" in error or "ut of memory" in error


def mfu_at_most(program: Program, compiled: Any, c: Any) -> float | None:
    """Returns the ceiling of MFU of a compiled step, as `meshtrain audit` prints it.

    None if the device is unknown.
    """
    device = program.mesh.devices.flat[0]
    row = hardware.device_of(device.device_kind)
    if row is None:
        return None
    module = hlo.parse(compiled.as_text())
    found = collective_ops.find_collectives(module, program.mesh.shape, device.platform)
    tokens = c.train.global_batch * c.data.seq_len / program.mesh.size
    flops = tokens * program.model.flops_per_token(c.data.seq_len)
    return roofline(module, found, row, program.mesh, model_flops=flops).mfu


if __name__ == "__main__":
    print(json.dumps(asdict(describe())))
