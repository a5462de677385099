"""Hosts joined by a slow network, simulated on one Linux machine.

Each host is a network namespace with a name, an address and one interface, eth0. A bridge joins
them. A token-bucket filter (tc tbf) at both ends of each cable limits what a host sends and what it
receives. The kernel limits the rate for real; it adds no latency. A process holds each namespace,
so that all of this is gone when the caller ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DEVICE, BRIDGE = "eth0", "bridge0"
# A bucket of two of the largest packets that the kernel sends; a queue of a second, so that none is
# dropped.
BUCKET = "burst 128kb latency 1s"
NAMESPACES = ("--net", "--mount", "--uts")
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")


def fault() -> str:
    """Returns in one line why this machine cannot simulate a network, or ""."""
    if missing := [name for name in TOOLS if not shutil.which(name)]:
        return f"{', '.join(missing)}: not installed; apt-get install iproute2 util-linux"
    script = f"""
        ip link add {BRIDGE} type bridge
        ip link add {DEVICE} type veth peer name port0
        tc qdisc add dev {DEVICE} root tbf rate 1mbit {BUCKET}
        mount --bind /etc/hosts /etc/hosts
        hostname host0"""
    done = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-ec", script], capture_output=True, text=True
    )
    if not done.returncode:
        return ""
    why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
    return (
        f"network namespaces are not permitted ({why}); run as root, or as a user: "
        f"unshare --map-root-user {os.path.basename(sys.executable)} ..."
    )


@dataclass(frozen=True)
class Hosts:
    """Running namespaces: the process that holds each host, and the one that holds the bridge."""

    holders: Sequence[subprocess.Popen]
    bridge: subprocess.Popen

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def prefix(self, number: int) -> list[str]:
        """Returns what runs a command on a host, if it stands before the command."""
        return _enter(self.holders[number])

    def limit(self, mbit: float | None) -> None:
        """Limits each direction of each cable to this many Mbit/s; None: no limit."""
        for number, holder in enumerate(self.holders):
            for process, device in ((holder, DEVICE), (self.bridge, f"port{number}")):
                if mbit:
                    command = f"tc qdisc replace dev {device} root tbf rate {mbit:g}mbit {BUCKET}"
                else:
                    command = f"tc qdisc del dev {device} root 2>/dev/null || true"
                _run(process, command)

    def sent(self) -> list[int]:
        """Returns the bytes that each host has sent, as its interface counts them."""
        return [_sent(holder.pid) for holder in self.holders]


@contextlib.contextmanager
def joined(count: int) -> Iterator[Hosts]:
    """Starts `count` hosts, named host0, host1, ... in their /etc/hosts.

    Raises SystemExit(2) if it cannot.
    """
    if why := fault():
        print(why, file=sys.stderr)
        raise SystemExit(2)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(
            tempfile.NamedTemporaryFile("w", suffix="-hosts", encoding="utf-8")
        )
        os.chmod(names.name, 0o644)
        bridge, *holders = (stack.enter_context(_namespace()) for _ in range(count + 1))
        hosts = Hosts(holders, bridge)
        lines = [f"{hosts.address(number)} host{number}" for number in range(count)]
        print("127.0.0.1 localhost", *lines, sep="\n", file=names, flush=True)
        _run(bridge, f"ip link add {BRIDGE} type bridge; ip link set {BRIDGE} up")
        for number, holder in enumerate(holders):
            port, far = f"port{number}", f"{DEVICE} netns {holder.pid}"
            _run(bridge, f"ip link add {port} type veth peer name {far}")
            _run(bridge, f"ip link set {port} master {BRIDGE} up")
            script = f"ip addr add {hosts.address(number)}/24 dev {DEVICE}; ip link set {DEVICE} up"
            script += f"; ip link set lo up; mount --bind {names.name} /etc/hosts"
            _run(holder, f"{script}; hostname host{number}")
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[subprocess.Popen]:
    # `cat` ends when this process does, however it ends: its input is closed.
    command = ["unshare", *NAMESPACES, "sh", "-c", "echo ready; exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        holder.stdout.readline()
        yield holder


def _enter(process: subprocess.Popen) -> list[str]:
    return ["nsenter", "--target", str(process.pid), *NAMESPACES]


def _run(process: subprocess.Popen, script: str) -> None:
    subprocess.run([*_enter(process), "sh", "-ec", script], check=True)


def _sent(pid: int) -> int:
    with open(f"/proc/{pid}/net/dev", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int({name.strip(): rest for name, rest in fields.items()}[DEVICE].split()[8])
