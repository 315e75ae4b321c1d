"""Pytrees and key paths: round trips, structures, errors that name the place."""

import dataclasses
import pickle
import re
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blufunc as bf
from blufunc.core.pytree import nodes, paths, tree
from blufunc.core.pytree import reduce as treefold
from blufunc.core.pytree.nodes import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from blufunc.errors import ArgumentError, TreeError

Point = namedtuple("Point", "x y")


@nodes.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    w: object
    b: object = None
    size: int = dataclasses.field(default=3, metadata={"static": True})


@nodes.register_dataclass
@dataclasses.dataclass(slots=True)
class Picky:
    """Its constructor inspects its argument, so unflatten must not call it."""

    value: object

    def __post_init__(self):
        assert isinstance(self.value, float)


class Box:
    def __init__(self, children, tag):
        self.children, self.tag = children, tag

    def __eq__(self, other):
        return type(other) is type(self) and (self.children, self.tag) == (other.children, other.tag)

    __hash__ = None  # type: ignore[assignment]


class Named(Box):
    pass


nodes.register_node(Box, lambda b: (b.children, b.tag), lambda tag, xs: Box(list(xs), tag))
nodes.register_node(
    Named,
    lambda n: (n.children, n.tag),
    lambda tag, xs: Named(list(xs), tag),
    lambda n: ([(GetAttrKey(f"part{i}"), c) for i, c in enumerate(n.children)], n.tag),
)


class SubDict(dict):
    pass


class SubList(list):
    pass


# tree, leaves, repr of its structure, paths
CASES = [
    (1, [1], "*", [""]),
    (None, [], "None", []),
    ({}, [], "{}", []),
    ((), [], "()", []),
    ([], [], "[]", []),
    ((1,), [1], "(*,)", ["[0]"]),
    ({"b": 2, "a": [1, (3,)]}, [1, 3, 2], "{'a': [*, (*,)], 'b': *}", ["['a'][0]", "['a'][1][0]", "['b']"]),
    ({2: 1, 1: None}, [1], "{1: None, 2: *}", ["[2]"]),
    (OrderedDict(b=1, a=2), [1, 2], "OrderedDict({'b': *, 'a': *})", ["['b']", "['a']"]),
    (defaultdict(list, b=1, a=2), [2, 1], "defaultdict(list, {'a': *, 'b': *})", ["['a']", "['b']"]),
    (Point(1, [2]), [1, 2], "Point(x=*, y=[*])", [".x", ".y[0]"]),
    (Layer(1, (2, 3), 7), [1, 2, 3], "Layer(w=*, b=(*, *), size=7)", [".w", ".b[0]", ".b[1]"]),
    (Picky(1.0), [1.0], "Picky(value=*)", [".value"]),
    (Box([1, [2]], "t"), [1, 2], "Box['t'](*, [*])", ["[<flat index 0>]", "[<flat index 1>][0]"]),
    (Named([1, 2], None), [1, 2], "Named(part0=*, part1=*)", [".part0", ".part1"]),
    (SubDict(a=1), [SubDict(a=1)], "*", [""]),
    ([SubList([1])], [SubList([1])], "[*]", ["[0]"]),
    ({"k": DictKey("a")}, [DictKey("a")], "{'k': *}", ["['k']"]),
]


@pytest.mark.parametrize("value, want_leaves, want_repr, want_paths", CASES, ids=lambda v: None)
def test_cases(value, want_leaves, want_repr, want_paths):
    leaves, treedef = tree.flatten(value)
    assert leaves == want_leaves == tree.leaves(value)
    assert repr(treedef) == f"PyTreeDef({want_repr})"
    assert treedef.num_leaves == len(leaves)
    back = tree.unflatten(treedef, iter(leaves))
    assert back == value and type(back) is type(value)
    assert tree.structure(back) == treedef and hash(tree.structure(back)) == hash(treedef)
    assert paths.leaf_paths(treedef) == want_paths
    pairs, same = paths.flatten_with_path(value)
    assert same == treedef
    assert [(paths.keystr(path), leaf) for path, leaf in pairs] == list(zip(want_paths, leaves, strict=True))
    assert tree.flatten(value, is_leaf=lambda x: False) == (leaves, treedef)
    assert pickle.loads(pickle.dumps(treedef)) == treedef
    assert tree.flatten_up_to(treedef, value) == leaves
    assert sum(c.num_leaves for c in treedef.children()) == (0 if treedef is tree.LEAF else len(leaves))


