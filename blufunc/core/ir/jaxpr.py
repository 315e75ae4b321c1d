"""The intermediate representation: a jaxpr is a typed, ordered list of equations.

Core; produced by stage 1 (``core/programs/stage.py``), and transformed by every later stage. Variables are
compared by identity. Constants are attached to the jaxpr that tracing produced. A jaxpr that is a parameter
of an equation (the body of a ``scan``) has none: its constants were hoisted to arguments.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.ir import dtypes, printer
from blufunc.core.ir import source as source_lib
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.local_avals import LocalArray
from blufunc.core.ir.trace import state

LOCAL_TYPES = "local types"
"""Key in ``Jaxpr.memo``: mesh axes, and by variable its types over them."""

_NO_TYPES: tuple[tuple[str, ...], dict[Any, tuple[str, ...]]] = (), {}

# -- keys of parameters: ``exact`` distinguishes values that ``==`` does not, as 1 and True ---------


_NUMBERS = bool, int, float, complex, np.generic


def exact(value: Any) -> Any:
    """A key that distinguishes scalars by class and sign, also inside containers."""
    if isinstance(value, _NUMBERS):
        return (value.__class__, repr(value))
    if isinstance(value, tuple):
        return (value.__class__, *map(exact, value))
    if isinstance(value, frozenset):
        return (value.__class__, frozenset(map(exact, value)))
    options = getattr(value.__class__, "__dataclass_params__", None)
    if options is None or not options.eq:
        return value
    fields = [exact(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare]
    key = (value.__class__, value, *fields)
    try:
        hash(key)
    except TypeError:  # a class may have a hash of its own
        return value
    return key


def same(a: Any, b: Any) -> bool:
    """True if two values and their ``exact`` keys are equal."""
    if a is b:
        return True
    if a.__class__ is tuple is b.__class__ and len(a) == len(b) and all(map(operator.is_, a, b)):
        return True  # the most frequent case, in C
    return equal(a, b) and exact(a) == exact(b)


def equal(a: Any, b: Any) -> bool:
    """True if two values are equal; those of unrelated classes may not compare."""
    try:
        return bool(a == b)
    except Exception:
        if _of_other_classes(a, b):
            return False
        raise


def _of_other_classes(a: Any, b: Any) -> bool:
    if a.__class__ is not b.__class__:
        return True
    return a.__class__ is tuple and (len(a) != len(b) or any(map(_of_other_classes, a, b)))


def shown(key: Any) -> str:
    """The printed form of a value that ``exact`` made a key of."""
    if not isinstance(key, tuple):
        return repr(key)
    kind, first, *rest = (*key, None) if len(key) == 1 else key
    if issubclass(kind, tuple):
        parts = [shown(k) for k in key[1:]]
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if issubclass(kind, frozenset):
        return f"frozenset({{{', '.join(sorted(map(shown, first)))}}})"
    return first if issubclass(kind, _NUMBERS) else repr(first)


# -- programs ---------------------------------------------------------------------------------------


class Var:
    """A variable: a type and an identity."""

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def __repr__(self) -> str:
        return f"Var:{self.aval}"


class DropVar(Var):
    """An output that is never read; printed as ``_``."""

    __slots__ = ()


class Literal:
    """A rank-0 constant in the place of a variable."""

    __slots__ = ("array", "aval")

    def __init__(self, array: Any):
        self.array = array
        self.aval = array.aval

    @property
    def value(self) -> Any:
        """The constant as a NumPy scalar."""
        return self.array.__array__()[()]

    val = value

    def __repr__(self) -> str:
        return f"Literal({self.value})"


Atom = Var | Literal


class SourceInfo(NamedTuple):
    """Where an equation comes from, by the names that JAX has for it."""

    traceback: Any
    name_stack: str


class Eqn:
    """One equation, ``outvars = prim[params](*invars)``, from the line ``source``."""

    __slots__ = ("invars", "outvars", "params", "prim", "source")

    def __init__(self, prim, invars: Sequence[Atom], outvars: Sequence[Var], params: dict[str, Any], source):
        self.prim = prim
        self.invars = invars
        self.outvars = outvars
        self.params = params
        self.source = source

    @property
    def primitive(self) -> Any:
        """``prim``, by the name that JAX has for it."""
        return self.prim

    @property
    def effects(self) -> frozenset[str]:
        """The effects of the equation besides its outputs."""
        return self.prim.effects_of(self.params)

    @property
    def scopes(self) -> tuple[str, ...]:
        """The enclosing ``named_scope`` names, outermost first, within its jaxpr."""
        return source_lib.scopes_of(self.source)

    @property
    def source_info(self) -> SourceInfo:
        """The user's line, and ``scopes`` as a path."""
        return SourceInfo(self.source, "/".join(self.scopes))

    def with_vars(self, invars: Sequence[Atom], outvars: Sequence[Var]) -> Eqn:
        """The same operation on other variables."""
        return Eqn(self.prim, invars, outvars, self.params, self.source)

    def with_invars(self, invars: Sequence[Atom]) -> Eqn:
        """The same equation on other operands; itself if they are unchanged."""
        same = all(map(operator.is_, invars, self.invars))
        return self if same else Eqn(self.prim, invars, self.outvars, self.params, self.source)

    def __repr__(self) -> str:
        return f"Eqn({self.prim}, at {source_lib.summary(self.source)})"


