"""Convolutions that are matmuls, for the CPU.

Kernels, before stage 5 on the CPU. In: a simplified jaxpr. Out: one in which a convolution is a ``dot_general`` if
along each axis its kernel has size 1, or its result. Such are 1 x 1 convolutions with any strides, and their gradients
in inputs and in weights. The GEMM multiplies operands in place, and neighbors fuse. Other convolutions are
native steps (``steps/convolution.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blufunc.core.arrays.array import scalar
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.convolution import conv_general_dilated_p
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.shape import pad_p, slice_p
from blufunc.core.primitives.linear_ops import reshape_p, transpose_p
from blufunc.core.primitives.override import is_replaced

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def with_matmuls(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with matmuls for the convolutions that are."""
    if not any(map(_is_matmul, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in (_matmul(eqn) if _is_matmul(eqn) else [eqn])])


def _is_matmul(eqn: Eqn) -> bool:
    if eqn.prim is not conv_general_dilated_p or is_replaced(eqn.prim, "impl"):
        return False
    p, (out,) = eqn.params, eqn.outvars
    lhs, rhs = (a.aval for a in eqn.invars)
    if not lhs.dtype == rhs.dtype == out.aval.dtype or out.aval.dtype not in _DTYPES:
        return False
    if (
        p["feature_group_count"] != 1
        or p["batch_group_count"] != 1
        or not (lhs.size and rhs.size and out.aval.size)
    ):
        return False
    return all(a.kernel == 1 or a.is_summed for a in _axes(eqn))


class _Axis(NamedTuple):
    """A spatial axis: its sizes, and how the kernel slides along it."""

    kernel: int
    size: int
    stride: int
    pad: tuple[int, int]
    holes: int
    dilation: int
    n: int

    @property
    def is_summed(self) -> bool:
        """True for one window, whose elements are all within the operand."""
        last = (self.kernel - 1) * self.dilation - self.pad[0]
        return self.n == 1 and self.holes == 1 and self.pad[0] <= 0 and last < self.size


def _axes(eqn: Eqn) -> list[_Axis]:
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (a.aval.shape for a in (*eqn.invars, *eqn.outvars))
    sizes = zip(numbers.rhs_spec[2:], numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)
    slides = zip(p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True)
    return [
        _Axis(rhs[k], lhs[x], stride, tuple(pad), holes, dilation, out[y])  # type: ignore[arg-type]
        for (k, x, y), (stride, pad, holes, dilation) in zip(sizes, slides, strict=True)
    ]


def _matmul(eqn: Eqn) -> list[Eqn]:
    """The equations of one convolution."""
    p, (out,), (x, w) = eqn.params, eqn.outvars, eqn.invars
    numbers = p["dimension_numbers"]
    made: list[Eqn] = []

    def put(prim: Any, ins: Sequence[Atom], result: Sequence[int], params: dict[str, Any]) -> Var:
        v = Var(ShapedArray(tuple(result), out.aval.dtype))
        made.append(Eqn(prim, list(ins), [v], params, eqn.source))
        return v

    def part(v: Any, spans: dict[int, tuple[int, int, int]]) -> Any:
        """Elements of some axes, by start, count and stride."""
        all_of = [spans.get(d, (0, n, 1)) for d, n in enumerate(v.aval.shape)]
        if all_of == [(0, n, 1) for n in v.aval.shape]:
            return v
        starts, counts, strides = zip(*all_of, strict=True)
        limits = tuple([a + (n - 1) * s + 1 for a, n, s in zip(starts, counts, strides, strict=True)])
        return put(
            slice_p, [v], counts, {"start_indices": starts, "limit_indices": limits, "strides": strides}
        )

    axes = _axes(eqn)
    whole = [a.is_summed for a in axes]
    # along other axes the matmul is padded, and every stride-th element kept; without padding, ahead of the matmul
    plain = [a.pad == (0, 0) and a.holes == 1 for a in axes]
    spans = {}
    for d, a, covered, early in zip(numbers.lhs_spec[2:], axes, whole, plain, strict=True):
        if covered:
            spans[d] = -a.pad[0], a.kernel, a.dilation
        elif early:
            spans[d] = 0, a.n, a.stride
    x = part(x, spans)
    # axes that the kernel covers are summed; of the others it has one position, which is dropped
    summed = [i for i, covered in enumerate(whole) if covered]
    free = [i for i, covered in enumerate(whole) if not covered]
    dropped = {numbers.rhs_spec[2 + i] for i in free}
    kept = [d for d in range(w.aval.ndim) if d not in dropped]
    if dropped:
        shape = [w.aval.shape[d] for d in kept]
        w = put(reshape_p, [w], shape, {"shape": tuple(shape)})
    contracted = (
        (numbers.lhs_spec[1], *(numbers.lhs_spec[2 + i] for i in summed)),
        tuple([kept.index(d) for d in (numbers.rhs_spec[1], *(numbers.rhs_spec[2 + i] for i in summed))]),
    )
    rows = [d for d in range(x.aval.ndim) if d not in contracted[0]]
    shape = [*(x.aval.shape[d] for d in rows), out.aval.shape[numbers.out_spec[1]]]
    params = {
        "dimension_numbers": (contracted, ((), ())),
        "precision": p["precision"],
        "preferred_element_type": p["preferred_element_type"],
    }
    result = put(dot_general_p, [x, w], shape, params)
    # axes of the result, in the order of the matmul's and then those of size 1
    order = [numbers.out_spec[([numbers.lhs_spec[0], None, *numbers.lhs_spec[2:]]).index(d)] for d in rows]
    order += [numbers.out_spec[1], *(numbers.out_spec[2 + i] for i in summed)]
    config, late = [(0, 0, 0)] * len(rows), {}
    for i in (i for i in free if not plain[i]):
        at, a = order.index(numbers.out_spec[2 + i]), axes[i]
        config[at] = *a.pad, a.holes - 1
        late[at] = 0, a.n, a.stride
    if late:
        config.append((0, 0, 0))
        zero = Literal(scalar(np.zeros((), out.aval.dtype)[()], out.aval.dtype))
        shape = [
            lo + hi + n + (n - 1) * gap for n, (lo, hi, gap) in zip(result.aval.shape, config, strict=True)
        ]
        result = part(put(pad_p, [result, zero], shape, {"padding_config": tuple(config)}), late)
    if summed:
        shape = [out.aval.shape[d] for d in order]
        result = put(reshape_p, [result], shape, {"shape": tuple(shape)})
    permutation = tuple([order.index(d) for d in range(out.aval.ndim)])
    if permutation != tuple(range(out.aval.ndim)):
        put(transpose_p, [result], out.aval.shape, {"permutation": permutation})
    last = made.pop()
    return [*made, last.with_vars(last.invars, [out])]
