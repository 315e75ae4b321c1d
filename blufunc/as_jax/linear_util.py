"""Functions under transformations: ``jax.extend.linear_util``, ``api_util``.

Under the face ``as_jax``. A transformation is a generator function: it receives the arguments, yields those of the
function below it, receives the results, and yields its own. Libraries use them to flatten functions of pytrees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.pytree import tree

__all__ = [
    "Store",
    "StoreException",
    "WrappedFun",
    "argnums_partial",
    "cache",
    "debug_info",
    "flatten_fun",
    "flatten_fun_nokwargs",
    "merge_linear_aux",
    "safe_map",
    "safe_zip",
    "transformation",
    "transformation2",
    "transformation_with_aux",
    "transformation_with_aux2",
    "wrap_init",
]


class StoreException(Exception):
    """An auxiliary value is read before its function ran, or set twice."""


class Store:
    """The auxiliary value of a transformation, read by calling it."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self) -> Any:
        if not self.values:
            raise StoreException("the auxiliary value is known after the function has run")
        return self.values[-1]

    def store(self, value: Any) -> None:
        """Set the value."""
        self.values.append(value)


class WrappedFun:
    """A function under a list of transformations, the innermost first."""

    def __init__(self, f: Callable, transforms: tuple = (), params: dict | None = None, debug: Any = None):
        self.f, self.transforms, self.params, self.debug_info = f, transforms, params or {}, debug

    @property
    def __name__(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)

    def wrap(self, generator: Callable, args: tuple, store: Store | None = None) -> WrappedFun:
        """The function under one more transformation."""
        return WrappedFun(self.f, (*self.transforms, (generator, args, store)), self.params, self.debug_info)

    def call_wrapped(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through its transformations."""
        running: list[tuple[Any, Store | None]] = []
        kwargs = {**self.params, **kwargs}
        try:
            for generator, given, store in reversed(self.transforms):
                step = generator(*given, *args, **kwargs)
                running.append((step, store))
                args, kwargs = next(step)
            out = self.f(*args, **kwargs)
            while running:
                step, store = running[-1]
                out = step.send(out)
                if store is not None:
                    out, value = out
                    store.values.append(value)
                running.pop()[0].close()
        finally:  # after an error: generators yield inside of blocks that set the trace, and these must end now
            while running:
                running.pop()[0].close()
        return out

    __call__ = call_wrapped


def wrap_init(f: Callable, params: dict | None = None, *, debug_info: Any = None) -> WrappedFun:
    """A function without transformations yet."""
    return WrappedFun(f, (), params, debug_info)


def transformation(generator: Callable) -> Callable[..., WrappedFun]:
    """Decorator: a generator function as a transformation of wrapped functions."""
    return lambda fun, *args: fun.wrap(generator, args)


def transformation_with_aux(generator: Callable) -> Callable[..., tuple[WrappedFun, Store]]:
    """As ``transformation``, of a generator that yields an auxiliary value, too."""

    def apply(fun: WrappedFun, *args: Any) -> tuple[WrappedFun, Store]:
        store = Store()
        return fun.wrap(generator, args, store), store

    return apply


def transformation2(function: Callable, fun: WrappedFun, *args: Any) -> WrappedFun:
    """A wrapped function under ``function(call, *args, *arguments)``."""

    def outer(*given: Any, **kwargs: Any) -> Any:
        return function(fun.call_wrapped, *args, *given, **kwargs)

    outer.__name__ = fun.__name__
    return WrappedFun(outer, (), {}, fun.debug_info)


def transformation_with_aux2(
    function: Callable, fun: WrappedFun, *args: Any, **options: Any
) -> tuple[WrappedFun, Store]:
    """As ``transformation2``, of a function that gets a store second."""
    store = Store()
    return transformation2(
        lambda call, *rest, **kwargs: function(call, store, *rest, **kwargs), fun, *args
    ), store


def merge_linear_aux(aux1: Store, aux2: Store) -> tuple[bool, Any]:
    """The auxiliary value of that of two transformations which ran.

    Raises:
      StoreException: neither or both ran.
    """
    ran = bool(aux1.values), bool(aux2.values)
    if ran[0] == ran[1]:
        raise StoreException("both functions ran" if ran[0] else "neither function has run")
    return (True, aux1()) if ran[0] else (False, aux2())


def cache(call: Callable, *, explain: Any = None) -> Callable:
    """Memoize a function of a wrapped function and hashable arguments."""
    memo: dict[tuple, Any] = {}

    @functools.wraps(call)
    def cached(fun: WrappedFun, *args: Any) -> Any:
        key = (fun.f, fun.transforms, tuple(fun.params.items()), args)
        if key not in memo:
            memo[key] = call(fun, *args)
        return memo[key]

    cached.cache_clear = memo.clear  # type: ignore[attr-defined]
    return cached


@transformation_with_aux
def flatten_fun(in_tree, *leaves):
    """A function of pytrees as one of leaves, and the tree of its results."""
    args, kwargs = tree.unflatten(in_tree, leaves)
    out = yield args, kwargs
    yield tree.flatten(out)


@transformation_with_aux
def flatten_fun_nokwargs(in_tree, *leaves):
    """As ``flatten_fun``, without keyword arguments."""
    out = yield tree.unflatten(in_tree, leaves), {}
    yield tree.flatten(out)


@transformation
def _partial(positions, fixed, *dynamic):
    rest = iter(dynamic)
    out = yield [fixed[i] if i in fixed else next(rest) for i in range(len(fixed) + len(positions))], {}
    yield out


def argnums_partial(fun: WrappedFun, dyn_argnums: Any, args: Sequence[Any], **options: Any) -> tuple:
    """A function of the arguments ``dyn_argnums`` alone, and these."""
    dyn = (dyn_argnums,) if isinstance(dyn_argnums, int) else tuple(dyn_argnums)
    dyn = tuple(i % len(args) for i in dyn)
    fixed = {i: a for i, a in enumerate(args) if i not in dyn}
    return _partial(fun, dyn, fixed), tuple(args[i] for i in dyn)


def debug_info(*args: Any, **options: Any) -> None:
    """Names of arguments for messages: blufunc finds them itself."""


def safe_map(f: Callable, *xs: Sequence[Any]) -> list[Any]:
    """``map`` over sequences of one length, as a list."""
    return [f(*args) for args in zip(*xs, strict=True)]


def safe_zip(*xs: Sequence[Any]) -> list[tuple]:
    """``zip`` of sequences of one length, as a list."""
    return list(zip(*xs, strict=True))
