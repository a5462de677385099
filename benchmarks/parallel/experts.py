"""Step time of a mixture of experts relative to a dense model with the same FLOPs per token.

  python benchmarks/parallel/experts.py [--parts one two] [--kinds dense equal ...] [--output=PATH]

one    on one device (one core), one after the other in each round: the dense model, whose
       feed-forward is as wide as all experts of a token together; the mixture; and the mixture with
       dense dispatch, in which every expert computes every token and a mask drops what it was not
       chosen for
two    the same on two processes with one core each: the dense model on data=2, the mixture on
       expert=2; and the mixture on one process. Linux only

Routing of the mixture:

equal    each expert has exactly its share of the rows: the router's choice is replaced
initial  the router chooses, as initialized
skewed   a bias of the router: one expert is chosen by every token, half of the others by none
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import llama, record, workers
from meshtrain.cluster import runtime
from meshtrain.models import mixture
from meshtrain.models.base import STATS_KEY
from meshtrain.ops import experts

# T tokens, k experts per token, n experts, D model, F feed-forward, E all experts, L layers

DENSE, DISPATCH = "dense", "dense dispatch"
ROUTINGS = ("equal", "initial", "skewed")
KINDS = (DENSE, *ROUTINGS, DISPATCH)
BIAS = 100.0  # outweighs every score


def settings(args):
    """Returns the config of a step: the mixture on `expert`, or the dense model on `data`."""
    k, F = args.experts_per_token, args.d_expert
    is_mixture = args.kind != DENSE
    mesh = {"data": 1, "expert" if is_mixture else "data": jax.device_count()}
    c = llama.settings(args, mesh=mesh, train={"global_batch": args.rows})
    c.model.d_ff = k * F
    if is_mixture:
        c.model.update(num_experts=args.experts, experts_per_token=k, d_expert=F)
    return c


def choose_equally(self, scores_BSE: jax.Array) -> jax.Array:
    """Replaces `Mixture._choose`: token t of all has the experts t k ... t k + k - 1, modulo E."""
    (B, S, E), k = scores_BSE.shape, self.c.experts_per_token
    token_BS = jnp.arange(B * S).reshape(B, S)
    return (token_BS[..., None] * k + jnp.arange(k)[None, None]) % E


def dense_dispatch(combine, num_experts, x_TD, experts_Tk, weights_Tk, first, kernels, *, has_bias):
    """Replaces `experts.feed_forward`: each computes every token, most times 0."""
    assert not has_bias
    *projections, down = kernels
    number_n = first + jnp.arange(len(down))
    is_chosen_Tkn = experts_Tk[..., None] == number_n[None, None]
    weights_Tn = jnp.where(is_chosen_Tkn, weights_Tk[..., None], 0).sum(1)
    hidden_nTF = combine(*(jnp.einsum("td,ndf->ntf", x_TD, one) for one in projections))
    return jnp.einsum("ntf,tn,nfd->td", hidden_nTF, weights_Tn, down)


def prepare(args):
    """Returns the compiled step, the initial state, the batch, and a dict of facts."""
    if args.kind == "equal":
        mixture.Mixture._choose = choose_equally
    if args.kind == DISPATCH:
        experts.feed_forward = dense_dispatch
    c = settings(args)
    _, program, batch = llama.program_of(c, jax.devices())
    with program.active():
        compiled = program.compile(batch)
        state = program.initial_state(0)
        if args.kind == "skewed":
            bias = state.params["layers"]["mlp"][STATS_KEY]["bias"]
            value = np.zeros(bias.shape, np.float32)
            value[:, 0], value[:, args.experts // 2 :] = BIAS, -BIAS
            whole = jax.make_array_from_callback(value.shape, bias.sharding, value.__getitem__)
            state.params["layers"]["mlp"][STATS_KEY]["bias"] = whole
        state, metrics = compiled(state, batch)
    facts = {name: np.asarray(one).tolist() for name, one in metrics.items() if "expert" in name}
    return compiled, state, batch, {"kind": args.kind, **facts}


def measure(args, teams: Mapping[str, tuple]) -> dict:
    """Prints and returns the step time of each team, and relative to the first one."""
    size = dict(rounds=args.rounds, steps=args.steps)
    measured = workers.measure_alternately(__file__, teams, **size)
    medians = workers.medians_of(measured["turns"])
    loads = [max(fact.get("expert_load_max", [1.0])) for fact in measured["facts"]]
    rows, base = [], next(iter(teams))
    for key, (cores, *_) in teams.items():
        load, loads = loads[0], loads[len(cores) :]
        row = {"model, routing": key, "processes": len(cores), "ms per step": 1e3 * medians[key]}
        rows.append(row | {f"over {base}": medians[key] / medians[base], "largest load": load})
    record.show(rows)
    return {"workers": measured, "figures": rows}


def measure_one(args, cores: list[int]) -> dict:
    """Prints and returns the step times on one device."""
    return measure(args, {kind: (cores[:1], "--kind", kind) for kind in args.kinds})


def measure_two(args, cores: list[int]) -> dict:
    """Prints and returns the step times on two processes, and of the mixture on one."""
    if len(cores) < 2:
        raise SystemExit("the part two needs two cores; choose others with --parts")
    teams = {kind: (cores[:2], "--kind", kind) for kind in args.kinds}
    for kind in args.kinds[:2]:
        teams[f"{kind}, one process"] = (cores[:1], "--kind", kind)
    return measure(args, teams)


PARTS = {"one": measure_one, "two": measure_two}


def main():
    parser = record.parser(__doc__)
    numbers = dict(experts=8, experts_per_token=2, d_expert=256, rows=8, rounds=5, steps=3)
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for name, value in {**llama.SIZES, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, metavar="KIND")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return workers.serve(lambda: prepare(args))
    runtime.simulate(1)  # this process only waits
    results, cores = record.about(args), sorted(os.sched_getaffinity(0))
    for part in args.parts:
        print(f"\n{part}")
        results[part] = PARTS[part](args, cores)
    model = f"experts-{args.experts}x{args.d_expert}"
    record.save(args.output, results, model="-".join([model, *args.parts]))


if __name__ == "__main__":
    main()
