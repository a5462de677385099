"""Steps of several contestants, each in a process of its own, that take turns on one machine.

Threads and memory of one would be in the way of another in the same process. Losses are compared
step by step: a fast step with other maths is no peer.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import bare
from meshtrain import state
from meshtrain.config import Config
from meshtrain.data.source import Batch
from meshtrain.program import assemble

PEERS = {
    "meshtrain": {},
    "bare jax, scan": dict(unroll=False, flat=False),
    "bare jax, unrolled": dict(unroll=True, flat=False),
    "bare jax, unrolled, matrices flat": dict(unroll=True, flat=True),
    "torch eager": dict(compile=None),
    "torch compiled": dict(compile="default"),
    "torch compiled, max-autotune": dict(compile="max-autotune-no-cudagraphs"),
}
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # folders
FUSED = "__cudnn$fmha"  # what the compiled text calls where attention is fused


class Results(NamedTuple):
    facts: dict[str, dict[str, Any]]  # of each contestant
    seconds: dict[str, list[float]]  # a step, the mean of a turn
    losses: dict[str, list[float]]  # of all steps


def prepare(name: str, cfg: Config, *, threads: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Returns a function that takes a step and returns its loss when it is there, and facts."""
    c, rows, length = cfg.raw["model"], cfg.train.global_batch, cfg.raw["data"]["seq_len"]
    tokens = np.random.default_rng(0).integers(0, c["vocab_size"], (rows, length + 1))
    program = assemble(cfg, cfg.model)
    facts: dict[str, Any] = {"parameters": state.count(program.abstract_state.params)}
    with program.active():
        start = program.start(0)
        if name.startswith("torch"):
            params = jax.device_get(start.params)
            jax.tree.map(lambda leaf: leaf.delete(), start)  # makes room
            step = _torch(cfg, params, tokens, threads, **PEERS[name])
        else:
            step, compiled, seconds = _jax(name, cfg, program, start, tokens)
            facts["compile_seconds"] = seconds
            memory = compiled.memory_analysis()
            peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
            peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
            facts |= {"bytes": peak, "fused_attention": FUSED in compiled.as_text()}
        float(step())
    return step, facts


def _jax(name, cfg, program, start, tokens):
    tokens = np.int32(tokens)
    weights = np.ones((tokens.shape[0], tokens.shape[1] - 1), np.float32)
    everywhere = jax.sharding.NamedSharding(program.mesh, jax.P())
    batch = jax.device_put(Batch(tokens[:, :-1], tokens[:, 1:], weights), everywhere)
    began = time.perf_counter()
    if name == "meshtrain":
        carry, inputs, compiled = start, (batch,), program.compile(batch)
    else:
        optimizer = bare.make_optimizer(cfg)
        made = bare.make_step(cfg.raw["model"], optimizer, dtype=cfg.train.dtype, **PEERS[name])
        carry, inputs = (start.params, optimizer.init(start.params)), (batch.tokens, batch.targets)
        compiled = jax.jit(made, donate_argnums=0).lower(carry, *inputs).compile()
    seconds = time.perf_counter() - began

    def step():
        nonlocal carry
        carry, report = compiled(carry, *inputs)
        return report["loss"] if isinstance(report, dict) else report

    return step, compiled, seconds


def _torch(cfg, params, tokens, threads, compile):
    import torch

    from benchmarks import torch_peer

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch_peer.make_step(
        cfg.raw["model"],
        params,
        optim=cfg.raw["optim"],
        seq_len=tokens.shape[1] - 1,
        device=device,
        dtype=cfg.train.dtype,
        compile=compile,
    )
    pair = [torch.tensor(part, device=device) for part in (tokens[:, :-1], tokens[:, 1:])]
    return lambda: made(*pair)


def _contestant(pipe, prepare: Callable, name: str) -> None:
    step, facts = prepare(name)
    pipe.send(facts)
    while count := pipe.recv():
        began = time.perf_counter()
        losses = [step() for _ in range(count)]
        losses = [float(loss) for loss in losses]  # waits for all
        pipe.send(((time.perf_counter() - began) / count, losses))


def hold(prepare: Callable, names: Sequence[str], *, rounds: int, steps: int) -> Results:
    """Lets each have `rounds` turns of `steps` steps; `prepare(name)` runs in its process.

    Each is started twice, first with empty compile caches, then with what that left in them.
    """
    found = Results({}, {name: [] for name in names}, {name: [] for name in names})
    pipes, caches = {}, tempfile.TemporaryDirectory()
    for name in names:  # one after the other: compilers would slow each other down
        for number, variable in enumerate(CACHES):
            os.environ[variable] = f"{caches.name}/{len(pipes)}-{number}"
        cold, facts = _start(prepare, name)
        cold.send(0)
        pipes[name], warm = _start(prepare, name)
        found.facts[name] = facts | {"warm_seconds": warm["cold_seconds"]}
    for turn in range(rounds):
        for name in names[:: 1 if turn % 2 else -1]:
            pipes[name].send(steps)
            seconds, losses = pipes[name].recv()
            found.seconds[name].append(seconds)
            found.losses[name] += losses
    for pipe in pipes.values():
        pipe.send(0)  # ends it
    caches.cleanup()
    return found


def _start(prepare: Callable, name: str) -> tuple[Connection, dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    began = time.perf_counter()
    context.Process(target=_contestant, args=(theirs, prepare, name), daemon=True).start()
    theirs.close()
    return ours, ours.recv() | {"cold_seconds": time.perf_counter() - began}


def compare(losses: dict[str, list[float]], *, rtol: float) -> None:
    """Raises AssertionError where the first steps of one have other losses than those of the first."""
    first, *_ = losses.values()
    for name, values in losses.items():
        np.testing.assert_allclose(values[:5], first[:5], rtol=rtol, err_msg=name)
