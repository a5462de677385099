"""How long a step waits for data on a slow object store, and what memory that takes.

  python benchmarks/data_store.py --latency=0.2 --errors=0.01 --gb=1 --cache_gb=10 [--output=PATH]

A server on loopback answers each request after `latency` seconds, a fraction `errors` of them by
an error. Rows are read at the speed of GPT-2 124M on 8 H200: 8 MB/s, 4,000 rows of 1,024 tokens of
2 bytes, by `--processes` in equal parts. A step is a pause. Printed are the wait of the first
batch, that of all later steps in per cent of their time, what was fetched, and the memory of the
process; `--local` reads the folder, for comparison.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain.data import prepared, tokens
from meshtrain.data.loader import Loader
from meshtrain.data.prepare import outputs, shards
from meshtrain.data.prepare.records import Position

ROWS_PER_SECOND = 4000  # of 1,024 tokens: 8 MB/s
SEQ_LEN = 1024
STEPS_PER_SECOND = 8


def write_prepared(folder: Path, gb: float, shard_tokens: int) -> None:
    """Writes a prepared folder of random tokens, as `meshtrain prepare` would."""
    journal = shards.Journal(outputs.open_output(folder), {})
    writer = shards.ShardWriter(folder, journal, dtype=np.dtype("<u2"), shard_tokens=shard_tokens)
    random_tokens = np.random.default_rng(0)
    for _ in range(int(gb * 1e9 / 2 / 2000)):
        writer.write(random_tokens.integers(0, 50257, 2000, np.uint16), 8000)
        writer.end_document(Position())
    writer.finish(Position())
    writer.close()
    entry = {
        "kind": "bytes",
        "file": None,
        "sha256": "x",
        "vocab_size": 50257,
        "eos": 0,
        "bos": None,
    }
    manifest = {"version": 1, "tokenizer": entry, "settings": {}, "dtype": "uint16"}
    np.save(folder / prepared.TOKEN_BYTES, np.ones(50257, np.int32))
    manifest |= shards.summary(journal.shards)
    journal.finish()
    prepared.write_durably(folder / prepared.MANIFEST, json.dumps(manifest))


def serve(folder: Path, port: int, latency: float, errors: float) -> None:
    """Answers reads of S3's protocol; the path of a request is /bucket/NAME."""
    counts = {"requests": 0, "bytes": 0}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode()
                await asyncio.sleep(latency)
                path = request.split(" ")[1].partition("?")[0].removeprefix("/bucket/")
                head, body = response(path, request)
                counts["requests"] += 1
                counts["bytes"] += len(body)
                writer.write(head.encode() + body)
                await writer.drain()

    def response(path: str, request: str) -> tuple[str, bytes]:
        if path == "counts":
            body = json.dumps(counts).encode()
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n", body
        file = folder / path
        if random.random() < errors:
            return "HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", b""
        if not path or not file.is_file():
            return "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""
        size = file.stat().st_size
        status, start, end = "200 OK", 0, size
        if found := re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d*)", request):
            start, end = int(found[1]), min(int(found[2] or size) + 1, size)
            status = f"206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{size}"
        with open(file, "rb") as opened:
            opened.seek(start)
            body = opened.read(end - start)
        return f'HTTP/1.1 {status}\r\nETag: "1"\r\nContent-Length: {len(body)}\r\n\r\n', body

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    asyncio.run(main())


def memory() -> dict[str, int]:
    """Returns the memory of this process, MB: not shared, and the peak with mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("Rss", "Vm"))
    }
    return {"anonymous": int(fields["RssAnon"]) >> 10, "peak": int(fields["VmHWM"]) >> 10}


def train(path: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Reads the batches of one of `args.processes`; returns what it waited."""
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((1,), ("data",))
    began = time.perf_counter()
    source = tokens.build(
        path=path,
        dtype="",
        pattern="",
        exclude=(),
        seq_len=SEQ_LEN,
        vocab_size=50257,
        separator=-1,
        heldout=0.001,
        seed=number,  # another order for each process, as they read other rows
        split="train",
        packing=args.packing,
        cache_gb=args.cache_gb,
    )
    opened = time.perf_counter() - began
    global_batch = ROWS_PER_SECOND // STEPS_PER_SECOND // args.processes
    before = memory()
    loader = Loader(source, mesh, (("batch", "data"), ("seq", None)), global_batch=global_batch)
    began = time.perf_counter()
    next(loader)
    first = time.perf_counter() - began
    waits = []
    for _ in range(int(args.seconds * STEPS_PER_SECOND)):
        time.sleep(1 / STEPS_PER_SECOND)
        began = time.perf_counter()
        next(loader)
        waits.append(time.perf_counter() - began)
    loader.close()
    total = args.seconds + sum(waits)
    print(
        f"process {number}: opened in {opened:.1f} s, first batch {first:.1f} s; then waited "
        f"{sum(waits) / total:.2%} of {total:.0f} s, {sum(wait > 0.01 for wait in waits)} steps "
        f"longer than 10 ms; MB before {before}, at the end {memory()}",
        flush=True,
    )
    return {
        "process": number,
        "opened s": opened,
        "first batch s": first,
        "waits s": waits,
        "MB before": before,
        "MB at the end": memory(),
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds of each request")
    parser.add_argument("--errors", type=float, default=0.01, help="fraction of the requests")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the tokens")
    parser.add_argument("--cache_gb", type=float, default=100.0, help="data.cache_gb")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the steps")
    parser.add_argument("--processes", type=int, default=1, help="that read the rows")
    parser.add_argument("--packing", default="windows", help="data.packing")
    parser.add_argument("--local", action="store_true", help="read the folder, for comparison")
    args = parser.parse_args()
    results = record.about(args, devices=["cpu"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        folder.mkdir()
        write_prepared(folder / "tokens", args.gb, shard_tokens=50_000_000)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        serving = (folder, port, args.latency, args.errors)
        server = context.Process(target=serve, args=serving, daemon=True)
        server.start()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "XDG_CACHE_HOME": f"{place}/cache",
        }
        time.sleep(2)
        path = str(folder / "tokens") if args.local else "s3://bucket/tokens"
        with context.Pool(args.processes) as readers:
            numbered = [(path, number, args) for number in range(args.processes)]
            results["processes"] = readers.starmap(train, numbered, chunksize=1)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /bucket/counts HTTP/1.1\r\n\r\n")
            results["server"] = connection.recv(4096).decode().rpartition("\r\n")[2]
            print("server:", results["server"])
        server.terminate()
        record.save(args.output, results, model="data-store")


if __name__ == "__main__":
    main()
