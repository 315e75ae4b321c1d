"""Calls of a definition for which a device has a library kernel.

Kernels, below the rewrites, which make the calls.
"""

from __future__ import annotations

from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive


class DefinedCall(Primitive):
    """A call with a library kernel; its jaxpr is its definition."""

    kind, multiple_results, body = "call", True, "jaxpr"

    def abstract(self, *avals, jaxpr: Jaxpr, **params):
        return [a.strong() for a in jaxpr.out_avals]

    def reference(self, compile, *, jaxpr: Jaxpr, **params):
        """The definition."""
        return compile(jaxpr)
