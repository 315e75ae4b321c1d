"""CUDA kernels against the LoopIR interpreter, on the host and on a device."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

import blufunc.numpy as bnp
from benchmarks.harness.kernel_resources import resources
from blufunc import lax, nn
from blufunc.core.ops import elementwise as ew
from blufunc.kernels.backends.cuda.device_model import Limits, limits_of
from blufunc.kernels.backends.cuda.driver import nvrtc
from blufunc.kernels.backends.cuda.render.source import function_of, render, render_many
from blufunc.kernels.backends.cuda.schedule import scheduled_kernel
from blufunc.kernels.backends.cuda.schedule.kinds import group_key, group_limit
from blufunc.kernels.backends.cuda.schedule.online_reductions import OnlineSum, take_online_sums
from blufunc.kernels.backends.cuda.schedule.passes import schedule, schedule_group
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import ScheduledKernel
from blufunc.kernels.backends.cuda.schedule.vectorize import best_width
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.loopir.index import Range, of
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Reduce,
    Rows,
    Set,
    Store,
    Total,
    load,
    read,
)
from blufunc.kernels.loopir.verify import check_kernel
from blufunc.kernels.pipeline import same_place
from tests.emulation import cuda_functions
from tests.emulation.cuda_functions import (
    BF16,
    F32,
    F64,
    SMALL,
    adamw,
    backward,
    crowded,
    gelu_gradient,
    kernels,
    ranged,
)
from tests.emulation.cuda_machines import needs_nvrtc
from tests.emulation.cuda_scan_functions import LARGE_SCANS, SMALL_SCANS
from tests.emulation.loop_interpreter import run as interpret
from tests.kernels import differential, random_graphs
from tests.kernels.kernel_arrays import agree, arrays_for, launch
from tests.kernels.loop_kernels import CASES, op

SMALL_CASES = cuda_functions.SMALL_CASES | SMALL_SCANS
LARGE_CASES = cuda_functions.LARGE_CASES | LARGE_SCANS


# -- kernels written by hand -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases(machine):
    """All cases as one source."""
    found = {}
    for i, (name, make) in enumerate(CASES.items()):
        case = make()
        case.kernel = replace(case.kernel, name=f"{case.kernel.name}_{i}")
        found[name] = case, schedule(case.kernel)
    return found, machine.compile([w for _, w in found.values()])


@pytest.mark.second
@pytest.mark.sampled(24, "[host-")
@pytest.mark.parametrize("name", CASES)
def test_against_numpy(machine, cases, name):
    found, library = cases
    case, made = found[name]
    launch(machine, library, made, case.arrays)
    case.compare()


def _kept(width, dtype):
    """Softmax that keeps rows of any length, including rows of only minus infinity."""
    r, k = Range("r", 3), Range("k", width)
    x, y = Buffer("x", dtype, 3 * width), Buffer("y", dtype, 3 * width, written=True)
    top, total = Total("top", dtype, "max"), Total("total", dtype, "sum")
    kept, e, at = Keep("kept", dtype, k), Keep("e", dtype, k), of(r) * width + of(k)
    body = (
        Lanes(k, (Reduce(top, load(x, at)), Set(kept, load(x, at)))),
        Lanes(k, (Set(e, op(ew.exp_p, op(ew.sub_p, read(kept), read(top)))), Reduce(total, read(e)))),
        Lanes(k, (Store(y, at, op(ew.div_p, read(e), read(total))),)),
    )
    return Kernel("kept", (x, y), (r,), body)


def _sums_of_rows(width, rows):
    """Sums over the rows of a point, and of each row, too wide for a warp's registers."""
    g, j, k = Range("g", 2), Range("j", rows), Range("k", width)
    x, y = Buffer("x", F32, 2 * rows * width), Buffer("y", F32, 2 * width, written=True)
    sums = Buffer("sums", F32, 2 * rows, written=True)
    total, column = Total("total", F32, "sum"), Keep("column", F32, k, "max")
    row = of(g) * rows + of(j)
    value = load(x, row * width + of(k))
    body = (
        Rows(
            j,
            (Lanes(k, (Reduce(total, value), Accumulate(column, value))), Store(sums, row, read(total))),
            of(j),
            rows,
        ),
        Lanes(k, (Store(y, of(g) * width + of(k), read(column)),)),
    )
    return Kernel("sums", (x, y, sums), (g,), body)


