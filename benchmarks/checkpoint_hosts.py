"""Bytes read and written by each process at a save and at a restore, and the seconds on disks of a
given rate.

  python benchmarks/checkpoint_hosts.py [--processes=1,2,4] [--mib=256] [--rate=50] [--output=PATH]

One array of this size (MiB) is sharded over the processes, each with one CPU device, then saved and
restored by the functions of the trainer. `--rate` limits the MB per second that each process reads
and writes, as if each were a host with a link to a common disk; it needs a C compiler. Bytes are
those of /proc/PID/io.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain.checkpoint import arrays, manifest
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.cluster import distributed, environment
from meshtrain.state import TrainState

LEAST = 1 << 14  # bytes of a call that is slowed down
SLOW_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
#include <stdlib.h>
#include <sys/uio.h>
static ssize_t slow(ssize_t n) {
  if (n >= LEAST) usleep(n / atof(getenv("DISK_MB_PER_SECOND")));
  return n;
}
#define SLOW(name, ...) static ssize_t (*real)(); \\
  if (!real) real = dlsym(RTLD_NEXT, #name); return slow(real(__VA_ARGS__));
ssize_t read(int f, void *b, size_t n) { SLOW(read, f, b, n) }
ssize_t pread(int f, void *b, size_t n, off_t o) { SLOW(pread, f, b, n, o) }
ssize_t pread64(int f, void *b, size_t n, off_t o) { SLOW(pread64, f, b, n, o) }
ssize_t preadv(int f, const struct iovec *v, int c, off_t o) { SLOW(preadv, f, v, c, o) }
ssize_t write(int f, const void *b, size_t n) { SLOW(write, f, b, n) }
ssize_t pwrite(int f, const void *b, size_t n, off_t o) { SLOW(pwrite, f, b, n, o) }
ssize_t pwrite64(int f, const void *b, size_t n, off_t o) { SLOW(pwrite64, f, b, n, o) }
ssize_t writev(int f, const struct iovec *v, int c) { SLOW(writev, f, v, c) }
ssize_t pwritev(int f, const struct iovec *v, int c, off_t o) { SLOW(pwritev, f, v, c, o) }
"""
COLUMNS = ("save_read", "save_written", "save_seconds", "restore_read", "restore_seconds")


def io() -> tuple[float, float]:
    """Returns the MiB that this process has read and written."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(lines[0].split()[1]) / 2**20, int(lines[1].split()[1]) / 2**20


def work(args) -> dict[str, float]:
    """Saves and restores as one of the processes; returns its COLUMNS."""
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    sharding = jax.NamedSharding(mesh, jax.P("fsdp"))
    replicated = jax.NamedSharding(mesh, jax.P())
    shape = (args.mib << 18,)
    values = np.random.default_rng(0).standard_normal(shape[0], np.float32)
    array = jax.make_array_from_callback(shape, sharding, lambda index: values[index])
    step = jax.make_array_from_callback((), replicated, lambda _: np.int32(0))
    state = TrainState(step, {"w": array}, ())
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    folder, writer, described = args.folder, AsyncWriter(), arrays.shapes_of(state)
    names = ("metrics", "loss_statistics", "mesh", "versions", "config")
    fields = dict.fromkeys(names, {}) | dict(position=0, time=time.time(), arrays=described)
    for step in range(2):  # the first one loads libraries
        if distributed.process_id() == 0:
            manifest.partial_folder(folder, step).mkdir(parents=True)
        distributed.barrier(f"begin {step}")
        (read, written), began = io(), time.perf_counter()
        writer.save(manifest.partial_folder(folder, step) / arrays.FOLDER, arrays.fields(state))
        writer.wait()
        if distributed.process_id() == 0:
            manifest.commit(folder, step, processes=distributed.num_processes(), **fields)
        distributed.barrier(f"end {step}")
        saved = io()[0] - read, io()[1] - written, time.perf_counter() - began
    writer.close()
    read, began = io()[0], time.perf_counter()
    if distributed.process_id() == 0:
        manifest.check(folder / "1")
    distributed.barrier("checked")
    restored = arrays.restore(folder / "1", described, abstract)
    jax.block_until_ready(restored.params)
    distributed.barrier("restored")
    measured = (*saved, io()[0] - read, time.perf_counter() - began)
    own = restored.params["w"].addressable_shards[0]
    assert np.array_equal(own.data, values[own.index])
    return dict(zip(COLUMNS, measured, strict=True))


def run(args, num_processes: int, library: Path) -> list[dict[str, float]]:
    """Returns what each process measured."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    port = 20000 + os.getpid() % 20000 + num_processes
    command = [sys.executable, __file__, "--worker", f"--mib={args.mib}", f"--folder={folder}"]
    processes = []
    for rank in range(num_processes):
        address = (f"127.0.0.1:{port}", str(num_processes), str(rank))
        env = {"JAX_PLATFORMS": "cpu", "DISK_MB_PER_SECOND": str(args.rate)}
        env |= dict(zip(environment.JAX_VARIABLES, address, strict=True))
        if args.rate:
            env["LD_PRELOAD"] = str(library)
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, env={**os.environ, **env}, stdout=pipe, text=True)
        )
    outputs = [process.communicate()[0] for process in processes]
    shutil.rmtree(folder)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s; 0 is as fast as it goes")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args)))
        return
    about, results = record.about(args, devices=["cpu"]), {}
    with tempfile.TemporaryDirectory() as temporary:
        library = Path(temporary) / "slow_disk.so"
        if args.rate:
            command = ["cc", "-shared", "-fPIC", f"-DLEAST={LEAST}", "-x", "c", "-", "-ldl"]
            subprocess.run([*command, "-o", str(library)], input=SLOW_DISK, text=True, check=True)
        for number in map(int, args.processes.split(",")):
            results[number] = run(args, number, library)
    rows = [
        {"processes": number, "process": rank} | {name: f"{row[name]:,.1f}" for name in COLUMNS}
        for number, processes in results.items()
        for rank, row in enumerate(processes)
    ]
    record.show(rows)
    record.save(args.output, about | {"processes": results}, model="checkpoint-hosts")


if __name__ == "__main__":
    main()
