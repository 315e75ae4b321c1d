"""Composite primitives: operations defined by other operations.

Transforms, above ``calls.py``. In: a definition, a function of arrays. Out: a primitive whose equations hold the
definition as a jaxpr, traced once for each combination of types. Compilers inline it unless they have a kernel, and
the rules that a composite lacks are those of its definition: what they make of it is a plain call. It stands here and
not in ``core``, because these rules are transforms of a jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, Var, trace_scope
from blufunc.core.ir.trace import state
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import stage
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.batching.batch import MeshAxis
from blufunc.transforms.control_flow.calls import Call, jit_p


class Composite(Call):
    """A call of ``definition`` that stays one operation.

    Attributes:
      definition: ``definition(*operands, **params)``, a function that closes over nothing and returns a list.
      lines: whether its equations keep the lines of the definition, or have those of each call.
      tangent: the linear primitive that is the tangent of the first result, with the parameter ``nonzeros``; the
        other results have none. Its operands are the primals, the results if it is ``of_results``, and the nonzero
        tangents. None: the derivative of the definition.
    """

    definition: Callable
    lines: bool = True
    tangent: Composite | None = None
    of_results: bool = False
    drop_outputs = None  # type: ignore[assignment]  # it has kernels for all results

    def at(self, *args: Any, **params: Any) -> list[Any]:
        """The operation on operands of any types."""
        return self.bind(*args, jaxpr=self.staged([a.aval for a in args], **params), **params)

    def staged(self, avals: Sequence[ShapedArray], **params: Any) -> Jaxpr:
        """The definition at the types of operands."""
        strong = tuple([a.strong() for a in avals])
        return staged(type(self).definition, strong, self.lines, trace_scope(), **params)

    def restaged(self, avals: Sequence[ShapedArray]) -> Callable:
        """For the rule of ``shard``: the parameters of the call on a part of the operands."""

        def local(params: dict, shapes: Sequence, _: Sequence) -> dict:
            here = [a.with_shape(s) for a, s in zip(avals, shapes, strict=True)]
            own = {k: v for k, v in params.items() if k != "jaxpr"}
            return {**own, "jaxpr": self.staged(here, **own)}

        return local

    def call(self, jaxpr: Jaxpr, args: Sequence[Any], params: dict) -> list[Any]:
        closed, consts = jaxpr.hoist()
        return jit_p.bind(*consts, *args, jaxpr=closed, name=self.name)

    def linearize(self, trace, primals, tangents, *, jaxpr, **params):
        if self.tangent is None:
            return jit_p.linearize(trace, primals, tangents, jaxpr=jaxpr, name=self.name)
        outs = self.bind(*primals, jaxpr=jaxpr, **params)
        nonzeros = tuple(t.__class__ is not Zero for t in tangents)
        derived = jaxpr.memoised(("tangent", nonzeros), lambda: self._tangent(jaxpr, nonzeros))
        ins = [
            *primals,
            *(outs if self.of_results else ()),
            *(t for t in tangents if t.__class__ is not Zero),
        ]
        params = {"jaxpr": derived, **params, "nonzeros": nonzeros}
        (tangent,) = trace.tangents.process(self.tangent, ins, params)
        return outs, [tangent, *(zero(o.aval) for o in outs[1:])]

    def _tangent(self, jaxpr: Jaxpr, nonzeros: tuple[bool, ...]) -> Jaxpr:
        """The tangent of the first result as a function of the operands of ``tangent``."""
        n = len(jaxpr.outvars)
        both, _ = jvp_jaxpr(jaxpr, nonzeros, tuple(i == 0 for i in range(n)))
        both = simplify.dce(both, tuple(i == n for i in range(len(both.outvars))))
        if not self.of_results:
            return both
        k = len(nonzeros)
        ins = [*both.invars[:k], *(Var(a) for a in jaxpr.out_avals), *both.invars[k:]]
        return both.replace(invars=ins, arg_names=())

    def rewrite(self, bodies, operands, *, jaxpr, **params):
        """The transformed definition."""
        return bodies.inline(jaxpr, operands)


@functools.lru_cache(1024)
def staged(
    definition: Callable, avals: tuple[ShapedArray, ...], lines: bool, context: Any, **params: Any
) -> Jaxpr:
    """Trace a definition at strong types of operands.

    ``context`` holds the flags that traces depend on. In a ``shard_map`` a definition is of one rank alone, so its
    derivatives need no types over the mesh axes.
    """
    around = state.context
    state.context = tuple(e for e in around if not isinstance(e, MeshAxis))
    try:
        jaxpr = stage(functools.partial(definition, **params), avals, definition.__name__.strip("_"))
    finally:
        state.context = around
    assert not jaxpr.consts, "definitions close over nothing"
    return jaxpr if lines else simplify.without_lines(jaxpr)
