"""Stage 1 of a program's path: trace a Python function to a jaxpr.

Core. In: a function and abstract arguments. The function runs once with ``StagedTracer`` arguments while a
``StageTrace`` is current; every operation that reaches the trace becomes an equation. Outside values (arrays,
tracers of enclosing transforms) become constants; rank-0 host arrays become literals. Out: a jaxpr.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray, from_numpy, is_number, lift
from blufunc.core.ir import check, dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var, eval_jaxpr, in_scope, subjaxprs
from blufunc.core.ir.trace import (
    EVAL,
    Body,
    Trace,
    Tracer,
    UntypedError,
    leak_error,
    new_trace,
    set_trace,
    state,
)
from blufunc.core.primitives.primitive import derived
from blufunc.core.primitives.rule_errors import (
    check_defined_types,
    check_definition,
    check_values,
    definition_error,
)

explicit_types: Any = None
"""``parallel/partition/explicit_types``: meshes are above the core."""


class TraceTypes:
    """The shardings of a trace along explicit mesh axes, once its function asks.

    Args:
      values: for each parameter the value it is of, or made of: an array of xs for an element; or a
        ``ShapeDtypeStruct``.
      avals: the types of the parameters.
    Attributes:
      asked: whether the function asked, so that the trace depends on the shardings of its arguments.
    """

    def __init__(self, values: Sequence[Any], avals: Sequence[ShapedArray]):
        self.asked = False
        self._values, self._avals = values, avals
        self._found: Any = None

    @property
    def key(self) -> tuple:
        """Each argument's sharding along explicit axes, or None."""
        return tuple(map(explicit_types.sharding_of, self._values))

    def type_of(self, trace: StageTrace, x: StagedTracer) -> ShapedArray:
        """The type of a value of the trace, with its sharding."""
        self.asked = True
        if self._found is None:
            self._found = explicit_types.ExplicitTypes(self._values, self._avals)
        return self._found.type_of(trace, x)

    def settled(self, trace: StageTrace, outs: Sequence[Atom]) -> TraceTypes | None:
        """The types for a second trace of a body that shards its carry ``outs`` further.

        None if it does not.
        """
        found = None if self._found is None else self._found.settled(trace, outs)
        if found is None:
            return None
        joined = TraceTypes(self._values, self._avals)
        joined._found = found
        return joined


class StagedTracer(Tracer):
    """A tracer that stands for a variable of the jaxpr being built."""

    __slots__ = ("variable",)

    def __init__(self, trace: Trace, var: Var, source=None, label: str | None = None):
        self.trace = trace
        self.aval = var.aval
        self.source = source
        self.label = label
        self.variable = var


class StageTrace(Trace):
    """Records operations as equations."""

    __slots__ = ("_constants", "_literals", "eqns", "invars", "keeps_arrays", "name", "types")

    def __init__(self, name: str = "jit", types: TraceTypes | None = None, keeps_arrays: bool = False):
        super().__init__()
        self.name, self.types, self.keeps_arrays = name, types, keeps_arrays
        self.eqns: list[Eqn] = []
        self.invars: list[Var] = []
        self._constants: dict[int, tuple[Var, Any]] = {}  # by id: the value is kept alive, so ids stay unique
        self._literals: dict[int, tuple[Literal, ConcreteArray]] = {}

    def parameter(self, aval: ShapedArray, label: str | None = None) -> StagedTracer:
        """A new parameter of the jaxpr."""
        var = Var(aval)
        self.invars.append(var)
        return StagedTracer(self, var, None, label)

    def process(self, prim, args, params):
        invars = [
            a.variable if a.__class__ is StagedTracer and a.trace is self else self.atom(a) for a in args
        ]
        outs = prim.typed(tuple([v.aval for v in invars]), params)
        if prim.has_definition and prim.own_definition is None:
            definition(prim, [v.aval for v in invars], params)
        line = source.replay.line or source.current()
        if prim.multiple_results:
            outvars = [Var(aval) for aval in outs]
            self.eqns.append(Eqn(prim, invars, outvars, params, line))
            return [StagedTracer(self, v, line) for v in outvars]
        var = Var(outs)
        self.eqns.append(Eqn(prim, invars, [var], params, line))
        return StagedTracer(self, var, line)

    def type_of(self, x):
        return x.aval if self.types is None else self.types.type_of(self, x)

    def sharding_of(self, x):
        for eqn in reversed(self.eqns):
            for n, var in enumerate(eqn.outvars):
                if var is x.variable:
                    stated = eqn.prim.sharding_of(n, **eqn.params)
                    if stated is not None:
                        return stated
        found = self.type_of(x)
        return None if found is x.aval else found.sharding

    @property
    def constants(self) -> dict[Var, Any]:
        """The outside values among the variables."""
        return {var: value for var, (_, value) in self._constants.values()}

    def atom(self, x: Any) -> Atom:
        """The variable or literal for a value."""
        if x.__class__ is StagedTracer and x.trace is self:
            return x.variable
        known = self._literals.get(id(x))
        if known is not None:
            return known[0]
        constant = self._constants.get(id(x))
        if constant is not None:
            return constant[0]
        value = lift(x)
        if isinstance(value, Tracer):
            if value.trace is self:
                return value.variable  # type: ignore[attr-defined]
            if not value.trace.alive:
                raise leak_error(value)
        elif (
            not value.aval.ndim
            and value.device.platform == "cpu"  # type: ignore[attr-defined]
            and not (self.keeps_arrays and value is x and not is_number(value))  # type: ignore[arg-type]
        ):
            literal = Literal(value)  # type: ignore[arg-type]
            self._literals[id(x)] = (literal, x)
            return literal
        var = Var(value.aval)
        self._constants[id(x)] = (var, (x, value))
        return var

    def finish(self, outs: Sequence[Any], name: str = "", arg_names: Sequence[str] = ()) -> Jaxpr:
        """The jaxpr that returns ``outs``."""
        outvars = [self.atom(x) for x in outs]
        constvars = [var for var, _ in self._constants.values()]
        consts = [value for _, (_, value) in self._constants.values()]
        jaxpr = Jaxpr(self.invars, self.eqns, outvars, constvars, consts, name, arg_names)
        if config.check:
            check.check_jaxpr(jaxpr)
        return jaxpr


