"""Types along explicit axes, and regions, against what JAX 0.10.2 showed."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, NamedSharding, P, ShapeDtypeStruct, errors, lax
from blufunc.as_jax.meshes import get_abstract_mesh
from blufunc.extend import ShapedArray
from blufunc.sharding import AxisType, auto_axes, explicit_axes, reshard

A = np.arange(24, dtype=np.float32).reshape(4, 6)
W = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
SPECS = {"a": P("x"), "b": P(None, "y"), "c": P(None, "x"), "w": P(None, "y")}
VALUES = {"a": A, "b": A, "c": A, "w": W}


@pytest.fixture
def explicit(eight):
    with bf.make_mesh((2, 2), ("x", "y"), axis_types=AxisType.Explicit) as mesh:
        yield mesh


def on(mesh, names):
    return [bf.device_put(VALUES[n], NamedSharding(mesh, SPECS[n])) for n in names]


def types_of(tree):
    return [str(bf.typeof(x)) for x in bf.tree.leaves(tree)]


def tanh_grad(a, w):
    return bf.grad(lambda a, w: bnp.tanh(a @ w).sum(), (0, 1))(a, w)


def elementwise_region(a, c):
    return auto_axes(lambda a, c: a * c, out_sharding=P("x"))(a, c)


# The function, its arguments, and the types of its results in JAX 0.10.2 on 4 simulated CPU devices.
AS_JAX = {
    "argument": (lambda a: a, "a", ["f32[4@x,6]"]),
    "add": (lambda a, b: a + b, "ab", ["f32[4@x,6@y]"]),
    "transpose": (lambda a: bnp.sin(a).T, "a", ["f32[6,4@x]"]),
    "matmul": (lambda a, w: a @ w, "aw", ["f32[4@x,8@y]"]),
    "sums": (lambda a: (a.sum(0), a.sum(1), a.sum()), "a", ["f32[6]", "f32[4@x]", "f32[]"]),
    "grad": (tanh_grad, "aw", ["f32[4@x,6]", "f32[6,8@y]"]),
    "vmap": (lambda a: bf.vmap(lambda r: r * 2)(a), "a", ["f32[4@x,6]"]),
    "scan": (
        lambda b: lax.scan(lambda c, r: (c + r, r * 2), b[0], b), "b", ["f32[6@y]", "f32[4,6@y]"],
    ),
    "cond": (lambda a: lax.cond(a.sum() > 0, lambda a: a * 2, lambda a: a, a), "a", ["f32[4@x,6]"]),
    "reshape": (lambda a: a.reshape(2, 2, 6), "a", ["f32[2@x,2,6]"]),
    "reshard": (lambda a: reshard(a, P(None, "x")), "a", ["f32[4,6@x]"]),
    "concatenate": (lambda a: bnp.concatenate([a, a], 1), "a", ["f32[4@x,12]"]),
    "broadcast": (lambda a: bnp.broadcast_to(a[None], (3, 4, 6)), "a", ["f32[3,4@x,6]"]),
    "checkpoint": (lambda a: bf.checkpoint(bnp.sin)(a), "a", ["f32[4@x,6]"]),
    "a region": (elementwise_region, "ac", ["f32[4@x,6]"]),
    "a region of one axis": (
        lambda a, c: auto_axes(lambda a, c: a + c, axes="x", out_sharding=P("x"))(a, c), "ac", ["f32[4@x,6]"],
    ),
    "gradients through a region": (
        lambda a, c: bf.grad(lambda a, c: elementwise_region(a, c).sum(), (0, 1))(a, c), "ac",
        ["f32[4@x,6]", "f32[4,6@x]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AS_JAX)
def test_types_are_those_of_jax(case, explicit):
    f, names, want = AS_JAX[case]
    args, seen = on(explicit, names), []

    def asks(*xs):
        out = f(*xs)
        seen.append(types_of(out))
        return out

    out = bf.jit(asks)(*args)
    assert seen == [want] and types_of(out) == want  # what the type says is how the result lies
    assert types_of(f(*args)) == want
    want_values = bf.jit(f)(*args)
    for x, y in zip(bf.tree.leaves(out), bf.tree.leaves(want_values), strict=True):
        np.testing.assert_array_equal(x, y)
    alone = (
        bf.tree.leaves(f(*[VALUES[n] for n in names])) if case not in _PLACES else bf.tree.leaves(want_values)
    )
    for x, y in zip(bf.tree.leaves(out), alone, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


_PLACES = {"reshard", "a region", "a region of one axis", "gradients through a region"}


# -- what types are known in ---------------------------------------------------------------------------


def test_inner_functions_see_their_types(explicit):
    a, b = on(explicit, "ab")
    seen = {}

    def see(name, x):
        seen[name] = str(bf.typeof(x))
        return x

    def f(a, b):
        lax.scan(lambda c, r: (see("carry", c) + r, see("x", r)), bnp.zeros(6), b)
        lax.while_loop(lambda c: c.sum() < 9, lambda c: see("while", c) + 1, a)
        lax.cond(a.sum() > 0, lambda a: see("branch", a), lambda a: a, a)
        bf.vmap(lambda r: see("vmap", r))(a)
        bf.vmap(lambda r: see("vmap of columns", r), in_axes=1)(a)
        bf.checkpoint(lambda a: see("checkpoint", a))(a)
        bf.jit(lambda a: see("jit", a))(a)
        bf.grad(lambda a: see("grad", a * 2).sum())(a)
        return see("closed over", bf.jit(lambda: a * 1)())

    bf.jit(f)(a, b)
    assert seen == {
        "carry": "f32[6@y]",  # zeros that become sums of sharded rows: traced again with what the carry becomes
        "x": "f32[6@y]", "while": "f32[4@x,6]", "branch": "f32[4@x,6]", "vmap": "f32[6]",
        "vmap of columns": "f32[4@x]", "checkpoint": "f32[4@x,6]", "jit": "f32[4@x,6]", "grad": "f32[4@x,6]",
        "closed over": "f32[4@x,6]",
    }  # fmt: skip


def test_a_function_that_asks_is_traced_for_the_shardings_of_its_arguments(explicit):
    a, c = on(explicit, "ac")
    asks = bf.jit(lambda x: x * (2 if bf.typeof(x).sharding.spec == P("x") else 3))
    for x, factor in ((A, 3), (a, 2), (c, 3), (a, 2), (A, 3), (A, 3)):
        np.testing.assert_array_equal(asks(x), A * factor)
    assert asks.trace_count == 3
    outer = bf.jit(lambda x: asks(x) + 1)  # what an inner function asks, the outer one asks
    np.testing.assert_array_equal(outer(a), A * 2 + 1)
    np.testing.assert_array_equal(outer(c), A * 3 + 1)
    silent = bf.jit(lambda x: x * 2)
    for x in (A, a, c):
        silent(x)
    assert silent.trace_count == 1


def test_a_function_that_asks_is_compiled_ahead_of_time(explicit):
    a, c = on(explicit, "ac")
    f = lambda x: x * (2 if bf.typeof(x).sharding.spec == P("x") else 3)
    for x, factor in ((A, 3), (a, 2), (c, 3)):
        np.testing.assert_array_equal(bf.jit(f).lower(x).compile()(x), A * factor)
    with pytest.raises(errors.ArgumentError, match=r"sharded as P\('x'.*-> P\(None, 'x'"):
        bf.jit(f).lower(a).compile()(c)
    moved = bf.jit(f, in_shardings=NamedSharding(explicit, P("x")))
    np.testing.assert_array_equal(moved.lower(A).compile()(A), moved(A))
    np.testing.assert_array_equal(moved.lower(a).compile()(a), A * 2)


def test_types_of_plans_and_of_arguments_without_devices():
    mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=AxisType.Explicit)
    seen = []
    struct = ShapeDtypeStruct((4, 6), "float32", sharding=NamedSharding(mesh, P("x")))
    bf.make_jaxpr(lambda x: seen.append(str(bf.typeof(x.T))) or x)(struct)
    assert seen == ["f32[6,4@x]"]


def test_shard_map_takes_the_specs_of_typed_arguments_under_jit(explicit):
    (a,) = on(explicit, "a")
    f = bf.jit(lambda a: bf.shard_map(lambda x: x * x.shape[0], out_specs=P("x"))(a * 1))
    np.testing.assert_array_equal(f(a), A * 2)


def test_mixed_meshes_show_their_explicit_axes(eight):
    with bf.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto)) as mesh:
        a = bf.device_put(A, NamedSharding(mesh, P("x", "y")))
        seen = []
        bf.jit(lambda a: seen.append(str(bf.typeof(a * 2))) or a)(a)
        assert seen == ["f32[4@x,6]"] and str(bf.typeof(a)) == "f32[4@x,6]"


# -- regions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit], ids=["eager", "jit"])
def test_axes_have_another_type_in_a_region(wrap, explicit):
    a, b, c = on(explicit, "abc")
    seen = []

    def inside(*xs):
        seen.append((types_of(xs), get_abstract_mesh().axis_types))
        return xs[0] + xs[1]

    auto, axis = AxisType.Auto, AxisType.Explicit
    both = wrap(auto_axes(inside, out_sharding=P("x")))(a, c)
    one = wrap(auto_axes(inside, axes="x", out_sharding=P("x", "y")))(a, b)
    assert [s[1] for s in seen] == [(auto, auto), (auto, axis)]
    assert seen[0][0] == ["f32[4,6]", "f32[4,6]"] and seen[1][0] == ["f32[4,6]", "f32[4,6@y]"]
    assert types_of([both, one]) == ["f32[4@x,6]", "f32[4@x,6@y]"]
    np.testing.assert_array_equal(both, A + A)
    np.testing.assert_array_equal(one, A + A)


@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit], ids=["eager", "jit"])
def test_explicit_regions_of_an_automatic_mesh(wrap, eight):
    seen = []
    with bf.make_mesh((2, 2), ("x", "y")) as mesh:
        a = bf.device_put(A, NamedSharding(mesh, P("x")))
        inside = lambda x: (
            seen.append((str(bf.typeof(x)), get_abstract_mesh().explicit_axes)),
            bnp.tanh(x) * 2,
        )[1]
        out = wrap(explicit_axes(inside, in_sharding=P("x", "y")))(a)
        assert seen == [("f32[4@x,6@y]", ("x", "y"))]
        np.testing.assert_allclose(out, np.tanh(A) * 2, rtol=1e-5)
        pair = explicit_axes(lambda x, y: x + y, in_sharding=(P("x"), P(None, "x")))
        with pytest.raises(errors.ShardingError, match=r"ambiguous.*P\('x', None\) or as P\(None, 'x'\)"):
            wrap(pair)(a, a)
        grads = wrap(bf.grad(lambda x: explicit_axes(bnp.sin, in_sharding=P("x"))(x).sum()))(a)
        np.testing.assert_allclose(grads, np.cos(A), rtol=1e-5, atol=1e-6)


def test_regions_under_vmap_and_scan(explicit):
    a, c = on(explicit, "ac")
    batched = bf.jit(bf.vmap(auto_axes(lambda r, s: r * s, out_sharding=P()), in_axes=(0, 1)))
    square = bf.device_put(A[:, :4], NamedSharding(explicit, P("x")))
    np.testing.assert_array_equal(batched(square, square), A[:, :4] * A[:, :4].T)
    step = lambda t, _: (auto_axes(lambda t, c: t + c, out_sharding=P("x"))(t, c), None)
    np.testing.assert_array_equal(bf.jit(lambda a, c: lax.scan(step, a, None, length=3)[0])(a, c), A * 4)


def test_eager_vmap_of_a_region_keeps_what_its_specs_do_not_say(explicit):
    columns = bf.device_put(A, NamedSharding(explicit, P("y")))
    f = auto_axes(lambda r: r * 2, out_sharding=P("x"))
    assert types_of(bf.vmap(f)(columns)) == ["f32[4@y,6@x]"]
    (rows,) = on(explicit, "a")
    assert types_of(bf.vmap(f)(rows)) == ["f32[4,6@x]"]  # the region says what "x" shards
    np.testing.assert_array_equal(bf.vmap(f)(rows), A * 2)


def test_a_region_without_a_mesh_in_force_is_on_that_of_its_arguments(eight):
    mesh = bf.make_mesh((2, 2), ("x", "y"), axis_types=AxisType.Explicit)
    a, c = on(mesh, "ac")
    seen = []
    f = auto_axes(lambda a, c: (seen.append(types_of([a, c])), a * c)[1], out_sharding=P("x"))
    out = f(a, c)
    assert seen == [["f32[4,6]", "f32[4,6]"]] and types_of(out) == ["f32[4@x,6]"]
    np.testing.assert_array_equal(out, A * A)


def test_a_region_takes_its_sharding_with_the_call_and_needs_one(explicit):
    (a,) = on(explicit, "a")
    assert types_of(auto_axes(bnp.sin)(a, out_sharding=P(None, "x"))) == ["f32[4,6@x]"]
    assert types_of(auto_axes(axes="x", out_sharding=P("x"))(bnp.sin)(a)) == ["f32[4@x,6]"]


REFUSED = {
    "no out_sharding": (lambda a: auto_axes(bnp.sin)(a), errors.ArgumentError, "takes out_sharding="),
    "no in_sharding": (lambda a: explicit_axes(bnp.sin)(a), errors.ArgumentError, "takes in_sharding="),
    "an axis that is not there": (
        lambda a: auto_axes(bnp.sin, axes="z", out_sharding=P())(a), errors.ShardingError, "'z' is no axis",
    ),
    "not a spec": (lambda a: auto_axes(bnp.sin, out_sharding=3)(a), errors.ArgumentError, "out_sharding of.*holds 3"),
    "too many entries": (
        lambda a: auto_axes(bnp.sin, out_sharding=P(None, None, "x"))(a), errors.ShardingError, "out_sharding",
    ),
    "a manual axis": (
        lambda a: bf.shard_map(
            lambda a: auto_axes(bnp.sin, axes="x", out_sharding=P())(a), in_specs=P("x"), out_specs=P("x")
        )(a),
        errors.ShardingError, "'x' is manual",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_regions_refuse(case, explicit):
    f, kind, message = REFUSED[case]
    (a,) = on(explicit, "a")
    with pytest.raises(kind, match=message) as caught:
        f(a)
    assert "test_explicit_types.py" in str(caught.value)


def test_explicit_axes_need_a_mesh_and_auto_axes_do_not():
    with pytest.raises(errors.ArgumentError, match="has no mesh"):
        explicit_axes(bnp.sin, in_sharding=P())(A)
    np.testing.assert_array_equal(auto_axes(lambda x: x + 1, out_sharding=P())(A), A + 1)


def test_types_made_with_shardings_and_memories(explicit):
    """By the constructor, as JAX's programs make them."""
    array = bf.device_put(A, NamedSharding(explicit, P("x")))
    made = lambda **how: ShapedArray((4, 6), "float32", **how)
    assert made(sharding=array.sharding) == bf.typeof(array)
    assert str(made(sharding=NamedSharding(explicit, P(None, ("x", "y"))))) == "f32[4,6@(x,y)]"
    auto = NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    for nothing in (auto, made().sharding, None):
        assert made(sharding=nothing) is made()
    assert made(sharding=bf.typeof(array).sharding).update(weak_type=False) is made()
    for host in (bf.memory.Space.Host, "pinned_host"):
        assert made(memory_space=host) is made(memory="pinned_host")
    assert made(memory_space=bf.memory.Space.Device) is made()
    both = made(sharding=array.sharding, memory_space="pinned_host")
    assert (both.memory, str(both)) == ("pinned_host", "f32<host>[4@x,6]")
    with pytest.raises(errors.ValueRangeError, match="no memory 'vmem'"):
        made(memory_space="vmem")
    with pytest.raises(errors.ArgumentError, match="the sharding is a str"):
        made(sharding="x")


def test_constants_of_a_body_that_is_traced_twice(explicit):
    """Its carry starts without axes and ends with one: types take two traces."""
    (a,) = on(explicit, "a")
    scale, seen = bnp.float32(2.0) + 0, []

    def step(carry, _):
        seen.append(str(bf.typeof(carry)))
        return carry * scale + a, None

    jaxpr = bf.make_jaxpr(lambda x: lax.scan(step, x, None, length=2)[0])(bnp.zeros((4, 6)))
    assert seen == ["f32[4,6]", "f32[4@x,6]"]
    assert sum(c is scale for c in jaxpr.consts) == 1
