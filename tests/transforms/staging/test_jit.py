"""``jit``: retracing, static arguments, donation, stages, and constants."""

import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config
from blufunc.core.arrays.array import ConcreteArray, from_numpy, scalar
from blufunc.core.ir import dtypes
from blufunc.core.ir.jaxpr import Literal, eval_jaxpr
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops import shape
from blufunc.core.primitives import linear_ops
from blufunc.core.primitives.override import override
from blufunc.core.pytree import nodes, tree
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.autodiff.grad import grad, jvp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.staging.jit import disable_jit, jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr


def arr(x, dtype=np.float32):
    return from_numpy(np.asarray(x, dtype))


def total(x):
    return linear_ops.reduce_sum(x, tuple(range(x.ndim)))


def check(got, want, rtol=1e-6):
    got = np.asarray(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


X = np.array([0.5, -1.0, 2.0], np.float32)


@nodes.register_dataclass
@dataclasses.dataclass
class Tagged:
    x: object
    tag: object = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Config:
    n: object


# -- when it traces --------------------------------------------------------------------------------


def test_one_trace_for_each_kind_of_argument():
    f = jit(lambda x: ew.mul(x, 2.0))
    for x in (X, X + 1, arr(X), X.astype(np.float64)):
        check(f(x), 2 * np.asarray(x))
    assert f.trace_count == 1, "values do not matter, and float64 from NumPy is float32 here"
    f(X[:2])
    assert f.trace_count == 2, "another shape"
    f(arr(X, np.float64))
    assert f.trace_count == 3, "another dtype, asked for explicitly"
    f(3.0)
    f(4.0)
    assert f.trace_count == 4, "a weakly typed number"
    f(np.float32(3.0))
    assert f.trace_count == 5, "a strongly typed number"
    f(X)
    assert f.trace_count == 5


def test_structure_is_part_of_the_key():
    f = jit(lambda p: p["a"])
    f({"a": X})
    f({"a": X + 1})
    assert f.trace_count == 1
    f({"a": X, "b": X})
    f({"a": X, "b": None})
    assert f.trace_count == 3


SHAPES_OF_A_CALL = {
    "positional": ((X, 2.0), {}),
    "by keyword": ((X,), {"b": 2.0}),
    "both by keyword": ((), {"b": 2.0, "a": X}),
    "arrays": ((X, X), {}),
    "a list": (([X, 2.0],), {}),
    "a tuple": (((X, 2.0),), {}),
    "a dict": (({"x": X, "y": 2.0},), {}),
    "a dict in another order": (({"y": 2.0, "x": X},), {}),
    "a dict in its place": (({"x": {"x": X}, "y": 2.0},), {}),
    "a dict that is like the arguments": ((({"x": X, "y": 2.0},), {"b": 2.0}), {}),
    "None": (({"x": X, "y": None}, 2.0), {}),
}


@pytest.mark.parametrize("lift", [lambda x: x, lambda x: arr(x)], ids=["NumPy", "arrays"])
@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_calls_of_all_shapes_in_turn(lift, donate):
    """Alternating structures: each is traced once."""

    def sums(a=None, b=None):
        leaves = [ew.mul(x, float(i + 1)) for i, x in enumerate(tree.leaves((a, b)))]
        return leaves[0] if len(leaves) == 1 else ew.add(leaves[0], leaves[1])

    f = jit(sums, donate_argnums=donate)
    for turn in range(2):
        for args, kwargs in SHAPES_OF_A_CALL.values():
            args, kwargs = tree.map(lift, (args, kwargs))
            want = np.asarray(sums(*args, **kwargs))
            for _ in range(2):
                check(f(*tree.map(lambda x: x + 0, args), **tree.map(lambda x: x + 0, kwargs)), want)
        if not turn:
            traced = f.trace_count
    assert f.trace_count == traced


def test_static_data_that_cannot_be_hashed_is_named_each_time():
    f = jit(lambda box: box.x)
    f(Tagged(X, 2))
    for _ in range(2):
        with pytest.raises(errors.TreeError, match="static field 'tag' of Tagged"):
            f(Tagged(X, np.arange(2)))


def test_positional_and_keyword_arguments():
    f = jit(lambda x, y: ew.sub(x, y))
    check(f(X, 1.0), X - 1)
    check(f(X, y=1.0), X - 1)
    check(f(y=X, x=X), X - X)


def test_inner_functions_are_traced_once_for_each_type():
    inner = jit(lambda x: ew.sin(x))
    outer = jit(lambda x: ew.add(inner(x), inner(ew.mul(x, 2.0))))
    outer(X)
    outer(X)
    assert (outer.trace_count, inner.trace_count) == (1, 1)
    grad(lambda x: total(outer(x)))(X)
    vmap(outer)(np.stack([X, X]))
    jvp(outer, (X,), (X,))
    assert (outer.trace_count, inner.trace_count) == (1, 1), "vmap sees one example, of the same type"


def test_transforms_of_jitted_functions_are_memoised():
    calls = []

    @jit
    def f(x):
        calls.append(1)
        return total(ew.square(x))

    g = grad(f)
    for _ in range(3):
        g(X)
    assert len(calls) == 1


def test_max_traces():
    f = jit(lambda x: x, max_traces=2)
    f(X)
    f(X[:2])
    f(X)
    with pytest.raises(errors.RetraceError) as info:
        f(X[:1])
    assert "f32[2] -> f32[1]" in info.value.why
    assert "test_jit.py" in info.value.where


def test_retraces_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "retrace")

    def step(params, x):
        return params["w"]

    f = jit(step)
    f({"w": X}, 1.0)
    assert capsys.readouterr().err == ""
    f({"w": X[:2]}, 1.0)
    assert capsys.readouterr().err.strip() == "retrace of step: params['w']: f32[3] -> f32[2]"
    f({"w": X, "b": X}, 1.0)
    assert "'b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "before, now, text",
    [
        (2, 3, "2 -> 3"),
        (1, 1.0, "1 -> 1.0"),
        ("a", (1, ("b",)), "'a' -> (1, ('b',))"),
        (None, (), "None -> ()"),
        (frozenset({2, 1}), frozenset({1.0}), "frozenset({1, 2}) -> frozenset({1.0})"),
        (Config(1), Config((True,)), "Config(n=1) -> Config(n=(True,))"),
    ],
    ids=["numbers", "types", "tuples", "empty", "sets", "dataclasses"],
)
def test_a_static_argument_is_shown_as_it_was_written(before, now, text, monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "retrace")
    f = jit(lambda x, n: x, static_argnums=1)
    f(X, before)
    f(X, now)
    assert capsys.readouterr().err.strip() == f"retrace of <lambda>: static argument 1: {text}"


