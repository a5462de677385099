"""Bytes that each device sends in a step, by mesh axis, compared with the layout's minimum.

  python benchmarks/parallel/collectives.py [--layouts NAME ...] [--output=PATH]

A float32 Llama-style model (8.0 M parameters) on eight simulated devices. Nothing is run: the
compiled step is audited by the code of `meshtrain audit --config=...`, which defines the minimum
and explains every excess line by line. Compilers differ: on CPU, XLA replaces a reduce-scatter by
an all-reduce and a slice; the audit counts it as a reduce-scatter, with a note. bandwidth.py
measures latency and bandwidth of the collectives themselves.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import llama, record
from meshtrain.cluster import runtime
from meshtrain.tools.audit.audit import audit

DEVICES = 8
# Mesh axes, whose sizes multiply to DEVICES, and the zero stage if it is not the default.
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


def rows_of(name: str, audited) -> list[dict]:
    """Returns a row for each axis, or group of axes, over which bytes are sent or must be sent."""
    rows = []
    for total in audited.axes:
        minimum = None if total.minimum is None else total.minimum / 1e6
        row = {"layout": name, "over": total.name, "MB": total.bytes / 1e6, "minimum": minimum}
        rows.append(
            row | {"ratio": total.ratio, "largest excess": _largest_excess(audited, total)[0]}
        )
    return rows


def reasons(audits) -> list[str]:
    """Returns an explanation of each value of the table's last column."""
    largest = [_largest_excess(audited, total) for audited in audits for total in audited.axes]
    return sorted({f"{what}: {why}" for what, why in largest if what})


def _largest_excess(audited, total) -> tuple[str, str]:
    """Returns purpose and reason of the largest excess over the minimum; "" below 1 %."""
    excess = [
        row for row in audited.extra_bytes if row[0] == total.name and row[3] > 0.01 * total.bytes
    ]
    _, what, why, _ = max(excess, key=lambda row: row[3], default=("", "", "", 0))
    return what, why


def main():
    parser = record.parser(__doc__)
    llama.add_numbers(parser, rows=16, microbatches=4)  # rows per micro-batch
    parser.add_argument("--layouts", nargs="+", default=[*LAYOUTS], choices=LAYOUTS, metavar="NAME")
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {llama.QUICK_FLAGS}".strip()
    runtime.simulate(DEVICES)
    results, audits = {**record.about(args), "layouts": {}}, {}
    for name in args.layouts:
        audits[name] = audited = measure(args, LAYOUTS[name])
        layout = {"mesh": audited.mesh, "platform": audited.platform}
        layout |= {"excess": audited.extra_bytes, "saved": audited.unsent_bytes}
        layout |= {"axes": [asdict(total) for total in audited.axes], "warnings": audited.warnings}
        results["layouts"][name] = layout
        print(f"compiled: {name}", file=sys.stderr, flush=True)
    record.show([row for name, audited in audits.items() for row in rows_of(name, audited)])
    print(*reasons(audits.values()), sep="\n")
    record.save(args.output, results, model=f"collectives-{llama.name_of(args)}")


if __name__ == "__main__":
    main()
