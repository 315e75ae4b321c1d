"""Bad input: the class of each error, and its what, where, why and fix."""

import functools
import pickle
import re
from dataclasses import dataclass

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy, lift
from blufunc.core.ir import dtypes
from blufunc.core.ops import dot, reduce, shape
from blufunc.core.ops import elementwise as ew
from blufunc.core.primitives import linear_ops
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, jvp, linearize, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.while_loop import while_loop
from blufunc.transforms.staging.eval_shape import eval_shape
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

X = np.array([0.5, -1.0, 2.0], np.float32)
M = np.ones((2, 3), np.float32)
N = np.array([1, 2, 3])
ARR = from_numpy(X)


def looped(x):
    y = ew.mul(x, 2.0)
    return while_loop(lambda v: ew.lt(v, 9.0), lambda v: ew.mul(v, x), y)


@pytest.mark.parametrize("f", [grad(looped), grad(jit(looped)), jit(grad(jit(looped)))])
def test_errors_of_rules_name_the_line_that_made_the_operation(f):
    with pytest.raises(errors.GradError, match="return while_loop"):
        f(3.0)


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


def scale(params, x):
    return ew.mul(params["w"], x)


@dataclass(frozen=True)
class Bad:
    """A mistake and what is said about it.

    Attributes:
      run: makes it.
      error: the class of the error.
      says: texts in its message: the argument or path, and the values concerned.
      has: the parts that the message must have besides ``what`` and ``where``.
    """

    run: object
    error: type
    says: tuple
    has: tuple = ("fix",)


def assign():
    ARR[0] = 1.0


def assign_traced(x):
    x[0] = 1.0
    return x


def branch(x):
    if x > 0 if isinstance(x, float) else ew.gt(x, 0.0):
        return x
    return ew.neg(x)


def leak(transform, *args):
    """Store the traced argument outside, and use it after the transform has ended."""
    kept = []

    def f(x):
        kept.append(x)
        return total(x) if x.ndim else x

    transform(f)(*args)
    return kept[0]


def use_after_donation():
    a = from_numpy(X)
    step = jit(lambda x: ew.add(x, 1.0), donate_argnums=0)
    step(a)
    return ew.neg(a)


SHAPES = {
    "elementwise": Bad(lambda: ew.add(lift(X), lift(M)), errors.ShapeError, ("add", "f32[3]", "f32[2,3]")),
    "elementwise in jit": Bad(lambda: jit(ew.add)(X, M), errors.ShapeError, ("add", "f32[3]", "f32[2,3]")),
    "elementwise in grad": Bad(
        lambda: grad(lambda x: total(ew.mul(x, M)))(X), errors.ShapeError, ("mul", "f32[2,3]")
    ),
    "elementwise in vmap": Bad(
        lambda: vmap(ew.add, (0, None))(M, M), errors.ShapeError, ("add", "f32[3]", "f32[2,3]")
    ),
    "select": Bad(
        lambda: ew.select(N > 1, lift(M), 1.0), errors.ShapeError, ("select", "bool[3]", "f32[2,3]"), ()
    ),
    "reshape": Bad(
        lambda: linear_ops.reshape(lift(M), (4,)), errors.ShapeError, ("f32[2,3]", "6", "(4,)"), ()
    ),
    "reduce over a missing axis": Bad(
        lambda: reduce.reduce_max(M, (2,)), errors.ShapeError, ("f32[2,3]", "(2,)"), ()
    ),
    "transpose": Bad(
        lambda: linear_ops.transpose(lift(M), (0, 0)), errors.ShapeError, ("(0, 0)", "f32[2,3]"), ()
    ),
    "concatenate": Bad(
        lambda: shape.concatenate([lift(X), lift(M)], 0), errors.ShapeError, ("array 1", "f32[2,3]")
    ),
    "contraction": Bad(
        lambda: dot.dot_general(lift(M), lift(M), (((1,), (0,)), ((), ()))),
        errors.ShapeError,
        ("axis 1", "size 3", "axis 0", "size 2"),
        (),
    ),
    "dtypes that do not meet": Bad(
        lambda: ew.add(lift(X), lift(N)), errors.DtypeError, ("add", "f32[3]", "i32[3]")
    ),
    "floats only": Bad(lambda: ew.sin(N), errors.DtypeError, ("sin", "i32[3]")),
    "a float that does not fit": Bad(lambda: ew.add(lift(N), 1.5), errors.DtypeError, ("1.5", "i32[3]")),
}

