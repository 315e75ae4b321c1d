"""Classes, protocols and old forms of arguments that JAX libraries rely on."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.config import config


@pytest.mark.parametrize("transform", [bf.jit, bf.grad, bf.vmap, bf.checkpoint, lambda f: f])
def test_traced_values_are_arrays(transform):
    seen = []
    x = bnp.ones(3) if transform is bf.vmap else bnp.float32(1)
    transform(lambda x: seen.append(isinstance(x, bf.Array)) or x * 1)(x)
    assert seen[0]
    assert not isinstance(np.ones(3), bf.Array)


class Wrapped:
    """An object that stands for an array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def test_objects_that_give_arrays():
    w = Wrapped(np.arange(3.0, dtype=np.float32))
    for got in (bnp.asarray(w) + 1, bnp.ones(3) + w, w.value + 1, bf.jit(lambda x: x + 1)(w), bnp.add(w, 1)):
        np.testing.assert_array_equal(got, [1, 2, 3])
    assert bf.eval_shape(lambda x: x[1:], w).shape == (2,)


class Described:
    shape, dtype = (2, 3), "float16"


def test_shapes_of_objects_that_have_them():
    assert bf.eval_shape(lambda x: x.sum(0), Described()) == bf.ShapeDtypeStruct((3,), "float16")
    with pytest.raises(errors.ArgumentError, match="which is not an array"):
        bf.jit(lambda x: x)(Described())


def test_what_is_not_mapped_stays_as_it_is():
    double = lambda f, x, flag: f(x) if flag == "on" else x
    np.testing.assert_array_equal(bf.vmap(double, (None, 0, None))(bnp.negative, bnp.ones(2), "on"), [-1, -1])
    tree = {"f": bnp.negative, "scale": 3.0}
    got = bf.jit(bf.vmap(lambda t, x: t["f"](x) * t["scale"], ({"f": None, "scale": None}, 0)))
    with pytest.raises(errors.ArgumentError, match="is a function, which is not an array"):
        got(tree, bnp.ones(2))  # jit takes arrays
    mapped = bf.jit(lambda x: bf.vmap(lambda t, x: t["f"](x) * t["scale"], (None, 0))(tree, x))
    np.testing.assert_array_equal(mapped(bnp.ones(2)), [-3, -3])
    with pytest.raises(errors.ArgumentError, match="is a function, which is not an array"):
        bf.vmap(lambda f, x: x)(bnp.negative, bnp.ones(2))


@pytest.mark.parametrize("pred", [True, False])
def test_an_operand_for_each_branch(pred):
    x, y = bnp.ones(2), {"y": bnp.zeros(2)}
    old = lambda pred: lax.cond(pred, x, lambda x: x + 1, y, lambda y: y["y"] - 1)
    for fun in (old, bf.jit(old)):
        np.testing.assert_array_equal(fun(pred), [2, 2] if pred else [-1, -1])


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 2)
    return bf.devices("cpu")


@pytest.mark.parametrize("named", [False, True])
def test_values_are_put_where_they_are(named):
    x, place = bnp.ones(3), bf.devices()[0] if named else None
    double = lambda x: bf.device_put(x * 2, place)
    np.testing.assert_array_equal(bf.jit(double)(x), [2, 2, 2])
    np.testing.assert_array_equal(bf.grad(lambda x: double(x).sum())(x), [2, 2, 2])


def test_values_are_not_put_elsewhere(two_devices):
    with pytest.raises(errors.UnsupportedError, match="device_put of a traced value to cpu:1"):
        bf.jit(lambda x: bf.device_put(x, two_devices[1]))(bnp.ones(3))


def test_values_are_put_on_a_mesh(two_devices):
    mesh = bf.make_mesh((2,), ("x",))
    whole, spread = (bf.NamedSharding(mesh, bf.P(*names)) for names in ((), ("x",)))
    x = bf.device_put(bnp.ones(4), whole)
    assert bf.jit(lambda x: bf.device_put(x + 1, spread))(x).sharding == spread


def test_keys_as_words():
    key = random.key(3)
    words = random.key_data(key)
    for given in (words, np.asarray(words)):
        np.testing.assert_array_equal(random.normal(given, (4,)), random.normal(key, (4,)))
        np.testing.assert_array_equal(random.split(given, 3), random.key_data(random.split(key, 3)))
        np.testing.assert_array_equal(random.fold_in(given, 7), random.key_data(random.fold_in(key, 7)))
    draw = bf.jit(lambda words: random.uniform(random.split(words)[1]))
    assert draw(words) == random.uniform(random.split(key)[1])
    assert bf.vmap(random.normal)(random.split(words, 5)).shape == (5,)
    for words in (np.zeros(3, np.uint32), np.zeros(2, np.int32)):
        with pytest.raises(errors.ArgumentError, match="takes a key"):
            random.normal(words)


