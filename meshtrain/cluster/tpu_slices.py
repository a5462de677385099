"""The environment variables of a host of TPU slices on GKE."""

from collections.abc import Mapping

from meshtrain.errors import ConfigError

PORT = 8476  # as of jax before 0.8.1; the firewall of Cloud TPU VMs admits it, jax-ml/jax#35905


def of_host(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Returns HOST:PORT of process 0, the number of processes and the rank; None if there are not several hosts.

    The hosts of slice 0 have the lowest ranks. jax reads the same variables (jax/_src/clusters/cloud_tpu_cluster.py).
    Raises ConfigError if a number is out of range. Without one of the variables it is None too.
    """
    given = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    hosts = [name.strip() for name in given.split(",") if name.strip()]
    slices = _number(environ, "MEGASCALE_NUM_SLICES", "1", 10**5)
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS") if slices > 1 else ",".join(hosts[:1])
    needed = ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID") if slices > 1 else ("TPU_WORKER_ID",)
    if len(hosts) * slices < 2 or not first or not all(map(environ.get, needed)):
        return None
    rank = _number(environ, "TPU_WORKER_ID", "", len(hosts))
    if slices > 1:
        rank += _number(environ, "MEGASCALE_SLICE_ID", "", slices) * len(hosts)
    return f"{first.partition(':')[0]}:{PORT}", str(len(hosts) * slices), str(rank)


def _number(environ: Mapping[str, str], name: str, default: str, end: int) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < end):
        raise ConfigError(f"{name}={text}: use a number from 0 to {end - 1}")
    return int(text)
