"""What libraries do on CUDA devices: linear algebra, Fourier transforms, sorting, scans, convolutions, scatters.

Kernels, stages 6 to 8 of primitives that are not loops of ours. In come a primitive, buffers and parameters; out come
buffers. ``TABLE`` says how each such primitive is done with CuPy's functions, in terms that NumPy has too: run on
NumPy arrays the entries must give what the primitive's ``impl`` gives. A primitive that is neither here nor generated
is computed on the host by its definition, which ``explain`` lists and ``BLUFUNC_DEBUG=fusion`` tells.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import cupy_entries as entries
from blufunc.kernels.backends.cuda.library import scatter as cuda_scatter
from blufunc.kernels.backends.cuda.library.cupy_entries import narrowed, widened
from blufunc.kernels.backends.cuda.library.host import fallback
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, Function, FunctionKernel

# -- running ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """How a library computes a primitive.

    Attributes:
      run: ``(context, *arrays, **params)`` gives an array, or a list of them for several results.
      widens: whether float16 and bfloat16 come as float32, and go back when it is done; else they are bits to move.
      refuses: ``(operand dtypes, params)`` says whether this use is left to the host.
      captured: whether a graph can have it: nothing in it, nor in the functions of CuPy that it calls, waits for the
        device or copies from the host. A copy would be captured with the address of memory that soon is another's.
    """

    run: Callable[..., Any]
    widens: bool = False
    refuses: Callable[[Sequence[np.dtype], dict], bool] = lambda operands, params: False
    captured: bool = False


@dataclass(frozen=True)
class Context:
    """What an entry is run with.

    Attributes:
      library: what arrays of this kind can do beyond what NumPy's names say.
      xp: the module of array functions: CuPy.
      operands, outs: the types of operands and results.
    """

    library: Any
    operands: Sequence[np.dtype]
    outs: Sequence[ShapedArray]

    @property
    def xp(self) -> Any:
        return self.library.xp


def is_host_fallback(
    prim: Any, operands: Sequence[np.dtype] | None = None, params: dict | None = None
) -> bool:
    """Whether ``run`` computes a primitive on the host; of one use, if operand dtypes and parameters are given."""
    entry = TABLE.get(prim.name)
    if entry is None:
        return True
    if operands is None:
        return False
    return (entry.widens and _float8(operands)) or entry.refuses(operands, params or {})


def is_captured(prim: Any) -> bool:
    """Whether a graph can have what ``run`` does for a primitive; the first time it must run without one."""
    entry = TABLE.get(prim.name)
    return entry is not None and entry.captured


def run(
    prim: Any,
    buffers: Sequence[cuda_memory.DeviceBuffer],
    params: dict,
    outs: Sequence[ShapedArray],
    label: str = "",
) -> list[cuda_memory.DeviceBuffer]:
    """The results of a primitive, in buffers of their own.

    Args:
      buffers: the operands, at least one, all of one device.
      outs: the types of the results.
      label: what the results are for, for reports on memory.
    """
    device = buffers[0].device
    empty = any(not b.nbytes for b in buffers) or any(not math.prod(a.shape) for a in outs)
    if empty or is_host_fallback(prim, [b.dtype for b in buffers], params):
        return fallback(prim, buffers, params, outs, label)
    with cuda_memory.library_scope(device):
        arrays = [cuda_memory.as_cupy(b) for b in buffers]
        results = evaluate(cupy_library(), prim, arrays, [b.dtype for b in buffers], params, outs)
        return [
            cuda_memory.from_cupy(r, a.dtype, device, label or prim.name)
            for r, a in zip(results, outs, strict=True)
        ]


def evaluate(
    library: Any,
    prim: Any,
    arrays: Sequence[Any],
    operands: Sequence[np.dtype],
    params: dict,
    outs: Sequence[ShapedArray],
) -> list[Any]:
    """The results of a primitive in ``TABLE``, as arrays in the dtypes that ``raw_dtype`` says, as the operands are."""
    entry, xp = TABLE[prim.name], library.xp
    if entry.widens:
        arrays = [widened(xp, x, d) for x, d in zip(arrays, operands, strict=True)]
    results = entry.run(Context(library, operands, outs), *arrays, **params)
    results = results if prim.multiple_results else [results]
    return [
        narrowed(xp, r, a.dtype, cuda_memory.raw_dtype(a.dtype)) for r, a in zip(results, outs, strict=True)
    ]


def _float8(operands: Sequence[np.dtype], params: Any = None) -> bool:
    """Whether an operand is of a dtype that CuPy can move and not compute with."""
    return any(d in (dtypes.float8_e4m3fn, dtypes.float8_e5m2) for d in operands)


# -- what CuPy does under other names than NumPy -----------------------------------------------------


class CupyLibrary:
    """CuPy; its methods are what entries need beyond functions that NumPy has too."""

    def __init__(self) -> None:
        import cupy
        import cupyx.scipy.special

        self.xp, self.special = cupy, cupyx.scipy.special
        self._constants: dict[tuple, Any] = {}

    def constant(self, x: np.ndarray) -> Any:
        """An array of the host's on the current device; copied there once, so that no graph has a copy in it."""
        key = (self.xp.cuda.runtime.getDevice(), x.shape, x.dtype, x.tobytes())
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self.xp.asarray(x)
        return found

    def order(self, x: Any, axis: int) -> Any:
        """The indices that sort lines, equal elements in their order: CuPy has no other argsort."""
        return self.xp.argsort(x, axis)

    def solve_triangles(
        self, a: Any, b: Any, lower: bool, transposed: bool, conjugated: bool, unit: bool
    ) -> Any:
        """The solutions of ``op(a) x = b``, a (..., n, n) and b (..., n, k)."""
        from cupyx.scipy.linalg import solve_triangular

        if conjugated and not transposed:
            a = a.conj()
        code = "N" if not transposed else "C" if conjugated else "T"
        return solve_triangular(a, b, trans=code, lower=lower, unit_diagonal=unit)

    def cholesky(self, x: Any) -> Any:
        """The lower triangular factors; where there are none, a diagonal with an element that is not positive."""
        return self.xp.linalg.cholesky(x)

    def lu(self, x: Any) -> tuple[Any, Any]:
        """The packed factors of one matrix (m, n), and its pivots."""
        from cupyx.scipy.linalg import lu_factor

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of singular matrices: they are no error here
            return lu_factor(x, check_finite=False)

    def permutation(self, pivots: Any, rows: int) -> Any:
        """The permutations (b, rows) that exchanges (b, k) amount to, int32."""
        pivots = self.xp.ascontiguousarray(pivots, np.int32)
        out = self.xp.empty((len(pivots), rows), np.int32)
        _permutation_kernel()(pivots, pivots.shape[1], rows, out, size=len(pivots))
        return out

    def scatter(self, x: Any, rows: Any, updates: Any, how: str, dtype: np.dtype) -> Any:
        """``x`` (n, w) with the ``updates`` (m, w) combined into ``rows`` (m), in their order; rows of n are left out.

        ``x`` and ``updates`` hold the bits of ``dtype``.
        """
        xp = self.xp
        if dtypes.is_bool(dtype):  # only ever set
            moved = self.scatter(x.view(np.uint8), rows, updates.view(np.uint8), how, np.dtype(np.uint8))
            return moved.view(np.bool_)
        x, updates = (xp.ascontiguousarray(a) for a in (x, updates))
        return cuda_scatter.scatter(x, rows, updates, how, dtype, self, xp.cuda.runtime.getDevice())


