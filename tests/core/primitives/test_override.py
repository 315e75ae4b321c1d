"""Scoped rules apply inside their block and thread; cached results stay separate."""

import threading

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax
from tests.transforms.common import arr

X = arr([0.3, -0.7, 1.2])


def times(factor):
    """A jvp rule of sin that is off by a factor."""

    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return lax.sin_p.bind(x), t * (factor * bnp.cos(x))

    return rule


def slope(f=bnp.sin):
    return np.asarray(bf.grad(lambda x: f(x).sum())(X) / np.cos(X))


@pytest.fixture(autouse=True)
def undone():
    """Every test restores the primitives."""
    before = {p: dict(vars(p)) for p in (lax.sin_p, lax.scan_p, lax.add_p)}
    yield
    for prim, attributes in before.items():
        assert {k: v for k, v in vars(prim).items() if k != "_typed"} == {
            k: v for k, v in attributes.items() if k != "_typed"
        }
    np.testing.assert_allclose(slope(), 1)


DERIVATIVES = {
    "grad": lambda: slope(),
    "jvp": lambda: bf.jvp(bnp.sin, (X,), (bnp.ones_like(X),))[1] / bnp.cos(X),
    "linearize": lambda: bf.linearize(bnp.sin, X)[1](bnp.ones_like(X)) / bnp.cos(X),
    "grad of jit": lambda: slope(bf.jit(bnp.sin)),
    "jit of grad": lambda: bf.jit(lambda: bf.grad(lambda x: bnp.sin(x).sum())(X) / bnp.cos(X))(),
    "vmap of grad": lambda: bf.vmap(bf.grad(bnp.sin))(X) / bnp.cos(X),
    "grad of vmap": lambda: slope(bf.vmap(bnp.sin)),
    "checkpoint": lambda: slope(bf.checkpoint(bnp.sin)),
    "scan": lambda: slope(lambda x: lax.scan(lambda c, _: (bnp.sin(c), None), x, None, length=1)[0]),
    "cond": lambda: slope(lambda x: lax.cond(True, bnp.sin, bnp.cos, x)),
    "while_loop": lambda: slope(lambda x: lax.fori_loop(0, 1, lambda i, c: bnp.sin(c), x)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_derivative(derivative):
    """Before, inside, in a nested block, and after."""
    np.testing.assert_allclose(derivative(), 1)
    with bf.override(lax.sin_p, jvp=times(2)):
        np.testing.assert_allclose(derivative(), 2)
        with bf.override(lax.sin_p, jvp=times(3)):
            np.testing.assert_allclose(derivative(), 3)
        np.testing.assert_allclose(derivative(), 2)
    np.testing.assert_allclose(derivative(), 1)


def test_one_function_compiled_in_each_scope():
    """jit's caches separate traces by rules in force, and hit for equal rules."""
    traces = []

    @bf.jit
    def f(x):
        traces.append(1)
        return bf.grad(lambda x: bnp.sin(x).sum())(x) / bnp.cos(x)

    rule = times(2)
    for _ in range(2):
        np.testing.assert_allclose(f(X), 1)
        with bf.override(lax.sin_p, jvp=rule):
            np.testing.assert_allclose(f(X), 2)
        with bf.override(lax.sin_p, jvp=times(3)):
            np.testing.assert_allclose(f(X), 3)
    assert len(traces) == 4  # times(3) is another function each time


def test_memos_of_jaxprs_are_kept_apart():
    """Of one jaxpr, which remembers its derivatives, whichever comes first."""
    f = bf.jit(bnp.sin)
    with bf.override(lax.sin_p, jvp=times(2)):
        np.testing.assert_allclose(slope(f), 2)
    np.testing.assert_allclose(slope(f), 1)
    with bf.override(lax.sin_p, jvp=times(2)):
        np.testing.assert_allclose(slope(f), 2)


def test_a_pullback_keeps_what_it_was_made_with():
    with bf.override(lax.sin_p, jvp=times(2)):
        pullback = bf.vjp(bnp.sin, X)[1]
    np.testing.assert_allclose(pullback(bnp.ones_like(X))[0], 2 * np.cos(X))


@pytest.mark.parametrize("run", [lambda f, x: f(x), lambda f, x: bf.jit(f)(x), lambda f, x: bf.vmap(f)(x)])
def test_impl(run):
    """Also where a ufunc would run instead."""
    f = lambda x: bnp.sin(x) + 1
    with bf.override(lax.sin_p, impl=lambda x: 0 * x):
        np.testing.assert_array_equal(run(f, X), 1)
    np.testing.assert_allclose(run(f, X), np.sin(X) + 1)


def test_a_program_compiled_outside_is_not_used_inside():
    f = bf.jit(lambda x: bnp.sin(x) + 1)
    want = np.asarray(f(X))
    with bf.override(lax.sin_p, impl=lambda x: 0 * x):
        np.testing.assert_array_equal(f(X), 1)
    np.testing.assert_array_equal(f(X), want)


def test_batch():
    asked = []

    def rule(axis, args, dims):
        asked.append(axis.size)
        return before(axis, args, dims)

    before = lax.sin_p.batch
    with bf.override(lax.sin_p, batch=rule):
        np.testing.assert_allclose(bf.vmap(bnp.sin)(X), np.sin(X))
    bf.vmap(bnp.sin)(X)
    assert asked == [3]


def test_transpose():
    def rule(ct, x):
        x.add(lax.neg(ct))

    def doubled():
        return bf.grad(lambda x: (bnp.broadcast_to(x, (3,)) * 2).sum())(arr(1.0))

    def spoilt(ct, x, **params):
        before(ct, x, **params)
        before(ct, x, **params)

    before = lax.broadcast_in_dim_p.transpose
    assert float(doubled()) == 6
    with bf.override(lax.broadcast_in_dim_p, transpose=spoilt):
        assert float(doubled()) == 12
    with bf.override(lax.neg_p, transpose=rule):
        assert float(bf.grad(lax.neg)(1.0)) == -1  # from an equivalent rule
    assert float(doubled()) == 6


def test_linearize():
    """Reverse mode uses it instead of jvp; forward mode does not."""

    def rule(trace, primals, tangents):
        (x,), (t,) = primals, tangents
        with_slope = trace.tangents.process(lax.mul_p, [t, 5 * bnp.cos(x)], {})
        return lax.sin_p.bind(x), with_slope

    with bf.override(lax.sin_p, linearize=rule):
        np.testing.assert_allclose(slope(), 5)
        np.testing.assert_allclose(DERIVATIVES["jvp"](), 1)


def test_jvp_of_what_is_linearized_otherwise_needs_both():
    with pytest.raises(errors.ArgumentError, match="does not use its jvp rule but linearize"):
        bf.override(lax.scan_p, jvp=lambda *a, **k: None)
    with bf.override(lax.sin_p, linearize=lambda trace, ps, ts: lax.sin_p.jvp(ps, ts)):
        with pytest.raises(errors.ArgumentError, match="linearize"):
            bf.override(lax.sin_p, jvp=times(2))
    bf.override(lax.scan_p, jvp=lambda *a, **k: None, linearize=lambda *a, **k: None)


def test_unsupported_rules_can_be_supplied():
    class Opaque(bf.Primitive):
        name = "opaque"
        jvp = extend.unsupported("it is only an example")
        transpose = extend.unsupported("it is only an example")
        batch = extend.unsupported("it is only an example")

        def impl(self, x):
            return x * 3

        def abstract(self, x):
            return x

    p = Opaque()
    own = vars(p).keys() | set()
    with bf.override(p, jvp=lambda ps, ts: (p.bind(*ps), lax.mul(ts[0], 3))):
        np.testing.assert_allclose(bf.grad(lambda x: p.bind(x).sum())(X), 3)
    with pytest.raises(errors.GradError, match="opaque has no jvp: it is only an example"):
        bf.grad(lambda x: p.bind(x).sum())(X)
    assert vars(p).keys() == own


def test_several_rules_and_primitives_at_once():
    with bf.override(lax.sin_p, jvp=times(2), impl=lambda x: 0 * x), bf.override(lax.add_p, impl=np.subtract):
        np.testing.assert_allclose(slope(), 2)
        np.testing.assert_array_equal(bnp.sin(X) + X, -np.asarray(X))


def test_one_block_within_itself():
    rule = bf.override(lax.sin_p, jvp=times(2))
    for _ in range(2):
        with rule, rule:
            np.testing.assert_allclose(slope(), 2)
        np.testing.assert_allclose(slope(), 1)


def test_a_rule_may_use_the_one_that_it_replaces():
    before = lax.sin_p.jvp

    def doubled(primals, tangents):
        out, t = before(primals, tangents)
        return out, t * 2

    with bf.override(lax.sin_p, jvp=doubled):
        np.testing.assert_allclose(slope(), 2)
        inner = lax.sin_p.jvp  # that of the block

        def tripled(primals, tangents):
            out, t = inner(primals, tangents)
            return out, t * 3

        with bf.override(lax.sin_p, jvp=tripled):
            np.testing.assert_allclose(slope(), 6)
            np.testing.assert_allclose(slope(bf.jit(bnp.sin)), 6)
        np.testing.assert_allclose(slope(), 2)


def test_higher_orders_use_the_rule_too():
    """f' = 2 cos by sin's rule, f'' = -2 sin by cos's own; and a rule that calls sin."""
    with bf.override(lax.sin_p, jvp=times(2)):
        np.testing.assert_allclose(bf.vmap(bf.grad(bf.grad(bnp.sin)))(X), -2 * np.sin(X))

    def shifted(primals, tangents):
        (x,), (t,) = primals, tangents
        return lax.sin_p.bind(x), t * (2 * bnp.sin(x + np.pi / 2))

    with bf.override(lax.sin_p, jvp=shifted):  # f'(x) = 2 sin(x + pi/2), f''(x) = 4 sin(x + pi)
        for f in (bf.grad(bf.grad(bnp.sin)), bf.jacfwd(bf.grad(bnp.sin)), bf.jacfwd(bf.jacfwd(bnp.sin))):
            np.testing.assert_allclose(bf.vmap(f)(X), -4 * np.sin(X), atol=1e-6)


def test_a_rule_kept_from_the_original_stays_the_original():
    """A saved rule stays the original, although other blocks are open by then."""
    before = lax.sin_p.jvp
    with bf.override(lax.sin_p, jvp=times(2)), bf.override(lax.sin_p, jvp=before):
        np.testing.assert_allclose(slope(), 1)


def test_exceptions_end_the_block():
    with pytest.raises(KeyError), bf.override(lax.sin_p, jvp=times(2)):
        raise KeyError
    np.testing.assert_allclose(slope(), 1)

    def broken(primals, tangents):
        raise KeyError("mine")

    with bf.override(lax.sin_p, jvp=broken), pytest.raises(KeyError, match="mine"):
        slope()


def test_other_threads_have_other_rules():
    """Two threads in separate blocks, and one without, at the same time."""
    barrier, found = threading.Barrier(3, timeout=20), {}

    def work(name, factor):
        def run():
            for _ in range(3):
                barrier.wait()
                found.setdefault(name, []).append(float(slope()[0]))
                found[name].append(float(slope(bf.jit(bnp.sin))[0]))
                barrier.wait()

        if factor is None:
            run()
        else:
            with bf.override(lax.sin_p, jvp=times(factor)):
                run()

    threads = [threading.Thread(target=work, args=a) for a in (("two", 2), ("three", 3), ("none", None))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for name, factor in (("two", 2), ("three", 3), ("none", 1)):
        np.testing.assert_allclose(found[name], [factor] * 6)


def test_linearize_in_another_thread():
    """While another thread replaces it, reverse mode here still splits the jvp rule."""
    ready, done = threading.Event(), threading.Event()

    def other():
        with bf.override(lax.sin_p, linearize=lambda *a, **k: None):
            ready.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(20)
    try:
        np.testing.assert_allclose(slope(), 1)
        with bf.override(lax.sin_p, jvp=times(2)):
            np.testing.assert_allclose(slope(), 2)
    finally:
        done.set()
        thread.join()


def test_what_an_instance_has_of_its_own_comes_back():
    class Own(bf.Primitive):
        name = "own"

        def abstract(self, x):
            return x

    p = Own()
    p.impl = mine = lambda x: x + 1
    with bf.override(p, impl=lambda x: x + 2):
        np.testing.assert_allclose(p.bind(X), X + 2)
    np.testing.assert_allclose(p.bind(X), X + 1)
    assert p.impl is mine


def test_equality():
    rule = times(2)
    a, b = (bf.override(lax.sin_p, jvp=rule) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    assert a != bf.override(lax.sin_p, jvp=times(2))
    assert a != bf.override(lax.cos_p, jvp=rule)
    assert a != bf.override(lax.sin_p, batch=rule)
    assert repr(a) == "override(sin, jvp)"


@pytest.mark.parametrize(
    "call",
    [
        lambda: bf.override(bnp.sin, jvp=times(2)),
        lambda: bf.override(lax.sin_p),
        lambda: bf.override(lax.sin_p, jvp=3),
        lambda: bf.override(lax.sin_p, abstract=lambda x: x),
        lambda: bf.override(lax.sin_p, rewrite=lambda x: x),
        lambda: bf.override(lax.sin_p, jvp=None),
    ],
)
def test_bad_input(call):
    with pytest.raises(errors.ArgumentError) as info:
        call()
    assert "test_override.py" in info.value.where
