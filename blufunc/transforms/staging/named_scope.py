"""``named_scope`` and ``named_call``: names that every transform keeps.

Transforms, stage 1. In: a name. Out: source lines with the names of open scopes, for each equation staged in them; they
appear wherever lines are shown: jaxprs printed with lines, the source of compiled programs. A derivative's equations
have the scopes of the equations they come from.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from blufunc.core.ir import source
from blufunc.errors import ArgumentError, ValueRangeError
from blufunc.transforms.arguments import check_callable, name_of

P = ParamSpec("P")
R = TypeVar("R")


def named_scope(name: str) -> contextlib._GeneratorContextManager[None]:
    """Name the operations of a block or function. Scopes nest: ``encoder/layer``.

    Args:
      name: the name, of printable characters.
    Returns:
      a context manager and decorator.
    Raises:
      ArgumentError: ``name`` is not a string.
      ValueRangeError: ``name`` is empty or holds line breaks or other control characters.
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f"named_scope takes a string, not {name!r}.",
            where=source.here(),
            fix='with bf.named_scope("layer"):',
        )
    if not name or not name.isprintable():
        raise ValueRangeError(
            f"named_scope: {name!r} is not a name.",
            where=source.here(),
            why="names are shown in the comments of programs, a line for each operation.",
            fix="use one or more printable characters",
        )
    return _scope(name)


@contextlib.contextmanager
def _scope(name: str) -> Iterator[None]:
    replayed = source.replay.line
    if replayed is not None:  # within a rule for an equation: this scope nests in the equation's
        source.replay.line = source.within(source.scopes_of(replayed) + (name,), replayed[:2])
        try:
            yield
        finally:
            source.replay.line = replayed
        return
    before = source.open_scopes(())
    source.open_scopes((*before, name))
    try:
        yield
    finally:
        source.open_scopes(before)


def named_call(fun: Callable[P, R], *, name: str | None = None) -> Callable[P, R]:
    """Wrap ``fun`` in a named scope.

    Args:
      fun: a function.
      name: the name of the scope; default the name of the function.
    Returns:
      a function of the same arguments.
    """
    check_callable(fun, "named_call")
    scope = name_of(fun) if name is None else name
    named_scope(scope)  # raise for a bad name here, not at the first call

    @functools.wraps(fun)
    def named(*args, **kwargs):
        with named_scope(scope):
            return fun(*args, **kwargs)

    return named
