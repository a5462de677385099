"""Large models on 64 to 1,024 H200: the layout that `plan` chooses, compiled on a host without any.

  bash launch/setup.sh aot-gpu
  python benchmarks/plan/scale.py [--models NAME ...] [--sizes 64 256] [--output=PATH]

Nothing is run and nothing is measured. `meshtrain plan` ranks the layouts, and `meshtrain audit
--target=h200:HOSTSx8` compiles the first; one that needs more memory than a device has is left out,
and the next one is compiled, three at most. Each device has 32,768 tokens a step: 4 rows of 8,192
(dense models), 8 of 4,096 (mixtures, whose routing is taken as balanced). "closed form" is what
`plan` predicts, "compiled" the least time by the rule that is printed below the table. A model is
"too large" where `plan` finds no layout.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import audits, record
from meshtrain import hardware

TOKENS = 32_768  # per device and step
TRIES = 3


class Model(NamedTuple):
    config: str
    seq_len: int
    section: Mapping[str, Any]  # what section model changes


LLAMA_70B = {
    "num_layers": 80,
    "d_model": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "d_ff": 28672,
}
LLAMA_405B = {
    "num_layers": 126,
    "d_model": 16384,
    "num_heads": 128,
    "num_kv_heads": 8,
    "d_ff": 53248,
}
# arXiv 2412.19437, section 4.2. Queries have one matrix here, not two of rank 1,536.
DEEPSEEK_V3 = {
    "num_layers": 61,
    "d_model": 7168,
    "num_heads": 128,
    "num_kv_heads": 128,
    "d_ff": 18432,
    "vocab_size": 129280,
    "num_experts": 256,
    "experts_per_token": 8,
    "d_expert": 2048,
    "num_shared_experts": 1,
    "first_dense_layers": 3,
}
MODELS = {
    "Llama 3.1 8B": Model("llama3", 8192, {}),
    "Llama 3.1 70B": Model("llama3", 8192, LLAMA_70B),
    "Llama 3.1 405B": Model("llama3", 8192, LLAMA_405B),
    "Mixtral 8x7B": Model("mixtral", 4096, {}),
    "Qwen3 30B-A3B": Model("qwen3_moe", 4096, {}),
    "DeepSeek-V3": Model("deepseek_v2_lite", 4096, DEEPSEEK_V3),
}


def keys_of(model: Model, size: int) -> list[str]:
    """Returns the overrides of the config that no layout changes."""
    values = {f"model.{name}": value for name, value in model.section.items()}
    values["data.seq_len"] = model.seq_len
    values["data.packing"] = "windows"
    values["train.global_batch"] = TOKENS // model.seq_len * size
    return [f"--config.{name}={value}" for name, value in values.items()]


def layouts_of(model: Model, size: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what `meshtrain plan` ranks, best first; none where nothing fits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        flags = [f"--config={model.config}", "--device=h200", f"--devices={size}"]
        done = subprocess.run(
            [sys.executable, "-m", "meshtrain", "plan", *flags, f"--output={file}", *keys],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(audits.ROOT), *sys.path])},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stderr.strip().splitlines()[-1])
            return []
        return json.loads(file.read_text(encoding="utf-8"))["layouts"]


def case_of(name: str, size: int) -> dict[str, Any]:
    """Returns the columns of the table for a model on `size` devices."""
    model = MODELS[name]
    keys = keys_of(model, size)
    row: dict[str, Any] = {"model": name, "H200": size}
    for layout in layouts_of(model, size, keys)[:TRIES]:
        chosen = [f"--config.{key}={value}" for key, value in layout["overrides"].items()]
        found = audits.audited(model.config, f"h200:{size // 8}x8", keys + chosen)
        if "error" in found:
            return row | {"layout": found["error"][:120]}
        if found["memory"]["peak"] < hardware.device_named("h200").memory:
            return row | columns_of(layout, found, size)
        peak = found["memory"]["peak"] / 1e9
        print(f"{name} on {size}: {mesh_of(layout)} needs {peak:.0f} GB compiled")
    return row | {"layout": "too large"}


def columns_of(layout: Mapping[str, Any], found: Mapping[str, Any], size: int) -> dict[str, Any]:
    roofline = found["roofline"]
    return {
        "layout": mesh_of(layout),
        "GB": found["memory"]["peak"] / 1e9,
        "closed form s": layout["step_seconds"],
        "compiled s": roofline["seconds"],
        "exposed ms": 1e3 * sum(one["exposed"] for one in roofline["transfers"]),
        "tokens/s per device": TOKENS / roofline["seconds"],
        "MFU at most": roofline["mfu"],
        "rule": roofline["rule"],
    }


def mesh_of(layout: Mapping[str, Any]) -> str:
    """Returns a layout in words, such as fsdp 64, remat none."""
    overrides = layout["overrides"]
    axes = [f"{axis} {size}" for axis, size in layout["mesh"].items() if size > 1]
    of_train = [f"remat {overrides['train.remat']}"]
    if overrides["train.num_microbatches"] > 1:
        of_train.append(f"{overrides['train.num_microbatches']} micro-batches")
    if "pipeline.schedule" in overrides:
        of_train.append(overrides["pipeline.schedule"])
    return ", ".join([*axes, *of_train])


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[64, 256, 1024])
    args = parser.parse_args()
    result = record.about(args, devices=["h200-compiled-ahead"]) | {"rows": []}
    rule = ""
    for name in args.models:
        for size in args.sizes:
            row = case_of(name, size)
            rule = row.pop("rule", rule)
            result["rows"].append(row)
            record.show([row])
            sys.stdout.flush()
    print(rule)
    record.save(args.output, result, model="scale")


if __name__ == "__main__":
    main()
