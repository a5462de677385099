"""Laws of sums of gradients that are sent in narrow formats, on all devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.metrics import Metrics
from meshtrain.parallel import grad_sync
from meshtrain.parallel.grad_sync import BITS, Wire
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools.verify.reference import step as reference_step

BLOCK, STEPS = 4, 2

WEIGHT = 8.0  # of a batch; a power of two, so that the residual's unit is exact

# Names in order; of each the shape, and the dims that tensor shards. Two parameters share blocks.
LEAVES = {
    "one": ((6, 7), ()),
    "scale": ((5,), ()),
    "sharded": ((4, 9), (0,)),
    "two": ((11,), ()),
}


def compressed() -> str | None:
    """Law: all devices get the bits that numpy computes, what a sum lacks is kept, and NaN arrives."""
    num_devices = jax.device_count()
    tensor = 2 if num_devices % 2 == 0 and num_devices > 2 else 1
    num_shards = num_devices // tensor
    mesh = make_mesh(data=num_shards, tensor=tensor)
    networks = 2 if num_shards % 2 == 0 else 1
    chosen = {(wire, networks) for wire in BITS} | {("int8", 1)}
    variants = {(wire, number): _sync(wire, num_shards, number) for wire, number in sorted(chosen)}
    random = np.random.default_rng(0)
    steps = [
        {name: random.normal(size=(num_shards, *shape)) for name, (shape, _) in LEAVES.items()}
        for _ in range(STEPS)
    ]
    steps[-1]["two"][num_shards - 1, 3] = np.nan
    places = {
        name: jax.NamedSharding(
            mesh, jax.P(*("tensor" if d in dims else None for d in range(len(shape))))
        )
        for name, (shape, dims) in LEAVES.items()
    }
    weights = np.zeros(num_shards)
    weights[0] = WEIGHT

    def run(steps):
        found = {}
        for variant, how in variants.items():
            residual, found[variant] = (
                how.start_residual({n: s[0] for n, s in steps[0].items()}),
                [],
            )
            for sums in steps:
                metrics = Metrics(jnp.asarray(weights), jnp.asarray(weights))
                grads, _, residual = grad_sync.synchronise(
                    sums, metrics, places, grad_sync=how, residual=residual
                )
                found[variant].append((grads, residual))
        return found

    with jax.set_mesh(mesh):
        split = {
            name: jax.NamedSharding(mesh, jax.P("data", *one.spec)) for name, one in places.items()
        }
        found = jax.jit(run)(jax.device_put(steps, [split] * STEPS))
    for (wire, number), results in found.items():
        if fault := _fault(results, steps, wire, number, tensor):
            return f"{wire}, {number} networks: {fault}"
    return None


def _sync(wire: str, num_shards: int, num_networks: int) -> grad_sync.Sync:
    pattern = "hierarchical" if num_networks > 1 else "xla"
    levels = grad_sync.levels_of(pattern, num_shards, num_networks)
    return grad_sync.Sync(("data",), levels, Wire(BITS[wire], BLOCK), ("scale",), feedback=True)


def _fault(results: list, steps: list, wire: str, num_networks: int, tensor: int) -> str | None:
    held = {name: np.zeros_like(leaf) for name, leaf in steps[0].items()}
    for step, ((grads, residual), sums) in enumerate(zip(results, steps, strict=True)):
        own = {name: leaf + WEIGHT * held[name] for name, leaf in sums.items()}
        expected, lost = _expected(own, wire, num_networks, tensor)
        held = {name: leaf / WEIGHT for name, leaf in lost.items()}
        for name, wanted in expected.items():
            for shard in grads[name].addressable_shards:
                # Of an exact sum the order of additions may differ.
                tolerance = 1e-12 if name == "scale" else 0.0
                if fault := _differs(shard.data, wanted[shard.index], tolerance):
                    return f"step {step}, {name} on {shard.device}: {fault}"
        for name, leaf in residual.items():
            if fault := _differs(leaf, held[name]):
                return f"step {step}, residual of {name}: {fault}"
        if "scale" in residual:
            return "scale has a residual, but is exact"
    return None if np.isnan(grads["two"][3]) else "a NaN of one shard did not arrive"


def _expected(
    own: dict[str, np.ndarray], wire: str, num_networks: int, tensor: int
) -> tuple[dict, dict]:
    """Returns the sums, and what they lack of each shard's part: a device adds up and sends what it holds."""
    total = {name: np.zeros(leaf.shape[1:]) for name, leaf in own.items()}
    lost = {name: np.zeros_like(leaf) for name, leaf in own.items()}
    total["scale"] = own["scale"].sum(0)
    # What tensor shards has blocks of its own.
    groups = [["one", "two"], ["sharded"]] if tensor > 1 else [["one", "sharded", "two"]]
    for names in groups:
        rows = LEAVES["sharded"][0][0] // tensor
        for number in range(tensor):
            part = slice(number * rows, (number + 1) * rows) if "sharded" in names else slice(None)
            part = part if tensor > 1 else slice(None)
            pieces = [own[name][:, part].reshape(len(own[name]), -1) for name in names]
            sums, rest = reference_step.summed(np.hstack(pieces), wire, BLOCK, num_networks)
            ends = np.cumsum([piece.shape[1] for piece in pieces])[:-1]
            for name, a, b in zip(
                names, np.split(sums, ends), np.split(rest, ends, 1), strict=True
            ):
                total[name][part] = a.reshape(total[name][part].shape)
                lost[name][:, part] = b.reshape(lost[name][:, part].shape)
    return total, lost


def _differs(found: Any, expected: np.ndarray, tolerance: float = 0.0) -> str | None:
    found = np.asarray(found)
    wrong = ~((abs(found - expected) <= tolerance) | (np.isnan(found) & np.isnan(expected)))
    if not wrong.any():
        return None
    at = tuple(np.argwhere(wrong)[0].tolist())
    return f"{found[at]:.12g} here, {expected[at]:.12g} in the reference at {at}"
