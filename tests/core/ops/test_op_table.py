"""Every row of the op table: values, ``jit``, derivatives, ``vmap``, dtypes."""

import itertools
import math

import numpy as np
import pytest

from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.core.programs.stage import stage
from blufunc.transforms.autodiff.grad import jvp, linearize, vjp
from blufunc.transforms.autodiff.transpose import backward_pass
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.op_table.row import Op
from tests.op_table.rows import OPS

# Tolerated error in ULPs: 64-bit results are compared with 64-bit references.
_ULPS = {"float64": 64, "complex128": 64, "float32": 16, "complex64": 16, "float16": 4, "bfloat16": 4}


def rows(ops):
    """One test for each row."""
    return pytest.mark.parametrize("op", [pytest.param(op, id=op.id) for op in ops])


def rows_with_dtypes(ops):
    """One test for each row and dtype."""
    return pytest.mark.parametrize(
        "op, dtype", [pytest.param(op, d, id=f"{op.id}-{d}") for op in ops for d in op.dtypes]
    )


DIFFERENTIABLE = [op for op in OPS if op.grad]


def differentiable_in(ops, orders=(1, 2)):
    return pytest.mark.parametrize(
        "op, dtype",
        [
            pytest.param(op, d, id=f"{op.id}-{d}")
            for op in ops
            for d in ("float64", "complex128")
            if d in op.dtypes and op.grad in orders
        ],
    )


def arrays(values):
    return [from_numpy(np.asarray(v)) for v in values]


def results(out):
    """The results of a primitive as a list of NumPy arrays."""
    return [np.asarray(x) for x in (out if isinstance(out, (list, tuple)) else [out])]


def wide(x):
    """An argument of a reference: half precision in float64, others unchanged."""
    return x.astype(np.float64) if dtypes.is_floating(x.dtype) else x


def assert_close(got, want, dtype, tol=1.0, what=""):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    d = got.dtype
    if not dtypes.is_inexact(d):
        np.testing.assert_array_equal(got, want.astype(d), err_msg=what)
        return
    coarse = max(float(dtypes.finfo(x).eps) for x in (d, dtype) if dtypes.is_inexact(dtypes.as_dtype(x)))
    rtol = tol * coarse * _ULPS.get(str(dtype), 4)
    kind = np.complex128 if dtypes.is_complex(d) else np.float64
    np.testing.assert_allclose(got.astype(kind), want.astype(kind), rtol=rtol, atol=rtol, err_msg=what)


