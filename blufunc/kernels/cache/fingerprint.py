"""Fingerprints of programs, equal in every process: the keys of their plans.

Kernels, before stage 5, for ``plans.py``. In: a simplified jaxpr. Out: its ``Fingerprint``. It covers the equations
with numbered variables, operations by name, types, parameters, literals, names of arguments, and the user's lines:
plans have these in labels, and equations of one line may be lowered once. A program with a part that has no stable
text, such as a function, raises ``NoFingerprint``, which names it.
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

_PREFIX = "blufunc."
_NAMED = frozenset(("blufunc", "numpy", "ml_dtypes", "builtins"))
"""Packages whose classes and functions have one name in every process."""


class NoFingerprint(Exception):
    """A part of a program has no stable text: which, and where, if ``placed``."""

    def __init__(self, what: str, placed: bool = False):
        super().__init__(what)
        self.placed = placed


class Fingerprint:
    """The hash of a program.

    Args:
      jaxpr: simplified, without constants.

    Attributes:
      digest: the hash.
      codes: the code objects of the user's lines, in order: programs with equal digests have the same line, of files of
        one name, at each position.

    Raises:
      NoFingerprint: a part of the program has no stable text.
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
        """The hash of a jaxpr; a body shared by equations is hashed once."""
        found = self._bodies.get(id(jaxpr))
        if found is None:
            found = self._bodies[id(jaxpr)] = _hash(*self._text(jaxpr))
        return found

    def _text(self, jaxpr: Jaxpr) -> Iterable[str]:
        if jaxpr.consts:
            raise NoFingerprint("constants in its body")
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
            except NoFingerprint as e:
                where = f"{eqn.prim.name} at {source.summary(eqn.source)}"
                raise (e if e.placed else NoFingerprint(f"{where} has {e}", placed=True)) from None
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
        """The index of a line, shared by all bytecode instructions of one line."""
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
        """The text of a code object, with its position in ``codes``.

        Plans refer to code by position. Of the file, only the name counts:
        a notebook's cells are in a folder per process, and labels name no folders.
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
        if kind is CodeType:  # from a line that is a parameter
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
        """The contents of an instance of a class."""
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
        options = getattr(x.__class__, "__dataclass_params__", None)
        if options is None or not options.frozen:
            raise NoFingerprint(f"a {x.__class__.__name__}")
        return f"({','.join(self._value(getattr(x, f.name)) for f in dataclasses.fields(x))})"

    def _dtype(self, dtype: np.dtype) -> str:
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = repr(dtype)
        return found


def _hash(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


_PLAIN = frozenset((int, bool, float, complex, str, bytes, type(None), type(Ellipsis), range))
"""Classes whose ``repr`` is injective."""


def is_read(prim: Primitive, name: str, value: Any) -> bool:
    """True if a compiled program can depend on a parameter.

    Calls that are inlined also have rules as parameters, which only transforms read.
    """
    return not prim.inline or isinstance(value, Jaxpr) or value.__class__ in _PLAIN


# -- global names ----------------------------------------------------------------------------------

_names: dict[Primitive, str] = {}


def name_of(prim: Primitive) -> str:
    """The global name of a blufunc primitive: ``module:name``.

    Raises:
      NoFingerprint: its class is not blufunc's, or it is in none of blufunc's modules.
    """
    if type(prim).__module__.startswith(_PREFIX):
        found = _names.get(prim)
        if found is None or _named(found) is not prim:  # a module's attribute may be replaced
            _names.update(_primitives())
            found = _names.get(prim)
        if found is not None and _named(found) is prim:
            return found
    raise NoFingerprint("rules that are not blufunc's own")


def primitive(name: str) -> Primitive:
    """The primitive with a name from ``name_of``.

    Raises:
      NoFingerprint: there is none.
    """
    if name.startswith(_PREFIX):
        importlib.import_module(name.partition(":")[0])
        if isinstance(found := _named(name), Primitive):
            return found
    raise NoFingerprint(f"no primitive {name}")


def _named(name: str) -> Any:
    """The attribute that a name refers to; None if there is none."""
    module, _, attribute = name.partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def _primitives() -> dict[Primitive, str]:
    """Names of the global primitives in blufunc's modules; the first name of each."""
    found: dict[Primitive, str] = {}
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(_PREFIX)]:
        for name, value in list(vars(module).items()):
            if isinstance(value, Primitive):
                found.setdefault(value, f"{module.__name__}:{name}")
    return found


def _global_name(x: type | Callable) -> str:
    """The name of a class or function of blufunc, NumPy or Python."""
    module, name = getattr(x, "__module__", None) or "", getattr(x, "__qualname__", "")
    what = "the class" if isinstance(x, type) else "the function"
    if module.partition(".")[0] in _NAMED:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is x:
            return f"{module}:{name}"
        raise NoFingerprint(f"{what} {name} of {module}, which has no global name")
    raise NoFingerprint(f"{what} {name} of {module}")
