"""Stable text of jaxprs, as ``print(jaxpr)`` and the golden files show it.

Core, at every stage. Names go a, b, ..., z, aa, ... in order of appearance, so the text depends only on the
program. Jaxprs inside parameters are printed indented below their equation. The IR itself uses it, so it
relies on duck typing only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes, source


def to_text(
    jaxpr: Any, *, lines: bool = False, indent: str = "", names: Callable[[Any], str] | None = None
) -> str:
    """The text of a jaxpr.

    Args:
      lines: whether to end each equation with the user's line.
      indent: prefix of each line.
      names: naming of variables, shared with the surrounding text.
    """
    name = names or _namer()
    shown = lambda v: f"{name(v)}:{jaxpr.local_aval(v)}"
    params = " ".join(map(shown, jaxpr.invars))
    consts = " ".join(map(shown, jaxpr.constvars))
    head = "{ lambda " + (f"{consts} ; " if consts else "; ") + (params + " " if params else "") + ". let"
    body = [_eqn(e, name, shown, indent + "    ", lines) for e in jaxpr.eqns]
    outs = ", ".join(_atom(v, name) for v in jaxpr.outvars) + ("," if len(jaxpr.outvars) == 1 else "")
    if not body:
        return f"{head} in ({outs}) }}"
    return "\n".join([head, *body, f"{indent}  in ({outs}) }}"])


def _namer() -> Callable[[Any], str]:
    fresh = _letters()
    known: dict[Any, str] = {}

    def name(var: Any) -> str:
        found = known.get(var)
        if found is None:
            found = known[var] = next(fresh)
        return found

    return name


def _letters() -> Iterator[str]:
    n = 0
    while True:
        text, k = "", n
        while True:
            text = chr(97 + k % 26) + text
            k = k // 26 - 1
            if k < 0:
                break
        yield text
        n += 1


def _atom(atom: Any, name: Callable[[Any], str]) -> str:
    if hasattr(atom, "array"):
        return f"{scalar_text(atom.value)}:{atom.aval}"
    return name(atom)


def scalar_text(value: Any) -> str:
    """The shortest text of a scalar that reads back equal."""
    if dtypes.is_key(value.dtype):
        return f"key({int(value['hi'])}, {int(value['lo'])})"
    return repr(value.item())


def _eqn(eqn: Any, name: Callable[[Any], str], shown: Callable[[Any], str], indent: str, lines: bool) -> str:
    ins = " ".join(_atom(a, name) for a in eqn.invars)
    params = [
        f"{k}={_param(v, indent + '  ', lines)}"
        for k, v in sorted(eqn.prim.shown(eqn.params).items())
        if v is not None
    ]
    where = f"  # {source.summary(eqn.source)}" if lines else ""
    if any("\n" in p for p in params):
        inside = "\n".join(f"{indent}  {p}" for p in params)
        settings = f"[\n{inside}\n{indent}]"
    else:
        settings = f"[{' '.join(params)}]" if params else ""
    outs = " ".join("_" if type(v).__name__ == "DropVar" else shown(v) for v in eqn.outvars)
    assigned = f"{outs} = " if outs else ""
    return f"{indent}{assigned}{eqn.prim}{settings} {ins}".rstrip() + where


def _param(value: Any, indent: str, lines: bool) -> str:
    if hasattr(value, "eqns"):
        return to_text(value, lines=lines, indent=indent)
    if isinstance(value, np.dtype):
        return dtypes.short_name(value)
    if isinstance(value, tuple):
        inner = ", ".join(_param(v, indent, lines) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return str(value)
