"""Arrays as objects: printing, copying, properties; names of ``lax``, ``tree``."""

import copy
import math

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, tree
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.ir.trace import Tracer
from blufunc.numpy import methods
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.numpy.common import f32, same


@pytest.mark.parametrize(
    "x, text",
    [
        (lambda: bnp.asarray([1.0, 2.0]), "Array([1., 2.], dtype=float32)"),
        (lambda: bnp.asarray([[1, 2], [3, 4]]), "Array([[1, 2],\n       [3, 4]], dtype=int32)"),
        (lambda: bnp.ones(2, "bfloat16"), "Array([1., 1.], dtype=bfloat16)"),
        (lambda: bnp.float32(3), "Array(3., dtype=float32)"),
        (lambda: bnp.asarray(3.0), "Array(3., dtype=float32, weak_type=True)"),
        (lambda: bnp.asarray([True]), "Array([ True], dtype=bool)"),
        (lambda: bnp.zeros((0, 3)), "Array([], shape=(0, 3), dtype=float32)"),
        (lambda: from_numpy(np.zeros(2, dtypes.key)), "Array((2,)) key<fry>"),
    ],
)
def test_repr(x, text):
    assert repr(x()) == text


def test_text():
    x = bnp.asarray([1.0, 2.5])
    assert str(x) == "[1.  2.5]" and f"{x}" == "[1.  2.5]"
    assert f"{bnp.float32(2.5):.2f}" == "2.50" and f"{bnp.asarray(7):03d}" == "007"
    assert len(repr(bnp.arange(100000))) < 300
    with pytest.raises(errors.ArgumentError, match="format"):
        f"{x:.2f}"
    with pytest.raises(errors.ConcretizationError, match="format"):
        jit(lambda v: f"{v:.2f}")(1.0)
    with pytest.raises(errors.ConcretizationError, match="item"):
        jit(lambda v: v.item())(1.0)
    donated = bnp.ones(3) + 1
    jit(lambda v: v + 1, donate_argnums=0)(donated)
    assert "donated" in repr(donated) and "donated" in str(donated)


def test_copies_and_properties():
    x = bnp.asarray(f32(2, 3))
    assert copy.copy(x) is x and copy.deepcopy(x) is not x
    same(copy.deepcopy({"a": x})["a"], np.asarray(x))
    assert x.__array_namespace__() is bnp
    assert x.to_device("cpu") is x and x.itemsize == 4 and x.nbytes == 24 and x.size == 6 and x.ndim == 2
    same(x.real, np.asarray(x))
    same(x.imag, np.zeros((2, 3), np.float32))
    same(x.view("int32"), np.asarray(x).view(np.int32))
    for dtype in ("int8", "int16"):
        same(x.view(dtype), np.asarray(x).view(dtype))
        same(x.view(dtype).view("float32"), np.asarray(x))
    assert x.view() is x
    with pytest.raises(errors.ArgumentError, match="a dtype, not a shape"):
        x.view(2, 6)
    with pytest.raises(errors.ShapeError, match="2 elements make one, and the last axis has 3"):
        x[:, :3].view("int16")[:, :3].view("int32")
    same(x.clip(0, 1), np.asarray(x).clip(0, 1))
    same(x.round(1), np.asarray(x).round(1))
    same(x.conj(), np.asarray(x))
    assert x.item is not None and bnp.asarray([7]).item() == 7
    assert x.tolist() == np.asarray(x).tolist()
    assert isinstance(x, bnp.ndarray)
    assert jit(lambda v: isinstance(v, bnp.ndarray) and v)(True) is not None
    assert [float(v) for v in x[0].flat] == x[0].tolist()
    with pytest.raises(TypeError):
        hash(x)
    same(np.sin(x), np.sin(np.asarray(x))) if isinstance(np.sin(x), bnp.ndarray) else None
    assert bnp.pi == math.pi and bnp.newaxis is None and math.isnan(bnp.nan) and bnp.inf > 0


