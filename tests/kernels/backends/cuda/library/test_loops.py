"""Loops in one kernel: which scans have one, and what it computes."""

import ctypes
import dataclasses
import functools
import re

import ml_dtypes
import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax, nn, random
from blufunc.core.arrays.errstate import ignoring_fp_errors
from blufunc.kernels.backends.cuda.device_model import SHARED_BYTES
from blufunc.kernels.backends.cuda.driver import driver, nvrtc
from blufunc.kernels.backends.cuda.library import mma
from blufunc.kernels.backends.cuda.library.loops import op, source, tiling
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.codegen import source_files
from blufunc.kernels.schedule import OpaqueStep
from tests.emulation.cuda_machines import BLOCK, Host, needs_nvrtc
from tests.emulation.emulated_mma import _PARTS as ON_HOST
from tests.kernels import random_loops
from tests.kernels.differential import differences

HOST = bf.devices("cpu")[0]
T, B, D, H = 5, 6, 8, 24
DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}


# -- cells -------------------------------------------------------------------------------------------


def lstm(w, u, b, xs, h, c, reverse=False):
    def cell(s, x):
        h, c = s
        i, f, g, o = bnp.split(x @ w + h @ u + b, 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * bnp.tanh(g)
        h = nn.sigmoid(o) * bnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (h, c), xs, reverse=reverse)


def gru(w, u, b, xs, h):
    def cell(h, x):
        a, p = x @ w + b, h @ u
        ar, az, an = bnp.split(a, 3, axis=-1)
        pr, pz, pn = bnp.split(p, 3, axis=-1)
        r, z = nn.sigmoid(ar + pr), nn.sigmoid(az + pz)
        h = (1 - z) * bnp.tanh(an + r * pn) + z * h
        return h, h

    return lax.scan(cell, h, xs)


def gru_of_two(w, u, v, xs, h):
    """The first form of a GRU: its second matmul reads what the first one computes."""

    def cell(h, x):
        a, n = x @ w, h.shape[-1]
        r, z = bnp.split(nn.sigmoid(a[..., : 2 * n] + h @ u), 2, axis=-1)
        h = (1 - z) * bnp.tanh(a[..., 2 * n :] + (r * h) @ v) + z * h
        return h, (h, r)

    return lax.scan(cell, h, xs)


def rnn(u, xs, h):
    def cell(s, x):
        h, n = s
        h = bnp.tanh(x + h @ u)
        return (h, n + 1), (h, n)

    return lax.scan(cell, (h, bnp.int32(3)), xs)


def two_layers(u1, w2, u2, xs, h1, h2):
    def cell(s, x):
        h1, h2 = s
        h1 = bnp.tanh(x + h1 @ u1)
        h2 = bnp.tanh(h1 @ w2 + h2 @ u2)
        return (h1, h2), h2

    return lax.scan(cell, (h1, h2), xs)


def of_two_widths(u, v, xs, h, c):
    """Two matmuls at once, of different numbers of terms."""

    def cell(s, x):
        h, c = s
        h, c = bnp.tanh(x + bnp.concatenate([h, c], axis=-1) @ u), bnp.sin(c + h @ v)
        return (h, c), c

    return lax.scan(cell, (h, c), xs)


def both_ways(w, u, b, xs, h, c):
    return lstm(w, u, b, xs, h, c)[1] + lstm(w, u, b, xs, h, c, reverse=True)[1]


def of_vectors(u, xs, h):
    def cell(h, x):
        h = bnp.tanh(x + h @ u)
        return h, (h, x)

    return lax.scan(cell, h, xs)


def joined(w, xs, h):
    """One matmul of inputs and state."""

    def cell(h, x):
        h = bnp.tanh(bnp.concatenate([x, h], axis=-1) @ w)
        return h, h

    return lax.scan(cell, h, xs)


def gradient(fun):
    def loss(*args):
        leaves = bf.tree.leaves(fun(*args))
        return sum((x.astype("float32") ** 2).sum() for x in leaves if bnp.issubdtype(x.dtype, bnp.floating))

    return lambda *args: bf.grad(loss, argnums=tuple(range(len(args))))(*args)


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return [(rng.normal(size=s) / np.sqrt(s[-2] if len(s) > 1 else 4)).astype(kind) for s in shapes]


