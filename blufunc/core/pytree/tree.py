"""Pytrees: flattening of nested containers to a list of leaves, and the inverse.

Core, before tracing, on top of ``nodes``, the container classes. Every transform flattens its arguments,
works on the list, and unflattens the result. In: any nesting of dict, OrderedDict, defaultdict, list, tuple,
namedtuple, None, dataclasses and registered classes. Out: the leaves, in a fixed order, and a ``TreeDef``.

A ``TreeDef`` wraps a spec of plain tuples, ``(kind, aux, child specs)`` for a node and ``None`` for a leaf,
so that structures (the key of every ``jit`` call) are compared and hashed by tuples, in C. The fast paths
carry no key paths; when one fails, the structures are walked once more to locate the mismatch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import equal, same
from blufunc.core.pytree.nodes import (
    DEFAULT,
    DICT,
    KINDS,
    LIST,
    NONE,
    ORDERED,
    TUPLE,
    GetAttrKey,
    Kind,
    UnsortableKeys,
)
from blufunc.errors import ArgumentError, TreeError

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

T = TypeVar("T")
A = TypeVar("A", bound="ArrayLike")

Leaf = Any
PyTree = Any
Path = tuple[Any, ...]
IsLeaf = Callable[[Any], bool] | None


# TreeDef.

Spec = tuple[Kind, Any, tuple[Any, ...]] | None


class TreeDef:
    """The structure of a pytree without its leaves: immutable, hashable, picklable.

    Structures are equal if their static data and dict keys are equal and of the same classes: a program
    traced for 1 does not serve 1.0.
    """

    __slots__ = ("_hash", "num_leaves", "spec")

    spec: Spec
    num_leaves: int

    def __init__(self, spec: Spec, num_leaves: int):
        self.spec = spec
        self.num_leaves = num_leaves
        self._hash: int | None = None

    @property
    def node_type(self) -> type | None:
        """The class of the outermost container; None for a leaf."""
        return None if self.spec is None else self.spec[0].cls

    @property
    def num_nodes(self) -> int:
        """Number of containers and leaves."""
        return _count_nodes(self.spec)

    def children(self) -> list[TreeDef]:
        """The structures of the children of the outermost container."""
        return [] if self.spec is None else [_treedef(c) for c in self.spec[2]]

    def node_data(self) -> tuple[type, Any] | None:
        """The class of the outermost container, and its static data; None for a leaf."""
        return None if self.spec is None else (self.spec[0].cls, self.spec[1])

    def unflatten(self, leaves: Iterable[Leaf]) -> PyTree:
        """The tree of this structure with the given leaves."""
        return unflatten(self, leaves)

    def flatten_up_to(self, tree: PyTree) -> list[PyTree]:
        """The subtrees of ``tree`` at the positions of this structure's leaves."""
        return flatten_up_to(self, tree)

    def compose(self, inner: TreeDef) -> TreeDef:
        """This structure with ``inner`` in place of each leaf."""
        return _treedef(_compose(self.spec, check_treedef(inner, "compose").spec))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not TreeDef:
            return NotImplemented
        return (
            self.num_leaves == other.num_leaves
            and equal(self.spec, other.spec)
            and _same(self.spec, other.spec)
        )

    def __hash__(self) -> int:
        if self._hash is None:
            try:
                self._hash = hash(self.spec)
            except TypeError:  # data that may change is copied: this is the key of programs
                self.spec = _fixed(self.spec)
                self._hash = hash(_hashed(self.spec))
        return self._hash

    def __repr__(self) -> str:
        return f"PyTreeDef({_repr(self.spec)})"

    def __reduce__(self) -> Any:
        return _treedef, (self.spec,)


LEAF = TreeDef(None, 1)
"""The structure of every bare leaf: one object, so that ``treedef is LEAF`` works."""


def _treedef(spec: Spec) -> TreeDef:
    return LEAF if spec is None else TreeDef(spec, _count(spec))


def _same(a: Spec, b: Spec) -> bool:
    """True if equal specs have static data of the same classes too."""
    if a is None or b is None or a is b:
        return True
    if not same(a[1], b[1]):
        return False
    return not any(a[2]) or all(_same(x, y) for x, y in zip(a[2], b[2], strict=True))