ARGUMENTS = {
    "jit of no array": Bad(
        lambda: jit(scale)({"w": "text"}, X), errors.ArgumentError, ("params['w']", "str", "'text'")
    ),
    "grad of no array": Bad(lambda: grad(scale)({"w": {1}}, X), errors.ArgumentError, ("params['w']", "set")),
    "vmap of no array": Bad(
        lambda: vmap(scale)({"w": "text"}, X), errors.ArgumentError, ("params['w']", "str")
    ),
    "make_jaxpr of no array": Bad(
        lambda: make_jaxpr(scale)({"w": "t"}, X), errors.ArgumentError, ("params['w']", "str")
    ),
    "a result that is no array": Bad(
        lambda: jit(lambda x: {"a": "text"})(X), errors.ArgumentError, ("result of <lambda>['a']", "str")
    ),
    "jit of no function": Bad(lambda: jit(3), errors.ArgumentError, ("jit takes a function", "3"), ()),
    "a NumPy dtype that is none of ours": Bad(
        lambda: jit(total)(np.array(["a"])), errors.DtypeError, ("<U1",), ("fix",)
    ),
    "an integer that is too large": Bad(lambda: jit(ew.neg)(2**40), errors.ValueRangeError, (str(2**40),)),
    "a truth value of many": Bad(lambda: bool(ARR), errors.ArgumentError, ("f32[3]", "one element")),
}

TREES = {
    "tangents of a different structure": Bad(
        lambda: jvp(scale, ({"w": X}, X), ({"v": X}, X)),
        errors.TreeError,
        ("primals", "tangents", "'w'", "'v'"),
        ("why",),
    ),
    "too few tangents": Bad(
        lambda: jvp(scale, ({"w": X}, X), ({"w": X},)), errors.TreeError, ("tangents",), ("why",)
    ),
    "tangents that are no tuple": Bad(lambda: jvp(total, X, X), errors.ArgumentError, ("tuples",)),
    "a cotangent of a different structure": Bad(
        lambda: vjp(lambda x: {"a": x, "b": x}, X)[1]({"a": X}),
        errors.TreeError,
        ("cotangent", "'b'"),
        ("why",),
    ),
    "a tangent of a different structure, later": Bad(
        lambda: linearize(lambda p: p["a"], {"a": X})[1]({"b": X}),
        errors.TreeError,
        ("'a'",),
        ("why",),
    ),
    "in_axes that are no prefix": Bad(
        lambda: vmap(scale, in_axes=({"v": 0}, None))({"w": M}, X),
        errors.TreeError,
        ("vmap of scale", "in_axes", "'v'", "'w'"),
        ("why", "fix"),
    ),
    "in_axes for another number of arguments": Bad(
        lambda: vmap(scale, in_axes=(0,))({"w": M}, M),
        errors.TreeError,
        ("vmap of scale", "1 entries", "2 positional"),
    ),
    "out_axes that are no prefix": Bad(
        lambda: vmap(lambda x: (x, x), out_axes=(0, 0, 0))(M),
        errors.TreeError,
        ("out_axes", "[2]"),
        ("why", "fix"),
    ),
}

