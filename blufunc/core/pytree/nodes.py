"""Pytree node classes: how to flatten, unflatten and name the children of each.

Core, below ``tree``. In: Python's containers, known from the start; namedtuples and dataclasses, inspected at
first use; and registered user classes. Out: their ``Kind``s (None for leaves) in one table, ``KINDS``, and
the keys of paths.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar, overload

from blufunc.errors import ArgumentError, TreeError

_C = TypeVar("_C", bound=type)


# Keys: one step of a path, printed as the Python expression for it.


@dataclasses.dataclass(frozen=True, slots=True)
class DictKey:
    """The value under ``key`` of a dict."""

    key: Hashable

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceKey:
    """Element ``idx`` of a list or tuple."""

    idx: int

    def __str__(self) -> str:
        return f"[{self.idx}]"


@dataclasses.dataclass(frozen=True, slots=True)
class GetAttrKey:
    """Field ``name`` of a namedtuple or dataclass."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclasses.dataclass(frozen=True, slots=True)
class FlattenedIndexKey:
    """Child number ``key`` of a registered class that does not name its children."""

    key: int

    def __str__(self) -> str:
        return f"[<flat index {self.key}>]"


# Kinds: flatten and unflatten rules of one container class.


class Kind:
    """Flatten and unflatten rules of one class, and the names of its children.

    ``keys(aux, n)`` names the children knowing only the spec. ``keys_of(x)`` does so for a live object, where
    the class chose its own names at registration.
    """

    __slots__ = ("cls", "join", "keys", "keys_of", "split", "static_names")

    def __init__(
        self,
        cls: type,
        split: Callable[[Any], tuple[Sequence[Any], Hashable]],
        join: Callable[[Any, list[Any]], Any],
        keys: Callable[[Any, int], list[Any]],
        *,
        static_names: tuple[str, ...] = (),
        keys_of: Callable[[Any], list[Any]] | None = None,
    ):
        self.cls, self.split, self.join, self.keys = cls, split, join, keys
        self.static_names, self.keys_of = static_names, keys_of

    def __reduce__(self) -> Any:  # a TreeDef is unpickled by a process that has registered the same classes
        return _load_kind, (self.cls,)


class _Kinds(dict[type, "Kind | None"]):
    """Table from class to Kind, or None for leaves, filled at first use of a class."""

    def __missing__(self, cls: type) -> Kind | None:
        kind = self[cls] = _discover(cls)
        return kind


class UnsortableKeys(Exception):
    """A dict has unsortable keys; ``flatten`` turns it into a TreeError with the path."""


def _split_dict(x: dict[Any, Any]) -> tuple[Sequence[Any], Hashable]:
    try:
        keys = tuple(sorted(x))
    except TypeError:
        raise UnsortableKeys(x) from None
    return tuple(map(x.__getitem__, keys)), keys


def _split_defaultdict(x: defaultdict[Any, Any]) -> tuple[Sequence[Any], Hashable]:
    children, keys = _split_dict(x)
    return children, (x.default_factory, keys)


def _dict_keys(aux: tuple[Any, ...], n: int) -> list[Any]:
    return [DictKey(k) for k in aux]


def _sequence_keys(aux: Any, n: int) -> list[Any]:
    return [SequenceKey(i) for i in range(n)]


def _flat_keys(aux: Any, n: int) -> list[Any]:
    return [FlattenedIndexKey(i) for i in range(n)]


NONE = Kind(type(None), lambda x: ((), None), lambda aux, xs: None, _sequence_keys)
# A spec has as many keys as children, so the joins zip without checking.
DICT = Kind(dict, _split_dict, lambda aux, xs: dict(zip(aux, xs)), _dict_keys)  # noqa: B905
ORDERED = Kind(
    OrderedDict,
    lambda x: (list(x.values()), tuple(x)),  # an OrderedDict's order is part of its structure: not sorted
    lambda aux, xs: OrderedDict(zip(aux, xs)),  # noqa: B905
    _dict_keys,
)
DEFAULT = Kind(
    defaultdict,
    _split_defaultdict,
    lambda aux, xs: defaultdict(aux[0], zip(aux[1], xs)),  # noqa: B905
    lambda aux, n: _dict_keys(aux[1], n),
)
LIST = Kind(list, lambda x: (x, None), lambda aux, xs: xs, _sequence_keys)
TUPLE = Kind(tuple, lambda x: (x, None), lambda aux, xs: tuple(xs), _sequence_keys)

