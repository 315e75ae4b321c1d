"""``check_grads``, ``check_jvp``, ``check_vjp``: comparison with differences.

Face, part of ``blufunc.testing``. In: a function and a point. Out: an ``AssertionError`` if a derivative is wrong.
Derivatives are compared along random directions with the central difference of order four

    (8 (f(x + h) - f(x - h)) - (f(x + 2h) - f(x - 2h))) / 12h  =  f'(x) + O(h^4),

whose truncation and rounding errors are about equal where h is the fifth root of the spacing of floating numbers. In
float64 it is good to eleven digits, in float32 to five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.pytree import paths, tree
from blufunc.testing.compare import assert_close, eps_of, numbers, random_like, values_of
from blufunc.transforms.arguments import check_callable, name_of
from blufunc.transforms.autodiff.grad import jvp, vjp

MODES = ("fwd", "rev")


class Tolerance:
    """The step of differences, and the tolerance of derivatives.

    Attributes, each None for the default of the arrays' dtypes:
      atol, rtol: absolute (for results of size one) and relative.
      eps: the step.
    """

    def __init__(self, atol: float | None, rtol: float | None, eps: float | None):
        for name, value in (("atol", atol), ("rtol", rtol), ("eps", eps)):
            number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if value is not None and not (number and value >= 0 and (value or name != "eps")):
                raise errors.ArgumentError(
                    f"{name} is a {'positive' if name == 'eps' else 'nonnegative'} number or None, not {value!r:.60}.",
                    where=source.here(),
                )
        self.atol, self.rtol, self.eps = atol, rtol, eps

    def step(self, arrays: Sequence[Any]) -> float:
        """The step of differences of a function of and to ``arrays``."""
        return eps_of(*arrays) ** 0.2 if self.eps is None else self.eps

    def of(self, arrays: Sequence[Any]) -> tuple[float, float]:
        """Relative and absolute tolerance for the same."""
        # differences have four fifths of the digits: leave some for curvature
        usual = 30 * eps_of(*arrays) ** 0.6
        return usual if self.rtol is None else self.rtol, usual if self.atol is None else self.atol


class Problem:
    """A function restricted to inexact arguments and inexact results.

    Attributes:
      point: those arguments, flat.
      name: what to call it.
    """

    def __init__(self, f: Callable, args: Sequence[Any], caller: str):
        check_callable(f, caller)
        if not isinstance(args, (tuple, list)):
            raise errors.ArgumentError(
                f"{caller} takes the arguments of the function as a tuple, not {args!r:.60}.",
                where=source.here(),
                fix=f"{caller}(f, (x,), ...)",
            )
        self.f, self.name = f, name_of(f)
        leaves, self.in_tree = tree.flatten(tuple(args))
        self.values = values_of(leaves, "the arguments")
        self.wrt = [i for i, v in enumerate(self.values) if dtypes.is_inexact(v.dtype)]
        self.point = [self.values[i] for i in self.wrt]
        if not self.wrt:
            raise errors.ArgumentError(
                f"{caller}: {self.name} has no floating or complex arguments to differentiate with respect to.",
                where=source.here(),
            )

    def args(self, xs: Sequence[Any]) -> tuple:
        """All arguments, with ``xs`` in the places of those that are differentiated."""
        leaves = list(self.values)
        for i, x in zip(self.wrt, xs, strict=True):
            leaves[i] = x
        return tree.unflatten(self.in_tree, leaves)

    def __call__(self, *xs: Any) -> list[Any]:
        return inexact_leaves(self.f(*self.args(xs)), f"the result of {self.name}")

    def tangent_args(self, ts: Sequence[Any]) -> tuple:
        """Tangents of all arguments: those of integers have dtype float0."""
        leaves = [zeros(v.aval.tangent()) for v in self.values]
        for i, t in zip(self.wrt, ts, strict=True):
            leaves[i] = t
        return tree.unflatten(self.in_tree, leaves)


def inexact_leaves(out: Any, what: str) -> list[Any]:
    """The floating and complex arrays of a pytree."""
    return [x for x in values_of(tree.leaves(out), what) if dtypes.is_inexact(x.dtype)]


def check_grads(
    f: Callable,
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[str] = MODES,
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
) -> None:
    """Check the derivatives of a function against finite differences.

    Each derivative of order 2 and more is the derivative of one of the order below: forward over forward, reverse
    over forward, and so on, for all ``modes``.

    Args:
      f: a function of pytrees of arrays; smooth at ``args`` and around. Integers are left as they are, among
        arguments and results.
      args: a tuple of its arguments. In float64 the comparison is much sharper than in float32, which NumPy arrays
        and Python numbers become: ``bnp.asarray(x, "float64")``.
      order: up to which order.
      modes: "fwd" for ``jvp``, "rev" for ``vjp``.
      atol, rtol: the error that is allowed: ``rtol * |want| + atol * max(1, |want|.max())``.
      eps: the step of the differences. All three are by default what suits the dtypes.
    Raises:
      AssertionError: a derivative is wrong: which, where, and by how much.
      ArgumentError: there is nothing to differentiate, or the options are none.
    """
    check_options(order, modes, "check_grads")
    problem = Problem(f, args, "check_grads")
    if not problem(*problem.point):
        raise errors.ArgumentError(
            f"check_grads: {problem.name} has no floating or complex results.", where=source.here()
        )
    _check_orders(problem, problem.point, order, tuple(modes), Tolerance(atol, rtol, eps), problem.name)


def check_options(order: Any, modes: Any, caller: str) -> None:
    """Raise ArgumentError unless order and modes are such."""
    if isinstance(order, bool) or not isinstance(order, (int, np.integer)) or order < 1:
        raise errors.ArgumentError(
            f"{caller}: order is an int of 1 or more, not {order!r:.60}.", where=source.here()
        )
    known = isinstance(modes, (tuple, list)) and modes and all(m in MODES for m in modes)
    if not known:
        raise errors.ArgumentError(
            f"{caller}: modes are 'fwd' and 'rev', not {modes!r:.60}.",
            where=source.here(),
            fix="modes=('fwd', 'rev')",
        )


def _check_orders(
    fun: Callable, point: Sequence[Any], order: int, modes: tuple[str, ...], tol: Tolerance, name: str
) -> None:
    """Check a function of flat arrays, and then its derivatives as such functions."""
    rng = np.random.default_rng(order)
    tangents = [random_like(x, rng) for x in point]
    cotangents = [cotangent_of(x, rng) for x in fun(*point)]
    forward = lambda *xs: [t for t in jvp(fun, xs, tangents)[1] if dtypes.is_inexact(t.dtype)]
    reverse = lambda *xs: list(vjp(fun, *xs)[1](cotangents))
    for mode, derivative in (("fwd", forward), ("rev", reverse)):
        if mode not in modes:
            continue
        if mode == "fwd":
            out, out_ts = jvp(fun, point, tangents)
            compare_forward(fun, point, tangents, out, out_ts, tol, f"jvp of {name}")
        else:
            out, pullback = vjp(fun, *point)
            grads = pullback(cotangents)
            compare_reverse(fun, point, tangents, cotangents, out, grads, tol, f"vjp of {name}")
        if order > 1:
            _check_orders(
                derivative, point, order - 1, modes, tol, f"{'jvp' if mode == 'fwd' else 'vjp'} of {name}"
            )


def check_jvp(
    f: Callable,
    f_jvp: Callable,
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
    err_msg: str = "",
) -> None:
    """Check a forward-mode derivative of a function against finite differences.

    Args:
      f: a function of pytrees of arrays.
      f_jvp: ``f_jvp(primals, tangents) -> (out, out_tangent)``, as ``functools.partial(bf.jvp, f)`` is.
      args, atol, rtol, eps: as for ``check_grads``.
      err_msg: what to put before the message of an error.
    Raises:
      AssertionError: the value or the tangent is wrong.
    """
    check_callable(f_jvp, "check_jvp")
    problem = Problem(f, args, "check_jvp")
    rng = np.random.default_rng(0)
    tangents = [random_like(x, rng) for x in problem.point]
    pair = f_jvp(problem.args(problem.point), problem.tangent_args(tangents))
    out, out_ts = _pair(pair, "f_jvp must return (out, out_tangent)", err_msg)
    what = f"{err_msg}jvp of {problem.name}"
    ts = inexact_leaves(out_ts, f"the tangent of {problem.name}")
    outs = inexact_leaves(out, f"the result of {problem.name}")
    compare_forward(problem, problem.point, tangents, outs, ts, Tolerance(atol, rtol, eps), what)


def check_vjp(
    f: Callable,
    f_vjp: Callable,
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
    eps: float | None = None,
    err_msg: str = "",
) -> None:
    """Check a reverse-mode derivative of a function against finite differences.

    Args:
      f: a function of pytrees of arrays.
      f_vjp: ``f_vjp(*args) -> (out, pullback)``, as ``functools.partial(bf.vjp, f)`` is.
      args, atol, rtol, eps: as for ``check_grads``.
      err_msg: what to put before the message of an error.
    Raises:
      AssertionError: the value or the cotangents are wrong.
    """
    check_callable(f_vjp, "check_vjp")
    problem = Problem(f, args, "check_vjp")
    rng = np.random.default_rng(0)
    tangents = [random_like(x, rng) for x in problem.point]
    out, pullback = _pair(f_vjp(*problem.args(problem.point)), "f_vjp must return (out, pullback)", err_msg)
    leaves, out_tree = tree.flatten(out)
    outs = values_of(leaves, f"the result of {problem.name}")
    inexact = [dtypes.is_inexact(x.dtype) for x in outs]
    cts = [
        cotangent_of(x, rng) if floats else zeros(x.aval.tangent())
        for x, floats in zip(outs, inexact, strict=True)
    ]
    found, found_tree = tree.flatten(pullback(tree.unflatten(out_tree, cts)))
    what = f"{err_msg}vjp of {problem.name}"
    if found_tree != problem.in_tree:
        differences = "; ".join(
            paths.diff(problem.in_tree, found_tree, "the arguments", "the cotangents")[:3]
        )
        raise AssertionError(
            f"{what}: the cotangents have a different structure from the arguments: {differences}"
        )
    grads = values_of([found[i] for i in problem.wrt], f"the cotangents of {problem.name}")
    keep = lambda xs: [x for x, floats in zip(xs, inexact, strict=True) if floats]
    compare_reverse(
        problem, problem.point, tangents, keep(cts), keep(outs), grads, Tolerance(atol, rtol, eps), what
    )


def _pair(result: Any, expected: str, err_msg: str) -> tuple:
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise AssertionError(f"{err_msg}{expected}, not {result!r:.60}")
    return tuple(result)


# -- one derivative of a function of flat arrays ---------------------------------------------------


def compare_forward(fun, point, tangents, outs, out_ts, tol: Tolerance, what: str) -> None:
    """Compare tangents with differences, and results with the function."""
    values = fun(*point)
    _check_values(outs, values, what)
    if len(out_ts) != len(values):
        raise AssertionError(f"{what}: {len(out_ts)} tangents for {len(values)} results")
    want = along(fun, point, tangents, tol)
    rtol, atol = tol.of([*point, *values])
    for i, (t, x, w) in enumerate(zip(out_ts, values, want, strict=True)):
        if not t.aval.same_type(x.aval):
            raise AssertionError(f"{what}: tangent {i} is {t.aval}, and its result is {x.aval}")
        t = np.where(np.isfinite(numbers(x)), numbers(t), 0)
        assert_close(t, w, f"{what}: tangent {i}, against differences,", rtol, atol, _hint(w))


def compare_reverse(fun, point, tangents, cts, outs, grads, tol: Tolerance, what: str) -> None:
    """Compare cotangents with differences: ``<ct, f'(x) t> = <f'(x)^T ct, t>``."""
    values = fun(*point)
    _check_values(outs, values, what)
    for i, (g, x) in enumerate(zip(grads, point, strict=True)):
        if not g.aval.same_type(x.aval):
            raise AssertionError(f"{what}: cotangent {i} is {g.aval}, and its argument is {x.aval}")
    rtol, atol = tol.of([*point, *values])
    pushed = along(fun, point, tangents, tol)
    # One argument at a time would cost as many differences: so long as the sum is right, nothing else is looked at.
    want, size = pairing(cts, pushed)
    got, got_size = pairing(grads, tangents)
    bound = atol + rtol * max(size, got_size)
    if abs(got - want) <= bound or (np.isnan(got) and np.isnan(want)):
        return
    worst = ""
    if len(point) > 1:
        errors_by_argument = []
        for i in range(len(point)):
            alone = [
                t if j == i else from_numpy(np.zeros_like(np.asarray(t))) for j, t in enumerate(tangents)
            ]
            expected = pairing(cts, along(fun, point, alone, tol))[0]
            errors_by_argument.append(abs(pairing(grads[i : i + 1], tangents[i : i + 1])[0] - expected))
        worst = f", most of it in argument {int(np.argmax(errors_by_argument))}"
    raise AssertionError(
        f"{what}: the cotangents, along a random direction, give {got:.9g} where differences give {want:.9g}: "
        f"off by {abs(got - want):.3g}{worst} (allowed: {bound:.3g}){_hint(np.asarray(want))}"
    )


def _check_values(got: Sequence[Any], want: Sequence[Any], what: str) -> None:
    if len(got) != len(want):
        raise AssertionError(
            f"{what}: {len(got)} results beside the derivative, the function has {len(want)}"
        )
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not g.aval.same_type(w.aval):
            raise AssertionError(f"{what}: value {i} is {g.aval}, the function returns {w.aval}")
        slack = 256 * eps_of(w)
        assert_close(g, w, f"{what}: value {i}", slack, slack)


def cotangent_of(x: Any, rng: np.random.Generator) -> Any:
    """A random cotangent of a result; zero where that is not finite."""
    ct = random_like(x, rng)
    return from_numpy(np.where(np.isfinite(numbers(x)), np.asarray(ct), 0).astype(x.dtype))


def along(fun: Callable, point: Sequence[Any], tangents: Sequence[Any], tol: Tolerance) -> list[np.ndarray]:
    """The derivative along ``tangents``, by differences; zero where not finite."""
    values = fun(*point)
    h = tol.step([*point, *values])
    with np.errstate(all="ignore"):

        def at(s):
            moved = [
                from_numpy((numbers(x) + s * h * numbers(t)).astype(x.dtype))
                for x, t in zip(point, tangents, strict=True)
            ]
            return [numbers(y) for y in fun(*moved)]

        near = [p - m for p, m in zip(at(1), at(-1), strict=True)]
        far = [p - m for p, m in zip(at(2), at(-2), strict=True)]
        return [
            np.where(np.isfinite(numbers(x)), (8 * a - b) / (12 * h), 0)
            for x, a, b in zip(values, near, far, strict=True)
        ]


def pairing(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[float, float]:
    """The real pairing of cotangents and tangents, and the sum of absolute terms."""
    terms = [np.real(numbers(x) * numbers(y)) for x, y in zip(xs, ys, strict=True)]
    return float(sum(np.sum(t) for t in terms)), float(sum(np.sum(np.abs(t)) for t in terms))


def _hint(want: np.ndarray) -> str:
    if np.all(np.isfinite(want)):
        return ""
    return "; the differences are not finite: the steps leave the domain, choose other arguments or a smaller eps"
