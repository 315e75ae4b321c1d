"""Names of leaves in files: their key paths, ``params.blocks.0.weight``.

Below the file format. In: a pytree. Out: its leaves by name, in order. The name is that of the path in its short form,
unless two leaves would share it: these get the full form, ``['a.b']``. Names depend on the structure alone.
"""

from __future__ import annotations

import collections
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import paths, tree

RESERVED = "__metadata__"
"""Key of the metadata in a header of safetensors, which no leaf may take."""


def named_leaves(values: Any) -> tuple[dict[str, Any], tree.TreeDef]:
    """The leaves of a pytree by name, in order, and its structure.

    Raises:
      TreeError: two leaves have the same path.
    """
    found, treedef = paths.flatten_with_path(values)
    short = [paths.keystr(path, simple=True, separator=".") for path, _ in found]
    shared = {name for name, n in collections.Counter(short).items() if n > 1} | {RESERVED}
    full = [
        paths.keystr(path) if name in shared else name for name, (path, _) in zip(short, found, strict=True)
    ]
    taken = collections.Counter(full)
    if (repeated := next((name for name, n in taken.items() if n > 1), None)) is not None:
        raise errors.TreeError(
            f"two leaves of the tree are called {repeated}.",
            where=source.here(),
            why="leaves are stored under their key paths.",
            fix="rename a key of the dict or a field of the class that they are in",
        )
    return {name: leaf for name, (_, leaf) in zip(full, found, strict=True)}, treedef
