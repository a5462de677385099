"""Worker processes of a benchmark, each pinned to one core, that run steps alternately on request.

A worker prints a line of JSON when it is ready, then reads numbers of steps from stdin, runs them,
and prints a line of JSON for each.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtrain.cluster import distributed, environment, runtime

ALONE, BUSY, TOGETHER = "one process", "one process on each core", "all processes"  # kinds of run
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def launch(
    script: str, core: int, *options: str, prefix: Sequence[str] = (), **variables: str
) -> subprocess.Popen:
    """Starts a worker on this core, with these environment variables.

    It gets the flags of this process, and `options`.

    `prefix` is a command that runs the worker's.
    """
    flags = f"{ONE_THREAD} {os.environ.get('XLA_FLAGS', '')}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **variables}
    command = [
        *prefix,
        "taskset",
        "-c",
        str(core),
        sys.executable,
        script,
        "--worker",
        *sys.argv[1:],
    ]
    command += options  # last, because argparse uses the last value of a flag
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def launch_team(script: str, cores: Sequence[int], *options: str) -> list[subprocess.Popen]:
    """Starts workers on these cores that run one program together."""
    if len(cores) == 1:
        return [launch(script, cores[0], *options)]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    ranks = [(address, str(len(cores)), str(rank)) for rank in range(len(cores))]
    variables = [dict(zip(environment.JAX_VARIABLES, rank, strict=True)) for rank in ranks]
    pairs = zip(cores, variables, strict=True)
    return [launch(script, core, *options, **env) for core, env in pairs]


def read_reply(worker: subprocess.Popen) -> dict:
    for line in worker.stdout:
        if line.startswith("{"):  # other lines are log lines of gloo
            return json.loads(line)
    raise SystemExit("a worker ended before its reply")


def run_steps(workers: list[subprocess.Popen], count: int) -> list[dict]:
    for worker in workers:
        print(count, file=worker.stdin, flush=True)
    return [read_reply(worker) for worker in workers]


def seconds_waiting_for_core() -> float:
    """Returns for how long threads of this process were runnable but waited for the core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="utf-8").split()[1]) for file in files) / 1e9


def timed_steps(compiled, carry, batch, count: int):
    """Returns the state after `count` steps, and their seconds and losses."""
    reply = {"seconds": [], "cpu_seconds": [], "losses": []}
    waited = seconds_waiting_for_core()
    for _ in range(count):
        began, cpu_began = time.perf_counter(), time.process_time()
        carry, metrics = compiled(carry, batch)
        jax.block_until_ready((carry, metrics))
        reply["seconds"].append(time.perf_counter() - began)
        reply["cpu_seconds"].append(time.process_time() - cpu_began)
        reply["losses"].append(float(metrics["loss"]))
    return carry, reply | {"waited_seconds": seconds_waiting_for_core() - waited}


def serve(prepare: Callable) -> None:
    """Runs this process as a worker: prints the facts of `prepare`, then runs requested steps."""
    # As in train(): gloo mixes up the messages of programs that run at once, here initialization
    # and a step.
    distributed.initialize()
    runtime.setup()
    compiled, carry, batch, reply = prepare()
    print(json.dumps(reply), flush=True)
    for line in sys.stdin:
        carry, reply = timed_steps(compiled, carry, batch, int(line))
        print(json.dumps(reply), flush=True)


def stop(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.stdin.close()
    codes = [worker.wait(60) for worker in workers]
    for worker in workers:
        worker.stdout.close()
    assert not any(codes), codes


def measure(script: str, cores: list[int], *options: str, rounds: int, steps: int) -> dict:
    """Times runs of all processes (TOGETHER), one process (ALONE), and one on each core (BUSY).

    Returns the facts of all workers, the replies by kind of run, and the losses of each worker.
    """
    team = launch_team(script, cores, *options)
    workers = team + (independent := [launch(script, core, *options) for core in cores])
    try:
        facts = [read_reply(worker) for worker in workers]
        replies = run_steps(team, 1) + run_steps(independent, 1)  # warm-up
        losses = [reply["losses"] for reply in replies]
        turns = {ALONE: [], BUSY: [], TOGETHER: []}
        for i in range(rounds):
            groups = [[independent[i % len(cores)]], independent, team]
            for kind, group in list(zip(turns, groups, strict=True))[:: 1 if i % 2 else -1]:
                turns[kind].append(run_steps(group, steps))
                for worker, reply in zip(group, turns[kind][-1], strict=True):
                    losses[workers.index(worker)] += reply["losses"]
    finally:
        stop(workers)
    return {"facts": facts, "turns": turns, "losses": losses}


def measure_simulated(
    script: str, core: int, *options: str, counts: Sequence[int], rounds: int, steps: int
) -> dict:
    """Times workers with these numbers of simulated devices (--devices), which share one core."""
    teams = {num: ([core], *options, "--devices", str(num)) for num in counts}
    return measure_alternately(script, teams, rounds=rounds, steps=steps)


def measure_alternately(
    script: str, teams: Mapping[Any, Sequence[Any]], *, rounds: int, steps: int
) -> dict:
    """Times teams of workers, one after the other in each round.

    Each is given as (cores, *options).

    Returns their facts, the replies of a first step, and the replies of all others by the key of
    the team.
    """
    running = {}
    try:
        for key, (cores, *options) in teams.items():
            running[key] = launch_team(script, cores, *options)
        facts = [read_reply(worker) for team in running.values() for worker in team]
        first = [reply for team in running.values() for reply in run_steps(team, 1)]  # warm-up
        turns = {key: [] for key in running}
        for i in range(rounds):
            for key in [*running][:: 1 if i % 2 else -1]:
                turns[key] += run_steps(running[key], steps)
    finally:
        stop([worker for team in running.values() for worker in team])
    return {"facts": facts, "first": first, "turns": turns}


def medians_of(turns: dict[Any, list[dict]]) -> dict[Any, float]:
    """Returns the median seconds of a step by team."""
    return {
        num: float(np.median([seconds for reply in replies for seconds in reply["seconds"]]))
        for num, replies in turns.items()
    }


def seconds_of(measured: dict) -> dict[str, np.ndarray]:
    """Returns the seconds of all steps by kind of run.

    Raises AssertionError if the losses of two workers differ.

    A step of a run of all processes takes as long as its slowest process.
    """
    longest = max(measured["losses"], key=len)
    pairs = [pair for losses in measured["losses"] for pair in zip(losses, longest, strict=False)]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-5)
    seconds = {}
    for kind, turns in measured["turns"].items():
        steps = np.concatenate([np.array([r["seconds"] for r in turn]).T for turn in turns])
        seconds[kind] = steps.max(1) if kind == TOGETHER else steps.ravel()
    return seconds
