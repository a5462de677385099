"""Speed of data: reading rows, the loader onto devices, and `meshtrain prepare` beside its tokenizer alone.

  python benchmarks/data.py [--seconds=2] [--megabytes=30] [--output=PATH]

Rows are read from a memory map that is in the page cache, with all checks on, and packed by windows and
by best fit. The text is the .py files of Python's standard library, the tokenizer one of 8192 tokens that
is learned from it.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import record
from meshtrain import cli
from meshtrain.data import tokens
from meshtrain.data.loader import Loader
from meshtrain.data.tokenizer import load
from meshtrain.parallel import mesh

RULES = (("batch", ("data", "fsdp")),)
SIZES = [(1024, 8), (1024, 64), (4096, 8), (4096, 64)]  # tokens of a row, rows of a batch


def text(megabytes: int) -> list[str]:
    """Returns files of the standard library, so many bytes of them."""
    root, found, left = Path(sysconfig.get_paths()["stdlib"]), [], megabytes * 10**6
    for path in sorted(root.rglob("*.py")):
        if left > 0 and not {"site-packages", "dist-packages"} & set(path.parts):
            with contextlib.suppress(UnicodeDecodeError):
                found.append(path.read_text(encoding="utf-8"))
                left -= path.stat().st_size
    return [one for one in found if one]


def preparing(folder: Path, texts: list[str]) -> dict[str, float]:
    """Returns seconds of MB of text: the tokenizer alone, and the verb with one and two workers."""
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    megabytes = sum(len(one.encode()) for one in texts) / 1e6
    verb = [sys.executable, "-m", "meshtrain", "prepare", str(source)]
    learned = folder / "learned"
    small = folder / "small.jsonl"
    small.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts[::10]))
    cli.main("prepare", [str(small), f"--output={learned}", "--train_bpe=8192", "--num_workers=1"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(learned)
    began = time.perf_counter()
    for start in range(0, len(texts), 64):
        tokenizer.encode_batch(texts[start : start + 64])
    speeds = {"tokenizer alone, one thread": megabytes / (time.perf_counter() - began)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for workers in (1, 2):
        out = folder / f"out{workers}"
        began = time.perf_counter()
        flags = [f"--output={out}", f"--tokenizer={learned}", f"--num_workers={workers}"]
        subprocess.run([*verb, *flags], check=True, env=environment, capture_output=True)
        name = f"prepare, {workers} workers, start included"
        speeds[name] = megabytes / (time.perf_counter() - began)
    return speeds


def reading(path: Path, seconds: float, **settings) -> dict[str, float]:
    """Returns tokens a second of a source alone, and of the loader onto the devices."""
    rows = settings.pop("rows")
    source = tokens.build(
        **{"path": str(path), "dtype": "", "pattern": "", "exclude": (), "separator": -1},
        **{"vocab_size": 8192, "heldout": 0.0, "seed": 0, "split": "train", **settings},
    )
    places = mesh.make_mesh(data=1)
    with contextlib.closing(Loader(source, places, RULES, global_batch=rows)) as loader:
        return {
            "read": rate(lambda i: source.read(i * rows + np.arange(rows)), seconds),
            "loader": rate(lambda i: jax.block_until_ready(next(loader)), seconds),
        }


def rate(batch, seconds: float) -> float:
    """Returns tokens a second of batch(0), batch(1), ..., the first few left out."""
    for i in range(5):
        size = batch(i).tokens.size
    began, number = time.perf_counter(), 5
    while time.perf_counter() < began + seconds:
        batch(number)
        number += 1
    return size * (number - 5) / (time.perf_counter() - began)


def main() -> None:
    flags = record.parser(__doc__)
    flags.add_argument("--seconds", type=float, default=2.0)
    flags.add_argument("--megabytes", type=int, default=30)
    args = flags.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found = record.about(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found["MB a second"] = preparing(folder, text(args.megabytes))
        record.show([{"": name, "MB/s": one} for name, one in found["MB a second"].items()])
        found["tokens a second"] = {}
        for packing in tokens.PACKINGS:
            for seq_len, rows in SIZES:
                settings = dict(seq_len=seq_len, rows=rows, packing=packing)
                speeds = reading(folder / "out1", args.seconds, **settings)
                found["tokens a second"][f"{packing} {rows} x {seq_len}"] = speeds
    table = found["tokens a second"].items()
    print()
    record.show([{"M tokens/s": n, **{k: v / 1e6 for k, v in one.items()}} for n, one in table])
    record.save(args.output, found, model="data-bpe-8192")


if __name__ == "__main__":
    main()
