"""How wrong the planner is about meshtrain's own programs: compiled ones, predicted again.

  python benchmarks/plan/compiled_steps.py [--compile NAME ...] [--output=PATH]

compiled_steps.csv has a row for each step that `meshtrain audit --target` compiled: its config, its
keys, the bytes at the peak, and the seconds of collectives that no computation hides, by two
versions of jax. Next to them are the predictions, with the links at their full rate, as the rule of
the audit has them. --compile compiles steps again with the jax that is installed; it needs the
extra aot-gpu. Nothing is measured.
"""

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib import record
from meshtrain import hardware
from meshtrain.config.load import load_config
from meshtrain.config.parse import on_devices, parse
from meshtrain.tools.plan import compiled, from_config, memory
from meshtrain.tools.plan.cost import step_cost
from meshtrain.tools.plan.machine import LINK, NETWORK, Machine
from meshtrain.tools.plan.predict import layout_of

STEPS = Path(__file__).with_name("compiled_steps.csv")
# Parts of the cost that are communication.
SENT = ("fsdp", "gradients", "tensor", "context", "expert", "sends")


def rows(path: Path = STEPS) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def prediction(row: dict[str, str]) -> tuple[dict[str, Any], float, float]:
    """Returns the config of a row, and its predicted bytes at the peak and exposed seconds."""
    cfg = parse(load_config(row["config"])).with_keys(keys_of(row))
    hosts, _, per_host = row["target"].rpartition(":")[2].rpartition("x")
    num_devices = int(hosts or 1) * int(per_host)
    plan_input = from_config.plan_input(cfg, platform="gpu")
    resolved = on_devices(cfg, num_devices)
    layout = layout_of(resolved)
    device = hardware.devices()[row["target"].partition(":")[0]]
    device = dataclasses.replace(device, link=device.link / LINK, network=device.network / NETWORK)
    machine = Machine(device, num_devices, int(per_host))
    parts = step_cost(plan_input.work, layout, machine, plan_input.seq_len).parts
    state = plan_input.stored.bytes(layout)
    size = memory.parts(plan_input.work, layout, state, plan_input.seq_len)
    return resolved.to_dict(), sum(size.values()), sum(parts.get(name, 0.0) for name in SENT)


def keys_of(row: dict[str, str]) -> dict[str, Any]:
    pairs = [pair.split("=", 1) for pair in row["keys"].split()]
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}


def comparison(row: dict[str, str]) -> dict[str, Any]:
    """Returns the columns of a row of the table."""
    _, size, exposed = prediction(row)
    columns = {"step": row["name"], "GB": size / 1e9}
    for version in ("0.12", "0.10"):
        found = float(row[f"bytes {version}"])
        columns |= {f"GB, jax {version}": found / 1e9, f"% {version}": 100 * (size / found - 1)}
    columns["ms exposed"] = 1e3 * exposed
    for version in ("0.12", "0.10"):
        columns[f"jax {version}, ms"] = 1e3 * float(row[f"exposed {version}"])
    return columns | {"of ms": 1e3 * float(row["seconds 0.12"])}


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--compile", nargs="*", metavar="NAME", default=[])
    args = parser.parse_args()
    results = record.about(args, devices=["h200-compiled-ahead"])
    results["steps"] = [comparison(row) for row in rows()]
    record.show(results["steps"])
    for row in rows():
        if row["name"] not in args.compile:
            continue
        audit, fault = compiled.audited(prediction(row)[0], row["target"])
        if not audit:
            print(f"{row['name']}: {fault}")
            continue
        roofline = audit["roofline"]
        exposed = sum(one["exposed"] for one in roofline["transfers"])
        print(
            f"{row['name']}: {audit['memory']['peak']} bytes, {exposed} of "
            f"{roofline['seconds']} s exposed"
        )
    record.save(args.output, results, model="plan-compiled")


if __name__ == "__main__":
    main()
