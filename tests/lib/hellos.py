"""Messages of supervisors that join, and of strangers."""

import json
import time

HELLO = {"node": 1, "nnodes": 2, "nproc": 1}
STATUS = dict(
    rank=1,
    pid=7,
    phase="step",
    current_step=5,
    first_step=0,
    phase_age=0.5,
    heartbeat_age=0,
    stopped_for=0.0,
    step_seconds=0.1,
)


def line(message):
    return json.dumps(message).encode() + b"\n"


NOT_HELLO = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x00\xff\n",
    b"\n",
    b"null\n",
    b"[]\n",
    b'"text"\n',
    b"[" * 900 + b"\n",
    b"[" * 100_000,  # without an end of line
    b"1" * 900 + b"\n",
    b"NaN\n",
    line({}),
    line({**HELLO, "nproc": "x"}),
    line({**HELLO, "nproc": 0}),
    line({**HELLO, "nproc": 10**30}),
    line({**HELLO, "nproc": True}),
    line({**HELLO, "nproc": 1.0}),
    line({**HELLO, "node": 0}),
    line({**HELLO, "node": -1}),
    line({**HELLO, "node": 2}),
    line({**HELLO, "node": [1]}),
    line({**HELLO, "node": {"a": 1}}),
    line({**HELLO, "nnodes": "2"}),
    line({**HELLO, "nnodes": 3}),
    line({**HELLO, "more": 1}),
]


def poll(server, until, seconds=10):
    """Polls until a condition is met; returns all faults."""
    faults, deadline = [], time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        faults += server.poll()
        time.sleep(0.005)
    assert until()
    return faults


def is_closed(connection):
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