def test_structures_of_cases_differ():
    structures = {repr(v): tree.structure(v) for v, *_ in CASES}
    assert len(set(structures.values())) == len(structures) - 1  # 1 and SubDict are both bare leaves
    assert tree.structure(Layer(1, 2, 3)) != tree.structure(Layer(1, 2, 4))
    assert tree.structure(OrderedDict(a=1, b=2)) != tree.structure(OrderedDict(b=2, a=1))
    assert tree.structure({"a": 1, "b": 2}) == tree.structure({"b": 1, "a": 2})
    assert tree.structure([1]) != "something else"


def test_leaf_is_a_singleton():
    assert (
        tree.structure(1) is tree.structure("x") is tree.structure([1], is_leaf=lambda x: True) is tree.LEAF
    )
    assert tree.structure([1]).children()[0] is tree.LEAF
    assert pickle.loads(pickle.dumps(tree.LEAF)) is tree.LEAF
    assert tree.LEAF.node_type is None and tree.LEAF.children() == []
    assert tree.structure([1]).node_type is list and tree.structure(None).node_type is type(None)


containers = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Layer, inner, inner, st.integers(0, 2)),
        st.builds(Box, st.lists(inner, max_size=3), st.integers(0, 2)),
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(containers)
def test_round_trip(value):
    leaves, treedef = tree.flatten(value)
    assert tree.unflatten(treedef, leaves) == value
    assert treedef.num_leaves == len(leaves) == len(paths.leaf_paths(treedef))
    assert len(set(paths.leaf_paths(treedef))) == len(leaves)
    marked = tree.unflatten(treedef, range(len(leaves)))
    assert tree.leaves(marked) == list(range(len(leaves)))
    assert tree.structure(marked) == treedef and hash(tree.structure(marked)) == hash(treedef)
    assert paths.diff(treedef, tree.structure(marked)) == []
    assert tree.map(lambda a, b: (a, b), value, value) == tree.map(lambda a: (a, a), value)


@settings(max_examples=200, deadline=None)
@given(containers, containers)
def test_diff_agrees_with_equality(a, b):
    da, db = tree.structure(a), tree.structure(b)
    assert (da == db) == (paths.diff(da, db) == [])
    try:
        tree.flatten_up_to(da, b)
    except TreeError as error:
        message = str(error)
    else:
        return
    assert da != db and "\n" in message  # the second line says where


@settings(max_examples=200, deadline=None)
@given(containers, containers)
def test_leaves_of_trees_of_one_structure(a, b):
    treedef = tree.structure(a)
    assert tree.leaves_like(treedef, a) == tree.leaves(a)
    assert tree.leaves_like(treedef, b) == (tree.leaves(b) if tree.structure(b) == treedef else None)


TOLD_APART = [
    ({1: 0}, {1.0: 0}),
    ({0.0: 0}, {-0.0: 0}),
    ({1: 0, 2: 0}, {2: 0, True: 0}),
    ([{(1, "a"): 0}], [{(True, "a"): 0}]),
    (OrderedDict({1: 0}), OrderedDict({1.0: 0})),
    (defaultdict(list, {1: 0}), defaultdict(list, {1.0: 0})),
    (Layer(1, 2, 1), Layer(1, 2, True)),
    (Layer(1, 2, (1, 0.0)), Layer(1, 2, (1, -0.0))),
    (Layer(1, 2, Layer(None, None, 1)), Layer(1, 2, Layer(None, None, 1.0))),
    ((3, [Layer(1, Box([2], 1))]), (3, [Layer(1, Box([2], 1.0))])),
]
"""Trees whose static data or keys are equal numbers of other classes or signs."""


@pytest.mark.parametrize("one, other", TOLD_APART, ids=lambda v: None)
def test_numbers_of_other_classes_are_another_structure(one, other):
    a, b = tree.structure(one), tree.structure(other)
    assert a.spec == b.spec and a != b and hash(a) == hash(b)
    assert a == tree.structure(tree.map(lambda x: x, one))
    lines = paths.diff(a, b, "one", "other")
    assert lines and paths.diff(a, a) == []
    assert tree.map(lambda x, y: (x, y), one, other) == tree.map(lambda x: (x, x), one), (
        "what is mapped is equal"
    )


