"""Static data that is comparable only with its own class."""

from dataclasses import dataclass, field
from typing import Any

import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.pytree import tree
from blufunc.transforms.staging.jit import jit
from blufunc.tree_util import register_dataclass, register_pytree_node


class Picky:
    """An ``__eq__`` that touches an attribute, and a hash that collides."""

    def __init__(self, v):
        self.v = v

    def __eq__(self, other):
        return self.v == other.v

    def __hash__(self):
        return 7


@register_dataclass
@dataclass
class Field:
    x: Any
    data: Any = field(metadata={"static": True})


class Node:
    def __init__(self, x, data):
        self.x, self.data = x, data


register_pytree_node(Node, lambda n: ((n.x,), n.data), lambda data, xs: Node(xs[0], data))


@pytest.mark.parametrize("cls", [Field, Node])
@pytest.mark.parametrize("other", [None, 3, "s", (Picky(2),), object])
def test_unrelated(cls, other):
    a, b = cls(1.0, Picky(2)), cls(1.0, other)
    for x, y in ((a, b), (b, a), ([a], [b]), ((a, a), (a, b))):
        assert tree.structure(x) != tree.structure(y)
        with pytest.raises(errors.TreeError, match="structure"):
            tree.map(lambda u, v: u, x, y)
        with pytest.raises(errors.BranchError, match="structure"):
            lax.cond(bnp.asarray(True), lambda x=x: x, lambda y=y: y)
    traces = []

    @jit
    def f(n):
        traces.append(None)
        return n.x + 1

    for n in (a, b, a, b, cls(1.0, Picky(2)), cls(1.0, Picky(3))):
        assert f(n) == 2.0
    assert len(traces) == 3


def test_own_class():
    a, b = Node(1.0, Picky(2)), Node(1.0, Picky(3))
    assert tree.structure(a) == tree.structure(Node(2.0, Picky(2)))
    assert tree.structure(a) != tree.structure(b)

    class Broken:
        def __eq__(self, other):
            raise RuntimeError("broken")

        __hash__ = None

    with pytest.raises(RuntimeError, match="broken"):
        assert tree.structure(Node(1.0, Broken())) == tree.structure(Node(1.0, Broken()))
