"""Programs as JSON and constants, and back.

Above ``values.py`` and ``rules.py``. In: a jaxpr. Out: a ``Document``: tables of primitives, types, lines, jaxprs and
rules, which refer to one another by number, and the arrays of constants. A jaxpr numbers its variables: constants,
parameters, then the results of its equations. An equation is

    [primitive, operands, result types, parameters, line]

where an operand is the number of a variable, or ``[dtype, bytes, weak]`` of a literal; the type of a result that is
never read is negative, minus one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.primitive import Primitive, named
from blufunc.core.primitives.rule_errors import type_of
from blufunc.export import rules, structures, values
from blufunc.export.values import Inexpressible, Unreadable
from blufunc.transforms.control_flow.calls import jit_p
from blufunc.transforms.custom_rules.custom_jvp import _FlatRule, custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p
from blufunc.transforms.custom_rules.custom_vmap import custom_vmap_call_p

_PREFIX = "blufunc."

_CALLS_PYTHON = {
    "pure_callback": "compute it with blufunc operations, or leave it to the caller of the program",
    "io_callback": "leave it to the caller of the program: return what it reads",
    "debug_callback": "leave out the print, or return the value",
    "check": "export checkify.checkify(f), which returns the error",
    "cuda_kernel": "export the function that calls the reference in its place",
}
"""Primitives that hold Python code of the user, and what to write in their place."""

_RULE: dict[Primitive, str] = {custom_jvp_call_p: "rule", custom_vjp_call_p: "fwd"}


@dataclass
class Document:
    """A program outside of Python.

    Attributes:
      tables: JSON: lists of primitives, types, lines, jaxprs and rules; ``main`` is the number of the program's jaxpr.
      constants: arrays that jaxprs refer to by number.
    """

    tables: dict[str, Any]
    constants: list[Any]


# -- writing ---------------------------------------------------------------------------------------


class _Table:
    """Numbers for different keys."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, row: Callable[[], Any]) -> int:
        found = self._numbers.get(key)
        if found is None:
            made = row()  # it may add rows
            found = self._numbers[key] = len(self.rows)
            self.rows.append(made)
        return found


