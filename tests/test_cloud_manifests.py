"""The manifests for EKS with EFA and for TPU slices on GKE.

Processes on this machine stand in for pods.
"""

import math
import os
import signal
import socket
import time

import pytest
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

from meshtrain.cluster import environment, launchers, runtime
from meshtrain.config import load as configfile
from meshtrain.config import parse
from tests.lib.manifests import JOB_SET, Pods, container_of, documents, environ_of, job_of
from tests.lib.paths import ROOT
from tests.lib.rows import newest_step, rows
from tests.lib.tiny_run import assert_losses_equal_uninterrupted, tiny_run

EKS, SLICE, MULTISLICE = (
    ROOT / "launch" / "kubernetes" / name
    for name in ("eks-efa.yaml", "gke-tpu.yaml", "gke-multislice.yaml")
)
TPU = [SLICE, MULTISLICE]


def run_flags(job):
    """Returns the arguments of a run in a manifest: those after --."""
    arguments = container_of(job)["args"]
    return arguments[arguments.index("--") + 1 :]


# ---- EKS ----


def test_the_pods_for_eks_are_those_of_the_job_set_with_efa():
    (job, hosts, _), (other, other_hosts, _) = map(job_of, (EKS, JOB_SET))
    container, other_container = container_of(job), container_of(other)
    limits = container["resources"]["limits"]
    assert limits.pop("vpc.amazonaws.com/efa") == "32" and limits.pop("hugepages-2Mi") == "5120Mi"
    added = {"NCCL_NET", "FI_PROVIDER"}
    assert {one["name"] for one in container["env"]} >= added
    container["env"] = [one for one in container["env"] if one["name"] not in added]
    pod = job["template"]["spec"]
    assert pod.pop("nodeSelector") and pod["tolerations"].pop()["key"] == "aws.amazon.com/efa"
    for one in (container, other_container):
        del one["image"], one["resources"]["requests"]
    assert (job, hosts) == (other, other_hosts)


def test_with_the_variables_for_eks_a_missing_plugin_is_reported(tmp_path):
    job, hosts, _ = job_of(EKS)
    environ = environ_of(job, hosts, 0)
    (tmp_path / "sys/class/infiniband/rdmap0s6/device").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/rdmap0s6/device/vendor").write_text("0x1d0f\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()

    def nothing(name):
        raise OSError(name)

    assert "libnccl-net.so" in runtime.efa_fault(environ, root=tmp_path, load=nothing)
    assert runtime.efa_fault(environ, root=tmp_path, load=len) == ""


# ---- TPU slices ----


def test_the_pods_of_several_slices_are_those_of_one():
    (job, hosts, restarts), (one, one_hosts, one_restarts) = map(job_of, (MULTISLICE, SLICE))
    container = container_of(job)
    container["env"] = [
        variable for variable in container["env"] if not variable["name"].startswith("MEGASCALE_")
    ]
    container["args"] = [flag for flag in container["args"] if "mesh" not in flag]
    assert (job, restarts) == (one, one_restarts) and hosts[:2] == one_hosts
    (document,) = documents(MULTISLICE.name)
    assert document["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }


@pytest.mark.parametrize("path", TPU, ids=lambda path: path.name)
def test_hosts_and_mesh_fit_the_topology(path):
    job, hosts, _ = job_of(path)
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, topology.split("x")))
    each = int(container_of(job)["resources"]["limits"]["google.com/tpu"])
    assert chips == job["completions"] * each
    name, *flags = [flag for flag in run_flags(job) if not flag.startswith("--workdir")]
    config = configfile.load_config(str(ROOT / name.partition("=")[2]), flags)
    num_slices = len(hosts) // job["completions"]
    settings = parse.parse(config, num_devices=chips * num_slices)  # raises ConfigError
    assert settings.mesh.data % num_slices == 0


@pytest.mark.parametrize("path", TPU, ids=lambda path: path.name)
def test_a_pod_has_the_rank_that_jax_gives_it(path, monkeypatch):
    job, hosts, _ = job_of(path)
    monkeypatch.setattr(GkeTpuCluster, "wait_for_coordinator", lambda *arguments: None)
    for number in range(len(hosts)):
        environ = environ_of(job, hosts, number)
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            if path == SLICE:  # jax would ask Google's metadata server
                patch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "")
                patch.setenv("MEGASCALE_NUM_SLICES", "")
                patch.setenv("MEGASCALE_SLICE_ID", "")
            address = GkeTpuCluster.get_coordinator_address(1, str(launchers.TPU_PORT))
            expected = (address, GkeTpuCluster.get_process_count(), GkeTpuCluster.get_process_id())
        found = environment.process_info(environ)
        assert (found.address, found.num_processes, found.process_id) == expected
        assert (found.num_processes, found.process_id) == (len(hosts), number)


class TpuPods(Pods):
    """The pods of TPU slices, without TPUs; all their hosts are this one."""

    def _on_loopback(self):
        found = {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1"}
        if len(self._hosts) > self.job["completions"]:
            found["MEGASCALE_COORDINATOR_ADDRESS"] = "127.0.0.1"
        return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_slices_complete_after_losing_a_pod(tmp_path):
    with socket.socket() as port:
        try:
            port.bind(("127.0.0.1", launchers.TPU_PORT))
        except OSError:
            pytest.skip(f"port {launchers.TPU_PORT} is in use, and the pods can have no other")
    steps, sent, deadline = 40, False, time.monotonic() + 300
    arguments, environ = tiny_run(tmp_path, steps=steps)
    pods = TpuPods(MULTISLICE, [*arguments, "--config.mesh.slices=2"], {**os.environ, **environ})
    restarts = pods.restarts_left
    try:
        while (completed := pods.tick()) is None:
            if not sent and newest_step(tmp_path / "run") >= 15:
                pods.running[3].send_signal(signal.SIGKILL)  # in the second slice
                sent = True
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.1)
    finally:
        pods.end()
    assert completed and sent and len(pods.codes) == 4
    assert pods.restarts_left == restarts - 1  # all pods of both slices are restarted
    restores = [row for row in rows(tmp_path / "run", "events.jsonl") if row["event"] == "restore"]
    assert len(restores) == 1 and restores[0]["step"] >= 10
    assert_losses_equal_uninterrupted(tmp_path, steps=steps)