def is_staging() -> bool:
    """True if operations are being staged into a program, under any transforms."""
    trace: Any = state.trace
    while trace is not None and not isinstance(trace, StageTrace):
        trace = getattr(trace, "parent", None) or getattr(trace, "inner", None)
    return trace is not None


def stage(
    fun: Callable[..., Sequence[Any]],
    in_avals: Sequence[ShapedArray],
    name: str = "jit",
    labels: Sequence[str] | None = None,
    line: source.Source | None = None,
    types: TraceTypes | None = None,
    n_carry: int = 0,
    keeps_arrays: bool = False,
) -> Jaxpr:
    """Trace ``fun``, flat arguments to flat results, to a jaxpr with its constants.

    Args:
      fun: takes ``len(in_avals)`` values.
      in_avals: the types to trace it at.
      name: name of the transform in messages, and of the jaxpr.
      labels: the path of each argument, for messages.
      line: the user's line for its equations; None: the running one.
      types: what is known of shardings along explicit axes.
      n_carry: the number of leading parameters and results that are the carry of a loop.
      keeps_arrays: rank-0 arrays from outside are constants, as larger ones are, and not literals. Programs do
        better with literals; callers of ``make_jaxpr`` count the constants, and must find an array where another
        trace of the function has a tracer.
    """
    trace = StageTrace(name, types, keeps_arrays)
    params = [trace.parameter(a, labels[i] if labels else None) for i, a in enumerate(in_avals)]
    previous, source.replay.line = source.replay.line, line
    # Scopes of a call belong to its equation, not to the body's: other calls may share the trace.
    scopes = source.open_scopes(())
    try:
        with new_trace(trace):
            outs = fun(*params)
            jaxpr = trace.finish(outs, name, labels or ())
            joined = types.settled(trace, jaxpr.outvars[:n_carry]) if types is not None and n_carry else None
    finally:
        source.replay.line = previous
        source.open_scopes(scopes)
    return (
        jaxpr if joined is None else stage(fun, in_avals, name, labels, line, joined, n_carry, keeps_arrays)
    )


def stage_body(
    fun: Callable[..., Sequence[Any]],
    in_avals: Sequence[ShapedArray],
    values: Sequence[Any],
    name: str,
    labels: Sequence[str] | None = None,
    n_carry: int = 0,
    chosen_by: Any = None,
) -> Jaxpr:
    """Trace a function that a loop, a branch or a call runs; see ``Body``.

    Inside ``shard_map`` types over the mesh axes are inferred from the finished body, which places casts best. If the
    function needs them while it is traced (it takes a gradient, or asks), it is traced again, with types.
    """
    try:
        types = TraceTypes(values, in_avals)
        return stage(fun, in_avals, name, labels, None, types, n_carry, keeps_arrays=keeps_arrays())
    except UntypedError as error:
        first = error
    previous, source.replay.line = source.replay.line, None
    scopes = source.open_scopes(())
    try:
        jaxpr = state.trace.typed_body(Body(fun, in_avals, values, name, labels, n_carry, chosen_by))
        if jaxpr is None:
            raise first
        return jaxpr
    finally:
        source.replay.line = previous
        source.open_scopes(scopes)


