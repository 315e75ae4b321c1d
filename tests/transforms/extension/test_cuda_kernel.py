"""User kernels: values and rules by reference, compiled sources, devices."""

import re
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.user_kernel import C_TYPES
from blufunc.testing import check_grads
from blufunc.transforms.extension.kernel_call import cuda_kernel_p
from tests.emulation.kernels_on_host import launch_of, run_on_host
from tests.transforms.common import arr, close, draw

ROOT = Path(__file__).parents[3]
SAXPY = "if (i < out_size) out[i] = a[0] * x[i] + y[i];"


def saxpy(a, x, y):
    """a x + y"""
    return a * x + y


fast = bf.cuda_kernel(SAXPY, reference=saxpy)
polar = bf.cuda_kernel(
    """
    if (i < x_size) {
        r[i] = sqrt(x[i] * x[i] + y[i] * y[i]);
        angle[i] = atan2(y[i], x[i]);
    }
    """,
    reference=lambda x, y: {"r": bnp.hypot(x, y), "angle": bnp.arctan2(y, x)},
    name="polar",
)


def count(jaxpr, prim=cuda_kernel_p):
    """How often a primitive stands in a jaxpr, at any depth."""
    own = sum(e.prim is prim for e in jaxpr.eqns)
    return own + sum(count(s, prim) for e in jaxpr.eqns for s in subjaxprs(e.params))


def struct(*shape, dtype="float32"):
    return bf.ShapeDtypeStruct(shape, dtype)


# -- values ----------------------------------------------------------------------------------------

SAME = [lambda f: f, bf.jit, lambda f: bf.jit(bf.jit(f)), bf.checkpoint, lambda f: bf.jit(bf.checkpoint(f))]


@pytest.mark.parametrize("wrap", SAME)
def test_the_value_is_that_of_the_reference(wrap):
    x, y = draw(5), draw(5, seed=1)
    close(wrap(fast)(arr(2.0), x, y), saxpy(2.0, x, y))
    close(wrap(lambda a, x, y: fast(a, x, y) * 2)(arr(2.0), x, y), saxpy(2.0, x, y) * 2)


def test_it_is_one_equation_of_a_program():
    jaxpr = bf.make_jaxpr(lambda x: fast(2.0, x * 2, x))(bnp.ones(3))
    assert [e.prim.name for e in jaxpr.eqns] == ["mul", "cuda_kernel"]
    assert "cuda_kernel[kernel=saxpy]" in str(jaxpr)
    assert [e.prim.name for e in simplify(jaxpr).eqns] == ["mul", "cuda_kernel"]


def test_arguments_by_name_and_by_default():
    scaled = bf.cuda_kernel("if (i < out_size) out[i] = by[0] * x[i];", reference=lambda x, by=3.0: x * by)
    x = draw(4)
    close(scaled(x), x * 3)
    close(scaled(by=2.0, x=x), x * 2)
    close(fast(y=x, x=x, a=1.0), x + x)
    half = bnp.asarray([1.0, 2.0], "float16")
    assert scaled(half).dtype == "float16"  # a number is weak in the reference too


def test_several_results_have_the_structure_of_the_reference():
    x, y = draw(3), draw(3, seed=1)
    got = bf.jit(polar)(x, y)
    close(got, {"r": bnp.hypot(x, y), "angle": bnp.arctan2(y, x)})


def test_a_reference_may_close_over_arrays_but_not_over_traced_values():
    table = arr([10.0, 20.0, 30.0])
    shifted = bf.cuda_kernel("/* as */", reference=lambda x: x + table)
    x = draw(3)
    for wrap in (lambda f: f, bf.jit, bf.vmap, lambda f: bf.jit(bf.grad(lambda x: (f(x) ** 2).sum()))):
        y = draw(2, 3) if wrap is bf.vmap else x
        close(wrap(shifted)(y), wrap(lambda x: x + table)(y))
    with pytest.raises(errors.ArgumentError, match=r"closes over a traced value \(f64\[3\]\)"):
        bf.jit(lambda x, y: bf.cuda_kernel("", reference=lambda x: x + y)(x))(x, x)


