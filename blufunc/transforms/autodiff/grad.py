"""Differentiation for users: ``grad``, ``vjp``, ``jvp``, ``linearize``, ...

Transforms, stage 2. In: functions of pytrees. Out: their derivatives. Thin wrappers of ``jvp_flat`` (forward mode), and
of ``linearize_flat`` with ``backward_pass`` (reverse mode), which flatten pytrees and check their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import lift, scalar
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.jaxpr import Jaxpr, eval_jaxpr
from blufunc.core.ir.trace import Array, state
from blufunc.core.ops.elementwise import weak_as
from blufunc.core.primitives.linear_ops import instantiate, zeros
from blufunc.core.primitives.tangents import Zero, zero
from blufunc.core.pytree import nodes, paths, tree
from blufunc.transforms.arguments import (
    Auxiliary,
    FlatFunction,
    LazyLabels,
    argument_indices,
    as_values,
    check_callable,
    check_structure,
    labels_of,
    name_of,
)
from blufunc.transforms.autodiff.jvp import jvp_flat
from blufunc.transforms.autodiff.linearize import differentiable, in_shard_map, linearize_flat
from blufunc.transforms.autodiff.transpose import backward_pass

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.signatures import OfArray

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A", bound="ArrayLike")
Aux = TypeVar("Aux")


@overload
def grad(
    fun: Callable[Concatenate[A, P], tuple[ArrayLike, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> OfArray[A, P, tuple[Array, Aux]]: ...
@overload
def grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[A, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> OfArray[A, P, Array]: ...
@overload
def grad(
    fun: Callable[Concatenate[T, P], tuple[ArrayLike, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[Concatenate[T, P], tuple[T, Aux]]: ...
@overload
def grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[T, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[Concatenate[T, P], T]: ...
@overload
def grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    argnums: int,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Any, Aux]]: ...
@overload
def grad(
    fun: Callable[P, ArrayLike],
    argnums: int,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    argnums: Sequence[int],
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[tuple[Any, ...], Aux]]: ...
@overload
def grad(
    fun: Callable[P, ArrayLike],
    argnums: Sequence[int],
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Any, ...]]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...
@overload
def grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...


def grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Gradient of a scalar function, by reverse mode.

    Args:
      fun: returns a floating scalar; with ``has_aux`` a pair of it and any pytree.
      argnums: the positional arguments to differentiate with respect to; default 0.
      has_aux: True if ``fun`` also returns auxiliary data.
      holomorphic: True if ``fun`` is holomorphic, from complex to complex.
      allow_int: allow integer arguments; their gradients have dtype float0.
    Returns:
      a function of the same arguments that returns the gradient, of the structure, shapes and dtypes of the
      argument (a tuple for several ``argnums``); with ``has_aux``, the pair of it and the auxiliary data.
    Raises (when called):
      GradError: the output is not a floating scalar, or an argument is not floating.
    """
    with_value = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def grad_fun(*args, **kwargs):
        value, g = with_value(*args, **kwargs)
        return (g, value[1]) if has_aux else g

    return grad_fun


