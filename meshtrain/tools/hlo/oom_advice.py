"""Advice when memory runs out: settings that need less on each device, and about how much less."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain import grads
from meshtrain import state as states
from meshtrain.config import schema
from meshtrain.config.build import RunParts
from meshtrain.config.schema import AXES, Config
from meshtrain.errors import OutOfMemory, memory_fault
from meshtrain.models import blocks, trees
from meshtrain.ops.losses import MIB
from meshtrain.parallel import sharding
from meshtrain.schedules import SCHEDULES
from meshtrain.tools.hlo import activations
from meshtrain.tools.hlo.memory import Memory, describe_memory, gigabytes, memory_of

SMALLEST = 0.01  # of what the step needs: a remedy that saves less is not listed


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and the bytes that it saves on each device."""

    flags: str
    saves: float
    of: str  # what it saves: "state", "activations" ...


@dataclass
class MemoryAdvice:
    """The remedies for a run that needs more memory than its devices have."""

    cfg: Config
    parts: RunParts
    program: Any  # a program.Program
    batch: Any  # shapes
    memory: Memory | None = None  # of the compiled step, once it is known
    traces: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes kept, by train.remat

    @contextlib.contextmanager
    def when_out_of_memory(self) -> Iterator[None]:
        """Raises OutOfMemory, with the remedies, if memory runs out inside this context."""
        try:
            yield
        except Exception as error:
            fault = memory_fault(error, verb=None)
            if fault and not isinstance(error, OutOfMemory):
                raise OutOfMemory("\n".join([fault, *self.lines()])) from error
            raise

    def memory_lines(self, compiled: jax.stages.Compiled) -> Iterator[str]:
        """Yields what the compiled step needs, and the remedies if it does not fit.

        The state is in memory already.
        """
        allocated = states.bytes_per_device(self.program.abstract_state)
        self.memory = memory_of(self.program, compiled, allocated=allocated)
        if self.memory:
            yield describe_memory(self.memory)
            if self.memory.fits is False:
                yield from self.remedies()

    def lines(self) -> Iterator[str]:
        """Yields what the step needs, and the remedies, the one that saves most first."""
        if self.memory:
            yield describe_memory(self.memory)
        else:
            state, gradients = self._state_bytes(self.cfg)
            activation_bytes = self._activation_bytes(self.cfg)
            yield (
                f"each device needs {gigabytes(state)} GB for the state, up to "
                f"{gigabytes(gradients)} for gradients, about {gigabytes(activation_bytes)} for "
                f"activations, and temporaries"
            )
        yield from self.remedies()

    def remedies(self) -> Iterator[str]:
        """Yields the remedies alone."""
        ways = self.ways()
        yield "ways out, by what each saves on a device:"
        for remedy in ways:
            yield f"  {remedy.flags}  saves about {gigabytes(remedy.saves)} GB ({remedy.of})"
        yield f"  {'or ' if ways else ''}a lower train.global_batch, or a smaller model"

    def ways(self) -> list[Remedy]:
        """Returns the remedies that apply to this run, the one that saves most first."""
        remedies = [*self._of_state(), *self._of_activations(), *self._of_loss()]
        needed = self.memory.peak if self.memory else sum(self._state_bytes(self.cfg))
        worthwhile = [remedy for remedy in remedies if remedy.saves > SMALLEST * needed]
        return sorted(worthwhile, key=lambda remedy: -remedy.saves)

    # ---- state: exact, from the shardings that the changed config has ----

    def _of_state(self) -> Iterator[Remedy]:
        mesh, zero_stage = self.cfg.mesh, self.cfg.train.zero_stage
        if mesh.fsdp > 1 and zero_stage < 3:
            yield self._state_remedy({"train.zero_stage": 3}, "state and gradients")
        if self.cfg.optim.moment_dtype != "bfloat16":
            yield self._state_remedy({"optim.moment_dtype": "bfloat16"}, "optimizer state")
        if zero_stage == 0:
            return
        if mesh.data > mesh.slices:
            # Parameters are gathered within a slice.
            fsdp = mesh.data // mesh.slices * mesh.fsdp
            change = {"mesh.data": mesh.slices, "mesh.fsdp": fsdp}
            yield self._state_remedy(change, "state")
        if self._rows() % 2 == 0:
            of = f"state and activations, on {2 * self.program.mesh.size} devices"
            remedy = self._state_remedy({"mesh.fsdp": 2 * mesh.fsdp}, of)
            yield dataclasses.replace(remedy, saves=remedy.saves + self._row_bytes() / 2)

    def _state_remedy(self, change: dict[str, Any], of: str) -> Remedy:
        state, gradients = self._state_bytes(self.cfg)
        changed_state, changed_gradients = self._state_bytes(_changed(self.cfg, change))
        saved_gradients = gradients - changed_gradients
        if self.memory:
            # Gradients in memory that activations have left cost nothing.
            saved_gradients = min(saved_gradients, self.memory.gradients)
        return Remedy(_flags(change), state - changed_state + saved_gradients, of)

    def _state_bytes(self, cfg: Config) -> tuple[int, int]:
        """Returns the bytes of state and gradients on each device.

        The mesh may have more devices than there are. At ZeRO stage 3 the gathered parameters of
        one layer are included.
        """
        sizes = tuple(getattr(cfg.mesh, axis) for axis in AXES)
        types = (jax.sharding.AxisType.Auto,) * len(AXES)
        mesh = jax.sharding.AbstractMesh(sizes, AXES, axis_types=types)
        with jax.sharding.use_abstract_mesh(self.program.mesh.abstract_mesh):
            abstract = self.program.optimizer_and_state_of(cfg, self.parts, mesh)
        state, grad_shardings = abstract.state, abstract.grad_shardings
        gradients = jax.tree.map(
            lambda leaf, grad_sharding: leaf.update(sharding=grad_sharding),
            trees.intersect(state.params, grad_shardings),
            grad_shardings,
        )
        gathered = 0
        if cfg.train.zero_stage == 3 and cfg.mesh.fsdp > 1 and self.parts.model.block:
            layer = states.count(state.params["layers"]) // self._num_layers()
            gathered = layer * np.dtype(cfg.train.dtype).itemsize // cfg.mesh.tensor
        return states.bytes_per_device(state) + gathered, states.bytes_per_device(gradients)

    # ---- activations: as the compiled step keeps them, or as a trace of the forward pass ----

    def _of_activations(self) -> Iterator[Remedy]:
        cfg = self.cfg
        activation_bytes = self._activation_bytes(cfg)
        if microbatches := self._more_microbatches(activation_bytes):
            yield microbatches
        if self.parts.model.block is None:
            return
        if self.memory:
            # What the compiler fuses is not kept, what it computes only once may be.
            activation_bytes = max(activation_bytes, self.memory.activations)
        if cfg.train.remat != "full" and not schema.is_offloaded(cfg.train.remat):
            change = {"train.remat": "full"}
            saves = activation_bytes - self._activation_bytes(_changed(cfg, change))
            # What was kept of one layer is still needed, and may be where temporaries were.
            layer_bytes = saves / self._num_layers()
            if cfg.mesh.pipeline > 1:
                saves -= layer_bytes * cfg.mesh.pipeline * cfg.pipeline.num_chunks
            elif cfg.train.remat == "none":
                temporaries = self.memory.temporaries if self.memory else 0
                saves -= max(0, layer_bytes - temporaries)
            yield Remedy(_flags(change), saves, "activations, recomputed")
        if cfg.mesh.pipeline > 1 and cfg.pipeline.keep == "residuals":
            change = {"pipeline.keep": "inputs"}
            saves = activation_bytes - self._activation_bytes(_changed(cfg, change))
            yield Remedy(_flags(change), saves, "activations, recomputed")

    def _more_microbatches(self, activation_bytes: float) -> Remedy | None:
        """Returns the change to the fewest micro-batches that fit: 2, 4, 8 ... times as many.

        If none fits, to the most that divide the rows; None if the rows are odd.
        """
        missing = 0.0
        if self.memory and self.memory.capacity:
            missing = self.memory.peak - self.memory.capacity
        remedy = None
        num_rows, factor = self._rows(), 2
        while num_rows % factor == 0:
            change = {"train.num_microbatches": factor * self.cfg.train.num_microbatches}
            then = self._activation_bytes(_changed(self.cfg, change))
            saves = self._row_bytes() * (1 - then / max(activation_bytes, 1))
            saves -= self._gradient_sum_bytes()
            remedy = Remedy(_flags(change), saves, "activations and temporaries")
            if not missing or saves >= missing:
                break
            factor *= 2
        return remedy

    def _row_bytes(self) -> float:
        """Returns the bytes that are in proportion to the rows of a micro-batch."""
        if not self.memory:
            return self._activation_bytes(self.cfg)
        # Besides them, temporaries are copies of parameters, cast or gathered.
        copies = min(self.memory.temporaries, self.memory.parameters)
        return self.memory.activations + self.memory.temporaries - copies

    def _gradient_sum_bytes(self) -> int:
        """Returns the bytes of gradient sums that a step with one micro-batch does not have."""
        mesh, train = self.cfg.mesh, self.cfg.train
        num_partial_sums = mesh.data
        if train.zero_stage < 2:
            num_partial_sums *= mesh.fsdp
        if train.num_microbatches > 1 or num_partial_sums > 1 or mesh.pipeline > 1:
            return 0
        _, gradients = self._state_bytes(self.cfg)
        return gradients

    def _activation_bytes(self, cfg: Config) -> float:
        """Returns about how many bytes each device keeps for its backward passes."""
        num_microbatches, num_stages = cfg.train.num_microbatches, cfg.mesh.pipeline
        inputs = self._traced_bytes("full") / num_microbatches
        kept = self._traced_bytes(cfg.train.remat) / num_microbatches
        # Inputs of blocks are replicated over tensor.
        kept = inputs + (kept - inputs) / cfg.mesh.tensor
        if num_stages == 1:
            return kept
        schedule = SCHEDULES[cfg.pipeline.schedule]
        table = schedule(num_stages, num_microbatches, cfg.pipeline.num_chunks)
        chunk = kept / (num_stages * table.num_chunks)
        if cfg.pipeline.keep == "residuals":
            return table.num_slots * chunk
        return table.num_slots * inputs / self._num_layers() + chunk

    def _traced_bytes(self, remat: str) -> float:
        """Returns the bytes that the vjp of the loss keeps of all micro-batches.

        As if only the batch were sharded.
        """
        train = self.cfg.train
        if remat not in self.traces:
            self.traces[remat] = self._trace(remat)
        return self.traces[remat] * train.num_microbatches / self._num_shards()

    def _trace(self, remat: str) -> int:
        """Returns the bytes that the vjp of the loss of one micro-batch keeps, without sharding."""
        train, params = self.cfg.train, self.program.abstract_state.params
        loss = grads.make_loss(self.parts.model, remat=remat)
        num_rows = train.global_batch // train.num_microbatches

        def vjp(params: Any, batch: Any) -> Any:
            params = blocks.to_compute_dtype(params, train.dtype)
            key = jax.random.key(0)
            _, backward = jax.vjp(lambda params: loss(params, batch, key).loss, params)
            return backward

        microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype), self.batch
        )
        with self.program.active():
            jaxpr = jax.make_jaxpr(vjp)(params, microbatch).jaxpr
        # The backward function is returned as its residuals; one may be returned twice.
        residuals = {id(variable): variable.aval for variable in jaxpr.outvars}.values()
        kept = activations.without_parameters(residuals, params)
        on_device = [array for array in kept if array.memory_space == jax.memory.Space.Device]
        return sum(array.size * array.dtype.itemsize for array in on_device)

    def _num_layers(self) -> int:
        return len(jax.tree.leaves(self.program.abstract_state.params["layers"])[0])

    def _num_shards(self) -> int:
        with self.program.active():
            _, num_shards = sharding.batch_slices(AXES)
        return num_shards

    def _rows(self) -> int:
        """Returns the rows of a micro-batch on each device."""
        return self.cfg.train.global_batch // self.cfg.train.num_microbatches // self._num_shards()

    # ---- loss: the logits that are computed at a time ----

    def _of_loss(self) -> Iterator[Remedy]:
        options, dtype = self.cfg.model.options, self.cfg.train.dtype
        is_ours = "loss_chunk_mib" in options and self.parts.model.logits is not None
        if not is_ours or dtype == "float16":
            return
        vocab_size = options["vocab_size"]
        num_tokens = self._rows() * self.batch.tokens.shape[1]
        with self.program.active():
            logit_bytes = 4 * num_tokens * vocab_size / sharding.num_shards("vocab", vocab_size)
        # loss_chunk_mib=0: all logits at once.
        chunk_bytes = min(logit_bytes, options["loss_chunk_mib"] * MIB or logit_bytes)
        # A power of two, at most a quarter.
        smaller_mib = 2 ** (int(chunk_bytes / 4 / MIB).bit_length() - 1)
        if smaller_mib < 1:
            return
        # The gradient of the logits is in the compute dtype.
        saves = (1 + np.dtype(dtype).itemsize / 4) * (chunk_bytes - smaller_mib * MIB)
        if chunk_bytes == logit_bytes:
            # The head's gradient is summed over chunks, in float32.
            saves -= 4 * vocab_size * options["d_model"]
        yield Remedy(_flags({"model.loss_chunk_mib": smaller_mib}), saves, "logits, slower")


def _changed(cfg: Config, change: dict[str, Any]) -> Config:
    for key, value in change.items():
        section_name, name = key.split(".")
        section = dataclasses.replace(getattr(cfg, section_name), **{name: value})
        cfg = dataclasses.replace(cfg, **{section_name: section})
    return cfg


def _flags(change: dict[str, Any]) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in change.items())
