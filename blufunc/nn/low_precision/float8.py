"""fp8 training: transforms that replace the matmuls of a function by fp8 ones.

A face, above ``product.py`` and ``matmuls.py``. A matmul becomes a function with a derivative of its own: operands are
rounded to e4m3 and cotangents to e5m2, each with scales, and all three matmuls read fp8. cuBLASLt reads fp8 matrices
only with the contracted axis innermost, so operands are written in that order as they are rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.axes import static_int
from blufunc.core.pytree import tree
from blufunc.nn.low_precision import matmuls
from blufunc.nn.low_precision.product import dot
from blufunc.nn.low_precision.scaling import SCALINGS, Scaled, largest, scaled
from blufunc.transforms.arguments import check_callable
from blufunc.transforms.custom_rules.custom_vjp import custom_vjp
from blufunc.transforms.staging.eval_shape import eval_shape

_FORMATS = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)


@dataclass(frozen=True)
class Float8:
    """How matmuls are done in fp8.

    Attributes:
      scaling: "tensor": one scale for an operand; "row": one for each of its rows, which are not contracted; "block":
        one for 128 elements of a row. A finer scale keeps more small elements next to large ones, and costs time.
      forward, backward: formats of operands, and of cotangents: "float8_e4m3fn" or "float8_e5m2". At most one is e5m2.
      margin: powers of two that scales leave below the largest number of a format.
      fast: let the forward matmuls sum in fewer bits, as Hopper's tensor cores do for twice the rate.
      where: which matmuls: a function of the types of both operands, such as ``lambda x, y: y.shape[-1] < 50000``.
        Default: all. Matmuls with batch axes, such as those of attention, and with a vector stay in any case. So write
        ``float8(vmap(f))``: under ``vmap(float8(f))``, an example that is a vector has no matmul in fp8.
    Raises:
      ValueRangeError: there is no such scaling, format or margin.
      ArgumentError: ``where`` is no function.
    """

    scaling: str = "tensor"
    forward: Any = "float8_e4m3fn"
    backward: Any = "float8_e5m2"
    margin: int = 0
    fast: bool = True
    where: Callable[[Any, Any], bool] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise errors.ValueRangeError(
                f"Float8: there is no scaling {self.scaling!r:.60}.",
                where=source.here(),
                fix=f"one of {', '.join(map(repr, SCALINGS))}",
            )
        for name in ("forward", "backward"):
            dtype = dtypes.as_dtype(getattr(self, name))
            if dtype not in _FORMATS:
                raise errors.ValueRangeError(
                    f"Float8: {name} is {dtypes.short_name(dtype)}.",
                    where=source.here(),
                    fix="'float8_e4m3fn' or 'float8_e5m2'",
                )
            object.__setattr__(self, name, dtype)
        if self.forward == self.backward == dtypes.float8_e5m2:
            raise errors.ValueRangeError(
                "Float8: operands and cotangents are both e5m2.",
                where=source.here(),
                why="tensor cores multiply e4m3 with e4m3 or e5m2.",
                fix='forward="float8_e4m3fn"',
            )
        matmuls.check_where("Float8", self.where)
        object.__setattr__(self, "margin", static_int(self.margin, "Float8", "margin"))
        if not 0 <= self.margin <= 8:
            raise errors.ValueRangeError(
                f"Float8: a margin of {self.margin} powers of two.", where=source.here(), fix="0 to 8"
            )


class History(NamedTuple):
    """Largest magnitudes of the last steps of one matmul, the latest first.

    In a ``scan``, each of its steps has a row. As gradients, histories are added up: over microbatches, devices or a
    batch. ``uses`` is added up with them, and the next step reads their average.

    Attributes:
      lhs, rhs, cotangent: float32 [..., length]; 0 where there is none yet.
      uses: float32 [...]: derivatives that the magnitudes are a sum of; 0 if there are none.
    """

    lhs: Any
    rhs: Any
    cotangent: Any
    uses: Any


# -- matmuls with derivatives ----------------------------------------------------------------------


class _How(NamedTuple):
    """Static facts about a matmul.

    Attributes:
      out: dtype of the result.
      dtype: of operands and gradients.
      transposed: the gradient of b is computed as its transpose, [k, n], its layout in memory.
      line: of the matmul in the function.
    """

    recipe: Float8
    out: np.dtype
    dtype: np.dtype
    transposed: bool
    line: source.Source | None


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _forward(how: _How, x: Scaled, y: Scaled) -> Any:
    return dot(x, y, how.out, how.recipe.scaling, how.recipe.fast)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _gradients(how: _How, rows: Scaled, columns: Scaled, x: Scaled, y: Scaled) -> tuple[Any, Any]:
    """Gradients of a [m, k] and b [n, k].

    Args:
      rows, columns: the cotangent [m, n], and its transpose.
      x, y: the transposes of a and b.
    """
    scaling = how.recipe.scaling
    of_a = dot(rows, y, how.dtype, scaling)
    of_b = dot(x, columns, how.dtype, scaling).mT if how.transposed else dot(columns, x, how.dtype, scaling)
    return of_a, of_b


def _second(how: _How, _: None, ct: Any) -> Any:
    raise errors.GradError(
        "the second derivative of a matmul in fp8.",
        where=source.describe(how.line),
        why="cotangents of fp8 numbers would be rounded to fp8 without a scale.",
        fix="Float8(where=lambda x, y: ...) that leaves it out, or differentiate the function in full precision",
    )


# an outer derivative enters here; without these rules it would pass through the conversions to fp8
_forward.defvjp(lambda how, *args: (_forward(how, *args), None), _second)
_gradients.defvjp(lambda how, *args: (_gradients(how, *args), None), _second)


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _current(a: Any, b: Any, how: _How) -> Any:
    return _current_forward(a, b, how)[0]


def _current_forward(a: Any, b: Any, how: _How) -> tuple[Any, tuple[Scaled, Scaled]]:
    with source.at_line(how.line):
        (x, for_b), (y, for_a) = (_both(v, how.recipe.forward, how.recipe) for v in (a, b))
        return _forward(how, x, y), (for_b, for_a)


def _current_backward(how: _How, residuals: tuple[Scaled, Scaled], ct: Any) -> tuple[Any, Any]:
    with source.at_line(source.backward(how.line)):
        return _gradients(how, *_both(ct, how.recipe.backward, how.recipe), *residuals)


def _both(x: Any, dtype: np.dtype, recipe: Float8) -> tuple[Scaled, Scaled]:
    """A matrix and its transpose in fp8, for the matmuls that contract either axis.

    Both are rounded from ``x``. One scale of a whole matrix serves both; rows and blocks of the transpose are others.
    """
    top = largest(x, "tensor") if recipe.scaling == "tensor" else None
    rows = scaled(x, dtype, recipe.scaling, recipe.margin, top)
    return rows, scaled(x.mT, dtype, recipe.scaling, recipe.margin, top)


_current.defvjp(_current_forward, _current_backward)


@functools.partial(custom_vjp, nondiff_argnums=(3,))
def _delayed(a: Any, b: Any, history: History, how: _How) -> Any:
    return _delayed_forward(a, b, history, how)[0]


def _delayed_forward(a: Any, b: Any, history: History, how: _How) -> tuple[Any, tuple[Any, ...]]:
    with source.at_line(how.line):
        forward = how.recipe.forward
        n = bnp.where(history.uses > 0, history.uses, 1.0)
        lhs, rhs, cotangent = (h / n for h in history[:3])
        x, for_b = _by_history(a, lhs, forward, how.recipe)
        y, for_a = _by_history(b, rhs, forward, how.recipe)
        seen = _recorded(lhs, a), _recorded(rhs, b), cotangent
        return _forward(how, x, y), (for_b, for_a, *seen)


def _delayed_backward(how: _How, residuals: tuple[Any, ...], ct: Any) -> tuple[Any, Any, History]:
    for_b, for_a, lhs, rhs, before = residuals
    with source.at_line(source.backward(how.line)):
        rows, columns = _by_history(ct, before, how.recipe.backward, how.recipe)
        of_a, of_b = _gradients(how, rows, columns, for_b, for_a)
        return of_a, of_b, _together(lhs, rhs, _recorded(before, ct))


def _together(lhs: Any, rhs: Any, cotangent: Any) -> History:
    """A history of one use, as parts of one array.

    A ``vmap`` and a ``shard_map`` add up only what differs between their members, and a weight's magnitudes do not.
    Parts of one array are all added up, or none.
    """
    whole = bnp.concatenate([lhs, rhs, cotangent, bnp.ones(1, dtypes.float32)])
    lhs, rhs, cotangent, uses = bnp.split(whole, [len(lhs) * i for i in (1, 2, 3)])
    return History(lhs, rhs, cotangent, uses.reshape(()))


def _by_history(x: Any, history: Any, dtype: np.dtype, recipe: Float8) -> tuple[Scaled, Scaled]:
    """``_both``, with the scale of a history.

    Where there is none the scale is 1, not that of ``x``: with a branch that measures ``x``, the kernel that computes
    it could not round it, and twice the bytes would move.
    """
    top = bnp.max(history, axis=-1).reshape((1, 1))
    rows, columns = (scaled(v, dtype, "tensor", recipe.margin, top) for v in (x, x.mT))
    return rows, columns


def _recorded(history: Any, x: Any) -> Any:
    """A history with the largest element of ``x``.

    One that is not finite repeats the latest.
    """
    top = largest(x, "tensor").reshape((1,))
    return bnp.concatenate([bnp.where(bnp.isfinite(top), top, history[:1]), history[:-1]])


_delayed.defvjp(_delayed_forward, _delayed_backward)


# -- rules of matmuls ------------------------------------------------------------------------------


def as_matrices(lhs: Any, rhs: Any, params: dict) -> tuple[Any, Any, tuple[int, ...], bool]:
    """The operands of a ``dot_general`` as matrices [m, k] and [n, k].

    Also returned: the shape of its result, and ``_How.transposed``.
    """
    (lc, rc), _ = params["dimension_numbers"]
    rows, columns = (tuple(d for d in range(x.ndim) if d not in c) for x, c in ((lhs, lc), (rhs, rc)))
    k = math.prod(lhs.shape[d] for d in lc)
    a = bnp.transpose(lhs, (*rows, *lc)).reshape((-1, k))
    b = bnp.transpose(rhs, (*columns, *rc)).reshape((-1, k))
    shape = (*(lhs.shape[d] for d in rows), *(rhs.shape[d] for d in columns))
    return a, b, shape, rc[0] < columns[0]


@dataclass(frozen=True)
class _Rule:
    """A matmul in fp8; with ``length`` steps of history, if that is not 0."""

    recipe: Float8
    length: int = 0

    @property
    def where(self) -> matmuls.Where | None:
        return self.recipe.where

    @property
    def avals(self) -> tuple[ShapedArray, ...]:
        if not self.length:
            return ()
        magnitudes = ShapedArray((self.length,), dtypes.float32)
        return magnitudes, magnitudes, magnitudes, ShapedArray((), dtypes.float32)

    def __call__(
        self, lhs: Any, rhs: Any, params: dict, dtype: np.dtype, arrays: Sequence[Any] | None
    ) -> Any:
        a, b, shape, transposed = as_matrices(lhs, rhs, params)
        how = _How(self.recipe, dtype, lhs.dtype, transposed, source.replay.line)
        out = _delayed(a, b, History(*arrays), how) if self.length and arrays else _current(a, b, how)
        return out.reshape(shape)


# -- transforms ------------------------------------------------------------------------------------


def float8(fun: Callable[..., Any], recipe: Float8 = Float8()) -> Callable[..., Any]:
    """``fun`` with its matmuls in fp8, scaled by the largest elements of operands.

        loss = nn.low_precision.float8(bf.autocast(loss))
        value, grads = bf.value_and_grad(loss)(params, batch)  # of the types that they have without it

    Operands, results and gradients of matmuls keep their dtypes: fp8 is what the matmuls read. On NVIDIA GPUs of
    compute capability 8.9 and newer they are cuBLASLt's, where sizes are multiples of 16; ``bf.explain`` names those
    that are not. Elsewhere, fp8 numbers are multiplied in bfloat16, with sums in float32, which is exact.

    Args:
      fun: a function of pytrees of arrays. It has a derivative in reverse mode only, and no second one.
      recipe: formats, scales, and which matmuls.
    Returns:
      a function of the same arguments and results.
    Raises:
      ArgumentError: ``fun`` is no function, or the recipe no ``Float8``.
      GradError: when a derivative of the function is differentiated again.
    """
    check_callable(fun, "float8")
    rule = _Rule(_checked(recipe, "float8"))

    @functools.wraps(fun)
    def low(*args: Any, **kwargs: Any) -> Any:
        jaxpr, values, out_tree = matmuls.staged(fun, args, kwargs, "float8")
        return tree.unflatten(out_tree, matmuls.run(jaxpr, rule, values, None))

    return low


class DelayedFloat8:
    """A function of ``delayed_float8``, whose first argument is a state.

    Attributes:
      fun: the function in full precision.
      recipe: formats, scales, and which matmuls.
      history: steps that a scale looks back.
    """

    def __init__(self, fun: Callable[..., Any], recipe: Float8, history: int):
        self.fun, self.recipe, self.history = fun, recipe, history
        self._rule = _Rule(recipe, history)

    def init(self, *args: Any, **kwargs: Any) -> tuple[History, ...]:
        """The state ahead of the first step: for each matmul a ``History`` of zeros.

        Args:
          args, kwargs: of ``fun``: arrays, or ``ShapeDtypeStruct`` of their types. Nothing is computed.
        """

        def empty(*args: Any, **kwargs: Any) -> tuple[History, ...]:
            jaxpr, _, _ = matmuls.staged(self.fun, args, kwargs, "delayed_float8")
            found = matmuls.sites(jaxpr, self.recipe.where)
            return tuple(
                History(*[bnp.zeros((*s.lengths, *a.shape), a.dtype) for a in self._rule.avals])
                for s in found
            )

        return tree.map(lambda x: bnp.zeros(x.shape, x.dtype), eval_shape(empty, *args, **kwargs))

    def __call__(self, state: Sequence[History], *args: Any, **kwargs: Any) -> Any:
        """``fun(*args, **kwargs)``, with scales from the histories of ``state``."""
        if not isinstance(state, (tuple, list)) or not all(isinstance(h, History) for h in state):
            raise errors.ArgumentError(
                f"delayed_float8: the first argument is a state, not {state!r:.60}.",
                where=source.here(),
                fix="state = scaled.init(*args), and scaled(state, *args)",
            )
        jaxpr, values, out_tree = matmuls.staged(self.fun, args, kwargs, "delayed_float8")
        found = matmuls.sites(jaxpr, self.recipe.where)
        shapes = [tuple(bnp.shape(x) for x in h) for h in state]
        want = [tuple((*s.lengths, *a.shape) for a in self._rule.avals) for s in found]
        if shapes != want:
            raise errors.TreeError(
                f"delayed_float8: the state is not of the {len(found)} matmuls of this call.",
                where=source.here(),
                why=_difference(shapes, want, found),
                fix="state = scaled.init(*args), of arguments of these types",
            )
        arrays = [tuple(map(bnp.asarray, h)) for h in state]
        if dtype := next((x.dtype for h in arrays for x in h if x.dtype != dtypes.float32), None):
            raise errors.DtypeError(
                f"delayed_float8: the state has arrays of {dtypes.short_name(dtype)}.",
                where=source.here(),
                why="histories are float32, as gradients by them are.",
                fix="keep the state out of casts of parameters",
            )
        return tree.unflatten(out_tree, matmuls.run(jaxpr, self._rule, values, iter(arrays)))


def _difference(shapes: list[Any], want: list[Any], found: Sequence[matmuls.Site]) -> str:
    if len(shapes) != len(want):
        return f"it has {len(shapes)} histories"
    i = next(i for i, (a, b) in enumerate(zip(shapes, want, strict=True)) if a != b)
    return f"history {i}, of the matmul at {found[i].line}, has shapes {shapes[i]}, not {want[i]}"


def delayed_float8(fun: Callable[..., Any], recipe: Float8 = Float8(), *, history: int = 16) -> DelayedFloat8:
    """``float8`` with scales from the largest elements of earlier steps, as a state.

    A scale that is known ahead of a step saves a pass over each operand: it is rounded as it is computed. The state is
    the first argument, and *the gradient by it is the next state*::

        scaled = nn.low_precision.delayed_float8(loss)
        state = scaled.init(params, batch)


        @bf.jit
        def step(params, state, batch):
            value, (state, grads) = bf.value_and_grad(scaled, (0, 1))(state, params, batch)
            ...

    Each matmul has a history, one for each step of a ``scan`` around it. Elements beyond the range of a scale are
    clipped. The first step has no history, and scales of 1: its gradients may underflow. Matmuls in branches and
    ``while`` loops have no history, and are scaled as by ``float8``.

    The gradient may be a sum or a mean, as those of parameters: over microbatches, over devices in a ``shard_map``,
    over a ``vmap`` with one state. The next step then has means of the largest elements in its history.

    A matmul without a cotangent never gets a history: one under ``stop_gradient``, or that only an auxiliary result
    depends on. Its ``uses`` stay 0, and elements above 448 are clipped. Give this part of ``fun`` current scales::

        target = lax.stop_gradient(nn.low_precision.float8(network)(old, x))

    Args:
      fun: see ``float8``.
      recipe: see ``float8``; its scaling is "tensor".
      history: steps that a scale looks back.
    Returns:
      a function (state, *args) with a method ``init``.
    Raises:
      ValueRangeError: the scaling is another one, or the history is shorter than a step.
    """
    check_callable(fun, "delayed_float8")
    _checked(recipe, "delayed_float8")
    history = static_int(history, "delayed_float8", "history")
    if recipe.scaling != "tensor":
        raise errors.ValueRangeError(
            f"delayed_float8: scaling by {recipe.scaling!r}.",
            where=source.here(),
            why="a history is of one number for an operand.",
            fix='Float8(scaling="tensor"), or float8, whose scales are of the step itself',
        )
    if history < 1:
        raise errors.ValueRangeError(
            f"delayed_float8: a history of {history} steps.", where=source.here(), fix="history=16"
        )
    return DelayedFloat8(fun, recipe, history)


def _checked(recipe: Any, name: str) -> Float8:
    if not isinstance(recipe, Float8):
        raise errors.ArgumentError(
            f"{name}: the recipe is a {type(recipe).__name__}.",
            where=source.here(),
            fix='nn.low_precision.Float8(scaling="row")',
        )
    return recipe
