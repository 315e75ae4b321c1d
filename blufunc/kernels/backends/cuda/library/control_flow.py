"""Host-driven control flow on a CUDA device: ``scan``, ``while`` and ``cond``.

Kernels, stages 6 and 8, a row of the registry. In: the equation of a loop or branch, whose bodies become programs.
Out: steps in which the host launches them, and reads the condition of a ``while`` and the index of a ``cond``. A
program whose scans can be captured is replayed as one graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.memory import DeviceBuffer
from blufunc.kernels.backends.cuda.library.library_kernel import Body, Compile, Function, FunctionKernel

LARGE = 1 << 20
"""Minimum bytes of a carry that a scan copies once and then updates in place."""


def written_over(jaxpr: Jaxpr, *, n_consts: int = 0, n_carry: int = 0, **_: Any) -> tuple[bool, ...]:
    """Donation flags for the arguments of a loop's or branch's body.

    Each step of a scan overwrites large carries if it can, so that a sum of gradients is in memory once.
    """
    avals = enumerate(v.aval for v in jaxpr.invars)
    return tuple(0 <= i - n_consts < n_carry and a.ndim > 0 and a.nbytes >= LARGE for i, a in avals)


def _scan(
    device: int, compile: Compile, *, jaxpr: Jaxpr, length, reverse, n_consts, n_carry, **_: Any
) -> tuple[Function, bool]:
    """Run the body once per step: inputs are views, outputs are copied into results."""
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
    """Carries whose donated buffers alias no other argument; those that do are copied."""
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
    """Run the body while the host reads that the condition holds."""
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
    """The branch whose index the host reads."""
    bodies = [compile(b) for b in branches]

    def run(given: list[DeviceBuffer]) -> list[DeviceBuffer]:
        index, *operands = given
        which = int(cuda_memory.to_host(index))
        return list(bodies[min(max(which, 0), len(bodies) - 1)](operands))

    return run, False


_FUNCTIONS: dict[str, Callable[..., tuple[Function, bool]]] = {"scan": _scan, "while": _while, "cond": _cond}
"""Builders of functions of buffers, by name of the primitive."""


class ControlFlow(FunctionKernel):
    """Loops and branches."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.name in _FUNCTIONS

    def function(self, eqn: Eqn, device: int, compile: Compile) -> tuple[Function, bool]:
        return _FUNCTIONS[eqn.prim.name](device, compile, **eqn.params)


class Call(FunctionKernel):
    """A call of a body that has no kernel: the body as a program."""

    def matches(self, eqn: Eqn) -> bool:
        return eqn.prim.kind == "call" and eqn.prim.reference is not None

    def function(self, eqn: Eqn, device: int, compile: Compile) -> tuple[Function, bool]:
        return eqn.prim.reference(compile, **eqn.params), False  # type: ignore[misc]
