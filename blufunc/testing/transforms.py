"""Compositions of a transform with the others: ``check_transform``.

Face, part of ``blufunc.testing``. In: a transform, a function and arguments for the transformed function. Out: a
report of the compositions, or an ``AssertionError`` if one gives another result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes, source
from blufunc.core.ops.elementwise import add
from blufunc.core.primitives.linear_ops import full, zeros
from blufunc.core.pytree import tree
from blufunc.testing.compare import assert_same, random_like, values_of
from blufunc.testing.gradients import Tolerance, check_grads
from blufunc.testing.primitives import SIZE, variants
from blufunc.testing.report import Report
from blufunc.transforms.arguments import check_callable, name_of
from blufunc.transforms.autodiff.grad import jvp, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.cond import cond
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.control_flow.while_loop import while_loop
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.jit import jit

DECLINED = (errors.UnsupportedError, errors.BranchError, errors.CarryError)
"""Errors of a transform for unsupported compositions."""


def check_transform(
    t: Callable[[Callable], Callable],
    f: Callable,
    args: Sequence[Any],
    atol: float | None = None,
    rtol: float | None = None,
) -> Report:
    """Check that a transform composes with the others, on one function.

    ``t(f)(*args)`` itself is what all else is compared with: ``jit`` and ``vmap`` (against a loop) outside of t and
    inside; checkpoint, custom_jvp, cond, scan and while_loop of f under t; ``t(f)`` in the body of a scan; derivatives
    of f under t, and those of ``t(f)`` against finite differences. What the transform says it cannot do
    (``UnsupportedError``, or boxes that a loop or branch cannot carry) is in the report and fails nothing.

    Args:
      t: the transform, a ``bf.Transform`` or any function from functions to functions.
      f: a function of arrays, smooth enough to differentiate ``t(f)`` at ``args``.
      args: a tuple of arguments of ``t(f)``: boxes and arrays. The batches are of multiples of all their floating
        numbers by one factor, from 1 to 0.86; boxes must hold such multiples and have the axes of the array that
        they stand for in front.
      atol, rtol: what derivatives may be off, as for ``check_grads``.
    Raises:
      AssertionError: a composition gives another result, or raises another error than one of the above.
    """
    check_callable(t, "check_transform")
    check_callable(f, "check_transform")
    if not isinstance(args, (tuple, list)):
        raise errors.ArgumentError(
            f"check_transform takes the arguments of t(f) as a tuple, not {args!r:.60}.",
            where=source.here(),
            fix="check_transform(t, f, (box,))",
        )
    Tolerance(atol, rtol, None)  # of the caller's, so that a mistake is an error of the caller's
    check = _Check(t, f, tuple(args))
    check.run("jit outside", check.jit_outside, "jit(t(f))")
    check.run("jit inside", check.jit_inside, "t(jit(f))")
    check.run("vmap outside", check.vmap_outside, "vmap(t(f)) against a loop")
    check.run("vmap inside", check.vmap_inside, "t(vmap(f)) against a loop")
    check.run("checkpoint", check.in_checkpoint, "t(checkpoint(f))")
    check.run("custom_jvp", check.in_custom_jvp, "t(custom_jvp(f))")
    check.run("cond", check.in_cond, "f in the branches of a cond under t")
    check.run("scan", check.in_scan, "f in the body of a scan under t")
    check.run("inside scan", check.inside_scan, "t(f) in the body of a scan")
    check.run("while_loop", check.in_while_loop, "f in the body of a while_loop under t")
    check.run("grad inside", check.grad_inside, "t(vjp(f)), the same under jit")
    check.run(
        "grad outside", lambda: check.gradients(atol, rtol), "derivatives of t(f) against finite differences"
    )
    return check.report


class _Check:
    """One function under one transform: ``want`` is its result there."""

    def __init__(self, t: Callable, f: Callable, args: tuple):
        self.t, self.f, self.args = t, f, args
        self.want = t(f)(*args)
        self.name = f"{getattr(t, 'name', None) or name_of(t)}({name_of(f)})"
        self.report = Report(self.name)

    def run(self, what: str, compare: Callable[[], None], text: str) -> None:
        """Run one check, and report it."""
        try:
            compare()
        except DECLINED as e:
            self.report.unsupported[what] = e.what
        except errors.BlufuncError as e:
            raise AssertionError(f"{self.name}: {text} raises {type(e).__name__}: {e}") from e
        else:
            self.report.checked[what] = text

    def same(self, got: Any, want: Any, text: str) -> None:
        """Compare two results."""
        assert_same(got, want, f"{self.name}: {text}")

    # -- the compositions ----------------------------------------------------------------------

    def jit_outside(self) -> None:
        self.same(jit(self.t(self.f))(*self.args), self.want, "jit(t(f))")

    def jit_inside(self) -> None:
        self.same(self.t(jit(self.f))(*self.args), self.want, "t(jit(f))")
        self.same(jit(self.t(jit(self.f)))(*self.args), self.want, "jit(t(jit(f)))")

    def vmap_outside(self) -> None:
        batch, want = self._batch()
        self.same(vmap(self.t(self.f))(*batch), want, "vmap(t(f)), over the first axis,")

    def vmap_inside(self) -> None:
        batch, want = self._batch()
        self.same(self.t(vmap(self.f))(*batch), want, "t(vmap(f)), over the first axis,")

    def in_checkpoint(self) -> None:
        self.same(self.t(checkpoint(self.f))(*self.args), self.want, "t(checkpoint(f))")

    def in_custom_jvp(self) -> None:
        f = custom_jvp(self.f)
        f.defjvp(lambda primals, tangents: jvp(self.f, primals, tangents))
        self.same(self.t(f)(*self.args), self.want, "t(custom_jvp(f))")
        self.same(jit(self.t(f))(*self.args), self.want, "jit(t(custom_jvp(f)))")

    def in_cond(self) -> None:
        branches = lambda *xs: cond(True, self.f, lambda *ys: self.f(*ys), *xs)
        self.same(self.t(branches)(*self.args), self.want, "t(cond)")

    def in_scan(self) -> None:
        steps = lambda *xs: scan(lambda c, _: (c, self.f(*xs)), 0, None, length=2)[1]
        self._same_steps(self.t(steps)(*self.args), "t(scan)")

    def inside_scan(self) -> None:
        step = lambda c, _: (c, self.t(self.f)(*self.args))
        self._same_steps(scan(step, 0, None, length=2)[1], "scan of t(f)")

    def _same_steps(self, stacked: Any, text: str) -> None:
        for i in range(2):
            self.same(tree.map(lambda x, i=i: x[i], stacked), self.want, f"{text}, step {i},")

    def in_while_loop(self) -> None:
        def loop(*xs):
            step = lambda c: (add(c[0], 1), self.f(*xs))
            return while_loop(lambda c: c[0] < 2, step, (0, self.f(*xs)))[1]

        self.same(self.t(loop)(*self.args), self.want, "t(while_loop)")

    def grad_inside(self) -> None:
        def pulled(*xs):
            out, pullback = vjp(self.f, *xs)
            one = lambda x: (
                full(x.shape, 1, x.dtype) if dtypes.is_inexact(x.dtype) else zeros(x.aval.tangent())
            )
            return [ct for ct in tree.leaves(pullback(tree.map(one, out))) if dtypes.is_inexact(ct.dtype)]

        self.same(jit(self.t(pulled))(*self.args), self.t(pulled)(*self.args), "jit(t(vjp(f)))")

    def gradients(self, atol: float | None, rtol: float | None) -> None:
        """Of a random combination of the results, in both modes."""
        rng = np.random.default_rng(0)
        floats = lambda out: [
            x for x in values_of(tree.leaves(out), "the results") if dtypes.is_inexact(x.dtype)
        ]
        outs = floats(self.want)
        if not outs or not floats(self.args):
            raise errors.UnsupportedError("it does not go from floats to floats")
        weights = [random_like(x, rng) for x in outs]

        def scalar(*args):
            results = floats(self.t(self.f)(*args))
            return sum((x * w).sum() for x, w in zip(results, weights, strict=True))

        scalar.__name__ = self.name
        check_grads(scalar, self.args, 1, atol=atol, rtol=rtol)

    def _batch(self) -> tuple[tuple, Any]:
        """Arguments for three examples at once, and the results for each, stacked."""
        leaves, structure = tree.flatten(self.args)
        columns = [variants(x, SIZE) for x in values_of(leaves, "the arguments")]
        stack = lambda xs: from_numpy(np.stack([np.asarray(x) for x in xs]))
        batch = tree.unflatten(structure, list(map(stack, columns)))
        examples = [tree.unflatten(structure, list(map(from_numpy, xs))) for xs in zip(*columns, strict=True)]
        results = [tree.flatten(self.t(self.f)(*example)) for example in examples]
        want = [stack(xs) for xs in zip(*[r for r, _ in results], strict=True)]
        return batch, tree.unflatten(results[0][1], want)
