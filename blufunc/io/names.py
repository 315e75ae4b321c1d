"""Names of leaves in files: their key paths, ``params.blocks.0.weight``.

Below the file format. In: a pytree. Out: its leaves by name, in order. The name is that of the path in its short form,
unless two leaves would share it: these get the full form, ``['a.b']``. Names depend on the structure alone.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
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
    leaves, treedef = tree.flatten(values)
    hashable = _is_hashable(treedef.spec)
    names = _known.get(treedef) if hashable else None
    if names is None:
        names = _names([path for path, _ in paths.flatten_with_path(values)[0]])
        if hashable and _is_enough(treedef.spec):
            if len(_known) == _KEPT:
                _known.clear()
            _known[treedef] = names
    return dict(zip(names, leaves, strict=True)), treedef


_KEPT = 8
_known: dict[tree.TreeDef, tuple[str, ...]] = {}
"""Names by structure: a run saves the same one again and again."""


def _is_hashable(spec: Any) -> bool:
    """True unless static data may change, such as an array.

    Then names are not kept; a program could not be called with it, but a file holds its leaves.
    """
    try:
        hash(spec)
    except TypeError:
        return False
    return True


def _is_enough(spec: Any) -> bool:
    """True if no container names its children by what they are."""
    return spec is None or (spec[0].keys_of is None and all(map(_is_enough, spec[2])))


def _names(found: Sequence[paths.Path]) -> tuple[str, ...]:
    short = [paths.keystr(path, simple=True, separator=".") for path in found]
    shared = {name for name, n in collections.Counter(short).items() if n > 1} | {RESERVED}
    full = [paths.keystr(path) if name in shared else name for name, path in zip(short, found, strict=True)]
    taken = collections.Counter(full)
    if (repeated := next((name for name, n in taken.items() if n > 1), None)) is not None:
        raise errors.TreeError(
            f"two leaves of the tree are called {repeated}.",
            where=source.here(),
            why="leaves are stored under their key paths.",
            fix="rename a key of the dict or a field of the class that they are in",
        )
    return tuple(full)