SIZES = {
    "different sizes": Bad(
        lambda: vmap(scale)({"w": M}, X),
        errors.VmapSizeError,
        ("vmap of scale", "params['w'] has 2", "x has 3", "f32[3]"),
        ("why", "fix"),
    ),
    "another axis_size": Bad(
        lambda: vmap(total, axis_size=4)(M),
        errors.VmapSizeError,
        ("x has 2", "axis_size is 4"),
        ("why", "fix"),
    ),
    "an axis that is not there": Bad(
        lambda: vmap(total, in_axes=1)(X), errors.VmapSizeError, ("axis 1", "x", "f32[3]")
    ),
    "a number has no axis": Bad(
        lambda: vmap(scale, (None, 0))({"w": X}, 1.0), errors.VmapSizeError, ("axis 0", "x")
    ),
    "nothing mapped": Bad(
        lambda: vmap(total, in_axes=None)(X), errors.VmapSizeError, ("vmap of total", "no argument")
    ),
    "in_axes of a wrong kind": Bad(
        lambda: vmap(total, in_axes="0"), errors.ArgumentError, ("in_axes", "'0'")
    ),
    "an axis of a wrong kind": Bad(
        lambda: vmap(scale, in_axes=({"w": 0.5}, 0))({"w": M}, M),
        errors.ArgumentError,
        ("0.5", "params['w']"),
        (),
    ),
}

GRADS = {
    "an array as the output": Bad(
        lambda: grad(scale)({"w": X}, X), errors.GradError, ("scale", "f32[3]", "scalar")
    ),
    "several outputs": Bad(
        lambda: grad(lambda x: (total(x), x))(X), errors.GradError, ("<lambda>", "one scalar")
    ),
    "an integer output": Bad(
        lambda: grad(lambda x: ew.convert(total(x), dtypes.int32))(X), errors.GradError, ("i32[]",)
    ),
    "a complex output": Bad(
        lambda: grad(lambda x: total(ew.complex_(x, x)))(X), errors.GradError, ("c64[]",)
    ),
    "an integer argument": Bad(
        lambda: grad(scale)({"w": 2}, X), errors.GradError, ("params['w']", "i32[]"), ("why", "fix")
    ),
    "an integer array": Bad(
        lambda: grad(scale, 1)({"w": X}, N), errors.GradError, ("scale", "x", "i32[3]"), ("why", "fix")
    ),
    "a complex argument": Bad(
        lambda: grad(lambda z: total(z))(1j * X), errors.GradError, ("real floating", "c64[]"), ("fix",)
    ),
    "argnums out of range": Bad(
        lambda: grad(total, 1)(X), errors.ValueRangeError, ("argnums=1", "1 positional")
    ),
    "no auxiliary data": Bad(
        lambda: value_and_grad(total, has_aux=True)(X), errors.GradError, ("has_aux", "total")
    ),
    "a tangent of another shape": Bad(
        lambda: jvp(total, (X,), (M,)), errors.GradError, ("x", "f32[3]", "f32[2,3]")
    ),
    "a tangent of another dtype": Bad(
        lambda: jvp(total, (X,), (from_numpy(X.astype(np.float64)),)),
        errors.GradError,
        ("x", "f32[3]", "f64[3]"),
    ),
    "a tangent for integers": Bad(
        lambda: jvp(ew.neg, (N,), (X,)), errors.GradError, ("x", "i32[3]", "float0"), ("why", "fix")
    ),
    "a cotangent of another shape": Bad(
        lambda: vjp(total, X)[1](X), errors.GradError, ("cotangent", "f32[]", "f32[3]")
    ),
    "a cotangent of another dtype, deep inside": Bad(
        lambda: vjp(lambda x: {"a": [x]}, X)[1]({"a": [from_numpy(X.astype(np.float64))]}),
        errors.GradError,
        ("cotangent['a'][0]", "f32[3]", "f64[3]"),
    ),
}

