"""The syntax trees of elementwise functions in C: what ``c_parser.py`` reads and ``c_evaluator.py`` evaluates.

Transforms, before stage 1. Each node knows its place in the text (``at``, an index), so that whatever is wrong with it
can be shown there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from blufunc.core.ir import dtypes, source
from blufunc.errors import CompileError


@dataclass(frozen=True)
class Number:
    """A literal: a Python int, float or bool."""

    value: Any
    at: int


@dataclass(frozen=True)
class Name:
    """A parameter or a local variable."""

    name: str
    at: int


@dataclass(frozen=True)
class Apply:
    """An operator or a function of values: ``+`` (one operand or two), ``?:``, ``exp`` ..."""

    what: str
    args: tuple[Node, ...]
    at: int


@dataclass(frozen=True)
class Cast:
    """A conversion that the text asks for."""

    type: str
    arg: Node
    at: int


Node = Number | Name | Apply | Cast


@dataclass(frozen=True)
class Let:
    """A declaration with a value, or an assignment; ``type`` is the variable's."""

    name: str
    type: str
    value: Node
    at: int


@dataclass(frozen=True)
class If:
    """Two sides, of which the second may be empty."""

    test: Node
    then: tuple[Statement, ...]
    other: tuple[Statement, ...]
    at: int


@dataclass(frozen=True)
class Return:
    """The result."""

    value: Node
    at: int


Statement = Let | If | Return


@dataclass(frozen=True)
class Function:
    """What a text says.

    Attributes:
      name: the function's; None for an expression.
      inputs: its parameters, in order, with their types.
      result: the type of its result; ``auto`` for an expression.
      body: statements, of which the last on each path is a ``Return``.
      text: as it was given, for messages.
    """

    name: str | None
    inputs: tuple[tuple[str, str], ...]
    result: str
    body: tuple[Statement, ...]
    text: str


TYPES: dict[str, np.dtype | None] = {
    "auto": None,  # of the value
    "T": None,  # the common one of all parameters that are declared so
    "bool": dtypes.bool_,
    "char": dtypes.int8,
    "signed char": dtypes.int8,
    "unsigned char": dtypes.uint8,
    "short": dtypes.int16,
    "unsigned short": dtypes.uint16,
    "int": dtypes.int32,
    "signed": dtypes.int32,
    "signed int": dtypes.int32,
    "unsigned": dtypes.uint32,
    "unsigned int": dtypes.uint32,
    "long": dtypes.int64,
    "long long": dtypes.int64,
    "unsigned long": dtypes.uint64,
    "unsigned long long": dtypes.uint64,
    **{f"{d}_t": dtypes.as_dtype(d) for d in ("int8", "int16", "int32", "int64")},
    **{f"{d}_t": dtypes.as_dtype(d) for d in ("uint8", "uint16", "uint32", "uint64")},
    "half": dtypes.float16,
    "__half": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "__nv_bfloat16": dtypes.bfloat16,
    "float": dtypes.float32,
    "double": dtypes.float64,
}
"""The dtypes of C's types; None where it depends on the arguments."""


def always_returns(statements: Sequence[Statement]) -> bool:
    """Whether every path through the statements ends in a ``return``."""
    return any(
        isinstance(s, Return) or (isinstance(s, If) and always_returns(s.then) and always_returns(s.other))
        for s in statements
    )


# -- errors ----------------------------------------------------------------------------------------


def place(text: str, at: int) -> tuple[str, str]:
    """``column 5``, with the line where there are several, and that line with a mark under the place."""
    start = text.rfind("\n", 0, at) + 1
    line, column = text.count("\n", 0, at) + 1, at - start + 1
    shown = text[start:].split("\n", 1)[0]
    # tabs stay tabs, so that the mark is where it belongs however wide they are shown
    under = "".join("\t" if char == "\t" else " " for char in shown[: column - 1]) + "^"
    where = f"column {column}" if "\n" not in text.strip() else f"line {line}, column {column}"
    return where, f"{shown}\n{under}"


def fail(text: str, at: int, what: str, fix: str | None = None) -> NoReturn:
    """Raise the CompileError for the place ``at`` of ``text``."""
    where, marked = place(text, at)
    raise CompileError(f"elementwise, {where}: {what}.", where=source.here(), why=marked, fix=fix)


def unknown(
    text: str, node: Any, name: str, kind: str, names: Iterable[str], fix: str | None = None
) -> NoReturn:
    """Raise the CompileError for a name that nothing has, with the nearest one that something has."""
    near = difflib.get_close_matches(name, list(names), 1, 0.7)
    fail(text, node.at, f"there is no {kind} {name!r}", f"did you mean {near[0]}?" if near else fix)