def test_new_function_objects_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(config, "debug", "retrace")
    for _ in range(2):
        jit(lambda x: x + 1)(X)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("retrace of <lambda>: test_jit.py:") and "a new function object" in line
    for n in (1, 2):
        jit(lambda x: x * 2)(X[:n])  # other types: it would be traced in any case
    f = lambda x: x - 1
    jit(f)(X)
    jit(f)(X)
    for g in (lambda x: x.sum(), lambda x: (2 * x).sum()):
        jit(grad(g))(X)  # one wrapper, two functions
    assert "new function object" not in capsys.readouterr().err


def test_clear_cache():
    f = jit(lambda x: x)
    f(X)
    f.clear_cache()
    f(X)
    assert f.trace_count == 2


def test_a_function_that_raises_is_not_cached():
    fail = [True]

    @jit
    def f(x):
        if fail[0]:
            raise RuntimeError("mine")
        return x

    with pytest.raises(RuntimeError):
        f(X)
    fail[0] = False
    check(f(X), X)


# -- static arguments ------------------------------------------------------------------------------


def test_static_arguments_are_python_values():
    @functools.partial(jit, static_argnums=1)
    def f(x, n):
        for _ in range(n):
            x = ew.mul(x, 2.0)
        return x

    check(f(X, 3), 8 * X)
    check(f(X, 3), 8 * X)
    check(f(X, n=3), 8 * X)
    assert f.trace_count <= 2
    check(f(X, 0), X)