CONCRETE = {
    "if": Bad(lambda: jit(branch)(X[0]), errors.ConcretizationError, ("truth value",), ("why", "fix")),
    "if in grad": Bad(
        lambda: vmap(grad(branch))(X), errors.ConcretizationError, ("truth value",), ("why", "fix")
    ),
    "bool of an argument": Bad(
        lambda: jit(lambda flag: bool(flag))(True),
        errors.ConcretizationError,
        ("the argument flag", "bool[]", "jit"),
        ("why", "fix"),
    ),
    "a path": Bad(
        lambda: jit(lambda p: float(p["lr"]))({"lr": 1.0}),
        errors.ConcretizationError,
        ("p['lr']", "float()"),
        ("why", "fix"),
    ),
    "int": Bad(
        lambda: jit(lambda n: int(n))(3), errors.ConcretizationError, ("int()", "argument n"), ("why", "fix")
    ),
    "an index": Bad(
        lambda: jit(lambda n: [1, 2, 3][n])(1),
        errors.ConcretizationError,
        ("index", "argument n"),
        ("why", "fix"),
    ),
    "range": Bad(
        lambda: jit(lambda n: list(range(n)))(3),
        errors.ConcretizationError,
        ("range()", "argument n"),
        ("why", "fix"),
    ),
    "NumPy": Bad(
        lambda: jit(lambda x: np.sin(x))(X),
        errors.ConcretizationError,
        ("NumPy", "argument x"),
        ("why", "fix"),
    ),
    "complex": Bad(
        lambda: jit(lambda x: complex(x))(1.0), errors.ConcretizationError, ("complex()",), ("why", "fix")
    ),
    "a value on the way": Bad(
        lambda: jit(lambda x: float(ew.sin(x)))(1.0),
        errors.ConcretizationError,
        ("the value made at test_errors.py:",),
        ("why", "fix"),
    ),
    "in grad": Bad(
        lambda: jit(grad(lambda x: float(x)))(1.0),
        errors.ConcretizationError,
        ("argument x",),
        ("why", "fix"),
    ),
    "in jvp": Bad(
        lambda: jit(lambda x: jvp(lambda y: float(y), (x,), (x,)))(1.0),
        errors.ConcretizationError,
        ("argument y", "jvp"),
        ("why", "fix"),
    ),
    "in vmap": Bad(
        lambda: vmap(lambda p: int(p["n"]))({"n": N}),
        errors.ConcretizationError,
        ("p['n']", "vmap"),
        ("why", "fix"),
    ),
}

TRACERS = {
    "leaked from jit": Bad(
        lambda: ew.neg(leak(jit, X)),
        errors.LeakedTracerError,
        ("argument x", "f32[3]", "ended"),
        ("why", "fix"),
    ),
    "leaked from grad": Bad(
        lambda: ew.neg(leak(grad, X)), errors.LeakedTracerError, ("argument x", "grad"), ("why", "fix")
    ),
    "leaked from vmap": Bad(
        lambda: ew.neg(leak(vmap, X)), errors.LeakedTracerError, ("argument x", "vmap"), ("why", "fix")
    ),
    "leaked into another jit": Bad(
        lambda: jit(lambda y: ew.add(y, leak(jit, X)))(X),
        errors.LeakedTracerError,
        ("argument x",),
        ("why", "fix"),
    ),
    "leaked as an argument": Bad(
        lambda: jit(ew.neg)(leak(jit, X)), errors.LeakedTracerError, ("argument x",), ("why", "fix")
    ),
    "leaked as a result": Bad(
        lambda: vmap(lambda y, t=leak(jit, X): t)(X), errors.LeakedTracerError, ("f32[3]",), ("why", "fix")
    ),
    "in-place assignment": Bad(
        assign, errors.ImmutableArrayError, ("f32[3]", ".at[index].set(value)"), ("why", "fix")
    ),
    "in-place assignment while traced": Bad(
        lambda: jit(assign_traced)(X), errors.ImmutableArrayError, ("f32[3]",), ("why", "fix")
    ),
    "unhashable static argument": Bad(
        lambda: jit(lambda x, sizes: x, static_argnums=1)(X, [1]),
        errors.StaticArgumentError,
        ("static argument sizes", "list"),
        ("why", "fix"),
    ),
    "unhashable static keyword": Bad(
        lambda: jit(lambda x, sizes: x, static_argnames="sizes")(X, sizes=[1]),
        errors.StaticArgumentError,
        ("static argument sizes", "list"),
        ("why", "fix"),
    ),
    "traced static argument": Bad(
        lambda: jit(lambda n: jit(lambda x, k: x, static_argnums=1)(X, n))(3),
        errors.StaticArgumentError,
        ("static argument k", "traced value", "i32[]"),
    ),
    "use after donation": Bad(
        use_after_donation,
        errors.DonatedArrayError,
        ("f32[3]", "donated to <lambda> at test_errors.py"),
        ("why", "fix"),
    ),
    "an unhashable parameter": Bad(
        lambda: linear_ops.reduce_sum(ARR, [0]), errors.ArgumentError, ("axes", "hashable"), ()
    ),
}

