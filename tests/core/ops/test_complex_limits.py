"""Complex functions near 0 and at infinities, as in the array API standard."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import config
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.staging.jit import jit

INF, NAN = np.inf, np.nan

# The function, the argument, and the result as (real, imaginary): None where its sign, or all of it, is unspecified.
LIMITS = [
    ("expm1", (0.0, 0.0), (0.0, 0.0)), ("expm1", (1.0, INF), (NAN, NAN)), ("expm1", (1.0, NAN), (NAN, NAN)),
    ("expm1", (INF, 0.0), (INF, 0.0)), ("expm1", (-INF, 2.0), (-1.0, 0.0)), ("expm1", (INF, 1.0), (INF, INF)),
    ("expm1", (INF, 2.0), (-INF, INF)), ("expm1", (-INF, INF), (-1.0, 0.0)), ("expm1", (INF, INF), (INF, NAN)),
    ("expm1", (-INF, NAN), (-1.0, 0.0)), ("expm1", (INF, NAN), (INF, NAN)), ("expm1", (NAN, 0.0), (NAN, 0.0)),
    ("expm1", (NAN, 1.0), (NAN, NAN)), ("expm1", (NAN, NAN), (NAN, NAN)),
    ("tanh", (0.0, 0.0), (0.0, 0.0)), ("tanh", (1.0, INF), (NAN, NAN)), ("tanh", (1.0, NAN), (NAN, NAN)),
    ("tanh", (0.0, INF), (0.0, NAN)), ("tanh", (0.0, NAN), (0.0, NAN)), ("tanh", (INF, 1.0), (1.0, 0.0)),
    ("tanh", (INF, 2.0), (1.0, 0.0)), ("tanh", (INF, INF), (1.0, 0.0)), ("tanh", (INF, NAN), (1.0, 0.0)),
    ("tanh", (NAN, 0.0), (NAN, 0.0)), ("tanh", (NAN, 1.0), (NAN, NAN)), ("tanh", (NAN, NAN), (NAN, NAN)),
    ("log1p", (-1.0, 0.0), (-INF, 0.0)), ("log1p", (1.0, INF), (INF, np.pi / 2)), ("log1p", (1.0, NAN), (NAN, NAN)),
    ("log1p", (-INF, 1.0), (INF, np.pi)), ("log1p", (INF, 1.0), (INF, 0.0)),
    ("log1p", (-INF, INF), (INF, 3 * np.pi / 4)), ("log1p", (INF, INF), (INF, np.pi / 4)),
    ("log1p", (INF, NAN), (INF, NAN)), ("log1p", (NAN, 1.0), (NAN, NAN)), ("log1p", (NAN, INF), (INF, NAN)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("compiler", ["never", "always"])
@pytest.mark.parametrize("name", ["expm1", "tanh", "log1p"])
def test_limits(name, compiler, dtype, monkeypatch):
    """Also of the conjugates."""
    monkeypatch.setattr(config, "host_compiler", compiler)
    rows = [(x, want) for row, x, want in LIMITS if row == name]
    points = np.array([complex(*x) for x, _ in rows] + [complex(a, -b) for (a, b), _ in rows], dtype)
    real = np.array([want[0] for _, want in rows] * 2)
    imag = np.array([want[1] for _, want in rows])
    f = getattr(bnp, name)
    for g in (f, jit(f)):
        got = np.asarray(g(bnp.asarray(points, dtype)))
        np.testing.assert_allclose(got.real, real, rtol=1e-6)
        np.testing.assert_allclose(np.abs(got.imag), np.abs(np.concatenate([imag, imag])), rtol=1e-6)
        signed = np.isfinite(points).all() & (points.imag != 0)
        np.testing.assert_array_equal(np.sign(got.imag[signed]), np.sign(points.imag[signed]))


@pytest.mark.parametrize("dtype, tol", [("complex64", 1e-6), ("complex128", 1e-12)])
@pytest.mark.parametrize("compiler", ["never", "always"])
def test_near_0(dtype, tol, compiler, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", compiler)
    z = np.array([1e-8 + 1e-9j, -1e-9 + 1e-9j, 1e-3 - 2e-3j, 0.3 + 0.4j, -0.4 - 0.3j], dtype)
    wide = z.astype(np.clongdouble)
    series = {
        "log1p": wide - wide**2 / 2 + wide**3 / 3 - wide**4 / 4 + wide**5 / 5,
        "expm1": wide + wide**2 / 2 + wide**3 / 6 + wide**4 / 24 + wide**5 / 120,
    }
    for name, want in series.items():
        f = getattr(bnp, name)
        for g in (f, jit(f)):
            got = np.asarray(g(bnp.asarray(z, dtype)))
            for part in ("real", "imag"):
                np.testing.assert_allclose(getattr(got, part)[:3], getattr(want, part)[:3], rtol=tol)
            np.testing.assert_allclose(got[3:], getattr(np, name)(z[3:].astype("complex128")), rtol=tol)


def test_derivatives():
    z = bnp.asarray(1e-8 + 1e-9j, "complex128")
    assert grad(bnp.log1p, holomorphic=True)(z) == pytest.approx(1 / (1 + complex(z)))
    assert grad(bnp.expm1, holomorphic=True)(z) == pytest.approx(np.exp(complex(z)))


@pytest.mark.parametrize("a", [[[2 + 1j, 0], [0, 3 - 2j]], [[2, 1j], [-1j, 3]], [[2, 5 + 1j], [1j, 4]]])
@pytest.mark.parametrize(
    "t", [[[1 + 1j, 0], [0, 1]], [[0, 1j], [-1j, 0]], [[0, 1j], [0, 0]], [[0, 0], [1, 0]]]
)
def test_hermitian_pseudoinverse(a, t):
    """The pseudoinverse of the Hermitian part, and its derivative."""
    a, t = bnp.asarray(a, "complex128"), bnp.asarray(t, "complex128")
    f = lambda x: bnp.linalg.pinv(x, hermitian=True)
    host = np.asarray(a)
    np.testing.assert_allclose(f(a), np.linalg.pinv((host + host.conj().T) / 2), atol=1e-12)
    step = 1e-6
    slope = (np.asarray(f(a + step * t)) - np.asarray(f(a - step * t))) / (2 * step)
    for g in (f, jit(f)):
        np.testing.assert_allclose(jvp(g, (a,), (t,))[1], slope, atol=1e-7)
