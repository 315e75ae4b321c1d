"""Primitives of JAX on windows, of random bits and of Refs, composed of others.

Under the face ``as_jax``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import debug, lax, ref
from blufunc.as_jax.extras.composed import Composed
from blufunc.core.programs.interpret import jaxpr_as_fun
from blufunc.experimental.random import StatefulPRNG, stateful_rng
from blufunc.lax import linalg
from blufunc.parallel.recipes import ragged_exchange
from blufunc.transforms.autodiff.grad import jvp, vjp

__all__ = [
    "dce_sink", "dce_sink_p", "get_p", "ormqr_p", "ragged_all_to_all_p", "reduce_window_p", "rng_bit_generator_p",
    "rng_uniform", "rng_uniform_p", "select_and_gather_add_p", "select_and_scatter_add_p", "swap_p",
]  # fmt: skip

_WINDOWS = ("window_dimensions", "window_strides", "padding")


def _extremum(select_prim: Any) -> tuple[Callable, Any]:
    """The reduction whose windows choose by a comparison, and its identity."""
    return (
        (lax.max, -bnp.inf)
        if getattr(select_prim, "name", select_prim) in ("ge", "gt")
        else (lax.min, bnp.inf)
    )


def _reduced(select_prim: Any, params: dict) -> Callable:
    combine, identity = _extremum(select_prim)
    windows = {k: params[k] for k in (*_WINDOWS, "base_dilation", "window_dilation") if k in params}
    return lambda x: lax.reduce_window(x, bnp.asarray(identity, x.dtype), combine, **windows)


def _scatter_add(source: Any, operand: Any, *, select_prim: Any, **params: Any) -> Any:
    return vjp(_reduced(select_prim, params), operand)[1](source)[0]


def _gather_add(tangents: Any, operand: Any, *, select_prim: Any, **params: Any) -> Any:
    return jvp(_reduced(select_prim, params), (operand,), (tangents,))[1]


def _window(*args: Any, jaxpr: Any, consts: Any = (), **params: Any) -> list[Any]:
    half = len(args) // 2
    combine = lambda *xs: jaxpr_as_fun(jaxpr)(*consts, *xs)
    body = (lambda a, b: combine(a, b)[0]) if half == 1 else lambda xs, ys: tuple(combine(*xs, *ys))
    operands, starts = (args[0], args[1]) if half == 1 else (args[:half], args[half:])
    out = lax.reduce_window(operands, starts, body, **params)
    return [out] if half == 1 else list(out)


def _bits(key: Any, *, shape: Any, dtype: Any, algorithm: Any = None, **options: Any) -> list[Any]:
    return list(lax.rng_bit_generator(key, shape, dtype))


def dce_sink(val: Any, *, prevent_mlir_dce: bool = False) -> None:
    """Keep a value that nothing reads: an effect without action depends on it."""
    debug.callback(lambda *values: None, val)


def _kept(*xs: Any, **options: Any) -> list[Any]:
    dce_sink(xs)
    return []


_generators: list[StatefulPRNG] = []


def rng_uniform(a: Any, b: Any, shape: Any) -> Any:
    """Uniform samples on [a, b), of a generator seeded by the operating system."""
    if not _generators:
        _generators.append(stateful_rng())
    low, high = bnp.asarray(a), bnp.asarray(b)
    if bnp.issubdtype(low.dtype, bnp.integer):
        return _generators[0].integers(low, high, tuple(shape), dtype=low.dtype)
    return _generators[0].uniform(low, high, tuple(shape), dtype=low.dtype)


def _householder(a: Any, taus: Any, c: Any, *, left: bool = True, transpose: bool = False) -> Any:
    """The product with the matrix of the reflectors."""
    rows = c.shape[-2] if left else c.shape[-1]
    padded = bnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, rows - a.shape[-1])])
    more = bnp.pad(taus, [(0, 0)] * (taus.ndim - 1) + [(0, rows - taus.shape[-1])])
    q = linalg.householder_product(padded, more)
    q = bnp.conj(q.mT) if transpose else q
    return q @ c if left else c @ q


def _ragged(*args: Any, axis_name: Any, **options: Any) -> Any:
    return ragged_exchange.ragged_all_to_all(*args, axis_name=axis_name)


dce_sink_p = Composed("dce_sink", _kept, True)
get_p = Composed("get", lambda r, *index, **options: ref.get(r, index or None))
swap_p = Composed("swap", lambda r, x, *index, **options: ref.swap(r, index or None, x))
ormqr_p = Composed("ormqr", _householder)
ragged_all_to_all_p = Composed("ragged_all_to_all", _ragged)
reduce_window_p = Composed("reduce_window", _window, True)
rng_bit_generator_p = Composed("rng_bit_generator", _bits, True)
rng_uniform_p = Composed("rng_uniform", lambda a, b, *, shape: rng_uniform(a, b, shape))
select_and_gather_add_p = Composed("select_and_gather_add", _gather_add)
select_and_scatter_add_p = Composed("select_and_scatter_add", _scatter_add)
