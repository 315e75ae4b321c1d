"""Rows that several loops read: staged by a block, kept by a cluster, or reread."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
from blufunc import nn
from blufunc.kernels.backends.cuda.device_model import HOPPER, Limits, limits_of
from blufunc.kernels.backends.cuda.render.source import function_of
from blufunc.kernels.backends.cuda.schedule.passes import schedule
from blufunc.kernels.backends.cuda.schedule.shared_rows import cluster_shape
from blufunc.kernels.pipeline import same_place
from tests.emulation.cuda_functions import (
    BF16,
    F32,
    F64,
    I32,
    SMALL_CASES,
    backward,
    cross_entropy,
    kernels,
    ranged,
)
from tests.emulation.loop_interpreter import run as interpret
from tests.kernels.kernel_arrays import agree, arrays_for, launch

# -- rows that are reread -------------------------------------------------------------------------------


@pytest.mark.parametrize("shared, threads", [(227 << 10, 1024), (163 << 10, 1024), (99 << 10, 512)])
def test_rows_are_copied_to_shared_memory_where_there_is_room(machine, shared, threads):
    """Rows of 132 kB: same results with and without staging, without bulk copies."""
    (kernel,) = kernels(*SMALL_CASES["cross-entropy of long rows with gradient"])
    limits = Limits(shared, cluster=1)
    made = schedule(kernel, (), limits)
    text = function_of(made)
    assert made.mapping.block == threads
    assert (
        ("vec_copy<float, 4, LONG>(logits_row" in text) == ("ptx_wait_copies(" in text) == (threads == 1024)
    )
    assert ("vec_ldcs<" in text) == (threads == 512) and "bulk" not in text
    got, want = arrays_for(kernel), arrays_for(kernel)
    interpret(kernel, want)
    launch(machine, machine.compile([made]), made, got)
    agree(kernel, got, want)


def _of_pieces(x):
    """Softmax over the last axis and the first."""
    return nn.softmax(x.transpose(1, 0, 2).reshape(x.shape[1], -1))


IN_BULK = {  # a function, its arguments, the number of pieces, and of vectors of the copy
    "softmax": (nn.softmax, ranged((3, 20000)), 8, 5000),
    "the most for two blocks": (nn.softmax, ranged((2, 28000)), 11, 7000),
    "loss": (bf.value_and_grad(cross_entropy), [((3, 40000), BF16), ((3,), I32)], 8, 5000),
    "shares": (nn.layer_norm, ranged((2, 33000), (33000,), (33000,)), 9, 9 * 480),
    "a last piece that some blocks have": (nn.softmax, ranged((2, 65540)), 9, 9 * 480),
}


@pytest.mark.second
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", IN_BULK)
def test_rows_are_copied_in_bulk(machine, name):
    """One thread copies a piece per vector of the other threads, with a barrier each."""
    function, shapes, pieces, slots = IN_BULK[name]
    (kernel,) = kernels(function, shapes)
    made = schedule(kernel)
    text = function_of(made)
    assert f"_came[{pieces}];" in text and "vec_copy" not in text and "ptx_wait_copies" not in text
    got, want = arrays_for(kernel), arrays_for(kernel)
    interpret(kernel, want)
    launch(machine, machine.compile([made]), made, got)
    agree(kernel, got, want)
    assert made.shared_bytes == 16 * slots


@pytest.mark.parametrize("in_bulk", [True, False])
def test_rows_that_lie_in_pieces_are_copied_vector_by_vector(machine, in_bulk):
    """Bulk copies require contiguous memory."""
    (kernel,) = kernels(_of_pieces, ranged((3, 2, 8000)) if not in_bulk else ranged((1, 2, 24000)))
    made = schedule(kernel)
    text = function_of(made)
    assert ("bulk_row<" in text) == in_bulk == ("vec_copy<" not in text)
    got, want = arrays_for(kernel), arrays_for(kernel)
    interpret(kernel, want)
    launch(machine, machine.compile([made]), made, got)
    agree(kernel, got, want)


@pytest.mark.parametrize("rows, writes", [(8192, "vec_stcs"), (128, "vec_store")])
def test_results_larger_than_the_cache_are_written_past_it(rows, writes):
    """Rows that are reread need L2 more."""
    text = function_of(schedule(_loss_with_gradient(rows, 50304, BF16), (), Limits(99 << 10, cluster=1)))
    assert f"{writes}<bf16, 8>(" in text and "vec_copy" not in text


@pytest.mark.parametrize("cluster", [8, 1])
def test_where_rows_are_copied_results_are_not_written_past_the_cache(cluster):
    text = function_of(schedule(_loss_with_gradient(8192, 50304, BF16), (), HOPPER._replace(cluster=cluster)))
    assert "vec_store<bf16, 8>(" in text and "vec_stcs" not in text


def _loss_with_gradient(rows, columns, dtype):
    function, _ = SMALL_CASES["cross-entropy with gradient"]
    (kernel,) = kernels(function, [((rows, columns), dtype), ((rows,), np.dtype("int32"))])
    return kernel


@pytest.mark.parametrize(
    "dtype, columns, most, shape",
    [
        (BF16, 50304, 8, (1, 640, 2)),
        (BF16, 50304, 1, (1, 1024, 2)),  # vector by vector
        (F32, 50304, 1, (1, 1024, 1)),
        (F32, 50304, 8, (2, 640, 2)),  # no copies are in flight while a lone block synchronizes
        (F32, 32768, 8, (2, 512, 3)),
        (BF16, 100000, 8, (2, 640, 2)),
        (F32, 60000, 1, (1, 512, 0)),
    ],
)
def test_as_many_rows_are_copied_at_a_time_as_there_is_room_for(dtype, columns, most, shape):
    made = schedule(_loss_with_gradient(8192, columns, dtype), (), HOPPER._replace(cluster=most)).mapping
    assert (made.cluster, made.block, made.resident) == shape


@pytest.mark.parametrize("aliased", [(), ("logits",)])
def test_the_logit_of_a_label_is_read_before_the_row(aliased):
    """By all threads: none waits for the label's lane, and no gradient overwrites it."""
    text = function_of(schedule(_loss_with_gradient(8192, 60000, F32), aliased))
    assert text.index("logits_at = ") < text.index("take_up(") < text.index("vec_store<float, 4>(")
    assert text.count("block_reduce<Sum") == 2, "the mass, and the loss of all rows"
    assert text.count(" == 0) ? ") == 1, "one comparison for a label"


