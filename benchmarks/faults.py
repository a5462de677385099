"""Time from a kill to the next step, and a soak: a fault every minute, and where the training ends.

  python benchmarks/faults.py recovery [--runs=10] [--output=PATH]
  python benchmarks/faults.py soak [--minutes=15] [--every=60] [--seed=0] [--output=PATH]

A tiny model on two processes with a CPU device each, under `meshtrain launch`. `recovery` kills a worker
(rank 1 and rank 0 in turn) in a step of a run, which compiles anew each time. `soak` draws a fault from
a seed each minute: a worker killed, stopped, told to stop (SIGTERM), one that sleeps before its next
batch, an abort, a segmentation fault; no hand touches the run; in the end its parameters, optimizer
state and losses must be, bit for bit, those of a run that nobody disturbed.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import record
from meshtrain import checkpoint
from meshtrain.checkpoint import arrays
from meshtrain.cluster.progress import VARIABLE
from meshtrain.data import synthetic
from meshtrain.data.source import Source

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ("kill", "stop", "terminate", "sleep", "abort", "segfault")
NAP = "nap"  # a file of the workdir: who is to sleep
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
SIGNALS |= {"abort": signal.SIGABRT, "segfault": signal.SIGSEGV}


def build(*, split: str, workdir: str, pace: float, **section) -> Source:
    """Synthetic data, at a pace, that is late on a rank whose number is in a file."""
    source, nap = synthetic.build(split=split, **section), Path(workdir) / NAP

    def read(indices):
        time.sleep(pace)
        if nap.exists() and nap.read_text() == os.environ.get("JAX_PROCESS_ID"):
            nap.unlink()
            time.sleep(1e6)
        return source.read(indices)

    return Source(read, description="synthetic, with naps")


def command(workdir: Path, steps: int, pace: float, *flags: str) -> list[str]:
    settings = {"train.steps": steps, "train.global_batch": 8, "train.log_every": 1}
    settings |= {"model.num_layers": 2, "model.d_model": 32, "model.num_heads": 2}
    settings |= {"model.num_kv_heads": 2, "model.d_ff": 64, "model.vocab_size": 64}
    settings |= {"data.build": "benchmarks.faults:build", "data.seq_len": 16, "eval.batches": 0}
    settings |= {"checkpoint.every": 20, "data.workdir": str(workdir), "data.pace": pace}
    settings |= {"optim.schedule": "constant"}  # so that the steps to come change nothing
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    config = f"--config={__file__}"
    own = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=1", *flags]
    return [*own, "--", config, f"--workdir={workdir}", *overrides]


def get_config():
    """This file is its own config: the default, with two keys more for its data."""
    from configs import default

    config = default.get_config()
    with config.data.unlocked():
        config.data.update(workdir="", pace=0.0)
    return config


def workers(workdir: Path) -> dict[int, int]:
    """Returns the processes of a run, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(
                one.split("=", 1)
                for one in (folder / "environ").read_text(errors="replace").split("\0")
                if "=" in one
            )
            if VARIABLE in variables and str(workdir) in (folder / "cmdline").read_text():
                found[int(variables["JAX_PROCESS_ID"])] = int(folder.name)
        except OSError:
            continue
    return found


def rows(workdir: Path, name: str) -> list[dict]:
    path = workdir / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def step_of(workdir: Path) -> int:
    return max((row["step"] for row in rows(workdir, "metrics.jsonl")[-1:]), default=-1)


def wait_for(condition, seconds: float, run: subprocess.Popen) -> None:
    until = time.time() + seconds
    while not condition():
        if time.time() > until or run.poll() is not None:
            raise SystemExit(f"nothing happened for {seconds:.0f} s, exit code {run.poll()}")
        time.sleep(0.02)


