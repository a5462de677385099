"""Servers of object stores on loopback: moto (S3) and gcp-storage-emulator (Google)."""

import contextlib
import importlib.util
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from tests.lib.paths import ROOT
from tests.lib.processes import free_port, wait_until_listening

COMMANDS = {
    "s3": ["-m", "moto.server", "-p"],
    "gs": [str(ROOT / "tests" / "lib" / "gcs_server.py")],
}
KINDS = list(COMMANDS)
needed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "gcp_storage_emulator", "flask"))),
    reason="needs the servers of the extra stores",
)


@contextlib.contextmanager
def running(kind: str) -> Iterator[str]:
    """Starts a server, sets the variables by which clients find it, and yields the bucket's URL."""
    port = free_port()
    bucket = ["bucket"] if kind == "gs" else []
    command = [sys.executable, *COMMANDS[kind], str(port), *bucket]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=null, stderr=null)
    address = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        set_address(patch, address)
        try:
            wait_until_listening(process, port)
            if not bucket:
                urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
            yield f"{kind}://bucket"
        finally:
            process.kill()
            process.wait()


def set_address(patch: pytest.MonkeyPatch, address: str) -> None:
    """Sets the variables by which clients find a server."""
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("STORAGE_EMULATOR_HOST", address)
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
