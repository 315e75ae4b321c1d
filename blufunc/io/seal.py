"""Digests: of chunks of arrays, and of a JSON text inside of itself.

Below the file format. A sealed text begins with a fixed prefix, the SHA-256 of the whole text with zeros in the place
of the digest, and a quotation mark. A text whose beginning is changed is not sealed; one that is changed elsewhere has
another digest.
"""

from __future__ import annotations

import hashlib
from typing import Any

CHUNK = 1 << 22
"""Bytes of an array with one digest: the least that is read and verified.

Smaller chunks make headers larger: 16 bytes of header for each MiB.
"""

DIGITS = 64
_BLANK = b"0" * DIGITS


def digest(data: Any) -> str:
    """SHA-256 of contiguous bytes, in hexadecimal; releases the GIL."""
    return hashlib.sha256(data).hexdigest()


def seal(text: bytes, prefix: bytes, salt: bytes = b"") -> bytes:
    """Fill in the digest of a text: ``DIGITS`` characters after ``prefix``.

    Args:
      salt: further bytes that the digest covers.
    """
    start, stop = len(prefix), len(prefix) + DIGITS
    blank = prefix + _BLANK + text[stop:]
    return text[:start] + digest(salt + blank).encode() + text[stop:]


def is_sealed(text: bytes, prefix: bytes) -> bool:
    """True if a text has a digest."""
    return text.startswith(prefix) and text[len(prefix) + DIGITS : len(prefix) + DIGITS + 1] == b'"'


def is_whole(text: bytes, prefix: bytes, salt: bytes = b"") -> bool:
    """True if the digest of a sealed text is that of the text."""
    return seal(text, prefix, salt) == text
