"""Which sets of XLA's options are fastest on this GPU: the line for meshtrain/hardware.toml.

  python benchmarks/gpu/presets.py [--model=gpt2-124m] [--output=PATH]
  JAX_PLATFORMS=cpu python benchmarks/gpu/presets.py --model=gpt2-toy --rounds=1 --steps=2

Times the step of one model with each set, alternating, for at most 2.75 minutes, with
benchmarks/compare/gpu_settings.py, which says how, and prints `presets` for
the section of this GPU, from which train.xla_preset=auto takes them. Another set than today's must
be faster by 1 %: less is noise.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import record
from benchmarks.lib.gpu_models import SHAPES, TOY
from meshtrain import hardware
from meshtrain.hardware import DEFAULT_PRESETS

SETTINGS = Path(__file__).resolve().parents[1] / "compare" / "gpu_settings.py"
CANDIDATES = ("none", "cublas", "cuda_graphs", "cublas,cuda_graphs")
KEY = "train.xla_preset="
GAIN = 1.01  # of another set than today's


def fastest(milliseconds: Mapping[str, float], today: str) -> str:
    """Returns the set with the shortest step, by name; today's unless another is 1 % faster."""
    best = min(milliseconds, key=lambda name: milliseconds[name])
    is_noise = today in milliseconds and milliseconds[today] < GAIN * milliseconds[best]
    return today if is_noise else best


def line_of(saved: Mapping[str, Any]) -> str:
    """Returns the line of hardware.toml that a record of gpu_settings.py leads to."""
    (kind,) = {device.partition(" x ")[0] for device in saved["devices"]}
    known = hardware.device_of(kind)
    today = ",".join(known.presets if known else DEFAULT_PRESETS)
    times = {row["settings"].removeprefix(KEY): row["ms per step"] for row in saved["rows"]}
    best = fastest(times, today)
    names = [] if best == "none" else best.split(",")
    measured = ", ".join(f"{name} {time:.4g} ms" for name, time in times.items())
    versions = saved["versions"]
    where = f"{kind}, {saved['model']}, jax {versions['jax']}, {saved['date'][:10]}"
    return f"presets = {json.dumps(names)}  # {where}: {measured}"


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--model", default="gpt2-124m", choices=[*SHAPES, *TOY])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--minutes", type=float, default=2.75)
    args = parser.parse_args()
    flags = [f"--{name}={getattr(args, name)}" for name in ("model", "rounds", "steps", "minutes")]
    flags += ["--settings", *(KEY + one for one in CANDIDATES)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "settings.json")
        done = subprocess.run([sys.executable, str(SETTINGS), f"--output={file}", *flags])
        if done.returncode:
            sys.exit(done.returncode)
        saved = json.loads(file.read_text(encoding="utf-8"))
    saved["line"] = line_of(saved)
    print(saved["line"])
    record.save(args.output, saved, model=f"presets-{args.model}")


if __name__ == "__main__":
    main()