@pytest.mark.parametrize("aliased, early", [((), True), (("logits",), True), (("scale",), False)])
def test_a_block_is_done_when_it_has_stored_what_the_last_one_reads(aliased, early):
    """Unless the last block's stores may overwrite data that others still read."""

    def function(logits, labels, scale):
        return bf.value_and_grad(lambda x: cross_entropy(x * scale, labels))(logits)

    (kernel,) = kernels(function, [((8, 60000), F32), ((8,), I32), ((), F32)])
    text = function_of(schedule(kernel, aliased))
    assert ("ptx_arrive(finished" in text) == ("came_last(" in text) == early
    assert ("last_block(finished" in text) == (not early)
    if early:
        assert text.index("ptx_arrive(") < text.rindex("vec_store<") < text.index("came_last(")


def test_exponentials_of_which_16_bits_are_kept_are_the_device_s_own():
    """But not of float32 sums of float32 values, nor for float32 results."""
    narrow, wide = (function_of(schedule(_loss_with_gradient(8, 60000, d))) for d in (BF16, F32))
    assert "take_up<true>(" in narrow and "* ptx_exp(" in narrow
    assert "take_up(" in wide and "* bf_exp(" in wide and "ptx_exp" not in wide
    rounded_at_once = function_of(schedule(kernels(*SMALL_CASES["softmax bf16"])[0]))
    assert "round_to<bf16>(ptx_exp(" in rounded_at_once and "bf_exp(" not in rounded_at_once


def test_what_is_copied_must_lie_where_vectors_can():
    """Rows that are not whole vectors are reread."""
    (kernel,) = kernels(nn.softmax, ranged((2, 33001)))
    text = function_of(schedule(kernel))
    assert "vec_copy" not in text and "__ldcs(" in text


def test_what_is_computed_of_a_copied_row_takes_its_place():
    """Scaled logits, then the gradient: later loops read neither operands nor scales."""
    function, shapes = SMALL_CASES["loss of scaled logits with gradient, scaled too"]
    text = function_of(schedule(kernels(function, shapes)[0]))
    assert text.count("vec_store<float, 8>(low_row + ") == 2
    assert [text.count(f"{name}_vec = vec_load<") for name in ("x", "columns")] == [1, 1]
    assert text.count("bf_exp(") == 1  # that of the gradient: the sum is online
    narrow = function_of(schedule(_loss_with_gradient(8, 60000, BF16)))
    assert "_row + " in narrow and not re.search(r"vec_store<\w+, 8>\(\w+_row", narrow)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limits", [HOPPER, Limits(99 << 10), Limits(24 << 10, cluster=1)])
@pytest.mark.parametrize("case", ["plain", "minus infinity", "infinity", "nan", "rising"])
def test_sums_under_a_narrow_maximum(machine, case, limits):
    """Online sums are accurate at the ends of the range too."""
    (kernel,) = kernels(*SMALL_CASES["softmax of long rows with a narrow top"])
    made = schedule(kernel, (), limits)
    assert "take_up<true>(" in function_of(made)
    got, want = arrays_for(kernel), arrays_for(kernel)
    x = np.random.default_rng(0).standard_normal(80000).astype(np.float32)
    lane = np.arange(40000)
    x[40000:] = {
        "plain": x[40000:],
        "minus infinity": -np.inf,
        "infinity": np.where(lane == 777, np.inf, x[40000:]),
        "nan": np.where(lane == 39999, np.nan, x[40000:]),
        "rising": np.linspace(-300, 300, 40000),
    }[case]
    for arrays in (got, want):
        arrays[kernel.buffers[0]][:] = x
    interpret(kernel, want)
    launch(machine, machine.compile([made]), made, got)
    agree(kernel, got, want)


# -- rows that a cluster keeps -------------------------------------------------------------------------