KINDS = _Kinds({kind.cls: kind for kind in (NONE, DICT, ORDERED, DEFAULT, LIST, TUPLE)})
_explicit: set[type] = set(KINDS)


def _discover(cls: type) -> Kind | None:
    fields = getattr(cls, "_fields", None)
    if issubclass(cls, tuple) and isinstance(fields, tuple):
        return Kind(
            cls,
            lambda x: (x, None),
            lambda aux, xs: cls._make(xs),  # type: ignore[attr-defined]
            lambda aux, n: [GetAttrKey(f) for f in fields],
        )
    return None


def _load_kind(cls: type) -> Kind:
    kind = KINDS[cls]
    if kind is None:
        raise TreeError(
            f"a saved tree holds {cls.__name__}, which is not registered here", fix="register_node(...)"
        )
    return kind


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) >= 2:
        return operator.attrgetter(*names)
    return lambda x: tuple([getattr(x, name) for name in names])


def _attribute_kind(
    cls: type, data: tuple[str, ...], static: tuple[str, ...], constructs: bool = False
) -> Kind:
    get_data, get_static, new, set_ = _getter(data), _getter(static), object.__new__, object.__setattr__

    def join(aux: tuple[Any, ...], xs: list[Any]) -> Any:
        # Not through __init__: the children may be tracers, placeholders or None, which it may reject.
        x = new(cls)
        for name, value in zip(data, xs):  # noqa: B905
            set_(x, name, value)
        for name, value in zip(static, aux):  # noqa: B905
            set_(x, name, value)
        return x

    def construct(aux: tuple[Any, ...], xs: list[Any]) -> Any:
        return cls(**dict(zip((*data, *static), (*xs, *aux))))  # noqa: B905

    return Kind(
        cls,
        lambda x: (get_data(x), get_static(x)),
        construct if constructs else join,
        lambda aux, n: [GetAttrKey(name) for name in data],
        static_names=static,
    )


# Registration.


def _register(cls: type, kind: Kind | None) -> None:
    if not isinstance(cls, type):
        raise ArgumentError(
            f"a pytree node is registered by its class, got {cls!r:.60}", fix="register type(x)"
        )
    if cls in _explicit:
        raise TreeError(f"{cls.__name__} is already a pytree node", fix="register each class once")
    _explicit.add(cls)
    KINDS[cls] = kind


def is_registered(cls: type) -> bool:
    """True if a class was registered as a node."""
    return cls in _explicit


def register_node(
    cls: type,
    flatten_fn: Callable[[Any], tuple[Iterable[Any], Hashable]],
    unflatten_fn: Callable[[Any, Sequence[Any]], Any],
    flatten_with_keys: Callable[[Any], tuple[Iterable[tuple[Any, Any]], Hashable]] | None = None,
) -> None:
    """Register ``cls`` (exactly, not its subclasses) as a pytree node.

    Args:
      flatten_fn: object -> ``(children, aux)``; ``aux`` is hashable, and equal for equal structures.
      unflatten_fn: ``(aux, children)`` -> object; it must accept children of any type.
      flatten_with_keys: object -> ``([(key, child), ...], aux)``, for paths in messages; a key is one of
        ``DictKey``, ``SequenceKey``, ``GetAttrKey``, or anything with a ``str``.
    """

    def split(x: Any) -> tuple[Sequence[Any], Hashable]:
        result = flatten_fn(x)
        if type(result) is not tuple or len(result) != 2:
            raise TreeError(
                f"the flatten function of {cls.__name__} returned {type(result).__name__}",
                fix="return (children, aux)",
            )
        return tuple(result[0]), result[1]

    def join(aux: Any, xs: list[Any]) -> Any:
        return unflatten_fn(aux, tuple(xs))

    if flatten_with_keys is None:
        _register(cls, Kind(cls, split, join, _flat_keys))
        return

    def keys_of(x: Any) -> list[Any]:
        return [key for key, _ in flatten_with_keys(x)[0]]

    def keys(aux: Any, n: int) -> list[Any]:
        # Keys require an object, so one is built from placeholders. A constructor that inspects its children
        # may reject them: then indices have to do.
        try:
            named = keys_of(join(aux, [object()] * n))
        except Exception:
            return _flat_keys(aux, n)
        return named if len(named) == n else _flat_keys(aux, n)

    _register(cls, Kind(cls, split, join, keys, keys_of=keys_of))


