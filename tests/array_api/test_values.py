"""Values of the standard's functions in each dtype, over odd shapes, as NumPy's.

NumPy implements the standard.
Operands hold limits of their dtypes, and infinities and NaN where there are such. What the standard leaves open is left
out by ``_fits``.
"""

import itertools
import zlib

import numpy as np
import pytest

import blufunc.numpy as bnp
from tests.array_api.signatures import BINARY, DEPARTS, DTYPES, INTEGERS, KINDS, PROMOTION, UNARY

SHAPES = ((), (1,), (0,), (7,), (2, 0, 3), (3, 4), (2, 1, 3))
PAIRS = (((), (4,)), ((3, 1), (1, 4)), ((0, 3), (3,)), ((2, 1, 3), (5, 1)), ((), ()), ((1,), (0,)))
EPS = {"float32": 3e-6, "complex64": 1e-5, "float64": 1e-13, "complex128": 1e-13}
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0)


def operand(dtype, shape, seed, special=True):
    """Elements of a dtype: limits and special values first, then random ones."""
    rng = np.random.default_rng(zlib.crc32(f"{dtype}{shape}{seed}".encode()))
    n, kind = int(np.prod(shape)), np.dtype(dtype).kind
    if kind == "b":
        x = rng.integers(0, 2, n)
    elif kind in "iu":
        info = np.iinfo(dtype)
        x = rng.integers(max(info.min, -9), 9, n, dtype=dtype, endpoint=True)
        first = np.array([info.max, info.min, 0, 1], dtype)[: n if special else 0]
        x[: first.size] = first
    else:
        x = rng.normal(size=n) * 3 + (1j * rng.normal(size=n) if kind == "c" else 0)
        if kind == "f" and special:
            first = rng.permutation(SPECIAL)[:n]
            x[: first.size] = first
    return np.asarray(x).astype(dtype).reshape(shape)


def compare(name, args, got, want, dtype):
    want = np.asarray(want)
    assert got.shape == want.shape, (name, got.shape, want.shape)
    eps = EPS.get(np.dtype(dtype).name, 0)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            np.asarray(got).astype(want.dtype), want, rtol=eps, atol=eps, err_msg=f"{name}: {args}"
        )


def given(x):
    return bnp.asarray(x, dtype=x.dtype)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    kind, _ = UNARY[name]
    for dtype, shape in itertools.product(KINDS[kind], SHAPES):
        x = operand(dtype, shape, name)
        with np.errstate(all="ignore"):
            want = getattr(np, name)(x)
        compare(name, [x], getattr(bnp, name)(given(x)), want, dtype)


def _fits(name, x, y, dtype):
    """Second operands for which the standard says what the result is."""
    if dtype not in INTEGERS:
        return y
    if name in ("floor_divide", "remainder"):
        return np.where(y == 0, np.array(1, y.dtype), np.where(y == -1, np.array(2).astype(y.dtype), y))
    if "shift" in name:
        return np.abs(y) % np.array(np.iinfo(x.dtype).bits, y.dtype)
    return np.abs(y) % np.array(5, y.dtype) if name == "pow" else y


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    kind, rule = BINARY[name]
    for a, b in itertools.product(KINDS[kind], repeat=2):
        common = PROMOTION.get((a, b)) or PROMOTION.get((b, a))
        if common is None or (a, b) in DEPARTS or (b, a) in DEPARTS:
            continue
        for i, (left, right) in enumerate(PAIRS):
            x = operand(a, left, i, special=common not in KINDS["complex"])
            y = operand(b, right, -i - 1, special=common not in KINDS["complex"])
            with np.errstate(all="ignore"):
                y = _fits(name, x, y, common)
                want = getattr(np, name)(x, y)
            compare(
                name,
                [x, y],
                getattr(bnp, name)(given(x), given(y)),
                want,
                "bool" if rule == "bool" else common,
            )


