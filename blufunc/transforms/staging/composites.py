"""``composite``: a function that is one named operation in printed programs.

Transforms. A call of the function is a ``jit`` equation with the composite's name; compilers inline it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.jit import jit


def composite(decomposition: Callable, name: str, version: int = 0) -> Callable:
    """Name the computation of a function, as ``"my.softmax"``.

    Args:
      decomposition: the definition, a function of pytrees of arrays. What is passed by name is static.
      name: the name, with which calls appear in jaxprs.
      version: of the name; a number from 0 on.
    Returns:
      the function, with a call as one equation.
    """
    check_callable(decomposition, "composite")
    if not isinstance(name, str) or not isinstance(version, int) or version < 0:
        raise errors.ArgumentError(
            f"composite: the name {name!r:.60}, version {version!r:.60}.",
            where=source.here(),
            fix='composite(f, "my.operation", version=1)',
        )
    label = name if not version else f"{name}.v{version}"
    calls: dict[tuple, Callable] = {}

    @functools.wraps(decomposition)
    def call(*args: Any, **attributes: Any) -> Any:
        key = tuple(sorted(attributes.items()))
        try:
            function = calls.get(key)
        except TypeError:
            raise errors.StaticArgumentError(
                f"composite {name}: what is passed by name is static, and must be hashable.",
                where=source.here(),
                fix="pass arrays by position",
            ) from None
        if function is None:
            body = lambda *args: decomposition(*args, **attributes)
            body.__name__ = label
            function = calls[key] = jit(body)
        return function(*args)

    return call
