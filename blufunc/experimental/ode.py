"""``ode``: ``odeint``, an adaptive Runge-Kutta solver with an adjoint.

A face above ``blufunc.lax``. Steps are those of J. R. Dormand and P. J. Prince, "A family of embedded Runge-Kutta
formulae" (1980), with the middle of a step by L. F. Shampine, "Some practical Runge-Kutta formulas" (1986), for values
between steps; E. Hairer, S. P. Norsett and G. Wanner, "Solving Ordinary Differential Equations I" (1993), section II.4,
has the control of steps. The derivative integrates the adjoint equation backward: L. S. Pontryagin et al. (1962); its
memory does not grow with the number of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.arrays.array import ConcreteArray, lift
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.linalg.common import real_dtype
from blufunc.core.pytree import tree
from blufunc.flatten_util import ravel_pytree
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.autodiff.grad import vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.custom_rules.closure_convert import closure_convert
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")

__all__ = ["odeint", "optimal_step_size"]

_TIMES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
_MIDDLE = (
    6025192743 / 60171106304,
    0.0,
    51252292925 / 130801643196,
    -2691868925 / 90256659456,
    187940372067 / 3189068634112,
    -1776094331 / 39487288512,
    11237099 / 470086768,
)


class _Step(NamedTuple):
    """State: the point, its slope, the next step size, the last step's polynomial."""

    count: Any
    y: Any
    f: Any
    t: Any
    dt: Any
    before: Any
    polynomial: Any


def odeint(
    func: Callable[..., T],
    y0: T,
    t: ArrayLike,
    *args: Any,
    rtol: float = 1.4e-8,
    atol: float = 1.4e-8,
    mxstep: float = np.inf,
    hmax: float = np.inf,
) -> T:
    """Integrate ``dy/dt = func(y, t, *args)``.

    Args:
      func: gives a pytree like y0. It may close over values; derivatives with respect to them are right.
      y0: the state at ``t[0]``, a pytree of inexact arrays.
      t: times (n,), increasing or decreasing.
      args: further arguments of ``func``, pytrees of arrays.
      rtol, atol: bounds of the local error, relative and absolute.
      mxstep: the largest number of steps from one time to the next. Where more are needed the result is an
        extrapolation.
      hmax: the largest step.
    Returns:
      the states at the times: a pytree like y0, with a new first axis of n. Differentiable in y0, t, and args.
    Raises:
      ValueRangeError: the times go both ways.
    """
    check_callable(func, "odeint")
    for name, value in (("rtol", rtol), ("atol", atol), ("mxstep", mxstep), ("hmax", hmax)):
        if not isinstance(value, (int, float, np.number)) or value <= 0:
            raise errors.ValueRangeError(
                f"odeint: {name} = {value!r:.60}.", where=source.here(), fix="give a positive Python number"
            )
    t = lift(t, "the times of odeint")
    if t.aval.ndim != 1 or not t.aval.size or not dtypes.is_floating(t.aval.dtype):
        raise errors.ShapeError(
            f"odeint: the times are {t.aval}.", where=source.here(), fix="pass a vector of increasing floats"
        )
    if isinstance(t, ConcreteArray):
        _check_order(np.asarray(t))
    leaves = tree.leaves(y0)
    if not leaves or not all(dtypes.is_inexact(lift(x, "y0 of odeint").aval.dtype) for x in leaves):
        raise errors.DtypeError(
            "odeint: y0 is a pytree of floating or complex arrays.",
            where=source.here(),
            fix="bnp.asarray(y0, 'float32')",
        )
    flat, unravel = ravel_pytree(y0)
    values, structure = tree.flatten(args)
    values = [lift(x, "an argument of func") for x in values]
    smooth = [i for i, x in enumerate(values) if dtypes.is_inexact(x.aval.dtype)]

    # the solver goes forward: where times decrease, it integrates over their negatives
    sign = lax.stop_gradient(bnp.where(t[-1] < t[0], -1, 1).astype(t.dtype))

    def slope(y, time, *xs):
        given = list(values)
        for i, x in zip(smooth, xs, strict=True):
            given[i] = x
        out = func(unravel(y), sign * time, *tree.unflatten(structure, given))
        found, like = tree.structure(out), tree.structure(y0)
        if found != like:
            raise errors.TreeError(
                f"odeint: func gives {found}, and y0 is {like}.",
                where=source.here(),
                fix="return the derivative of each part of the state",
            )
        out = ravel_pytree(out)[0]
        if out.shape != y.shape or dtypes.is_complex(out.dtype) > dtypes.is_complex(y.dtype):
            raise errors.ShapeError(
                f"odeint: func gives {out.aval} for the state {y.aval}, both flattened.",
                where=source.here(),
                fix="give y0 the shapes and the dtype of its derivative",
            )
        return sign.astype(y.dtype) * out.astype(y.dtype)

    xs = [values[i] for i in smooth]
    forward = sign * t
    converted, closed = closure_convert(slope, flat, forward[0], *xs)
    ys = _solve(converted, (rtol, atol, mxstep, hmax), flat, forward, *xs, *closed)
    return vmap(unravel)(ys)


