"""Deferred imports: names of a package, and modules, are imported at first use.

Before the path of a program, below ``config``. In: import statements in a ``with`` block, which type checkers
and import-linter read as ordinary ones. Out: a package that imports a name's module when the name is first
accessed (``names``), or stand-ins for modules, which import them at the first attribute access (``modules``).
The statements in the block run, but import nothing, as with the ``lazy`` keyword of PEP 810.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

_lock = threading.RLock()  # one block at a time replaces ``__import__``


class _Recorded:
    """A deferred import statement: the module ``module``, or ``name`` in it."""

    def __init__(self, module: str, name: str | None = None, top: bool = False):
        self._module, self._name, self._top = module, name, top

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # from ``from package import *``
            return importlib.import_module(self._module).__all__
        return _Recorded(self._module.partition(".")[0] if self._top else self._module, name)

    def _load(self, package: str = "") -> Any:
        """The object itself; ``package`` is already being queried: do not re-enter it."""
        module = importlib.import_module(self._module)
        if self._top:  # ``import a.b`` binds ``a``
            return sys.modules[self._module.partition(".")[0]]
        if self._name is None:
            return module
        if self._module != package:
            with contextlib.suppress(AttributeError):
                return getattr(module, self._name)
        return importlib.import_module(f"{self._module}.{self._name}")


class _Package(ModuleType):
    """A package with deferred names."""

    _deferred: dict[str, _Recorded]
    _hints: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        recorded = self._deferred.get(name)
        if recorded is None:
            hint = f": {self._hints[name]}" if name in self._hints else ""
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{hint}")
        value = recorded._load(self.__name__)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of a submodule sets it here: a function of the same name takes precedence.
        if isinstance(value, ModuleType) and name in self._deferred:
            value = self._deferred[name]._load(self.__name__)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._deferred})


@contextlib.contextmanager
def _recording(namespace: dict[str, Any]) -> Iterator[dict[str, _Recorded]]:
    """Record the block's imports of the module with this namespace, by bound name."""
    found: dict[str, _Recorded] = {}
    with _lock:
        original = builtins.__import__

        def record(name, globals=None, locals=None, fromlist=(), level=0):
            if globals is not namespace:
                return original(name, globals, locals, fromlist, level)
            return _Recorded(name, top=not fromlist)

        builtins.__import__ = record
        try:
            yield found
        finally:
            builtins.__import__ = original
    found.update({k: v for k, v in namespace.items() if isinstance(v, _Recorded)})


@contextlib.contextmanager
def names(package: str, hints: Mapping[str, str] | None = None) -> Iterator[None]:
    """Defer the block's imports in a package's ``__init__`` until a name is accessed.

    Args:
      package: its ``__name__``.
      hints: replacements of names that the package does not have.
    """
    module = sys.modules[package]
    with _recording(module.__dict__) as found:
        yield
    for name in found:
        del module.__dict__[name]
    module.__dict__.update(_deferred=found, _hints=hints or {})
    module.__dict__.setdefault("__all__", sorted([*found, *(k for k in module.__dict__ if k[0] != "_")]))
    module.__class__ = _Package


class _Module(ModuleType):
    """A module that is imported at its first attribute access."""

    def __init__(self, recorded: _Recorded):
        super().__init__(recorded._name or recorded._module)
        self.__dict__["_recorded"] = recorded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._recorded._load(), name, value)


@contextlib.contextmanager
def modules(namespace: dict[str, Any]) -> Iterator[None]:
    """Defer the imports of the block, which must import modules, not their contents.

    Args:
      namespace: the ``globals()`` of the module with the block.
    """
    with _recording(namespace) as found:
        yield
    namespace.update({name: _Module(recorded) for name, recorded in found.items()})
