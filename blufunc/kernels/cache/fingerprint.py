"""Programs as text that is the same in every process: what plans are kept under between processes.

Kernels, before stage 5, for ``plans.py``. In: a simplified jaxpr. Out: its ``Spelling``: equations with numbers in
the place of variables, operations by name, types, parameters, literals, the names of arguments, and the user's lines,
for plans have these in labels, and what is of one line may be lowered once. What has no such text, as a function has
none, is ``Unspelled``, which says what it was.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import numpy as np

from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import DropVar, Jaxpr, Literal
from blufunc.core.primitives.primitive import Primitive

_OURS = "blufunc."
_NAMED = frozenset(("blufunc", "numpy", "ml_dtypes", "builtins"))
"""The packages whose classes and functions are the same in every process under one name."""


class Unspelled(Exception):
    """Something of a program has no text that says all of it: ``str`` says what, and where, if that is ``placed``."""

    def __init__(self, what: str, placed: bool = False):
        super().__init__(what)
        self.placed = placed


class Spelling:
    """A program as text.

    Args:
      jaxpr: simplified, without constants.
    Raises:
      Unspelled: something in it has no text.

    Attributes:
      digest: a hash of the text.
      codes: the code objects of the user's lines, in the order in which they come: two programs of one text have, at
        one place, the same line of files of one name.
    """

    def __init__(self, jaxpr: Jaxpr):
        self.codes: list[CodeType] = []
        self._code_texts: dict[int, str] = {}
        self._lines: dict[str, int] = {}
        self._numbers: dict[Any, str] = {}
        self._bodies: dict[int, str] = {}
        self._dtypes: dict[Any, str] = {}
        self.digest = _hash(self._jaxpr(jaxpr), *self._lines)

    # -- programs --------------------------------------------------------------------------------------

    def _jaxpr(self, jaxpr: Jaxpr) -> str:
        """A hash of its text; a body that many equations have is spelled once."""
        found = self._bodies.get(id(jaxpr))
        if found is None:
            found = self._bodies[id(jaxpr)] = _hash(*self._text(jaxpr))
        return found

    def _text(self, jaxpr: Jaxpr) -> Iterable[str]:
        if jaxpr.consts:
            raise Unspelled("constants in its body")
        numbers: dict[Any, str] = {v: str(n) for n, v in enumerate(jaxpr.invars)}
        count = itertools.count(len(numbers))
        literal, value, line = self._literal, self._value, self._line

        def operand(atom: Any) -> str:
            return literal(atom) if atom.__class__ is Literal else numbers[atom]

        yield repr((jaxpr.name, jaxpr.arg_names))
        yield " ".join([str(v.aval) for v in jaxpr.invars])
        for eqn in jaxpr.eqns:
            try:
                read = [(k, v) for k, v in eqn.params.items() if is_read(eqn.prim, k, v)]
                head = f"{name_of(eqn.prim)}[{','.join([f'{k}={value(v)}' for k, v in read])}]"
            except Unspelled as e:
                where = f"{eqn.prim.name} at {source.summary(eqn.source)}"
                raise (e if e.placed else Unspelled(f"{where} has {e}", placed=True)) from None
            outs = []
            for v in eqn.outvars:
                numbers[v] = str(next(count))
                outs.append(f"_{v.aval}" if v.__class__ is DropVar else str(v.aval))
            operands = " ".join([operand(a) for a in eqn.invars])
            yield f"{head} {operands} -> {' '.join(outs)} @{line(eqn.source)}"
        yield " ".join([operand(a) for a in jaxpr.outvars])

    def _literal(self, atom: Literal) -> str:
        x = atom.array.__array__()
        return f"{atom.aval}:{x.tobytes().hex()}"

    def _line(self, line: source.Source | None) -> str:
        """The number of a line; the same for all instructions that an interpreter makes of one."""
        if line is None:
            return ""
        key = id(line[0]), *line[1:], source.is_backward(line)
        known = self._numbers.get(key)
        if known is None:
            how = *source.position_of(line), source.scopes_of(line), source.is_backward(line)
            place = f"{self._code(line[0])} {how!r}"
            known = self._numbers[key] = str(self._lines.setdefault(place, len(self._lines)))
        return known

    def _code(self, code: CodeType) -> str:
        """What a code object is, and its place among ``codes``. Plans count instructions: these are part of it.

        Of the file it is the name: a notebook's cells lie in a folder of each process, and labels name no folders.
        """
        text = self._code_texts.get(id(code))
        if text is None:
            digest = hashlib.sha256(code.co_code + code.co_linetable).hexdigest()
            file = os.path.basename(code.co_filename)
            where = len(self.codes), file, code.co_name, code.co_firstlineno, digest
            text = self._code_texts[id(code)] = repr(where)
            self.codes.append(code)
        return text

    # -- parameters ------------------------------------------------------------------------------------

    def _value(self, x: Any) -> str:
        kind = x.__class__
        if kind in _PLAIN:
            return repr(x)
        if kind is tuple:
            return f"({','.join(map(self._value, x))})"
        if isinstance(x, np.dtype):
            return self._dtype(x)
        if kind is CodeType:  # of a line that is a parameter
            return self._code(x)
        if kind is ShapedArray:
            return str(x)
        if kind is Jaxpr:
            return self._jaxpr(x)
        if isinstance(x, Primitive):
            return name_of(x)
        if isinstance(x, (type, FunctionType, BuiltinFunctionType)):
            return _global_name(x)
        if isinstance(x, (np.generic, np.ndarray)) and not x.dtype.hasobject:
            return f"{self._dtype(x.dtype)}{x.shape}:{x.tobytes().hex()}"
        return f"{_global_name(kind)}{self._parts(x)}"

    def _parts(self, x: Any) -> str:
        """What is in a value of a class of its own."""
        if isinstance(x, enum.Enum):
            return f".{x.name}"
        if isinstance(x, (tuple, list)):
            return f"({','.join(map(self._value, x))})"
        if isinstance(x, (set, frozenset)):
            return f"({','.join(sorted(map(self._value, x)))})"
        if isinstance(x, dict):
            return f"({','.join(f'{self._value(k)}:{self._value(v)}' for k, v in x.items())})"
        if isinstance(x, slice):
            return self._parts((x.start, x.stop, x.step))
        made = getattr(x.__class__, "__dataclass_params__", None)
        if made is None or not made.frozen:
            raise Unspelled(f"a {x.__class__.__name__}")
        return f"({','.join(self._value(getattr(x, f.name)) for f in dataclasses.fields(x))})"

    def _dtype(self, dtype: np.dtype) -> str:
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = repr(dtype)
        return found


def _hash(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_PLAIN = frozenset((int, bool, float, complex, str, bytes, type(None), type(Ellipsis), range))
"""Classes whose ``repr`` tells apart what is not the same."""


def is_read(prim: Primitive, name: str, value: Any) -> bool:
    """Whether a parameter is of any use in a program that is compiled.

    Calls that only stand for their bodies have rules beside these, which are for transforms.
    """
    return not prim.inline or isinstance(value, Jaxpr) or value.__class__ in _PLAIN


# -- what has a name -------------------------------------------------------------------------------

_names: dict[Primitive, str] = {}


def name_of(prim: Primitive) -> str:
    """Where a primitive of ours is to be found: ``module:name``.

    Raises:
      Unspelled: its class is not ours, or it is in no module of ours.
    """
    if type(prim).__module__.startswith(_OURS):
        found = _names.get(prim)
        if found is None or _named(found) is not prim:  # modules may be given others
            _names.update(_primitives())
            found = _names.get(prim)
        if found is not None and _named(found) is prim:
            return found
    raise Unspelled("rules that are not blufunc's own")


def primitive(name: str) -> Primitive:
    """The primitive that ``name_of`` gives this name.

    Raises:
      Unspelled: there is none.
    """
    if name.startswith(_OURS):
        importlib.import_module(name.partition(":")[0])
        if isinstance(found := _named(name), Primitive):
            return found
    raise Unspelled(f"no primitive {name}")


def _named(name: str) -> Any:
    """What is in a module under a name; None if there is none."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def _primitives() -> dict[Primitive, str]:
    """The names of the primitives that are global in our modules; of many names, the first."""
    found: dict[Primitive, str] = {}
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(_OURS)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, Primitive):
                found.setdefault(value, f"{module.__name__}:{name}")
    return found


def _global_name(x: type | Callable) -> str:
    """The name of a class or function of ours, of NumPy's or of Python's."""
    module, name = getattr(x, "__module__", None) or "", getattr(x, "__qualname__", "")
    what = "the class" if isinstance(x, type) else "the function"
    if module.partition(".")[0] in _NAMED:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is x:
            return f"{module}:{name}"
        raise Unspelled(f"{what} {name} of {module}, which has no global name")
    raise Unspelled(f"{what} {name} of {module}")