class _Writer:
    def __init__(self) -> None:
        self.primitives, self.types, self.lines, self.jaxprs, self.rules = (_Table() for _ in range(5))
        self.constants: list[Any] = []
        self._constants: dict[int, int] = {}
        self._kept: list[Any] = []  # their ids are keys
        self._pending: list[tuple[int, Eqn, int]] = []
        self._depth = 0
        self._encode = values.Encoder(self.jaxpr, self.primitive)

    def document(self, jaxpr: Jaxpr) -> Document:
        """The whole program. Rules follow their uses, as they may use themselves."""
        main = self.jaxpr(jaxpr)
        while self._pending:
            number, eqn, self._depth = self._pending.pop(0)
            self.rules.rows[number] = self._staged(eqn)
        tables = {name: getattr(self, name).rows for name in _TABLES}
        return Document({"main": main, **tables}, self.constants)

    def jaxpr(self, jaxpr: Jaxpr) -> int:
        self._kept.append(jaxpr)
        return self.jaxprs.number(id(jaxpr), lambda: self._jaxpr(jaxpr))

    def primitive(self, prim: Primitive) -> int:
        return self.primitives.number(prim, lambda: _primitive_row(prim))

    def _type(self, aval: ShapedArray) -> int:
        return self.types.number(aval, lambda: values.aval_text(aval))

    def _jaxpr(self, jaxpr: Jaxpr) -> dict:
        numbers: dict[Any, int] = {}
        for v in (*jaxpr.constvars, *jaxpr.invars):
            numbers[v] = len(numbers)

        def operand(atom: Atom) -> Any:
            return numbers[atom] if atom.__class__ is not Literal else _literal_row(atom)

        eqns = []
        for eqn in jaxpr.eqns:
            prim, params = self._operation(eqn)
            operands = [operand(a) for a in eqn.invars]
            outs = []
            for v in eqn.outvars:
                numbers[v] = len(numbers)
                kind = self._type(v.aval)
                outs.append(-1 - kind if v.__class__ is DropVar else kind)
            eqns.append([prim, operands, outs, params, self._line(eqn.source)])
        return {
            "name": jaxpr.name,
            "arg_names": [*map(str, jaxpr.arg_names)],
            "constants": [self._constant(c) for c in jaxpr.consts],
            "constant_types": [self._type(v.aval) for v in jaxpr.constvars],
            "parameters": [self._type(v.aval) for v in jaxpr.invars],
            "equations": eqns,
            "results": [operand(a) for a in jaxpr.outvars],
        }

    def _constant(self, x: Any) -> int:
        if id(x) not in self._constants:
            if not isinstance(x, ConcreteArray):
                raise errors.ArgumentError(
                    f"export: the program holds a traced value of {x.aval}.",
                    where=source.here(),
                    why="it was traced inside another transform, whose values it needs.",
                    fix="export the function outside of jit, grad and vmap",
                )
            self._constants[id(x)] = len(self.constants)
            self.constants.append(x)
        return self._constants[id(x)]

    def _operation(self, eqn: Eqn) -> tuple[int, dict[str, Any]]:
        """The number of a primitive, and its encoded parameters."""
        prim, params = eqn.prim, eqn.params
        if prim.name in _CALLS_PYTHON and home_of(prim):
            called = next(iter(params.values()))
            raise errors.UnsupportedError(
                f"export: {prim.name} of {getattr(called, '__name__', called)}.",
                where=source.describe(eqn.source),
                why="it holds Python code, which an exported program does not contain.",
                fix=_CALLS_PYTHON[prim.name],
            )
        if prim is custom_vmap_call_p:  # its rule gives what the batched body gives
            prim, params = jit_p, {"jaxpr": params["jaxpr"], "name": params["name"]}
        encoded = {}
        for key, value in params.items():
            if key == _RULE.get(prim):
                encoded[key] = {"rule": self._rule(eqn)}
                continue
            try:
                encoded[key] = self._encode(value)
            except Inexpressible as error:
                raise errors.UnsupportedError(
                    f"export: {prim.name} has {key}={value!r:.60}, which is {error}.",
                    where=source.describe(eqn.source),
                    why="an exported program holds numbers, types and jaxprs, and no Python code.",
                    fix="use parameters of these kinds: for a policy of checkpoint, one of bf.checkpoint_policies",
                ) from None
        return self.primitive(prim), encoded

    # -- rules -----------------------------------------------------------------------------------

    def _rule(self, eqn: Eqn) -> int:
        rule, avals = _rule_of(eqn)
        self._kept.append(eqn)
        n = len(self.rules.rows)
        number = self.rules.number(rules.key_of(rule, avals), lambda: None)
        if number == n:
            own = self._own_rule(rule)
            if own is not None:
                self.rules.rows[number] = own
            elif self._depth >= rules.DEPTH:
                self.rules.rows[number] = _missing(rule, f"rules are stored to a depth of {rules.DEPTH}.")
            else:
                self._pending.append((number, eqn, self._depth + 1))
        return number

    def _own_rule(self, rule: Any) -> dict | None:
        """A reference to the rule of one of blufunc's functions."""
        found = rules.own_function(rule)
        if found is None:
            return None
        try:
            static = [self._encode(x) for x in rule.static]
            in_tree = structures.encoded(rule.in_tree)
        except (Inexpressible, errors.BlufuncError):
            return None
        return {"kind": "own", "function": list(found), "in_tree": in_tree, "static": static}

    def _staged(self, eqn: Eqn) -> dict:
        rule, avals = _rule_of(eqn)
        outs = eqn.params["jaxpr"].out_avals
        try:
            with source.own_lines():
                if eqn.prim is custom_jvp_call_p:
                    jaxpr = rules.staged_jvp(rule, avals)
                    return {
                        "kind": "jvp",
                        "name": rule.__name__,
                        "n_outs": len(outs),
                        "jaxpr": self.jaxpr(jaxpr),
                    }
                forward, backward, given = rules.staged_vjp(rule, avals, outs)
                return {
                    "kind": "vjp", "name": rule.__name__, "n_outs": len(outs), "given": list(given),
                    "forward": self.jaxpr(forward), "backward": self.jaxpr(backward),
                }  # fmt: skip
        except Exception as error:  # the user's code: the program may be run all the same
            return _missing(rule, f"it could not be staged: {type(error).__name__}: {error}")

    # -- lines -----------------------------------------------------------------------------------

    def _line(self, line: source.Source | None) -> int | None:
        if line is None:
            return None
        code = line[0]
        file = os.path.basename(code.co_filename).removeprefix("<exported ").removesuffix(">")
        row = (file, code.co_name, source.line_of(line), source.scopes_of(line), source.is_backward(line))
        return self.lines.number(row, lambda: [*row[:3], list(row[3]), row[4]])


