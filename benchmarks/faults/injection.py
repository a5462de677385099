"""Fault injection: the time from a kill to the next step; a soak test with a fault every minute.

  python benchmarks/faults/injection.py recovery [--runs=10] [--output=PATH]
  python benchmarks/faults/injection.py soak [--minutes=15] [--every=60] [--s3] [--output=PATH]

A tiny model on two processes with a CPU device each, under `meshtrain launch`; with --s3 a mixture
of experts on four processes with two devices each, on the axes pipeline, context and expert, and a
workdir on an S3 server on loopback (extra `stores`). `recovery` kills a worker (rank 1 and rank 0
alternately) in a step; the restarted run compiles again each time. `soak` draws a random fault
every minute: kill, stop, SIGTERM, a sleep before the next batch, abort, or segmentation fault of a
worker. The final parameters, optimizer state and losses must be bit-equal to an uninterrupted run.
"""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain import object_store
from meshtrain.checkpoint import arrays, find
from meshtrain.cli.verify import QUICK_COMPILE_FLAGS
from meshtrain.cluster.progress import VARIABLE
from meshtrain.data import synthetic
from meshtrain.data.source import Source

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("kill", "stop", "terminate", "sleep", "abort", "segfault")
SLEEP_FILE = "nap"  # in the workdir; contains the rank that is to sleep
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
SIGNALS |= {"abort": signal.SIGABRT, "segfault": signal.SIGSEGV}


def build(*, split: str, workdir: str, pace: float, **section) -> Source:
    """Returns synthetic data, of which a batch takes `pace` seconds.

    It never arrives on the rank that SLEEP_FILE names.
    """
    source, sleep_file = synthetic.build(split=split, **section), Path(workdir) / SLEEP_FILE

    def read(indices):
        time.sleep(pace)
        if sleep_file.exists() and sleep_file.read_text(encoding="utf-8") == os.environ.get(
            "JAX_PROCESS_ID"
        ):
            sleep_file.unlink()
            time.sleep(1e6)
        return source.read(indices)

    return Source(read, description="synthetic, with delays")


PROCESSES = 2
# With --s3.
S3_PROCESSES = 4
MIXTURE = {"mesh.data": 1, "mesh.pipeline": 2, "mesh.context": 2, "mesh.expert": 2}
MIXTURE |= {"model.num_experts": 4, "pipeline.schedule": "1f1b", "train.num_microbatches": 2}
MIXTURE |= {"checkpoint.every": 5}


def command(workdir: Path, steps: int, pace: float, *flags: str) -> list[str]:
    place = object_store.url(workdir)
    settings = {"train.steps": steps, "train.global_batch": 8, "train.log_every": 1}
    settings |= {"model.num_layers": 2, "model.d_model": 32, "model.num_heads": 2}
    settings |= {"model.num_kv_heads": 2, "model.d_ff": 64, "model.vocab_size": 64}
    settings |= {
        "data.build": "benchmarks.faults.injection:build",
        "data.seq_len": 16,
        "eval.batches": 0,
    }
    settings |= {"checkpoint.every": 20, "data.workdir": str(workdir), "data.pace": pace}
    settings |= {"optim.schedule": "constant"}  # independent of train.steps, which differs
    settings |= MIXTURE if place else {}
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    config = f"--config={__file__}"
    launch = [
        sys.executable,
        "-m",
        "meshtrain",
        "launch",
        f"--nproc={S3_PROCESSES if place else PROCESSES}",
        f"--simulate_devices={2 if place else 1}",
        *flags,
    ]
    return [*launch, "--", config, f"--workdir={place or workdir}", *overrides]


def get_config():
    """Returns the config of these runs: the default one with two more keys for `build`."""
    from meshtrain.configs import default

    config = default.get_config()
    with config.data.unlocked():
        config.data.update(workdir="", pace=0.0)
    return config


