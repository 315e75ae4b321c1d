"""Debugging of running programs: ``print``, ``callback``, sharding plots.

Face. In: values of a program, eager or under any transform. Out: reports at run time, per iteration of a loop
and per element of a ``vmap``. Derivatives report in the forward pass only, also under ``checkpoint`` (JAX
repeats the report).
"""

from __future__ import annotations

import builtins
import logging
import pdb
import re
import string
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.trace import Array
from blufunc.core.primitives.effects import DebugEffect, OrderedDebugEffect
from blufunc.parallel.reports.visualize import visualize_sharding
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.staging.callback import debug_callback

__all__ = [
    "DebugEffect",
    "OrderedDebugEffect",
    "breakpoint",
    "callback",
    "log",
    "print",
    "visualize_array_sharding",
    "visualize_sharding",
]

visualize_array_sharding = visualize_sharding


def callback(
    callback: Callable, *args: Any, ordered: bool = False, partitioned: bool = False, **kwargs: Any
) -> None:
    """Call a Python function with the values of arrays, at run time.

    Args:
      callback: called for its side effects; its result is ignored. It may keep references to its arguments.
      args, kwargs: its arguments, pytrees; leaves that are not arrays, such as strings, are passed unchanged.
      ordered: keep the calls in program order relative to other ordered ones.
      partitioned: False; it sees whole arrays, on a mesh too, where the first device reports.
    Raises:
      ArgumentError: ``callback`` is not a function.
    """
    check_callable(callback, "debug.callback")
    _check_whole(partitioned, "debug.callback")
    debug_callback(callback, args, kwargs, ordered, "debug.callback")


def print(
    fmt: str,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    **kwargs: Any,
) -> None:
    """Print the values of arrays at run time: ``debug.print("x = {x}", x=x)``.

    Args:
      fmt: a format string for ``str.format``, not an f-string.
      args, kwargs: the values to format: pytrees of arrays, and any other objects.
      ordered: keep the lines in program order relative to other ordered ones.
      partitioned: False; it sees whole arrays, on a mesh too, where the first device reports.
      skip_format_check: do not check ``fmt`` before it is printed.
    Raises:
      ArgumentError: ``fmt`` is not a string, is an f-string of traced values, or does not fit the arguments.
    """
    line = lambda text: builtins.print(f"{text}\n", end="")  # one write: ranks are threads
    _report("print", line, fmt, args, kwargs, ordered, partitioned, skip_format_check)


def log(
    fmt: str,
    *args: Any,
    ordered: bool = False,
    partitioned: bool = False,
    skip_format_check: bool = False,
    level: int = logging.INFO,
    **kwargs: Any,
) -> None:
    """Log the values of arrays at run time, to the logger ``blufunc``.

    Args:
      fmt, args, kwargs, ordered, partitioned, skip_format_check: as of ``print``.
      level: the level of the record, of the module ``logging``.
    """
    write = lambda text: logging.getLogger("blufunc").log(level, "%s", text)
    _report("log", write, fmt, args, kwargs, ordered, partitioned, skip_format_check)


def _report(
    name: str,
    emit: Callable[[str], object],
    fmt: str,
    args: tuple,
    kwargs: dict[str, Any],
    ordered: bool,
    partitioned: bool,
    skip_format_check: bool,
) -> None:
    """Format values at run time, and emit the text."""
    api = f"debug.{name}"
    if not isinstance(fmt, str):
        raise errors.ArgumentError(
            f"{api} takes a format string first, not {_short(fmt)}.",
            where=source.here(),
            fix=f'{api}("x = {{x}}", x=x)',
        )
    _check_whole(partitioned, api)
    if not skip_format_check:
        _check_format(fmt, args, kwargs)
    line = source.current()

    def show(*args: Any, **kwargs: Any) -> None:
        try:
            text = fmt.format(*args, **kwargs)
        except (errors.BlufuncError, AttributeError, LookupError, TypeError, ValueError) as e:
            raise _unfit(fmt, getattr(e, "what", str(e)), source.describe(line)) from None
        emit(text)

    show.__name__ = name
    debug_callback(show, args, kwargs, ordered, api, keep=(bool, int, float, complex))