def test_static_argnames():
    f = jit(lambda x, mode, n=1: ew.mul(x, 2.0) if mode == "double" else x, static_argnames=("mode", "n"))
    check(f(X, "double"), 2 * X)
    check(f(X, mode="double"), 2 * X)
    check(f(X, mode="same", n=2), X)


def test_static_values_are_told_apart_by_type():
    f = jit(lambda x, n: ew.mul(x, n), static_argnums=1)
    assert f(arr(X, np.int32), 1).dtype == np.int32
    assert f(X, 1.0).dtype == np.float32
    f(X, 1)
    f(X, True and 1)
    assert f.trace_count == 3


EQUAL = (1, 1.0, True, np.float32(1), np.float64(1), 0, 0.0, -0.0, False)
"""Numbers of which only the class and the sign differ."""


@pytest.mark.parametrize(
    "static, pack, unpack",
    [
        (True, lambda n: n, lambda x: x),
        (True, lambda n: ("a", (n,)), lambda x: x[1][0]),
        (True, lambda n: frozenset({n}), lambda x: next(iter(x))),
        (True, Config, lambda x: x.n),
        (True, lambda n: Config((Config(n), "a")), lambda x: x.n[0].n),
        (False, lambda n: Tagged(X, n), lambda x: x.tag),
        (False, lambda n: [Tagged(X, Config((n,)))], lambda x: x[0].tag.n[0]),
        (False, lambda n: {n: X}, lambda x: next(iter(x))),
        (False, lambda n: ({"a": {n: X, 7: X}},), lambda x: sorted(x[0]["a"])[0]),
    ],
    ids="value tuple set dataclass dataclasses field dataclass-in-field key key-of-many".split(),
)
def test_equal_numbers_of_other_classes_are_other_programs(static, pack, unpack):
    traced = []

    def f(x, packed):
        traced.append(unpack(packed))
        return x

    f = jit(f, static_argnums=1 if static else ())
    for _ in range(2):
        for n in EQUAL:
            f(X, pack(n))
            f(X, pack(n))
    assert [(type(n), repr(n)) for n in traced] == [(type(n), repr(n)) for n in EQUAL]


def test_a_static_field_decides_about_the_dtype_of_the_result():
    f = jit(lambda t: t.x * t.tag)
    x = arr([1, 2], np.int32)
    for tag, dtype in ((1, np.int32), (1.0, np.float32), (True, np.int32), (1.0, np.float32)):
        assert f(Tagged(x, tag)).dtype == dtype


def test_static_data_with_a_hash_of_its_own_may_hold_what_has_none():
    @nodes.register_dataclass
    @dataclasses.dataclass
    class Listed:
        items: list

        def __hash__(self):
            return len(self.items)

    f = jit(lambda x, c: ew.mul(x, c.items[0]), static_argnums=1)
    check(f(X, Listed([2.0])), 2 * X)
    check(f(X, Listed([3.0])), 3 * X)
    check(f(X, Listed([2.0])), 2 * X)
    assert f.trace_count == 2


def test_static_argnums_count_from_the_end():
    f = jit(lambda x, n: ew.mul(x, float(n)), static_argnums=-1)
    check(f(X, 2), 2 * X)


def test_static_arguments_among_varargs():
    f = jit(lambda *args: ew.mul(args[1], float(args[0])), static_argnums=0)
    check(f(2, X), 2 * X)


def test_unknown_static_names_are_refused():
    with pytest.raises(errors.ValueRangeError, match="no parameter 'm'"):
        jit(lambda x, n: x, static_argnames="m")
    with pytest.raises(errors.ValueRangeError, match="static_argnums"):
        jit(lambda x: x, static_argnums=3)


# -- as a decorator --------------------------------------------------------------------------------


