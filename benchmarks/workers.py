"""Workers of a benchmark: processes that keep to one core each, and wait while others have a turn.

A worker writes a line of JSON when it is ready, and one for each line that it reads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def launch(script: str, core: int, **variables: str) -> subprocess.Popen:
    """Starts a worker with our own options, all of whose threads stay on this core."""
    flags = f"{ONE_THREAD} {os.environ.get('XLA_FLAGS', '')}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **variables}
    command = ["taskset", "-c", str(core), sys.executable, script, "--worker", *sys.argv[1:]]
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


def about(args) -> dict:
    """Returns what the figures depend on."""
    names = Path("/proc/cpuinfo").read_text().splitlines()
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "cpu": next((line.split(": ")[1] for line in names if "model name" in line), None),
        "load": os.getloadavg(),
        "git": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "flags": vars(args),
    }