CELLS = {  # a function, and the shapes of its arguments for sizes T, B, D, H
    "LSTM": (lstm, lambda t, b, d, h: [(d, 4 * h), (h, 4 * h), (4 * h,), (t, b, d), (b, h), (b, h)]),
    "LSTM from the end": (
        lambda *a: lstm(*a, reverse=True),
        lambda t, b, d, h: [(d, 4 * h), (h, 4 * h), (4 * h,), (t, b, d), (b, h), (b, h)],
    ),
    "both ways": (both_ways, lambda t, b, d, h: [(d, 4 * h), (h, 4 * h), (4 * h,), (t, b, d), (b, h), (b, h)]),
    "GRU": (gru, lambda t, b, d, h: [(d, 3 * h), (h, 3 * h), (3 * h,), (t, b, d), (b, h)]),
    "GRU of two": (gru_of_two, lambda t, b, d, h: [(d, 3 * h), (h, 2 * h), (h, h), (t, b, d), (b, h)]),
    "two widths": (
        of_two_widths,
        lambda t, b, d, h: [(2 * h, h), (h, h), (t, b, h), (b, h), (b, h)],
    ),
    "RNN": (rnn, lambda t, b, d, h: [(h, h), (t, b, h), (b, h)]),
    "two layers": (two_layers, lambda t, b, d, h: [(h, h), (h, h), (h, h), (t, b, h), (b, h), (b, h)]),
    "vectors": (of_vectors, lambda t, b, d, h: [(h, h), (t, h), (h,)]),
    "joined": (joined, lambda t, b, d, h: [(2 * h, h), (t, b, h), (b, h)]),
    "a batch of batches": (
        lambda u, xs, h: bf.vmap(rnn, (None, 0, 0))(u, xs, h),
        lambda t, b, d, h: [(h, h), (3, t, b, h), (3, b, h)],
    ),
}  # fmt: skip


def case(name, dtype, sizes=(T, B, D, H)):
    fun, shapes = CELLS[name.removesuffix(" gradient")]
    return gradient(fun) if name.endswith(" gradient") else fun, arrays(dtype, *shapes(*sizes))


def loops(fun, args):
    """The scans of a program, as its schedule has them."""
    jaxpr = bf.jit(fun).trace(*args).jaxpr
    steps = Draft(jaxpr, (False,) * len(jaxpr.invars), "sm_90a").schedule.steps
    return [s.eqn for s in steps if isinstance(s, OpaqueStep) and s.eqn.prim.name == "scan"]


NAMES = [*CELLS, *(f"{name} gradient" for name in CELLS)]


# -- which scans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_one_kernel(name):
    for eqn in loops(*case(name, "bfloat16")):
        found = op.loop_of(eqn)
        assert not isinstance(found, str), found
        assert f"is one kernel of {found[1].grid} block" in op.remark(eqn)


def other_loop(body, *more, length=8, dtype="bfloat16"):
    u, h, xs = arrays(dtype, (H, H), (B, H), (length, B, H))
    fun = lambda u, h, xs, *more: lax.scan(lambda h, x: (body(u, h, x, *more), h), h, xs)
    return fun, [u, h, xs, *more]


