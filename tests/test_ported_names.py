"""Top-level names of JAX programs: their value here, or the error's advice."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax
from blufunc.config import _OF_JAX, Config, from_environment
from blufunc.typing import ArrayLike, DTypeLike

ABSENT = [(module, name) for module in (bf, bnp, bf.profiler) for name in sorted(module._NOT_HERE)]


@pytest.mark.parametrize("module, name", ABSENT, ids=[f"{m.__name__}.{n}" for m, n in ABSENT])
def test_absent_names_say_what_there_is(module, name):
    assert not hasattr(module, name), "it is here: the hint has to go"
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert name in str(caught.value) and module._NOT_HERE[name] in str(caught.value)


def test_unknown_names_are_plain():
    with pytest.raises(AttributeError, match=r"module 'blufunc' has no attribute 'nothing_like_it'$"):
        bf.nothing_like_it
    assert getattr(bf, "smap", None) is None


def test_scipy_modules():
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        bf.scipy.nothing


@pytest.mark.peer
def test_all_names_of_jax_are_here_or_named():
    """Each top-level name exists, or its error gives advice."""
    jax = pytest.importorskip("jax")
    internal = {
        "ad", "allow_f16_reductions", "api_util", "array_garbage_collection_guard", "auto_pcast", "empty_ref",
        "host_ids", "jax2tf_associative_scan_reductions", "legacy_prng_key", "make_user_context", "no_execution",
        "no_tracing", "process_indices", "remove_size_one_mesh_axis_from_type",
        "softmax_custom_jvp", "thread_guard", "transfer_guard_device_to_device", "transfer_guard_device_to_host",
        "transfer_guard_host_to_device", "ds",
    }  # fmt: skip
    absent = {n for n in dir(jax) if n[0] != "_" and not hasattr(bf, n)}
    assert absent - set(bf._NOT_HERE) <= internal


# -- flags -----------------------------------------------------------------------------------------


def test_flags():
    config = Config()
    config.update("debug", "jaxpr")
    config.update("jax_debug_key_reuse", True)
    assert config.shows("jaxpr") and config.debug_key_reuse
    with pytest.raises(errors.ArgumentError, match="is a bool"):
        config.update("check", "yes")
    for name in ("jax_nothing", None, 3):
        with pytest.raises(errors.ValueRangeError, match="no flag"):
            config.update(name, True)
    assert config == Config("jaxpr", False, True)
    with pytest.raises(errors.UnsupportedError, match="jax_enable_x64"):
        config.jax_enable_x64 = True
    with pytest.raises(errors.ValueRangeError, match="no flag"):
        config.chek = True
    config.check = True
    assert config == Config("jaxpr", True, True)


WRONG_VALUES = {
    "a stage": ("debug", "jaxpr,fusoin", "fusoin.*\n.*use jaxpr, retrace, fusion"),
    "a choice": ("host_compiler", "sometimes", "sometimes.*\n.*use auto, always, never"),
    "no choice": ("host_compiler", "", "use auto, always, never"),
    "a precision": ("matmul_precision", "tf33", "tf33.*\n.*use default"),
}


@pytest.mark.parametrize("flag, value, message", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_a_value_that_a_flag_cannot_have(flag, value, message):
    config = Config()
    for attempt in (lambda: config.update(flag, value), lambda: setattr(config, flag, value)):
        with pytest.raises(errors.ValueRangeError, match=message):
            attempt()
    assert config == Config()


def test_flags_are_assigned_in_their_type():
    with pytest.raises(errors.ArgumentError, match="'debug' is a str"):
        Config().debug = True


def test_stages_may_have_spaces():
    config = Config("jaxpr, fusion,")
    assert config.shows("fusion") and not config.shows("") and not config.shows("fus")


def test_flags_in_the_environment():
    given = {
        "BLUFUNC_HOST_COMPILER": "never",
        "BLUFUNC_CUDA_GRAPHS": "off",
        "BLUFUNC_CHECK": "1",
        "BLUFUNC_DEBUG": "",
    }
    assert from_environment(given) == Config(host_compiler="never", cuda_graphs=False, check=True)
    for variable, value in {"BLUFUNC_DEBUG_NANS": "2", "BLUFUNC_HOST_COMPILER": "yes"}.items():
        with pytest.raises(errors.ValueRangeError, match=value):
            from_environment({variable: value})


@pytest.mark.parametrize("name", sorted(_OF_JAX))
def test_flags_of_jax(name):
    with pytest.raises(errors.UnsupportedError, match=name) as caught:
        Config().update(name, True)
    assert caught.value.why and caught.value.fix


def test_x64_says_how_it_is_done_here():
    with pytest.raises(errors.UnsupportedError, match="dtype='float64'"):
        bf.config.update("jax_enable_x64", True)


# -- devices and types -----------------------------------------------------------------------------


def test_devices():
    assert bf.default_backend() == "cpu"
    assert bf.device_count() == bf.local_device_count() == bf.device_count("cpu") == len(bf.devices()) == 1
    assert bf.local_devices() == bf.local_devices(0, "cpu") == bf.devices()
    assert (bf.process_index(), bf.process_count()) == (0, 1)
    x = bnp.ones(3)
    assert x.devices() == {x.device} == set(bf.devices())
    assert isinstance(x.device, bf.Device)
    with pytest.raises(errors.ValueRangeError, match="tpu"):
        bf.device_count("tpu")
    with pytest.raises(errors.ValueRangeError, match="process 1"):
        bf.local_devices(1)
    with pytest.raises(errors.ArgumentError, match="string"):
        bf.devices([])


def test_typeof():
    t = bf.typeof(bnp.ones((2, 3), "float64"))
    assert (t.shape, t.dtype, t.weak_type, str(t)) == ((2, 3), np.dtype("float64"), False, "f64[2,3]")
    assert bf.typeof(1.0).weak_type and bf.typeof(np.ones(3)).dtype == "float32"
    seen = []
    bf.jit(lambda x: seen.append(bf.typeof(x)) or x)(bnp.ones(4))
    assert seen == [bf.typeof(bnp.zeros(4))]
    assert bf.typeof(bf.ShapeDtypeStruct((2,), "int8")).shape == (2,)
    with pytest.raises(errors.ArgumentError):
        bf.typeof("a")


def test_float0():
    g = bf.grad(lambda i: i * 1.0, allow_int=True)(bnp.int32(1))
    assert g.dtype == bf.float0


def test_annotations():
    for x in (bnp.ones(3), np.ones(3), np.float32(1), True, 1, 1.0, 1j):
        assert isinstance(x, ArrayLike)
    assert not isinstance("a", ArrayLike) and not isinstance([1], ArrayLike)
    seen = []
    bf.jit(lambda x: seen.append(isinstance(x, ArrayLike)) or x)(1.0)
    assert seen == [True]
    assert all(
        isinstance(d, DTypeLike) for d in ("float32", np.float32, np.dtype("int8"), float, bnp.ones(1))
    )


# -- lax -------------------------------------------------------------------------------------------


def test_top_k_along_an_axis():
    x = np.random.default_rng(0).permutation(np.arange(24.0)).reshape(2, 3, 4)
    for axis in (0, 1, 2, -1, -2, -3):
        k = x.shape[axis]
        values, index = lax.top_k(bnp.asarray(x), k, axis=axis)
        np.testing.assert_array_equal(np.asarray(values), -np.sort(-x, axis))
        np.testing.assert_array_equal(np.asarray(index), np.argsort(-x, axis))
        assert lax.top_k(operand=bnp.asarray(x), k=1, axis=axis)[0].shape[axis] == 1
        grads = bf.grad(lambda v, axis=axis: lax.top_k(v, 1, axis=axis)[0].sum())(bnp.asarray(x))
        np.testing.assert_array_equal(np.asarray(grads), x == x.max(axis, keepdims=True))
    with pytest.raises(errors.BlufuncError):
        lax.top_k(bnp.asarray(x), 1, axis=3)


def test_barriers_are_kept():
    def f(x):
        return lax.optimization_barrier(x) * lax.optimization_barrier(x)

    text = bf.jit(f).lower(3.0).as_text()
    assert text.count("optimization_barrier") == 2
    assert (
        bf.jit(lambda: lax.optimization_barrier(2.0) + 1).lower().as_text().count("optimization_barrier") == 1
    )
    assert float(bf.jit(f)(3.0)) == 9.0 and float(bf.grad(f)(3.0)) == 6.0
    assert float(bf.jit(bf.grad(bf.grad(f)))(3.0)) == 2.0


def test_barriers_take_trees():
    x = {"a": bnp.ones(3), "b": (2, None)}
    out = bf.jit(lax.optimization_barrier)(x)
    assert out["a"].tolist() == [1, 1, 1] and int(out["b"][0]) == 2
    assert lax.optimization_barrier(()) == ()
    keep = lambda a, b: lax.optimization_barrier((a, b))
    out = bf.vmap(keep, (0, None), (0, None))(bnp.arange(3), 5)
    assert out[0].tolist() == [0, 1, 2] and int(out[1]) == 5
    (a, b), (da, db) = bf.jvp(lambda a: keep(a, a * 0 + 2), (3.0,), (1.0,))
    assert [float(v) for v in (a, b, da, db)] == [3, 2, 1, 0]
    with pytest.raises(errors.ArgumentError):
        lax.optimization_barrier("a")
