"""Small matrices: kernels on the host and on a device against LAPACK."""

import functools

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.core.ops.linalg.solve import solve as lu_solve
from blufunc.core.ops.linalg.spectral import eigvalsh
from blufunc.core.programs.simplify import inline_calls
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.library.linalg import small
from tests.emulation.cuda_machines import PARTS, needs_nvrtc
from tests.kernels.backends.cuda.test_program import on

DTYPES = ("float32", "float64", "complex64", "complex128")
RNG = np.random.default_rng(0)


def random(*shape):
    """Matrices in complex128, of which real dtypes take the real part."""
    return RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)


def definite(*shape):
    x = random(*shape)
    return x @ x.conj().swapaxes(-1, -2) + shape[-1] * np.eye(shape[-1])


def triangular(*shape):
    return random(*shape) + 3 * np.sqrt(shape[-1]) * np.eye(shape[-1])


def solves(**params):
    return lambda a, b: lax.linalg.triangular_solve(a, b, **params)


def transposed_solve(a, b):
    """The derivative of a solve, which has one with the transposed matrix."""
    return bf.vjp(lambda b: lu_solve(a, b), b)[1](b)[0]


qr = lambda full: lambda x: lax.linalg.qr(x, full_matrices=full)
svd = lambda full: lambda x: lax.linalg.svd(x, full_matrices=full)
values = lambda x: lax.linalg.svd(x, compute_uv=False)
cholesky = lambda x: lax.linalg.cholesky(x, symmetrize_input=False)
eigh = lambda x: lax.linalg.eigh(x, symmetrize_input=False)

CASES = {
    "cholesky": (cholesky, definite(3, 9, 9)),
    "cholesky of 1": (cholesky, definite(5, 1, 1)),
    "cholesky of one": (cholesky, definite(32, 32)),
    "cholesky of two warps": (cholesky, definite(2, 50, 50)),
    "lu": (lax.linalg.lu, random(5, 7, 7)),
    "lu of a warp": (lax.linalg.lu, random(2, 32, 32)),
    "lu of two warps": (lax.linalg.lu, random(2, 45, 45)),
    "lu, tall": (lax.linalg.lu, random(3, 13, 6)),
    "lu, wide": (lax.linalg.lu, random(3, 6, 21)),
    "lower": (solves(left_side=True, lower=True), triangular(3, 10, 10), random(3, 10, 3)),
    "upper, from the right": (solves(), triangular(3, 10, 10), random(3, 7, 10)),
    "transposed, many": (solves(left_side=True, transpose_a=True), triangular(2, 9, 9), random(2, 9, 70)),
    "conjugated": (
        solves(left_side=True, lower=True, transpose_a=True, conjugate_a=True), triangular(2, 5, 5), random(2, 5, 9)
    ),
    "ones on the diagonal": (
        solves(lower=True, unit_diagonal=True, conjugate_a=True), triangular(2, 6, 6) / 9, random(2, 20, 6)
    ),
    "two warps of rows": (solves(left_side=True), triangular(2, 41, 41), random(2, 41, 5)),
    "solve": (lu_solve, random(3, 8, 8), random(3, 8, 4)),
    "solve many": (lu_solve, random(2, 7, 7), random(2, 7, 11)),
    "solve the transposed": (transposed_solve, random(3, 9, 9), random(3, 9, 2)),
    "solve many transposed": (transposed_solve, random(3, 9, 9), random(3, 9, 17)),
    "qr": (qr(False), random(3, 8, 8)),
    "qr, tall": (qr(True), random(3, 11, 4)),
    "qr, reduced": (qr(False), random(2, 11, 4)),
    "qr, wide": (qr(False), random(2, 3, 35)),
    "qr of zeros": (qr(True), np.zeros((2, 5, 3))),
    "eigh": (eigh, definite(3, 8, 8)),
    "eigh, odd": (eigh, definite(3, 5, 5)),
    "eigh of 1": (eigh, definite(3, 1, 1)),
    "eigh of a warp": (eigh, definite(1, 32, 32)),
    "eigh, repeated": (eigh, np.stack([np.eye(6), np.zeros((6, 6)), np.diag([1.0, 1, 2, 2, 3, 3])])),
    "eigenvalues": (lambda x: eigvalsh(x, symmetrize_input=False), definite(2, 7, 7)),
    "svd": (svd(True), random(3, 8, 8)),
    "svd, tall": (svd(True), random(3, 9, 4)),
    "svd, wide": (svd(True), random(2, 4, 9)),
    "svd, reduced": (svd(False), random(2, 20, 7)),
    "svd of 1": (svd(True), random(3, 1, 1)),
    "svd, singular": (svd(True), np.stack([np.ones((5, 4)), np.zeros((5, 4))])),
    "singular values": (values, random(2, 6, 9)),
}  # fmt: skip