_SCOPES = "memos of scopes"


class Jaxpr:
    """A pure function as a list of equations in order of dependence. Immutable.

    Attributes:
      constvars, consts: variables bound to attached constant values.
      invars: the parameters.
      eqns: the equations.
      outvars: the results.
      name: the function it came from.
      arg_names: for each invar, the path of the user's argument, or "".
      memo: memoized results of transforms of this jaxpr, kept as long as it lives.
    """

    __slots__ = (
        "__weakref__",
        "_effects",
        "_named_axes",
        "arg_names",
        "consts",
        "constvars",
        "eqns",
        "invars",
        "memo",
        "name",
        "outvars",
    )

    def __init__(
        self,
        invars: Sequence[Var],
        eqns: Sequence[Eqn],
        outvars: Sequence[Atom],
        constvars: Sequence[Var] = (),
        consts: Sequence[Any] = (),
        name: str = "",
        arg_names: Sequence[str] = (),
    ):
        self.invars = tuple(invars)
        self.eqns = tuple(eqns)
        self.outvars = tuple(outvars)
        self.constvars = tuple(constvars)
        self.consts = tuple(consts)
        self.name = name
        self.arg_names = tuple(arg_names)
        self.memo: dict[Any, Any] = {}
        self._effects: frozenset[str] | None = None
        self._named_axes: frozenset[str] | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """The jaxpr itself: it has its constants, so that none is closed or open."""
        return self

    @property
    def literals(self) -> tuple:
        """``consts``, by the name that interpreters written for JAX have for them."""
        return self.consts

    @property
    def in_avals(self) -> list[ShapedArray]:
        """The types of the parameters."""
        return [v.aval for v in self.invars]

    @property
    def out_avals(self) -> list[ShapedArray]:
        """The types of the results."""
        return [v.aval for v in self.outvars]

    @property
    def effects(self) -> frozenset[str]:
        """The union of the effects of all equations."""
        if self._effects is None:
            self._effects = frozenset().union(*[e.effects for e in self.eqns])
        return self._effects

    @property
    def named_axes(self) -> frozenset[str]:
        """The named axes of the collectives in it."""
        if self._named_axes is None:
            self._named_axes = frozenset().union(*[named_axes(e.prim, e.params) for e in self.eqns])
        return self._named_axes

    def replace(self, **changes) -> Jaxpr:
        """A copy with some fields changed."""
        fields = ("invars", "eqns", "outvars", "constvars", "consts", "name", "arg_names")
        return Jaxpr(**{f: changes.get(f, getattr(self, f)) for f in fields})

    def hoist(self) -> tuple[Jaxpr, tuple]:
        """The jaxpr with its constants as leading parameters, and those constants."""
        if not self.constvars:
            return self, ()
        names = ("",) * len(self.constvars) + self.arg_names if self.arg_names else ()
        closed = self.replace(invars=self.constvars + self.invars, constvars=(), consts=(), arg_names=names)
        return closed, self.consts

    def memoised(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, memoized per jaxpr, ``key``, and rules in force."""
        memo = in_scope(self.memo)
        found = memo.get(key)
        if found is None:
            found = memo[key] = make()
        return found

    def local_aval(self, var: Var) -> ShapedArray:
        """The type of a variable, with that over mesh axes if it has been inferred."""
        axes, types = in_scope(self.memo).get(LOCAL_TYPES, _NO_TYPES)
        found = types.get(var)
        return LocalArray(var.aval, axes, found) if found else var.aval

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def pretty_print(self, *, source_info: bool = False) -> str:
        """The jaxpr as text, each equation with the user's line if ``source_info``."""
        return printer.to_text(self, lines=source_info)

    def __str__(self) -> str:
        return printer.to_text(self)

    __repr__ = __str__


def trace_scope() -> tuple:
    """A key of the state that traces depend on: ``state.context``, the wide mode."""
    return (*state.context, "wide") if dtypes.is_wide() else state.context


def in_scope(memo: dict) -> dict:
    """The part of a memo for the axes, meshes and rules in force.

    It is bounded to the last few scopes.
    """
    scope = trace_scope()
    if not scope:
        return memo
    scopes = memo.setdefault(_SCOPES, {})
    part = scopes[scope] = scopes.pop(scope, {})
    if len(scopes) > 16:
        del scopes[next(iter(scopes))]
    return part


def eval_jaxpr(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Apply ``jaxpr`` to values under the current trace, equation by equation.

    Every transform of a jaxpr works this way: it evaluates the jaxpr with its trace current. Equations keep
    the user's lines.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    previous = source_lib.replay.line
    try:
        for eqn in jaxpr.eqns:
            source_lib.replay.line = eqn.source
            values = [a.array if a.__class__ is Literal else env[a] for a in eqn.invars]
            out = state.trace.process(eqn.prim, values, eqn.params)
            if eqn.prim.multiple_results:
                env.update(zip(eqn.outvars, out, strict=True))
            else:
                env[eqn.outvars[0]] = out
    finally:
        source_lib.replay.line = previous
    return [a.array if a.__class__ is Literal else env[a] for a in jaxpr.outvars]


def named_axes(prim: Any, params: dict[str, Any]) -> frozenset[str]:
    """The named axes that one use of a primitive refers to, its jaxprs included."""
    return frozenset(prim.axes_of(params)).union(*[j.named_axes for j in subjaxprs(params)])


def subjaxprs(params: dict[str, Any]) -> Iterable[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        if isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, Jaxpr))


def map_jaxprs(change: Callable[[Jaxpr], Jaxpr], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation with ``change`` applied to each jaxpr."""

    def changed(value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return change(value)
        if value.__class__ is tuple and any(isinstance(v, Jaxpr) for v in value):
            return tuple([change(v) if isinstance(v, Jaxpr) else v for v in value])
        return value

    return {key: changed(value) for key, value in params.items()}


def communicates(eqn: Eqn) -> bool:
    """True if an equation, or a jaxpr that it runs, has a collective."""
    if eqn.prim.kind == "collective" and eqn.prim.communicates:  # type: ignore[attr-defined]
        return True
    return any(map(communicates, itertools.chain.from_iterable(j.eqns for j in subjaxprs(eqn.params))))


def line_of(eqn: Eqn) -> str:
    """The user's line of an equation; for a derivative the forward line, marked."""
    return source_lib.summary(eqn.source) + (" backward" if source_lib.is_backward(eqn.source) else "")


def uses_host(jaxpr: Jaxpr) -> bool:
    """True if a program has values in the memory of the host, or moves any."""
    return jaxpr.memoised(
        "uses host",
        lambda: (
            any(v.aval.memory != DEVICE for v in jaxpr.invars)
            or any(e.prim.kind == "transfer" or any(map(uses_host, subjaxprs(e.params))) for e in jaxpr.eqns)
        ),
    )
