"""`mesh.slices` splits `data` into parts between which the network is slow.

Everything else stays within a part.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.config.schema import AXES, MeshConfig
from meshtrain.errors import ConfigError
from meshtrain.parallel import mesh as meshes


@dataclass(frozen=True)
class Device:
    """The attributes of a device that building a mesh reads."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str = "any"
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0
    num_local: int = 1

    @property
    def client(self):
        return SimpleNamespace(local_device_count=lambda: self.num_local)


def gpus(num_hosts, per_host=4, order=None):
    """Returns the GPUs of a cluster, with a process each.

    For these jax numbers hosts by `slice_index`.
    """
    found = [Device(n, n, n // per_host, "gpu") for n in range(num_hosts * per_host)]
    return [found[n] for n in order] if order is not None else found


def tpus(num_slices, side=4):
    """Returns the chips of several slices, each a torus, in an order that mixes the slices."""
    return [
        Device(n * side * side + k, 0, n, "tpu", "TPU v5 lite", (x, y, 0))
        for k, (x, y) in enumerate(np.ndindex(side, side))
        for n in range(num_slices)
    ]


def network(devices=None, **sizes):
    mesh = meshes.make_mesh(MeshConfig(**sizes), devices=devices)
    return mesh, meshes.network_of(mesh, sizes.get("slices", 1))


@pytest.mark.parametrize("num_slices", [2, 4])
def test_simulated_slices_are_contiguous_parts_of_the_devices(num_slices):
    mesh, found = network(data=4, tensor=2, slices=num_slices)
    ids = np.vectorize(lambda device: device.id)(mesh.devices).ravel()
    np.testing.assert_array_equal(ids, np.arange(8))
    np.testing.assert_array_equal(found.slices.ravel(), np.arange(8) * num_slices // 8)
    assert found.num_slices == num_slices
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_stages_of_a_pipeline_are_within_a_slice_although_their_axis_comes_before_data():
    mesh, found = network(pipeline=2, data=2, fsdp=2, slices=2)
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids[:, 0].ravel().tolist() == [0, 1, 2, 3]
    assert ids[:, 1].ravel().tolist() == [4, 5, 6, 7]
    assert {axis: found.link_along(axis) for axis in ("pipeline", "data", "fsdp")} == {
        "pipeline": "host",
        "data": "slices",
        "fsdp": "host",
    }


def test_slices_of_gpus_are_groups_of_hosts():
    order = np.random.default_rng(0).permutation(16)
    mesh, found = network(gpus(4, order=order), data=2, fsdp=4, tensor=2, slices=2)
    hosts = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert hosts.reshape(2, 8).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 3, 3, 3, 3]]
    links = {axis: found.link_along(axis) for axis in ("data", "fsdp", "tensor")}
    assert links == {"data": "slices", "fsdp": "hosts", "tensor": "host"}
    assert found.link([0, 1]) == "host" and found.link([0, 4]) == "hosts"
    assert found.link([0, 4, 8]) == "slices" and found.num_slices == 2


@pytest.mark.parametrize("said", [1, 2])
def test_tpu_slices_are_found_without_a_setting(said):
    mesh, found = network(tpus(2), data=2, fsdp=8, tensor=2, slices=said)
    numbers = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert [{*half.ravel().tolist()} for half in np.split(numbers, 2, axis=1)] == [{0}, {1}]
    assert found.num_slices == 2 and found.link_along("data") == "slices"
    assert found.link_along("fsdp", "tensor") == "host"
    # Along tensor, the last axis, chips are neighbours of the torus, whose side of 4 wraps around.
    for first, second in mesh.devices.reshape(-1, 2):
        steps = np.abs(np.subtract(second.coords, first.coords))
        assert np.minimum(steps, 4 - steps).sum() == 1


@pytest.mark.parametrize(
    ("sizes", "links"),
    [
        (dict(pipeline=2, fsdp=16), {"pipeline": "slices", "fsdp": "host"}),
        (dict(fsdp=32), {"fsdp": "slices"}),
        (dict(pipeline=2, data=2, fsdp=8), {"pipeline": "host", "data": "slices"}),
    ],
)
def test_tpu_slices_that_do_not_divide_data_split_the_next_axis(sizes, links):
    _, found = network(tpus(2), **sizes)
    assert {axis: found.link_along(axis) for axis in links} == links
    assert found.num_slices == (2 if "data" in sizes else 1)


@pytest.mark.parametrize(
    ("devices", "sizes", "fault"),
    [
        (None, dict(data=8, slices=3), "mesh.slices=3 does not divide mesh.data=8; use "
                                       "mesh.slices=2 or 4, or mesh"),
        (None, dict(data=1, fsdp=8, slices=2), "mesh.slices=2 does not divide mesh.data=1; use "
                                               "mesh.slices=1, or mesh"),
        (None, dict(data=8, slices=0), "mesh.slices=0: use 1 or more"),
        (gpus(3), dict(data=12, slices=2), "splits a host: there are 3, with 12 devices; use "
                                           "mesh.slices=1 or 3"),
        (tpus(2), dict(data=32, slices=4), "mesh.slices=4: the TPUs form 2 slices; use "
                                           "mesh.slices=2"),
        (tpus(1), dict(data=16, slices=2), "mesh.slices=2: the TPUs form 1 slice; use "
                                           "mesh.slices=1"),
    ],
)  # fmt: skip
def test_slices_that_the_devices_cannot_form_are_one_line(devices, sizes, fault):
    with pytest.raises(ConfigError) as error:
        network(devices, **sizes)
    assert fault in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["slices=3"], "=3 does not divide mesh.data=8; use mesh.slices=2 or 4, or mesh.data=6 or "
                       "9"),
        (["slices=0"], "=0: use 1 or more"),
        (["slices=2", "data=1", "fsdp=8"], "=2 does not divide mesh.data=1; use mesh.slices=1, or "
                                           "mesh.data=2"),
        (["slices=two"], "=two: not of type int, like 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_exit_code_2_and_one_line(flags, line, capsys):
    flags = [f"--config.mesh.{flag}" for flag in flags]
    assert app.main("audit", ["--config=quickstart", *flags]) == 2
    (fault,) = capsys.readouterr().err.splitlines()
    assert fault.removeprefix("--config.") == f"mesh.slices{line}"


def test_hosts_of_a_described_gpu_cluster_are_its_processes():
    """Without devices of its own, jax's client of a topology gives all GPUs slice_index 0."""
    devices = [Device(n, n // 8, 0, "gpu", num_local=0) for n in range(16)]
    _, found = network(devices, data=2, fsdp=8)
    assert found.link_along("data") == "hosts" and found.link_along("fsdp") == "host"
    # In a cluster that is there, they would be 16 GPUs of one host, with a process for every 8.
    _, found = network([replace(one, num_local=8) for one in devices], data=2, fsdp=8)
    assert found.link_along("data") == "host"


def test_the_slowest_link_of_several_axes_counts():
    _, found = network(data=2, fsdp=2, tensor=2, slices=2)
    assert [found.link_along(axis) for axis in AXES] == ["host", "slices", *["host"] * 4]
    assert found.link_along("fsdp", "tensor") == "host"
    assert found.link_along("data", "tensor") == "slices"
    # Of three groups of two devices on hosts of three, the middle one crosses.
    _, found = network(gpus(2, per_host=3), data=3, fsdp=2)
    assert found.link_along("fsdp") == "hosts"