def test_decorators():
    @jit
    def plain(x):
        """Words."""
        return x

    @jit(static_argnums=1)
    def configured(x, n):
        return x

    assert plain.__name__ == "plain" and plain.__doc__ == "Words."
    assert repr(plain) == "<jit of plain>"
    check(configured(X, 1), X)


def test_methods():
    class Model:
        scale = 2.0

        @jit
        def double(x):
            return ew.mul(x, 2.0)

        @functools.partial(jit, static_argnums=0)
        def scaled(self, x):
            return ew.mul(x, self.scale)

    check(Model.double(X), 2 * X)
    check(Model().scaled(X), 2 * X)


# -- results ---------------------------------------------------------------------------------------


def test_results_of_any_structure():
    out = jit(lambda x: {"a": (x, None), "b": [ew.neg(x), 3]})(X)
    check(out["a"][0], X)
    assert out["a"][1] is None
    check(out["b"][0], -X)
    assert isinstance(out["b"][1], ConcreteArray)
    assert jit(lambda x: None)(X) is None
    assert jit(lambda x: ())(X) == ()


def test_results_do_not_share_memory_with_arguments():
    a = arr(X)
    same, flipped, repeated = jit(lambda x: (x, shape.rev(x, (0,)), x))(a)
    buffers = [np.asarray(x) for x in (a, same, flipped, repeated)]
    for i in range(4):
        for j in range(i):
            assert not np.shares_memory(buffers[i], buffers[j])


def test_arguments_are_never_written_to():
    a = arr(X)
    f = jit(lambda x: ew.add(ew.mul(linear_ops.reshape(x, (3, 1)), 2.0), 1.0))
    check(f(a), (2 * X + 1)[:, None])
    check(a, X)


def test_jit_agrees_with_eager_bit_for_bit():
    f = lambda x: ew.mul(ew.tanh(ew.add(ew.square(x), 1.0)), ew.exp(ew.neg(x)))
    np.testing.assert_array_equal(np.asarray(jit(f)(X)), np.asarray(f(arr(X))))


def test_weak_types_of_arguments_and_results():
    f = jit(lambda x: ew.add(x, x))
    assert make_jaxpr(lambda x: x)(3.0).in_avals[0].weak_type
    assert f(3.0).weak_type and not f(scalar(3.0, np.dtype("float32"))).weak_type, "as outside of jit"
    assert f(3.0).dtype == np.float32


@pytest.mark.slow
def test_nothing_is_kept_alive():
    import weakref

    a = arr(X)
    r = weakref.ref(a)
    f = jit(lambda x: ew.mul(x, 2.0))
    f(a)
    f(a)
    del a
    gc.collect()
    assert r() is None


# -- closures and constants ------------------------------------------------------------------------


def test_constants_are_hoisted_to_parameters():
    c = arr(X)
    jaxpr = jit(lambda x: ew.add(ew.mul(x, c), c)).trace(X).jaxpr
    assert jaxpr.consts == () and len(jaxpr.invars) == 2


def test_scalar_arrays_from_outside_are_constants_of_make_jaxpr():
    """A closed-over scalar is one constant, be it an array or a tracer.

    Numbers, and arrays that the function makes, are literals; in programs, arrays are, too.
    """
    outside = bnp.asarray(3)

    def counted(x, n):
        inside = bnp.asarray(2.0)
        loop = lambda carry, _: (carry * inside + n + np.float32(1.5), None)
        return scan(loop, x * 4.0, None, 2)[0] - n

    one = bnp.ones((), "float32")
    jaxpr = make_jaxpr(lambda x: counted(x, outside))(one)
    assert [c.aval.shape for c in jaxpr.consts] == [()] and jaxpr.consts[0] is outside
    assert jaxpr.eqns[-1].invars[-1].__class__ is not Literal
    nested = []
    jit(lambda n: nested.append(make_jaxpr(lambda x: counted(x, n))(one)))(3)
    assert [c.aval.shape for c in nested[0].consts] == [()] and len(nested[0].eqns) == len(jaxpr.eqns)
    assert len(jit(lambda x: counted(x, outside)).trace(one).jaxpr.invars) == 1
    assert eval_jaxpr(jaxpr, [one])[0] == counted(one, outside)


