"""Memory, roofline and ceiling of MFU of the step, compiled for H200 that this machine lacks.

  bash launch/setup.sh aot-gpu
  python benchmarks/plan/roofline.py [--models NAME] [--sizes 1 8] [--output=PATH] [-- OVERRIDES]

Nothing is run and nothing is measured: each row is `meshtrain audit --target=h200:SIZE` in a
process of its own, so its times follow from the compiled program and the data sheet, by the rule
that is printed below the table. All devices are on fsdp; each has 64 rows of 1,024 tokens (GPT-2)
or one row of 8,192 (Llama). Arguments after -- are overrides of the config, such as
--config.train.remat=dots.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import audits, record

GPT2, LLAMA = ("gpt2", 64, {"seq_len": 1024}), ("llama3", 1, {"seq_len": 8192})
LARGER = {"num_layers": 24, "d_model": 1024, "num_heads": 16, "num_kv_heads": 16, "d_ff": 4096}
LLAMA_1B = {"num_layers": 16, "d_model": 2048, "d_ff": 8192, "tie_embeddings": True}
# Config, rows per device, section data, and what section model changes.
MODELS = {
    "gpt2-124m": (*GPT2, {}),
    "gpt2-350m": (*GPT2, LARGER),
    "llama-1b": (*LLAMA, LLAMA_1B),
    "llama-8b": (*LLAMA, {}),
}


def keys_of(model: str, size: int) -> list[str]:
    """Returns the overrides of a case: all devices on fsdp."""
    _, rows, data, sections = MODELS[model]
    train = {"global_batch": rows * size, "num_microbatches": 1}
    values = {"mesh": {"data": 1, "fsdp": size}, "train": train, "model": sections}
    values["data"] = data | {"packing": "windows"}
    return [f"--config.{s}.{k}={v}" for s, section in values.items() for k, v in section.items()]


def audited(model: str, size: int, overrides: list[str]) -> dict:
    """Returns the figures of one case, or its error."""
    keys = keys_of(model, size) + overrides
    found = audits.audited(MODELS[model][0], f"h200:{size}", keys)
    return {"model": model, "h200": size, "keys": keys} | found


def row_of(case: dict) -> dict:
    """Returns the columns of the table."""
    if "error" in case:
        return {"model": case["model"], "H200": case["h200"], "peak GB": case["error"][:60]}
    roofline, memory = case["roofline"], case["memory"]
    groups = {row["name"]: row["ceiling_seconds"] * 1e3 for row in roofline["rows"]}
    return {
        "model": case["model"],
        "H200": case["h200"],
        "peak GB": memory["peak"] / 1e9,
        **{f"{name} ms": value for name, value in groups.items()},
        "exposed collectives ms": sum(one["exposed"] for one in roofline["transfers"]) * 1e3,
        "MFU at most": roofline["mfu"],
    }


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 8, 64])
    arguments, overrides = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, overrides = arguments[:at], arguments[at + 1 :]
    args = parser.parse_args(arguments)
    result = record.about(args, devices=["h200-compiled-ahead"]) | {"rows": []}
    for model in args.models:
        for size in args.sizes:
            case = audited(model, size, overrides)
            case.pop("extra_bytes", None)
            if "roofline" in case:
                case["roofline"]["operations"] = case["roofline"]["operations"][:20]
            result["rows"].append(case)
            record.show([row_of(case)])
    print(next((case["roofline"]["rule"] for case in result["rows"] if "roofline" in case), ""))
    record.save(args.output, result, model="-".join(["roofline", *args.models]))


if __name__ == "__main__":
    main()
