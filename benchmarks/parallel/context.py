"""Long sequences over several devices: speed of attention, bytes and memory, ceiling on H200.

  python benchmarks/parallel/context.py [--parts speed overhead bytes memory] [--output=PATH]

speed      forward and backward pass of causal attention, in blocks of 256 tokens, on two processes
           with one core each, compared with one process: pairs of a query and a key that it attends
           to, per second. Linux only. A round is a few steps of both processes together, of one
           alone, and of independent ones on both cores at once, which shows how much busy cores
           slow each other down.
overhead   the same on 2, 4 and 8 simulated devices of one process, which share one core: time
           relative to one device. This is not scaling: it shows what the order of the work and the
           copies cost.
bytes      what a device sends in a step for keys and values, compared with the minimum of the
           method (docs/concepts/context.md has the formulas)
memory     bytes per device of the compiled step of a sequence over eight devices, compared with a
           sequence of an eighth of the length on one device; activations kept for the backward
           pass, and all temporaries
roofline   memory and ceiling of MFU of configs/llama3_128k.py, compiled for one host of eight H200;
           needs the extra aot-gpu. Computed, not measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.lib import llama, record, workers
from meshtrain.cluster import runtime
from meshtrain.configs import default
from meshtrain.ops.attention import attention
from meshtrain.parallel import context, sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools.audit.audit import audit
from meshtrain.tools.hlo import activations, hlo

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("ring", "gather", "ulysses")
DEVICES, DEVICE_COUNTS = 8, (1, 2, 4, 8)
HEADS, HEAD_DIM = 8, 64
IMPLEMENTATION = "blockwise:256"


def prepare(args):
    """Returns the compiled passes of attention, its inputs, and the number of attended pairs."""
    length, num_devices = args.tokens, jax.device_count()
    mesh = make_mesh(context=num_devices)
    method = context.active_method(args.methods[0])
    rules = sharding.use_rules(default.get_config().rules)
    place = jax.NamedSharding(mesh, jax.P(None, "context"))

    def step(carry, weights):
        def total(carry):
            return (attention(*carry, None, implementation=IMPLEMENTATION) * weights).sum()

        loss, grads = jax.value_and_grad(total)(carry)
        # Each step starts from other inputs, as in training.
        return jax.tree.map(lambda x, g: x - 1e-3 * g, carry, grads), {"loss": loss}

    random, order = np.random.default_rng(0), context.order(length, num_devices)

    def array():
        x = random.normal(size=(1, length, HEADS, HEAD_DIM)).astype(np.float32)[:, order]
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

    carry, weights = (array(), array(), array()), array()
    with jax.set_mesh(mesh), rules, method:
        jitted = jax.jit(step, donate_argnums=0, out_shardings=((place,) * 3, None))
        compiled = jitted.lower(carry, weights).compile()
    return compiled, carry, weights, {"pairs": length * (length + 1) // 2 * HEADS}


def measure_speed(args) -> dict:
    """Prints and returns the attended pairs per second of two processes, for each method."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("the part speed needs two cores; choose others with --parts")
    measured, rows = {}, []
    for method in args.methods:
        options = ("--methods", method)
        size = dict(rounds=args.rounds, steps=args.steps)
        measured[method] = found = workers.measure(__file__, cores, *options, **size)
        seconds = {kind: statistics.median(all) for kind, all in workers.seconds_of(found).items()}
        pairs = found["facts"][0]["pairs"] / 1e6
        alone, busy, together = (
            seconds[kind] for kind in (workers.ALONE, workers.BUSY, workers.TOGETHER)
        )
        row = {"method": method, "tokens": args.tokens, "M pairs/s, one device": pairs / alone}
        row |= {"M pairs/s, two": pairs / together, "speed-up": alone / together}
        rows.append(row | {"over busy core": busy / together})
    record.show(rows)
    return {"workers": measured, "figures": rows}


def measure_overhead(args) -> dict:
    """Prints and returns the time on simulated devices sharing one core, relative to one device."""
    core, measured, rows = sorted(os.sched_getaffinity(0))[0], {}, []
    for method in args.methods:
        size = dict(counts=DEVICE_COUNTS, rounds=args.rounds, steps=args.steps)
        measured[method] = workers.measure_simulated(__file__, core, "--methods", method, **size)
        medians = workers.medians_of(measured[method]["turns"])
        row = {"T(n) / T(1)": method, "T(1) in s": medians[1]}
        rows.append(row | {f"n = {num}": medians[num] / medians[1] for num in DEVICE_COUNTS[1:]})
    record.show(rows)
    return {"workers": measured, "figures": rows}


