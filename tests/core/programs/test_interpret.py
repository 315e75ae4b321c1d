"""Programs that read jaxprs and dtypes, with JAX's names."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import core, dtypes, errors, extend, lax, random


def evaluate(closed, *args):
    """An interpreter as JAX's guide has it."""
    env = {}
    read = lambda v: v.val if type(v) is extend.core.Literal else env[v]
    env.update(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.literals, strict=True))
    for eqn in closed.jaxpr.eqns:
        subfuns, params = eqn.primitive.get_bind_params(eqn.params)
        outs = eqn.primitive.bind(*subfuns, *map(read, eqn.invars), **params)
        env.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
    return list(map(read, closed.jaxpr.outvars))


TABLE = bnp.arange(3.0)


def program(x):
    return lax.scan(lambda c, t: (c + t, bnp.sin(c) * 2.0), x.sum(), TABLE)[1], x @ TABLE


def test_interpreters():
    x = bnp.ones((2, 3))
    closed = bf.make_jaxpr(program)(x)
    assert isinstance(closed, core.ClosedJaxpr) and isinstance(closed.eqns[0], core.JaxprEqn)
    want = program(x)
    for got in (
        evaluate(closed, x),
        core.eval_jaxpr(closed.jaxpr, closed.consts, x),
        core.jaxpr_as_fun(closed)(np.ones((2, 3))),
        bf.jit(core.jaxpr_as_fun(closed))(x),
    ):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    with pytest.raises(errors.ArgumentError, match="0 arguments for 1 variables"):
        core.eval_jaxpr(closed, closed.consts)
    with pytest.raises(errors.ArgumentError, match="0 constants for 1 variables"):
        core.eval_jaxpr(closed, (), x)
    assert closed.eqns[0].primitive in (extend.core.primitives.reduce_sum_p, lax.reduce_sum_p)
    names = [e.primitive.name for sub in extend.core.subjaxprs(closed) for e in sub.eqns]
    assert {"add", "sin", "mul"} <= set(names)
    assert any(extend.core.jaxprs_in_params(e.params) for e in closed.eqns if e.primitive.name == "scan")
    assert "test_interpret.py" in closed.pretty_print(source_info=True)
    assert closed.pretty_print() == str(closed)


def test_types():
    a = core.ShapedArray([2, 3], "bfloat16")
    assert a is core.ShapedArray((2, 3), bnp.bfloat16) is bf.typeof(bnp.ones((2, 3), "bfloat16"))
    assert (a.str_short(), a.str_short(True)) == ("bfloat16[2,3]", "bf16[2,3]")
    assert a.update(shape=(1,), dtype="int8") is core.ShapedArray((1,), "int8")
    assert isinstance(a, core.AbstractValue) and core.get_aval(1.0).weak_type
    assert core.ShapedArray((), "float32", weak_type=True) is core.get_aval(1.0)
    with pytest.raises(errors.DtypeError):
        core.ShapedArray((), "float17")
    batched = extend.core.unmapped_aval(5, 1, a)
    assert batched.shape == (2, 5, 3) and extend.core.mapped_aval(5, 1, batched) is a
    assert extend.core.mapped_aval(5, None, a) is a
    with pytest.raises(errors.ShapeError):
        extend.core.mapped_aval(4, 1, batched)
    with pytest.raises(errors.AxisRangeError):
        extend.core.unmapped_aval(4, 3, a)


def test_equations_of_ones_own():
    new = extend.core.gensym()
    x, y = (new(core.ShapedArray((3,), "float32")) for _ in range(2))
    eqn = extend.core.new_jaxpr_eqn([x], [y], lax.sin_p, {}, extend.core.no_effects)
    jaxpr = core.Jaxpr([x], [eqn], [y])
    extend.core.check_jaxpr(jaxpr)
    np.testing.assert_allclose(core.jaxpr_as_fun(jaxpr)(bnp.ones(3))[0], np.sin(np.ones(3)), rtol=1e-6)
    with pytest.raises(errors.ArgumentError, match="effects"):
        extend.core.new_jaxpr_eqn([x], [y], lax.sin_p, {}, {"io"})


def test_what_is_traced():
    seen = []
    outside = extend.core.get_opaque_trace_state()

    def look(x):
        seen.append(extend.core.get_opaque_trace_state())
        assert isinstance(x, core.Tracer) and extend.core.find_top_trace([x]) is not outside.trace
        with pytest.raises(errors.ConcretizationTypeError, match="the size of the world"):
            extend.core.concrete_or_error(int, x, "the size of the world")
        return x

    bf.jit(look)(1)
    assert seen[0] != outside == extend.core.get_opaque_trace_state()
    assert extend.core.concrete_or_error(int, bnp.int32(3)) == 3
    axes = []
    get = extend.core.unsafe_get_axis_names_DO_NOT_USE
    bf.vmap(lambda x: axes.append(get()) or x, axis_name="i")(bnp.ones(2))
    assert axes == [["i"]] and not extend.core.nonempty_axis_env_DO_NOT_USE()
    assert extend.core.valid_jaxtype(1) and not extend.core.valid_jaxtype("a")
    assert isinstance(bnp.ones(3), tuple(extend.core.array_types))
    with core.eval_context():
        assert bnp.ones(3).sum() == 3


def test_kinds_of_dtypes():
    key = random.key(0).dtype
    for kind, holds in {
        dtypes.prng_key: 1,
        dtypes.extended: 1,
        np.generic: 1,
        np.number: 0,
        np.integer: 0,
    }.items():
        assert dtypes.issubdtype(key, kind) == bnp.issubdtype(key, kind) == bool(holds)
        assert dtypes.issubdtype(dtypes.prng_key, kind) == bool(holds)
    assert not dtypes.issubdtype("float32", dtypes.prng_key) and dtypes.issubdtype(
        dtypes.bfloat16, np.floating
    )


def test_dtypes():
    assert dtypes.result_type(1, 2.0) == "float32" and dtypes.result_type(bnp.int8(1), 2) == "int8"
    assert dtypes.result_type(bnp.int8(1), 1.0, return_weak_type_flag=True) == (np.dtype("float32"), True)
    assert dtypes.canonicalize_dtype(int) == "int32" and dtypes.canonicalize_dtype("float64") == "float64"
    key = random.key(0).dtype
    assert dtypes.canonicalize_dtype(key, allow_extended_dtype=True) == key
    with pytest.raises(ValueError, match="random keys"):
        dtypes.canonicalize_dtype(key)
    kinds = [
        dtypes.scalar_type_of(x) for x in (bnp.bfloat16(1), True, "uint8", np.ones(3), 1j, "float8_e5m2")
    ]
    assert kinds == [float, bool, int, float, complex, float]
    with pytest.raises(TypeError):
        dtypes.scalar_type_of(key)
    assert [dtypes.itemsize_bits(d) for d in ("complex64", bool, "int8", "bfloat16", "float64")] == [
        64,
        8,
        8,
        16,
        64,
    ]
    assert dtypes.finfo("bfloat16").bits == 16 and dtypes.iinfo("int8").max == 127
    with pytest.raises(dtypes.TypePromotionError):
        bnp.ones(3, "float8_e5m2") + bnp.ones(3, "bfloat16")
