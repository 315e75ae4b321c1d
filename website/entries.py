"""Entry of a public name: parameters, result, errors, as stated once.

In: an object of the package. Out: an ``Entry``. Parameters come from the docstring's ``Args``, else from
``meanings.py``, which says once what ``axis`` is. Errors come from ``Raises``, and from the ``raise`` statements of
the function itself, whose messages say when. Types are the annotations.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from website import meanings
from website.shapes import CALLS, Call, measured


class Parameter(NamedTuple):
    """A parameter of an entry.

    Attributes:
      name: its name, with the stars of ``*args``.
      type: its annotation; empty if there is none.
      default: its default as source; None if it is required.
      meaning: what it is; empty is a gap.
    """

    name: str
    type: str
    default: str | None
    meaning: str


class Entry(NamedTuple):
    """The facts of a public name that is called.

    Attributes:
      name: the name.
      signature: its parameters as source; empty if Python knows none.
      summary: the docstring without its sections.
      parameters: all parameters but ``self``.
      returns: the result; empty is a gap.
      shapes: small calls with the types of their results; only of functions of arrays.
      raises: error classes, and when.
      unknown: names in ``Args`` that are no parameters: mistakes of a docstring.
    """

    name: str
    signature: str
    summary: str
    parameters: list[Parameter]
    returns: str
    shapes: list[Call]
    raises: list[tuple[str, str]]
    unknown: list[str]


_TITLES = "Args|Arguments|Returns|Yields|Raises|Attributes|Example|Examples"
_SECTION = re.compile(rf"^({_TITLES})(?: \([^)\n]*\))?:[ \t]*$", re.MULTILINE)


def sections(docstring: str) -> dict[str, str]:
    """The sections of a docstring; the text ahead of them is under ``""``."""
    parts = _SECTION.split(docstring)
    found = {"": parts[0].rstrip()}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        lines = body.strip("\n").split("\n")
        n = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
        found[title] = textwrap.dedent("\n".join(lines[:n])).strip("\n")
        if rest := "\n".join(lines[n:]).strip():
            found[""] += "\n\n" + rest
    return found


def items(section: str) -> list[tuple[str, str]]:
    """The items ``name, name: text`` of a section; several names give an item each."""
    found: list[tuple[str, str]] = []
    for block in re.split(r"\n(?=\S)", section):
        names, colon, text = block.partition(":")
        if colon and re.fullmatch(r"[\w*.`, \n]+", names):
            text = " ".join(line.strip() for line in text.strip().split("\n"))
            found += [(n.strip().strip("`").lstrip("*"), text) for n in names.split(",")]
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {block.strip()}")
    return found


def signature_of(value: Any) -> inspect.Signature | None:
    """The signature of a callable, or None."""
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


def _annotation(a: Any) -> str:
    if a is inspect.Parameter.empty:
        return ""
    text = a if isinstance(a, str) else inspect.formatannotation(a)
    return text.strip("'\"").replace("blufunc.core.ir.trace.", "").replace("typing.", "")


def _default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value)
    return "..." if " at 0x" in text or len(text) > 40 else text


def shown_signature(signature: inspect.Signature) -> str:
    """Parameters with defaults and without types, for a heading."""
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default=_Source(_default(p.default)))
        if p.default is not inspect.Parameter.empty
        else p.replace(annotation=inspect.Parameter.empty)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters))


class _Source:
    """An object whose ``repr`` is given source."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


