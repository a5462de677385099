"""Bytes that each device sends in a step, by mesh axis, beside the least that the layout calls for.

  python benchmarks/collectives.py [--layouts NAME ...] [--output=PATH]

A float32 Llama-style model (8.0 M parameters) on eight simulated devices. Nothing is run: the
collectives are read from the compiled step by `meshtrain audit`, whose minimum it is, and which explains
the rest line by line (`python -m meshtrain.analysis.audit --config=...`). Compilers differ: XLA makes an all-reduce
and a slice for CPU of what is a reduce-scatter elsewhere, which the audit counts as the latter, with a
note. For latency and bandwidth of the collectives themselves see bandwidth.py.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import llama, record
from meshtrain.analysis.audit import audit
from meshtrain.cluster import runtime

DEVICES = 8
# The mesh, and where it is not the default the zero stage; all sizes multiply to DEVICES.
LAYOUTS = {
    "data": {"data": 8},
    "fsdp, zero 1": {"fsdp": 8, "zero_stage": 1},
    "fsdp, zero 2": {"fsdp": 8, "zero_stage": 2},
    "fsdp, zero 3": {"fsdp": 8},
    "tensor": {"tensor": 8},
    "data x fsdp": {"data": 2, "fsdp": 4},
    "data x tensor": {"data": 2, "tensor": 4},
    "fsdp x tensor": {"fsdp": 4, "tensor": 2},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "pipeline": {"pipeline": 8},
    "pipeline x data": {"pipeline": 4, "data": 2},
    "pipeline x fsdp": {"pipeline": 4, "fsdp": 2},
    "pipeline x fsdp x tensor": {"pipeline": 2, "fsdp": 2, "tensor": 2},
}


def measure(args, layout: dict[str, int]):
    """Returns the audit of a layout."""
    mesh = {axis: size for axis, size in layout.items() if axis != "zero_stage"}
    train = {"global_batch": args.rows * args.microbatches, "num_microbatches": args.microbatches}
    train["zero_stage"] = layout.get("zero_stage", 3)
    return audit(llama.settings(args, mesh={"data": 1, **mesh}, train=train))


def rows_of(name: str, found) -> list[dict]:
    """Returns a row of each axis, or axes together, that carry something or should."""
    rows = []
    for total in found.axes:
        least = None if total.minimum is None else total.minimum / 1e6
        row = {"layout": name, "over": total.name, "MB": total.bytes / 1e6, "minimum": least}
        rows.append(row | {"ratio": total.ratio, "most beyond it": _most(found, total)[0]})
    return rows


def reasons(audits) -> list[str]:
    """Returns what the tables' last column stands for, each once."""
    found = [_most(one, total) for one in audits for total in one.axes]
    return sorted({f"{what}: {why}" for what, why in found if what})


def _most(found, total) -> tuple[str, str]:
    """Returns for what some axes send most beyond the minimum, and why; nothing below 1 %."""
    excess = [one for one in found.excess if one[0] == total.name and one[3] > 0.01 * total.bytes]
    _, what, why, _ = max(excess, key=lambda one: one[3], default=("", "", "", 0))
    return what, why


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, rows=16, microbatches=4)  # rows of a micro-batch
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS], choices=LAYOUTS, metavar="NAME")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {llama.QUICK}".strip()
    runtime.simulate(DEVICES)
    found, audits = {**record.about(args), "layouts": {}}, {}
    for name in args.layouts:
        audits[name] = audited = measure(args, LAYOUTS[name])
        told = {key: getattr(audited, key) for key in ("mesh", "platform", "excess", "saved")}
        told |= {"axes": [asdict(total) for total in audited.axes], "warnings": audited.warnings}
        found["layouts"][name] = told
        print(f"compiled: {name}", file=sys.stderr, flush=True)
    record.show([row for name, audited in audits.items() for row in rows_of(name, audited)])
    print(*reasons(audits.values()), sep="\n")
    record.save(args.output, found, model=f"collectives-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
