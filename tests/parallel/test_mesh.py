"""The sizes of the mesh axes, and which devices are neighbours along them."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshtrain.config.schema import MeshConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel import mesh


@pytest.mark.parametrize(
    ("sizes", "num_devices", "filled"),
    [
        ({}, 1, {}),
        ({"data": -1}, 8, {"data": 8}),
        ({"fsdp": -1}, 1, {"fsdp": 1}),
        ({"data": 2, "tensor": -1}, 8, {"data": 2, "tensor": 4}),
        ({"data": 4, "fsdp": 2, "context": -1}, 8, {"data": 4, "fsdp": 2}),
        (
            {"pipeline": 2, "context": 4, "expert": -1},
            24,
            {"pipeline": 2, "context": 4, "expert": 3},
        ),
        ({"fsdp": 2, "tensor": 4}, 8, {"fsdp": 2, "tensor": 4}),
    ],
)
def test_minus_one_is_filled_with_the_remaining_devices(sizes, num_devices, filled):
    assert MeshConfig(**sizes).resolve(num_devices) == MeshConfig(**filled)


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ({"data": -1, "fsdp": -1}, ["mesh.data and mesh.fsdp", "-1", "only one"]),
        ({"data": -1, "fsdp": -1, "tensor": -1}, ["mesh.data and mesh.fsdp and mesh.tensor"]),
        ({"tensor": 0}, ["mesh.tensor=0", "use 1 or more, or -1"]),
        ({"tensor": 0, "data": -1}, ["mesh.tensor=0"]),
        ({"expert": -2}, ["mesh.expert=-2", "use 1 or more, or -1"]),
        ({"fsdp": 3, "tensor": 2}, ["mesh.fsdp=3 x mesh.tensor=2", "6", "8", "simulate_devices=6"]),
        ({"fsdp": 2, "tensor": 8}, ["mesh.fsdp=2 x mesh.tensor=8", "16", "8"]),
        ({}, ["8", "simulate_devices=1", "set one axis to -1"]),
        ({"fsdp": 3, "data": -1}, ["mesh.fsdp=3", "multiple of 3", "mesh.data=-1", "8"]),
        ({"fsdp": 16, "data": -1}, ["mesh.fsdp=16", "multiple of 16", "mesh.data=-1", "8"]),
    ],
)
def test_sizes_that_do_not_fit_eight_devices_are_rejected_with_a_remedy(sizes, messages):
    with pytest.raises(ConfigError) as error:
        MeshConfig(**sizes).resolve(8)
    assert [text for text in messages if text not in str(error.value)] == []


def test_a_mesh_always_has_all_axes_in_order():
    built = mesh.make_mesh(fsdp=4, tensor=2)
    assert built.axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert built.devices.shape == (1, 1, 4, 1, 1, 2)
    assert set(built.axis_types) == {jax.sharding.AxisType.Auto}


def test_the_last_axis_joins_neighbouring_devices():
    built = mesh.make_mesh(pipeline=2, data=2, tensor=2)
    ids = [device.id for device in built.devices.ravel()]
    np.testing.assert_array_equal(ids, [device.id for device in jax.devices()])


def test_a_mesh_of_a_config_fills_in_minus_one():
    assert mesh.make_mesh(MeshConfig(data=-1, tensor=2)).shape["data"] == 4


def test_a_mesh_may_use_a_subset_of_the_devices():
    built = mesh.make_mesh(data=-1, devices=jax.devices()[2:5])
    assert list(built.devices.ravel()) == jax.devices()[2:5]


def test_an_unknown_axis_is_rejected():
    with pytest.raises(TypeError, match="sequence"):
        mesh.make_mesh(sequence=8)


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that building a mesh needs."""

    id: int
    coords: tuple[int, ...]
    platform = "tpu"
    device_kind = "TPU v5"
    core_on_chip = process_index = slice_index = 0


def test_axes_split_the_sides_of_a_torus_that_do_not_match():
    chips = [Chip(i, coords) for i, coords in enumerate(np.ndindex(4, 4, 4))]
    built = mesh.make_mesh(pipeline=2, fsdp=16, tensor=2, devices=chips)
    assert built.devices.shape == (2, 1, 16, 1, 1, 2)
    assert set(built.devices.flat) == set(chips)
    # Along tensor, which is the last axis, devices are neighbours.
    pairs = built.devices.reshape(-1, 2)
    assert {int(np.abs(np.subtract(b.coords, a.coords)).sum()) for a, b in pairs} == {1}


@dataclass(frozen=True)
class HostDevice:
    """A GPU of a cluster. jax numbers its hosts by `slice_index`."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    client = SimpleNamespace(local_device_count=lambda: 1)


def test_neighbours_in_a_mesh_of_several_hosts_share_a_host():
    # Processes of two hosts, numbered alternately.
    devices = [HostDevice(id, slice_index=id % 2) for id in range(8)]
    built = mesh.make_mesh(data=2, tensor=4, devices=devices)
    assert built.axis_types == mesh.make_mesh(data=8).axis_types
    ids = np.vectorize(lambda device: device.id)(built.devices)
    assert ids.reshape(2, 4).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
