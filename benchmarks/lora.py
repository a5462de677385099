"""Held-out loss and optimizer memory of LoRA, compared with training all parameters.

  python benchmarks/lora.py --start=runs/smollm2-start --data=data/smollm2 [--output=PATH]

--start is a run of SmolLM2, and --data its prepared text: launch/smollm2.sh makes both. All cases
start with the same parameters and see the same batches. The held-out rows are in two parts. Each
method is trained with every one of its learning rates; the first part, for validation, decides
which one is used, and only the second part is reported.
"""

import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain.checkpoint import initial
from meshtrain.cluster import runtime
from meshtrain.config.build import build
from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.data.loader import Loader
from meshtrain.monitor.heldout import make_heldout_metrics
from meshtrain.program import assemble

FULL, LORA = "all parameters", "LoRA"


def settings(args, method: str, rate: float):
    c = load_config(args.config)
    c.train.update(steps=args.steps, global_batch=args.rows, remat="none")
    c.data.update(path=str(args.data), seq_len=args.seq_len, heldout=args.heldout)
    c.checkpoint.init_from = str(args.start)
    c.eval.batches = args.eval_batches
    c.optim.learning_rate = rate
    if method == LORA:
        c.adapter.rank = args.rank
    return c


def train(args, method: str, rate: float, *, is_first: bool) -> dict[str, Any]:
    """Returns a row: losses on both held-out parts, and bytes of the optimizer.

    The first row also has the losses before training.
    """
    began = time.perf_counter()
    cfg = parse(settings(args, method, rate), num_devices=1)
    parts = build(cfg)
    program = assemble(cfg, parts)
    loader = Loader(parts.train_data, program.mesh, cfg.rules, global_batch=args.rows)
    with program.active():
        directory, manifest = initial.find_source(cfg.checkpoint, {}, log=_silent)
        load = functools.partial(
            initial.load_params,
            directory=directory,
            saved=manifest,
            only="*",
            adapter=cfg.adapter,
            event=_silent,
            log=_silent,
        )
        state = program.initial_state(cfg.train.seed, load)
        evaluate_on = {
            name: make_heldout_metrics(program.eval_step, batches, cfg, program.mesh)
            for name, batches in heldout_parts(args, parts.heldout_data).items()
        }
        row = {"method": method, "learning rate": rate}
        if is_first:
            row |= {
                "before": {
                    name: evaluate(state)["eval_loss"] for name, evaluate in evaluate_on.items()
                }
            }
        row |= {"optimizer bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))}
        step = program.compile(loader.peek())
        losses, seconds = [], []
        for _ in range(args.steps):
            start = time.perf_counter()
            state, metrics = step(state, next(loader))
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - start)
        row |= {
            "after": {name: evaluate(state)["eval_loss"] for name, evaluate in evaluate_on.items()}
        }
    loader.close()
    row |= {"losses": losses, "seconds": seconds, "total seconds": time.perf_counter() - began}
    print(f"{method}, learning rate {rate:g}: {row['after']}", file=sys.stderr, flush=True)
    return row


def heldout_parts(args, source) -> dict[str, list]:
    """Returns the batches of both parts; they have no row in common."""
    rows = np.arange(args.rows)
    numbers = {
        "validation": range(args.eval_batches),
        "test": range(args.eval_batches, 2 * args.eval_batches),
    }
    if source.size < 2 * args.eval_batches * args.rows:
        raise SystemExit(
            f"the held-out text has {source.size} rows, fewer than two parts of "
            f"{args.eval_batches} batches"
        )
    return {
        name: [source.read(rows + args.rows * number) for number in part]
        for name, part in numbers.items()
    }


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each method, with the learning rate whose validation loss is lowest."""
    table, before = [], rows[0]["before"]["test"]
    for method in (FULL, LORA):
        best = min(
            (row for row in rows if row["method"] == method),
            key=lambda row: row["after"]["validation"],
        )
        first = table[0] if table else None
        bytes_, loss = best["optimizer bytes"], best["after"]["test"]
        entry = {"trained": method, "learning rate": best["learning rate"]}
        entry |= {"loss before": before, "loss after": loss}
        entry |= {"relative, %": 100 * (loss / first["loss after"] - 1) if first else 0.0}
        entry |= {"optimizer MB": bytes_ / 1e6}
        entry |= {"memory, %": 100 * bytes_ / 1e6 / first["optimizer MB"] if first else 100.0}
        table.append(entry | {"s per step": float(np.median(best["seconds"]))})
    return table


def _silent(*args: Any, **fields: Any) -> None:
    pass


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--start", required=True, type=Path, metavar="WORKDIR")
    parser.add_argument("--data", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--config", default="smollm2")
    for name, value in dict(steps=24, rows=4, seq_len=256, rank=8, eval_batches=6).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--heldout", type=float, default=0.1)
    rates = dict(nargs="+", type=float, metavar="RATE")
    parser.add_argument("--full-rates", default=[1e-4, 2e-4], **rates)
    parser.add_argument("--lora-rates", default=[1e-3, 3e-3], **rates)
    args = parser.parse_args()
    runtime.setup()
    results = record.about(args)
    cases = [(FULL, rate) for rate in args.full_rates] + [(LORA, rate) for rate in args.lora_rates]
    results["rows"] = [
        train(args, *case, is_first=number == 0) for number, case in enumerate(cases)
    ]
    results["figures"] = figures(results["rows"])
    record.show(results["figures"])
    name = f"lora-{args.config}-{args.steps}-steps"
    record.save(args.output, results, model=name)


if __name__ == "__main__":
    main()