REDUCTIONS = {
    "all": DTYPES, "any": DTYPES, "count_nonzero": DTYPES, "max": KINDS["real"], "min": KINDS["real"],
    "argmax": KINDS["real"], "argmin": KINDS["real"], "mean": KINDS["floating"], "std": KINDS["real floating"],
    "var": KINDS["real floating"], "sum": KINDS["numeric"], "prod": KINDS["numeric"],
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    needs_elements = name in ("max", "min", "argmax", "argmin", "mean", "std", "var")
    for dtype, shape in itertools.product(REDUCTIONS[name], SHAPES):
        x = operand(dtype, shape, name, special=name not in ("std", "var"))
        for axis in (None, *range(-len(shape), len(shape))):
            if needs_elements and 0 in (shape if axis is None else (shape[axis],)):
                continue
            for keepdims in (False, True):
                got = getattr(bnp, name)(given(x), axis=axis, keepdims=keepdims)
                with np.errstate(all="ignore"):
                    wide = {} if name not in ("sum", "prod") else {"dtype": got.dtype}
                    want = getattr(np, name)(x, axis=axis, keepdims=keepdims, **wide)
                compare(f"{name} over {axis}", [x], got, want, dtype)


LINES = {
    "sort": lambda n, x: n.sort(x, axis=-1, stable=True),
    "argsort": lambda n, x: n.argsort(x, axis=0, stable=True),
    "flip": lambda n, x: n.flip(x, axis=-1),
    "roll": lambda n, x: n.roll(x, 2, axis=0),
    "cumulative_sum": lambda n, x: n.cumulative_sum(n.astype(x, n.int64), axis=-1),
    "concat": lambda n, x: n.concat([x, x[:1]], axis=0),
    "stack": lambda n, x: n.stack([x, x], axis=1),
    "take": lambda n, x: n.take(x, n.asarray([0] * (x.shape[0] > 0), dtype=n.int32), axis=0),
    "tile": lambda n, x: n.tile(x, (2, 1)),
    "repeat": lambda n, x: n.repeat(x, 2, axis=0),
    "expand_dims": lambda n, x: n.expand_dims(x, axis=1),
    "reshape": lambda n, x: n.reshape(x, (x.size,)),
    "nonzero": lambda n, x: n.nonzero(x)[0],
    "unique_values": lambda n, x: n.sort(n.unique_values(x)),
    "unique_counts": lambda n, x: n.unique_counts(x)[1],
    "unique_inverse": lambda n, x: n.unique_inverse(x)[1],
    "diff": lambda n, x: n.diff(n.astype(x, n.int32), axis=0),
    "where": lambda n, x: n.where(x == x, x, x[:1]),
    "moveaxis": lambda n, x: n.moveaxis(x, 0, -1),
    "searchsorted": lambda n, x: n.searchsorted(n.sort(n.reshape(x, (-1,) if x.size else (0,))), x),
    "astype": lambda n, x: n.astype(x, n.float64),
    "zeros_like": lambda n, x: n.zeros_like(x),
    "mask": lambda n, x: x[x == x],
    "reversed": lambda n, x: x[::-1],
    "every other": lambda n, x: x[::2],
    "new axis": lambda n, x: x[None, ..., None],
}


@pytest.mark.parametrize("name", LINES)
def test_functions_of_shapes_and_order(name):
    for dtype, shape in itertools.product(INTEGERS + KINDS["real floating"] + ("bool",), SHAPES[1:]):
        x = operand(dtype, shape, name, special=name not in ("diff",))
        if name in (
            "unique_values",
            "unique_counts",
            "unique_inverse",
            "searchsorted",
            "astype",
            "mask",
            "cumulative_sum",
        ):
            x = np.nan_to_num(x, nan=2, posinf=5, neginf=-5)
        if name == "diff" and dtype == "bool":
            continue
        compare(name, [x], LINES[name](bnp, given(x)), LINES[name](np, x), dtype)


MATRICES = {
    "matmul": lambda n, x: n.matmul(x, n.matrix_transpose(x)),
    "vecdot": lambda n, x: n.vecdot(x, x),
    "tensordot": lambda n, x: n.tensordot(x, x, axes=([-1], [-1])),
    "matrix_transpose": lambda n, x: n.matrix_transpose(x),
    "trace": lambda n, x: n.linalg.trace(x, offset=1, dtype=x.dtype),
    "diagonal": lambda n, x: n.linalg.diagonal(x, offset=-1),
    "tril": lambda n, x: n.tril(x, k=1),
    "triu": lambda n, x: n.triu(x, k=-1),
    "outer": lambda n, x: n.linalg.outer(x.reshape(-1) if x.size else x.reshape(0), x[..., 0].reshape(-1)),
}
DECOMPOSED = {
    "det": lambda n, x: n.linalg.det(x),
    "inv": lambda n, x: n.linalg.inv(x),
    "slogdet": lambda n, x: n.linalg.slogdet(x)[1],
    "solve": lambda n, x: n.linalg.solve(x, x[..., :1]),
    "svdvals": lambda n, x: n.linalg.svdvals(x),
    "eigvalsh": lambda n, x: n.linalg.eigvalsh(x @ n.conj(n.matrix_transpose(x))),
    "cholesky": lambda n, x: n.linalg.cholesky(x @ n.conj(n.matrix_transpose(x)) + n.eye(3, dtype=x.dtype)),
    "matrix_norm": lambda n, x: n.linalg.matrix_norm(x),
    "vector_norm": lambda n, x: n.linalg.vector_norm(x, axis=-1, ord=1),
    "matrix_power": lambda n, x: n.linalg.matrix_power(x, 3),
    "matrix_rank": lambda n, x: n.linalg.matrix_rank(x),
    "pinv": lambda n, x: n.linalg.pinv(x),
    "qr": lambda n, x: n.abs(n.linalg.qr(x)[1]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name):
    for dtype, shape in itertools.product(KINDS["numeric"], ((3, 3), (2, 3, 3), (0, 3), (2, 0, 4), (4, 2))):
        x = operand(dtype, shape, name, special=False)
        if np.dtype(dtype).kind == "u":
            x = x % np.array(4, dtype)
        with np.errstate(all="ignore"):
            want = MATRICES[name](np, x)
        compare(name, [x], MATRICES[name](bnp, given(x)), want, dtype)


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions(name):
    for dtype, shape in itertools.product(KINDS["floating"], ((3, 3), (2, 3, 3), (0, 3, 3))):
        x = operand(dtype, shape, name, special=False) + (4 * np.eye(3)).astype(dtype)
        got, want = DECOMPOSED[name](bnp, given(x)), DECOMPOSED[name](np, x)
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        compare(name, [x], got / scale if scale > 1 else got, want / scale if scale > 1 else want, "complex64"
                if dtype in ("float32", "complex64") else "complex128")  # fmt: skip
