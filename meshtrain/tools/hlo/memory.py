"""The memory that a compiled step needs on each device, compared with what the device has."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import jax

from meshtrain import hardware
from meshtrain import state as states
from meshtrain.cluster import limits
from meshtrain.models import trees
from meshtrain.tools.hlo import activations, hlo


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs; all from `parameters` to `temporaries` and `residual`
    add up to `peak`.
    """

    parameters: int
    optimizer_state: int
    batch: int  # with other small arguments
    activations: int  # kept from the forward pass for the backward pass
    gradients: int  # without those that use the memory of activations that are no longer needed
    temporaries: int  # what operations need, and activations that are computed again
    peak: int
    capacity: float | None  # None if unknown
    residual: int = 0  # of compressed gradients, see `parallel.grad_sync`
    # In the host's memory, for each device; not in `peak`.
    optimizer_state_on_host: int = 0
    activations_on_host: int = 0

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.peak <= self.capacity


def memory_of(
    program: Any,
    compiled: jax.stages.Compiled,
    *,
    allocated: int = 0,
    module: hlo.Module | None = None,
) -> Memory | None:
    """Returns the memory of the compiled step of a `program.Program`.

    None if the compiler does not report it. `allocated`: bytes of the state that each device holds
    already. `module`: the step's HLO, if it is parsed already.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    state = program.abstract_state
    arguments = stats.argument_size_in_bytes
    buffers = arguments + stats.temp_size_in_bytes + stats.output_size_in_bytes
    buffers -= stats.alias_size_in_bytes
    # On CPU the peak that XLA reports lacks the temporaries (jaxlib 0.10.2 and 0.12.0.1).
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    host_arguments = getattr(stats, "host_argument_size_in_bytes", 0)
    host_temporaries = getattr(stats, "host_temp_size_in_bytes", 0)
    # The peak includes what is in the host's memory, or, of temporaries, the larger part alone
    # (jaxlib 0.10.2 and 0.12.0.1).
    is_wrong = on_cpu or host_arguments or host_temporaries
    reported = 0 if is_wrong else getattr(stats, "peak_memory_in_bytes", 0)
    peak = max(reported or buffers, arguments)
    gradients = jax.tree.map(
        lambda leaf, grad_sharding: leaf.update(sharding=grad_sharding),
        trees.intersect(state.params, program.grad_shardings),
        program.grad_shardings,
    )
    free = peak - arguments
    # The HLO of another version of XLA may have another form. No run ends for that: temporaries
    # then include the activations.
    kept = 0
    with contextlib.suppress(LookupError, StopIteration, TypeError, ValueError):
        module = module or hlo.parse(compiled.as_text() or "")
        kept = min(activations.kept_bytes(module, state.params), free)
    gradient_bytes = min(states.bytes_per_device(gradients), free - kept)
    parameters = states.bytes_per_device(state.params)
    optimizer_state = states.bytes_per_device(state.opt_state)
    residual = states.bytes_per_device(state.residual)
    return Memory(
        parameters=parameters,
        optimizer_state=optimizer_state,
        residual=residual,
        batch=arguments - parameters - optimizer_state - residual,
        activations=kept,
        gradients=gradient_bytes,
        temporaries=free - kept - gradient_bytes,
        peak=peak,
        capacity=_capacity(program.mesh, allocated),
        optimizer_state_on_host=states.host_bytes_per_device(state.opt_state),
        activations_on_host=host_temporaries,
    )


def describe_memory(memory: Memory) -> str:
    """Returns what a step needs and what there is, in one line."""
    state = memory.parameters + memory.optimizer_state + memory.residual
    needed = f"the step needs {gigabytes(memory.peak)}"
    if memory.capacity:
        needed += f" of {gigabytes(memory.capacity)}"
    needed += " GB on each device"
    if memory.fits is False:
        needed += f": {gigabytes(memory.peak - memory.capacity)} GB too much"
    if memory.activations:
        activations_text = f"activations {gigabytes(memory.activations)}, "
    else:
        activations_text = "activations and "
    on_host = memory.optimizer_state_on_host + memory.activations_on_host
    on_host = f"; in host memory {gigabytes(on_host)} for each device" if on_host else ""
    return (
        f"{needed}: state {gigabytes(state)}, gradients {gigabytes(memory.gradients)}, "
        f"{activations_text}temporaries {gigabytes(memory.temporaries)}{on_host}"
    )


def gigabytes(size: float) -> str:
    """Returns bytes in units of 10^9 bytes, with three digits."""
    return f"{size / 1e9:.3g}" if size < 1e11 else f"{size / 1e9:,.0f}"


def _capacity(mesh: jax.sharding.Mesh, allocated: int) -> float | None:
    """Returns the bytes of a device; of a simulated one, its share of the host's free memory."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        free = limits.available_memory() / jax.local_device_count() + allocated
        return free if math.isfinite(free) else None
    reported = None
    # A device of another host, or of a topology to compile for, reports nothing.
    if device in jax.local_devices():
        reported = (device.memory_stats() or {}).get("bytes_limit")
    if reported:
        return reported
    table_device = hardware.device_of(device.device_kind)
    return table_device.memory if table_device else None
