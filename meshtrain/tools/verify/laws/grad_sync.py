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

# Names in order; of each the shape, and the dims that `tensor` shards. Two parameters share blocks.
LEAVES = {
    "one": ((6, 7), ()),
    "scale": ((5,), ()),
    "sharded": ((4, 9), (0,)),
    "two": ((11,), ()),
}


def compressed() -> str | None:
    """Law: all devices get the bits that numpy computes; what a sum lacks is kept; NaN arrives."""
    num_devices = jax.device_count()
    tensor = 2 if num_devices % 2 == 0 and num_devices > 2 else 1
    num_shards = num_devices // tensor
    mesh = make_mesh(data=num_shards, tensor=tensor)

    # Each format once, in two networks if the devices allow; one format also in a single network.
    num_networks = 2 if num_shards % 2 == 0 else 1
    variants = {(wire, num_networks) for wire in BITS} | {("int8", 1)}
    syncs = {(wire, number): _sync(wire, num_shards, number) for wire, number in sorted(variants)}

    random = np.random.default_rng(0)
    steps = [
        {name: random.normal(size=(num_shards, *shape)) for name, (shape, _) in LEAVES.items()}
        for _ in range(STEPS)
    ]
    steps[-1]["two"][num_shards - 1, 3] = np.nan
    weights = np.zeros(num_shards)
    weights[0] = WEIGHT

    grad_shardings, partial_shardings = {}, {}
    for name, (shape, sharded) in LEAVES.items():
        axes = ["tensor" if dim in sharded else None for dim in range(len(shape))]
        grad_shardings[name] = jax.NamedSharding(mesh, jax.P(*axes))
        partial_shardings[name] = jax.NamedSharding(mesh, jax.P("data", *axes))

    def run(steps):
        results = {}
        for variant, sync in syncs.items():
            residual = sync.start_residual({name: leaf[0] for name, leaf in steps[0].items()})
            results[variant] = []
            for sums in steps:
                metrics = Metrics(jnp.asarray(weights), jnp.asarray(weights))
                grads, _, residual = grad_sync.synchronise(
                    sums, metrics, grad_shardings, grad_sync=sync, residual=residual
                )
                results[variant].append((grads, residual))
        return results

    with jax.set_mesh(mesh):
        results = jax.jit(run)(jax.device_put(steps, [partial_shardings] * STEPS))
    for (wire, number), result in results.items():
        fault = _fault(result, steps, wire, number, tensor)
        if fault:
            return f"{wire}, {number} networks: {fault}"
    return None


def _sync(wire: str, num_shards: int, num_networks: int) -> grad_sync.Sync:
    pattern = "hierarchical" if num_networks > 1 else "xla"
    levels = grad_sync.levels_of(pattern, num_shards, num_networks)
    return grad_sync.Sync(("data",), levels, Wire(BITS[wire], BLOCK), ("scale",), feedback=True)


def _fault(results: list, steps: list, wire: str, num_networks: int, tensor: int) -> str | None:
    """Returns the first difference of the (gradients, residual) of all steps from the reference."""
    # What the sums of the last step lacked, for each shard.
    held = {name: np.zeros_like(leaf) for name, leaf in steps[0].items()}
    for step, ((grads, residual), sums) in enumerate(zip(results, steps, strict=True)):
        own = {name: leaf + WEIGHT * held[name] for name, leaf in sums.items()}
        expected, lost = _expected(own, wire, num_networks, tensor)
        held = {name: leaf / WEIGHT for name, leaf in lost.items()}
        for name, wanted in expected.items():
            # Of an exact sum the order of additions may differ.
            tolerance = 1e-12 if name == "scale" else 0.0
            for shard in grads[name].addressable_shards:
                fault = _difference(shard.data, wanted[shard.index], tolerance)
                if fault:
                    return f"step {step}, {name} on {shard.device}: {fault}"
        for name, leaf in residual.items():
            fault = _difference(leaf, held[name])
            if fault:
                return f"step {step}, residual of {name}: {fault}"
        if "scale" in residual:
            return "scale has a residual, but is exact"
    return None if np.isnan(grads["two"][3]) else "a NaN of one shard did not arrive"


def _expected(
    own: dict[str, np.ndarray], wire: str, num_networks: int, tensor: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the sums of `own` over all shards, and what they lack of each shard's part.

    A device adds up and sends what it holds, in blocks that parameters share.
    """
    total = {name: np.zeros(leaf.shape[1:]) for name, leaf in own.items()}
    lost = {name: np.zeros_like(leaf) for name, leaf in own.items()}
    total["scale"] = own["scale"].sum(0)
    # What `tensor` shards has blocks of its own.
    groups = [["one", "two"], ["sharded"]] if tensor > 1 else [["one", "sharded", "two"]]
    num_rows = LEAVES["sharded"][0][0] // tensor
    for names in groups:
        is_sharded = tensor > 1 and "sharded" in names
        for number in range(tensor):
            part = slice(number * num_rows, (number + 1) * num_rows) if is_sharded else slice(None)
            pieces = [own[name][:, part].reshape(len(own[name]), -1) for name in names]
            sums, rest = reference_step.summed(np.hstack(pieces), wire, BLOCK, num_networks)
            ends = np.cumsum([piece.shape[1] for piece in pieces])[:-1]
            sums_by_name = zip(names, np.split(sums, ends), np.split(rest, ends, 1), strict=True)
            for name, name_sums, name_rest in sums_by_name:
                total[name][part] = name_sums.reshape(total[name][part].shape)
                lost[name][:, part] = name_rest.reshape(lost[name][:, part].shape)
    return total, lost


def _difference(actual: Any, expected: np.ndarray, tolerance: float = 0.0) -> str | None:
    """Returns the first element that differs; NaN equals NaN."""
    actual = np.asarray(actual)
    is_near = abs(actual - expected) <= tolerance
    differs = ~(is_near | (np.isnan(actual) & np.isnan(expected)))
    if not differs.any():
        return None
    at = tuple(np.argwhere(differs)[0].tolist())
    return f"{actual[at]:.12g} here, {expected[at]:.12g} in the reference at {at}"
