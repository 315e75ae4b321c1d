"""Native sorts and selections against the same programs as NumPy calls."""

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, random
from blufunc.kernels.backends.cpu import toolchain
from tests.kernels.backends.cpu.two_ways import by_both

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "bool",
)  # fmt: skip
SHAPES = ((1,), (7,), (40,), (41,), (500,), (9000,), (3, 50), (2, 3, 4), (0, 5), (5, 0), (0,))


def draw(*shape, dtype="float32"):
    """Values with ties, and of floats infinities, zeros of both signs and NaN."""
    rng = np.random.default_rng(sum(shape))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        wide = rng.integers(info.min, info.max, shape, endpoint=True, dtype=kind)
        return np.where(rng.random(shape) < 0.5, wide, rng.integers(0, 5, shape).astype(kind))
    x = np.where(rng.random(shape) < 0.5, rng.standard_normal(shape), rng.integers(-2, 3, shape))
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-45, 3e38])
    with np.errstate(over="ignore"):
        return np.where(rng.random(shape) < 0.2, rng.choice(special, shape), x).astype(kind)


def same(fun, *args, native=True):
    """Compare the bits of the results of NumPy calls and of the compiled program."""
    for want, got in by_both(fun, *args, native=native and all(x.size for x in args)):
        np.testing.assert_array_equal(got.view(f"V{got.itemsize}"), want.view(f"V{want.itemsize}"))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sort(dtype, shape):
    x = draw(*shape, dtype=dtype)
    for axis in range(len(shape)):
        same(lambda x, axis=axis: (bnp.sort(x, axis=axis), bnp.argsort(x, axis=axis)), x)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k(dtype, shape):
    x = draw(*shape, dtype=dtype)
    for k in {1, min(5, shape[-1]), min(100, shape[-1]), shape[-1]}:
        same(lambda x, k=k: lax.top_k(x, k), x)


def test_selections_of_ordered_lines():
    x = np.arange(1000, dtype=np.float32)
    for line in (x, x[::-1].copy(), x * 0, x * np.nan, np.repeat(x[:20], 50)):
        for k in (1, 16, 17, 64, 65):
            same(lambda x, k=k: lax.top_k(x, k), line)
    same(lambda x: lax.top_k(x, 0), x, native=False)


def test_views():
    x = draw(6, 40)
    for view in (
        lambda x: x.T,
        lambda x: x[::-1, ::2],
        lambda x: bnp.broadcast_to(x[0], (3, 40)),
        lambda x: x[:, ::-1],
    ):
        same(lambda x, view=view: (bnp.sort(view(x)), bnp.argsort(view(x), axis=0), lax.top_k(view(x), 4)), x)


@pytest.mark.parametrize("num_keys", [1, 2, 3])
@pytest.mark.parametrize("n", [5, 30, 300])
def test_several_operands(n, num_keys):
    rng = np.random.default_rng(0)
    keys = (
        rng.integers(0, 3, (2, n)).astype(np.int8),
        draw(2, n, dtype="bfloat16"),
        draw(2, n, dtype="int64"),
    )
    rest = (draw(2, n) + 1j, np.arange(2 * n).reshape(2, n), draw(2, n, dtype="bool"))
    same(lambda *xs: lax.sort(xs, num_keys=num_keys), *keys, *rest)
    same(lambda *xs: lax.sort(xs, dimension=0, num_keys=num_keys), *keys, *rest)


def test_one_operand_that_is_not_read():
    same(lambda x: lax.sort((x, x * 2, x + 1))[1], draw(300))
    same(lambda x: lax.top_k(x, 3)[1], draw(4, 300))


def test_many_lines_and_long_ones():
    same(bnp.sort, draw(3000, 30))
    same(lambda x: lax.top_k(x, 3), draw(3000, 30))
    same(bnp.argsort, draw(100_000))
    same(lambda x: lax.top_k(x, 50), draw(100_000))
    same(bnp.argsort, draw(20_000, dtype="int64"))


def test_dtypes_without_keys_run_in_python():
    z = draw(20) + 1j * draw(20)
    same(lambda z: lax.sort(z), np.nan_to_num(z), native=False)
    same(lambda x: lax.sort(x), draw(20).astype(ml_dtypes.float8_e5m2), native=False)


def test_derivatives():
    x = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    same(bf.grad(lambda x: (bnp.sort(x) * np.arange(30)).sum()), x, native=False)
    same(bf.grad(lambda x: (lax.top_k(x, 3)[0] * np.arange(3)).sum()), x, native=False)


def beams(x):
    """Selections and sorts in the body of a loop."""

    def body(c, a):
        scores, index = lax.top_k((c[:, None] + a).reshape(-1), 4)
        return scores, (index, bnp.sort(a, axis=0), bnp.argsort(a))

    return lax.scan(body, x[0, :4], x)


def until_sorted(x):
    """A while loop that ends when the shuffled carry is in order."""
    going = lambda c: (c[0] < 9) & (c[1][0] > c[1][1])
    return lax.while_loop(going, lambda c: (c[0] + 1, bnp.sort(c[1] - c[0])), (0, x.reshape(-1)))


@pytest.mark.parametrize("fun", [beams, until_sorted])
def test_loops(fun):
    x = np.random.default_rng(0).standard_normal((6, 4, 20)).astype(np.float32)
    x = x[:, 0] if fun is beams else x
    same(fun, x)
    same(bf.vmap(fun), np.stack([x, x[::-1]]), native=False)


def test_permutations():
    same(lambda k: random.permutation(random.wrap_key_data(k), 500), np.array([3, 4], np.uint32))
