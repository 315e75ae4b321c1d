"""Mistakes of a rule's author: errors with primitive, rule, line and the fix."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, extend, lax
from blufunc.config import config
from tests.transforms.common import arr

X = arr([0.3, 0.6])  # as long as a pair: must not be mistaken for one


class Twice(extend.Primitive):
    """2 x, broken rule by rule."""

    name = "twice"

    def impl(self, x):
        return np.multiply(x, 2)

    def abstract(self, x):
        return x

    def jvp(self, primals, tangents):
        return self.bind(*primals), self.bind(*tangents)

    def transpose(self, ct, x):
        x.add(self.bind(ct))

    def batch(self, axis, args, dims):
        return self.bind(*args), dims[0]


class Halves(extend.Primitive):
    """A vector in two halves, broken rule by rule."""

    name, multiple_results = "halves", True

    def impl(self, x):
        return [x[:1], x[1:]]

    def abstract(self, x):
        half = extend.ShapedArray((1,), x.dtype)
        return [half, half]

    def jvp(self, primals, tangents):
        return self.bind(*primals), self.bind(*tangents)

    def transpose(self, cts, x):
        x.add(bnp.concatenate([extend.instantiate(ct) for ct in cts]))

    def batch(self, axis, args, dims):
        moved = extend.batched_front(axis, args[0], dims[0])
        return [moved[:, :1], moved[:, 1:]], [0, 0]


def evaluated(prim, x):
    return prim.bind(x)


def forward(prim, x):
    return bf.jvp(prim.bind, (x,), (x,))


def reverse(prim, x):
    return bf.grad(lambda v: bnp.sum(bf.tree.leaves(prim.bind(v))[0]))(x)


def mapped(prim, x):
    return bf.vmap(prim.bind)(bnp.stack([x, x, x]))


ONE = {
    "abstract: a tuple": ("abstract", lambda self, x: (x,), evaluated, "a tuple of 1"),
    "abstract: nothing": ("abstract", lambda self, x: None, evaluated, "returned None"),
    "abstract: a shape": ("abstract", lambda self, x: x.shape, evaluated, "a tuple of 1"),
    "impl: shape": (
        "impl",
        lambda self, x: x[:1],
        evaluated,
        r"returned f64\[1\], and abstract says f64\[2\]",
    ),
    "impl: dtype": ("impl", lambda self, x: x.astype("f4"), evaluated, r"returned f32\[2\]"),
    "impl: no array": ("impl", lambda self, x: "a", evaluated, "returned 'a'"),
    "jvp: no pair": ("jvp", lambda self, ps, ts: ps[0], forward, r"returned f64\[2\], not a pair"),
    "jvp: three": ("jvp", lambda self, ps, ts: (*ps, *ts, 1), forward, "a tuple of 3, not a pair"),
    "jvp: no pair, reverse": ("jvp", lambda self, ps, ts: ps[0], reverse, "not a pair"),
    "jvp: nothing": ("jvp", lambda self, ps, ts: None, reverse, "returned None, not a pair"),
    "jvp: no tangent": ("jvp", lambda self, ps, ts: (self.bind(*ps), None), reverse, "extend.zero"),
    "jvp: a tangent's shape": (
        "jvp",
        lambda self, ps, ts: (self.bind(*ps), bnp.sum(ts[0])),
        forward,
        r"a tangent f64\[\] for a result f64\[2\]",
    ),
    "jvp: a tangent's dtype": (
        "jvp",
        lambda self, ps, ts: (self.bind(*ps), ts[0].astype("float32")),
        reverse,
        r"a tangent f32\[2\]",
    ),
    "jvp: a NumPy array": ("jvp", lambda self, ps, ts: (np.ones(2), ts[0]), forward, "ndarray"),
    "transpose: returned": ("transpose", lambda self, ct, x: ct, reverse, "returned f64"),
    "transpose: shape": (
        "transpose",
        lambda self, ct, x: x.add(bnp.sum(ct)),
        reverse,
        r"added f64\[\] to an operand",
    ),
    "transpose: dtype": (
        "transpose",
        lambda self, ct, x: x.add(ct.astype("float32")),
        reverse,
        r"added f32\[2\]",
    ),
    "transpose: no array": ("transpose", lambda self, ct, x: x.add(3.0), reverse, "added 3.0"),
    "batch: no pair": ("batch", lambda self, axis, args, dims: args[0], mapped, "not a pair"),
    "batch: another dim": ("batch", lambda self, axis, args, dims: (args[0], 1), mapped, "is axis 1 of"),
    "batch: negative": ("batch", lambda self, axis, args, dims: (args[0], -2), mapped, "is axis -2 of"),
    "batch: dim of a list": ("batch", lambda self, axis, args, dims: (args[0], dims), mapped, "a list of 1"),
    "batch: not batched": (
        "batch",
        lambda self, axis, args, dims: (args[0], None),
        mapped,
        r"examples of f64\[3,2\]",
    ),
    "batch: dtype": (
        "batch",
        lambda self, axis, args, dims: (args[0].astype("float32"), 0),
        mapped,
        r"examples of f32\[2\], and abstract says f64",
    ),
}

SEVERAL = {
    "abstract: one": ("abstract", lambda self, x: x, evaluated, "returned"),
    "impl: one": ("impl", lambda self, x: x, evaluated, "returned ndarray, not a list"),
    "impl: three": ("impl", lambda self, x: [x, x, x], evaluated, "3 results, and abstract says 2"),
    "jvp: one tangent": (
        "jvp",
        lambda self, ps, ts: (self.bind(*ps), ts[0]),
        forward,
        "in the place of a list",
    ),
    "jvp: too few": ("jvp", lambda self, ps, ts: (self.bind(*ps), ts), reverse, "lists of 2 and of 1"),
    "jvp: types": (
        "jvp",
        lambda self, ps, ts: (self.bind(*ps), [ts[0], ts[0]]),
        reverse,
        r"a tangent f64\[2\]",
    ),
    "batch: one dim": ("batch", lambda self, axis, args, dims: (args, 0), mapped, "in the place of a list"),
}

CASES = [pytest.param(Twice, *case, id=f"twice: {name}") for name, case in ONE.items()]
CASES += [pytest.param(Halves, *case, id=f"halves: {name}") for name, case in SEVERAL.items()]


@pytest.mark.parametrize("base, rule, wrong, use, message", CASES)
def test_a_wrong_rule_is_named(base, rule, wrong, use, message):
    prim = type("Spoilt", (base,), {rule: wrong})()
    with pytest.raises(errors.JaxprTypeError, match=message) as info:
        use(prim, X)
    e = info.value
    assert f"{rule} rule of {prim.name}" in e.what
    assert "test_rule_errors.py" in e.where
    assert e.fix.startswith(rule)


@pytest.mark.parametrize("base", [Twice, Halves])
@pytest.mark.parametrize("check", [True, False])
def test_right_rules_pass(base, check, monkeypatch):
    monkeypatch.setattr(config, "check", check)
    for use in (evaluated, forward, reverse, mapped):
        use(base(), X)


STRUCTURAL = [
    c
    for c in CASES
    if c.values[1] not in ("impl",) and "batch: not" not in c.id and "batch: dtype" not in c.id
]


@pytest.mark.parametrize("base, rule, wrong, use, message", STRUCTURAL)
def test_what_a_trace_cannot_use_is_found_without_checks(base, rule, wrong, use, message, monkeypatch):
    monkeypatch.setattr(config, "check", False)
    with pytest.raises(errors.JaxprTypeError, match=message):
        use(type("Spoilt", (base,), {rule: wrong})(), X)


def test_wrong_rules_in_a_scope():
    with bf.override(lax.exp_p, jvp=lambda ps, ts: ps[0]):
        for use in (forward, reverse):
            with pytest.raises(errors.JaxprTypeError, match=r"jvp rule of exp returned .* not a pair"):
                use(lax.exp_p, X)
    with bf.override(lax.exp_p, batch=lambda axis, args, dims: args[0]):
        with pytest.raises(errors.JaxprTypeError, match="batch rule of exp"):
            mapped(lax.exp_p, X)
    with bf.override(lax.exp_p, linearize=lambda trace, ps, ts: ps[0]):
        with pytest.raises(errors.JaxprTypeError, match="linearize rule of exp"):
            reverse(lax.exp_p, X)
    with bf.override(lax.exp_p, impl=lambda x: x[:1]):
        with pytest.raises(errors.JaxprTypeError, match="impl rule of exp"):
            evaluated(lax.exp_p, X)


# -- kinds -----------------------------------------------------------------------------------------


def times(x, y):
    return x * y


@pytest.mark.parametrize(
    "use", [lambda p: p.bind(X, X), lambda p: bf.grad(lambda v: bnp.sum(p.bind(v, X)))(X)]
)
@pytest.mark.parametrize("rules", [{"derivs": [None]}, {"derivs": [None] * 3}, {"transposes": [None]}])
def test_a_derivative_for_each_operand(use, rules):
    two_p = extend.Elementwise("two", times, "float", **rules)
    with pytest.raises(errors.ArgumentError, match=r"two has .* for . operands?, but 2 given") as info:
        use(two_p)
    assert "test_rule_errors.py" in info.value.where
    assert info.value.fix


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: extend.Elementwise("f", times, "floaty"), "types='floaty' is not a family"),
        (lambda: extend.Elementwise("f", times, ["float"]), "is not a family"),
        (lambda: extend.Elementwise("f", 3, "float"), "impl=3 cannot be called"),
        (lambda: extend.Elementwise("f", times, "float", derivs=times), "not a list of functions"),
        (lambda: extend.Elementwise("f", times, "float", derivs=[1, 2]), "not a list of functions"),
        (lambda: extend.Elementwise("f", times, "float", transposes=None), "not a list of functions"),
        (lambda: extend.Elementwise("f", times, "float", out="float32"), "out='float32' is not a dtype"),
        (lambda: extend.Elementwise("f", times, "float", out=np.float32), "is not a dtype"),
        (lambda: extend.Elementwise(None, times, "float"), "has no name"),
        (lambda: extend.Reduction("f", times, "floaty"), "is not a family"),
        (lambda: extend.Reduction("f", times, "float", deriv=1), "not a list of functions"),
        (lambda: type("Nameless", (extend.Primitive,), {})(), "Nameless has no name"),
        (lambda: extend.Elementwise("f", times, "float").bind(), "one operand or more"),
    ],
)
def test_what_cannot_be_made(make, message):
    with pytest.raises(errors.ArgumentError, match=message) as info:
        make()
    assert "test_rule_errors.py" in info.value.where
