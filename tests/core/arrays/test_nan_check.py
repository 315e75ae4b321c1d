"""NaN debugging: the origin of the first NaN, reported with the user's line."""

import inspect
import pickle

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import Config, config
from tests.emulation import fake_cuda


@pytest.fixture(autouse=True)
def nans(monkeypatch):
    monkeypatch.setattr(config, "debug_nans", True)


def line_of(function, text):
    """``file.py:line`` of the line of a function with ``text`` in it."""
    lines, start = inspect.getsourcelines(function)
    return f"test_nan_check.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


def array(*values):
    return bnp.asarray(np.asarray(values, np.float32))


def root(x):
    return bnp.sqrt(x)


def masked_root(x):
    y = bnp.sqrt(x)  # root
    return bnp.sum(bnp.where(x > 0, y, 0.0))


def roots_in_a_loop(x):
    def body(c, _):
        c = c - 1.0
        return bnp.log(c), c  # logarithm

    return lax.scan(body, x, None, length=5)[0]


def chosen(x):
    return lax.cond(x[0] > 0, bnp.sin, lambda x: bnp.arccosh(x), x)  # arccosh


def until(x):
    return lax.while_loop(lambda x: x > -3, lambda x: bnp.sqrt(x) - 1, x)  # square root


def nested(x):
    return lax.scan(lambda c, a: (until(c) + a, None), x, x[None])[0]


def folded(x):
    return x + bnp.log(bnp.asarray(-1.0))  # a constant


def ratio(x):
    return x / bnp.sum(x * 0)  # ratio


# name: function, arguments, primitive, in which function is the line, what is in the line
FOUND = {
    "root": (root, array(-1, 4), "sqrt", root, "bnp.sqrt"),
    "scan": (roots_in_a_loop, array(20.0), "log", roots_in_a_loop, "# logarithm"),
    "branch": (chosen, array(-1.0, 3.0), "acosh", chosen, "# arccosh"),
    "while": (until, bnp.asarray(2.0), "sqrt", until, "# square root"),
    "while in scan": (nested, bnp.asarray(2.0), "sqrt", until, "# square root"),
    "ratio": (ratio, array(0.0, 0.0), "div", ratio, "# ratio"),
    "constant": (folded, array(0.0), "log", folded, "# a constant"),
}


@pytest.mark.parametrize("how", ["eager", "jit", "jit of jit"])
@pytest.mark.parametrize("name", FOUND)
def test_the_line_is_named(name, how):
    f, x, prim, function, text = FOUND[name]
    jitted = {"eager": f, "jit": bf.jit(f), "jit of jit": bf.jit(lambda x: bf.jit(f)(x))}[how]
    with pytest.raises(errors.NanError, match=f"^{prim} made NaN") as caught:
        jitted(x)
    assert line_of(function, text) in caught.value.where
    assert caught.value.why.startswith("its operands: ") and caught.value.fix


@pytest.mark.parametrize(
    "f",
    [bf.grad(masked_root), bf.jit(bf.grad(masked_root)), bf.grad(bf.jit(masked_root))],
    ids=["eager", "jit of grad", "grad of jit"],
)
def test_the_forward_line_of_a_backward_operation_is_named(f):
    with pytest.raises(
        errors.NanError, match="in the backward pass of this line, mul made NaN: 1 of 2"
    ) as caught:
        f(array(0.0, 4.0))
    assert line_of(masked_root, "# root") in caught.value.where
    assert "where(ok, x, 1.0)" in caught.value.fix


def test_a_nan_that_is_put_aside_is_none():
    f = bf.jit(lambda x: bnp.where(x > 0, bnp.sqrt(x), 0.0))
    np.testing.assert_array_equal(f(array(-1.0, 4.0)), [0, 2])


def test_not_the_one_that_is_put_aside_but_the_one_that_counts():
    def f(x):
        aside = bnp.where(x > 0, bnp.sqrt(x), 0.0)
        return bnp.log(-aside - 1)  # the one

    with pytest.raises(errors.NanError, match=r"^log made NaN: 2 of 2") as caught:
        bf.jit(f)(array(-1.0, 4.0))
    assert line_of(f, "# the one") in caught.value.where