# -- derivatives and batches -----------------------------------------------------------------------


def test_derivatives_are_those_of_the_reference():
    x, y = draw(4), draw(4, seed=1)
    check_grads(fast, (arr(1.5), x, y), 3)
    check_grads(polar, (x + 2, y), 2)
    check_grads(bf.jit(polar), (x + 2, y), 2)


def test_a_derivative_has_the_value_from_the_kernel_and_the_rest_from_the_reference():
    x = draw(4)
    forward = bf.make_jaxpr(lambda x, t: bf.jvp(lambda x: fast(2.0, x, x), (x,), (t,)))(x, x)
    assert count(forward) == 1
    backward = simplify(bf.make_jaxpr(bf.grad(lambda x: (fast(2.0, x, x) ** 2).sum()))(x))
    assert count(backward) == 1
    only = simplify(bf.make_jaxpr(bf.grad(lambda x: fast(2.0, x, x).sum()))(x))
    assert count(only) == 0, "its value is not used"


def test_integers_among_the_results_have_no_derivative():
    split = bf.cuda_kernel("...", reference=lambda x: (bnp.floor(x).astype("int32"), x - bnp.floor(x)))
    x = arr([1.25, 2.5])
    close(bf.grad(lambda x: split(x)[1].sum())(x), bnp.ones_like(x))
    _, ts = bf.jvp(split, (x,), (x,))
    assert ts[0].dtype == bf.float0


def test_batches_are_those_of_the_reference():
    x, y = draw(4, 3), draw(3, seed=1)
    close(bf.vmap(fast, (None, 0, None))(2.0, x, y), 2 * x + y)
    twice = bf.jit(bf.vmap(bf.vmap(fast, (None, None, 0)), (0, None, None)))
    close(
        twice(arr([1.0, 2.0]), y, y[:2]), arr([[[a * v + w for v in y] for w in y[:2]] for a in (1.0, 2.0)])
    )
    close(
        bf.vmap(bf.grad(lambda x, y: polar(x, y)["r"]))(x[:, 0], x[:, 1]),
        x[:, 0] / bnp.hypot(x[:, 0], x[:, 1]),
    )


def test_sequential_batches_run_the_kernel_for_each_element():
    each = bf.cuda_kernel(SAXPY, reference=saxpy, vmap="sequential")
    x, y = draw(4, 3), draw(3, seed=1)
    mapped = bf.vmap(each, (None, 0, None))
    close(mapped(2.0, x, y), 2 * x + y)
    assert count(bf.make_jaxpr(mapped)(2.0, x, y)) == 1
    assert count(bf.make_jaxpr(bf.vmap(fast, (None, 0, None)))(2.0, x, y)) == 0
    close(bf.grad(lambda x: mapped(2.0, x, y).sum())(x), bnp.full_like(x, 2.0))


def test_a_batching_rule_of_ones_own():
    def rule(axis_size, in_batched, a, x, y):
        assert in_batched == [False, True, True] or in_batched == (False, True, True)
        return own(a, x.reshape(-1), y.reshape(-1)).reshape(x.shape), True

    own = bf.cuda_kernel(SAXPY, reference=saxpy, vmap=rule)
    x = draw(4, 3)
    mapped = bf.vmap(lambda x, y: own(2.0, x, y))
    close(mapped(x, x), 3 * x)
    assert count(bf.make_jaxpr(mapped)(x, x)) == 1


