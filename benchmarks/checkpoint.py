"""Cost of a checkpoint: blocked time compared with a copy, save with a raw write, verification with
restore.

  python benchmarks/checkpoint.py [--rounds=7] [--folder=DIR] [--output=PATH]

A Llama-style model with AdamW, 305 MB of state on one CPU device, is saved by the trainer's Saver
while nothing else runs. `blocked` is the time for which training waits for a save; `raw write`
writes one file with the same bytes; `verify` reads every chunk, as `meshtrain checkpoint verify`
does. Each round measures everything once; the results are ratios of medians.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain import state
from meshtrain.checkpoint import find, manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.program import assemble
from meshtrain.storage import LocalFolder


def raw_write(path: Path, blocks: list[np.ndarray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for block in blocks:
            file.write(block.data)
        os.fsync(file.fileno())


def add_noise(tree, key):
    """Changes all values: each save differs, and compresses no better than a trained state."""
    return jax.tree.map(lambda x: x + jax.random.normal(key, x.shape).astype(x.dtype), tree)


def measure(args) -> dict:
    c = default.get_config()
    c.model.update(num_layers=6, d_model=512, d_ff=2048, num_heads=8, num_kv_heads=8)
    c.data.build = "meshtrain.data.synthetic:build"
    cfg = parse(c, num_devices=1)
    parts = build(cfg)
    program, folder = assemble(cfg, parts), Path(tempfile.mkdtemp(dir=args.folder))
    events: list[dict] = []
    saver = Saver(
        LocalFolder(folder),
        cfg.checkpoint,
        config=cfg.to_dict(),
        mesh=asdict(cfg.mesh),
        identity={},
        event=lambda name, **fields: events.append({"event": name, **fields}),
        log=print,
        sync=lambda: None,
    )
    times: dict[str, list[float]] = {
        name: [] for name in ("copy", "blocked", "save", "raw write", "verify", "restore")
    }
    with program.active():
        current = program.initial_state(0)
        step = jax.jit(add_noise)
        saver.prepare(program.abstract_state)
        for number in range(args.rounds + 1):  # the first is warm-up
            current = jax.block_until_ready(step(current, jax.random.key(number)))
            began = time.perf_counter()
            blocks = [np.array(leaf) for leaf in jax.tree.leaves(current)]
            copied = time.perf_counter()
            saver.finish(number, current, position=0, metrics={}, loss_statistics={})
            saved = time.perf_counter()
            raw_write(folder / "raw", blocks)
            written = time.perf_counter()
            manifest.verify(folder / find.FOLDER / str(number))
            checked = time.perf_counter()
            saved_manifest, restored_state = saver.restore(program.abstract_state)
            jax.block_until_ready(restored_state)
            del restored_state
            restored = time.perf_counter()
            if number:
                times["copy"].append(copied - began)
                times["blocked"].append(events[-1]["blocked_seconds"])
                times["save"].append(saved - copied)
                times["raw write"].append(written - saved)
                times["verify"].append(checked - written)
                times["restore"].append(restored - checked)
    saver.close()
    shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "bytes": state.bytes_of(current),
        "files": saved_manifest.bytes,
        "times": times,
        "medians": medians,
    }


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", help="on the disk to measure; default: the system's temporary folder"
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = record.about(args)
    results |= measure(args)
    m = results["medians"]
    print(f"{results['bytes'] / 1e6:,.0f} MB of state, {results['files'] / 1e6:,.0f} MB of files")
    record.show([{"": name, "seconds": seconds} for name, seconds in m.items()])
    print(f"blocked / copy        {m['blocked'] / m['copy']:.2f}")
    print(f"save / raw write      {m['save'] / m['raw write']:.2f}")
    print(f"verify / restore      {m['verify'] / m['restore']:.1%}")
    record.save(args.output, results, model="checkpoint-llama-6x512")


if __name__ == "__main__":
    main()
