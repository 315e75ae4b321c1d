"""Prologues and epilogues fused into users' CUDA kernels: code, values, limits."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.backends.numpy.program import interpret
from blufunc.kernels.ops.fused_user_kernel import fused_user_kernel_p
from blufunc.kernels.schedule import OpaqueStep
from tests.emulation.kernels_on_host import run_source
from tests.transforms.common import draw

COPY = "if (i < out_size) out[i] = a[0] * x[i] + y[i];"


def saxpy(a, x, y):
    return a * x + y


def made(elementwise, body=COPY, reference=saxpy, **more):
    return bf.cuda_kernel(body, reference=reference, elementwise=elementwise, **more)


fused = made("x, out")
transposed = bf.cuda_kernel(
    "if (i < x_size) out[i % x_shape_1 * x_shape_0 + i / x_shape_1] = x[i];",
    reference=lambda x: x.T,
    elementwise=("x", "out"),
)


def schedule_of(f, *args):
    """The schedule of a CUDA program for ``f``."""
    traced = bf.jit(f).trace(*args)
    return Draft(traced.jaxpr, (False,) * len(traced.jaxpr.invars), "sm_90").schedule


def steps_of(f, *args):
    """Its steps."""
    return schedule_of(f, *args).steps


def kernel_step(schedule):
    """The equation of a program's only step, a user's kernel with fused operations."""
    (step,) = schedule.steps
    assert isinstance(step, OpaqueStep) and step.eqn.prim is fused_user_kernel_p
    return step.eqn


def source_of(eqn):
    return eqn.prim.cuda_source(*[a.aval for a in eqn.invars], **eqn.params)


# of any dtype: CUDA has no product of a float and a half
in_float = made("x, out", "if (i < out_size) out[i] = out_dtype(float(a[0]) * float(x[i]) + float(y[i]));")


def residual(x, y, r, kernel=fused):
    return bnp.tanh(kernel(2.0, bnp.exp(x) * 0.5, y)) * 3 + r


def one_transposed(x, r):
    return transposed(bnp.sin(x) + x) * r


def with_number(x, y, s):
    return fused(1.5, x * s, y) - s


X, Y, R = draw(7, 9), draw(7, 9, seed=1), draw(7, 9, seed=2)
CASES = {
    "residual": (residual, (X, Y, R)),
    "transposed": (one_transposed, (X, draw(9, 7, seed=3))),
    "a number": (with_number, (X, Y, bnp.asarray(0.25, X.dtype))),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("f, args", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_kernel_with_the_same_value(f, args, dtype, tmp_path):
    args = [bnp.asarray(a, dtype) for a in args]
    schedule = schedule_of(f, *args)
    eqn = kernel_step(schedule)
    places = eqn.params["kernel"].places
    inputs = dict(zip(schedule.jaxpr.invars, map(np.asarray, args), strict=True))
    given = [np.asarray(a.array) if n is None else inputs[a] for a, n in zip(eqn.invars, places, strict=True)]
    (got,) = run_source(source_of(eqn), given, [v.aval for v in eqn.outvars], tmp_path)
    tol = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(got, f(*args), tol, tol)
    (on_host,) = eqn.prim.reference(interpret, **eqn.params)(given)
    np.testing.assert_allclose(on_host, f(*args), tol, tol)


@pytest.mark.skipif(nvrtc.available() is not None, reason=nvrtc.available() or "")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_it_compiles_for_devices(dtype):
    args = [bf.ShapeDtypeStruct((64, 32), dtype)] * 3
    schedule = schedule_of(lambda *args: residual(*args, in_float), *args)
    text = source_of(kernel_step(schedule)).text
    assert nvrtc.compile(text, "sm_90a", "saxpy")[1:4] == b"ELF"


def test_what_others_read_is_stored():
    def f(x, y):
        scaled = x * 2
        out = fused(2.0, scaled, y)
        return out, scaled, out + 1

    assert not any(isinstance(s, OpaqueStep) and s.eqn.prim is fused_user_kernel_p for s in steps_of(f, X, Y))


def test_only_what_the_author_names_is_fused():
    plain = made(())
    f = lambda x, y: plain(2.0, x * 2, y) + 1
    assert len(steps_of(f, X, Y)) == 3
    only_x = made("x")
    assert len(steps_of(lambda x, y: only_x(2.0, x * 2, y) + 1, X, Y)) == 2
    sums = lambda x, y: fused(2.0, bnp.cumsum(x, 1), y)  # no elementwise operation
    assert not any(
        getattr(s, "eqn", None) and s.eqn.prim is fused_user_kernel_p for s in steps_of(sums, X, Y)
    )


@pytest.mark.parametrize(
    "elementwise, body, name",
    [
        ("x", "if (i < out_size) out[i] = *x + a[0] + y[i];", "x"),
        ("x", "const float *p = x; if (i < out_size) out[i] = p[i] + a[0] + y[i];", "x"),
        ("x", "const float *p = &x[i]; if (i < out_size) out[i] = *p + a[0] + y[i];", "x"),
        ("out", "if (i < out_size) { out[i] = a[0] * x[i]; out[i] += y[i]; }", "out"),
        ("out", "if (i < out_size) { out[i] = x[i]; y_more(out[i]); }", "out"),
        ("z", COPY, "z"),
    ],
)
def test_what_is_not_elementwise_is_an_error(elementwise, body, name):
    use = lambda: steps_of(lambda x, y: made(elementwise, body)(2.0, x * 2, y) + 1, X, Y)
    with pytest.raises(errors.ValueRangeError, match=f"saxpy: elementwise='{name}'") as e:
        use()
    assert __file__ in e.value.where and e.value.fix
    with pytest.raises(errors.ArgumentError, match="elementwise=3 are no names"):
        made(3)
