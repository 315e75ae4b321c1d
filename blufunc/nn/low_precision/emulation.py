"""Emulated formats of the operands of matmuls: a transform for studies.

A face, above ``rounding.py`` and ``matmuls.py``. A matmul rounds its operands, and its derivative the cotangent and the
operands again, along the axes that are contracted there; sums are those of the dtype that the function has. Rounding
itself has the derivative of the identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.pytree import tree
from blufunc.nn.low_precision import matmuls
from blufunc.nn.low_precision.float8 import as_matrices
from blufunc.nn.low_precision.formats import MX, Format
from blufunc.nn.low_precision.rounding import check_rounding, round_to
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp

_ROWS = (((1,), (1,)), ((), ()))


class _How(NamedTuple):
    """Static facts about a matmul.

    Attributes:
      forward, backward: formats of operands and of cotangents; without one, cotangents stay as they are.
      out: dtype of the result.
      precision: of the function's ``dot_general``.
    """

    forward: Format | MX
    backward: Format | MX | None
    rounding: str
    out: np.dtype
    precision: Any


@functools.partial(custom_vjp, nondiff_argnums=(3,))
def _dot(a: Any, b: Any, key: Any, how: _How) -> Any:
    x, y = (_rounded(v, how.forward, how, k) for v, k in zip((a, b), _keys(key, 2), strict=True))
    return _product(x, y, how, how.out)


def _forward(a: Any, b: Any, key: Any, how: _How) -> tuple[Any, tuple[Any, Any, Any]]:
    return _dot(a, b, key, how), (a, b, key)


def _backward(how: _How, residuals: tuple[Any, Any, Any], ct: Any) -> tuple[Any, Any, None]:
    a, b, key = residuals
    keys = _keys(None if key is None else random.fold_in(key, 1), 4)
    rows, columns = (_rounded(x, how.backward, how, k) for x, k in zip((ct, ct.mT), keys[:2], strict=True))
    x, y = (_rounded(v.mT, how.forward, how, k) for v, k in zip((a, b), keys[2:], strict=True))
    return _product(rows, y, how, b.dtype), _product(columns, x, how, a.dtype), None


_dot.defvjp(_forward, _backward)


def _keys(key: Any, n: int) -> Sequence[Any]:
    return [None] * n if key is None else list(random.split(key, n))


def _rounded(x: Any, format: Format | MX | None, how: _How, key: Any) -> Any:
    return x if format is None else round_to(x, format, rounding=how.rounding, key=key)


def _product(a: Any, b: Any, how: _How, dtype: np.dtype) -> Any:
    """``a @ b.T``, with ``b`` in the dtype of ``a``.

    Cotangents have the dtype of the forward result; ``dot_general`` is differentiated in the same way.
    """
    return lax.dot_general(a, b.astype(a.dtype), _ROWS, precision=how.precision, preferred_element_type=dtype)


@dataclass(frozen=True)
class _Rule:
    """A matmul of rounded operands."""

    forward: Format | MX
    backward: Format | MX | None
    rounding: str
    where: matmuls.Where | None

    @property
    def avals(self) -> tuple[ShapedArray, ...]:
        return (ShapedArray((), dtypes.key),) if self.rounding == "stochastic" else ()

    def __call__(
        self, lhs: Any, rhs: Any, params: dict, dtype: np.dtype, arrays: Sequence[Any] | None
    ) -> Any:
        if self.rounding == "stochastic" and not arrays:
            raise errors.UnsupportedError(
                "emulate: a matmul in a branch, a while loop or a shard_map is rounded stochastically.",
                where=source.describe(source.replay.line),
                why="it has no key of its own.",
                fix='rounding="nearest", or where=lambda x, y: ... that leaves it out',
            )
        a, b, shape, _ = as_matrices(lhs, rhs, params)
        how = _How(self.forward, self.backward, self.rounding, dtype, params["precision"])
        return _dot(a, b, arrays[0] if arrays else None, how).reshape(shape)


def emulate(
    fun: Callable[..., Any],
    format: Format | MX,
    *,
    gradients: Format | MX | None = None,
    rounding: str = "nearest",
    where: matmuls.Where | None = None,
) -> Callable[..., Any]:
    """``fun`` with the operands of its matmuls rounded to a format.

        loss = nn.low_precision.emulate(loss, MX(E2M1), gradients=MX(E3M2), rounding="stochastic")
        value, grads = bf.value_and_grad(loss, 1)(key, params, batch)

    Matmuls are computed in the dtypes that they have without it. Blocks of an ``MX`` are along the contracted axis, of
    the matmuls of the derivative, too.

    Args:
      fun: a function of pytrees of arrays. It has a derivative in reverse mode only.
      format: of the operands.
      gradients: of cotangents, in the matmuls of the derivative; default: they are not rounded.
      rounding: see ``round_to``. With "stochastic", the first argument of the result is a random key; each matmul, and
        each step of a ``scan``, has one of its own.
      where: which matmuls: a function of the types of both operands. Default: all. Those with batch axes or a vector
        stay in any case, as under ``Float8``.
    Returns:
      a function of the same arguments, after a key if rounding is stochastic, and results.
    Raises:
      ArgumentError: there is no such format or rounding, or the first argument of a call is no key.
      UnsupportedError: at a call, stochastic rounding in a branch, a ``while`` loop or a ``shard_map``.
    """
    check_callable(fun, "emulate")
    check_rounding("emulate", rounding)
    for name, given in (("format", format), ("gradients", gradients)):
        if not isinstance(given, (Format, MX)) and not (name == "gradients" and given is None):
            raise errors.ArgumentError(
                f"emulate: {name} is {given!r:.60}.", where=source.here(), fix="MX(E2M1), or Format(4, 3)"
            )
    matmuls.check_where("emulate", where)
    rule = _Rule(format, gradients, rounding, where)

    def evaluated(key: Any, args: tuple, kwargs: dict) -> Any:
        jaxpr, values, out_tree = matmuls.staged(fun, args, kwargs, "emulate")
        arrays = None if key is None else _of_sites(key, matmuls.sites(jaxpr, where))
        return tree.unflatten(out_tree, matmuls.run(jaxpr, rule, values, arrays))

    if rounding == "stochastic":

        @functools.wraps(fun)
        def with_key(key: Any, *args: Any, **kwargs: Any) -> Any:
            return evaluated(_one_key(key), args, kwargs)

        return with_key

    @functools.wraps(fun)
    def rounded(*args: Any, **kwargs: Any) -> Any:
        return evaluated(None, args, kwargs)

    return rounded


def _one_key(key: Any) -> Any:
    """The first argument of a function that rounds stochastically."""
    found = getattr(key, "dtype", None)
    words = found == dtypes.uint32 and bnp.shape(key) == (2,)
    if found is None or not (words or (dtypes.is_key(found) and bnp.shape(key) == ())):
        text = (
            f"{key!r:.60}"
            if found is None
            else f"of dtype {dtypes.short_name(found)} and shape {bnp.shape(key)}"
        )
        raise errors.ArgumentError(
            f"emulate: with stochastic rounding the first argument is a random key, not {text}.",
            where=source.here(),
            fix="f(random.key(0), *args)",
        )
    return bnp.asarray(key)


def _of_sites(key: Any, sites: Sequence[matmuls.Site]) -> Any:
    """For each matmul a key, or an array of keys for the steps around it."""
    keys = random.split(key, max(len(sites), 1))
    for i, site in enumerate(sites):
        n = math.prod(site.lengths)
        yield (random.split(keys[i], n).reshape(site.lengths) if site.lengths else keys[i],)
