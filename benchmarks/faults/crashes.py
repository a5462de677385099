"""Kills a run (SIGKILL) in steps and in each phase of a save, and compares its final state.

  python benchmarks/faults/crashes.py [--kills=30] [--seed=0] [--output=PATH]

A tiny model on two simulated devices, with a checkpoint every ten steps. The final parameters, the
optimizer state and all recorded losses must be bit-equal to an uninterrupted run.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.lib import llama, record
from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.checkpoint.saver import Saver
from meshtrain.configs import default
from meshtrain.train import train

STEPS_PER_KILL, MAX_STEPS, EVERY = 120, 3000, 10
KILL_POINTS = ("any time", "step", "copy", "write", "commit", "manifest", "rename", "removal")


def num_steps(args) -> int:
    """Returns the steps of a run, so many that it does not end before its last kill."""
    return min(MAX_STEPS, STEPS_PER_KILL * args.kills)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def schedule_kill(kill_point: str, rng: random.Random) -> None:
    """Makes this process kill itself at `kill_point`, or at any time.

    The point is in one of the next three saves.
    """
    count = rng.randint(1, 3)

    def on_call(owner, name: str, fatal) -> None:
        """Replaces the `count`-th call of a function by `fatal`."""
        original, calls = getattr(owner, name), []

        def call(*args, **options):
            calls.append(1)
            if len(calls) < count:
                return original(*args, **options)
            return fatal(original, *args, **options)

        setattr(owner, name, call)

    def before(original, *args, **options):
        die()

    def after(original, *args, **options):
        original(*args, **options)
        die()

    def during(original, *args, **options):
        die_after(rng.uniform(0, 0.05))
        return original(*args, **options)

    def half_removed(original, path, **options):
        for file in sorted(Path(path).rglob("*"))[::2]:
            if file.is_file():
                file.unlink()
        die()

    if kill_point == "any time":
        die_after(rng.uniform(0, 8))
        return
    owner, name, fatal = {
        "step": (Saver, "due", during),
        "copy": (AsyncWriter, "save", during),
        "write": (AsyncWriter, "wait", during),
        "commit": (manifest, "commit", before),
        # The manifest is written, but the folder is not renamed yet.
        "manifest": (manifest, "write", after),
        "rename": (manifest.os, "rename", before),
        "removal": (find.shutil, "rmtree", half_removed),
    }[kill_point]
    on_call(owner, name, fatal)


def work(args) -> None:
    """Trains in this process, which kills itself at args.kill_point."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if args.kill_point:
        schedule_kill(args.kill_point, random.Random(args.seed))
    c = default.get_config()
    c.train.update(steps=num_steps(args), global_batch=4, log_every=1)
    c.model.update(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=64)
    c.data.update(build="meshtrain.data.synthetic:build", seq_len=16)
    c.checkpoint.every, c.eval.batches = EVERY, 0
    train(c, workdir=args.workdir)


def launch(workdir: Path, *options: str) -> int:
    command = [sys.executable, __file__, "--worker", f"--workdir={workdir}", *options]
    env = {**os.environ, "XLA_FLAGS": llama.QUICK_FLAGS}
    return subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    for hidden in ("--kill_point", "--workdir"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    jax.config.update("jax_platforms", "cpu")
    about = record.about(args)
    folder, rng, began = Path(tempfile.mkdtemp()), random.Random(args.seed), time.perf_counter()
    uninterrupted, interrupted = folder / "uninterrupted", folder / "interrupted"
    kills, steps = f"--kills={args.kills}", num_steps(args)
    assert launch(uninterrupted, kills) == 0
    killed = collections.Counter()
    while sum(killed.values()) < args.kills:
        kill_point = KILL_POINTS[sum(killed.values()) % len(KILL_POINTS)]
        how = [f"--kill_point={kill_point}", f"--seed={rng.randrange(10**9)}"]
        code = launch(interrupted, kills, *how)
        assert code in (0, -signal.SIGKILL), f"killed at {kill_point}: exit code {code}"
        assert code, f"the run ended after {dict(killed)}: raise STEPS_PER_KILL"
        killed[kill_point] += 1
        saved = find.steps(interrupted / find.FOLDER)
        print(
            f"killed {sum(killed.values()):2}: {kill_point:8} · newest checkpoint {saved[:1]}",
            flush=True,
        )
    assert launch(interrupted, kills) == 0

    def final_state(workdir: Path):
        saved = arrays.as_numpy(workdir / find.FOLDER / str(steps))
        rows = [
            json.loads(line)
            for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        return saved, {row["step"]: row["loss"] for row in rows}

    (a, losses_a), (b, losses_b) = final_state(uninterrupted), final_state(interrupted)
    same = losses_a == losses_b and a.keys() == b.keys()
    same = same and all(np.array_equal(a[path], b[path]) for path in a)
    events = (interrupted / "events.jsonl").read_text(encoding="utf-8")
    print(f"{dict(killed)}; {events.count('quarantine')} corrupt checkpoints quarantined")
    relation = "bit-equal to" if same else "DIFFERENT from"
    print(f"{len(a)} arrays and {len(losses_a)} losses: {relation} the uninterrupted run")
    about |= {"killed": killed, "losses": len(losses_a), "arrays": len(a), "same": same}
    about |= {"quarantined": events.count("quarantine"), "seconds": time.perf_counter() - began}
    print(f"{about['seconds']:.0f} s")
    record.save(args.output, about, model="crashes-tiny")
    if same:
        shutil.rmtree(folder)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
