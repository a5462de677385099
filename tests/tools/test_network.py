"""What `meshtrain info --network` prints: interfaces, kernel, adapters and variables."""

import os
import socket
import subprocess
import sys

import pytest

from meshtrain.cli import app
from meshtrain.cluster.launchers import ProcessInfo
from meshtrain.tools import network
from tests.lib.paths import ROOT

LOOPBACK = ProcessInfo("127.0.0.1", 8476, num_processes=2, process_id=0, source="SLURM")


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path):
    """Returns a folder with the files of a host with two interfaces and an adapter."""
    name = socket.if_nameindex()[0][1]  # of this machine, which knows its addresses
    write(
        tmp_path,
        {
            f"sys/class/net/{name}/operstate": "up\n",
            f"sys/class/net/{name}/mtu": "9000\n",
            f"sys/class/net/{name}/speed": "25000\n",
            "sys/class/net/bonding_masters": "veth9\n",
            "sys/class/net/veth9/operstate": "down\n",
            "sys/class/net/veth9/speed": "-1\n",
            "proc/net/if_inet6": "\nno address of veth9\n"
            "fd000000000000000000000000000007 05 40 00 80    veth9\n",
            "proc/sys/net/core/rmem_max": "4194304\n",
            "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "etc/nccl.conf": "# of the cluster\nNCCL_IB_TIMEOUT=22\n\n",
            "own.conf": "NCCL_DEBUG=WARN\n",
        },
    )
    return tmp_path


def report(root, process=None, **environ):
    return [
        *network.lines({"NCCL_CONF_FILE": str(root / "own.conf"), **environ}, process, root=root)
    ]


def texts(lines, name):
    return [line[18:] for line in lines if line.startswith(name)]


def test_the_files_of_the_kernel_are_shown(root):
    lines = report(root)
    first, second = texts(lines, "interface")
    assert first.endswith(" · mtu 9000 · 25000 Mbit/s") and ": up · " in first
    assert second == "veth9: down · fd00::7 · mtu not readable here · speed unknown"
    assert texts(lines, "infiniband") == [
        "mlx5_0 port 1: 4: ACTIVE · InfiniBand · 400 Gb/sec (4X NDR)"
    ]
    kernel = texts(lines, "kernel")
    assert "net.core.rmem_max=4194304" in kernel
    assert "net.ipv4.tcp_rmem=4096 131072 6291456" in kernel
    assert "net.core.wmem_max: not readable here" in kernel


def test_a_container_without_these_files_is_no_error(tmp_path):
    lines = report(tmp_path)
    assert texts(lines, "interface") == ["/sys/class/net: not readable here"]
    assert texts(lines, "infiniband") == ["no adapter in /sys/class/infiniband"]
    kernel = texts(lines, "kernel")
    assert len(kernel) == len(network.KERNEL_SETTINGS)
    assert all(text.endswith(": not readable here") for text in kernel)


def test_variables_and_files_of_nccl_are_shown_and_no_secret(root):
    variables = {"GLOO_A": "1", "FI_PROVIDER": "efa", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a"}
    lines = report(root, MESHTRAIN_SECRET="hidden", HOME="/root", **variables)
    variables["NCCL_CONF_FILE"] = str(root / "own.conf")
    expected = [f"{name}={value}" for name, value in sorted(variables.items())]
    assert texts(lines, "variable") == expected
    assert texts(lines, "nccl file") == [
        "/etc/nccl.conf: NCCL_IB_TIMEOUT=22",
        f"{root / 'own.conf'}: NCCL_DEBUG=WARN",
    ]
    assert not any("hidden" in line for line in lines)


def test_a_file_of_nccl_in_another_encoding_is_shown(root):
    (root / "own.conf").write_bytes(b"NCCL_DEBUG=\xffWARN\n")
    assert texts(report(root), "nccl file")[1].endswith(r"own.conf: NCCL_DEBUG=\xffWARN")


def test_a_file_of_nccl_of_a_user_who_does_not_exist_is_no_error(root):
    lines = report(root, NCCL_CONF_FILE="~nobodyx/x")
    assert texts(lines, "nccl file") == ["/etc/nccl.conf: NCCL_IB_TIMEOUT=22"]


def test_a_rank_without_the_number_of_processes_stands_in_the_report(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert app.main("info", ["--network"]) == 2
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    (text,) = texts(lines, "coordinator")
    assert text.startswith("RANK=0: WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set; set all, or")
    assert texts(lines, "kernel") and not printed.err


def test_without_variables_it_says_which_it_looked_for(tmp_path):
    assert texts([*network.lines({}, None, root=tmp_path)], "variable") == [
        "none of NCCL_*, GLOO_*, FI_*, JAX_*, XLA_* is set"
    ]


@pytest.mark.skipif(
    not os.path.exists("/sys/class/net/lo"), reason="this system shows no loopback interface"
)
def test_the_interface_that_reaches_the_coordinator_is_named():
    (text,) = texts(network.lines({}, LOOPBACK), "coordinator")
    assert text == "127.0.0.1:8476 (SLURM): by lo, from 127.0.0.1"
    (text,) = texts(network.lines({}, None), "coordinator")
    assert text == "none: this process is alone"


def test_a_coordinator_without_an_address_is_a_line(monkeypatch, tmp_path):
    def fail(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    (text,) = texts(network.lines({}, LOOPBACK, root=tmp_path), "coordinator")
    assert text == "127.0.0.1:8476 (SLURM): Name or service not known"


@pytest.mark.parametrize(
    ("flags", "faults"),
    [
        (["--mesh"], ["--mesh: "]),
        (["--config=quickstart"], ["--config: "]),
        (["--device=h200", "--simulate_devices=2"], ["--device: ", "--simulate_devices: "]),
    ],
)
def test_flags_of_devices_are_a_mistake(flags, faults, capsys):
    assert app.main("info", ["--network", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    rest = "not with --network, which uses no devices; leave out one of them"
    assert lines == [fault + rest for fault in faults]


def test_jax_is_not_loaded_and_nobody_waits_for_the_other_process():
    """Of two processes only one runs: it prints, and does not join the other."""
    program = """
import sys
from meshtrain.cli import app
code = app.main("info", ["--network", "--coordinator=127.0.0.1:9", "--num_processes=2",
                         "--process_id=1"])
sys.exit(code or 5 * ("jax" in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "coordinator       127.0.0.1:9 (" in done.stdout
