"""``debug.print`` and ``debug.callback``: output, order, and errors in formats."""

import io
import logging

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import debug, errors, lax
from tests.transforms.common import arr


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def shows(x):
    debug.print("x = {x}", x=x)
    return bnp.sin(x)


FORMATS = {
    "positional": (("{} {}", 1, arr(2.0)), {}, "1 2.0"),
    "numbered": (("{1} {0}", "a", "b"), {}, "b a"),
    "named": (("{x} {y}",), {"x": arr([1.0, 2.0]), "y": None}, "[1. 2.] None"),
    "mixed": (("{} {y}", arr(1, np.int32)), {"y": True}, "1 True"),
    "spec": (("{x:.3f} {n:>4d} {c}",), {"x": arr(2.0), "n": arr(3, np.int32), "c": 1j}, "2.000    3 1j"),
    "nested spec": (("{x:.{digits}f}",), {"x": arr(2.0), "digits": 2}, "2.00"),
    "conversion": (("{x!r}",), {"x": arr(2.0, np.float32)}, "Array(2., dtype=float32)"),
    "tree": (("{}", {"a": arr([1.0], np.float32)}), {}, "{'a': Array([1.], dtype=float32)}"),
    "attribute": (("{x.shape} {y[0]}",), {"x": arr([[1.0]]), "y": arr([3.0])}, "(1, 1) 3.0"),
    "numbers as they are": (("{} {}", 0.1, np.float32(0.5)), {}, "0.1 0.5"),
    "text": (("{}: {}", "name", arr(1.0)), {}, "name: 1.0"),
    "braces": (("{{}} {}", 1), {}, "{} 1"),
    "nothing": (("hello",), {}, "hello"),
    "complex": (("{:.1f}", arr(1 + 2j, np.complex64)), {}, "1.0+2.0j"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit, bf.checkpoint, lambda f: bf.jit(bf.jit(f))])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, wrap, capsys):
    args, kwargs, want = FORMATS[name]
    wrap(lambda: debug.print(*args, **kwargs))()
    assert lines(capsys) == [want]


def test_values_are_printed_at_run_time(capsys):
    f = bf.jit(shows)
    f(1.0), f(2.0)
    assert lines(capsys) == ["x = 1.0", "x = 2.0"]
    assert f.trace_count == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_under_transforms(ordered, capsys):
    def f(x):
        debug.print("{}", x, ordered=ordered)
        return bnp.sin(x)

    bf.grad(f)(1.0)
    bf.jit(bf.grad(bf.checkpoint(f)))(2.0)
    bf.vmap(f)(arr([3.0, 4.0]))
    bf.jit(bf.vmap(bf.grad(f)))(arr([5.0, 6.0]))
    assert lines(capsys) == [f"{i}.0" for i in range(1, 7)]
    bf.jit(lambda x: lax.scan(lambda c, a: (c, f(a)), None, x))(arr([1.0, 2.0]))
    bf.jit(lambda x: lax.cond(x > 0.0, f, lambda x: x, x))(arr(3.0))
    bf.jit(lambda x: lax.fori_loop(0, 2, lambda i, x: (f(x), x + 1.0)[1], x))(arr(4.0))
    assert lines(capsys) == [f"{i}.0" for i in range(1, 6)]


def test_callbacks_get_arrays_and_what_else_they_are_given():
    got = []
    bf.jit(
        lambda x: debug.callback(lambda *a, **k: got.append((a, k)), x, 3, "text", p={"x": x, "none": None})
    )(1.5)
    (((x, n, text), kwargs),) = got
    assert (
        isinstance(x, bf.Array) and not isinstance(x, bf.Tracer) and float(x) == 1.5 and x.dtype == np.float32
    )
    assert isinstance(n, bf.Array) and not isinstance(n, bf.Tracer) and int(n) == 3
    assert text == "text" and float(kwargs["p"]["x"]) == 1.5 and kwargs["p"]["none"] is None


def test_what_a_debug_callback_returns_is_dropped():
    assert debug.callback(lambda x: x, 1.0) is None
    assert bf.jit(lambda x: debug.callback(lambda x: [x, "junk"], x))(1.0) is None


def test_callbacks_are_in_order_with_prints(capsys):
    @bf.jit
    def f(x):
        debug.print("one {}", x, ordered=True)
        debug.callback(lambda x: print("two", x), x + 1.0, ordered=True)
        debug.print("three {}", x + 2.0)

    f(arr(1.0))
    assert lines(capsys) == ["one 1.0", "two 2.0", "three 3.0"]


def test_the_jaxpr_of_a_print():
    jaxpr = bf.make_jaxpr(lambda x: debug.print("{}", x))(1.0)
    (eqn,) = jaxpr.eqns
    assert str(jaxpr) == (
        "{ lambda ; a:~f32[] . let\n    debug_callback[callback=print ordered=False] a\n  in () }"
    )
    assert eqn.effects == {"debug"}


