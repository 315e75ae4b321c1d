"""Steps that are no kernels of ours, on a CUDA device: products, libraries, users' kernels, control flow, the host.

Kernels, stages 6 and 8. In: an ``OpaqueStep`` of an executor. Out: its ``Work``. Which of the ways serves a primitive
is decided in ``work``, from what the primitive is; ``TABLE`` of ``backends/cuda/library/cupy_ops`` has those that
libraries do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from blufunc.config import config
from blufunc.core.arrays.errstate import openly, quietly
from blufunc.core.ir import source
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr
from blufunc.core.ops.barrier import optimization_barrier_p
from blufunc.core.ops.windows import GatherScatterMode
from blufunc.core.primitives.effects import eqn_calls_back
from blufunc.core.primitives.override import is_replaced
from blufunc.kernels.backends.cuda.device_model import COLLECTIVE_SMS
from blufunc.kernels.backends.cuda.driver import driver, modules
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.executor import Executor, Operand, Work
from blufunc.kernels.backends.cuda.library import collectives, cupy_ops, pointwise_gemm, softmax_gemm
from blufunc.kernels.backends.cuda.library import scatter as cuda_scatter
from blufunc.kernels.backends.cuda.library.attention import op as cuda_attention_step
from blufunc.kernels.backends.cuda.library.attention.backward_source import ROWS_OF_SUM
from blufunc.kernels.backends.cuda.library.matmul import Product
from blufunc.kernels.backends.cuda.library.tile_gemm import ROWS
from blufunc.kernels.backends.numpy.program import interpret
from blufunc.kernels.ops.gemm import PRODUCTS
from blufunc.kernels.ops.pointwise_gemm import dot_pointwise_p
from blufunc.kernels.rewrites.packed_outputs import packed_p
from blufunc.kernels.schedule import OpaqueStep
from blufunc.kernels.user_kernel import CudaSource

Function = Callable[[list[DeviceBuffer]], Sequence[DeviceBuffer]]


class Body(Protocol):
    """A program as a step of another one runs it.

    Attributes:
      captured: whether a graph can have it.
    """

    captured: bool

    def __call__(self, buffers: list[DeviceBuffer]) -> Sequence[DeviceBuffer]:
        """The results."""

    def own(self, aval: ShapedArray, label: str) -> DeviceBuffer:
        """Memory for a value."""


class Compile(Protocol):
    """How bodies become programs."""

    def __call__(self, jaxpr: Jaxpr, donated: tuple[bool, ...] = ()) -> Body:
        """The program of a body, which may write over the arguments that are donated: by default over none."""


def planned(eqn: Eqn) -> bool:
    """Whether an equation's results are written into planned memory."""
    if collectives.is_collective(eqn):
        return True
    by_us = (
        eqn.prim in (*PRODUCTS, dot_pointwise_p)
        or hasattr(eqn.prim, "cuda_source")
        or cuda_attention_step.is_attention(eqn)
        or softmax_gemm.is_softmax(eqn)
    )
    return by_us or cuda_scatter.rows_of(eqn) is not None


def scratch_bytes(eqn: Eqn, arch: str) -> int:
    """The memory that a step of an equation works in on an architecture, if its results are planned."""
    if cuda_attention_step.is_attention(eqn):
        return cuda_attention_step.scratch_bytes(eqn, arch)
    return softmax_gemm.scratch_bytes(eqn) if softmax_gemm.is_softmax(eqn) else 0


def rows_of_sums(eqn: Eqn) -> int:
    """The rows of each partial column sum that the kernel of an equation can write as well; 0: none."""
    if eqn.prim is packed_p and eqn.outvars[0].aval.dtype.itemsize == 2:
        return ROWS_OF_SUM
    return ROWS if eqn.prim is dot_pointwise_p else 0


