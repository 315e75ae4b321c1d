"""``tree_util`` beyond ``core.pytree``: JAX's names, registration, ``Partial``."""

import dataclasses
import functools
import operator

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, tree, tree_util


def test_old_names_are_the_functions_of_tree():
    for (
        name
    ) in "all broadcast flatten leaves map reduce reduce_associative structure transpose unflatten".split():
        assert getattr(tree_util, f"tree_{name}") is getattr(tree, name)
    for name in "flatten_with_path leaves_with_path map_with_path".split():
        assert getattr(tree_util, f"tree_{name}") is getattr(tree, name)


# -- registration ----------------------------------------------------------------------------------


@tree_util.register_pytree_node_class
class Pair:
    def __init__(self, a, b, tag):
        self.a, self.b, self.tag = a, b, tag

    def tree_flatten(self):
        return (self.a, self.b), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


@tree_util.register_pytree_with_keys_class
class Keyed(Pair):
    def tree_flatten_with_keys(self):
        return [(tree_util.GetAttrKey("a"), self.a), (tree_util.DictKey("b"), self.b)], self.tag


class Plain:
    def __init__(self, *xs):
        self.xs = xs


class PlainKeyed(Plain):
    pass


tree_util.register_pytree_node(Plain, lambda p: (p.xs, None), lambda aux, xs: Plain(*xs))
tree_util.register_pytree_with_keys(
    PlainKeyed,
    lambda p: ([(tree_util.SequenceKey(10 * i), x) for i, x in enumerate(p.xs)], None),
    lambda aux, xs: PlainKeyed(*xs),
)


@tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mode:
    name: str


def paths(x):
    return [tree_util.keystr(path) for path, _ in tree_util.tree_leaves_with_path(x)]


def test_classes_by_their_methods():
    doubled = tree.map(lambda x: 2 * x, Pair(1, (2, 3), "t"))
    assert (doubled.a, doubled.b, doubled.tag) == (2, (4, 6), "t")
    assert paths(Pair(1, 2, "t")) == ["[<flat index 0>]", "[<flat index 1>]"]
    assert paths(Keyed(1, (2,), "t")) == [".a", "['b'][0]"]
    assert tree.structure(Pair(1, 2, "t")) != tree.structure(Pair(1, 2, "u"))
    assert type(tree.map(operator.neg, Keyed(1, 2, "t"))) is Keyed


def test_classes_by_functions():
    assert tree.map(operator.neg, Plain(1, [2])).xs == (-1, [-2])
    assert tree.map(operator.neg, PlainKeyed(1, [2])).xs == (-1, [-2])
    assert paths(PlainKeyed(1, [2])) == ["[0]", "[10][0]"]


def test_static_classes_are_part_of_the_structure():
    leaves, treedef = tree.flatten((1, Mode("a")))
    assert leaves == [1]
    assert tree.unflatten(treedef, [5]) == (5, Mode("a"))
    assert treedef == tree.structure((0, Mode("a"))) != tree.structure((0, Mode("b")))
    count = []
    f = bf.jit(lambda x, mode: count.append(mode) or x)
    for name in "aab":
        f(1.0, Mode(name))
    assert [m.name for m in count] == ["a", "b"]


@functools.partial(
    tree_util.register_dataclass, data_fields=["w"], meta_fields=["size"], drop_fields=["cache"]
)
@dataclasses.dataclass
class Layer:
    w: object
    size: int
    cache: list = dataclasses.field(default_factory=list)


@tree_util.register_dataclass
@dataclasses.dataclass
class Op:
    x: object
    name: str = tree.static(default="add", metadata={"unit": 1})


@dataclasses.dataclass
class Derived:
    x: object
    twice: object = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = (self.x, self.x)


tree_util.register_dataclass(Derived, ["x"], [])


def test_dataclasses():
    layer = tree.map(lambda w: w + 1, Layer(1, 8, [1, 2]))
    assert layer == Layer(2, 8, [])
    assert tree.leaves(Op(1, "mul")) == [1]
    assert tree.map(operator.neg, Op(1, "mul")) == Op(-1, "mul")
    assert dataclasses.fields(Op)[1].metadata == {"unit": 1, "static": True}
    assert tree.map(operator.neg, Derived(3)).twice == (-3, -3)