def test_numpy_constants_are_taken_once():
    c = np.ones(3, np.float32)
    f = jit(lambda x: ew.mul(x, c))
    check(f(X), X)
    c[:] = 5
    check(f(X), X)


def test_golden_closures(golden):
    c = arr(X)
    inner = jit(lambda y: ew.mul(y, c))
    golden("closure", make_jaxpr(jit(lambda x: ew.add(inner(x), ew.mul(x, c))))(X))


def test_closing_over_tracers_of_the_outer_transform():
    def f(x):
        y = ew.sin(x)
        return total(jit(lambda z: ew.mul(y, z))(x))

    check(grad(f)(X), X * np.cos(X) + np.sin(X))
    check(vmap(f)(np.stack([X, 2 * X])), [np.sum(np.sin(X) * X), np.sum(np.sin(2 * X) * 2 * X)])
    check(jit(f)(X), np.sum(np.sin(X) * X))


def test_one_jitted_closure_in_two_traces():
    """A constant that died since the first trace forces a second one."""
    box = {}
    inner = jit(lambda z: ew.mul(box["y"], z))

    def f(x):
        box["y"] = ew.sin(x)
        return total(inner(x))

    for scale in (1, 2):
        x = scale * X
        check(grad(f)(x), x * np.cos(x) + np.sin(x), 1e-5)


def test_side_effects_happen_while_tracing_only():
    seen = []
    f = jit(lambda x: seen.append(1) or x)
    f(X)
    f(X)
    assert seen == [1]


# -- donation --------------------------------------------------------------------------------------


def test_donated_arrays_may_not_be_used():
    f = jit(lambda x: ew.add(x, 1.0), donate_argnums=0)
    a = arr(X)
    check(f(a), X + 1)
    assert a.is_deleted()
    for use in (
        np.asarray,
        lambda a: ew.neg(a),
        lambda a: f(a),
        jit(ew.neg),
        lambda a: a.tolist(),
    ):
        with pytest.raises(errors.DonatedArrayError) as info:
            use(a)
        assert "test_jit.py" in str(info.value)
        assert "<lambda>" in info.value.what, "the call that took it is named"


def test_the_type_of_a_donated_array_may_be_used():
    f = jit(lambda x: ew.add(x, 1.0), donate_argnums=0)
    a = arr(X)
    f(a)
    assert a.shape == (3,) and a.dtype == np.float32
    assert f.trace(a).jaxpr.in_avals[0] is a.aval


def test_views_of_donated_arrays_stay_valid():
    big = arr(np.ones((1000,)))
    view = np.asarray(big)
    f = jit(lambda x: ew.add(ew.mul(x, 3.0), 4.0), donate_argnums=0)
    check(f(big), np.full(1000, 7.0))
    check(view, np.ones(1000))


def test_arrays_that_share_a_buffer_stay_valid():
    x = arr(np.arange(6.0))
    y = linear_ops.reshape(x, (2, 3))
    f = jit(lambda x: ew.mul(x, 0.0), donate_argnums=0)
    f(x)
    check(y, np.arange(6.0).reshape(2, 3))


def test_donation_reuses_memory():
    a = arr(np.ones((1000,)))
    address = np.asarray(a).__array_interface__["data"][0]
    out = jit(lambda x: ew.add(x, 1.0), donate_argnums=0)(a)
    assert np.asarray(out).__array_interface__["data"][0] == address


def test_only_what_was_named_is_donated():
    f = jit(lambda p, x: (ew.add(p["a"], x), p["b"]), donate_argnums=0)
    p, x = {"a": arr(X), "b": arr(X)}, arr(X)
    f(p, x)
    assert p["a"].is_deleted() and p["b"].is_deleted()
    assert not x.is_deleted()