ALL = {
    f"{group}: {name}": bad
    for group, table in {
        "shapes": SHAPES,
        "arguments": ARGUMENTS,
        "trees": TREES,
        "sizes": SIZES,
        "grad": GRADS,
        "concrete": CONCRETE,
        "tracers": TRACERS,
    }.items()
    for name, bad in table.items()
}


@pytest.mark.parametrize("name", ALL)
def test_bad_input(name):
    bad = ALL[name]
    with pytest.raises(errors.BlufuncError) as info:
        bad.run()
    e = info.value
    assert type(e) is bad.error, f"{type(e).__name__}: {e}"
    text = str(e)
    without_line = "\n".join(filter(None, [e.what, e.why, e.fix]))
    for part in bad.says:
        assert part in without_line, f"{part!r} is not in\n{text}"
    assert e.where and "test_errors.py" in e.where, f"the user's line is not in\n{text}"
    for part in bad.has:
        assert getattr(e, part), f"there is no {part!r} in\n{text}"


def test_errors_are_also_builtin_ones():
    """Code that catches what Python raises goes on working."""
    for cls, builtin in {
        errors.ShapeError: TypeError,
        errors.TreeError: ValueError,
        errors.VmapSizeError: ValueError,
        errors.ConcretizationError: TypeError,
        errors.LeakedTracerError: RuntimeError,
        errors.UnsupportedError: NotImplementedError,
    }.items():
        assert issubclass(cls, builtin)


def test_errors_pickle():
    e = errors.GradError("what", where="here", why="why", fix="fix")
    copied = pickle.loads(pickle.dumps(e))
    assert (type(copied), str(copied), copied.fix) == (errors.GradError, str(e), "fix")


def test_the_shape_of_a_message():
    text = str(errors.GradError("It failed.", where="f.py:1", why="so", fix="one\ntwo"))
    assert text == "It failed.\n  at:  f.py:1\n  why: so\n  fix: one\n       two"


def test_golden_messages(golden):
    """A few of them in full, to be read; lines and folders left out."""
    chosen = ["shapes: elementwise", "sizes: different sizes", "grad: an integer argument",
              "trees: tangents of a different structure", "concrete: a path", "tracers: leaked from jit",
              "tracers: use after donation", "tracers: unhashable static argument"]  # fmt: skip
    texts = []
    for name in chosen:
        with pytest.raises(errors.BlufuncError) as info:
            ALL[name].run()
        lines = [line for line in str(info.value).splitlines() if not line.startswith("  at:")]
        texts.append(f"# {name}\n{type(info.value).__name__}: " + "\n".join(lines))
    golden("messages", _without_line_numbers("\n\n".join(texts)))


def _without_line_numbers(text):
    return re.sub(r"test_errors\.py:\d+", "test_errors.py", text)


def test_a_failed_call_leaves_nothing_behind():
    """After any of these mistakes everything works as before."""
    for bad in ALL.values():
        with pytest.raises(errors.BlufuncError):
            bad.run()
    np.testing.assert_allclose(np.asarray(grad(lambda x: total(ew.sin(x)))(X)), np.cos(X), rtol=1e-6)
    assert eval_shape(total, ShapeDtypeStruct((3,), "float32")).shape == ()
    assert functools.reduce(lambda f, t: t(f), [jit, vmap, jit], ew.neg)(M).shape == (2, 3)
