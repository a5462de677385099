"""Signs the lines that two programs exchange, with a secret that both know and never send.

Each end of a connection sends a random nonce, and both derive the key of the connection from the
secret and the nonces: what was signed on another connection is worth nothing on this one.
Supervisors use it with the secret of the user, processes with a token for each attempt.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable

MAX_NONCE_LINE = 100  # bytes
NONCE_SECONDS = 5.0  # within which node 0 sends it
NONCE_TICK = 0.2


class Signer:
    """Signs and checks the messages of one end of a connection, in their order."""

    def __init__(self, secret: str, *, is_node_0: bool):
        self._secret = os.fsencode(secret)
        self.is_node_0 = is_node_0
        self.nonce = secrets.token_hex(16)
        self._key = b""  # of this connection, from the secret and both nonces
        self._num_sent = 0
        self._num_received = 0

    @property
    def greeting(self) -> dict[str, str]:
        return {"nonce": self.nonce}

    def sign(self, text: bytes) -> bytes:
        """Returns the next message to send with its signature."""
        tag = self._tag(self.is_node_0, self._num_sent, text)
        self._num_sent += 1
        return tag + b" " + text

    def checked(self, line: bytes) -> bytes | None:
        """Returns the next message received without its signature; None if that is wrong."""
        tag, _, text = line.partition(b" ")
        if not self._key and not self.accept_nonce(text):
            return None
        expected = self._tag(not self.is_node_0, self._num_received, text)
        if not hmac.compare_digest(tag, expected):
            return None
        self._num_received += 1
        return text

    def accept_nonce(self, text: bytes) -> bool:
        """Reads the nonce of the other end in its first message; returns whether there is one."""
        try:
            nonce = json.loads(text)["nonce"]
            if not re.fullmatch("[0-9a-f]{32}", nonce):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        # Both ends sign with the same key, which no other connection has: the nonce of node 0 comes
        # first.
        nonces = f"{self.nonce} {nonce}" if self.is_node_0 else f"{nonce} {self.nonce}"
        self._key = hmac.digest(self._secret, nonces.encode(), "sha256")
        return True

    def _tag(self, is_node_0: bool, number: int, text: bytes) -> bytes:
        """Returns the signature of message `number`: a replayed or reflected one has another."""
        signed = b"%d %d %b" % (is_node_0, number, text)
        return hmac.digest(self._key, signed, "sha256").hex().encode()


def attempt_token(secret: str, nonce: str) -> str:
    """Returns the token of the processes of an attempt of this nonce.

    Hosts send only the nonce to each other: without the secret it gives another token.
    """
    return hmac.digest(os.fsencode(secret), f"attempt {nonce}".encode(), "sha256").hex()


def signer_of_node(
    secret: str, connection: socket.socket, num_signals: Callable[[], int] = lambda: 0
) -> Signer | None:
    """Returns the signer of a new connection to node 0, with its nonce; None without a secret.

    Node 0 is the end that listens: a supervisor, or process 0 of an attempt. Closes the connection
    and raises OSError if it sends something else, or nothing in NONCE_SECONDS, and after a signal.
    """
    if not secret:
        return None
    signer = Signer(secret, is_node_0=False)
    line = b""
    deadline = time.monotonic() + NONCE_SECONDS
    connection.settimeout(NONCE_TICK)
    try:
        while not line.endswith(b"\n") and len(line) < MAX_NONCE_LINE:
            if num_signals() or time.monotonic() > deadline:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1)
                if not received:
                    raise ConnectionResetError
                line += received
        if not signer.accept_nonce(line):
            raise ConnectionResetError
    except OSError:
        connection.close()
        raise
    return signer