def test_donate_argnames():
    f = jit(lambda x, y: ew.add(x, y), donate_argnames="y")
    x, y = arr(X), arr(X)
    f(x, y=y)
    assert y.is_deleted() and not x.is_deleted()


def test_donated_numpy_arguments_belong_to_the_caller():
    f = jit(lambda x: ew.add(x, 1.0), donate_argnums=0)
    x = X.copy()
    check(f(x), X + 1)
    np.testing.assert_array_equal(x, X)
    check(f(2.0), 3.0)
    check(f(2.0), 3.0)


def test_donating_one_array_twice():
    f = jit(lambda x, y: (ew.add(x, 1.0), ew.add(y, 2.0)), donate_argnums=(0, 1))
    a = arr(X)
    for x, want in zip(f(a, a), (X + 1, X + 2), strict=True):
        check(x, want)  # the program had the array and a copy of it
    assert a.is_deleted()


def test_an_array_donated_and_used_in_one_call():
    f = jit(lambda x, y: ew.add(ew.mul(x, 2.0), y), donate_argnums=0)
    a = arr(X)
    check(f(a, a), 3 * X)
    assert a.is_deleted()


def test_what_is_donated_of_hundreds_of_arrays():
    """Donated arrays that are shared or views: other references stay intact."""
    f = jit(lambda p, q: ({k: ew.add(v, 1.0) for k, v in p.items()}, q), donate_argnums=0)
    p = {f"{i:03}": arr(np.full(i % 3, i)) for i in range(300)} | {"n": 7.0}
    seen = {k: np.asarray(p[k]) for k in list(p)[:300:50]}
    p["twice"] = kept = p["007"]
    q = [p["010"]]
    for _ in range(3):
        got, (same,) = f(p, q)
        check(same, [10.0])
        for k, v in got.items():
            check(v, np.full(int(k) % 3, int(k) + 1) if k.isdecimal() else {"n": 8.0}.get(k, [8.0]))
        assert kept.is_deleted() and q[0].is_deleted()
        assert all(x.is_deleted() == (x.ndim > 0) for x in p.values() if isinstance(x, ConcreteArray))
        for k, v in seen.items():
            np.testing.assert_array_equal(v, np.full(int(k) % 3, int(k)))
        p = {k: ew.sub(v, 1.0) for k, v in got.items()}
        kept, q = p["twice"], [p["010"]]
    assert f.trace_count == 1, "a number of Python, and one that was computed from it"


def test_an_array_that_the_function_closes_over_is_not_overwritten():
    a = arr(X)
    f = jit(lambda x: ew.add(ew.mul(x, 2.0), a), donate_argnums=0)
    check(f(arr(X)), 3 * X)
    b = ConcreteArray(a.buffer, a.aval, a.device)
    check(f(b), 3 * X)
    assert b.is_deleted()
    check(f(arr(X)), 3 * X)


def test_static_and_donated_arguments():
    f = jit(lambda n, x, y: ew.add(ew.mul(x, n), y), static_argnums=0, donate_argnums=(1,))
    for n in (2.0, 3.0, 2.0):
        x, y = arr(X), arr(X)
        check(f(n, x, y), (n + 1) * X)
        assert x.is_deleted() and not y.is_deleted()
    assert f.trace_count == 2


def test_numbers_are_never_taken():
    """Constants of programs may be the very object that a user holds."""
    one = grad(lambda x: x)(2.0)
    double = jit(lambda x: ew.mul(x, 2.0), donate_argnums=0)
    assert float(double(one)) == 2.0
    assert float(one) == 1.0
    assert float(grad(ew.sin)(0.0)) == 1.0


def test_a_failed_call_takes_nothing():
    f = jit(lambda x, y: ew.add(x, y), donate_argnums=0)
    a, b = arr(X), arr(X)
    f(arr(X), b)
    jit(lambda x: ew.add(x, 1.0), donate_argnums=0)(b)
    with pytest.raises(errors.DonatedArrayError):
        f(a, b)
    assert not a.is_deleted()


