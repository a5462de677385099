"""Seconds from the start of a process to its first step, with a cold and with a warm compile cache.

  python benchmarks/startup.py [--rounds=5] [--config=FILE] [--output=PATH]

Each run is a new process on one CPU device. A cold run starts with an empty compile cache
(JAX_COMPILATION_CACHE_DIR, a temporary folder), which the warm run after it reads; by default jax
stores programs that took at least a second to compile. `import` includes the start of the
interpreter; `state` compiles and runs the initialization of the parameters. Tokens are synthetic:
no data is read.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def work(args) -> dict[str, float]:
    """Runs this new process to the end of its first step; returns the seconds of each part."""
    import jax

    from benchmarks.lib import llama
    from meshtrain.cluster import runtime
    from meshtrain.config import load as configfile

    ends = {"import": time.time()}
    c = configfile.load_config(args.config)
    c.data.update(build="meshtrain.data.synthetic:build")
    runtime.simulate(1)
    devices = jax.devices()
    ends["config, device"] = time.time()
    cfg, program, batch = llama.program_of(c, devices)
    ends["build, batch"] = time.time()
    with program.active():
        state = jax.block_until_ready(program.initial_state(0))
        ends["state"] = time.time()
        compiled = program.compile(batch)
        ends["compile"] = time.time()
        jax.block_until_ready(compiled(state, batch))
        ends["first step"] = time.time()
    starts = [args.began, *ends.values()]
    parts = {name: end - start for (name, end), start in zip(ends.items(), starts, strict=False)}
    return {**parts, "all": ends["first step"] - args.began}


def run(args, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, f"--config={args.config}", f"--began={time.time()!r}"]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    from benchmarks.lib import record
    from meshtrain.cluster import runtime

    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.py"), metavar="FILE")
    args = parser.parse_args()
    runtime.simulate(1)  # this process only waits
    results, seconds = record.about(args), {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind in seconds:
                seconds[kind].append(run(args, cache))
    rows = []
    for name in seconds["cold"][0]:
        row = {"seconds": name}
        for kind, runs in seconds.items():
            row[kind] = statistics.median(parts[name] for parts in runs)
        rows.append(row)
    record.show(rows)
    results |= {"seconds": seconds, "figures": rows}
    record.save(args.output, results, model=f"startup-{Path(args.config).stem}")


if __name__ == "__main__":
    # The flags are read before large imports, because the imports are part of the measured time.
    worker = argparse.ArgumentParser(add_help=False)
    worker.add_argument("--began", type=float)
    worker.add_argument("--config")
    given, _ = worker.parse_known_args()
    if given.began:
        print(json.dumps(work(given)))
    else:
        main()
