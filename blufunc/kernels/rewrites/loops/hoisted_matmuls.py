"""Matmuls that leave a scan: one large one before or after the loop.

Kernels, before stage 5. In: a jaxpr with its calls inlined. Out: one in which

- the matmul of an input of a ``scan`` and a constant, such as ``x[t] @ w`` of a recurrent cell, is one matmul of all
  inputs before the loop, whose rows are inputs of the loop; that of an output, one after it;
- a carry that only adds up matmuls, such as the gradient of ``w``, is one matmul after the loop, of stacked operands,
  that sums over the steps as well;
- a carry that only adds up sums of an array that is stacked anyway, such as the gradient of a bias, is one sum after
  the loop.

A library multiplies a few large matrices faster than many small ones, and sums in its accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Atom, DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.ops.elementwise import add_p, convert_p
from blufunc.core.primitives.linear_ops import add_any_p, reduce_sum_p, transpose_p
from blufunc.core.primitives.override import is_replaced
from blufunc.core.programs.simplify import Origins, dce, keeps_none, rewrite, simplified_body
from blufunc.kernels.rewrites.readers import Readers

LEAST_STEPS = 4
"""Minimum steps of a loop: fewer gain less than a stack of operands costs."""

MOST_BYTES = 1 << 28
"""Limit of a stack that is made for this, in bytes."""


def with_hoisted_matmuls(jaxpr: Jaxpr, origins: Origins, keep: Callable[[Eqn], bool] = keeps_none) -> Jaxpr:
    """Take matmuls out of the scans of a program, to any depth.

    ``keep`` selects calls with a kernel, which stay calls in the bodies; default: none.
    """
    if not any(e.prim.name == "scan" and e.prim.kind == "control" for e in jaxpr.eqns):
        return jaxpr
    changed = False

    def step(eqn: Eqn, invars: list[Atom], alias: Callable) -> list[Eqn]:
        nonlocal changed
        eqn = eqn.with_invars(invars)
        if eqn.prim.name != "scan" or eqn.prim.kind != "control" or is_replaced(eqn.prim, "impl"):
            return [eqn]
        if eqn.params["length"] < LEAST_STEPS or eqn.effects:
            return [eqn]
        found = _Scan(eqn, keep).hoisted()
        changed |= found is not None
        return found or [eqn]

    made = rewrite(jaxpr, step, origins)
    return dce(made, origins=origins) if changed else jaxpr


@dataclass
class _Scan:
    """A scan while its matmuls are taken out.

    Attributes:
      eqn: the scan.
      keep: selects the calls of its body that stay calls.
      before, after: equations before and after it.
      inputs: variables of the body that become inputs, and their stacks.
      outputs: variables of the body that become outputs, and their stacks.
      sums: numbers of carries that leave the loop.
      products: numbers of outputs that leave the loop.
    """

    eqn: Eqn
    keep: Callable[[Eqn], bool]
    before: list[Eqn] = field(default_factory=list)
    after: list[Eqn] = field(default_factory=list)
    inputs: dict[Var, Var] = field(default_factory=dict)
    outputs: dict[Var, Var] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        p = self.eqn.params
        self.body = simplified_body(p["jaxpr"], self.keep)
        self.length, self.n_consts, self.n_carry = p["length"], p["n_consts"], p["n_carry"]
        n, m = self.n_consts, self.n_consts + self.n_carry
        self.consts: dict[Any, Atom] = dict(zip(self.body.invars[:n], self.eqn.invars[:n], strict=True))
        self.xs: dict[Any, Atom] = dict(zip(self.body.invars[m:], self.eqn.invars[m:], strict=True))
        self.readers = Readers(self.body)
        self.makers = self.readers.makers

    def hoisted(self) -> list[Eqn] | None:
        """The equations that replace it; None if it has no such matmul."""
        for e in self.body.eqns:
            if e.prim is dot_general_p and not is_replaced(dot_general_p, "impl"):
                self.multiply_before(e)
        for k in range(self.n_carry):
            self.add_up_after(k)
        for n in range(self.n_carry, len(self.body.outvars)):
            self.multiply_after(n)
        for k in range(self.n_carry):
            self.sum_after(k)
        if not (self.inputs or self.sums or self.products):
            return None
        return [*self.before, self.replacement(), *self.after]

    # -- before --------------------------------------------------------------------------------------

    def multiply_before(self, e: Eqn) -> None:
        """Multiply all inputs at once: one operand is an input, the other a constant."""
        (out,) = e.outvars
        if not self.fits(out.aval):
            return
        for x, w in (e.invars, e.invars[::-1]):
            size = len(self.before)
            stack, const = self.outside(x, self.xs, 1), self.outside(w, self.consts, 0)
            if stack is not None and const is not None and self.is_plain(e):
                self.inputs[out] = self.multiply(e, x, stack, const, self.before)
                return
            del self.before[size:]

    @staticmethod
    def is_plain(e: Eqn) -> bool:
        """True for a matmul without batch axes, and with one precision."""
        return not e.params["dimension_numbers"][1][0] and not isinstance(e.params["precision"], tuple)

    def multiply(self, e: Eqn, x: Atom, stack: Atom, const: Atom, eqns: list[Eqn]) -> Var:
        """Add the matmul ``e`` of all steps to ``eqns``; ``stack`` is operand ``x``."""
        (lc, rc), none = e.params["dimension_numbers"]
        first = x is e.invars[0]
        xc, wc, w = (lc, rc, e.invars[1]) if first else (rc, lc, e.invars[0])
        n_x, n_w = x.aval.ndim - len(xc), w.aval.ndim - len(wc)
        aval = e.outvars[0].aval
        shape = aval.shape if first else (*aval.shape[n_w:], *aval.shape[:n_w])
        params = {**e.params, "dimension_numbers": ((tuple(d + 1 for d in xc), wc), none)}
        made = Var(self.stacked(aval.with_shape(shape)))
        eqns.append(Eqn(dot_general_p, [stack, const], [made], params, e.source))
        if not first:
            order = (0, *range(1 + n_x, 1 + n_x + n_w), *range(1, 1 + n_x))
            turned = Var(self.stacked(aval))
            eqns.append(Eqn(transpose_p, [made], [turned], {"permutation": order}, e.source))
            made = turned
        return made

    def outside(self, a: Atom, known: dict[Any, Atom], axes: int) -> Atom | None:
        """A value outside the loop: an operand of it, converted or transposed.

        Args:
          known: the operand of each variable of the body that may be used.
          axes: number of axes that these operands have more.
        """
        if a.__class__ is Literal:
            return None
        if a in known:
            return known[a]
        maker = self.makers.get(a)
        if maker is None or maker.prim not in (convert_p, transpose_p) or is_replaced(maker.prim, "impl"):
            return None
        x = self.outside(maker.invars[0], known, axes)
        if x is None:
            return None
        params = dict(maker.params)
        if axes and maker.prim is transpose_p:
            params["permutation"] = (0, *(d + 1 for d in params["permutation"]))
        aval = maker.outvars[0].aval
        return self.put(maker.prim, [x], self.stacked(aval) if axes else aval, params, maker.source)

    # -- after ---------------------------------------------------------------------------------------

    def addend(self, k: int) -> tuple[Eqn, Any] | None:
        """The sum and the addend of a carry that is only added to; else None."""
        carry, out = self.body.invars[self.n_consts + k], self.body.outvars[k]
        total = self.makers.get(out)
        if total is None or total.prim not in (add_p, add_any_p) or carry not in total.invars:
            return None
        if len(self.readers.of(carry)) != 1 or self.readers.of(out) or self.body.outvars.count(out) != 1:
            return None
        if carry in self.body.outvars or total.invars.count(carry) != 1:
            return None
        (d,) = (a for a in total.invars if a is not carry)
        return total, d

    def sum_after(self, k: int) -> None:
        """Take out a carry that only adds up sums of an array of which there is a stack."""
        found = None if k in self.sums else self.addend(k)
        e = found and self.makers.get(found[1])
        if found is None or e is None or e.prim is not reduce_sum_p:
            return
        total, made = found[0], e.outvars[0]
        x, aval = e.invars[0], made.aval
        if (
            len(self.readers.of(made)) != 1
            or made in self.body.outvars
            or aval.dtype != total.outvars[0].aval.dtype
        ):
            return
        if any(is_replaced(eqn.prim, "impl") for eqn in (total, e)):
            return
        if x in self.xs or x in self.inputs or x in self.outputs:
            stack = self.stack_of(x)
        elif x in self.body.outvars[self.n_carry :]:
            n = self.body.outvars.index(x, self.n_carry)
            if isinstance(self.eqn.outvars[n], DropVar):
                return
            stack = self.eqn.outvars[n]
        else:
            return
        self.sums.add(k)
        summed: Var = Var(aval)
        axes = (0, *(d + 1 for d in e.params["axes"]))
        self.after.append(Eqn(reduce_sum_p, [stack], [summed], {**e.params, "axes": axes}, e.source))
        self.add_to_initial(k, summed, total)

    def add_to_initial(self, k: int, made: Atom, total: Eqn) -> None:
        """The result of a carry that left the loop: its initial value and a sum."""
        init, result = self.eqn.invars[self.n_consts + k], self.eqn.outvars[k]
        if not isinstance(result, DropVar):
            self.after.append(Eqn(add_p, [init, made], [result], {}, total.source))

    def add_up_after(self, k: int) -> None:
        """Take out a carry that only adds up matmuls."""
        carry, found = self.body.invars[self.n_consts + k], self.addend(k)
        if found is None:
            return
        total, d = found
        chain = [e for e in (self.makers.get(d),) if e is not None]
        if chain and chain[0].prim is transpose_p:
            chain += [e for e in (self.makers.get(chain[0].invars[0]),) if e is not None]
        if any(is_replaced(e.prim, "impl") for e in (total, *chain)):
            return
        if not chain or chain[-1].prim is not dot_general_p or chain[-1].params["dimension_numbers"][1][0]:
            return
        if any(len(self.readers.of(e.outvars[0])) != 1 or e.outvars[0] in self.body.outvars for e in chain):
            return
        product = chain[-1]
        if product.outvars[0].aval.dtype != carry.aval.dtype or product.outvars[0] in self.inputs:
            return
        operands = product.invars
        if any(a.__class__ is Literal or a in self.consts or not self.fits(a.aval) for a in operands):
            return
        self.sums.add(k)
        stacks = [self.stack_of(a) for a in operands]
        (lc, rc), none = product.params["dimension_numbers"]
        numbers = ((0, *(d + 1 for d in lc)), (0, *(d + 1 for d in rc))), none
        made: Var = Var(product.outvars[0].aval)
        self.after.append(
            Eqn(
                dot_general_p,
                stacks,
                [made],
                {**product.params, "dimension_numbers": numbers},
                product.source,
            )
        )
        if len(chain) == 2:
            turned = Var(chain[0].outvars[0].aval)
            self.after.append(Eqn(transpose_p, [made], [turned], chain[0].params, chain[0].source))
            made = turned
        self.add_to_initial(k, made, total)

    def multiply_after(self, n: int) -> None:
        """Take out an output that is a matmul with a constant."""
        out = self.body.outvars[n]
        e, result = self.makers.get(out), self.eqn.outvars[n]
        if (
            e is None
            or e.prim is not dot_general_p
            or is_replaced(dot_general_p, "impl")
            or not self.is_plain(e)
        ):
            return
        if out in self.inputs or self.readers.of(out) or self.body.outvars.count(out) != 1:
            return
        for x, w in (e.invars, e.invars[::-1]):
            if x.__class__ is Literal or x in self.consts or not self.fits(x.aval):
                continue
            size = len(self.before)
            const = self.outside(w, self.consts, 0)
            if const is None:
                del self.before[size:]
                continue
            made = self.multiply(e, x, self.stack_of(x), const, self.after)
            last = self.after.pop()
            assert last.outvars[0] is made
            self.after.append(Eqn(last.prim, last.invars, [result], last.params, last.source))
            self.products.add(n)
            return

    def stack_of(self, a: Any) -> Atom:
        """The values of a variable of the body in all steps."""
        if a in self.xs:
            return self.xs[a]
        if a in self.inputs:
            return self.inputs[a]
        if a not in self.outputs:
            self.outputs[a] = Var(self.stacked(a.aval))
        return self.outputs[a]

    # -- the loop ------------------------------------------------------------------------------------

    def replacement(self) -> Eqn:
        """The scan without what was taken out."""
        p, body = self.eqn.params, self.body
        n, m = self.n_consts, self.n_consts + self.n_carry
        kept = [k for k in range(self.n_carry) if k not in self.sums]
        at = lambda xs: [xs[n + k] for k in kept]
        invars = [*body.invars[:n], *at(body.invars), *body.invars[m:], *self.inputs]
        ys = [k for k in range(self.n_carry, len(body.outvars)) if k not in self.products]
        outvars = [*(body.outvars[k] for k in (*kept, *ys)), *self.outputs]
        eqns = [e for e in body.eqns if e.outvars[0] not in self.inputs]
        jaxpr = dce(body.replace(invars=invars, eqns=eqns, outvars=outvars, arg_names=()))
        operands = [*self.eqn.invars[:n], *at(self.eqn.invars), *self.eqn.invars[m:], *self.inputs.values()]
        results = [*(self.eqn.outvars[k] for k in (*kept, *ys)), *self.outputs.values()]
        params = {**p, "jaxpr": jaxpr, "n_carry": len(kept)}
        return Eqn(self.eqn.prim, operands, results, params, self.eqn.source)

    def put(self, prim: Any, ins: Sequence[Atom], aval: ShapedArray, params: dict, line: Any) -> Var:
        """Add an equation before the loop and return its result."""
        out = Var(aval)
        self.before.append(Eqn(prim, list(ins), [out], params, line))
        return out

    def stacked(self, aval: ShapedArray) -> ShapedArray:
        return aval.with_shape((self.length, *aval.shape))

    def fits(self, aval: ShapedArray) -> bool:
        """True if a stack of such values is not too large."""
        return self.length * math.prod(aval.shape) * aval.dtype.itemsize <= MOST_BYTES