def texts(step: OpaqueStep, arch: str) -> list[modules.Text]:
    """The sources that ``work`` will ask to be compiled on a device of an architecture, and their names; those of
    bodies are not among them.
    """
    eqn = step.eqn
    if is_replaced(eqn.prim, "impl"):
        return []
    if hasattr(eqn.prim, "cuda_source"):
        found = _source_of(eqn)
        return [] if 0 in found.grid else [(found.text, found.entry)]
    if cuda_attention_step.is_attention(eqn):
        return cuda_attention_step.texts(eqn, arch)
    if softmax_gemm.is_softmax(eqn):
        return [softmax_gemm.text(step)]
    if eqn.prim is dot_pointwise_p:
        return [pointwise_gemm.text(step, arch)]
    if step.planned and (rows := cuda_scatter.rows_of(eqn)) is not None:
        x, indices, _ = (a.aval for a in eqn.invars)
        return [cuda_scatter.text(rows[0], x.dtype, indices.dtype, rows[1], _clips(eqn))]
    return []


def work(executor: Executor, step: OpaqueStep, compile: Compile) -> Work:
    """A step, ready to run.

    Args:
      compile: makes a function of buffers out of the body of a loop, branch or call.
    """
    eqn = step.eqn
    pairs = zip(eqn.invars, step.operands, strict=True)
    operands = [Operand(executor, atom, given) for atom, given in pairs]
    if is_replaced(eqn.prim, "impl"):
        return _as_replaced(executor, step, operands)
    if eqn.prim is optimization_barrier_p:
        return Work(lambda executor: _pass_on(executor, step, operands), eqn.prim.name, step)
    if collectives.is_collective(eqn):
        return collectives.work(executor, step, operands)
    if hasattr(eqn.prim, "cuda_source"):
        return _user_kernel(executor, step, operands)
    if cuda_attention_step.is_attention(eqn):
        return cuda_attention_step.work(executor, step, operands)
    if softmax_gemm.is_softmax(eqn):
        return softmax_gemm.work(executor, step, operands)
    if eqn.prim is dot_pointwise_p:
        return pointwise_gemm.work(executor, step, operands)
    if step.planned and cuda_scatter.rows_of(eqn) is not None:
        return _row_scatter(executor, step, operands)
    function, captured = _function_of(eqn, executor.device, compile)

    def run(executor: Executor) -> None:
        given = [o.buffer(executor) for o in operands]
        for value, result in zip(step.results, function(given), strict=True):
            if value is not None:
                executor.put(value, _apart(executor, result, given))

    if eqn.prim in PRODUCTS:
        product = Product.of(executor, step, operands, run)
        if product is not None:
            if step.beside is not None and config.cuda_graphs and config.nccl_graphs:
                product.leave(COLLECTIVE_SMS)
            return Work(product.run, eqn.prim.name, step, anywhere=lambda: product.alone)
    return Work(run, eqn.prim.name, step, captured=captured)


