"""``jax.experimental.compilation_cache``: the folder of compiled programs.

Under the face ``as_jax``. The cache is on always; ``$BLUFUNC_CACHE_DIR`` names its folder.
"""

from __future__ import annotations

import os

from blufunc.transforms.staging.jit import clear_caches

__all__ = ["reset_cache", "set_cache_dir"]


def set_cache_dir(path: str | os.PathLike) -> None:
    """Keep programs that are compiled from now on in a folder."""
    os.environ["BLUFUNC_CACHE_DIR"] = os.fspath(path)


def reset_cache() -> None:
    """Drop the programs of this process; those on disk stay, and are found again."""
    clear_caches()