def breakpoint(
    *,
    backend: str | None = None,
    ordered: bool = False,
    token: None = None,
    stdin: Any = None,
    stdout: Any = None,
) -> None:
    """Stop the program at run time in a debugger, with the values of local variables.

    The debugger sees the arrays, traced or not, and the numbers among the local variables of the calling function, as
    NumPy arrays. ``interact`` starts a Python prompt with them; ``c`` goes on.

    Args:
      backend: None or ``"cli"``: ``pdb`` in the terminal.
      ordered: keep the stop in program order relative to other ordered callbacks.
      token: None.
      stdin, stdout: files to use instead of the terminal's.
    """
    if token is not None or backend not in (None, "cli"):
        raise errors.UnsupportedError(
            f"debug.breakpoint with token={_short(token)}, backend={_short(backend)}.",
            where=source.here(),
            fix="leave both out: the debugger is pdb",
        )
    frame = sys._getframe(1)
    where = f"{frame.f_code.co_name} at {frame.f_code.co_filename}:{frame.f_lineno}"
    found = {
        k: v for k, v in frame.f_locals.items() if isinstance(v, (Array, np.ndarray, int, float, complex))
    }

    def stop(**values: Any) -> None:
        debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
        debugger.message(f"{where}: {', '.join(values) or 'no arrays'}")
        debugger.run("pass", {"__name__": "breakpoint", **values}, values)

    stop.__name__ = "breakpoint"
    debug_callback(stop, (), found, ordered, "debug.breakpoint", keep=(bool, int, float, complex))


# -- checking formats ------------------------------------------------------------------------------


def _check_format(fmt: str, args: tuple, kwargs: dict) -> None:
    """Raise ArgumentError unless ``fmt`` uses exactly the arguments, with valid specs."""
    if "Tracer<" in fmt:
        raise errors.ArgumentError(
            f"debug.print was given the text of a traced value: {_short(fmt)}.",
            where=source.here(),
            why="an f-string is formatted while the function is traced, when its arrays have no values yet.",
            fix='debug.print("x = {x}", x=x)   (skip_format_check=True prints the text as it is)',
        )
    used = set()
    try:
        for key, plain, spec in _fields(fmt):
            used.add(key)
            if key not in kwargs and not (isinstance(key, int) and key < len(args)):
                name = f"{{{key}}}" if isinstance(key, str) else f"positional argument {key}"
                raise ValueError(f"it asks for {name}, which is not given")
            if plain and spec:
                _check_spec(args[key] if isinstance(key, int) else kwargs[key], spec)
    except ValueError as e:
        raise _unfit(fmt, str(e), source.here()) from None
    unused = [f"positional argument {i}" for i in range(len(args)) if i not in used]
    unused += [k for k in kwargs if k not in used]
    if unused:
        raise _unfit(fmt, f"it does not use {', '.join(unused)}", source.here())


def _fields(fmt: str) -> Iterator[tuple[int | str, bool, str]]:
    """The fields of a format: argument, absence of a conversion, and format spec.

    Raises:
      ValueError: it is not a format.
    """
    position = 0
    numbered: bool | None = None
    pending = [fmt]
    while pending:
        for _, field, spec, conversion in string.Formatter().parse(pending.pop(0)):
            if field is None:
                continue
            root = re.split(r"[.\[]", field, maxsplit=1)[0]
            key: int | str = int(root) if root.isdecimal() else root
            if isinstance(key, int) or not root:
                if numbered not in (None, bool(root)):
                    raise ValueError("it mixes fields with and without numbers")
                numbered = bool(root)
            if not root:
                key, position = position, position + 1
            if conversion not in (None, "r", "s", "a"):
                raise ValueError(f"it has the unknown conversion !{conversion}")
            spec = spec or ""
            if "{" in spec:
                pending.append(spec)
            yield key, root == field and conversion is None and "{" not in spec, spec


def _check_spec(x: Any, spec: str) -> None:
    """Raise ValueError if ``spec`` is invalid for a scalar; other objects pass."""
    if not isinstance(x, (Array, np.ndarray, np.generic)):
        return
    if x.ndim or dtypes.is_key(x.dtype):
        raise ValueError(
            f"the format {spec!r} is for numbers, and there is an array of shape {x.shape} for it"
        )
    format(np.zeros((), x.dtype).item(), spec)


def _unfit(fmt: str, why: str, where: str | None) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"debug.print cannot format {_short(fmt)}.",
        where=where,
        why=why if why.endswith(".") else why + ".",
        fix='name what is printed: debug.print("x = {x}, y = {y}", x=x, y=y); for braces write {{ and }}',
    )


def _check_whole(partitioned: bool, api: str) -> None:
    if partitioned is not False:
        raise errors.UnsupportedError(
            f"{api} with partitioned={_short(partitioned)}.",
            where=source.here(),
            why="a callback sees whole arrays.",
            fix="partitioned=False",
        )


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 60 else text[:57] + "..."
