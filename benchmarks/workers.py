"""Workers of a benchmark: processes that keep to one core each, and wait while others have a turn.

A worker writes a line of JSON when it is ready, and one for each line that it reads.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from meshtrain.cluster import distributed, environment, runtime

ALONE, BUSY, TOGETHER = "one process", "one process on each core", "a run of all"  # kinds of turn
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def launch(script: str, core: int, *options: str, **variables: str) -> subprocess.Popen:
    """Starts a worker with our own options and these, all of whose threads stay on this core."""
    flags = f"{ONE_THREAD} {os.environ.get('XLA_FLAGS', '')}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **variables}
    command = ["taskset", "-c", str(core), sys.executable, script, "--worker", *sys.argv[1:]]
    command += options  # last: those that are given twice count as here
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def answer(worker: subprocess.Popen) -> dict:
    for line in worker.stdout:
        if line.startswith("{"):  # else it is gloo's
            return json.loads(line)
    raise SystemExit("a worker ended early")


def ask(workers: list[subprocess.Popen], count: int) -> list[dict]:
    for worker in workers:
        print(count, file=worker.stdin, flush=True)
    return [answer(worker) for worker in workers]


def waiting() -> float:
    """Returns for how long threads of this process could have run, and others had the core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def run(compiled, carry, batch, count: int):
    """Returns the state after so many steps, and what they took."""
    reply, waited = {"seconds": [], "cpu_seconds": [], "losses": []}, waiting()
    for _ in range(count):
        began, cpu_began = time.perf_counter(), time.process_time()
        carry, report = compiled(carry, batch)
        jax.block_until_ready((carry, report))
        reply["seconds"].append(time.perf_counter() - began)
        reply["cpu_seconds"].append(time.process_time() - cpu_began)
        reply["losses"].append(float(report["loss"]))
    return carry, reply | {"waited_seconds": waiting() - waited}


def serve(prepare: Callable) -> None:
    """A worker: says what `prepare` compiled, then runs as many steps as each line of stdin asks for."""
    # As train() does: gloo mixes the messages of two programs in flight, here of init and of a step.
    distributed.initialize()
    runtime.setup()
    compiled, carry, batch, reply = prepare()
    print(json.dumps(reply), flush=True)
    for line in sys.stdin:
        carry, reply = run(compiled, carry, batch, int(line))
        print(json.dumps(reply), flush=True)


def end(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.stdin.close()
    codes = [worker.wait(60) for worker in workers]
    assert not any(codes), codes


def measure(script: str, cores: list[int], *options: str, rounds: int, steps: int) -> dict:
    """Compares a run of a process on each core (TOGETHER) with runs of one process.

    Returns facts of all workers, the replies of each kind of turn, and each worker's losses.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    places = [(address, str(len(cores)), str(i)) for i in range(len(cores))]
    places = [dict(zip(environment.JAX_VARIABLES, one, strict=True)) for one in places]
    team = [launch(script, core, *options, **one) for core, one in zip(cores, places, strict=True)]
    workers = team + (copies := [launch(script, core, *options) for core in cores])
    try:
        facts = [answer(worker) for worker in workers]
        losses = [reply["losses"] for reply in ask(team, 1) + ask(copies, 1)]  # warms up
        turns = {ALONE: [], BUSY: [], TOGETHER: []}
        for i in range(rounds):
            groups = [[copies[i % len(cores)]], copies, team]
            for kind, group in list(zip(turns, groups, strict=True))[:: 1 if i % 2 else -1]:
                turns[kind].append(ask(group, steps))
                for worker, reply in zip(group, turns[kind][-1], strict=True):
                    losses[workers.index(worker)] += reply["losses"]
    finally:
        end(workers)
    return {"facts": facts, "turns": turns, "losses": losses}


def seconds_of(measured: dict) -> dict[str, np.ndarray]:
    """Returns the seconds of all steps of each kind, after comparing the losses of all workers.

    Of those that work together, a step takes as long as its slowest process.
    """
    most = max(measured["losses"], key=len)
    pairs = [pair for one in measured["losses"] for pair in zip(one, most, strict=False)]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-5)
    found = {}
    for kind, turns in measured["turns"].items():
        steps = np.concatenate([np.array([r["seconds"] for r in turn]).T for turn in turns])
        found[kind] = steps.max(1) if kind == TOGETHER else steps.ravel()
    return found