def _count(spec: Spec) -> int:
    return 1 if spec is None else sum([_count(c) for c in spec[2]])


def _count_nodes(spec: Spec) -> int:
    return 1 if spec is None else 1 + sum([_count_nodes(c) for c in spec[2]])


def _compose(outer: Spec, inner: Spec) -> Spec:
    if outer is None:
        return inner
    kind, aux, specs = outer
    return kind, aux, tuple([_compose(s, inner) for s in specs])


def tuple_of(treedefs: Iterable[TreeDef]) -> TreeDef:
    """The structure of a tuple whose elements have the given structures."""
    specs = tuple([check_treedef(t, "treedef_tuple").spec for t in _iterated(treedefs, "treedef_tuple")])
    return _treedef((TUPLE, None, specs))


def check_treedef(treedef: TreeDef, name: str) -> TreeDef:
    """Check that ``treedef`` is a TreeDef, and return it."""
    if type(treedef) is not TreeDef:
        raise ArgumentError(
            f"{name} needs a TreeDef, got {type(treedef).__name__}",
            where=source.here(),
            fix="treedef = tree.structure(x)",
        )
    return treedef


def _iterated(xs: Any, name: str) -> list[Any]:
    try:
        return list(xs)
    except TypeError:
        raise ArgumentError(
            f"{name} needs a sequence, got {type(xs).__name__}", where=source.here(), fix=f"{name}([...])"
        ) from None


def _repr(spec: Spec) -> str:
    if spec is None:
        return "*"
    kind, aux, specs = spec
    parts = [_repr(c) for c in specs]
    if kind is NONE:
        return "None"
    if kind is LIST:
        return f"[{', '.join(parts)}]"
    if kind is TUPLE:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if kind in (DICT, ORDERED, DEFAULT):
        names = aux[1] if kind is DEFAULT else aux
        text = "{" + ", ".join(f"{k!r}: {p}" for k, p in zip(names, parts, strict=True)) + "}"
        if kind is DEFAULT:
            text = f"{getattr(aux[0], '__name__', aux[0])}, {text}"
        return text if kind is DICT else f"{kind.cls.__name__}({text})"
    keys = [f"{k.name}={p}" if type(k) is GetAttrKey else p for k, p in zip(_keys(spec), parts, strict=True)]
    if kind.static_names:
        keys += [f"{name}={value!r}" for name, value in zip(kind.static_names, aux, strict=True)]
    elif aux is not None and aux != ():
        return f"{kind.cls.__name__}[{aux!r}]({', '.join(keys)})"
    return f"{kind.cls.__name__}({', '.join(keys)})"


def _keys(spec: Spec) -> list[Any]:
    """The keys of a node's children."""
    assert spec is not None
    kind, aux, specs = spec
    return kind.keys(aux, len(specs))


def _hashed(spec: Spec) -> Any:
    """The hashed part of a structure: no static data that can only be compared."""
    if spec is None:
        return None
    kind, aux, specs = spec
    try:
        own = hash(aux)
    except TypeError:
        own = 0
    return kind, own, tuple([_hashed(c) for c in specs])


def _fixed(spec: Spec, path: Path = ()) -> Spec:
    """A structure with copies of static data that cannot be hashed, and may change.

    Raises:
      TreeError: static data does not equal its copy, as arrays and what holds them.
    """
    if spec is None:
        return None
    kind, aux, specs = spec
    children = tuple([_fixed(c, (*path, key)) for key, c in zip(_keys(spec), specs, strict=True)])
    try:
        hash(aux)
        return kind, aux, children
    except TypeError:
        pass
    if not kind.static_names:
        return kind, _copied(aux, "the static data", kind, path), children
    named = zip(kind.static_names, aux, strict=True)
    return kind, tuple([_copied(x, f"static field {name!r}", kind, path) for name, x in named]), children


