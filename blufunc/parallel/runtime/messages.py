"""Messages of a job's store: framing, and proofs of the job's token.

Parallel, before stage 3. In: bytes of a connection. Out: messages, non-empty JSON lists that begin with a string, which
are never executed. Bytes that are not such a list raise ``Malformed``: the connection that sent them ends, and nothing
else does. Both ends prove that they know the token of the job without sending it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 26
"""Maximum bytes of a message from a rank."""

LONGEST_ANSWER = (1 << 32) - 1
"""Maximum bytes of a message from the server: the values of all ranks."""

LONGEST_GREETING = 512
"""Maximum bytes of a message ahead of the proof, to bound what strangers can send."""

_LENGTH = struct.Struct(">I")


class Malformed(Exception):
    """Bytes that are no message; the text says why."""


def encoded(*message: Any) -> bytes:
    """A message as bytes."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _decoded(data: bytes) -> list[Any]:
    try:
        message = json.loads(data.decode())
    except UnicodeDecodeError:
        raise Malformed("a message that is not UTF-8") from None
    except RecursionError:
        raise Malformed("a message that is nested too deep") from None
    except ValueError:
        raise Malformed("a message that is not JSON") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise Malformed("a message that is not a list with a name")
    return message


class Inbox:
    """The messages of a connection, whose bytes arrive in pieces.

    Attributes:
      longest: maximum bytes of a message.
    """

    def __init__(self, longest: int = LONGEST_GREETING):
        self.longest = longest
        self._bytes = bytearray()

    def put(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._bytes += data

    def messages(self) -> Iterator[list[Any]]:
        """Remove and yield the complete messages; Malformed if one is not a message."""
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.longest:
                raise Malformed(f"a message of {length:,} bytes, where {self.longest:,} are allowed")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            data = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield _decoded(data)


def nonce() -> str:
    """A random text, used once, so that no recorded proof is valid again."""
    return secrets.token_hex(16)


def proof(token: str, by: str, *nonces: str) -> str:
    """Proof that ``by``, the store or a rank, knows the token."""
    return hmac.new(token.encode(), " ".join((by, *nonces)).encode(), hashlib.sha256).hexdigest()


def is_proof(given: Any, token: str, by: str, *nonces: str) -> bool:
    """True if ``given`` is that proof; the time does not depend on where it differs."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(errors="replace"), proof(token, by, *nonces).encode()
    )


def tuned(connection: socket.socket) -> socket.socket:
    """Disable Nagle's algorithm, and detect within half a minute that a host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