def test_the_staged_path_donates_too():
    a = arr(X)
    compiled = jit(lambda x: ew.add(ew.sin(x), 1.0), donate_argnums=0).lower(a).compile()
    check(compiled(a), np.sin(X) + 1)
    assert a.is_deleted()


def test_results_do_not_share_storage():
    x, y = jit(lambda x: (ew.add(x, 1.0), linear_ops.transpose(ew.add(x, 1.0), (1, 0))))(
        arr([[1.0, 2.0], [3.0, 4.0]])
    )
    assert not np.shares_memory(np.asarray(x), np.asarray(y))


@pytest.mark.slow
def test_nothing_of_a_dead_function_is_kept():
    f = jit(lambda x: total(ew.sin(x)))
    outer = jit(grad(f))
    outer(arr(X))
    jaxpr = weakref.ref(outer.trace(arr(X)).jaxpr)
    del f, outer
    gc.collect()
    assert jaxpr() is None


def test_nothing_is_donated_inside_another_transform():
    f = jit(lambda x: total(ew.square(x)), donate_argnums=0)
    a = arr(X)
    check(grad(f)(a), 2 * X)
    check(jit(f)(a), np.sum(X**2))
    assert not a.is_deleted()


def test_a_training_loop_with_donation():
    @jit(donate_argnums=0)
    def step(state, x):
        return {"w": ew.sub(state["w"], ew.mul(x, 0.5)), "n": ew.add(state["n"], 1)}

    state = {"w": arr(X), "n": scalar(0, dtypes.int32)}
    for _ in range(4):
        state = step(state, X)
    check(state["w"], -X)
    assert int(state["n"]) == 4
    assert step.trace_count == 1


# -- stages ----------------------------------------------------------------------------------------


def test_stages():
    f = jit(lambda x, y: ew.add(ew.mul(x, 2.0), y))
    traced = f.trace(X, y := np.float32(1))
    assert [e.prim.name for e in traced.jaxpr.eqns] == ["mul", "add"]
    lowered = traced.lower()
    assert [e.prim.name for e in lowered.jaxpr.eqns] == ["mul", "add"]
    compiled = lowered.compile()
    check(compiled(X, y), 2 * X + 1)
    assert "mul(" in compiled.source()
    assert "test_jit.py" in f.lower(X, y).source(), "the source names the user's lines"
    assert f.trace_count == 1


def test_stages_from_shapes_alone():
    spec = ShapeDtypeStruct((3,), "float32")
    f = jit(lambda x: total(x))
    compiled = f.trace(spec).lower().compile()
    check(compiled(X), X.sum())
    check(f(X), X.sum())
    assert f.trace_count == 1


def test_compiled_programs_take_what_they_were_compiled_for():
    compiled = jit(lambda x, n: ew.mul(x, float(n)), static_argnums=1).lower(X, 2).compile()
    check(compiled(X, 2), 2 * X)
    with pytest.raises(errors.ArgumentError) as info:
        compiled(X[:2], 2)
    assert "x: f32[3] -> f32[2]" in info.value.why
    with pytest.raises(errors.ArgumentError, match="arguments of other types"):
        compiled(X, 3)
    check(compiled(X), 2 * X)  # the static ones may be left out
    scaled = jit(
        lambda n, x, *, k, y: ew.mul(ew.add(x, y), float(n * k)), static_argnums=0, static_argnames="k"
    )
    assert scaled.lower(3, X, k=2, y=X).compile()(X, y=X)[0] == scaled(3, X, k=2, y=X)[0]
    with pytest.raises(errors.UnsupportedError, match="options of XLA"):
        scaled.lower(3, X, k=2, y=X).compile(compiler_options={"xla_flag": True})


def test_lowering_simplifies():
    def f(x):
        ew.exp(x)
        return ew.add(jit(ew.sin)(x), ew.sin(x))

    lowered = jit(f).lower(X)
    assert [e.prim.name for e in lowered.jaxpr.eqns] == ["sin", "add"]