@overload
def register_dataclass(
    cls: _C,
    data_fields: Iterable[str] | None = ...,
    static_fields: Iterable[str] | None = ...,
    drop_fields: Iterable[str] = ...,
) -> _C: ...
@overload
def register_dataclass(
    cls: None = ...,
    data_fields: Iterable[str] | None = ...,
    static_fields: Iterable[str] | None = ...,
    drop_fields: Iterable[str] = ...,
) -> Callable[[_C], _C]: ...
def register_dataclass(
    cls: Any = None,
    data_fields: Iterable[str] | None = None,
    static_fields: Iterable[str] | None = None,
    drop_fields: Iterable[str] = (),
) -> Any:
    """Declare which attributes of ``cls`` are children and which static; a decorator.

    Fields with ``field(metadata={'static': True})`` are static unless lists say otherwise. A single list implies the
    other: all remaining fields. Classes that are not dataclasses need both. Unregistered dataclasses are leaves.

    ``drop_fields`` are in neither and are lost: then the constructor rebuilds the object and sets their
    defaults. The same holds for fields with ``init=False`` that are in neither of two given lists.
    """
    if cls is None:
        return functools.partial(
            register_dataclass, data_fields=data_fields, static_fields=static_fields, drop_fields=drop_fields
        )
    data = None if data_fields is None else _names(data_fields, "data_fields")
    static = None if static_fields is None else _names(static_fields, "static_fields")
    dropped = _names(drop_fields, "drop_fields")
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        all_fields = dataclasses.fields(cls)
        if data is not None and static is not None:
            dropped += tuple(
                f.name for f in all_fields if not f.init and f.name not in data + static + dropped
            )
        fields = {f.name: bool(f.metadata.get("static")) for f in all_fields if f.name not in dropped}
        if data is None and static is None:
            static = tuple(name for name, is_static in fields.items() if is_static)
        if data is None:
            data = tuple(name for name in fields if name not in (static or ()))
        if static is None:
            static = tuple(name for name in fields if name not in data)
        if sorted(data + static + dropped) != sorted({f.name for f in all_fields}):
            raise TreeError(
                f"data_fields {data}, static_fields {static} and drop_fields {dropped} are not the fields of "
                f"{cls.__name__}",
                why="each field is in exactly one of them, and "
                f"{cls.__name__} has {', '.join(f.name for f in all_fields)}",
            )
    elif data is None or static is None:
        raise TreeError(
            f"{getattr(cls, '__name__', cls)} is not a dataclass, so its fields are unknown",
            fix="decorate it with @dataclasses.dataclass first, or give both data_fields and static_fields",
        )
    _register(cls, _attribute_kind(cls, data, static, bool(dropped)))
    return cls


def _names(names: Any, what: str) -> tuple[str, ...]:
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return names
    raise ArgumentError(f"{what} holds names of fields, not {names!r:.60}", fix=f"{what}=['w', 'b']")


def register_static(cls: _C) -> _C:
    """Register hashable instances of ``cls`` as static, childless nodes; a decorator."""
    _register(cls, Kind(cls, lambda x: ((), x), lambda aux, xs: aux, _flat_keys))
    return cls


def static(**options: Any) -> Any:
    """``dataclasses.field`` for a static field: part of the structure, not a child."""
    try:
        metadata = {**(options.pop("metadata", None) or {}), "static": True}
        return dataclasses.field(metadata=metadata, **options)
    except (TypeError, ValueError) as e:
        raise ArgumentError(
            f"static takes the options of dataclasses.field: {e}", fix="static(default='add')"
        ) from None


def register_leaf(cls: _C) -> _C:
    """Register a dataclass or namedtuple ``cls`` as a leaf type; a decorator."""
    _register(cls, None)
    return cls


for _key in (DictKey, SequenceKey, GetAttrKey, FlattenedIndexKey):
    register_leaf(_key)
