"""The Kubernetes manifests of launch/, and local processes in place of their pods."""

import re
import secrets
import signal
import socket
import subprocess
import sys
import time

import yaml

from tests.lib.paths import ROOT

SECRET = secrets.token_hex(32)
JOB, JOB_SET = (ROOT / "launch" / "kubernetes" / name for name in ("job.yaml", "jobset.yaml"))


# ---- contents of the manifests ----


def documents(name):
    return list(yaml.safe_load_all((ROOT / "launch" / "kubernetes" / name).read_text()))


def job_of(path):
    """Returns the Job, the host names of all its pods, and how often a JobSet restarts all."""
    *services, top = documents(path.name)
    if top["kind"] == "Job":
        (service,) = services
        job, name, domain = top["spec"], top["metadata"]["name"], service["metadata"]["name"]
        assert job["template"]["spec"].pop("subdomain") == domain
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
        names, restarts = [name], 0
    else:
        (group,) = top["spec"]["replicatedJobs"]
        job, domain = group["template"]["spec"], top["metadata"]["name"]
        names = [f"{domain}-{group['name']}-{number}" for number in range(group["replicas"])]
        restarts = top["spec"]["failurePolicy"]["maxRestarts"]
    hosts = [f"{name}-{number}.{domain}" for name in names for number in range(job["completions"])]
    return job, hosts, restarts


def container_of(job):
    (container,) = job["template"]["spec"]["containers"]
    return container


def environ_of(job, hosts, number):
    """Returns the variables of pod `number` of all.

    The value of a Secret is another for each run of the tests.

    JobSet sets the labels, Kubernetes the index, and GKE the variables of pods that request TPUs.
    """
    replica, index = divmod(number, job["completions"])
    replicas = len(hosts) // job["completions"]
    labels = {"job-index": replica, "replicatedjob-replicas": replicas}

    def value_of(source):
        if "fieldRef" not in source:
            return SECRET
        (name,) = re.findall(r"jobset.sigs.k8s.io/([\w-]+)'\]$", source["fieldRef"]["fieldPath"])
        return str(labels[name])

    container = container_of(job)
    found = {
        one["name"]: one.get("value") or value_of(one["valueFrom"]) for one in container["env"]
    }
    if "google.com/tpu" in container["resources"]["limits"]:
        slice_hosts = hosts[replica * job["completions"] :][: job["completions"]]
        found |= {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": ",".join(slice_hosts)}
    return {**found, "JOB_COMPLETION_INDEX": str(index)}


def action_of(job, code):
    """Returns Kubernetes' action for a pod with this exit code: from the first matching rule."""
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule.get("onExitCodes")
        if on and on["operator"] == "In" and code in on["values"]:
            return rule["action"]
    return "Count"


# ---- simulated jobs ----


class Pods:
    """Runs local processes as Kubernetes runs the pods of a Job or JobSet."""

    def __init__(self, path, arguments, environ):
        self.job, self._hosts, self.restarts_left = job_of(path)
        self._local_address = self._on_loopback()
        self._arguments, self._environ = arguments, environ
        self.running, self.codes = {}, {number: [] for number in range(len(self._hosts))}
        self._failures, self._start_at = 0, dict.fromkeys(self.codes, 0.0)

    def _on_loopback(self):
        """Returns variables that replace those of the manifest with host names."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = environ_of(self.job, self._hosts, 0)["JAX_COORDINATOR_ADDRESS"]
        assert address.startswith(self._hosts[0] + ":")
        return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}

    def start(self, number):
        container = container_of(self.job)
        launch_flags = container["args"][: container["args"].index("--") + 1]
        command = [sys.executable, *container["command"][1:], *launch_flags, *self._arguments]
        own = environ_of(self.job, self._hosts, number)
        environ = {**self._environ, **own, **self._local_address}
        self.running[number] = subprocess.Popen(command, cwd=ROOT, env=environ)

    def tick(self):
        """Returns True if the job completed, False if it failed, None while it runs."""
        for number, at in list(self._start_at.items()):
            if time.monotonic() >= at:
                del self._start_at[number]
                self.start(number)
        for number, process in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[number]
            code = process.returncode
            code = 128 - code if code < 0 else code
            self.codes[number].append(code)
            if code and not self._handle_failure(number, action_of(self.job, code)):
                return False
        return None if self.running or self._start_at else True

    def _handle_failure(self, number, action):
        """Replaces the pod or all pods; returns whether the job continues."""
        self._failures += action == "Count"
        if action == "FailJob":
            return False
        if self._failures <= self.job["backoffLimit"]:
            self._start_at[number] = time.monotonic() + 2  # 10 s in Kubernetes
            return True
        if not self.restarts_left:
            return False
        self.restarts_left, self._failures = self.restarts_left - 1, 0
        self.end(signal.SIGTERM)
        self._start_at = dict.fromkeys(self.codes, time.monotonic())
        return True

    def end(self, number=signal.SIGKILL):
        for process in self.running.values():
            process.send_signal(number)
        for process in self.running.values():
            process.wait(timeout=100)
        self.running.clear()