def test_golden_source(golden):
    f = jit(lambda x: ew.mul(ew.add(ew.sin(x), 1.0), x))
    text = f.lower(X).source()
    golden("program", "\n".join(line.split("  #")[0] for line in text.splitlines()))


# -- programs --------------------------------------------------------------------------------------


def test_primitives_that_are_called_like_python_keywords():
    """``and``, ``or`` and ``not`` must not end up as such in the program's source."""
    b = np.array([True, False])
    f = jit(lambda p, q: ew.bitwise_or(ew.bitwise_and(p, q), ew.bitwise_not(q)))
    np.testing.assert_array_equal(np.asarray(f(b, ~b)), (b & ~b) | b)


def test_intermediates_are_reused_and_not_results():
    def f(x):
        a = ew.add(x, 1.0)
        b = ew.mul(a, 2.0)
        c = linear_ops.reshape(b, (3, 1))
        d = ew.mul(b, 3.0)
        return a, c, ew.neg(d)

    a, c, d = jit(f)(X)
    check(a, X + 1)
    check(c, (2 * X + 2)[:, None])
    check(d, -6 * (X + 1))


def test_literals_that_look_alike():
    f = jit(lambda x: (ew.mul(x, 0.0), ew.mul(x, -0.0), ew.add(x, 1e-7), ew.add(x, 1e7)))
    y = np.array([1.0], np.float32)
    out = [float(np.asarray(v)[0]) for v in f(y)]
    assert np.signbit(out[:2]).tolist() == [False, True]
    check(out[2:], [1 + 1e-7, 1 + 1e7])


def test_disable_jit_runs_the_function():
    seen = []

    @jit
    def f(x):
        seen.append(x)
        return ew.add(x, 1.0)

    with disable_jit():
        f(arr(1)), f(arr(2))
        with disable_jit(False):
            f(arr(3))
    f(arr(4))
    assert [isinstance(x, ConcreteArray) for x in seen] == [True, True, False] and f.trace_count == 1


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": "a"},
        {"static_argnums": {}},
        {"static_argnames": 1},
        {"donate_argnums": 1.5},
        {"max_traces": "a"},
    ],
    ids=str,
)
def test_options_are_checked(options):
    with pytest.raises(errors.ArgumentError, match=next(iter(options))):
        jit(lambda x: x, **options)


def test_no_options_may_be_none():
    assert float(jit(lambda x: x, static_argnums=None, static_argnames=None)(1.0)) == 1.0


def test_a_compiled_program_keeps_the_scope_that_it_was_made_in():
    with override(ew.sin_p, jvp=lambda ps, ts: (ew.sin(ps[0]), ew.mul(ts[0], 7.0))):
        compiled = jit(grad(ew.sin)).lower(0.0).compile()
        assert float(compiled(0.0)) == 7.0
    assert float(compiled(0.0)) == 7.0 and float(grad(ew.sin)(0.0)) == 1.0


@pytest.mark.slow
def test_scopes_without_end_do_not_fill_the_memory():
    f = jit(lambda x: jit(ew.sin)(x))
    counts = []
    for _ in range(3):
        for k in range(40):
            with override(ew.sin_p, jvp=lambda ps, ts, k=k: (ew.sin(ps[0]), ew.mul(ts[0], float(k)))):
                assert float(grad(f)(0.0)) == k
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 400, counts
    assert float(grad(f)(0.0)) == 1.0


def test_classes_that_check_their_children():
    class Checked:
        def __init__(self, x):
            if not hasattr(x, "shape"):
                raise TypeError("x is an array")
            self.x = x

    nodes.register_node(Checked, lambda c: ((c.x,), None), lambda _, children: Checked(*children))
    assert jit(lambda c, y: Checked(c.x * y))(Checked(arr(2.0)), arr(3.0)).x.item() == 6.0
    with pytest.raises(errors.ArgumentError, match="argument y is a set"):
        jit(lambda c, y: y)(Checked(arr(2.0)), {1})