def test_methods_work_on_tracers():
    """No attribute of a tracer may stand in the way of a method."""
    x = np.abs(f32(3, 4)) + 1
    plain = {
        "reshape": ((4, 3),), "astype": ("int32",), "view": ("int32",), "to_device": ("cpu",), "repeat": (2,),
        "swapaxes": (0, 1), "take": (1,), "dot": (x.T,), "clip": (0, 1), "searchsorted": None, "nonzero": None,
        "argpartition": (1,), "choose": None, "compress": None,
    }  # fmt: skip
    for name in methods._METHODS:
        args = plain.get(name, ())
        if args is not None:
            got = jit(lambda v, name=name, args=args: getattr(v, name)(*args))(x)
            same(got, np.asarray(getattr(bnp.asarray(x), name)(*args)))
            batched = vmap(lambda v, name=name, args=args: getattr(v, name)(*args))(x[None])
            same(batched[0], np.asarray(got))
    waiting = [Tracer]
    for cls in waiting:
        waiting += cls.__subclasses__()
        assert not set(cls.__slots__) & (set(methods._METHODS) | {"at", "T", "mT", "real", "imag"}), cls


def test_every_public_name_is_there_and_documented():
    for module in (bnp, lax, tree):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and not isinstance(thing, type):
                assert thing.__doc__, name
        assert len(set(module.__all__)) == len(module.__all__)


def test_lax():
    x = bnp.asarray(f32(3, 4))
    h = np.asarray(x)
    same(lax.add(x, x), h + h)
    same(lax.select(x > 0, x, -x), np.abs(h))
    same(lax.select_n(x > 0, -x, x), np.abs(h))
    same(lax.select_n((x > 0).astype("int32"), -x, x), np.abs(h))
    same(lax.clamp(0.0, x, 1.0), h.clip(0, 1))
    same(lax.convert_element_type(x, "int32"), h.astype(np.int32))
    same(lax.bitcast_convert_type(x, "uint32"), h.view(np.uint32))
    same(lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)), np.broadcast_to(h, (2, 3, 4)))
    same(lax.broadcast(x, (2,)), np.broadcast_to(h, (2, 3, 4)))
    same(lax.reshape(x, (4, 3)), h.reshape(4, 3))
    same(lax.transpose(x, (1, 0)), h.T)
    same(lax.reduce_sum(x, (0,)), h.sum(0))
    same(lax.reduce_max(x, (1,)), h.max(1))
    same(lax.slice(x, (1, 0), (3, 4), (1, 2)), h[1:3, ::2])
    same(lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 1)))[1:, ::2], h)
    same(lax.iota("int32", 4), np.arange(4))
    same(lax.broadcasted_iota("float32", (2, 3), 1), np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3)))
    same(lax.full((2,), 3.0), np.full(2, 3, np.float32))
    same(lax.full_like(x, 2), np.full((3, 4), 2, np.float32))
    same(lax.dynamic_slice(x, (1, 1), (2, 2)), h[1:3, 1:3])
    same(lax.collapse(x[None], 0, 2), h)
    same(lax.batch_matmul(x[None], x.T[None]), (h @ h.T)[None])
    same(lax.squeeze(x[None], (0,)), h)
    same(lax.expand_dims(x, (0,)), h[None])
    same(lax.argmax(x, 1, "int32"), h.argmax(1))
    assert lax.stop_gradient({"a": x})["a"].shape == (3, 4)
    assert str(lax.add_p) == "add" and lax.mul_p.bind(x, x).shape == (3, 4)
    with pytest.raises(errors.ShapeError):
        lax.add(x, x[0])
    with pytest.raises(errors.DtypeError):
        lax.add(x, bnp.ones((3, 4), "int32"))
    jaxpr = make_jaxpr(lambda v: lax.full_like(v, 1.0))(x)
    assert [e.prim.name for e in jaxpr.eqns] == ["broadcast_in_dim"]


def test_tree():
    t = {"a": 1, "b": (2, [3])}
    assert tree.map(lambda v: v + 1, t) == {"a": 2, "b": (3, [4])}
    leaves, treedef = tree.flatten(t)
    assert leaves == tree.leaves(t) == [1, 2, 3] and tree.unflatten(treedef, leaves) == t
    assert tree.structure(t) == treedef and tree.reduce(lambda a, b: a + b, t) == 6 and tree.all(t)
    assert [tree.keystr(p) for p, _ in tree.leaves_with_path(t)] == ["['a']", "['b'][0]", "['b'][1][0]"]
    assert tree.map_with_path(lambda p, v: len(p), t) == {"a": 1, "b": (2, [3])}
    assert tree.register_pytree_node is tree.register_node