def test_wrong_registrations():
    class Bare:
        pass

    with pytest.raises(errors.ArgumentError, match="tree_flatten"):
        tree_util.register_pytree_node_class(Bare)
    with pytest.raises(errors.ArgumentError, match="tree_flatten_with_keys"):
        tree_util.register_pytree_with_keys_class(Pair)
    with pytest.raises(errors.ArgumentError, match="functions"):
        tree_util.register_pytree_node(Bare, 1, 2)
    with pytest.raises(errors.TreeError, match="already"):
        tree_util.register_static(Pair)
    with pytest.raises(errors.TreeError, match="drop_fields"):
        tree_util.register_dataclass(dataclasses.make_dataclass("Two", "ab"), ["a"], [])
    with pytest.raises(errors.ArgumentError, match="data_fields"):
        tree_util.register_dataclass(dataclasses.make_dataclass("Three", "ab"), "ab", [])
    with pytest.raises(errors.ArgumentError, match="static takes the options"):
        tree.static(defualt=1)


# -- Partial ---------------------------------------------------------------------------------------


def keep(*args, **kw):
    return args, kw


def test_partials_are_trees():
    p = tree_util.Partial(keep, 1, y=2)
    assert p(3, z=4) == ((1, 3), {"y": 2, "z": 4})
    assert tree.leaves(p) == [1, 2]
    assert paths(p) == [".args[0]", ".keywords['y']"]
    assert tree.map(operator.neg, p)() == ((-1,), {"y": -2})
    assert tree.structure(p) == tree.structure(tree_util.Partial(keep, 5, y=6))
    assert tree.structure(p) != tree.structure(tree_util.Partial(dict, 5, y=6))


@pytest.mark.parametrize("wrapped", [functools.partial(keep, 1), tree_util.Partial(keep, 1)])
def test_arguments_of_a_wrapped_partial_are_static(wrapped):
    p = tree_util.Partial(wrapped, 2)
    assert tree.leaves(p) == [2]
    assert tree.map(operator.neg, p)(3) == ((1, -2, 3), {})
    assert tree.structure(p) == tree.structure(tree_util.Partial(wrapped, 5))


def test_partials_pass_through_transforms():
    scale = tree_util.Partial(lambda w, x: w * x, bnp.float32(3.0))
    count = []
    f = bf.jit(lambda g, x: count.append(1) or g(x))
    assert float(f(scale, 2.0)) == 6.0
    assert float(f(tree.map(lambda w: w + 1, scale), 2.0)) == 8.0
    assert len(count) == 1
    assert float(bf.grad(lambda g: g(2.0))(scale).args[0]) == 2.0
    back = bf.jit(lambda w: tree_util.Partial(operator.mul, w * 2))(3.0)
    assert float(back(5.0)) == 30.0
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        tree_util.Partial(3)


# -- structures ------------------------------------------------------------------------------------


def test_structures():
    x = {"a": 1, "b": [2, (3,)]}
    treedef = tree.structure(x)
    assert (treedef.num_leaves, treedef.num_nodes) == (3, 6)
    assert treedef.node_data() == (dict, ("a", "b")) and tree.structure(1).node_data() is None
    assert tree_util.treedef_children(treedef) == [tree.structure(1), tree.structure([1, (1,)])]
    assert tree_util.treedef_is_leaf(tree.structure(1)) and not tree_util.treedef_is_leaf(treedef)
    assert tree_util.treedef_tuple([treedef, tree.structure(1)]) == tree.structure((x, 1))
    assert treedef.compose(tree.structure((1, 2))) == tree.structure(tree.map(lambda _: (1, 2), x))
    assert treedef.unflatten([1, 2, 3]) == x
    assert treedef.flatten_up_to({"a": (), "b": [2, ({},)]}) == [(), 2, {}]
    assert tree_util.build_tree(treedef, [1, [2, [3]]]) == x
    with pytest.raises(errors.TreeError, match="a sequence of 2"):
        tree_util.build_tree(treedef, [1, 2, 3])


def test_one_level():
    assert tree_util.flatten_one_level({"b": (2,), "a": 1}) == ([1, (2,)], ("a", "b"))
    assert tree_util.flatten_one_level_with_keys(Keyed(1, (2,), "t")) == (
        [(tree_util.GetAttrKey("a"), 1), (tree_util.DictKey("b"), (2,))],
        "t",
    )
    with pytest.raises(errors.TreeError, match="is a leaf"):
        tree_util.flatten_one_level(1)
    assert tree_util.is_tree_node(dict) and not tree_util.is_tree_node(int)
    assert tree_util.all_leaves([1, "a"]) and not tree_util.all_leaves([1, None])
    assert tree_util.all_leaves([(1, 2)], is_leaf=lambda x: type(x) is tuple)


