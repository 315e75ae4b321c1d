"""Kinds: families of primitives that share their rules.

Core operations. A kind provides the abstract, derivative, transposition and batching rules, so that a new
member of a family states only its specifics:

    sinh_p = Elementwise("sinh", np.sinh, "inexact", derivs=[lambda t, ans, x: mul(t, cosh(x))])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.primitives import sharding
from blufunc.core.primitives.c_form import KINDS, CForm
from blufunc.core.primitives.linear_ops import (
    add_any,
    batch_reduction,
    batched_front,
    broadcast_in_dim,
    broadcast_to,
    reduced_shape,
    unbroadcast,
)
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.rule_errors import described, rule_error
from blufunc.core.primitives.tangents import Zero, is_linear, zero

TYPES: dict[str, tuple[str, Callable[[np.dtype], bool]]] = {
    "any": ("any dtype", lambda d: d != dtypes.float0),
    "numeric": ("numbers and booleans", lambda d: dtypes.is_numeric(d) or dtypes.is_bool(d)),
    "number": ("numbers", lambda d: dtypes.is_numeric(d) and not dtypes.is_bool(d)),
    "real": ("real numbers", lambda d: dtypes.is_integer(d) or dtypes.is_floating(d)),
    "ordered": ("real numbers and booleans", lambda d: not dtypes.is_complex(d) and not dtypes.is_key(d)),
    "inexact": ("floating and complex numbers", dtypes.is_inexact),
    "float": ("floating numbers", dtypes.is_floating),
    "complex": ("complex numbers", dtypes.is_complex),
    "component": ("float32 and float64", lambda d: d in (dtypes.float32, dtypes.float64)),
    "integer": ("integers", dtypes.is_integer),
    "bits": ("integers and booleans", lambda d: dtypes.is_integer(d) or dtypes.is_bool(d)),
    "bool": ("booleans", dtypes.is_bool),
}
"""Accepted types by name: description for messages, and predicate."""

_LIKELY = {"complex": "complex64", "integer": "int32", "bits": "int32", "bool": "bool"}
"""The dtype to suggest where a primitive does not accept another."""


def check_types(name: str, types: str, *avals: ShapedArray) -> None:
    """Raise DtypeError unless all of ``avals`` have a dtype among ``types``."""
    text, accepts = TYPES[types]
    for a in avals:
        if not accepts(a.dtype):
            raise errors.DtypeError(
                f"{name} takes {text}, not {a}.",
                fix=f"convert first: x.astype('{_LIKELY.get(types, 'float32')}') or another dtype",
            )


AUTOCAST = ("low", "widest", "float32", "exact")
"""The classes of ``bf.autocast``; see ``transforms/precision/policy.py``."""

C_FORMS: dict[np.ufunc, Elementwise] = {}
"""The first primitive with a C form for each ufunc: others of it share the form."""


def _check_lower(name: str, impl: Any, lower: Any, autocast_class: str | None, cost: Any) -> None:
    """Raise ArgumentError for an invalid ``lower``, autocast class or cost."""
    wrong = fix = None
    if impl is None and not callable(lower):
        wrong, fix = (
            "it has neither impl nor a definition",
            "give a function of NumPy arrays, or lower=definition",
        )
    elif isinstance(lower, CForm):
        unknown = [k for k in lower.templates if k not in KINDS]
        if unknown:
            wrong = f"the C form has a template for {', '.join(unknown)}"
            fix = f"kinds of operands are {', '.join(f'{k} ({n})' for k, n in KINDS.items())}"
    elif not (lower is None or callable(lower) or isinstance(lower, unsupported)):
        wrong = f"lower={lower!r:.60} is neither a definition nor a C form"
        fix = 'lower=lambda x: x / (1 + bnp.abs(x)), or lower=extend.CForm({"f": "{0} / (1 + bf_abs({0}))"})'
    elif autocast_class is not None and autocast_class not in AUTOCAST:
        wrong, fix = (
            f"autocast={autocast_class!r:.60} is not an autocast class",
            f"one of {', '.join(AUTOCAST)}, or None",
        )
    elif cost.__class__ is not int or cost < 0:
        wrong, fix = (
            f"cost={cost!r:.60} is not a number of additions",
            "1 for an addition, 4 a division, 8 an exponential",
        )
    if wrong:
        raise errors.ArgumentError(f"the primitive {name}: {wrong}.", where=source.here(), fix=fix)


def _check_made(name: str, impl: Any, types: Any, rules: dict[str, Any], out: Any) -> None:
    """Raise ArgumentError for invalid arguments of a kind; uses check the arity."""
    wrong = fix = None
    if impl is not None and not callable(impl):
        wrong, fix = f"impl={impl!r:.60} cannot be called", "give a function of NumPy arrays"
    elif not isinstance(types, str) or types not in TYPES:
        wrong, fix = f"types={types!r:.60} is not a family of dtypes", f"one of {', '.join(TYPES)}"
    elif not (out is None or isinstance(out, np.dtype) or (callable(out) and not isinstance(out, type))):
        wrong, fix = (
            f"out={out!r:.60} is not a dtype",
            "np.dtype('float32'), or a function of the operands' dtype",
        )
    for what, functions in rules.items():
        if not (isinstance(functions, (list, tuple)) and all(r is None or callable(r) for r in functions)):
            wrong = f"{what}={functions!r:.60} is not a list of functions"
            fix = f"{what}=[...] with a function, or None, for each operand"
    if wrong:
        raise errors.ArgumentError(f"the primitive {name}: {wrong}.", where=source.here(), fix=fix)


class Elementwise(Primitive):
    """Operations applied element by element.

    Operands have one dtype, and one shape except that any of them may be of rank 0.

    Args:
      name: name in printed jaxprs.
      impl: NumPy function; executors may run a ``np.ufunc`` in place.
      types: a key of ``TYPES``.
      derivs: for each operand ``(t, ans, *operands) -> term`` of the output tangent, linear in ``t``, or None where
        the derivative is zero wherever it exists; None for a non-differentiable function.
      transposes: for each operand that the function may be linear in, ``(ct, *operands) -> ct``; None otherwise.
      out: the result's dtype where it is not the operands': a dtype, or a function of the dtype.
      lower: a ``CForm`` for kernels, or a definition by other operations, which also supplies the derivative where
        ``derivs`` is None, and ``impl`` where that is None. Without either, and with an ``impl`` that is no ufunc of
        a known primitive, NumPy computes it on the host.
      linear: groups of operands in which it is jointly linear.
      autocast: its class in mixed precision, one of ``AUTOCAST``; None: it runs on the traced dtypes.
      cost: approximate cost of one application, in float additions.
    """

    kind = "elementwise"
    fresh = True
    widens = True
    out: Any

    def __init__(
        self,
        name: str,
        impl: Callable | None,
        types: str,
        derivs: Sequence[Callable | None] | None = None,
        transposes: Sequence[Callable | None] = (),
        out: np.dtype | Callable[[np.dtype], np.dtype] | None = None,
        *,
        lower: Any = None,
        linear: Sequence[Collection[int]] = (),
        autocast: str | None = None,
        cost: int | None = None,
    ):
        _check_made(
            name, impl, types, {"derivs": () if derivs is None else derivs, "transposes": transposes}, out
        )
        self._impl: Any = impl
        self.ufunc = impl if isinstance(impl, np.ufunc) else None
        if lower is not None:
            self.lower = lower
        twin = C_FORMS.get(self.ufunc) if self.ufunc and type(self) is Elementwise and lower is None else None
        if twin is not None and twin.out == out:
            self.lower, self.cost = twin.lower, twin.cost
        super().__init__(name)
        if impl is not None or type(self) is Elementwise:
            _check_lower(name, impl, lower, autocast, 1 if cost is None else cost)
        if self.ufunc is not None and isinstance(lower, CForm):
            C_FORMS.setdefault(self.ufunc, self)
        self.linear = tuple(map(frozenset, linear))
        self.autocast_class = autocast
        self.cost = self.cost if cost is None else cost
        self.types = types
        self.derivs = derivs
        self.transposes = transposes
        self.out = out

    @property
    def has_impl(self):
        return self._impl is not None

    def impl(self, *args, **params):
        return super().impl(*args, **params) if self._impl is None else self._impl(*args, **params)

    def abstract(self, *avals, **params):
        check_types(self.name, self.types, *avals)
        first = avals[0]
        shape = elementwise_shape(self.name, avals)
        for a in avals[1:]:
            if a.dtype != first.dtype:
                raise errors.DtypeError(
                    f"{self.name} takes operands of one dtype, not {', '.join(map(str, avals))}.",
                    fix="use blufunc.numpy, which promotes, or convert with .astype",
                )
        dtype = self.out_dtype(first.dtype, **params)
        return ShapedArray(shape, dtype, all(a.weak_type for a in avals) and not dtypes.is_bool(dtype))

    def shard(self, avals, outs, **params):
        def stays_owed(group):
            # narrowing before an unreduced sum would round each partial sum
            types = [avals[i].dtype for i in group]
            wide = all(outs[0].dtype.itemsize >= d.itemsize for d in types)
            return wide and all(map(dtypes.is_inexact, (*types, outs[0].dtype)))

        groups = self.linear_in(avals, outs, **params)
        return sharding.elementwise(avals, outs, tuple(filter(stays_owed, groups)))

    def _checked(self, avals, params):
        self._check_operands(len(avals))
        if isinstance(self.lower, CForm) and (unknown := self.lower.names() - {"T", "U", *params}):
            raise errors.ArgumentError(
                f"the C form of {self.name} has {{{min(unknown)}}}, and {self.name} has no parameter of that name.",
                where=source.here(),
                fix="{0}, {1}, ... are operands, {T} and {U} types; double the braces of C code",
            )
        return super()._checked(avals, params)

    def _check_operands(self, n: int) -> None:
        """Raise ArgumentError unless each of ``n`` operands has both linear rules."""
        if not n:
            raise errors.ArgumentError(f"{self.name} takes one operand or more.", where=source.here())
        if isinstance(self.lower, CForm) and self.lower.operands() > n:
            raise errors.ArgumentError(
                f"the C form of {self.name} has {self.lower.operands()} operands, but {n} given.",
                where=source.here(),
                fix=f"write its operands as {', '.join(f'{{{i}}}' for i in range(n))}, or give {self.name} as many",
            )
        for what, rules in (("derivs", self.derivs), ("transposes", self.transposes or None)):
            if rules is not None and len(rules) != n:
                raise errors.ArgumentError(
                    f"{self.name} has {what} for {len(rules)} operand{'s' * (len(rules) != 1)}, but {n} given.",
                    where=source.here(),
                    why=f"{what} has one entry for each operand.",
                    fix=f"give {self.name} as many operands, or {what}=[...] as many entries, None for no derivative",
                )

    def out_dtype(self, dtype: np.dtype, **params: Any) -> np.dtype:
        """The dtype of the result."""
        if self.out is None:
            return dtype
        return self.out(dtype) if callable(self.out) else self.out

    def jvp(self, primals, tangents, **params):
        if self.derivs is None and self.has_definition:
            return super().jvp(primals, tangents, **params)
        ans = self.bind(*primals, **params)
        total = None
        if self.derivs is not None:
            for deriv, t in zip(self.derivs, tangents, strict=True):
                if t.__class__ is Zero or deriv is None:
                    continue
                term = deriv(t, ans, *primals, **params)
                shape = getattr(getattr(term, "aval", None), "shape", None)
                if shape != ans.aval.shape and (shape is None or shape != t.aval.shape):
                    raise rule_error(self, "derivs", f"returned {described(term)} for a result {ans.aval}")
                term = broadcast_to(term, ans.aval.shape)
                total = term if total is None else add_any(total, term)
        return ans, zero(ans.aval) if total is None else total

    def transpose(self, ct, *args, **params):
        if not self.transposes and self.has_definition:
            return super().transpose(ct, *args, **params)
        linear = {i for i, x in enumerate(args) if is_linear(x)}
        if len(linear) > 1 and self.linear and not any(linear <= group for group in self.linear):
            raise errors.GradError(
                f"{self.name} is linear in each operand alone, and several depend on a tangent.",
                where=source.here(),
                why="a derivative is linear in the tangents.",
                fix="correct the derivative rule that multiplies them; testing.check_grads finds it",
            )
        rules = self.transposes or (None,) * len(args)
        for i, (rule, x) in enumerate(zip(rules, args, strict=True)):
            if is_linear(x):
                if rule is None:
                    raise errors.GradError(
                        f"{self.name} is not linear in operand {i}: it is transposed through its derivative.",
                        where=source.here(),
                    )
                x.add(unbroadcast(rule(ct, *args, **params), x.aval))

    def batch(self, axis, args, dims, **params):
        pairs = list(zip(args, dims, strict=True))
        ranks = {(a.aval.ndim, d) for a, d in pairs if d is not None}
        if len(ranks) == 1 and all(d is not None or not a.aval.ndim for a, d in pairs):
            ((_, d),) = ranks
            return self.bind(*args, **params), d
        # type the operation on one example, so that errors refer to it
        shape = self.typed(tuple([example_aval(a.aval, d) for a, d in pairs]), params).shape
        return self.bind(*[_align(axis, a, d, shape) for a, d in pairs], **params), 0


def example_aval(aval: ShapedArray, d: int | None) -> ShapedArray:
    """The type of one example of a batch along ``d``."""
    return aval if d is None else aval.with_shape(aval.shape[:d] + aval.shape[d + 1 :])


def _align(axis: Any, x: Any, d: int | None, shape: tuple[int, ...]) -> Any:
    """``x`` with the batch axis leading ``shape``; rank-0 constants are unchanged."""
    if d is None and not x.aval.ndim:
        return x
    x = batched_front(axis, x, d)
    return broadcast_in_dim(x, (axis.size, *shape), tuple(range(x.aval.ndim)))


def elementwise_shape(name: str, avals: Sequence[ShapedArray]) -> tuple[int, ...]:
    """The common shape of operands that agree or have rank 0."""
    shape: tuple[int, ...] = ()
    for a in avals:
        if a.shape:
            if shape and a.shape != shape:
                raise errors.ShapeError(
                    f"{name} takes operands of one shape (or rank 0), not {', '.join(map(str, avals))}.",
                    fix="use blufunc.numpy, which broadcasts, or lax.broadcast_in_dim",
                )
            shape = a.shape
    return shape


class Reduction(Primitive):
    """Reductions over ``axes``; a subclass or instance adds its derivative.

    Args:
      impl: ``(x, axes) -> array``.
      deriv: ``(t, ans, x, axes) -> tangent``; None for results without derivative.
      monoid: combines elements: a key of ``REDUCTIONS`` in ``kernels/loopir/ir.py``; kernels compute those.
      autocast: its class in mixed precision.
      out: the result's dtype where it is not the operand's.
    """

    kind = "reduce"
    fresh = widens = True

    def __init__(
        self,
        name: str,
        impl: Callable,
        types: str,
        deriv: Callable | None = None,
        out: np.dtype | None = None,
        *,
        monoid: str = "",
        autocast: str | None = None,
    ):
        _check_made(name, impl, types, {"deriv": [deriv]}, out)
        self.monoid, self.autocast_class = monoid, autocast
        self._impl, self.types, self.deriv, self.out = impl, types, deriv, out
        super().__init__(name)

    def impl(self, x, *, axes):
        return self._impl(x, axes)

    def abstract(self, x, *, axes):
        check_types(self.name, self.types, x)
        return ShapedArray(reduced_shape(x, axes, self.name), self.out or x.dtype)

    def jvp(self, primals, tangents, *, axes):
        (x,), (t,) = primals, tangents
        ans = self.bind(x, axes=axes)
        if t.__class__ is Zero or self.deriv is None:
            return ans, zero(ans.aval)
        return ans, self.deriv(t, ans, x, axes)

    def transpose(self, ct, x, *, axes):
        raise errors.GradError(f"{self.name} is not linear: it is transposed through its derivative.")

    def shard(self, avals, outs, **params):
        return sharding.shard_reduction(self.monoid, avals, outs, **params)

    def batch(self, axis, args, dims, *, axes):
        return batch_reduction(self, args[0], dims[0], axes)