def _copy(value: Any) -> Any:
    """A copy of static data; what can be hashed is taken for immutable."""
    kind = type(value)
    try:
        hash(value)
        return value
    except TypeError:
        pass
    if kind in (list, tuple, set):
        return kind([_copy(x) for x in value])
    if kind is dict:
        return {k: _copy(v) for k, v in value.items()}
    return copy.deepcopy(value)


def _copied(value: Any, what: str, kind: Kind, path: Path) -> Any:
    try:
        copied = _copy(value)
        equal = (value == copied) is True
    except Exception:
        equal = False
    if equal:
        return copied
    raise TreeError(
        f"{what} of {kind.cls.__name__}, a {type(value).__name__}, does not equal its copy{at(path)}",
        where=source.here(),
        why="static data is compared to find out whether a function was traced before",
        fix="make it a data field if it holds arrays, or define __eq__ for its class",
    )


def at(path: Path) -> str:
    """`` at ['a'][0]`` for messages; nothing for the root."""
    return " at " + "".join([str(k) for k in path]) if path else ""


# Flatten and unflatten.


def flatten(tree: PyTree, is_leaf: IsLeaf = None) -> tuple[list[Leaf], TreeDef]:
    """The leaves of ``tree`` from left to right, and its structure. Dicts sort by key.

    ``is_leaf(x)`` is called for each object on the way; if true, ``x`` is a leaf whatever it contains.
    """
    leaves: list[Leaf] = []
    if is_leaf is None:
        kind = KINDS[type(tree)]
        if kind is None:
            return [tree], LEAF
        try:
            return leaves, TreeDef(_flatten(tree, kind, leaves), len(leaves))
        except UnsortableKeys as error:
            raise explain_unsortable(tree, error.args[0]) from None
    check_function(is_leaf, "is_leaf")
    try:
        spec = _flatten_until(tree, leaves, is_leaf)
    except UnsortableKeys as error:
        raise explain_unsortable(tree, error.args[0]) from None
    return leaves, LEAF if spec is None else TreeDef(spec, len(leaves))


def _flatten(x: PyTree, kind: Kind, leaves: list[Leaf]) -> Spec:
    specs: list[Spec] = []
    if kind is DICT:  # most nodes are dicts: DICT.split inlined, without its list of children
        try:
            keys = tuple(sorted(x))
        except TypeError:
            raise UnsortableKeys(x) from None
        for key in keys:
            child = x[key]
            child_kind = KINDS[type(child)]
            if child_kind is None:
                leaves.append(child)
                specs.append(None)
            else:
                specs.append(_flatten(child, child_kind, leaves))
        return kind, keys, tuple(specs)
    children, aux = kind.split(x)
    for child in children:
        child_kind = KINDS[type(child)]
        if child_kind is None:
            leaves.append(child)
            specs.append(None)
        else:
            specs.append(_flatten(child, child_kind, leaves))
    return kind, aux, tuple(specs)


def _flatten_until(x: PyTree, leaves: list[Leaf], is_leaf: Callable[[Any], bool]) -> Spec:
    kind = None if is_leaf(x) else KINDS[type(x)]
    if kind is None:
        leaves.append(x)
        return None
    children, aux = kind.split(x)
    return kind, aux, tuple([_flatten_until(child, leaves, is_leaf) for child in children])


def explain_unsortable(tree: PyTree, culprit: dict[Any, Any]) -> TreeError:
    """The error for a dict in ``tree`` whose keys have no order."""
    path = _find(tree, culprit, ())
    return TreeError(
        f"the keys of a dict{at(path or ())} cannot be sorted: {list(culprit)}",
        where=source.here(),
        why="leaves are ordered by sorted keys, so that the order of insertion does not matter",
        fix="use keys of one type, or an OrderedDict, which keeps its own order",
    )


def _find(x: PyTree, target: object, path: Path) -> Path | None:
    if x is target:
        return path
    kind = KINDS[type(x)]
    if kind is not None:
        try:
            children, aux = kind.split(x)
        except UnsortableKeys:
            return None
        for key, child in zip(kind.keys(aux, len(children)), children, strict=True):
            found = _find(child, target, (*path, key))
            if found is not None:
                return found
    return None


