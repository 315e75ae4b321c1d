"""Arguments of transformed functions: pytrees to flat leaves and back.

Transforms, at their entry. In: a user's arguments. Out: flat lists, on which every transform works.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc import errors
from blufunc.core.arrays.array import PROTOCOLS, ConcreteArray, lift
from blufunc.core.arrays.memories import Space, kind_of
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import DEVICE, ShapedArray
from blufunc.core.ir.axes import shape_of
from blufunc.core.ir.trace import Array
from blufunc.core.pytree import nodes, paths, tree


class ShapeDtypeStruct:
    """Shape and dtype of an array without values, as for ``eval_shape``.

    Attributes:
      shape, dtype: of the array.
      sharding: the ``NamedSharding`` of the array on a mesh, for ``plan`` and ``collectives``; or None.
      weak_type: whether the dtype yields in promotion.
      memory: the kind of memory, ``"device"`` or ``"pinned_host"``; default that of ``sharding``, if there is one.
    Raises:
      ValueRangeError: there is no such memory, or ``sharding`` has another.
    """

    __slots__ = ("dtype", "memory", "shape", "sharding", "weak_type")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        sharding: Any = None,
        weak_type: bool = False,
        memory: str | Space | None = None,
    ):
        self.weak_type = weak_type
        self.shape = tuple(shape)
        self.dtype = dtypes.as_dtype(dtype)
        self.sharding = sharding
        there = getattr(sharding, "memory_kind", None)
        self.memory: str = there or DEVICE
        if memory is None:
            return
        self.memory = kind_of(memory.value if isinstance(memory, Space) else memory, "ShapeDtypeStruct")
        if there not in (None, self.memory):
            raise errors.ValueRangeError(
                f"ShapeDtypeStruct: memory={self.memory!r}, and its sharding is in {there!r}.",
                where=source.here(),
                fix=f"leave memory out, or sharding.with_memory_kind({self.memory!r})",
            )

    def __repr__(self) -> str:
        more = ", weak_type=True" if self.weak_type else ""
        more += "" if self.sharding is None else f", sharding={self.sharding}"
        more += "" if self.memory == DEVICE or self.sharding is not None else f", memory={self.memory!r}"
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={dtypes.short_name(self.dtype)}{more})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeDtypeStruct) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple:
        return self.shape, self.dtype, self.sharding, self.weak_type, self.memory

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))


def struct_of(aval: ShapedArray) -> ShapeDtypeStruct:
    """The shape, dtype, weak type and memory of a type."""
    memory = None if aval.memory == DEVICE else aval.memory
    return ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, memory=memory)


class FlatFunction:
    """A function of pytrees as a function of flat leaves.

    Attributes:
      out_tree: the structure of the results, known after a call.
    """

    def __init__(self, fun: Callable, in_tree: tree.TreeDef):
        self.fun = fun
        self.in_tree = in_tree
        self.out_tree: Any = None

    def __call__(self, *leaves: Any) -> list[Any]:
        args, kwargs = tree.unflatten(self.in_tree, leaves)
        return self.flatten_out(self.fun(*args, **kwargs))

    def flatten_out(self, out: Any) -> list[Any]:
        """The leaves of a result, as values."""
        flat, self.out_tree = tree.flatten(out)
        return as_values(
            flat, lambda i: f"the result of {name_of(self.fun)}{paths.leaf_paths(self.out_tree)[i]}"
        )


def as_values(leaves: Sequence[Any], name: Callable[[int], str]) -> list[Any]:
    """Leaves as values; ``name(i)`` names the i-th in errors."""
    if set(map(type, leaves)) == {ConcreteArray}:
        return list(leaves)
    return [x if x.__class__ is ConcreteArray else _as_value(x, i, name) for i, x in enumerate(leaves)]


def _as_value(x: Any, i: int, name: Callable[[int], str]) -> Array:
    if isinstance(x, Array):
        return x
    if isinstance(x, ShapeDtypeStruct):
        raise errors.ArgumentError(
            f"{name(i)} is a ShapeDtypeStruct, which has no values: {x}",
            where=source.here(),
            fix="lower() and explain() take types; calls take arrays",
        )
    try:
        return lift(x)
    except (errors.ArgumentError, errors.InteropError):
        return lift(x, name(i))


class Auxiliary:
    """Auxiliary results of a function.

    Other leaves than arrays stay as they are, numbers and objects of any kind. Objects with a protocol that makes them
    arrays become these: they may hold a tracer, which must not outlive its trace.

    Attributes:
      values: the leaves that are arrays.
    """

    def __init__(self, aux: Any):
        leaves, self.structure = tree.flatten(aux)
        leaves = [lift(x) if any(hasattr(x, p) for p in PROTOCOLS) else x for x in leaves]
        self.others = {i: x for i, x in enumerate(leaves) if not isinstance(x, Array)}
        self.values = [x for i, x in enumerate(leaves) if i not in self.others]

    def rebuild(self, values: Sequence[Any]) -> Any:
        """The pytree with other values for its arrays."""
        rest = iter(values)
        n = self.structure.num_leaves
        return tree.unflatten(
            self.structure, [self.others[i] if i in self.others else next(rest) for i in range(n)]
        )


def value_or_none(x: Any) -> Array | None:
    """A leaf as a value, or None where it is no array."""
    try:
        return lift(x)
    except errors.BlufuncError:
        return None


def abstract(x: Any, name: str | None = None) -> ShapedArray:
    """The type of a value, or of an object with ``shape`` and ``dtype``."""
    if isinstance(x, Array):
        return x.aval
    if isinstance(x, ShapeDtypeStruct):
        return ShapedArray(x.shape, x.dtype, x.weak_type, x.memory)
    try:
        return lift(x, name).aval
    except errors.ArgumentError:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise
    return ShapedArray(shape_of(x.shape, name or "a value"), dtypes.as_dtype(x.dtype))


def name_of(fun: Any) -> str:
    """The display name of a function."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", None) or type(fun).__name__