def worker_pids(workdir: Path) -> dict[int, int]:
    """Returns the process ids of a run, by rank."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(
                pair.split("=", 1)
                for pair in (folder / "environ")
                .read_text(errors="replace", encoding="utf-8")
                .split("\0")
                if "=" in pair
            )
            place = object_store.url(workdir) or str(workdir)
            if VARIABLE in variables and place in (folder / "cmdline").read_text(encoding="utf-8"):
                pids[int(variables["JAX_PROCESS_ID"])] = int(folder.name)
        except OSError:
            continue
    return pids


def read_jsonl(workdir: Path, name: str) -> list[dict]:
    path = workdir / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def newest_step(workdir: Path) -> int:
    return max((row["step"] for row in read_jsonl(workdir, "metrics.jsonl")[-1:]), default=-1)


def wait_for(condition, seconds: float, run: subprocess.Popen) -> None:
    """Waits until `condition()` holds, or ends this script if the run ends or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if run.poll() is not None:
            raise SystemExit(f"the run ended with exit code {run.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"the run made no progress in {seconds:.0f} s")
        time.sleep(0.02)


def start(workdir: Path, steps: int, pace: float, *flags: str) -> subprocess.Popen:
    with open(f"{workdir}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen(
            command(workdir, steps, pace, *flags), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )


def recovery(args, folder: Path) -> dict:
    workdir, seconds = folder / "run", []
    run = start(workdir, 10**6, 0.02, "--max_restarts=1000")
    try:
        wait_for(lambda: newest_step(workdir) > 30, 120, run)
        for number in range(args.runs):
            before = len(read_jsonl(workdir, "events.jsonl"))

            def recovered(before=before):
                new = read_jsonl(workdir, "events.jsonl")[before:]
                return [row for row in new if row["event"] == "recovered"]

            killed, rank = time.time(), (number + 1) % 2
            os.kill(worker_pids(workdir)[rank], signal.SIGKILL)
            wait_for(recovered, 120, run)
            seconds.append(recovered()[0]["time"] - killed)
            print(f"rank {rank} killed: next step after {seconds[-1]:.2f} s", flush=True)
            wait_for(lambda: newest_step(workdir) >= recovered()[0]["step"] + 40, 60, run)
    finally:
        run.terminate()
        run.wait(60)
    figures = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    print("median {median:.2f} s, {min:.2f} to {max:.2f} s".format(**figures), end="")
    print(f", {len(seconds)} kills")
    return {"seconds": seconds, "figures": figures}


def inject(kind: str, rank: int, workdir: Path) -> None:
    if kind == "sleep":
        (workdir / SLEEP_FILE).write_text(str(rank), encoding="utf-8")
    else:
        os.kill(worker_pids(workdir)[rank], SIGNALS[kind])


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Starts an S3 server with a bucket, whose URL it yields, for this process and its children."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, null = f"http://127.0.0.1:{port}", subprocess.DEVNULL
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=null, stderr=null)
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}
    os.environ[object_store.VARIABLE] = str(folder / "scratch")
    os.environ["XLA_FLAGS"] = QUICK_COMPILE_FLAGS  # two cores compile for eight devices
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
                break
            time.sleep(0.1)
        yield "s3://bucket"
    finally:
        server.kill()


def soak(args, folder: Path) -> dict:
    if not args.s3:
        workdirs = folder / "interrupted", folder / "uninterrupted"
        return soak_in(args, *workdirs, PROCESSES, 0.05, "--stall_seconds=5")
    with s3_server(folder) as bucket:
        workdirs = [
            object_store.scratch_folder(f"{bucket}/{name}")
            for name in ("interrupted", "uninterrupted")
        ]
        workdirs[0].parent.mkdir(parents=True)
        return soak_in(args, *workdirs, S3_PROCESSES, 0.3, "--stall_seconds=15")


