"""Scans along lanes in SIMD loops of the CPU.

Kernels, stage 6, below ``renderer.py``. In: a loop over lanes with scans. Out: C++ loops over strips that fit in
cache. Each strip has three loops: a SIMD loop that stores the scanned values in small arrays, the scans of these in
place with a carry across strips, and a SIMD loop over the statements that read them.

Sums of words are scanned in vector registers (OpenMP 5.0 ``scan``), in an order that depends only on the machine.
Expensive operators such as ``logaddexp`` scan parts of a strip side by side. All other scans are sequential: partial
products could overflow where the whole does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blufunc.core.ir import dtypes
from blufunc.kernels.codegen import scalar_ops
from blufunc.kernels.codegen.c_renderer import CStyle, as_type, reducing, start_of, update
from blufunc.kernels.codegen.scalar_ops import bare
from blufunc.kernels.codegen.scopes import written_in
from blufunc.kernels.loopir.ir import Lanes, Prefix, Scan

STRIP = 256
"""Lanes of a strip: enough to amortize its prologue and epilogue."""

_DEAR = frozenset(("logaddexp",))
"""Operators so expensive that combining twice in SIMD beats once per lane."""

_PARTS, _PART = 64, 16
"""Parts of a strip for expensive operators, and lanes of each part."""


class Scans(CStyle):
    """Loops over lanes that contain scans."""

    strip_start = ""  # first lane of the current strip
    vector_loop: Callable[..., None]  # of the renderer

    def scanned_lanes(self, s: Lanes, scans: Sequence[Scan], pragma: str) -> None:
        """Write a loop with scans; ``pragma`` precedes the loop over the other statements."""
        prefixes, n = [x.prefix for x in scans], s.range.extent
        carries = {p: self.fresh(f"{self.name(p, p.name)}_carry") for p in prefixes}
        for p, carry in carries.items():
            self.line(f"{scalar_ops.register_type(p.dtype)} {carry} = {start_of(p.op, p.dtype)};")
        first, last, index = self.fresh("first"), self.fresh("last"), self.index_type
        in_parts = {p for p in prefixes if p.op in _DEAR and n >= _PARTS * _PART // 2}
        strip = _PARTS * _PART if in_parts else STRIP
        if prefixes[0].reverse:
            head = f"for ({index} {last} = {n}; {last} > 0; {last} -= {strip})"
            other = f"const {index} {first} = {last} > {strip} ? {last} - {strip} : 0;"
        else:
            head = f"for ({index} {first} = 0; {first} < {n}; {first} += {strip})"
            other = f"const {index} {last} = {n} - {first} < {strip} ? {n} : {first} + {strip};"
        writes, rest = written_in([s]), [x for x in s.body if not isinstance(x, Scan)]
        with self.block([head], [], writes):
            self.line(other)
            for p in prefixes:
                self.line(f"alignas(64) {_element(p)} {self.named[p]}[{strip}];")
            outer, self.strip_start = self.strip_start, first
            self.vector_loop("#pragma omp simd", s.range, writes, scans, (first, last))
            for p, carry in carries.items():
                scan = self._scan_in_parts if p in in_parts else self._scan
                scan(p, carry, f"{last} - {first}")
            self.vector_loop(pragma, s.range, writes, rest, (first, last))
            self.strip_start = outer

    def _scan(self, p: Prefix, carry: str, count: str) -> None:
        """Scan a strip in place."""
        i, array = self.fresh("i"), self.named[p]
        loop = f"for (int {i} = 0; {i} < {count}; ++{i})"
        if p.reverse:
            loop = f"for (int {i} = {count} - 1; {i} >= 0; --{i})"
        vector = p.op == "sum" and p.dtype.itemsize >= 4
        opening = [f"#pragma omp simd reduction(inscan, + : {carry})"] if vector else []
        with self.block([*opening, loop]):
            self.line(update(carry, bare(reducing(p.op, p.dtype, carry, self._loaded(p, i), p.dtype))))
            if vector:
                self.line(f"#pragma omp scan inclusive({carry})")
            self.line(f"{array}[{i}] = {carry};")

    def _scan_in_parts(self, p: Prefix, carry: str, count: str) -> None:
        """Scan the parts of a strip side by side, then combine with their offsets."""
        i, g, before = self.fresh("i"), self.fresh("g"), self.fresh(f"{self.named[p]}_before")
        array, kind = self.named[p], scalar_ops.register_type(p.dtype)
        start, simd = start_of(p.op, p.dtype), "#pragma omp simd"
        at = f"{array}[{g} * {_PART} + {i}]"

        def combined(x: str, y: str) -> str:
            return bare(reducing(p.op, p.dtype, x, y, p.dtype))

        def loop(x: str, n: int, begin: int = 0) -> str:
            """Loop head over ``n`` elements in scan order, skipping the first ``begin``."""
            if p.reverse:
                return f"for (int {x} = {n - 1 - begin}; {x} >= 0; --{x})"
            return f"for (int {x} = {begin}; {x} < {n}; ++{x})"

        with self.block([f"for (int {i} = {count}; {i} < {_PARTS * _PART}; ++{i})"]):
            self.line(f"{array}[{i}] = {start};")
        with self.block([loop(i, _PART, 1)]), self.block([simd, f"for (int {g} = 0; {g} < {_PARTS}; ++{g})"]):
            previous = f"{array}[{g} * {_PART} + {i} {'+' if p.reverse else '-'} 1]"
            self.line(f"{at} = {combined(previous, at)};")
        self.line(f"{kind} {before}[{_PARTS}];")
        with self.block([loop(g, _PARTS)]):
            self.line(f"{before}[{g}] = {carry};")
            self.line(
                f"{carry} = {combined(carry, f'{array}[{g} * {_PART} + {0 if p.reverse else _PART - 1}]')};"
            )
        parts = self.block([f"for (int {g} = 0; {g} < {_PARTS}; ++{g})"])
        with parts, self.block([simd, f"for (int {i} = 0; {i} < {_PART}; ++{i})"]):
            self.line(f"{at} = {combined(f'{before}[{g}]', at)};")

    def take(self, s: Scan) -> None:
        value = as_type(self.value(s.value), s.value.dtype, s.prefix.dtype)
        at = f"{self.variable(s.prefix.lanes)} - {self.strip_start}"
        self.line(f"{self.named[s.prefix]}[{at}] = {value};")

    def read_prefix(self, prefix: Prefix) -> str:
        return self._loaded(prefix, f"{self.variable(prefix.lanes)} - {self.strip_start}")

    def _loaded(self, p: Prefix, at: str) -> str:
        text = f"{self.named[p]}[{at}]"
        return f"({text} != 0)" if dtypes.is_bool(p.dtype) else text


def _element(p: Prefix) -> str:
    # compilers vectorize loads of bytes, but not of booleans
    return "uint8_t" if dtypes.is_bool(p.dtype) else scalar_ops.register_type(p.dtype)
