"""Long loops outside of ``jit``: compiled where interpreting them takes as long.

Kernels, stage 8 on the CPU. In: a scan or while that runs by itself, and its operands. Out: the results, or None where
NumPy interprets it. The number of rounds decides and not the clock, so that a loop gives the same bits each time: a
scan is compiled if it is long enough, and a while is interpreted for that many rounds, and then compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Var, subjaxprs
from blufunc.core.ir.source import current
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.backends.numpy.program import interpret

_COMPILING = 1_000_000.0
"""Microseconds of interpreting after which a loop is compiled.

measured: planning and compiling loops of 10 to 100 equations takes 0.5 to 2 s (2 shared cores, 2026-11-28)
"""

_CALL = 1.5
"""Microseconds of a call of NumPy on a small array."""

_BYTES = 2_000.0
"""Bytes that NumPy computes in a microsecond."""


def run(
    compile: Callable[[Jaxpr, Sequence[bool]], Callable],
    prim: Any,
    buffers: Sequence,
    params: dict[str, Any],
    outs: Sequence[ShapedArray],
) -> Sequence | None:
    """Results of a loop that lasts; None if it is to be interpreted.

    Args:
      compile: the program of a jaxpr, from it and a flag for each donated parameter.
      prim, buffers, params, outs: the loop, its operands, and the types of its results.
    """
    if prim.name not in ("scan", "while") or prim.effects_of(params) or is_replaced(prim, "impl"):
        return None
    rounds = int(_COMPILING / max(_CALL, sum(map(_microseconds, subjaxprs(params)))))
    if prim.name == "scan":
        if params["length"] <= rounds:
            return None
        return _compiled(compile, prim, buffers, params, outs)(list(buffers))
    limit = params["max_steps"]
    if limit is not None and limit <= rounds:
        return None
    carry = prim.reference(interpret, **params | {"max_steps": rounds})(list(buffers))
    n_cond, n_consts = params["n_cond"], params["n_cond"] + params["n_body"]
    if not interpret(params["cond"])([*buffers[:n_cond], *carry])[0]:
        return carry
    operands = [*buffers[:n_consts], *carry]
    left = params | {"max_steps": None if limit is None else limit - rounds}
    return _compiled(compile, prim, operands, left, outs)(operands)


def _microseconds(jaxpr: Jaxpr) -> float:
    """Estimated time to interpret a jaxpr once."""
    return jaxpr.memoised("microseconds interpreted", lambda: sum(map(_of_equation, jaxpr.eqns)))


def _of_equation(eqn: Eqn) -> float:
    bodies = list(subjaxprs(eqn.params))
    if bodies:
        each = map(_microseconds, bodies)
        return min(each) if eqn.prim.name == "cond" else (toolchain.rounds_of(eqn) or 1) * sum(each)
    nbytes = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    return _CALL * toolchain.CALLS_OF.get(eqn.prim.name, 1) + nbytes / _BYTES


def _compiled(
    compile: Callable, prim: Any, operands: Sequence, params: dict[str, Any], outs: Sequence[ShapedArray]
) -> Callable:
    """The loop as a program, memoized with its body."""
    avals = tuple([ShapedArray(x.shape, x.dtype) for x in operands])

    def make() -> Callable:
        ins, results = list(map(Var, avals)), list(map(Var, outs))
        loop = Jaxpr(ins, [Eqn(prim, ins, results, params, current())], results, name=f"eager {prim.name}")
        return compile(loop, (False,) * len(ins))

    (body, *_) = subjaxprs(params)
    return body.memoised(("eager loop", avals, *sorted(params.items())), make)
