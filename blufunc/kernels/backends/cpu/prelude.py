"""What stands before a generated host kernel: the functions of one number that it uses, and no others.

Kernels, stage 6: in come the names that a kernel's text uses, out goes C++ that declares them. The names are those
of ``backends/cuda/render/prelude``, so that the text of a kernel's arithmetic is the same for both machines: ``bf_p``
for the elementwise primitive ``p``, ``to_float`` and ``from_float<T>`` for the types of storage, ``c64`` and ``c128``.
Parts that are plain C++ are those of the device; ``scalar_source`` and ``math_source`` have what takes the place of the
others.

Everything is in an anonymous namespace, so that two libraries never see each other's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from blufunc import errors
from blufunc.kernels.backends.cpu.math_source import MATH, two_over_pi_table
from blufunc.kernels.backends.cpu.scalar_source import BASE, complex_functions
from blufunc.kernels.codegen.complex_source import COMPLEX
from blufunc.kernels.codegen.scalar_source import SCALAR

_HEAD = re.compile(r"^//# (?P<names>.*?)(?P<complex> complex)?\n", re.MULTILINE)
_NO_CODE = re.compile(r'//[^\n]*|"[^"\n]*"')  # comments and strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMPLEX_TYPES = frozenset({"Complex", "c64", "c128"})
_ABSENT = frozenset({"bf_erfcx"})  # libm has no such function


class _Part:
    """A piece of the prelude: the names that it declares, its text, and whether it is for complex numbers."""

    def __init__(self, names: list[str], for_complex: bool, text: str):
        self.names, self.for_complex, self.text = frozenset(names), for_complex, text
        self.uses: frozenset[str] = frozenset()


def _split(source: str) -> list[_Part]:
    heads = list(_HEAD.finditer(source))
    ends = [h.start() for h in heads[1:]] + [len(source)]
    return [
        _Part(h["names"].split(), h["complex"] is not None, source[h.end() : end].strip() + "\n")
        for h, end in zip(heads, ends, strict=True)
    ]


@functools.cache
def _parts() -> tuple[_Part, ...]:
    """All parts, each below those that it needs; the host's take the place of the device's."""
    table = _Part(["two_over_pi_high", "two_over_pi_low"], False, two_over_pi_table())
    own = [*_split(BASE), table, *_split(MATH), *_split(complex_functions())]
    placed = {(name, part.for_complex) for part in own for name in part.names}
    device = [
        part
        for part in (*_split(SCALAR), *_split(COMPLEX))
        if not part.names & _ABSENT and not any((name, part.for_complex) in placed for name in part.names)
    ]
    parts = own + device
    declared = frozenset(name for part in parts for name in part.names)
    for part in parts:
        part.uses = (declared & _words(part.text)) - part.names
    return _in_order(parts)


def _in_order(parts: list[_Part]) -> tuple[_Part, ...]:
    """Parts sorted such that each stands below what it uses, as templates ask for."""
    makers: dict[str, list[_Part]] = {}
    for part in parts:
        for name in part.names:
            makers.setdefault(name, []).append(part)
    ordered: dict[_Part, None] = {}
    entered: set[_Part] = set()

    def visit(part: _Part) -> None:
        if part in entered:
            return
        entered.add(part)
        for name in sorted(part.uses | part.names):
            for maker in makers[name]:
                # overloads for real numbers stand above those for complex ones, which are made of them
                if maker.for_complex <= part.for_complex:
                    visit(maker)
        ordered[part] = None

    for part in parts:
        visit(part)
    return tuple(ordered)


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(_NO_CODE.sub("", text)))


@functools.cache
def names() -> frozenset[str]:
    """Everything that a prelude can declare."""
    return frozenset(name for part in _parts() for name in part.names)


def used_names(source: str) -> frozenset[str]:
    """The names of the prelude that the text of a kernel uses."""
    return names() & _words(source)


def prelude(wanted: Iterable[str]) -> str:
    """C++ that declares ``wanted`` and what they need.

    Functions of complex numbers are declared for kernels that want one of ``c64``, ``c128`` and ``Complex`` too.

    Raises:
      UnsupportedError: there is no such name.
    """
    wanted = frozenset(wanted)
    if unknown := wanted - names():
        raise errors.UnsupportedError(
            f"the host prelude has no {', '.join(sorted(unknown))}.",
            why="a kernel is generated from operations that are written out in C++.",
            fix="leave the operation to NumPy (see host_prelude.names())",
        )
    return _text(wanted)


@functools.lru_cache(1024)
def _text(wanted: frozenset[str]) -> str:
    needed, chosen = set(wanted), set()
    grown = True
    while grown:
        grown = False
        for part in _parts():
            fits = not part.for_complex or needed & _COMPLEX_TYPES
            if part not in chosen and needed & part.names and fits:
                chosen.add(part)
                needed |= part.uses
                grown = True
    return "namespace {\n" + "".join(part.text for part in _parts() if part in chosen) + "}\n"


def with_prelude(source: str) -> str:
    """A kernel's text behind the prelude that it needs."""
    return prelude(used_names(source)) + source