def settings(args, length: int, num_devices: int, method: str):
    """Returns the config of a step on one sequence over these devices."""
    size = argparse.Namespace(layers=args.layers, width=args.width, seq_len=length)
    train = {"global_batch": 1, "num_microbatches": 1}
    c = llama.settings(size, mesh={"data": 1, "context": num_devices}, train=train)
    c.model.update(attention_impl=IMPLEMENTATION, max_seq_len=length)
    c.context.method = method
    return c


def measure_bytes(args) -> dict:
    """Prints and returns what a device sends over the axis for keys and values, and the minimum."""
    rows = []
    for method in args.methods:
        audited = audit(settings(args, args.lengths[0], DEVICES, method))
        (total,) = (one for one in audited.axes if one.name == "context")
        extra = sum(row[3] for row in audited.extra_bytes if row[0] == "context")
        row = {"method": method, "tokens": args.lengths[0], "MB": total.bytes / 1e6}
        row |= {"minimum": total.minimum / 1e6, "ratio": total.ratio}
        rows.append(row | {"explained excess": extra / 1e6})
    record.show(rows)
    return {"figures": rows}


def bytes_of(args, length: int, num_devices: int, method: str) -> dict:
    """Returns the bytes of the compiled step on a device: kept activations, all temporaries."""
    c = settings(args, length, num_devices, method)
    _, program, batch = llama.program_of(c, jax.devices()[:num_devices])
    with program.active():
        compiled = program.compile(batch)
    params = program.abstract_state.params
    kept = activations.kept_bytes(hlo.parse(compiled.as_text()), params)
    return {"kept": kept, "temporary": compiled.memory_analysis().temp_size_in_bytes}


def measure_memory(args) -> dict:
    """Prints and returns the bytes of long sequences over 8 devices, and of an eighth on one."""
    rows = []
    for length in args.lengths:
        alone = bytes_of(args, length // DEVICES, 1, "ring")
        for method in args.methods:
            found = bytes_of(args, length, DEVICES, method)
            row = {"method": method, "tokens": length}
            for kind in alone:
                row |= {
                    f"{kind} MB": found[kind] / 1e6,
                    f"{kind}, ratio": found[kind] / alone[kind],
                }
            rows.append(row)
            print(f"compiled: {method}, {length} tokens", file=sys.stderr, flush=True)
    record.show(rows)
    return {"figures": rows}


def measure_roofline(args) -> dict:
    """Prints and returns the audit of configs/llama3_128k.py for eight H200."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "audit.json")
        command = [sys.executable, "-m", "meshtrain", "audit", "--config=llama3_128k"]
        paths = os.pathsep.join([str(ROOT), *sys.path])
        done = subprocess.run(
            [*command, "--target=h200:8", f"--output={file}"],
            env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(f"roofline: {done.stderr.strip().splitlines()[-1]}")
            return {"error": done.stderr.strip()[-1000:]}
        audited = json.loads(file.read_text(encoding="utf-8"))
    groups = {row["name"]: row["ceiling_seconds"] for row in audited["roofline"]["rows"]}
    row = {"config": "llama3_128k", "H200": 8, "peak GB": audited["memory"]["peak"] / 1e9}
    row |= {f"{name} s": seconds for name, seconds in groups.items()}
    row |= {"MFU at most": audited["roofline"]["mfu"]}
    record.show([row])
    return {"figures": [row]}


PARTS = {
    "speed": measure_speed,
    "overhead": measure_overhead,
    "bytes": measure_bytes,
    "memory": measure_memory,
    "roofline": measure_roofline,
}


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    parser.add_argument("--tokens", type=int, default=4096, help="of speed and overhead")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    for name, value in {"layers": 4, "width": 256, "rounds": 3, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.devices > 1:
            runtime.simulate(args.devices)
        return workers.serve(lambda: prepare(args))
    measured_here = {"bytes", "memory"} & {*args.parts}
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {llama.QUICK_FLAGS if measured_here else ''}".strip()
    runtime.simulate(DEVICES if measured_here else 1)
    is_computed = [*args.parts] == ["roofline"]
    results = record.about(args, devices=["h200-compiled-ahead"] if is_computed else ())
    os.environ["XLA_FLAGS"] = flags  # of the workers, which are timed
    for part in args.parts:
        print(f"\n{part}")
        results[part] = PARTS[part](args)
    record.save(args.output, results, model="-".join(["context", *args.parts]))


if __name__ == "__main__":
    main()
