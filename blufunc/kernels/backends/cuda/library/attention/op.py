"""``attention`` and ``attention_grad`` as steps of a CUDA program.

Kernels, stages 5 and 8. In: calls of these primitives (``nn/attention/call.py``). Out: whether a kernel exists for
one, so that its definition does not replace it; and its ``Work``, which reads parts of a packed array without a copy.
``kernels`` describes the kernels, ``launch`` puts them on streams, and ``mods`` compiles the mods of an equation.
Float32 runs on tensor cores where ``rewrites/split_float32_attention`` splits it, and otherwise in ``ieee``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.driver.modules import Text
from blufunc.kernels.backends.cuda.executor import ALIGNMENT, Executor, Operand, Results, Work
from blufunc.kernels.backends.cuda.library.attention import decode, ieee
from blufunc.kernels.backends.cuda.library.attention import kernels as cuda_attention
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from blufunc.kernels.backends.cuda.library.attention.kernels import Shape, Strides
from blufunc.kernels.backends.cuda.library.attention.mods import Code, code_of
from blufunc.kernels.backends.cuda.library.library_kernel import Compile, LibraryKernel
from blufunc.kernels.loopir.index import strides_of
from blufunc.kernels.precision import ACCURATE
from blufunc.kernels.rewrites.packed_outputs import packed_p
from blufunc.kernels.rewrites.split_float32_attention import attention_grad_p, attention_p, parts_of
from blufunc.kernels.schedule import OpaqueStep

_FORWARD, _BACKWARD, _OF_TABLES = "attention", "attention_grad", "attention_table_grad"
_WHOLE = {_FORWARD: 3, _BACKWARD: 6, attention_p.name: 3, attention_grad_p.name: 6, packed_p.name: 6}
"""Operand counts, without second parts, units, and operands of mods."""
_VECTOR = 8
"""Strides are multiples of this many elements, of any size (``kernels.refused``)."""


def why_not(eqn: Eqn, arch: str) -> str | None:
    """Reason why an attention call has no kernel on an architecture; None if it has."""
    if eqn.prim.name == _OF_TABLES:
        return "the gradients of arrays that score_mod reads are computed from the scores of all pairs"
    query, key = (v.aval for v in eqn.invars[:2])
    if not query.size or not key.size:
        return "an operand is empty"
    if not eqn.params["scale"] > 0:
        return f"scale={eqn.params['scale']} is not positive"
    code = _code(eqn)
    if isinstance(code, str):
        return code
    if _is_forward(eqn) and code.mods is not None and code.mods.blind_is_nan and not _decodes(eqn):
        return "queries that see no key give NaN there, and zeros in the kernels of many queries"
    parts = parts_of(eqn) if query.dtype == dtypes.float32 else 0
    if parts == 1 and code.sloped and eqn.prim.name == _BACKWARD:
        return (
            "score_mod has a slope that may be of any size, and gradients in one part of float16 may not; "
            f"in two parts, by precision {ACCURATE!r}, they may"
        )
    rows = (*eqn.invars[: _WHOLE[eqn.prim.name]], *eqn.outvars)
    strides = [_dense(v.aval) for v in rows if v.aval.ndim == 4]
    if query.dtype == dtypes.float32 and not parts:
        return ieee.refused(_shape(query, key), strides, arch, code)
    return cuda_attention.refused(_shape(query, key), query.dtype, strides, arch, parts)


def _code(eqn: Eqn) -> Code | str:
    """The code of an equation's mods; or why there is none."""
    mods = eqn.params.get("mods")
    if mods is None:
        return cuda_attention.NO_CODE
    return code_of(mods, tuple([v.aval for v in eqn.invars[_own(eqn) + 2 :]]))


def _own(eqn: Eqn) -> int:
    """Number of operands that precede those of the mods."""
    split = 3 if _is_forward(eqn) else 4  # operands that have second parts and units
    return _WHOLE[eqn.prim.name] + eqn.params.get("parts", 0) * split