def _check_order(t: np.ndarray) -> None:
    steps = np.diff(t)
    if (steps > 0).any() and (steps < 0).any():
        raise errors.ValueRangeError(
            f"odeint: the times {t.tolist()!r:.60} go both ways.",
            where=source.here(),
            fix="sort them: odeint(func, y0, bnp.sort(t))",
        )


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def _solve(func: Callable, settings: tuple, y0: Any, ts: Any, *args: Any) -> Any:
    """The states (n, m) at the times (n,) of a system of vectors."""
    rtol, atol, mxstep, hmax = settings
    f = lambda y, t: func(y, t, *args)
    real = real_dtype(y0.aval.dtype)
    ts = ts.astype(real)
    f0 = f(y0, ts[0])
    dt = bnp.clip(_first_step(f, ts[0], y0, f0, rtol, atol), 0.0, hmax)
    start = _Step(0, y0, f0, ts[0], dt, ts[0], bnp.stack([y0] * 5))

    def to_time(state, target):
        def going(s):
            return (s.t < target) & (s.count < mxstep) & (s.dt > 0)

        def step(s):
            y, f1, error, k = _runge_kutta(f, s.y, s.f, s.t, s.dt)
            ratio = _error_ratio(error, rtol, atol, s.y, y)
            accepted = ratio <= 1
            dt = bnp.clip(optimal_step_size(s.dt, ratio), 0.0, hmax)
            after = _Step(s.count + 1, y, f1, s.t + s.dt, dt, s.t, _polynomial(s.y, y, k, s.dt))
            stay = s._replace(count=s.count + 1, dt=dt)
            return tree.map(lambda a, b: bnp.where(accepted, a, b), after, stay)

        state = lax.while_loop(going, step, state._replace(count=0))
        there = (target - state.before) / bnp.where(state.t > state.before, state.t - state.before, 1)
        y = functools.reduce(lambda total, c: total * there + c, state.polynomial)
        return state, y

    _, ys = lax.scan(to_time, start, ts[1:])
    return bnp.concatenate([y0[None], ys])


def _runge_kutta(f: Callable, y: Any, f0: Any, t: Any, dt: Any) -> tuple[Any, Any, Any, list]:
    """A step: the state, its slope, the error estimate and the slopes of all stages."""
    k = [f0]
    for c, row in zip(_TIMES, _STAGES, strict=True):
        moved = y + dt * _combined(row, k)
        k.append(f(moved, t + c * dt))
    return moved, k[-1], dt * _combined(_ERROR, k), k


def _combined(row: tuple[float, ...], k: list) -> Any:
    terms = [a * s for a, s in zip(row, k, strict=True) if a]
    return sum(terms[1:], start=terms[0])


def _polynomial(y0: Any, y1: Any, k: list, dt: Any) -> Any:
    """The quartic through both ends, with their slopes, and the middle; highest first."""
    middle = y0 + dt * _combined(_MIDDLE, k)
    d0, d1 = dt * k[0], dt * k[-1]
    return bnp.stack(
        [
            2 * (d1 - d0) - 8 * (y1 + y0) + 16 * middle,
            5 * d0 - 3 * d1 + 18 * y0 + 14 * y1 - 32 * middle,
            d1 - 4 * d0 - 11 * y0 - 5 * y1 + 16 * middle,
            d0,
            y0,
        ]
    )


