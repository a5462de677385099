"""Finds the rank of a Ray Train worker, and an address where its rank 0 can listen.

Ray sets no variables for its workers. Those of JaxTrainer are joined already on GPUs and TPUs; on
CPUs, or under another trainer of Ray, they are not.
"""

import socket
import sys

from meshtrain.errors import import_optional


def flags() -> tuple[str, int, int] | None:
    """Returns HOST:PORT of process 0, the number of processes and the rank in a Ray Train worker.

    None in any other process. All workers must call it: rank 0 chooses the address for all. Raises
    ConfigError in a worker of a version of Ray that cannot send it.
    """
    if "ray.train" not in sys.modules:  # a worker has loaded it
        return None
    import ray
    import ray.train

    try:
        context = ray.train.get_context()
        rank = context.get_world_rank()
        experiment = context.get_experiment_name()
    except (RuntimeError, DeprecationWarning):  # not in a worker; in a trial of Ray Tune
        return None
    # Version 1 of Ray Train has a context outside of workers too: of rank 0, without a name.
    if rank is None or experiment is None:
        return None
    # Only in a worker: older versions of Ray lack it.
    collective = import_optional("ray.train.collective", "ray")
    address = None
    if rank == 0:
        address = _free_address(ray.util.get_node_ip_address())
    address = collective.broadcast_from_rank_zero(address)
    return address, context.get_world_size(), rank


def _free_address(host: str) -> str:
    """Returns HOST:PORT or [IPV6]:PORT with a port that is free on this host now."""
    is_ipv6 = ":" in host
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