def unflatten(treedef: TreeDef, leaves: Iterable[Leaf]) -> PyTree:
    """The tree of this structure with the given leaves: the inverse of ``flatten``."""
    if type(treedef) is not TreeDef:
        raise ArgumentError(
            f"unflatten needs a TreeDef, got {type(treedef).__name__}",
            where=source.here(),
            fix="unflatten(treedef, leaves)",
        )
    if type(leaves) is not list:
        leaves = _iterated(leaves, "unflatten")
    if len(leaves) != treedef.num_leaves:
        raise TreeError(
            f"{len(leaves)} leaves were given for a structure of {treedef.num_leaves}: {treedef}",
            where=source.here(),
            fix="give one leaf for each place, in the order of flatten",
        )
    if treedef.spec is None:
        return leaves[0]
    return _unflatten(treedef.spec, iter(leaves))


def _unflatten(spec: Spec, rest: Iterator[Leaf]) -> PyTree:
    kind, aux, specs = spec  # type: ignore[misc]
    if not any(specs):  # leaves only: no Python code per leaf
        if kind is DICT:
            return dict(zip(aux, rest))  # noqa: B905 - zip asks aux first, so it takes no leaf too many
        return kind.join(aux, list(itertools.islice(rest, len(specs))))
    return kind.join(aux, [next(rest) if s is None else _unflatten(s, rest) for s in specs])


def leaves_like(treedef: TreeDef, tree: PyTree) -> list[Leaf] | None:
    """The leaves of ``tree`` if ``treedef`` is its structure, else None.

    Faster than ``flatten`` and a comparison: it sorts, builds and hashes nothing.
    """
    found: list[PyTree] = []
    try:
        if treedef.spec is None:
            found.append(tree)
        else:
            _up_to(treedef.spec, tree, found, exactly=True)
    except (
        _Mismatch,
        UnsortableKeys,
        ValueError,
        TypeError,
    ):  # static data that cannot be compared raises later
        return None
    for cls in {type(x) for x in found}:
        if KINDS[cls] is not None:  # a container in the place of a leaf
            return None
    return found


def leaves(tree: PyTree, is_leaf: IsLeaf = None) -> list[Leaf]:
    """The leaves of ``tree``, from left to right."""
    return flatten(tree, is_leaf)[0]


def structure(tree: PyTree, is_leaf: IsLeaf = None) -> TreeDef:
    """The structure of ``tree``."""
    return flatten(tree, is_leaf)[1]


# Several trees at once.


@overload
def map(f: Callable[..., Any], tree: A, *rest: PyTree, is_leaf: IsLeaf = None) -> Array: ...
@overload
def map(f: Callable[..., Any], tree: T, *rest: PyTree, is_leaf: IsLeaf = None) -> T: ...


def map(f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None) -> Any:
    """Map ``f`` over the leaves of ``tree`` and the matching subtrees of ``rest``.

    The structure of ``tree`` must be a prefix of those of ``rest``.
    """
    check_function(f, "tree.map")
    flat, treedef = flatten(tree, is_leaf)
    if not rest:
        return unflatten(treedef, [f(x) for x in flat])
    others = [_flatten_up_to(treedef, r, ("the first tree", f"tree {i}")) for i, r in enumerate(rest, 2)]
    return unflatten(treedef, [f(*xs) for xs in zip(flat, *others, strict=True)])


def check_function(f: Any, name: str) -> None:
    """Check that ``f``, an argument of ``name``, is callable."""
    if not callable(f):
        raise ArgumentError(
            f"{name} needs a function, not {f!r:.60}.", where=source.here(), fix="lambda x: ..."
        )


