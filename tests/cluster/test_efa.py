"""EFA adapters that NCCL will not use are reported.

The hosts are folders that look like the root of one.
"""

import jax
import pytest

from meshtrain.cluster import runtime

START = "this host has 2 EFA adapters, and NCCL cannot use them: "


def host(folder, *, adapters=("rdmap0s6", "rdmap0s7"), vendor="0x1d0f", devices=2):
    """Returns the root of a host with these RDMA devices, `devices` of them in the container."""
    for name in adapters:
        (folder / "sys/class/infiniband" / name / "device").mkdir(parents=True)
        (folder / "sys/class/infiniband" / name / "device/vendor").write_text(f"{vendor}\n")
    (folder / "dev/infiniband").mkdir(parents=True)
    for number in range(devices):
        (folder / "dev/infiniband" / f"uverbs{number}").touch()
    return folder


def loader(*present):
    def load(name):
        if name not in present:
            raise OSError(f"{name}: cannot open shared object file")

    return load


def missing(name):
    way_out = "add aws-ofi-nccl to the image, and its folder to LD_LIBRARY_PATH"
    return f"{START}{name}: cannot open shared object file; {way_out}"


@pytest.mark.parametrize(
    ("environ", "present", "expected"),
    [
        ({}, ["libnccl-net.so"], ""),
        ({}, [], missing("libnccl-net.so")),
        ({}, ["libnccl-net-ofi.so"], missing("libnccl-net.so")),
        ({"NCCL_NET_PLUGIN": "ofi"}, ["libnccl-net-ofi.so"], ""),
        ({"NCCL_NET_PLUGIN": "/opt/plugin.so"}, ["/opt/plugin.so"], ""),
        ({"NCCL_NET_PLUGIN": "ofi"}, ["libnccl-net.so"], missing("libnccl-net-ofi.so")),
        ({"NCCL_NET": "AWS Libfabric"}, [], missing("libnccl-net.so")),
        # Another network is chosen.
        ({"NCCL_NET": "Socket"}, [], ""),
        ({"NCCL_NET_PLUGIN": "none"}, [], ""),
        # libfabric's provider; a value with ^ excludes providers.
        ({"FI_PROVIDER": "efa"}, ["libnccl-net.so"], ""),
        ({"FI_PROVIDER": "^tcp"}, ["libnccl-net.so"], ""),
        (
            {"FI_PROVIDER": "tcp"},
            ["libnccl-net.so"],
            f"{START}FI_PROVIDER=tcp; unset it, or set FI_PROVIDER=efa",
        ),
    ],
)
def test_adapters_that_nccl_cannot_use_are_reported(environ, present, expected, tmp_path):
    assert runtime.efa_fault(environ, root=host(tmp_path), load=loader(*present)) == expected


def test_adapters_that_the_container_lacks_are_reported(tmp_path):
    why = "none is in this container; request vpc.amazonaws.com/efa in its resources"
    assert runtime.efa_fault({}, root=host(tmp_path, devices=0), load=loader("libnccl-net.so")) == (
        START + why
    )


def test_other_hosts_need_no_plugin(tmp_path):
    assert runtime.efa_fault({}, root=tmp_path, load=loader()) == ""
    infiniband = host(tmp_path, adapters=["mlx5_0"], vendor="0x15b3")
    assert runtime.efa_fault({}, root=infiniband, load=loader()) == ""


@pytest.mark.parametrize(
    ("address", "rank", "backend", "is_logged"),
    [
        ("head:1", 0, "gpu", True),
        ("head:1", 1, "gpu", True),  # each host logs it
        ("head:1", 1, "cpu", False),
        ("127.0.0.1:1", 0, "gpu", False),  # no network between processes of one host
        (None, None, "gpu", False),
    ],
)
def test_each_host_of_a_run_on_gpus_logs_it(address, rank, backend, is_logged, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(runtime, "efa_fault", lambda environ: "no plugin")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    runtime._log_unused_adapters((address, address and 2, rank))
    assert capsys.readouterr().err == "no plugin\n" * is_logged


def test_only_the_first_process_of_a_host_logs_it(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(runtime, "efa_fault", lambda environ: "no plugin")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for local_id in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(local_id))
        runtime._log_unused_adapters(("head:1", 4, 2 + local_id))
    assert capsys.readouterr().err == "no plugin\n"
