"""Primitives as JAX defines them: a name, and rules in tables of each transform.

Under the face ``as_jax``. ``Primitive`` adapts the rules in the tables to those of ``core/primitives``: results of
``transpose`` are added to accumulators, batchers get the size of the axis, and ``lower_fun`` is the definition that
compilers inline. Parameters need not be hashable, and rules may have state, so types are not memoized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.as_jax import lowering
from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import EVAL, set_trace, state
from blufunc.core.primitives.primitive import Primitive as CorePrimitive
from blufunc.core.primitives.primitive import concrete
from blufunc.core.primitives.rule_errors import check_defined_types
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs.stage import stage

__all__ = [
    "Primitive",
    "UndefinedPrimal",
    "axis_primitive_batchers",
    "is_undefined_primal",
    "lower_fun",
    "primitive_batchers",
    "primitive_jvps",
    "primitive_transposes",
    "register_lowering",
]


class UndefinedPrimal:
    """The operand of a transpose rule that the rule transposes with respect to."""

    __slots__ = ("aval",)

    def __init__(self, aval: ShapedArray):
        self.aval = aval

    def __repr__(self) -> str:
        return f"UndefinedPrimal({self.aval})"


def is_undefined_primal(x: Any) -> bool:
    """True for an operand to transpose with respect to."""
    return x.__class__ is UndefinedPrimal


class _Table(dict):
    """Rules by primitive. Those for a primitive of blufunc itself replace its own.

    Args:
      rule: the attribute of a primitive.
      adapted: ``(prim, rule of JAX) -> rule of blufunc``.
    """

    def __init__(self, rule: str, adapted: Callable[[CorePrimitive, Callable], Callable]):
        super().__init__()
        self.rule, self.adapted = rule, adapted

    def __setitem__(self, prim: CorePrimitive, rule: Callable) -> None:
        super().__setitem__(prim, rule)
        if not isinstance(prim, Primitive):
            setattr(prim, self.rule, self.adapted(prim, rule))


def _jvp(prim: CorePrimitive, rule: Callable) -> Callable:
    def jvp(primals, tangents, **params):
        # tuples, as in JAX: rules that map over operands have a tuple of axes for them
        out, out_t = rule(tuple(primals), tuple(tangents), **params)
        if not prim.multiple_results:
            out = lift(out)
            return out, _tangent(out, out_t)
        out = [lift(x) for x in out]
        return out, [_tangent(x, t) for x, t in zip(out, out_t, strict=True)]

    return jvp


def _tangent(out: Any, t: Any) -> Any:
    return zero(out.aval) if t is None or t.__class__ is Zero else lift(t)


def _transpose(prim: CorePrimitive, rule: Callable) -> Callable:
    def transpose(ct, *args, **params):
        ins = [UndefinedPrimal(a.aval) if is_linear(a) else a for a in args]
        cts = rule(ct, *ins, **params)
        if len(cts) != len(args):
            raise errors.JaxprTypeError(
                f"the transpose rule of {prim.name} returned {len(cts)} cotangents for {len(args)} operands.",
                where=source.here(),
            )
        for a, c in zip(args, cts, strict=True):
            # a rule may return the class Zero, as equinox's do
            if is_linear(a) and c is not None and c is not Zero and c.__class__ is not Zero:
                a.add(lift(c))

    return transpose


def _batch(prim: CorePrimitive, rule: Callable) -> Callable:
    def batch(axis, args, dims, **params):
        return _batched(prim, *rule(tuple(args), tuple(dims), **params))

    return batch


def _batch_over_axis(prim: CorePrimitive, rule: Callable) -> Callable:
    def batch(axis, args, dims, **params):
        # the third is the class of JAX's trace, which rules pass on
        return _batched(prim, *rule(axis.size, axis.name, None, tuple(args), tuple(dims), **params))

    return batch


def _batched(prim: CorePrimitive, out: Any, dims: Any) -> tuple:
    return ([lift(x) for x in out], list(dims)) if prim.multiple_results else (lift(out), dims)


primitive_jvps = _Table("jvp", _jvp)
primitive_transposes = _Table("transpose", _transpose)
primitive_batchers = _Table("batch", _batch)
axis_primitive_batchers = _Table("batch", _batch_over_axis)
_lowerings: dict[CorePrimitive, Any] = {}
_cpu_lowerings: dict[CorePrimitive, Any] = {}


class _LowerFun:
    """A lowering that is a function of arrays, and not a generator of MLIR."""

    def __init__(self, fun: Callable, multiple_results: bool):
        self.fun, self.multiple_results = fun, multiple_results

    def __call__(self, ctx: Any, *xs: Any, **params: Any) -> list:
        """As part of another rule."""
        out = self.fun(*xs, **params)
        return list(out) if self.multiple_results else [out]


def lower_fun(fun: Callable, multiple_results: bool = True) -> _LowerFun:
    """The lowering that traces ``fun``."""
    return _LowerFun(fun, multiple_results)


def register_lowering(
    prim: CorePrimitive, rule: Any = None, platform: str | None = None, **options: Any
) -> Any:
    """Set the lowering of a primitive, which ``lower_fun`` makes; also a decorator.

    One for the platform ``"cpu"`` counts where there is none for all: rules are told this platform, whatever the
    program runs on (``ModuleContext.platforms``). Those for others are never asked.
    """
    if rule is None:
        return lambda rule: register_lowering(prim, rule, platform)
    if platform is None:
        _lowerings[prim] = rule
    elif platform == "cpu":
        _cpu_lowerings[prim] = rule
    return rule


class Primitive(CorePrimitive):
    """A primitive whose rules are in tables, as in JAX."""

    opaque = True  # parameters need not compare: equal uses are not merged
    impl_on_arrays = True

    def __init__(self, name: str):
        super().__init__(name)
        self._impl_rule: Callable | None = None
        self._abstract_rule: Callable | None = None
        self.check_impl = False

    def _has_definition(self) -> bool:
        return True

    # -- as users define it ---------------------------------------------------------------------

    def def_impl(self, impl: Callable) -> Callable:
        """Set the function that computes it eagerly."""
        self._impl_rule = self.impl = impl  # type: ignore[method-assign]  # on arrays and tracers, as in JAX
        return impl

    def def_abstract_eval(self, rule: Callable) -> Callable:
        """Set the function from types of operands to types of results."""
        self._abstract_rule = rule
        return rule

    def def_effectful_abstract_eval(self, rule: Callable) -> Callable:
        """As ``def_abstract_eval``, of a function that also returns effects."""
        self._abstract_rule = lambda *avals, **params: rule(*avals, **params)[0]
        return rule

    # -- as blufunc asks ------------------------------------------------------------------------

    def bind(self, *args: Any, **params: Any) -> Any:
        return state.trace.process(self, [lift(x) for x in args], params)

    def typed(self, avals, params):
        if self._abstract_rule is None:
            raise self._missing("abstract")
        outs = self._abstract_rule(*avals, **params)
        if not self.multiple_results:
            return _aval(outs)
        return tuple([_aval(a) for a in outs])

    def evaluate(self, args, params):
        if self._impl_rule is None:
            raise self._missing("impl")
        with set_trace(EVAL):
            out = self._impl_rule(
                *[a if a.__class__ is ConcreteArray else concrete(a) for a in args], **params
            )
        return [lift(x) for x in out] if self.multiple_results else lift(out)

    def own_definition(self, avals: Sequence[ShapedArray], params: dict) -> Jaxpr:
        """The function of ``lower_fun``, what a rule emits, or ``def_impl``."""
        rule = _lowerings.get(self, _cpu_lowerings.get(self))
        if rule is not None and not isinstance(rule, _LowerFun):
            return lowering.lowered(self, rule, avals, params)
        fun = self._impl_rule if rule is None else rule.fun
        many = self.multiple_results if rule is None else rule.multiple_results
        if fun is None:
            raise self._missing("lowering")

        def defined(*xs):
            out = fun(*xs, **params)
            return list(out) if many else [out]

        jaxpr = stage(defined, avals, self.name)
        check_defined_types(self, jaxpr.out_avals, self.typed(tuple(avals), params))
        return jaxpr

    def jvp(self, primals, tangents, **params):
        return _jvp(self, self._rule(primitive_jvps, "jvp"))(primals, tangents, **params)

    def transpose(self, ct, *args, **params):
        _transpose(self, self._rule(primitive_transposes, "transpose"))(ct, *args, **params)

    def batch(self, axis, args, dims, **params):
        if self in axis_primitive_batchers:
            return _batch_over_axis(self, axis_primitive_batchers[self])(axis, args, dims, **params)
        return _batch(self, self._rule(primitive_batchers, "batch"))(axis, args, dims, **params)

    def _rule(self, table: dict, name: str) -> Callable:
        rule = table.get(self)
        if rule is None:
            raise NotImplementedError(f"the primitive {self.name} has no {name} rule")
        return rule


def _aval(x: Any) -> ShapedArray:
    if x.__class__ is ShapedArray:
        return x
    if isinstance(x, ShapedArray):  # with a sharding, which traces infer
        return x.with_shape(x.shape)
    return ShapedArray(tuple(x.shape), np.dtype(x.dtype), bool(getattr(x, "weak_type", False)))
