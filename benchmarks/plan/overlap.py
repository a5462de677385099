"""Collectives that nothing hides on ten meshes of H200, compiled on a host without any, by preset.

  bash launch/setup.sh aot-gpu
  python benchmarks/plan/overlap.py [--meshes NAME ...] [--presets NAME ...] [--output=PATH]

Nothing is run and nothing is measured: each row is `meshtrain audit --target=h200:SIZE` in a
process of its own, by the rule that is printed below the table. Dense models have one row of 8,192
tokens a device, unless the name says otherwise. "exposed" is the time of collectives with nothing
else between their start and their end in the compiled schedule.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import audits, record


class Case(NamedTuple):
    config: str
    target: str
    keys: Mapping[str, Any]


LLAMA_70B = {
    "model.d_model": 8192,
    "model.num_heads": 64,
    "model.num_kv_heads": 8,
    "model.d_ff": 28672,
    "model.num_layers": 4,
}
EIGHT_LAYERS = {"model.num_layers": 8, "data.seq_len": 8192, "train.remat": "full"}
MESHES = {
    "Llama 8B, fsdp=64": Case(
        "llama3", "h200:64", {"mesh.fsdp": 64, "train.global_batch": 64, "data.seq_len": 8192}
    ),
    "8 layers, fsdp=8": Case(
        "llama3", "h200:8", EIGHT_LAYERS | {"mesh.fsdp": 8, "train.global_batch": 8}
    ),
    "8 layers, fsdp=8, 4 micro-batches": Case(
        "llama3",
        "h200:8",
        EIGHT_LAYERS | {"mesh.fsdp": 8, "train.global_batch": 32, "train.num_microbatches": 4},
    ),
    "8 layers, data=8 between hosts, fsdp=8 inside": Case(
        "llama3",
        "h200:64",
        EIGHT_LAYERS | {"mesh.data": 8, "mesh.fsdp": 8, "train.global_batch": 64},
    ),
    "8 layers, fsdp=64, remat=dots": Case(
        "llama3",
        "h200:64",
        EIGHT_LAYERS | {"mesh.fsdp": 64, "train.global_batch": 64, "train.remat": "dots"},
    ),
    "70B shape, 4 layers, fsdp=64": Case(
        "llama3",
        "h200:64",
        EIGHT_LAYERS | LLAMA_70B | {"mesh.fsdp": 64, "train.global_batch": 64},
    ),
    "70B shape, 4 layers, fsdp=8, tensor=8": Case(
        "llama3",
        "h200:64",
        EIGHT_LAYERS | LLAMA_70B | {"mesh.fsdp": 8, "mesh.tensor": 8, "train.global_batch": 8},
    ),
    "Llama 8B, 4 stages, 1f1b, 8 micro-batches, fsdp=2": Case(
        "llama3",
        "h200:8",
        {
            "mesh.pipeline": 4,
            "mesh.fsdp": 2,
            "pipeline.schedule": "1f1b",
            "train.num_microbatches": 8,
            "train.global_batch": 16,
            "data.seq_len": 8192,
        },
    ),
    "Llama 8B, 2 layers, 128k tokens, context=8": Case(
        "llama3_128k",
        "h200:8",
        {"model.num_layers": 2, "mesh.context": 8, "train.global_batch": 1},
    ),
    "Mixtral, 2 layers, expert=8": Case(
        "mixtral",
        "h200:8",
        {
            "model.num_layers": 2,
            "mesh.expert": 8,
            "train.global_batch": 8,
            "data.seq_len": 4096,
        },
    ),
    "Qwen3-MoE, 2 layers, fsdp=8 between hosts, expert=8 inside": Case(
        "qwen3_moe",
        "h200:64",
        {
            "model.num_layers": 2,
            "mesh.fsdp": 8,
            "mesh.expert": 8,
            "train.global_batch": 128,
            "data.seq_len": 4096,
        },
    ),
    "GPT-2 124M, 64 rows of 1,024, fsdp=8": Case(
        "gpt2", "h200:8", {"mesh.fsdp": 8, "train.global_batch": 512, "data.seq_len": 1024}
    ),
}
COMMON = {
    "mesh.data": 1,
    "train.num_microbatches": 1,
    "data.packing": "windows",
    "optim.moment_dtype": "float32",
}


def keys_of(case: Case, preset: str) -> list[str]:
    """Returns the overrides of the config."""
    values = COMMON | dict(case.keys) | {"train.xla_preset": preset}
    return [f"--config.{name}={value}" for name, value in values.items()]


def row_of(name: str, preset: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of the table."""
    row = {"mesh": name, "preset": preset}
    if "error" in found:
        return row | {"error": found["error"]}
    roofline = found["roofline"]
    exposed = {one["name"]: 0.0 for one in roofline["transfers"]}
    for one in roofline["transfers"]:
        exposed[one["name"]] += 1e3 * one["exposed"]
    return row | {
        "exposed ms": sum(exposed.values()),
        "of all ms": 1e3 * sum(one["seconds"] for one in roofline["transfers"]),
        "by axis": ", ".join(f"{axis} {ms:.3g}" for axis, ms in exposed.items() if ms > 0.05),
        "step ms": 1e3 * roofline["seconds"],
        "MFU at most": roofline["mfu"],
        "peak GB": found["memory"]["peak"] / 1e9,
    }


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--meshes", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--presets", nargs="*", default=["cublas", "auto"])
    args = parser.parse_args()
    result = record.about(args, devices=["h200-compiled-ahead"]) | {"rows": []}
    rule = ""
    for name, case in MESHES.items():
        if not any(name.startswith(start) for start in args.meshes):
            continue
        for preset in args.presets:
            found = audits.audited(case.config, case.target, keys_of(case, preset))
            rule = found.get("roofline", {}).get("rule", rule)
            result["rows"].append(row_of(name, preset, found))
            record.show([result["rows"][-1]])
            sys.stdout.flush()
    print(rule)
    record.save(args.output, result, model="overlap")


if __name__ == "__main__":
    main()
