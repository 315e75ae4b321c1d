"""Flags for a block or a function, and JAX's names of flags."""

import threading

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import Config, config

BLOCKS = {  # a context, the flag, and its value inside
    "debug_nans": (lambda: bf.debug_nans(True), "debug_nans", True),
    "debug_nans off": (lambda: bf.debug_nans(False), "debug_nans", False),
    "debug_infs": (lambda: bf.debug_infs(), "debug_infs", True),
    "debug_key_reuse": (lambda: bf.debug_key_reuse(True), "debug_key_reuse", True),
    "enable_checks": (lambda: bf.enable_checks(False), "check", False),
    "log_compiles": (lambda: bf.log_compiles(), "debug", "retrace,compile"),
    "explain_cache_misses": (lambda: bf.explain_cache_misses(True), "debug", "retrace"),
    "default_device": (lambda: bf.default_device(bf.devices("cpu")[0]), "default_device", "cpu:0"),
    "no default_device": (lambda: bf.default_device(None), "default_device", ""),
    "gpu": (lambda: bf.default_device("gpu"), "default_device", "cuda"),
    "float32": (lambda: bf.default_matmul_precision("float32"), "matmul_precision", "highest"),
    "tensorfloat32": (lambda: bf.default_matmul_precision("tensorfloat32"), "matmul_precision", "tf32"),
    "float32_tc": (lambda: bf.default_matmul_precision("float32_tc"), "matmul_precision", "float32_tc"),
    "rank_promotion": (lambda: bf.numpy_rank_promotion("raise"), "numpy_rank_promotion", "raise"),
    "dtype_promotion": (lambda: bf.numpy_dtype_promotion("strict"), "numpy_dtype_promotion", "strict"),
    "no precision": (lambda: bf.default_matmul_precision(None), "matmul_precision", "default"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_decorators_set_flags(name):
    make, flag, inside = BLOCKS[name]
    before = getattr(config, flag)
    with make():
        assert getattr(config, flag) == inside
    assert getattr(config, flag) == before
    context = make()
    for _ in range(2):
        assert context(lambda: getattr(config, flag))() == inside
    assert getattr(config, flag) == before
    with pytest.raises(KeyError), make():
        raise KeyError
    assert getattr(config, flag) == before


def test_nans_in_a_block():
    with bf.debug_nans(True), pytest.raises(errors.NanError):
        bf.jit(lambda x: x / x)(bnp.zeros(2))
    assert np.isnan(bf.jit(lambda x: x / x)(bnp.zeros(2))).all()
    with (
        pytest.raises(errors.ValueRangeError, match="cannot be 'float17'"),
        bf.default_matmul_precision("float17"),
    ):
        pass


def test_blocks_that_change_nothing():
    with bf.checking_leaks(), bf.checking_leaks(False), bf.enable_x64(False), bf.check_tracer_leaks():
        assert bnp.ones(2).dtype == "float32"
    with bf.threefry_partitionable(True), bf.default_prng_impl("threefry2x32"):
        pass
    for change in (lambda: bf.threefry_partitionable(False), lambda: bf.default_prng_impl("rbg")):
        with pytest.raises(errors.UnsupportedError, match="jax_"), change():
            pass
    with pytest.raises(errors.UnsupportedError, match="dtype='float64'"), bf.enable_x64():
        pass


def test_a_mesh_is_set_for_a_block_or_from_now_on(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 2)
    mesh = bf.make_mesh((2,), ("x",))
    put = lambda: bf.device_put(bnp.ones(4), bf.P("x")).sharding
    with bf.set_mesh(mesh) as current:
        assert current is mesh and put() == bf.NamedSharding(mesh, bf.P("x"))
    with pytest.raises(errors.BlufuncError):
        put()
    setting = bf.set_mesh(mesh)
    assert put() == bf.NamedSharding(mesh, bf.P("x"))
    setting.__exit__(None, None, None)


FLAGS = [  # JAX's flag and value, our flag and value
    ("jax_platforms", "cpu", "default_device", "cpu"),
    ("jax_platforms", "cuda,cpu", "default_device", "cuda"),
    ("jax_platform_name", "gpu", "default_device", "cuda"),
    ("jax_default_device", None, "default_device", ""),
    ("jax_default_matmul_precision", "tensorfloat32", "matmul_precision", "tf32"),
    ("jax_default_matmul_precision", None, "matmul_precision", "default"),
    ("jax_log_compiles", True, "debug", "retrace"),
    ("jax_log_compiles", False, "debug", ""),
    ("jax_enable_checks", True, "check", True),
    ("jax_num_cpu_devices", 4, "cpu_devices", 4),
    ("jax_enable_x64", False, "check", False),
    ("jax_traceback_filtering", "off", "check", False),
    ("jax_numpy_rank_promotion", "raise", "numpy_rank_promotion", "raise"),
    ("jax_numpy_dtype_promotion", "strict", "numpy_dtype_promotion", "strict"),
]


@pytest.mark.parametrize("name, value, ours, expected", FLAGS)
def test_flags_of_jax(name, value, ours, expected):
    c = Config()
    c.update(name, value)
    assert getattr(c, ours) == expected


@pytest.mark.parametrize(
    "name, value",
    [("jax_enable_x64", True), ("jax_numpy_rank_promotion", "no"), ("jax_threefry_partitionable", False)],
)
def test_values_of_flags_that_are_missing(name, value):
    with pytest.raises(errors.BlufuncError, match=name.removeprefix("jax_")):
        Config().update(name, value)


X, Y, I = bnp.ones((2, 3)), bnp.ones(3), bnp.arange(3)
RANKS = [
    lambda: X + Y,
    lambda: bnp.where(X > 0, X, Y),
    lambda: bf.jit(bnp.add)(X, Y),
    lambda: Y.at[:].add(0) - X,
]
DTYPES = [
    lambda: I + Y,
    lambda: I + 1.0,
    lambda: Y * True,
    lambda: bnp.concatenate([I, Y]),
    lambda: Y + Y.astype("bfloat16"),
    lambda: bnp.result_type(I, Y),
    lambda: bf.jit(bnp.multiply)(I, Y),
]


@pytest.mark.parametrize("call", RANKS)
def test_ranks_are_refused_or_warned_about(call):
    allowed = call()
    with bf.numpy_rank_promotion("raise"):
        with pytest.raises(ValueError, match=r"whose ranks differ\.[\s\S]*test_contexts"):
            call()
        assert (X + 1).shape == (X * bnp.float32(1)).shape == (X - Y[None]).shape == (2, 3)
    with bf.numpy_rank_promotion("warn"):
        for _ in range(2):  # each time, as warnings have their own filter
            with pytest.warns(UserWarning, match="whose ranks differ") as caught:
                np.testing.assert_array_equal(call(), allowed)
            assert caught[0].filename == __file__
    np.testing.assert_array_equal(call(), allowed)


@pytest.mark.parametrize("call", DTYPES)
def test_dtypes_are_refused(call):
    allowed = call()
    with bf.numpy_dtype_promotion("strict"):
        with pytest.raises(TypeError, match="no implicit promotion"):
            call()
        assert (I + 1).dtype == "int32" and (Y + 1).dtype == (Y * bnp.float32(2)).dtype == "float32"
        assert (1 + 1.0 * Y[0]).dtype == bnp.sin(I).dtype == bnp.mean(I).dtype == "float32"
    assert str(call()) == str(allowed)


def test_a_traced_function_is_traced_again_where_promotion_is_strict():
    f = bf.jit(lambda x, y: x + y)
    assert f(X, Y).shape == (2, 3) and f(I, Y).dtype == "float32"
    with bf.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="ranks differ"):
        f(X, Y)
    with bf.numpy_dtype_promotion("strict"), pytest.raises(TypeError, match="no implicit promotion"):
        f(I, Y)
    assert f(X, Y).shape == (2, 3) and f.trace_count == 2


def test_blocks_hold_for_their_thread():
    """Blocks that overlap in two threads: each sees its own value, and none is left."""
    entered, leave = threading.Event(), threading.Event()
    seen = {}

    def other():
        with bf.numpy_dtype_promotion("strict"), bf.debug_nans(True), bf.default_matmul_precision("tf32"):
            seen["inside"] = (config.numpy_dtype_promotion, config.guards, config.matmul_precision)
            entered.set()
            leave.wait(10)
            with pytest.raises(errors.DtypeError):
                bnp.ones(2, "int8") + bnp.ones(2, "int16")
            seen["still"] = config.guards

    thread = threading.Thread(target=other)
    with bf.default_matmul_precision("highest"):
        thread.start()
        entered.wait(10)
        assert (config.numpy_dtype_promotion, config.guards) == ("standard", False)
        assert config.matmul_precision == "highest"
        assert (bnp.ones(2, "int8") + bnp.ones(2, "int16")).dtype == "int16"
        assert np.isnan(bnp.zeros(2) / bnp.zeros(2)).all()
    leave.set()
    thread.join()
    assert seen == {"inside": ("strict", True, "tf32"), "still": True}
    assert (config.numpy_dtype_promotion, config.guards, config.matmul_precision) == (
        "standard",
        False,
        "default",
    )
    assert not config._shared and not config._own.values and not any(config._blocks.values())


def test_flags_of_the_process_are_seen_after_a_block():
    """Flags set in a block hold for the process, and the block for its thread."""
    with bf.debug_key_reuse(True):
        config.debug_key_reuse = False
        assert config.debug_key_reuse
        with bf.debug_key_reuse(False):
            assert not config.debug_key_reuse
        config.update("debug_infs", True)
        assert config.guards
    assert not config.debug_key_reuse
    config.debug_infs = False
    assert not config.guards


def test_blocks_reach_the_ranks_of_simulated_devices(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 2)
    mesh = bf.make_mesh((2,), ("x",))
    seen = []
    note = lambda v: seen.append(config.debug_infs) or v
    body = lambda v: bf.pure_callback(note, v, v)
    mapped = bf.shard_map(body, mesh=mesh, in_specs=bf.P("x"), out_specs=bf.P("x"))
    with bf.debug_infs(True):
        bf.jit(mapped)(bnp.ones(4))
    assert seen and all(seen)
