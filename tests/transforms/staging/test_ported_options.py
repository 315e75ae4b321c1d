"""Options of JAX's ``jit`` and ``checkpoint``: accepted, or refused by name."""

import gc

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors

ABSENT = ("device", "backend", "compiler_options")


def test_jit_accepts_what_changes_nothing():
    options = dict.fromkeys((*ABSENT, "in_shardings", "out_shardings"))
    f = bf.jit(lambda x, unused: x + 1, inline=True, keep_unused=True, **options)
    assert float(f(1.0, 2.0)) == 2.0
    g = bf.jit(inline=True, static_argnums=None, donate_argnums=None, static_argnames=None)(lambda x: x * 2)
    assert float(g(2.0)) == 4.0


@pytest.mark.parametrize("option", ABSENT)
@pytest.mark.parametrize("decorates", [False, True])
def test_jit_refuses_by_name(option, decorates):
    with pytest.raises(errors.UnsupportedError, match=option) as caught:
        bf.jit(**{option: "cpu"}) if decorates else bf.jit(lambda x: x, **{option: {}})
    assert caught.value.where and caught.value.why and caught.value.fix


def test_jit_flags_are_flags():
    for option in ("inline", "keep_unused"):
        with pytest.raises(errors.ArgumentError, match=option):
            bf.jit(lambda x: x, **{option: 1})


def test_lowered_text_is_the_simplified_jaxpr():
    lowered = bf.jit(lambda x: bnp.sin(x) + bnp.sin(x)).lower(1.0)
    assert lowered.as_text() == str(lowered.jaxpr)
    assert lowered.as_text().count("sin") == 1


def test_clear_caches():
    f, g = bf.jit(lambda x: x + 1), bf.jit(lambda x: x + 2)
    for _ in range(2):
        f(1.0), g(1.0)
    assert (f.trace_count, g.trace_count) == (1, 1)
    bf.clear_caches()
    assert (float(f(1.0)), float(g(1.0))) == (2.0, 3.0)
    assert (f.trace_count, g.trace_count) == (2, 2)


@pytest.mark.slow
def test_functions_are_not_kept_for_clear_caches():
    before = sum(1 for _ in bf.transforms.staging.jit._jitted)
    f = bf.jit(lambda x: x)
    f(1.0)
    assert f in bf.transforms.staging.jit._jitted
    del f
    gc.collect()
    assert sum(1 for _ in bf.transforms.staging.jit._jitted) <= before


def test_checkpoint_static_names():
    seen = []

    def f(x, power, flag=True):
        seen.append((type(power), flag))
        return x**power if flag else x

    g = bf.checkpoint(f, static_argnames=("power", "flag"))
    assert float(bf.grad(lambda x: g(x, 3))(2.0)) == 12.0
    assert float(bf.grad(lambda x: g(x, power=2, flag=False))(2.0)) == 1.0
    assert float(bf.grad(lambda x: g(x, 2, flag=True))(2.0)) == 4.0
    assert {t for t, _ in seen} == {int}
    one = bf.checkpoint(static_argnames="flag", static_argnums=1)(f)
    assert float(bf.grad(lambda x: one(x, 2, True))(3.0)) == 6.0
    with pytest.raises(errors.ArgumentError, match="static_argnames"):
        bf.checkpoint(f, static_argnames=[1])


def test_checkpoint_concrete():
    assert float(bf.grad(bf.checkpoint(lambda x: x * x, concrete=False))(3.0)) == 6.0
    with pytest.raises(errors.UnsupportedError, match="concrete") as caught:
        bf.checkpoint(lambda x: x, concrete=True)
    assert "static_argnums" in caught.value.fix
