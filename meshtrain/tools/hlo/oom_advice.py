"""Ways out when memory runs out: which settings need less on each device, and about how many bytes less."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshtrain import grads
from meshtrain import state as states
from meshtrain.config.build import Parts
from meshtrain.config.schema import AXES, Config
from meshtrain.errors import OutOfMemory, memory_fault
from meshtrain.models import blocks, trees
from meshtrain.ops.losses import MIB
from meshtrain.parallel import sharding
from meshtrain.schedules import SCHEDULES
from meshtrain.tools.hlo import activations
from meshtrain.tools.hlo.memory import Memory, describe_memory, gigabytes, memory_of

SMALLEST = 0.01  # of what the step needs: a way that saves less is not listed


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and the bytes that it saves on each device."""

    flags: str
    saves: float
    of: str


@dataclass
class MemoryAdvice:
    """What the ways out of a run depend on."""

    cfg: Config
    parts: Parts
    program: Any  # program.Program
    batch: Any  # shapes
    memory: Memory | None = None  # of the compiled step, once it is known
    traces: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes kept, by train.remat

    @contextlib.contextmanager
    def when_out_of_memory(self) -> Iterator[None]:
        """Raises OutOfMemory, with the ways out, if memory runs out inside this context."""
        try:
            yield
        except Exception as error:
            if (fault := memory_fault(error, verb=None)) and not isinstance(error, OutOfMemory):
                raise OutOfMemory("\n".join([fault, *self.lines()])) from error
            raise

    def start_lines(self, compiled: jax.stages.Compiled) -> Iterator[str]:
        """Yields what the compiled step needs; the ways out too if it does not fit. The state is in memory already."""
        allocated = states.bytes_per_device(self.program.abstract_state)
        self.memory = memory_of(self.program, compiled, allocated=allocated)
        if self.memory:
            yield describe_memory(self.memory)
            yield from self.remedies() if self.memory.fits is False else ()

    def lines(self) -> Iterator[str]:
        """Yields what the step needs, and the ways out, the one that saves most first."""
        if self.memory:
            yield describe_memory(self.memory)
        else:
            state, gradients = self._bytes_of_state(self.cfg)
            kept = gigabytes(self._activations(self.cfg))
            yield (
                f"each device needs {gigabytes(state)} GB for the state, up to {gigabytes(gradients)} for gradients, "
                f"about {kept} for activations, and temporaries"
            )
        yield from self.remedies()

    def remedies(self) -> Iterator[str]:
        """Yields the ways out alone."""
        ways = self.ways()
        yield "ways out, by what each saves on a device:"
        for way in ways:
            yield f"  {way.flags}  saves about {gigabytes(way.saves)} GB ({way.of})"
        yield f"  {'or ' if ways else ''}a lower train.global_batch, or a smaller model"

    def ways(self) -> list[Remedy]:
        """Returns the ways that apply to this run, the one that saves most first."""
        found = [*self._of_state(), *self._of_activations(), *self._of_loss()]
        needed = self.memory.peak if self.memory else sum(self._bytes_of_state(self.cfg))
        worthwhile = [way for way in found if way.saves > SMALLEST * needed]
        return sorted(worthwhile, key=lambda way: -way.saves)

    # ---- state: exact, from the shardings that the changed config has ----

    def _of_state(self) -> Iterator[Remedy]:
        mesh, moments = self.cfg.mesh, self.cfg.optim.moment_dtype
        if mesh.fsdp > 1 and self.cfg.train.zero_stage < 3:
            yield self._state_way({"train.zero_stage": 3}, "state and gradients")
        if moments != "bfloat16":
            yield self._state_way({"optim.moment_dtype": "bfloat16"}, "optimizer state")
        if self.cfg.train.zero_stage == 0:
            return
        if mesh.data > mesh.slices:
            fsdp = mesh.data // mesh.slices * mesh.fsdp  # within a slice
            change = {"mesh.data": mesh.slices, "mesh.fsdp": fsdp}
            yield self._state_way(change, "state")
        if self._rows() % 2 == 0:
            of = f"state and activations, on {2 * self.program.mesh.size} devices"
            way = self._state_way({"mesh.fsdp": 2 * mesh.fsdp}, of)
            yield dataclasses.replace(way, saves=way.saves + self._of_rows() / 2)

    def _state_way(self, change: dict[str, Any], of: str) -> Remedy:
        then = self._bytes_of_state(_changed(self.cfg, change))
        saved, gradients = (
            a - b for a, b in zip(self._bytes_of_state(self.cfg), then, strict=True)
        )
        # Gradients in memory that activations have left cost nothing.
        saved += min(gradients, self.memory.gradients) if self.memory else gradients
        return Remedy(_flags(change), saved, of)

    def _bytes_of_state(self, cfg: Config) -> tuple[int, int]:
        """Returns the bytes of state and gradients on each device; the mesh may have more devices than there are.

        At ZeRO stage 3 the gathered parameters of one layer are included.
        """
        sizes = tuple(getattr(cfg.mesh, axis) for axis in AXES)
        types = (jax.sharding.AxisType.Auto,) * len(AXES)
        mesh = jax.sharding.AbstractMesh(sizes, AXES, axis_types=types)
        with jax.sharding.use_abstract_mesh(self.program.mesh.abstract_mesh):
            *_, state, grad_shardings = self.program.plan(cfg, self.parts, mesh)
        gradients = jax.tree.map(
            lambda leaf, one: leaf.update(sharding=one),
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
        cfg, now, rows = self.cfg, self._activations(self.cfg), self._rows()
        short = self.memory and self.memory.capacity and self.memory.peak - self.memory.capacity
        change, saves, factor = {}, 0.0, 2
        while rows % factor == 0 and (not change or (short and saves < short)):
            change = {"train.num_microbatches": factor * cfg.train.num_microbatches}
            then = self._activations(_changed(cfg, change))
            saves = self._of_rows() * (1 - then / max(now, 1)) - self._gradient_sums()
            factor *= 2
        if change:
            yield Remedy(_flags(change), saves, "activations and temporaries")
        if self.parts.model.block is None:
            return
        if self.memory:  # what the compiler fuses is not kept, what it computes only once may be
            now = max(now, self.memory.activations)
        if cfg.train.remat != "full":
            change = {"train.remat": "full"}
            saves = now - self._activations(_changed(cfg, change))
            # What was kept of one layer is still needed at a time, and may be where temporaries were.
            of_layer = saves / self._num_layers()
            if cfg.mesh.pipeline > 1:
                saves -= of_layer * cfg.mesh.pipeline * cfg.pipeline.num_chunks
            elif cfg.train.remat == "none":
                saves -= max(0, of_layer - (self.memory.temporaries if self.memory else 0))
            yield Remedy(_flags(change), saves, "activations, recomputed")
        if cfg.mesh.pipeline > 1 and cfg.pipeline.keep == "residuals":
            change = {"pipeline.keep": "inputs"}
            saves = now - self._activations(_changed(cfg, change))
            yield Remedy(_flags(change), saves, "activations, recomputed")

    def _of_rows(self) -> float:
        """Returns the bytes that are in proportion to the rows of a micro-batch."""
        if not self.memory:
            return self._activations(self.cfg)
        # Besides them, temporaries are copies of parameters, cast or gathered.
        copies = min(self.memory.temporaries, self.memory.parameters)
        return self.memory.activations + self.memory.temporaries - copies

    def _gradient_sums(self) -> int:
        """Returns the bytes of the sums of gradients that a step has only if it has several micro-batches."""
        mesh, c = self.cfg.mesh, self.cfg.train
        sums_over_shards = mesh.data * (mesh.fsdp if c.zero_stage < 2 else 1) > 1
        has_sums = c.num_microbatches > 1 or sums_over_shards or mesh.pipeline > 1
        return 0 if has_sums else self._bytes_of_state(self.cfg)[1]

    def _activations(self, cfg: Config) -> float:
        """Returns about how many bytes each device keeps for its backward passes."""
        c, P = cfg.train, cfg.mesh.pipeline
        inputs, kept = (self._traced(remat) / c.num_microbatches for remat in ("full", c.remat))
        kept = inputs + (kept - inputs) / cfg.mesh.tensor  # inputs of blocks are replicated over it
        if P == 1:
            return kept
        table = SCHEDULES[cfg.pipeline.schedule](P, c.num_microbatches, cfg.pipeline.num_chunks)
        chunk = kept / (P * table.num_chunks)
        if cfg.pipeline.keep == "residuals":
            return table.num_slots * chunk
        return table.num_slots * inputs / self._num_layers() + chunk

    def _traced(self, remat: str) -> float:
        """Returns the bytes that the vjp of the loss keeps of all micro-batches, if only the batch is sharded."""
        c, params = self.cfg.train, self.program.abstract_state.params
        if remat not in self.traces:
            loss = grads.make_loss(self.parts.model, remat=remat)

            def vjp(params, batch):
                params, key = blocks.to_compute_dtype(params, c.dtype), jax.random.key(0)
                return jax.vjp(lambda params: loss(params, batch, key).loss, params)[1]

            rows = c.global_batch // c.num_microbatches
            microbatch = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), self.batch
            )
            with self.program.active():
                jaxpr = jax.make_jaxpr(vjp)(params, microbatch).jaxpr
            kept = {id(var): var.aval for var in jaxpr.outvars}.values()
            kept = activations.without_parameters(kept, params)
            self.traces[remat] = sum(one.size * one.dtype.itemsize for one in kept)
        return self.traces[remat] * c.num_microbatches / self._num_shards()

    def _num_layers(self) -> int:
        return len(jax.tree.leaves(self.program.abstract_state.params["layers"])[0])

    def _num_shards(self) -> int:
        with self.program.active():
            return sharding.batch_slices(AXES)[1]

    def _rows(self) -> int:
        """Returns the rows of a micro-batch on each device."""
        return self.cfg.train.global_batch // self.cfg.train.num_microbatches // self._num_shards()

    # ---- loss: the logits that are computed at a time ----

    def _of_loss(self) -> Iterator[Remedy]:
        options, c = self.cfg.model.options, self.cfg.train
        is_ours = "loss_chunk_mib" in options and self.parts.model.logits is not None
        if not is_ours or c.dtype == "float16":
            return
        vocab, mib = options["vocab_size"], options["loss_chunk_mib"]
        tokens = self._rows() * self.batch.tokens.shape[1]
        with self.program.active():
            logits = 4 * tokens * vocab / sharding.num_shards("vocab", vocab)
        chunk = min(logits, mib * MIB or logits)
        smaller = 2 ** (int(chunk / 4 / MIB).bit_length() - 1)  # a power of two, at most a quarter
        # The head's gradient is summed over chunks, in float32.
        sums = 4 * vocab * options["d_model"] if chunk == logits else 0
        if smaller >= 1:
            # The gradient of the logits is in the compute dtype.
            saves = (1 + np.dtype(c.dtype).itemsize / 4) * (chunk - smaller * MIB) - sums
            yield Remedy(_flags({"model.loss_chunk_mib": smaller}), saves, "logits, slower")


def _changed(cfg: Config, change: dict[str, Any]) -> Config:
    for key, value in change.items():
        section, name = key.split(".")
        cfg = dataclasses.replace(
            cfg, **{section: dataclasses.replace(getattr(cfg, section), **{name: value})}
        )
    return cfg


def _flags(change: dict[str, Any]) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in change.items())