def arguments(name, dtype):
    fun, *args = CASES[name]
    return fun, [np.asarray(a if dtype[0] == "c" else a.real, dtype) for a in args]


def on_host(eqn, operands, host):
    """The results of the kernel of an equation."""
    found = small.kernel(eqn, small.small(eqn))
    text = small.body(small.small(eqn), len(eqn.invars))
    text = text.replace("  extern __shared__ __align__(16) unsigned char shared_memory[];\n", "")
    if eqn.prim.name == "lu_solve":  # the matrix itself is not read
        text, operands = text.replace("const Scalar *x0, ", ""), operands[1:]
    before = f"constexpr int SHARED_BYTES = {found.shared};\n" + PARTS["rendered"]
    outs = [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    given, shape = [*operands, *outs[:-1]], {"grid": found.grid[0], "block": found.block[0]}
    last = host.launch(before + text, found.entry, given, outs[-1], **shape)
    return [*outs[:-1], last]


def adjoint(x):
    return x.conj().swapaxes(-1, -2)


def check(eqn, operands, got, want):
    """Results that are unique to rounding, and others by what they must satisfy."""
    tolerance = 4e-5 if want[0].dtype.itemsize // (1 + (want[0].dtype.kind == "c")) == 4 else 1e-12
    x = operands[0]
    size = max(1.0, np.abs(x).max()) * tolerance
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=size)
    orthonormal = lambda u: close(
        adjoint(u) @ u, np.broadcast_to(np.eye(u.shape[-1]), (adjoint(u) @ u).shape)
    )
    name = eqn.prim.name
    if name == "eigh" and len(got) == 2:
        v, w = got
        orthonormal(v)
        low = np.tril(x, -1)
        close(v * w[..., None, :] @ adjoint(v), low + adjoint(low) + np.eye(x.shape[-1]) * x.real)
        got, want = [w], [want[1]]
    elif name == "svd" and len(got) == 3:
        u, s, vh = got
        k = s.shape[-1]
        orthonormal(u)
        orthonormal(adjoint(vh))
        close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], x)
        got, want = [s], [want[1]]
    elif name == "qr":
        q, r = got
        orthonormal(q)
        close(q @ r, x)
        if x.any() and q.shape[-1] > min(x.shape[-2:]):  # the last columns are any basis
            got, want = [r], [want[1]]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        close(a, b)


