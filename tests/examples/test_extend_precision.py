"""The example of mixed precision: the dtype of each operation, and losses."""

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, random, testing
from examples.extend import precision
from examples.extend.precision import lowered


def dtypes(f, *args):
    """The dtype of the result of each primitive that occurs once."""
    jaxpr = bf.make_jaxpr(lowered(f))(*args)
    return {e.prim.name: str(e.outvars[0].aval.dtype) for e in jaxpr.eqns}


X = bnp.ones((4, 4))


def test_products_are_low_and_the_rest_follows():
    found = dtypes(lambda x: bnp.exp(-(bnp.tanh(x @ x))), X)
    assert found["dot_general"] == found["tanh"] == found["neg"] == "bfloat16"
    assert found["exp"] == "float32"


def test_numbers_adapt_and_arrays_widen():
    assert dtypes(lambda x: (x @ x) * 2.0, X)["mul"] == "bfloat16"
    assert dtypes(lambda x: (x @ x) * x, X)["mul"] == "float32"


def test_results_have_the_dtypes_of_the_function():
    f = lambda x, n: (x @ x, n + 1, (x @ x).astype("float16"), x > 0)
    args = X, bnp.asarray(3)
    want, got = bf.eval_shape(f, *args), bf.eval_shape(lowered(f), *args)
    assert [a.dtype for a in want] == [a.dtype for a in got]
    np.testing.assert_array_equal(lowered(f)(*args)[1], 4)


def test_other_dtypes_are_left_alone():
    x = X.astype("float64")
    assert dtypes(lambda x: x @ x, x)["dot_general"] == "float64"


def test_loops_carry_the_dtype_of_the_function():
    f = lambda x: lax.scan(lambda c, _: (bnp.tanh(c @ c), c.sum()), x, None, length=3)
    for a, b in zip(bf.tree.leaves(lowered(f)(X / 4)), bf.tree.leaves(f(X / 4)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-2)
    g = lambda x: lax.cond(True, lambda: x @ x, lambda: x)
    assert lowered(g)(X).dtype == np.float32


def test_gradients_are_in_the_dtype_of_the_parameters():
    params, x = precision.init(random.key(0)), random.normal(random.key(1), (16, 8))
    want = bf.grad(precision.loss)(params, x, bnp.ones(16))
    for got in (
        bf.grad(lowered(precision.loss))(params, x, bnp.ones(16)),
        lowered(bf.grad(precision.loss))(params, x, bnp.ones(16)),
    ):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, atol=0.05 * float(bnp.abs(b).max()))


def test_composition():
    f = lambda x: bnp.tanh(x) / (1 + bnp.square(x))
    assert not testing.check_transform(lowered, f, (X,)).unsupported
    values = lambda x: (x @ x, bnp.exp(x))  # whose differences in bfloat16 say little
    report = testing.check_transform(lowered, values, (X / 3,), atol=0.1, rtol=0.1)
    assert not report.unsupported


def test_training():
    plain, mixed = precision.train(precision.loss, 60), precision.train(lowered(precision.loss), 60)
    assert abs(plain[1] - mixed[1]) < 0.05 * plain[1]
    assert all(p.dtype == np.float32 for p in mixed[0])


def test_main(capsys):
    precision.main()
    assert "bfloat16  dot_general" in capsys.readouterr().out
