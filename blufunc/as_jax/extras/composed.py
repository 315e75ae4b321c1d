"""Primitives of JAX that blufunc composes of others.

Under the face ``as_jax``. No jaxpr holds one, so rules that programs register for them are never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blufunc.numpy as bnp
from blufunc import lax, random
from blufunc.as_jax.primitives import Primitive
from blufunc.core.ops.linalg import reduction
from blufunc.core.programs.interpret import jaxpr_as_fun
from blufunc.lax import linalg
from blufunc.parallel.programs.placement import device_put

__all__ = [
    "after_all_p", "approx_top_k_p", "cholesky_update_p", "clz_p", "create_token_p", "device_put_p", "eq_to_p",
    "hessenberg_p", "householder_product_p", "le_to_p", "lt_to_p", "mulhi_p", "random_gamma_p", "reduce_p",
    "schur_p", "scatter_sub_p", "select_n_p", "split_p", "squeeze_p", "stack_p", "symmetric_product_p", "tile_p",
    "tridiagonal_p", "unstack_p", "after_all", "create_token",
]  # fmt: skip


class Composed(Primitive):
    """A primitive whose use is a use of the operations that it is composed of.

    Args:
      function: ``(*operands, **params) -> result``, or a list of them.
    """

    def __init__(self, name: str, function: Callable, multiple_results: bool = False):
        super().__init__(name)
        self.function, self.multiple_results = function, multiple_results

    def bind(self, *args: Any, **params: Any) -> Any:
        out = self.function(*args, **params)
        return list(out) if self.multiple_results else out


def _total_order(x: Any) -> Any:
    """Integers in the order of floats, with -NaN < -inf, -0 < 0 and inf < NaN."""
    x = bnp.asarray(x)
    if not bnp.issubdtype(x.dtype, bnp.floating):
        return x
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    return bnp.where(bits < 0, bits ^ bnp.iinfo(bits.dtype).max, bits)


def _ordered(compare: Callable) -> Callable:
    return lambda x, y: compare(_total_order(x), _total_order(y))


def create_token(_: Any = None) -> Any:
    """A value without elements, which effects do not need for their order."""
    return bnp.zeros(0, bool)


def after_all(*operands: Any) -> Any:
    """A token that depends on all tokens."""
    return lax.optimization_barrier((create_token(), *operands))[0]


def _reduce(
    *args: Any, computation: Callable | None = None, jaxpr: Any = None, dimensions: Any, **_: Any
) -> list:
    half = len(args) // 2
    body = computation
    if body is None:
        body = lambda xs, ys: jaxpr_as_fun(jaxpr)(*xs, *ys)
    return lax.reduce(list(args[:half]), list(args[half:]), body, dimensions)


def _scatter_sub(x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, **options: Any) -> Any:
    kept = {k: options[k] for k in ("indices_are_sorted", "unique_indices", "mode") if k in options}
    return lax.scatter_sub(x, indices, updates, dimension_numbers, **kept)


def _approx_top_k(x: Any, *, k: int, reduction_dimension: int, is_max_k: bool, **options: Any) -> Any:
    find = lax.approx_max_k if is_max_k else lax.approx_min_k
    return find(x, k, reduction_dimension)


def _put(*xs: Any, devices: Any = (None,), **options: Any) -> list[Any]:
    return [device_put(x, d) for x, d in zip(xs, [*devices, *devices[-1:] * len(xs)], strict=False)]


def _gamma(key: Any, a: Any, *, log_space: bool = False, **options: Any) -> Any:
    draw = random.loggamma if log_space else random.gamma
    return draw(random.wrap_key_data(key) if bnp.asarray(key).dtype == "uint32" else key, a)


select_n_p = Composed("select_n", lax.select_n)
squeeze_p = Composed("squeeze", lambda x, *, dimensions: lax.squeeze(x, dimensions))
split_p = Composed("split", lambda x, *, sizes, axis: lax.split(x, sizes, axis), True)
tile_p = Composed("tile", lambda x, *, reps: bnp.tile(x, reps))
stack_p = Composed("stack", lambda *xs, axis: bnp.stack(xs, axis))
unstack_p = Composed("unstack", lambda x, *, axis: bnp.unstack(x, axis=axis), True)
clz_p = Composed("clz", lax.clz)
mulhi_p = Composed("mulhi", lambda x, y: lax.mulhi(x, y))
eq_to_p = Composed("eq_to", _ordered(lax.eq))
le_to_p = Composed("le_to", _ordered(lax.le))
lt_to_p = Composed("lt_to", _ordered(lax.lt))
reduce_p = Composed("reduce", _reduce, True)
scatter_sub_p = Composed("scatter_sub", _scatter_sub)
approx_top_k_p = Composed("approx_top_k", _approx_top_k, True)
device_put_p = Composed("device_put", _put, True)
random_gamma_p = Composed("random_gamma", _gamma)
create_token_p = Composed("create_token", create_token)
after_all_p = Composed("after_all", after_all)
cholesky_update_p = Composed("cholesky_update", linalg.cholesky_update)
householder_product_p = Composed("householder_product", linalg.householder_product)
symmetric_product_p = Composed(
    "symmetric_product", lambda a, c, *, alpha, beta: linalg.symmetric_product(a, c, alpha=alpha, beta=beta)
)
hessenberg_p, schur_p, tridiagonal_p = reduction.hessenberg_p, reduction.schur_p, reduction.tridiagonal_p