BY_HAND = {
    "kept in registers of a block": (lambda: _kept(4096, F32), (512, 1, 1), 0),
    "kept in shared memory": (lambda: _kept(28000, F32), (1024, 1, 1), 112000),
    "too much to keep on the chip": (lambda: _kept(70000, F32), (1024, 1, 1), 0),
    "kept, f64": (lambda: _kept(1100, F64), (288, 1, 1), 0),
    "a block for each row": (lambda: _sums_of_rows(8192, 5), (512, 1, 1), 131072),
    "a warp for each row": (lambda: _sums_of_rows(260, 11), (32, 1, 8), 7280),
}


@pytest.mark.second
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_HAND)
def test_schedules(machine, name):
    """The thread mapping is the expected one, and results match the interpreter."""
    make, shape, shared = BY_HAND[name]
    kernel = make()
    made = schedule(kernel)
    assert (made.mapping.threads, made.mapping.points, made.mapping.sharing) == shape
    library = machine.compile([made])
    assert made.shared_bytes == shared
    got, want = arrays_for(kernel), arrays_for(kernel)
    interpret(kernel, want)
    launch(machine, library, made, got)
    agree(kernel, got, want)


# -- functions -----------------------------------------------------------------------------------------


def _lowered(machine, places):
    found = {}
    for i, (name, (function, shapes)) in enumerate(SMALL_CASES.items()):
        found[name] = []
        for n, k in enumerate(kernels(function, shapes, SMALL)):
            kernel = replace(k, name=f"{k.name}_{i}_{n}")
            pairs = places(kernel)
            found[name].append((kernel, pairs, schedule(kernel, [into.name for _, into in pairs])))
        assert found[name], name
    return found, machine.compile([w for some in found.values() for _, _, w in some])


@pytest.fixture(scope="module")
def lowered(machine):
    """Kernels of all functions, as one source."""
    return _lowered(machine, lambda kernel: [])


@pytest.fixture(scope="module")
def lowered_in_place(machine):
    """The same for launches whose outputs alias inputs wherever possible."""

    def places(kernel):
        found = {}
        for out, into in same_place(kernel):
            if out not in found and into not in found.values():
                found[out] = into
        return list(found.items())

    return _lowered(machine, places)


def _check(machine, lowered, name):
    found, library = lowered
    for kernel, pairs, made in found[name]:
        check_kernel(kernel)
        got, want = arrays_for(kernel, pairs), arrays_for(kernel)
        interpret(kernel, want)
        launch(machine, library, made, got)
        agree(kernel, got, want)


@pytest.mark.second
@pytest.mark.sampled(24, "[host-")
@pytest.mark.parametrize("name", SMALL_CASES)
def test_functions_against_the_interpreter(machine, lowered, name):
    _check(machine, lowered, name)


def test_threads_synchronize_before_a_result_overwrites_its_input():
    """A loop keeps its sum, which synchronizes, if a result aliases its input."""
    (kernel,) = kernels(*SMALL_CASES["a row's mass in the place of a number of it"])
    (read,) = [b.name for b in kernel.buffers if b.size == 3 and not b.written]
    online = lambda aliased: any(
        isinstance(s, OnlineSum) and s.mass is not None
        for s in take_online_sums(ScheduledKernel(kernel, frozenset(aliased))).kernel.statements()
    )
    assert online(()) and not online((read,))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_CASES)
def test_functions_in_place(machine, lowered_in_place, name):
    _check(machine, lowered_in_place, name)


