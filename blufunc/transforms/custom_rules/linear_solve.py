"""``custom_linear_solve``: the user's solver, with implicit derivatives.

Transforms, stage 2. The system, the solvers and the transposed system are closed jaxprs with constants of their own;
the operands are those constants and the right hand side. The solution is differentiated through what it satisfies,
never through how it was found: from ``A x = b`` follows ``A x' = b' - A' x``, which is the same system again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ops.elementwise import neg
from blufunc.core.primitives.linear_ops import add_tangents, batched_front, instantiate, move_dim
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import Zero, is_linear, zero
from blufunc.core.programs import simplify
from blufunc.core.programs.stage import keeps_arrays, stage
from blufunc.core.pytree import paths as treepath
from blufunc.core.pytree import tree
from blufunc.transforms.arguments import as_values, check_callable, name_of
from blufunc.transforms.autodiff.jvp import jvp_jaxpr
from blufunc.transforms.autodiff.linear_transpose import linear_transpose
from blufunc.transforms.batching.batch import batch_jaxpr
from blufunc.transforms.control_flow import loop_carry

T = TypeVar("T")


def _parts(xs: Iterable, n_consts: tuple[int, ...]) -> list[list]:
    """Split operands into the constants of the four jaxprs and the right-hand side."""
    rest = list(xs)
    parts = []
    for n in n_consts:
        parts.append(rest[:n])
        rest = rest[n:]
    return [*parts, rest]


class _LinearSolve(Primitive):
    """The x of ``matvec(x) = b``, and what else ``solve`` returns.

    Params: matvec and solve, from constants and then a vector; vecmat and transpose_solve, the same of the
    transposed system, or None; n_consts: the numbers of constants of matvec, vecmat, solve and transpose_solve.
    """

    name, kind, multiple_results = "linear_solve", "call", True
    any_memory = True
    autocast_class = "exact"
    shard = unsupported("its operands are any, and go to the user's functions together")

    def call(self, systems: Sequence[tuple[Jaxpr | None, Sequence]], b: Iterable[Any]) -> list[Any]:
        """Bind matvec, vecmat, solve and transpose_solve, each with its constants."""
        jaxprs = dict(
            zip(("matvec", "vecmat", "solve", "transpose_solve"), [j for j, _ in systems], strict=True)
        )
        n_consts = tuple(len(consts) for _, consts in systems)
        return self.bind(*(c for _, consts in systems for c in consts), *b, **jaxprs, n_consts=n_consts)

    def effects_of(self, params):
        return params["solve"].effects

    def abstract(self, *avals, matvec: Jaxpr, vecmat, solve: Jaxpr, transpose_solve, n_consts):
        *consts, b = _parts(avals, n_consts)
        for jaxpr, own in zip((matvec, vecmat, solve, transpose_solve), consts, strict=True):
            if jaxpr is None:
                continue
            for got, want in zip(jaxpr.in_avals, [*own, *b], strict=True):
                if not got.same_type(want):
                    raise errors.ShapeError(
                        f"linear_solve: a jaxpr takes {got} where the operands give {want}."
                    )
            for got, want in zip(jaxpr.out_avals, b, strict=False):
                if not got.same_type(want):
                    raise errors.ShapeError(f"linear_solve: a jaxpr returns {got} for a vector of {want}.")
        return [a.strong() for a in solve.out_avals]

    def reference(self, compile, *, solve: Jaxpr, n_consts, **params):
        body = compile(solve)

        def run(buffers):
            _, _, consts, _, b = _parts(buffers, n_consts)
            return body([*consts, *b])

        return run

    def rewrite(self, bodies, operands, *, solve: Jaxpr, n_consts, **params):
        """Inline the transformed solver: boxes do not depend on the system."""
        _, _, consts, _, b = _parts(operands, n_consts)
        return bodies.inline(solve, [*consts, *b])

    def jvp(self, primals, tangents, *, matvec: Jaxpr, n_consts, **params):
        consts, *_, b = _parts(primals, n_consts)
        const_ts, *_, rhs = _parts(tangents, n_consts)
        n = len(b)
        bind = lambda vector: self.bind(
            *primals[: len(primals) - n], *vector, matvec=matvec, n_consts=n_consts, **params
        )
        outs = bind(b)
        ts = [t for t in const_ts if t.__class__ is not Zero]
        if ts:
            nonzeros = tuple(t.__class__ is not Zero for t in const_ts) + (False,) * n
            derived, moved = jvp_jaxpr(matvec, nonzeros, (False,) * n)
            change = derived.memoised(
                ("tangents", n), lambda: simplify.dce(derived, (False,) * n + (True,) * sum(moved))
            )
            changes = iter(eval_jaxpr(change, [*consts, *outs[:n], *ts]) if any(moved) else ())
            rhs = [add_tangents(t, neg(next(changes))) if m else t for t, m in zip(rhs, moved, strict=True)]
        if all(t.__class__ is Zero for t in rhs):
            return outs, [zero(x.aval) for x in outs]
        out_ts = bind([instantiate(t) for t in rhs])[:n]
        return outs, [*out_ts, *(zero(x.aval) for x in outs[n:])]

    def transpose(self, cts, *args, matvec, vecmat, solve, transpose_solve, n_consts):
        of_matvec, of_vecmat, of_solve, of_transpose_solve, b = _parts(args, n_consts)
        if any(map(is_linear, args[: len(args) - len(b)])):
            raise errors.GradError(
                "custom_linear_solve is linear in its right hand side only.",
                where=source.here(),
                fix="take the derivative: bf.vjp(f, x)[1]",
            )
        if transpose_solve is None:
            raise errors.GradError(
                "reverse mode through custom_linear_solve needs a solver of the transposed system.",
                where=source.here(),
                why="the cotangent of b is the solution of A.T y = ct.",
                fix="lax.custom_linear_solve(matvec, b, solve, transpose_solve=solve_transposed), or symmetric=True "
                "where A.T is A",
            )
        systems = (
            (vecmat, of_vecmat),
            (matvec, of_matvec),
            (transpose_solve, of_transpose_solve),
            (solve, of_solve),
        )
        found = self.call(systems, map(instantiate, cts[: len(b)]))
        for target, ct in zip(b, found, strict=False):
            if is_linear(target):
                target.add(ct)

    def batch(self, axis, args, dims, *, matvec, vecmat, solve, transpose_solve, n_consts):
        *consts, b = _parts(zip(args, dims, strict=True), n_consts)
        # a batch of any part of the system is a batch of solutions, whole: its equations depend on each other
        whole = (True,) * len(b)

        def batched(jaxpr: Jaxpr | None, own: list) -> tuple[Jaxpr | None, list, tuple[bool, ...]]:
            if jaxpr is None:
                return None, [], ()
            flags = tuple(d is not None for _, d in own) + whole
            derived, out_flags = batch_jaxpr(
                jaxpr, axis, flags, whole + (False,) * (len(jaxpr.outvars) - len(b))
            )
            closed, extra = derived.hoist()
            return closed, [*extra, *(a if d is None else move_dim(a, d, 0) for a, d in own)], out_flags

        parts = [batched(j, c) for j, c in zip((matvec, vecmat, solve, transpose_solve), consts, strict=True)]
        outs = self.call([part[:2] for part in parts], [batched_front(axis, a, d) for a, d in b])
        return outs, [0 if b else None for b in parts[2][2]]


linear_solve_p = _LinearSolve()


@overload
def custom_linear_solve(
    matvec: Callable[..., Any],
    b: T,
    solve: Callable[..., Any],
    transpose_solve: Callable[..., Any] | None = None,
    symmetric: bool = False,
    has_aux: Literal[False] = False,
) -> T: ...
@overload
def custom_linear_solve(
    matvec: Callable[..., Any],
    b: T,
    solve: Callable[..., Any],
    transpose_solve: Callable[..., Any] | None = None,
    symmetric: bool = False,
    *,
    has_aux: Literal[True],
) -> tuple[T, Any]: ...


def custom_linear_solve(
    matvec: Callable,
    b: Any,
    solve: Callable,
    transpose_solve: Callable | None = None,
    symmetric: bool = False,
    has_aux: bool = False,
) -> Any:
    """The solution of ``matvec(x) = b`` by ``solve``, with its derivatives.

    Neither solver is differentiated, so that it may be a loop of any kind; ``matvec`` is, with respect to whatever it
    closes over. All functions are traced.

    Args:
      matvec: a linear function from pytrees like ``b`` to pytrees like ``b``.
      b: a pytree of floating or complex arrays.
      solve: ``solve(matvec, b)`` returns x, like ``b``.
      transpose_solve: ``transpose_solve(vecmat, b)`` the same for the transpose of ``matvec``, which it is given.
        Reverse mode needs it, unless ``symmetric``.
      symmetric: whether ``matvec`` is its own transpose; ``solve`` is then the default of ``transpose_solve``.
      has_aux: whether the solvers return ``(x, aux)``: the second is a pytree that has no derivative.
    Returns:
      x, or ``(x, aux)``.
    Raises:
      TreeError, ShapeError: a function returns a structure or types different from those of ``b``.
      GradError: ``transpose_solve`` is given and ``matvec`` is not linear; or reverse mode without it.
    """
    what = "custom_linear_solve"
    for f in (matvec, solve, *(() if transpose_solve is None else (transpose_solve,))):
        check_callable(f, what)
    leaves, b_tree = tree.flatten(b)
    paths = treepath.leaf_paths(b_tree)
    values = as_values(leaves, lambda i: f"b{paths[i]}")
    restage = lambda avals: stage_like(matvec, what, "matvec", b_tree, avals)[0]
    system = restage([v.aval for v in values])
    values, system = loop_carry.settle(values, system, restage)
    avals = [v.aval for v in values]
    check_vector(what, "b", paths, avals)
    check_types(what, f"matvec, {name_of(matvec)},", paths, avals, system.out_avals)
    forward, out_tree = stage_like(lambda x: solve(matvec, x), what, "solve", b_tree, avals, has_aux)
    check_types(what, f"solve, {name_of(solve)},", paths, avals, forward.out_avals)
    transposed = backward = None
    if transpose_solve is None and symmetric:
        transposed, backward = system, forward
    elif transpose_solve is not None:
        if symmetric:
            vecmat, transposed = matvec, system
        else:
            of_b = linear_transpose(matvec, tree.unflatten(b_tree, values))
            vecmat = taking_numbers(lambda x: of_b(x)[0], avals)
            transposed, _ = stage_like(vecmat, what, "the transpose", b_tree, avals)
        solve_transposed = lambda x: transpose_solve(vecmat, x)
        backward, _ = stage_like(solve_transposed, what, "transpose_solve", b_tree, avals, has_aux)
        check_types(what, f"transpose_solve, {name_of(transpose_solve)},", paths, avals, backward.out_avals)
    closed = [(None, ()) if j is None else j.hoist() for j in (system, transposed, forward, backward)]
    outs = linear_solve_p.call(closed, values)
    return tree.unflatten(out_tree, outs)


# -- functions from vectors to vectors of one type, shared with custom_root ------------------------


def stage_like(
    f: Callable,
    what: str,
    role: str,
    in_tree: tree.TreeDef,
    avals: Sequence[ShapedArray],
    has_aux: bool = False,
) -> tuple[Jaxpr, tree.TreeDef]:
    """The jaxpr of a function of one pytree, and the structure of its result.

    That is ``in_tree``, or with ``has_aux`` a pair of it and any.

    Raises:
      TreeError: the result has a different structure.
    """
    out_tree: Any = None

    def flat(*leaves):
        nonlocal out_tree
        out = f(tree.unflatten(in_tree, leaves))
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise errors.TreeError(
                f"{what}: with has_aux, {role} returns (x, aux); it returned a {type(out).__name__}.",
                where=source.here(),
                fix="return x, aux   (or leave has_aux out)",
            )
        found = tree.structure(out[0] if has_aux else out)
        if found != in_tree:
            raise errors.TreeError(
                f"{what}: {role} returns a different structure from it is given.",
                where=source.here(),
                why="; ".join(treepath.diff(in_tree, found, "given", "returned")[:4]),
            )
        out_leaves, out_tree = tree.flatten(out)
        return as_values(out_leaves, lambda i: f"the result{treepath.leaf_paths(out_tree)[i]} of {role}")

    return stage(flat, avals, role, keeps_arrays=keeps_arrays()), out_tree


def taking_numbers(f: Callable, avals: Sequence[ShapedArray]) -> Callable:
    """Let a function of a pytree take Python numbers: ``y / f(1.0)``."""

    def taking(x):
        leaves, structure = tree.flatten(x)
        values = as_values(leaves, lambda i: f"the argument{treepath.leaf_paths(structure)[i]}")
        if len(values) == len(avals):
            values = [loop_carry.promoted(v, a) for v, a in zip(values, avals, strict=True)]
        return f(tree.unflatten(structure, values))

    return taking


def check_vector(what: str, name: str, paths: Sequence[str], avals: Sequence[ShapedArray]) -> None:
    """Raise DtypeError unless all types are floating or complex."""
    for path, a in zip(paths, avals, strict=True):
        if not dtypes.is_inexact(a.dtype):
            raise errors.DtypeError(
                f"{what}: {name}{path} is {a}; it must be floating or complex.",
                where=source.here(),
                fix=f"{name}.astype('float32')",
            )


def check_types(
    what: str, role: str, paths: Sequence[str], given: Sequence[ShapedArray], found: Sequence[ShapedArray]
) -> None:
    """Raise ShapeError unless a function returns the types that it takes."""
    for path, a, b in zip(paths, given, found, strict=False):
        if not a.same_type(b):
            raise errors.ShapeError(
                f"{what}: {role} is given x{path} as {a} and returns it as {b}.",
                where=source.here(),
                fix="return what it is given, of the same shape and dtype",
            )