def transpose(outer_treedef: TreeDef, inner_treedef: TreeDef | None, pytree_to_transpose: PyTree) -> PyTree:
    """Swap outer and inner structures: a list of dicts to a dict of lists.

    Without ``inner_treedef``, it is the structure at the first leaf of the outer one.
    """
    outer, inner = outer_treedef, inner_treedef
    check_treedef(outer, "transpose")
    subtrees = _flatten_up_to(outer, pytree_to_transpose, ("the outer structure", "the tree"))
    if inner is None:
        if not subtrees:
            raise TreeError(
                "transpose cannot tell the inner structure: the outer one has no leaf.",
                where=source.here(),
                fix="transpose(outer, inner, tree)",
            )
        inner = structure(subtrees[0])
    check_treedef(inner, "transpose")
    rows = [
        _flatten_up_to(inner, row, ("the inner structure", f"element {i} of the tree"))
        for i, row in enumerate(subtrees)
    ]
    return unflatten(inner, [unflatten(outer, [row[j] for row in rows]) for j in range(inner.num_leaves)])


def flatten_up_to(treedef: TreeDef, tree: PyTree) -> list[PyTree]:
    """The subtrees of ``tree`` at the positions of ``treedef``'s leaves."""
    return _flatten_up_to(check_treedef(treedef, "flatten_up_to"), tree, ("the treedef", "the tree"))


def broadcast_prefix(prefix: PyTree, tree: PyTree, is_leaf: IsLeaf = None) -> list[Leaf]:
    """For each leaf of ``tree``, the leaf of ``prefix`` at its position or above.

    ``is_leaf`` applies to ``prefix`` only. With ``is_leaf=lambda x: x is None``, None is an ordinary value;
    without, it must correspond to a None.
    """
    values, treedef = flatten(prefix, is_leaf)
    if treedef is LEAF:
        return values * len(leaves(tree))
    result: list[Leaf] = []
    for value, subtree in zip(values, _flatten_up_to(treedef, tree, ("the prefix", "the tree")), strict=True):
        if KINDS[type(subtree)] is None:
            result.append(value)
        else:
            result += [value] * len(leaves(subtree))
    return result


def broadcast(prefix: PyTree, tree: PyTree, is_leaf: IsLeaf = None) -> PyTree:
    """A tree like ``tree``, with each leaf of ``prefix`` repeated over its subtree.

    ``is_leaf`` applies to both: what it names in ``tree`` is one leaf there.
    """
    values, treedef = flatten(prefix, is_leaf)
    places = _flatten_up_to(treedef, tree, ("the prefix", "the tree"))
    result: list[Leaf] = []
    for value, subtree in zip(values, places, strict=True):
        result += [value] * structure(subtree, is_leaf).num_leaves
    return unflatten(structure(tree, is_leaf), result)


class _Mismatch(Exception):
    """``_up_to`` found a different structure; turned into a TreeError with the path."""


def _flatten_up_to(treedef: TreeDef, tree: PyTree, names: tuple[str, str]) -> list[PyTree]:
    if treedef.spec is None:
        return [tree]
    found: list[PyTree] = []
    try:
        _up_to(treedef.spec, tree, found)
    except UnsortableKeys as error:
        raise explain_unsortable(tree, error.args[0]) from None
    except _Mismatch:
        lines = list(_mismatches(treedef.spec, tree, names, ()))
        if len(lines) > 5:
            lines[4:] = [f"and {len(lines) - 4} more differences"]
        what = f"{names[1]} does not have the structure of {names[0]}"
        raise TreeError(
            what,
            where=source.here(),
            why="; ".join(lines),
            fix="give both the same structure down to the leaves",
        ) from None
    return found


def _up_to(spec: Spec, x: Any, found: list[PyTree], exactly: bool = False) -> None:
    """Append the subtrees of ``x`` at ``spec``'s leaves to ``found``."""
    kind, aux, specs = spec  # type: ignore[misc]
    cls: type = type(x)
    if cls is not kind.cls:
        raise _Mismatch
    children: Sequence[Any]
    if kind is DICT:
        # In the order of the spec, so that nothing has to be sorted.
        try:
            children = [x[key] for key in aux]
        except KeyError:
            raise _Mismatch from None
        if len(x) != len(aux):
            raise _Mismatch
        if exactly and aux and aux[0].__class__ is not str:  # strings equal no other type
            own = dict(zip(x, x, strict=True))
            if not same(tuple([own[key] for key in aux]), aux):
                raise _Mismatch
    elif kind is TUPLE or kind is LIST:
        children = x
        if len(children) != len(specs):
            raise _Mismatch
    else:
        children, x_aux = kind.split(x)
        if len(children) != len(specs) or not (same(x_aux, aux) if exactly else equal(x_aux, aux)):
            raise _Mismatch
    if not any(specs):
        found += children
        return
    for s, child in zip(specs, children):  # noqa: B905
        if s is None:
            found.append(child)
        else:
            _up_to(s, child, found, exactly)


