"""Audits of a tiny config."""

import jax
import pytest

from meshtrain.tools.audit import audit
from tests.lib.configs import tiny_config

# XLA on CPU sends this above the minimum of a layout; TPU does not.
ONE_BY_ONE = "input gradients summed one by one"


def audited(model=None, rules=(), train=None, schedule=None, **mesh):
    c = tiny_config()
    c.mesh.update({"data": 1, **mesh})
    c.model.update(model or {})
    c.train.update(train or {})
    c.pipeline.update(schedule or {})
    c.rules = (*rules, *c.rules)
    num_devices = 1
    for size in mesh.values():
        num_devices *= size
    return audit.audit(c, devices=jax.devices()[:num_devices])


def assert_explained(result):
    """Every byte above the minimum has a reason."""
    assert result.warnings == []
    for one in result.explanations:
        assert one.extra_bytes >= 0
        assert one.reason or one.extra_bytes <= 0.01 * one.needed_bytes + 0.5
    for total in result.axes:
        extra = sum(num_bytes for axes, _, _, num_bytes in result.extra_bytes if axes == total.name)
        assert total.bytes == pytest.approx(total.minimum + extra, abs=1)
