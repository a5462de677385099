"""The rank of a process from the launcher's variables, and the rendezvous of all processes."""

import json
import os
import re
import socket
import threading
import time
import zlib

import pytest

from meshtrain.cluster import distributed, environment, launchers, rendezvous
from meshtrain.cluster.launchers import ProcessInfo
from meshtrain.errors import ConfigError
from tests.lib.processes import free_port

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

TPU = {  # the second host of the second of two slices
    "TPU_WORKER_HOSTNAMES": "a,b,c",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}

# The variables of a batch script and of a shell of `salloc`: no step.
BATCH_SCRIPT = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_NTASKS": "8"}


def described(environ, flags=(None, None, None)):
    found = environment.process_info(environ, flags)
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
        # A single process: a step of one task, a shell of salloc, the batch script of a job with
        # many tasks.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (BATCH_SCRIPT, None),
        ({**BATCH_SCRIPT, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, None),
        ({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"JAX_NUM_PROCESSES": "1", **TORCH}, None),
        ({"JAX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "3"}, None),
        ({"JAX_NUM_PROCESSES": "1", "PMI_SIZE": "2", "PMI_RANK": "0"}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "set by an image"}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({"MASTER_ADDR": "set by an image", "MASTER_PORT": "1", "LOCAL_RANK": ""}, None),
        ({"WORLD_SIZE": "", "RANK": "", "TPU_WORKER_HOSTNAMES": "localhost"}, None),
        # TPU slices on GKE.
        (
            {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t", "TPU_WORKER_ID": "1"},
            ("t-0.t", 8476, 2, 1, "JAX_*"),
        ),
        ({"TPU_WORKER_HOSTNAMES": "t-0", "TPU_WORKER_ID": "0"}, None),
        (TPU, ("first", 8476, 6, 4, "JAX_*")),
        ({**TPU, "JAX_NUM_PROCESSES": "1"}, None),
        ({**TPU, **JAX}, ("head", 1234, 4, 3, "JAX_*")),
        # Half of a launcher next to a complete one.
        (
            {"WORLD_SIZE": "7", "PMI_RANK": "2", **SLURM},
            ("gpu-07", 61440 + zlib.crc32(b"4100/0") % 4096, 5, 2, "SLURM"),
        ),
    ],
)
def test_the_first_complete_description_is_used(environ, expected):
    assert described(environ) == expected


def test_flags_override_variables():
    assert described(JAX, ("other:5", None, 0)) == ("other", 5, 4, 0, "JAX_*")


def test_processes_on_one_host_use_loopback():
    one_host = {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert described(one_host)[0] == "127.0.0.1"
    process = environment.process_info(
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    )
    assert process.on_one_host and process.num_local == 5


MORE_TORCH = "MASTER_ADDR, MASTER_PORT"
JAX_TOO = "not enough to join a run; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        # Only a part of a launcher: this process would train alone, next to the others.
        ("JAX_NUM_PROCESSES=2", "JAX_NUM_PROCESSES=2: JAX_PROCESS_ID, JAX_COORDINATOR_ADDRESS are"),
        (
            "JAX_PROCESS_ID=0",
            "JAX_PROCESS_ID=0: JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS are not",
        ),
        ("JAX_COORDINATOR_ADDRESS=a:1", "=a:1: JAX_NUM_PROCESSES, JAX_PROCESS_ID are not set"),
        ("JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID is not set"),
        ("JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0", "JAX_COORDINATOR_ADDRESS not set; set JAX_COORD"),
        ("WORLD_SIZE=2", f"WORLD_SIZE=2: RANK, {MORE_TORCH} are not set; set all, or to run alone"),
        ("RANK=0", f"RANK=0: WORLD_SIZE, {MORE_TORCH} are not set"),
        ("RANK=1 LOCAL_RANK=1", f"RANK=1: WORLD_SIZE, {MORE_TORCH} are not set"),
        ("WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "MASTER_PORT=1: RANK is not set"),
        ("WORLD_SIZE=2 JAX_COORDINATOR_ADDRESS=a:1", "WORLD_SIZE=2: RANK is not set"),
        ("WORLD_SIZE=2 RANK=0", f"WORLD_SIZE=2 RANK=0: torchrun .*: {MORE_TORCH} not set"),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a", "MASTER_PORT not set"),
        (
            "SLURM_NTASKS=2",
            "SLURM_NTASKS=2: SLURM_PROCID, SLURM_STEP_NODELIST are not set; start it",
        ),
        ("SLURM_NPROCS=2", "SLURM_NPROCS=2: SLURM_PROCID, "),
        ("SLURM_PROCID=1", "SLURM_PROCID=1: SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST are not set"),
        ("SLURM_JOB_ID=1 SLURM_NTASKS=2 SLURM_PROCID=0", "SLURM_STEP_NODELIST is not set"),
        (
            "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a SLURM_NTASKS=2 SLURM_PROCID=1",
            "STEP_NODELIST is not",
        ),
        ("SLURM_STEP_NODELIST=a SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID is not set; start it with"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=2: OMPI_COMM_WORLD_RANK, JAX_COORDINATOR"),
        ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK=1: OMPI_COMM_WORLD_SIZE, JAX_COORDINATOR"),
        (
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1",
            "Open MPI describes .* JAX_COORDINATOR_A",
        ),
        (
            "JOB_COMPLETION_INDEX=1",
            "JOB_COMPLETION_INDEX=1: JAX_NUM_PROCESSES, JAX_COORDINATOR_ADD",
        ),
        ("JOB_COMPLETION_INDEX=0 WORLD_SIZE=1", "JOB_COMPLETION_INDEX=0: JAX_NUM_PROCESSES, "),
        ("PMI_SIZE=2 PMI_RANK=0", f"PMI_SIZE=2 PMI_RANK=0: {JAX_TOO}"),
        ("PMIX_RANK=0", f"PMIX_RANK=0: {JAX_TOO}"),
        ("MV2_COMM_WORLD_SIZE=4", f"MV2_COMM_WORLD_SIZE=4: {JAX_TOO}"),
        ("FLUX_TASK_RANK=1", f"FLUX_TASK_RANK=1: {JAX_TOO}"),
        ("MEGASCALE_NUM_SLICES=2", f"MEGASCALE_NUM_SLICES=2: {JAX_TOO}"),
        ("LOCAL_RANK=1", f"LOCAL_RANK=1: {JAX_TOO}"),
        ("LOCAL_WORLD_SIZE=2", f"LOCAL_WORLD_SIZE=2: {JAX_TOO}"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE=2", f"OMPI_COMM_WORLD_LOCAL_SIZE=2: {JAX_TOO}"),
        ("TPU_WORKER_HOSTNAMES=a,b", "TPU_WORKER_HOSTNAMES=a,b: several hosts"),
        ("TPU_WORKER_HOSTNAMES=a,b TPU_WORKER_ID=2", "TPU_WORKER_ID=2: use a number from 0 to 1"),
        ("*TPU MEGASCALE_SLICE_ID=2", "MEGASCALE_SLICE_ID=2: use a number from 0 to 1"),
        ("*TPU MEGASCALE_SLICE_ID=", f"MEGASCALE_NUM_SLICES=2: {JAX_TOO}"),
        ("*TPU MEGASCALE_NUM_SLICES=two", "MEGASCALE_NUM_SLICES=two: use a number"),
        # Halves of two descriptions that contradict each other.
        ("*SLURM JAX_NUM_PROCESSES=2", "JAX_NUM_PROCESSES=2: differs from 5 of SLURM"),
        ("*TORCH JAX_PROCESS_ID=3", "JAX_PROCESS_ID=3: differs from 1 of torchrun"),
        # Values that are no numbers, or out of range: the launcher's own variable is named.
        ("*JAX JAX_PROCESS_ID=4", "JAX_PROCESS_ID=4: use an id from 0 to 3, below JAX_NUM_PROC"),
        ("*JAX JAX_NUM_PROCESSES=two", "JAX_NUM_PROCESSES=two: use a number of processes from 1"),
        ("*JAX JAX_COORDINATOR_ADDRESS=head", "JAX_COORDINATOR_ADDRESS=head: use HOST:PORT"),
        ("*JAX JAX_COORDINATOR_ADDRESS=head:99999", "=head:99999: use HOST:PORT, .* to 65535"),
        ("*JAX JAX_COORDINATOR_ADDRESS=a/b:1", "=a/b:1: use a host name or an IP address"),
        ("*JAX LOCAL_RANK=1", "LOCAL_RANK=1: LOCAL_WORLD_SIZE is not set; set both"),
        ("*TORCH WORLD_SIZE=-4", "WORLD_SIZE=-4: use a number of processes"),
        ("*TORCH WORLD_SIZE=0", "WORLD_SIZE=0: use a number of processes"),
        ("*TORCH WORLD_SIZE=99999999999999999999", "WORLD_SIZE=9+: use a number of processes"),
        ("*TORCH RANK=4", "^RANK=4: use an id from 0 to 3, below WORLD_SIZE=4"),
        ("*TORCH RANK=\N{SUPERSCRIPT TWO}", "^RANK=.: use an id from 0 to 3"),
        ("*TORCH MASTER_PORT=http", "MASTER_PORT=http: use a port"),
        ("*TORCH MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True", "MASTER_PORT=65535: use"),
        ("*TORCH MASTER_ADDR=http://a", "MASTER_ADDR=http://a: use a host name"),
        ("*TORCH LOCAL_RANK=0 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0: use"),
        ("*TORCH LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2: LOCAL_RANK is not set"),
        ("*TORCH LOCAL_RANK=x LOCAL_WORLD_SIZE=2", "LOCAL_RANK=x: use a number"),
        ("*SLURM SLURM_PROCID=5", "SLURM_PROCID=5: use an id from 0 to 4, below SLURM_STEP_NUM_T"),
        ("*SLURM SLURM_NODEID=one", "SLURM_NODEID=one: use a number"),
        ("*SLURM SLURM_NODEID=5", "SLURM_NODEID=5: SLURM_STEP_TASKS_PER_NODE=1.x5. has 5 nodes"),
        ("*SLURM SLURM_LOCALID=1", "SLURM_LOCALID=1: use a number, below SLURM_STEP_TASKS_PER"),
        ("*SLURM SLURM_STEP_TASKS_PER_NODE=1(x999999999)", "SLURM_STEP_TASKS_PER_NODE=1.*: use"),
        ("*OPEN_MPI OMPI_COMM_WORLD_LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_RANK=1: use a number"),
        ("*OPEN_MPI OMPI_MCA_orte_hnp_uri=", "Open MPI describes several processes but not where"),
    ],
)
def test_an_incomplete_description_is_one_fault(environ, message):
    words, variables = environ.split(), {}
    if words[0].startswith("*"):
        variables |= globals()[words.pop(0)[1:]]
    variables |= dict(word.split("=", 1) for word in words)
    with pytest.raises(ConfigError, match=message) as error:
        environment.process_info(variables)
    (fault,) = error.value.faults
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("environ", "flags", "message"),
    [
        ({}, ("a:1", None, None), "--coordinator=a:1: --num_processes, --process_id are not set"),
        ({}, (None, 2, None), "--num_processes=2: --process_id, --coordinator are not set"),
        ({}, ("a:1", 2, 2), "--process_id=2: use an id from 0 to 1, below --num_processes=2"),
        ({}, ("a:1", 0, 0), "--num_processes=0: use a number of processes"),
        ({}, ("foo", 2, 0), "--coordinator=foo: use HOST:PORT"),
        ({}, ("", 2, 0), "--coordinator=: is empty"),
        (SLURM, (None, 2, None), "--num_processes=2: differs from 5 of SLURM; set --num_processes"),
    ],
)
def test_faults_in_flags_name_the_flags(environ, flags, message):
    with pytest.raises(ConfigError, match=message):
        environment.process_info(environ, flags)


def test_a_batch_script_of_a_job_with_many_tasks_is_reported():
    assert "SLURM_NTASKS=8: this process runs alone" in launchers.batch_script_line(BATCH_SCRIPT)
    for environ in ({}, SLURM, {**BATCH_SCRIPT, "SLURM_NTASKS": "1"}):
        assert launchers.batch_script_line(environ) == ""


@pytest.mark.parametrize(
    ("num_local", "local_id", "variables", "indices", "allotted"),
    [
        (1, 0, {"SLURM_GPUS_ON_NODE": "8"}, None, 8),  # jax would use only GPU 0
        (8, 3, {"SLURM_GPUS_ON_NODE": "8"}, [3], 1),
        (2, 1, {"SLURM_GPUS_ON_NODE": "8"}, [4, 5, 6, 7], 4),
        # The launcher has divided the GPUs.
        (8, 3, {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "3"}, None, 1),
        (2, 1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [2, 3], 2),
        (2, 1, {"CUDA_VISIBLE_DEVICES": ""}, None, 0),
        (1, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, None, 0),
    ],
)
def test_processes_of_a_host_share_its_gpus(num_local, local_id, variables, indices, allotted):
    process = ProcessInfo("h", 1, 16, 0, local_id, num_local)
    assert environment.local_gpus(process, variables) == indices
    assert environment.num_allotted_gpus(process, variables) == allotted


@pytest.mark.parametrize(
    ("num_local", "local_id", "variables", "most", "indices"),
    [
        (1, 0, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, [0, 1]),
        (2, 1, {"SLURM_GPUS_ON_NODE": "8"}, 2, [4, 5]),
        (2, 1, {"SLURM_GPUS_ON_NODE": "8"}, 5, [4, 5, 6, 7]),  # reported when jax has started
        (2, 1, {"CUDA_VISIBLE_DEVICES": ""}, 2, None),
    ],
)
def test_a_process_uses_the_first_of_its_gpus(num_local, local_id, variables, most, indices):
    process = ProcessInfo("h", 1, 16, 0, local_id, num_local)
    assert environment.local_gpus(process, variables, most) == indices


def test_a_variable_does_not_make_gpus(monkeypatch):
    monkeypatch.setattr(environment, "DRIVER_FILES", "no-driver*")
    assert environment.num_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 0
    monkeypatch.setattr(environment, "DRIVER_FILES", "null")
    assert environment.num_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 2


def test_gpus_that_cannot_be_shared_evenly_are_rejected():
    with pytest.raises(ConfigError, match="8 GPUs on this host and 3 processes"):
        environment.local_gpus(ProcessInfo("h", 1, 3, 0, 0, 3), {"SLURM_GPUS_ON_NODE": "8"})


def rendezvous_faults(*descriptions, seconds=1.0, port=None):
    """Runs a rendezvous of processes, each given as (id, count); returns the faults of each one."""
    port, faults = port or free_port(), {}

    def one(index, number, count):
        try:
            process = ProcessInfo("127.0.0.1", port, count, number)
            rendezvous.wait_for_all(process, seconds=seconds)
            faults[index] = ()
        except ConfigError as error:
            faults[index] = error.faults

    threads = [threading.Thread(target=one, args=(i, *d)) for i, d in enumerate(descriptions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [faults[i] for i in range(len(descriptions))]


def test_no_faults_if_all_processes_arrive():
    assert rendezvous_faults((0, 4), (2, 4), (1, 4), (3, 4), seconds=20) == [(), (), (), ()]


def test_missing_processes_are_reported_to_all_that_arrived():
    faults = rendezvous_faults((0, 4), (2, 4))
    assert faults[0] == faults[1]
    assert faults[0][0].startswith("2 of 4 processes arrived, missing [1, 3]")
    assert "or set JAX_NUM_PROCESSES to the number that you start, now 4" in faults[0][0]


def test_conflicting_counts_and_ids_are_reported_on_both_sides():
    for faults in rendezvous_faults((0, 2), (1, 3), seconds=20):
        assert "one of 2 processes and process 1" in faults[0] and "one of 3" in faults[0]
    by_process = rendezvous_faults((0, 3), (1, 3), (1, 3), seconds=20)
    assert all("two processes have number 1" in faults[0] for faults in by_process)
    assert str(os.getpid()) in by_process[0][0]


def test_a_port_in_use_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        (faults,) = rendezvous_faults((0, 2), port=address[1], seconds=60)
        assert f"127.0.0.1:{address[1]}: process 0 cannot listen there" in faults[0]


def test_an_address_where_nothing_listens_is_reported():
    (faults,) = rendezvous_faults((1, 2))
    assert "missing process 0, not reached within 1 s: Connection refused" in faults[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_of_variables_that_may_be_stale_names_them(rank, capfd, monkeypatch):
    """The address is made from several of them; on one host it is loopback."""
    monkeypatch.setattr(rendezvous, "LOG_EVERY", 0.1)
    port = free_port()
    variables = f"WORLD_SIZE=2 RANK={rank} MASTER_ADDR=old MASTER_PORT={port}"
    environ = dict(pair.split("=") for pair in variables.split())
    environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    process = environment.process_info(environ)
    assert process.address == f"127.0.0.1:{port}"
    with pytest.raises(ConfigError) as error:
        rendezvous.wait_for_all(process, seconds=1)
    (fault,) = error.value.faults
    waiting = capfd.readouterr().err
    assert f"{variables} (torchrun)" in waiting
    assert fault.endswith("to run alone, set JAX_NUM_PROCESSES=1")
    if rank:
        assert fault.startswith(f"{variables} (torchrun): 127.0.0.1:{port}: missing process 0, not")


def test_an_address_where_another_program_listens_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (faults,) = rendezvous_faults((1, 2), port=other.getsockname()[1], seconds=20)
        thread.join()
    assert "not a process of this run" in faults[0]


@pytest.mark.parametrize(
    "received", [b"", b"GET / HTTP/1.1\r\n\r\n", json.dumps([1]).encode() + b"\n"]
)
def test_connections_of_other_programs_are_ignored(received):
    port, results = free_port(), []
    first, second = (ProcessInfo("127.0.0.1", port, 2, number) for number in range(2))

    def wait_as_process_0():
        results.append(rendezvous.wait_for_all(first, seconds=20))

    thread = threading.Thread(target=wait_as_process_0)
    thread.start()
    for _ in range(100):
        try:
            other = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            time.sleep(0.05)
    with other:
        other.sendall(received)
        rendezvous.wait_for_all(second, seconds=20)
    thread.join(30)
    assert results == [None]


def test_processes_with_different_versions_report_the_difference(monkeypatch):
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda found: [found, {**found, "jax": "0.1"}])
    here = distributed.versions()["jax"]
    line = f"jax differs between processes: {here} on process 0, 0.1 on process 1; use the same"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        distributed.check_same({"train": {"steps": 3}})
