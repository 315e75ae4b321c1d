"""blufunc under the name ``jax``, for libraries that are written for JAX.

Face over all others. ``install()`` serves the modules that ``table.py`` lists; ``python -m blufunc.as_jax script.py``
does so for a script. See docs/design/023-as-jax.md.
"""

from __future__ import annotations

import sys

from blufunc import errors
from blufunc.as_jax.extras import callback_errors
from blufunc.as_jax.finder import ROOT, Finder, is_served
from blufunc.as_jax.table import HIDDEN, TABLE
from blufunc.core.ir import dtypes
from blufunc.transforms.staging import callback

__all__ = ["install"]


def install() -> None:
    """Serve blufunc as ``jax`` from now on, in this process.

    Call it before anything imports ``jax``. Calling it again changes nothing.

    Raises:
      UnsupportedError: JAX itself is already imported.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules and not is_served():
        raise errors.UnsupportedError(
            "JAX is already imported in this process, and blufunc cannot take its name.",
            why="arrays and transforms of the two do not mix, and some libraries would hold either.",
            fix="call blufunc.as_jax.install() before the first import of jax, or of a library that imports it: "
            "python -m blufunc.as_jax script.py",
        )
    dtypes.set_truncating(True)
    callback.as_raised = callback_errors.as_raised
    sys.meta_path.insert(0, Finder(TABLE, HIDDEN))