@pytest.mark.second
@pytest.mark.parametrize(
    "target", [differential.SMALL, differential.LIKE_A_GPU, CUDA], ids=["small", "grouped", "cuda"]
)
def test_random_programs(machine, target):
    """All kernels of random programs match the interpreter."""
    found = []
    for seed in range(16):
        for kernel in random_graphs.from_seed(seed, target).schedule.kernels:
            kernel = replace(kernel, name=f"{kernel.name}_{len(found)}")
            found.append((kernel, schedule(kernel)))
    library = machine.compile([made for _, made in found])
    for kernel, made in found:
        got, want = arrays_for(kernel), arrays_for(kernel)
        interpret(kernel, want)
        launch(machine, library, made, got)
        agree(kernel, got, want)


@pytest.fixture
def begins_in_order(monkeypatch):
    """Kernels as of arrays too large for them to begin ahead."""
    monkeypatch.setattr(scheduled_kernel, "AHEAD_BYTES", -1)


def test_kernels_that_begin_ahead_wait_and_read_memory():
    (kernel,) = kernels(*SMALL_CASES["adamw"])
    text = function_of(schedule(kernel))
    assert "wait_for_previous_kernel" in text and "vec_ldg<" not in text
    (kernel,) = kernels(adamw, ranged(*[(1 << 20,)] * 4))
    text = function_of(schedule(kernel))
    assert "wait_for_previous_kernel" not in text and "vec_ldg<" in text


def test_what_may_be_aliased_is_not_read_through_the_read_only_cache(begins_in_order):
    (kernel,) = kernels(*SMALL_CASES["adamw"])
    name = kernel.buffers[0].name
    text = function_of(schedule(kernel, [name]))
    assert f"vec_load<float, 4>({name} +" in text
    assert text.count("vec_ldg<") == sum(not b.written for b in kernel.buffers) - 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limits", [Limits(cluster=1), Limits(72 << 10, cluster=4)], ids=["block", "cluster"])