OTHERS = {
    "a sum of a row": (other_loop(lambda u, h, x: nn.softmax(x + h @ u, axis=-1)), "other rows or columns|another row"),
    "other columns": (other_loop(lambda u, h, x: bnp.tanh(x + h @ u)[:, ::-1]), "another row or column"),
    "other rows": (other_loop(lambda u, h, x: bnp.tanh(x + h[::-1] + h @ u)), "another row or column"),
    "weights that change": (other_loop(lambda u, h, x: bnp.tanh(h @ (u * x[:1, :H].sum()))), "weights|constant"),
    "a state times itself": (other_loop(lambda u, h, x: (h @ x.T) @ h), "constant in the loop"),
    "a sort": (other_loop(lambda u, h, x: bnp.sort(h @ u, axis=-1)), "is not pointwise"),
    "three steps": (other_loop(lambda u, h, x: bnp.tanh(x + h @ u), length=3), "it has 3 steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_run_step_by_step(name):
    (fun, args), reason = OTHERS[name]
    (eqn,) = loops(fun, args)
    assert not op.LoopKernel().matches(eqn)
    assert re.search(reason, op.loop_of(eqn)), op.loop_of(eqn)
    assert "runs step by step" in op.remark(eqn)


def test_reductions_without_matmuls_are_no_cells():
    fun = lambda xs: lax.scan(lambda s, x: (s + x.sum(), s), bnp.float32(0), xs)
    (eqn,) = loops(fun, arrays("float32", (8, 3)))
    assert op.loop_of(eqn) is None
    assert op.remark(eqn) is None


def test_what_does_not_fit_on_chip():
    u, h, xs = (bf.ShapeDtypeStruct(s, "bfloat16") for s in ((8192, 8192), (8, 8192), (100, 8, 8192)))
    (eqn,) = loops(lambda u, h, xs: lax.scan(lambda h, x: (bnp.tanh(x + h @ u), h), h, xs), (u, h, xs))
    assert "do not fit on chip" in op.loop_of(eqn)


def test_weights_are_spread_over_all_blocks():
    shapes = CELLS["LSTM"][1](512, 64, 512, 512)
    fun = gradient(lambda *a: lstm(*a))
    found = [op.loop_of(e)[1] for e in loops(fun, [bf.ShapeDtypeStruct(s, "bfloat16") for s in shapes])]
    assert [(t.rows, t.units, t.grid, t.elements) for t in found] == [(16, 16, 128, 1)] * 2
    assert all(p.kept for t in found for p in t.products)


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (lambda: case("GRU", "bfloat16", (8, B, D, H)), "is one kernel of 1 block"),
        (lambda: OTHERS["a sort"][0], "runs step by step: sort is not pointwise"),
    ],
)
def test_plans_say_which_loops_are_one_kernel(made, note):
    fun, args = made()
    jaxpr = bf.jit(fun).trace(*args).jaxpr
    (found,) = Draft(jaxpr, (False,) * len(jaxpr.invars), "sm_90a").schedule.notes
    assert re.fullmatch(rf"scan at test_loops.py:\d+ \(.*\) {note}", found)


# -- steps of programs -------------------------------------------------------------------------------


def on_fake(fun, args, cuda, **options):
    """The results of two calls on the fake device, and on the host."""
    want = [np.asarray(x) for x in bf.tree.leaves(fun(*map(bnp.asarray, args)))]
    jitted = bf.jit(lambda *a: fun(*a), **options)
    for _ in range(4):  # the later ones are replays
        given = [bf.device_put(a, cuda) for a in args]
        found = [np.asarray(x) for x in bf.tree.leaves(jitted(*given))]
        for x, y in zip(found, want, strict=True):
            a, b = x.astype(np.float64), y.astype(np.float64)
            assert np.linalg.norm(a - b) <= 1e-5 * max(1.0, np.linalg.norm(b))


def nested(u, xs, h):
    """A loop whose body is a loop, and work that is no cell's."""

    def outer(h, _):
        return bnp.sort(rnn(u, xs, h)[0][0], axis=-1), h.sum()

    return lax.scan(outer, h, None, length=3)


def recomputed(w, u, b, xs, h, c):
    return gradient(bf.checkpoint(lstm))(w, u, b, xs, h, c)


PROGRAMS = {
    "gradient": (lambda: case("LSTM gradient", "float32")),
    "both ways": (lambda: case("both ways gradient", "float32")),
    "nested": (lambda: (nested, case("RNN", "float32")[1])),
    "a batch": (lambda: case("a batch of batches gradient", "float32")),
    "recomputed": (lambda: (recomputed, case("LSTM", "float32")[1])),
    "a counter": (lambda: case("RNN", "float32")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, fake, cuda):
    fun, args = PROGRAMS[name]()
    on_fake(fun, args, cuda)
    assert fake.loops


def test_donated_states(fake, cuda):
    fun, args = case("RNN", "float32")
    on_fake(fun, args, cuda, donate_argnums=(1, 2))
    assert fake.loops


@pytest.mark.parametrize("changes", [{"capability": (7, 0)}, {"sm_count": 2}, {"shared_per_block": 1 << 13}])
def test_devices_without_room_run_step_by_step(changes, fake, cuda, monkeypatch):
    properties = driver.properties(0)
    monkeypatch.setattr(driver, "properties", lambda index=0: dataclasses.replace(properties, **changes))
    fun, args = case("RNN", "float32", (T, 40, D, H))
    on_fake(fun, args, cuda)
    assert not fake.loops


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_cells_on_a_device(name, dtype):
    """Several blocks of the same rows, and sizes that fill no tile.

    Long recurrences amplify roundings, the host's as well: both are compared with float32.
    """
    device = bf.devices("cuda")[0]
    for sizes in ((T, B, D, H), (9, 37, D, 72), (33, 64, D, 256)):
        fun, args = case(name, dtype, sizes)
        assert all(op.LoopKernel().matches(e) for e in loops(fun, args))
        on_host = [bf.device_put(a, HOST) for a in args]
        want = bf.tree.leaves(bf.jit(lambda *a, fun=fun: fun(*a))(*on_host))
        exact = bf.tree.leaves(fun(*(a.astype("float32") for a in on_host)))
        jitted = bf.jit(lambda *a, fun=fun: fun(*a))
        given = [bf.device_put(a, device) for a in args]
        first = [np.asarray(x) for x in bf.tree.leaves(jitted(*given))]
        for _ in range(3):  # a graph from the second call on
            others = [np.asarray(x) for x in bf.tree.leaves(jitted(*given))]
            assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, others, strict=True))
        for x, y, z in zip(first, want, exact, strict=True):
            a, b, c = (np.asarray(v).astype(np.float64) for v in (x, y, z))
            own = 1.5 * np.linalg.norm(b - c)
            assert np.linalg.norm(a - c) <= own + 2 * TOLERANCE[dtype] * max(np.linalg.norm(c), 1e-6)