def start(workdir: Path, steps: int, pace: float, *flags: str) -> subprocess.Popen:
    with open(f"{workdir}.log", "a") as log:
        line = command(workdir, steps, pace, *flags)
        return subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def recovery(args, folder: Path) -> dict:
    workdir, took = folder / "run", []
    run = start(workdir, 10**6, 0.02, "--max_restarts=1000")
    try:
        wait_for(lambda: step_of(workdir) > 30, 120, run)
        for number in range(args.runs):
            before = len(rows(workdir, "events.jsonl"))

            def recovered(before=before):
                new = rows(workdir, "events.jsonl")[before:]
                return [row for row in new if row["event"] == "recovered"]

            killed = time.time()
            os.kill(workers(workdir)[(number + 1) % 2], signal.SIGKILL)
            wait_for(recovered, 120, run)
            took.append(recovered()[0]["time"] - killed)
            print(
                f"rank {(number + 1) % 2} killed: the next step {took[-1]:.2f} s later", flush=True
            )
            wait_for(lambda: step_of(workdir) >= recovered()[0]["step"] + 40, 60, run)
    finally:
        run.terminate()
        run.wait(60)
    figures = {"median": statistics.median(took), "least": min(took), "most": max(took)}
    print(
        f"median {figures['median']:.2f} s, {min(took):.2f} to {max(took):.2f} s, {len(took)} kills"
    )
    return {"seconds": took, "figures": figures}


def strike(kind: str, rank: int, workdir: Path) -> None:
    if kind == "sleep":
        (workdir / NAP).write_text(str(rank))
    else:
        os.kill(workers(workdir)[rank], SIGNALS[kind])


def soak(args, folder: Path) -> dict:
    draw, deck, struck = random.Random(args.seed), [], []
    disturbed, calm = folder / "disturbed", folder / "calm"
    run = start(disturbed, 10**9, 0.05, "--max_restarts=1000", "--stall_seconds=5")
    wait_for(lambda: step_of(disturbed) > 5, 120, run)
    began, end = time.time(), time.time() + 60 * args.minutes
    while time.time() < end:
        due = began + (len(struck) + 0.5) * args.every + draw.uniform(-0.3, 0.3) * args.every
        time.sleep(max(0.1, min(due, end) - time.time()))
        if run.poll() is not None:
            raise SystemExit(f"the supervisor ended with exit code {run.poll()}")
        if time.time() < min(due, end):
            continue
        deck = deck or draw.sample(FAULTS, len(FAULTS))  # all kinds, in another order each time
        rank = draw.randrange(2)
        try:
            strike(deck[0], rank, disturbed)
        except (KeyError, ProcessLookupError):
            continue  # just being started again
        struck.append(deck.pop(0))
        at = f"{time.time() - began:6.0f} s"
        print(f"{at}: {struck[-1]} rank {rank} at step {step_of(disturbed)}", flush=True)
    run.terminate()
    code, minutes, steps = run.wait(120), (time.time() - began) / 60, step_of(disturbed) + 1
    print(f"{steps} steps, {len(struck)} faults, {minutes:.1f} minutes, stopped: exit code {code}")
    print(Path(f"{disturbed}.log").read_text().splitlines()[-1], flush=True)
    assert start(calm, steps, 0.0).wait() == 0
    same = outcome(disturbed) == outcome(calm)
    told = "bit-equal to" if same else "NOT those of"
    print(f"parameters, optimizer state and {steps} losses: {told} a calm run's")
    account = [row for row in rows(disturbed, "events.jsonl") if row["event"] == "goodput"][-1]
    return {"faults": struck, "minutes": minutes, "same": same, "goodput": account}


def outcome(workdir: Path) -> tuple:
    newest = max(
        (int(path.name) for path in (workdir / checkpoint.FOLDER).glob("[0-9]*")), default=0
    )
    found = arrays.as_numpy(workdir / checkpoint.FOLDER / str(newest))
    losses = {row["step"]: row["loss"] for row in rows(workdir, "metrics.jsonl")}
    return newest, {path: np.asarray(array).tobytes() for path, array in found.items()}, losses


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("what", choices=("recovery", "soak"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--every", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found, folder = record.about(args), Path(tempfile.mkdtemp())
    found |= {"recovery": recovery, "soak": soak}[args.what](args, folder)
    record.save(args.output, found, model=f"{args.what}-tiny")
    return 0 if found.get("same", True) else 1


if __name__ == "__main__":
    sys.exit(main())
