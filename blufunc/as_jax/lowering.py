"""Lowerings written as rules: ``mlir.emit_python_callback``, and contexts.

Under the face ``as_jax``, for ``primitives.py``. A rule is called while its primitive's definition is traced, with
traced values where JAX has values of MLIR. Of what a rule may emit there are calls of Python and functions by
``lower_fun``; the dialects of MLIR are not spoken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.ir.trace import Array
from blufunc.core.primitives.linear_ops import zeros
from blufunc.core.primitives.rule_errors import check_defined_types
from blufunc.core.programs.stage import stage
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import value_or_none
from blufunc.transforms.staging.callback import HostFunction, io_callback_p, pure_callback_p

__all__ = ["LoweringRuleContext", "ModuleContext", "emit_python_callback"]


@dataclasses.dataclass
class ModuleContext:
    """The program around a rule.

    Attributes:
      platforms: those to lower for; programs of blufunc are lowered before they have one, so they are named as the CPU.
      keepalives: objects that live as long as the program; callbacks are parts of it here.
    """

    platforms: Sequence[str] = ("cpu",)
    keepalives: list = dataclasses.field(default_factory=list)

    def add_keepalive(self, x: Any) -> None:
        """Keep an object as long as the program."""
        self.keepalives.append(x)


@dataclasses.dataclass
class LoweringRuleContext:
    """The context of a rule: what it is told besides its operands.

    Attributes:
      primitive: the primitive to lower.
      avals_in, avals_out: the types of its operands and results.
    """

    primitive: Any
    avals_in: Sequence[ShapedArray]
    avals_out: Sequence[ShapedArray]
    module_context: ModuleContext = dataclasses.field(default_factory=ModuleContext)

    def replace(self, **changes: Any) -> LoweringRuleContext:
        """The context with other attributes."""
        return dataclasses.replace(self, **changes)


def lowered(prim: Any, rule: Callable, avals: Sequence[ShapedArray], params: dict) -> Jaxpr:
    """The definition of a primitive that a rule emits.

    Raises:
      UnsupportedError: the rule fails, as one does that builds operations of MLIR, or its results are not values.
      JaxprTypeError: the results are of other types than the primitive's.
    """
    outs = prim.typed(tuple(avals), params)
    context = LoweringRuleContext(prim, list(avals), list(outs) if prim.multiple_results else [outs])

    def defined(*xs: Array) -> list[Array]:
        try:
            found = tree.leaves(rule(context, *xs, **params))
            values = [value for x in found if (value := value_or_none(x)) is not None]
            if len(values) != len(found) or len(found) != len(context.avals_out):
                raise TypeError(f"the rule returned {[type(x).__name__ for x in found]!r:.60}")
        except errors.BlufuncError:
            raise
        except Exception as e:
            raise errors.UnsupportedError(
                f"{prim.name} has a lowering to MLIR, which blufunc does not speak.",
                where=source.here(),
                why=f"the rule may call mlir.emit_python_callback and mlir.lower_fun; here it raised "
                f"{type(e).__name__}: {e}",
                fix=f"mlir.register_lowering({prim.name}_p, mlir.lower_fun(function))",
            ) from e
        return values

    jaxpr = stage(defined, avals, prim.name)
    check_defined_types(prim, jaxpr.out_avals, outs)
    return jaxpr


def emit_python_callback(
    ctx: LoweringRuleContext,
    callback: Callable,
    token: Any,
    operands: Sequence[Array],
    operand_avals: Sequence[ShapedArray],
    result_avals: Sequence[ShapedArray],
    *,
    has_side_effect: bool,
    returns_token: bool = True,
    partitioned: bool = False,
    sharding: None = None,
) -> tuple[list[Array], Any, Any]:
    """Call a Python function of arrays, from a lowering.

    Args:
      ctx: the context of the rule.
      callback: takes an array for each operand, and returns a sequence of arrays. What has the dtype ``float0`` it
        gets as False.
      token: orders calls with side effects if it is not None; returned as it is.
      operands, operand_avals, result_avals: the operands, and the types of these and of the results.
      has_side_effect: whether the call must happen exactly as often as the program says.
      returns_token: of JAX's signature; a token is returned in any case.
      partitioned, sharding: False and None: a callback sees whole arrays.
    Returns:
      the results, the token, and an object to keep alive, which may be dropped.
    Raises:
      UnsupportedError: it is to be partitioned or sharded.
    """
    if partitioned or sharding is not None:
        raise errors.UnsupportedError(
            "emit_python_callback with a sharding.",
            where=source.here(),
            why="a callback sees whole arrays.",
            fix="partitioned=False, sharding=None",
        )
    values = [
        zeros(ShapedArray(a.shape, dtypes.bool_)) if a.dtype == dtypes.float0 else x
        for x, a in zip(operands, operand_avals, strict=True)
    ]
    in_tree, out_tree = tree.structure((tuple(values), {})), tree.structure([0] * len(result_avals))
    outs = tuple([a.strong() for a in result_avals])
    host = HostFunction(callback, in_tree, {}, out_tree, outs, "emit_python_callback")
    if has_side_effect:
        results = io_callback_p.bind(*values, callback=host, ordered=token is not None)
    else:
        results = pure_callback_p.bind(*values, callback=host, vmap_method="sequential")
    return list(results), token, host
