"""Real text without a download: Python's standard library, one token per byte.

Files are sorted by name, so the text depends only on the version of Python. Training windows are shuffled with a fixed
seed, so a batch covers all parts of the library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def windows(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens int32 [count, length], below 256, of windows that share one token."""
    text = sources(count * (length - 1) + 1)
    starts = (length - 1) * np.random.default_rng(seed).permutation(count)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def sources(nbytes: int, root: Path | None = None) -> np.ndarray:
    """First bytes of the text, uint8 [nbytes]; ``root`` overrides the source folder."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    found = 0
    for path in sorted(root.rglob("*.py")):
        if found < nbytes and not LEFT_OUT & set(path.relative_to(root).parts):
            parts.append(path.read_bytes())
            found += len(parts[-1])
    if found < nbytes:
        raise ValueError(
            f"{root} has {found:,} bytes of Python, and {nbytes:,} are wanted: take fewer or smaller batches"
        )
    return np.frombuffer(b"".join(parts)[:nbytes], np.uint8)
