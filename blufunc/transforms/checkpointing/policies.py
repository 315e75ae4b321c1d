"""Policies of ``checkpoint``: the intermediate results to save, and where.

Transforms, stage 2. In: an equation of a checkpointed function, including jitted calls in it, as ``policy(primitive,
*input_avals, **params)``. Out: True to save its results, False to recompute them, or an ``Offload`` to save them in
another memory. Loops, branches and functions with custom derivative rules are recomputed as a whole, without asking.
Policies are compared by value: equal ones share a trace.

The operation that policies refer to is here too: the identity that names a value. ``core/ops/offload.py`` moves one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from blufunc.core.arrays.memories import kind_of
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ops.dot import dot_general_p
from blufunc.core.primitives.linear_ops import Linear
from blufunc.core.primitives.sharding import FIRST, one_by_one
from blufunc.core.pytree import tree
from blufunc.errors import ArgumentError, ValueRangeError
from blufunc.transforms.arguments import as_values, check_callable, name_of

T = TypeVar("T")

__all__ = [
    "everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots",
    "dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims", "offload_dot_with_no_batch_dims",
    "save_anything_except_these_names", "save_any_names_but_these", "save_only_these_names",
    "save_from_both_policies", "save_and_offload_only_these_names",
]  # fmt: skip


@dataclass(frozen=True)
class Offload:
    """A verdict: save in the memory ``dst``, and move back to ``src`` for use."""

    src: str
    dst: str


Verdict = bool | Offload
Policy = Callable[..., Verdict]
"""``(primitive, *input_avals, **params) -> verdict`` on an equation's results."""


# -- operations --------------------------------------------------------------------------------------


class _Name(Linear):
    """The operand itself, with a ``name`` for policies; its tangent has none."""

    name, kind, identity, any_memory = "name", "movement", True, True
    linear, autocast_class = FIRST, "widest"

    shard = staticmethod(one_by_one)

    def impl(self, x, **params):
        return x

    def abstract(self, x, **params):
        return x

    def jvp(self, primals, tangents, **params):
        return self.bind(*primals, **params), tangents[0]

    def transpose(self, ct, x, **params):
        x.add(ct)

    def batch(self, axis, args, dims, **params):
        return self.bind(args[0], **params), dims[0]


name_p = _Name()


def checkpoint_name(x: T, name: str) -> T:
    """Name a value for policies of ``checkpoint``.

    Args:
      x: a pytree of arrays.
      name: the name.
    Returns:
      the pytree, to use instead of ``x``.
    """
    if not isinstance(name, str):
        raise ArgumentError(
            f"checkpoint_name takes a string for the name, not {name!r}.",
            where=source.here(),
            fix='x = bf.checkpoint_name(x, "activations")',
        )
    leaves, structure = tree.flatten(x)
    values = as_values(leaves, lambda i: f"checkpoint_name {name!r}: leaf {i}")
    return tree.unflatten(structure, [name_p.bind(v, name=name) for v in values])


# -- policies ----------------------------------------------------------------------------------------


def nothing_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Recompute all: the default."""
    return False


def everything_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Save all residuals; only bodies of loops and other calls are recomputed."""
    return True


