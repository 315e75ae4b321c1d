"""Modules of JAX, served from blufunc: an import hook, and its modules.

Under the face ``as_jax``. In: the name of a module of JAX that the table lists. Out: a module that looks each of its
names up in its sources when it is first read, so that an import loads as little as blufunc's own does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from blufunc.as_jax import adapted, stubs

ROOT = "jax"
_OWN = "blufunc.as_jax."
_DUNDERS = ("__version__", "__version_info__", "__array_api_version__", "__array_namespace_info__")


class ServedModule(ModuleType):
    """A module of JAX: names come from its sources, the first that has one."""

    _sources: tuple[str, ...]
    _hidden: frozenset[str]
    _table: Mapping[str, tuple[str, ...]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _DUNDERS:
            raise AttributeError(name)
        submodule = f"{self.__name__}.{name}"
        value = adapted.find(self.__name__, name)
        if value is not None:
            self.__dict__[name] = value
            return value
        if name not in self._hidden:
            for source in self._sources:
                try:
                    module = importlib.import_module(source)
                except ModuleNotFoundError as e:
                    if e.name is None or not source.startswith(e.name):
                        raise
                    continue
                if source.startswith(_OWN) and name not in module.__all__:
                    continue  # what it imports for itself
                try:
                    value = getattr(module, name)
                except AttributeError:
                    continue
                # A module of blufunc is part of the face only where the table names it.
                if not isinstance(value, ModuleType) or isinstance(value, ServedModule):
                    self.__dict__[name] = value
                    return value
        if submodule in self._table:
            return importlib.import_module(submodule)
        stub = stubs.find(self.__name__, name)
        if stub is not None:
            self.__dict__[name] = stub
            return stub
        raise AttributeError(
            f"module {self.__name__!r}, which blufunc serves, has no attribute {name!r}: JAX lacks it, "
            "or blufunc does (docs/jax.md)"
        )

    def __dir__(self) -> list[str]:
        found: set[str] = set()
        for source in self._sources:
            with contextlib.suppress(ModuleNotFoundError):
                module = importlib.import_module(source)
                found |= {n for n in getattr(module, "__all__", dir(module)) if not n.startswith("_")}
        prefix = self.__name__ + "."
        found |= {
            m[len(prefix) :] for m in self._table if m.startswith(prefix) and "." not in m[len(prefix) :]
        }
        return sorted({*self.__dict__, *found} - self._hidden)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of a table, and raises for other modules under the same name.

    Args:
      table: for each module of JAX, its sources in blufunc.
      hidden: for a module of JAX, names that its sources have and JAX lacks.
    """

    def __init__(self, table: Mapping[str, tuple[str, ...]], hidden: Mapping[str, Sequence[str]]):
        self.table, self.hidden = table, hidden

    def find_spec(self, fullname, path=None, target=None):
        if fullname != ROOT and not fullname.startswith(ROOT + "."):
            return None
        if fullname not in self.table:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: blufunc serves the name {ROOT!r}, and has no such module "
                "(docs/jax.md lists what it serves)",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, origin="blufunc.as_jax", is_package=True)

    def create_module(self, spec):
        return ServedModule(spec.name)

    def exec_module(self, module):
        sources = self.table[module.__name__]
        module._sources = sources
        module._hidden = frozenset(self.hidden.get(module.__name__, ()))
        module._table = self.table
        module.__path__ = []
        module.__doc__ = f"{module.__name__}, served by {', '.join(sources) or 'blufunc'}."


def is_served() -> bool:
    """True if the name ``jax`` is blufunc's in this process."""
    return isinstance(sys.modules.get(ROOT), ServedModule)
