"""Real text without a download: the sources of Python's standard library, a token for each byte.

The files come in the order of their names, so that the text depends on the version of Python alone. The windows that
are trained on are shuffled with a fixed seed: neighbours in a batch are of all parts of the library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


def windows(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Tokens int32 [count, length], all below 256: of windows that follow each other and share one token."""
    text = sources(count * (length - 1) + 1)
    starts = (length - 1) * np.random.default_rng(seed).permutation(count)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def sources(nbytes: int, root: Path | None = None) -> np.ndarray:
    """The first bytes of the text, uint8 [nbytes]; ``root``: the folder of Python sources, if not the library's."""
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