def test_broadcast():
    assert tree.broadcast((1, 2), ([0, 0], {"a": 0})) == ([1, 1], {"a": 2})
    assert tree.broadcast(1, (0, (0, None))) == (1, (1, None))
    assert tree.broadcast((1, None), (0, None)) == (1, None)
    is_pair = lambda x: type(x) is tuple and len(x) == 2 and type(x[0]) is int
    assert tree.broadcast([(1, 2), 3], [[0, 0], (4, 5)], is_leaf=is_pair) == [[(1, 2), (1, 2)], 3]
    with pytest.raises(errors.TreeError, match="the prefix"):
        tree.broadcast((1, 2), (0, 0, 0))


def test_reduce_associative():
    join = lambda a, b: f"({a}{b})"
    assert tree.reduce_associative(join, list("abcde")) == "(((ab)(cd))e)"
    for n in range(1, 20):
        assert tree.reduce_associative(operator.add, [[str(i)] for i in range(n)], is_leaf=None) == "".join(
            map(str, range(n))
        )
    assert tree.reduce_associative(operator.add, (), identity=7) == 7
    for f in (tree.reduce_associative, tree.reduce):
        with pytest.raises(errors.TreeError, match="without leaves"):
            f(operator.add, ())


def test_is_leaf_may_ask_for_the_path():
    x = {"a": [1, (2, 3)], "b": 4}
    deep = lambda path, _: len(path) == 2
    found, treedef = tree.flatten_with_path(x, is_leaf=deep, is_leaf_takes_path=True)
    assert [(tree.keystr(p), v) for p, v in found] == [("['a'][0]", 1), ("['a'][1]", (2, 3)), ("['b']", 4)]
    assert tree.unflatten(treedef, [0, 1, 2]) == {"a": [0, 1], "b": 2}
    assert tree.leaves_with_path(x, deep, True) == found
    named = tree.map_with_path(
        lambda p, v, w: (tree.keystr(p), v, w), x, {"a": [5, [6]], "b": 7}, is_leaf=deep, is_leaf_takes_path=True
    )  # fmt: skip
    assert named == {"a": [("['a'][0]", 1, 5), ("['a'][1]", (2, 3), [6])], "b": ("['b']", 4, 7)}
    with pytest.raises(errors.TreeError, match="cannot be sorted"):
        tree.leaves_with_path({1: 0, "a": 0}, lambda path, _: False, True)


def test_transpose_finds_the_inner_structure():
    rows = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert tree.transpose(tree.structure([0, 0]), None, rows) == {"a": [1, 3], "b": [2, 4]}
    with pytest.raises(errors.TreeError, match="no leaf"):
        tree.transpose(tree.structure([]), None, [])


@pytest.mark.peer
def test_as_jax():
    """Each function of both libraries, on the same trees."""
    jax = pytest.importorskip("jax")
    jtu = jax.tree_util
    x = {"a": [1, (2, 3)], "b": (4, None)}
    programs = [
        lambda t: t.tree_broadcast((1, 2), ([0, 0], {"a": 0})),
        lambda t: t.tree_reduce_associative(operator.add, [1, (2, 3), [4, 5]]),
        lambda t: [t.keystr(p) for p, _ in t.tree_leaves_with_path(x)],
        lambda t: [t.keystr(p, simple=True, separator="/") for p, _ in t.tree_leaves_with_path(x)],
        lambda t: t.tree_map_with_path(lambda p, v: t.keystr(p), x),
        lambda t: str(t.treedef_tuple([t.tree_structure(x)] * 2)),
        lambda t: (t.tree_structure(x).num_leaves, t.tree_structure(x).num_nodes),
        lambda t: str(t.tree_structure(x).compose(t.tree_structure([1, 2]))),
        lambda t: list(map(str, t.treedef_children(t.tree_structure(x)))),
        lambda t: t.tree_structure(x).flatten_up_to({"a": [1, (2, {})], "b": (4, None)}),
        lambda t: t.tree_leaves(t.Partial(functools.partial(keep, 1), 2, x=3)),
        lambda t: t.tree_transpose(t.tree_structure([0, 0]), None, [{"a": 1}, {"a": 2}]),
        lambda t: [t.all_leaves([1, 2]), t.all_leaves([1, ()])],
        lambda t: [t.is_tree_node(c) for c in (dict, int, type(None))],
    ]
    for i, program in enumerate(programs):
        assert program(tree_util) == program(jtu), i
    assert {n for n in dir(jtu) if n[0] != "_"} - set(tree_util.__all__) == {"default_registry"}
