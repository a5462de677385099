"""The EFA adapters of a host on AWS. NCCL uses them only through a plugin; without it, it uses TCP and says nothing."""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

AMAZON = "0x1d0f"  # the PCI vendor in sysfs
PLUGIN = "libnccl-net{}.so"  # of aws-ofi-nccl; NCCL loads it by this name


def fault(
    environ: Mapping[str, str], *, root: Path = Path("/"), load: Callable[[str], Any] = ctypes.CDLL
) -> str:
    """Returns a line to log if this host has EFA adapters that NCCL will not use, or "".

    `root` is the root of the file system, `load` raises OSError for a library that cannot be loaded.
    """
    count = _num_adapters(root)
    chosen = environ.get("NCCL_NET", "").lower()
    if not count or chosen in ("socket", "ib") or environ.get("NCCL_NET_PLUGIN") == "none":
        return ""  # there are none, or another network is chosen
    start = f"this host has {count} EFA adapter{'s' * (count > 1)}, and NCCL cannot use them:"
    if not any(root.glob("dev/infiniband/uverbs*")):
        return f"{start} none is in this container; request vpc.amazonaws.com/efa in its resources"
    provider = environ.get("FI_PROVIDER", "efa")
    if "efa" not in provider and not provider.startswith("^"):
        return f"{start} FI_PROVIDER={provider}; unset it, or set FI_PROVIDER=efa"
    if error := _load_error(environ.get("NCCL_NET_PLUGIN", ""), load):
        return f"{start} {error}; add aws-ofi-nccl to the image, and its folder to LD_LIBRARY_PATH"
    return ""


def _num_adapters(root: Path) -> int:
    """Returns the number of RDMA devices that Amazon makes."""
    vendors = root.glob("sys/class/infiniband/*/device/vendor")
    return sum(path.read_text().strip() == AMAZON for path in vendors)


def _load_error(plugin: str, load: Callable[[str], Any]) -> str:
    """Returns why the plugin cannot be loaded, or ""; NCCL tries the same names."""
    error = ""
    for name in (plugin, PLUGIN.format(f"-{plugin}")) if plugin else (PLUGIN.format(""),):
        try:
            load(name)
            return ""
        except OSError as why:
            error = str(why)
    return error
