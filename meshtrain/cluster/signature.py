"""Signs the messages between supervisors if MESHTRAIN_SECRET is set: nobody else can write or repeat one.

Node 0 sends a random number (nonce), and the other supervisor its own in its first message. The secret and both numbers
give the key of the connection. Before each message stands the HMAC-SHA256 (RFC 2104) of its sender, its number on the
connection, and its text.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping

from meshtrain.errors import ConfigError

VARIABLE = "MESHTRAIN_SECRET"
SHORTEST = 16  # characters
MAX_NONCE_LINE = 100  # bytes
NONCE_SECONDS = 5.0  # within which node 0 sends it
TICK = 0.2
WRONG = f"a message without the right signature; set the same {VARIABLE} on all hosts"


def of_environment(environ: Mapping[str, str]) -> str:
    """Returns the secret, "" without one. Raises ConfigError if it is short."""
    secret = environ.get(VARIABLE, "")
    if secret and len(secret) < SHORTEST:
        raise ConfigError(
            f"{VARIABLE}: has {len(secret)} characters; use {SHORTEST} or more, such as the output of "
            f"`openssl rand -hex 32`"
        )
    return secret


class Signer:
    """Signs and checks the messages of one end of a connection, in their order."""

    def __init__(self, secret: str, *, is_node_0: bool):
        self._secret, self.is_node_0 = os.fsencode(secret), is_node_0
        self.nonce = secrets.token_hex(16)
        self._key, self._num_sent, self._num_received = b"", 0, 0

    @property
    def greeting(self) -> dict[str, str]:
        return {"nonce": self.nonce}

    def sign(self, text: bytes) -> bytes:
        """Returns the next message to send with its signature."""
        tag = self._tag(self.is_node_0, self._num_sent, text)
        self._num_sent += 1
        return tag + b" " + text

    def checked(self, line: bytes) -> bytes | None:
        """Returns the text of the next message received, without its signature; None if that is wrong."""
        tag, _, text = line.partition(b" ")
        if not self._key and not self.meet(text):
            return None
        if not hmac.compare_digest(tag, self._tag(not self.is_node_0, self._num_received, text)):
            return None
        self._num_received += 1
        return text

    def meet(self, text: bytes) -> bool:
        """Takes the nonce of the other end from its first message; returns whether there is one."""
        try:
            nonce = json.loads(text)["nonce"]
            if not re.fullmatch("[0-9a-f]{32}", nonce):
                return False
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        both = (self.nonce, nonce) if self.is_node_0 else (nonce, self.nonce)
        self._key = hmac.digest(self._secret, " ".join(both).encode(), "sha256")
        return True

    def _tag(self, is_node_0: bool, number: int, text: bytes) -> bytes:
        signed = b"%d %d %b" % (is_node_0, number, text)
        return hmac.digest(self._key, signed, "sha256").hex().encode()


def signer_of_node(
    secret: str, connection: socket.socket, num_signals: Callable[[], int] = lambda: 0
) -> Signer | None:
    """Returns the signer of a new connection to node 0 after it has sent its nonce; None without a secret.

    Closes the connection and raises OSError if it sends something else, or nothing in NONCE_SECONDS, or after a signal.
    """
    if not secret:
        return None
    signer, line, deadline = Signer(secret, is_node_0=False), b"", time.monotonic() + NONCE_SECONDS
    connection.settimeout(TICK)
    try:
        while not line.endswith(b"\n") and len(line) < MAX_NONCE_LINE:
            if num_signals() or time.monotonic() > deadline:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1)
                if not received:
                    raise ConnectionResetError
                line += received
        if not signer.meet(line):
            raise ConnectionResetError
    except OSError:
        connection.close()
        raise
    return signer
