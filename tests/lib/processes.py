"""Ports of processes on this host."""

import socket
import time


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until_listening(process, port, *, host="127.0.0.1", seconds=60):
    """Returns when `process` accepts connections; it starts on its own time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"ended with exit code {process.returncode}"
            assert time.monotonic() < deadline, f"nothing listens on {host}:{port}"
            time.sleep(0.05)