def _is_forward(eqn: Eqn) -> bool:
    return eqn.prim.name in (_FORWARD, attention_p.name)


def _decodes(eqn: Eqn) -> bool:
    """True if the kernel for few queries computes an equation."""
    shape = _shape(*(v.aval for v in eqn.invars[:2]))
    return (
        _is_forward(eqn)
        and not _is_ieee(eqn)
        and decode.decodes(shape, eqn.params["is_causal"], eqn.params.get("parts", 0))
    )


def _is_ieee(eqn: Eqn) -> bool:
    """True if the kernels of ``ieee`` compute an equation that has kernels."""
    return eqn.invars[0].aval.dtype == dtypes.float32 and "parts" not in eqn.params


def _is_summed(eqn: Eqn) -> bool:
    """True if it returns sums of gradients (``partial_reductions.py``)."""
    return eqn.prim is packed_p and len(eqn.outvars) == 2


class Attention(LibraryKernel):
    """Attention, its derivative, and the gradients of arrays that a score_mod reads."""

    composite = needs_all = True

    def matches(self, eqn: Eqn) -> bool:
        return (eqn.prim.name in _WHOLE or eqn.prim.name == _OF_TABLES) and eqn.prim.kind == "call"

    def rows_of_sums(self, eqn: Eqn) -> int:
        return (
            cuda_attention.ROWS_OF_SUM
            if eqn.prim is packed_p and eqn.outvars[0].aval.dtype.itemsize == 2
            else 0
        )

    def why_not(self, eqn: Eqn, arch: str) -> str | None:
        return why_not(eqn, arch)

    def note(self, line: str, reason: str | None) -> str | None:
        if reason is None:
            return f"recognised as attention at {line}"
        return f"attention at {line} runs as it is written, without a kernel: {reason}"

    def scratch_bytes(self, eqn: Eqn, arch: str) -> int:
        code, (query, key) = _code(eqn), (v.aval for v in eqn.invars[:2])
        assert isinstance(code, Code), code
        if _decodes(eqn):
            return 0
        if _is_ieee(eqn):
            return sum(ieee.scratch_bytes(_is_forward(eqn), _shape(query, key), code))
        how = arch, code, eqn.params.get("parts", 0)
        return sum(cuda_attention.scratch_bytes(_is_forward(eqn), _shape(query, key), *how))

    def sources(self, step: OpaqueStep, arch: str) -> list[Text]:
        eqn = step.eqn
        code, (query, key) = _code(eqn), (v.aval for v in eqn.invars[:2])
        assert isinstance(code, Code), code
        if _decodes(eqn):
            return decode.texts(_shape(query, key), query.dtype, arch, code)
        if _is_ieee(eqn):
            return ieee.texts(_is_forward(eqn), _shape(query, key), eqn.params["is_causal"], code)
        how = eqn.params["is_causal"], arch, code, eqn.params.get("parts", 0), _is_summed(eqn)
        return cuda_attention.texts(_is_forward(eqn), query.dtype, _shape(query, key), *how)

    def bind(
        self, executor: Executor, step: OpaqueStep, operands: Sequence[Operand], compile: Compile
    ) -> Work:
        eqn = step.eqn
        query, key = (v.aval for v in eqn.invars[:2])
        shape, whole, own = _shape(query, key), _WHOLE[eqn.prim.name], _own(eqn)
        repeats = driver.properties(executor.device).arch != "sm_90a"
        parts = [_Part(o, n < own and o.aval.ndim == 4, repeats) for n, o in enumerate(operands)]
        outs = [v.aval for v in eqn.outvars]
        memory = Results(executor, step)
        rows = [p.strides for p in parts[:whole] if p.strides is not None]
        rows += _strides_of_results(eqn)
        rest = [p.strides for p in parts[whole:own] if p.strides is not None]
        assert not rest or rest == [s for n, s in enumerate(rows[: len(rest) + 1]) if n != 3], (
            "parts have equal strides"
        )
        code = _code(eqn)
        assert isinstance(code, Code), code
        params = eqn.params
        options = params["scale"], params["is_causal"], executor.device, code, params.get("parts", 0)
        launch: Any
        decodes = _decodes(eqn)
        if decodes:
            launch = decode.Decode(shape, query.dtype, rows, *options)
        elif _is_ieee(eqn):
            launch = (ieee.Forward if _is_forward(eqn) else ieee.Backward)(shape, rows, *options[:-1])
        elif _is_forward(eqn):
            launch = cuda_attention_launch.Forward(shape, query.dtype, rows, *options)
        else:
            launch = cuda_attention_launch.Backward(shape, query.dtype, rows, *options, _is_summed(eqn))
        scratch_bytes = self.scratch_bytes(eqn, driver.properties(executor.device).arch)
        assert (step.scratch is not None) == bool(scratch_bytes), "what kernels work in is planned"
        place = None if step.scratch is None else executor.roots.place(step.scratch)

        def run(executor: Executor) -> None:
            held = [p.address(executor) for p in parts]
            results = memory.addresses(executor)
            if eqn.prim is packed_p:
                results = [
                    r + n * a.dtype.itemsize
                    for r, a in zip(results, outs, strict=True)
                    for n in eqn.params["places"]
                ]
            given, scratch = [a for a, _ in held], 0 if place is None else executor.address(place)
            operands = [*given[:own], *results], scratch, executor.work_stream(), given[own:]
            if decodes:
                launch(*operands, overlaps=executor.follows_kernel and not copied)
            else:
                launch(*operands)

        copied = any(p.copied for p in parts)
        name = decode.ENTRY if decodes else eqn.prim.name
        return Work(run, name, step, anywhere=lambda: not copied, ends_in_kernel=True)


