"""Structures of pytrees as JSON, and back.

Below ``exported.py``. In: a ``TreeDef``. Out: nested lists: None for a leaf, and ``[kind, static data, children]`` for
a node. Python's containers are known. A namedtuple and a registered class are stored under the name that the user gave
them, by ``register_namedtuple_serialization`` and ``register_pytree_node_serialization``, in both processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blufunc import errors
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.core.pytree.nodes import DEFAULT, DICT, KINDS, LIST, NONE, ORDERED, TUPLE, Kind
from blufunc.export.values import Decoder, Encoder, Inexpressible, Unreadable

_PLAIN = {"none": NONE, "list": LIST, "tuple": TUPLE, "dict": DICT, "ordered": ORDERED}


@dataclass(frozen=True)
class _Registered:
    """How instances of a class are stored."""

    cls: type
    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_by_class: dict[type, _Registered] = {}
_by_name: dict[str, _Registered] = {}


def register_pytree_node_serialization(
    nodetype: type,
    *,
    serialized_name: str,
    serialize_auxdata: Callable[[Any], bytes | bytearray],
    deserialize_auxdata: Callable[[bytes], Any],
    from_children: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> type:
    """Let exported programs take and return instances of a registered pytree class.

    Args:
      nodetype: the class, registered by ``tree_util.register_pytree_node`` or one of its siblings.
      serialized_name: its name in files, the same in all processes.
      serialize_auxdata, deserialize_auxdata: its static data as bytes, and back.
      from_children: None; the registered function rebuilds instances.
    Returns:
      the class.
    Raises:
      ArgumentError: it is no registered class, or the class or name is registered already.
      UnsupportedError: ``from_children`` is given.
    """
    if from_children is not None:
        raise errors.UnsupportedError(
            "register_pytree_node_serialization: from_children.",
            where=source.here(),
            why="instances are rebuilt as tree_util.register_pytree_node says.",
            fix="leave it out",
        )
    if not isinstance(nodetype, type) or KINDS[nodetype] is None:
        raise errors.ArgumentError(
            f"register_pytree_node_serialization: {getattr(nodetype, '__name__', nodetype)} is no pytree class.",
            where=source.here(),
            fix="bf.tree_util.register_pytree_node(cls, flatten, unflatten) first",
        )
    _register(
        _Registered(nodetype, serialized_name, lambda x: bytes(serialize_auxdata(x)), deserialize_auxdata)
    )
    return nodetype


def register_namedtuple_serialization(nodetype: type, *, serialized_name: str) -> type:
    """Let exported programs take and return instances of a namedtuple class.

    Args:
      nodetype: the class.
      serialized_name: its name in files, the same in all processes.
    Returns:
      the class.
    Raises:
      ArgumentError: it is no namedtuple, or the class or name is registered already.
    """
    if not (isinstance(nodetype, type) and issubclass(nodetype, tuple) and hasattr(nodetype, "_fields")):
        raise errors.ArgumentError(
            f"register_namedtuple_serialization: {getattr(nodetype, '__name__', nodetype)} is no namedtuple.",
            where=source.here(),
            fix="export.register_pytree_node_serialization for other classes",
        )
    fields: Any = nodetype._fields  # type: ignore[attr-defined]
    made: Any = nodetype(*[0] * len(fields))  # type: ignore[arg-type]
    _, aux = tree.structure(made).node_data()  # type: ignore[misc]
    _register(_Registered(nodetype, serialized_name, lambda _: b"", lambda _: aux))
    return nodetype


def _register(entry: _Registered) -> None:
    for what, taken in ((entry.cls.__name__, entry.cls in _by_class), (entry.name, entry.name in _by_name)):
        if taken:
            raise errors.ArgumentError(
                f"the serialization of {what} is registered already.",
                where=source.here(),
                fix="register each class once, under a name of its own",
            )
    _by_class[entry.cls] = _by_name[entry.name] = entry  # type: ignore[index]


def _refuse(*args: Any) -> Any:
    raise Inexpressible("a part of a program")


_encode = Encoder(_refuse, _refuse)
_decode = Decoder(_refuse, _refuse, _refuse)


def encoded(treedef: tree.TreeDef) -> Any:
    """A structure as JSON.

    Raises:
      UnsupportedError: it has a class, or a key of a dict, that no file can hold.
    """
    return _encoded(treedef.spec)


def _encoded(spec: tree.Spec) -> Any:
    if spec is None:
        return None
    kind, aux, children = spec
    return [*_node(kind, aux), [_encoded(c) for c in children]]


def _node(kind: Kind, aux: Any) -> tuple[str, Any]:
    for name, plain in _PLAIN.items():
        if kind is plain:
            return name, _keys(kind, aux)
    if kind is DEFAULT:
        factory = getattr(aux[0], "__name__", None)
        if aux[0] is None or _FACTORIES.get(factory or "") is aux[0]:
            return "defaultdict", [factory, _keys(kind, aux[1])]
    entry = _by_class.get(kind.cls)
    if entry is None:
        named = issubclass(kind.cls, tuple) and hasattr(kind.cls, "_fields")
        raise errors.UnsupportedError(
            f"export: arguments and results with the class {kind.cls.__name__}.",
            where=source.here(),
            why="a file refers to a class by a name that both processes give it.",
            fix=f'export.register_namedtuple_serialization({kind.cls.__name__}, serialized_name="...")'
            if named
            else f'export.register_pytree_node_serialization({kind.cls.__name__}, serialized_name="...", '
            "serialize_auxdata=..., deserialize_auxdata=...)",
        )
    return f"class {entry.name}", entry.encode(aux).hex()


_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "int": int, "float": float, "set": set}


def _keys(kind: Kind, aux: Any) -> Any:
    try:
        return _encode(aux)
    except Inexpressible as error:
        raise errors.UnsupportedError(
            f"export: a {kind.cls.__name__} with the keys {aux!r:.60}, one of which is {error}.",
            where=source.here(),
            fix="use strings and numbers as keys",
        ) from None


def decoded(text: Any) -> tree.TreeDef:
    """The structure that ``encoded`` wrote.

    Raises:
      Unreadable: it is no structure.
      UnsupportedError: it has a class that is not registered in this process.
    """
    spec = _spec_of(text)
    return tree.LEAF if spec is None else tree.TreeDef(spec, _n_leaves(spec))


def _n_leaves(spec: tree.Spec) -> int:
    return 1 if spec is None else sum(map(_n_leaves, spec[2]))


def _spec_of(text: Any) -> tree.Spec:
    if text is None:
        return None
    name, aux, children = text
    specs = tuple([_spec_of(c) for c in children])
    if name in _PLAIN:
        return _PLAIN[name], _decode(aux), specs
    if name == "defaultdict":
        factory, keys = aux
        return DEFAULT, (None if factory is None else _FACTORIES[factory], _decode(keys)), specs
    if not name.startswith("class "):
        raise Unreadable(f"{name!r:.60} is no node of a pytree")
    entry = _by_name.get(name.removeprefix("class "))
    if entry is None:
        raise errors.UnsupportedError(
            f"the exported program has arguments or results of a class {name.removeprefix('class ')!r:.60}.",
            where=source.here(),
            why="no class of this process is registered under that name.",
            fix="export.register_pytree_node_serialization or register_namedtuple_serialization, ahead of "
            "export.deserialize",
        )
    kind = KINDS[entry.cls]
    assert kind is not None
    return kind, entry.decode(bytes.fromhex(aux)), specs