def test_one_that_came_with_an_argument():
    def f(p):
        return p["w"] * 2

    x = {"w": array(1.0, np.nan)}
    where = r"f was given NaN: 1 of 2 elements .*, the first at \[1\]: the argument p\['w'\]"
    with pytest.raises(errors.NanError, match=where):
        bf.jit(f)(x)
    with pytest.raises(errors.NanError, match=r"^mul passed on NaN"):
        x["w"] * 2


def test_infinities(monkeypatch):
    np.testing.assert_array_equal(bf.jit(lambda x: 1 / x)(array(0.0, 2.0)), [np.inf, 0.5])
    monkeypatch.setattr(config, "debug_infs", True)
    for f in (lambda x: 1 / x, bf.jit(lambda x: 1 / x)):
        with pytest.raises(errors.NanError, match=r"^div made infinity: 1 of 2 elements .* at \[0\]"):
            f(array(0.0, 2.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
def test_dtypes(dtype):
    x = bnp.asarray([np.inf], dtype=dtype)
    with pytest.raises(errors.NanError, match=r"^sub made NaN: 1 of 1"):
        x - x
    assert (bnp.arange(3) // 1).dtype == "int32"


def test_donated_arguments_are_kept_until_all_is_well():
    f = bf.jit(lambda x: bnp.sqrt(x), donate_argnums=0)
    bad, good = array(-1.0, 4.0), array(1.0, 4.0)
    with pytest.raises(errors.NanError, match=r"^sqrt made NaN"):
        f(bad)
    np.testing.assert_array_equal(bad, [-1, 4])
    np.testing.assert_array_equal(f(good), [1, 2])
    assert good.is_deleted()


def test_compiled_stages_look_too():
    f = bf.jit(lambda x: bnp.sqrt(x), donate_argnums=0)
    compiled = f.lower(array(1.0, 4.0)).compile()
    with pytest.raises(errors.NanError, match=r"^sqrt made NaN"):
        compiled(array(-1.0, 4.0))
    x = array(1.0, 4.0)
    np.testing.assert_array_equal(compiled(x), [1, 2])
    assert x.is_deleted()


def test_reports_are_not_repeated(capsys):
    def body(c, _):
        bf.debug.print("c = {c}", c=c)
        return bnp.log(c), None

    def f(x):
        bf.debug.print("x = {x}", x=x)
        return lax.scan(body, x, None, 3)[0]

    with pytest.raises(errors.NanError, match=r"^log made NaN") as caught:
        bf.jit(f)(bnp.asarray(0.5))
    assert line_of(body, "log") in caught.value.where
    out = capsys.readouterr().out
    assert (out.count("x = "), out.count("c = ")) == (1, 3)


def test_what_acts_on_the_world_is_not_run_again():
    calls = []

    def f(x):
        y = bf.io_callback(lambda v: calls.append(1) or v, bf.ShapeDtypeStruct((2,), "float32"), x)
        return bnp.sqrt(y)

    with pytest.raises(errors.NanError, match="a result of f has NaN: 1 of 2") as caught:
        bf.jit(f)(array(-1.0, 1.0))
    assert "acts on the world" in caught.value.why and len(calls) == 1


def test_vmap_and_constants_of_the_function():
    w = array(-1.0, 2.0)

    def f(x):
        return bnp.log(x * w)  # here

    with pytest.raises(errors.NanError, match=r"^log made NaN") as caught:
        bf.jit(bf.vmap(f))(bnp.ones((3, 2)))
    assert line_of(f, "# here") in caught.value.where


@pytest.mark.parametrize("name", ["root", "scan", "branch", "while", "ratio"])
def test_on_a_device(name, monkeypatch):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(config, "default_device", "cuda")
    f, x, prim, function, text = FOUND[name]
    with pytest.raises(errors.NanError, match=f"^{prim} made NaN") as caught:
        bf.jit(f)(bf.device_put(x, bf.devices("cuda")[0]))
    assert line_of(function, text) in caught.value.where


def test_the_error_is_a_floating_point_error_and_can_be_sent():
    with pytest.raises(FloatingPointError) as caught:
        bnp.log(array(-1.0))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_flags():
    c = Config()
    assert not c.guards
    c.update("jax_debug_nans", True)
    assert c.debug_nans and c.guards
    c.debug_nans = False
    assert not c.guards
    c.debug_infs = True
    assert c.guards


def test_off_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(config, "debug_nans", False)
    assert np.isnan(bnp.log(array(-1.0))).all() and np.isnan(bf.jit(bnp.log)(array(-1.0))).all()
