"""Held-out loss of training with each sync.dtype, compared with float32, for several seeds.

  python benchmarks/parallel/wire_loss.py [--steps=300] [--seeds 0 1 2] [--output=PATH]

The quickstart's model and data on eight simulated devices, mesh.data=8, so that gradients of eight
batch shards are sent. A seed decides the initial parameters and the order of the data; the schedule
of the learning rate ends after --steps. All cases of a seed start with the same parameters and see
the same batches.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from benchmarks.lib import record
from meshtrain.cluster import runtime
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import quickstart
from meshtrain.data.loader import Loader
from meshtrain.monitor.heldout import make_heldout_metrics
from meshtrain.program import assemble

DEVICES = 8
EXACT = "float32"
CASES = {
    EXACT: {},
    # Only the order of additions differs: by how much rounding alone changes the loss.
    "float32, ring": {"pattern": "ring"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "int4, feedback": {"dtype": "int4", "feedback": "on"},
    "int4, feedback, block 64": {"dtype": "int4", "feedback": "on", "block_size": 64},
    "int4, no feedback": {"dtype": "int4", "feedback": "off"},
}


def settings(args, case: str, seed: int):
    c = quickstart.get_config()
    c.train.update(steps=args.steps, seed=seed)
    c.optim.warmup_steps = min(c.optim.warmup_steps, args.steps // 4)
    c.eval.batches = args.eval_batches
    c.model.update(num_layers=args.layers, d_model=args.width, d_ff=args.width * 8 // 3)
    c.mesh.data = DEVICES
    c.sync.update(CASES[case])
    return c


def train(args, case: str) -> list[dict[str, Any]]:
    """Returns a row for each seed: the held-out loss after the last step, and some training losses.

    All seeds run the program of the first one: the seed of its stochastic rounding is the same.
    """
    rows, program, step = [], None, None
    for seed in args.seeds:
        began = time.perf_counter()
        cfg = parse(settings(args, case, seed), num_devices=DEVICES)
        parts = build(cfg)
        program = program or assemble(cfg, parts)
        loader = Loader(
            parts.train_data, program.mesh, cfg.rules, global_batch=cfg.train.global_batch
        )
        with program.active():
            state = program.initial_state(seed)
            step = step or program.compile(loader.peek())
            losses = []
            for number in range(args.steps):
                state, metrics = step(state, next(loader))
                if number % 10 == 9:
                    losses.append(float(metrics["loss"]))
            evaluate = make_heldout_metrics(
                program.eval_step, parts.heldout_data, cfg, program.mesh
            )
            heldout = evaluate(state)["eval_loss"]
            row = {"case": case, "seed": seed, "heldout": heldout, "losses": losses}
        loader.close()
        rows.append(row | {"seconds": time.perf_counter() - began})
        print(f"{case}, seed {seed}: {rows[-1]['heldout']:.4f}", file=sys.stderr, flush=True)
    return rows


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each case: its loss for each seed, relative to float32 in percent."""
    loss = {(row["case"], row["seed"]): row["heldout"] for row in rows}
    seeds, table = [*dict.fromkeys(seed for _, seed in loss)], []
    for case in dict.fromkeys(case for case, _ in loss):
        differences = [100 * (loss[case, seed] / loss[EXACT, seed] - 1) for seed in seeds]
        entry = {
            "wire": case,
            "held-out loss": sum(loss[case, seed] for seed in seeds) / len(seeds),
        }
        entry |= {f"seed {seed}, %": one for seed, one in zip(seeds, differences, strict=True)}
        table.append(entry | {"mean, %": sum(differences) / len(seeds)})
    return table


def main():
    parser = record.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES, metavar="CASE")
    parser.add_argument("--eval-batches", type=int, default=32)
    for name, value in dict(layers=4, width=192).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    if args.cases[0] != EXACT:
        parser.error(
            f"--cases {args.cases[0]}: start with {EXACT}, which the others are compared to"
        )
    runtime.simulate(DEVICES)
    runtime.setup()
    results = record.about(args)
    results["rows"] = [row for case in args.cases for row in train(args, case)]
    results["figures"] = figures(results["rows"])
    record.show(results["figures"])
    record.save(
        args.output, results, model=f"wire-loss-{args.layers}x{args.width}-{args.steps}-steps"
    )


if __name__ == "__main__":
    main()