@pytest.mark.parametrize("name", ["bool_", "int8", "uint32", "bfloat16", "float32", "complex64"])
def test_dtypes_are_classes(name):
    cls = getattr(bnp, name)
    assert isinstance(cls, type) and np.dtype(cls) == cls.dtype == cls and np.dtype(cls).type in {cls}
    assert isinstance(np.ones((), cls)[()], cls) and not isinstance("a", cls)
    assert bnp.ones(2, cls).dtype == cls and cls(1).shape == ()


MISTAKES = [  # a wrong call, and the classes that users of JAX and NumPy catch
    (lambda: bnp.ones(3) + bnp.ones(4), (TypeError, ValueError)),
    (lambda: bnp.stack([bnp.ones(2), bnp.ones(3)]), (TypeError, ValueError)),
    (lambda: bnp.ones(3).reshape(2), (TypeError, ValueError)),
    (lambda: lax.scan(lambda c, x: (c, x), 0.0, (bnp.ones(2), bnp.ones(3))), (TypeError, ValueError)),
    (lambda: bf.tree.map(lambda x, y: x, [1], (1,)), (TypeError, ValueError)),
    (lambda: bnp.ones(3)[3], (IndexError,)),
    (lambda: bnp.linalg.matrix_rank(bnp.eye(2), rtol=1.0, tol=1.0), (ValueError,)),
    (lambda: bnp.sum(bnp.ones(3), where=bnp.ones(3)), (TypeError, ValueError)),
    (lambda: bnp.cov(bnp.ones((2, 2)), dtype="int32"), (TypeError, ValueError)),
    (lambda: bnp.fft.fft2(bnp.ones((2, 2)), axes=(0,)), (ValueError,)),
    (lambda: bf.jit(lambda x: 1 if x else 0)(1.0), (errors.TracerBoolConversionError, TypeError)),
    (lambda: bf.jit(np.asarray)(1.0), (errors.TracerArrayConversionError,)),
    (lambda: bf.jit(range)(1), (errors.TracerIntegerConversionError, errors.ConcretizationTypeError)),
]


@pytest.mark.parametrize("call, classes", MISTAKES)
def test_classes_of_errors(call, classes):
    with pytest.raises(errors.BlufuncError) as caught:
        call()
    assert all(isinstance(caught.value, c) for c in classes)


def test_residuals_that_are_no_arrays():
    seen = []

    @bf.custom_vjp
    def scaled(x, flag):
        return x * 2

    scaled.defvjp(
        lambda x, flag: (x * 2, (x, True, "name", bnp.negative)),
        lambda residuals, ct: (seen.append(residuals[1:]) or ct * residuals[0], None),
    )
    for grad in (
        bf.grad(scaled),
        bf.jit(bf.grad(scaled)),
        lambda x, f: bf.vmap(bf.grad(scaled), (0, None))(x[None], f),
    ):
        assert float(grad(bnp.float32(3), 1.0).sum()) == 3
    assert len(seen) == 3 and all(s == (True, "name", bnp.negative) for s in seen)


class Held:
    """An object that gives an array."""

    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


def test_auxiliary_results_that_are_no_arrays():
    x, kept = bnp.ones(3), (2, "name", np.float64(0.1), bnp.negative)
    f = lambda x: (x.sum(), {"kept": kept, "x": x, "held": Held(x)})
    for aux in (
        bf.grad(f, has_aux=True)(x)[1],
        bf.value_and_grad(f, has_aux=True)(x)[0][1],
        bf.vjp(f, x, has_aux=True)[2],
        bf.jvp(f, (x,), (x,), has_aux=True)[2],
        bf.linearize(f, x, has_aux=True)[2],
        bf.jacrev(f, has_aux=True)(x)[1],
        bf.jacfwd(f, has_aux=True)(x)[1],
    ):
        assert aux["kept"] == kept and [*map(type, aux["kept"])] == [*map(type, kept)]
        np.testing.assert_array_equal(aux["x"], x)
        np.testing.assert_array_equal(aux["held"] + 1, x + 1)  # the array that it held, and no traced value
    doubled = bf.jit(lambda x: bf.grad(lambda x: (x.sum(), (2, x)), has_aux=True)(x)[1])
    assert doubled(x)[0].dtype == np.int32