def _strides_of_results(eqn: Eqn) -> list[Strides]:
    """Strides of the results that have rows of features, slices of an array included."""
    outs = [v.aval for v in eqn.outvars]
    if eqn.prim is not packed_p:
        return [_dense(a) for a in outs if a.ndim == 4]
    batch, tokens, _, features = eqn.invars[0].aval.shape
    row = outs[0].size // (batch * tokens)
    return [Strides(tokens * row, row, features)] * 3


class _Part:
    """An operand in place, or a dense copy if kernels cannot read its layout."""

    def __init__(self, operand: Operand, rows: bool, repeats: bool):
        """Bind an operand.

        Args:
          rows: whether it has rows of features, which may be strided.
          repeats: whether kernels read broadcast axes in place; tensor maps are not known to.
        """
        self._operand, layout = operand, operand.layout
        last = len(layout.strides) - 1
        repeated = any(not s and n > 1 for s, n in zip(layout.strides, layout.shape, strict=True))
        self.in_place = (
            rows
            and (repeats or not repeated)
            and layout.strides[last] == 1
            and all(s >= 0 and not s % _VECTOR for s in layout.strides[:last])
            and not layout.offset % _VECTOR
        )
        self.strides = (
            Strides(*layout.strides[:last]) if self.in_place else _dense(operand.aval) if rows else None
        )
        self.copied = not (self.in_place or operand.in_place)

    def address(self, executor: Executor) -> tuple[int, cuda_memory.DeviceBuffer | None]:
        """Address of its first element, and the buffer that must live until it is read."""
        return self._operand.located(executor, self.in_place)


def _shape(query: ShapedArray, key: ShapedArray) -> Shape:
    batch, queries, heads, features = query.shape
    return Shape(batch, queries, key.shape[1], heads, key.shape[2], features)


def _dense(aval: ShapedArray) -> Strides:
    return Strides(*strides_of(aval.shape)[:3])


assert not ALIGNMENT % 16