MISTAKES = {
    "an f-string": (lambda x: debug.print(f"{x}"), "the text of a traced value"),
    "an unknown name": (lambda x: debug.print("{y}", x=x), r"asks for \{y\}, which is not given"),
    "too few": (lambda x: debug.print("{} {}", x), "asks for positional argument 1"),
    "too many": (lambda x: debug.print("{}", x, 2, z=3), "does not use positional argument 1, z"),
    "unused": (lambda x: debug.print("x", x=x), "does not use x"),
    "a format for numbers": (lambda x: debug.print("{:.2f}", bnp.stack([x, x])), r"array of shape \(2,\)"),
    "a format for integers": (lambda x: debug.print("{x:d}", x=x), "Unknown format code 'd'"),
    "an open brace": (lambda x: debug.print("{x", x=x), "expected '}'"),
    "a closing brace": (lambda x: debug.print("{x} }", x=x), "Single '}'"),
    "a conversion": (lambda x: debug.print("{x!z}", x=x), "unknown conversion !z"),
    "both numberings": (lambda x: debug.print("{} {0}", x), "with and without numbers"),
    "no format": (lambda x: debug.print(x), "takes a format string first"),
    "partitioned": (lambda x: debug.print("{}", x, partitioned=True), "partitioned=True"),
    "no function": (lambda x: debug.callback(x, 1), "takes a function"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_when_tracing(name, capsys):
    f, text = MISTAKES[name]
    with pytest.raises(errors.BlufuncError, match=text) as info:
        bf.make_jaxpr(f)(1.0)
    assert "test_debug.py" in info.value.where and info.value.fix
    assert lines(capsys) == []


def test_mistakes_that_only_values_show():
    f = bf.jit(lambda x: debug.print("{x[3]} {t.nothing}", x=x, t="text"))
    with pytest.raises(errors.ArgumentError, match=r"cannot format '\{x") as info:
        f(arr([1.0, 2.0]))
    assert "test_debug.py" in info.value.where and not hasattr(info.value, "__notes__")


def test_the_check_of_the_format_can_be_skipped(capsys):
    bf.jit(lambda x: debug.print("Tracer< {}", x, 2, skip_format_check=True))(1.0)
    assert lines(capsys) == ["Tracer< 1.0"]


def test_junk():
    for bad in [None, -1, 1.5, (), {}, object(), bf.random.key(0), bnp.ones(3)]:
        for call in (
            lambda bad=bad: debug.print(bad),
            lambda bad=bad: debug.callback(bad),
            lambda bad=bad: debug.print("", partitioned=bad),
            lambda bad=bad: debug.callback(len, [], partitioned=bad),
        ):
            with pytest.raises(errors.BlufuncError):
                call()


def test_effects_barrier_flushes(capsys):
    debug.print("{}", 1)
    bf.effects_barrier()
    assert lines(capsys) == ["1"]


@pytest.mark.peer
@pytest.mark.parametrize("name", ["positional", "numbered", "named", "spec", "attribute", "text", "nothing"])
def test_lines_as_jax(name, capsys):
    import jax
    import jax.numpy as jnp

    args, kwargs, want = FORMATS[name]
    theirs = lambda x: jnp.asarray(np.asarray(x, dtype=x.dtype)) if isinstance(x, bf.Array) else x
    with jax.enable_x64(True):
        jax.debug.print(*map(theirs, args), **{k: theirs(v) for k, v in kwargs.items()})
        jax.effects_barrier()
    assert lines(capsys) == [want]


def test_a_debugger_has_the_local_variables():
    for transform in (bf.jit, lambda f: f, bf.grad):
        out = io.StringIO()

        def f(x, stdout=out):
            y, n, _other = x * 2, 3, "a string"
            bf.debug.breakpoint(stdin=io.StringIO("p y + n\nc\n"), stdout=stdout)
            return y + n

        transform(f)(2.0)
        bf.effects_barrier()
        assert "f at " in out.getvalue() and "7." in out.getvalue() and "_other" not in out.getvalue()
    with pytest.raises(errors.UnsupportedError, match="web_pdb"):
        bf.debug.breakpoint(backend="web_pdb")


def test_logs(caplog):
    with caplog.at_level(logging.WARNING, "blufunc"):
        bf.jit(lambda x: bf.debug.log("x = {x}, {n}", x=x, n=2, level=logging.WARNING))(bnp.float32(1.5))
        bf.jit(lambda x: bf.debug.log("{}", x))(1.0)
        bf.effects_barrier()
    assert [(r.getMessage(), r.levelno) for r in caplog.records] == [("x = 1.5, 2", logging.WARNING)]
    with pytest.raises(errors.ArgumentError):
        bf.debug.log("{y}", x=1)
