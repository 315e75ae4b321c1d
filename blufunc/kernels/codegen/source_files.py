"""Loader of C++ and CUDA sources from files in the packages that use them.

Kernels, stage 6. In: the path of a ``.h`` or ``.cuh`` file in ``blufunc/kernels``. Out: its source, whole or in parts,
after constants. A part begins with a line ``//# name``; what precedes the first part is for readers only. Files are C++
that an editor and ``clang-format`` understand: sizes and flags reach them as constants that are declared first, never
by formatting strings.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Mapping
from types import MappingProxyType

_PACKAGE = "blufunc.kernels"
_HEAD = re.compile(r"^//# (.*)\n", re.MULTILINE)

Constant = bool | int | str


@functools.cache
def parts(path: str) -> Mapping[str, str]:
    """Parts of a file in their order, by the words of their first lines.

    Args:
      path: of the file, from ``blufunc/kernels`` on.
    """
    data = pkgutil.get_data(_PACKAGE, path)
    assert data is not None, path
    return MappingProxyType(split(data.decode()))


def split(text: str) -> dict[str, str]:
    """Parts of a source in their order, by the words of their first lines."""
    _, *found = _HEAD.split(text)
    return {name: part.strip() + "\n" for name, part in zip(found[::2], found[1::2], strict=True)}


def source(path: str, *names: str, **constants: Constant) -> str:
    """Source of some parts of a file, or of all, after the constants that it needs.

    Args:
      path: of the file, from ``blufunc/kernels`` on.
      names: of parts; none for the whole file.
      constants: as of ``declared``.
    """
    found = parts(path)
    return declared(**constants) + "\n".join(found[name] for name in names or found)


def declared(**constants: Constant) -> str:
    """Declarations: integers and booleans as ``constexpr``, strings as macros."""
    return "".join(f"{_declaration(name, value)}\n" for name, value in constants.items())


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, str):
        return f"#define {name} {value}"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    return f"constexpr int {name} = {value};"