TRANSFORMS = {
    "none": lambda f: f,
    "grad": bf.grad,
    "value_and_grad": bf.value_and_grad,
    "hessian": bf.hessian,
    "jacfwd": bf.jacfwd,
    "jacrev": bf.jacrev,
    "jvp": lambda f: lambda x: bf.jvp(f, (x,), (1.0,)),
    "vjp": lambda f: lambda x: bf.vjp(f, x)[0],
    "linearize": lambda f: lambda x: bf.linearize(f, x)[0],
    "linear_transpose": lambda f: lambda x: bf.linear_transpose(f, 1.0)(x),
    "checkpoint": bf.checkpoint,
    "grad of checkpoint": lambda f: bf.grad(bf.checkpoint(f)),
    "vmap of grad": lambda f: lambda x: bf.vmap(bf.grad(f))(x * bnp.ones(2)),
    "closure_convert": lambda f: lambda x: bf.closure_convert(f, x)[0](x),
    "platform_dependent": lambda f: lambda x: lax.platform_dependent(x, cpu=f, default=f),
    "custom_linear_solve": lambda f: lambda x: lax.custom_linear_solve(f, x, lambda mv, b: mv(b)),
    "branch": lambda f: lambda x: lax.cond(x > 0, f, lambda y: y, x),
    "autocast": bf.autocast,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_scalar_arrays_are_constants_under_every_transform(name):
    """Libraries compare the constants of two jaxprs, one of which is a gradient's."""
    made = TRANSFORMS[name]
    for c in (bnp.float32(2.5) + 0, lax.full((), 2.0)):
        loop = lambda x, c=c: lax.scan(lambda a, _: (a * c, None), x, None, length=2)[0]
        assert [k is c for k in bf.make_jaxpr(made(loop))(1.0).consts] == [True]
    for inside in (lambda: 2.5, lambda: np.float32(2.5), lambda: lax.full((), 2.0)):
        loop = lambda x, n=inside: lax.scan(lambda a, _: (a * n(), None), x, None, length=2)[0]
        assert not bf.make_jaxpr(made(loop))(1.0).consts


def test_constraints_to_one_device(two_devices):
    there = bf.sharding.SingleDeviceSharding(two_devices[1])
    for x in lax.with_sharding_constraint({"a": bnp.ones(3), "b": [np.ones(2)]}, there)["b"]:
        assert x.device == two_devices[1]


def test_known_values_while_tracing():
    def f(x):
        with bf.ensure_compile_time_eval():
            size = int(bnp.arange(4).sum())  # known: computed
            y = x * size  # traced: an equation
        return y + 1

    np.testing.assert_array_equal(bf.jit(f)(bnp.ones(2)), [7, 7])
    np.testing.assert_array_equal(bf.vmap(bf.grad(f))(bnp.ones(2)), [6, 6])
    assert [e.prim.name for e in bf.make_jaxpr(f)(1.0).eqns] == ["mul", "add"]


def test_keys_compare():
    keys = random.split(random.key(0), 3)
    for same in (lambda a, b: a == b, bf.jit(lambda a, b: a == b), bf.vmap(lambda a, b: a == b, (0, None))):
        assert same(keys, keys[1]).tolist() == [False, True, False]
    assert (keys != keys).tolist() == [False] * 3
    assert bnp.issubdtype(keys.dtype, bf.dtypes.prng_key) and not bnp.issubdtype(
        np.uint32, bf.dtypes.prng_key
    )
    np.testing.assert_array_equal(random.key_data(np.asarray(keys)), random.key_data(keys))


def test_objects_with_shape_and_dtype():
    weak = bf.ShapeDtypeStruct((), "float32", weak_type=True)
    assert bnp.result_type(weak, bnp.bfloat16) == "bfloat16" and bnp.shape(Described()) == (2, 3)
    assert bnp.ndim(Described()) == 2 and bnp.size(Described()) == 6 and not bnp.iscomplexobj(Described())
    out = bf.eval_shape(lambda x: (x, bf.ShapeDtypeStruct((2,), "int8")), 1.0)
    assert out == (weak, bf.ShapeDtypeStruct((2,), "int8"))


def test_zeros_of_trees():
    tree = bf.custom_derivatives.zero_from_primal({"a": bnp.ones(2), "b": (1, 2.0)}, symbolic_zeros=True)
    assert [z.aval.dtype for z in bf.tree.leaves(tree)] == [np.float32, bf.float0, np.float32]


def test_axes_of_the_environment():
    jaxpr = bf.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 3)])(1.0)
    assert jaxpr.eqns[0].prim is lax.psum_p
    with pytest.raises(errors.AxisNameError):
        lax.psum(bnp.ones(2), "i")


def test_axes_and_shapes_are_any_iterable():
    x = bnp.ones((2, 3))
    assert bnp.expand_dims(x, range(2)).shape == (1, 1, 2, 3) and bnp.zeros(iter((2, 1))).shape == (2, 1)
    assert bnp.sum(x, axis=range(2)).shape == ()
    with pytest.raises(errors.ArgumentError):
        bnp.sum(x, axis="01")


def test_transposed_trees_by_keyword():
    outer, inner = bf.tree.structure([0, 0]), bf.tree.structure({"a": 0})
    got = bf.tree_util.tree_transpose(
        outer_treedef=outer, inner_treedef=inner, pytree_to_transpose=[{"a": 1}, {"a": 2}]
    )
    assert got == {"a": [1, 2]}