@cache
def _tree(function: Callable) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _text(node: ast.expr | None) -> str:
    """Prose of an expression of a message: what is computed becomes an ellipsis."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""


def _message(call: ast.Call) -> str:
    """When an error is raised: its message, or its reason or fix if that is brief."""
    found = [_text(call.args[0])] if call.args else []
    found += [_text(k.value) for name in ("why", "fix") for k in call.keywords if k.arg == name]
    found = [re.sub(r"^[\w.…]+: ", "", text).strip().rstrip(".") for text in found]
    return next((text for text in found if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3), "")


def raised(function: Any, depth: int = 1) -> list[tuple[str, str]]:
    """Errors that a function, or a helper of its module, raises: class, message."""
    function = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(function) or (tree := _tree(function)) is None:
        return []
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = ast.unparse(node.exc.func)
            if called.startswith("errors."):
                found.setdefault(called.removeprefix("errors."), _message(node.exc))
        elif depth and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = function.__globals__.get(node.func.id)
            if inspect.isfunction(helper) and helper.__module__ == function.__module__:
                for cls, message in raised(helper, depth - 1):
                    found.setdefault(cls, message)
    return list(found.items())


_made: dict[tuple[str, str, int], Entry] = {}


def entry(name: str, value: Any, namespace: str) -> Entry:
    """The entry of a name, made once; for the arguments see ``_entry``."""
    key = (namespace, name, id(value))
    if key not in _made:
        _made[key] = _entry(name, value, namespace)
    return _made[key]


def _entry(name: str, value: Any, namespace: str) -> Entry:
    """The entry of a function, a class, or an object that is called.

    Args:
      name: the public name.
      value: its object.
      namespace: name of the public module, which decides between the meanings of a parameter.
    """
    plain = inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value)
    docstring = inspect.getdoc(value) or ""
    parts = sections(docstring)
    signature = signature_of(value)
    described = dict(items(parts.get("Args", parts.get("Arguments", ""))))
    fields = dict(items(parts.get("Attributes", ""))) if inspect.isclass(value) else {}
    if inspect.isclass(value) and "Args" not in parts and value.__init__.__doc__:
        described |= dict(items(sections(inspect.getdoc(value.__init__) or "").get("Args", "")))
    related = _related(parts[""], value)
    parameters, returns, calls = [], "", []
    if _is_made(value, namespace, name):
        signature = None
    if signature is not None:
        for p in signature.parameters.values():
            if p.name in ("self", "cls"):
                continue
            stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
            meaning = (
                described.get(p.name)
                or meanings.of_function(p.name, namespace, name)
                or fields.get(p.name)
                or related.get(p.name)
                or meanings.shared(p.name, namespace, _annotation(p.annotation))
                or ("see above" if f"``{p.name}``" in parts[""] else "")
            )
            default = None if p.default is p.empty else _default(p.default)
            parameters.append(Parameter(stars + p.name, _annotation(p.annotation), default, meaning))
        if returns_arrays(value, namespace, name):
            calls = measured(f"{namespace}.{name}", name, value)
        returns = _returns(parts, signature, value, namespace, name) or (
            _described(calls[0].result) if calls else ""
        )
    known = {p.name.lstrip("*") for p in parameters} if signature is not None else set(described)
    stated = [(cls, " ".join(text.split())) for cls, text in items(parts.get("Raises", ""))]
    classes = {cls for cls, _ in stated}
    derived = [
        (cls, text) for cls, text in raised(value if plain else type(value).__call__) if cls not in classes
    ]
    return Entry(
        name,
        shown_signature(signature) if signature is not None else "",
        parts[""] + "".join(f"\n\n{parts[t]}" for t in ("Example", "Examples") if t in parts),
        parameters,
        returns,
        calls,
        stated + derived,
        sorted(set(described) - known),
    )


ARRAYS = ("numpy", "lax", "nn", "random", "scipy", "image", "ops", "optim")
"""Namespaces whose functions are functions of arrays if their results are."""


def returns_arrays(value: Any, namespace: str, name: str) -> bool:
    """True for a function that an entry shows shapes of."""
    if inspect.isclass(value) or namespace.split(".")[1:2] == [] or namespace.split(".")[1] not in ARRAYS:
        return False
    if (calls := CALLS.get(_path(namespace, name))) is not None:
        return bool(calls)
    signature = signature_of(value)
    if signature is None:
        return False
    annotation = _annotation(signature.return_annotation)
    return ("Array" in annotation and "Callable" not in annotation) or annotation in ("Any", "")


def _path(namespace: str, name: str) -> str:
    return f"{namespace}.{name}".removeprefix("blufunc.")


def _described(result: str) -> str:
    return {"(": "a tuple of arrays", "[": "a list of arrays", "{": "a dict of arrays"}.get(
        result[0], "`Array`"
    )


def _related(text: str, value: Any, depth: int = 1) -> dict[str, str]:
    """Parameters of functions that a docstring names: "arguments of ``csd``"."""
    found: dict[str, str] = {}
    if not inspect.isfunction(value):
        return found
    for name in re.findall(r"``(\w+)``", text):
        other = value.__globals__.get(name)
        if inspect.isfunction(other) and other is not value:
            parts = sections(inspect.getdoc(other) or "")
            own = dict(items(parts.get("Args", "")))
            further = _related(parts[""], other, depth - 1) if depth else {}
            found = further | own | found
    return found


def _is_made(value: Any, namespace: str, name: str) -> bool:
    """True for classes that programs do not call: enumerations, and ``MADE``."""
    return inspect.isclass(value) and (issubclass(value, enum.Enum) or name in MADE)


MADE = {
    "Lowered", "Compiled", "Traced", "Wrapped", "ArgInfo", "TreeDef", "PyTreeDef", "Var", "DropVar", "JaxprEqn",
    "Token", "Tracer", "Array", "Trace", "Device", "Value", "KeyEntry", "ParamDict",
}  # fmt: skip
"""Classes whose objects programs get from functions."""


def _returns(
    parts: dict[str, str], signature: inspect.Signature, value: Any, namespace: str, name: str
) -> str:
    if text := parts.get("Returns", parts.get("Yields", "")):
        return " ".join(text.split())
    if inspect.isclass(value):
        return f"an instance of `{name}`"
    annotation = _annotation(signature.return_annotation)
    if annotation == "None":
        return "nothing"
    if text := meanings.result(namespace, name):
        return text
    return f"`{annotation}`" if annotation and annotation != "Any" else ""