@pytest.mark.parametrize(
    "like, other",
    [
        (1, [1]),
        ([1], 1),
        ([1], (1,)),
        ([1], [None]),
        ([1], [[1]]),
        ([1, 2], [1]),
        ((1,), Point(1, 2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({"a": 1, "b": 1}, {"a": 1}),
        ({"a": 1}, {"a": {}}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, SubDict(a=1)),
        ({"a": 1}, {1: 0, "b": 0}),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        (defaultdict(list, a=1), defaultdict(dict, a=1)),
        (defaultdict(list, a=1), defaultdict(list, {1: 0, "b": 0})),
        (Layer(1, 2, 3), Layer(1, 2, 4)),
        (Layer(1, 2), Layer(1)),
        (Box([1], 0), Box([1], 1)),
        (Box([1], 0), Box([1, 2], 0)),
        *TOLD_APART,
    ],
    ids=lambda v: None,
)
def test_other_structures_have_no_leaves_like_these(like, other):
    treedef = tree.structure(like)
    assert tree.leaves_like(treedef, like) == tree.leaves(like)
    assert tree.leaves_like(treedef, other) is None


def test_the_order_in_dicts_is_no_structure():
    assert tree.leaves_like(tree.structure({"a": 1, "b": [2]}), {"b": [3], "a": 4}) == [4, 3]


def test_unflatten_errors():
    treedef = tree.structure([1, 2])
    with pytest.raises(TreeError, match="3 leaves were given for a structure of 2"):
        tree.unflatten(treedef, [1, 2, 3])
    with pytest.raises(ArgumentError, match="treedef, leaves"):
        tree.unflatten([1, 2], treedef)


def test_unsortable_keys_name_the_path():
    with pytest.raises(TreeError, match=r"at \['a'\]\[1\] cannot be sorted: \[1, 'b'\]"):
        tree.flatten({"a": [0, {1: 0, "b": 0}]})
    with pytest.raises(TreeError, match="OrderedDict"):
        tree.flatten({1: 0, "b": 0}, is_leaf=lambda x: False)
    with pytest.raises(TreeError, match=r"\['a'\].*cannot be sorted"):
        tree.flatten_up_to(tree.structure({"a": {"b": 0}}), {"a": {1: 0, "b": 0}})
    with pytest.raises(TreeError, match=r"at \['a'\] cannot be sorted"):
        tree.flatten_up_to(
            tree.structure({"a": defaultdict(list, b=0)}), {"a": defaultdict(list, {1: 0, "b": 0})}
        )


def test_static_data_need_only_be_comparable():
    made = lambda size: tree.structure({"a": Layer(1, 2, size=size), "b": [Box([1], [size])]})
    assert hash(made([3])) == hash(made([3])) and made([3]) == made([3]) != made([4])
    calls = []
    fun = bf.jit(lambda t: calls.append(0) or t["a"].w + 1)
    for size in ([3], [3], [4]):
        fun({"a": Layer(np.ones(2), np.ones(2), size=size)})
    assert len(calls) == 2


def test_static_data_that_changes_is_another_key():
    fun = bf.jit(lambda t: t.w * t.size[0])
    layer = Layer(np.ones(2, np.float32), size=[2.0])
    assert list(fun(layer)) == [2, 2]
    layer.size[0] = 3.0
    assert list(fun(layer)) == [3, 3]
    assert list(fun(Layer(np.ones(2, np.float32), size=[2.0]))) == [2, 2]


@pytest.mark.parametrize("value", [np.ones(2), {"x": np.ones(2)}, [np.ones(2)]])
def test_static_arrays_name_the_field(value):
    treedef = tree.structure({"a": Layer(1, 2, size=value)})
    with pytest.raises(
        TreeError, match=r"static field 'size' of Layer, a \w+, does not equal its copy at \['a'\]"
    ):
        hash(treedef)
    with pytest.raises(TreeError, match=r"the static data of Box, a .*, does not equal its copy"):
        hash(tree.structure(Box([1], value)))


def test_map():
    assert tree.map(lambda x: x + 1, {"a": 1, "b": (2, None)}) == {"a": 2, "b": (3, None)}
    assert tree.map(lambda x, y: x + y, [1, 2], [10, 20]) == [11, 22]
    assert tree.map(lambda x, y: (x, y), [1, 2], [{"k": 3}, 4]) == [(1, {"k": 3}), (2, 4)]
    assert tree.map(lambda x: x is None, [None, 1], is_leaf=lambda x: x is None) == [True, False]
    assert tree.map(sum, [(1, 2), (3,)], is_leaf=lambda x: isinstance(x, tuple)) == [3, 3]


@pytest.mark.parametrize(
    "first, second, line",
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, "['a'][2]: only in tree 2"),
        ({"a": 1, "b": [2]}, {"a": 1}, "['b']: only in the first tree"),
        (
            {"b": {"x": 1}},
            {"b": (1,)},
            "['b']: the first tree has a dict with keys 'x', tree 2 has a tuple of 1",
        ),
        ([[1, 2]], [3.0], "[0]: the first tree has a list of 2, tree 2 has a leaf (float)"),
        ([[1]], [None], "[0]: the first tree has a list of 1, tree 2 has None"),
        ([None], [1], "[0]: the first tree has None, tree 2 has a leaf (int)"),
        ([1], (1,), "at the root: the first tree has a list of 1, tree 2 has a tuple of 1"),
        (Layer(1, 2, 3), Layer(1, 2, 4), ".size: static, 3 in the first tree, 4 in tree 2"),
        (
            Box([1], "s"),
            Box([1], "t"),
            "at the root: static data of Box, 's' in the first tree, 't' in tree 2",
        ),
        (
            OrderedDict(a=1, b=2),
            OrderedDict(b=1, a=2),
            "at the root: keys in order ['a', 'b'] in the first tree",
        ),
        (defaultdict(int, a=1), defaultdict(list, a=1), "at the root: default factory <class 'int'>"),
        (
            OrderedDict(a=1),
            {"a": 1},
            "the first tree has an OrderedDict with keys 'a', tree 2 has a dict with",
        ),
        (Point([1], 2), Point({}, 2), ".x: the first tree has a list of 1, tree 2 has an empty dict"),
        ([1] * 9, [1], "and 4 more differences"),
    ],
)
def test_map_mismatch_names_the_place(first, second, line):
    with pytest.raises(TreeError, match=re.escape(line)):
        tree.map(lambda x, y: None, first, second)


