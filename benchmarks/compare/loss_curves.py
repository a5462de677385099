"""Loss curves of meshtrain with several settings, on the same text.

  python benchmarks/compare/loss_curves.py --settings "train.remat=none" "train.remat=full"
  JAX_PLATFORMS=cpu python benchmarks/compare/loss_curves.py --toy --steps=20 \\
      --settings "train.remat=none" "train.remat=full"

Each text of --settings, config keys with their values, is a run of `meshtrain train
--config=gpt2`: GPT-2 124M, 32 x 1,024 tokens per step, bfloat16, on the bytes of Python's standard
library. The runs differ in their settings alone. The table has the differences from
the first run, of the logged losses. The script fails if a loss differs by more than 6 %, or the
mean of the last fifth by more than 1 %: 16-bit programs with another order of sums differ, but not
in where they lead. Settings with a key or value that this version does not know are skipped.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.lib import devices, record, settings
from meshtrain.config.load import load_config
from meshtrain.errors import ConfigError

LOG_EVERY = 5  # steps
LARGEST = 0.06  # relative difference of a loss; that of one batch in a short run was 0.037
LAST_FIFTH = 0.01  # of the mean of the last losses
TEXT = {
    "data.path": sysconfig.get_paths()["stdlib"],
    "data.pattern": "*.py",
    "eval.every": 0,
    "checkpoint.every": 0,
    "mesh.data": 1,
}
TOY = {
    "train.global_batch": 4,
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.d_ff": 128,
    "model.vocab_size": 256,
    "data.seq_len": 32,
    "optim.learning_rate": 1e-3,
}


def arguments(text: str, *, steps: int, is_toy: bool) -> list[str]:
    """Returns the flags of the run with these settings, without its workdir."""
    keys = TEXT | (TOY if is_toy else {})
    keys |= {"train.steps": steps, "train.log_every": LOG_EVERY}
    keys["optim.warmup_steps"] = max(1, steps // 10)
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    return flags + settings.overrides(text)


def train(flags: list[str], workdir: Path) -> tuple[dict[int, float], float]:
    """Returns the logged losses by step, and the seconds of the run. Raises SystemExit."""
    command = [sys.executable, "-m", "meshtrain", "train", "--config=gpt2", *flags]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--num_devices=1", f"--workdir={workdir}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}: {done.stdout[-2000:]}")
    losses = {}
    for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "loss" in row:
            losses[row["step"]] = row["loss"]
    return losses, time.monotonic() - began


def row_of(name: str, losses: dict[int, float], first: dict[int, float], seconds: float) -> dict:
    """Returns the row of the table for a run."""
    found, expected = np.array([*losses.values()]), np.array([*first.values()])
    last = max(1, len(found) // 5)
    return {
        "settings": name,
        "first loss": found[0].item(),
        "mean of the last fifth": found[-last:].mean().item(),
        "difference %": 100 * (found[-last:].mean() / expected[-last:].mean() - 1).item(),
        "largest difference %": 100 * np.abs(found / expected - 1).max().item(),
        "s": seconds,
    }


def faults_of(rows: list[dict]) -> list[str]:
    faults = []
    for row in rows:
        # Not a number is a fault too.
        if not abs(row["difference %"]) <= 100 * LAST_FIFTH:
            faults.append(
                f"{row['settings']}: the last losses differ by {row['difference %']:.3g} %"
            )
        if not row["largest difference %"] <= 100 * LARGEST:
            faults.append(
                f"{row['settings']}: a loss differs by {row['largest difference %']:.3g} %"
            )
    return faults


def known_settings(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the settings that this version knows, and why the others are skipped."""
    known, skipped = [], {}
    for text in args.settings:
        try:
            config = load_config("gpt2", arguments("", steps=args.steps, is_toy=args.toy))
            settings.apply(config, text)
            known.append(text)
        except ConfigError as error:
            skipped[text] = " ".join(str(error).split())
            print(f"skipped: {text}: {skipped[text]}")
    return known, skipped


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--settings", nargs="+", required=True, metavar="KEYS",
                        help='runs, such as "train.remat=full train.unroll=1"')  # fmt: skip
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--toy", action="store_true", help="a tiny model, for any device")
    args = parser.parse_args()
    if args.steps < LOG_EVERY:
        parser.error(
            f"--steps={args.steps}: use {LOG_EVERY} or more, the steps between two logged losses"
        )
    known, skipped = known_settings(args)
    if len(known) < 2:
        sys.exit("this version knows fewer than two of the settings: nothing to compare")
    found = devices.find()
    fields = record.about(args, devices=[found.kind])
    os.environ |= devices.environment()
    curves, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(known):
            name = text or "default"
            flags = arguments(text, steps=args.steps, is_toy=args.toy)
            losses, seconds = train(flags, Path(folder, str(number)))
            curves[name] = losses
            first = next(iter(curves.values()))
            rows.append(row_of(name, losses, first, seconds))
    record.show(rows)
    fields |= {"rows": rows, "skipped": skipped, "losses": curves}
    record.save(args.output, fields, model="loss-curves")
    sys.exit("\n".join(faults_of(rows)) or None)


if __name__ == "__main__":
    main()
