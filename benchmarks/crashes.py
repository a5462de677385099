"""Kills a run again and again (SIGKILL), in steps and in each stage of a save, and compares where it ends.

  python benchmarks/crashes.py [--kills=30] [--seed=0] [--output=PATH]

A tiny model on two simulated devices, a checkpoint every ten steps. Parameters, optimizer state and
every loss on record must be, bit for bit, those of a run that nobody disturbed.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import llama, record
from configs import default
from meshtrain import checkpoint
from meshtrain.checkpoint import arrays, manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.train import train

STEPS, EVERY = 3000, 10
PLACES = ("any time", "step", "copy", "write", "commit", "manifest", "name", "removal")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def after(seconds: float) -> None:
    timer = threading.Timer(seconds, die)
    timer.daemon = True
    timer.start()


def arm(place: str, draw: random.Random) -> None:
    """Arranges the death of this process in one of the next few saves, or some time."""
    count = draw.randint(1, 3)

    def at(owner, name: str, fatal) -> None:
        right, calls = getattr(owner, name), []

        def call(*args, **options):
            calls.append(1)
            if len(calls) < count:
                return right(*args, **options)
            return fatal(right, *args, **options)

        setattr(owner, name, call)

    def before(right, *args, **options):
        die()

    def within(right, *args, **options):
        after(draw.uniform(0, 0.05))
        return right(*args, **options)

    def half_removed(right, path, **options):
        for file in sorted(Path(path).rglob("*"))[::2]:
            if file.is_file():
                file.unlink()
        die()

    if place == "any time":
        after(draw.uniform(0, 8))
    elif place == "step":
        at(Saver, "due", within)
    elif place == "copy":
        at(arrays.Arrays, "save", within)
    elif place == "write":
        at(arrays.Arrays, "wait", within)
    elif place == "commit":
        at(manifest, "commit", before)
    elif place == "manifest":
        at(manifest, "_sync_folder", before)  # it is written, the folder has no name yet
    elif place == "name":
        at(manifest.os, "rename", before)
    elif place == "removal":
        at(manifest.shutil, "rmtree", half_removed)


def work(args) -> None:
    """A worker: trains, and dies where it is told to."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if args.place:
        arm(args.place, random.Random(args.seed))
    c = default.get_config()
    c.train.update(steps=STEPS, global_batch=4, log_every=1)
    c.model.update(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=64)
    c.data.update(build="meshtrain.data.synthetic:build", seq_len=16)
    c.checkpoint.every, c.eval.batches = EVERY, 0
    train(c, workdir=args.workdir)


def launch(workdir: Path, *options: str) -> int:
    command = [sys.executable, __file__, "--worker", f"--workdir={workdir}", *options]
    env = {**os.environ, "XLA_FLAGS": llama.QUICK}
    return subprocess.run(command, env=env, stdout=subprocess.DEVNULL).returncode


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    for hidden in ("--place", "--workdir"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    jax.config.update("jax_platforms", "cpu")
    about = record.about(args)
    folder, draw, began = Path(tempfile.mkdtemp()), random.Random(args.seed), time.perf_counter()
    calm, disturbed = folder / "calm", folder / "disturbed"
    assert launch(calm) == 0
    killed = collections.Counter()
    while sum(killed.values()) < args.kills:
        place = PLACES[sum(killed.values()) % len(PLACES)]
        code = launch(disturbed, f"--place={place}", f"--seed={draw.randrange(10**9)}")
        assert code in (0, -signal.SIGKILL), f"killed at {place}: exit code {code}"
        assert code, f"nothing left to kill after {dict(killed)}: raise STEPS"
        killed[place] += 1
        saved = manifest.steps(disturbed / checkpoint.FOLDER)
        print(
            f"killed {sum(killed.values()):2}: {place:8} · newest checkpoint {saved[:1]}",
            flush=True,
        )
    assert launch(disturbed) == 0

    def outcome(workdir: Path):
        found = arrays.as_numpy(workdir / checkpoint.FOLDER / str(STEPS))
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return found, {row["step"]: row["loss"] for row in rows}

    (a, losses_a), (b, losses_b) = outcome(calm), outcome(disturbed)
    same = losses_a == losses_b and a.keys() == b.keys()
    same = same and all(np.array_equal(a[path], b[path]) for path in a)
    events = (disturbed / "events.jsonl").read_text()
    print(f"{dict(killed)}; {events.count('quarantine')} checkpoints set aside")
    told = "bit-equal to" if same else "NOT those of"
    print(f"{len(a)} arrays and {len(losses_a)} losses: {told} the undisturbed run")
    about |= {"killed": killed, "losses": len(losses_a), "arrays": len(a), "same": same}
    about |= {"set aside": events.count("quarantine"), "seconds": time.perf_counter() - began}
    print(f"{about['seconds']:.0f} s")
    record.save(args.output, about, model="crashes-tiny")
    if same:
        shutil.rmtree(folder)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
