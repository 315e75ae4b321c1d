"""Meanings that parameters of one name share, and results without docstrings.

In: ``meanings.toml``. Out: the meaning of a parameter, by function, then namespace, then anywhere. A docstring that
says something of a parameter takes precedence; the table is for hundreds of functions of which ``axis`` is the axis.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

TABLES: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "meanings.toml").read_text())


def of_function(parameter: str, namespace: str, function: str) -> str:
    """The meaning of a parameter in its function's table, or empty."""
    return TABLES.get(_function(namespace, function), {}).get(parameter, "")


def shared(parameter: str, namespace: str, annotation: str = "") -> str:
    """The meaning of a parameter in a namespace, the inner ones first, or anywhere.

    A row ``"axis:int"`` is for parameters of that name and annotation, and precedes the others.
    """
    if found := TABLES["shared"].get(f"{parameter}:{annotation}"):
        return found
    place = namespace.removeprefix("blufunc.")
    while place:
        if found := TABLES.get(place, {}).get(parameter):
            return found
        place = place.rpartition(".")[0]
    return TABLES["shared"].get(parameter, "")


def result(namespace: str, function: str) -> str:
    """The result of a function whose docstring has no ``Returns``, or empty."""
    return TABLES["results"].get(_function(namespace, function), "")


def _function(namespace: str, function: str) -> str:
    """A function as the tables spell it: ``numpy.eye``, ``blufunc.jit``."""
    return f"{namespace.removeprefix('blufunc.')}.{function}"