@pytest.mark.parametrize(
    "case",
    ["plain", "one infinity", "a share minus infinity", "all minus infinity", "infinity", "nan", "rising"],
)
def test_online_sums_at_the_ends_of_the_range(machine, case, limits):
    """Rows too long to keep handle infinities too."""
    (kernel, *_) = kernels(*SMALL_CASES["softmax, too long to keep"])
    made, at = schedule(kernel, (), limits), np.arange(33000)
    library = machine.compile([made])
    assert made.mapping.cluster == limits.cluster
    assert "take_up(" in function_of(made)
    got, want = arrays_for(kernel), arrays_for(kernel)
    x = np.random.default_rng(0).standard_normal(want[kernel.buffers[0]].size).astype(np.float32)
    x[33000:] = {
        "plain": x[33000:],
        "one infinity": np.where(at == 777, -np.inf, x[33000:]),
        "a share minus infinity": np.where(at // 4 % 1664 < 416, -np.inf, x[33000:]),  # all memory of a block
        "all minus infinity": -np.inf,
        "infinity": np.where(at == 777, np.inf, x[33000:]),
        "nan": np.where(at == 32999, np.nan, x[33000:]),
        "rising": np.linspace(-300, 300, 33000),
    }[case]
    for arrays in (got, want):
        arrays[kernel.buffers[0]][:] = x
    interpret(kernel, want)
    launch(machine, library, made, got)
    agree(kernel, got, want)


@pytest.mark.parametrize(
    "shape, grid, launches",
    [
        ((16384, 768), [32, 12], 1),  # enough blocks to fill a device
        ((16384, 50304), [16, 786], 1),  # at most 1024 rows each
        ((300, 768), [5, 12], 1),  # and at least 64
        ((1 << 22, 8), [4096], 2),  # too much for one block to reduce
    ],
)
def test_sums_of_columns(shape, grid, launches):
    made = kernels(lambda x: x.sum(0), ranged(shape))
    assert [r.extent for r in made[0].grid] == grid
    assert len(made) == launches
    assert render(schedule(made[0])).counters == (grid[1] if launches == 1 else 0)


@pytest.mark.parametrize("rows, tiles, launches", [(16384, 12, 2), (1024, 48, 1)])
def test_tiles_of_columns_are_wider_where_much_is_stored_too(rows, tiles, launches):
    function, _ = SMALL_CASES["gelu backward"]
    made = kernels(function, ranged((rows, 3072), (3072,), (rows, 3072)))
    assert made[0].grid[-1].extent == tiles
    assert len(made) == launches


# -- moments -------------------------------------------------------------------------------------------


def _standardised(mean):
    """Centered rows divided by the root mean square, with ``mean`` for the mean."""

    def function(x):
        x = x - mean(x)
        return x * lax.rsqrt(mean(x * x) + 1e-6)

    return function


MOMENTS = {  # a function, its arguments, and synchronizations: with moments, and without
    "layer norm": (nn.layer_norm, ranged((9, 768), (768,), (768,)), 1, 0),
    "layer norm of a block": (nn.layer_norm, ranged((3, 4096), (4096,), (4096,)), 1, 0),
    "layer norm of 20 warps": (nn.layer_norm, ranged((3, 5120), (5120,), (5120,)), 1, 0),
    "layer norm bf16": (nn.layer_norm, ranged((9, 1024), (1024,), (1024,), dtype=BF16), 1, 0),
    "variance": (lambda x: x.var(-1), ranged((9, 256)), 1, 0),
    "deviation of a function": (lambda x: bnp.exp(x).std(-1, ddof=1), ranged((5, 1536)), 1, 0),
    "variance in f64": (lambda x: x.var(-1), ranged((9, 256), dtype=F64), 1, 0),
    "squares as products": (_standardised(lambda x: x.mean(-1, keepdims=True)), ranged((9, 256)), 1, 0),
    "rows that are copied": (nn.layer_norm, ranged((2, 24576), (24576,), (24576,)), 1, 0),
    "a lane more for some threads": (nn.layer_norm, ranged((9, 132), (132,), (132,)), 0, 2),
    "rms norm": (nn.rms_norm, ranged((9, 768), (768,)), 0, 1),
    "about half the mean": (_standardised(lambda x: 0.5 * x.mean(-1, keepdims=True)), ranged((9, 256)), 0, 2),
    "the mean is awaited": (
        lambda x: (x.var(-1), (x - x.mean(-1, keepdims=True)).max(-1)),
        ranged((9, 256)),
        0,
        3,
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_reduced_together(machine, name):
    """As accurate as two passes, even if the mean is much larger than the deviations."""
    function, shapes, moments, others = MOMENTS[name]
    *_, kernel = kernels(function, shapes)
    made = schedule(kernel)
    text = function_of(made)
    assert len(re.findall(r"(?:warp|block)_moments<", text)) == moments
    assert len(re.findall(r"(?:warp|block)_reduce<", text)) == others
    got, want = arrays_for(kernel), arrays_for(kernel)
    far = 8 if "exp" in text else 100  # float32 squares still have enough digits
    for arrays in (got, want):
        arrays[kernel.buffers[0]][...] = (
            np.random.default_rng(1).standard_normal(kernel.buffers[0].size) + far
        )
    interpret(kernel, want)
    launch(machine, machine.compile([made]), made, got)
    agree(kernel, got, want)


# -- rows ahead ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype, shared, depth",
    [
        ((16384, 768), F32, 227 << 10, 4),
        ((16384, 768), F32, 163 << 10, 2),
        ((16384, 768), F32, 99 << 10, 0),  # two rows per group do not fit
        ((16384, 768), BF16, 227 << 10, 4),
        ((16384, 512), F32, 227 << 10, 0),  # several blocks per SM
        ((132, 768), F32, 227 << 10, 0),  # one row each
        ((16384, 4096), F32, 227 << 10, 0),  # blocks that loop over rows
    ],
)
def test_rows_ahead_where_a_block_is_alone(shape, dtype, shared, depth):
    made = kernels(backward(nn.layer_norm), ranged(shape, shape[1:], shape[1:], shape, dtype=dtype))
    (kernel,) = [k for k in made if any(isinstance(s, Rows) for s in k.body)]
    scheduled = schedule(kernel, (), Limits(shared))
    text = function_of(scheduled)
    assert (scheduled.prefetch.depth if scheduled.prefetch else 0) == depth
    assert (f"ptx_wait_copies({depth - 1});" in text) == ("ALONE>(" in text) == (depth > 0)
    assert scheduled.shared_bytes <= shared - (4 << 10)


@pytest.mark.parametrize(
    "function, rows, lanes, threads, blocks, resident, depth",
    [
        (gelu_gradient, 16384, 3072, 192, 264, 2, 4),
        (gelu_gradient, 16384, 6144, 384, 264, 0, 0),  # registers do not suffice for two
        (crowded, 16384, 768, 96, 528, 4, 4),  # nor for a row per warp
        (crowded, 200, 768, 96, 200, 2, 0),  # one row each
        (crowded, 16384, 512, 32, 264, 0, 0),  # a row per warp, with many warps
    ],
)
def test_rows_ahead_of_blocks(function, rows, lanes, threads, blocks, resident, depth):
    """Blocks that loop over rows, several per SM."""
    full, one = (rows, lanes), (lanes,)
    shapes = [full, one, full] if function is gelu_gradient else [full, one, one, full, full]
    made = schedule(kernels(function, ranged(*shapes))[0])
    assert (made.mapping.threads, made.mapping.blocks) == (threads, blocks)
    assert made.mapping.resident == resident
    assert (made.prefetch.depth if made.prefetch else 0) == depth
    assert made.shared_bytes <= (227 << 10) // max(1, resident)


def test_rows_ahead_are_read_once(begins_in_order):
    """Only vectors read by the first loop alone; row-invariant values come before."""
    (kernel, *_) = kernels(*SMALL_CASES["layer norm backward, rows ahead"], SMALL)
    text = function_of(schedule(kernel))
    loop = text[text.index("for (int j = group") :]
    assert loop.count("vec_load<") == 2 and "vec_ldg<" not in loop
    assert text.index("vec_ldg<") < text.index("ptx_commit_copies")


# -- groups --------------------------------------------------------------------------------------------


def _updates(*sizes, function=adamw, dtype=F32):
    return [kernels(function, ranged(*[(n,)] * 4, dtype=dtype))[0] for n in sizes]


def test_groups(machine):
    some = _updates(8, 4096, 2052, 4, 2048)
    made = schedule_group(some, "update")
    library = machine.compile([made])
    got, want = [arrays_for(k) for k in some], [arrays_for(k) for k in some]
    for k, arrays in zip(some, want, strict=True):
        interpret(k, arrays)
    machine.launch(library, made, [a[b] for k, a in zip(some, got, strict=True) for b in k.buffers])
    for k, x, y in zip(some, got, want, strict=True):
        agree(k, x, y)


def test_what_may_be_a_group():
    a, b, odd = _updates(8, 4096, 9)
    assert group_key(a) == group_key(b) != group_key(odd)  # a misaligned one is read elementwise
    assert 148 < group_limit(a) < 1000
    (wide,) = _updates(8, dtype=F64)
    (other,) = _updates(8, function=lambda p, g, m, v: adamw(p, g, 0.5 * m, v))
    assert len({group_key(k) for k in (a, odd, wide, other)}) == 4
    (softmax,) = kernels(*SMALL_CASES["softmax, odd"])
    assert group_key(softmax) is None


# -- what the compiler makes of them -------------------------------------------------------------------


def _numbered(some):
    return [replace(k, name=f"{k.name}_{i}") for i, k in enumerate(some)]


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("capability, shared", [((8, 0), 163), ((9, 0), 227), ((10, 0), 227)])
def test_nothing_spills(capability, shared):
    """At practical and small sizes, keeps of rows stay in registers."""
    limits = limits_of(capability, shared << 10)
    some = [k for f, shapes in LARGE_CASES.values() for k in kernels(f, shapes)]
    some += [k for f, shapes in SMALL_CASES.values() for k in kernels(f, shapes, SMALL)]
    made = render_many([schedule(k, (), limits) for k in _numbered(some)])
    assert ("__cluster_dims__" in made[0].source) == (limits.cluster > 1)
    found = resources(nvrtc.build(made[0].source, "sm_{}{}".format(*capability)))
    assert set(found) == {k.entry for k in made}
    spilled = {n: r for n, r in found.items() if r.spill_loads or r.spill_stores or r.stack}
    assert not spilled
    for k in made:
        registers = -(-found[k.entry].registers // 8) * 8
        assert registers * k.block[0] <= 65536, k.entry
        assert found[k.entry].shared + k.shared_bytes <= limits.shared_bytes


@needs_nvrtc
def test_groups_compile():
    made = render(schedule_group(_updates(*range(4, 600, 4)), "update"))
    (found,) = resources(nvrtc.build(made.source, "sm_90")).values()
    assert not found.spill_loads and not found.stack
    assert made.segments == 149 and made.grid == (149, 1, 1)


@pytest.mark.parametrize(
    "name", ["softmax bf16", "layer norm backward", "gelu", "loops that end apart", "branches"]
)
def test_golden_functions(golden, name):
    texts = [function_of(schedule(k)) for k in kernels(*SMALL_CASES[name], SMALL)]
    golden(f"cuda_{name.replace(' ', '_')}", "\n".join(texts))


def test_names_of_cuda_are_left_to_it():
    x, y = Buffer("threadIdx", F32, 64), Buffer("vec", F32, 64, written=True)
    i = Range("block", 64)
    text = function_of(schedule(Kernel("exp", (x, y), (i,), (Store(y, of(i), load(x, of(i))),))))
    assert "exp_kernel(const float *threadIdx_, float *vec_)" in text


def _copy(extent, source=F32, target=F32, offset=0, stride=None):
    """A copy of rows, within the limits of a stride and an offset."""
    r, i = Range("r", 3), Range("i", extent)
    stride = stride or extent
    x = Buffer("x", source, 3 * stride + offset)
    y = Buffer("y", target, 3 * extent, written=True)
    value = load(x, of(r) * stride + of(i) + offset)
    value = value if source == target else op(ew.convert_p, value, dtype=target)
    return Kernel("copy", (x, y), (r, i), (Store(y, of(r) * extent + of(i), value),))


def _taps(number, step, dtype, extent=64):
    """Sums of neighboring elements of rows, of windows that are ``step`` apart."""
    r, i = Range("r", 512), Range("i", extent)
    x = Buffer("x", dtype, 512 * 2 * step * extent)
    y = Buffer("y", dtype, 512 * extent, written=True)
    loads = [load(x, of(r) * (2 * step * extent) + of(i) * step + k) for k in range(number)]
    total = functools.reduce(lambda a, b: op(ew.add_p, a, b), loads)
    return Kernel("taps", (x, y), (r, i), (Store(y, of(r) * extent + of(i), total),))


WIDTHS = {
    "f32": (_copy(64), 4),
    "f64": (_copy(64, F64, F64), 2),
    "bf16": (_copy(64, BF16, BF16), 8),
    "bytes": (_copy(64, np.dtype(bool), np.dtype(bool)), 16),
    "bf16 to f32": (_copy(64, BF16, F32), 4),
    "f64 to bytes": (_copy(64, F64, np.dtype("int8")), 4),
    "even": (_copy(6), 2),
    "odd": (_copy(7), 1),
    "only the stores": (_copy(64, offset=1), 4),
    "from the second vector on": (_copy(64, offset=4), 4),
    "rows apart": (_copy(64, stride=66), 2),
    "every other, by few accesses": (_taps(2, 2, BF16), 8),
    "every other, by many": (_taps(9, 2, BF16), 2),
    "every other, by many, in float32": (_taps(9, 2, F32), 1),
    "far apart": (_taps(9, 64, BF16), 8),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_widths_of_vectors(name):
    kernel, width = WIDTHS[name]
    assert best_width(kernel, kernel.grid[-1]) == width
