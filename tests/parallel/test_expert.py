"""Which mesh axes shard the tokens and the experts of a mixture, by the rules."""

import jax
import pytest

from meshtrain.configs import default
from meshtrain.parallel import expert, mesh, sharding

RULES = tuple(default.get_config().rules)


def larger_than_1(axes, shape):
    return tuple(axis for axis in axes if shape[axis] > 1)


@pytest.mark.parametrize(
    ("sizes", "groups", "sequence", "gathered", "others"),
    [
        (dict(data=8), ("data",), (), (), ()),
        (dict(expert=8), (), (), ("expert",), ()),
        (dict(data=2, expert=4), ("data",), (), ("expert",), ()),
        (dict(data=2, fsdp=2, expert=2), ("data", "fsdp"), (), ("expert",), ()),
        (dict(expert=4, tensor=2), (), (), ("expert",), ("tensor",)),
        (dict(data=2, context=2, expert=2), ("data",), ("context",), ("expert",), ()),
        (dict(context=4, tensor=2), (), ("context",), (), ("tensor",)),
    ],
    ids=str,
)
def test_tokens_are_gathered_along_axes_of_batch_and_experts(
    sizes, groups, sequence, gathered, others
):
    built = mesh.make_mesh(**{"data": 1} | sizes)
    with jax.set_mesh(built), sharding.use_rules(RULES):
        found = expert.layout(num_rows=16, length=32, num_experts=8)
    for axes, expected in [
        (found.groups, groups),
        (found.sequence, sequence),
        (found.gathered, gathered),
        (found.others, others),
        (found.experts, (*gathered, *others)),
        (found.outside, (*groups, *sequence)),
    ]:
        assert larger_than_1(axes, built.shape) == expected
    assert found.num_shards == sizes.get("expert", 1) * sizes.get("tensor", 1)
    assert found.num_batch_groups == sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert found.num_sequence_groups == sizes.get("context", 1)


@pytest.mark.parametrize(
    "rules",
    [
        [("batch", ("expert", "data")), ("expert", "expert")],
        [("batch", ("data", "expert")), ("expert", ("tensor", "expert"))],
    ],
    ids=["outer axis of the batch", "inner axis of the experts"],
)
def test_tokens_are_not_gathered_along_other_axes(rules):
    built = mesh.make_mesh(data=2, expert=2, tensor=2)
    with jax.set_mesh(built), sharding.use_rules([*rules, ("seq", None)]):
        found = expert.layout(num_rows=16, length=32, num_experts=8)
    assert found.gathered == () and found.num_gathered == 1
    assert "expert" in found.others and found.groups == ("data",)
