"""Reductions over lanes, as CUDA C++: per thread, then across threads.

Kernels, stage 6, functions of a ``CudaWriter`` for ``kernel.py``. In: a loop over lanes with totals. Out: lines of
CUDA. Threads of a warp combine by shuffles, warps through shared memory, and blocks of a cluster through distributed
shared memory, always in rank order, so results are deterministic. Two totals of one kind are reduced together. So are
a maximum with the sum of exponentials below it, and a sum with the squares about its mean
(``schedule/online_reductions.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blufunc.kernels.backends.cuda.device_model import WARP
from blufunc.kernels.backends.cuda.render.lane_scans import REDUCERS
from blufunc.kernels.backends.cuda.render.writer import CudaWriter
from blufunc.kernels.backends.cuda.schedule.online_reductions import OnlineSum, Spread, sums_of_spreads
from blufunc.kernels.backends.cuda.schedule.scheduled_kernel import Vectors
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import accumulator, is_arg, reducing, start_of, update
from blufunc.kernels.codegen.scalar_ops import bare, grouped
from blufunc.kernels.loopir.ir import Lanes, Reduce, Total


def declare_totals(w: CudaWriter, s: Lanes, cut: Vectors) -> None:
    """Declare the totals of a loop over lanes."""
    for total in (*_totals(s), *_masses(s).values()):
        _declare(w, total)
    for r in s.body:
        if isinstance(r, Spread):
            _declare_own_mean(w, r, cut)


def reduce_totals(w: CudaWriter, s: Lanes, cut: Vectors) -> None:
    """Reduce the totals of a loop across its threads; every thread gets the results."""
    masses, moments = _masses(s), sums_of_spreads(w.kernel)
    moments |= {spread: spread for spread in moments.values()}
    owns = {top: w.fresh(f"{w.named[top]}_own") for top in masses}
    for top, own in owns.items():
        w.line(f"const {scalar_ops.register_type(top.dtype)} {own} = {w.named[top]};")
    _reduce_threads(w, [t for t in _totals(s) if t not in moments], masses)
    for r in s.body:
        if isinstance(r, Spread):
            _reduce_moments(w, r, cut)
    for top, mass in masses.items():
        w.line(f"{w.named[mass]} = under_top({w.named[mass]}, {owns[top]}, {w.named[top]});")
    _reduce_threads(w, list(masses.values()), masses.values())
    if _in_cluster(w):
        for top, mass in masses.items():
            found = _received(w, w.named[top], f"vec<{scalar_ops.register_type(top.dtype)}, 2>")
            names = f"{w.named[top]}, {w.named[mass]}"
            w.line(f"cluster_under_top<{w.cluster_reductions - 1}>({names}, {found}, met);")


def accumulate(w: CudaWriter, s: Reduce) -> None:
    """Accumulate the lane's value into a total."""
    name, value = w.named[s.total], w.value(s.value)
    kind = scalar_ops.register_type(accumulator(s.total.dtype))
    if isinstance(s, OnlineSum):
        _accumulate_online(w, s, value)
    elif isinstance(s, Spread):
        deviation = w.temporary()
        w.line(f"const {kind} {deviation} = {grouped(value)} - {w.own_means[s.total]};")
        w.line(f"{name} += {deviation} * {deviation};")
    elif is_arg(s.total):
        assert s.position is not None
        here = f"Arg<{kind}, {w.index_type}>{{{bare(value)}, {w.index(s.position)}}}"
        w.line(f"{name} = {REDUCERS[s.total.op]}::combine({name}, {here});")
    else:
        text = reducing(s.total.op, accumulator(s.total.dtype), name, value, s.value.dtype)
        w.line(update(name, bare(text)))


def _declare(w: CudaWriter, total: Total) -> None:
    name, kind = w.name(total, total.name), scalar_ops.register_type(accumulator(total.dtype))
    if is_arg(total):
        w.line(f"Arg<{kind}, {w.index_type}> {name} = {{{kind}(0), -1}};")
    else:
        w.line(f"{kind} {name} = {start_of(total.op, total.dtype)};")


def _in_cluster(w: CudaWriter) -> bool:
    """True if a group's threads span several blocks."""
    return w.mapping.cluster > 1 and not w.finishing


def _received(w: CudaWriter, name: str, kind: str) -> str:
    """Memory for messages between blocks of a cluster; waits until all have started."""
    if not w.cluster_reductions:
        w.line("ptx_cluster_wait();")
    w.cluster_reductions += 1
    found = w.fresh(f"{name}_found")
    w.line(f"__shared__ Sent<{kind}> {found}[{w.mapping.cluster}];")
    return found


