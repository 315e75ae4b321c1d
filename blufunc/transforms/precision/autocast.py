"""``autocast``: mixed precision, as a transform of jaxprs.

Transforms, stage 2. In: a function, staged in float32. Out: the same with casts, by the table in ``policy.py``. A value
that is float32 in the program may be *low* for a while: cheap operations keep it low, and sensitive ones cast it back.
Results keep the dtypes they have without the transform, and casts are differentiable, so gradients have the dtypes of
the parameters.

Bodies of ``jit`` and ``checkpoint`` take and return low values; so do functions with custom rules, whose rules are cast
like any function. ``scan`` takes low inputs, and weights are cast before the loop; its carry, and operands and results
of ``cond`` and ``while_loop``, keep the program's dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import convert, convert_p
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs.stage import stage, stage_body
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of
from blufunc.transforms.control_flow.calls import Call
from blufunc.transforms.control_flow.scan import scan_p
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp_call_p
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp_call_p
from blufunc.transforms.custom_rules.custom_vmap import Rule, custom_vmap_call_p
from blufunc.transforms.precision.policy import Policy, make_policy

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import DTypeLike

P = ParamSpec("P")
R = TypeVar("R")

WIDE = dtypes.float32
Flags = tuple[bool, ...]


@overload
def autocast(
    fun: Callable[P, R], dtype: DTypeLike = "bfloat16", *, float32: Any = (), low: Any = ()
) -> Callable[P, R]: ...
@overload
def autocast(
    fun: None = None, dtype: DTypeLike = "bfloat16", *, float32: Any = (), low: Any = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def autocast(
    fun: Callable[..., Any] | None = None, dtype: Any = "bfloat16", *, float32: Any = (), low: Any = ()
) -> Any:
    """Run ``fun`` in mixed precision: matmuls in ``dtype``, the rest in float32.

        loss, grads = bf.value_and_grad(bf.autocast(loss_fn))(params, batch)   # params and grads: float32

    Args:
        fun: a function of pytrees of arrays. It is traced in each call; under ``jit``, once. Without it, a decorator is
          returned.
        dtype: the low dtype, bfloat16 (default) or float16. (With float16, scale the loss: gradients may underflow.)
        float32: additional primitives, or names of primitives, to run in float32.
        low: additional primitives, or names of primitives, to run in ``dtype``. ``print(bf.autocast_table())`` shows
          the table.
    Returns:
      a function of the same arguments whose results have the structure, shapes and dtypes of ``fun``'s.
    Raises:
      DtypeError: ``dtype`` is not a half-precision float.
      ValueRangeError, ArgumentError: ``float32`` or ``low`` hold something other than primitives, or share one.
    """
    policy = make_policy(dtype, float32, low)
    if fun is None:
        return functools.partial(autocast, dtype=dtype, float32=float32, low=low)
    check_callable(fun, "autocast")

    @functools.wraps(fun)
    def cast(*args, **kwargs):
        leaves, in_tree = tree.flatten((args, kwargs))
        labels = functools.cache(lambda: labels_of(fun, in_tree))
        values = as_values(leaves, lambda i: f"the argument {labels()[i]}")
        flat = FlatFunction(fun, in_tree)
        jaxpr = stage_body(flat, [v.aval for v in values], values, name_of(fun), labels())
        return tree.unflatten(flat.out_tree, [c.traced() for c in _run(jaxpr, policy, values)])

    return cast


class _Cell:
    """A value of the program: its traced type, and its current value.

    Attributes:
      aval: its type in the program.
      value: the value; low, or of the program's dtype.
      literal: True for a constant that the program was written with.
    """

    __slots__ = ("_other", "aval", "literal", "value")

    def __init__(self, value: Any, aval: ShapedArray, literal: bool = False):
        self.value = value
        self.aval = aval
        self.literal = literal
        self._other: Any = None

    @property
    def eligible(self) -> bool:
        """Whether it may be low."""
        return self.aval.dtype == WIDE

    @property
    def is_low(self) -> bool:
        """Whether it is."""
        return self.value.aval.dtype != self.aval.dtype

    def cast(self, dtype: np.dtype) -> Any:
        """The value as ``dtype``, the program's or the low one; each cast is made once."""
        if not self.eligible or self.value.aval.dtype == dtype:
            return self.value
        if self.literal:
            return scalar(self.value.item(), dtype)
        if self._other is None:
            self._other = convert(self.value, dtype)
        return self._other

    def traced(self) -> Any:
        """As the program has it."""
        return self.cast(self.aval.dtype)


