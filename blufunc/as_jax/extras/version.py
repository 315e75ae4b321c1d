"""The version of JAX that the name ``jax`` stands for.

Under the face ``as_jax``.
"""

from __future__ import annotations

__all__ = ["__version__", "__version_info__"]

__version__ = "0.10.2"
__version_info__ = (0, 10, 2)