def assert_same(got, want, what=""):
    """Compare two evaluations of the same operations by one executor."""
    for g, w in zip(results(got), results(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, (
            f"{what}: {g.dtype}{g.shape}, not {w.dtype}{w.shape}"
        )
        if dtypes.is_inexact(w.dtype):
            assert_close(g, w, str(w.dtype), what=what)
        else:
            np.testing.assert_array_equal(g, w, err_msg=what)


# -- values ----------------------------------------------------------------------------------------


@rows_with_dtypes(OPS)
def test_values(op: Op, dtype):
    """Eager evaluation agrees with the reference, the abstract rule and ``jit``."""
    values = op.sample(dtype)
    xs = arrays(values)
    before = [v.copy() for v in values]
    out = op.apply(*xs)
    outs = out if op.prim.multiple_results else [out]
    expected = op.prim.abstract(*[x.aval for x in xs], **op.params)
    for x, aval in zip(outs, expected if op.prim.multiple_results else [expected], strict=True):
        assert x.aval.same_type(aval)
        assert np.asarray(x).shape == aval.shape and np.asarray(x).dtype == aval.dtype
    if not op.prim.multiple_results:
        assert str(dtypes.short_name(outs[0].dtype)) == dtypes.short_name(
            dtypes.as_dtype(op.out_dtype(dtype))
        )
    if op.ref is not None:
        want = op.ref(*map(wide, values))
        for x, w in zip(outs, want if op.prim.multiple_results else [want], strict=True):
            assert_close(x, w, dtype, op.tol, "against the reference")
    assert_same(jit(op.apply)(*xs), out, "jit")
    for x, v in zip(xs, before, strict=True):
        np.testing.assert_array_equal(np.asarray(x), v, err_msg="an argument was written to")


# -- derivatives -----------------------------------------------------------------------------------


class Problem:
    """A row as a function of its inexact arguments, with tangents and cotangents."""

    def __init__(self, op: Op, dtype: str, batch: tuple[int, ...] = ()):
        self.op, self.batch = op, batch
        self.values = op.sample(dtype, batch)
        inexact = [i for i, v in enumerate(self.values) if dtypes.is_inexact(v.dtype)]
        self.wrt = list(inexact if op.wrt is None else op.wrt)
        self.point = arrays(self.values[i] for i in self.wrt)
        self.rng = np.random.default_rng(1)
        example = arrays(op.sample(dtype))
        self.fixed = {i: x for i, x in enumerate(example) if i not in self.wrt}
        outs = self.fun(*[example[i] for i in self.wrt])
        self.cotangent = [self.random(batch + x.shape, x.dtype) for x in outs]

    def fun(self, *xs):
        """The row's inexact results."""
        args = dict(self.fixed)
        args.update(zip(self.wrt, xs, strict=True))
        out = self.op.apply(*[args[i] for i in range(len(args))])
        out = out if isinstance(out, (list, tuple)) else [out]
        return [x for x in out if dtypes.is_inexact(x.dtype)]

    def gradient(self, cotangent, *xs):
        """The pullback, as a function of the point too."""
        return list(vjp(self.fun, *xs)[1](cotangent))

    def random(self, shape, dtype):
        x = self.rng.standard_normal(shape)
        if dtypes.is_complex(dtype):
            x = x + 1j * self.rng.standard_normal(shape)
        return from_numpy(np.asarray(x, dtype))

    def like(self, xs):
        return [self.random(x.shape, x.dtype) for x in xs]


def inner(xs, ys):
    """The real pairing of tangents with cotangents."""
    total = sum(np.sum(np.asarray(x) * np.asarray(y)) for x, y in zip(xs, ys, strict=True))
    return float(np.real(total))


def along(f, point, tangents):
    """The derivative of ``f`` by central differences."""
    h = 1e-5
    moved = lambda s: arrays(
        np.asarray(x) + s * h * np.asarray(t) for x, t in zip(point, tangents, strict=True)
    )
    plus, minus = f(*moved(1)), f(*moved(-1))
    return [(np.asarray(p) - np.asarray(m)) / (2 * h) for p, m in zip(plus, minus, strict=True)]


def assert_derivative(got, want, what):
    for g, w in zip(got, want, strict=True):
        scale = max(1.0, float(np.max(np.abs(w), initial=0)))
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-6, atol=1e-7 * scale, err_msg=what)


def assert_pairing(a, b, what):
    assert math.isclose(a, b, rel_tol=1e-10, abs_tol=1e-10), f"{what}: {a} and {b}"


def check_derivatives(f, point, problem, what):
    """Compare forward mode with differences, and all other modes with forward mode."""
    ts = problem.like(point)
    out, out_t = jvp(f, tuple(point), tuple(ts))
    assert_same(out, f(*point), f"{what}: the value under jvp")
    assert_derivative(out_t, along(f, point, ts), f"{what}: jvp against differences")
    value, pullback = vjp(f, *point)
    assert_same(value, out, f"{what}: the value under vjp")
    ct = problem.like(out)
    grads = pullback(ct)
    assert [g.aval.same_type(x.aval) for g, x in zip(grads, point, strict=True)]
    assert_pairing(inner(grads, ts), inner(ct, out_t), f"{what}: vjp against jvp")
    assert_same(linearize(f, *point)[1](*ts), out_t, f"{what}: linearize")
    assert_same(jit(lambda x, t: jvp(f, x, t))(tuple(point), tuple(ts))[1], out_t, f"{what}: jit of jvp")
    assert_same(jvp(jit(f), tuple(point), tuple(ts))[1], out_t, f"{what}: jvp of jit")
    assert_same(jit(lambda x, c: vjp(f, *x)[1](c))(point, ct), grads, f"{what}: jit of vjp")
    assert_same(vjp(jit(f), *point)[1](ct), grads, f"{what}: vjp of jit")
    return ts


@differentiable_in(DIFFERENTIABLE)
def test_first_derivative(op: Op, dtype):
    """``jvp`` against differences, ``vjp`` against ``jvp``, also under ``jit``."""
    p = Problem(op, dtype)
    check_derivatives(p.fun, p.point, p, "order 1")


@differentiable_in(DIFFERENTIABLE, orders=(2,))
def test_second_derivative(op: Op, dtype):
    """The same of the pullback: ``jvp`` of ``vjp``, ``vjp`` of ``vjp``."""
    p = Problem(op, dtype)
    check_derivatives(lambda *xs: p.gradient(p.cotangent, *xs), p.point, p, "order 2")


@pytest.mark.parametrize(
    "op, dtype",
    [
        pytest.param(op, d, id=f"{op.id}-{d}")
        for op in DIFFERENTIABLE
        for d in op.dtypes
        if dtypes.is_inexact(dtypes.as_dtype(d))
    ],
)
def test_derivative_types(op: Op, dtype):
    """Tangents have the type of results, cotangents that of arguments, in any dtype."""
    p = Problem(op, dtype)
    out, out_t = jvp(p.fun, tuple(p.point), tuple(p.like(p.point)))
    assert [t.aval.strong() for t in out_t] == [x.aval.strong() for x in out]
    grads = p.gradient(p.like(out), *p.point)
    assert [g.aval.strong() for g in grads] == [x.aval.strong() for x in p.point]


# -- linearity: linear operations must have a transpose --------------------------------------------


def is_linear_in(f, x, rng):
    call = lambda v: np.asarray(f(from_numpy(np.asarray(v, x.dtype))))
    for scale in (1, -2.5, 10, -10):
        a, b = (np.asarray(rng.standard_normal(x.shape)) for _ in range(2))
        if not np.allclose(call(scale * a - b), scale * call(a) - call(b), rtol=1e-9, atol=1e-9):
            return False
    return True


@rows([op for op in DIFFERENTIABLE if op.linear and not op.prim.multiple_results and "float64" in op.dtypes])
def test_transpose(op: Op):
    """Rows that are linear in one argument are transposable in it directly."""
    p = Problem(op, "float64")
    for k in range(len(p.point)):
        f = lambda x, k=k: p.fun(*[x if i == k else v for i, v in enumerate(p.point)])[0]
        with np.errstate(all="ignore"):
            if not is_linear_in(f, p.point[k], p.rng):
                continue
        if not np.any(np.asarray(jvp(f, (p.point[k],), (p.random(p.point[k].shape, np.float64),))[1])):
            continue  # constant
        jaxpr = stage(lambda x, f=f: [f(x)], [p.point[k].aval])
        (x,) = p.like([p.point[k]])
        (ct,) = p.like(p.fun(*p.point))
        (back,) = backward_pass(jaxpr, [None], [ct])
        assert back.aval.same_type(x.aval)
        assert_pairing(inner([ct], [f(x)]), inner([back], [x]), f"transpose in argument {k}")


# -- vmap ------------------------------------------------------------------------------------------

SIZE = 3


def batchings(ranks):
    """In-axes to try: each argument and axis alone, then several combinations."""
    n = len(ranks)
    for i, rank in enumerate(ranks):
        for d in range(rank + 1):
            yield tuple(d if j == i else None for j in range(n))
    if n > 1:
        yield (0,) * n
        yield tuple(0 if i % 2 else -1 for i in range(n))
        yield (*(-1 for _ in ranks[:-1]), None)
    yield (-1,) * n


def check_vmap(f, samples, ranks, what, in_axes):
    """``vmap`` against a Python loop. ``samples`` have the batch axis in front."""
    args, examples = [], []
    for x, d, rank in zip(samples, in_axes, ranks, strict=True):
        if d is None:
            args.append(from_numpy(x[0]))
            examples.append([x[0]] * len(x))
        else:
            args.append(from_numpy(np.ascontiguousarray(np.moveaxis(x, 0, d % (rank + 1)))))
            examples.append(list(x))
    got = results(vmap(f, in_axes=in_axes)(*args))
    loop = [results(f(*arrays(example))) for example in zip(*examples, strict=True)]
    want = [np.stack(column) for column in zip(*loop, strict=True)]
    assert_same(got, want, f"{what}, in_axes={in_axes}")
    return args, want


@rows([op for op in OPS if op.args])
def test_vmap(op: Op):
    """Over every axis of every argument, alone and together, against a loop."""
    dtype = op.dtypes[0]
    samples = op.sample(dtype, (SIZE,))
    ranks = [x.ndim - 1 for x in samples]
    for in_axes in batchings(ranks):
        args, want = check_vmap(op.apply, samples, ranks, "vmap", in_axes)
    if all(x.ndim > 1 for x in want):
        out = vmap(op.apply, in_axes=in_axes, out_axes=1)(*args)
        assert_same(out, [np.moveaxis(x, 0, 1) for x in want], "out_axes=1")
    assert_same(jit(vmap(op.apply, in_axes=in_axes))(*args), want, "jit of vmap")
    assert_same(vmap(jit(op.apply), in_axes=in_axes)(*args), want, "vmap of jit")
    check_vmap(op.apply, [x[:1] for x in samples], ranks, "a batch of one", (0,) * len(ranks))


@rows([op for op in OPS if op.args])
def test_nested_vmap(op: Op):
    """Two batch axes, one per level; then different arguments mapped by each level."""
    dtype = op.dtypes[0]
    samples = op.sample(dtype, (SIZE, 2))
    got = vmap(vmap(op.apply))(*arrays(samples))
    loop = [results(op.apply(*arrays(x[i, j] for x in samples))) for i in range(SIZE) for j in range(2)]
    want = [np.stack(c).reshape(SIZE, 2, *c[0].shape) for c in zip(*loop, strict=True)]
    assert_same(got, want, "vmap of vmap")
    if len(samples) > 1:
        inner_axes = tuple(0 if i == 0 else None for i in range(len(samples)))
        outer_axes = tuple(None if i == 0 else 0 for i in range(len(samples)))
        args = [x[0] if i == 0 else x[:, 0] for i, x in enumerate(samples)]
        got = vmap(vmap(op.apply, in_axes=inner_axes), in_axes=outer_axes)(*arrays(args))
        loop = [
            results(op.apply(*arrays(x[j] if k == 0 else x[i] for k, x in enumerate(args))))
            for i, j in itertools.product(range(SIZE), range(2))
        ]
        want = [np.stack(c).reshape(SIZE, 2, *c[0].shape) for c in zip(*loop, strict=True)]
        assert_same(got, want, "different arguments at each level")


@differentiable_in(DIFFERENTIABLE)
def test_vmap_of_derivatives(op: Op, dtype):
    """Pullbacks over batches of points and of cotangents, and pullbacks of ``vmap``."""
    p = Problem(op, dtype, (SIZE,))
    points = [np.asarray(x) for x in p.point]
    cts = [np.asarray(c) for c in p.cotangent]
    f = lambda *args: p.gradient(list(args[: len(cts)]), *args[len(cts) :])
    samples = [*cts, *points]
    ranks = [x.ndim - 1 for x in samples]
    _, want = check_vmap(f, samples, ranks, "points and cotangents", (0,) * len(ranks))
    check_vmap(f, samples, ranks, "cotangents", (0,) * len(cts) + (None,) * len(points))
    check_vmap(f, samples, ranks, "points", (None,) * len(cts) + (-1,) * len(points))
    back = vjp(vmap(p.fun), *p.point)[1](p.cotangent)
    assert_same(back, want, "vjp of vmap")
    g = lambda *args: jvp(p.fun, args[: len(points)], args[len(points) :])[1]
    tangents = [np.asarray(t) for t in p.like(p.point)]
    ranks = [x.ndim - 1 for x in points] * 2
    check_vmap(g, [*points, *tangents], ranks, "jvp", (-1,) * len(ranks))


# -- dtypes ----------------------------------------------------------------------------------------


@rows([op for op in OPS if op.refuses])
def test_refused_dtypes(op: Op):
    """Unsupported dtypes raise ``DtypeError`` with the primitive and the argument."""
    for dtype in op.refuses:
        d = dtypes.as_dtype(dtype)
        avals = [a.aval(dtype) for a in op.args]
        with pytest.raises(errors.DtypeError) as info:
            op.prim.typed(tuple(avals), op.params)
        assert op.prim.name in str(info.value)
        assert dtypes.short_name(d) in str(info.value)
        assert "test_op_table.py" in info.value.where


@rows([op for op in OPS if sum(a.dtype is None for a in op.args) > 1 and not op.mixes])
def test_mixed_dtypes(op: Op):
    """Operands are never promoted here: only ``blufunc.numpy`` does."""
    dtype = op.dtypes[0]
    other = "int16" if "int" in dtype else "float16"
    free = [i for i, a in enumerate(op.args) if a.dtype is None]
    for culprit in free:
        avals = [a.aval(other if i == culprit else dtype) for i, a in enumerate(op.args)]
        with pytest.raises(errors.DtypeError):
            op.prim.typed(tuple(avals), op.params)