class LazyLabels(Sequence):
    """Labels of flat arguments, computed when one is printed."""

    def __init__(self, labels: Callable[[], Sequence[str]], n: int):
        self.labels, self.n = labels, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        return _LazyLabel(self, i)


class _LazyLabel:
    __slots__ = ("i", "owner")

    def __init__(self, owner: LazyLabels, i: int):
        self.owner, self.i = owner, i

    def __str__(self) -> str:
        return self.owner.labels()[self.i]


def check_callable(fun: Any, transform: str) -> None:
    """Raise ArgumentError unless ``fun`` is callable."""
    if not callable(fun):
        raise errors.ArgumentError(
            f"{transform} takes a function, not {fun!r}.", where=source.here(), fix=f"{transform}(f)(x)"
        )


def signature_of(fun: Callable) -> inspect.Signature | None:
    """The signature, or None if Python does not know it."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def labels_of(fun: Callable, in_tree: tree.TreeDef) -> list[str]:
    """Labels of the leaves of ``(args, kwargs)``, such as ``params['w']``, ``x``."""
    parameters: list[str] = []
    signature = signature_of(fun)
    variadic = None
    for p in signature.parameters.values() if signature else ():
        if p.kind is p.VAR_POSITIONAL:
            variadic = p.name
            break
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            parameters.append(p.name)
    labels = []
    for path in paths.paths_in(in_tree):
        group, argument, *rest = path
        if group == nodes.SequenceKey(1):
            head = str(argument.key)
        elif argument.idx < len(parameters):
            head = parameters[argument.idx]
        else:
            head = f"{variadic or 'args'}[{argument.idx - (len(parameters) if variadic else 0)}]"
        labels.append(head + paths.keystr(tuple(rest)))
    return labels


def argument_numbers(nums: Any, what: str) -> tuple[int, ...]:
    """``argnums`` as a tuple of ints; None for none."""
    if nums is None:
        return ()
    listed = (nums,) if isinstance(nums, (int, np.integer)) else nums
    if not isinstance(listed, (tuple, list, set, frozenset)) or not all(
        isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in listed
    ):
        raise errors.ArgumentError(
            f"{what} is an int or a sequence of them, not {nums!r:.60}.",
            where=source.here(),
            fix=f"{what.split()[-1]}=(0,)",
        )
    return tuple(map(int, listed))


def argument_names(names: Any, what: str) -> tuple[str, ...]:
    """``argnames`` as a tuple of strings; None for none."""
    listed = (names,) if isinstance(names, str) else () if names is None else names
    if not isinstance(listed, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in listed):
        raise errors.ArgumentError(
            f"{what} holds names of parameters, not {names!r:.60}.",
            where=source.here(),
            fix=f"{what.split()[-1]}=('n',)",
        )
    return tuple(listed)


def argument_indices(argnums: int | Sequence[int], n_args: int, what: str) -> tuple[int, ...]:
    """``argnums`` as non-negative indices.

    Raises:
      ValueRangeError: an index is out of range.
    """
    nums = argument_numbers(argnums, what)
    for i in nums:
        if not -n_args <= i < n_args:
            raise errors.ValueRangeError(
                f"{what}={argnums}, but there are {n_args} positional arguments.",
                where=source.here(),
                fix="pass the argument by position, or correct the index",
            )
    return tuple(i % n_args for i in nums)


def check_structure(
    expected: tree.TreeDef,
    got: tree.TreeDef,
    what: str,
    names: tuple[str, str],
    fix: str = "",
    error: type[errors.BlufuncError] = errors.TreeError,
) -> None:
    """Raise ``error`` with the differing paths unless two structures agree."""
    if expected != got:
        raise error(
            f"{what}: {names[1]} has a different structure from {names[0]}.",
            where=source.here(),
            why="; ".join(paths.diff(expected, got, *names)[:5]),
            fix=fix or None,
        )


def bind_positional(fun: Callable, args: tuple, kwargs: dict) -> tuple:
    """Bind keyword arguments to their positions."""
    code = getattr(fun, "__code__", None)
    if not kwargs and code is not None and len(args) == code.co_argcount:
        return args
    bound = inspect.signature(fun).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise errors.ArgumentError(
            f"{name_of(fun)} got {', '.join(bound.kwargs)} by keyword only.",
            why="functions with custom derivatives have positional arguments.",
            where=source.here(),
        )
    return bound.args


def fix_static(fun: Callable, args: tuple, nondiff: tuple[int, ...]) -> tuple[Callable, tuple, tuple]:
    """``fun`` of the differentiable arguments only; these; and the others."""
    if not nondiff:
        return fun, args, ()
    static = {i: args[i] for i in argument_indices(nondiff, len(args), "nondiff_argnums")}

    def with_static(*dynamic):
        rest = iter(dynamic)
        return fun(*[static[i] if i in static else next(rest) for i in range(len(args))])

    functools.update_wrapper(with_static, fun)
    return with_static, tuple(a for i, a in enumerate(args) if i not in static), tuple(static.values())