# -- the source --------------------------------------------------------------------------------------


def shapes_of(name, sizes, dtype):
    fun, shapes = CELLS[name.removesuffix(" gradient")]
    args = [bf.ShapeDtypeStruct(s, dtype) for s in shapes(*sizes)]
    return gradient(fun) if name.endswith(" gradient") else fun, args


SIZES = [(512, 64, 512, 512), (64, 256, 8, 512), (64, 1, 8, 512), (64, 1024, 8, 128), (9, 37, 8, 72)]


@pytest.mark.second
@needs_nvrtc
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["LSTM gradient", "GRU of two gradient", "two layers", "RNN", "joined"])
def test_kernels_compile_and_do_not_spill(name, sizes, dtype):
    for eqn in loops(*shapes_of(name, sizes, dtype)):
        found = op.loop_of(eqn)
        if isinstance(found, str):
            assert "on chip" in found or "estimated" in found
            continue
        (used,) = resources(nvrtc.build(source.complete(*found), "sm_90a")).values()
        assert not used.spill_loads and not used.stack
        assert used.shared + found[1].shared_bytes <= SHARED_BYTES


def test_golden_loop(golden):
    (eqn,) = loops(*case("LSTM", "bfloat16", (8, 20, 8, 24)))
    text = source.source(*op.loop_of(eqn))
    golden("cuda_loop", text[text.index('extern "C" __global__') :])


# -- what they compute -------------------------------------------------------------------------------

STAND_INS = """
struct alignas(16) Words { unsigned x, y, z, w; };
static Words read_words(const void *p) { return *(const Words *)p; }
static void add_release(unsigned *counter) { ++*counter; }
static unsigned read_acquire(const unsigned *counter) {
  wait(WAITS_FOR_CLUSTER);  // other blocks take turns
  return *counter;
}
"""
PACKED = 'extern "C" void run(void **p, void *, void *, void *) {{ {entry}({arguments}); }}\n'
SHARED = 1 << 18


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("loops"))


def emulated(host, eqn, tiles, values):
    """Results of a loop kernel on the host, where warps and blocks take turns.

    They do so in two orders, which find different missing barriers.
    """
    first, second = (_emulated(host, eqn, tiles, values, backward) for backward in (False, True))
    assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(first, second, strict=True))
    return first


def _emulated(host, eqn, tiles, values, backward):
    cell, _ = op.loop_of(eqn)
    dtype_name, text = str(cell.dtype), source.source(cell, tiles)
    own = source_files.parts(source.FILE)["instructions"]
    assert (own in text) == bool(cell.products)
    dtype_name = dtype_name if cell.products else "float32"
    stand_ins = ON_HOST[dtype_name if dtype_name != "float32" else "bfloat16"]
    if dtype_name != "float16":
        stand_ins = source_files.parts(mma.MMA)["unpack bf16"] + stand_ins
    if dtype_name != "float32":
        text = text.replace(mma.instructions(dtype_name), "")
    text = stand_ins + STAND_INS + text.replace(own, "")
    text = text.replace("extern __shared__ __align__(1024) unsigned char shared_memory[];", "")
    before = ON_HOST["instructions"].replace(
        "alignas(1024) static unsigned char shared_memory",
        "alignas(1024) __shared__ unsigned char shared_memory",
    )
    results = [np.full(v.aval.shape, 77).astype(v.aval.dtype) for v in eqn.outvars]
    scratch = np.full(tiles.left_starts[-1], 0xFF, np.uint8)
    scratch[: tiles.counter_bytes] = 0
    given = [*(np.ascontiguousarray(v) for v in values), *results, scratch]
    names = [re.sub(r"(__restrict__ )?\w+$", "", p) for p in source._Source(cell, tiles).parameters()]
    arguments = ", ".join(f"({t})p[{i}]" for i, t in enumerate(names))
    text += PACKED.format(entry=source.ENTRY, arguments=arguments)
    library = host.compile(text, source_files.declared(SHARED=SHARED) + BLOCK + before)
    pointers = (ctypes.c_void_p * len(given))(*[a.ctypes.data for a in given])
    library.begin(0)
    ctypes.c_bool.in_dll(library, "backward").value = backward
    together = tiles.blocks if tiles.waits else 1
    assert library.launch(library.run, tiles.grid, together, tiling.THREADS, pointers, None, None, None)
    return results


