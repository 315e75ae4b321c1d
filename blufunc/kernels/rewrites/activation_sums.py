"""Before stage 5, for devices with kernels for it: a product with GELU's derivative makes sums over rows, too.

Kernels, behind ``activation_epilogue``; the sibling of ``gradient_sums``. In: a program with such products. Out: the
same, in which the gradient of the bias that was added before GELU, the sum of the result over all rows, is made of sums
over ``ROWS`` rows each, which the kernel has when it stores the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives.linear_ops import reduce_sum, reshape
from blufunc.core.programs.simplify import Origins
from blufunc.core.programs.stage import stage
from blufunc.kernels.backends.cuda.library.gelu_gemm_source import GeluProduct
from blufunc.kernels.backends.cuda.library.tile_gemm import ROWS
from blufunc.kernels.rewrites.activation_epilogue import dot_dgelu_p
from blufunc.kernels.rewrites.gradient_sums import with_sums_begun

Kernel = Callable[[Eqn], GeluProduct | None]
"""From a product with an activation to the kernel for it, if there is one."""


def with_activation_sums(jaxpr: Jaxpr, origins: Origins, kernel: Kernel) -> Jaxpr:
    """The program with sums over rows that kernels begin.

    Args:
      jaxpr: behind ``with_activations``.
      origins: for equations, the call that computes them again; kept up for those that take their place.
    """
    found = {e: made.m for e in jaxpr.eqns if e.prim is dot_dgelu_p and (made := kernel(e)) is not None}
    return with_sums_begun(jaxpr, origins, found, _summed)


def _summed(eqn: Eqn) -> Eqn:
    """The equation with one more result, sums of ``ROWS`` rows each of the first."""
    definition: Jaxpr = eqn.params["jaxpr"]
    result = eqn.outvars[0]
    (_, contracted), _ = eqn.params["dimension_numbers"]
    columns = math.prod(n for d, n in enumerate(eqn.invars[1].aval.shape) if d not in contracted)
    groups = result.aval.size // (ROWS * columns)

    def of_groups(d: Any) -> list[Any]:
        return [reduce_sum(ew.convert(reshape(d, (groups, ROWS, columns)), dtypes.float32), (1,))]

    behind = stage(of_groups, [result.aval], eqn.prim.name, line=eqn.source)
    place: dict[Any, Any] = dict(zip(behind.invars, definition.outvars[:1], strict=True))
    more = [e.with_invars([place.get(a, a) for a in e.invars]) for e in behind.eqns]
    body = definition.replace(eqns=[*definition.eqns, *more], outvars=[*definition.outvars, *behind.outvars])
    sums = Var(ShapedArray((groups, columns), dtypes.float32))
    return Eqn(dot_dgelu_p, eqn.invars, [*eqn.outvars, sums], {**eqn.params, "jaxpr": body}, eqn.source)
