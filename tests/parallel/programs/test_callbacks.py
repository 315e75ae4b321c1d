"""Callbacks on a mesh: calls as on one device, results on all devices."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import NamedSharding, P, ShapeDtypeStruct, lax, make_mesh

X = np.arange(1, 6, dtype=np.float32)  # uneven on four devices
F32 = ShapeDtypeStruct((), "float32")


def placed(spec=P("x")):
    return bf.device_put(X, NamedSharding(make_mesh((2, 2), ("x", "y")), spec))


def counter():
    """A callback that returns how often it was called, and what it was called with."""
    seen = []

    def call(v):
        seen.append(np.asarray(v))
        return np.float32(len(seen))

    return call, seen


def once(call, x):
    return x * bf.io_callback(call, F32, x, ordered=True)


def in_a_scan(call, x):
    step = lambda total, row: (total + bf.io_callback(call, F32, row, ordered=True), total)
    return lax.scan(step, 0.0, x)[1]


def in_a_branch(call, x):
    return x + lax.cond(x.sum() > 0, lambda: bf.io_callback(call, F32, x), lambda: 0.0)


@pytest.mark.parametrize("program", [once, in_a_scan, in_a_branch])
@pytest.mark.parametrize("how", [bf.jit, lambda f: f], ids=["jit", "eager"])
def test_an_io_callback_acts_once_and_all_devices_get_its_result(eight, program, how):
    call, seen = counter()
    expected = np.asarray(program(call, bnp.asarray(X)))
    calls = [*seen]
    seen.clear()
    whole = NamedSharding(make_mesh((2, 2), ("x", "y")), P())
    got = bf.reshard(how(lambda x: program(call, x))(placed()), whole)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected)
    assert len(seen) == len(calls)
    for a, b in zip(seen, calls, strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_of_several_dtypes(eight):
    types = [ShapeDtypeStruct((2,), d) for d in ("bool", "int32", "bfloat16", "complex64")]
    values = [np.array([1, 0]), np.array([-3, 4]), np.array([0.5, -2]), np.array([1 + 2j, -1j])]
    give = lambda v: [x.astype(t.dtype) for x, t in zip(values, types, strict=True)]
    got = bf.jit(lambda x: bf.io_callback(give, types, x))(placed())
    for x, v, t in zip(got, values, types, strict=True):
        assert x.dtype == t.dtype
        np.testing.assert_array_equal(np.asarray(x), v.astype(t.dtype))


def test_a_report_is_made_once_of_the_whole_value(eight, capsys):
    bf.jit(lambda x: bf.debug.print("x = {}", x))(placed())
    assert capsys.readouterr().out == "x = [1. 2. 3. 4. 5.]\n"


def test_what_is_exchanged_for_a_callback_is_because_of_it(eight):
    table = bf.collectives(
        lambda x: bf.io_callback(lambda v: v, ShapeDtypeStruct((5,), "float32"), x), placed()
    )
    assert [(r.operation, r.because) for r in table] == [
        ("all_gather", "io_callback"),
        ("all_reduce", "io_callback"),
    ]
    assert not bf.collectives(lambda x: bf.debug.print("{}", x), placed(P()))