def _rms(x: Any) -> Any:
    return bnp.sqrt(bnp.mean(bnp.real(x) ** 2 + bnp.imag(x) ** 2))


def _error_ratio(error: Any, rtol: float, atol: float, y0: Any, y1: Any) -> Any:
    return _rms(error / (atol + rtol * bnp.maximum(bnp.abs(y0), bnp.abs(y1))))


def optimal_step_size(
    last_step: ArrayLike,
    mean_error_ratio: ArrayLike,
    safety: float = 0.9,
    ifactor: float = 10.0,
    dfactor: float = 0.2,
    order: float = 5.0,
) -> Array:
    """The next step size of an integrator whose local error has an order.

    Args:
      last_step: the size of the last step, which was accepted if its error was within the tolerance.
      mean_error_ratio: its error, in units of the tolerance.
      safety: what the estimate is multiplied by.
      ifactor, dfactor: bounds on growth, and on what a rejected step shrinks to; an accepted one does not shrink.
    """
    accepted = bnp.asarray(mean_error_ratio) <= 1
    factor = safety * bnp.maximum(mean_error_ratio, 1e-10) ** (-1 / order)
    return bnp.asarray(last_step) * bnp.clip(factor, bnp.where(accepted, 1.0, dfactor), ifactor)


def _first_step(f: Callable, t: Any, y: Any, f0: Any, rtol: float, atol: float) -> Any:
    """Hairer, Norsett and Wanner, II.4, "starting step size"."""
    scale = atol + bnp.abs(y) * rtol
    d0, d1 = _rms(y / scale), _rms(f0 / scale)
    small = (d0 < 1e-5) | (d1 < 1e-5)
    h0 = bnp.where(small, 1e-6, 0.01 * d0 / bnp.where(small, 1, d1))
    f1 = f(y + h0 * f0, t + h0)
    d2 = _rms((f1 - f0) / scale) / h0
    largest = bnp.maximum(d1, d2)
    h1 = bnp.where(
        largest <= 1e-15, bnp.maximum(1e-6, h0 * 1e-3), (0.01 / bnp.maximum(largest, 1e-15)) ** 0.2
    )
    return bnp.minimum(100 * h0, h1)


def _solve_fwd(func, settings, y0, ts, *args):
    ys = _solve(func, settings, y0, ts, *args)
    return ys, (ys, ts, args)


def _solve_bwd(func, settings, residuals, g):
    ys, ts, args = residuals
    zeros = tuple([bnp.zeros_like(a) for a in args])

    def backward(state, time, *args):
        """Slopes in ``-t`` of the state, and of the cotangents of it, t and args."""
        y, y_bar, *_ = state
        slope, pull = vjp(lambda y, t, *args: func(y, t, *args), y, -time, *args)
        y_dot, t_dot, *rest = pull(y_bar)
        return (-slope, y_dot, t_dot, tuple(rest))

    def interval(carry, i):
        y_bar, t0_bar, args_bar = carry
        # moving the end of the interval moves the state there
        end = func(ys[i], ts[i], *args)
        t_bar = bnp.real(bnp.sum(end * g[i])).astype(ts.dtype)
        t0_bar = t0_bar - t_bar
        _, y_bar, t0_bar, args_bar = odeint(
            backward,
            (ys[i], y_bar, t0_bar, args_bar),
            bnp.stack([-ts[i], -ts[i - 1]]),
            *args,
            rtol=settings[0],
            atol=settings[1],
            mxstep=settings[2],
            hmax=settings[3],
        )
        y_bar, t0_bar, args_bar = tree.map(lambda x: x[1], (y_bar, t0_bar, args_bar))
        return (y_bar + g[i - 1], t0_bar, args_bar), t_bar

    start = (g[-1], bnp.zeros((), ts.dtype), zeros)
    (y_bar, t0_bar, args_bar), ts_bar = lax.scan(interval, start, bnp.arange(ts.shape[0] - 1, 0, -1))
    return (y_bar, bnp.concatenate([t0_bar[None], ts_bar[::-1]]), *args_bar)


_solve.defvjp(_solve_fwd, _solve_bwd)
