"""Describes what is set for the network of this host, for `meshtrain info --network`.

Only files of the kernel and environment variables are read: no device is used, jax is not loaded,
and no other host is asked.
"""

import fcntl
import ipaddress
import os
import platform
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from meshtrain.cluster.launchers import ProcessInfo

VARIABLES = ("NCCL_", "GLOO_", "FI_", "JAX_", "XLA_")  # how the names of settings start

# Files that NCCL reads besides its variables; NCCL_CONF_FILE names another one in place of the
# second.
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")

KERNEL_SETTINGS = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mtu_probing",
    "net.core.netdev_max_backlog",
    "net.core.somaxconn",
    "net.ipv4.ip_local_port_range",
)
UNREADABLE = "not readable here"
GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)
NAME_BYTES = 16  # of an interface, IFNAMSIZ
IPV6_LINE = re.compile(r"(?P<address>[0-9a-f]{32})\s.*\s(?P<name>\S+)\s*")  # of /proc/net/if_inet6


def lines(
    environ: Mapping[str, str],
    process: ProcessInfo | None,
    *,
    faults: Sequence[str] = (),
    root: Path = Path("/"),
) -> Iterator[str]:
    """Yields the report, a setting a line; `root` is the folder that holds /proc, /sys and /etc.

    `faults` say why this process has no rank, and stand in place of the coordinator.
    """
    yield _row("host", platform.node())
    addresses = addresses_by_interface(root)
    for name, of_interface in addresses.items():
        yield _row("interface", _interface(name, of_interface, root))
    if not addresses:
        yield _row("interface", f"/sys/class/net: {UNREADABLE}")
    for text in faults or [_coordinator(process, addresses)]:
        yield _row("coordinator", text)
    yield from (_row("infiniband", port) for port in infiniband_ports(root))
    for name in KERNEL_SETTINGS:
        value = _read(root / "proc/sys" / name.replace(".", "/"))
        yield _row("kernel", f"{name}: {UNREADABLE}" if value is None else f"{name}={value}")
    names = [name for name in sorted(environ) if name.startswith(VARIABLES)]
    yield from (_row("variable", f"{name}={environ[name]}") for name in names)
    if not names:
        yield _row("variable", f"none of {', '.join(f'{prefix}*' for prefix in VARIABLES)} is set")
    yield from _nccl_files(environ, root)


def _row(name: str, text: str) -> str:
    return f"{name:17} {text}"


def _read(path: Path) -> str | None:
    """Returns the text of a file of the kernel as one line; None if it cannot be read."""
    try:
        return " ".join(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError):
        return None


# ---- interfaces ----


def addresses_by_interface(root: Path) -> dict[str, list[str]]:
    """Returns the addresses of each interface: the first one of IPv4, and all of IPv6."""
    try:
        # Without the files next to them, such as bonding_masters.
        names = sorted(path.name for path in (root / "sys/class/net").iterdir() if path.is_dir())
    except OSError:
        return {}
    addresses: dict[str, list[str]] = {name: _ipv4_address(name) for name in names}
    for line in _read_lines(root / "proc/net/if_inet6"):
        found = IPV6_LINE.fullmatch(line)
        if found and found["name"] in addresses:
            address = ipaddress.IPv6Address(int(found["address"], 16))
            addresses[found["name"]].append(str(address))
    return addresses


def _ipv4_address(name: str) -> list[str]:
    request = struct.pack(f"{NAME_BYTES}s16x", name.encode()[: NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            reply = fcntl.ioctl(any_socket, GET_ADDRESS, request)
        except OSError:  # it has none
            return []
    # After the name comes a sockaddr_in: family and port of two bytes each, then the address.
    return [socket.inet_ntoa(reply[NAME_BYTES + 4 : NAME_BYTES + 8])]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
    except OSError:
        return []


def _interface(name: str, addresses: list[str], root: Path) -> str:
    """Returns state, addresses, MTU and speed of an interface."""
    folder = root / "sys/class/net" / name
    speed = _read(folder / "speed")  # the drivers of virtual interfaces do not know theirs
    is_known = speed is not None and speed.isdecimal()
    parts = [
        _read(folder / "operstate") or f"state {UNREADABLE}",
        ", ".join(addresses) or "no address",
        f"mtu {_read(folder / 'mtu') or UNREADABLE}",
        f"{speed} Mbit/s" if is_known else "speed unknown",
    ]
    return f"{name}: {' · '.join(parts)}"


def _coordinator(process: ProcessInfo | None, addresses: Mapping[str, list[str]]) -> str:
    """Returns by which interface this host sends to the coordinator; nothing is sent."""
    if process is None:
        return "none: this process is alone"
    start = f"{process.address} ({process.source})"
    try:
        found = socket.getaddrinfo(process.host, process.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        # To connect a UDP socket only looks up the route.
        with socket.socket(family, kind, protocol) as route:
            route.connect(address)
            own_address = route.getsockname()[0]
    except OSError as error:
        return f"{start}: {error.strerror}"
    names = [name for name, own in addresses.items() if own_address in own]
    return f"{start}: by {names[0] if names else 'an interface'}, from {own_address}"


# ---- InfiniBand, RoCE and EFA ----


def infiniband_ports(root: Path) -> list[str]:
    """Returns a text for each port of an RDMA adapter, or one that says that there is none."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return ["no adapter in /sys/class/infiniband"]
    return [
        f"{port.parents[1].name} port {port.name}: "
        + " · ".join(_read(port / name) or UNREADABLE for name in ("state", "link_layer", "rate"))
        for port in ports
    ]


# ---- files of NCCL ----


def _nccl_files(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yields the settings in the files that NCCL reads."""
    system_file, own_file = NCCL_FILES
    # Not Path.expanduser, which raises an error for a user that does not exist.
    own_file = os.path.expanduser(environ.get("NCCL_CONF_FILE") or own_file)
    yield from _settings(system_file, root / system_file.lstrip("/"))
    yield from _settings(own_file, Path(own_file))


def _settings(name: str, path: Path) -> Iterator[str]:
    """Yields a row for each setting in a file of NCCL."""
    for line in _read_lines(path):
        if line.strip() and not line.startswith("#"):
            yield _row("nccl file", f"{name}: {line.strip()}")