def _reduce_threads(w: CudaWriter, totals: Sequence[Total], of_block: Collection[Total] = ()) -> None:
    """All-reduce totals over the group; those ``of_block`` only within each block."""
    kinds: dict[tuple[str, str, bool], list[Total]] = {}
    for total in totals:
        kind = scalar_ops.register_type(accumulator(total.dtype))
        kind = f"Arg<{kind}, {w.index_type}>" if is_arg(total) else kind
        across = _in_cluster(w) and total not in of_block
        kinds.setdefault((REDUCERS[total.op], kind, across), []).append(total)
    for (op, kind, across), some in kinds.items():
        names = [w.named[t] for t in some]
        if w.threads > WARP:
            for first in range(0, len(names), 2):
                _block_reduce(w, op, kind, names[first : first + 2], across)
        elif w.threads > 1:
            for name in names:
                w.line(f"{name} = warp_reduce<{op}, {w.threads}>({name});")
    for total in totals:
        if scalar_ops.is_small_float(total.dtype) and not is_arg(total):
            name = w.named[total]
            w.line(f"{name} = round_to<{scalar_ops.storage_type(total.dtype)}>({name});")


def _block_reduce(w: CudaWriter, op: str, kind: str, names: Sequence[str], across: bool) -> None:
    """One reduction of one or two totals, in a block or ``across`` a cluster."""
    memory, mine = w.fresh(f"{names[0]}_shared"), names[0]
    threads = w.mapping.block if w.mapping.cluster > 1 else w.threads
    if len(names) > 1:
        mine, op, kind = w.fresh(f"{names[0]}_both"), f"Each<{op}>", f"vec<{kind}, 2>"
    w.line(f"__shared__ {kind} {memory}[{threads // WARP}];")
    if len(names) > 1:
        w.line(f"{kind} {mine} = {{{{{', '.join(names)}}}}};")
    if across:
        found = _received(w, names[0], kind)
        text = f"cluster_reduce<{op}, {threads}, {w.cluster_reductions - 1}>({mine}, {memory}, {found}, met)"
    else:
        text = f"block_reduce<{op}, {threads}, {'true' if w.repeated else 'false'}>({mine}, {memory})"
    w.line(f"{mine} = {text};")
    for i, name in enumerate(names if len(names) > 1 else ()):
        w.line(f"{name} = {mine}.x[{i}];")


def _declare_own_mean(w: CudaWriter, s: Spread, cut: Vectors) -> None:
    """Declare the mean of this thread's values."""
    assert s.sum is not None
    own = w.own_means[s.total] = w.fresh(f"{w.named[s.sum]}_own")
    part = scalar_ops.literal(s.sum.dtype.type(1 / (cut.steps(w.threads) * cut.width)), s.sum.dtype)
    w.line(f"const {scalar_ops.register_type(s.sum.dtype)} {own} = {w.named[s.sum]} * {part};")


def _reduce_moments(w: CudaWriter, s: Spread, cut: Vectors) -> None:
    """Reduce a sum and its spread together; every thread gets the results."""
    assert s.sum is not None
    names, n = f"{w.named[s.sum]}, {w.named[s.total]}", cut.steps(w.threads) * cut.width
    if w.threads <= WARP:
        w.line(f"warp_moments<{n}, {w.threads}>({names});")
        return
    memory = w.fresh(f"{w.named[s.sum]}_shared")
    w.line(f"__shared__ vec<{scalar_ops.register_type(s.sum.dtype)}, 2> {memory}[{w.threads // WARP}];")
    w.line(f"block_moments<{n}, {w.threads}>({names}, {memory});")


def _accumulate_online(w: CudaWriter, s: OnlineSum, value: str) -> None:
    """Buffer the values of a vector, which are accumulated together."""
    assert s.mass is not None
    take_up = "take_up<true>" if s.is_narrow else "take_up"
    kind, both = scalar_ops.register_type(s.value.dtype), f"{w.named[s.total]}, {w.named[s.mass]}"
    values = w.fresh(f"{w.named[s.total]}_of")
    if w.inner is None or w.inner.element is None:
        w.line(f"const {kind} {values}[1] = {{{bare(value)}}};")
        w.line(f"{take_up}({both}, {values});")
        return
    w.scopes[-2].lines.append(f"{kind} {values}[{w.inner.width}];")
    w.line(f"{values}[{w.variable(w.inner.element)}] = {bare(value)};")
    w.after.append(f"{take_up}({both}, {values});")


def _totals(s: Lanes) -> list[Total]:
    """Totals of a loop, except the sums of its ``OnlineSum``s."""
    return list(dict.fromkeys(r.total for r in s.body if isinstance(r, Reduce)))


def _masses(s: Lanes) -> dict[Total, Total]:
    """Maxima of a loop's ``OnlineSum``s, and the sums below them."""
    return {r.total: r.mass for r in s.body if isinstance(r, OnlineSum) and r.mass is not None}