def soak_in(
    args, interrupted: Path, uninterrupted: Path, processes: int, pace: float, *flags: str
) -> dict:
    rng, remaining, injected = random.Random(args.seed), [], []
    run = start(interrupted, 10**9, pace, "--max_restarts=1000", *flags)
    wait_for(lambda: newest_step(interrupted) > 5, 400, run)
    began, end = time.monotonic(), time.monotonic() + 60 * args.minutes
    while True:
        next_fault = began + (len(injected) + 0.5 + rng.uniform(-0.3, 0.3)) * args.every
        time.sleep(max(0.1, min(next_fault, end) - time.monotonic()))
        if run.poll() is not None:
            raise SystemExit(f"the supervisor ended with exit code {run.poll()}")
        now = time.monotonic()
        if now >= end:
            break  # a fault now would meet the SIGTERM below
        if now < next_fault:
            continue
        remaining = remaining or rng.sample(FAULTS, len(FAULTS))  # each kind once, in random order
        rank = rng.randrange(processes)
        try:
            inject(remaining[0], rank, interrupted)
        except (KeyError, ProcessLookupError):
            continue  # the worker is being restarted
        injected.append(remaining.pop(0))
        at = f"{time.monotonic() - began:6.0f} s"
        print(f"{at}: {injected[-1]} rank {rank} at step {newest_step(interrupted)}", flush=True)
    wait_for(lambda: not is_recovering(interrupted), 900, run)  # its rows would not be its steps
    run.terminate()
    code, minutes, steps = (
        run.wait(120),
        (time.monotonic() - began) / 60,
        newest_step(interrupted) + 1,
    )
    print(f"{steps} steps, {len(injected)} faults, {minutes:.1f} minutes, exit code {code}")
    print(Path(f"{interrupted}.log").read_text(encoding="utf-8").splitlines()[-1], flush=True)
    assert start(uninterrupted, steps, 0.0).wait() == 0
    ends = [object_store.url(one) or one for one in (interrupted, uninterrupted)]
    same = final_state(ends[0]) == final_state(ends[1])
    relation = "bit-equal to" if same else "DIFFERENT from"
    print(f"parameters, optimizer state and {steps} losses: {relation} an uninterrupted run")
    events = read_jsonl(interrupted, "events.jsonl")
    goodput = [row for row in events if row["event"] == "goodput"][-1]
    counts = {"steps": steps, "minutes": minutes}
    return {"faults": injected, **counts, "same": same, "goodput": goodput}


def is_recovering(workdir: Path) -> bool:
    """Whether the run has not taken a step since its last restart."""
    names = [row["event"] for row in read_jsonl(workdir, "events.jsonl")]
    return [name for name in names if name in ("restart", "recovered")][-1:] == ["restart"]


def final_state(workdir: Path | str) -> tuple:
    """Returns the newest checkpoint's step and arrays, as bytes by path, and all losses."""
    if object_store.is_url(workdir):  # as a process sees it that has no scratch folder yet
        os.environ[object_store.VARIABLE] = tempfile.mkdtemp()
        object_store.root.cache_clear()
        workdir = find.download_metadata(Path(workdir))
    newest = max((int(path.name) for path in (workdir / find.FOLDER).glob("[0-9]*")), default=0)
    saved = arrays.as_numpy(workdir / find.FOLDER / str(newest))
    losses = {row["step"]: row["loss"] for row in read_jsonl(workdir, "metrics.jsonl")}
    return newest, {path: np.asarray(array).tobytes() for path, array in saved.items()}, losses


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("what", choices=("recovery", "soak"))
    parser.add_argument("--runs", type=int, default=10, help="number of kills of recovery")
    parser.add_argument("--minutes", type=float, default=15, help="duration of soak")
    parser.add_argument("--every", type=float, default=60, help="seconds between faults of soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--s3", action="store_true", help="soak: see above")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results, folder = record.about(args), Path(tempfile.mkdtemp())
    results |= {"recovery": recovery, "soak": soak}[args.what](args, folder)
    record.save(args.output, results, model=f"{args.what}-tiny")
    return 0 if results.get("same", True) else 1


if __name__ == "__main__":
    sys.exit(main())