def _centred(x):
    """Totals of several kinds and types, including argmax and argmin."""
    top = x.max(1, keepdims=True)
    return x - top, x.argmin(1), (x > 3).any(1), (x * x).sum(1) + x.sum(1), x.astype(F64).sum(1)


_LONG = ranged((2, 33000))
CLUSTERED = {
    "softmax": (nn.softmax, _LONG),
    "log softmax": (nn.log_softmax, _LONG),
    "layer norm": (nn.layer_norm, [*_LONG, *ranged((33000,), (33000,))]),
    "totals": (_centred, _LONG),
    "loss": SMALL_CASES["cross-entropy of long rows with gradient"],
    "loss bf16": (bf.value_and_grad(cross_entropy), [((2, 66000), BF16), ((2,), I32)]),
    "loss of scaled logits": SMALL_CASES["loss of scaled logits with gradient, scaled too"],
}
"""Rows of 132 kB."""


CLUSTER_LIMITS = [((99, 8), 3), ((72, 4), 4), ((24, 8), 8), ((24, 4), 1)]
"""Shared memory in kilobytes, most blocks of a cluster, and its blocks."""


@pytest.fixture(scope="module")
def clustered(machine):
    """Of a name: kernel, places and schedules, results; all limits in one library."""

    @functools.cache
    def of(name):
        (kernel,) = kernels(*CLUSTERED[name])
        same = [p for p in same_place(kernel) if p[0].size == kernel.buffers[0].size][:1]
        found = {}
        for limits, _ in CLUSTER_LIMITS:
            for in_place in (False, True):
                pairs = same if in_place else []
                named = replace(kernel, name=f"{kernel.name}_{len(found)}")
                at = [into.name for _, into in pairs]
                found[limits, in_place] = pairs, schedule(named, at, Limits(limits[0] << 10, limits[1]))
        want = arrays_for(kernel)
        interpret(kernel, want)
        return kernel, found, want, machine.compile([made for _, made in found.values()])

    return of


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("limits, cluster", CLUSTER_LIMITS)
@pytest.mark.parametrize("name", CLUSTERED)
def test_rows_too_long_for_a_block_are_kept_by_a_cluster(machine, clustered, name, limits, cluster, in_place):
    """If a cluster has space; results are the same wherever the row is stored."""
    kernel, found, want, library = clustered(name)
    pairs, made = found[limits, in_place]
    got = arrays_for(kernel, pairs)
    launch(machine, library, made, got)
    agree(kernel, got, want)
    assert made.mapping.cluster == cluster
    assert made.mapping.blocks == cluster * kernel.points and made.shared_bytes < limits[0] << 10


@pytest.mark.parametrize(
    "width, limits, shape",
    [
        (28000, HOPPER, (1, 640, 2)),  # one block per row, if two rows fit
        (58000, HOPPER, (4, 480, 3)),  # as much of an SM's shared memory as possible
        (65536, HOPPER, (4, 512, 3)),
        (100000, HOPPER, (4, 640, 2)),  # in as few blocks as possible
        (128256, HOPPER, (5, 608, 2)),
        (262144, HOPPER, (8, 512, 1)),
        (400000, HOPPER, (8, 800, 1)),  # at most 16 vectors per thread
        (460000, HOPPER, None),
        (58000, Limits(163 << 10, cluster=1), None),
        (128256, Limits(99 << 10), (8, 512, 1)),
    ],
)
def test_the_shape_of_clusters(width, limits, shape):
    """Rows of float32, in vectors of 16 bytes."""
    assert cluster_shape(width // 4, 16, limits) == shape


def test_devices_without_clusters_reread():
    kernel = _loss_with_gradient(16, 128256, F32)
    found = {c: limits_of(c, 163 << 10).cluster for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))}
    assert found == {(8, 0): 1, (8, 9): 1, (9, 0): 8, (10, 0): 8, (12, 0): 8}
    old = function_of(schedule(kernel, (), limits_of((8, 0), 163 << 10)))
    new = function_of(schedule(kernel, (), limits_of((9, 0), 227 << 10)))
    assert "vec_ldcs<float, 4>(logits +" in old and "cluster" not in old
    assert "__cluster_dims__(5, 1, 1)" in new and "vec_ldcs" not in new
    assert new.count("cluster_under_top<0>") == 1, "the maximum and the sum go together"


@pytest.mark.parametrize(
    "function, shapes, held",
    [
        (nn.layer_norm, [(16384, 4096), (4096,), (4096,)], True),
        (backward(nn.layer_norm), [(16384, 4096), (4096,), (4096,), (16384, 4096)], True),
        (nn.layer_norm, [(1024, 4096), (4096,), (4096,)], False),  # all of it fits in L2
        (lambda x: x.sum(1), [(16384, 4096)], False),  # no writes compete for L2
        (nn.softmax, [(4096, 40000)], False),  # reread rows
    ],
)
def test_what_is_read_outlives_what_is_written_in_the_cache(function, shapes, held):
    kernel, *_ = kernels(function, ranged(*shapes))
    assert ("vec_ldg_held<float, 4>(" in function_of(schedule(kernel))) == held
