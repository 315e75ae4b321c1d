"""Fusion of small programs: their steps, and what keeps equations apart."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.kernels.fusion import fuse as fuse_module
from blufunc.kernels.fusion.fuse import Opaque, Region, fuse
from blufunc.kernels.fusion.iteration_space import reduction_pattern
from tests.emulation import fake_cuda


def ones(*shape, dtype=np.float32):
    return from_numpy(np.ones(shape, dtype))


X, ROW, COLUMN, TALL = ones(6, 8), ones(8), ones(6, 1), ones(80, 900)
INDEX, NUMBER = ones(6, dtype=np.int32), ones()


def fused(fun, *args):
    """The fusion of a function."""
    return fuse(simplify(bf.jit(fun).trace(*args).jaxpr))


def steps_of(fusion):
    """Each step as text: a region's operations, ``copy``, or ``!`` and the opaque one."""
    return [
        f"!{s.eqn.prim.name}" if isinstance(s, Opaque) else " ".join(e.prim.name for e in s.eqns) or "copy"
        for s in fusion.steps
    ]


PROGRAMS = {
    # arithmetic, and what only moves
    "elementwise": (lambda x: bnp.sin(x) * 2 + x, [X], ["sin mul add"]),
    "broadcasts": (lambda x, r, c: x * r + c, [X, ROW, COLUMN], ["mul add"]),
    "movement between": (lambda x: bnp.sin(x.T.reshape(4, 12)[::-1]), [X], ["sin"]),
    "moved after": (lambda x: bnp.sin(x).T * 2, [X], ["sin", "mul"]),
    "reshaped after": (lambda x: bnp.sin(x).reshape(48) * 2, [X], ["sin mul"]),
    "a view is returned": (lambda x: x.T[1:], [X], ["copy"]),
    "a reshape is returned": (lambda x: bnp.sin(x).reshape(48), [X], ["sin"]),
    "reshapes of rows are returned": (lambda x: (y := bnp.exp(x), (y / y.sum(1, keepdims=True)).reshape(2, 24),
                                                 y.sum(1).reshape(2, 3))[1:], [X], ["exp reduce_sum div"]),
    "a reshape of columns is returned": (lambda x: x.sum(0).reshape(2, 4), [X], ["reduce_sum", "copy"]),
    "both shapes are returned": (lambda x: (y := bnp.sin(x), y.reshape(48)), [X], ["sin"]),
    "a transpose there and back is returned": (lambda x: bnp.sin(x).T.reshape(8, 6).T, [X], ["sin"]),
    "a transpose is returned": (lambda x: bnp.sin(x).T, [X], ["copy"]),
    "a transpose of what else is returned": (lambda x: (y := bnp.sin(x), y.T), [X], ["sin", "copy"]),
    "a transpose of rows is returned": (lambda x: (x - x.max(1, keepdims=True)).T, [X], ["reduce_max", "copy"]),
    "copies of copies": (lambda x: bnp.flip(bnp.roll(bnp.pad(x, 1), 1, axis=1), 0), [X], ["copy"]),
    "copies of copies, of a region": (lambda x: bnp.pad(lax.concatenate([x.cumsum(1), x], 0), 1), [X],
                                      ["cumsum", "pad"]),
    "a copy that is read again": (lambda x: (y := bnp.pad(x, 1), bnp.pad(y, 1), y.sum())[1:], [X],
                                  ["pad reduce_sum", "pad"]),
    "one operand many times": (lambda x: bnp.concatenate([bnp.exp(x)] * 8), [X], ["exp", "concatenate"]),
    "half of it is returned": (lambda x: bnp.sin(x)[:, ::2], [X], ["copy"]),
    "unrelated": (lambda x, r: (x * 2, r * 3), [X, ROW], ["mul", "mul"]),
    "positions": (lambda x: x * lax.broadcasted_iota(np.float32, (6, 8), 1), [X], ["mul"]),
    # numbers
    "arithmetic on numbers": (lambda x, a: x * (a * 2 + 1), [X, NUMBER], ["mul"]),
    "a number is returned": (lambda a: a * 2, [NUMBER], ["copy"]),
    # reductions
    "over rows": (lambda x: x - x.max(1, keepdims=True), [X], ["reduce_max sub"]),
    "rows twice": (lambda x: (y := x - x.mean(1, keepdims=True)) / bnp.sqrt((y * y).sum(1, keepdims=True)), [X],
                   ["reduce_sum div sub mul reduce_sum sqrt div"]),
    "over columns, then": (lambda x: x - x.sum(0), [X], ["reduce_sum", "sub"]),
    "columns of what a row computes": (lambda x: (x - x.max(1, keepdims=True)).sum(0), [X],
                                       ["reduce_max sub reduce_sum"]),
    "everything, in one row": (lambda x: x * x.sum(), [X], ["reduce_sum mul"]),
    "everything, of many": (lambda x: x * x.sum(), [TALL], ["reduce_sum", "mul"]),
    "and arithmetic on it": (lambda x: bnp.sqrt((x * x).sum()) * 2, [TALL], ["mul reduce_sum"]),
    "the middle axis": (lambda x: bnp.exp(x).sum(1), [ones(3, 4, 5)], ["exp reduce_sum"]),
    "two axes apart": (lambda x: x.sum((0, 2)), [ones(3, 4, 5)], ["reduce_sum"]),
    "axes of size 1": (lambda x: x.sum(1) * 2, [COLUMN], ["mul"]),
    "positions of maxima": (lambda x: bnp.exp(x).argmax(1), [X], ["exp argmax"]),
    "positions along columns": (lambda x: x.argmax(0), [X], ["!argmax"]),
    # reads at other elements
    "one of each row": (lambda x, i: bnp.take_along_axis(x - x.max(1, keepdims=True), i[:, None], 1), [X, INDEX],
                        ["reduce_max sub add lt select gather"]),
    "one of what has no rows": (lambda x, i: bnp.take_along_axis(bnp.exp(x), i[:, None], 1), [X, INDEX],
                                ["exp", "add lt select gather"]),
    "a gather of rows": (lambda x, i: x[i] * 2, [X, INDEX], ["add lt select", "gather mul"]),
    "concatenated": (lambda x, y: bnp.concatenate([x, y]) * 2, [X, X], ["concatenate mul"]),
    "concatenated of computed": (lambda x: bnp.concatenate([bnp.sin(x), x]), [X], ["concatenate"]),
    "concatenated of what takes longer than a copy": (
        lambda x: bnp.concatenate([bnp.sin(bnp.sin(bnp.sin(bnp.sin(x)))), x]), [X], ["sin sin sin sin", "concatenate"]),
    "padded": (lambda x: bnp.pad(x, 1) + 1, [X], ["pad add"]),
    "a window that moves": (lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)) * 2, [X, ones(dtype=np.int32)],
                            ["dynamic_slice mul"]),
    # libraries
    "a number that is returned, and that a library reads": (
        lambda x: (y := x.sum() * 2, bnp.sort((y * 3).reshape(1))), [X], ["reduce_sum", "!sort"]),
    "a product": (lambda x, r: bnp.sin(x @ bnp.exp(r)), [X, ROW], ["exp", "!dot_general", "sin"]),
    "a product of a view": (lambda x: x @ x.T, [X], ["!dot_general"]),
    "a product of what is no view": (lambda x: x @ x.T[::-1].reshape(2, 24)[0].reshape(8, 3),
                                     [X], ["copy", "!dot_general"]),
    "nothing in it": (lambda x: x * 2, [ones(0, 3)], ["!mul"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps(name):
    fun, args, steps = PROGRAMS[name]
    assert steps_of(fused(fun, *args)) == steps


def test_a_search_is_one_kernel():
    """Each round gathers at indices of the last one; NaNs are counted first."""
    count, search = steps_of(fused(lambda a, v: bnp.searchsorted(a, v), ones(1000), ones(300)))
    assert count == "ne convert reduce_sum" and search.count("gather") == 11


def test_a_gather_from_what_a_kernel_computes_is_another_kernel():
    steps = fused(lambda x, i: bnp.sin(x)[i], ROW, INDEX).steps
    assert len(steps) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_values_of_a_search(monkeypatch, rng, device, side):
    a, v = np.sort(rng.integers(0, 50, 100)).astype(np.float32), rng.integers(-5, 55, 300).astype(np.float32)
    v[7] = np.nan
    if device == "cuda":
        fake_cuda.install(monkeypatch)
    else:
        monkeypatch.setattr(toolchain, "WORTH_CALLING", 0)
    given = bf.device_put((a, v), bf.devices(device)[0])
    got = bf.jit(lambda a, v: bnp.searchsorted(a, v, side=side))(*given)
    np.testing.assert_array_equal(np.asarray(got), np.searchsorted(a, v, side))


RETURNED = [name for name in PROGRAMS if "returned" in name or "cop" in name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", RETURNED)
def test_what_is_moved_on_its_way_out(monkeypatch, rng, device, name):
    """Values of programs whose results are views, on both compilers."""
    fun, args, _ = PROGRAMS[name]
    args = [rng.standard_normal(a.shape).astype(np.float32) for a in args]
    want = bf.tree.leaves(fun(*map(bnp.asarray, args)))
    if device == "cuda":
        fake_cuda.install(monkeypatch)
    else:
        monkeypatch.setattr(toolchain, "WORTH_CALLING", 0)
    got = bf.tree.leaves(bf.jit(fun)(*bf.device_put(args, bf.devices(device)[0])))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-6, atol=1e-6)


def test_roles():
    """Elements, rows and columns of the backward pass of a normalisation."""

    def backward(x, g):
        y = x - x.max(1, keepdims=True)
        return (g * y).sum(0), g - (g * y).sum(1, keepdims=True)

    (region,) = fused(backward, X, X).regions
    frame = region.frame
    assert (frame.size, frame.rows, frame.lanes, frame.outer) == (48, 6, 8, 1)
    assert sorted(region.roles.values()) == ["column", "element", "element", "element", "row", "row"]


def test_what_reads_one_large_array_reads_it_once():
    x = ones(300, 300)
    assert steps_of(fused(lambda x: (bnp.sin(x), x.sum(1), x.max(0)), x)) == ["sin reduce_sum reduce_max"]


def test_a_step_between_keeps_regions_apart():
    """An equation that waits for a matmul does not run before it."""
    fusion = fused(lambda x: (y := bnp.sin(x)) + y @ y.T @ y, X)
    assert steps_of(fusion) == ["sin", "!dot_general", "!dot_general", "add"]


@pytest.mark.parametrize("name, fun, why", [
    ("other elements", lambda x: bnp.sin(x).T * 2, "reads other elements"),
    ("other points", lambda x: bnp.sin(x)[:2] * 2, "points differ"),
    ("the end of a reduction", lambda x: bnp.sin(x) - x.sum(0), "result of a reduction"),
], ids=["moved", "fewer", "reduced"])  # fmt: skip
def test_why(name, fun, why):
    assert any(why in reason for *_, reason in fused(fun, X).apart), name


REPEATED = {  # reads a value before a sine is recomputed; the steps
    "nobody": (lambda y, x: y, ["!dot_general", "!dot_general", "cos sin mul"]),
    "a product": (lambda y, x: y @ x.T, ["!dot_general", "!dot_general", "cos", "!dot_general", "sin mul"]),
    "a view in a product": (
        lambda y, x: y.reshape(8, 6) @ x, ["!dot_general", "!dot_general", "cos", "!dot_general", "sin mul"]
    ),
    "a view, at the end": (lambda y, x: y.T, ["!dot_general", "!dot_general", "cos sin mul", "copy"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_what_may_wait_for_something_computed_again_joins_it(name):
    """Not values read before the recomputation, which is there to lower a peak."""
    read, steps = REPEATED[name]

    def program(x):
        y = bnp.cos(x @ x.T @ x)
        z = read(y, x)
        return z, y * bnp.sin(x)

    jaxpr = simplify(bf.jit(program).trace(X).jaxpr)
    (sine,) = (e for e in jaxpr.eqns if e.prim is lax.sin_p)
    assert steps_of(fuse(jaxpr, {sine: 1})) == steps


HELD = {  # what else is returned, and the last steps
    "nothing": (lambda a: (), ["cos reduce_sum", "sin mul"]),
    "what is read": (lambda a: a, ["cos reduce_sum sin mul"]),
    "a view of it": (lambda a: a.T, ["cos reduce_sum sin mul", "copy"]),
}


@pytest.mark.parametrize("name", HELD)
def test_what_would_keep_more_alive_than_it_writes_does_not_wait(name):
    """Sums of rows, of what is only read for them."""
    also, steps = HELD[name]

    def program(x):
        a = x @ x.T @ x
        return also(a), bnp.cos(a).sum(1, keepdims=True) * bnp.sin(x)

    jaxpr = simplify(bf.jit(program).trace(X).jaxpr)
    (sine,) = (e for e in jaxpr.eqns if e.prim is lax.sin_p)
    assert steps_of(fuse(jaxpr, {sine: 1})) == ["!dot_general", "!dot_general", *steps]


def test_what_comes_later_anyway_does_not_wait():
    """So it joins, whatever it reads."""

    def program(x):
        a, s = x @ x.T @ x, bnp.sin(x)
        return bnp.cos(a).sum(1, keepdims=True) * s

    jaxpr = simplify(bf.jit(program).trace(X).jaxpr)
    (sine,) = (e for e in jaxpr.eqns if e.prim is lax.sin_p)
    names = [e.prim.name for e in jaxpr.eqns]
    assert names.index("sin") < names.index("cos")
    assert steps_of(fuse(jaxpr, {sine: 1})) == ["!dot_general", "!dot_general", "sin cos reduce_sum mul"]


def test_numbers_that_took_long_to_compute_are_stored():
    """Others would repeat them for each kernel that reads them."""

    def program(x, a):
        for _ in range(40):
            a = bnp.sin(a) + 1
        return x * a, x[0] + a

    names = steps_of(fused(program, X, NUMBER))
    assert len(names) > 2 and names[-2:] == ["mul", "add"]


def test_kernels_have_no_more_parameters_than_allowed():
    xs = [ones(4, 5) for _ in range(3 * fuse_module.MOST_BUFFERS)]
    fusion = fused(lambda *xs: sum(x * (i + 1) for i, x in enumerate(xs)), *xs)
    assert len(fusion.regions) > 1
    for region in fusion.regions:
        assert len(region.inputs) <= fuse_module.MOST_BUFFERS + 1


def test_effects_keep_their_order():
    seen = []

    def program(x):
        for i in range(3):
            bf.debug.callback(lambda v, i=i: seen.append(i), x * i)
        return bnp.sin(x)

    opaque = [s for s in fused(program, X).steps if isinstance(s, Opaque)]
    assert [s.after for s in opaque] == [None, *opaque[:-1]]


def test_the_text_shows_shapes_and_lines():
    text = str(fused(lambda x: bnp.exp(x).sum(1) @ bnp.ones(6), X))
    assert "[6x8] exp reduce_sum  # test_fuse.py:" in text
    assert "dot_general" in text


def test_every_equation_is_somewhere_once():
    """Computed in one region, opaque, or virtual."""
    jaxpr = simplify(bf.jit(lambda x: (bnp.sin(x).T @ x, x.sum(0) * 2 - x[0])).trace(X).jaxpr)
    fusion = fuse(jaxpr)
    placed = [id(e) for s in fusion.steps for e in (s.eqns if isinstance(s, Region) else [s.eqn])]
    placed += [id(e) for e in fusion.virtual.values()]
    assert sorted(placed) == sorted(map(id, jaxpr.eqns))


@pytest.mark.parametrize("shape, axes, pattern", [
    ((2, 3, 4), (1,), [(2, False), (3, True), (4, False)]),
    ((2, 3, 4), (1, 2), [(2, False), (12, True)]),
    ((2, 1, 4), (0, 2), [(8, True)]),
    ((2, 1, 4), (1,), [(8, False)]),
    ((1, 1), (0,), []),
])  # fmt: skip
def test_reduction_pattern(shape, axes, pattern):
    assert reduction_pattern(shape, axes) == pattern