def _mismatches(spec: Spec, x: PyTree, names: tuple[str, str], path: Path) -> Iterator[str]:
    """One line per deviation of ``x`` from ``spec``, whose leaves it may extend."""
    if spec is None:
        return
    kind = KINDS[type(x)]
    if kind is None:
        yield f"{_place(path)}: {names[0]} has {describe(spec)}, {names[1]} has a leaf ({type(x).__name__})"
        return
    try:
        children, aux = kind.split(x)
    except UnsortableKeys:
        yield f"{_place(path)}: in {names[1]}, keys that cannot be sorted: {list(x)}"
        return
    other = (kind, aux, (None,) * len(children))
    yield from node_differences(spec, other, names, path)
    if kind is spec[0]:
        theirs = dict(zip(kind.keys(aux, len(children)), children, strict=True))
        for key, s in zip(_keys(spec), spec[2], strict=True):
            if key in theirs:
                yield from _mismatches(s, theirs[key], names, (*path, key))


def node_differences(
    a: Spec, b: Spec, names: tuple[str, str], path: Path, key: Callable[[Any], Any] = lambda x: x
) -> Iterator[str]:
    """One line per difference between two nodes, their common children aside.

    Args:
      key: key of static data and of the keys of children, for comparison.
    """
    assert a is not None and b is not None
    if a[0] is not b[0]:
        yield f"{_place(path)}: {names[0]} has {describe(a)}, {names[1]} has {describe(b)}"
        return
    keys_a, keys_b = _keys(a), _keys(b)
    for keys, others, name in ((keys_a, keys_b, names[0]), (keys_b, keys_a, names[1])):
        known = [key(k) for k in others]
        yield from [f"{_place((*path, k))}: only in {name}" for k in keys if key(k) not in known]
    kind, aux_a, aux_b = a[0], a[1], b[1]
    if kind is DICT or equal(key(aux_a), key(aux_b)):
        return
    if kind.static_names:
        for name, x, y in zip(kind.static_names, aux_a, aux_b, strict=True):
            if not equal(key(x), key(y)):
                place = _place((*path, GetAttrKey(name)))
                yield f"{place}: static, {x!r} in {names[0]}, {y!r} in {names[1]}"
    elif kind is DEFAULT:
        if aux_a[0] != aux_b[0]:
            yield f"{_place(path)}: default factory {aux_a[0]!r} in {names[0]}, {aux_b[0]!r} in {names[1]}"
    elif kind is ORDERED:
        if {key(k) for k in aux_a} == {key(k) for k in aux_b}:
            yield f"{_place(path)}: keys in order {list(aux_a)} in {names[0]}, {list(aux_b)} in {names[1]}"
    else:
        what = f"static data of {kind.cls.__name__}"
        yield f"{_place(path)}: {what}, {aux_a!r} in {names[0]}, {aux_b!r} in {names[1]}"


def describe(spec: Spec) -> str:
    """A description of a node: ``a dict with keys 'a', 'b'``."""
    if spec is None:
        return "a leaf"
    kind, aux, specs = spec
    if kind is NONE:
        return "None"
    if kind in (DICT, ORDERED, DEFAULT):
        keys = aux[1] if kind is DEFAULT else aux
        shown = ", ".join([repr(k) for k in keys[:6]]) + (", ..." if len(keys) > 6 else "")
        return f"{_article(kind.cls)} with keys {shown}" if keys else f"an empty {kind.cls.__name__}"
    if kind in (LIST, TUPLE):
        return f"a {kind.cls.__name__} of {len(specs)}"
    return _article(kind.cls)


def _article(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOUaeiou' else 'a'} {cls.__name__}"


def _place(path: Path) -> str:
    return "".join([str(k) for k in path]) or "at the root"