@functools.cache
def cupy_library() -> CupyLibrary:
    """CuPy as entries use it."""
    driver.require()
    return CupyLibrary()


@functools.cache
def _permutation_kernel() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "raw int32 pivots, int32 k, int32 m",
        "raw int32 order",
        """
        for (int j = 0; j < m; ++j) order[i * m + j] = j;
        for (int j = 0; j < k; ++j) {
          int p = pivots[i * k + j];
          if (p < 0 || p >= m) continue;
          int row = order[i * m + j];
          order[i * m + j] = order[i * m + p];
          order[i * m + p] = row;
        }
        """,
        "blufunc_permutation",
    )


# -- the table -------------------------------------------------------------------------------------

# Special functions that kernels do not have: the primitive, and the name in ``scipy.special``.
_SPECIAL = {
    "gamma": "gamma", "gammasgn": "gammasgn", "zeta": "zeta", "betaln": "betaln", "poch": "poch",
    "igamma": "gammainc", "igammac": "gammaincc", "regularized_incomplete_beta": "betainc",
    "bessel_i0e": "i0e", "bessel_i1e": "i1e", "expi": "expi", "exp1": "exp1", "log_ndtr": "log_ndtr", "ndtri": "ndtri",
}  # fmt: skip

TABLE: dict[str, Entry] = {
    **{prim: Entry(entries.special(name), widens=True) for prim, name in _SPECIAL.items()},
    "digamma": Entry(entries.digamma, widens=True),
    "cumsum": Entry(entries.cumulative("cumsum"), widens=True, captured=True),
    "cumprod": Entry(entries.cumulative("cumprod"), widens=True, captured=True),
    "cummax": Entry(entries.doubling("maximum"), widens=True),
    "cummin": Entry(entries.doubling("minimum"), widens=True),
    "cumlogsumexp": Entry(entries.doubling("logaddexp"), widens=True),
    "fft": Entry(entries.fft),
    "sort": Entry(entries.sort, refuses=_float8),
    "top_k": Entry(entries.top_k, refuses=_float8),
    "pick_along": Entry(entries.pick_along, captured=True),
    "place_along": Entry(entries.place_along),
    "gather": Entry(entries.gather, captured=True),
    "scatter": Entry(entries.scatter("set"), captured=True),
    "scatter_add": Entry(entries.scatter("add"), refuses=_float8, captured=True),
    "scatter_mul": Entry(entries.scatter("mul"), refuses=_float8, captured=True),
    "scatter_max": Entry(entries.scatter("max"), refuses=_float8, captured=True),
    "scatter_min": Entry(entries.scatter("min"), refuses=_float8, captured=True),
    "dynamic_slice": Entry(entries.dynamic_slice, captured=True),
    "dynamic_update_slice": Entry(entries.dynamic_update_slice, captured=True),
    "dot_general": Entry(entries.dot_general, widens=True, captured=True),
    "dot_general+bias": Entry(entries.dot_and_sum, widens=True, captured=True),
    "dot_general+accumulate": Entry(entries.dot_and_sum, widens=True, captured=True),
    "dot_general+promoted": Entry(entries.dot_promoted, widens=True, captured=True),
    "conv_general_dilated": Entry(entries.convolution, widens=True),
    "reduce_window_sum": Entry(entries.window_sum, widens=True),
    "reduce_window_max": Entry(entries.window_max, widens=True),
    "reduce_window_min": Entry(entries.window_min, widens=True),
    "window_argmax": Entry(entries.window_argmax, widens=True),
    "window_argmin": Entry(entries.window_argmin, widens=True),
    "cholesky": Entry(entries.cholesky),
    "lu": Entry(entries.lu),
    "lu_pivots_to_permutation": Entry(entries.pivots_to_permutation),
    "lu_solve": Entry(entries.lu_solve),
    "triangular_solve": Entry(entries.triangular_solve),
    "qr": Entry(
        entries.qr, refuses=lambda operands, params: params["pivoting"]
    ),  # no library of CuPy's has geqp3
    "eigh": Entry(entries.eigh),
    "svd": Entry(entries.svd),
}
"""By name of the primitive. Not here, and so computed on the host: ``eig``, as its documentation says, and
``tridiagonal_solve``."""


class CupyOperation(FunctionKernel):
    """A primitive in ``TABLE``; one use of it, if that has operands and results with elements."""

    def matches(self, eqn: Eqn) -> bool:
        types = [a.aval.dtype for a in eqn.invars]
        return (
            bool(types) and eqn.prim.reference is None and not is_host_fallback(eqn.prim, types, eqn.params)
        )

    def function(self, eqn: Eqn, device: int, compile: Compile) -> tuple[Function, bool]:
        outs, label = [v.aval for v in eqn.outvars], f"{eqn.prim.name} at {source.summary(eqn.source)}"
        whole = all(x.aval.size for x in (*eqn.invars, *eqn.outvars))
        return lambda given: run(eqn.prim, given, eqn.params, outs, label), whole and is_captured(eqn.prim)


CUPY = CupyOperation()