def test_derivatives_of_ones_own():
    x, y = draw(3), draw(3, seed=1)
    marked = bf.cuda_kernel(SAXPY, reference=saxpy, jvp=lambda ps, ts: (saxpy(*ps), 100 * ts[1]))
    close(bf.grad(lambda x: marked(2.0, x, y).sum())(x), bnp.full_like(x, 100))
    fwd = lambda a, x, y: (fast(a, x, y), (a, x))
    bwd = lambda res, ct: (bnp.sum(ct * res[1]), 7 * ct, ct)
    reverse = bf.cuda_kernel(SAXPY, reference=saxpy, vjp=(fwd, bwd))
    close(bf.grad(lambda x: reverse(arr(2.0), x, y).sum())(x), bnp.full_like(x, 7))
    close(bf.vmap(bf.grad(lambda x: reverse(arr(2.0), x, y[0])))(x), bnp.full_like(x, 7))
    with pytest.raises(errors.GradError, match="forward-mode"):
        bf.jvp(lambda x: reverse(arr(2.0), x, y), (x,), (x,))


def test_other_transforms():
    double = bf.cuda_kernel("if (i < out_size) out[i] = 2 * x[i];", reference=lambda x: 2 * x, name="twice")
    x = draw(3)
    (back,) = bf.linear_transpose(double, x)(x)
    close(back, 2 * x)
    counting = bf.Transform("counting")
    counting.rule(lax.mul_p)(lambda x, y: x * y + 1)
    close(counting(double)(x), 2 * x + 1)  # goes through the reference
    low = bf.make_jaxpr(bf.autocast(lambda x: double(x @ x)))(bnp.ones((2, 2)))
    (eqn,) = [e for e in low.eqns if e.prim is cuda_kernel_p]
    assert eqn.invars[0].aval.dtype == "float32", "a kernel's types are those that it was traced with"
    out = bf.lax.scan(lambda c, _: (double(c), c), x, None, length=3)[0]
    close(out, 8 * x)


def test_the_reference_is_traced_once_for_each_combination_of_types():
    traces = []

    def reference(x):
        traces.append(x.shape)
        return x + 1

    f = bf.cuda_kernel("", reference=reference)
    x = draw(3)
    for _ in range(3):
        f(x)
        bf.jit(f)(x)
        bf.grad(lambda x: f(x).sum())(x)
    assert traces == [(3,)]
    f(draw(4))
    assert traces == [(3,), (4,)]


# -- sources ---------------------------------------------------------------------------------------


def test_golden_source(golden):
    kernel = bf.cuda_kernel(
        """
        extern __shared__ float tile[];
        const int row = blockIdx.y;
        for (int j = threadIdx.x; j < x_shape_1; j += blockDim.x) {
            x_dtype v = x[row * x_shape_1 + j];
            out_1[row * x_shape_1 + j] = row < x_shape_0 && scale[0] ? twice(v) : v;
        }
        if (i == 0) out_0[0] = out_1_size * x_ndim;  // the first thread
        """,
        reference=lambda x, scale: (bnp.int32(0) + x.size, x * scale),
        name="example",
        grid=lambda x, scale: (1, x.shape[0]),
        block=128,
        shared=lambda x, scale: 4 * x.shape[1],
        preamble="template <class T> T twice(T x) { return x + x; }",
    )
    args = struct(4, 100, dtype="bfloat16"), struct(dtype="bool")
    text = re.sub(r"test_cuda_kernel.py:\d+", "test_cuda_kernel.py:N", kernel.source(*args))
    golden("cuda_kernel", text)
    found = launch_of(kernel, *args)
    assert (found.entry, found.grid, found.block, found.shared) == ("example", (1, 4, 1), (128, 1, 1), 400)


LAUNCHES = [
    ({}, (1000,), (4, 1, 1), (256, 1, 1)),
    ({}, (), (1, 1, 1), (256, 1, 1)),
    ({"block": 100}, (10, 100), (10, 1, 1), (100, 1, 1)),
    ({"block": (32, 8)}, (300,), (2, 1, 1), (32, 8, 1)),
    ({"grid": 7}, (1000,), (7, 1, 1), (256, 1, 1)),
    ({"grid": (2, 3, 4), "block": (4, 4, 4)}, (8,), (2, 3, 4), (4, 4, 4)),
    ({"grid": lambda x: x.shape[0], "block": lambda x: min(x.size, 64)}, (5, 6), (5, 1, 1), (30, 1, 1)),
    ({}, (0,), (0, 1, 1), (256, 1, 1)),
]