def dots_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Save the results of contractions (matmuls, convolutions), recompute the rest."""
    return prim.kind == "contract"


def dots_with_no_batch_dims_saveable(prim, *avals: ShapedArray, **params: Any) -> bool:
    """Save results of matmuls without batch axes: with weights, not attention."""
    return prim is dot_general_p and not params["dimension_numbers"][1][0]


checkpoint_dots = dots_saveable
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


class _Named:
    """A policy with parameters, printed as the call that constructs it."""

    @property
    def __name__(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class _OffloadDots(_Named):
    offload: Offload

    def __call__(self, prim, *avals: ShapedArray, **params: Any) -> Verdict:
        return dots_with_no_batch_dims_saveable(prim, *avals, **params) and self.offload

    def __repr__(self) -> str:
        return f"offload_dot_with_no_batch_dims({self.offload.src!r}, {self.offload.dst!r})"


@dataclass(frozen=True)
class _ByName(_Named):
    """Verdicts on values in ``names``, on other named, and on unnamed values."""

    made_by: str
    names: frozenset[str]
    listed: bool
    other: bool
    unnamed: bool

    def __call__(self, prim, *avals: ShapedArray, **params: Any) -> Verdict:
        if prim is not name_p:
            return self.unnamed
        return self.listed if params["name"] in self.names else self.other

    def __repr__(self) -> str:
        return f"{self.made_by}({', '.join(map(repr, sorted(self.names)))})"


@dataclass(frozen=True)
class _SaveAndOffload(_Named):
    saved: frozenset[str]
    offloaded: frozenset[str]
    offload: Offload

    def __call__(self, prim, *avals: ShapedArray, **params: Any) -> Verdict:
        if prim is not name_p:
            return False
        return params["name"] in self.saved or (params["name"] in self.offloaded and self.offload)

    def __repr__(self) -> str:
        parts = f"{sorted(self.saved)}, {sorted(self.offloaded)}, {self.offload.src!r}, {self.offload.dst!r}"
        return f"save_and_offload_only_these_names({parts})"


@dataclass(frozen=True)
class _Both(_Named):
    first: Policy
    second: Policy

    def __call__(self, prim, *avals: ShapedArray, **params: Any) -> Verdict:
        return self.first(prim, *avals, **params) or self.second(prim, *avals, **params)

    def __repr__(self) -> str:
        return f"save_from_both_policies({name_of(self.first)}, {name_of(self.second)})"


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """``dots_with_no_batch_dims_saveable``, saved in the memory ``offload_dst``.

    Args:
      offload_src, offload_dst: memories: where values are computed and read (``"device"``), and where they wait
        (``"pinned_host"``).
    """
    return _OffloadDots(_memories("offload_dot_with_no_batch_dims", offload_src, offload_dst))


def save_only_these_names(*names_which_can_be_saved: str) -> Policy:
    """Save the values that ``checkpoint_name`` gave one of these names."""
    return _by_name(
        "save_only_these_names", names_which_can_be_saved, listed=True, other=False, unnamed=False
    )


def save_any_names_but_these(*names_not_to_save: str) -> Policy:
    """Save the named values, except these names."""
    return _by_name("save_any_names_but_these", names_not_to_save, listed=False, other=True, unnamed=False)


def save_anything_except_these_names(*names_not_to_save: str) -> Policy:
    """Save all values, named or not, except these names."""
    return _by_name(
        "save_anything_except_these_names", names_not_to_save, listed=False, other=True, unnamed=True
    )


def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
    """Save the values that either policy saves; the first one's memory wins."""
    for policy in (policy_1, policy_2):
        check_callable(policy, "save_from_both_policies")
    return _Both(policy_1, policy_2)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Sequence[str],
    names_which_can_be_offloaded: Sequence[str],
    offload_src: str,
    offload_dst: str,
) -> Policy:
    """Save the first list of names in place, the second in ``offload_dst``.

    Args:
      names_which_can_be_saved, names_which_can_be_offloaded: the names; no name may be in both.
      offload_src, offload_dst: memories: where values are computed and read (``"device"``), and where they wait
        (``"pinned_host"``).
    """
    api = "save_and_offload_only_these_names"
    saved = _names(api, names_which_can_be_saved)
    offloaded = _names(api, names_which_can_be_offloaded)
    if both := saved & offloaded:
        raise ValueRangeError(
            f"{api}: both lists hold {', '.join(map(repr, sorted(both)))}.",
            where=source.here(),
            fix="use each name in one list",
        )
    return _SaveAndOffload(saved, offloaded, _memories(api, offload_src, offload_dst))


def _by_name(api: str, names: Sequence[str], *, listed: bool, other: bool, unnamed: bool) -> Policy:
    return _ByName(api, _names(api, names), listed, other, unnamed)


def _names(api: str, names: Any) -> frozenset[str]:
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f"{api} takes names, not {names!r}.",
            where=source.here(),
            fix='names are strings: "activations", ...',
        )
    return frozenset(names)


def _memories(api: str, src: Any, dst: Any) -> Offload:
    for memory in (src, dst):
        if not isinstance(memory, str):
            raise ArgumentError(
                f"{api} takes the names of two memories, not {memory!r}.",
                where=source.here(),
                fix='offload_src="device", offload_dst="pinned_host"',
            )
    return Offload(kind_of(src, api), kind_of(dst, api))
