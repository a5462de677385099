"""Where Muon's matrices are computed."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

from meshtrain.config.schema import MeshConfig
from meshtrain.configs import default
from meshtrain.optim import muon
from meshtrain.parallel import sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.tools.hlo import collective_ops, hlo

AXES = {
    "up": ("layers", "embed", "mlp"),
    "query": ("layers", "embed", "heads", "head_dim"),
    "out": ("layers", "heads", "head_dim", "embed"),
    "expert": ("layers", "expert", "embed", None),
    "tokens": ("vocab", "embed"),
    "bias": ("layers", "mlp"),
}


def shapes_of(num_layers):
    L = num_layers
    shapes = {"up": (L, 64, 96), "query": (L, 64, 4, 8), "out": (L, 4, 8, 64)}
    shapes |= {"expert": (L, 4, 64, 32), "tokens": (128, 64), "bias": (L, 96)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("num_layers", "layout", "kinds"),
    [
        (8, {"data": 2, "fsdp": 2, "tensor": 2}, {"all-to-all"}),
        (8, {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2}, {"all-to-all"}),
        (3, {"data": 1, "fsdp": 4, "tensor": 2}, {"all-gather"}),
    ],
    ids=str,
)
def test_each_device_orthogonalizes_its_share_and_the_cost_is_that_of_the_program(
    num_layers, layout, kinds
):
    """No collective is inside the iterations; a device computes and receives what `cost` says."""
    rules = default.get_config().rules
    mesh, params = make_mesh(MeshConfig(**layout)), shapes_of(num_layers)
    transform = muon.orthogonalize(AXES, num_steps=5, rms=0.2)
    with jax.set_mesh(mesh), sharding.use_rules(rules):
        shardings = sharding.shardings(AXES, params, rules, mesh)
        updates = jax.tree.map(lambda leaf, one: leaf.update(sharding=one), params, shardings)
        updates |= dict.fromkeys(("tokens", "bias"), optax.MaskedNode())
        shardings |= dict.fromkeys(("tokens", "bias"), optax.MaskedNode())
        run = jax.jit(lambda leaves: transform.update(leaves, None)[0], out_shardings=shardings)
        compiled = run.lower(updates).compile()
    cost = muon.cost(params, AXES, rules, mesh.shape, num_steps=5)
    assert compiled.cost_analysis()["flops"] == pytest.approx(cost.flops, rel=0.1)
    found = collective_ops.find_collectives(hlo.parse(compiled.as_text()), mesh.shape)
    assert {one.kind for one in found} == kinds
    assert sum(one.bytes for one in found) == pytest.approx(cost.num_bytes)


def test_the_cost_on_one_device_is_that_of_its_formula():
    rules = default.get_config().rules
    sizes = dict.fromkeys(("data", "fsdp", "expert", "pipeline", "context", "tensor"), 1)
    shapes = {"up": shapes_of(3)["up"], "bias": shapes_of(3)["bias"]}
    cost = muon.cost(shapes, {name: AXES[name] for name in shapes}, rules, sizes, num_steps=5)
    # Five iterations of three matrices (64, 96); a vector has none.
    assert cost == (5 * 3 * (4 * 64**2 * 96 + 2 * 64**3), 0)


def test_a_route_moves_one_axis_at_a_time_to_complete_matrices_on_every_mesh():
    """An axis is gathered only if no stacked dim can take it, and shards no dim unevenly."""
    rules = default.get_config().rules
    matrix_of_param = {name: one for name, one in muon.matrices(AXES).items() if one}
    meshes = itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4))
    kinds = []
    for num_layers, mesh, name in itertools.product((1, 3, 4, 8), meshes, matrix_of_param):
        sizes = dict(zip(("pipeline", "fsdp", "expert", "tensor"), mesh, strict=True))
        sizes |= {"data": 2, "context": 2}
        matrix, shape = matrix_of_param[name], shapes_of(num_layers)[name].shape
        spec, steps = muon.route(AXES[name], matrix, shape, rules, sizes)
        for step in steps:
            # The innermost axis of a dim of the matrix leaves it ...
            (left,) = [d for d in (*matrix.rows, *matrix.columns) if step.spec[d] != spec[d]]
            assert spec[left] == (*step.spec[left], step.axis)
            # ... for the first stacked dim that it divides, with the axes that are there.
            fitting = [
                dim
                for dim in matrix.stacked
                if shape[dim] % math.prod(sizes[axis] for axis in (*spec[dim], step.axis)) == 0
            ]
            entered = [dim for dim in matrix.stacked if step.spec[dim] != spec[dim]]
            assert entered == fitting[:1] and step.is_gather == (not fitting)
            assert all(step.spec[dim] == (*spec[dim], step.axis) for dim in entered)
            kinds.append(step.is_gather)
            spec = step.spec
        assert not any(spec[dim] for dim in (*matrix.rows, *matrix.columns))
    assert kinds.count(True) > 50 and kinds.count(False) > 50
