"""Promotion: weak Python numbers, explicit 64-bit, and JAX's lattice."""

import itertools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
]


def test_scalars_are_weak():
    assert (bnp.ones(3, "int32") + 2.0).dtype == bnp.float32
    assert (bnp.ones(3, "int8") + 2).dtype == bnp.int8
    assert (bnp.ones(3, "bfloat16") * 2.0).dtype == bnp.bfloat16
    assert (bnp.ones(3, "bool") + 2).dtype == bnp.int32
    assert (bnp.ones(3, "float16") * 1j).dtype == bnp.complex64
    assert (bnp.ones(3, "float64") * 2.0).dtype == bnp.float64
    assert (bnp.ones(3, "int64") + 2**40).dtype == bnp.int64
    assert int((bnp.zeros(3, "int64") + 2**40)[0]) == 2**40


def test_weakness_survives():
    x = bnp.asarray(2.0)
    assert x.weak_type and (x + 1).weak_type and bnp.sin(x).weak_type and (x * 3.0).weak_type
    assert not (x + bnp.float32(1)).weak_type
    assert not bnp.asarray([2.0]).weak_type and not bnp.asarray(True).weak_type
    assert bnp.asarray(2).weak_type and (bnp.asarray(2) + 1.5).weak_type
    half = bnp.ones(2, "bfloat16")
    assert (half * (bnp.asarray(2) + 1.5)).dtype == bnp.bfloat16
    assert (half * bnp.sqrt(2)).dtype == bnp.bfloat16
    # a Python int given to a traced function, and changed in kind there
    assert jit(lambda n, h: h * bnp.sqrt(n))(2, half).dtype == bnp.bfloat16
    assert jit(lambda n, h: h * (n + 0.5))(2, half).dtype == bnp.bfloat16


def test_sixty_four_bits_are_kept():
    x = np.array([1.0 + 2.0**-40, 2.0**60])
    y = bnp.asarray(x, dtype=bnp.float64)
    assert y.dtype == np.float64 and np.array_equal(np.asarray(y), x)
    n = np.array([2**40 + 1, -(2**40)])
    assert np.array_equal(np.asarray(bnp.asarray(n, dtype="int64")), n)
    assert float(bnp.asarray(1 + 2.0**-40, dtype="float64")) == 1 + 2.0**-40
    assert int(bnp.asarray(2**40 + 1, dtype="int64")) == 2**40 + 1
    assert np.asarray(bnp.asarray([2**40 + 1], dtype="int64"))[0] == 2**40 + 1
    assert (y + 1).dtype == np.float64 and bnp.sin(y).dtype == np.float64 and y.mean().dtype == np.float64
    assert jit(lambda v: v * 2)(y).dtype == np.float64
    assert bnp.asarray(x).dtype == np.float32


def test_integers_in_functions_of_reals():
    for f in (bnp.sin, bnp.exp, bnp.sqrt, bnp.mean, lambda v: v / v, lambda v: v / 2):
        for dtype in ("int8", "int32", "uint16", "bool"):
            assert f(bnp.ones(3, dtype)).dtype == bnp.float32
    assert (bnp.ones(3, "float16") / bnp.ones(3, "int32")).dtype == bnp.float16


def test_reduction_dtypes():
    assert bnp.sum(bnp.ones(3, "int8")).dtype == bnp.int32
    assert bnp.sum(bnp.ones(3, "bool")).dtype == bnp.int32
    assert bnp.prod(bnp.ones(3, "uint8")).dtype == bnp.uint32
    assert bnp.sum(bnp.ones(3, "int64")).dtype == bnp.int64
    assert bnp.sum(bnp.ones(3, "bfloat16")).dtype == bnp.bfloat16
    assert bnp.mean(bnp.ones(3, "bfloat16")).dtype == bnp.bfloat16
    assert bnp.cumsum(bnp.ones(3, "int8")).dtype == bnp.int8
    assert bnp.argmax(bnp.ones(3)).dtype == bnp.int32
    assert bnp.sum(bnp.ones(3), dtype="float64").dtype == bnp.float64