def agree(given, expected, dtype):
    for x, y in zip(given, expected, strict=True):
        a, b = (np.asarray(v).astype(np.float64) for v in (x, y))
        assert np.linalg.norm(a - b) <= TOLERANCE[dtype] * max(np.linalg.norm(b), 1e-6)


def runs(host, name, dtype, sizes, units, rows=16, **changes):
    """Run each scan of a program both ways, on the same random operands."""
    fun, args = case(name, dtype, sizes)
    for eqn in loops(fun, args):
        found = op.loop_of(eqn)
        assert isinstance(found, tuple), found
        tiles = dataclasses.replace(tiling.tiling_with(found[0], rows, units), **changes)
        rng = np.random.default_rng(1)
        values = [
            (rng.normal(size=a.aval.shape) * 0.5).astype(a.aval.dtype)
            if a.aval.ndim
            else np.asarray(3, a.aval.dtype)
            for a in eqn.invars
        ]
        given = emulated(host, eqn, tiles, values)
        reference = functools.partial(eqn.prim.bind, **eqn.params)
        expected = ignoring_fp_errors(reference, *map(bnp.asarray, values))
        agree(given, expected, dtype)


@pytest.mark.second
@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_one_block_of_the_same_rows(name, dtype, host):
    runs(host, name, dtype, (T, B, D, H), 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["LSTM gradient", "GRU of two gradient", "two layers", "RNN", "vectors gradient"]
)
def test_blocks_that_wait_for_each_other(name, dtype, host):
    runs(host, name, dtype, (T, 19, D, 36), 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["LSTM gradient", "GRU of two gradient", "RNN"])
def test_elements_whose_scalars_are_not_held(name, dtype, host):
    runs(host, name, dtype, (T, 37, D, 36), 16, rows=32, held=False)


def returns(rewards, values, after):
    """Discounted sums, from the end."""

    def step(s, x):
        advantage, following = s
        reward, value = x
        advantage = reward + 0.99 * following - value + 0.94 * advantage
        return (advantage, value), advantage

    return lax.scan(step, (after, after), (rewards, values), reverse=True)


def recurrence(a, b, h, scale):
    """A linear recurrence of rows that have a scale each, and its steps."""

    def step(s, x):
        h, n = s
        a, b = x
        h = a * h + b[:, None] * scale
        return (h, n + 1), (h[:, None], n)

    return lax.scan(step, (h, bnp.int32(0)), (a, b))


def mapped(xs):
    return lax.map(lambda x: bnp.sin(x) * 2, xs)