def _as_replaced(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> Work:
    """An operation whose definition the user replaced: that is a function of NumPy arrays, which the host runs."""
    eqn = step.eqn
    outs = [v.aval for v in eqn.outvars]
    function = _on_host(eqn, _implementation(eqn), executor.device, outs, f"{eqn.prim.name}, replaced")

    def run(executor: Executor) -> None:
        results = function([o.buffer(executor) for o in operands])
        for value, result in zip(step.results, results, strict=True):
            if value is not None:
                executor.put(value, result)

    return Work(run, eqn.prim.name, step, captured=False)


def _apart(executor: Executor, result: DeviceBuffer, given: Sequence[DeviceBuffer]) -> DeviceBuffer:
    """A result with memory of its own: the plan may give that of operands to something else."""
    shared = result.nbytes and any(result.shares(x) for x in given)
    return executor.copied(result) if shared else result


def _pass_on(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> None:
    """Make what cannot simply be another name for an operand: a number, or a view."""
    for value, operand in zip(step.results, operands, strict=True):
        if value is not None and value not in executor.made.aliases:
            x = operand.buffer(executor)
            executor.put(value, _apart(executor, x, [operand.base(executor)]))


def _user_kernel(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> Work:
    eqn = step.eqn
    text = _source_of(eqn)
    if 0 in text.grid:
        return Work(lambda executor: None, text.entry, step)
    outs = list(zip(eqn.outvars, step.results, strict=True))
    unused = [None if r is not None else executor.own(v.aval, "a result that nobody wants") for v, r in outs]
    places = [None if r is None else executor.roots.place(r) for _, r in outs]
    loaded = modules.load_source(text, executor.device)
    launch, addresses = loaded.prepare([*[0] * len(operands), *[b.ptr if b else 0 for b in unused]])
    executor.follow(addresses, [*[None] * len(operands), *places])

    def run(executor: Executor) -> None:
        given = [o.buffer(executor) for o in operands]
        for i, x in enumerate(given):
            addresses[i] = x.ptr
        launch(executor.stream)

    executor.keep(unused)
    return Work(run, text.entry, step, anywhere=lambda: all(o.in_place for o in operands))


def _source_of(eqn: Eqn) -> CudaSource:
    """What a user wrote for an equation."""
    return eqn.prim.cuda_source(*[a.aval for a in eqn.invars], **eqn.params)  # type: ignore[attr-defined]


def _clips(eqn: Eqn) -> bool:
    """Whether a scatter takes the nearest row for one that there is not."""
    return eqn.params["mode"] is GatherScatterMode.CLIP


def _row_scatter(executor: Executor, step: OpaqueStep, operands: Sequence[Operand]) -> Work:
    eqn = step.eqn
    how, width = cuda_scatter.rows_of(eqn)  # type: ignore[misc]
    x, indices, _ = (a.aval for a in eqn.invars)
    own = lambda shape, dtype: executor.own(ShapedArray(shape, dtype), "the order of a scatter")
    scatter = cuda_scatter.Scatter(
        how, x.dtype, indices.dtype, indices.size, x.shape[0], width, executor.device, own, _clips(eqn)
    )
    (result,) = step.results
    assert result is not None
    place = executor.roots.place(result)

    def run(executor: Executor) -> None:
        given = [o.buffer(executor) for o in operands]  # copies live until they have been read
        x, rows, updates = (b.ptr for b in given)
        scatter(x, rows, updates, executor.address(place), executor.work_stream())

    return Work(run, eqn.prim.name, step, anywhere=lambda: all(o.in_place for o in operands))


# -- by functions of buffers -----------------------------------------------------------------------


def _function_of(eqn: Eqn, device: int, compile: Compile) -> tuple[Function, bool]:
    """The function of buffers that computes an equation, and whether a graph can have it."""
    prim, params = eqn.prim, eqn.params
    if prim.name in CONTROL:
        return CONTROL[prim.name](device, compile, **params)
    if prim.kind == "call" and prim.reference is not None:
        return prim.reference(compile, **params), False
    outs = [v.aval for v in eqn.outvars]
    label = f"{prim.name} at {source.summary(eqn.source)}"
    if prim.reference is not None:
        return _on_host(eqn, prim.reference(interpret, **params), device, outs, label), False
    if not eqn.invars:
        return _on_host(eqn, _implementation(eqn), device, outs, label), False
    types = [a.aval.dtype for a in eqn.invars]
    whole = all(a.size for a in (*[a.aval for a in eqn.invars], *outs))
    on_device = whole and not cupy_ops.is_host_fallback(prim, types, params)
    captured = on_device and cupy_ops.is_captured(prim)
    return lambda given: cupy_ops.run(prim, given, params, outs, label), captured


def _implementation(eqn: Eqn) -> Callable[[list], Sequence]:
    def run(values: list) -> Sequence:
        out = eqn.prim.impl(*values, **eqn.params)
        return out if eqn.prim.multiple_results else (out,)

    return run


def _on_host(eqn: Eqn, function: Callable, device: int, outs: Sequence[ShapedArray], label: str) -> Function:
    """A function of NumPy arrays as one of buffers."""
    apply = openly if eqn_calls_back(eqn.prim, eqn.params) else quietly

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        results = apply(function, [cuda_memory.to_host(b) for b in given])
        return [
            cuda_memory.to_device(np.asarray(r, a.dtype), device, label)
            for r, a in zip(results, outs, strict=True)
        ]

    return run


# -- control flow ------------------------------------------------------------------------------------

LARGE = 1 << 20
"""Bytes from which on what a scan carries is worth a copy at its start, to be written over from then on."""


def written_over(jaxpr: Jaxpr, *, n_consts: int = 0, n_carry: int = 0, **_: Any) -> tuple[bool, ...]:
    """For each argument of the body of a loop or branch whether it is donated; from the parameters of the equation.

    What a scan carries and is large is written over by each step, if it can be: a sum of gradients is in memory once.
    """
    avals = enumerate(v.aval for v in jaxpr.invars)
    return tuple(0 <= i - n_consts < n_carry and a.ndim > 0 and a.nbytes >= LARGE for i, a in avals)


def _scan(
    device: int, compile: Compile, *, jaxpr: Jaxpr, length, reverse, n_consts, n_carry, **_: Any
) -> tuple[Function, bool]:
    """The body once for each step: inputs are views of their arrays, and outputs are copied into theirs."""
    donated = written_over(jaxpr, n_consts=n_consts, n_carry=n_carry)
    body = compile(jaxpr, donated)
    ys_avals = jaxpr.out_avals[n_carry:]

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        consts, rest = given[:n_consts], given[n_consts:]
        carry, xs = rest[:n_carry], rest[n_carry:]
        stream = driver.work_stream(device)
        ys = [body.own(ShapedArray((length, *a.shape), a.dtype), "results of scan") for a in ys_avals]
        others = given
        for i in range(length - 1, -1, -1) if reverse else range(length):
            carry = _apart_from(others, carry, donated[n_consts:], body)
            others = [*consts, *xs]
            outs = body([*consts, *carry, *[row(x, i) for x in xs]])
            carry = list(outs[:n_carry])
            for y, out in zip(ys, outs[n_carry:], strict=True):
                driver.copy_on_device(y.ptr + i * out.nbytes, out.ptr, out.nbytes, stream)
        return [*carry, *ys]

    return run, body.captured


def _apart_from(
    others: Sequence[DeviceBuffer], carry: Sequence[DeviceBuffer], donated: Sequence[bool], body: Body
) -> list[DeviceBuffer]:
    """What is carried, such that nothing else lies in the memory of what is donated."""
    pairs = list(zip(carry, donated, strict=False))
    taken = {x.memory for x in (*others, *[x for x, given in pairs if not given])} if any(donated) else set()
    out = []
    for x, given in pairs:
        if given and x.memory in taken:
            x = _copied(x, body)
        taken.add(x.memory)
        out.append(x)
    return out


def _copied(x: DeviceBuffer, body: Body) -> DeviceBuffer:
    out = body.own(ShapedArray(x.shape, x.dtype), "what a scan carries")
    driver.copy_on_device(out.ptr, x.ptr, x.nbytes, driver.work_stream(x.device))
    return out


def row(x: DeviceBuffer, i: int) -> DeviceBuffer:
    """``x[i]``, a view."""
    shape = x.shape[1:]
    return x.view(shape, x.dtype, i * math.prod(shape) * x.dtype.itemsize)


def _while(
    device: int, compile: Compile, *, cond: Jaxpr, body: Jaxpr, n_cond, n_body, max_steps
) -> tuple[Function, bool]:
    """The body for as long as the host reads that the condition holds."""
    holds, advance = compile(cond), compile(body)

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        c_consts, rest = given[:n_cond], given[n_cond:]
        b_consts, carry = rest[:n_body], rest[n_body:]
        steps = 0
        while steps != max_steps and bool(cuda_memory.to_host(holds([*c_consts, *carry])[0])):
            carry = list(advance([*b_consts, *carry]))
            steps += 1
        return carry

    return run, False


def _cond(device: int, compile: Compile, *, branches: Sequence[Jaxpr]) -> tuple[Function, bool]:
    """The branch whose number the host reads."""
    bodies = [compile(b) for b in branches]

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        index, *operands = given
        which = int(cuda_memory.to_host(index))
        return list(bodies[min(max(which, 0), len(bodies) - 1)](operands))

    return run, False


CONTROL: dict[str, Callable[..., tuple[Function, bool]]] = {"scan": _scan, "while": _while, "cond": _cond}
"""By name of the primitive, which is defined above this layer: its function of buffers, from its parameters."""