@pytest.mark.peer
def test_against_jax():
    import jax
    import jax.numpy as jnp

    def theirs(f, *dtypes):
        """Their result type, by tracing."""
        out = jax.eval_shape(f, *[jax.ShapeDtypeStruct((2,), d) for d in dtypes])
        return out.dtype

    scalars = [True, 2, 2.0, 2j]
    for a, b in itertools.product(DTYPES, DTYPES):
        x, y = bnp.ones(2, a), bnp.ones(2, b)
        assert (x + y).dtype == theirs(jnp.add, a, b), (a, b)
        assert (x / y).dtype == theirs(jnp.true_divide, a, b), (a, b)
    for a, s in itertools.product(DTYPES, scalars):
        x = bnp.ones(2, a)
        assert (x * s).dtype == theirs(lambda v, s=s: v * s, a), (a, s)
        assert (x / s).dtype == theirs(lambda v, s=s: v / s, a), (a, s)
        assert (bnp.asarray(1, a) * s).weak_type == jax.eval_shape(
            lambda v, s=s: v * s, jnp.asarray(1, a)
        ).weak_type
    for s, t in itertools.product(scalars, scalars):
        got, want = bnp.multiply(s, t), jax.eval_shape(lambda s=s, t=t: jnp.multiply(s, t))
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type), (s, t)
    for a in DTYPES:
        for name in (
            "sum",
            "prod",
            "mean",
            "cumsum",
            "max",
            "std",
            "argmax",
            "sin",
            "floor",
            "abs",
            "square",
        ):
            if a == "complex64" and name in ("max", "argmax", "floor"):
                continue
            assert getattr(bnp, name)(bnp.ones(2, a)).dtype == theirs(getattr(jnp, name), a), (name, a)


def test_types():
    assert bnp.result_type(bnp.int8, 2.0) == bnp.float32
    assert bnp.result_type(bnp.ones(2, "bfloat16"), 2.0) == bnp.bfloat16
    assert bnp.promote_types("int8", "uint8") == bnp.int16
    assert bnp.float32 == np.dtype("float32") == bnp.float32 and hash(bnp.float32) == hash(np.float32)
    assert np.dtype("float32") == bnp.float32 and bnp.float32 != bnp.float64
    assert bnp.zeros(2, bnp.bfloat16).dtype == bnp.bfloat16 == bnp.dtype("bfloat16")
    assert np.zeros(2, bnp.float32).dtype == np.float32
    assert bnp.issubdtype(bnp.bfloat16, bnp.floating) and bnp.issubdtype("int8", bnp.integer)
    assert not bnp.issubdtype(bnp.int8, bnp.unsignedinteger) and bnp.issubdtype(bnp.floating, bnp.inexact)
    assert bnp.issubdtype(bnp.float32, bnp.float32) and not bnp.issubdtype(bnp.bool_, bnp.number)
    assert bnp.isdtype(bnp.float32, "real floating") and bnp.isdtype("int8", ("bool", "signed integer"))
    assert bnp.finfo(bnp.bfloat16).bits == 16 and bnp.iinfo("int8").max == 127
    assert bnp.finfo(bnp.ones(2)).bits == 32
    x = bnp.float32(3)
    assert isinstance(x, bnp.ndarray) and x.dtype == bnp.float32 and float(x) == 3
    assert jit(lambda v: bnp.float32(v))(3).dtype == bnp.float32
    assert bnp.can_cast("int8", "int16") and not bnp.can_cast("float32", "int32")
    assert str(bnp.bfloat16) == "bfloat16" and "bfloat16" in repr(bnp.bfloat16)


def test_scalar_constants_are_literals():
    jaxpr = make_jaxpr(lambda x: bnp.where(x > 0, x * 2.0 + 1, 0.0) / 3)(np.ones(3, np.float32))
    assert not jaxpr.constvars
    assert [e.prim.name for e in jaxpr.eqns] == ["gt", "mul", "add", "select", "div"]


def test_values_that_do_not_fit():
    with pytest.raises(errors.ValueRangeError, match="int64"):
        bnp.asarray(2**40)
    with pytest.raises(errors.ValueRangeError, match="int64"):
        bnp.asarray([2**40])
    with pytest.raises(errors.ValueRangeError):
        bnp.asarray(300, dtype="uint8")
    with pytest.raises(errors.DtypeError):
        bnp.asarray(1, dtype="float99")