def test_reduce_and_all():
    assert treefold.reduce(lambda a, b: a + b, {"a": 1, "b": [2, 3]}) == 6
    assert treefold.reduce(lambda a, b: a + b, [], 5) == 5
    assert treefold.all([1, {"a": True}]) and not treefold.all([1, 0]) and treefold.all(None)


def test_transpose():
    value = [{"a": 1, "b": (2, 3)}, {"a": 4, "b": (5, 6)}]
    outer, inner = tree.structure([0, 0]), tree.structure(value[0])
    turned = tree.transpose(outer, inner, value)
    assert turned == {"a": [1, 4], "b": ([2, 5], [3, 6])}
    assert tree.transpose(inner, outer, turned) == value
    with pytest.raises(TreeError, match=r"element 1 of the tree does not have the structure of the inner"):
        tree.transpose(outer, inner, [value[0], 1])


@pytest.mark.parametrize(
    "prefix, value, want",
    [
        (0, {"a": 1, "b": [2, 3]}, [0, 0, 0]),
        ({"a": 0, "b": 1}, {"a": 1, "b": [2, 3]}, [0, 1, 1]),
        ((0, None), ([1, 2], {"x": 3}), [0, 0, None]),
        (None, [1, 2], [None, None]),
        ([0, 1], [None, 5], [1]),
    ],
)
def test_broadcast_prefix(prefix, value, want):
    assert tree.broadcast_prefix(prefix, value, is_leaf=lambda x: x is None) == want


def test_broadcast_prefix_errors():
    assert tree.broadcast_prefix((0, None), (1, None)) == [0]
    with pytest.raises(TreeError, match=re.escape("[1]: the prefix has None, the tree has a leaf (int)")):
        tree.broadcast_prefix((0, None), (1, 2))
    with pytest.raises(TreeError, match=re.escape("['a'][1]: only in the tree")):
        tree.broadcast_prefix({"a": [0]}, {"a": [1, 2]})


def test_register_dataclass():
    @nodes.register_dataclass(static_fields=["n"])
    @dataclasses.dataclass
    class Marked:
        x: object
        n: int

    @nodes.register_dataclass
    @dataclasses.dataclass
    class Plain:
        x: object

    class Bare:
        pass

    nodes.register_dataclass(Bare, ("x", "y"), ())
    bare = Bare()
    bare.x, bare.y = 1, [2]
    assert tree.leaves(bare) == [1, 2]
    assert repr(tree.structure(Marked(1, 2))) == "PyTreeDef(Marked(x=*, n=2))"
    assert tree.map(lambda x: x + 1, Marked(1, 2)) == Marked(2, 2)
    assert tree.leaves(Plain([1, 2])) == [1, 2]

    class Other:
        pass

    with pytest.raises(TreeError, match="is not a dataclass"):
        nodes.register_dataclass(Other)
    with pytest.raises(TreeError, match="are not the fields of Layer"):
        nodes.register_dataclass(Layer, data_fields=["w"], static_fields=["size"])