def keeps_arrays() -> bool:
    """Whether a function that is traced now belongs to a trace of ``make_jaxpr``."""
    trace: Any = state.trace if state.numbers is not None else None
    while trace is not None and not isinstance(trace, StageTrace):
        trace = getattr(trace, "parent", None) or getattr(trace, "inner", None)
    return trace is not None and trace.keeps_arrays


class _Tracing(threading.local):
    """The definitions that this thread traces."""

    keys: frozenset = frozenset()


_tracing = _Tracing()


def definition(prim: Any, avals: Sequence[ShapedArray], params: dict) -> Jaxpr:
    """A primitive's definition as a jaxpr, memoized by operand types and parameters.

    Raises:
      JaxprTypeError: it does not trace, uses the primitive itself, or its results are not those of ``abstract``;
        of an elementwise primitive, it is not elementwise, or disagrees with ``impl``.
    """
    if prim.own_definition is not None:
        return prim.own_definition(avals, params)
    prim.typed(tuple(avals), params)  # raises for parameters that are not hashable
    memo, key = in_scope(prim.definitions), (*avals, *params.items())
    found = memo.get(key)
    if found is None:
        if (prim, key) in _tracing.keys:
            raise definition_error(prim, "uses the primitive itself", "write it with other operations")
        _tracing.keys |= {(prim, key)}
        try:
            found = memo[key] = _traced(prim, avals, params)
        finally:
            _tracing.keys -= {(prim, key)}
    return found


def _traced(prim: Any, avals: Sequence[ShapedArray], params: dict) -> Jaxpr:
    def defined(*xs):
        out = prim.lower(*xs, **params)
        return list(out) if prim.multiple_results else [out]

    outs = prim.typed(tuple(avals), params)
    try:
        jaxpr = stage(defined, avals, prim.name)
    except errors.JaxprTypeError:
        raise
    except Exception as e:
        raise definition_error(
            prim,
            f"cannot be traced: {type(e).__name__}: {e}",
            "write it with blufunc operations: bnp.exp(x), not np.exp(x); bnp.where, not if",
        ) from e
    if jaxpr.consts:
        raise definition_error(
            prim,
            f"captures an array of {jaxpr.consts[0].aval}",
            "take it as an operand: a definition is a function of the operands, numbers and parameters alone",
        )
    check_defined_types(prim, jaxpr.out_avals, outs)
    if prim.kind == "elementwise":
        _check_elementwise(prim, jaxpr)
        if prim.has_impl and "impl" not in vars(prim):  # an override replaces impl on the instance
            _check_sample(prim, defined, avals, params)
    return jaxpr.replace(eqns=[Eqn(e.prim, e.invars, e.outvars, e.params, None) for e in jaxpr.eqns])


def _check_elementwise(prim: Any, jaxpr: Jaxpr) -> None:
    """Raise JaxprTypeError unless an elementwise primitive's definition is too."""
    for eqn in jaxpr.eqns:
        bodies = list(subjaxprs(eqn.params))
        for body in bodies:
            _check_elementwise(prim, body)
        if not bodies and eqn.prim.kind != "elementwise" and any(a.aval.ndim for a in eqn.invars):
            raise definition_error(
                prim,
                f"applies {eqn.prim.name}, which is not elementwise",
                "apply it outside of the primitive, or define a subclass of extend.Primitive",
            )


def _check_sample(prim: Any, defined: Callable, avals: Sequence[ShapedArray], params: dict) -> None:
    """Compare an elementwise definition with ``impl`` on four elements."""
    if any(dtypes.is_key(a.dtype) for a in avals):
        return
    sample: list[np.ndarray] = []
    for k, a in enumerate(avals):
        x = np.arange(1, 5) / (6 + k) if dtypes.is_inexact(a.dtype) else np.arange(1, 5)
        sample.append((x if a.ndim else x[1]).astype(a.dtype))
    with np.errstate(all="ignore"):
        try:
            computed = prim.impl(*sample, **params)
        except Exception:  # outside of its domain
            return
        jaxpr = stage(defined, [a.with_shape(x.shape) for a, x in zip(avals, sample, strict=True)], prim.name)
        with set_trace(EVAL):
            found = eval_jaxpr(jaxpr, [from_numpy(x, backend.host_device()) for x in sample])
    results = computed if prim.multiple_results else [computed]
    check_values(prim, results, jaxpr.out_avals)
    check_definition(prim, found, results, sample)


def _evaluated(prim: Any, args: Sequence[Any], params: dict) -> list[np.ndarray]:
    """Evaluate the definition on NumPy arrays, in place of ``impl``."""
    values = [from_numpy(np.asarray(a), backend.host_device()) for a in args]
    jaxpr = definition(prim, [x.aval for x in values], params)
    with set_trace(EVAL):
        return [np.asarray(x) for x in eval_jaxpr(jaxpr, values)]


derived["impl"] = _evaluated