def chain(fun, args):
    """Equations with kernels, their operands, and LAPACK's results."""
    jaxpr = bf.make_jaxpr(fun)(*[bf.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    jaxpr = inline_calls(getattr(jaxpr, "jaxpr", jaxpr))
    values = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [np.asarray(values[a]) for a in eqn.invars]
        results = ignoring_fp_errors(functools.partial(eqn.prim.impl, **eqn.params), *operands)
        results = results if eqn.prim.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
        if small.small(eqn):
            yield eqn, [np.ascontiguousarray(x) for x in operands], [np.asarray(r) for r in results]


@pytest.mark.second
@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_the_host(name, dtype, host):
    found = list(chain(*arguments(name, dtype)))
    assert found
    for eqn, operands, want in found:
        check(eqn, operands, on_host(eqn, operands, host), want)


@pytest.mark.parametrize("fun", [qr(True), svd(True)])
def test_columns_whose_inverse_overflows(fun, host):
    x = np.array([[[1e-39, 0], [1e-39, 1]]], np.float32)
    for eqn, operands, want in chain(fun, [x]):
        check(eqn, operands, on_host(eqn, operands, host), want)


def bind(eqn):
    """One equation as a function."""
    return lambda *xs: eqn.prim.bind(*xs, **eqn.params)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_device(name, dtype):
    device = bf.devices("cuda")[0]
    for eqn, operands, want in chain(*arguments(name, dtype)):
        jitted, there = bf.jit(bind(eqn)), on(device, *operands)
        for _ in range(3):  # the third is a graph
            got = jitted(*there)
            check(eqn, operands, [np.asarray(x) for x in (got if eqn.prim.multiple_results else [got])], want)


# -- matrices without a result -----------------------------------------------------------------------

BROKEN = {
    "cholesky, indefinite": (cholesky, np.diag([1.0, -1, 2, 3, 4])),
    "cholesky, singular": (cholesky, np.zeros((5, 5))),
    "cholesky of NaN": (cholesky, np.full((5, 5), np.nan)),
    "eigh of NaN": (eigh, np.full((5, 5), np.nan)),
    "eigh of infinity": (eigh, np.diag([1.0, 2, np.inf, 3, 4])),
    "svd of NaN": (svd(True), np.full((5, 5), np.nan)),
    "lu of NaN": (lax.linalg.lu, np.full((5, 5), np.nan)),
    "lu, singular": (lax.linalg.lu, np.ones((5, 5))),
    "solve, singular": (lu_solve, np.zeros((5, 5))),
    "qr of NaN": (qr(True), np.full((5, 5), np.nan)),
}


def broken(name):
    """A matrix without a result between two that have one."""
    fun, bad = BROKEN[name]
    x = np.stack([definite(5, 5).real, bad, definite(5, 5).real]).astype(np.float32)
    return (fun, x, np.ones((3, 5, 2), np.float32)) if fun is lu_solve else (fun, x)


def check_broken(name, eqn, operands, got, want):
    """Neighbours are what they were; NaN and infinities are where LAPACK has them."""
    neighbours = lambda xs: [x[[0, 2]] for x in xs]
    check(eqn, neighbours(operands), neighbours(got), neighbours(want))
    if "singular" in name and eqn.prim.name == "lu":
        check(eqn, operands, got, want)
    elif eqn.prim.name in ("cholesky", "eigh", "svd"):
        for a, b in zip(got, want, strict=True):
            if "infinity" in name:  # LAPACK decomposes some matrices with infinities
                assert np.isnan(a[1]).all()
            else:
                np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    elif got[0].dtype.kind == "f":
        assert not np.isfinite(got[0][1]).all()


@pytest.mark.second
@pytest.mark.parametrize("name", BROKEN)
def test_broken_matrices_on_the_host(name, host):
    fun, *args = broken(name)
    for eqn, operands, want in chain(fun, args):
        check_broken(name, eqn, operands, on_host(eqn, operands, host), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN)
def test_broken_matrices_on_a_device(name):
    fun, *args = broken(name)
    device = bf.devices("cuda")[0]
    for eqn, operands, want in chain(fun, args):
        got = bf.jit(bind(eqn))(*on(device, *operands))
        got = [np.asarray(x) for x in (got if eqn.prim.multiple_results else [got])]
        check_broken(name, eqn, operands, got, want)


# -- programs -----------------------------------------------------------------------------------------

PROGRAMS = {
    "solve": (bnp.linalg.solve, random(4, 6, 6), random(4, 6, 2)),
    "inv": (bnp.linalg.inv, random(4, 6, 6)),
    "det": (bnp.linalg.det, random(4, 6, 6)),
    "gradient of a solve": (bf.grad(lambda a, b: bnp.linalg.solve(a, b).sum()), random(4, 6, 6), random(4, 6, 2)),
    "gradient of a determinant": (bf.grad(lambda a: bnp.linalg.slogdet(a)[1].sum()), definite(4, 6, 6)),
    "gradient of a factor": (bf.grad(lambda a: bnp.linalg.cholesky(a).sum()), definite(4, 6, 6)),
    "batched": (bf.vmap(lambda a, b: bnp.linalg.solve(a, b), (0, None)), random(4, 6, 6), random(6, 2)),
    "of one": (lambda a: bnp.linalg.inv(a @ a), random(6, 6)),
}  # fmt: skip


def check_program(name, device):
    fun, *args = PROGRAMS[name]
    args = [np.asarray(a.real, np.float32) for a in args]
    want, jitted = np.asarray(fun(*map(bnp.asarray, args))), bf.jit(fun)
    for _ in range(3):
        np.testing.assert_allclose(
            jitted(*on(device, *args)), want, rtol=2e-3, atol=2e-3 * np.abs(want).max()
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, cuda):
    check_program(name, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_a_device(name):
    check_program(name, bf.devices("cuda")[0])


@needs_nvrtc
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name):
    for eqn, _, _ in chain(*arguments(name, "complex128")):
        found = small.kernel(eqn, small.small(eqn))
        (resources_of,) = resources(nvrtc.build(found.text, "sm_80", name)).values()
        assert not resources_of.spill_stores


def test_what_libraries_compute():
    def kernels(fun, *shapes, dtype=np.float32):
        args = [bf.ShapeDtypeStruct(s, dtype) for s in shapes]
        jaxpr = bf.make_jaxpr(fun)(*args)
        return [
            small.small(e)
            for e in inline_calls(getattr(jaxpr, "jaxpr", jaxpr)).eqns
            if e.prim in small._KERNELS
        ]

    assert kernels(cholesky, (2, 128, 128)) != [None]
    assert kernels(cholesky, (2, 129, 129)) == [None]
    assert kernels(eigh, (33, 33)) == [None]
    assert kernels(lambda x: lax.linalg.qr(x, pivoting=True), (2, 5, 5)) == [None]
    assert (
        kernels(lu_solve, (100, 100), (100, 3), dtype=np.complex128)[1] is None
    )  # of shared memory there is less