@pytest.mark.parametrize("options, shape, grid, block", LAUNCHES, ids=range(len(LAUNCHES)))
def test_launches(options, shape, grid, block):
    found = launch_of(bf.cuda_kernel("", reference=lambda x: x, **options), struct(*shape))
    assert (found.grid, found.block) == (grid, block)


def test_indices_are_as_wide_as_they_have_to_be():
    kernel = bf.cuda_kernel("if (i < out_size) out[i] = x[i];", reference=lambda x: x, name="copy")
    assert "const int i = blockIdx.x * blockDim.x" in kernel.source(struct(2**20))
    wide = kernel.source(struct(2**31, dtype="int8"))
    assert "const long long i = (long long)blockIdx.x * blockDim.x" in wide
    assert "constexpr long long out_size = 2147483648" in wide


Pair = namedtuple("Pair", "total mean")
RESULTS = [
    (lambda x: x, ["out"]),
    (lambda x: (x, x), ["out_0", "out_1"]),
    (lambda x: {"b": x, "a": [x, x]}, ["a_0", "a_1", "b"]),
    (lambda x: Pair(x, x), ["total", "mean"]),
]


@pytest.mark.parametrize("reference, names", RESULTS, ids=["one", "tuple", "dict", "namedtuple"])
def test_names_of_results(reference, names):
    text = bf.cuda_kernel("", reference=reference).source(struct(3))
    assert re.findall(r"    float\* __restrict__ (\w+)", text) == names


# -- the source, run on the host -------------------------------------------------------------------

transposed = bf.cuda_kernel(
    """
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < x_shape_0 && column < x_shape_1) out[column * out_shape_1 + row] = x[row * x_shape_1 + column];
    """,
    reference=lambda x: x.T,
    name="transposed",
    block=(8, 4),
    grid=lambda x: (-(-x.shape[1] // 8), -(-x.shape[0] // 4)),
)
row_sums = bf.cuda_kernel(
    """
    if (i < out_size) {
        x_dtype sum = 0;
        for (int j = 0; j < x_shape_1; ++j) sum += x[i * x_shape_1 + j];
        out[i] = sum;
    }
    """,
    reference=lambda x: bnp.sum(x, axis=1),
    name="row_sums",
)


@pytest.mark.second
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kernel, args",
    [
        (fast, (2.5, draw(1000), draw(1000, seed=1))),
        (fast, (bnp.asarray(3, "int32"), bnp.arange(7), bnp.ones(7, "int32"))),
        (polar, (draw(5, 7), draw(5, 7, seed=1))),
        (transposed, (draw(13, 21),)),
        (row_sums, (draw(300, 3),)),
        (row_sums, (bnp.ones((3, 5), "int64"),)),
    ],
    ids=["saxpy", "integers", "polar", "transposed", "row sums", "sums of int64"],
)
def test_the_kernel_computes_what_the_reference_does(kernel, args, tmp_path):
    got = run_on_host(kernel, args, tmp_path)
    want = bf.tree.leaves(kernel(*args))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12)


# -- the source, compiled for devices --------------------------------------------------------------

needs_nvrtc = pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_kernels_compile_for(arch):
    x = struct(64, 32)
    assert polar.compile(x, x, arch=arch)[1:4] == b"ELF"
    assert transposed.compile(x, arch=arch) and row_sums.compile(x, arch=arch)


@needs_nvrtc
def test_every_dtype_compiles():
    for dtype in C_TYPES:
        copy = bf.cuda_kernel("if (i < out_size) out[i] = x[i];", reference=lambda x: x, name="copied")
        assert copy.compile(struct(3, dtype=dtype))