def test_registration_rules():
    with pytest.raises(TreeError, match="already"):
        nodes.register_node(Box, lambda b: ((), None), lambda aux, xs: None)
    with pytest.raises(TreeError, match="already"):
        nodes.register_node(dict, lambda b: ((), None), lambda aux, xs: None)
    with pytest.raises(ArgumentError, match="class"):
        nodes.register_node(Box([], 1), lambda b: ((), None), lambda aux, xs: None)

    class Late:
        child = 1

    late = Late()
    assert tree.leaves(late) == [late]  # a leaf at first; registration changes that
    nodes.register_node(Late, lambda b: iter([1, 2]), lambda aux, xs: late)
    with pytest.raises(TreeError, match=r"return \(children, aux\)"):
        tree.leaves(late)

    @nodes.register_leaf
    @dataclasses.dataclass
    class Spec:
        x: int

    assert tree.structure(Spec(1)) is tree.LEAF


def test_unregistered_dataclasses_are_leaves():
    @dataclasses.dataclass
    class Spec:
        x: int

    assert tree.structure(Spec(1)) is tree.LEAF
    with pytest.raises(ArgumentError, match=r"fix: decorate the class with tree\.register_dataclass"):
        bf.jit(lambda s: s.x)(Spec(1))


def test_keys_of_a_class_that_refuses_placeholders():
    class Strict:
        def __init__(self, x):
            self.x = x + 1 - 1

    nodes.register_node(
        Strict,
        lambda s: ((s.x,), None),
        lambda aux, xs: Strict(*xs),
        lambda s: ([(GetAttrKey("x"), s.x)], None),
    )
    assert paths.leaf_paths(tree.structure(Strict(1))) == ["[<flat index 0>]"]
    assert paths.leaves_with_path(Strict(1)) == [((GetAttrKey("x"),), 1)]


def test_keystr():
    path = (DictKey("a"), SequenceKey(0), GetAttrKey("x"), FlattenedIndexKey(3))
    assert paths.keystr(path) == "['a'][0].x[<flat index 3>]"
    assert paths.keystr(path, simple=True, separator="/") == "a/0/x/3"
    assert paths.keystr(()) == ""


def test_map_with_path():
    value = {"a": [1, None], "b": 2}
    assert paths.map_with_path(lambda p, x: f"{paths.keystr(p)}={x}", value) == {
        "a": ["['a'][0]=1", None],
        "b": "['b']=2",
    }
    assert paths.map_with_path(lambda p, x, y: (len(p), x, y), value, value)["b"] == (1, 2, 2)
    with_none = paths.map_with_path(lambda p, x: len(p), value, is_leaf=lambda x: x is None)
    assert with_none == {"a": [2, 2], "b": 1}


def test_diff():
    a = tree.structure({"a": [1, 2], "b": {"x": 1}, "c": Layer(1, 2, 3)})
    b = tree.structure({"a": [1], "b": 1, "c": Layer(1, [2], 4), "d": 0})
    assert paths.diff(a, b, "old", "new") == [
        "['d']: only in new",
        "['a'][1]: only in old",
        "['b']: old has a dict with keys 'x', new has a leaf",
        "['c'].size: static, 3 in old, 4 in new",
        "['c'].b: old has a leaf, new has a list of 1",
    ]
    a, b = (tree.structure({"c": Layer(1, 2, n), "d": {n: 1}}) for n in (1, 1.0))
    assert paths.diff(a, b, "old", "new") == [
        "['c'].size: static, 1 in old, 1.0 in new",
        "['d'][1]: only in old",
        "['d'][1.0]: only in new",
    ]


def test_diff_of_a_leaf():
    b = tree.structure({"a": [1], "b": 1, "c": Layer(1, [2], 4), "d": 0})
    assert paths.diff(tree.LEAF, b) == [
        "at the root: the first has a leaf, the second has a dict with keys 'a', 'b', 'c', 'd'"
    ]


@pytest.mark.peer
@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.integers()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
            st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda d: defaultdict(int, d)),
            st.builds(Point, inner, inner),
        ),
        max_leaves=15,
    )
)
def test_agrees_with_jax(value):
    jax = pytest.importorskip("jax")
    assert tree.leaves(value) == jax.tree.leaves(value)
    want = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(value)]
    assert paths.leaf_paths(tree.structure(value)) == want