@overload
def value_and_grad(
    fun: Callable[Concatenate[A, P], tuple[ArrayLike, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> OfArray[A, P, tuple[tuple[Array, Aux], Array]]: ...
@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[A, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> OfArray[A, P, tuple[Array, Array]]: ...
@overload
def value_and_grad(
    fun: Callable[Concatenate[T, P], tuple[ArrayLike, Aux]],
    argnums: Literal[0] = 0,
    *,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[Concatenate[T, P], tuple[tuple[Array, Aux], T]]: ...
@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[T, P], ArrayLike],
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[Concatenate[T, P], tuple[Array, T]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    argnums: int,
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[tuple[Array, Aux], Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, ArrayLike],
    argnums: int,
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Array, Any]]: ...
@overload
def value_and_grad(
    fun: Callable[P, tuple[ArrayLike, Aux]],
    argnums: Sequence[int],
    has_aux: Literal[True],
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[tuple[Array, Aux], tuple[Any, ...]]]: ...
@overload
def value_and_grad(
    fun: Callable[P, ArrayLike],
    argnums: Sequence[int],
    has_aux: Literal[False] = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Array, tuple[Any, ...]]]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...
@overload
def value_and_grad(
    fun: Callable[P, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]: ...


def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Value and gradient of a scalar function; arguments as for ``grad``.

    With ``has_aux`` the value is itself the pair that ``fun`` returned.
    """

    check_callable(fun, "grad")
    check_argnums(argnums)

    @functools.wraps(fun)
    def value_and_grad_fun(*args, **kwargs):
        chosen = Chosen(fun, args, kwargs, argnums)
        primals, labels = chosen.values, chosen.labels
        check_inputs("grad", chosen, holomorphic, allow_int)
        aux = Auxiliary(())

        def flat_fun(*xs):
            nonlocal aux
            out = chosen.call(xs)
            if has_aux:
                out, found = split_aux(fun, out, "(scalar, auxiliary)")
                aux = Auxiliary(found)
            return [_scalar_output(fun, out, holomorphic), *aux.values]

        nonzeros = [dtypes.is_inexact(p.aval.dtype) for p in primals]
        outs, out_nonzeros, linear = linearize_flat(
            differentiable(flat_fun, primals), primals, nonzeros, labels=LazyLabels(labels, len(primals))
        )
        cts: list[Any] = [None] * sum(out_nonzeros)
        if out_nonzeros[0]:
            cts[0] = scalar(1, outs[0].aval.dtype, outs[0].aval.weak_type)
        found = iter(backward_pass(linear, [None] * len(linear.invars), cts))
        grads = [
            _gradient(next(found), p) if nz else zeros(p.aval.tangent())
            for p, nz in zip(primals, nonzeros, strict=True)
        ]
        g = chosen.rebuild(grads)
        value = (outs[0], aux.rebuild(outs[1:])) if has_aux else outs[0]
        return value, g

    return value_and_grad_fun


def _gradient(ct: Any, primal: Any) -> Any:
    """A cotangent as a gradient, also where a constant is one in ``shard_map``."""
    ct = weak_as(zeros(primal.aval) if ct.__class__ is Zero else ct, primal.aval)
    return state.trace.typed_cotangent(ct, primal) if in_shard_map() else ct


def check_argnums(argnums: Any) -> None:
    """Raise ArgumentError unless ``argnums`` is an int or a sequence of them."""
    nums = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for i in nums:
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            raise errors.ArgumentError(
                f"argnums is an int or a tuple of ints, not {argnums!r:.60}.",
                where=source.here(),
                fix="argnums=0, or argnums=(0, 1)",
            )


class Chosen:
    """The differentiated arguments of a call, flat, and the function of these.

    Attributes:
      values: the leaves of the arguments in ``argnums``.
      in_tree: the structure of these arguments, a tuple.
    """

    def __init__(self, fun: Callable, args: tuple, kwargs: dict, argnums: int | Sequence[int]):
        self.fun, self.args, self.kwargs = fun, args, kwargs
        self.single = not isinstance(argnums, (tuple, list))
        self.nums = argument_indices(int(argnums) if self.single else argnums, len(args), "argnums")  # type: ignore[arg-type]
        leaves, self.in_tree = tree.flatten(tuple(args[i] for i in self.nums))
        self._names: list[str] | None = None
        self.values = as_values(leaves, lambda i: f"the argument {self.labels()[i]}")

    def call(self, xs: Sequence) -> Any:
        """Call the function with ``xs`` for the leaves of the chosen arguments."""
        inner = list(self.args)
        for i, x in zip(self.nums, tree.unflatten(self.in_tree, xs), strict=True):
            inner[i] = x
        return self.fun(*inner, **self.kwargs)

    def rebuild(self, leaves: Sequence) -> Any:
        """Unflatten leaves to the one chosen argument, or to the tuple of several."""
        whole = tree.unflatten(self.in_tree, leaves)
        return whole[0] if self.single else whole

    def labels(self) -> list[str]:
        """Labels of the leaves, computed on first use."""
        if self._names is None:
            self._names = self._work_out_names()
        return self._names

    def _work_out_names(self) -> list[str]:
        args, nums = self.args, self.nums
        mapped = {i: tree.structure(args[i]) for i in nums}
        full = tuple(
            tree.unflatten(mapped[i], [0] * mapped[i].num_leaves) if i in mapped else None
            for i in range(len(args))
        )
        names = labels_of(self.fun, tree.structure((full, {})))
        order = sorted(range(len(nums)), key=lambda k: nums[k])
        groups: dict[int, list[str]] = {}
        rest = iter(names)
        for k in order:
            groups[k] = [next(rest) for _ in range(mapped[nums[k]].num_leaves)]
        return [name for k in range(len(nums)) for name in groups[k]]


def check_inputs(
    transform: str, chosen: Chosen, holomorphic: bool, allow_int: bool = False, real: bool = False
) -> None:
    """Raise GradError unless a transform supports every chosen argument.

    Args:
      real: whether complex arguments require ``holomorphic``.
    """
    accepts = dtypes.is_complex if holomorphic else dtypes.is_floating if real else dtypes.is_inexact
    kind = "complex" if holomorphic else "real floating" if real else "floating or complex"
    for i, p in enumerate(chosen.values):
        dtype = p.aval.dtype
        if accepts(dtype) or (allow_int and not dtypes.is_inexact(dtype)):
            continue
        label, why = chosen.labels()[i], "functions of integers are not differentiable."
        option = "leave out holomorphic=True" if holomorphic else "" if real else "pass allow_int=True"
        if holomorphic:
            why = "holomorphic functions go from complex to complex numbers."
        elif dtypes.is_complex(dtype):
            why, option = "directions are real.", "pass holomorphic=True for a holomorphic function"
        raise errors.GradError(
            f"{transform} of {name_of(chosen.fun)} with respect to {label}, which is {p.aval}: {kind} arguments only.",
            where=source.here(),
            why=why,
            fix=f"convert {label} to a {'complex' if holomorphic else 'floating'} dtype"
            + (f", choose other argnums, or {option}" if option else ", or choose other argnums"),
        )


def split_aux(fun: Callable, out: Any, form: str = "(result, auxiliary)") -> tuple:
    """Unpack the pair that a function with ``has_aux`` returned."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise errors.GradError(
            f"has_aux=True, but {name_of(fun)} returned a {type(out).__name__}.",
            where=source.here(),
            fix=f"return {form}",
        )
    return out


def _scalar_output(fun, out: Any, holomorphic: bool) -> Any:
    leaves, structure = tree.flatten(out)
    if structure.num_leaves != 1 or len(leaves) != 1 or structure != tree.structure(0):
        raise errors.GradError(
            f"grad needs a function that returns one scalar, {name_of(fun)} returned {structure}.",
            where=source.here(),
            fix="return only the scalar; return other results with has_aux=True",
        )
    (value,) = as_values(leaves, lambda i: f"the result of {name_of(fun)}")
    if value.aval.shape:
        raise errors.GradError(
            f"grad needs a function that returns a scalar, {name_of(fun)} returned {value.aval}.",
            where=source.here(),
            fix="reduce the result (.sum(), .mean()), or use vjp or jacrev for functions with array results",
        )
    is_allowed = dtypes.is_complex if holomorphic else dtypes.is_floating
    if not is_allowed(value.aval.dtype):
        raise errors.GradError(
            f"grad needs a {'complex' if holomorphic else 'real floating'} result, "
            f"{name_of(fun)} returned {value.aval}.",
            where=source.here(),
            fix="convert the result, or take its real part",
        )
    return value


@overload
def jvp(
    fun: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[False] = False,
) -> tuple[R, R]: ...
@overload
def jvp(
    fun: Callable[..., tuple[R, Aux]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[True],
) -> tuple[R, R, Aux]: ...


def jvp(fun: Callable[..., Any], primals: Sequence, tangents: Sequence, has_aux: bool = False) -> Any:
    """Value of ``fun`` and its directional derivative, by forward mode.

    Args:
      fun: any function of pytrees.
      primals: the arguments, a tuple or list.
      tangents: a tangent per argument, of the same structure, shapes and dtypes (float0 for integers).
      has_aux: True if ``fun`` returns a pair of its result and auxiliary data.
    Returns:
      ``(out, out_tangent)``, and the auxiliary data third with ``has_aux``.
    Raises:
      TreeError, GradError: primals and tangents do not match.
    """
    check_callable(fun, "jvp")
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise errors.ArgumentError(
            "jvp takes its primals and its tangents as tuples of arguments.",
            where=source.here(),
            fix="jvp(f, (x,), (t,))",
        )
    leaves, in_tree = tree.flatten((tuple(primals), {}))
    t_leaves, t_tree = tree.flatten((tuple(tangents), {}))
    check_structure(in_tree, t_tree, "jvp", ("primals", "tangents"))
    ps = as_values(leaves, lambda i: f"primal {labels_of(fun, in_tree)[i]}")
    ts = [
        _tangent(p, t, functools.partial(_label, fun, in_tree, i))
        for i, (p, t) in enumerate(zip(ps, t_leaves, strict=True))
    ]
    flat, finish = _with_aux(FlatFunction(fun, in_tree), has_aux)
    labels = LazyLabels(lambda: labels_of(fun, in_tree), len(ps))
    outs, out_ts = jvp_flat(flat, ps, ts, labels)
    return finish(
        outs, [weak_as(instantiate(t), x.aval.tangent()) for x, t in zip(outs, out_ts, strict=True)]
    )


def _label(fun: Callable, in_tree: tree.TreeDef, i: int) -> str:
    return labels_of(fun, in_tree)[i]


def _tangent(p: Array, t: Any, label: Callable[[], str]) -> Any:
    """Check a user's tangent against its primal."""
    if getattr(t, "dtype", None) == dtypes.float0:
        return zero(p.aval)
    (t,) = as_values([t], lambda _: f"the tangent of {label()}")
    expected = p.aval.tangent()
    if expected.dtype == dtypes.float0:
        raise errors.GradError(
            f"the tangent of {label()} ({p.aval}) must have dtype float0, not {t.aval}.",
            where=source.here(),
            why="integers and booleans have no derivative.",
            fix=f"np.zeros({p.aval.shape}, bf.dtypes.float0), or None",
        )
    if not expected.same_type(t.aval):
        raise errors.GradError(
            f"the tangent of {label()} must be {expected} like its primal, not {t.aval}.",
            where=source.here(),
            fix="use the primal's shape and dtype",
        )
    return t


def _with_aux(flat: FlatFunction, has_aux: bool) -> tuple[Callable, Callable]:
    """A flat function, and one that assembles results, with aux last."""
    if not has_aux:
        return flat, lambda outs, *rest: (
            tree.unflatten(flat.out_tree, outs),
            *(tree.unflatten(flat.out_tree, r) for r in rest),
        )
    split: dict[str, Any] = {}

    def run(*xs):
        args, kwargs = tree.unflatten(flat.in_tree, xs)
        pair = split_aux(flat.fun, flat.fun(*args, **kwargs))
        split["aux"] = Auxiliary(pair[1])
        out = flat.flatten_out(pair[0])
        split["n"] = len(out)
        return [*out, *split["aux"].values]

    def finish(outs, *rest):
        n = split["n"]
        return (
            tree.unflatten(flat.out_tree, outs[:n]),
            *(tree.unflatten(flat.out_tree, r[:n]) for r in rest),
            split["aux"].rebuild(outs[n:]),
        )

    return run, finish


class LinearFunction:
    """A linear map: the derivative at a point, or its transpose.

    A pytree of its residuals, so that it passes through ``jit`` and ``vmap``.
    """

    def __init__(self, residuals: list, jaxpr: Jaxpr, static: tuple):
        self.residuals = residuals
        self.jaxpr = jaxpr
        self.static = static


class Linearized(LinearFunction):
    """Maps tangents of the arguments to tangents of the results, at a point."""

    def __call__(self, *tangents: Any) -> Any:
        in_tree, in_avals, out_tree, out_avals, out_nonzeros = self.static
        leaves, t_tree = tree.flatten((tangents, {}))
        check_structure(in_tree, t_tree, "linearize", ("the primals", "the tangents"))
        ts = []
        for i, (aval, t) in enumerate(zip(in_avals, leaves, strict=True)):
            t = lift(t, f"tangent {i}")
            if not aval.same_type(t.aval):
                raise errors.GradError(f"tangent {i} must be {aval}, not {t.aval}.", where=source.here())
            ts.append(t)
        ts = [t for t, aval in zip(ts, in_avals, strict=True) if aval.dtype != dtypes.float0]
        outs = iter(eval_jaxpr(self.jaxpr, [*self.residuals, *ts]))
        full = [
            weak_as(next(outs) if nz else zeros(a.tangent()), a.tangent())
            for a, nz in zip(out_avals, out_nonzeros, strict=True)
        ]
        return tree.unflatten(out_tree, full)


class Pullback(LinearFunction):
    """Maps cotangents of results to cotangents of arguments: the result of ``vjp``."""

    def __call__(self, ct: Any) -> tuple[Any, ...]:
        in_tree, in_avals, out_tree, out_avals, out_nonzeros = self.static
        leaves, ct_tree = tree.flatten(ct)
        check_structure(out_tree, ct_tree, "vjp", ("the result", "the cotangent"))
        cts = []
        for path, aval, nz, x in zip(
            paths.leaf_paths(out_tree), out_avals, out_nonzeros, leaves, strict=True
        ):
            expected = aval.tangent()
            if expected.dtype == dtypes.float0 or getattr(x, "dtype", None) == dtypes.float0:
                continue
            x = lift(x, f"the cotangent{path}")
            if not expected.same_type(x.aval):
                raise errors.GradError(
                    f"the cotangent{path} must be {expected} like the result, not {x.aval}.",
                    where=source.here(),
                    fix="use the result's shape and dtype",
                )
            if nz:
                cts.append(x)
        n = len(self.residuals)
        found = iter(
            backward_pass(self.jaxpr, [*self.residuals, *[None] * (len(self.jaxpr.invars) - n)], cts)
        )
        grads = [
            zeros(a) if a.dtype == dtypes.float0 else weak_as(instantiate(next(found)), a) for a in in_avals
        ]
        return tuple(tree.unflatten(in_tree, grads)[0])


def _rebuild_linear(cls: type, aux: tuple, children: Sequence) -> LinearFunction:
    return cls(list(children), *aux)


for _cls in (Linearized, Pullback):
    nodes.register_node(
        _cls,
        lambda f: (f.residuals, (f.jaxpr, f.static)),
        functools.partial(_rebuild_linear, _cls),
    )


def _linear_at(cls: type, fun: Callable, primals: tuple, has_aux: bool) -> tuple:
    """Linearize at a point: results, a tuple of auxiliary data, and the linear map."""
    check_callable(fun, "vjp" if cls is Pullback else "linearize")
    leaves, in_tree = tree.flatten((primals, {}))
    ps = as_values(leaves, lambda i: f"primal {labels_of(fun, in_tree)[i]}")
    nonzeros = [dtypes.is_inexact(p.aval.dtype) for p in ps]
    flat = FlatFunction(fun, in_tree)
    run, finish = _with_aux(flat, has_aux)
    labels = LazyLabels(functools.cache(lambda: labels_of(fun, in_tree)), len(ps))
    outs, out_nonzeros, linear = linearize_flat(differentiable(run, ps), ps, nonzeros, labels=labels)
    out, *aux = finish(outs)
    n = flat.out_tree.num_leaves
    n_outs = sum(out_nonzeros[:n])
    linear = linear.replace(outvars=linear.outvars[:n_outs])
    closed, residuals = linear.hoist()
    static = (
        in_tree,
        tuple(p.aval.tangent() for p in ps),
        flat.out_tree,
        tuple(x.aval for x in outs[:n]),
        tuple(out_nonzeros[:n]),
    )
    return out, tuple(aux), cls(list(residuals), closed, static)


@overload
def vjp(fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False) -> tuple[R, Pullback]: ...
@overload
def vjp(
    fun: Callable[..., tuple[R, Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[R, Pullback, Aux]: ...


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Value of ``fun`` and its pullback, by reverse mode.

    Args:
      fun: any function of pytrees.
      primals: its arguments.
      has_aux: True if ``fun`` returns a pair of its result and auxiliary data.
    Returns:
        ``(out, pullback)``, and the auxiliary data third with ``has_aux``. ``pullback(cotangent)`` takes a pytree like
        ``out`` and returns a tuple with a cotangent per primal; it may be called repeatedly.
    """
    out, aux, pullback = _linear_at(Pullback, fun, primals, has_aux)
    return (out, pullback, *aux)


@overload
def linearize(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[R, Callable[..., R]]: ...
@overload
def linearize(
    fun: Callable[..., tuple[R, Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[R, Callable[..., R], Aux]: ...


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Value of ``fun`` and its derivative at a point, as a linear function.

    Returns:
        ``(out, derivative)``, and the auxiliary data third with ``has_aux``. ``derivative(*tangents)`` does not
        evaluate ``fun`` again.
    """
    out, aux, derivative = _linear_at(Linearized, fun, primals, has_aux)
    return (out, derivative, *aux)