@needs_nvrtc
def test_a_body_that_does_not_compile_shows_its_line():
    broken = bf.cuda_kernel(
        """
        int j = i;
        out[j] = nonsense(x[j]);
        """,
        reference=lambda x: x,
        name="broken",
    )
    with pytest.raises(errors.CompileError, match="nonsense") as caught:
        broken.compile(struct(3))
    here = Path(__file__).read_text().split("\n")
    line = 1 + next(k for k, text in enumerate(here) if "out[j] = nonsense(x[j]);" in text)
    assert caught.value.where == f"test_cuda_kernel.py:{line}"
    assert ">" in caught.value.why and "out[j] = nonsense(x[j]);" in caught.value.why


# -- on a device -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_run_on_the_device(dtype):
    device = bf.devices("cuda")[0]
    put = lambda x: bf.device_put(x.astype(dtype), device)
    x, y = put(draw(37, 65)), put(draw(37, 65, seed=1))
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(fast(2.0, x, y), saxpy(2.0, np.asarray(x), np.asarray(y)), **tolerance)
    got = bf.jit(lambda x, y: polar(x * 2, y * 2)["r"])(x, y)
    np.testing.assert_allclose(got, 2 * np.hypot(np.asarray(x), np.asarray(y)), **tolerance)
    np.testing.assert_array_equal(bf.jit(transposed)(x), np.asarray(x).T)
    np.testing.assert_allclose(row_sums(x), np.asarray(x).sum(1), **tolerance)
    slope = bf.jit(bf.grad(lambda x: (fast(2.0, x, y) ** 2).sum()))(x)
    np.testing.assert_allclose(slope, 4 * np.asarray(2.0 * x + y), **tolerance)
    each = bf.cuda_kernel(SAXPY, reference=saxpy, vmap="sequential")
    np.testing.assert_allclose(
        bf.vmap(lambda x, y: each(2.0, x, y))(x, y), np.asarray(2.0 * x + y), **tolerance
    )


# -- errors ----------------------------------------------------------------------------------------


def positional(*args):
    return args[0]


KEY = bf.random.key(0)


def kernel_of(reference, **options):
    return bf.cuda_kernel("", reference=reference, **options)


def source_of(**options):
    return kernel_of(lambda x: x, **options).source(1.0)


def doubled(body, elementwise):
    return bf.cuda_kernel(body, reference=lambda x: 2 * x, elementwise=elementwise)(1.0)