_TABLES = ("primitives", "types", "lines", "jaxprs", "rules")


def encoded(jaxpr: Jaxpr) -> Document:
    """A jaxpr, with its constants, as a document.

    Raises:
      UnsupportedError: an equation holds what no file can: Python code, a primitive that has no name of its own.
    """
    return _Writer().document(jaxpr)


def _rule_of(eqn: Eqn) -> tuple[Any, list[ShapedArray]]:
    """The rule of an equation, and the types of its arguments."""
    n = eqn.params["n_consts"]
    return eqn.params[_RULE[eqn.prim]], [a.aval for a in eqn.invars[n:]]


def _missing(rule: Any, reason: str) -> dict:
    return {"kind": "missing", "name": rule.__name__, "reason": reason}


def _literal_row(atom: Any) -> list:
    x = np.asarray(atom.array)
    return [values.dtype_name(x.dtype), x.tobytes().hex(), atom.aval.weak_type]


def _primitive_row(prim: Primitive) -> list:
    """The name of a primitive, and the module that defines it."""
    own = home_of(prim)
    if own is None and named.get(prim.name) is not prim:
        raise errors.UnsupportedError(
            f"export: two primitives have the name {prim.name}.",
            where=source.here(),
            why="a program finds a primitive that is not blufunc's by its name.",
            fix="give the primitive a name of its own",
        )
    module = type(prim).__module__
    return [prim.name, own or ("" if module.startswith(_PREFIX) else module)]


@functools.cache
def _homes(n_modules: int) -> dict[int, str]:
    """The module of each of blufunc's primitives, by id."""
    found: dict[int, str] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and not name.startswith("blufunc.as_jax"):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive) and type(value).__module__.startswith(_PREFIX):
                    known = found.get(id(value))
                    if known is None or name == type(value).__module__:
                        found[id(value)] = name
    return found


def home_of(prim: Primitive) -> str | None:
    """The module of one of blufunc's primitives; None for a user's."""
    return _homes(len(sys.modules)).get(id(prim))


# -- reading ---------------------------------------------------------------------------------------


def decoded(document: Document) -> Jaxpr:
    """The jaxpr of a document, its types checked.

    Raises:
      Unreadable: it refers to what is not there.
      UnsupportedError: it has a primitive that this process does not have.
      JaxprTypeError: a primitive does not take the types or parameters that it says.
    """
    return _Reader(document).jaxpr(document.tables["main"])


class _Reader:
    def __init__(self, document: Document):
        self._tables, self._constants = document.tables, document.constants
        self._types = [values.aval_of(row) for row in self._tables["types"]]
        self._lines = [_source_of(*row) for row in self._tables["lines"]]
        self._primitives = [primitive_named(*row) for row in self._tables["primitives"]]
        self._jaxprs: dict[int, Jaxpr] = {}
        self._rules: list[Any] = [None] * len(self._tables["rules"])
        self._decode = values.Decoder(self.jaxpr, self._primitives.__getitem__, self._rule)
        for number in range(len(self._tables["jaxprs"])):
            self.jaxpr(number)
        for number, row in enumerate(self._tables["rules"]):
            for part in ("jaxpr", "forward", "backward"):
                if part in row:
                    setattr(self._rule(number), part, self.jaxpr(row[part]))

    def jaxpr(self, number: int) -> Jaxpr:
        found = self._jaxprs.get(number)
        if found is None:
            found = self._jaxprs[number] = self._jaxpr(self._tables["jaxprs"][number])
        return found

    def _rule(self, number: int) -> Any:
        if self._rules[number] is None:
            self._rules[number] = self._made_rule(self._tables["rules"][number])
        return self._rules[number]

    def _made_rule(self, row: dict) -> Any:
        match row:
            case {"kind": "own", "function": [module, name], "in_tree": in_tree, "static": static}:
                owner: Any = getattr(_own_module(module), name, None)
                if not hasattr(owner, "defjvp"):
                    raise Unreadable(f"{module} has no custom_jvp function {name}")
                return _FlatRule(owner, structures.decoded(in_tree), tuple(map(self._decode, static)))
            case {"kind": "jvp"}:
                return rules.JVPRule(row["name"], row["n_outs"])
            case {"kind": "vjp"}:
                return rules.VJPRule(row["name"], row["n_outs"], row["given"])
            case {"kind": "missing"}:
                return rules.MissingRule(row["name"], row["reason"])
        raise Unreadable(f"{row!r:.60} is no rule")

    def _jaxpr(self, row: dict) -> Jaxpr:
        types = self._types
        constvars = [Var(types[t]) for t in row["constant_types"]]
        invars = [Var(types[t]) for t in row["parameters"]]
        variables: list[Var] = [*constvars, *invars]

        def operand(x: Any) -> Atom:
            return variables[x] if x.__class__ is int else _literal_of(*x)

        eqns = []
        for number, operands, outs, params, line in row["equations"]:
            ins = [operand(x) for x in operands]
            outvars = [Var(types[t]) if t >= 0 else DropVar(types[-1 - t]) for t in outs]
            variables += outvars
            decoded_params = {key: self._decode(value) for key, value in params.items()}
            where = None if line is None else self._lines[line]
            eqn = Eqn(self._primitives[number], ins, outvars, decoded_params, where)
            _check_types(eqn)
            eqns.append(eqn)
        jaxpr = Jaxpr(
            invars,
            eqns,
            [operand(x) for x in row["results"]],
            constvars,
            [self._constants[n] for n in row["constants"]],
            row["name"],
            row["arg_names"],
        )
        for v, c in zip(constvars, jaxpr.consts, strict=True):
            if not v.aval.same_type(c.aval):
                raise Unreadable(f"a constant of {c.aval} stands for one of {v.aval}")
        return jaxpr


