"""Speed of the data pipeline: reading rows, loading onto devices, `meshtrain prepare` compared with
its tokenizer.

  python benchmarks/data.py [--seconds=2] [--megabytes=30] [--output=PATH]

Rows are read from a memory map that is in the page cache, with all checks on, for both values of
data.packing. The text is the .py files of Python's standard library; the tokenizer has 8192 tokens
and is trained on it.
"""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain.cli import app
from meshtrain.data import tokens
from meshtrain.data.loader import Loader
from meshtrain.data.tokenizer import load
from meshtrain.parallel import mesh

RULES = (("batch", ("data", "fsdp")),)
SIZES = [(1024, 8), (1024, 64), (4096, 8), (4096, 64)]  # tokens per row, rows per batch


def standard_library(megabytes: int) -> list[str]:
    """Returns the texts of files of the standard library, about this many MB in total."""
    root, texts, left = Path(sysconfig.get_paths()["stdlib"]), [], megabytes * 10**6
    for path in sorted(root.rglob("*.py")):
        if left > 0 and not {"site-packages", "dist-packages"} & set(path.parts):
            with contextlib.suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
                left -= path.stat().st_size
    return [text for text in texts if text]


def prepare_speeds(folder: Path, texts: list[str]) -> dict[str, float]:
    """Returns MB of text per second, of the tokenizer alone and of `meshtrain prepare`.

    `prepare` runs with one and with two workers.
    """
    source = folder / "text.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    command = [sys.executable, "-m", "meshtrain", "prepare", str(source)]
    tokenizer_folder = folder / "tokenizer"
    small = folder / "small.jsonl"
    small.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[::10]), encoding="utf-8"
    )
    flags = [f"--output={tokenizer_folder}", "--train_bpe=8192", "--num_workers=1"]
    app.main("prepare", [str(small), *flags])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(tokenizer_folder)
    began = time.perf_counter()
    for start in range(0, len(texts), 64):
        tokenizer.encode_batch(texts[start : start + 64])
    speeds = {"tokenizer alone, one thread": megabytes / (time.perf_counter() - began)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for workers in (1, 2):
        out = folder / f"out{workers}"
        began = time.perf_counter()
        flags = [f"--output={out}", f"--tokenizer={tokenizer_folder}", f"--num_workers={workers}"]
        subprocess.run([*command, *flags], check=True, env=environment, capture_output=True)
        name = f"prepare, {workers} workers, including start"
        speeds[name] = megabytes / (time.perf_counter() - began)
    return speeds


def read_speeds(path: Path, seconds: float, **settings) -> dict[str, float]:
    """Returns tokens per second of a source alone, and of the loader onto the devices."""
    rows = settings.pop("rows")
    source = tokens.build(
        **{"path": str(path), "dtype": "", "pattern": "", "exclude": (), "separator": -1},
        **{"vocab_size": 8192, "heldout": 0.0, "seed": 0, "split": "train", **settings},
    )
    one_device = mesh.make_mesh(data=1)
    with contextlib.closing(Loader(source, one_device, RULES, global_batch=rows)) as loader:
        return {
            "read": tokens_per_second(lambda i: source.read(i * rows + np.arange(rows)), seconds),
            "loader": tokens_per_second(lambda i: jax.block_until_ready(next(loader)), seconds),
        }


def tokens_per_second(batch, seconds: float) -> float:
    """Returns the rate of batch(0), batch(1), ..., without the first five."""
    for i in range(5):
        size = batch(i).tokens.size
    began, number = time.perf_counter(), 5
    while time.perf_counter() < began + seconds:
        batch(number)
        number += 1
    return size * (number - 5) / (time.perf_counter() - began)


def main() -> None:
    flags = record.parser(__doc__)
    flags.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    flags.add_argument("--megabytes", type=int, default=30, help="size of the text")
    args = flags.parse_args()
    jax.config.update("jax_platforms", "cpu")
    results = record.about(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds = results["MB per second"] = prepare_speeds(folder, standard_library(args.megabytes))
        record.show([{"": name, "MB/s": speed} for name, speed in speeds.items()])
        table = results["tokens per second"] = {}
        for packing in tokens.PACKINGS:
            for seq_len, rows in SIZES:
                settings = dict(seq_len=seq_len, rows=rows, packing=packing)
                speeds = read_speeds(folder / "out1", args.seconds, **settings)
                table[f"{packing} {rows} x {seq_len}"] = speeds
    print()
    record.show(
        [
            {"M tokens/s": case, **{kind: speed / 1e6 for kind, speed in speeds.items()}}
            for case, speeds in table.items()
        ]
    )
    record.save(args.output, results, model="data-bpe-8192")


if __name__ == "__main__":
    main()
