"""Who a process is, from what launchers set, and that all processes meet."""

import json
import os
import socket
import threading
import time
import zlib

import pytest
from conftest import free_port

from meshtrain.cluster import environment as place
from meshtrain.cluster import rendezvous
from meshtrain.cluster.environment import Place
from meshtrain.errors import ConfigError

JAX = {"JAX_COORDINATOR_ADDRESS": "head:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCH = {"MASTER_ADDR": "master", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-[07-09,12],login",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def where(environ, flags=(None, None, None)):
    found = place.find(environ, flags)
    return found and (found.host, found.port, found.num_processes, found.process_id, found.source)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (JAX, ("head", 1234, 4, 3, "JAX_*")),
        ({**JAX, **TORCH, **SLURM}, ("head", 1234, 4, 3, "JAX_*")),
        (TORCH, ("master", 29500, 4, 1, "torchrun")),
        ({**TORCH, **SLURM}, ("master", 29500, 4, 1, "torchrun")),
        ({**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("master", 29501, 4, 1, "torchrun")),
        (SLURM, ("gpu-07", 61440 + zlib.crc32(b"4100/0") % 4096, 5, 2, "SLURM")),
        ({**SLURM, **OPEN_MPI}, ("gpu-07", 61440 + zlib.crc32(b"4100/0") % 4096, 5, 2, "SLURM")),
        (OPEN_MPI, ("10.96.0.1", 61440 + zlib.crc32(b"1531576320") % 4096, 2, 1, "Open MPI")),
        (
            {**SLURM, "JAX_COORDINATOR_ADDRESS": "[fe80::1]:77"},
            ("fe80::1", 77, 5, 2, "SLURM"),
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "job-0.job:80",
                "JAX_NUM_PROCESSES": "2",
                "JOB_COMPLETION_INDEX": "1",
            },
            ("job-0.job", 80, 2, 1, "Indexed Job"),
        ),
        # One process alone, in a step, a shell of salloc, or the batch script of a job of many tasks.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
        ({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"MASTER_ADDR": "of an image", "WORLD_SIZE": "4"}, None),
    ],
)
def test_the_first_complete_description_counts(environ, expected):
    assert where(environ) == expected


def test_flags_take_the_place_of_variables():
    assert where(JAX, ("other:5", None, 0)) == ("other", 5, 4, 0, "JAX_*")


def test_processes_that_share_a_host_meet_on_loopback():
    on_one = {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert where(on_one)[0] == "127.0.0.1"
    here = place.find({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"})
    assert here.on_one_host and here.num_local == 5


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES set and .*JAX_PROCESS_ID not"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "set JAX_COORDINATOR_ADDRESS="),
        ({**JAX, "JAX_PROCESS_ID": "4"}, "an id from 0 to below it"),
        ({**JAX, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "head"}, "use HOST:PORT"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "head:99999"}, "from 1 to 65535"),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, "Open MPI describes 2 processes and not where"),
    ],
)
def test_a_description_with_a_gap_is_told_in_a_line(environ, told):
    with pytest.raises(ConfigError, match=told) as error:
        place.find(environ)
    assert len(error.value.faults) == 1


@pytest.mark.parametrize(
    ("num_local", "local_id", "variables", "ours", "promised"),
    [
        (1, 0, {"SLURM_GPUS_ON_NODE": "8"}, None, 8),  # jax alone would take GPU 0
        (8, 3, {"SLURM_GPUS_ON_NODE": "8"}, [3], 1),
        (2, 1, {"SLURM_GPUS_ON_NODE": "8"}, [4, 5, 6, 7], 4),
        (8, 3, {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "3"}, None, 1),  # cut up already
        (2, 1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [2, 3], 2),
        (2, 1, {"CUDA_VISIBLE_DEVICES": ""}, None, 0),
        (1, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, None, 0),
    ],
)
def test_processes_of_a_host_share_its_gpus(num_local, local_id, variables, ours, promised):
    one = Place("h", 1, 16, 0, local_id, num_local)
    assert place.local_gpus(one, variables) == ours
    assert place.promised_gpus(one, variables) == promised


def test_gpus_that_cannot_be_shared_evenly_are_told():
    with pytest.raises(ConfigError, match="8 GPUs on this host and 3 processes"):
        place.local_gpus(Place("h", 1, 3, 0, 0, 3), {"SLURM_GPUS_ON_NODE": "8"})


def meet(*descriptions, seconds=1.0, port=None):
    """Returns what each of (id, count) is told, all at once."""
    port, told = port or free_port(), {}

    def one(index, number, count):
        try:
            rendezvous.meet(Place("127.0.0.1", port, count, number), seconds=seconds)
            told[index] = ()
        except ConfigError as error:
            told[index] = error.faults

    threads = [threading.Thread(target=one, args=(i, *d)) for i, d in enumerate(descriptions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [told[i] for i in range(len(descriptions))]


def test_processes_that_are_all_there_meet():
    assert meet((0, 4), (2, 4), (1, 4), (3, 4), seconds=20) == [(), (), (), ()]


def test_who_is_missing_is_told_to_all_who_came():
    told = meet((0, 4), (2, 4))
    assert told[0] == told[1]
    assert told[0][0].startswith("2 of 4 processes arrived, missing [1, 3]")


def test_other_counts_and_numbers_are_told_on_both_sides():
    for told in meet((0, 2), (1, 3), seconds=20):
        assert "one of 2 processes and process 1" in told[0] and "one of 3" in told[0]
    told = meet((0, 3), (1, 3), (1, 3), seconds=20)
    assert all("two processes are number 1" in faults[0] for faults in told)
    assert str(os.getpid()) in told[0][0]


def test_a_port_that_is_taken_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        (told,) = meet((0, 2), port=address[1], seconds=60)
        assert f"127.0.0.1:{address[1]}: process 0 cannot listen there" in told[0]


def test_an_address_where_nobody_listens_is_told():
    (told,) = meet((1, 2))
    assert "missing process 0, which is not there after 1 s: Connection refused" in told[0]


def test_an_address_where_somebody_else_listens_is_told():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (told,) = meet((1, 2), port=other.getsockname()[1], seconds=20)
        thread.join()
    assert "no process of this run" in told[0]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", json.dumps([1]).encode() + b"\n"])
def test_strangers_do_not_disturb(said):
    port, told = free_port(), []
    place_0 = Place("127.0.0.1", port, 2, 0)
    thread = threading.Thread(target=lambda: told.append(rendezvous.meet(place_0, seconds=20)))
    thread.start()
    for _ in range(100):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            time.sleep(0.05)
    with stranger:
        stranger.sendall(said)
        rendezvous.meet(Place("127.0.0.1", port, 2, 1), seconds=20)
    thread.join(30)
    assert told == [None]