def _check_types(eqn: Eqn) -> None:
    """Compare an equation with the rule of its primitive, which another version wrote."""
    try:
        outs = eqn.prim.typed(tuple([a.aval for a in eqn.invars]), eqn.params)
        found = outs if eqn.prim.multiple_results else (outs,)
        fits = len(found) == len(eqn.outvars) and all(
            v.aval.same_type(a) for v, a in zip(eqn.outvars, found, strict=True)
        )
    except Exception as error:  # a rule may fail in any way on parameters that it does not know
        raise Unreadable(f"{eqn.prim} is no longer what it was: {type(error).__name__}: {error}") from error
    if not fits:
        says = ", ".join(type_of(v.aval) for v in eqn.outvars)
        raise Unreadable(f"{eqn.prim} gives {', '.join(map(type_of, found))} here, and {says} in the file")


def _literal_of(name: str, text: str, weak: bool) -> Literal:
    return Literal(from_numpy(np.asarray(values.scalar_of(name, text)), backend.host_device(), weak))


def _own_module(name: str) -> Any:
    if not name.startswith(_PREFIX):
        raise Unreadable(f"{name} is no module of blufunc")
    return importlib.import_module(name)


def primitive_named(name: str, module: str) -> Primitive:
    """The primitive of this process with a name.

    Args:
      module: where it was defined; imported if it is blufunc's.
    Raises:
      UnsupportedError: there is none.
    """
    if module.startswith(_PREFIX):
        try:
            found = _in_module(importlib.import_module(module), name)
        except ImportError:
            found = None
    else:
        found = named.get(name)
    if found is None:
        own = module.startswith(_PREFIX)
        raise errors.UnsupportedError(
            f"the exported program uses the primitive {name}, which this process does not have.",
            where=source.here(),
            why=f"it was in {module} of another version of blufunc."
            if own
            else f"it is a user's{f', whose class is in {module}' if module else ''}.",
            fix="load it with the version that wrote it, or export it again"
            if own
            else "import the module that defines it, ahead of export.deserialize",
        )
    return found


def _in_module(module: Any, name: str) -> Primitive | None:
    return next((v for v in vars(module).values() if isinstance(v, Primitive) and v.name == name), None)


@functools.lru_cache(4096)
def _code(file: str, function: str, line: int) -> Any:
    template = (lambda: None).__code__
    return template.replace(co_filename=f"<exported {file}>", co_name=function, co_firstlineno=max(line, 1))


def _source_of(file: str, function: str, line: int, scopes: Sequence[str], backward: bool) -> Any:
    """A line of the program that was exported: its label, without the source."""
    code = _code(file, function, line)
    found = (code, 0, tuple(scopes)) if scopes else (code, 0)
    return source.backward(found) if backward else found