POINTWISE = {
    "returns": (returns, [(21, 7), (21, 7), (7,)]),
    "returns of many": (returns, [(5, 3, 300), (5, 3, 300), (3, 300)]),
    "recurrence": (recurrence, [(9, 11, 40), (9, 11), (11, 40), (40,)]),
    "map": (mapped, [(6, 13)]),
    "numbers": (lambda xs: lax.scan(lambda s, x: (s * x + 1, s), bnp.float32(1), xs), [(9,)]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_loops(name, dtype, host):
    fun, shapes = POINTWISE[name]
    args = arrays(dtype, *shapes)
    (eqn,) = loops(fun, args)
    cell, tiles = op.loop_of(eqn)
    assert not cell.products
    assert not tiles.waits
    rng = np.random.default_rng(1)
    values = [np.asarray(rng.normal(size=a.aval.shape), a.aval.dtype) for a in eqn.invars]
    expected = ignoring_fp_errors(functools.partial(eqn.prim.bind, **eqn.params), *map(bnp.asarray, values))
    agree(emulated(host, eqn, tiles, values), expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_loops_on_a_device(name):
    fun, shapes = POINTWISE[name]
    args = arrays("float32", *shapes)
    want = bf.tree.leaves(fun(*map(bnp.asarray, args)))
    given = [bf.device_put(a, bf.devices("cuda")[0]) for a in args]
    agree(bf.tree.leaves(bf.jit(lambda *a: fun(*a))(*given)), want, "float32")


@needs_nvrtc
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_loops_compile(name):
    fun, shapes = POINTWISE[name]
    (eqn,) = loops(fun, arrays("float32", *shapes))
    (used,) = resources(nvrtc.build(source.complete(*op.loop_of(eqn)), "sm_80")).values()
    assert not used.spill_loads and not used.stack


def masked(u, xs, h, lengths):
    """Sequences of different lengths keep their last states."""

    def cell(s, x):
        h, t = s
        h = bnp.where((t < lengths)[:, None], bnp.tanh(x + h @ u), h)
        return (h, t + 1), h

    return lax.scan(cell, (h, bnp.int32(0)), xs)


def mixed(u, xs, h, c):
    """A state in float32, multiplied in bfloat16."""

    def cell(s, x):
        h, c = s
        c = bnp.tanh(x + (h @ u).astype("float32")) + 0.5 * c
        return (bnp.sin(c).astype("bfloat16"), c), c

    return lax.scan(cell, (h, c), xs)


def dropout(u, xs, h, key):
    def cell(s, x):
        h, key = s
        key, own = random.split(key)
        h = bnp.where(random.bernoulli(own, 0.8, h.shape), bnp.tanh(x + h @ u), 0)
        return (h, key), h

    return lax.scan(cell, (h, key), xs)[1]


def test_masks_dtypes_and_random_numbers(host):
    u, xs, h = arrays("bfloat16", (H, H), (T, B, H), (B, H))
    wide = [a.astype(np.float32) for a in (xs, h)]
    lengths = np.array([1, 5, 0, 3, 2, 4], np.int32)
    for fun, args, order in (
        (masked, (u, xs, h, lengths), (u, lengths, h, np.int32(0), xs)),
        (mixed, (u, wide[0], h, wide[1]), (u, h, wide[1], wide[0])),
    ):
        (eqn,) = loops(fun, args)
        cell, _ = op.loop_of(eqn)
        shapes = [a.aval.shape for a in eqn.invars]
        values = sorted(order, key=lambda v: shapes.index(np.shape(v)))
        assert [np.shape(v) for v in values] == shapes
        expected = ignoring_fp_errors(
            functools.partial(eqn.prim.bind, **eqn.params), *map(bnp.asarray, values)
        )
        agree(emulated(host, eqn, tiling.tiling_with(cell, 16, 8), values), expected, "bfloat16")
    (eqn,) = loops(dropout, (u, xs, h, random.key(3)))
    assert op.LoopKernel().matches(eqn)


def bits(xs, b):
    """Integers that constants mask."""
    return lax.scan(lambda b, x: ((3 * b - x) & 15 | 2, b & 6), b, xs)


def test_constant_masks_of_integers(host):
    b, xs = (np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((7, (7,)), (63, (9, 7))))
    (eqn,) = loops(bits, (xs, b))
    want = bf.tree.leaves(bits(*map(bnp.asarray, (xs, b))))
    for x, y in zip(emulated(host, eqn, op.loop_of(eqn)[1], [b, xs]), want, strict=True):
        np.testing.assert_array_equal(x, np.asarray(y))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_pointwise_loops_of_random_programs(seed, host):
    """Their sources, against the definition of ``scan``."""
    program, args = random_loops.Program(seed), random_loops.inputs(seed)
    rng = np.random.default_rng(seed)
    for eqn in loops(program, [bnp.asarray(x, x.dtype) for x in args]):
        found = op.loop_of(eqn)
        if not isinstance(found, tuple) or found[0].products:
            continue
        values = [np.asarray(rng.integers(0, 16, a.aval.shape)).astype(a.aval.dtype) for a in eqn.invars]
        want = ignoring_fp_errors(
            functools.partial(eqn.prim.bind, **eqn.params), *(bnp.asarray(v, v.dtype) for v in values)
        )
        got = emulated(host, eqn, found[1], values)
        assert not differences(got, [np.asarray(x) for x in want], exact=False)