def _run(jaxpr: Jaxpr, policy: Policy, args: Sequence[Any]) -> list[_Cell]:
    """Evaluate a jaxpr under the current trace, with casts. Arguments may be low."""
    cells = {v: _Cell(c, v.aval) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True)}
    cells.update((v, _Cell(x, v.aval)) for v, x in zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return _Cell(atom.array, atom.aval, literal=True) if atom.__class__ is Literal else cells[atom]

    previous = source.replay.line
    try:
        for eqn in jaxpr.eqns:
            source.replay.line = eqn.source
            outs = _apply(eqn, policy, [read(a) for a in eqn.invars])
            cells.update((v, _Cell(x, v.aval)) for v, x in zip(eqn.outvars, outs, strict=True))
    finally:
        source.replay.line = previous
    return [read(a) for a in jaxpr.outvars]


def _apply(eqn: Eqn, policy: Policy, ins: list[_Cell]) -> list[Any]:
    """The results of one equation; those that are float32 in the program may be low."""
    prim, params = eqn.prim, eqn.params
    rule = _CALLS.get(prim)
    low = (policy.class_of(prim) or "low") == policy.class_of(dot_general_p) == "low"
    if rule is None and prim.autocast is not None and low:
        return prim.autocast(ins, policy.dtype, **params)
    if rule is None and isinstance(prim, Call) and "jaxpr" in params:
        rule = _call
    if rule is not None:
        return rule(prim, policy, ins, params)
    if prim is convert_p:
        (x,) = ins
        exact = x.eligible and params["dtype"] == WIDE  # only drops the weak type
        return [x.value if exact and x.is_low else prim.bind(x.value, **params)]
    target = _target(policy, prim, ins, params)
    if target is None:
        if policy.class_of(prim) != "exact":
            params = {k: _closed(v, policy) for k, v in params.items()}
        out = prim.bind(*[c.traced() for c in ins], **params)
    else:
        out = prim.bind(*[c.cast(target) for c in ins], **params)
    return list(out) if prim.multiple_results else [out]


def _target(policy: Policy, prim: Any, ins: list[_Cell], params: dict) -> np.dtype | None:
    """The dtype to cast float32 operands to; None for the program's own."""
    inexact = [c for c in ins if dtypes.is_inexact(c.aval.dtype)]
    if not inexact or not all(c.eligible for c in inexact):
        return None
    cls = policy.class_of(prim)
    if cls == "low":
        declared = params.get("preferred_element_type")
        # Any other dtype is explicit, so the operands keep their precision, too.
        return policy.dtype if declared is None or declared == WIDE else None
    if cls == "widest":
        arrays = [c.is_low for c in inexact if not c.literal]
        return policy.dtype if arrays and all(arrays) else WIDE
    return WIDE if cls == "float32" else None


# -- equations that hold jaxprs and rules ----------------------------------------------------------


def _body(
    jaxpr: Jaxpr, policy: Policy, low_ins: Flags, wide_outs: Sequence[bool] = ()
) -> tuple[Jaxpr, Flags]:
    """A body with casts, and a flag per low result.

    Args:
      low_ins: a flag per parameter, True if it is low.
      wide_outs: a flag per result, True if it must have the program's dtype; default none.
    """
    wide = tuple(wide_outs or (False,) * len(jaxpr.outvars))

    def make():
        low_outs: Flags = ()

        def fun(*args):
            nonlocal low_outs
            outs = [
                c.traced() if w else c.value for c, w in zip(_run(jaxpr, policy, args), wide, strict=True)
            ]
            low_outs = tuple(x.aval.dtype != a.dtype for x, a in zip(outs, jaxpr.out_avals, strict=True))
            return outs

        avals = [_typed(a, low, policy) for a, low in zip(jaxpr.in_avals, low_ins, strict=True)]
        return stage(fun, avals, jaxpr.name), low_outs

    return jaxpr.memoised(("autocast", policy, low_ins, wide), make)


def _typed(aval: ShapedArray, low: bool, policy: Policy) -> ShapedArray:
    return aval.with_dtype(policy.dtype) if low else aval


def _closed(param: Any, policy: Policy) -> Any:
    """A parameter; jaxprs in it get casts inside, and keep their types."""
    if isinstance(param, Jaxpr):
        body, _ = _body(param, policy, (False,) * len(param.invars), (True,) * len(param.outvars))
        return body
    if isinstance(param, tuple) and any(isinstance(p, Jaxpr) for p in param):
        bodies = [_closed(p, policy) for p in param]
        return type(param)(*bodies) if hasattr(param, "_fields") else tuple(bodies)
    return param


def _low(cells: Sequence[_Cell]) -> Flags:
    return tuple(c.is_low for c in cells)


def _call(prim: Call, policy: Policy, ins: list[_Cell], params: dict) -> list[Any]:
    """A plain call: low values go in and out."""
    body, _ = _body(params["jaxpr"], policy, _low(ins))
    return prim.call(body, [c.value for c in ins], params)


def _scan(prim, policy: Policy, ins: list[_Cell], params: dict) -> list[Any]:
    """A loop: low inputs, constants and outputs; the carry keeps its dtypes."""
    jaxpr, n_consts, n_carry = params["jaxpr"], params["n_consts"], params["n_carry"]
    carry = range(n_consts, n_consts + n_carry)
    wide_outs = [i < n_carry for i in range(len(jaxpr.outvars))]
    flags = tuple(c.is_low and i not in carry for i, c in enumerate(ins))
    body, _ = _body(jaxpr, policy, flags, wide_outs)
    # Cast a constant once before the loop, if each step would only cast it.
    casts = [e for e in body.eqns if e.prim is convert_p and e.params["dtype"] == policy.dtype]
    cast = {e.invars[0] for e in casts}
    read = {a for e in body.eqns if e not in casts for a in e.invars} | set(body.outvars)
    flags = tuple(
        f or (i < n_consts and c.eligible and v in cast and v not in read)
        for i, (f, c, v) in enumerate(zip(flags, ins, body.invars, strict=True))
    )
    body, _ = _body(jaxpr, policy, flags, wide_outs)
    values = [c.cast(policy.dtype if f else c.aval.dtype) for c, f in zip(ins, flags, strict=True)]
    closed, extra = body.hoist()
    return prim.bind(*extra, *values, **{**params, "jaxpr": closed, "n_consts": n_consts + len(extra)})


def _custom_derivative(prim, policy: Policy, ins: list[_Cell], params: dict) -> list[Any]:
    n_consts = params["n_consts"]
    body, low_outs = _body(params["jaxpr"], policy, _low(ins))
    closed, extra = body.hoist()
    rule = _Fwd if prim is custom_vjp_call_p else _JVPRule
    changed = {
        "jaxpr": closed,
        prim.rule: rule(params[prim.rule], policy, _low(ins)[n_consts:], low_outs),
        "n_consts": n_consts + len(extra),
    }
    return prim.bind(*extra, *[c.value for c in ins], **{**params, **changed})


def _custom_vmap(prim, policy: Policy, ins: list[_Cell], params: dict) -> list[Any]:
    body, low_outs = _body(params["jaxpr"], policy, _low(ins))
    closed, extra = body.hoist()
    rule = _VmapRule(params["rule"], policy, _low(ins), low_outs, len(extra))
    return prim.bind(*extra, *[c.value for c in ins], **{**params, "jaxpr": closed, "rule": rule})


_CALLS: dict[Any, Callable] = {
    scan_p: _scan,
    custom_jvp_call_p: _custom_derivative,
    custom_vjp_call_p: _custom_derivative,
    custom_vmap_call_p: _custom_vmap,
}


def _run_rule(rule: Callable, policy: Policy, args: Sequence[Any], low: Sequence[bool]) -> list[_Cell]:
    """Run a rule (of flat lists) with casts, on arguments of which some are low."""
    avals = [x.aval.with_dtype(WIDE) if is_low else x.aval for x, is_low in zip(args, low, strict=True)]
    return _run(stage(rule, avals, name_of(rule)), policy, args)


def _as_flags(cells: Sequence[_Cell], low: Sequence[bool], policy: Policy) -> list[Any]:
    """Cast results to low where flagged, else to the program's dtype."""
    return [c.cast(policy.dtype) if is_low else c.traced() for c, is_low in zip(cells, low, strict=True)]


class _CastRule:
    """A rule with casts."""

    def __init__(self, rule: Callable, policy: Policy, low_ins: Flags, low_outs: Flags):
        self.rule, self.policy, self.low_ins, self.low_outs = rule, policy, low_ins, low_outs
        self.__name__ = name_of(rule)


class _JVPRule(_CastRule):
    """A jvp rule with casts."""

    def __call__(self, primals: Sequence, tangents: Sequence) -> tuple[list, list]:
        nonzero = [t.__class__ is not Zero for t in tangents]
        n = len(primals)
        filled: list[bool] = []

        def flat(*xs):
            ps, rest = xs[:n], iter(xs[n:])
            ts = [next(rest) if g else zero(p.aval) for p, g in zip(ps, nonzero, strict=True)]
            outs, out_ts = self.rule(ps, ts)
            filled[:] = [t.__class__ is not Zero for t in out_ts]
            return [*outs, *(t for t in out_ts if t.__class__ is not Zero)]

        flat.__name__ = self.__name__
        ts = [t for t, g in zip(tangents, nonzero, strict=True) if g]
        low_ts = [low for low, g in zip(self.low_ins, nonzero, strict=True) if g]
        cells = _run_rule(flat, self.policy, [*primals, *ts], [*self.low_ins, *low_ts])
        k = len(self.low_outs)
        outs = _as_flags(cells[:k], self.low_outs, self.policy)
        low_out_ts = [low for low, f in zip(self.low_outs, filled, strict=True) if f]
        found = iter(_as_flags(cells[k:], low_out_ts, self.policy))
        return outs, [next(found) if f else zero(o.aval) for o, f in zip(outs, filled, strict=True)]


class _Fwd(_CastRule):
    """A forward rule with casts, which returns the backward rule with casts."""

    def __call__(self, primals: Sequence, perturbed: Sequence[bool]) -> tuple[list, list, Callable]:
        bwd: Any = None

        def flat(*xs):
            nonlocal bwd
            outs, residuals, bwd = self.rule(xs, perturbed)
            return [*outs, *residuals]

        flat.__name__ = self.__name__
        cells = _run_rule(flat, self.policy, primals, self.low_ins)
        n = len(self.low_outs)
        low_residuals = _low(cells[n:])

        def cast_bwd(residuals: Sequence, cts: Sequence) -> list:
            return self._backward(bwd, residuals, low_residuals, cts)

        cast_bwd.__name__ = name_of(bwd)
        return _as_flags(cells[:n], self.low_outs, self.policy), [c.value for c in cells[n:]], cast_bwd

    def _backward(self, bwd: Callable, residuals: Sequence, low_residuals: Flags, cts: Sequence) -> list:
        nonzero = [ct.__class__ is not Zero for ct in cts]
        n = len(residuals)
        filled: list[bool] = []

        def flat(*xs):
            rest = iter(xs[n:])
            # a zero of the cotangent's type in the program
            own = [
                next(rest) if g else zero(ct.aval.with_dtype(WIDE) if low else ct.aval)
                for ct, g, low in zip(cts, nonzero, self.low_outs, strict=True)
            ]
            found = bwd(xs[:n], own)
            filled[:] = [ct is not None for ct in found]
            return [ct for ct in found if ct is not None]

        flat.__name__ = name_of(bwd)
        values = [ct for ct, g in zip(cts, nonzero, strict=True) if g]
        low_cts = [low for low, g in zip(self.low_outs, nonzero, strict=True) if g]
        cells = _run_rule(flat, self.policy, [*residuals, *values], [*low_residuals, *low_cts])
        low_found = [low for low, f in zip(self.low_ins, filled, strict=True) if f]
        found = iter(_as_flags(cells, low_found, self.policy))
        return [next(found) if f else None for f in filled]


class _VmapRule(Rule):
    """A batching rule with casts. Its first operands are ``n_extra`` constants."""

    def __init__(self, rule: Rule, policy: Policy, low_ins: Flags, low_outs: Flags, n_extra: int):
        super().__init__(rule.__name__, [*(True,) * n_extra, *rule.closed])
        self.rule, self.policy, self.n_extra = rule, policy, n_extra
        self.low_ins, self.low_outs = low_ins, low_outs

    def run(self, axis, batched, args):
        out_batched: list[bool] = []

        def flat(*xs):
            outs, out_batched[:] = self.rule(axis, batched[self.n_extra :], xs)
            return outs

        flat.__name__ = self.__name__
        cells = _run_rule(flat, self.policy, args[self.n_extra :], self.low_ins)
        return _as_flags(cells, self.low_outs, self.policy), out_batched
