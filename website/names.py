"""Public names of blufunc: the modules of the reference, and the names of each.

In: the imported package. Out: one ``Namespace`` per public module, with its names in groups. A name is public if it
is in ``__all__`` of a public module (``_lazy.names`` makes that of packages), or, without one, if it is defined there
and has no leading underscore. A name that several namespaces export is described by each.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf

INTERNAL = {"blufunc.kernels", "blufunc.transforms", "blufunc.parallel.recipes"}
"""Packages that are attributes of public ones, without public names."""

FURTHER = ("blufunc.as_jax", "blufunc.errors")
"""Public modules that `blufunc` does not export."""

SUBJECTS = {
    "transforms.autodiff": "Derivatives",
    "transforms.custom_rules": "Derivatives of one's own",
    "transforms.checkpointing": "Rematerialization",
    "transforms.batching": "Batching",
    "transforms.staging": "Compiling, callbacks, devices",
    "transforms.precision": "Mixed precision",
    "transforms.extension": "Extending",
    "transforms.arguments": "Types",
    "parallel": "Meshes and shardings",
    "contexts": "Settings within a block",
    "explain": "Compiling, callbacks, devices",
    "doctor": "Compiling, callbacks, devices",
    "config": "Settings",
    "core.primitives": "Extending",
    "core.programs": "Compiling, callbacks, devices",
    "core": "Types",
}
"""Groups of the names of ``blufunc`` itself, by the package that defines them."""


class Namespace(NamedTuple):
    """A public module.

    Attributes:
      name: name for ``import``.
      doc: its docstring.
      groups: title of a group, and the names in it with their objects.
      modules: public modules inside it.
    """

    name: str
    doc: str
    groups: dict[str, list[tuple[str, Any]]]
    modules: list[str]

    def objects(self) -> list[tuple[str, Any]]:
        """All names with their objects."""
        return [pair for group in self.groups.values() for pair in group]


def _exported(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return sorted(n for n in module.__all__ if not n.startswith("_"))
    return sorted(
        n
        for n, o in vars(module).items()
        if not n.startswith("_") and getattr(o, "__module__", None) == module.__name__
    )


def _first_line(module: ModuleType | None) -> str:
    return re.sub(r"(?<![.])[.:]$", "", (inspect.getdoc(module) or "").split("\n")[0])


def home_of(name: str, value: Any, namespace: str) -> str:
    """The module that defines a name; if made at run time, the one imported from."""
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and not hasattr(sys.modules.get(home), "__path__"):
        return home
    recorded = getattr(sys.modules[namespace], "_deferred", {}).get(name)
    return recorded._module if recorded is not None else str(home)


def _group(name: str, value: Any, namespace: str) -> str:
    """Title of the group of a name: the subject of the module that defines it."""
    if isinstance(value, bf.Primitive):
        return "Primitives"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "Exceptions"
    home = home_of(name, value, namespace)
    if not home.startswith("blufunc"):
        return "Constants and types"
    if namespace == "blufunc":
        tail = home.removeprefix("blufunc.")
        found = [p for p in SUBJECTS if tail == p or tail.startswith(p + ".")]
        return SUBJECTS[max(found, key=len)] if found else "Other"
    if inspect.isclass(value) and isinstance(getattr(value, "dtype", None), np.dtype):
        return "Dtypes"
    return _first_line(sys.modules.get(home)) or "Other"


def namespace(name: str) -> Namespace:
    """The public names of a module.

    Args:
      name: its name for ``import``.
    """
    module = importlib.import_module(name)
    groups: dict[str, list[tuple[str, Any]]] = {}
    modules = []
    for n in _exported(module):
        value = getattr(module, n)
        if isinstance(value, ModuleType):
            full = f"{name}.{n}"
            if value.__name__ == full and full not in INTERNAL:
                modules.append(full)
            continue
        groups.setdefault(_group(n, value, name), []).append((n, value))
    subjects = list(SUBJECTS.values())
    order = lambda title: (
        title in ("Primitives", "Constants and types", "Other"),
        subjects.index(title) if title in subjects else 0,
    )
    return Namespace(
        name, inspect.getdoc(module) or "", {t: groups[t] for t in sorted(groups, key=order)}, modules
    )


def namespaces() -> list[Namespace]:
    """All public modules, each after the one that it is in."""
    found: list[Namespace] = []
    pending = ["blufunc", *FURTHER]
    while pending:
        if (name := pending.pop(0)) in {s.name for s in found}:
            continue
        space = namespace(name)
        found.append(space)
        pending.extend(space.modules)
    return sorted(found, key=lambda s: s.name)
