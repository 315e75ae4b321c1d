"""``platform_dependent``: functions by platform, chosen at compilation.

Transforms, stage 2. In: functions of one type. Out: an equation with the body for the CPU and that for CUDA devices,
which go through all transforms as the variants of ``platform_variants.py`` do; the device takes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Jaxpr
from blufunc.core.primitives.primitive import Primitive, unsupported
from blufunc.core.primitives.tangents import zero
from blufunc.core.programs.stage import keeps_arrays, stage
from blufunc.core.pytree import paths, tree
from blufunc.transforms.arguments import FlatFunction, as_values, check_callable, labels_of, name_of
from blufunc.transforms.control_flow.platform_variants import Either

_HERE = ("cpu", "cuda")
_ELSEWHERE = ("tpu", "rocm", "mps", "METAL")
"""Platforms of JAX for which functions are accepted, and never run."""


class _PlatformDependent(Either):
    """Params as of ``either``: the plain body is for the CPU, the other for CUDA."""

    name = "platform_dependent"
    by_platform = True


platform_dependent_p = _PlatformDependent()


class _NoFunction(Primitive):
    """Stands for the function of a platform that has none: an error if it runs."""

    name, kind, multiple_results, opaque = "no_function_for_platform", "call", True, True
    transpose = unsupported("it has no tangent")
    shard = unsupported("it only raises an error")

    def abstract(self, *avals, outs: tuple[ShapedArray, ...], platform: str, others: tuple[str, ...]):
        return list(outs)

    def impl(self, *args, outs, platform, others):
        raise errors.UnsupportedError(
            f"platform_dependent has functions for {', '.join(others)}, and runs on {platform}.",
            fix=f"{platform}=f, or default=f, which serves all other platforms",
        )

    def jvp(self, primals, tangents, **params):
        results = self.bind(*primals, **params)
        return results, [zero(x.aval) for x in results]

    def batch(self, axis, args, dims, *, outs, platform, others):
        whole = tuple([ShapedArray((axis.size, *a.shape), a.dtype) for a in outs])
        return self.bind(*args, outs=whole, platform=platform, others=others), [0] * len(outs)


no_function_p = _NoFunction()


def platform_dependent(*args: Any, default: Callable | None = None, **per_platform: Callable) -> Any:
    """Apply the function for the platform that the program runs on.

        lax.platform_dependent(x, cpu=f, cuda=g)
        lax.platform_dependent(x, cuda=g, default=f)

    A program, and its derivatives and batches, have the functions for all platforms until they are compiled.

    Args:
      args: pytrees of arrays, the arguments of the function.
      default: the function for platforms without one.
      per_platform: functions for ``cpu`` and ``cuda`` (or ``gpu``), with the same types of results. Those for platforms
        that are not served here, such as ``tpu``, are never traced.
    Raises:
      ArgumentError: there is no function for ``cpu`` and ``cuda``, or a platform is unknown.
      BranchError: the functions return different structures or types.
      UnsupportedError: when it runs on a platform without a function.
    """
    chosen = {"cuda" if name == "gpu" else name: fun for name, fun in per_platform.items()}
    unknown = [name for name in chosen if name not in _HERE + _ELSEWHERE]
    available = {name: chosen.get(name, default) for name in _HERE}
    given = tuple(name for name, fun in available.items() if fun is not None)
    if unknown or not given:
        raise errors.ArgumentError(
            f"platform_dependent has no platform {unknown[0]!r}."
            if unknown
            else "platform_dependent has no function for cpu or cuda.",
            where=source.here(),
            fix="platform_dependent(x, cpu=f, cuda=g), or default=f",
        )
    leaves, in_tree = tree.flatten((args, {}))
    first = available[given[0]]
    assert first is not None
    check_callable(first, "platform_dependent")
    values = as_values(leaves, lambda i: f"the argument {labels_of(first, in_tree)[i]}")
    avals = [x.aval for x in values]
    staged: dict[str, Jaxpr] = {}
    out_tree: Any = None
    for name in given:
        fun = available[name]
        check_callable(fun, "platform_dependent")
        flat = FlatFunction(fun, in_tree)  # type: ignore[arg-type]
        staged[name] = stage(flat, avals, name_of(fun), line=source.replay.line, keeps_arrays=keeps_arrays())
        if out_tree is None:
            out_tree = flat.out_tree
        _check(out_tree, flat.out_tree, staged[given[0]], staged[name], given[0], name)
    outs = tuple([a.strong() for a in staged[given[0]].out_avals])
    for name in set(_HERE) - set(given):
        params = {"outs": outs, "platform": name, "others": given}
        staged[name] = stage(lambda *xs, p=params: no_function_p.bind(*xs, **p), avals, name)
    results = platform_dependent_p.both(
        [staged[name] for name in _HERE], values, (len(outs), 0, 0), (False,) * len(values)
    )
    return tree.unflatten(out_tree, results)


def _check(expected: Any, got: Any, first: Jaxpr, other: Jaxpr, platform: str, name: str) -> None:
    why = paths.diff(expected, got, platform, name)[:5] if expected != got else []
    if not why:
        pairs = zip(first.out_avals, other.out_avals, strict=True)
        why = [f"{a} for {platform}, {b} for {name}" for a, b in pairs if not a.same_type(b)]
    if why:
        raise errors.BranchError(
            f"platform_dependent: the functions for {platform} and {name} return different results.",
            where=source.here(),
            why="; ".join(why),
            fix="return the same structure, shapes and dtypes on all platforms",
        )
