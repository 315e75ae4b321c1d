"""Flags for a block or a function, and JAX's names of flags."""

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
    "default_device": (lambda: bf.default_device(bf.devices("cpu")[0]), "default_device", "cpu:0"),
    "no default_device": (lambda: bf.default_device(None), "default_device", ""),
    "gpu": (lambda: bf.default_device("gpu"), "default_device", "cuda"),
    "float32": (lambda: bf.default_matmul_precision("float32"), "matmul_precision", "highest"),
    "tensorfloat32": (lambda: bf.default_matmul_precision("tensorfloat32"), "matmul_precision", "tf32"),
    "float32_tc": (lambda: bf.default_matmul_precision("float32_tc"), "matmul_precision", "float32_tc"),
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
    ("jax_numpy_rank_promotion", "allow", "check", False),
]


@pytest.mark.parametrize("name, value, ours, expected", FLAGS)
def test_flags_of_jax(name, value, ours, expected):
    c = Config()
    c.update(name, value)
    assert getattr(c, ours) == expected


@pytest.mark.parametrize(
    "name, value",
    [("jax_enable_x64", True), ("jax_numpy_rank_promotion", "raise"), ("jax_threefry_partitionable", False)],
)
def test_values_of_flags_that_are_missing(name, value):
    with pytest.raises(errors.BlufuncError, match=name):
        Config().update(name, value)