WRONG = {
    "no body": (lambda: bf.cuda_kernel(3, reference=saxpy), errors.ArgumentError, "the body is a text"),
    "no preamble": (lambda: kernel_of(saxpy, preamble=3), errors.ArgumentError, "preamble"),
    "no reference": (
        lambda: bf.cuda_kernel("out[i] = x[i];"),
        errors.ArgumentError,
        "the reference is a function",
    ),
    "both rules": (lambda: kernel_of(saxpy, jvp=abs, vjp=(abs, abs)), errors.ArgumentError, "jvp= and vjp="),
    "no jvp": (lambda: kernel_of(saxpy, jvp=3), errors.ArgumentError, "jvp=3 is no rule"),
    "no vjp": (lambda: kernel_of(saxpy, vjp=abs), errors.ArgumentError, "vjp=.* is no rule"),
    "no vmap": (lambda: kernel_of(saxpy, vmap="fast"), errors.ArgumentError, "is no rule"),
    "no name": (lambda: kernel_of(saxpy, name="a b"), errors.ValueRangeError, "cannot be a name"),
    "reserved": (lambda: kernel_of(lambda float: float), errors.ValueRangeError, "is called 'float'"),
    "star": (lambda: kernel_of(positional), errors.ArgumentError, "do not name"),
    "inputs": (lambda: kernel_of(positional, inputs=3), errors.ArgumentError, "no names"),
    "inputs twice": (lambda: kernel_of(positional, inputs="x x"), errors.ValueRangeError, "twice"),
    "too few": (lambda: fast(1.0, 2.0), errors.ArgumentError, "missing a required argument: 'y'"),
    "wrong number": (
        lambda: kernel_of(positional, inputs="x, y")(1.0),
        errors.ArgumentError,
        "takes 2 arrays",
    ),
    "no array": (lambda: fast(1.0, "a", 2.0), errors.ArgumentError, "argument x of saxpy is a str"),
    "key": (lambda: fast(1.0, KEY, 2.0), errors.DtypeError, "CUDA has no type"),
    "key out": (lambda: kernel_of(lambda x: KEY)(1.0), errors.DtypeError, "a type that CUDA has not"),
    "nothing": (lambda: kernel_of(lambda x: ())(1.0), errors.TreeError, "returns no array"),
    "effects": (
        lambda: kernel_of(lambda x: (bf.debug.print("{}", x), x)[1])(1.0),
        errors.UnsupportedError,
        "does more than compute",
    ),
    "block": (lambda: source_of(block=2048), errors.ValueRangeError, "block=2048"),
    "block product": (lambda: source_of(block=(64, 64)), errors.ValueRangeError, "4096 threads"),
    "block of none": (lambda: source_of(block=0), errors.ValueRangeError, "0 threads"),
    "grid": (lambda: source_of(grid=1.5), errors.ValueRangeError, "grid=1.5"),
    "deep grid": (lambda: source_of(grid=(1, 10**6)), errors.ValueRangeError, "not one to three"),
    "shared": (lambda: source_of(shared=-1), errors.ArgumentError, "shared=-1"),
    "elementwise": (lambda: doubled("out[i] = x[i];", "y"), errors.ValueRangeError, "='y' is neither"),
    "whole": (
        lambda: doubled("out[i] = x[i] + *x;", "x"),
        errors.ValueRangeError,
        "the body has it otherwise",
    ),
    "reads a result": (
        lambda: doubled("out[i] = x[i]; out[i] = out[i] + x[i];", "out"),
        errors.ValueRangeError,
        "the body has it otherwise than as out",
    ),
    "taken": (
        lambda: kernel_of(lambda out: out).source(1.0),
        errors.ValueRangeError,
        "a result is called out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_and_calls(case):
    call, error, match = WRONG[case]
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.where


OUTS = {
    "like": ("x", None, None),
    "struct": (struct(3), None, None),
    "function": (lambda a, x, y: struct(*x.shape, dtype=y.dtype), None, None),
    "function of a name": (lambda a, x, y: "y", None, None),
    "shape": (struct(4), errors.ShapeError, r"returns f32\[3\], and out is f32\[4\]"),
    "dtype": (struct(3, dtype="float16"), errors.DtypeError, r"returns f32\[3\], and out is f16\[3\]"),
    "structure": ((struct(3), struct(3)), errors.TreeError, "a different structure"),
    "name": ("z", errors.ValueRangeError, "out='z' is no argument"),
    "number": (3, errors.ArgumentError, "out is a int, which has no shape"),
}


@pytest.mark.parametrize("case", OUTS)
def test_what_out_says_has_to_be_what_the_reference_returns(case):
    out, error, match = OUTS[case]
    x = bnp.ones(3)
    kernel = bf.cuda_kernel(SAXPY, reference=saxpy, out=out)
    if error is None:
        close(kernel(2.0, x, x), 3 * x)
        return
    with pytest.raises(error, match=match) as caught:
        kernel(2.0, x, x)
    assert "test_cuda_kernel.py" in caught.value.where


# -- the page --------------------------------------------------------------------------------------


def test_the_page_on_kernels_runs():
    """Its blocks are one program."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), flags=re.S):
        exec(compile(block, "docs/kernels.md", "exec"), names)
